"""How far a pass is, seen from outside: from rounds, claims, ledgers and heartbeats. Changes nothing.

A look lists claims and ledgers and reads the heartbeats of running workers. What cannot change any more (a plan's header, a round, the
heartbeat of a worker that ended) is read once by each observer. A plan's rows are never read.
"""

import operator
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final, cast

from cachestore.core.errors import FormatError
from cachestore.core.keys import Json
from cachestore.core.words import in_short, plural
from cachestore.files.locks import is_locked
from cachestore.files.opening import names_in
from cachestore.files.paths import ClaimName, Layout, damaged, parse_plan, parse_worker
from cachestore.jobs.share.claims import Claims
from cachestore.jobs.share.ledgers import list_ledgers
from cachestore.jobs.share.partition import partition_count
from cachestore.jobs.share.passes import PassRef, list_passes, list_rounds, read_done, read_round_record
from cachestore.jobs.share.plan import Outline, read_outline
from cachestore.jobs.share.workers import COUNTS, ENDED, SILENT_SECONDS, Beat, Watch, read_heartbeat

STILL_SECONDS: Final = 30.0
"""A worker whose count has not risen for longer than this is reported as silent."""

WORKING: Final = "working"
WAITING: Final = "waiting"
"""The phase of a worker that has nothing to do until others finish: its count does not rise, but it is not silent."""


@dataclass(frozen=True, slots=True)
class RankStatus:
    """One worker of a pass."""

    rank: int | None
    host: str
    pid: int
    rate: float
    """Units per second since it started; falls while the worker publishes nothing."""
    done: int
    beat_age_seconds: float
    """By a monotonic clock; for a worker on another machine, by the clocks of both machines."""
    phase: str
    reused: int
    encoded: int
    failed: int
    alive: bool | None
    """None if this machine cannot find out."""
    worker: str
    launch: str
    count: int
    slowest_batch: float
    still_seconds: float
    """For how long this observer has seen its count stand still; at the first look, the heartbeat's age."""
    doing: str = ""
    """What it does, in words, such as "loading text_encoder_2"."""
    failures: tuple[str, ...] = ()
    """Descriptions of the newest units that failed."""
    failures_seen: int = 0
    """How many units failed so far; `failed` counts them when their partition is finished."""

    @property
    def is_at_work(self) -> bool:
        """Whether it lives and has not ended, as far as is known."""
        return self.alive is not False and self.phase != ENDED and (self.alive is True or self.still_seconds < SILENT_SECONDS)

    @property
    def is_silent(self) -> bool:
        """Whether it should be working but its count has not risen for more than 30 s."""
        return self.alive is not False and self.phase not in {ENDED, WAITING} and self.still_seconds > STILL_SECONDS


@dataclass(frozen=True, slots=True)
class EncoderStatus:
    """How far one encoder of a pass is."""

    encoder: str
    total: int
    """Its units in the plan."""
    done: int
    """Those that are published, found or failed."""
    unpublished: int
    """Those that running workers have encoded, but not published yet."""


