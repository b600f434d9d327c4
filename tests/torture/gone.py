"""The store's root goes away, or gives way to an empty folder or to another store, before the k-th call of the file system, for every k.

Each point is a command at 1 or 2 ranks, of which one takes the root away; as with a disk that is unmounted, what is open stays open.
The root may come back some calls later. Required afterwards, with the store at its path again: what was
acknowledged is there and right, `verify` is content, and the same command goes through. No process raised what is not ours or hung. In
the empty folder no store was made; the other store has what it had, and `verify` is content with it.
"""

import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any, Final, Literal

import cachestore as cs
from cachestore.care import collect as upkeep
from cachestore.care import repair as repairing
from cachestore.core.keys import Key
from cachestore.files.paths import MARKER
from cachestore.jobs.start import here as run
from cachestore.store.format.findings import HARMLESS
from cachestore.store.write.commit import create_store
from tests.torture import jobs
from tests.torture.calls import (
    EACH,
    NOT_STRUCK,
    _Notes,
    _start,
    _wait,
    copy,
    held_before,
    of_second_run,
    of_store,
    prepare,
    say_to,
)
from tests.torture.campaign import Campaign, Outcome, judged, outcome_of, scratch
from tests.torture.jobs import Job, Unfinished, held, own
from tests.torture.watching import Call

POINTS: Final = 800
WORLDS: Final = (1, 2)
AWAY_CALLS: Final = 12
"""For so many calls at most the store is away, where it comes back."""
_THEIRS: Final = range(100, 103)
"""What the other store holds."""

Left = Literal["nothing", "an empty folder", "another store"]


@dataclass(frozen=True, slots=True)
class Point:
    """The root goes away before a call of one rank, counted from when the store was open there."""

    job: str
    world: int
    rank: int
    number: int
    left: Left
    calls_away: int
    """After so many calls it is back; 0 for never."""

    def __repr__(self) -> str:
        back = f", back after {self.calls_away} calls" if self.calls_away else ""
        return f"{self.job}, rank {self.rank} of {self.world}, call {self.number}, {self.left} in its place{back}"


# Commands that say when their store is open: before that no other store is a strange one

_is_open: list[bool] = []


def _opened(root: Path, rank: int, world: int) -> None:
    """Say that the store is open here, once all ranks say so: one that opened what took its place would rightly work on that."""
    meeting = _beside(root, "meeting")
    if meeting.exists():
        (meeting / str(rank)).touch()
        while len(list(meeting.iterdir())) < world:
            time.sleep(0.0005)
    _is_open.append(True)


def _beside(root: Path, name: str) -> Path:
    return root.with_name(f"{root.name}.{name}")


def _put(root: Path, rank: int, world: int) -> None:
    with cs.open(root, mode="a") as store:
        _opened(root, rank, world)
        for numbers in (jobs.FILLED[:3], jobs.FILLED[3:6]):
            with store.writer() as writer:
                for n in numbers:
                    writer.put(own(n), jobs.value_of(own(n)), {"n": n})
        store.commit()


def _fill(root: Path, rank: int, world: int) -> None:
    with cs.open(root, mode="a") as store:
        _opened(root, rank, world)
        report = cs.fill(store, [(own(n), n) for n in jobs.FILLED], jobs.encode, batch_size=3, rank=rank, world_size=world)
    if not report.complete:
        raise Unfinished(report.failures)


def _commit(root: Path, rank: int, world: int) -> None:
    with cs.open(root, mode="a") as store:
        _opened(root, rank, world)
        store.commit()


def _opening(module: Any, name: str, act: Callable[[Path, int, int], None]) -> Callable[[Path, int, int], None]:
    """The same command, in which a function of a module opens the store."""

    def act_and_say(root: Path, rank: int, world: int) -> None:
        really = getattr(module, name)

        def call(*given: Any, **named: Any) -> Any:
            found = really(*given, **named)
            if not _is_open:
                _opened(root, rank, world)
            return found

        setattr(module, name, call)
        try:
            act(root, rank, world)
        finally:
            setattr(module, name, really)

    return act_and_say


