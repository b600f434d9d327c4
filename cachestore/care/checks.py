"""The checks of `verify`. Each looks at one kind of file or fact, yields what is wrong with it, and changes nothing."""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Final

from cachestore.care.foreign import foreign_files
from cachestore.care.lines import lost_tables, read_known
from cachestore.care.losses import Needed, read_lost, still_wanted, vanished_keys
from cachestore.care.soundness import SegmentCheck, check_segment
from cachestore.core import system
from cachestore.core.errors import WRONG_FIELDS, BadInput, FormatError
from cachestore.core.keys import Key, Recipe
from cachestore.core.words import first_of, noun, plural
from cachestore.files.opening import names_in
from cachestore.files.paths import BlockName, Layout, damaged, parse_lost, parse_marked, parse_recipe
from cachestore.files.records import read_record
from cachestore.jobs.share.plan import is_published, read_plan
from cachestore.jobs.share.retention import ReportedCatalog, list_plans, reported_catalogs
from cachestore.store.format.catalog import HAVE_SOURCES, list_names, read_catalog
from cachestore.store.format.findings import DamagedEntry, Finding, Kind, finding_of, missing_keys, read_or_finding
from cachestore.store.format.index import Index, NoIndex, digest_table
from cachestore.store.format.index import check as check_index
from cachestore.store.format.line import list_line, path_of, read_entry
from cachestore.store.format.marked import read_marked
from cachestore.store.read.snapshot import Snapshot, list_indexes
from cachestore.store.read.unfinished import list_data_sets
from cachestore.store.write.commit import RECIPE_FORMAT, RECIPE_VERSION


@dataclass(slots=True)
class StoreToCheck:
    """A store while it is checked. Everything is from one moment: catalogs were read first, then the segments that they need."""

    layout: Layout
    needed: Needed
    snapshot: Snapshot
    segments: Sequence[SegmentCheck]
    findings: list[Finding] = field(default_factory=list[Finding])
    """What the checks before this one found."""
    good: frozenset[Key] = field(init=False)
    """Keys that a sound segment holds."""
    in_index: Mapping[str, list[Key]] = field(init=False)
    """By segment with a damaged header, the keys that it holds as far as the index knows."""

    def __post_init__(self) -> None:
        self.good = frozenset[Key]().union(*(one.good for one in self.segments))
        self.in_index = in_index = {one.digest: list[Key]() for one in self.segments if one.bad is None}
        for key, locations in self.snapshot.index.items() if in_index and self.snapshot.index is not None else ():
            for location in locations:
                if location.segment.digest in in_index:
                    in_index[location.segment.digest].append(key)

    def reported_keys(self) -> set[str | None]:
        """The keys of the entries that the findings so far name."""
        return {key for finding in self.findings for key in (finding.key, *(entry.key for entry in finding.entries))}

    def may_miss_entries(self) -> bool:
        """Whether an absent entry can be called missing: the entries of a segment that cannot be read are unknown."""
        return not any(segment.is_unreadable for segment in self.segments)


Check = Callable[[StoreToCheck], Iterable[Finding]]


def read_segments(layout: Layout, digests: Iterable[str], whole: AbstractSet[str]) -> list[SegmentCheck]:
    """Check each segment, several at a time: reading and hashing release the GIL. Every byte is read of those in `whole`."""

    def check_one(digest: str) -> SegmentCheck:
        return check_segment(layout, digest, every_byte=digest in whole)

    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as threads:
        return list(threads.map(check_one, digests))


def lost_catalogs(layout: Layout) -> list[ReportedCatalog]:
    """Return the catalogs that are missing although a pass names them as the newest of their data set, with the first such pass."""
    reported: dict[str, list[ReportedCatalog]] = {}
    for each in reported_catalogs(layout):
        reported.setdefault(each.name, []).append(each)
    lost: list[ReportedCatalog] = []
    for name, passes in sorted(reported.items()):
        last = max(passes, key=lambda each: (each.generation, each.ended))
        line = list_line(layout, name)
        if last.generation > max(*line.tables, line.dropped, 0):
            same = [each for each in passes if (each.generation, each.digest) == (last.generation, last.digest)]
            lost.append(min(same, key=lambda each: (each.ended, each.ref.number)))
    return lost


