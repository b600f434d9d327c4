"""Compact: merge small segments into few, and leave behind entries that nothing needs.

The needed entries of the chosen segments are copied into new ones, and every byte is checked. Then an index that covers the copies is
published. Only then are the old segments marked for deletion. They stay readable, until a later `gc` removes them after a grace period. A
crash leaves only copies, which are harmless. Safe beside readers, a running pass and other collectors, as `gc` is.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from cachestore.care.gc import mark
from cachestore.care.soundness import good_entries
from cachestore.care.usage import MERGED, Needs, Usage, owner_of
from cachestore.core.errors import FormatError, WriteFailed
from cachestore.core.keys import Key
from cachestore.core.words import human_bytes
from cachestore.files.failpoints import failpoint
from cachestore.files.marker import check_for_writing
from cachestore.files.opening import free_bytes
from cachestore.files.paths import Layout
from cachestore.store.format.entry import Entry
from cachestore.store.format.locations import SegmentRef
from cachestore.store.format.segment import read_contents
from cachestore.store.write.append import Appender
from cachestore.store.write.commit import commit

SMALL_ENTRIES: Final = 1024
SMALL_BYTES: Final = 64 * 1024 * 1024
"""A segment with fewer entries and fewer bytes is small. These are a quarter of the limits at which a segment is closed."""
LOOSE_FRACTION: Final = 0.1
"""A larger segment is rewritten if at least this part of its bytes is not needed."""


@dataclass(frozen=True, slots=True)
class Group:
    """Segments that are rewritten together."""

    origin: str
    usages: tuple[Usage, ...]


@dataclass(frozen=True, slots=True)
class Compacted:
    """The result of a compaction."""

    segments: int
    """Segments that were rewritten and marked for deletion."""
    written: int
    """New segments that hold the needed entries."""
    entries: int
    """Entries that were copied."""
    remarks: tuple[str, ...]


def choose_groups(usages: Iterable[Usage], needs: Needs) -> list[Group]:
    """Choose what to rewrite, given the usage of each segment of a snapshot for planning.

    Leaves out unfinished passes, values that a session may not have named yet, and segments for which rewriting gains nothing. Entries
    of writers and entries of passes never come into one segment: they must stay distinguishable.
    """
    streams: dict[str, list[Usage]] = {}
    for usage in usages:
        if not usage.young and (stream := _stream(usage.ref, needs)) is not None and (_is_small(usage.ref) or _is_worn(usage)):
            streams.setdefault(stream, []).append(usage)
    groups: list[Group] = []
    for stream, chosen in sorted(streams.items()):
        if len(chosen) > 1 or _is_worn(chosen[0]):
            origins = {usage.ref.origin for usage in chosen}
            groups.append(Group(origins.pop() if len(origins) == 1 else stream, tuple(chosen)))
    return groups


def _stream(ref: SegmentRef, needs: Needs) -> str | None:
    """With which segments this one may be merged: those of finished passes, of one data set's sessions, or of the same origin.

    None during its pass.
    """
    if (owner := owner_of(ref.origin)) is not None:
        return f"{MERGED}/{owner}"
    if needs.may_go(ref.origin):
        return MERGED
    return None if "/" in ref.origin else ref.origin


def _is_small(ref: SegmentRef) -> bool:
    return ref.entries < SMALL_ENTRIES and ref.size_bytes < SMALL_BYTES


def _is_worn(usage: Usage) -> bool:
    return bool(usage.loose) and (_is_small(usage.ref) or usage.loose_bytes >= LOOSE_FRACTION * usage.ref.size_bytes)


def compact_segments(layout: Layout, groups: Sequence[Group], needs: Needs) -> Compacted:
    """Copy the needed entries, publish an index, mark the old segments for deletion. `groups` may be empty.

    A segment with a damaged needed entry stays as it is, and a remark reports it. Raises WriteFailed before any segment is marked.
    """
    need = sum(usage.ref.size_bytes - usage.loose_bytes for group in groups for usage in group.usages)
    check_for_writing(layout)
    free = free_bytes(layout.root)
    if need > free:
        raise WriteFailed(
            f"about {human_bytes(need)} are needed in {layout.root} until the old segments are removed, but {human_bytes(free)} are free;"
            " make room, then run it again"
        )
    copied: set[str] = set()
    """Segments of which every needed entry was copied."""
    new_segments: dict[str, int] = {}
    """The number of entries of each segment that was written."""
    remarks: list[str] = []
    for group in groups:
        appender = Appender(layout, origin=group.origin)
        seen = set[Key]()
        for usage in group.usages:  # if several segments have a key, the one with the smallest name counts
            good = _needed_entries(layout, usage, needs, remarks)
            for entry in good or ():
                if entry.key not in seen:
                    seen.add(entry.key)
                    new_segments.update({new.digest: len(new.contents.entries) for new in appender.add(entry)})
            if good is not None:
                copied.add(usage.ref.digest)
        new_segments.update({new.digest: len(new.contents.entries) for new in appender.close_segment()})
    failpoint("compact.before_index")
    if copied:
        commit(layout).close()
    old = sorted(copied - new_segments.keys())  # a segment whose copy is identical stays
    mark(layout, old)
    return Compacted(len(old), len(new_segments.keys() - copied), sum(new_segments.values()), tuple(remarks))


def _needed_entries(layout: Layout, usage: Usage, needs: Needs, remarks: list[str]) -> list[Entry] | None:
    """The needed entries of a segment. None, and a remark, if not all of them are sound."""
    digest = usage.ref.digest
    try:
        contents = read_contents(layout.segment(digest))
        needed = [entry for entry in contents.entries if needs.hold(contents.origin, entry)]
        good = good_entries(layout.segment(digest), needed)
    except (FormatError, OSError) as error:
        remarks.append(f"segment {digest} was not rewritten: {error}")
        return None
    if len(good) < len({entry.key for entry in needed}):
        damaged = f"{len(needed) - len(good)} of its entries are damaged; run {layout.command('repair')}"
        remarks.append(f"segment {digest} was not rewritten: {damaged}")
        return None
    return good
