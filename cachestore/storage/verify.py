"""Verify: finds damage and changes nothing. Streams findings; only a mismatch seen twice through fresh opens is damage.

quick   names, sizes and headers of segments; the index's digest, and all that it says of them; catalogs whole; keys of the newest
        catalogs present
full    all of that, and every byte of every segment against the digest in its name and each entry's checksum
"""

import os
import stat
import time
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, cast, get_args

from cachestore.core.arguments import as_whole, as_word, check_function, refuse
from cachestore.core.errors import BadInput, FormatError
from cachestore.core.keys import Json, Key, Recipe
from cachestore.core.words import in_short
from cachestore.files.checksum import Checksum, begin_digest, read_blocks
from cachestore.files.marker import check_for_reading
from cachestore.files.opening import is_link, look_at, names_in, opened, read_into, reason_of
from cachestore.files.paths import (
    MARKER,
    Layout,
    PassFolder,
    decode_name,
    is_temporary,
    parse_attempt,
    parse_catalog,
    parse_claim,
    parse_condemned,
    parse_dropped,
    parse_index,
    parse_ledger,
    parse_listed,
    parse_listing,
    parse_lost,
    parse_pass,
    parse_plan,
    parse_recipe,
    parse_round,
    parse_segment,
    parse_worker,
    to_repair,
)
from cachestore.files.records import read_record
from cachestore.storage.catalog import Catalog, list_generations, list_names, newest_catalog, read_catalog
from cachestore.storage.commit import RECIPE_FORMAT, RECIPE_VERSION
from cachestore.storage.condemned import condemned_segments, read_condemned
from cachestore.storage.entry import begin_checksum, checksum_of
from cachestore.storage.index import Index, check, digest_table, is_no_index
from cachestore.storage.places import SegmentRef
from cachestore.storage.segment import SegmentContents, StoredEntry, read_contents
from cachestore.storage.snapshot import Snapshot, list_indexes, load_snapshot, open_layout, ref_of

Kind = Literal[
    "corrupt-segment",
    "corrupt-entry",
    "missing-entry",
    "wrong-value",
    "bad-index",
    "bad-catalog",
    "bad-plan",
    "bad-recipe",
    "bad-list",
    "unreadable",
    "stale-temp",
    "foreign-file",
]
HARMLESS: Final[frozenset[Kind]] = frozenset({"stale-temp", "foreign-file"})
STALE_SECONDS: Final = 3600.0
LOST_FORMAT: Final = "cachestore-lost"
LOST_VERSION: Final = 1

_OUR_NAMES: Final[Mapping[str, Callable[[str], object]]] = {
    "index": parse_index,
    "recipes": parse_recipe,
    "plans": parse_plan,
    "condemned": parse_condemned,
    "catalogs": decode_name,
    "listings": decode_name,
}
_OUR_NAMES_IN_PASSES: Final[Mapping[str, Callable[[str], object]]] = {
    "rounds": parse_round,
    "claims": parse_claim,
    "ledgers": parse_ledger,
    "attempts": parse_attempt,
}
_FREE_FOLDERS: Final = frozenset({"segments", "locks", "quarantine", "digests", "workers", "tmp"})


Level = Literal["full", "quick"]
"""How much is read: every byte, or names, sizes and headers."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is not as it should be."""

    kind: Kind
    path: str
    """Relative to the store."""
    message: str
    key: str | None = None
    sample: str | None = None
    """The id of a sample that needs the entry; the first one where there are several."""


@dataclass(frozen=True, slots=True, repr=False)
class VerifyReport:
    """What verify saw. `ok` is false for every kind of finding but stale temporary and foreign files."""

    ok: bool
    entries: int
    segments: int
    bytes: int
    seconds: float
    findings: tuple[Finding, ...]
    level: str = "full"
    recomputed: Mapping[str, Json] | None = None
    """What became of the entries that were made again, by count; None where none was to be."""
    remarks: tuple[str, ...] = ()
    """What is no damage, and slows the store down, in words."""

    __repr__ = in_short

    def as_json(self) -> dict[str, Json]:
        """The object that `cachestore verify --json` prints."""
        return asdict(self) | {"findings": [asdict(finding) for finding in self.findings], "remarks": list(self.remarks)}


