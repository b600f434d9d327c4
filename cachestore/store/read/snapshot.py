"""Snapshots: the index, plus segments that it does not cover, minus covered segments that are gone.

So any good index is correct, and races between index writers are harmless. A snapshot never changes; `load_snapshot` takes a newer one.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from heapq import merge
from itertools import groupby
from operator import itemgetter
from pathlib import Path

from cachestore.core import system
from cachestore.core.errors import FormatError, NewerFormat, ReadFailed, StoreNotFound
from cachestore.core.keys import Key
from cachestore.files.marker import check_for_reading, read_marker
from cachestore.files.opening import is_link, is_of_a_signal, names_in, status_of
from cachestore.files.paths import CACHE_MARKER, IndexName, Layout, Mode, parse_index, parse_segment
from cachestore.store.format.index import Index, Verdict, check
from cachestore.store.format.locations import Located, Location, SegmentRef
from cachestore.store.format.marked import marked_segments
from cachestore.store.format.segment import SegmentContents, read_contents


@dataclass(slots=True)
class Snapshot:
    """What is in a store at one moment. Look-ups need no lock and write nothing."""

    layout: Layout
    index: Index | None
    uncovered: Mapping[str, SegmentContents]
    """By digest, the segments that the index does not cover."""
    vanished: frozenset[int]
    """Numbers of segments that the index covers but that are gone or were cut short."""
    unreadable: Mapping[str, str]
    """Segments whose header could not be read, with the reason; their entries count as missing."""
    listed: frozenset[str] = field(default_factory=frozenset[str])
    """Digests of all segments that exist; for planning without those marked for deletion."""
    for_planning: bool = False
    """Whether it shows only reliable segments: not marked for deletion, and of the published size."""
    _tail: Mapping[Key, tuple[Location, ...]] | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def tail(self) -> Mapping[Key, tuple[Location, ...]]:
        """Entry locations in segments that the index does not cover. Made lazily: writers never need it."""
        if self._tail is None:
            self._tail = _laid({}, self.uncovered)
        return self._tail

    def with_segments(self, published: Mapping[str, SegmentContents]) -> "Snapshot":
        """Return this snapshot with segments that were published since. Nothing is listed, and it uses the same index."""
        fresh = {digest: contents for digest, contents in published.items() if digest not in self.listed}
        newer = replace(self, uncovered={**self.uncovered, **fresh}, listed=self.listed | fresh.keys())
        if self._tail is not None:
            newer._tail = _laid({**self._tail}, fresh)  # noqa: SLF001 - its own class
        return newer

    def find(self, keys: Sequence[Key]) -> list[list[Location]]:
        """The locations of each key, in the order of segment names; an empty list for a key that is not there."""
        found: list[list[Location]] = self.index.find(keys) if self.index is not None else [[] for _key in keys]
        if self.vanished and self.index is not None:
            gone = {self.index.segments[number].digest for number in self.vanished}
            found = [[location for location in locations if location.segment.digest not in gone] for locations in found]
        if not self.uncovered:
            return found
        tail = self.tail
        return [
            sorted([*locations, *tail.get(key, ())], key=lambda location: (location.segment.digest, location.ordinal))
            for key, locations in zip(keys, found, strict=True)
        ]

    def locate(self, keys: Sequence[Key]) -> Located | None:
        """The first copy of each key, which is the one to read. None if any key is not there."""
        if self.index is not None and not self.vanished and not self.uncovered:
            return self.index.locate(keys)
        found = self.find(keys)
        return Located.of([locations[0] for locations in found]) if all(found) else None

    def __contains__(self, key: Key) -> bool:
        return bool(self.find([key])[0])

    def items(self) -> Iterator[tuple[Key, Sequence[Location]]]:
        """All keys in their order, each with its locations in the order of segment names. Holds none of the index in memory."""
        in_index = self._index_items()
        if not self.uncovered:
            yield from in_index
            return
        in_tail = ((key, self.tail[key]) for key in sorted(self.tail))
        for key, found in groupby(merge(in_index, in_tail, key=itemgetter(0)), key=itemgetter(0)):
            copies = [location for _key, locations in found for location in locations]
            yield key, sorted(copies, key=lambda location: (location.segment.digest, location.ordinal))

    def keys(self) -> Iterator[Key]:
        """All keys in their order."""
        in_index = self._index_keys()
        return (key for key, _copies in groupby(merge(in_index, sorted(self.tail)))) if self.uncovered else in_index

    def raw_keys(self) -> bytes:
        """All keys concatenated, 16 bytes each. A key in both index and tail comes twice. For comparing millions at once."""
        in_index = self.index.raw_keys() if self.index is not None and not self.vanished else b"".join(self._index_keys())
        return b"".join((in_index, *self.tail))

    def _index_keys(self) -> Iterator[Key]:
        if self.index is not None and not self.vanished:
            return (Key(raw) for raw, _packed in self.index.raw_entries())
        return (key for key, _found in self._index_items())

    def _index_items(self) -> Iterator[tuple[Key, Sequence[Location]]]:
        """The keys of the index that lie in a segment that is there, with their locations there."""
        if self.index is None:
            return
        gone = {self.index.segments[number].digest for number in self.vanished}
        for key, locations in self.index.items():
            there = [location for location in locations if location.segment.digest not in gone] if gone else locations
            if there:
                yield key, there

    def __len__(self) -> int:
        if self.index is None:
            return len(self.tail)
        if self.vanished:
            return sum(1 for _key in self.keys())
        return len(self.index) + sum(1 for locations in self.index.find(list(self.tail)) if not locations)

    @property
    def generation(self) -> int:
        """The number of the index, or -1 without one."""
        return self.index.verdict.name.number if self.index is not None else -1

    def segments(self) -> list[SegmentRef]:
        """All readable segments, sorted by digest."""
        covered = [ref for number, ref in self.index.segments.items() if number not in self.vanished] if self.index is not None else []
        return sorted([*covered, *(ref_of(digest, contents) for digest, contents in self.uncovered.items())], key=lambda ref: ref.digest)

    def close(self) -> None:
        """Close the index. May be called twice."""
        if self.index is not None:
            self.index.close()


def _laid(tail: dict[Key, tuple[Location, ...]], segments: Mapping[str, SegmentContents]) -> dict[Key, tuple[Location, ...]]:
    """Add the entry locations of segments to a tail, and return it."""
    for digest, contents in segments.items():
        ref = ref_of(digest, contents)
        for entry in contents.entries:
            location = Location(ref, entry.ordinal, entry.offset, entry.specs, entry.checksum)
            tail[entry.key] = (*tail.get(entry.key, ()), location)
    return tail


def ref_of(digest: str, contents: SegmentContents) -> SegmentRef:
    """The `SegmentRef` of a segment's contents."""
    return SegmentRef(digest, contents.size_bytes, len(contents.entries), contents.origin)


