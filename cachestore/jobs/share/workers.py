"""Workers: each one's heartbeat, the lock that it holds while it lives, and how others judge whether it lives.

A worker is proved dead if its lock was seen held and is free now, if its lock is free and it ran on this host in this boot, or if it
ran on this host in an earlier boot. Otherwise it is presumed dead only when its count has stood still for
max(180 s, 3 x its slowest batch) on the observer's own monotonic clock. The clocks of two machines are not compared for this.

A dead worker's claims may be taken over. Whether its work killed it is another question: if its last heartbeat says "ended", it did not.
"""

import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from cachestore.core.errors import WRONG_FIELDS, FormatError, WriteFailed
from cachestore.core.keys import Json
from cachestore.files.locks import LifeLock, is_locked
from cachestore.files.opening import names_in
from cachestore.files.paths import Layout, parse_plan, parse_worker
from cachestore.files.publish import make_folder, overwrite
from cachestore.files.records import encode_record, read_record

if TYPE_CHECKING:
    from typing_extensions import Self

FORMAT: Final = "cachestore-worker"
VERSION: Final = 1

PLANNING: Final = "planning"
"""The phase of a worker until its pass is open."""
ENDED: Final = "ended"
"""The last phase of a worker that was not killed."""

SILENT_SECONDS: Final = 180.0
SILENT_BATCHES: Final = 3.0
SLOW_SECONDS: Final = 5.0
SLOW_BATCHES: Final = 5.0
COUNTS: Final = ("reused", "encoded", "failed")
"""The counts of finished units in a heartbeat, a pass and a report."""

SHOWN_FAILURES: Final = 5
"""The newest failures of a worker that its heartbeat holds."""
_REASON_CHARACTERS: Final = 300

FIRST_BATCH_SECONDS: Final = 60.0
"""Used for the slowest batch until there was one."""


def host_name() -> str:
    """The name of this machine."""
    return socket.gethostname()


def boot_id() -> str:
    """Return the id of this boot of the machine; empty on systems without one (macOS, Windows)."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


_KINDS: Final[Mapping[Any, Any]] = {str: str, int: int, float: (int, float)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """One heartbeat, as it was written or read."""

    worker: str
    rank: int | None = None
    world_size: int = 1
    launch: str = ""
    host: str = ""
    boot: str = ""
    """Empty on systems without one."""
    pid: int = 0
    plan: str = ""
    """Empty, with `pass_number` 0, until the plan is known."""
    pass_number: int = 0
    phase: str = PLANNING
    doing: str = PLANNING
    """What the worker does, for a person, such as "loading text_encoder_2"."""
    count: int = 0
    """Rises with work done."""
    slowest_batch: float = 0.0
    reused: int = 0
    encoded: int = 0
    failed: int = 0
    units: Mapping[str, tuple[int, int]] = field(default_factory=dict[str, "tuple[int, int]"])
    """By encoder: the units that it finished, and those that it has encoded but not published yet."""
    failures: tuple[str, ...] = ()
    """Descriptions of the newest units that failed."""
    failures_seen: int = 0
    """How many units have failed so far, also those that `failed` does not count yet."""
    stages: Mapping[str, tuple[float, float]] = field(default_factory=dict[str, "tuple[float, float]"])
    """How long each stage was busy and waited (see `stages`)."""
    started: float = 0.0
    """Seconds since the epoch, as `updated`."""
    updated: float = 0.0
    lived: float = 0.0
    """Seconds since the worker started, by its monotonic clock."""
    pass_seconds: float = 0.0
    """Seconds that the pass has taken so far, without pauses between two runs."""
    at: float = 0.0
    """When it was written, by the clock since boot of its machine."""
    detail: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Further fields for other invocations: what this one's plan follows from (see `agreement`)."""

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> "Beat":
        """Return a heartbeat as `as_json` gave it. Raises KeyError, TypeError or ValueError for a field that cannot be what it says."""
        values = {each.name: body[each.name] for each in fields(cls)}
        kinds = {each.name: _KINDS.get(each.type, object) for each in fields(cls)}
        if wrong := [name for name, value in values.items() if isinstance(value, bool) or not isinstance(value, kinds[name])]:
            raise TypeError(f"{wrong[0]} is not what it should be")
        if not (isinstance(values["rank"], int | None) and isinstance(values["detail"], dict) and isinstance(values["failures"], list)):
            raise TypeError("rank is a number, detail an object, and failures a list")
        if values["plan"] and parse_plan(values["plan"]) is None:
            raise ValueError("no plan has such a name")
        values["units"] = {str(encoder): (_whole(done), _whole(rest)) for encoder, (done, rest) in body["units"].items()}
        values["stages"] = {str(stage): (float(busy), float(waited)) for stage, (busy, waited) in body["stages"].items()}
        values["failures"] = tuple(map(_text, body["failures"]))
        return cls(**values)

    def as_json(self) -> dict[str, Json]:
        """The body of the record."""
        return asdict(self)

    @property
    def has_ended(self) -> bool:
        """Whether the worker wrote that it ends."""
        return self.phase == ENDED

    @property
    def is_of_this_boot(self) -> bool:
        """Whether it was written on this machine since it was started."""
        return (self.host, self.boot) == (host_name(), boot_id())

    @property
    def age(self) -> float:
        """Its age in seconds: by the clock since boot if it is from this machine, else by the clocks of both machines."""
        return max(0.0, time.monotonic() - self.at if self.boot and self.is_of_this_boot else time.time() - self.updated)

    @property
    def done(self) -> int:
        """Units that are published, found or failed."""
        return self.reused + self.encoded + self.failed

    def __str__(self) -> str:
        """The worker's pid and host, for a message."""
        return f"pid {self.pid} on {self.host}"


