"""Which partitions a worker claims next. Pure functions, for workers and for the simulation of many ranks."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from cachestore.files.paths import ClaimName
from cachestore.work.workers import Life

GROUP_PARTITIONS: Final = 8
GROUP_UNITS: Final = 64
"""A worker claims up to 8 partitions at once, or more if 64 units need more: batches are then full and segments not tiny."""

POLL_SECONDS: Final = 0.2
POLLS_PER_SECOND: Final = 256
"""The limit over all idle workers: each poll lists two folders with thousands of names."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The partitions that are left for a worker, in the order in which it looks at them."""

    free: Sequence[int]
    """Partitions to claim now, together; empty if all are claimed."""
    held: Sequence[int]
    """Partitions that are claimed and not finished; filled only if `free` is empty."""
    is_plenty: bool = False
    """Whether so many are free that a worker may claim some before it needs them without leaving another idle."""


@dataclass(frozen=True, slots=True)
class Held:
    """A claim on an unfinished partition, and how an idle worker judges its holder."""

    claim: ClaimName
    holder: str | None
    life: Life
    still_seconds: float
    is_slow: bool


class Takeover(NamedTuple):
    """What an idle worker may take over."""

    claims: Sequence[ClaimName]
    """In the order in which it tries them."""
    most: int
    """How many of them it takes at once."""


def choose(
    order: Sequence[int], *, finished: Collection[int], claimed: Collection[int], each: int, world_size: int, units: int = GROUP_UNITS
) -> Choice:
    """Choose from `order` the partitions to claim next. Each has `each` or `each` + 1 units; a worker aims at `units` in all."""
    left = [p for p in order if p not in finished]
    free = [p for p in left if p not in claimed]
    is_plenty = len(free) >= 2 * world_size * _group_limit(each, units)
    return Choice(free[: group_size(each, len(free), world_size, units)], [] if free else left, is_plenty)


def group_size(each: int, free: int, world_size: int, units: int = GROUP_UNITS) -> int:
    """Return how many partitions of `each` units to claim at once: fewer towards the end, so that every worker has some."""
    return max(1, min(_group_limit(each, units), free // (2 * world_size) if world_size > 1 else free))


def _group_limit(each: int, units: int) -> int:
    return max(GROUP_PARTITIONS, units // max(1, each))


def claims_to_take(held: Collection[Held], *, each: int, world_size: int, units: int = GROUP_UNITS) -> Takeover:
    """Return the claims that an idle worker may take over: as many of one dead or silent worker as of free partitions.

    Without any, one of the slow worker whose count has stood still longest: at worst that makes duplicates.
    """
    if gone := [one for one in held if one.life is not Life.LIVE]:
        return Takeover([one.claim for one in gone if one.holder == gone[0].holder], group_size(each, len(gone), world_size, units))
    slow = sorted((one.still_seconds, one.claim) for one in held if one.is_slow)
    return Takeover([claim for _still, claim in slow[-1:]], 1)


def poll_seconds(world_size: int) -> float:
    """Return the seconds that an idle worker waits before it looks again."""
    return max(POLL_SECONDS, world_size / POLLS_PER_SECOND)
