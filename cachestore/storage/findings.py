"""Findings: what verify says of a store, one thing at a time. Knows no file."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal, TypeVar

from cachestore.core.errors import FormatError
from cachestore.files.opening import reason_of

Found = TypeVar("Found")

Kind = Literal[
    "corrupt-segment",
    "corrupt-entry",
    "missing-entry",
    "wrong-value",
    "bad-index",
    "bad-catalog",
    "bad-plan",
    "bad-recipe",
    "bad-list",
    "unreadable",
    "stale-temp",
    "foreign-file",
]
HARMLESS: Final[frozenset[Kind]] = frozenset({"stale-temp", "foreign-file"})


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is not as it should be."""

    kind: Kind
    path: str
    """Relative to the store."""
    message: str
    key: str | None = None
    sample: str | None = None
    """The id of a sample that needs the entry; the first one where there are several."""


def tried(kind: Kind, where: str, look: Callable[[], Found]) -> Found | Finding:
    """What a look at a file gives, or what is wrong with that file: `kind` for a damaged one, `unreadable` where it is refused."""
    try:
        return look()
    except FormatError as error:
        return Finding(kind, where, str(error))
    except OSError as error:
        return Finding("unreadable", where, f"{where}: {reason_of(error)}")
