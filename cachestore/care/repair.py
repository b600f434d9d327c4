"""`repair`: make a store consistent, and with `refill` complete.

Good entries are copied before a file is moved, and no damaged file is deleted.

The good entries of a damaged segment are copied into a new one, which is published first. So are entries that only segments with a wrong
name hold; those files stay where they are. Then the damaged file is moved to `quarantine/`, with a list of the keys that could not be
saved. Damaged indexes, catalogs and recipes are moved there too, and the index is built again from the segments.

A file that cannot be read (an I/O error) stays where it is. A second run changes nothing more. Safe beside readers, which find the copies
in a newer snapshot, and beside a running pass, whose reconcile checks what is really there.
"""

import logging
import os
import stat
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from itertools import chain, count
from pathlib import Path

from cachestore.care.checks import lost_catalogs
from cachestore.care.lines import close_gaps, known_with_losses, remake_tables, stays_as_it_is, tables_to_remake
from cachestore.care.losses import LOST_FORMAT, LOST_VERSION, NamedSample, needed_samples, vanished_keys, wanted_keys
from cachestore.care.moved import NewPaths, check_source_names, new_paths
from cachestore.care.refill import check_refill, newest_catalogs, rebuild_catalog, refill_catalog
from cachestore.care.soundness import check_segment, good_entries
from cachestore.care.usage import is_own_value
from cachestore.care.verify import verify
from cachestore.core.arguments import as_switch, check_calls
from cachestore.core.errors import BadInput, FormatError, NewerFormat, ReadFailed, StoreNotFound, naming_extras
from cachestore.core.keys import Json, Key
from cachestore.core.spelling import option
from cachestore.core.words import in_short
from cachestore.files.checksum import digest_file
from cachestore.files.failpoints import failpoint
from cachestore.files.marker import check_for_reading, noticing_its_end
from cachestore.files.opening import is_link, names_in, read_whole
from cachestore.files.paths import MARKER, Layout, Mode, parse_lost, parse_segment
from cachestore.files.publish import make_folder, move, publish
from cachestore.files.records import encode_record
from cachestore.files.table import TABLE_LIMIT_BYTES
from cachestore.jobs.run.task import Cancel, OnProgress
from cachestore.sources.combined import Moved
from cachestore.store.format.catalog import read_stray
from cachestore.store.format.entry import Entry
from cachestore.store.format.findings import HARMLESS, Finding, missing_keys
from cachestore.store.format.index import Index, NoIndex
from cachestore.store.format.index import check as check_index
from cachestore.store.format.segment import StoredEntries, StoredEntry, read_contents
from cachestore.store.read.snapshot import Snapshot, list_indexes, list_segments, load_snapshot, open_layout
from cachestore.store.read.unfinished import check_there
from cachestore.store.write.append import publish_segment
from cachestore.store.write.commit import commit, has_news, publish_marker

_log = logging.getLogger("cachestore")


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
    lost: tuple[str, ...] = ()
    """What is lost for good: changes to data sets, in words. The rows that are still known are in a new generation."""
    findings: tuple[Finding, ...] = ()
    """What is still wrong afterwards, without harmless findings."""

    __repr__ = in_short

    def as_json(self) -> dict[str, Json]:
        """The object that `cachestore repair --json` prints."""
        return asdict(self) | {"findings": [finding.as_json() for finding in self.findings]}


@dataclass(frozen=True, slots=True)
class _DamagedSegment:
    """A damaged segment."""

    digest: str
    entries: tuple[StoredEntry, ...]
    """Where each entry may lie: as the header says, then as the index says."""
    good: frozenset[Key]
    """Keys of the entries that can be saved."""
    origin: str
    """The pass that wrote it, if known. Else empty, as for a writer, so that nothing treats its entries as unneeded."""


