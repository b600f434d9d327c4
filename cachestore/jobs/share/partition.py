"""Partitions: how a recipe's units are divided. This depends on their number alone, never on the world size."""

from collections.abc import Iterable

from cachestore.files.paths import PARTITION_LIMIT


def partition_count(units: int) -> int:
    """Return the number of partitions for this many units: at most 4,096; 0 for no units."""
    return min(PARTITION_LIMIT, units)


def bounds(units: int, partition: int) -> tuple[int, int]:
    """Return (start, end) of a partition among its recipe's units. Sizes differ by at most one."""
    count = partition_count(units)
    return units * partition // count, units * (partition + 1) // count


def runs_of(partitions: Iterable[int]) -> list[range]:
    """Return these partitions as ranges without gaps. They come in rising order."""
    runs: list[range] = []
    for partition in partitions:
        if runs and runs[-1].stop == partition:
            runs[-1] = range(runs[-1].start, partition + 1)
        else:
            runs.append(range(partition, partition + 1))
    return runs
