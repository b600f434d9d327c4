"""Upkeep of a store: collecting garbage, compacting, dropping a data set. Finds out what is needed, and lets `storage` act on it.

What is needed is found out in the order that makes it safe: first the segments, then which passes have ended, then what catalogs name.
A pass publishes its catalog before its end, so what an ended pass made is named by then.
"""

import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal

from cachestore.core.arguments import as_path
from cachestore.core.errors import BadInput, FormatError
from cachestore.core.inputs import caption_key
from cachestore.core.keys import Json, Key
from cachestore.core.samples import CAPTION
from cachestore.core.words import in_short
from cachestore.files.marker import check_for_reading, noticing_its_end
from cachestore.files.opening import reason_of
from cachestore.files.paths import Layout
from cachestore.files.removal import remove_file
from cachestore.storage import verify as storage_verify
from cachestore.storage.catalog import list_generations, list_names, read_catalog
from cachestore.storage.catalog_writer import mark_dropped
from cachestore.storage.commit import commit
from cachestore.storage.compact import choose_groups, compact_segments
from cachestore.storage.condemned import CondemnedList, condemned_segments
from cachestore.storage.findings import Finding
from cachestore.storage.gc import (
    GRACE_SECONDS,
    condemn,
    due_lists,
    old_generations,
    old_indexes,
    plan_removal,
    remove_condemned,
    remove_files,
    spent_lists,
    stale_temporaries,
)
from cachestore.storage.listing_numbers import spent_numbers
from cachestore.storage.losses import needed_by
from cachestore.storage.segment import SegmentContents, read_contents
from cachestore.storage.snapshot import list_segments, load_snapshot, open_layout
from cachestore.storage.usage import Needs, survey
from cachestore.storage.verify import VerifyReport
from cachestore.work.passes import PassRef
from cachestore.work.plan import is_published, read_plan
from cachestore.work.retention import (
    Told,
    at_work,
    forgotten_workers,
    generations_of_passes,
    keys_of_passes,
    keys_of_plans,
    list_plans,
    open_passes,
    plans_of,
    remove_plan,
    spent_plans,
    told_catalogs,
)

_NAMED: Final = 3


@dataclass(frozen=True, slots=True)
class Amount:
    """So much of a store."""

    segments: int = 0
    entries: int = 0
    bytes: int = 0


@dataclass(frozen=True, slots=True, repr=False)
class _Report:
    __repr__ = in_short

    def as_json(self) -> dict[str, Json]:
        """The object that the command prints with `--json`."""
        return asdict(self)


@dataclass(frozen=True, slots=True, repr=False)
class GcReport(_Report):
    """What `gc` did, or would do."""

    applied: bool
    condemned: Amount
    """Newly named: absent for planners from now on, readable until a later run removes them."""
    waiting: Amount
    """Condemned earlier, and still within their grace, or held back."""
    removed: Amount
    copied: int
    """Entries of removed segments that something needs after all: they were copied first."""
    partly: Amount
    """Segments of which a part is not needed, and that part: `compact` frees it."""
    files: tuple[str, ...]
    """Other files: stale temporary ones, old generations and indexes, beats of workers long gone; relative to the store."""
    plans: tuple[str, ...]
    freed_bytes: int
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, repr=False)
class CompactReport(_Report):
    """What `compact` did, or would do."""

    applied: bool
    segments: int
    """Segments written anew; they are condemned, and go by a later `gc --apply`."""
    written: int
    entries: int
    loose_bytes: int
    """Bytes of entries that nothing needs and that were not copied."""
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, repr=False)
class DropReport(_Report):
    """What `drop` removed, or would remove."""

    applied: bool
    name: str
    generations: tuple[int, ...]
    plans: tuple[str, ...]
    freed_bytes: int


@dataclass(frozen=True, slots=True)
class _Found:
    needs: Needs
    kept: dict[str, list[int]]
    """Generations that stay, by data set."""
    old: dict[str, list[int]]


