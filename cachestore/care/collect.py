"""Collect garbage, compact a store, and drop a data set. This module finds out what is needed; `gc` and `compact` change the files.

The order of reading makes this safe: first the segments, then which passes have ended, then the keys in catalogs. A pass publishes its
catalog before it ends, so the catalogs name everything that an ended pass made.
"""

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path

from cachestore.care.checks import lost_catalogs
from cachestore.care.compact import Compacted, choose_groups, compact_segments
from cachestore.care.gc import (
    GRACE_SECONDS,
    due_lists,
    mark,
    old_generations,
    old_indexes,
    plan_removal,
    remove_files,
    remove_marked,
    spent_lists,
    stale_temporaries,
)
from cachestore.care.lines import MANY_ENTRIES, count_below_newest, covered_entries, files_of_line, keys_of_entries, tidy_line
from cachestore.care.losses import needed_by
from cachestore.care.usage import Needs, Owners, Usage, survey, values_by_owner
from cachestore.core import system
from cachestore.core.arguments import as_path, as_whole
from cachestore.core.errors import BadInput, FormatError
from cachestore.core.inputs import caption_key
from cachestore.core.keys import Json, Key
from cachestore.core.samples import CAPTION
from cachestore.core.spelling import option
from cachestore.core.words import in_short, plural
from cachestore.files.marker import check_for_reading, noticing_its_end
from cachestore.files.opening import reason_of
from cachestore.files.paths import Layout, as_stored
from cachestore.files.removal import remove_file
from cachestore.jobs.share.passes import PassRef
from cachestore.jobs.share.retention import (
    at_work,
    forgotten_workers,
    generations_of_passes,
    keys_of_passes,
    keys_of_plans,
    open_passes,
    plans_of,
    remove_plan,
    spent_plans,
)
from cachestore.store.format.catalog import list_generations, list_names, no_data_set, read_catalog
from cachestore.store.format.line import list_line
from cachestore.store.format.marked import MarkedList, list_marked, marked_segments
from cachestore.store.format.segment import SegmentContents, read_contents
from cachestore.store.read.snapshot import Snapshot, list_segments, load_snapshot, open_layout
from cachestore.store.read.unfinished import list_data_sets, not_there
from cachestore.store.write.catalog_writer import mark_dropped
from cachestore.store.write.commit import commit
from cachestore.store.write.folding import rows_above
from cachestore.store.write.link import end_line
from cachestore.store.write.listing_numbers import spent_numbers
from cachestore.store.write.made import has_sources


@dataclass(frozen=True, slots=True)
class Amount:
    """Numbers of segments, entries and bytes."""

    segments: int = 0
    entries: int = 0
    bytes: int = 0

    def __add__(self, other: "Amount") -> "Amount":
        return Amount(self.segments + other.segments, self.entries + other.entries, self.bytes + other.bytes)

    def __sub__(self, other: "Amount") -> "Amount":
        """Return the difference; nothing is below zero."""
        pairs = ((self.segments, other.segments), (self.entries, other.entries), (self.bytes, other.bytes))
        return Amount(*(max(0, one - another) for one, another in pairs))


@dataclass(frozen=True, slots=True, repr=False)
class _Report:
    __repr__ = in_short

    def as_json(self) -> dict[str, Json]:
        """Return the object that the command prints with `--json`."""
        return asdict(self)


