"""Findings: the problems that `verify` reports, one by one. Reads no file."""

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
    """One problem in a store."""

    kind: Kind
    path: str
    """Relative to the store."""
    message: str
    key: str | None = None
    sample: str | None = None
    """The id of the first sample that needs the entry."""


def tried(kind: Kind, where: str, look: Callable[[], Found]) -> Found | Finding:
    """Return what `look` returns, or a finding: `kind` for a damaged file, `unreadable` if the file cannot be read."""
    try:
        return look()
    except FormatError as error:
        return Finding(kind, where, str(error))
    except OSError as error:
        return Finding("unreadable", where, f"{where}: {reason_of(error)}")