LookFurther = Callable[[Layout], Iterable[Finding]]
"""Finds what this room cannot: it knows no plans and no passes."""


@dataclass(slots=True)
class _Looked:
    """What was learned about one segment."""

    digest: str
    size_bytes: int = 0
    entries: int = 0
    findings: list[Finding] = field(default_factory=list[Finding])
    good: frozenset[Key] = frozenset()
    is_unreadable: bool = False
    told: tuple[SegmentRef, bytes] | None = None
    """What its header says, as the index should say it: `ref_of` and `digest_table`. None where something is wrong with it."""


def verify(
    path: str | Path,
    level: Level = "full",
    *,
    subset: tuple[int, int] | None = None,
    on_finding: Callable[[Finding], None] | None = None,
    look_further: LookFurther | None = None,
) -> VerifyReport:
    """Check a store and change nothing.

    Args:
        path: the store.
        level: "full" reads every byte, "quick" names, sizes and headers.
        subset: (n, t) reads the bytes of the n-th of t parts of the segments, 1 <= n <= t; the rest is checked as by "quick".
        on_finding: called with each finding as it is made.
        look_further: finds what only plans and passes can tell of.

    Raises:
        StoreNotFound: there is no store there.
        FormatError: the store was written by a newer version.
        BadInput: there is no such part.
    """
    as_word("level", level, get_args(Level))
    _check_subset(subset)
    if on_finding is not None:
        check_function("on_finding", on_finding)
    started = time.monotonic()
    layout = open_layout(Layout.at(path))
    further = tuple(look_further(layout)) if look_further is not None else ()
    # Catalogs are published after the segments that they need, so they are read before the segments are listed.
    needed = dict(_needed(layout))
    snapshot = load_snapshot(layout)
    findings: list[Finding] = []
    with closing(snapshot):
        looked = list(_look_at_segments(layout, sorted(snapshot.listed), level, subset))
        for finding in (*further, *_all_findings(layout, snapshot, looked, needed)):
            findings.append(finding)
            if on_finding:
                on_finding(finding)
    check_for_reading(layout)  # what is listed of a folder that is gone finds nothing wrong
    return VerifyReport(
        ok=all(finding.kind in HARMLESS for finding in findings),
        entries=sum(one.entries for one in looked),
        segments=len(looked),
        bytes=sum(one.size_bytes for one in looked),
        seconds=round(time.monotonic() - started, 3),
        findings=tuple(findings),
        level=level if subset is None else f"{subset[0]}/{subset[1]}",
        remarks=tuple(_remarks(layout, snapshot)),
    )


def _remarks(layout: Layout, snapshot: Snapshot) -> Iterator[str]:
    """Of segments without any index, which are read as well as others; a damaged one is a finding."""
    if snapshot.listed and not list_indexes(layout):
        yield (
            f"there is no index, so whoever opens the store reads the headers of all its {len(snapshot.listed)} segments first: run"
            f" {layout.command('repair')}, unless a pass is running, which makes one when it ends"
        )


def _check_subset(subset: object) -> None:
    """Raise BadInput for what is no part of several."""
    if subset is None:
        return
    if not isinstance(subset, tuple | list) or len(cast("Sequence[Any]", subset)) != 2:
        refuse("subset", "(n, t): the n-th of t parts", cast("object", subset))
    part, parts = (as_whole("a number of subset", number) for number in cast("Sequence[Any]", subset))
    if not 1 <= part <= parts:
        raise BadInput(f"there is no part {part} of {parts}: parts are counted from 1")


def _good_keys(looked: Sequence[_Looked]) -> frozenset[Key]:
    good: set[Key] = set()
    for one in looked:
        good |= one.good
    return frozenset(good)


