"""How counts and lists read in a message. Pure text; knows nothing of what it names."""

from collections.abc import Iterable
from itertools import islice
from typing import Final

NAMED: Final = 3
"""How many names a message lists before it says that there are more."""


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
