"""Repair: makes a store consistent without a GPU. It copies before it moves and moves before it forgets.

1. Every segment is read whole. From a damaged one the good entries are copied into a new segment, which is published first.
2. The damaged file goes to `quarantine/`, with the keys that could not be saved beside it.
3. Damaged index files, catalogs and recipes go to `quarantine/`; the index is built again from the segments.

A file that cannot be read (an I/O error) is left where it is. Running it again changes nothing more. Safe beside readers, which
find the copy in a newer snapshot, and beside a running pass, whose reconcile looks at what is really there.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from cachestore.errors import FormatError, ReadFailed
from cachestore.files.checksum import digest_file
from cachestore.files.failpoints import failpoint
from cachestore.files.opening import names_in
from cachestore.files.paths import Layout
from cachestore.files.publish import make_folder, move, publish
from cachestore.files.records import encode_record
from cachestore.keys import Json, Key
from cachestore.storage.append import publish_segment
from cachestore.storage.commit import commit
from cachestore.storage.index import Index, check
from cachestore.storage.segment import StoredEntry, as_entry, read_contents
from cachestore.storage.snapshot import Snapshot, list_indexes, load_snapshot, open_layout
from cachestore.storage.verify import LOST_FORMAT, LOST_SUFFIX, LOST_VERSION, Finding, good_entries, look_at_segment, verify


@dataclass(frozen=True, slots=True)
class RepairReport:
    """What repair did, or with `dry_run` would do."""

    salvaged: int
    """Entries copied out of damaged segments."""
    quarantined: tuple[str, ...]
    """Files moved aside, relative to the store."""
    rebuilt: tuple[str, ...]
    """What was built again: `index`, catalogs by name."""
    missing: int
    """Keys that something needs and that have no valid copy anywhere."""
    refilled: int = 0
    dry_run: bool = False
    findings: tuple[Finding, ...] = ()
    """What is still wrong afterwards, harmless things left out."""

    def as_json(self) -> dict[str, Json]:
        """The object that `cachestore repair --json` prints."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class _Damaged:
    digest: str
    entries: tuple[StoredEntry, ...]
    """Where each may stand: as the header says, and as the index says."""
    good: int
    origin: str
    """Which pass wrote it, as far as that can still be told; else empty, as of a writer, so that nothing takes it for superfluous."""


def repair_store(path: str | Path, *, dry_run: bool = False) -> RepairReport:
    """Make a store consistent; see the module's text. Raises StoreNotFound, FormatError for a newer store, ReadFailed, WriteFailed."""
    layout = open_layout(Layout(Path(path).absolute()))
    with closing(_load(layout)) as snapshot:
        damaged = [found for digest in sorted(snapshot.listed) if (found := _examine(layout, snapshot, digest))]
    broken = _broken_files(layout)
    quarantined = [str(layout.segment(one.digest).relative_to(layout.root)) for one in damaged] + broken
    salvaged = sum(one.good for one in damaged)
    if dry_run:
        return RepairReport(salvaged, tuple(quarantined), ("index",) if quarantined else (), 0, dry_run=True)
    for one in damaged:
        with suppress(FileNotFoundError):  # another repair moved it just now, and saved what could be saved before
            _salvage(layout, one)
    for where in broken:
        _quarantine(layout, layout.root / where)
    with closing(load_snapshot(layout)) as before, closing(commit(layout, snapshot=before)) as after:
        rebuilt = ("index",) if after.generation != before.generation else ()
    return finish_report(layout.root, RepairReport(salvaged, tuple(quarantined), rebuilt, 0))


def _load(layout: Layout) -> Snapshot:
    """A snapshot with the newest index that is whole: of a segment whose header is damaged it alone knows where entries stand.

    Raises ReadFailed where that index cannot be read just now; everybody else then does without.
    """
    for name in list_indexes(layout):
        try:
            verdict = check(layout, name)
        except (FormatError, FileNotFoundError):
            continue
        try:
            with closing(Index(layout, verdict)):  # held open meanwhile, so that it is not opened a second time
                return load_snapshot(layout, verdict=verdict)
        except FormatError as error:
            message = f"the index {layout.index(name)} is whole, but cannot be opened ({error.__cause__}); nothing was moved: run it again"
            raise ReadFailed(message) from error
    return load_snapshot(layout)


