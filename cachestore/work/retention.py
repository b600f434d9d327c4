"""Retention: what plans, passes and workers still need, and which of them may go.

Ages are by the times of files: they decide only whether something is kept for longer than it has to be. Whether a value is needed is
never decided by a clock.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, Final

from cachestore.core.errors import FormatError
from cachestore.core.keys import Key
from cachestore.files.opening import names_in
from cachestore.files.paths import PASS_KINDS, Layout, PassFolder, parse_plan, parse_worker, parse_worker_lock, to_repair
from cachestore.files.removal import age_seconds, remove_file, remove_folder
from cachestore.work.ledgers import read_ledgers
from cachestore.work.passes import PassRef, has_ended, list_passes, list_rounds, read_done, read_round_record
from cachestore.work.plan import is_published, read_outline, read_plan
from cachestore.work.workers import Life, Watch, is_held, read_beat

KEPT_SECONDS: Final = 30 * 86_400.0
"""A pass that nobody touched for so long is abandoned; a worker that ended so long ago is forgotten."""
SLACK_SECONDS: Final = 3600.0
"""By how much the clocks of two machines may differ before a worker is taken to have begun after something that it began before."""


def list_plans(layout: Layout) -> list[str]:
    """The names of all plans."""
    return [plan for plan in map(parse_plan, names_in(layout.plans)) if plan is not None]


def open_passes(layout: Layout, *, now: float) -> frozenset[PassRef]:
    """The passes that somebody may still finish: the newest one of each plan, if it has not ended and was touched within 30 days."""
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
    """Every key that a plan of keys (`fill`) asks for. Raises FormatError for a plan that cannot be read, or was put aside as damaged."""
    for plan in list_plans(layout):
        if not is_published(layout, plan):
            _refuse_put_aside(layout, plan)
        elif not read_outline(layout, plan).catalog:
            yield from map(Key, read_plan(layout, plan).unit_ids)


def _refuse_put_aside(layout: Layout, plan: str) -> None:
    """A plan without rows tells nobody what it needs. That of a data set, whose catalogs do, is told by the end of a pass."""
    passes = (read_done(layout, PassRef(plan, number)) for number in list_passes(layout, plan))
    is_of_data_set = any(done is not None and done.report["name"] for done in passes)
    if not is_of_data_set and any(name.startswith(f"plans_{plan}_") for name in names_in(layout.quarantine)):
        folder = layout.plan_folder(plan)
        raise FormatError(
            f"the rows of {folder} were damaged and moved aside, so cachestore cannot tell which entries are needed: run the"
            " `fill` or precompute that made them again, or remove that folder if its entries may be removed"
        )


def keys_of_passes(layout: Layout, passes: frozenset[PassRef]) -> Iterator[Key]:
    """Every key that the ledgers of these passes name."""
    for ref in passes:
        folder = ref.folder(layout)
        for number in list_rounds(folder):
            for ledger in read_ledgers(folder, number):
                yield from (outcome.key for outcome in ledger.outcomes if outcome.key is not None)


def generations_of_passes(layout: Layout, passes: frozenset[PassRef]) -> set[tuple[str, int]]:
    """(data set, generation) of the catalogs that these passes took units from."""
    found: set[tuple[str, int]] = set()
    for ref in passes:
        with suppress(FormatError, FileNotFoundError):  # not begun, or damaged: then it is not joined either
            if (generation := generation_of_pass(layout, ref)) is not None:
                found.add((read_outline(layout, ref.plan).catalog, generation))
    return found


def generation_of_pass(layout: Layout, ref: PassRef) -> int | None:
    """The generation that a pass took units from; None where it took none. Raises FormatError, OSError for one that cannot tell."""
    path = ref.folder(layout).round(0)
    generation = read_round_record(layout, ref, 0).get("generation")
    if generation is not None and type(generation) is not int:
        raise FormatError(f"{path} does not say which generation its units are from; run {to_repair(path)}")
    return generation


@dataclass(frozen=True, slots=True)
class Told:
    """A catalog that the end of a pass names."""

    name: str
    generation: int
    digest: str
    ref: PassRef
    ended: float
    """When, by the time of the file that says so."""


def told_catalogs(layout: Layout) -> Iterator[Told]:
    """The catalogs that passes say they published, or found to be equal. A pass whose end cannot be read says nothing."""
    for plan in list_plans(layout):
        for number in list_passes(layout, plan):
            ref = PassRef(plan, number)
            if (done := read_done(layout, ref)) and (name := done.report["name"]):
                ended = _changed(ref.folder(layout).done)
                yield Told(str(name), int(done.report["generation"]), str(done.report["catalog_digest"]), ref, ended)


def spent_plans(layout: Layout, generations: Mapping[str, list[int]], *, now: float) -> list[str]:
    """Plans of which no catalog is left that was made from them. `generations` has those that stay, by data set.

    One that names a generation newer than all that are there stays: that one was lost, and can be built again from it. So does a plan
    of keys, and any that was touched within 30 days.
    """
    told: dict[str, list[Told]] = {}
    for each in told_catalogs(layout):
        told.setdefault(each.ref.plan, []).append(each)
    return [plan for plan in list_plans(layout) if _is_spent(layout, plan, told.get(plan, []), generations, now)]


def _is_spent(layout: Layout, plan: str, told: list[Told], generations: Mapping[str, list[int]], now: float) -> bool:
    if not _is_old(layout.plan(plan), now):
        return False
    try:
        name = read_outline(layout, plan).catalog
    except (FormatError, OSError):
        return False
    kept = generations.get(name, [])
    folders = [PassRef(plan, number).folder(layout) for number in list_passes(layout, plan)]
    is_untouched = all(_idle_seconds(folder, now) > KEPT_SECONDS for folder in folders)
    return bool(name) and is_untouched and all(each.generation not in kept and each.generation < max(kept, default=0) for each in told)


def plans_of(layout: Layout, name: str) -> list[str]:
    """The plans that a data set's catalogs are made from. Raises FormatError for a plan that cannot be read."""
    published = [plan for plan in list_plans(layout) if is_published(layout, plan)]
    return [plan for plan in published if read_outline(layout, plan).catalog == name]