@naming_extras()
def repair(
    path: str | Path,
    *,
    refill: bool = False,
    source: Moved | None = None,
    model: str | Path | None = None,
    vae: str | Path | None = None,
    text_encoder: str | Path | None = None,
    dry_run: bool = False,
    on_progress: OnProgress | None = None,
    cancel: Cancel | None = None,
    name: str | None = None,
) -> RepairReport:
    """Make a store consistent, and with `refill` complete.

    Args:
        path: the store.
        refill: encode again the entries that data sets need and that have no valid copy, with the same source and model. Samples and
            captions of a data set stay as they are: a source that lists others is refused.
        source: the new path of a source that was moved; for several sources a mapping from name to path. Without `refill` it is only
            used to build a lost catalog again.
        model: with `refill`, the new path of the model; it must have the fingerprint of the data set.
        vae: with `refill`, the new path of the VAE.
        text_encoder: with `refill`, the new path of the text encoder.
        dry_run: report what would be done and change nothing. With `refill`, the sources and models that would be needed are checked.
        on_progress: with `refill`, called about once a second with the counts that `precompute` gives.
        cancel: with `refill`, anything with `is_set()`. Once it is set, the work ends after the current batch: what is encoded is
            published, and Incomplete is raised.
        name: with `refill`, encode only what this data set lacks.

    Raises:
        Incomplete: cancelled; the same call continues from there.
        StoreNotFound: there is no store at this path.
        FormatError: the store was written by a newer version; nothing was changed.
        RecipeMismatch: the model is not the one of the data set.
        BadInput: the source or model cannot be found (pass its new path), or the source lists other samples or captions now.
    """
    refill, dry_run = as_switch("refill", refill), as_switch("dry_run", dry_run)
    check_calls(on_progress, cancel)
    moved = new_paths(source, model=model, vae=vae, text_encoder=text_encoder)
    root = Layout.at(path).root
    if not refill:
        _check_unused(moved, name)
    elif name is not None:
        check_there(open_layout(Layout(root)), name)
    if dry_run:
        return _foresee(root, moved, name, refill=refill)
    quarantined, rebuilt = list[str](), list[str]()
    if _is_marker_broken(root):
        if os.path.lexists(root / MARKER):
            quarantined.append(MARKER)
        _mend_marker(root)
        rebuilt.append(MARKER)
    layout = open_layout(Layout(root))
    with noticing_its_end(layout):
        segments, files = _find_damage(layout)
        salvaged, moved_segments = _salvage(layout, segments)
        salvaged += _save_misnamed(layout)
        _note_vanished(layout)
        quarantined += moved_segments
        lost, without_table = close_gaps(layout), tables_to_remake(layout, files)
        targets = [(where, _quarantine_file(layout, layout.root / where)) for where in files]
        here = [(where, target) for where, target in targets if os.path.lexists(target)]  # another repair just moved the others
        quarantined += [where for where, _target in here]
        # After all are moved: one may hold the name that another gets back.
        back = [data_set for _where, target in here for data_set in _put_back(layout, target)]
        with closing(load_snapshot(layout)) as before, closing(commit(layout, snapshot=before)) as after:
            rebuilt += ["index", *back] if after.generation != before.generation else back
        rebuilt += remake_tables(layout, without_table)
        check_for_reading(layout)
    check_source_names(newest_catalogs(layout), source)
    rebuilt += [each.name for each in lost_catalogs(layout) if rebuild_catalog(layout, each, moved)]
    refilled = 0
    for catalog in newest_catalogs(layout, name) if refill else ():
        refilled += refill_catalog(layout, catalog, moved, on_progress, cancel)
    left = tuple(finding for finding in verify(layout.root, "quick").findings if finding.kind not in HARMLESS)
    check_for_reading(layout)
    return RepairReport(salvaged, tuple(quarantined), tuple(rebuilt), len(missing_keys(left)), refilled, lost=tuple(lost), findings=left)


def _check_unused(moved: NewPaths, name: str | None) -> None:
    """Refuse a name, and warn of new paths, that mean something with `refill` alone."""
    if name is not None:
        why = "damaged files belong to the store, not to a data set"
        raise BadInput(f"{option('name')} needs {option('refill', value=True)}: {why}", option="name")
    refill = option("refill", value=True)
    if moved.models:
        needs = f"{option(next(iter(moved.models)))} needs {refill}"
        _log.warning("%s, which encodes again what was lost: without it no model is used", needs)
    if moved.source is not None:
        unused = f"{option('source')} without {refill}"
        _log.warning("%s is only used to rebuild a data set's lost catalog: nothing is encoded again", unused)


