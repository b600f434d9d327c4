"""Repair: make a store consistent without a GPU. Good entries are copied before a file is moved, and no damaged file is deleted.

The good entries of a damaged segment are copied into a new one, which is published first. So are entries that only segments with a wrong
name hold; those files stay where they are. Then the damaged file is moved to `quarantine/`, with a list of the keys that could not be
saved. Damaged indexes, catalogs and recipes are moved there too, and the index is built again from the segments.

A file that cannot be read (an I/O error) stays where it is. A second run changes nothing more. Safe beside readers, which find the copies
in a newer snapshot, and beside a running pass, whose reconcile checks what is really there.
"""

import os
import stat
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, replace
from itertools import chain, count
from pathlib import Path

from cachestore.core.errors import FormatError, NewerFormat, ReadFailed, StoreNotFound
from cachestore.core.keys import Json, Key, canonical
from cachestore.core.words import in_short
from cachestore.files.checksum import digest_file, digest_of
from cachestore.files.failpoints import failpoint
from cachestore.files.marker import check_for_reading, noticing_its_end
from cachestore.files.opening import is_link, names_in, read_whole
from cachestore.files.paths import MARKER, Layout, Mode, parse_lost, parse_segment
from cachestore.files.publish import make_folder, move, publish
from cachestore.files.records import encode_record
from cachestore.files.table import TABLE_LIMIT_BYTES
from cachestore.storage.append import publish_segment
from cachestore.storage.catalog import read_stray
from cachestore.storage.commit import commit, has_news, publish_marker
from cachestore.storage.entry import Entry
from cachestore.storage.findings import HARMLESS, Finding, missing_keys
from cachestore.storage.index import Index, check, is_no_index
from cachestore.storage.losses import LOST_FORMAT, LOST_VERSION, Sample, needed_samples, vanished_keys, wanted_keys
from cachestore.storage.segment import StoredEntries, StoredEntry, read_contents
from cachestore.storage.snapshot import Snapshot, list_indexes, list_segments, load_snapshot, open_layout
from cachestore.storage.soundness import check_segment, good_entries
from cachestore.storage.usage import is_own_value
from cachestore.storage.verify import LookFurther, verify


