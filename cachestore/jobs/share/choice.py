"""Which partitions a worker claims next. Pure functions, for workers and for the simulation of many ranks.

A claim covers a range of partitions. Ranges are whole powers of two at multiples of their size, so two of them are apart or one contains
the other. `ranges_of` says which of them are claimed. All workers cut a round for the number of workers in its record, so they try the same
names, of which the file system gives each to one. A trainer claims single partitions of what it needs at once: if another worker claims
their range between two listings, these units are encoded twice.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Final, NamedTuple

from cachestore.files.paths import ClaimName
from cachestore.jobs.share.partition import runs_of
from cachestore.jobs.share.workers import Life

GROUP_PARTITIONS: Final = 8
GROUP_UNITS: Final = 64
"""A worker claims up to 8 partitions at once, or more if 64 units need more: batches are then full and segments not tiny."""

LEAST_WORKERS: Final = 8
"""A round is cut for at least so many workers: a later run may have more than the one that opened it."""

POLL_SECONDS: Final = 0.2
POLLS_PER_SECOND: Final = 256
"""The limit over all idle workers: each poll lists two folders with up to thousands of names."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The partitions that are left for a worker."""

    free: Sequence[range]
    """Ranges to claim now, together; empty if all partitions are claimed."""
    held: Sequence[int]
    """Partitions that are claimed and not finished; filled only if `free` is empty."""
    is_plenty: bool = False
    """Whether so many are free that a worker may claim some before it needs them without leaving another idle."""


@dataclass(frozen=True, slots=True)
class Held:
    """A claim with unfinished partitions, and how an idle worker judges its holder."""

    claim: ClaimName
    partitions: Sequence[int]
    """Those that are not finished and have no newer claim, in rising order."""
    holder: str | None
    life: Life
    still_seconds: float
    is_slow: bool


class Takeover(NamedTuple):
    """What an idle worker may take over."""

    parts: Sequence[tuple[ClaimName, range]]
    """A claim and partitions of it, in the order in which the worker tries them."""
    most: int
    """How many partitions it takes at once, if the first part is not larger."""


@lru_cache(64)
def ranges_of(count: int, *, each: int, workers: int, units: int = GROUP_UNITS) -> tuple[range, ...]:
    """Return the ranges in which `count` partitions of `each` units are claimed: smaller towards the end, so that every worker has some."""
    ranges: list[range] = []
    first = 0
    while first < count:
        size = 1 << (group_size(each, count - first, workers, units).bit_length() - 1)
        ranges.append(range(first, first + size))
        first += size
    return tuple(ranges)


def choose(
    ranges: Sequence[range],
    *,
    finished: Collection[int],
    claimed: Collection[int],
    start: int,
    each: int,
    world_size: int,
    units: int = GROUP_UNITS,
) -> Choice:
    """Choose from `ranges` what to claim next; a worker aims at `units` in all. `start` is its rank, or a random number without one.

    The largest free ranges come first, so that none is left for the end; each of `world_size` workers takes another of them, so that two
    rarely try the same.
    """
    left = set(chain.from_iterable(ranges)).difference(finished)
    unclaimed = left.difference(claimed)
    free = [run for each_range in ranges for run in _runs_in(each_range, unclaimed)] if unclaimed else []
    free.sort(key=len, reverse=True)
    count = len(unclaimed)
    size = group_size(each, count, world_size, units)
    largest = sum(1 for run in free if len(run) == len(free[0]))
    begin = start % max(1, min(world_size, largest))
    chosen = free[begin : begin + 1]
    for run in free[begin + 1 :]:
        if sum(map(len, chosen)) + len(run) > size:
            break
        chosen.append(run)
    held = [] if free else [p for p in chain.from_iterable(ranges) if p in left]
    turn = start % max(1, len(held))
    return Choice(chosen, held[turn:] + held[:turn], count >= 2 * world_size * _group_limit(each, units))


def _runs_in(partitions: range, unclaimed: Collection[int]) -> list[range]:
    return runs_of(p for p in partitions if p in unclaimed)


def group_size(each: int, free: int, world_size: int, units: int = GROUP_UNITS) -> int:
    """Return how many partitions of `each` units to claim at once: fewer towards the end, so that every worker has some."""
    return max(1, min(_group_limit(each, units), free // (2 * world_size) if world_size > 1 else free))


def _group_limit(each: int, units: int) -> int:
    return max(GROUP_PARTITIONS, units // max(1, each))


def parts_to_take(held: Collection[Held], *, each: int, workers: int, world_size: int, units: int = GROUP_UNITS) -> Takeover:
    """Return what an idle worker may take over: as many partitions of one dead or silent worker as of free ones.

    Without any, the last partition of the slow worker whose count has stood still longest: at worst that makes duplicates.
    """
    if gone := [one for one in held if one.life is not Life.LIVE]:
        parts: list[tuple[ClaimName, range]] = []
        for one in gone:
            if one.holder == gone[0].holder:
                # Cut by the claim, not by what is left of it: so all that take over from it try the same names.
                first, count = one.claim.first, len(one.claim.partitions)
                cut = ranges_of(count, each=each, workers=workers, units=units)
                pieces = [range(first + piece.start, first + piece.stop) for piece in cut]
                parts += [(one.claim, run) for piece in pieces for run in runs_of(p for p in one.partitions if p in piece)]
        return Takeover(parts, group_size(each, sum(len(one.partitions) for one in gone), world_size, units))
    slowest = max((one for one in held if one.is_slow), key=lambda one: (one.still_seconds, one.claim), default=None)
    return Takeover([(slowest.claim, range(slowest.partitions[-1], slowest.partitions[-1] + 1))] if slowest else [], 1)


def poll_seconds(world_size: int) -> float:
    """Return the seconds that an idle worker waits before it looks again."""
    return max(POLL_SECONDS, world_size / POLLS_PER_SECOND)