def collect(path: str | Path, *, apply: bool = False, grace_seconds: float = GRACE_SECONDS) -> GcReport:
    """Remove what nothing needs, in two steps: mark it for deletion now, remove it in a later run (see `storage.gc`).

    Args:
        path: the store.
        apply: do it; otherwise only say what would be done.
        grace_seconds: how long a segment stays readable after it was marked.

    Returns:
        What was marked and removed, or would be.

    Raises:
        StoreNotFound: there is no store there.
        FormatError: the store was written by a newer version, or a catalog or plan cannot be read, so that nobody can tell what is needed.
        WriteFailed: the disk refuses; what was removed was not needed.
    """
    layout = open_layout(Layout.at(as_path("path", path)))
    with noticing_its_end(layout):
        return _collect(layout, grace_seconds, apply=apply)


def _collect(layout: Layout, grace_seconds: float, *, apply: bool) -> GcReport:
    now = time.time()
    lists = due_lists(layout, now=now, grace_seconds=grace_seconds)
    with closing(load_snapshot(layout, for_planning=True)) as snapshot:
        found = _find_needs(layout, now)
        lists, remarks = _not_held_back(layout, lists, now)
        removals, stays = plan_removal(layout, lists, found.needs)
        waiting = _waiting(layout, without=frozenset(removal.digest for removal in removals))
        files = _spent_files(layout, found, lists, now)
        plans = spent_plans(layout, found.kept, now=now)
        usages = survey(layout, snapshot, found.needs)
    idle = [usage for usage in usages if usage.is_idle]
    partly = [usage for usage in usages if usage.loose and usage.needed]
    freed = sum(removal.contents.size_bytes for removal in removals) + sum(map(_size_of, files))
    if apply:
        commit(layout).close()  # before a list goes that says of a segment why it is not there
        freed = remove_condemned(layout, removals) + remove_files(layout, files) + sum(remove_plan(layout, plan) for plan in plans)
        condemn(layout, [usage.ref.digest for usage in idle])
    check_for_reading(layout)
    return GcReport(
        applied=apply,
        condemned=Amount(len(idle), sum(len(usage.loose) for usage in idle), sum(usage.ref.size_bytes for usage in idle)),
        waiting=waiting,
        removed=_amount_of(removal.contents for removal in removals),
        copied=sum(len(removal.to_copy) for removal in removals),
        partly=Amount(len(partly), sum(len(usage.loose) for usage in partly), sum(usage.loose_bytes for usage in partly)),
        files=tuple(str(path.relative_to(layout.root)) for path in files),
        plans=tuple(plans),
        freed_bytes=freed,
        remarks=(*remarks, *stays),
    )


def compact(path: str | Path, *, apply: bool = True) -> CompactReport:
    """Write small segments, and those of which much is not needed, anew as few, and condemn the old ones (see `storage.compact`).

    Without `apply` it only says what would be done. Raises as `collect`; WriteFailed also where there is no room for the copies.
    """
    layout = open_layout(Layout.at(as_path("path", path)))
    with noticing_its_end(layout):
        return _compact(layout, apply=apply)


def _compact(layout: Layout, *, apply: bool) -> CompactReport:
    with closing(load_snapshot(layout, for_planning=True)) as snapshot:
        needs = _find_needs(layout, time.time()).needs
        groups = choose_groups(layout, snapshot, needs)
    usages = [usage for group in groups for usage in group.usages]
    loose = sum(usage.loose_bytes for usage in usages)
    if not apply:
        entries = sum(usage.ref.entries - len(usage.loose) for usage in usages)
        check_for_reading(layout)
        return CompactReport(applied=False, segments=len(usages), written=0, entries=entries, loose_bytes=loose)
    done = compact_segments(layout, groups, needs)
    check_for_reading(layout)
    return CompactReport(
        applied=True, segments=done.segments, written=done.written, entries=done.entries, loose_bytes=loose, remarks=done.remarks
    )