@dataclass(frozen=True, slots=True, repr=False)
class RepairReport:
    """What `repair` did, or would do with `dry_run`."""

    salvaged: int
    """Entries copied out of damaged segments."""
    quarantined: tuple[str, ...]
    """Files moved to `quarantine/`, relative to the store."""
    rebuilt: tuple[str, ...]
    """What was built again: the marker, `index`, and catalogs by name."""
    missing: int
    """Needed keys without a valid copy."""
    refilled: int = 0
    dry_run: bool = False
    findings: tuple[Finding, ...] = ()
    """What is still wrong afterwards, without harmless findings."""

    __repr__ = in_short

    def as_json(self) -> dict[str, Json]:
        """The object that `cachestore repair --json` prints."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class _Damaged:
    digest: str
    entries: tuple[StoredEntry, ...]
    """Where each entry may lie: as the header says, then as the index says."""
    good: frozenset[Key]
    """Keys of the entries that can be saved."""
    origin: str
    """The pass that wrote it, if known. Else empty, as for a writer, so that nothing treats its entries as unneeded."""


def repair_store(path: str | Path, *, dry_run: bool = False, look_further: LookFurther | None = None) -> RepairReport:
    """Make a store consistent, as the module's text says. `look_further` as in `verify`.

    Raises StoreNotFound, FormatError for a newer store, ReadFailed, WriteFailed.
    """
    if dry_run:
        return foresee_repair(path, look_further=look_further)[0]
    root = Layout.at(path).root
    if is_marker_broken(root):
        _mend_marker(root)
        report = repair_store(root, look_further=look_further)
        return replace(report, rebuilt=(MARKER, *report.rebuilt))
    layout = open_layout(Layout(root))
    with noticing_its_end(layout):
        return _repair(layout, look_further)


def foresee_repair(path: str | Path, *, look_further: LookFurther | None = None) -> tuple[RepairReport, frozenset[Key]]:
    """Return what `repair_store` would do, and the needed keys that would have no valid copy then. Changes nothing; raises as it does."""
    root = Layout.at(path).root
    if is_marker_broken(root):
        moved = (MARKER,) if os.path.lexists(root / MARKER) else ()
        return RepairReport(0, moved, (MARKER,), 0, dry_run=True), frozenset()  # the missing entries are not known before
    layout = open_layout(Layout(root))
    with noticing_its_end(layout):
        damaged, _broken, quarantined = _find_damage(layout, look_further)
        with closing(load_snapshot(layout)) as snapshot:
            lacking = [entry.key for _origin, good in _lacking(layout, snapshot) for entry in good]
            missing = _missing_then(layout, snapshot, damaged, lacking)
            rebuilt = ("index",) if quarantined or lacking or has_news(snapshot) else ()
        check_for_reading(layout)
    salvaged = sum(len(one.good) for one in damaged) + len(lacking)
    return RepairReport(salvaged, tuple(quarantined), rebuilt, len(missing), dry_run=True), missing


def _find_damage(layout: Layout, look_further: LookFurther | None) -> tuple[list[_Damaged], list[str], list[str]]:
    """Return the damaged segments, other broken files, and the paths of both."""
    with closing(_load(layout)) as snapshot:
        damaged = [found for digest in sorted(snapshot.listed) if (found := _examine(layout, snapshot, digest))]
    broken = _broken_files(layout, look_further)
    return damaged, broken, [layout.segment(one.digest).relative_to(layout.root).as_posix() for one in damaged] + broken


def _repair(layout: Layout, look_further: LookFurther | None) -> RepairReport:
    damaged, broken, quarantined = _find_damage(layout, look_further)
    salvaged = sum(len(one.good) for one in damaged)
    needed = needed_samples(layout, {entry.key for one in damaged for entry in one.entries if entry.key not in one.good})
    for one in damaged:
        with suppress(FileNotFoundError):  # another repair just moved it, and saved its entries
            _salvage(layout, one, needed)
    with closing(load_snapshot(layout)) as snapshot:
        for origin, good in _lacking(layout, snapshot):
            publish_segment(layout, good, origin=origin)
            salvaged += len(good)
    with closing(load_snapshot(layout)) as snapshot:
        _note_vanished(layout, snapshot)
    aside = [_put_aside(layout, layout.root / where) for where in broken]
    back = tuple(name for path in aside if (name := _put_back(layout, path)))
    with closing(load_snapshot(layout)) as before, closing(commit(layout, snapshot=before)) as after:
        rebuilt = ("index", *back) if after.generation != before.generation else back
    check_for_reading(layout)
    return finish_report(layout.root, RepairReport(salvaged, tuple(quarantined), rebuilt, 0), look_further=look_further)


def _missing_then(layout: Layout, snapshot: Snapshot, damaged: Sequence[_Damaged], lacking: Iterable[Key]) -> frozenset[Key]:
    """The needed or lost keys that will have no valid copy after the salvage."""
    saved = {*lacking, *(key for one in damaged for key in one.good)}
    gone = {one.digest for one in damaged}
    wanted = wanted_keys(layout, snapshot)
    asked = wanted.union(*(_to_report(one.origin, one.entries, wanted) for one in damaged)) - saved
    found = zip(sorted(asked), snapshot.find(sorted(asked)), strict=True)
    return frozenset(key for key, locations in found if all(location.segment.digest in gone for location in locations))


def _load(layout: Layout) -> Snapshot:
    """A snapshot with the newest intact index, which alone knows the entries of a segment with a damaged header.

    Raises ReadFailed if that index cannot be read right now. `load_snapshot` would do without it.
    """
    for name in list_indexes(layout):
        try:
            verdict = check(layout, name)
        except FormatError:
            continue
        except FileNotFoundError as error:
            check_for_reading(layout)
            if name not in list_indexes(layout):
                continue
            raise ReadFailed(
                f"the index {layout.index(name)} was missing a moment ago, but is there now; nothing was moved: run the same command again"
            ) from error
        try:
            with closing(Index(layout, verdict)):  # stays open, so that it is not opened a second time
                return load_snapshot(layout, verdict=verdict)
        except FormatError as error:
            if is_no_index(error):
                continue
            raise ReadFailed(
                f"the index {layout.index(name)} is intact, but cannot be opened ({error.__cause__}); nothing was moved: run the"
                " same command again"
            ) from error
    return load_snapshot(layout)


def is_marker_broken(root: Path) -> bool:
    """Whether the marker of a store is damaged, or is missing though the folder holds segments.

    Raises StoreNotFound if there is no store, and FormatError if a newer version wrote the marker.
    """
    try:
        open_layout(Layout(root))
    except StoreNotFound:
        if list_segments(Layout(root)):
            return True
        raise
    except NewerFormat:
        raise
    except FormatError:
        return True
    return False


def _mend_marker(root: Path) -> None:
    """Write the marker again. Only the folder's permissions tell whether a group may write."""
    is_group = bool(root.stat().st_mode & stat.S_IWGRP)
    layout = Layout(root, Mode.GROUP if is_group else Mode.PRIVATE)
    if os.path.lexists(layout.marker):
        _quarantine(layout, layout.marker)
    publish_marker(layout)