def _foresee(root: Path, moved: NewPaths, name: str | None, *, refill: bool) -> RepairReport:
    """Return what `repair` would do. With `refill` this raises what it would raise about the sources and models; encodes nothing."""
    if _is_marker_broken(root):  # nothing else can be checked without the marker
        aside = (MARKER,) if os.path.lexists(root / MARKER) else ()
        return RepairReport(0, aside, (MARKER,), 0, dry_run=True)
    layout = open_layout(Layout(root))
    with noticing_its_end(layout):
        segments, files = _find_damage(layout)
        quarantined = (*(layout.relative(layout.segment(segment.digest)) for segment in segments), *files)
        with closing(load_snapshot(layout)) as snapshot:
            misnamed = [entry.key for _origin, entries in _misnamed(layout, snapshot) for entry in entries]
            missing = _missing_after(layout, snapshot, segments, misnamed)
            rebuilt = ["index"] if quarantined or misnamed or has_news(snapshot) else []
        lost = tuple(each.lost_in_words() for each in known_with_losses(layout) if not each.is_beyond_repair)
        rebuilt += tables_to_remake(layout, files)
        check_for_reading(layout)
    check_source_names(newest_catalogs(layout), moved.source)
    for catalog in newest_catalogs(layout, name) if refill else ():
        check_refill(layout, catalog, moved, missing)
    rebuilt += [each.name for each in lost_catalogs(layout)]
    salvaged = sum(len(segment.good) for segment in segments) + len(misnamed)
    return RepairReport(salvaged, quarantined, tuple(rebuilt), len(missing), lost=lost, dry_run=True)


def _find_damage(layout: Layout) -> tuple[list[_DamagedSegment], list[str]]:
    """Return the damaged segments, and the paths of other damaged files. A file of a newer format is not damaged."""
    with closing(_load_with_index(layout)) as snapshot:
        segments = [damaged for digest in sorted(snapshot.listed) if (damaged := _read_damaged(layout, snapshot, digest))]
    check_for_reading(layout)  # `verify` would open any store at this path
    kinds = {"bad-index", "bad-catalog", "bad-changes", "bad-plan", "bad-recipe", "bad-list"}
    files = {finding.path for finding in verify(layout.root, "quick").findings if finding.kind in kinds and not finding.is_newer}
    files.difference_update(stays_as_it_is(layout, [*files], known_with_losses(layout)))
    return segments, sorted(path for path in files if os.path.lexists(layout.root / path))


def _missing_after(layout: Layout, snapshot: Snapshot, segments: Sequence[_DamagedSegment], misnamed: Iterable[Key]) -> frozenset[Key]:
    """Return the needed or lost keys that will have no valid copy after the salvage."""
    saved = {*misnamed, *(key for segment in segments for key in segment.good)}
    gone = {segment.digest for segment in segments}
    wanted = wanted_keys(layout, snapshot)
    asked = sorted(wanted.union(*(_to_report(segment.origin, segment.entries, wanted) for segment in segments)) - saved)
    copies = zip(asked, snapshot.find(asked), strict=True)
    return frozenset(key for key, locations in copies if all(location.segment.digest in gone for location in locations))


def _load_with_index(layout: Layout) -> Snapshot:
    """Return a snapshot with the newest intact index, which alone knows the entries of a segment with a damaged header.

    Raises ReadFailed if that index cannot be read right now. `load_snapshot` would do without it.
    """
    for name in list_indexes(layout):
        try:
            verdict = check_index(layout, name)
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
        except NoIndex:
            continue
        except FormatError as error:
            raise ReadFailed(
                f"the index {layout.index(name)} is intact, but cannot be opened ({error.__cause__}); nothing was moved: run the"
                " same command again"
            ) from error
    return load_snapshot(layout)


def _is_marker_broken(root: Path) -> bool:
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


