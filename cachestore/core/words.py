"""How counts, lists and results read in a message. Pure text; knows nothing of what it names."""

from collections.abc import Iterable, Mapping, Sized
from dataclasses import fields
from itertools import islice
from typing import Any, Final, cast

NAMED: Final = 3
"""How many names a message lists before it says that there are more."""
_LONGEST: Final = 40
"""Characters of a list that a result shows."""


def first_of(names: Iterable[object], limit: int = NAMED) -> str:
    """The first few names with commas between, and an ellipsis where there are more: `a, b, c, …`. Empty for none."""
    first = [str(name) for name in islice(names, limit + 1)]
    return ", ".join(first[:limit]) + (", …" if len(first) > limit else "")


def human_bytes(size: float) -> str:
    """A size in bytes for a person: `512 B`, `18.4 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def in_short(self: Any) -> str:
    """The `repr` of a result, a dataclass: every field, and of long lists and mappings how many items they have."""
    shown = ", ".join(f"{one.name}={_shortened(getattr(self, one.name))}" for one in fields(self))
    return f"{type(self).__name__}({shown})"


def _shortened(value: Any) -> str:
    items = len(cast("Sized", value)) if isinstance(value, list | tuple | Mapping) else 0
    shown = repr(cast("object", value))
    return f"<{items} items>" if items > 1 or (items and len(shown) > _LONGEST) else shown