def _whole(number: Any) -> int:
    if type(number) is not int:
        raise TypeError("no whole number")
    return number


def _text(text: Any) -> str:
    if not isinstance(text, str):
        raise TypeError("no text")
    return text


@dataclass(slots=True)
class Heartbeat:
    """Writes this worker's heartbeat, and holds its lock. The count rises with work, never from a timer: so a hung worker is noticed."""

    layout: Layout
    plan: str
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
    doing: str = PLANNING
    units: dict[str, list[int]] = field(default_factory=dict[str, "list[int]"])
    failures: list[str] = field(default_factory=list[str])
    failures_seen: int = 0
    stages: Mapping[str, tuple[float, float]] = field(default_factory=dict[str, "tuple[float, float]"])
    detail: Mapping[str, Json] = field(default_factory=dict[str, Json])
    on_write: Callable[[], None] | None = None
    """Called after each writing, so that the process can show what it does."""
    _lock: LifeLock | None = None
    _written_at: float = 0.0
    _started: float = field(default_factory=time.time)
    _began: float = field(init=False)
    _joined: float | None = None
    _pass_before: float = 0.0
    """Seconds that the pass had taken when this worker joined it."""

    def __post_init__(self) -> None:
        self._began = self.clock()

    def __enter__(self) -> "Self":
        """Take the lock, then write the heartbeat: a lock is checked only if its worker has a heartbeat."""
        make_folder(self.layout, self.layout.temporary)
        make_folder(self.layout, self.layout.workers)
        self._lock = LifeLock(self.layout.worker_lock(self.worker), bits=self.layout.mode.file_bits)
        self.write()
        return self

    def __exit__(self, kind: type[BaseException] | None = None, *_exc: object) -> None:
        """Write the phase "ended", then release the lock, even if the disk is full. That hides no error that ends the block."""
        self.phase = ENDED
        try:
            self.write()
        except WriteFailed:
            if kind is None:
                raise
        finally:
            if self._lock is not None:
                self._lock.release()

    def join(self, plan: str, number: int, launch: str) -> None:
        """Write which pass this worker takes part in; `launch` includes the number of the invocation."""
        self._pass_before, self._joined = seconds_of_pass(self.layout, plan, number), self.clock()
        self.plan, self.pass_number, self.launch = plan, number, launch
        self.write()

    def pass_seconds(self) -> float:
        """Return the seconds that the pass has taken: before this worker joined, and since. Pauses between two runs do not count."""
        return 0.0 if self._joined is None else self._pass_before + self.clock() - self._joined

    def rise(self, *, phase: str | None = None, doing: str | None = None) -> None:
        """Raise the count. A new phase is written at once, a new count at most every max(1, world size / 64) seconds.

        `doing` says in words what the worker does now; a new phase without it is its own name.
        """
        self.count += 1
        before = self.phase, self.doing
        self.phase = phase or self.phase
        self.doing = doing or (self.phase if self.phase != before[0] else self.doing)
        if before != (self.phase, self.doing) or self.clock() - self._written_at >= heartbeat_seconds(self.world_size):
            self.write()

    def show(self, *, doing: str) -> None:
        """Write what the worker does, if that is new. The count stays: waiting is no work."""
        if doing != self.doing:
            self.doing = doing
            self.write()

    def has_failed(self, what: str, reason: str) -> None:
        """Show a unit that failed; `what` names it."""
        self.failures_seen += 1
        self.failures = [*self.failures, f"{what}: {reason}"[:_REASON_CHARACTERS]][-SHOWN_FAILURES:]

    def has_finished(self, encoder: str, *, units: int = 0, unpublished: int = 0) -> None:
        """Count units of an encoder that are finished, and by how much the number of encoded, unpublished ones changed."""
        counts = self.units.setdefault(encoder, [0, 0])
        counts[:] = counts[0] + units, max(0, counts[1] + unpublished)

    def batch_took(self, seconds: float) -> None:
        """Raise the count, and remember the seconds of the slowest batch."""
        self.slowest_batch = max(self.slowest_batch, seconds)
        self.rise()

    def now(self) -> Beat:
        """The heartbeat as it is now."""
        return Beat(
            worker=self.worker,
            rank=self.rank,
            world_size=self.world_size,
            launch=self.launch,
            host=host_name(),
            boot=boot_id(),
            pid=os.getpid(),
            plan=self.plan,
            pass_number=self.pass_number,
            phase=self.phase,
            doing=self.doing,
            count=self.count,
            slowest_batch=round(self.slowest_batch, 3),
            reused=self.reused,
            encoded=self.encoded,
            failed=self.failed,
            units={encoder: (done, rest) for encoder, (done, rest) in self.units.items()},
            failures=tuple(self.failures),
            failures_seen=self.failures_seen,
            stages=self.stages,
            started=round(self._started, 3),
            updated=round(time.time(), 3),
            lived=round(self.clock() - self._began, 3),
            pass_seconds=round(self.pass_seconds(), 3),
            at=round(time.monotonic(), 3),
            detail=self.detail,
        )

    def write(self) -> None:
        """Write the heartbeat now."""
        self._written_at = self.clock()
        overwrite(self.layout, self.layout.worker(self.worker), encode_record(FORMAT, VERSION, self.now().as_json()))
        if self.on_write is not None and self.phase != ENDED:
            self.on_write()