def remove_plan(layout: Layout, plan: str) -> int:
    """Remove a plan with its passes; returns the bytes freed. Names that are not ours stay, and their folder with them.

    The rows go first and each pass's end last, so that what a crash leaves is neither joined nor believed.
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


def at_work(layout: Layout, *, now: float, before: float | None = None, plans: frozenset[str] | None = None) -> list[Mapping[str, Any]]:
    """The beats of workers that live, or may: those that began before a time (by clocks that may differ), or work on some plans.

    A worker that shows no end counts as living for a day, unless its death is proved.
    """
    watch = Watch(layout)
    found: list[Mapping[str, Any]] = []
    for worker in filter(None, map(parse_worker, names_in(layout.workers))):
        age = age_seconds(layout.worker(worker), now)
        beat = read_beat(layout, worker)
        if beat is None or beat["phase"] == "ended" or age is None:
            continue
        is_meant = (before is None or beat["started"] <= before + SLACK_SECONDS) and (plans is None or beat["plan"] in plans)
        if is_meant and (age <= 86_400.0 or is_held(layout, worker)) and watch.look(worker) is not Life.DEAD:
            found.append(beat)
    return found


def forgotten_workers(layout: Layout, *, now: float) -> list[Path]:
    """Beats and locks of workers that ended or died more than 30 days ago; a lock without a beat, too, that nobody holds."""
    names = names_in(layout.workers)
    shown = set(filter(None, map(parse_worker, names)))
    gone = {worker for worker in shown if _is_old(layout.worker(worker), now) and not is_held(layout, worker)}
    locks = set(filter(None, map(parse_worker_lock, names))) - (shown - gone)
    old = [worker for worker in sorted(locks) if _is_old(layout.worker_lock(worker), now) and not is_held(layout, worker)]
    return [*map(layout.worker, sorted(gone)), *map(layout.worker_lock, old)]


def _is_old(path: Path, now: float) -> bool:
    age = age_seconds(path, now)
    return age is not None and age > KEPT_SECONDS