def _all_findings(
    layout: Layout, snapshot: Snapshot, looked: Sequence[_Looked], needed: Mapping[Key, tuple[str, str]]
) -> Iterator[Finding]:
    good = _good_keys(looked)
    for one in looked:
        for finding in one.findings:
            yield _with_sample(finding, needed)
    yield from _look_at_indexes(layout, snapshot, looked)
    yield from _look_at_recipes(layout)
    yield from _look_at_catalogs(layout)
    yield from _look_at_lists(layout)
    if not any(one.is_unreadable for one in looked):
        # What an unreadable segment holds is unknown, so nothing can be called missing.
        yield from _missing(layout, needed, good)
        yield from _lost(layout, good)
        yield from _vanished(layout, snapshot, needed)
    yield from _strangers(layout)


def _with_sample(finding: Finding, needed: Mapping[Key, tuple[str, str]]) -> Finding:
    if finding.key is None:
        return finding
    _where, sample = needed.get(Key.parse(finding.key), ("", None))
    return Finding(finding.kind, finding.path, finding.message, finding.key, sample)


def _look_at_segments(layout: Layout, digests: Sequence[str], level: str, subset: tuple[int, int] | None) -> Iterator[_Looked]:
    """Each segment, several at a time: reading and hashing leave the interpreter's lock."""

    def look(numbered: tuple[int, str]) -> _Looked:
        number, digest = numbered
        is_full = level == "full" and (subset is None or number % subset[1] == subset[0] - 1)
        return look_at_segment(layout, digest, every_byte=is_full)

    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as threads:
        yield from threads.map(look, enumerate(digests))


def look_at_segment(layout: Layout, digest: str, *, every_byte: bool) -> _Looked:
    """Check one segment. A mismatch is looked at again through a fresh open before it counts; an I/O error is `unreadable`."""
    first = _look_once(layout, digest, every_byte=every_byte)
    return _look_once(layout, digest, every_byte=every_byte) if first.findings else first


def _look_once(layout: Layout, digest: str, *, every_byte: bool) -> _Looked:
    path = layout.segment(digest)
    where = str(path.relative_to(layout.root))
    help_text = f"run {layout.command('repair')}"
    try:
        contents = read_contents(path)
        keys = frozenset(entry.key for entry in contents.entries)
        told = (ref_of(digest, contents), digest_table(contents.entries))
        if not every_byte:
            return _Looked(digest, contents.size_bytes, len(keys), [], keys, told=told)
        bad = _bad_entries(path, digest, contents)
    except FormatError as error:
        return _Looked(digest, 0, 0, [Finding("corrupt-segment", where, f"{error}; {help_text}")])
    except OSError as error:
        return _Looked(digest, 0, 0, [Finding("unreadable", where, f"{where}: {reason_of(error)}; nothing was moved")], is_unreadable=True)
    if bad is None:
        return _Looked(digest, contents.size_bytes, len(keys), [], keys, told=told)
    findings = [
        Finding("corrupt-entry", where, f"entry {entry.key} does not match its checksum in {where}; {help_text}", str(entry.key))
        for entry in bad
    ]
    findings = findings or [
        Finding("corrupt-segment", where, f"{where} does not match the digest in its name, though its entries are whole; {help_text}")
    ]
    return _Looked(digest, contents.size_bytes, len(keys), findings, keys - {entry.key for entry in bad})


def _bad_entries(path: Path, digest: str, contents: SegmentContents) -> list[StoredEntry] | None:
    """The damaged entries of a segment; None if the whole file is as published, empty if only bytes between entries changed."""
    whole = begin_digest()
    entries = _EntriesInPassing(contents.entries)
    with opened(path) as (descriptor, _status):
        for offset, block in read_blocks(descriptor):
            whole.update(block)
            entries.pass_by(offset, block)
    bad = entries.finish()
    return None if not bad and whole.hexdigest() == digest else bad