def read_heartbeat(layout: Layout, worker: str) -> Beat | None:
    """Return a worker's last heartbeat; None if the file is gone, damaged, or of another worker."""
    try:
        shown = Beat.parse(read_record(layout.worker(worker), FORMAT, VERSION))
    except (FormatError, OSError, *WRONG_FIELDS):
        return None
    return shown if shown.worker == worker else None


def read_heartbeats(layout: Layout, *, plan: str | None = None, number: int | None = None) -> list[Beat]:
    """Return the heartbeats of all workers, or of those that work on `plan`, and on its pass `number`."""
    read = (read_heartbeat(layout, worker) for worker in map(parse_worker, names_in(layout.workers)) if worker)
    heartbeats = [shown for shown in read if shown is not None and plan in (None, shown.plan)]
    return [shown for shown in heartbeats if number in (None, shown.pass_number)]


def seconds_of_pass(layout: Layout, plan: str, number: int) -> float:
    """Return for how many seconds workers have worked on a pass, by their heartbeats; 0 if there are none."""
    return max((shown.pass_seconds for shown in read_heartbeats(layout, plan=plan, number=number)), default=0.0)


class Life(Enum):
    """What an observer believes about another worker."""

    LIVE = "live"
    SILENT = "silent"
    """Presumed dead: its count has stood still for too long."""
    DEAD = "dead"
    """Proved dead."""


def is_held(layout: Layout, worker: str) -> bool | None:
    """Return whether a worker's lock is held now; None if that cannot be found out."""
    return is_locked(layout.worker_lock(worker))


def heartbeat_seconds(world_size: int) -> float:
    """Return for how many seconds a working worker's file may show the same count, as not each rise is written."""
    return max(1.0, world_size / 64)


def silent_after(slowest_batch: float) -> float:
    """Return the seconds without a rise after which a worker is presumed dead; `slowest_batch` is 0 before the first batch."""
    return max(SILENT_SECONDS, SILENT_BATCHES * (slowest_batch or FIRST_BATCH_SECONDS))


def slow_after(slowest_batch: float, world_size: int) -> float:
    """Return the seconds without a rise after which an idle worker encodes the same units again.

    With 512 ranks a heartbeat is written every 8 s: then a count that stood still for 5 s means nothing.
    """
    return max(SLOW_SECONDS, SLOW_BATCHES * (slowest_batch or FIRST_BATCH_SECONDS), 2 * heartbeat_seconds(world_size))


