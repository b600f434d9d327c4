"""A campaign: so many faults, chosen by a seed, and what must hold after each. Points are judged in processes of their own.

A module of this folder that has `CAMPAIGNS` (name -> Campaign) is a part of `python3 scripts/chaos/torture.py`; nothing else lists it.
"""

import os
import select
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Final, Generic, ParamSpec, TypeVar

Point = TypeVar("Point")
Given = ParamSpec("Given")
Answer = TypeVar("Answer")

HANG_SECONDS: Final = 10.0
"""A call that takes longer hangs. Time in which it was ready to run and others ran instead does not count: a busy machine is no hang."""
LATEST_SECONDS: Final = 900.0
"""A judge that says nothing of a point for so long is ended, however busy the machine is."""
_WARM: Final = (
    "filelock",
    "numpy.ma",
    "cachestore.encode.batching.environment",
    "cachestore.encode.pictures.images",
    "cachestore.jobs.start.here",
    "cachestore.care.recompute",
    "cachestore.store.read.stats",
    "cachestore.store.write.writer",
)
"""What every judge would else import for itself, when it is first used."""
_MEMORY_FOLDER: Final = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a campaign."""

    points: int
    violations: tuple[str, ...] = ()
    """A sentence for each point at which something did not hold, with what it takes to play it again."""
    remarks: tuple[str, ...] = ()
    """What else a person wants to know: how many of which kind."""


@dataclass(frozen=True, slots=True)
class Campaign:
    """How a campaign is played, and how many points its whole has."""

    play: Callable[[int, int], Outcome]
    """Takes how many points and a seed; fewer points are judged only where there are no more."""
    count: int


def jobs() -> int:
    """How many points are judged at once."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def scratch() -> Generator[Path]:
    """A folder for stores that are thrown away: in memory where there is such a file system, as nothing here is to survive."""
    parent = _MEMORY_FOLDER if _MEMORY_FOLDER.is_dir() else None
    folder = Path(tempfile.mkdtemp(prefix="cachestore-torture-", dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def judged(
    points: Iterable[Point],
    judge: Callable[[Point], Sequence[str]],
    *,
    each: int = 1,
    at_once: int | None = None,
    seconds: float = LATEST_SECONDS,
) -> Generator[tuple[Point, Sequence[str]]]:
    """Judge points in forked processes, several at once and `each` so many; yields (point, violations) as they come. None of no points.

    This process must have no threads. What ends a judge by a signal, takes it longer than `seconds` for one point or makes it raise is a
    violation too; the processes that it started are ended with it, and the points that it had not begun are another's. Closed before its
    end, it ends who is judging.
    """
    warm_up()
    waiting = iter(points)
    running: dict[int, _Judge[Point]] = {}
    limit = at_once or jobs()
    left: list[Point] = []
    try:
        while True:
            while len(running) < limit and (some := left[:each] or list(islice(waiting, each))):
                del left[: len(some)]
                one = _begin(some, judge, seconds)
                running[one.reading] = one
            if not running:
                return
            ready = select.select(list(running), [], [], 0.5)[0]
            late = [one.reading for one in running.values() if time.monotonic() > one.deadline]
            for one in [running[reading] for reading in {*ready, *late}]:
                has_ended = one.take_in() if one.reading in ready else False
                yield from one.reported()
                if has_ended or time.monotonic() > one.deadline:
                    del running[one.reading]
                    yield from one.end(is_late=not has_ended)
                    left += one.points
    finally:
        for one in running.values():
            list(one.end(is_late=True))


class Hang(BaseException):
    """A call that does not end. No error of the package, so that nothing in it takes this for one."""


def timed(call: Callable[Given, Answer], *given: Given.args, **named: Given.kwargs) -> Answer:
    """Make a call that may take HANG_SECONDS, in the main thread of a judge. Raises Hang where it is by then, with the traceback to there.

    What holds the interpreter's lock for good is ended with its judge.
    """
    began, waited = time.monotonic(), waited_seconds(os.getpid())

    def ring(_number: int, _frame: object) -> None:
        left = HANG_SECONDS - (time.monotonic() - began) + (waited_seconds(os.getpid()) - waited)
        if left > 0:
            signal.setitimer(signal.ITIMER_REAL, max(left, 0.01))
            return
        raise Hang(f"it takes longer than {HANG_SECONDS:g} s")

    before = signal.signal(signal.SIGALRM, ring)
    others, _interval = signal.setitimer(signal.ITIMER_REAL, HANG_SECONDS)
    try:
        return call(*given, **named)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if others:  # somebody else's, such as of a test in whose process this is called
            signal.setitimer(signal.ITIMER_REAL, max(others - (time.monotonic() - began), 0.01))


def waited_seconds(*pids: int) -> float:
    """For how long the main threads of processes, which may have ended, waited for a processor; 0 where the system does not tell."""
    try:  # Linux: nanoseconds that it ran, that it waited for a processor, and how often it got one
        return sum(int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) for pid in pids) / 1e9
    except (OSError, IndexError):
        return 0.0


def warm_up() -> None:
    """Import here what every judge would else import for itself, when it is first used."""
    from PIL import Image

    Image.init()
    for module in _WARM:
        import_module(module)


@dataclass(slots=True)
class _Judge(Generic[Point]):
    """A process that judges points, as its parent sees it."""

    points: list[Point]
    """Those that it said nothing of yet, in order."""
    pid: int
    reading: int
    seconds: float
    deadline: float
    data: bytearray = field(default_factory=bytearray)

    def take_in(self) -> bool:
        """Read what it says; whether it has ended."""
        data = os.read(self.reading, 65_536)
        self.data += data
        return not data

    def reported(self) -> Iterator[tuple[Point, Sequence[str]]]:
        """The verdicts that are complete."""
        while (end := self.data.find(_END)) >= 0:
            text = self.data[:end].decode()
            del self.data[: end + len(_END)]
            self.deadline = time.monotonic() + self.seconds
            yield self.points.pop(0), text.split(_BETWEEN) if text else []

    def end(self, *, is_late: bool) -> Iterator[tuple[Point, Sequence[str]]]:
        """Wait for its end, or see to it; what it was at then is a violation."""
        if is_late:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
        os.close(self.reading)
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        if self.points and (is_late or code != 0):
            yield self.points.pop(0), ["it did not end in time" if is_late else f"the judge ended with {code}"]


_BETWEEN: Final = "\0"
_END: Final = b"\1"


def _begin(points: list[Point], judge: Callable[[Point], Sequence[str]], seconds: float) -> _Judge[Point]:
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        return _Judge(points, pid, reading, seconds, time.monotonic() + seconds)
    code = 1
    try:
        os.setpgid(0, 0)
        os.close(reading)
        with os.fdopen(writing, "wb") as out:
            for point in points:
                try:
                    violations = judge(point)
                except BaseException:  # noqa: BLE001 - the boundary of a process: a judge that raises has found something
                    violations = [f"raised {traceback.format_exc()}"]
                out.write(_BETWEEN.join(violations).encode("utf-8", "replace") + _END)
                out.flush()
        code = 0
    finally:
        os._exit(code)


def outcome_of(results: Iterable[tuple[object, Sequence[str]]], *, remarks: Sequence[str] = ()) -> Outcome:
    """The outcome of judged points: each point with a violation is named by its `repr`."""
    points, violations = 0, list[str]()
    for point, found in results:
        points += 1
        if found:
            violations.append(f"{point!r}: {'; '.join(found)}")
    return Outcome(points, tuple(violations), tuple(remarks))