def open_layout(layout_root: Layout) -> Layout:
    """Check that there is a store and that this code can read it. Returns its layout with the store's mode and id.

    Raises StoreNotFound, FormatError for a newer format, and ReadFailed if the layout already has an id and that store is not there.
    """
    check_for_reading(layout_root)
    path = layout_root.marker
    try:
        body = read_marker(layout_root)
    except (FileNotFoundError, NotADirectoryError) as error:
        help_text = '`cachestore precompute … --store` makes one, and so does `cs.open(path, mode="a")`'
        if (layout_root.root / CACHE_MARKER).exists():
            help_text = f"it has copies of stores at addresses: `cachestore cache {system.quoted(str(layout_root.root))}` lists them"
        elif list_segments(layout_root):
            help_text = f"it holds segments: {layout_root.command('repair')} makes it a store again"
        raise StoreNotFound(
            f"there is no store at {layout_root.root} (no {path.name} in it{_folder_hint(layout_root.root)}); {help_text}"
        ) from error
    except NewerFormat:
        raise
    except FormatError as error:
        raise FormatError(f"{error}; {layout_root.command('repair')} writes it again") from error
    mode, store_id = next((one for one in Mode if one.value == body.get("mode")), None), body.get("store_id")
    if mode is None or not isinstance(store_id, str) or not store_id:
        raise FormatError(f"{path} has no valid id and mode; {layout_root.command('repair')} writes it again")
    return Layout(layout_root.root, mode, store_id)


def _folder_hint(root: Path) -> str:
    """Words that name the working directory, if the path may have been relative to it."""
    try:
        folder = Path.cwd()
    except OSError:  # it was removed
        return ""
    return f"; a relative path is looked up from {folder}" if root.is_relative_to(folder) else ""


def list_segments(layout: Layout) -> frozenset[str]:
    """Digests of all segments, by listing folders, which alone shows what exists. Links are not followed."""
    folders = [folder for folder in names_in(layout.segments) if not is_link(layout.segments / folder)]
    found = ((folder, parse_segment(name)) for folder in folders for name in names_in(layout.segments / folder))
    return frozenset(digest for folder, digest in found if digest and digest[:2] == folder)


