"""Partitions: how the units of a recipe are cut. Pure; depends on the number of units alone, never on the world size."""

from typing import Final

PARTITION_LIMIT: Final = 4096


def partition_count(units: int) -> int:
    """How many partitions so many units have; none have none."""
    return min(PARTITION_LIMIT, units)


def bounds(units: int, partition: int) -> tuple[int, int]:
    """Where a partition starts and ends among its recipe's sorted units. Sizes differ by at most one."""
    count = partition_count(units)
    return units * partition // count, units * (partition + 1) // count


def order_for(rank: int | None, world_size: int, count: int, *, seed: int) -> list[int]:
    """The order in which a worker looks at partitions: its own (p % world == rank) first; without a rank from where `seed` says."""
    if rank is None:
        start = seed % count if count else 0
        return [*range(start, count), *range(start)]
    own = list(range(rank, count, world_size))
    others = [p for p in (*range(rank, count), *range(min(rank, count))) if p % world_size != rank]
    return own + others
