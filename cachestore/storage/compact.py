"""Compaction: many small segments become few, and what nothing needs is left behind.

What is needed of the chosen segments is copied into new ones, every byte against its checksum; an index that covers the copies is
published; only then are the old ones condemned. They stay readable, and a later run of `gc` removes them after a grace.
A crash anywhere leaves copies, which are harmless. Safe beside readers, a running pass and other collectors, as `gc` is.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Final

from cachestore.core.errors import FormatError, WriteFailed
from cachestore.core.keys import Key
from cachestore.files.failpoints import failpoint
from cachestore.files.marker import check_for_writing
from cachestore.files.opening import free_bytes
from cachestore.files.paths import Layout
from cachestore.storage.append import Acknowledged, Appender
from cachestore.storage.commit import commit
from cachestore.storage.entry import Entry
from cachestore.storage.gc import condemn
from cachestore.storage.places import SegmentRef
from cachestore.storage.segment import read_contents
from cachestore.storage.snapshot import Snapshot
from cachestore.storage.soundness import good_entries
from cachestore.storage.usage import MERGED, Needs, Usage, survey

SMALL_ENTRIES: Final = 1024
SMALL_BYTES: Final = 64 * 1024 * 1024
"""A segment with fewer entries and fewer bytes is small: a quarter of what closes one."""
LOOSE_SHARE: Final = 0.1
"""A larger segment is written anew when at least this part of its bytes is not needed."""


@dataclass(frozen=True, slots=True)
class Group:
    """Segments that are written anew together."""

    origin: str
    usages: tuple[Usage, ...]


@dataclass(frozen=True, slots=True)
class Compacted:
    """What a compaction did."""

    segments: int
    """Segments that were written anew, and condemned."""
    written: int
    """Segments that hold their needed entries now."""
    entries: int
    """Entries that were copied."""
    remarks: tuple[str, ...]


def choose_groups(layout: Layout, snapshot: Snapshot, needs: Needs) -> list[Group]:
    """What a compaction would write anew, of a snapshot for planning. Nothing of an unfinished pass; nothing where nothing is won.

    What a writer put and what passes made never come into one segment: the one must be told from the other for ever.
    """
    streams: dict[str, list[Usage]] = {}
    for usage in survey(layout, snapshot, needs):
        if (stream := _stream(usage.ref, needs)) is not None and (_is_small(usage.ref) or _is_worn(usage)):
            streams.setdefault(stream, []).append(usage)
    groups: list[Group] = []
    for stream, usages in sorted(streams.items()):
        if len(usages) > 1 or _is_worn(usages[0]):
            origins = {usage.ref.origin for usage in usages}
            groups.append(Group(origins.pop() if len(origins) == 1 else stream, tuple(usages)))
    return groups


def _stream(ref: SegmentRef, needs: Needs) -> str | None:
    """Which segments a segment may be merged with, None for none: those of passes that are over; else those of the same origin."""
    if needs.may_go(ref.origin):
        return MERGED
    return None if "/" in ref.origin else ref.origin


def _is_small(ref: SegmentRef) -> bool:
    return ref.entries < SMALL_ENTRIES and ref.size_bytes < SMALL_BYTES


def _is_worn(usage: Usage) -> bool:
    return bool(usage.loose) and (_is_small(usage.ref) or usage.loose_bytes >= LOOSE_SHARE * usage.ref.size_bytes)


def compact_segments(layout: Layout, groups: Sequence[Group], needs: Needs) -> Compacted:
    """Copy what is needed, publish an index, condemn what was copied from. No groups are fine.

    A segment of which anything needed is damaged stays as it is, and is told. Raises WriteFailed, before anything is condemned.
    """
    need = sum(usage.ref.size_bytes - usage.loose_bytes for group in groups for usage in group.usages)
    check_for_writing(layout)
    free = free_bytes(layout.root)
    if need > free:
        raise WriteFailed(
            f"about {need} bytes are needed in {layout.root} until the old segments are removed, but {free} are free; make room,"
            " then run it again"
        )
    copying = _Copying(layout, needs)
    written: set[str] = set()
    entries = 0
    for acknowledged in chain.from_iterable(map(copying.copy, groups)):
        written.add(acknowledged.digest)
        entries += len(acknowledged.places)
    failpoint("compact.before_index")
    if copying.sources:
        commit(layout).close()
    old = sorted(copying.sources - written)  # one that came out as it went in stays
    condemn(layout, old)
    return Compacted(len(old), len(written - copying.sources), entries, tuple(copying.remarks))


@dataclass(slots=True)
class _Copying:
    layout: Layout
    needs: Needs
    sources: set[str] = field(default_factory=set[str])
    """Segments whose needed entries are all in new ones."""
    remarks: list[str] = field(default_factory=list[str])

    def copy(self, group: Group) -> Iterator[Acknowledged]:
        """Copy what is needed of a group's segments. Of a key that several hold, the copy in the smallest segment name is taken."""
        appender = Appender(self.layout, origin=group.origin)
        seen = set[Key]()
        for usage in group.usages:
            good = self._sound(usage)
            for entry in good or ():
                if entry.key not in seen:
                    seen.add(entry.key)
                    yield from appender.add(entry)
            if good is not None:
                self.sources.add(usage.ref.digest)
        yield from appender.close_segment()

    def _sound(self, usage: Usage) -> list[Entry] | None:
        """The needed entries of a segment; None, and a remark, where not all of them are sound."""
        digest = usage.ref.digest
        try:
            contents = read_contents(self.layout.segment(digest))
            needed = [entry for entry in contents.entries if self.needs.hold(contents.origin, entry)]
            good = good_entries(self.layout.segment(digest), needed)
        except (FormatError, OSError) as error:
            self.remarks.append(f"segment {digest} was not rewritten: {error}")
            return None
        if len(good) < len({entry.key for entry in needed}):
            damaged = f"{len(needed) - len(good)} of its entries are damaged; run {self.layout.command('repair')}"
            self.remarks.append(f"segment {digest} was not rewritten: {damaged}")
            return None
        return good