def check_published(store: StoreToCheck) -> Iterator[Finding]:
    """Find catalogs that are missing although a pass published them."""
    for reported in lost_catalogs(store.layout):
        where = store.layout.relative(store.layout.catalog(reported.name, reported.generation))
        what = f"{where} is missing, though a pass published it"
        yield Finding("bad-catalog", where, what, f"run {store.layout.command('repair')} to rebuild it")


def check_plans(store: StoreToCheck) -> Iterator[Finding]:
    """Find plans that cannot be read."""
    layout = store.layout
    for plan in list_plans(layout):
        where = layout.relative(layout.plan(plan))
        result = read_or_finding("bad-plan", where, lambda plan=plan: is_published(layout, plan) and read_plan(layout, plan, io="pread"))
        if isinstance(result, Finding):
            yield result


def check_segments(store: StoreToCheck) -> Iterator[Finding]:
    """Find damaged segments, and the entries that the damage hits."""
    yield from _segment_findings(store, [segment for segment in store.segments if segment.findings])


def _segment_findings(store: StoreToCheck, segments: Sequence[SegmentCheck]) -> Iterator[Finding]:
    """Yield the findings of segments with the entries that they hit, and with the command that helps."""
    repair, refill = store.layout.command("repair"), store.layout.command("repair --refill")
    hit = [store.in_index.get(segment.digest, ()) if segment.bad is None else segment.bad for segment in segments]
    needed = store.needed.among({key for keys in hit for key in keys})
    for segment, keys in zip(segments, hit, strict=True):
        others = [one.good for one in store.segments if one.digest != segment.digest] if keys else []
        entries = tuple(
            DamagedEntry(
                str(key),
                needed[key].sample if key in needed else None,
                has_copy=key in store.good and any(key in good for good in others),
            )
            for key in keys
        )
        if segment.bad is None:  # repair saves what the index knows of it, if it is whole
            advice = f"run {repair}, and then {refill} if entries are missing"
        elif lost := len(missing_keys([Finding("corrupt-segment", "", "", entries=entries)])):
            advice = f"run {refill}, as {plural(lost, 'needed entry of it has', 'needed entries of it have')} no other copy"
        else:
            advice = f"run {repair}"
        for finding in segment.findings:
            if finding.kind == "unreadable" or finding.is_newer:
                yield finding
            else:
                sample = entries[0].sample if finding.key is not None and entries else None
                yield replace(finding, advice=advice, sample=sample, entries=entries)


def check_indexes(store: StoreToCheck) -> Iterator[Finding]:
    """Compare each index with its digest, and the one in use with the segments too: size, origin, and where each entry lies.

    A wrong location puts no value in danger, as each checksum is bound to its key. But reading the entry is an error.
    """
    layout, in_use = store.layout, store.snapshot.index
    by_header = {one.digest: one.summary for one in store.segments if one.summary is not None}
    for name in list_indexes(layout):
        where = layout.relative(layout.index(name))
        verdict = read_or_finding("bad-index", where, partial(check_index, layout, name))
        if isinstance(verdict, Finding):
            yield verdict
            continue
        try:
            with closing(Index(layout, verdict)) as index:
                if in_use is None or in_use.verdict.name != name:
                    continue
                try:
                    digests, nothing = index.table_digests(), digest_table(())
                except FormatError as error:
                    yield finding_of("bad-index", where, error)
                    continue
                for number, ref in index.segments.items():
                    by_index = (ref, digests.get(number, nothing))
                    if by_header.get(ref.digest, by_index) != by_index:
                        what = f"{where} records a different content of segment {ref.digest} than the segment's own header"
                        bad_index = Finding("bad-index", where, what, f"run {layout.command('repair')}")
                        # Only the segment's bytes tell which of the two is right.
                        yield from list(_segment_findings(store, [check_segment(layout, ref.digest, every_byte=True)])) or [bad_index]
        except NoIndex as error:
            yield finding_of("bad-index", where, error)
        except (FormatError, OSError) as error:
            what = f"{where} is intact, but cannot be opened ({error})"
            yield Finding("unreadable", where, what, "if that happens again, move it away: it can be rebuilt")