@dataclass(frozen=True, slots=True, repr=False)
class GcReport(_Report):
    """What `gc` did, or would do."""

    applied: bool
    condemned: Amount
    """Newly marked for deletion. Planning ignores them from now on; they can be read until a later run removes them."""
    waiting: Amount
    """Marked for deletion earlier. They stay because their grace is not over, or for a reason in `remarks`."""
    removed: Amount
    copied: int
    """Entries of removed segments that are needed after all. They were copied first."""
    removable_from: float | None
    """From when on all `waiting` segments can be removed, in seconds since the epoch; None if time alone does not hold them back."""
    partly: Amount
    """Segments with some entries that are not needed, and those entries: `compact` removes them."""
    generations: Mapping[str, int]
    """How many generations of each data set stay."""
    held: Amount
    """Segments that only older generations need: with `keep=1` they can go."""
    held_partly: Amount
    """Segments with some entries that only older generations need, and those entries: with `keep=1`, `compact` can leave them out."""
    held_catalog_bytes: int
    """The size of the older generations' catalogs."""
    files: tuple[str, ...]
    """Other removed files, relative to the store: old temporary files, generations and indexes, and heartbeats of workers long gone."""
    plans: tuple[str, ...]
    freed_bytes: int
    remarks: tuple[str, ...] = ()
    young: int = 0
    """Entries that no row names, which stay for a day after they were written: a session may still name them."""


@dataclass(frozen=True, slots=True, repr=False)
class CompactReport(_Report):
    """What `compact` did, or would do."""

    applied: bool
    segments: int
    """Old segments whose entries were copied. They are marked for deletion; a later `gc --apply` removes them."""
    written: int
    """New segments."""
    entries: int
    """Copied entries."""
    loose_bytes: int
    """Bytes of entries that are not needed and were not copied."""
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, repr=False)
class DropReport(_Report):
    """What `drop` removed, or would remove."""

    applied: bool
    name: str
    generations: tuple[int, ...]
    plans: tuple[str, ...]
    freed_bytes: int
    changes: int = 0
    """How many files of changes that sessions had published."""


@dataclass(frozen=True, slots=True)
class _Found:
    needs: Needs
    kept: dict[str, list[int]]
    """The generations of each data set that stay."""
    old: dict[str, list[int]]
    """The generations of each data set that are removed."""
    unfinished: frozenset[PassRef]
    """Passes that may still be finished."""


