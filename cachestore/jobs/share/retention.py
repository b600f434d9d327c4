"""Retention: what plans, passes and workers still need, and which of them may be removed.

Ages come from the times of files. They only decide whether something is kept longer than necessary; whether a value is needed does
not depend on a clock.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Final

from cachestore.core.errors import FormatError
from cachestore.core.keys import Key
from cachestore.files.opening import names_in
from cachestore.files.paths import PASS_KINDS, Layout, PassFolder, damaged, parse_plan, parse_worker, parse_worker_lock
from cachestore.files.removal import age_seconds, remove_file, remove_folder
from cachestore.jobs.share.ledgers import read_ledgers
from cachestore.jobs.share.passes import PassRef, has_ended, list_passes, list_rounds, read_done, read_round_record
from cachestore.jobs.share.plan import is_published, read_outline, read_plan
from cachestore.jobs.share.workers import Beat, Life, Watch, is_held, read_heartbeat

KEPT_SECONDS: Final = 30 * 86_400.0
"""A pass that was not touched for longer than this is abandoned; the files of a worker that ended before that may be removed."""
SLACK_SECONDS: Final = 3600.0
"""How far apart the clocks of two machines may be: a worker's start counts as before a time up to this much later."""


def list_plans(layout: Layout) -> list[str]:
    """Return the names of all plans."""
    return [plan for plan in map(parse_plan, names_in(layout.plans)) if plan is not None]


def open_passes(layout: Layout, *, now: float) -> frozenset[PassRef]:
    """Return the passes that may still be finished: each plan's newest, if it has not ended and was touched within 30 days."""
    newest = [PassRef(plan, numbers[-1]) for plan in list_plans(layout) if (numbers := list_passes(layout, plan))]
    return frozenset(ref for ref in newest if not has_ended(layout, ref) and _idle_seconds(ref.folder(layout), now) <= KEPT_SECONDS)


def _idle_seconds(folder: PassFolder, now: float) -> float:
    return now - max(map(_changed, (folder.root, folder.rounds, folder.claims, folder.ledgers, folder.attempts)))


def _changed(path: Path) -> float:
    try:
        return path.lstat().st_mtime
    except OSError:
        return 0.0


def keys_of_plans(layout: Layout) -> Iterator[Key]:
    """Yield every key that plans of `fill` ask for. Raises FormatError if a plan cannot be read or was moved aside as damaged."""
    for plan in list_plans(layout):
        if not is_published(layout, plan):
            _refuse_put_aside(layout, plan)
        elif not read_outline(layout, plan).catalog:
            yield from map(Key, read_plan(layout, plan).unit_ids)


def _refuse_put_aside(layout: Layout, plan: str) -> None:
    """Raise FormatError if a plan's rows were moved aside, unless a pass shows that it is of a data set: catalogs have its keys."""
    passes = (read_done(layout, PassRef(plan, number)) for number in list_passes(layout, plan))
    is_of_data_set = any(done is not None and done.report["name"] for done in passes)
    if not is_of_data_set and any(name.startswith(f"plans_{plan}_") for name in names_in(layout.quarantine)):
        folder = layout.plan_folder(plan)
        raise FormatError(
            f"the rows of {folder} were damaged and moved aside, so cachestore cannot tell which entries are needed: run the"
            " `fill` or precompute that made them again, or remove that folder if its entries may be removed"
        )


def keys_of_passes(layout: Layout, passes: frozenset[PassRef]) -> Iterator[Key]:
    """Yield every key that the ledgers of these passes name."""
    for ref in passes:
        folder = ref.folder(layout)
        for number in list_rounds(folder):
            for ledger in read_ledgers(folder, number):
                yield from (outcome.key for outcome in ledger.outcomes if outcome.key is not None)


def generations_of_passes(layout: Layout, passes: frozenset[PassRef]) -> set[tuple[str, int]]:
    """Return (data set, generation) of the catalogs from which these passes took units."""
    found: set[tuple[str, int]] = set()
    for ref in passes:
        with suppress(FormatError, FileNotFoundError):  # not begun, or damaged: such a pass is not joined either
            if (generation := generation_of_pass(layout, ref)) is not None:
                found.add((read_outline(layout, ref.plan).catalog, generation))
    return found


def generation_of_pass(layout: Layout, ref: PassRef) -> int | None:
    """Return the generation from which a pass took units; None if it took none. Raises FormatError or OSError for a damaged round."""
    path = ref.folder(layout).round(0)
    generation = read_round_record(layout, ref, 0).get("generation")
    if generation is not None and type(generation) is not int:
        raise damaged(f"{path} does not say which generation its units are from", path)
    return generation


@dataclass(frozen=True, slots=True)
class ReportedCatalog:
    """A catalog that `done.json` of a pass names."""

    name: str
    generation: int
    digest: str
    ref: PassRef
    ended: float
    """When the pass ended: the mtime of `done.json`, in seconds since the epoch."""


