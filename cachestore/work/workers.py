"""Workers: the beat each one writes, the lock it holds for life, and how others judge whether it lives.

A worker is proved dead when its lock was seen held and now yields, or yields although the worker ran on this host in this boot, or
when it ran on this host in an earlier boot. Otherwise it is presumed dead only when its count has stood still for
max(180 s, 3 x its slowest batch) on the observer's own monotonic clock. No clocks of two machines are ever compared.

Two questions are asked of the dead: may their claims be taken over (whoever gave its lock back is dead), and did they die of what
they did (who said "ended" before did not).
"""

import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Final, Self

from cachestore.core.errors import FormatError
from cachestore.core.keys import Json
from cachestore.files.locks import LifeLock, is_locked
from cachestore.files.opening import names_in
from cachestore.files.paths import Layout, parse_plan, parse_worker
from cachestore.files.publish import make_folder, overwrite
from cachestore.files.records import encode_record, read_record

FORMAT: Final = "cachestore-worker"
VERSION: Final = 1

PLANNING: Final = "planning"
"""The phase of a worker until its pass is open."""

SILENT_SECONDS: Final = 180.0
SILENT_BATCHES: Final = 3.0
SLOW_SECONDS: Final = 10.0
SLOW_BATCHES: Final = 5.0
COUNTS: Final = ("reused", "encoded", "failed")
"""What a worker, a pass and a report count of units that are dealt with."""

_FIELDS: Final[Mapping[str, Any]] = {
    **dict.fromkeys(("host", "boot", "launch", "plan", "phase"), str),
    **dict.fromkeys(("pid", "world_size", "pass", "count", *COUNTS), int),
    **dict.fromkeys(("slowest_batch", "started", "updated"), (int, float)),
}
"""What every beat says, and of which kind it is."""
_DURATIONS: Final = ("lived", "pass_seconds", "at")
"""Seconds by a clock that does not jump; beats of earlier versions lack them."""

FIRST_BATCH_SECONDS: Final = 60.0
"""Stands for the slowest batch until there was one."""


def host_name() -> str:
    """The name of this machine."""
    return socket.gethostname()


def boot_id() -> str:
    """Tells this boot of the machine from others; empty where the system does not say (macOS, Windows)."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


@dataclass(slots=True)
class Beat:
    """This worker's count and lock. The count rises with work done, never from a timer, so that a hung worker is found too."""

    layout: Layout
    plan: str
    """Empty, with pass 0, while the plan is not known yet."""
    pass_number: int
    launch: str
    rank: int | None
    world_size: int
    clock: Callable[[], float] = time.monotonic
    worker: str = field(default_factory=lambda: secrets.token_hex(16))
    phase: str = PLANNING
    count: int = 0
    slowest_batch: float = 0.0
    reused: int = 0
    encoded: int = 0
    failed: int = 0
    stages: Mapping[str, Json] = field(default_factory=dict[str, Json])
    """How busy its stages were so far (see `stages`)."""
    detail: Mapping[str, Json] = field(default_factory=dict[str, Json])
    """What else a start wants others of its launch to know: what its plan follows from (see `agreement`)."""
    _lock: LifeLock | None = None
    _written_at: float = 0.0
    _started: float = field(default_factory=time.time)
    _began: float = field(init=False)
    _joined: float | None = None
    _pass_before: float = 0.0
    """How long the pass had gone on when this worker joined it."""

    def __post_init__(self) -> None:
        self._began = self.clock()

    def __enter__(self) -> Self:
        """Take the lock, then show the beat: only workers with a beat are ever probed."""
        make_folder(self.layout, self.layout.temporary)
        make_folder(self.layout, self.layout.workers)
        self._lock = LifeLock(self.layout.worker_lock(self.worker), bits=self.layout.mode.file_bits)
        self.write()
        return self

    def __exit__(self, *_exc: object) -> None:
        """Show the end, then give the lock back, even where the disk is full."""
        self.phase = "ended"
        try:
            self.write()
        finally:
            if self._lock is not None:
                self._lock.release()

    def join(self, plan: str, number: int, launch: str) -> None:
        """Show which pass this worker takes part in, and as which start of its launch."""
        self._pass_before, self._joined = seconds_of_pass(self.layout, plan, number), self.clock()
        self.plan, self.pass_number, self.launch = plan, number, launch
        self.write()

    def pass_seconds(self) -> float:
        """How long the pass has gone on: what others show of it, and this worker's own part. Pauses between two runs do not count."""
        return 0.0 if self._joined is None else self._pass_before + self.clock() - self._joined

    def rise(self, *, phase: str | None = None) -> None:
        """Count a piece of work; written at most every max(1 s, world size / 16 s)."""
        self.count += 1
        changed = phase is not None and phase != self.phase
        if phase is not None:
            self.phase = phase
        if changed or self.clock() - self._written_at >= seconds_between_beats(self.world_size):
            self.write()

    def batch_took(self, seconds: float) -> None:
        """Remember how long the slowest batch took, and count it."""
        self.slowest_batch = max(self.slowest_batch, seconds)
        self.rise()

    def write(self) -> None:
        """Show the beat now."""
        self._written_at = self.clock()
        own = ("worker", "rank", "world_size", "launch", "plan", "phase", "count", *COUNTS)
        seconds = {
            "slowest_batch": self.slowest_batch,
            "started": self._started,
            "updated": time.time(),
            "lived": self.clock() - self._began,
            "pass_seconds": self.pass_seconds(),
            "at": time.monotonic(),
        }
        body: dict[str, Json] = {name: getattr(self, name) for name in own}
        body |= {"host": host_name(), "boot": boot_id(), "pid": os.getpid(), "pass": self.pass_number, "stages": dict(self.stages)}
        body |= {name: round(value, 3) for name, value in seconds.items()} | dict(self.detail)
        overwrite(self.layout, self.layout.worker(self.worker), encode_record(FORMAT, VERSION, body))


