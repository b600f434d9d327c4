"""Garbage collection: remove what nothing needs, in two steps, so that no race loses an entry.

1. `mark` marks segments for deletion in a create-only list. From then on planning treats them as absent; they can still be read.
2. A later run, after a grace period: `remove_marked` looks again. Needed entries without a sound copy in another, unmarked
   segment are copied into a new one. An index that covers the copies is published; then the old segment is removed.

A process that relies on an entry reads the lists only after its own catalog is published. A process that removes segments reads the
catalogs only after its own list is published. So one of the two sees the other, even if clocks differ. The grace period only helps readers
and saves work.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cachestore.care.soundness import good_entries
from cachestore.core.errors import CorruptEntry, FormatError
from cachestore.core.words import plural
from cachestore.files.checksum import digest_of
from cachestore.files.failpoints import failpoint
from cachestore.files.opening import names_in
from cachestore.files.paths import Layout, is_temporary
from cachestore.files.publish import publish
from cachestore.files.records import encode_record
from cachestore.files.removal import is_older, remove_file
from cachestore.store.format.catalog import list_generations, list_names
from cachestore.store.format.locations import Location
from cachestore.store.format.marked import FORMAT, VERSION, MarkedList, list_marked
from cachestore.store.format.segment import SegmentContents, StoredEntry, read_contents
from cachestore.store.read.fetch import Checked, Fetcher
from cachestore.store.read.snapshot import list_indexes, list_segments, load_snapshot
from cachestore.store.write.append import publish_segment
from cachestore.store.write.commit import commit

DAY_SECONDS: Final = 86_400.0
GRACE_SECONDS: Final = DAY_SECONDS
"""How long a marked segment stays readable by default; also the age at which temporary files are stale."""
KEPT_GENERATIONS: Final = 3
KEPT_SECONDS: Final = 30 * DAY_SECONDS
"""A generation of a data set is removed when it is older than this and three newer ones exist."""


def mark(layout: Layout, digests: Iterable[str]) -> str | None:
    """Mark segments for deletion, for good. Returns the digest of the list, or None for no segments. Raises WriteFailed."""
    segments = sorted(set(digests))
    if not segments:
        return None
    raw = encode_record(FORMAT, VERSION, {"segments": segments, "written": time.time()})
    failpoint("gc.before_list")
    publish(layout, layout.marked_list(digest_of([raw])), [raw], read_only=True)
    failpoint("gc.after_list")
    return digest_of([raw])


def due_lists(layout: Layout, *, now: float, grace_seconds: float) -> list[MarkedList]:
    """The lists whose grace period is over, including those whose segments are all gone."""
    return [each for each in list_marked(layout) if now - each.written >= grace_seconds]


@dataclass(frozen=True, slots=True)
class Removal:
    """A marked segment that may be removed now, and the entries that must be copied first."""

    digest: str
    contents: SegmentContents
    to_copy: tuple[StoredEntry, ...]


def plan_removal(layout: Layout, lists: Sequence[MarkedList], hold: Callable[[str, StoredEntry], bool]) -> tuple[list[Removal], list[str]]:
    """Plan removals: (what may be removed now, sentences on what may not). Find out what `hold` knows after the lists were read.

    `hold` returns whether an entry must stay, given the origin of its segment, as `Needs.hold` does. A segment stays if it cannot be read,
    or if such an entry has no sound copy at all: `repair` deals with it.
    """
    going = frozenset[str]().union(*(each.segments for each in lists))
    removals: list[Removal] = []
    remarks: list[str] = []
    with closing(load_snapshot(layout, for_planning=True)) as snapshot, closing(Fetcher(layout, Checked([]), verify="always")) as fetcher:

        def has_copy(entry: StoredEntry, copies: Iterable[Location]) -> bool:
            """Whether another segment has a sound copy, of which every byte was read.

            Those in `going` do not count, even if the snapshot did not see yet that they are marked.
            """
            for copy in copies:
                if copy.segment.digest not in going:
                    with suppress(CorruptEntry, FormatError, OSError):
                        fetcher.fetch(entry.key, copy)
                        return True
            return False

        for digest in sorted(list_segments(layout) & going):
            try:
                contents = read_contents(layout.segment(digest))
                needed = [entry for entry in contents.entries if hold(contents.origin, entry)]
                copies = snapshot.find([entry.key for entry in needed])
                to_copy = tuple(entry for entry, its_copies in zip(needed, copies, strict=True) if not has_copy(entry, its_copies))
                sound = len(good_entries(layout.segment(digest), to_copy))
            except (FormatError, OSError) as error:
                remarks.append(f"segment {digest} was not removed: {error}")
                continue
            if sound < len(to_copy):
                lost = plural(len(to_copy) - sound, "needed entry is", "needed entries are")
                remarks.append(f"segment {digest} was not removed: {lost} damaged; run {layout.command('repair')}")
                continue
            removals.append(Removal(digest, contents, to_copy))
    return removals, remarks


def remove_marked(layout: Layout, removals: Sequence[Removal]) -> int:
    """Copy what is needed, publish an index that covers the copies, then remove the segments. Returns the bytes freed.

    Raises WriteFailed, or CorruptEntry for fresh damage. What was removed until then was not needed; running it again continues. `removals`
    may be empty.
    """
    ready: list[Removal] = []
    for removal in removals:
        if removal.to_copy:
            try:
                good = good_entries(layout.segment(removal.digest), removal.to_copy)
            except FileNotFoundError:  # another collector removed it; if the store was only away for a moment, it stays
                continue
            if len(good) < len(removal.to_copy):
                raise CorruptEntry(f"segment {removal.digest} was damaged just now; nothing was removed: run {layout.command('repair')}")
            publish_segment(layout, good, origin=removal.contents.origin)
        ready.append(removal)
    if any(removal.to_copy for removal in ready):
        failpoint("gc.before_index")
        commit(layout).close()
    freed = 0
    for removal in ready:
        failpoint("gc.before_removal")
        freed += remove_file(layout, layout.segment(removal.digest))
    if ready:
        failpoint("gc.after_removal")
        commit(layout).close()
    return freed


def spent_lists(layout: Layout, lists: Sequence[MarkedList]) -> list[Path]:
    """Paths of those lists whose segments are all gone."""
    listed = list_segments(layout)
    return [layout.marked_list(each.digest) for each in lists if not each.segments & listed]


def stale_temporaries(layout: Layout, *, now: float) -> list[Path]:
    """Files in `tmp/` that cachestore made and that were not written to for a day."""
    paths = (layout.temporary / name for name in names_in(layout.temporary) if is_temporary(name))
    return [path for path in paths if is_older(path, GRACE_SECONDS, now=now)]


def old_indexes(layout: Layout, *, now: float) -> list[Path]:
    """Index files that are older than a day, without the newest three. Readers that still use one open a newer one."""
    paths = [layout.index(name) for name in list_indexes(layout)[KEPT_GENERATIONS:]]
    return [path for path in paths if is_older(path, GRACE_SECONDS, now=now)]


def old_generations(layout: Layout, *, now: float, keep: Mapping[str, int]) -> dict[str, list[int]]:
    """By data set, the generations that are older than 30 days, without the newest three; of those in `keep`, all but so many."""
    old: dict[str, list[int]] = {}
    for name in list_names(layout):
        earlier = list_generations(layout, name)[: -keep.get(name, KEPT_GENERATIONS)]
        old[name] = [n for n in earlier if name in keep or is_older(layout.catalog(name, n), KEPT_SECONDS, now=now)]
    return {name: generations for name, generations in old.items() if generations}


def remove_files(layout: Layout, paths: Iterable[Path]) -> int:
    """Remove files and return the bytes freed. Skips what is not a regular file. Parse the names first: only ours may be passed."""
    freed = 0
    for path in paths:
        with suppress(FormatError):
            freed += remove_file(layout, path)
    return freed
