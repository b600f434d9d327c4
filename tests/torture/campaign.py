"""A campaign: so many faults, chosen by a seed, and what must hold after each. Points are judged in processes of their own.

A module of this folder that has `CAMPAIGNS` (name -> Campaign) is a part of `python3 scripts/torture.py`; nothing else lists it.
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
from pathlib import Path
from typing import Final, Generic, TypeVar

Point = TypeVar("Point")

HANG_SECONDS: Final = 10.0
"""What takes longer hangs."""
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
    points: Iterable[Point], judge: Callable[[Point], Sequence[str]], *, at_once: int | None = None, seconds: float = 6 * HANG_SECONDS
) -> Iterator[tuple[Point, Sequence[str]]]:
    """Judge each point in a forked process, several at once; yields (point, violations) as they end. No points yield nothing.

    This process must have no threads. What ends a judge by a signal, takes it longer than `seconds` or makes it raise is a violation
    too; the processes that it started are ended with it.
    """
    waiting = iter(points)
    running: dict[int, _Judge[Point]] = {}
    limit = at_once or jobs()
    try:
        while True:
            while len(running) < limit and (point := next(waiting, None)) is not None:
                one = _begin(point, judge, time.monotonic() + seconds)
                running[one.reading] = one
            if not running:
                return
            for reading in select.select(list(running), [], [], 0.5)[0]:
                if _take_in(running[reading]):
                    one = running.pop(reading)
                    yield one.point, _verdict(one)
            for late in [one for one in running.values() if time.monotonic() > one.deadline]:
                del running[late.reading]
                yield late.point, _verdict(late, is_late=True)
    finally:
        for one in running.values():
            _verdict(one, is_late=True)


@dataclass(slots=True)
class _Judge(Generic[Point]):
    point: Point
    pid: int
    reading: int
    deadline: float
    said: bytearray = field(default_factory=bytearray)


def _begin(point: Point, judge: Callable[[Point], Sequence[str]], deadline: float) -> _Judge[Point]:
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        return _Judge(point, pid, reading, deadline)
    code = 1
    try:
        os.setpgid(0, 0)
        os.close(reading)
        try:
            violations = judge(point)
        except BaseException:  # noqa: BLE001 - the boundary of a process: a judge that raises has found something
            violations = [f"raised {traceback.format_exc()}"]
        with os.fdopen(writing, "wb") as out:
            out.write("\0".join(violations).encode("utf-8", "replace"))
        code = 0
    finally:
        os._exit(code)


def _take_in(one: _Judge[Point]) -> bool:
    """Read what a judge says; whether it has said everything."""
    data = os.read(one.reading, 65_536)
    one.said += data
    return not data


def _verdict(one: _Judge[Point], *, is_late: bool = False) -> list[str]:
    """The violations of a judge that has ended, or that is ended now."""
    if is_late:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(one.pid, signal.SIGKILL)
    os.close(one.reading)
    code = os.waitstatus_to_exitcode(os.waitpid(one.pid, 0)[1])
    if is_late:
        return ["it did not end in time"]
    if code != 0:
        return [f"the judge ended with {code}"]
    return one.said.decode().split("\0") if one.said else []


def outcome_of(results: Iterable[tuple[object, Sequence[str]]], *, remarks: Sequence[str] = ()) -> Outcome:
    """The outcome of judged points: each point with a violation is named by its `repr`."""
    points, violations = 0, list[str]()
    for point, found in results:
        points += 1
        if found:
            violations.append(f"{point!r}: {'; '.join(found)}")
    return Outcome(points, tuple(violations), tuple(remarks))
