"""Garbage collection: removing what nothing needs, in two steps that no race can turn into a loss.

1. `condemn` names segments in a create-only list. From then on they count as absent for whoever plans, and stay readable.
2. A later run, after a grace: `remove_condemned` looks again. What is needed after all, and has no sound copy in a segment that is not
   condemned, is copied into a new one; an index that covers the copies is published; then the old segment goes.

Who counts on an entry looks what is condemned only after its catalog stands. Who removes looks at the catalogs only after its list stood.
One of the two sees the other, whatever the clocks say. The grace is for readers and for the sake of work, not for this.
"""

import time
from collections.abc import Iterable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cachestore.core.errors import CorruptEntry, FormatError
from cachestore.files.checksum import digest_of
from cachestore.files.failpoints import failpoint
from cachestore.files.opening import names_in
from cachestore.files.paths import Layout, is_temporary
from cachestore.files.publish import make_folder, publish
from cachestore.files.records import encode_record
from cachestore.files.removal import is_older, remove_file
from cachestore.storage.append import publish_segment
from cachestore.storage.catalog import list_generations, list_names
from cachestore.storage.commit import commit
from cachestore.storage.condemned import FORMAT, VERSION, CondemnedList, list_condemned
from cachestore.storage.fetch import Checked, Fetcher
from cachestore.storage.places import Place
from cachestore.storage.segment import SegmentContents, StoredEntry, read_contents
from cachestore.storage.snapshot import Snapshot, list_indexes, list_segments, load_snapshot
from cachestore.storage.soundness import good_entries
from cachestore.storage.usage import Needs

DAY_SECONDS: Final = 86_400.0
GRACE_SECONDS: Final = DAY_SECONDS
"""How long a condemned segment stays readable, where the caller does not say; also the age at which temporary files are stale."""
KEPT_GENERATIONS: Final = 3
KEPT_SECONDS: Final = 30 * DAY_SECONDS
"""A generation of a data set goes when it is older than this and three newer ones are there."""


def condemn(layout: Layout, digests: Iterable[str]) -> str | None:
    """Name segments that are to go; returns the digest of the list, None for no segments. Final: see `condemned`. Raises WriteFailed."""
    segments = sorted(set(digests))
    if not segments:
        return None
    raw = encode_record(FORMAT, VERSION, {"segments": segments, "written": time.time()})
    make_folder(layout, layout.temporary, layout.condemned)
    failpoint("gc.before_list")
    publish(layout, layout.condemned_list(digest_of([raw])), [raw], read_only=True)
    failpoint("gc.after_list")
    return digest_of([raw])


def due_lists(layout: Layout, *, now: float, grace_seconds: float) -> list[CondemnedList]:
    """The lists whose grace is over. Those that name no segment that is still there are among them."""
    return [each for each in list_condemned(layout) if now - each.written >= grace_seconds]


@dataclass(frozen=True, slots=True)
class Removal:
    """One condemned segment whose time has come, and what of it must be copied first."""

    digest: str
    contents: SegmentContents
    to_copy: tuple[StoredEntry, ...]


def plan_removal(layout: Layout, lists: Sequence[CondemnedList], needs: Needs) -> tuple[list[Removal], list[str]]:
    """(what may be removed now, sentences on what may not). `needs` must have been found out after the lists were read.

    A segment that cannot be read, or of which a needed entry has no sound copy at all, stays: it is repair's.
    """
    named = frozenset[str]().union(*(each.segments for each in lists))
    removals: list[Removal] = []
    remarks: list[str] = []
    with closing(load_snapshot(layout, for_planning=True)) as snapshot, closing(Fetcher(layout, Checked([]), verify="always")) as fetcher:
        for digest in sorted(list_segments(layout) & named):
            try:
                contents = read_contents(layout.segment(digest))
                needed = tuple(entry for entry in contents.entries if needs.hold(contents.origin, entry))
                to_copy = tuple(_without_copy(snapshot, fetcher, needed, named))
                sound = len(good_entries(layout.segment(digest), to_copy))
            except (FormatError, OSError) as error:
                remarks.append(f"segment {digest} was not removed: {error}")
                continue
            if sound < len(to_copy):
                remarks.append(
                    f"segment {digest} was not removed: {len(to_copy) - sound} needed entries are damaged; run {layout.command('repair')}"
                )
                continue
            removals.append(Removal(digest, contents, to_copy))
    return removals, remarks


def _without_copy(snapshot: Snapshot, fetcher: Fetcher, entries: Sequence[StoredEntry], going: frozenset[str]) -> Iterable[StoredEntry]:
    """The entries that have no sound copy in any segment that is not condemned; every byte of those copies is read.

    Copies in the segments that are `going` now count for nothing, also where the snapshot did not see that they are condemned.
    """
    for entry, places in zip(entries, snapshot.find([entry.key for entry in entries]), strict=True):
        if not any(place.segment.digest not in going and _is_sound(fetcher, entry, place) for place in places):
            yield entry


def _is_sound(fetcher: Fetcher, entry: StoredEntry, place: Place) -> bool:
    with suppress(CorruptEntry, FormatError, OSError):
        fetcher.fetch(entry.key, place)
        return True
    return False


def remove_condemned(layout: Layout, removals: Sequence[Removal]) -> int:
    """Copy what is needed, publish an index that covers the copies, then remove; returns the bytes freed.

    Raises WriteFailed; what was removed until then was not needed, and the same command goes on. Nothing to remove is fine.
    """
    ready: list[Removal] = []
    for removal in removals:
        if removal.to_copy:
            try:
                good = good_entries(layout.segment(removal.digest), removal.to_copy)
            except FileNotFoundError:  # another collector removed it just now; if it is only the store that was away for a moment, it stays
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


def spent_lists(layout: Layout, lists: Sequence[CondemnedList]) -> list[Path]:
    """Paths of due lists none of whose segments is there any more."""
    listed = list_segments(layout)
    return [layout.condemned_list(each.digest) for each in lists if not each.segments & listed]


def stale_temporaries(layout: Layout, *, now: float) -> list[Path]:
    """Files in `tmp/` of our own naming that nobody wrote to for a day."""
    paths = (layout.temporary / name for name in names_in(layout.temporary) if is_temporary(name))
    return [path for path in paths if is_older(path, GRACE_SECONDS, now=now)]


def old_indexes(layout: Layout, *, now: float) -> list[Path]:
    """Index files behind the newest three that are older than a day: readers that still look through one open a newer one."""
    paths = [layout.index(name) for name in list_indexes(layout)[KEPT_GENERATIONS:]]
    return [path for path in paths if is_older(path, GRACE_SECONDS, now=now)]


def old_generations(layout: Layout, *, now: float) -> dict[str, list[int]]:
    """By data set, the generations behind the newest three that are older than 30 days."""
    earlier = {name: list_generations(layout, name)[:-KEPT_GENERATIONS] for name in list_names(layout)}
    old = {name: [n for n in some if is_older(layout.catalog(name, n), KEPT_SECONDS, now=now)] for name, some in earlier.items()}
    return {name: generations for name, generations in old.items() if generations}


def remove_files(layout: Layout, paths: Iterable[Path]) -> int:
    """Remove files whose names were parsed; returns the bytes freed. One that turns out to be no regular file is left alone."""
    freed = 0
    for path in paths:
        with suppress(FormatError):
            freed += remove_file(layout, path)
    return freed