def is_proved_dead(shown: Beat | None, *, held: bool | None, was_held: bool, host: str, boot: str) -> bool:
    """Return whether heartbeat and lock prove a worker dead. `held` is None if the lock cannot be checked.

    Without a heartbeat nothing is known. If the lock is held, the worker lives, whatever the host's name: two machines may share one.
    """
    if shown is None or held:
        return False
    if held is False and was_held:
        return True
    if shown.host != host:  # locks may not work across machines
        return False
    if shown.boot == boot:  # both may be empty: it ran in this boot or an earlier one
        return held is False
    return bool(shown.boot and boot)


@dataclass(slots=True)
class _Seen:
    count: int
    since: float
    slowest_batch: float = 0.0
    world_size: int = 1
    was_held: bool = False


@dataclass(slots=True)
class Watch:
    """Judges whether other workers live, by one observer's clock."""

    layout: Layout
    clock: Callable[[], float] = time.monotonic
    host: str = field(default_factory=host_name)
    boot: str = field(default_factory=boot_id)
    read: Callable[[Layout, str], Beat | None] = read_heartbeat
    """`read` gets a worker's heartbeat and `probe` checks its lock: in the store, or in memory for a simulation."""
    probe: Callable[[Layout, str], bool | None] = is_held
    _seen: dict[str, _Seen] = field(default_factory=dict[str, _Seen])
    _dead: set[str] = field(default_factory=set[str])

    def life_of(self, worker: str) -> Life:
        """Return whether a worker lives, as far as is known now. A missing heartbeat counts as one whose count does not rise."""
        if worker in self._dead:
            return Life.DEAD
        shown = self.read(self.layout, worker)
        seen = self._remember(worker, shown)
        # After the heartbeat was read: a worker takes its lock before it writes one.
        held = self.probe(self.layout, worker) if shown is not None else None
        if is_proved_dead(shown, held=held, was_held=seen.was_held, host=self.host, boot=self.boot):
            self._dead.add(worker)
            return Life.DEAD
        seen.was_held = seen.was_held or held is True
        return Life.SILENT if self.still_seconds(worker) >= silent_after(seen.slowest_batch) else Life.LIVE

    def has_died(self, worker: str) -> bool:
        """Return whether a worker is proved dead and its last heartbeat does not say "ended": its work may have killed it.

        A heartbeat that is gone by now counts as one that does not say so.
        """
        if self.life_of(worker) is not Life.DEAD:
            return False
        shown = self.read(self.layout, worker)  # again: it may have ended after its heartbeat was read and before its lock was checked
        return shown is None or not shown.has_ended

    def _remember(self, worker: str, shown: Beat | None) -> _Seen:
        count = shown.count if shown is not None else -1
        seen = self._seen.get(worker)
        if seen is None:
            seen = self._seen[worker] = _Seen(count, self.clock())
        elif shown is not None and count != seen.count:
            seen.count, seen.since = count, self.clock()
        if shown is not None:
            seen.slowest_batch, seen.world_size = shown.slowest_batch, shown.world_size
        return seen

    def still_seconds(self, worker: str) -> float:
        """Return for how many seconds this observer has seen a worker's count stand still."""
        seen = self._seen.get(worker)
        return self.clock() - seen.since if seen else 0.0

    def is_slow(self, worker: str) -> bool:
        """Return whether an idle worker may encode this worker's units again: that may make duplicates, but loses nothing."""
        seen = self._seen.get(worker)
        return seen is not None and self.still_seconds(worker) >= slow_after(seen.slowest_batch, seen.world_size)

    def patience(self, worker: str) -> float:
        """Return the seconds without a rise after which this observer presumes a worker dead."""
        seen = self._seen.get(worker)
        return silent_after(seen.slowest_batch if seen else 0.0)

    def name_of(self, worker: str) -> str:
        """Return a worker's pid and host for a message, or its id if its heartbeat is gone."""
        shown = self.read(self.layout, worker)
        return f"worker {worker} (heartbeat gone)" if shown is None else str(shown)

    def last_heartbeat(self, worker: str) -> str:
        """Describe a worker and its last heartbeat, for a message."""
        shown = self.read(self.layout, worker)
        if shown is None:
            return self.name_of(worker)
        rank = "without a rank" if shown.rank is None else f"rank {shown.rank}"
        return (
            f"{rank}, {shown}, last heartbeat: {shown.phase!r} with count {shown.count}, unchanged for {self.still_seconds(worker):.0f} s"
        )
