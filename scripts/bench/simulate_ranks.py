"""How evenly ranks share the work, simulated: `python3 scripts/bench/simulate_ranks.py [--seed N] [--json]`.

Drives what a worker decides by (`ranges_of`, `choose`, `parts_to_take`, `Claims`, `Watch`) with a clock that is moved, and a board in
memory for claims, ledgers and heartbeats. Nothing is encoded: a unit has a cost. One that is dead was killed at some moment; half of the
dead are proved dead at once, as their locks yield, the others are only silent, as if on a machine that locks do not reach.

    ratio       makespan / max(sum of costs / ranks, largest unit): 1 is the best there can be. Until the last ledger
    duplicates  units encoded more than once, in % of all; what a dead rank did of unfinished partitions is taken for lost
    files       claims, ledgers and attempts that were made
    listings    of a folder, by all ranks together

The exit status is 1 if a bound is missed.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import environment

if __name__ == "__main__":
    environment.enter()

import argparse
import heapq
import json
import time
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from cachestore.files.paths import ClaimName, Layout, PassFolder
from cachestore.jobs.share.choice import LEAST_WORKERS, choose, parts_to_take, poll_seconds, ranges_of
from cachestore.jobs.share.claims import Claims
from cachestore.jobs.share.partition import bounds, partition_count, runs_of
from cachestore.jobs.share.workers import Beat, Watch, heartbeat_seconds

HERE, THERE, BOOT = "here", "there", "boot"
NOWHERE = Layout(Path("nowhere"))
PASS = PassFolder(Path("nowhere"))

UNIT_SECONDS = 0.05
"""Mean cost of a unit: an image of 1,024 x 1,024 on a fast GPU."""
BATCH = 16
LISTING_SECONDS, NAME_SECONDS = 0.0005, 1e-6
"""For a folder on a network file system, and for each name in it: 5 ms for all claims of 4,096 partitions."""
FILE_SECONDS = 0.002
"""For a small file."""

UNITS = (25, 2_392, 1_000_000, 10_000_000)
RANKS = (1, 8, 64, 512)
DEAD_FRACTION = 0.05

Fate = Literal["lives", "killed", "silent"]
DEATHS: tuple[Fate, Fate] = ("killed", "silent")
Numbers = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True, slots=True)
class Case:
    """What is simulated."""

    units: int
    ranks: int
    spread: float = 1.0
    """Sigma of the costs' logarithm; 0 makes them equal. With 1, a unit in a hundred costs six times the mean."""
    dead: int = 0
    """Ranks that die on the way."""
    ratio_bound: float | None = None
    duplicates_bound: float | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """What came of a case."""

    case: Case
    makespan: float
    ideal: float
    duplicates: int
    files: int
    listings: int

    @property
    def ratio(self) -> float:
        """Makespan over the best there can be; 1 for nothing."""
        return self.makespan / self.ideal if self.ideal else 1.0

    @property
    def duplicates_percent(self) -> float:
        """Of all units; 0 for nothing."""
        return 100 * self.duplicates / self.case.units if self.case.units else 0.0

    @property
    def missed(self) -> list[str]:
        """The bounds that were missed, in words."""
        found: list[str] = []
        name = f"{self.case.units} units on {self.case.ranks} ranks"
        if self.case.ratio_bound is not None and self.ratio > self.case.ratio_bound:
            found.append(f"{name}: makespan is {self.ratio:.3f} of the best, the bound is {self.case.ratio_bound}")
        if self.case.duplicates_bound is not None and self.duplicates_percent > self.case.duplicates_bound:
            found.append(f"{name}: {self.duplicates_percent:.2f} % duplicates, the bound is {self.case.duplicates_bound} %")
        return found


@dataclass(slots=True)
class Board:
    """What all ranks see, in memory: claims, ledgers and heartbeats."""

    claims: dict[ClaimName, str] = field(default_factory=dict[ClaimName, str])
    """The holder of each claim."""
    newest: dict[int, ClaimName] = field(default_factory=dict[int, ClaimName])
    finished: set[int] = field(default_factory=set[int])
    ranks: dict[str, "Rank"] = field(default_factory=dict[str, "Rank"])
    files: int = 0
    listings: int = 0


@dataclass(slots=True)
class MemoryClaims(Claims):
    """The claims of one rank on a board in memory; how they are judged is inherited."""

    board: Board = field(default_factory=Board)

    def names(self, number: int) -> list[ClaimName]:
        """All claims, oldest of each partition first."""
        return sorted((name for name in self.board.claims if name.round == number), key=lambda name: name.n)

    def take(self, number: int, recipe: int, partitions: range, *, after: ClaimName | None = None) -> ClaimName | None:
        """Claim a range of partitions, the first time or after an earlier claim; None if somebody was faster."""
        name = ClaimName(number, recipe, partitions.start, partitions.stop - 1, after.n + 1 if after else 0)
        if name in self.board.claims:
            return None
        self.board.claims[name] = self.worker
        self.board.newest.update(dict.fromkeys(partitions, name))
        if after is not None:
            self._retaken.update(dict.fromkeys(((number, (recipe, p)) for p in partitions), name.n))
        self.board.files += 1
        return name

    def holder(self, name: ClaimName) -> str | None:
        """Who made a claim."""
        return self.board.claims[name]


