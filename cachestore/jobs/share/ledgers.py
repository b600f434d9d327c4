"""Ledgers: the outcome of each unit of a range of partitions. Written when it is finished and its segments are acknowledged.

A ledger says where to look; what is present, reconcile reads from the store. Rows are lists, to keep ten million of them small. Where two
workers did the same partitions, their ledgers may cover different ranges: then a unit has two outcomes, and one that succeeded counts.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, get_args

from cachestore.core.errors import WRONG_FIELDS, FormatError
from cachestore.core.inputs import NO_STAT
from cachestore.core.keys import Json, Key
from cachestore.files.opening import names_in
from cachestore.files.paths import Layout, LedgerName, PassFolder, parse_ledger
from cachestore.files.publish import note
from cachestore.files.records import encode_record, read_record

FORMAT: Final = "cachestore-ledger"
VERSION: Final = 1

Result = Literal["made", "found", "failed"]
_BEYOND_INT64: Final = 1 << 63


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one unit."""

    unit: int
    """Its unit index."""
    result: Result
    key: Key | None = None
    """None only if it failed before its key was known."""
    input: str = ""
    """SHA-256 (hex) of its input, by `inputs.combined_digest`; empty if unknown."""
    stat: tuple[int, int] = NO_STAT
    """The stat record of its file when it was read; for several files, `inputs.combined_stat`."""
    facts: Mapping[str, Json] = field(default_factory=dict[str, Json])
    reason: str = ""
    """Why it failed, in words."""
    is_transient: bool = False
    """Whether trying again may help."""


@dataclass(frozen=True, slots=True)
class Ledger:
    """The outcomes of the units of one range of partitions."""

    name: LedgerName
    worker: str
    launch: str
    outcomes: tuple[Outcome, ...]


def publish_ledger(layout: Layout, folder: PassFolder, ledger: Ledger) -> bool:
    """Publish a ledger. Return False if the same range has one already, which is as good.

    It is not synced: an fsync for each took longer than the work. If a power cut tears it, its checksum fails, and
    its units come back in the next round, where they are found.
    """
    rows = [
        [o.unit, o.result, str(o.key) if o.key is not None else None, o.input, list(o.stat), dict(o.facts), o.reason, o.is_transient]
        for o in ledger.outcomes
    ]
    body: dict[str, Json] = {"of": _identity(folder, ledger.name), "worker": ledger.worker, "launch": ledger.launch, "rows": rows}
    return note(layout, folder.ledger(ledger.name), encode_record(FORMAT, VERSION, body))


def list_ledgers(folder: PassFolder, number: int) -> frozenset[tuple[int, int]]:
    """Return (recipe, partition) of the finished partitions of a round."""
    names = filter(None, map(parse_ledger, names_in(folder.ledgers)))
    return frozenset((name.recipe, partition) for name in names if name.round == number for partition in name.partitions)


def read_ledgers(folder: PassFolder, number: int) -> Iterator[Ledger]:
    """Yield the ledgers of a round. Damaged and misplaced ones are left out: their units come back in the next round."""
    for name in filter(None, map(parse_ledger, names_in(folder.ledgers))):
        if name.round != number:
            continue
        try:
            body = read_record(folder.ledger(name), FORMAT, VERSION)
            ledger = Ledger(name, str(body["worker"]), str(body["launch"]), tuple(_outcome(row) for row in body["rows"]))
            is_at_home = body["of"] == _identity(folder, name)
        except (FormatError, FileNotFoundError, *WRONG_FIELDS):
            continue
        if is_at_home:
            yield ledger


def _identity(folder: PassFolder, name: LedgerName) -> list[Json]:
    """The plan, pass and range that a ledger names: unit indices mean other units in another plan."""
    return [folder.root.parent.name, folder.root.name, *name]


def _outcome(row: Sequence[Any]) -> Outcome:
    unit, result, digits, digest, (size, stamp), facts, reason, is_transient = row
    if not (all(type(n) is int and abs(n) < _BEYOND_INT64 for n in (unit, size, stamp)) and unit >= 0 and result in get_args(Result)):
        raise ValueError("a row of a ledger is a unit's number, what became of it, and how its file stood")
    key = Key.parse(digits) if digits else None
    return Outcome(unit, result, key, bytes.fromhex(digest).hex(), (size, stamp), dict(facts), str(reason), bool(is_transient))
