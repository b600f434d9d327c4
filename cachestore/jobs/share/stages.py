"""How busy the stages of encoding were. Reading and preparing share threads, so their waiting time is the same."""

import threading
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Literal

from cachestore.core.keys import Json

Stage = Literal["read", "prepare", "encode", "append"]

STAGES: Final[tuple[Stage, ...]] = ("read", "prepare", "encode", "append")
"""`read` (and digest), `prepare` (decode and resize, or tokenise), `encode`, `append` (compute checksums, write, sync, read back)."""

_NAMES: Final = {"read": "reading files", "prepare": "preparing", "encode": "encoding", "append": "writing"}
"""What stages are called for a person."""
_SHARED: Final[tuple[Stage, ...]] = ("read", "prepare")


@dataclass(slots=True)
class Stages:
    """One worker's busy and waiting seconds per stage, summed over its threads. Any thread may call `busy`."""

    clock: Callable[[], float] = time.monotonic
    _busy: dict[Stage, float] = field(default_factory=partial(dict[Stage, float].fromkeys, STAGES, 0.0))
    _wait: dict[Stage, float] = field(default_factory=partial(dict[Stage, float].fromkeys, STAGES, 0.0))
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def busy(self, stage: Stage) -> Generator[None]:
        """Count the time inside as a stage's work, also if an error ends it."""
        begun = self.clock()
        try:
            yield
        finally:
            spent = self.clock() - begun
            with self._lock:
                self._busy[stage] += spent

    @contextmanager
    def stretch(self, threads: int) -> Generator[None]:
        """Measure a time in which `threads` threads read and prepare: a stage waited while it was not busy."""
        begun, before = self.clock(), dict(self._busy)
        try:
            yield
        finally:
            seconds = self.clock() - begun
            did = {stage: self._busy[stage] - before[stage] for stage in STAGES}
            together = sum(did[stage] for stage in _SHARED)
            for stage in STAGES:
                self._wait[stage] += max(0.0, seconds * threads - together if stage in _SHARED else seconds - did[stage])

    def seconds(self) -> dict[str, tuple[float, float]]:
        """Return `{STAGE: (busy, waiting)}` in seconds; empty if nothing was done."""
        if not any(self._busy.values()):
            return {}
        return {stage: (round(self._busy[stage], 3), round(self._wait[stage], 3)) for stage in STAGES}


def sum_stages(workers: Iterable[Mapping[str, Sequence[float]]]) -> dict[str, Json]:
    """Sum the `stages` of workers: `{STAGE: {"busy_seconds", "wait_seconds"}, "limiting": STAGE}`; empty if none did anything.

    `limiting` is the stage whose threads were busy for the largest part of their time; of `read` and `prepare`, the one that took more.
    """
    reported = [stages for stages in workers if stages]
    if not reported:
        return {}
    names = ("busy_seconds", "wait_seconds")
    exact = {
        stage: {name: sum(float(stages.get(stage, (0, 0))[index]) for stages in reported) for index, name in enumerate(names)}
        for stage in STAGES
    }
    fractions = stage_fractions(exact)
    limiting = max(STAGES, key=lambda stage: (fractions.get(stage, 0.0), exact[stage]["busy_seconds"]))
    summed: dict[str, Json] = {stage: {name: round(seconds, 3) for name, seconds in exact[stage].items()} for stage in STAGES}
    return summed | {"limiting": limiting}


def stages_in_words(summed: Mapping[str, Any]) -> str:
    """Describe a result of `sum_stages`: the stage that everything waits for, and how busy each was. Empty if nothing was done."""
    if not summed:
        return ""
    busy = {_NAMES[stage]: f"{fraction:.0%}" for stage, fraction in stage_fractions(summed).items()}
    slowest = _NAMES[summed["limiting"]]
    others = ", ".join(f"{name} {fraction}" for name, fraction in busy.items() if name != slowest)
    return f"the slowest part was {slowest}, busy {busy[slowest]} of the time ({others})"


def stage_fractions(summed: Mapping[str, Any]) -> dict[str, float]:
    """Return how busy the threads of each stage were (0 to 1), from a result of `sum_stages`. Stages without any time are left out."""
    busy, wait = ({stage: float(summed[stage][name]) for stage in STAGES if stage in summed} for name in ("busy_seconds", "wait_seconds"))
    shared = sum(busy.get(stage, 0.0) for stage in _SHARED)
    worked = {stage: (shared if stage in _SHARED else busy[stage]) + wait[stage] for stage in busy}
    return {stage: busy[stage] / worked[stage] for stage in busy if worked[stage]}
