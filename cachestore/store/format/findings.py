"""Findings: the problems that `verify` reports, one by one. Reads no file."""

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from typing import Final, Literal, TypeVar

from cachestore.core.errors import FormatError, NewerFormat
from cachestore.core.keys import Json
from cachestore.files.opening import reason_of

Read = TypeVar("Read")
Kind = Literal[
    "corrupt-segment",
    "corrupt-entry",
    "missing-entry",
    "wrong-value",
    "bad-index",
    "bad-catalog",
    "bad-changes",
    "missing-changes",
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
    what: str
    advice: str = ""
    """What to do about it; empty if nothing is to be done."""
    key: str | None = None
    sample: str | None = None
    """The id of the first sample that needs the entry."""
    entries: tuple[DamagedEntry, ...] = ()
    """For a damaged segment, its entries that are damaged; `key` and `sample` are those of the first. If its header cannot be read, all of
    its entries, as far as the index knows them."""
    is_newer: bool = False
    """Whether the file is of a newer format, so that it is no damage of this version's to mend."""

    @property
    def message(self) -> str:
        """What is wrong, and what to do about it."""
        return f"{self.what}; {self.advice}" if self.advice else self.what

    def as_json(self) -> dict[str, Json]:
        """Return the object that commands print with `--json`."""
        fields = asdict(self) | {"message": self.message}
        return {name: value for name, value in fields.items() if name not in {"what", "advice"}}


def missing_keys(findings: Iterable[Finding]) -> set[str]:
    """Return the keys of the entries without a valid copy that findings name."""
    listed = tuple(findings)
    alone = {finding.key for finding in listed if finding.kind == "missing-entry" and finding.key is not None}
    return alone | {entry.key for finding in listed for entry in finding.entries if entry.sample is not None and not entry.has_copy}


def one_each(findings: Iterable[Finding]) -> list[Finding]:
    """Return the findings with all corrupt entries of a segment as one."""
    merged: dict[object, Finding] = {}
    for number, finding in enumerate(findings):
        which = finding.path if finding.kind == "corrupt-entry" else number
        earlier = merged.get(which)
        merged[which] = finding if earlier is None else replace(earlier, entries=(*earlier.entries, *finding.entries))
    return list(merged.values())


def finding_of(kind: Kind, where: str, error: FormatError) -> Finding:
    """Return the finding for a file that cannot be read as what it should be."""
    return Finding(kind, where, error.what or str(error), error.advice, is_newer=isinstance(error, NewerFormat))


def read_or_finding(kind: Kind, where: str, read: Callable[[], Read]) -> Read | Finding:
    """Return what `read` returns, or a finding: `kind` for a damaged file, `unreadable` if the file cannot be read."""
    try:
        return read()
    except FormatError as error:
        return finding_of(kind, where, error)
    except OSError as error:
        return Finding("unreadable", where, f"{where}: {reason_of(error)}")