def check_files(store: StoreToCheck) -> Iterator[Finding]:
    """Read each recipe, each catalog, and each list of segments marked for deletion.

    A damaged list has no effect: the next `gc` checks its segments again.
    """
    for kind, path, read in _files_of(store.layout):
        result = read_or_finding(kind, store.layout.relative(path), read)
        if isinstance(result, Finding):
            yield result


def _files_of(layout: Layout) -> Iterator[tuple[Kind, Path, Callable[[], object]]]:
    for fingerprint in filter(None, map(parse_recipe, names_in(layout.recipes))):
        yield "bad-recipe", layout.recipe(fingerprint), partial(_read_recipe, layout, fingerprint)
    for name in list_names(layout):
        line = list_line(layout, name)
        for generation in line.tables:
            path = layout.catalog(name, generation)
            yield "bad-catalog", path, partial(read_catalog, path, generation=generation)
        for number in (*line.entries, *line.blocks):
            yield "bad-changes", path_of(layout, name, number), partial(_read_changes, layout, name, number)
    for digest in filter(None, map(parse_marked, names_in(layout.marked))):
        path = layout.marked_list(digest)
        yield "bad-list", path, partial(read_marked, path)


def _read_changes(layout: Layout, name: str, number: int | BlockName) -> None:
    with suppress(FileNotFoundError):  # a newer table covers them, and they were removed: `check_lines` finds what is lost
        read_entry(layout, name, number)


def _read_recipe(layout: Layout, fingerprint: str) -> None:
    path = layout.recipe(fingerprint)
    where = layout.relative(path)
    try:
        recipe = Recipe.from_json(read_record(path, RECIPE_FORMAT, RECIPE_VERSION))
    except WRONG_FIELDS as error:
        raise damaged(f"{where}: {error}", path) from error
    if recipe.fingerprint != fingerprint:
        raise damaged(f"{where} holds the recipe {recipe.fingerprint}", path)


def check_lines(store: StoreToCheck) -> Iterator[Finding]:
    """Find data sets that have lost all their tables, or changes above the newest one. `check_files` finds damaged ones."""
    layout = store.layout
    for name in list_data_sets(layout):
        line, known = list_line(layout, name), None
        with suppress(FormatError, OSError):  # other findings say so
            known = read_known(layout, name)
        where = layout.relative(layout.catalog(name, line.highest))
        if known is not None and known.is_beyond_repair:
            what = f"all tables of the data set {name!r} are missing or damaged, and so are changes: nearly all rows are lost"
            advice = f"put a table back from a copy of the store, or run {layout.command(f'drop {system.quoted(name)}')}"
            yield Finding("bad-catalog", where, what, f"{advice}; until then its values stay")
            continue
        if known is not None and not line.tables:
            what = f"all tables of the data set {name!r} are missing, but its changes are there"
            yield Finding("bad-catalog", where, what, f"run {layout.command('repair')} to make one from them")
        for number in known.lost if known is not None else ():
            if number not in line.entries:
                where = layout.relative(layout.entry(name, number))
                what = f"{where} is missing, though later changes are there: what this flush set and removed is lost"
                yield Finding("missing-changes", where, what, f"run {layout.command('repair')}, which keeps the other rows")


def slow_lines(layout: Layout) -> Iterator[str]:
    """Yield a remark on each data set that has lost a table which its changes can give again."""
    for name in list_data_sets(layout):
        with suppress(FormatError, OSError):  # findings say so
            if lost := lost_tables(layout, name):
                gone = f"{noun(len(lost), 'generation', 'generations')} {first_of(map(str, lost))} of the data set {name!r}"
                missing = f"{gone} {noun(len(lost), 'is', 'are')} missing; an older one and later changes give the same rows"
                yield f"{missing}, but more slowly: run {layout.command('repair')}"