@dataclass(frozen=True, slots=True, repr=False)
class PassStatus:
    """The state of one pass of a plan, usually the newest."""

    plan: str
    number: int
    name: str
    partitions: int
    """Partitions of the newest round."""
    finished: int
    claimed: int
    """Claimed and not finished."""
    reused: int
    encoded: int
    failed: int
    complete: bool
    total: int
    """Units of the plan."""
    units: int
    """Units in the newest round."""
    round: int
    ranks: tuple[RankStatus, ...]
    encoders: tuple[EncoderStatus, ...] = ()
    prompts: int = 0
    """How many prompts for validation the plan has. Their texts are among its units."""
    generation: int = 0
    """The generation with which it ended; 0 while it has not."""

    @property
    def done(self) -> int:
        """Units that are published, found or failed."""
        return self.reused + self.encoded + self.failed

    @property
    def at_work(self) -> tuple[RankStatus, ...]:
        """The workers that live and have not ended."""
        return tuple(one for one in self.ranks if one.is_at_work)

    @property
    def silent(self) -> tuple[RankStatus, ...]:
        """The silent workers of running launches."""
        running = {one.launch for one in self.at_work}
        return tuple(one for one in self.ranks if one.is_silent and one.launch in running)

    @property
    def gone(self) -> tuple[RankStatus, ...]:
        """The workers that died while their launch goes on, and that no new worker of the same rank has replaced."""
        running = {one.launch for one in self.at_work}
        again = {(one.launch, one.rank) for one in self.at_work if one.rank is not None}
        dead = (one for one in self.ranks if one.alive is False and one.phase != ENDED)
        return tuple(one for one in dead if one.launch in running and (one.launch, one.rank) not in again)

    @property
    def unpublished(self) -> int:
        """Units that running workers have encoded, but not published yet: small ones wait until a segment is full."""
        return sum(one.unpublished for one in self.encoders)

    def counts(self) -> dict[str, Json]:
        """What `on_progress` gets: units over all workers (`reused`, `encoded`, `failed`, their sum `done`) and in the plan (`total`).

        Also `plan`, `pass`, and `doing`: what the workers do, in words.
        """
        counts: dict[str, Json] = {name: getattr(self, name) for name in (*COUNTS, "done", "total")}
        return {"plan": self.plan, "pass": self.number, **counts, "doing": ", ".join(dict.fromkeys(one.doing for one in self.at_work))}

    __repr__ = in_short

    def as_json(self) -> dict[str, Json]:
        """The object that `cachestore status --json` lists."""
        body = asdict(self)
        body["pass"] = body.pop("number")
        return body


@dataclass(frozen=True, slots=True)
class LaunchStatus:
    """What processes of this machine do, and how far their pass is."""

    ranks: tuple[RankStatus, ...] = ()
    """Those of the pass once it is known, also on other machines; before, the processes that have a heartbeat."""
    status: PassStatus | None = None
    """None until the pass is known, or if it cannot be read."""
    launch: str = ""
    """The name of their launch; empty until one of them has joined a pass."""


def all_status(layout: Layout) -> list[PassStatus]:
    """Return the newest pass of every plan in a store; damaged plans are left out."""
    observer = Observer(layout)
    found = (observer.newest(plan) for plan in filter(None, map(parse_plan, names_in(layout.plans))))
    return [status for status in found if status is not None]


def pass_status(layout: Layout, ref: PassRef, *, without: str = "") -> PassStatus:
    """Return how far a pass is; `without` is a launch whose workers are left out.

    Raises FormatError or FileNotFoundError if its plan or a round cannot be read.
    """
    return Observer(layout, without=without).status(ref)


