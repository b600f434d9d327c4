"""What a worker takes next, given what is finished and claimed. Pure: the worker acts on it, and so does the simulation of many ranks."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

from cachestore.files.paths import ClaimName
from cachestore.work.workers import Life

POOL_PARTITIONS: Final = 8
POOL_UNITS: Final = 64
"""A worker takes up to 8 partitions at once, or as many as hold 64 units, so that batches fill and segments are not tiny."""

POLL_SECONDS: Final = 0.2
POLLS_PER_SECOND: Final = 256
"""Of all idle workers together: each poll lists two folders of thousands of names."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What is left for a worker, each in the order in which it looks at partitions."""

    free: Sequence[int]
    """Partitions to claim now, at once; empty where nobody has left any."""
    held: Sequence[int]
    """Partitions that are claimed and not finished; looked up only where nothing is free."""
    is_plenty: bool = False
    """Whether so much is free that what is taken may wait a little without leaving anybody idle."""


@dataclass(frozen=True, slots=True)
class Held:
    """A claim on an unfinished partition, as an idle worker sees its holder."""

    claim: ClaimName
    life: Life
    still_seconds: float
    is_slow: bool


def choose(
    order: Sequence[int], *, finished: Collection[int], claimed: Collection[int], each: int, world_size: int, units: int = POOL_UNITS
) -> Choice:
    """Which partitions, of `each` units or one more, to claim next of those in `order`. A worker likes to have `units` at once."""
    left = [p for p in order if p not in finished]
    free = [p for p in left if p not in claimed]
    is_plenty = len(free) >= 2 * world_size * _pool_limit(each, units)
    return Choice(free[: pool_size(each, len(free), world_size, units)], [] if free else left, is_plenty)


def pool_size(each: int, free: int, world_size: int, units: int = POOL_UNITS) -> int:
    """How many partitions of `each` units to take at once: fewer towards the end, so that nobody is left without work."""
    return max(1, min(_pool_limit(each, units), free // (2 * world_size) if world_size > 1 else free))


def _pool_limit(each: int, units: int) -> int:
    return max(POOL_PARTITIONS, units // max(1, each))


def claims_to_take(held: Collection[Held]) -> list[ClaimName]:
    """Claims that an idle worker may take over, the best first; it takes one.

    Those of the dead and the silent, then of the slow ones the stillest: doing it over costs a duplicate at worst.
    """
    slow = sorted((one.still_seconds, one.claim) for one in held if one.life is Life.LIVE and one.is_slow)
    return [*(one.claim for one in held if one.life is not Life.LIVE), *(claim for _still, claim in slow[-1:])]


def poll_seconds(world_size: int) -> float:
    """How long an idle worker waits before it looks again."""
    return max(POLL_SECONDS, world_size / POLLS_PER_SECOND)
