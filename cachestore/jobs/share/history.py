"""History: what is recorded of the passes over a data set, for those who look back at them."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from cachestore.core.errors import FormatError
from cachestore.files.paths import Layout
from cachestore.files.records import read_record
from cachestore.jobs.share.passes import ROUND_FORMAT, VERSION, PassRef, list_passes, read_done
from cachestore.jobs.share.plan import read_outline
from cachestore.jobs.share.retention import list_plans
from cachestore.jobs.share.stages import STAGES, stage_fractions, sum_stages
from cachestore.jobs.share.workers import Beat, read_heartbeats

_COUNTS: Final = ("reused", "encoded", "failed")


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass over a plan of the data set."""

    started: float
    """Unix time in seconds, by the clock of the process that began it."""
    plan: str
    number: int
    complete: bool
    seconds: float
    wanted: int
    reused: int
    encoded: int
    failed: int
    bytes: int
    stages: tuple["StageTimes", ...] = ()
    limiting: str = ""
    ranks: tuple["RankNumbers", ...] = ()
    """Workers whose heartbeats are still there."""


@dataclass(frozen=True, slots=True)
class StageTimes:
    """One stage of encoding, over all workers of a pass."""

    name: str
    busy_seconds: float
    wait_seconds: float
    share: float
    """Which part of its threads' time it was busy."""


@dataclass(frozen=True, slots=True)
class RankNumbers:
    """What one worker did."""

    rank: int | None
    host: str
    pid: int
    encoded: int
    reused: int
    failed: int
    seconds: float
    phase: str


@dataclass(frozen=True, slots=True)
class Failure:
    """A sample that an encoder could not encode."""

    sample: str
    encoder: str
    reason: str


@dataclass(frozen=True, slots=True)
class UnusedFiles:
    """The files of the source that are not used, for one reason."""

    reason: str
    count: int
    examples: tuple[str, ...]


_PassRecord = tuple[Pass, tuple[Failure, ...], tuple[UnusedFiles, ...]]
"""A pass, and what its report lists."""


def passes_of(layout: Layout, name: str) -> tuple[tuple[Pass, ...], tuple[Failure, ...], tuple[UnusedFiles, ...]]:
    """Return the passes over a data set's plans, newest first, and what failed and was not used in the newest one that has ended.

    Plans and passes that cannot be read are left out.
    """
    heartbeats = read_heartbeats(layout)
    found: list[_PassRecord] = []
    for plan in list_plans(layout):
        with suppress(FormatError, OSError, KeyError, TypeError, ValueError):
            if read_outline(layout, plan).catalog == name:
                found += [_read_pass(layout, PassRef(plan, number), heartbeats) for number in list_passes(layout, plan)]
    found.sort(key=lambda item: (item[0].started, item[0].number), reverse=True)
    failures, unused = next(((failures, unused) for one, failures, unused in found if one.complete), ((), ()))
    return tuple(one for one, *_lists in found), failures, unused


def _read_pass(layout: Layout, ref: PassRef, heartbeats: Sequence[Beat]) -> _PassRecord:
    done = read_done(layout, ref)
    own = [shown for shown in heartbeats if (shown.plan, shown.pass_number) == (ref.plan, ref.number)]
    report: Mapping[str, Any] = done.report if done is not None else {}
    reused, encoded, failed = (int(report[name] if done else sum(getattr(shown, name) for shown in own)) for name in _COUNTS)
    stages: Mapping[str, Any] = report.get("stages") or sum_stages(shown.stages for shown in own)
    fractions = stage_fractions(stages) if stages else {}
    in_order = sorted(own, key=lambda shown: (shown.rank is None, shown.rank, shown.started))
    started = min((shown.started for shown in own), default=0.0)
    with suppress(FormatError, OSError, KeyError):
        started = float(read_record(ref.folder(layout).round(0), ROUND_FORMAT, VERSION)["started"])
    one = Pass(
        started=started,
        plan=ref.plan,
        number=ref.number,
        complete=done is not None,
        seconds=float(report.get("seconds", 0.0)),
        wanted=int(report.get("wanted", 0)),
        reused=reused,
        encoded=encoded,
        failed=failed,
        bytes=int(report.get("bytes", 0)),
        stages=tuple(
            StageTimes(name, float(stages[name]["busy_seconds"]), float(stages[name]["wait_seconds"]), fractions[name])
            for name in STAGES
            if name in fractions
        ),
        limiting=str(stages.get("limiting", "")),
        ranks=tuple(
            RankNumbers(shown.rank, shown.host, shown.pid, shown.encoded, shown.reused, shown.failed, round(shown.lived, 3), shown.phase)
            for shown in in_order
        ),
    )
    failures = (Failure(str(each["sample"]), str(each["encoder"]), str(each["reason"])) for each in report.get("failures", ()))
    unused = (UnusedFiles(str(row["reason"]), int(row["count"]), (*map(str, row["examples"]),)) for row in report.get("unused", ()))
    return one, tuple(failures), tuple(unused)