@dataclass(slots=True)
class Rank:
    """One simulated worker."""

    name: str
    claims: MemoryClaims
    number: int
    fate: Fate = "lives"
    dies_at: float = float("inf")
    is_dead: bool = False
    group: list[int] = field(default_factory=list[int])
    batch_ends: Numbers = field(default_factory=lambda: np.empty(0))
    heartbeats_at: list[float] = field(default_factory=lambda: [0.0])
    """When a risen count was shown."""
    slowest_batch: float = 0.0


@lru_cache(maxsize=1)
def costs_of(units: int, spread: float, seed: int) -> Numbers:
    """What each unit costs, in seconds; nothing for no units."""
    if spread == 0:
        return np.full(units, UNIT_SECONDS)
    return UNIT_SECONDS * np.random.default_rng([seed, units]).lognormal(-(spread**2) / 2, spread, units)


class Simulation:
    """Moves the ranks of one case until every partition is finished."""

    def __init__(self, case: Case, *, seed: int) -> None:
        """Costs and fates are drawn here, all from the seed."""
        random = np.random.default_rng([seed, case.ranks, case.dead])
        self.case = case
        self.now = 0.0
        self.costs = costs_of(case.units, case.spread, seed)
        self.board = Board()
        self.count = partition_count(case.units)
        self.ideal = max(float(self.costs.sum()) / case.ranks, float(self.costs.max(initial=0.0)))
        self.duplicates = 0
        self.makespan = 0.0
        self._events: list[tuple[float, int, str]] = []
        self._number = 0
        for rank in range(case.ranks):
            self._add(rank)
        for number, rank in enumerate(random.choice(case.ranks, case.dead, replace=False)):
            victim = self.board.ranks[f"{rank:032x}"]
            victim.fate, victim.dies_at = DEATHS[number % 2], float(random.uniform(0.0, 0.9 * self.ideal))

    def run(self) -> Result:
        """Let all ranks work until nothing is left."""
        while self._events and len(self.board.finished) < self.count:
            self.now, _number, name = heapq.heappop(self._events)
            self._step(self.board.ranks[name])
        return Result(self.case, self.makespan, self.ideal, self.duplicates, self.board.files, self.board.listings)

    def _add(self, rank: int) -> None:
        name = f"{rank:032x}"
        watch = Watch(NOWHERE, lambda: self.now, host=HERE, boot=BOOT, read=self._heartbeat_of, probe=self._is_held)
        claims = MemoryClaims(NOWHERE, PASS, name, watch, board=self.board)
        self.board.ranks[name] = Rank(name, claims, rank)
        self._at(0.0, name)

    def _at(self, moment: float, name: str) -> None:
        self._number += 1
        heapq.heappush(self._events, (moment, self._number, name))

    def _step(self, rank: Rank) -> None:
        """What a worker does when it is awake: die, finish its pool, take the next, or idle for a poll."""
        if self.now >= rank.dies_at:
            self._die(rank)
            return
        if rank.group:
            self._finish(rank)
        if taken := self._take(rank):
            self._begin(rank, taken)
        else:  # it listed twice to take something, and lists twice to see what is missing and who holds it
            self.board.listings += 2
            self._at(self.now + 2 * self._seconds_to_look() + poll_seconds(self.case.ranks), rank.name)

    def _seconds_to_look(self) -> float:
        """For listing claims and ledgers."""
        return 2 * LISTING_SECONDS + self.board.files * NAME_SECONDS

    def _take(self, rank: Rank) -> list[int]:
        """As `Claiming.take`, on the board."""
        board = self.board
        board.listings += 2
        each, world = self.case.units // max(1, self.count), self.case.ranks
        ranges = ranges_of(self.count, each=each, workers=max(LEAST_WORKERS, world))
        choice = choose(ranges, finished=board.finished, claimed=board.newest.keys(), start=rank.number, each=each, world_size=world)
        if choice.free:
            return [p for partitions in choice.free if rank.claims.take(0, 0, partitions) for p in partitions]
        held = rank.claims.judge({(0, p): board.newest[p] for p in choice.held})
        parts, most = parts_to_take(held, each=each, workers=max(LEAST_WORKERS, world), world_size=world)
        taken: list[int] = []
        for claim, partitions in parts:
            if taken and len(taken) + len(partitions) > most:
                break
            if rank.claims.take(0, 0, partitions, after=claim):
                taken += partitions
        return taken

    def _begin(self, rank: Rank, taken: list[int]) -> None:
        """Work on a pool: from here on all is known, when each batch ends, when a heartbeat is written, and whether it lives to see it."""
        rank.group = taken
        costs = np.concatenate([self.costs[slice(*bounds(self.case.units, p))] for p in taken])
        is_careful = bool(rank.claims.died_before(0, 0, set(taken)))
        size = 1 if is_careful else BATCH
        if is_careful:
            self.board.files += len(costs)
            costs = costs + FILE_SECONDS
        batches = np.add.reduceat(costs, np.arange(0, len(costs), size))
        files = len(runs_of(sorted(taken)))
        overhead = self._seconds_to_look() + files * FILE_SECONDS
        rank.batch_ends = self.now + overhead + np.cumsum(batches)
        rank.slowest_batch = max(rank.slowest_batch, float(batches.max()))
        self._show_heartbeats(rank)
        end = float(rank.batch_ends[-1]) + files * FILE_SECONDS
        self._at(min(end, rank.dies_at), rank.name)

    def _show_heartbeats(self, rank: Rank) -> None:
        """When the count, rising with each batch, is written: at most every so often."""
        ends = rank.batch_ends[rank.batch_ends <= rank.dies_at]
        while True:
            index = int(np.searchsorted(ends, rank.heartbeats_at[-1] + heartbeat_seconds(self.case.ranks)))
            if index >= len(ends):
                return
            rank.heartbeats_at.append(float(ends[index]))

    def _finish(self, rank: Rank) -> None:
        for p in rank.group:
            start, end = bounds(self.case.units, p)
            if p in self.board.finished:
                self.duplicates += end - start
            else:
                self.board.finished.add(p)
                self.makespan = self.now
        self.board.files += len(runs_of(sorted(rank.group)))
        rank.heartbeats_at.append(self.now)  # a ledger writes the heartbeat
        rank.group = []

    def _die(self, rank: Rank) -> None:
        """Leave everything as it is. What was done of the pool is done over by others."""
        rank.is_dead = True
        done = int(np.searchsorted(rank.batch_ends, rank.dies_at)) * BATCH if rank.group else 0
        self.duplicates += min(done, sum(end - start for start, end in (bounds(self.case.units, p) for p in rank.group)))

    def _heartbeat_of(self, _layout: Layout, worker: str) -> Beat:
        rank = self.board.ranks[worker]
        host = THERE if rank.fate == "silent" else HERE
        count = bisect_right(rank.heartbeats_at, self.now)
        world = self.case.ranks
        return Beat(worker=worker, world_size=world, host=host, boot=BOOT, phase="working", count=count, slowest_batch=rank.slowest_batch)

    def _is_held(self, _layout: Layout, worker: str) -> bool | None:
        rank = self.board.ranks[worker]
        return None if rank.fate == "silent" else not rank.is_dead