def collect(
    path: str | Path,
    *,
    apply: bool = False,
    grace_seconds: float = GRACE_SECONDS,
    keep: int | None = None,
    name: str | None = None,
) -> GcReport:
    """Remove what nothing needs, in two steps: mark it for deletion now, remove it in a later run (see `storage.gc`).

    Args:
        path: the store.
        apply: do it; otherwise only report what would be done.
        grace_seconds: how long a marked segment can still be read.
        keep: how many of the newest generations of each data set to keep, at least 1. By default the newest three, and all that are less
            than 30 days old.
        name: with `keep`, the data set whose generations it counts; those of others are kept as by default.

    Raises:
        StoreNotFound: there is no store at this path.
        BadInput: `keep` is less than 1; there is no data set of this name, or it is given without `keep`.
        FormatError: the store was written by a newer version, or a catalog or plan is damaged, so what is needed cannot be found out.
        WriteFailed: the disk refused to write. Nothing that is needed was removed.
    """
    if keep is not None:
        as_whole("keep", keep, least=1)
    layout = open_layout(Layout.at(as_path("path", path)))
    if name is not None and keep is None:
        needs = f"{option('name')} needs {option('keep')}"
        raise BadInput(f"{needs}: what nothing needs belongs to the store, not to a data set", option="name")
    if name is not None and not list_generations(layout, name):
        raise not_there(layout, name, list_data_sets(layout))
    now = time.time()
    with noticing_its_end(layout):
        counts = {} if keep is None else dict.fromkeys(list_names(layout) if name is None else [name], keep)
        lists = due_lists(layout, now=now, grace_seconds=grace_seconds)
        if apply:
            for each in list_names(layout):
                # Before it is read what is needed: a flush that looked at the marks before this has to look again.
                tidy_line(layout, each, with_fence=bool(lists))
        with closing(load_snapshot(layout, for_planning=True)) as snapshot:
            found = _find_needs(layout, now, counts)
            lists, remarks = _not_held_back(layout, lists, now)
            removals, stays = plan_removal(layout, lists, found.needs.hold)
            waiting = _waiting(layout, without=frozenset(removal.digest for removal in removals))
            covered = {each: covered_entries(layout, each, kept, now=now) for each, kept in found.kept.items()}
            files = [
                *stale_temporaries(layout, now=now),
                *(layout.catalog(each, generation) for each, generations in found.old.items() for generation in generations),
                *chain.from_iterable(covered.values()),
                *old_indexes(layout, now=now),
                *forgotten_workers(layout, now=now),
                *spent_lists(layout, lists),
                *spent_numbers(layout, now=now),
            ]
            plans = spent_plans(layout, found.kept, now=now)
            usages = survey(layout, snapshot, found.needs)
            idle, partly = _amounts(usages)
            held, held_partly = _held(layout, snapshot, found, (idle, partly), now)
        freed = sum(removal.contents.size_bytes for removal in removals) + sum(map(_size_of, files))
        if apply:
            commit(layout).close()  # before the lists are removed that explain why segments are missing
            freed = remove_marked(layout, removals) + remove_files(layout, files) + sum(remove_plan(layout, plan) for plan in plans)
            mark(layout, [usage.ref.digest for usage in usages if usage.is_idle])
        to_make = {each for each in found.kept if not apply and rows_above(layout, each)}  # the tables that `--apply` makes
        there = list_segments(layout)
        ends = [each.written + grace_seconds for each in list_marked(layout) if each.segments & there]
        check_for_reading(layout)
    if found.unfinished:
        unfinished = plural(len(found.unfinished), "unfinished run")
        stays.append(f"the values of {unfinished} stay: run the same `cachestore precompute` again to finish")
    stays += _young_in_words(usages)
    for each, going in covered.items():
        if (later := count_below_newest(layout, each) - len(going) * (not apply)) >= MANY_ENTRIES:
            stays.append(f"{later} files of changes of {each!r} stay: they go when two generations cover them, a day later")
    for each in found.needs.owners.lost:
        release = layout.command(f"drop {system.quoted(each)}")
        stays.append(f"values of the data set {each!r} stay, though nothing else of it is here: put its folder back, or run {release}")
    return GcReport(
        applied=apply,
        condemned=idle,
        waiting=waiting,
        removable_from=max((end for end in ends if end > now), default=None),
        removed=_amount_of(removal.contents for removal in removals),
        copied=sum(len(removal.to_copy) for removal in removals),
        partly=partly,
        generations={each: len(numbers) + (each in to_make) for each, numbers in sorted(found.kept.items()) if numbers},
        held=held,
        held_partly=held_partly,
        held_catalog_bytes=sum(_size_of(layout.catalog(each, n)) for each, kept in found.kept.items() for n in kept[:-1]),
        files=tuple(map(layout.relative, files)),
        plans=tuple(plans),
        freed_bytes=freed,
        remarks=(*remarks, *stays),
        young=sum(usage.young for usage in usages),
    )


def _amounts(usages: Iterable[Usage]) -> tuple[Amount, Amount]:
    """Return the segments in which nothing is needed, and those in which only some entries are not, with these."""
    idle, partly = Amount(), Amount()
    for usage in usages:
        if usage.is_idle:
            idle += Amount(1, len(usage.loose), usage.ref.size_bytes)
        elif usage.loose:
            partly += Amount(1, len(usage.loose), usage.loose_bytes)
    return idle, partly


def _held(layout: Layout, snapshot: Snapshot, found: _Found, now_free: tuple[Amount, Amount], now: float) -> tuple[Amount, Amount]:
    """Return what only older generations need: what `keep=1` frees in addition to `now_free`."""
    if all(len(generations) <= 1 for generations in found.kept.values()):
        return Amount(), Amount()
    idle, partly = _amounts(survey(layout, snapshot, _needs_now(layout, now, dict.fromkeys(found.kept, 1)).needs))
    return idle - now_free[0], partly - now_free[1]