def _read_damaged(layout: Layout, snapshot: Snapshot, digest: str) -> _DamagedSegment | None:
    """Return what can be saved from a segment. None if it is intact, or cannot be read (nothing is moved then).

    Raises NewerFormat for an intact segment of a newer format.
    """
    checked = check_segment(layout, digest, every_byte=True)
    if not checked.findings or checked.is_unreadable:
        return None
    path, index = layout.segment(digest), snapshot.index
    with suppress(OSError):
        in_header = StoredEntries()
        origin = next((ref.origin for ref in index.segments.values() if ref.digest == digest), "") if index is not None else ""
        try:
            contents = read_contents(path, is_whole=False)
            in_header, origin = contents.entries, contents.origin
        except NewerFormat:
            if digest_file(path) == digest:
                raise
        except FormatError:  # only the index knows its entries
            pass
        metas = {entry.key: entry.meta for entry in in_header}  # the others are lost
        in_index = (
            StoredEntry(key, found.ordinal, found.offset, found.specs, found.checksum, metas.get(key, {"salvaged_from": digest}))
            for key, locations in (index.items() if index is not None else ())
            for found in locations
            if found.segment.digest == digest
        )
        entries = (*in_header, *in_index)
        return _DamagedSegment(digest, entries, frozenset(entry.key for entry in good_entries(path, entries)), origin)
    return None


def _salvage(layout: Layout, segments: Sequence[_DamagedSegment]) -> tuple[int, list[str]]:
    """Copy the good entries, list the lost keys in `quarantine/`, then move the damaged file there.

    Returns how many entries were saved, and which files were moved.
    """
    needed = needed_samples(layout, {entry.key for segment in segments for entry in segment.entries if entry.key not in segment.good})
    salvaged, moved = 0, list[str]()
    for segment in segments:
        path = layout.segment(segment.digest)
        with suppress(FileNotFoundError):  # another repair just moved it, and saved its entries
            good = good_entries(path, segment.entries)
            if good:
                publish_segment(layout, good, origin=segment.origin)
            failpoint("repair.after_salvage")
            saved = {entry.key for entry in good}
            lost = [entry for entry in segment.entries if entry.key not in saved]
            _note_lost(layout, segment.digest, _to_report(segment.origin, lost, needed), needed)
            _quarantine(layout, path)
            salvaged += len(good)
            moved.append(layout.relative(path))
    return salvaged, moved


def _to_report(origin: str, lost: Iterable[StoredEntry], needed: Container[Key]) -> dict[Key, None]:
    """Return the lost keys of values that a user stored, and of those that a newest generation needs. Nothing needs the others."""
    return dict.fromkeys(entry.key for entry in lost if entry.key in needed or is_own_value(origin, entry))


def _note_lost(layout: Layout, digest: str, keys: Iterable[Key], needed: Mapping[Key, NamedSample]) -> None:
    """List keys that were lost with a segment, so that `verify` reports them until they are made again. No keys make no file."""
    lost = list(keys)
    body: dict[str, Json] = {"segment": digest, "keys": [str(key) for key in lost]}
    if samples := {str(key): list(needed[key]) for key in lost if key in needed}:
        body["needed"] = samples
    if lost:
        publish(layout, layout.lost_list(digest), [encode_record(LOST_FORMAT, LOST_VERSION, body)])


def _misnamed(layout: Layout, snapshot: Snapshot) -> Iterator[tuple[str, list[Entry]]]:
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


def _save_misnamed(layout: Layout) -> int:
    """Copy the entries that only segments with a wrong name hold. Returns how many."""
    saved = 0
    with closing(load_snapshot(layout)) as snapshot:
        for origin, good in _misnamed(layout, snapshot):
            publish_segment(layout, good, origin=origin)
            saved += len(good)
    return saved


def _note_vanished(layout: Layout) -> None:
    """List the lost keys of segments that are gone without having been marked. The next index will not show them any more."""
    with closing(load_snapshot(layout)) as snapshot:
        for digest, keys in vanished_keys(layout, snapshot).items():
            _note_lost(layout, digest, keys, needed_samples(layout, set(keys)))


def _quarantine_file(layout: Layout, path: Path) -> Path:
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


def _put_back(layout: Layout, path: Path) -> list[str]:
    """Publish an intact catalog under its own name, if that is free. Returns the data set's name, or nothing."""
    try:
        catalog = read_stray(path)
        own = layout.catalog(catalog.name, catalog.generation)
        if catalog.generation < 1 or own.name in names_in(own.parent):
            return []
        publish(layout, own, [read_whole(path, limit_bytes=TABLE_LIMIT_BYTES)], read_only=True)
    except (FormatError, FileNotFoundError):
        return []
    return [catalog.name]


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
