"""Verify: find damage and change nothing. A mismatch is damage only if a second opening shows it again."""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal, cast, get_args

from cachestore.core.arguments import as_whole, as_word, check_function, refuse
from cachestore.core.errors import BadInput, FormatError
from cachestore.core.keys import Json, Key, Recipe
from cachestore.core.words import in_short, plural
from cachestore.files.marker import check_for_reading
from cachestore.files.opening import names_in
from cachestore.files.paths import Layout, parse_marked, parse_recipe
from cachestore.files.records import read_record
from cachestore.storage.catalog import list_generations, list_names, newest_catalog, no_data_set, read_catalog
from cachestore.storage.commit import RECIPE_FORMAT, RECIPE_VERSION
from cachestore.storage.findings import HARMLESS, DamagedEntry, Finding, Kind, finding_of, missing_keys, tried
from cachestore.storage.index import Index, check, digest_table, is_no_index
from cachestore.storage.locations import SegmentRef
from cachestore.storage.losses import lost, missing, needed_by, needed_entries, vanished
from cachestore.storage.marked import read_marked
from cachestore.storage.snapshot import Snapshot, list_indexes, load_snapshot, open_layout
from cachestore.storage.soundness import SegmentCheck, check_segment
from cachestore.storage.strangers import strange_names

Level = Literal["full", "quick"]
"""How much is read: every byte, or names, sizes and headers."""


@dataclass(frozen=True, slots=True, repr=False)
class VerifyReport:
    """The result of `verify`. `ok` is false for any finding except stale temporary files and foreign files."""

    ok: bool
    entries: int
    segments: int
    bytes: int
    seconds: float
    findings: tuple[Finding, ...]
    level: str = "full"
    recomputed: Mapping[str, Json] | None = None
    """Counts of the entries that were encoded again; None if none were to be."""
    remarks: tuple[str, ...] = ()
    """Sentences on what is not damage, but makes the store slower."""

    __repr__ = in_short

    def as_json(self) -> dict[str, Json]:
        """The object that `cachestore verify --json` prints."""
        return asdict(self) | {"findings": [asdict(finding) for finding in self.findings], "remarks": list(self.remarks)}


LookFurther = Callable[[Layout], Iterable[Finding]]
"""Finds problems in plans and passes, which this package does not know."""


def verify(
    path: str | Path,
    level: Level = "full",
    *,
    subset: tuple[int, int] | None = None,
    on_finding: Callable[[Finding], None] | None = None,
    look_further: LookFurther | None = None,
    name: str | None = None,
) -> VerifyReport:
    """Check a store and change nothing.

    Args:
        path: the store.
        level: "quick" reads names, sizes and headers of segments, the index, and catalogs whole; "full" also every byte of the segments.
        subset: (n, t) reads the bytes of the n-th of t parts of the segments, 1 <= n <= t; the rest is checked as with "quick".
        on_finding: called with each finding as soon as it is made.
        look_further: finds problems in plans and passes.
        name: reads only the bytes of the segments that hold a value of this data set's newest generation; the rest is checked as with
            "quick".

    Raises:
        StoreNotFound: there is no store.
        FormatError: the store was written by a newer version.
        BadInput: an argument is wrong, such as a part that does not exist.
    """
    as_word("level", level, get_args(Level))
    _check_subset(subset)
    if on_finding is not None:
        check_function("on_finding", on_finding)
    started = time.monotonic()
    layout = open_layout(Layout.at(path))
    further = tuple(look_further(layout)) if look_further is not None else ()
    # Catalogs are published after the segments that they need, so they are read before the segments are listed.
    needed = needed_entries(layout)
    named = None if name is None else _keys_of(layout, name)
    snapshot = load_snapshot(layout)
    findings: list[Finding] = []
    with closing(snapshot):
        among = None if named is None else {one.segment.digest for locations in snapshot.find(named) for one in locations}
        checks = list(_check_segments(layout, sorted(snapshot.listed), level, subset, among))
        for finding in (*further, *_all_findings(layout, snapshot, checks, needed)):
            findings.append(finding)
            if on_finding:
                on_finding(finding)
    check_for_reading(layout)  # a folder that is gone lists as empty, and nothing seems wrong
    return VerifyReport(
        ok=all(finding.kind in HARMLESS for finding in findings),
        entries=sum(one.entries for one in checks),
        segments=len(checks),
        bytes=sum(one.size_bytes for one in checks),
        seconds=round(time.monotonic() - started, 3),
        findings=tuple(findings),
        level=(level if subset is None else f"{subset[0]}/{subset[1]}") + ("" if name is None else f", of the data set {name!r}"),
        remarks=tuple(_remarks(layout, snapshot)),
    )