class _EntriesInPassing:
    """Checks each entry while the file goes by in blocks, so that its bytes are read once and hashed while the cache holds them."""

    def __init__(self, entries: Sequence[StoredEntry]) -> None:
        self._waiting = sorted(entries, key=lambda entry: (entry.offset, entry.ordinal), reverse=True)
        self._state: Checksum | None = None
        self._bad: list[StoredEntry] = []

    def pass_by(self, offset: int, block: memoryview) -> None:
        """Take in the bytes of a block that starts at `offset` of the file."""
        end = offset + len(block)
        while self._waiting and self._waiting[-1].offset < end:
            entry = self._waiting[-1]
            state = self._state or begin_checksum(entry.key, entry.specs)
            last = entry.offset + entry.size_bytes
            state.update(block[max(entry.offset, offset) - offset : min(last, end) - offset])
            if last > end:
                self._state = state
                return
            self._state = None
            self._close(self._waiting.pop(), state)

    def _close(self, entry: StoredEntry, state: Checksum) -> None:
        if state.digest() != entry.checksum:
            self._bad.append(entry)

    def finish(self) -> list[StoredEntry]:
        """The damaged entries, once the whole file went by; one whose bytes did not all come is damaged."""
        for entry in reversed(self._waiting):
            self._close(entry, begin_checksum(entry.key, entry.specs))
        return self._bad


def good_entries(path: Path, places: Sequence[StoredEntry]) -> list[tuple[StoredEntry, bytearray]]:
    """The undamaged entries of a segment with their bytes, read one by one, for salvage; none where it is no regular file.

    `places` may name several places of a key; the first good one is taken. Raises FileNotFoundError, ReadFailed.
    """
    saved: dict[Key, tuple[StoredEntry, bytearray]] = {}
    with suppress(FormatError), opened(path) as (descriptor, _status):
        for entry in places:
            if entry.key in saved:
                continue
            run = bytearray(entry.size_bytes)
            count = read_into(descriptor, memoryview(run), entry.offset)
            if count == len(run) and checksum_of(entry.key, entry.specs, [run]) == entry.checksum:
                saved[entry.key] = (entry, run)
    return list(saved.values())


def _look_at_indexes(layout: Layout, snapshot: Snapshot, looked: Sequence[_Looked]) -> Iterator[Finding]:
    """Each index by its digest; the one that readers look into also by what it says of the segments."""
    told = {one.digest: one.told for one in looked if one.told is not None}
    for name in list_indexes(layout):
        where = str(layout.index(name).relative_to(layout.root))
        try:
            verdict = check(layout, name)
        except FormatError as error:
            yield Finding("bad-index", where, str(error))
            continue
        except OSError as error:
            yield Finding("unreadable", where, f"{where}: {reason_of(error)}")
            continue
        try:
            with closing(Index(layout, verdict)) as index:
                is_in_use = snapshot.index is not None and snapshot.index.verdict.name == name
                yield from _disagreements(layout, index, told) if is_in_use else ()
        except (FormatError, OSError) as error:
            if isinstance(error, FormatError) and is_no_index(error):
                yield Finding("bad-index", where, str(error))
                continue
            message = f"{where} is whole, but cannot be opened ({error}); it is derived: move it away if that happens again"
            yield Finding("unreadable", where, message)


def _disagreements(layout: Layout, index: Index, told: Mapping[str, tuple[SegmentRef, bytes]]) -> Iterator[Finding]:
    """The segments, of those with which nothing is wrong, of which an index says something else: size, origin, or where an entry stands.

    No value is in danger, as each entry's checksum is bound to its key: reading one that another's place is given for is an error, though.
    """
    where = str(layout.index(index.verdict.name).relative_to(layout.root))
    try:
        digests, nothing = index.table_digests(), digest_table(())
    except FormatError as error:
        yield Finding("bad-index", where, str(error))
        return
    for number, ref in index.segments.items():
        said = (ref, digests.get(number, nothing))
        if told.get(ref.digest, said) != said:
            what = f"something else of segment {ref.digest} than the segment's own header"
            bad_index = Finding("bad-index", where, f"{where} says {what}; run {layout.command('repair')}")
            # Without its bytes nobody could tell which of the two is right.
            yield from look_at_segment(layout, ref.digest, every_byte=True).findings or [bad_index]