def compact(path: str | Path, *, apply: bool = True) -> CompactReport:
    """Copy the needed entries of small segments, and of those with much that is not needed, into few new ones (see `storage.compact`).

    The old segments are marked for deletion. Without `apply` this only reports what would be done. Raises as `collect`, and WriteFailed
    if there is no room for the copies.
    """
    layout = open_layout(Layout.at(as_path("path", path)))
    with noticing_its_end(layout):
        with closing(load_snapshot(layout, for_planning=True)) as snapshot:
            needs = _find_needs(layout, time.time()).needs
            surveyed = survey(layout, snapshot, needs)
            groups = choose_groups(surveyed, needs)
        for name in list_names(layout) if apply and groups else ():
            tidy_line(layout, name, with_fence=False)
        usages = [usage for group in groups for usage in group.usages]
        loose = sum(usage.loose_bytes for usage in usages)
        entries = sum(usage.ref.entries - len(usage.loose) for usage in usages)
        done = compact_segments(layout, groups, needs) if apply else Compacted(len(usages), 0, entries, ())
        check_for_reading(layout)
    return CompactReport(apply, done.segments, done.written, done.entries, loose, (*done.remarks, *_young_in_words(surveyed)))


def drop(path: str | Path, name: str, *, apply: bool = True) -> DropReport:
    """Remove the catalogs, changes and plans of a data set. `gc` removes its values later, unless something else needs them.

    Of a data set whose folder was lost only values are left, which this lets go. An interrupted drop leaves files that nobody reads, or the
    whole data set: the same call removes them. A later data set of this name continues the numbers: opening a dropped generation raises an
    error.

    Raises:
        StoreNotFound: there is no store at this path.
        BadInput: there is no such data set, or a worker is working on it.
        FormatError: a plan is damaged, so its data set cannot be found out.
        WriteFailed: the disk refused to write. The same call continues.
    """
    layout = open_layout(Layout.at(as_path("path", path)))
    plans, line = plans_of(layout, name), list_line(layout, name)
    files = files_of_line(layout, name, line.highest)
    check_for_reading(layout)
    is_lost = not files and not line.dropped and _owns_values(layout, name)
    if not plans and not files and not is_lost:
        raise no_data_set(layout, name, list_data_sets(layout))
    if heartbeats := at_work(layout, now=time.time(), plans=frozenset(plans)):
        raise BadInput(f"{heartbeats[0]} is working on the data set {name!r}: stop it, or wait until it has ended")
    freed = 0
    if apply:
        end = list_line(layout, name).highest
        if line.entries or line.blocks or (line.tables and not has_sources(layout, name, if_damaged=False)):
            end = end_line(layout, name)
        if end or is_lost:
            mark_dropped(layout, name, end or 1)
        freed = sum(remove_plan(layout, plan) for plan in plans)
        freed += sum(remove_file(layout, path) for path in files_of_line(layout, name, end))
    check_for_reading(layout)
    return DropReport(apply, name, tuple(line.tables), tuple(plans), freed, len(line.entries) + len(line.blocks))


def _young_in_words(usages: Iterable[Usage]) -> list[str]:
    """Return what is to be said of values that no row names yet: nothing, or a sentence."""
    young = [usage.young for usage in usages if usage.young]
    which = f"{plural(sum(young), 'value')} in {plural(len(young), 'segment')}"
    return [f"{which} stay for a day after they were written: no row names them, but a session still may"] if young else []


def _owns_values(layout: Layout, name: str) -> bool:
    """Whether a segment has values of this data set."""
    for digest in list_segments(layout):
        with suppress(FormatError, OSError):
            if as_stored(name) in values_by_owner(read_contents(layout.segment(digest))):
                return True
    return False


def _waiting(layout: Layout, *, without: frozenset[str]) -> Amount:
    contents: list[SegmentContents] = []
    for digest in (marked_segments(layout) & list_segments(layout)) - without:
        with suppress(FormatError, OSError):
            contents.append(read_contents(layout.segment(digest)))
    return _amount_of(contents)


def _amount_of(segments: Iterable[SegmentContents]) -> Amount:
    listed = list(segments)
    return Amount(len(listed), sum(len(one.entries) for one in listed), sum(one.size_bytes for one in listed))