def visible_segments(layout: Layout) -> frozenset[str]:
    """Digests of segments that may be relied on: present and not marked for deletion. One that leaves this set never comes back."""
    return list_segments(layout) - marked_segments(layout)


def list_indexes(layout: Layout) -> list[IndexName]:
    """All index names, the one to use first at the front."""
    return sorted(filter(None, map(parse_index, names_in(layout.indexes))), reverse=True)


def load_snapshot(
    layout: Layout, *, earlier: Snapshot | None = None, verdict: Verdict | None = None, for_planning: bool = False
) -> Snapshot:
    """Take a snapshot of a store. Headers that `earlier` holds are not read again; a `verdict` saves checking the index.

    If an index is damaged, an older one is used; without any, the headers of all segments are read. Use `for_planning` to decide what to
    encode: then a segment counts as vanished if it is marked for deletion, or if its size is not the one in the index or in `earlier`.

    Raises ReadFailed if the store is not at its path any more: a missing folder lists like an empty store.
    """
    index = _open_newest(layout, earlier, verdict)
    # Listed after the index was chosen. Segments are published before the index that covers them, so none of its own is missed.
    listed = visible_segments(layout) if for_planning else list_segments(layout)
    refs: Mapping[int, SegmentRef] = index.segments if index is not None else {}
    covered = {ref.digest for ref in refs.values()}
    vanished = frozenset(
        number for number, ref in refs.items() if ref.digest not in listed or (for_planning and not has_its_size(layout, ref))
    )
    known: Mapping[str, SegmentContents] = earlier.uncovered if earlier is not None else {}
    if for_planning:
        known = {digest: contents for digest, contents in known.items() if has_its_size(layout, ref_of(digest, contents))}
    uncovered: dict[str, SegmentContents] = {}
    unreadable: dict[str, str] = {}
    for digest in sorted(listed - covered):
        try:
            uncovered[digest] = known.get(digest) or read_contents(layout.segment(digest))
        except (FormatError, OSError) as error:
            if is_of_a_signal(error):
                raise
            unreadable[digest] = str(error)
    check_for_reading(layout)
    return Snapshot(layout, index, uncovered, vanished, unreadable, listed, for_planning)


@dataclass(frozen=True, slots=True)
class Handover:
    """A snapshot for another process, which then uses the same index without listing or reading a header."""

    verdict: Verdict | None
    vanished: frozenset[int]
    uncovered: Mapping[str, SegmentContents]
    """Without the entries' JSON values."""


def hand_over(snapshot: Snapshot) -> Handover:
    """Make what travels with a pickled handle."""
    bare = {digest: replace(contents, entries=contents.entries.without_metas()) for digest, contents in snapshot.uncovered.items()}
    return Handover(snapshot.index.verdict if snapshot.index is not None else None, snapshot.vanished, bare)


def take_over(layout: Layout, handover: Handover) -> Snapshot:
    """Make the same snapshot in another process. Takes a new one if the index is gone or is not the checked file."""
    try:
        return snapshot_of(layout, handover)
    except (FormatError, OSError) as error:
        if is_of_a_signal(error):
            raise
        return load_snapshot(layout)


def snapshot_of(layout: Layout, handover: Handover) -> Snapshot:
    """Make a snapshot without listing anything. Raises FormatError, FileNotFoundError, ReadFailed if its index is not the checked file."""
    index = Index(layout, handover.verdict) if handover.verdict is not None else None
    covered = {ref.digest for number, ref in index.segments.items() if number not in handover.vanished} if index is not None else set[str]()
    return Snapshot(layout, index, handover.uncovered, handover.vanished, {}, frozenset(covered | set(handover.uncovered)))


def has_its_size(layout: Layout, ref: SegmentRef) -> bool:
    """Whether a segment is there, and was not cut short."""
    status = status_of(layout.segment(ref.digest))
    return status is not None and status.st_size == ref.size_bytes


def _open_newest(layout: Layout, earlier: Snapshot | None, verdict: Verdict | None) -> Index | None:
    held = earlier.index.verdict if earlier is not None and earlier.index is not None else verdict
    for name in list_indexes(layout):
        try:
            if held is not None and held.name == name:
                with suppress(FormatError, FileNotFoundError, ReadFailed):
                    return Index(layout, held)
            return Index(layout, check(layout, name))
        except (FormatError, OSError) as error:
            if is_of_a_signal(error):
                raise
    return None