def drop(path: str | Path, name: str, *, apply: bool = True) -> DropReport:
    """Remove a data set: its catalogs, and the plans they are made from. Its values go by `gc`, where nothing else needs them.

    Plans go first and the newest catalog last, so that a drop that was cut off leaves the newest generation, or none, to be opened. A data
    set that is made under the name later goes on counting: who pinned a dropped generation gets an error, never another data set.

    Raises:
        StoreNotFound: there is no store there.
        BadInput: there is no such data set, or somebody is at work on it.
        FormatError: a plan cannot be read, so nobody can tell whose it is.
        WriteFailed: the disk refuses; the same call goes on.
    """
    layout = open_layout(Layout.at(as_path("path", path)))
    plans, generations = plans_of(layout, name), list_generations(layout, name)
    check_for_reading(layout)
    if not plans and not generations:
        there = [one for one in list_names(layout) if list_generations(layout, one)]
        names = ", ".join(map(repr, there[:_NAMED])) or "none"
        raise BadInput(f"{layout.root} has no data set {name!r}; it has {names} ({layout.command('stats')} lists them)")
    if beats := at_work(layout, now=time.time(), plans=frozenset(plans)):
        raise BadInput(f"{_who(beats[0])} is working on the data set {name!r}: stop it, or wait until it has ended")
    freed = 0
    if apply:
        mark_dropped(layout, name)
        freed = sum(remove_plan(layout, plan) for plan in plans)
        freed += sum(remove_file(layout, layout.catalog(name, generation)) for generation in generations)
    check_for_reading(layout)
    return DropReport(apply, name, tuple(generations), tuple(plans), freed)


def _spent_files(layout: Layout, found: _Found, lists: list[CondemnedList], now: float) -> list[Path]:
    return [
        *stale_temporaries(layout, now=now),
        *(layout.catalog(name, generation) for name, generations in found.old.items() for generation in generations),
        *old_indexes(layout, now=now),
        *forgotten_workers(layout, now=now),
        *spent_lists(layout, lists),
        *spent_numbers(layout, now=now),
    ]


def _waiting(layout: Layout, *, without: frozenset[str]) -> Amount:
    """Condemned segments that are there and stay for now."""
    contents: list[SegmentContents] = []
    for digest in (condemned_segments(layout) & list_segments(layout)) - without:
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


def _find_needs(layout: Layout, now: float) -> _Found:
    """What must stay. Called after the segments in question were listed. Raises FormatError where that cannot be told, ReadFailed.

    It looks twice, and at the store in between: a root that is away for a moment lists as empty, and only one of the two looks can meet it.
    """
    one = _needs_now(layout, now)
    check_for_reading(layout)
    two = _needs_now(layout, now)
    names = {*one.kept, *two.kept}
    kept = {name: sorted({*one.kept.get(name, ()), *two.kept.get(name, ())}) for name in names}
    old = {name: [n for n in generations if n in two.old.get(name, ())] for name, generations in one.old.items()}
    needs = Needs({*one.needs.keys, *two.needs.keys}, lambda origin: one.needs.is_over(origin) and two.needs.is_over(origin))
    return _Found(needs, kept, old)


def _needs_now(layout: Layout, now: float) -> _Found:
    passes = open_passes(layout, now=now)
    _refuse_lost_catalogs(layout)
    used = generations_of_passes(layout, passes)
    old = {name: [n for n in generations if (name, n) not in used] for name, generations in old_generations(layout, now=now).items()}
    kept = {name: [n for n in list_generations(layout, name) if n not in old.get(name, ())] for name in list_names(layout)}
    keys = {key for name, generations in kept.items() for generation in generations for key in _keys_of(layout, name, generation)}
    keys.update(keys_of_plans(layout))
    keys.update(keys_of_passes(layout, passes))

    def is_over(origin: str) -> bool:
        plan, _, number = origin.partition("/")
        return PassRef(plan, int(number)) not in passes

    return _Found(Needs(keys, is_over), kept, old)


