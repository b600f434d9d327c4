"""Chaos for `fill`: `python3 scripts/chaos/fill.py [--seeds A-B] [--jobs N] [--keys N] [--views one|two|mixed] [--variant NAME] [--json]`.

For each seed up to 8 workers, real processes with an encoder passed in and no torch, fill one store, while a harness kills them, stops
and continues them, lets others join with another world size, and deletes, cuts and (in every third seed) changes published segments.
In every fifth seed the workers see the folder through two views with stale caches (bindfs), as two machines on a network file system do.
A seed is complete when one undisturbed run afterwards leaves every key with its right value; `verify` must then name exactly what was
cut and changed, `repair` and one more run must mend it. Exit 0 only if every seed is complete. Knows nothing of models and images.

With `--variant` the workers are wrong on purpose, so that it can be seen that the harness finds lost keys:
    ledger-first      publishes ledgers before their segments, and nobody looks whether these came
    trust-ledgers     ends a pass when all ledgers are there, whatever became of the segments
    own-part-only     does its own partitions and no others; a rank is killed, and no undisturbed run follows
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import environment

if __name__ == "__main__":
    environment.enter()

import argparse
import contextlib
import faulthandler
import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import traceback
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from random import Random
from types import ModuleType
from typing import Any, Final, Literal

import numpy as np

import cachestore as cs
from cachestore.core.errors import CacheStoreError
from cachestore.files.paths import Layout
from cachestore.files.publish import publish
from cachestore.jobs.run import claiming, reconcile, worker
from cachestore.jobs.run.reconcile import Reconciler
from cachestore.jobs.share import choice, workers
from cachestore.jobs.share.passes import Done, Round, list_passes, publish_done, publish_round
from cachestore.store.format.segment import SegmentDraft, read_contents
from cachestore.store.read.snapshot import list_segments
from cachestore.store.write import append
from cachestore.store.write.commit import commit

Bug = Literal["", "ledger-first", "trust-ledgers", "own-part-only"]
BUGS: Final[tuple[Bug, ...]] = ("ledger-first", "trust-ledgers", "own-part-only")

MOST_KILLS: Final = 12
MOST_STOPS: Final = 15
MOST_WORKERS: Final = 8
MOST_KEYS: Final = 2000
KEYS: Final = 600
ENCODE_SECONDS: Final = 5.0
"""What all items of a seed take together: long enough for every fault to strike somebody at work."""
STALE_SECONDS: Final = 1.0
"""How long the two views keep what they have seen of attributes, names and absences."""
SEED_SECONDS: Final = 200.0
"""A seed that takes longer hangs."""
SETTLE_SECONDS: Final = 45.0
"""The workers that are left when the faults are over must end within this time."""
PATIENCE_SECONDS: Final = 6.0
"""Those who do their own part only wait for the dead for ever."""


# What a seed does


@dataclass(frozen=True, slots=True)
class Faults:
    """How often each thing happens to a seed's workers and segments."""

    kills: int = 0
    stops: int = 0
    joins: int = 0
    deletions: int = 0
    cuts: int = 0
    flips: int = 0


@dataclass(frozen=True, slots=True)
class Trial:
    """Everything that a seed decides beforehand. When each fault strikes depends on the machine too."""

    seed: int
    keys: int
    workers: int
    batch: int
    item_seconds: float
    """What encoding one item takes, in the mean."""
    views: int
    variant: Bug
    faults: Faults