def read_beat(layout: Layout, worker: str) -> Mapping[str, Any] | None:
    """What a worker last showed, or None where its file is gone, damaged, or another worker's."""
    try:
        beat = read_record(layout.worker(worker), FORMAT, VERSION)
    except (FormatError, OSError):
        return None
    return beat if beat.get("worker") == worker and _is_beat(beat) else None


def _is_beat(beat: Mapping[str, Any]) -> bool:
    """Whether it has what others look at, each of its kind."""
    is_whole = all(isinstance(beat.get(name), kind) for name, kind in _FIELDS.items())
    is_whole = is_whole and all(isinstance(beat.get(name, 0.0), int | float) for name in _DURATIONS)
    return is_whole and isinstance(beat.get("rank", ""), int | None) and (not beat["plan"] or parse_plan(beat["plan"]) is not None)


def read_beats(layout: Layout, *, plan: str | None = None) -> list[Mapping[str, Any]]:
    """The beats of all workers, or of those that work on a plan."""
    beats = (read_beat(layout, worker) for worker in map(parse_worker, names_in(layout.workers)) if worker)
    return [beat for beat in beats if beat is not None and (plan is None or beat["plan"] == plan)]


def seconds_of_pass(layout: Layout, plan: str, number: int) -> float:
    """How long a pass has gone on while somebody worked on it, as its workers show; 0 without any."""
    shown = (float(beat.get("pass_seconds", 0.0)) for beat in read_beats(layout, plan=plan) if beat["pass"] == number)
    return max(shown, default=0.0)


def lived(beat: Mapping[str, Any]) -> float:
    """How long a worker had been at it when it showed a beat."""
    return max(0.0, float(beat.get("lived", beat["updated"] - beat["started"])))


def age_of(beat: Mapping[str, Any]) -> float:
    """How long ago a beat was shown. Of a worker on this machine by the clock that runs since boot; else two clocks are compared."""
    if "at" in beat and beat["boot"] and (beat["host"], beat["boot"]) == (host_name(), boot_id()):
        return max(0.0, time.monotonic() - beat["at"])
    return max(0.0, time.time() - beat["updated"])


class Life(Enum):
    """What an observer believes of another worker."""

    LIVE = "live"
    SILENT = "silent"
    """Presumed dead: its count stood still for too long."""
    DEAD = "dead"
    """Proved dead."""


def is_held(layout: Layout, worker: str) -> bool | None:
    """Whether a worker's lock is held now; None where that cannot be told."""
    return is_locked(layout.worker_lock(worker))


def seconds_between_beats(world_size: int) -> float:
    """How long a working worker may show the same count, as it does not write each rise."""
    return max(1.0, world_size / 16)


def silent_after(slowest_batch: float) -> float:
    """For how long a count stands still before its worker is presumed dead; 0 where there was no batch yet."""
    return max(SILENT_SECONDS, SILENT_BATCHES * (slowest_batch or FIRST_BATCH_SECONDS))


def slow_after(slowest_batch: float, world_size: int) -> float:
    """For how long a count stands still before an idle worker does the work over.

    In a world of 512 a beat is written every 32 s: a count that stood still for 10 s then says nothing.
    """
    return max(SLOW_SECONDS, SLOW_BATCHES * (slowest_batch or FIRST_BATCH_SECONDS), 2 * seconds_between_beats(world_size))