def _keys_of(layout: Layout, name: str) -> list[Key]:
    """The keys of a data set's newest generation. Raises BadInput if there is no such data set."""
    catalog = newest_catalog(layout, name)
    if catalog is None and not list_generations(layout, name):
        raise no_data_set(layout, name, [one for one in list_names(layout) if list_generations(layout, one)])
    return [] if catalog is None else [key for key, _sample in needed_by(catalog)]


def _remarks(layout: Layout, snapshot: Snapshot) -> Iterator[str]:
    """Remark that there is no index. The segments can be read without one; a damaged index is a finding."""
    if snapshot.listed and not list_indexes(layout):
        yield (
            f"there is no index, so opening the store reads the headers of its {plural(len(snapshot.listed), 'segment')}."
            f" A pass writes an index when it ends; if none is running, run {layout.command('repair')}"
        )


def _check_subset(subset: object) -> None:
    if subset is None:
        return
    if not isinstance(subset, tuple | list) or len(cast("Sequence[Any]", subset)) != 2:
        refuse("subset", "(n, t): the n-th of t parts", cast("object", subset))
    part, parts = (as_whole("a number of subset", number) for number in cast("Sequence[Any]", subset))
    if not 1 <= part <= parts:
        raise BadInput(f"there is no part {part} of {parts}: parts are counted from 1")


def _all_findings(
    layout: Layout, snapshot: Snapshot, checks: Sequence[SegmentCheck], needed: Mapping[Key, tuple[str, str]]
) -> Iterator[Finding]:
    damage = _Damage(layout, snapshot, checks, needed)
    reported = set[str]()
    for finding in chain.from_iterable(map(damage.described, checks)):
        reported.update(entry.key for entry in finding.entries)
        yield finding
    yield from _check_indexes(layout, snapshot, checks, damage.described)
    for kind, path, check_one in _file_checks(layout):
        found = tried(kind, path.relative_to(layout.root).as_posix(), check_one)
        if isinstance(found, Finding):
            yield found
    if not any(one.is_unreadable for one in checks):
        # The entries of an unreadable segment are unknown, so nothing can be called missing.
        yield from missing(layout, {key: sample for key, sample in needed.items() if str(key) not in reported}, damage.good)
        yield from lost(layout, damage.good)
        yield from vanished(layout, snapshot, needed)
    yield from strange_names(layout)


def _check_segments(
    layout: Layout, digests: Sequence[str], level: str, subset: tuple[int, int] | None, among: AbstractSet[str] | None
) -> Iterator[SegmentCheck]:
    """Check each segment, several at a time: reading and hashing release the GIL. Bytes are read of those in `among`, if it is given."""

    def check_one(numbered: tuple[int, str]) -> SegmentCheck:
        number, digest = numbered
        is_full = level == "full" and (subset is None or number % subset[1] == subset[0] - 1) and (among is None or digest in among)
        return check_segment(layout, digest, every_byte=is_full)

    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as threads:
        yield from threads.map(check_one, enumerate(digests))


Describe = Callable[[SegmentCheck], Iterable[Finding]]
"""Returns the findings of a segment's check with the entries that they hit."""


class _Damage:
    """Says which entries the damage of a segment hits, which samples need them, and whether another segment has them."""

    def __init__(self, layout: Layout, snapshot: Snapshot, checks: Sequence[SegmentCheck], needed: Mapping[Key, tuple[str, str]]) -> None:
        self.good = frozenset[Key]().union(*(one.good for one in checks))
        """Keys that a sound segment holds."""
        self._layout, self._checks, self._needed = layout, checks, needed
        unknown = {one.digest: list[Key]() for one in checks if one.bad is None}
        for key, locations in snapshot.index.items() if unknown and snapshot.index is not None else ():
            for location in locations:
                if location.segment.digest in unknown:
                    unknown[location.segment.digest].append(key)
        self._by_index = unknown

    def described(self, check: SegmentCheck) -> Iterator[Finding]:
        """Yield a segment's findings with the entries that they hit."""
        keys = self._by_index.get(check.digest, ()) if check.bad is None else check.bad
        entries = tuple(DamagedEntry(str(key), self._sample(key), self._has_copy(key, check.digest)) for key in keys)
        lost = len(missing_keys([Finding("corrupt-segment", "", "", entries=entries)]))
        advice = f"run {self._layout.command('repair')}"
        if check.bad is None:  # repair saves what the index knows of it, if it is whole
            advice += f", and then {self._layout.command('repair --refill')} if entries are missing"
        elif lost:
            needed = plural(lost, "needed entry of it has", "needed entries of it have")
            advice = f"run {self._layout.command('repair --refill')}, as {needed} no other copy"
        for finding in check.findings:
            if finding.kind == "unreadable" or finding.is_newer:
                yield finding
                continue
            sample = entries[0].sample if finding.key is not None and entries else None
            yield replace(finding, message=f"{finding.message}; {advice}", sample=sample, entries=entries)

    def _sample(self, key: Key) -> str | None:
        return self._needed[key][1] if key in self._needed else None

    def _has_copy(self, key: Key, digest: str) -> bool:
        return key in self.good and any(key in one.good for one in self._checks if one.digest != digest)