def finish_report(root: Path, report: RepairReport, *, look_further: LookFurther | None = None) -> RepairReport:
    """Return the report with what is still wrong now."""
    left = tuple(finding for finding in verify(root, "quick", look_further=look_further).findings if finding.kind not in HARMLESS)
    return replace(report, missing=len(missing_keys(left)), findings=left)


def _examine(layout: Layout, snapshot: Snapshot, digest: str) -> _Damaged | None:
    """What can be saved from a segment. None if it is intact, or cannot be read (nothing is moved then)."""
    checked = check_segment(layout, digest, every_byte=True)
    if not checked.findings or checked.is_unreadable:
        return None
    with suppress(OSError):
        entries = _entries_of(layout, snapshot, digest)
        good = frozenset(entry.key for entry in good_entries(layout.segment(digest), entries))
        return _Damaged(digest, entries, good, _origin_of(layout, snapshot, digest))
    return None


def _origin_of(layout: Layout, snapshot: Snapshot, digest: str) -> str:
    with suppress(FormatError, OSError):
        return read_contents(layout.segment(digest), is_whole=False).origin
    refs = snapshot.index.segments.values() if snapshot.index is not None else ()
    return next((ref.origin for ref in refs if ref.digest == digest), "")


def _entries_of(layout: Layout, snapshot: Snapshot, digest: str) -> tuple[StoredEntry, ...]:
    """The entries of a damaged segment, by its header, then by the index. Raises FormatError for an intact one of a newer format."""
    path = layout.segment(digest)
    in_header = StoredEntries()
    try:
        in_header = read_contents(path, is_whole=False).entries
    except FormatError as error:
        if isinstance(error, NewerFormat) and digest_file(path) == digest:
            raise
    values = {entry.key: entry.meta for entry in in_header}  # the others are lost
    in_index = (
        StoredEntry(key, location.ordinal, location.offset, location.specs, location.checksum, values.get(key, {"salvaged_from": digest}))
        for key, locations in (snapshot.index.items() if snapshot.index is not None else ())
        for location in locations
        if location.segment.digest == digest
    )
    return (*in_header, *in_index)


def _salvage(layout: Layout, damaged: _Damaged, needed: Mapping[Key, Sample]) -> None:
    """Copy the good entries, list the lost keys in `quarantine/`, then move the damaged file there."""
    good = good_entries(layout.segment(damaged.digest), damaged.entries)
    if good:
        publish_segment(layout, good, origin=damaged.origin)
    failpoint("repair.after_salvage")
    saved = {entry.key for entry in good}
    lost = [entry for entry in damaged.entries if entry.key not in saved]
    _note_lost(layout, damaged.digest, _to_report(damaged.origin, lost, needed), needed)
    _quarantine(layout, layout.segment(damaged.digest))


def _to_report(origin: str, lost: Iterable[StoredEntry], needed: Container[Key]) -> dict[Key, None]:
    """Return the lost keys of values that a user stored, and of those that a newest generation needs. Nothing needs the others."""
    return dict.fromkeys(entry.key for entry in lost if entry.key in needed or is_own_value(origin, entry))


def _note_lost(layout: Layout, digest: str, keys: Iterable[Key], needed: Mapping[Key, Sample]) -> None:
    """List keys that were lost with a segment, so that `verify` reports them until they are made again. No keys make no file."""
    lost = list(keys)
    body: dict[str, Json] = {"segment": digest, "keys": [str(key) for key in lost]}
    if samples := {str(key): list(needed[key]) for key in lost if key in needed}:
        body["needed"] = samples
    if lost:
        publish(layout, layout.lost_list(digest), [encode_record(LOST_FORMAT, LOST_VERSION, body)])


