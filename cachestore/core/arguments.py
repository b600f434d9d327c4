"""What callers pass, held against what it should be where it enters, at the public names alone: inside, types hold.

Numbers may be numpy's or torch's (those of `precompute` numpy's), paths texts or `os.PathLike`; what comes out is Python's own.
"""

import operator
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from numbers import Real
from pathlib import Path
from typing import Any, Final, NoReturn, cast

from cachestore.core.errors import BadInput

_SHOWN: Final = 60
"""Characters of a value that an error shows; of a longer one it names the type."""
_ADDRESS: Final = re.compile(r"([a-z][a-z0-9+.-]+)://", re.IGNORECASE)
"""The beginning of an address. A drive of Windows is one letter."""
_COLLAPSED: Final = re.compile(
    r"(s3[an]?|gs|gcs|az|azure|abfss?|adl|wasbs?|r2|b2|oss|cos|obs|oci|swift|hdfs|dbfs|hf|https?|s?ftp|ssh|file|smb|nfs|webdavs?):/",
    re.IGNORECASE,
)
"""The same as `pathlib` leaves it, with one slash: of schemes that are in use, as a folder may be called `data:`."""


def refuse(argument: str, wanted: str, given: object) -> NoReturn:
    """Raise the BadInput about an argument: `batch_size must be a whole number of at least 1, not '8'`."""
    shown = repr(given)
    if len(shown) > _SHOWN or shown.startswith("<") or "\n" in shown:
        shown = f"a value of the type {type(given).__name__}"
    raise BadInput(f"{argument} must be {wanted}, not {shown}")


def as_whole(argument: str, given: object, *, least: int | None = None) -> int:
    """A whole number, from `least` on where that is said. Raises BadInput for anything else, True and False among it."""
    number: int | None = None
    if not isinstance(given, bool):
        with suppress(TypeError):
            number = operator.index(cast("Any", given))
    if number is None or (least is not None and number < least):
        refuse(argument, "a whole number" + ("" if least is None else f" of at least {least}"), given)
    return number


def as_number(argument: str, given: object) -> float:
    """A number, whole or not, also numpy's or torch's. Raises BadInput for anything else, True and False among it."""
    if not isinstance(given, bool | Real) and hasattr(given, "__float__"):
        with suppress(TypeError, ValueError, RuntimeError):  # of several numbers there is no one
            given = float(cast("Any", given))
    if isinstance(given, bool) or not isinstance(given, Real):
        refuse(argument, "a number", given)
    return given if isinstance(given, int | float) and type(given) in {int, float} else float(given)


def as_switch(argument: str, given: object) -> bool:
    """True or False, also numpy's, or 1 or 0. Raises BadInput for anything else: a text such as "no" would count as true."""
    is_bool = type(given).__name__ in {"bool", "bool_"}  # numpy's has either name, by its version
    if not is_bool and not (isinstance(given, int) and given in (0, 1)):
        refuse(argument, "True or False", given)
    return bool(given)


def as_text(argument: str, given: object) -> str:
    """A text, which may be empty. Raises BadInput for anything else."""
    if not isinstance(given, str):
        refuse(argument, "a text", given)
    return given


def refuse_address(argument: str, place: str) -> None:
    """Raise BadInput for an address such as `s3://bucket/cache`, of which a folder `./s3:/bucket/cache` would be made."""
    found = _ADDRESS.match(place) or _COLLAPSED.match(place)
    if found is None:
        return
    scheme = found[1].lower()
    instead = (
        "pass the path only, without the scheme"
        if scheme == "file"
        else f"mount {scheme}:// as a folder or copy it, then pass that folder's path"
    )
    raise BadInput(f"{argument} is the address {place!r}, but cachestore reads and writes folders of this machine: {instead}")


def as_place(argument: str, given: object, wanted: str = "a path (str or pathlib.Path, and not empty)") -> str:
    """A path, or a name that stands for a place, as a text. Raises BadInput for anything else, and for an address such as `s3://a/b`.

    The empty text, which is what a shell makes of a variable that is not set, would be the current folder, and is refused.
    """
    place = os.fspath(cast("os.PathLike[str]", given)) if isinstance(given, os.PathLike) else given
    if not isinstance(place, str) or not place:
        refuse(argument, wanted, cast("object", given))
    refuse_address(argument, place)
    return place


def as_path(argument: str, given: object) -> Path:
    """As `as_place`, of what can only be a path."""
    return Path(as_place(argument, given))


def as_word(argument: str, given: object, words: Sequence[str]) -> str:
    """One of some words. Raises BadInput for anything else."""
    if not isinstance(given, str) or given not in words:
        *others, last = (f'"{word}"' for word in words)
        refuse(argument, f"{', '.join(others)} or {last}", given)
    return given


def as_mapping(argument: str, given: object, wanted: str) -> Mapping[Any, Any]:
    """A mapping; `wanted` says of what. Raises BadInput for anything else."""
    if not isinstance(given, Mapping):
        refuse(argument, wanted, given)
    return cast("Mapping[Any, Any]", given)


def as_many(argument: str, given: object, wanted: str) -> Iterator[Any]:
    """What can be gone through, but for one text or one mapping; `wanted` says of what. Raises BadInput for anything else."""
    if not isinstance(given, str | bytes | Mapping):
        with suppress(TypeError):
            return iter(cast("Iterable[Any]", given))
    refuse(argument, wanted, cast("object", given))


def as_pairs(argument: str, given: object) -> Iterator[tuple[Any, Any]]:
    """(key, item) pairs, one at a time. Raises BadInput for what is no such pair; of a mapping the pairs are its `items()`."""
    wanted = "(key, item) pairs"
    if isinstance(given, Mapping):
        refuse(argument, f"{wanted} (for a mapping, pass its items())", cast("object", given))
    for place, pair in enumerate(as_many(argument, given, wanted)):
        if not isinstance(pair, tuple | list) or len(cast("Sequence[Any]", pair)) != 2:
            refuse(f"{argument}[{place}]", "a (key, item) pair", cast("object", pair))
        key, item = cast("Sequence[Any]", pair)
        yield key, item


def check_function(argument: str, given: object) -> None:
    """Raise BadInput for what cannot be called."""
    if not callable(given):
        refuse(argument, "a function", given)


def check_calls(on_progress: object, cancel: object) -> None:
    """Raise BadInput for an `on_progress` that cannot be called, and for a `cancel` that cannot be asked. None of both is fine."""
    if on_progress is not None:
        check_function("on_progress", on_progress)
    if cancel is not None and not callable(getattr(cancel, "is_set", None)):
        refuse("cancel", "an object with is_set()", cancel)