def _look_at_recipes(layout: Layout) -> Iterator[Finding]:
    for name in names_in(layout.recipes):
        fingerprint = parse_recipe(name)
        if fingerprint is None:
            continue
        where = f"recipes/{name}"
        try:
            found = Recipe.from_json(read_record(layout.recipe(fingerprint), RECIPE_FORMAT, RECIPE_VERSION)).fingerprint
        except (FormatError, KeyError, TypeError, ValueError) as error:
            yield Finding("bad-recipe", where, f"{where}: {error}")
            continue
        except OSError as error:
            yield Finding("unreadable", where, f"{where}: {reason_of(error)}")
            continue
        if found != fingerprint:
            yield Finding("bad-recipe", where, f"{where} holds the recipe {found}; run {layout.command('repair')}")


def _look_at_catalogs(layout: Layout) -> Iterator[Finding]:
    for name in list_names(layout):
        for generation in list_generations(layout, name):
            path = layout.catalog(name, generation)
            where = str(path.relative_to(layout.root))
            try:
                read_catalog(path, generation=generation)
            except FormatError as error:
                yield Finding("bad-catalog", where, str(error))
            except OSError as error:
                yield Finding("unreadable", where, f"{where}: {reason_of(error)}")


def _look_at_lists(layout: Layout) -> Iterator[Finding]:
    """Lists of condemned segments. A damaged one counts for nobody: what it names is looked at anew by the next `gc`."""
    for digest in filter(None, map(parse_condemned, names_in(layout.condemned))):
        where = f"condemned/{digest}.json"
        try:
            read_condemned(layout.condemned_list(digest))
        except FormatError as error:
            yield Finding("bad-list", where, str(error))
        except OSError as error:
            yield Finding("unreadable", where, f"{where}: {reason_of(error)}")


def needed_by(catalog: Catalog) -> Iterator[tuple[Key, str]]:
    """Each key that a catalog names, with the id of its sample."""
    for column in catalog.columns:
        for row in range(len(catalog)):
            for key in column.row_keys(row):
                if key is not None:
                    yield key, catalog.ids[row]


def _needed(layout: Layout) -> Iterator[tuple[Key, tuple[str, str]]]:
    """Keys of the newest catalog of each name -> (the catalog's path, a sample); the first sample of a key stays."""
    seen: set[Key] = set()
    for name in list_names(layout):
        catalog = newest_catalog(layout, name)
        if catalog is None:
            continue
        where = str(layout.catalog(name, catalog.generation).relative_to(layout.root))
        for key, sample in needed_by(catalog):
            if key not in seen:
                seen.add(key)
                yield key, (where, sample)


def wanted_keys(layout: Layout, snapshot: Snapshot) -> set[Key]:
    """Every key whose absence `verify` tells of: what the newest catalogs need, and what was lost, as far as that can be read."""
    wanted = {key for key, _where in _needed(layout)}
    for name in filter(parse_lost, names_in(layout.quarantine)):
        with suppress(FormatError, OSError):
            wanted.update(key for key, _sample in _not_forgotten(layout, read_lost(layout.quarantine / name)))
    return wanted.union(*vanished_keys(layout, snapshot).values())


def _missing(layout: Layout, needed: Mapping[Key, tuple[str, str]], good: frozenset[Key]) -> Iterator[Finding]:
    for key, (where, sample) in needed.items():
        if key not in good:
            message = f"entry {key}, which sample {sample!r} needs, has no valid copy; run {layout.command('repair --refill')}"
            yield Finding("missing-entry", where, message, str(key), sample)


Sample = tuple[str, str]
"""A data set's name, and the id of a sample of it."""