def _keys_of(layout: Layout, name: str, generation: int) -> Iterator[Key]:
    path = layout.catalog(name, generation)
    try:
        catalog = read_catalog(path, generation=generation, io="mmap")
    except FileNotFoundError:
        return
    except OSError as error:
        raise FormatError(
            f"{path} cannot be read ({reason_of(error)}), so cachestore cannot tell which entries are needed; nothing was removed"
        ) from error
    yield from (key for key, _sample in needed_by(catalog))
    for column in catalog.columns:  # no row names the empty caption, which each data set with text may be asked for
        if column.role == CAPTION:
            yield caption_key(column.fingerprint, "")


def lost_catalogs(layout: Layout) -> list[Told]:
    """The catalogs that are gone though a pass names them as the newest of their data set, with the pass that made them first."""
    told: dict[str, list[Told]] = {}
    for each in told_catalogs(layout):
        told.setdefault(each.name, []).append(each)
    lost: list[Told] = []
    for name, passes in sorted(told.items()):
        last = max(passes, key=lambda each: (each.generation, each.ended))
        if last.generation > max(list_generations(layout, name), default=0):
            same = [each for each in passes if (each.generation, each.digest) == (last.generation, last.digest)]
            lost.append(min(same, key=lambda each: (each.ended, each.ref.number)))
    return lost


def look_further(layout: Layout) -> Iterator[Finding]:
    """What only plans and passes tell of: catalogs that are gone though a pass published them, and plans that cannot be read."""
    for told in lost_catalogs(layout):
        where = str(layout.catalog(told.name, told.generation).relative_to(layout.root))
        message = f"{where} is missing, though a pass published it; run {layout.command('repair')} to rebuild it"
        yield Finding("bad-catalog", where, message)
    for plan in list_plans(layout):
        path = layout.plan(plan)
        where = str(path.relative_to(layout.root))
        try:
            if is_published(layout, plan):
                read_plan(layout, plan, io="pread")
        except FormatError as error:
            yield Finding("bad-plan", where, str(error))
        except OSError as error:
            yield Finding("unreadable", where, f"{where}: {error.strerror or error}")


def verify(
    path: str | Path,
    level: Literal["full", "quick"] = "full",
    *,
    subset: tuple[int, int] | None = None,
    on_finding: Callable[[Finding], None] | None = None,
) -> VerifyReport:
    """`storage.verify`, which is told what passes say of catalogs. Raises as that does."""
    return storage_verify.verify(path, level, subset=subset, on_finding=on_finding, look_further=look_further)


def _refuse_lost_catalogs(layout: Layout) -> None:
    for told in lost_catalogs(layout):
        raise FormatError(
            f"generation {told.generation} of the data set {told.name!r} is missing, though a pass published it, so cachestore"
            f" cannot tell which entries are needed: run {layout.command('repair')}, or"
            f" {layout.command(f'drop {shlex.quote(told.name)}')} to remove the data set"
        )


def _not_held_back(layout: Layout, lists: list[CondemnedList], now: float) -> tuple[list[CondemnedList], list[str]]:
    """The lists that no worker at work may be older than. Needless for safety; it saves encoding again, and old versions know no lists."""
    free: list[CondemnedList] = []
    remarks: list[str] = []
    for each in lists:
        beats = at_work(layout, now=now, before=each.written) if each.segments & list_segments(layout) else []
        if beats:
            wait = f"{len(each.segments)} segments marked for deletion wait"
            remarks.append(f"{wait}: {_who(beats[0])} began before they were marked, and still works")
        else:
            free.append(each)
    return free, remarks


def _who(beat: Mapping[str, Any]) -> str:
    return f"pid {beat['pid']} on {beat['host']}"