def _made(job: Job) -> Callable[[Path], None]:
    """Prepares a job with a store that is there already, as none that is only being made can be a strange one."""

    def make(root: Path) -> None:
        job.prepare(root)
        create_store(root)

    return make


def _every_job() -> dict[str, Job]:
    acts = {
        "put": _put,
        "fill": _fill,
        "reconcile": _fill,
        "precompute": _opening(run, "open_for_pass", jobs.job("precompute").act),
        "precompute-again": _opening(run, "open_for_pass", jobs.job("precompute-again").act),
        "commit": _commit,
        "repair": _opening(repairing, "_load_with_index", jobs.job("repair").act),
        "gc": _opening(upkeep, "open_layout", jobs.job("gc").act),
        "compact": _opening(upkeep, "open_layout", jobs.job("compact").act),
    }
    return {name: replace(jobs.job(name), prepare=_made(jobs.job(name)), act=act) for name, act in acts.items()}


JOBS: Final = _every_job()


def _make_other(root: Path) -> None:
    """Another store that has every folder that the first one may have: only its id tells it from that."""
    layout = create_store(root)
    with cs.open(root, mode="a") as store:
        with store.writer() as writer:
            for n in _THEIRS:
                writer.put(own(n), jobs.value_of(own(n)))
        store.commit()
    for folder in (*(layout.segments / f"{n:02x}" for n in range(256)), layout.catalog_folder("train"), layout.recipes, layout.marked):
        folder.mkdir(parents=True, exist_ok=True)
    layout.quarantine.mkdir(exist_ok=True)


# A process that takes the root away


@dataclass(slots=True)
class _Remover:
    point: Point
    root: Path
    note: Path
    rename: Callable[..., None] = os.rename
    """As it was before it was watched."""
    count: int = 0
    taken_at: int = -1
    is_back: bool = False

    def __call__(self, call: Call, real: Callable[..., Any]) -> Any:
        if _is_open:
            if self.count >= self.point.number and self.taken_at < 0:
                self.take(call)
            elif self.taken_at >= 0 and self.count - self.taken_at == self.point.calls_away:
                self.bring_back()
            self.count += 1
        return real()

    def take(self, call: Call) -> None:
        self.taken_at = self.count
        self.note.write_text(f"{call.name} {call.path}")
        self.rename(self.root, _beside(self.root, "kept"))
        if self.point.left == "an empty folder":
            self.root.mkdir()
        elif self.point.left == "another store":
            self.rename(_beside(self.root, "other"), self.root)

    def bring_back(self) -> None:
        put_back(self.root, self.point.left, self.rename)


def put_back(root: Path, left: Left, rename: Callable[..., None] = os.rename) -> None:
    """Have the store at its path again, and what took its place beside it. Does nothing where it is back."""
    kept = _beside(root, "kept")
    if not kept.exists():
        return
    if root.exists():
        rename(root, _beside(root, "other" if left == "another store" else "strange"))
    rename(kept, root)


# Points


def _calls(job: Job, world: int, rank: int, template: Path, folder: Path) -> str:
    """The calls that a rank makes in an undisturbed run once the store is open there: `n` for one that makes a file, else `.`."""
    root = folder / secrets.token_hex(8)
    copy(template, root)
    log = _beside(root, "calls")
    _beside(root, "meeting").mkdir()
    say = say_to(log)

    def counting(call: Call, real: Callable[[], Any]) -> Any:
        if _is_open:
            say("n" if call.creates else ".")
        return real()

    pids = [_start(job, root, n, world, counting if n == rank else None) for n in range(world)]
    codes = _wait(pids, _Notes(root))
    if any(codes) or any(_Notes(root).ended(n)["how"] != "finished" for n in range(world)):
        raise RuntimeError(
            f"{job.name} at {world} ranks does not finish undisturbed: {codes}, {[_Notes(root).ended(n) for n in range(world)]}"
        )
    return log.read_text()


