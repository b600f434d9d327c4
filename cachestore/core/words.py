"""How counts, lists and results are written in messages."""

from collections.abc import Iterable, Mapping, Sized
from dataclasses import fields
from itertools import islice
from typing import Any, Final, cast

NAMED: Final = 3
"""How many names a message lists before it says that there are more."""
_LONGEST: Final = 40
"""Longest `repr` of a list of one item that a result shows."""


def first_of(names: Iterable[object], limit: int = NAMED) -> str:
    """Return the first names with commas between, and an ellipsis if there are more: `a, b, c, …`. Empty for none."""
    first = [str(name) for name in islice(names, limit + 1)]
    return ", ".join(first[:limit]) + (", …" if len(first) > limit else "")


def listed(names: Iterable[object], last: str = "and") -> str:
    """Return all names as a sentence lists them: `a, b and c`. `last` is the word before the last one. Empty for none."""
    *others, end = [*map(str, names)] or [""]
    return f"{', '.join(others)} {last} {end}" if others else end


def plural(number: int, one: str, many: str = "", *, form: str = "") -> str:
    """Return a count with its noun: `1 entry`, `2 entries`. `many` is an irregular plural; `form` is that of the number."""
    return f"{number:{form}} {noun(number, one, many)}"


def noun(number: int, one: str, many: str = "") -> str:
    """Return the form of a word for a count: `one` for 1, else its plural, or `many`."""
    return one if number == 1 else many or (one.removesuffix("y") + "ies" if one.endswith("ry") else one + "s")


def named_prompt(text: str) -> str:
    """Return what stands for a sample's id where a value belongs to a prompt for validation."""
    return f"(prompt) {text}"


def nearest(given: str, known: Iterable[str], also: Mapping[str, str] | None = None) -> str | None:
    """Return the known word that is most similar to a given one; None if none is similar. `also` has other names of some of them."""
    from difflib import get_close_matches

    spelt = {word.casefold(): word for word in known}
    spelt |= {name: word for name, word in (also or {}).items() if word in spelt.values()}
    return next((spelt[word] for word in get_close_matches(given.casefold(), spelt, 1)), None)


def did_you_mean(given: str, known: Iterable[str], also: Mapping[str, str] | None = None) -> str:
    """Return which known word may have been meant, as the end of a sentence: `; did you mean 'verify'?`. Empty if none is similar."""
    found = nearest(given, known, also)
    return "" if found is None else f"; did you mean {found!r}?"


def misspelt(given: str, known: Iterable[str]) -> str | None:
    """Return the known word that differs from a given one by a slip: letters in another order, or one too many or too few. Else None."""
    found = nearest(given, known)
    if found is None or found == given:
        return None
    short, long = sorted((given.casefold(), found.casefold()), key=len)
    is_slip = sorted(short) == sorted(long) or any(len(short) > 1 and short == long[:at] + long[at + 1 :] for at in range(len(long)))
    return found if is_slip else None


def human_bytes(size: float) -> str:
    """Return a size in bytes as a person reads it: `512 B`, `18.4 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def duration(seconds: float) -> str:
    """Return a time as 0:05, 12:34 or 1:02:03."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def in_short(self: Any) -> str:
    """Return the `repr` of a dataclass: every field, with the number of items in place of long lists and mappings."""
    shown = ", ".join(f"{one.name}={_shortened(getattr(self, one.name))}" for one in fields(self))
    return f"{type(self).__name__}({shown})"


def _shortened(value: Any) -> str:
    items = len(cast("Sized", value)) if isinstance(value, list | tuple | Mapping) else 0
    shown = repr(cast("object", value))
    return f"<{items} items>" if items > 1 or (items and len(shown) > _LONGEST) else shown