def read_lost(path: Path) -> dict[Key, Sample | None]:
    """The entries that repair could not save, as noted beside a quarantined segment, with a sample that needed each at that time.

    Raises FormatError, OSError.
    """
    try:
        body = read_record(path, LOST_FORMAT, LOST_VERSION)
        needed = {Key.parse(text): (str(name), str(sample)) for text, (name, sample) in body.get("needed", {}).items()}
        keys, is_at_home = {Key.parse(text): None for text in body["keys"]} | needed, parse_lost(path.name) == body["segment"]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FormatError(f"{path} is not a list of lost entries; run {to_repair(path)}") from error
    if not is_at_home:
        raise FormatError(f"{path} lists the lost entries of another segment; run {to_repair(path)}")
    return keys


def vanished_keys(layout: Layout, snapshot: Snapshot) -> dict[str, list[Key]]:
    """Values of a caller's own that the index shows in segments that are gone and were never condemned, by segment."""
    if snapshot.index is None or not snapshot.vanished:
        return {}
    condemned = condemned_segments(layout)
    gone = {snapshot.index.segments[number] for number in snapshot.vanished}
    lost = {ref.digest for ref in gone if ref.digest not in condemned and not ref.origin}
    found: dict[str, list[Key]] = {}
    for key, places in snapshot.index.items() if lost else ():
        for place in places:
            if place.segment.digest in lost and key not in snapshot:
                found.setdefault(place.segment.digest, []).append(key)
    return found


def _lost(layout: Layout, good: frozenset[Key]) -> Iterator[Finding]:
    for name in names_in(layout.quarantine):
        if parse_lost(name) is None:
            continue
        where = f"quarantine/{name}"
        try:
            keys = read_lost(layout.root / where)
        except FormatError as error:
            yield Finding("bad-list", where, str(error))
            continue
        except OSError as error:
            yield Finding("unreadable", where, f"{where}: {error.strerror or error}")
            continue
        for key, sample in _not_forgotten(layout, keys):
            if key not in good:
                yield _of_lost(layout, where, key, sample)


def _of_lost(layout: Layout, where: str, key: Key, sample: Sample | None) -> Finding:
    if sample is None:
        message = f"entry {key} was lost with a damaged segment and not made again; run `cachestore precompute` again, or put it again"
        return Finding("missing-entry", where, message, str(key))
    message = (
        f"entry {key} of sample {sample[1]!r} of {sample[0]!r} was lost and could not be made again: mend its source and run"
        f" {layout.command('repair --refill')}, or take the sample out of the source and run `cachestore precompute` again"
    )
    return Finding("missing-entry", where, message, str(key), sample[1])


def _not_forgotten(layout: Layout, keys: Mapping[Key, Sample | None]) -> Iterator[tuple[Key, Sample | None]]:
    """The lost entries that are still wanted: of a sample, as long as its data set lists it and something of it was not made.

    A sample that has left, or that was made anew of something else, needs the entry no more. Nor does one whose catalog names the
    entry again need a list to be told of.
    """
    yield from ((key, None) for key, sample in keys.items() if sample is None)
    for name in {sample[0] for sample in keys.values() if sample is not None}:
        catalog = newest_catalog(layout, name)
        rows = {sample: row for row, sample in enumerate(catalog.ids)} if catalog is not None else {}
        for key, sample in keys.items():
            if catalog is not None and sample is not None and sample[0] == name and sample[1] in rows:
                named = [each for column in catalog.columns for each in column.row_keys(rows[sample[1]])]
                if None in named and key not in named:
                    yield key, sample


def needed_samples(layout: Layout, among: Collection[Key]) -> dict[Key, Sample]:
    """Those of some keys that the newest catalogs need, each with the first sample that does. Of no keys nothing is read."""
    needed: dict[Key, Sample] = {}
    for name in list_names(layout) if among else ():
        catalog = newest_catalog(layout, name)
        for key, sample in needed_by(catalog) if catalog is not None else ():
            if key in among:
                needed.setdefault(key, (name, sample))
    return needed


def _vanished(layout: Layout, snapshot: Snapshot, needed: Container[Key]) -> Iterator[Finding]:
    for digest, keys in vanished_keys(layout, snapshot).items():
        where = str(layout.segment(digest).relative_to(layout.root))
        for key in keys:
            if key in needed:  # told already
                continue
            yield Finding("missing-entry", where, f"entry {key} went with {where}, which is gone; put it again", str(key))