def _check_indexes(layout: Layout, snapshot: Snapshot, checks: Sequence[SegmentCheck], describe: Describe) -> Iterator[Finding]:
    """Compare each index with its digest, and the one in use with the segments too."""
    summaries = {one.digest: one.summary for one in checks if one.summary is not None}
    for name in list_indexes(layout):
        where = layout.index(name).relative_to(layout.root).as_posix()
        verdict = tried("bad-index", where, partial(check, layout, name))
        if isinstance(verdict, Finding):
            yield verdict
            continue
        try:
            with closing(Index(layout, verdict)) as index:
                is_in_use = snapshot.index is not None and snapshot.index.verdict.name == name
                yield from _disagreements(layout, index, summaries, describe) if is_in_use else ()
        except (FormatError, OSError) as error:
            if isinstance(error, FormatError) and is_no_index(error):
                yield finding_of("bad-index", where, error)
                continue
            message = f"{where} is intact, but cannot be opened ({error}); if that happens again, move it away: it can be rebuilt"
            yield Finding("unreadable", where, message)


def _disagreements(
    layout: Layout, index: Index, summaries: Mapping[str, tuple[SegmentRef, bytes]], describe: Describe
) -> Iterator[Finding]:
    """Findings for intact segments of which the index says something else: size, origin, or where an entry lies.

    No value is in danger, as each checksum is bound to its key. But reading an entry at a wrong location is an error.
    """
    where = layout.index(index.verdict.name).relative_to(layout.root).as_posix()
    try:
        digests, nothing = index.table_digests(), digest_table(())
    except FormatError as error:
        yield finding_of("bad-index", where, error)
        return
    for number, ref in index.segments.items():
        recorded = (ref, digests.get(number, nothing))
        if summaries.get(ref.digest, recorded) != recorded:
            what = f"a different content of segment {ref.digest} than the segment's own header"
            bad_index = Finding("bad-index", where, f"{where} records {what}; run {layout.command('repair')}")
            # Only its bytes tell which of the two is right.
            yield from tuple(describe(check_segment(layout, ref.digest, every_byte=True))) or [bad_index]


def _file_checks(layout: Layout) -> Iterator[tuple[Kind, Path, Callable[[], object]]]:
    """(kind of finding, path, check) for each recipe, catalog and list of segments marked for deletion.

    A damaged list has no effect: the next `gc` looks at its segments again.
    """
    for fingerprint in filter(None, map(parse_recipe, names_in(layout.recipes))):
        yield "bad-recipe", layout.recipe(fingerprint), partial(_check_recipe, layout, fingerprint)
    for name in list_names(layout):
        for generation in list_generations(layout, name):
            path = layout.catalog(name, generation)
            yield "bad-catalog", path, partial(read_catalog, path, generation=generation)
    for digest in filter(None, map(parse_marked, names_in(layout.marked))):
        path = layout.marked_list(digest)
        yield "bad-list", path, partial(read_marked, path)


def _check_recipe(layout: Layout, fingerprint: str) -> None:
    where = f"recipes/{layout.recipe(fingerprint).name}"
    try:
        found = Recipe.from_json(read_record(layout.recipe(fingerprint), RECIPE_FORMAT, RECIPE_VERSION)).fingerprint
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError(f"{where}: {error}") from error
    if found != fingerprint:
        raise FormatError(f"{where} holds the recipe {found}; run {layout.command('repair')}")