def trial_for(seed: int, *, keys: int = KEYS, views: int | None = None, variant: Bug = "") -> Trial:
    """What a seed does. Pure. `views` is 1, 2, or None for what the seed says."""
    random = Random(f"chaos {seed}")
    faults = Faults(
        kills=random.randint(3, MOST_KILLS),
        stops=random.randint(3, MOST_STOPS),
        joins=random.randint(4, 10),
        deletions=random.randint(0, 4),
        cuts=random.randint(0, 3),
    )
    if seed % 3 == 0:
        faults = replace(faults, deletions=0, cuts=1, flips=random.randint(3, 8))  # what is deleted can no longer be named
    count, batch, asked = random.randint(keys // 2, keys), random.choice([1, 4, 16, 32]), views or (2 if seed % 5 == 4 else 1)
    trial = Trial(seed, count, random.randint(3, MOST_WORKERS), batch, ENCODE_SECONDS / max(count, 1), asked, variant, faults)
    return replace(trial, **_of_bug(trial)) if variant else trial


def _of_bug(trial: Trial) -> dict[str, Any]:
    """What shows the fault of a wrong variant: only what it cannot stand, so that nothing else explains what is lost."""
    slow = {"batch": 8, "workers": 4, "item_seconds": trial.item_seconds}
    match trial.variant:
        case "ledger-first":
            return {**slow, "item_seconds": trial.item_seconds / 4, "faults": Faults(kills=MOST_KILLS, joins=MOST_KILLS)}
        case "trust-ledgers":
            return {**slow, "faults": Faults(kills=2, joins=2, deletions=6)}
        case "own-part-only":
            return {**slow, "faults": Faults(kills=1)}
        case "":
            return {}


def key_of(number: int) -> cs.Key:
    """The key of the n-th item."""
    return cs.key("chaos", str(number))


def value_of(number: int) -> dict[str, np.ndarray]:
    """What is stored for the n-th item: two tensors that follow from its number."""
    block = sha256(b"chaos %d" % number).digest()
    return {"long": np.frombuffer(block * (1 + number % 40), np.uint8), "short": np.array([number, -number], np.int64)}


# A worker, in a process of its own


@dataclass(frozen=True, slots=True)
class Order:
    """What one worker is told."""

    root: Path
    host: str
    rank: int
    world_size: int
    launch: str
    trial: Trial
    folder: Path
    """Where it leaves its log of encoded keys and how it ended."""


def play(order: Order) -> int:
    """Be one worker: fill the store and leave a report. Returns the exit code."""
    harness = os.getppid()
    log = order.folder / f"{os.getpid()}.encoded"

    def encode(batch: list[tuple[cs.Key, int]]) -> dict[cs.Key, dict[str, np.ndarray]]:
        if os.getppid() != harness:
            os._exit(1)  # the harness was killed: nobody will ever stop this worker
        time.sleep(slowness.uniform(0, 2) * order.trial.item_seconds * len(batch))
        with log.open("a") as file:
            file.write("".join(f"{number}\n" for _key, number in batch))
        return {key: value_of(number) for key, number in batch}

    slowness = Random(os.getpid())
    stack = (order.folder / f"{os.getpid()}.stack").open("w")
    faulthandler.register(signal.SIGUSR1, stack)
    try:
        os.environ["CACHESTORE_LAUNCH"] = order.launch
        _hurry(order)
        _go_wrong(order)
        with cs.open(order.root, mode="a") as store:
            wanted = [(key_of(number), number) for number in range(order.trial.keys)]
            report = cs.fill(store, wanted, encode, batch_size=order.trial.batch, rank=order.rank, world_size=order.world_size)
        (order.folder / f"{os.getpid()}.report").write_text(json.dumps(report.as_json()))
    except Exception as error:  # noqa: BLE001 - the boundary of a process: whatever ends a worker is told to the harness
        words = f"{type(error).__name__}: {error}" if isinstance(error, CacheStoreError) else traceback.format_exc()
        (order.folder / f"{os.getpid()}.error").write_text(words)
        return 1
    return 0


def _patch(module: ModuleType | type, name: str, value: object) -> None:
    """Replace something that must be there: a harness that patches what nobody calls would test nothing."""
    if not hasattr(module, name):
        raise AttributeError(f"{module.__name__} has no {name} any more: bring scripts/chaos/fill.py up to date")
    setattr(module, name, value)


def _hurry(order: Order) -> None:
    """Let waits of minutes take a second, and let a host be what the order says."""
    silent = 1.2 if order.trial.views == 1 else 1.2 + STALE_SECONDS  # shorter than what the views keep, everybody would look dead
    _patch(workers, "SILENT_SECONDS", silent)
    _patch(workers, "SLOW_SECONDS", silent / 2)
    _patch(workers, "FIRST_BATCH_SECONDS", 0.3)
    _patch(choice, "POLL_SECONDS", 0.1)
    _patch(claiming, "STUCK_SECONDS", 30.0)
    _patch(socket, "gethostname", lambda: order.host)


def _go_wrong(order: Order) -> None:
    match order.trial.variant:
        case "ledger-first":
            _publish_segments_late(order.folder / f"{os.getpid()}.scratch")
            _trust_ledgers()
        case "trust-ledgers":
            _trust_ledgers()
        case "own-part-only":
            _patch(claiming, "choose", _choose_own_part)
        case "":
            pass


def _choose_own_part(ranges: Sequence[range], *, start: int, world_size: int, **options: Any) -> choice.Choice:
    """As `choose`, but a rank takes nothing that would be another's."""
    own = [each for number, each in enumerate(ranges) if number % world_size == start % world_size]
    return choice.choose(own, start=0, world_size=1, **options)


def _publish_segments_late(scratch: Path) -> None:
    """A segment is acknowledged when it is built, and published after its ledgers, as long after as a busy disk makes one wait."""
    really, listing = append.write_segment, worker.list_ledgers
    scratch.mkdir(exist_ok=True)
    waiting: list[tuple[Layout, str, list[bytes]]] = []

    def later(layout: Layout, draft: SegmentDraft, *, origin: str) -> append.Acknowledged:
        built = draft.build(origin=origin)
        waiting.append((layout, built.digest, [bytes(chunk) for chunk in built.chunks]))
        return really(Layout(scratch), draft, origin=origin)

    def first_publish(*arguments: Any) -> frozenset[tuple[int, int]]:
        if waiting:
            time.sleep(0.3)
        while waiting:
            layout, digest, chunks = waiting.pop()
            publish(layout, layout.segment(digest), chunks, read_only=True)
        return listing(*arguments)

    _patch(append, "write_segment", later)
    for module in (claiming, worker):
        _patch(module, "list_ledgers", first_publish)


def _trust_ledgers() -> None:
    """Reconcile believes: a round whose ledgers are all there has everything, and what an ended pass had is still there."""

    def open_believing(self: Reconciler, *_arguments: object, **_options: object) -> None:
        units = () if len(list_passes(self.job.layout, self.job.plan.name)) > 1 else self.job.plan.units_of(0)
        publish_round(self.job.layout, self.ref, self.job.plan, Round(0, (units,), self.job.launch, time.time()))

    def close_believing(self: Reconciler, *_arguments: object, **_options: object) -> Done:
        commit(self.job.layout).close()
        counts = dict.fromkeys(("samples", "reused", "failed", "missing", "seconds", "bytes", "generation"), 0)
        names = {"store": "", "name": "", "plan": self.job.plan.name}
        wanted = self.job.plan.unit_count
        return publish_done(
            self.job.layout, self.ref, {"complete": True, "wanted": wanted, "encoded": wanted, **counts, **names}, [self.job.launch]
        )

    _patch(Reconciler, "open_pass", open_believing)
    _patch(reconcile.Reconciler, "close_round", close_believing)


# The harness: workers


@dataclass(slots=True)
class Crowd:
    """The workers of a seed. The caller's process has one thread: it forks."""

    trial: Trial
    roots: Sequence[Path]
    folder: Path
    random: Random
    living: dict[int, Order] = field(default_factory=dict[int, Order])
    _stopped: dict[int, float] = field(default_factory=dict[int, float])
    started: int = 0
    killed: int = 0
    stopped: int = 0
    launch: int = 0

    def begin(self) -> None:
        """A launch with all its ranks. The store is there: where one is looked for a moment before it is made, a stale view denies it."""
        cs.open(self.roots[0], mode="a").close()
        time.sleep(STALE_SECONDS if len(self.roots) > 1 else 0)
        for rank in range(self.trial.workers):
            self.start(rank, self.trial.workers)

    def start(self, rank: int, world_size: int) -> int:
        """Start a worker on one of the views; returns its process."""
        view = self.started % len(self.roots)
        order = Order(self.roots[view], f"host-{view}", rank, world_size, f"launch {self.launch}", self.trial, self.folder)
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                code = play(order)
            finally:
                os._exit(code)
        self.started += 1
        self.living[pid] = order
        return pid

    def join(self) -> None:
        """One more worker, who believes in another world; sometimes of a new launch. Nobody where there are enough."""
        if len(self.living) >= MOST_WORKERS:
            return
        self.launch += self.random.random() < 0.3
        world_size = self.random.randint(1, MOST_WORKERS)
        self.start(self.random.randrange(world_size), world_size)

    def kill(self) -> None:
        """Kill one of the living."""
        self.reap()
        if self.living:
            os.kill(self.random.choice(list(self.living)), signal.SIGKILL)
            self.killed += 1

    def stop(self) -> None:
        """Stop one of the living, for a moment or until others take it for dead."""
        self.reap()
        if running := [pid for pid in self.living if pid not in self._stopped]:
            pid = self.random.choice(running)
            os.kill(pid, signal.SIGSTOP)
            self._stopped[pid] = time.monotonic() + self.random.choice([0.3, 0.3, 2.5])
            self.stopped += 1

    def resume(self, *, now: float) -> None:
        """Let those go on whose time has come."""
        for pid in [pid for pid, until in self._stopped.items() if until <= now]:
            del self._stopped[pid]
            if pid in self.living:
                os.kill(pid, signal.SIGCONT)

    def reap(self) -> None:
        """Notice who has ended."""
        for pid in list(self.living):
            if os.waitpid(pid, os.WNOHANG)[0]:
                del self.living[pid]

    def settle(self, seconds: float) -> list[str]:
        """Wait until nobody is left; returns words about those who did not end in time, who are then killed."""
        deadline = time.monotonic() + seconds
        while self.living and time.monotonic() < deadline:
            self.resume(now=time.monotonic())
            self.reap()
            time.sleep(0.01)
        hung = [f"{pid} (rank {order.rank} of {order.world_size}) did not end: {self._where(pid)}" for pid, order in self.living.items()]
        self.end()
        return hung

    def _where(self, pid: int) -> str:
        """Where a worker that does not end stands."""
        os.kill(pid, signal.SIGUSR1)
        time.sleep(0.2)
        return " <- ".join(line.strip() for line in (self.folder / f"{pid}.stack").read_text().splitlines()[1:8])

    def end(self) -> None:
        """Kill who is left."""
        for pid in self.living:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        self.living.clear()

    def errors(self) -> list[str]:
        """What workers ended with that nobody did to them."""
        return [path.read_text() for path in sorted(self.folder.glob("*.error"))]

    def encodes(self) -> int:
        """How many units were encoded, doubles counted."""
        return sum(path.read_bytes().count(b"\n") for path in self.folder.glob("*.encoded"))


# The harness: segments


@dataclass(slots=True)
class Damage:
    """What was done to published segments, and what `verify` must therefore find."""

    layout: Layout
    random: Random
    deleted: int = 0
    cut: set[str] = field(default_factory=set[str])
    flipped: dict[str, dict[int, str]] = field(default_factory=dict[str, dict[int, str]])
    """Segment -> offset -> key."""

    def _any(self) -> str | None:
        found = sorted(list_segments(self.layout) - self.cut)
        return self.random.choice(found) if found else None

    def delete(self) -> None:
        """Delete a segment. Nothing where there is none."""
        if digest := self._any():
            self.layout.segment(digest).unlink()
            self.flipped.pop(digest, None)
            self.deleted += 1

    def shorten(self) -> None:
        """Cut a segment somewhere. Nothing where there is none."""
        if digest := self._any():
            path = self.layout.segment(digest)
            path.chmod(0o644)
            os.truncate(path, self.random.randrange(path.stat().st_size))
            self.flipped.pop(digest, None)
            self.cut.add(digest)

    def flip(self) -> None:
        """Change a bit of an entry that has one. Nothing where there is none, or where this byte was changed already."""
        if (digest := self._any()) is None:
            return
        path = self.layout.segment(digest)
        entry = self.random.choice([*read_contents(path).entries])
        offset = entry.offset + self.random.randrange(entry.size_bytes)
        if offset in self.flipped.get(digest, {}):
            return
        path.chmod(0o644)
        with path.open("r+b", buffering=0) as file:
            file.seek(offset)
            byte = file.read(1)[0]
            file.seek(offset)
            file.write(bytes([byte ^ 1 << self.random.randrange(8)]))
        self.flipped.setdefault(digest, {})[offset] = str(entry.key)

    def expected(self) -> set[tuple[str, str, str | None]]:
        """(kind, path, key) of every finding that `verify` must make."""
        found: set[tuple[str, str, str | None]] = {("corrupt-segment", self._where(digest), None) for digest in self.cut}
        return found | {("corrupt-entry", self._where(digest), key) for digest, keys in self.flipped.items() for key in keys.values()}

    def _where(self, digest: str) -> str:
        return str(self.layout.segment(digest).relative_to(self.layout.root))


def named(findings: Iterable[cs.Finding]) -> set[tuple[str, str, str | None]]:
    """(kind, path, key) of what `verify` found: a row for each damaged entry, but none of a segment whose header is damaged."""
    found: set[tuple[str, str, str | None]] = set()
    for one in findings:
        keys = [entry.key for entry in one.entries] if one.kind == "corrupt-entry" else [one.key]
        found |= {(one.kind, one.path, key) for key in keys if one.kind != "stale-temp"}
    return found


# One seed


@dataclass(slots=True)
class Seen:
    """What became of a seed."""

    seed: int
    variant: Bug
    keys: int
    views: int
    complete: bool = False
    lost: int = 0
    """Keys without a value at the end."""
    wrong: int = 0
    """Keys with another value: never, whatever happens."""
    encodes: int = 0
    workers: int = 0
    kills: int = 0
    stops: int = 0
    deleted: int = 0
    cut: int = 0
    flipped: int = 0
    seconds: float = 0.0
    remarks: list[str] = field(default_factory=list[str])


def run_seed(trial: Trial, folder: Path) -> Seen:
    """Do one seed in an empty folder and look at what is left."""
    began = time.monotonic()
    seen = Seen(trial.seed, trial.variant, trial.keys, trial.views)
    disk, notes = folder / "disk", folder / "notes"
    disk.mkdir()
    notes.mkdir()
    random = Random(f"when {trial.seed}")
    with views_of(disk, folder, trial.views) as roots:
        crowd = Crowd(trial, [root / "store" for root in roots], notes, random)
        damage = Damage(Layout(disk / "store"), random)
        try:
            crowd.begin()
            _disturb(trial, crowd, damage)
            if trial.variant == "own-part-only":
                crowd.settle(PATIENCE_SECONDS)
            else:
                seen.remarks += crowd.settle(SETTLE_SECONDS)
            _judge(trial, crowd, damage, seen)
        finally:
            crowd.end()
    if trial.variant != "own-part-only":
        seen.remarks += crowd.errors()
    seen.encodes, seen.workers, seen.kills, seen.stops = crowd.encodes(), crowd.started, crowd.killed, crowd.stopped
    seen.deleted, seen.cut, seen.flipped = damage.deleted, len(damage.cut), sum(map(len, damage.flipped.values()))
    seen.complete = not seen.lost and not seen.wrong and not seen.remarks
    seen.seconds = round(time.monotonic() - began, 1)
    return seen


def _disturb(trial: Trial, crowd: Crowd, damage: Damage) -> None:
    """Let every fault happen, in an order that the seed chooses, a few hundredths of a second apart."""
    faults: Mapping[str, tuple[int, Callable[[], None]]] = {
        "kill": (trial.faults.kills, crowd.kill),
        "stop": (trial.faults.stops, crowd.stop),
        "join": (trial.faults.joins, crowd.join),
        "delete": (trial.faults.deletions, damage.delete),
        "cut": (trial.faults.cuts, damage.shorten),
        "flip": (trial.faults.flips, damage.flip),
    }
    due = [name for name, (count, _strike) in faults.items() for _time in range(count)]
    crowd.random.shuffle(due)
    _until_something_is_published(damage.layout)
    for name in due:
        time.sleep(crowd.random.uniform(0.01, 0.12))
        crowd.resume(now=time.monotonic())
        crowd.reap()
        if not crowd.living and trial.variant != "own-part-only":
            crowd.join()
        faults[name][1]()


def _until_something_is_published(layout: Layout) -> None:
    deadline = time.monotonic() + SETTLE_SECONDS
    while not layout.segments.is_dir() or not list_segments(layout):
        if time.monotonic() > deadline:
            raise TimeoutError(f"no worker published anything in {layout.root} within {SETTLE_SECONDS:g} s")
        time.sleep(0.005)


def _judge(trial: Trial, crowd: Crowd, damage: Damage, seen: Seen) -> None:
    """One undisturbed run, then: is everything there, is it right, and does `verify` say exactly what was damaged."""
    if trial.variant != "own-part-only":
        _run_undisturbed(trial, crowd, seen)
    if trial.variant:
        seen.lost, seen.wrong, _corrupt = _look(trial, damage.layout.root)
        return
    _lost, seen.wrong, corrupt = _look(trial, damage.layout.root)
    expected = damage.expected()
    if not corrupt <= {key for _kind, _path, key in expected}:
        seen.remarks.append("entries that nobody touched are corrupt")
    found = named(cs.verify(damage.layout.root).findings)
    if found != expected:
        seen.remarks.append(f"verify found {sorted(found - expected, key=str)[:3]} and not {sorted(expected - found, key=str)[:3]}")
    if expected:
        cs.repair(damage.layout.root)
        _run_undisturbed(trial, crowd, seen)
        if not cs.verify(damage.layout.root).ok:
            seen.remarks.append("verify is not content after repair and another run")
    seen.lost, wrong, corrupt = _look(trial, damage.layout.root)
    seen.wrong += wrong + len(corrupt)


def _run_undisturbed(trial: Trial, crowd: Crowd, seen: Seen) -> None:
    """One worker of a new launch, alone, after the views have forgotten what they knew.

    It may join the pass before it, in which two workers died on a unit; the next pass tries that unit again.
    """
    report = _run_alone(trial, crowd, seen)
    if report is not None and any("died encoding it" in failure["reason"] for failure in report["failures"]):
        report = _run_alone(trial, crowd, seen)
    if report is None or not report["complete"]:
        seen.remarks.append("the undisturbed run was not complete")


def _run_alone(trial: Trial, crowd: Crowd, seen: Seen) -> dict[str, Any] | None:
    """Run one worker of a new launch; return its report, None if it left none."""
    if trial.views > 1:
        time.sleep(STALE_SECONDS + 0.1)
    crowd.launch += 1
    pid = crowd.start(0, 1)
    seen.remarks += crowd.settle(SETTLE_SECONDS)
    report = crowd.folder / f"{pid}.report"
    return json.loads(report.read_text()) if report.exists() else None


def _look(trial: Trial, root: Path) -> tuple[int, int, set[str]]:
    """How many keys have no value, how many another, and which have a damaged one."""
    lost, wrong, corrupt = 0, 0, set[str]()
    with cs.open(root, verify="always") as store:
        for number in range(trial.keys):
            try:
                value = store.get(key_of(number), as_numpy=True)
            except cs.MissingEntry:
                lost += 1
            except cs.CorruptEntry:
                corrupt.add(str(key_of(number)))
            else:
                made = value_of(number)
                wrong += set(value) != set(made) or any(value[name].tobytes() != made[name].tobytes() for name in made)
    return lost, wrong, corrupt


# Two views


def why_no_views() -> str | None:
    """Why a folder cannot be mounted twice with stale caches here, or None where it can."""
    if shutil.which("bindfs") is None:
        return "bindfs is not installed"
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "this user may not open /dev/fuse"
    return None


@contextlib.contextmanager
def views_of(disk: Path, folder: Path, count: int) -> Generator[list[Path]]:
    """The folder itself, or so many views of it, each with a cache of its own that is right again after a second."""
    if count == 1:
        yield [disk]
        return
    stale = ",".join(f"{what}_timeout={STALE_SECONDS}" for what in ("attr", "entry", "negative"))
    mounts: list[tuple[Path, subprocess.Popen[bytes]]] = []
    try:
        for number in range(count):
            view = folder / f"view-{number}"
            view.mkdir()
            mounts.append((view, subprocess.Popen(["bindfs", "-f", "-o", stale, str(disk), str(view)])))
        for view, process in mounts:
            _until_mounted(view, process)
        yield [view for view, _process in mounts]
    finally:
        for view, process in mounts:
            process.terminate()  # it unmounts by itself
            process.wait(20)
            if os.path.ismount(view):
                subprocess.run(["umount", str(view)], check=False)


def _until_mounted(view: Path, process: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + 10
    while not view.is_mount():
        if process.poll() is not None or time.monotonic() > deadline:
            raise OSError(f"bindfs did not mount {view}")
        time.sleep(0.01)


# All seeds


def parse_seeds(text: str) -> range:
    """Seeds `A-B`, both included, or one seed. Raises ValueError."""
    first, _, last = text.partition("-")
    seeds = range(int(first), int(last or first) + 1)
    if not seeds:
        raise ValueError(f"{text} names no seed: the first is above the last")
    return seeds


def run_all(trials: Sequence[Trial], *, jobs: int, tell: Callable[[Seen], None]) -> list[Seen]:
    """Each seed in a process of its own, so many at once, in the order in which they end."""
    waiting, running, seen = list(trials), dict[subprocess.Popen[str], tuple[Trial, float]](), list[Seen]()
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                trial = waiting.pop(0)
                running[_start_seed(trial)] = (trial, time.monotonic())
            for process, (trial, began) in list(running.items()):
                if process.poll() is None and time.monotonic() - began < SEED_SECONDS:
                    continue
                del running[process]
                seen.append(_end_seed(process, trial))
                tell(seen[-1])
            time.sleep(0.02)
    finally:
        for process in running:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return seen


def _start_seed(trial: Trial) -> "subprocess.Popen[str]":
    """A seed in a session of its own, which can be ended as a whole. Not as a script: the environment is looked after already."""
    paths = os.pathsep.join([str(environment.ROOT / "scripts"), str(environment.ROOT)])
    surroundings = {**os.environ, "PYTHONPATH": paths, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", "import sys; from chaos import fill; fill.play_seed(sys.argv[1])", json.dumps(asdict(trial))]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=surroundings, start_new_session=True)


def _end_seed(process: "subprocess.Popen[str]", trial: Trial) -> Seen:
    is_late = process.poll() is None
    if is_late:
        os.killpg(process.pid, signal.SIGKILL)
    out = process.communicate()[0]
    if process.returncode == 0:
        return Seen(**json.loads(out))
    remark = f"did not end within {SEED_SECONDS:g} s" if is_late else f"the harness ended with {process.returncode}"
    return Seen(trial.seed, trial.variant, trial.keys, trial.views, remarks=[remark])


def play_seed(text: str) -> None:
    """Do one seed, given as JSON, and print what was seen."""
    body: dict[str, Any] = json.loads(text)
    body["faults"] = Faults(**body["faults"])
    trial = Trial(**body)
    folder = Path(tempfile.mkdtemp(prefix="cachestore-chaos-"))
    try:
        seen = run_seed(trial, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps(asdict(seen)))


def in_words(seen: Seen) -> str:
    """One line about a seed."""
    verdict = "complete" if seen.complete else f"INCOMPLETE: {seen.lost} lost, {seen.wrong} wrong"
    faults = f"{seen.kills} kills, {seen.stops} stops, {seen.deleted} deleted, {seen.cut} cut, {seen.flipped} bits"
    line = (
        f"seed {seen.seed:>3}  {verdict}; {seen.keys} keys, {seen.encodes} encodes, {seen.workers} workers, {seen.views} view(s); {faults}"
    )
    return "\n    ".join([f"{line}; {seen.seconds} s", *seen.remarks])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the seeds of the command line; 0 if every one is complete."""
    parser = argparse.ArgumentParser(description="Chaos for `fill`: kills, stops, joins and damage, seed by seed.")
    parser.add_argument("--seeds", type=parse_seeds, default=range(1, 31), metavar="A-B", help="default 1-30")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 1) // 2), help="seeds at once")
    parser.add_argument("--keys", type=int, default=KEYS, help=f"at most so many keys for a seed (default {KEYS})")
    parser.add_argument("--views", choices=["one", "two", "mixed"], default="mixed", help="one folder, or two stale views of it")
    parser.add_argument("--variant", choices=BUGS, default="", help="workers that are wrong on purpose")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    asked = parser.parse_args(arguments)
    if not hasattr(os, "fork"):
        print("chaos.py forks and stops processes: it needs a POSIX system", file=sys.stderr)
        return 2
    trials = [
        trial_for(seed, keys=asked.keys, variant=asked.variant, views={"one": 1, "two": 2, "mixed": None}[asked.views])
        for seed in asked.seeds
    ]
    if (reason := why_no_views()) and any(trial.views > 1 for trial in trials):
        named = ", ".join(str(trial.seed) for trial in trials if trial.views > 1)
        print(f"SKIPPED: two views in seed {named}, which run on one folder instead: {reason}", file=sys.stderr)
        trials = [replace(trial, views=1) for trial in trials]
    began = time.monotonic()
    seen = run_all(trials, jobs=asked.jobs, tell=(lambda _seen: None) if asked.json else (lambda one: print(in_words(one), flush=True)))
    complete = sum(one.complete for one in seen)
    if asked.json:
        body = {"complete": complete, "of": len(seen), "seconds": round(time.monotonic() - began, 1), "views_skipped": reason or ""}
        print(json.dumps({**body, "seeds": [asdict(one) for one in sorted(seen, key=lambda one: one.seed)]}))
    else:
        print(f"{complete} of {len(seen)} complete, {time.monotonic() - began:.0f} s")
    return 0 if complete == len(seen) else 1


if __name__ == "__main__":
    sys.exit(main())