def dead_of(ranks: int) -> int:
    """How many ranks die of so many: at least one, but never the only one."""
    return 0 if ranks == 1 else max(1, round(ranks * DEAD_FRACTION))


def cases() -> list[Case]:
    """All that is simulated, those with bounds among them."""
    found = [Case(25, 8, spread=0.0, ratio_bound=1.5)]
    for units in UNITS:
        for ranks in RANKS:
            is_bounded = (units, ranks) == (1_000_000, 64)
            found.append(Case(units, ranks, ratio_bound=1.05 if is_bounded else None, duplicates_bound=1.0 if is_bounded else None))
            if dead := dead_of(ranks):
                found.append(Case(units, ranks, dead=dead))
    return found


def simulate(case: Case, *, seed: int) -> Result:
    """Simulate one case."""
    return Simulation(case, seed=seed).run()


def as_json(result: Result) -> dict[str, Any]:
    """A row for a program."""
    kept = {name: value for name, value in asdict(result).items() if name != "case"}
    return {**asdict(result.case), **kept, "ratio": result.ratio, "duplicates_percent": result.duplicates_percent, "missed": result.missed}


def line(result: Result) -> str:
    """A row for a person."""
    case = result.case
    what = f"{case.units:>10,} {case.ranks:>5} {case.dead:>4} {'even' if case.spread == 0 else 'uneven':>7}"
    return f"{what} {result.makespan:>10.1f} {result.ratio:>8.3f} {result.duplicates_percent:>10.2f} {result.files:>8} {result.listings:>9}"


HEADING = (
    f"{'units':>10} {'ranks':>5} {'dead':>4} {'costs':>7} {'makespan s':>10} {'ratio':>8} {'duplic. %':>10} {'files':>8} {'listings':>9}"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Simulate all cases, print a table or JSON; 1 if a bound is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1, help="draws costs and deaths (default 1)")
    parser.add_argument("--units", type=int, help="only cases of so many units")
    parser.add_argument("--json", action="store_true", help="one object instead of a table")
    options = parser.parse_args(arguments)
    began = time.monotonic()
    chosen = [case for case in cases() if options.units in (None, case.units)]
    if not options.json:
        print(f"seed {options.seed}, a unit costs {UNIT_SECONDS} s on average\n{HEADING}")
    results: list[Result] = []
    for case in chosen:
        results.append(simulate(case, seed=options.seed))
        if not options.json:
            print(line(results[-1]), flush=True)
    missed = [bound for result in results for bound in result.missed]
    seconds = round(time.monotonic() - began, 1)
    if options.json:
        print(json.dumps({"seed": options.seed, "seconds": seconds, "missed": missed, "rows": [as_json(one) for one in results]}))
    else:
        print("\n".join([f"{seconds} s", *missed]) if missed else f"{seconds} s; every bound is kept")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