@dataclass(slots=True)
class Observer:
    """Looks at passes repeatedly, by its own clock. For use in one thread; keeps no files open."""

    layout: Layout
    clock: Callable[[], float] = time.monotonic
    began: float = field(default_factory=time.monotonic)
    """When it began, by the clock since boot. `status_of_processes` ignores older workers: their pids were used again."""
    without: str = ""
    """A launch whose workers are left out."""
    _outlines: dict[str, Outline] = field(default_factory=dict[str, Outline])
    _rounds: dict[tuple[PassRef, int], tuple[int, ...]] = field(default_factory=dict[tuple[PassRef, int], "tuple[int, ...]"])
    _final: dict[str, Beat] = field(default_factory=dict[str, Beat])
    _seen: dict[str, tuple[int, float]] = field(default_factory=dict[str, "tuple[int, float]"])
    """Each worker's count, and since when it has this value, by `clock`."""

    def status(self, ref: PassRef) -> PassStatus:
        """Return how far a pass is now. Raises FormatError or FileNotFoundError if its plan or a round cannot be read."""
        outline = self._outline(ref.plan)
        folder = ref.folder(self.layout)
        rounds = list_rounds(folder)
        sizes = self._sizes(ref, rounds[-1]) if rounds else ()
        number = rounds[-1] if rounds else 0
        finished = list_ledgers(folder, number)
        reader = Claims(self.layout, folder, "", Watch(self.layout))
        newest = reader.newest(number).items()
        claims = [claim for slot, claim in newest if slot[0] < len(sizes) and slot not in finished]
        done = None if self.without else read_done(self.layout, ref)
        heartbeats = [shown for shown in self._heartbeats() if (shown.plan, shown.pass_number) == (ref.plan, ref.number)]
        ranks = self._name_waiting([self._rank_status(shown) for shown in heartbeats], reader, claims)
        first = self._sizes(ref, 0) if rounds else tuple(map(operator.sub, outline.units_at[1:], outline.units_at))
        counted = _counted(ranks, outline.unit_count - sum(first), outline.unit_count, number)
        return PassStatus(
            plan=ref.plan,
            number=ref.number,
            name=outline.catalog,
            partitions=sum(map(partition_count, sizes)),
            finished=len(finished),
            claimed=len(claims),
            **({name: int(done.report[name]) for name in COUNTS} if done else counted),
            complete=done is not None,
            total=outline.unit_count,
            units=sum(sizes),
            round=number,
            ranks=tuple(ranks),
            encoders=_by_encoder(outline, first, heartbeats, {one.worker for one in ranks if one.is_at_work}, is_complete=done is not None),
            prompts=outline.prompts,
            generation=int(done.report["generation"]) if done else 0,
        )

    def newest(self, plan: str) -> PassStatus | None:
        """Return how far a plan's newest pass is; None if there is none or it cannot be read."""
        numbers = list_passes(self.layout, plan)
        return self._status_or_none(PassRef(plan, numbers[-1])) if numbers else None

    def _status_or_none(self, ref: PassRef) -> PassStatus | None:
        try:
            return self.status(ref)
        except (FormatError, OSError):
            return None

    def status_of_processes(self, pids: Collection[int]) -> LaunchStatus:
        """Return what these processes of this machine do, and how far the pass is that they work on."""
        # An older heartbeat belongs to an earlier process with the same pid; a second allows for rounding.
        longest = time.monotonic() - self.began + 1
        ours = [shown for shown in self._heartbeats() if shown.is_of_this_boot and shown.pid in pids and shown.age + shown.lived <= longest]
        newest = min((shown for shown in ours if shown.plan), key=lambda shown: shown.age + shown.lived, default=None)
        status = self._status_or_none(PassRef(newest.plan, newest.pass_number)) if newest is not None else None
        ranks = status.ranks if status else ()
        known = {rank.worker for rank in ranks}  # also those that have joined the pass since their heartbeat was read above
        waiting = (shown for shown in ours if shown.worker not in known and (status is None or not shown.plan))
        before = tuple(map(self._rank_status, waiting))
        return LaunchStatus((*before, *ranks), status, newest.launch if newest is not None else "")

    def following(self, show: Callable[[PassStatus], None], *, seconds: float = 1.0) -> Callable[[Mapping[str, Json]], None]:
        """Return a callback for one worker's counts that shows how far the whole pass is, at most every `seconds`."""
        seen_at = -seconds

        def tell(counts: Mapping[str, Json]) -> None:
            nonlocal seen_at
            if self.clock() - seen_at < seconds:
                return
            seen_at = self.clock()
            if (status := self._status_or_none(PassRef(str(counts["plan"]), int(counts["pass"])))) is not None:
                show(status)

        return tell

    def _outline(self, plan: str) -> Outline:
        if plan not in self._outlines:
            self._outlines[plan] = read_outline(self.layout, plan)
        return self._outlines[plan]

    def _sizes(self, ref: PassRef, number: int) -> tuple[int, ...]:
        """How many units of each recipe are in a round. Its file may be long, so it is read once."""
        if (ref, number) not in self._rounds:
            starts = self._outline(ref.plan).units_at
            path = ref.folder(self.layout).round(number)
            listed = _listed(read_round_record(self.layout, ref, number).get("units"))
            if len(listed) != len(starts) - 1:
                raise damaged(f"{path} has {plural(len(listed), 'recipe')}, but its plan has {len(starts) - 1}", path)
            sizes = (starts[at + 1] - starts[at] if units is None else len(_listed(units)) for at, units in enumerate(listed))
            self._rounds[ref, number] = tuple(sizes)
        return self._rounds[ref, number]

    def _heartbeats(self) -> list[Beat]:
        """The last heartbeat of each worker, oldest worker first."""
        workers = filter(None, map(parse_worker, names_in(self.layout.workers)))
        read = (self._final.get(worker) or read_heartbeat(self.layout, worker) for worker in workers)
        heartbeats = [shown for shown in read if shown is not None]
        self._final |= {shown.worker: shown for shown in heartbeats if shown.has_ended}
        return sorted((shown for shown in heartbeats if not self.without or shown.launch != self.without), key=lambda shown: shown.started)

    def _rank_status(self, shown: Beat) -> RankStatus:
        alive, shown = self._life(shown)
        still = self._still_seconds(shown)
        busy = shown.lived + (0.0 if shown.has_ended else still)
        return RankStatus(
            rank=shown.rank,
            host=shown.host,
            pid=shown.pid,
            rate=round(shown.done / max(busy, 0.001), 2),
            done=shown.done,
            beat_age_seconds=round(shown.age, 1),
            phase=shown.phase,
            reused=shown.reused,
            encoded=shown.encoded,
            failed=shown.failed,
            alive=alive,
            worker=shown.worker,
            launch=shown.launch,
            count=shown.count,
            slowest_batch=shown.slowest_batch,
            still_seconds=round(still, 1),
            doing=ENDED if shown.has_ended else shown.doing,
            failures=shown.failures,
            failures_seen=shown.failures_seen,
        )

    def _life(self, shown: Beat) -> tuple[bool | None, Beat]:
        """Whether a worker lives, and its last heartbeat. A worker of this boot that lost its lock writes no more."""
        if shown.has_ended or shown.worker in self._final:
            return False, shown
        if not shown.is_of_this_boot:
            return None, shown
        alive = is_locked(self.layout.worker_lock(shown.worker))
        if alive is False:
            # Read again: the worker may have written its end after the first read and before the check of its lock.
            shown = self._final[shown.worker] = read_heartbeat(self.layout, shown.worker) or shown
        return alive, shown

    def _still_seconds(self, shown: Beat) -> float:
        seen = self._seen.get(shown.worker)
        if seen is not None and seen[0] == shown.count:
            return self.clock() - seen[1]
        self._seen[shown.worker] = (shown.count, self.clock())
        return shown.age if seen is None else 0.0

    def _name_waiting(self, ranks: list[RankStatus], reader: Claims, claims: Collection[ClaimName]) -> list[RankStatus]:
        """Give silent workers without an open claim the phase `waiting`: they have nothing to do until others finish."""
        if not any(one.is_silent and one.phase == WORKING for one in ranks):
            return ranks
        busy = set(map(reader.holder, set(claims)))
        idle = [one.phase == WORKING and one.worker not in busy and one.is_silent for one in ranks]
        return [replace(one, phase=WAITING, doing=WAITING) if is_idle else one for one, is_idle in zip(ranks, idle, strict=True)]


