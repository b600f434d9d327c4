"""Findings: the problems that `verify` reports, one by one. Reads no file."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Final, Literal, TypeVar

from cachestore.core.errors import FormatError, NewerFormat
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
class DamagedEntry:
    """An entry that a damaged segment holds."""

    key: str
    sample: str | None
    """The id of the first sample that needs it."""
    has_copy: bool
    """Whether another segment has a valid copy of it, so that nothing is lost."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One problem in a store. A damaged segment is one finding, however many bytes of it have changed."""

    kind: Kind
    path: str
    """Relative to the store."""
    message: str
    key: str | None = None
    sample: str | None = None
    """The id of the first sample that needs the entry."""
    entries: tuple[DamagedEntry, ...] = ()
    """For a damaged segment, its entries that are damaged; `key` and `sample` are those of the first. If its header cannot be read, all of
    its entries, as far as the index knows them."""
    is_newer: bool = False
    """Whether the file is of a newer format, so that it is no damage of this version's to mend."""


def missing_keys(findings: Iterable[Finding]) -> set[str]:
    """Return the keys of the entries without a valid copy that findings name."""
    listed = tuple(findings)
    alone = {finding.key for finding in listed if finding.kind == "missing-entry" and finding.key is not None}
    return alone | {entry.key for finding in listed for entry in finding.entries if entry.sample is not None and not entry.has_copy}


def one_each(findings: Iterable[Finding]) -> list[Finding]:
    """Return the findings with all corrupt entries of a segment as one."""
    found: dict[object, Finding] = {}
    for number, finding in enumerate(findings):
        which = finding.path if finding.kind == "corrupt-entry" else number
        earlier = found.get(which)
        found[which] = finding if earlier is None else replace(earlier, entries=(*earlier.entries, *finding.entries))
    return list(found.values())


def finding_of(kind: Kind, where: str, error: FormatError) -> Finding:
    """Return the finding for a file that cannot be read as what it should be."""
    return Finding(kind, where, str(error), is_newer=isinstance(error, NewerFormat))


def tried(kind: Kind, where: str, look: Callable[[], Found]) -> Found | Finding:
    """Return what `look` returns, or a finding: `kind` for a damaged file, `unreadable` if the file cannot be read."""
    try:
        return look()
    except FormatError as error:
        return finding_of(kind, where, error)
    except OSError as error:
        return Finding("unreadable", where, f"{where}: {reason_of(error)}")