def note_unmade(layout: Layout, unmade: Mapping[Key, Sample]) -> None:
    """List entries of samples that could not be made again, unless a list has them already. No entries make no file."""
    with closing(load_snapshot(layout)) as snapshot:
        needed = wanted_keys(layout, snapshot)
    unmade = {key: sample for key, sample in unmade.items() if key not in needed}
    body: dict[str, Json] = {
        "keys": [str(key) for key in sorted(unmade)],
        "needed": {str(key): list(sample) for key, sample in sorted(unmade.items())},
    }
    digest = digest_of([canonical(body)])
    if unmade:
        publish(layout, layout.lost_list(digest), [encode_record(LOST_FORMAT, LOST_VERSION, {"segment": digest, **body})])


def _lacking(layout: Layout, snapshot: Snapshot) -> Iterator[tuple[str, list[Entry]]]:
    """Yield (origin, good entries) of segments with a wrong name, such as after a rename by hand, if the store lacks these entries.

    Leaves the files as they are, and skips all other files.
    """
    folders = [path for name in names_in(layout.segments) if not is_link(path := layout.segments / name)]
    for path in [*folders, *(folder / name for folder in folders for name in names_in(folder))]:
        if (parse_segment(path.name) or "")[:2] == path.parent.name:
            continue
        try:
            contents = read_contents(path, is_whole=False)
        except (FormatError, OSError):  # not a segment, or a folder: `verify` lists it
            continue
        lacking = [entry for entry in contents.entries if entry.key not in snapshot]
        with suppress(FileNotFoundError):
            if good := good_entries(path, lacking):
                yield contents.origin, good


def _note_vanished(layout: Layout, snapshot: Snapshot) -> None:
    """List the lost keys of segments that are gone without having been marked. The next index will not show them any more."""
    for digest, keys in vanished_keys(layout, snapshot).items():
        _note_lost(layout, digest, keys, needed_samples(layout, set(keys)))


def _put_aside(layout: Layout, path: Path) -> Path:
    """Move a damaged file to `quarantine/`; returns the new path.

    If it is a list of lost keys, they are collected again from the segment that it was about, if that is in `quarantine/`.
    """
    digest = parse_lost(path.name)
    if path.parent != layout.quarantine or digest is None:
        return _quarantine(layout, path)
    target = _quarantine(layout, path, f"{path.name}.damaged")
    with suppress(FormatError, OSError), closing(load_snapshot(layout)) as snapshot:
        contents = read_contents(layout.quarantine / _flat(layout, layout.segment(digest)))
        lost = [entry for entry in contents.entries if entry.key not in snapshot]
        needed = needed_samples(layout, {entry.key for entry in lost})
        _note_lost(layout, digest, _to_report(contents.origin, lost, needed), needed)
    return target


def _put_back(layout: Layout, path: Path) -> str | None:
    """Publish an intact catalog under its own name, if that is free. Returns the data set's name, or None."""
    try:
        catalog = read_stray(path)
        own = layout.catalog(catalog.name, catalog.generation)
        if catalog.generation < 1 or own.name in names_in(own.parent):
            return None
        publish(layout, own, [read_whole(path, limit_bytes=TABLE_LIMIT_BYTES)], read_only=True)
    except (FormatError, FileNotFoundError):
        return None
    return catalog.name


def _quarantine(layout: Layout, path: Path, name: str = "") -> Path:
    """Move a file to `quarantine/`, under `name` or a name made of its path. A number is added if that name is taken."""
    make_folder(layout, layout.quarantine)
    flat, taken = name or _flat(layout, path), set(names_in(layout.quarantine))
    free = (each for each in chain([flat], (f"{flat}.{number}" for number in count(1))) if each not in taken)
    target = layout.quarantine / next(free)
    move(layout, path, target)
    return target


def _flat(layout: Layout, path: Path) -> str:
    return path.relative_to(layout.root).as_posix().replace("/", "_")


def _broken_files(layout: Layout, look_further: LookFurther | None) -> list[str]:
    """Paths of indexes, catalogs, plans, recipes and lists with a wrong checksum. Newer formats are left out."""
    check_for_reading(layout)  # `verify` would open any store at this path
    kinds = {"bad-index", "bad-catalog", "bad-plan", "bad-recipe", "bad-list"}
    found = {
        finding.path
        for finding in verify(layout.root, "quick", look_further=look_further).findings
        if finding.kind in kinds and not finding.is_newer
    }
    return sorted(path for path in found if os.path.lexists(layout.root / path))