def _by_encoder(
    outline: Outline, first: Sequence[int], heartbeats: Collection[Beat], at_work: Collection[str], *, is_complete: bool
) -> tuple[EncoderStatus, ...]:
    """How far each encoder is. `first` are the sizes of round 0: all other units were there before the pass."""
    found: list[EncoderStatus] = []
    for encoder, start, end, size in zip(outline.encoders, outline.units_at, outline.units_at[1:], first, strict=False):
        counts = [(shown.worker in at_work, shown.units.get(encoder, (0, 0))) for shown in heartbeats]
        total = end - start
        done = total if is_complete else min(total, total - size + sum(units for _runs, (units, _rest) in counts))
        found.append(EncoderStatus(encoder, total, done, min(total - done, sum(rest for runs, (_units, rest) in counts if runs))))
    return tuple(found)


def _listed(found: Any) -> list[Any]:
    return cast("list[Any]", found) if isinstance(found, list) else []


def _counted(ranks: Collection[RankStatus], reused: int, total: int, number: int) -> dict[str, int]:
    """Units over all workers of a pass, at most `total`.

    The workers count twice what was done twice: first failures that a later round tried again are subtracted, then entries made twice.
    """
    counts = {name: sum(getattr(one, name) for one in ranks) for name in COUNTS}
    counts["reused"] += reused
    surplus = max(0, sum(counts.values()) - total)
    for name in (*["failed"] * bool(number), "encoded", "reused", "failed"):
        cut = min(surplus, counts[name])
        counts[name], surplus = counts[name] - cut, surplus - cut
    return counts