def ownerless(store: StoreToCheck) -> Iterator[str]:
    """Yield a remark on each data set of which values are there and nothing else."""
    values = Counter[str]()
    for segment in store.segments:
        values.update(segment.owners)
    for name, count in sorted(values.items()):
        with suppress(BadInput):  # no data set can have this name
            line = list_line(store.layout, name)
            if line.is_there or line.dropped:
                continue
            what = f"{plural(count, 'value')} of the data set {name!r} {noun(count, 'is', 'are')} here, and nothing else of it"
            why = "its folder in catalogs/ was lost, or only other data sets were pulled"
            yield f"{what}: {why}. Put the folder back, or let gc remove them: run {store.layout.command(f'drop {system.quoted(name)}')}"


def check_needed(store: StoreToCheck) -> Iterator[Finding]:
    """Find entries that the newest catalogs need and that have no sound copy."""
    if not store.may_miss_entries():
        return
    reported = store.reported_keys()
    refill = f"run {store.layout.command('repair --refill')}"
    for key, need in store.needed.without(store.good).items():
        if str(key) not in reported:
            what = f"entry {key}, which sample {need.sample!r} needs, has no valid copy"
            row = f"put it again, or set or remove this row of {need.name!r}"
            again = f"save or remove {need.sample!r} of {need.name!r}" if need.made == "files" else row
            again += ": cachestore cannot know how to make it"
            advice = refill if need.made in HAVE_SOURCES else again
            yield Finding("missing-entry", need.where, what, advice, str(key), need.sample)


def check_lost(store: StoreToCheck) -> Iterator[Finding]:
    """Find entries that `repair` listed as lost and that are still wanted, and lists that cannot be read."""
    for name in filter(parse_lost, names_in(store.layout.quarantine) if store.may_miss_entries() else ()):
        where = f"quarantine/{name}"
        keys = read_or_finding("bad-list", where, partial(read_lost, store.layout.root / where))
        if isinstance(keys, Finding):
            yield keys
            continue
        for key, sample in still_wanted(store.layout, keys):
            if key in store.good:
                continue
            if sample is None:
                what = f"entry {key} was lost with a damaged segment and not made again"
                yield Finding("missing-entry", where, what, "run `cachestore precompute` again, or write it again", str(key))
                continue
            what = f"entry {key} of sample {sample[1]!r} of {sample[0]!r} was lost and could not be made again: fix its source"
            what += f" and run {store.layout.command('repair --refill')}"
            advice = "or take the sample out of the source and run `cachestore precompute` again"
            yield Finding("missing-entry", where, what, advice, str(key), sample[1])


def check_vanished(store: StoreToCheck) -> Iterator[Finding]:
    """Find a writer's values that were lost with their segment. `check_needed` finds those that a catalog needs."""
    vanished = vanished_keys(store.layout, store.snapshot) if store.may_miss_entries() else {}
    needed = store.needed.among({key for keys in vanished.values() for key in keys})
    for digest, keys in vanished.items():
        where = store.layout.relative(store.layout.segment(digest))
        for key in sorted({*keys} - needed.keys()):
            yield Finding("missing-entry", where, f"entry {key} was lost with {where}, which is missing", "write it again", str(key))


def check_foreign(store: StoreToCheck) -> Iterator[Finding]:
    """Find files that cachestore did not make, and temporary files of dead processes."""
    return foreign_files(store.layout)


CHECKS: Final[tuple[Check, ...]] = (
    check_published,
    check_plans,
    check_segments,
    check_indexes,
    check_files,
    check_lines,
    check_needed,
    check_lost,
    check_vanished,
    check_foreign,
)
"""In this order, as later checks leave out what earlier ones have reported."""