def _size_of(path: Path) -> int:
    try:
        return path.lstat().st_size
    except OSError:
        return 0


def _find_needs(layout: Layout, now: float, keep: Mapping[str, int] | None = None) -> _Found:
    """Find out what must stay. Call it after listing the segments. Raises FormatError if it cannot be found out, and ReadFailed.

    It reads twice and checks the store in between: a root that is briefly unavailable lists as empty, but then not both times.
    """
    one = _needs_now(layout, now, keep or {})
    check_for_reading(layout)
    two = _needs_now(layout, now, keep or {})
    names = {*one.kept, *two.kept}
    kept = {name: sorted({*one.kept.get(name, ()), *two.kept.get(name, ())}) for name in names}
    old = {name: [n for n in generations if n in two.old.get(name, ())] for name, generations in one.old.items()}
    needs = Needs(
        {*one.needs.keys, *two.needs.keys}, lambda origin: one.needs.is_over(origin) and two.needs.is_over(origin), Owners(layout)
    )
    return _Found(needs, kept, old, two.unfinished)


def refuse_lost_catalogs(layout: Layout) -> None:
    """Raise FormatError if the newest generation of a data set is lost: then it is not known which entries are needed."""
    for reported in lost_catalogs(layout):
        missing = f"generation {reported.generation} of the data set {reported.name!r} is missing, though a pass published it"
        drop_it = layout.command(f"drop {system.quoted(reported.name)}")
        raise FormatError(
            f"{missing}, so cachestore cannot tell which entries are needed: run {layout.command('repair')}, or {drop_it} to remove the"
            " data set"
        )


def _needs_now(layout: Layout, now: float, keep: Mapping[str, int]) -> _Found:
    passes = open_passes(layout, now=now)
    refuse_lost_catalogs(layout)
    used = generations_of_passes(layout, passes)
    behind = old_generations(layout, now=now, keep=keep)
    old = {name: [n for n in generations if (name, n) not in used] for name, generations in behind.items()}
    kept = {name: [n for n in list_generations(layout, name) if n not in old.get(name, ())] for name in list_names(layout)}
    keys = {key for name, generations in kept.items() for generation in generations for key in _keys_of(layout, name, generation)}
    keys.update(key for name in kept for key in keys_of_entries(layout, name, now=now))
    keys.update(keys_of_plans(layout))
    keys.update(keys_of_passes(layout, passes))

    def is_over(origin: str) -> bool:
        plan, _, number = origin.partition("/")
        return PassRef(plan, int(number)) not in passes

    return _Found(Needs(keys, is_over, Owners(layout)), kept, old, passes)


def _keys_of(layout: Layout, name: str, generation: int) -> Iterator[Key]:
    path = layout.catalog(name, generation)
    try:
        catalog = read_catalog(path, generation=generation, io="mmap")
    except FileNotFoundError:
        return
    except OSError as error:
        raise FormatError(
            f"{path} cannot be read ({reason_of(error)}), so cachestore cannot tell which entries are needed; nothing"
            " was removed: fix that, then run the same command again"
        ) from error
    yield from (key for key, _sample in needed_by(catalog))
    for column in catalog.columns:  # no row has the empty caption, but every data set with text may need it
        if column.role == CAPTION:
            yield caption_key(column.fingerprint, "")


def _not_held_back(layout: Layout, lists: list[MarkedList], now: float) -> tuple[list[MarkedList], list[str]]:
    """Return the lists that are older than all running workers, and remarks on the others.

    Waiting is not needed for safety. It avoids encoding again.
    """
    free: list[MarkedList] = []
    remarks: list[str] = []
    for each in lists:
        heartbeats = at_work(layout, now=now, before=each.written) if each.segments & list_segments(layout) else []
        if heartbeats:
            wait = f"{plural(len(each.segments), 'segment')} marked for deletion wait"
            remarks.append(f"{wait}: {heartbeats[0]} began before they were marked, and still works")
        else:
            free.append(each)
    return free, remarks