def _points(name: str, world: int, template: Path, folder: Path, random: Random) -> list[Point]:
    """The points of a job in an order by chance; at every other one the store goes away between the look at it and a new file."""
    moments: list[Point] = []
    others: list[Point] = []
    for rank in range(world):
        for number, call in enumerate(_calls(JOBS[name], world, rank, template, folder)):
            for left in ("nothing", "an empty folder", "another store"):
                some = moments if call == "n" and left == "another store" else others
                some.append(Point(name, world, rank, number, left, 0))
                if left != "another store":
                    some.append(Point(name, world, rank, number, left, random.randint(1, AWAY_CALLS)))
    random.shuffle(moments)
    random.shuffle(others)
    pairs = [point for pair in zip(moments, others, strict=False) for point in pair]
    return [*pairs, *moments[len(others) :], *others[len(moments) :]]


def judge(point: Point, *, templates: Mapping[str, Path], other: Path, before: Mapping[str, set[Key]], folder: Path) -> list[str]:
    """Play a point, and say what did not hold."""
    _is_open.clear()  # the point before was played once more in this process
    job = JOBS[point.job]
    root = folder / secrets.token_hex(8)
    notes = _Notes(root)
    copy(templates[job.name], root)
    shutil.copytree(other, _beside(root, "other"))
    _beside(root, "meeting").mkdir()
    struck = notes.beside("struck")
    remover = _Remover(point, root, struck)
    pids = [_start(job, root, rank, point.world, remover if rank == point.rank else None) for rank in range(point.world)]
    codes = _wait(pids, notes)
    try:
        if not struck.exists():
            return [NOT_STRUCK]
        put_back(root, point.left)
        shutil.rmtree(_beside(root, "meeting"))
        found = [f"rank {rank} {code if isinstance(code, str) else f'ended with {code}'}" for rank, code in enumerate(codes) if code]
        endings = [notes.ended(rank) for rank, code in enumerate(codes) if not code]
        found += [f"raised: {one['text']} ({one.get('where', '')})" for one in endings if one["how"] == "raised"]
        acknowledged = notes.acknowledged()
        found += of_store(job, root, before[job.name] | acknowledged, notes.generations())
        found += _of_what_took_its_place(root)
        found += of_second_run(job, root, point.world)
        return [*found, f"struck was {struck.read_text().replace(str(root), 'STORE')}"] if found else []
    finally:
        for path in folder.glob(f"{root.name}*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _of_what_took_its_place(root: Path) -> list[str]:
    found: list[str] = []
    if (_beside(root, "strange") / MARKER).exists():
        found.append("a store was made in the empty folder")
    right, damaged = held(_beside(root, "other"))
    if set(map(own, _THEIRS)) - right.keys() or damaged or not all(right.values()):
        found.append(f"the other store lost or spoiled what it had: {len(right)} entries, {len(damaged)} damaged")
    if kinds := {finding.kind for finding in cs.verify(_beside(root, "other")).findings} - HARMLESS:
        found.append(f"verify finds {sorted(kinds)} in the other store")
    return found


def play(number: int, seed: int) -> Outcome:
    """Judge so many points, of every job and world in turn."""
    with scratch() as folder:
        templates = {name: prepare(job, folder) for name, job in JOBS.items()}
        other = prepare(Job("another store", _make_other, _put, lambda _root: set()), folder)
        before = {name: held_before(JOBS[name], template) for name, template in templates.items()}
        groups = [(name, world) for name in JOBS for world in WORLDS]
        random = Random(f"gone {seed}")
        random.shuffle(groups)
        points = [_points(name, world, templates[name], folder, random) for name, world in groups[: max(1, number // 4)]]
        judging = partial(judge, templates=templates, other=other, before=before, folder=folder)
        with closing(judged(_in_turn(points), judging, each=EACH)) as results:
            struck = list(islice(((point, found) for point, found in results if list(found) != [NOT_STRUCK]), number))
    each = ", ".join(f"{name} {sum(point.job == name for point, _found in struck)}" for name in JOBS)
    return outcome_of(struck, remarks=[f"of {sum(map(len, points)):,} points that there are: {each}"])


def _in_turn(groups: Sequence[Sequence[Point]]) -> Iterator[Point]:
    for number in range(max(map(len, groups), default=0)):
        yield from (some[number] for some in groups if number < len(some))


CAMPAIGNS: Final[Mapping[str, Campaign]] = {"gone": Campaign(play, POINTS)}
