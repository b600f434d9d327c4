"""Workers: the beat each one writes, the lock it holds for life, and how others judge whether it lives.

A worker is proved dead when its lock was seen held and now yields, or yields although the worker ran on this host in this boot, or
when it ran on this host in an earlier boot. Otherwise it is presumed dead only when its count has stood still for
max(180 s, 3 x its slowest batch) on the observer's own monotonic clock. No clocks of two machines are ever compared.
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

from cachestore.errors import FormatError
from cachestore.files.locks import LifeLock, is_locked
from cachestore.files.opening import names_in
from cachestore.files.paths import Layout, parse_worker
from cachestore.files.publish import make_folder, overwrite
from cachestore.files.records import encode_record, read_record
from cachestore.keys import Json

FORMAT: Final = "cachestore-worker"
VERSION: Final = 1

PLANNING: Final = "planning"
"""The phase of a worker until its pass is open."""

SILENT_SECONDS: Final = 180.0
SILENT_BATCHES: Final = 3.0
SLOW_SECONDS: Final = 10.0
SLOW_BATCHES: Final = 5.0
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
    detail: Mapping[str, Json] = field(default_factory=dict[str, Json])
    """What else a start wants others of its launch to know: what its plan follows from (see `agreement`)."""
    _lock: LifeLock | None = None
    _written_at: float = 0.0
    _started: float = field(default_factory=time.time)

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
        self.plan, self.pass_number, self.launch = plan, number, launch
        self.write()

    def rise(self, *, phase: str | None = None) -> None:
        """Count a piece of work; written at most every max(1 s, world size / 16 s)."""
        self.count += 1
        changed = phase is not None and phase != self.phase
        if phase is not None:
            self.phase = phase
        if changed or self.clock() - self._written_at >= max(1.0, self.world_size / 16):
            self.write()

    def batch_took(self, seconds: float) -> None:
        """Remember how long the slowest batch took, and count it."""
        self.slowest_batch = max(self.slowest_batch, seconds)
        self.rise()

    def write(self) -> None:
        """Show the beat now."""
        self._written_at = self.clock()
        body: dict[str, Json] = {
            "worker": self.worker,
            "host": host_name(),
            "boot": boot_id(),
            "pid": os.getpid(),
            "rank": self.rank,
            "world_size": self.world_size,
            "launch": self.launch,
            "plan": self.plan,
            "pass": self.pass_number,
            "phase": self.phase,
            "count": self.count,
            "slowest_batch": round(self.slowest_batch, 3),
            "reused": self.reused,
            "encoded": self.encoded,
            "failed": self.failed,
            "started": round(self._started, 3),
            "updated": round(time.time(), 3),
            **self.detail,
        }
        overwrite(self.layout, self.layout.worker(self.worker), encode_record(FORMAT, VERSION, body))


def read_beat(layout: Layout, worker: str) -> Mapping[str, Any] | None:
    """What a worker last showed, or None where its file is gone or damaged."""
    try:
        return read_record(layout.worker(worker), FORMAT, VERSION)
    except (FormatError, OSError):
        return None


def read_beats(layout: Layout, *, plan: str | None = None) -> list[Mapping[str, Any]]:
    """The beats of all workers, or of those that work on a plan."""
    beats = (read_beat(layout, worker) for worker in map(parse_worker, names_in(layout.workers)) if worker)
    return [beat for beat in beats if beat is not None and (plan is None or beat["plan"] == plan)]


class Life(Enum):
    """What an observer believes of another worker."""

    LIVE = "live"
    SILENT = "silent"
    """Presumed dead: its count stood still for too long."""
    DEAD = "dead"
    """Proved dead."""


@dataclass(slots=True)
class _Seen:
    count: int
    since: float
    slowest_batch: float
    was_locked: bool = False


@dataclass(slots=True)
class Watch:
    """Judges other workers, by one observer's clock."""

    layout: Layout
    clock: Callable[[], float] = time.monotonic
    host: str = field(default_factory=host_name)
    boot: str = field(default_factory=boot_id)
    _seen: dict[str, _Seen] = field(default_factory=dict[str, _Seen])
    _dead: set[str] = field(default_factory=set[str])

    def look(self, worker: str) -> Life:
        """Whether a worker lives, as far as can be told now. One whose beat is gone is watched as if its count stood still."""
        if worker in self._dead:
            return Life.DEAD
        beat = read_beat(self.layout, worker)
        seen = self._remember(worker, beat)
        if self._is_proved_dead(worker, beat, seen):
            self._dead.add(worker)
            return Life.DEAD
        still = self.still_seconds(worker)
        return Life.SILENT if still >= max(SILENT_SECONDS, SILENT_BATCHES * self._slowest(worker)) else Life.LIVE

    def _remember(self, worker: str, beat: Mapping[str, Any] | None) -> _Seen:
        count = int(beat["count"]) if beat else -1
        seen = self._seen.get(worker)
        if seen is None:
            seen = self._seen[worker] = _Seen(count, self.clock(), 0.0)
        elif beat is not None and count != seen.count:
            seen.count, seen.since = count, self.clock()
        if beat is not None:
            seen.slowest_batch = float(beat["slowest_batch"])
        return seen

    def _is_proved_dead(self, worker: str, beat: Mapping[str, Any] | None, seen: _Seen) -> bool:
        if beat is not None and beat["host"] == self.host and self.boot and beat["boot"] != self.boot:
            return True
        held = is_locked(self.layout.worker_lock(worker)) if beat is not None else None
        if held:
            seen.was_locked = True
            return False
        ran_here = beat is not None and beat["host"] == self.host and beat["boot"] == self.boot
        return held is False and (seen.was_locked or ran_here)

    def still_seconds(self, worker: str) -> float:
        """For how long a worker's count has not risen, as far as this observer saw."""
        seen = self._seen.get(worker)
        return self.clock() - seen.since if seen else 0.0

    def is_slow(self, worker: str) -> bool:
        """Whether an idle worker may do this one's work over: it may be a duplicate, never a loss."""
        return self.still_seconds(worker) >= max(SLOW_SECONDS, SLOW_BATCHES * self._slowest(worker))

    def _slowest(self, worker: str) -> float:
        seen = self._seen.get(worker)
        return seen.slowest_batch if seen and seen.slowest_batch > 0 else FIRST_BATCH_SECONDS
