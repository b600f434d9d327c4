"""Partitions: how a recipe's units are divided. This depends on their number alone, never on the world size."""

from typing import Final

PARTITION_LIMIT: Final = 4096


def partition_count(units: int) -> int:
    """Return the number of partitions for this many units: at most 4,096; 0 for no units."""
    return min(PARTITION_LIMIT, units)


def bounds(units: int, partition: int) -> tuple[int, int]:
    """Return (start, end) of a partition among its recipe's units. Sizes differ by at most one."""
    count = partition_count(units)
    return units * partition // count, units * (partition + 1) // count


def order_for(rank: int | None, world_size: int, count: int, *, seed: int) -> list[int]:
    """Return partitions in a worker's order: its own first (p % world_size == rank); without a rank, all from `seed` % count on."""
    if rank is None:
        start = seed % count if count else 0
        return [*range(start, count), *range(start)]
    own = list(range(rank, count, world_size))
    others = [p for p in (*range(rank, count), *range(min(rank, count))) if p % world_size != rank]
    return own + others