def finish_report(root: Path, report: RepairReport, *, find_lost: Callable[[Layout], Mapping[str, int]] | None = None) -> RepairReport:
    """The same report with what is still wrong now."""
    left = tuple(
        finding for finding in verify(root, "quick", find_lost=find_lost).findings if finding.kind not in {"stale-temp", "foreign-file"}
    )
    missing = len({finding.key for finding in left if finding.kind == "missing-entry"})
    return RepairReport(report.salvaged, report.quarantined, report.rebuilt, missing, report.refilled, findings=left)


def _examine(layout: Layout, snapshot: Snapshot, digest: str) -> _Damaged | None:
    """What can be saved from a segment; None where it is whole, or cannot be read at all (nothing is moved then)."""
    looked = look_at_segment(layout, digest, every_byte=True)
    if not looked.findings or looked.is_unreadable:
        return None
    try:
        entries = _entries_of(layout, snapshot, digest)
        return _Damaged(digest, entries, len(good_entries(layout, digest, entries)), _origin_of(layout, snapshot, digest))
    except OSError:
        return None


def _origin_of(layout: Layout, snapshot: Snapshot, digest: str) -> str:
    """Who wrote a segment, by its header, else by the index."""
    with suppress(FormatError, OSError):
        return read_contents(layout.segment(digest)).origin
    refs = snapshot.index.segments.values() if snapshot.index is not None else ()
    return next((ref.origin for ref in refs if ref.digest == digest), "")


def _entries_of(layout: Layout, snapshot: Snapshot, digest: str) -> tuple[StoredEntry, ...]:
    """What a damaged segment held, as its header says, then as the index says. Raises FormatError for a whole one of a newer format."""
    path = layout.segment(digest)
    in_header: tuple[StoredEntry, ...] = ()
    try:
        in_header = read_contents(path).entries
    except FormatError as error:
        if "install a newer one" in str(error) and digest_file(path) == digest:
            raise
    values = {entry.key: entry.meta for entry in in_header}
    return (*in_header, *_entries_in_index(snapshot, digest, values))


def _entries_in_index(snapshot: Snapshot, digest: str, values: Mapping[Key, Mapping[str, Json]]) -> Iterable[StoredEntry]:
    """What the index knows of a segment whose own header may be damaged. A JSON value that is not in `values` is lost with the header."""
    if snapshot.index is None:
        return
    for key, places in snapshot.index.items():
        for place in places:
            if place.segment.digest == digest:
                meta = values.get(key, {"salvaged_from": digest})
                yield StoredEntry(key, place.ordinal, place.offset, place.specs, place.checksum, meta)


def _salvage(layout: Layout, damaged: _Damaged) -> None:
    """Copy the good entries, then move the damaged file aside with the keys that were lost noted beside it."""
    good = [as_entry(entry, run) for entry, run in good_entries(layout, damaged.digest, damaged.entries)]
    if good:
        publish_segment(layout, good, origin=damaged.origin)
    failpoint("repair.after_salvage")
    make_folder(layout, layout.quarantine)
    saved = {entry.key for entry in good}
    if bad := dict.fromkeys(entry.key for entry in damaged.entries if entry.key not in saved):
        body: dict[str, Json] = {"segment": damaged.digest, "keys": [str(key) for key in bad]}
        publish(layout, layout.quarantine / f"{damaged.digest}{LOST_SUFFIX}", [encode_record(LOST_FORMAT, LOST_VERSION, body)])
    _quarantine(layout, layout.segment(damaged.digest))


def _quarantine(layout: Layout, path: Path) -> None:
    """Move a file aside under a name of its own; it is never deleted."""
    make_folder(layout, layout.quarantine)
    taken = set(names_in(layout.quarantine))
    flat = str(path.relative_to(layout.root)).replace("/", "_")
    number = 0
    while (name := flat if number == 0 else f"{flat}.{number}") in taken:
        number += 1
    move(layout, path, layout.quarantine / name)


def _broken_files(layout: Layout) -> list[str]:
    """Index files, catalogs and recipes that do not match their checksums; newer formats are not ours to judge."""
    kinds = {"bad-index", "bad-catalog", "bad-recipe", "bad-list"}
    found = {
        finding.path
        for finding in verify(layout.root, "quick").findings
        if finding.kind in kinds and "install a newer one" not in finding.message
    }
    return sorted(found)