def reported_catalogs(layout: Layout) -> Iterator[ReportedCatalog]:
    """Yield the catalogs that passes published or found to be equal. Passes whose `done.json` cannot be read are left out."""
    for plan in list_plans(layout):
        for number in list_passes(layout, plan):
            ref = PassRef(plan, number)
            if (done := read_done(layout, ref)) and (name := done.report["name"]):
                ended = _changed(ref.folder(layout).done)
                yield ReportedCatalog(str(name), int(done.report["generation"]), str(done.report["catalog_digest"]), ref, ended)


def spent_plans(layout: Layout, generations: Mapping[str, list[int]], *, now: float) -> list[str]:
    """Return the plans whose catalogs are all gone. `generations` has those that stay, by data set.

    A plan that names a generation newer than all of these stays: that catalog was lost, and can be built again from the plan. Plans of
    keys stay, and so do plans that were touched within 30 days.
    """
    reported: dict[str, list[ReportedCatalog]] = {}
    for each in reported_catalogs(layout):
        reported.setdefault(each.ref.plan, []).append(each)
    return [plan for plan in list_plans(layout) if _is_spent(layout, plan, reported.get(plan, []), generations, now)]


def _is_spent(layout: Layout, plan: str, reported: list[ReportedCatalog], generations: Mapping[str, list[int]], now: float) -> bool:
    if not _is_old(layout.plan(plan), now):
        return False
    try:
        name = read_outline(layout, plan).catalog
    except (FormatError, OSError):
        return False
    kept = generations.get(name, [])
    folders = [PassRef(plan, number).folder(layout) for number in list_passes(layout, plan)]
    is_untouched = all(_idle_seconds(folder, now) > KEPT_SECONDS for folder in folders)
    return bool(name) and is_untouched and all(each.generation not in kept and each.generation < max(kept, default=0) for each in reported)


def plans_of(layout: Layout, name: str) -> list[str]:
    """Return the plans of a data set's catalogs. Raises FormatError if a plan cannot be read."""
    published = [plan for plan in list_plans(layout) if is_published(layout, plan)]
    return [plan for plan in published if read_outline(layout, plan).catalog == name]


def remove_plan(layout: Layout, plan: str) -> int:
    """Remove a plan with its passes; return the bytes freed. Files with unknown names stay, and so do their folders.

    The rows go first and each pass's `done.json` last: after a crash, the rest is then neither joined nor believed.
    """
    freed = remove_file(layout, layout.plan(plan))
    for number in list_passes(layout, plan):
        folder = PassRef(plan, number).folder(layout)
        for kind in PASS_KINDS:
            inner = folder.root / PurePath(kind.folder).name
            freed += sum(remove_file(layout, inner / name) for name in names_in(inner) if kind.parse(name) is not None)
            remove_folder(layout, inner)
        freed += remove_file(layout, folder.done)
        remove_folder(layout, folder.root)
    remove_folder(layout, layout.plan_folder(plan))
    return freed


def at_work(layout: Layout, *, now: float, before: float | None = None, plans: frozenset[str] | None = None) -> list[Beat]:
    """Return the heartbeats of workers that may live. If given, `before` and `plans` select those begun by then and working on them.

    A worker without a written end counts as living for a day, or while its lock is held, unless proved dead. Clocks may differ by 1 h.
    """
    watch = Watch(layout)
    found: list[Beat] = []
    for worker in filter(None, map(parse_worker, names_in(layout.workers))):
        age = age_seconds(layout.worker(worker), now)
        shown = read_heartbeat(layout, worker)
        if shown is None or shown.has_ended or age is None:
            continue
        is_meant = (before is None or shown.started <= before + SLACK_SECONDS) and (plans is None or shown.plan in plans)
        if is_meant and (age <= 86_400.0 or is_held(layout, worker)) and watch.life_of(worker) is not Life.DEAD:
            found.append(shown)
    return found


def forgotten_workers(layout: Layout, *, now: float) -> list[Path]:
    """Return the files of workers that ended or died over 30 days ago: heartbeats, and locks that no process holds."""
    names = names_in(layout.workers)
    shown = set(filter(None, map(parse_worker, names)))
    gone = {worker for worker in shown if _is_old(layout.worker(worker), now) and not is_held(layout, worker)}
    locks = set(filter(None, map(parse_worker_lock, names))) - (shown - gone)
    old = [worker for worker in sorted(locks) if _is_old(layout.worker_lock(worker), now) and not is_held(layout, worker)]
    return [*map(layout.worker, sorted(gone)), *map(layout.worker_lock, old)]


def _is_old(path: Path, now: float) -> bool:
    age = age_seconds(path, now)
    return age is not None and age > KEPT_SECONDS