def is_proved_dead(beat: Mapping[str, Any] | None, *, held: bool | None, was_held: bool, host: str, boot: str) -> bool:
    """Whether a worker's death is proved, by its beat and its lock (`held` is None where that cannot be told).

    Of a worker without a beat nothing is known. A lock that is held outweighs all: two machines may bear one name.
    """
    if beat is None or held:
        return False
    if held is False and was_held:
        return True
    if beat["host"] != host:  # locks may not reach over machines
        return False
    if beat["boot"] == boot:  # both may be empty: then it ran in this boot, or in an earlier one
        return held is False
    return bool(beat["boot"] and boot)


@dataclass(slots=True)
class _Seen:
    count: int
    since: float
    slowest_batch: float = 0.0
    world_size: int = 1
    was_held: bool = False


@dataclass(slots=True)
class Watch:
    """Judges other workers, by one observer's clock."""

    layout: Layout
    clock: Callable[[], float] = time.monotonic
    host: str = field(default_factory=host_name)
    boot: str = field(default_factory=boot_id)
    read: Callable[[Layout, str], Mapping[str, Any] | None] = read_beat
    """How a worker's beat is read, and its lock probed: from the store, or from memory in a simulation."""
    probe: Callable[[Layout, str], bool | None] = is_held
    _seen: dict[str, _Seen] = field(default_factory=dict[str, _Seen])
    _dead: set[str] = field(default_factory=set[str])

    def look(self, worker: str) -> Life:
        """Whether a worker lives, as far as can be told now. One whose beat is gone is watched as if its count stood still."""
        if worker in self._dead:
            return Life.DEAD
        beat = self.read(self.layout, worker)
        seen = self._remember(worker, beat)
        # After the beat: a worker holds its lock before it shows a beat.
        held = self.probe(self.layout, worker) if beat is not None else None
        if is_proved_dead(beat, held=held, was_held=seen.was_held, host=self.host, boot=self.boot):
            self._dead.add(worker)
            return Life.DEAD
        seen.was_held = seen.was_held or held is True
        return Life.SILENT if self.still_seconds(worker) >= silent_after(seen.slowest_batch) else Life.LIVE

    def has_died(self, worker: str) -> bool:
        """Whether a worker is proved dead and did not say before that it ended: what it did may have killed it.

        Where its beat is gone by now, it is taken for one that did not say so.
        """
        if self.look(worker) is not Life.DEAD:
            return False
        beat = self.read(self.layout, worker)  # again: it may have ended between the last look at its beat and the one at its lock
        return beat is None or beat["phase"] != "ended"

    def _remember(self, worker: str, beat: Mapping[str, Any] | None) -> _Seen:
        count = int(beat["count"]) if beat else -1
        seen = self._seen.get(worker)
        if seen is None:
            seen = self._seen[worker] = _Seen(count, self.clock())
        elif beat is not None and count != seen.count:
            seen.count, seen.since = count, self.clock()
        if beat is not None:
            seen.slowest_batch, seen.world_size = float(beat["slowest_batch"]), int(beat["world_size"])
        return seen

    def still_seconds(self, worker: str) -> float:
        """For how long a worker's count has not risen, as far as this observer saw."""
        seen = self._seen.get(worker)
        return self.clock() - seen.since if seen else 0.0

    def is_slow(self, worker: str) -> bool:
        """Whether an idle worker may do this one's work over: it may be a duplicate, never a loss."""
        seen = self._seen.get(worker)
        return seen is not None and self.still_seconds(worker) >= slow_after(seen.slowest_batch, seen.world_size)

    def patience(self, worker: str) -> float:
        """For how long a worker's count stands still before it is presumed dead, as far as this observer knows."""
        seen = self._seen.get(worker)
        return silent_after(seen.slowest_batch if seen else 0.0)

    def name_of(self, worker: str) -> str:
        """Who a worker is, for a message: its process and host, or its number alone where its beat is gone."""
        beat = self.read(self.layout, worker)
        return f"worker {worker} (heartbeat gone)" if beat is None else f"pid {beat['pid']} on {beat['host']}"

    def last_beat(self, worker: str) -> str:
        """Who a worker is and what its beat says last, for a message."""
        beat = self.read(self.layout, worker)
        if beat is None:
            return self.name_of(worker)
        rank = "without a rank" if beat["rank"] is None else f"rank {beat['rank']}"
        still = f"unchanged for {self.still_seconds(worker):.0f} s"
        return f"{rank}, {self.name_of(worker)}, last heartbeat: {beat['phase']!r} with count {beat['count']}, {still}"
