"""Usage: which entries of a store are needed, and which may be removed. Changes nothing.

An entry may be removed if it has an owner, the pass or session that wrote it is over, and nothing names its key. `precompute` and `fill`
name the owner in the entry; a session does so in the origin of its segments, where no field of a user can be taken for it. What a `writer`
put, what `fill` made without `publish_as`, and all unclear cases stay. An owner without a trace was lost, not dropped: its values stay
until it is dropped.
"""

import re
import time
from collections import Counter
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, compress
from operator import not_
from typing import Final

from cachestore.core.errors import BadInput, FormatError
from cachestore.core.keys import Key
from cachestore.files.paths import Layout
from cachestore.files.removal import is_older
from cachestore.store.format.line import OWNER, SESSION, list_line
from cachestore.store.format.locations import SegmentRef
from cachestore.store.format.segment import SegmentContents, StoredEntry, read_contents
from cachestore.store.read.snapshot import Snapshot

MERGED: Final = "merged"
"""The origin of a segment that was merged from those of several finished passes. Of sessions it is `merged/<data set>`."""
_OF_A_PASS: Final = re.compile(r"[0-9a-f]{32}/(0|[1-9][0-9]*)")
_OF_A_SESSION: Final = re.compile(rf"{SESSION}/[0-9a-f]{{32}}/.+", re.DOTALL)
_OF_A_DATA_SET: Final = re.compile(rf"(?:{SESSION}/[0-9a-f]{{32}}|{MERGED})/(.+)", re.DOTALL)
_SESSION_SECONDS: Final = 86_400.0
"""A segment of a session counts as unfinished for so long. A session that flushes later is told if a value is gone."""


def owner_of(origin: str) -> str | None:
    """Return the data set to which all entries of a segment with this origin belong: a session's own. None for other origins."""
    match = _OF_A_DATA_SET.fullmatch(origin)
    return None if match is None else match[1]


def has_owner(origin: str, entry: StoredEntry) -> bool:
    """Whether an entry of a segment with this origin belongs to a data set: what `precompute` made has the digest of its input."""
    return owner_of(origin) is not None or (_may_name_owners(origin) and ("input_digest" in entry.meta or OWNER in entry.meta))


def is_own_value(origin: str, entry: StoredEntry) -> bool:
    """Whether a user stored an entry of a segment with this origin, by `put` or `fill`. What is unclear counts as that."""
    return not has_owner(origin, entry)


def _may_name_owners(origin: str) -> bool:
    return origin == MERGED or _OF_A_PASS.fullmatch(origin) is not None


class Owners:
    """Which data sets own values, but have left no trace: neither a file of their line nor a mark that they were dropped."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._known: dict[str, bool] = {}

    def is_lost(self, origin: str, entry: StoredEntry) -> bool:
        """Whether the owner of an entry is lost. A session, or `fill`, begins its data set before it puts a value."""
        name = owner_of(origin) or entry.meta.get(OWNER)
        if not isinstance(name, str):
            return False
        if name not in self._known:
            self._known[name] = self._has_no_trace(name)
        return self._known[name]

    @property
    def lost(self) -> list[str]:
        """The names of those that were found so far, sorted."""
        return sorted(name for name, is_lost in self._known.items() if is_lost)

    def _has_no_trace(self, name: str) -> bool:
        try:
            line = list_line(self._layout, name)
        except BadInput:  # no data set can have this name
            return False
        return not (line.is_there or line.dropped)


def values_by_owner(contents: SegmentContents) -> Counter[str]:
    """The number of values of each data set in a segment. What a `writer` put may say something else under this name."""
    if (owner := owner_of(contents.origin)) is not None:
        return Counter({owner: len(contents.entries)})
    owners = (meta.get(OWNER) for meta in contents.entries.metas) if _may_name_owners(contents.origin) else ()
    return Counter(name for name in owners if isinstance(name, str))


@dataclass(frozen=True, slots=True)
class Needs:
    """What must stay, as the caller found out."""

    keys: AbstractSet[Key]
    """Every key that a catalog, a plan of keys or an unfinished pass names."""
    is_over: Callable[[str], bool]
    """Whether the pass `<plan>/<pass>` has ended or does not exist any more."""
    owners: Owners

    def hold(self, origin: str, entry: StoredEntry) -> bool:
        """Whether an entry of a segment with this origin must stay."""
        return not self.may_go(origin) or entry.key in self.keys or not has_owner(origin, entry) or self.owners.is_lost(origin, entry)

    def may_go(self, origin: str) -> bool:
        """Whether unnamed entries of a segment with this origin may be removed."""
        if origin == MERGED or owner_of(origin) is not None:
            return True
        return _OF_A_PASS.fullmatch(origin) is not None and self.is_over(origin)


@dataclass(frozen=True, slots=True)
class Usage:
    """A segment, and which of its entries are needed."""

    ref: SegmentRef
    needed: tuple[StoredEntry, ...] | None = None
    """None if all are needed by the index alone, or if the header cannot be read."""
    loose: tuple[StoredEntry, ...] = ()
    """Entries that nothing needs."""
    young: int = 0
    """How many of its entries nothing names, though a session may: it was written within a day. Then `needed` and `loose` say nothing."""

    @property
    def is_idle(self) -> bool:
        """Whether nothing in it is needed."""
        return self.needed is not None and not self.needed

    @property
    def loose_bytes(self) -> int:
        """Bytes of the entries that nothing needs."""
        return sum(entry.size_bytes for entry in self.loose)


def survey(layout: Layout, snapshot: Snapshot, needs: Needs) -> list[Usage]:
    """The usage of each segment of a snapshot, sorted by digest. Reads only headers of segments that may hold unneeded entries.

    A segment whose header cannot be read counts as needed: `repair` deals with it.
    """
    now = time.time()
    unneeded = Counter[str]()
    for key, locations in chain(snapshot.index.items() if snapshot.index is not None else (), snapshot.tail.items()):
        if key not in needs.keys:
            unneeded.update(location.segment.digest for location in locations)
    usages: list[Usage] = []
    for ref in snapshot.segments():
        usage = Usage(ref)
        if not needs.may_go(ref.origin) or (ref.entries and ref.digest not in unneeded):
            pass
        elif _is_unflushed(layout, ref, now):
            usage = Usage(ref, young=unneeded[ref.digest])
        else:
            with suppress(FormatError, OSError):
                entries = read_contents(layout.segment(ref.digest)).entries
                held = [needs.hold(ref.origin, entry) for entry in entries]
                usage = Usage(ref, tuple(compress(entries, held)), tuple(compress(entries, map(not_, held))))
        usages.append(usage)
    return usages


def _is_unflushed(layout: Layout, ref: SegmentRef, now: float) -> bool:
    """Whether a session may not have named the values of a segment yet."""
    return _OF_A_SESSION.fullmatch(ref.origin) is not None and not is_older(layout.segment(ref.digest), _SESSION_SECONDS, now=now)