def _strangers(layout: Layout) -> Iterator[Finding]:
    """Files that are not ours, and temporary files that nobody will finish. Nothing is ever removed here."""
    known = {MARKER, *_OUR_NAMES, *_FREE_FOLDERS}
    yield from (_no_folder(name) for name in (*_OUR_NAMES, *_FREE_FOLDERS) if _is_no_folder(layout.root / name))
    yield from (_foreign(name) for name in names_in(layout.root, is_root=True) if name not in known)
    for folder, parse in _OUR_NAMES.items():
        yield from (_foreign(f"{folder}/{name}") for name in names_in(layout.root / folder) if parse(name) is None)
    for name in list_names(layout):
        folder = layout.catalog_folder(name)
        yield from (
            _foreign(f"catalogs/{folder.name}/{file}") for file in names_in(folder) if parse_catalog(file) is parse_dropped(file) is None
        )
    for folder in names_in(layout.listings):
        files = names_in(layout.listings / folder) if decode_name(folder) is not None else []
        yield from (_foreign(f"listings/{folder}/{file}") for file in files if parse_listing(file) is parse_listed(file) is None)
    yield from _strange_segments(layout)
    yield from _strange_in_plans(layout)
    yield from (_foreign(f"workers/{name}") for name in names_in(layout.workers) if not (name.endswith(".lock") or parse_worker(name)))
    yield from _stale_temporaries(layout)


def _strange_segments(layout: Layout) -> Iterator[Finding]:
    for folder in names_in(layout.segments):
        path = layout.segments / folder
        if is_link(path):
            where = f"segments/{folder}"
            yield Finding("unreadable", where, f"{where!a} is a link, and what lies behind it is not read: put the folder in its place")
            continue
        status = look_at(path)
        if status is None or not stat.S_ISDIR(status.st_mode):
            yield _foreign(f"segments/{folder}")
        for name in names_in(layout.segments / folder):
            if (parse_segment(name) or "")[:2] != folder:
                yield _foreign(f"segments/{folder}/{name}")


def _strange_in_plans(layout: Layout) -> Iterator[Finding]:
    """Files in plans and passes that nobody of ours named so."""
    for plan in filter(None, map(parse_plan, names_in(layout.plans))):
        folder, where = layout.plan_folder(plan), f"plans/{plan}"
        for name in names_in(folder):
            number = parse_pass(name)
            if number is None:
                yield from [_foreign(f"{where}/{name}")] * (name != layout.plan(plan).name)
                continue
            of_pass = PassFolder(layout.pass_folder(plan, number))
            known = {of_pass.done.name, *_OUR_NAMES_IN_PASSES}
            yield from (_foreign(f"{where}/{name}/{file}") for file in names_in(of_pass.root) if file not in known)
            for inner, parse in _OUR_NAMES_IN_PASSES.items():
                files = names_in(of_pass.root / inner)
                yield from (_foreign(f"{where}/{name}/{inner}/{file}") for file in files if parse(file) is None)


def _stale_temporaries(layout: Layout) -> Iterator[Finding]:
    now = time.time()
    for name in names_in(layout.temporary):
        if not is_temporary(name):
            yield _foreign(f"tmp/{name}")
            continue
        try:
            age = now - (layout.temporary / name).lstat().st_mtime
        except OSError:
            continue
        if age > STALE_SECONDS:
            yield Finding("stale-temp", f"tmp/{name}", f"tmp/{name} was left {age / 3600:.0f} h ago by a process that died; it is harmless")


def _is_no_folder(path: Path) -> bool:
    status = look_at(path)
    return os.path.lexists(path) and (status is None or not stat.S_ISDIR(status.st_mode))


def _no_folder(name: str) -> Finding:
    return Finding("unreadable", name, f"{name} is no folder, so nothing can be read or written there: move it away; nothing was moved")


def _foreign(where: str) -> Finding:
    return Finding("foreign-file", where, f"{where!a} was not made by cachestore; it is left alone")
