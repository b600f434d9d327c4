"""The order of batches: pure functions of (buckets, batch size, tail, seed, epoch).

The order is this project's own: an index is sorted by a hash of itself. So a run that resumes with another version of numpy or torch has
the same order.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from cachestore.core.keys import digest_parts

Tail = Literal["drop", "pad", "wrap"]
"""What happens to samples that do not fill a batch, and to batches that do not fill a round of all ranks. "drop" leaves them out, "pad"
repeats them, "wrap" adds the first ones of the same bucket (or of the epoch)."""

Indices = NDArray[np.int64]

_STEP: Final = np.uint64(0x9E3779B97F4A7C15)
_FIRST: Final = np.uint64(0xBF58476D1CE4E5B9)
_SECOND: Final = np.uint64(0x94D049BB133111EB)


@dataclass(frozen=True, slots=True)
class Order:
    """What determines the order, besides the epoch."""

    size: int
    shuffle: bool
    seed: int
    tail: Tail


def permutation(count: int, *name: str) -> Indices:
    """The numbers below `count`, in an order that depends only on `count` and the name: sorted by SplitMix64, which has no ties."""
    start = int.from_bytes(digest_parts("cachestore-order", *name)[:8], "little")
    mixed = np.arange(1, count + 1, dtype=np.uint64) * _STEP + np.uint64(start)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _FIRST
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _SECOND
    return np.argsort(mixed ^ (mixed >> np.uint64(31)), kind="stable")


def turn_of(count: int, epoch: int, *name: str) -> int:
    """Which of `count` things has its turn in this epoch. In `count` epochs each has one turn; then a new order is drawn."""
    if count == 1:
        return 0
    number, index = divmod(epoch, count)
    return int(permutation(count, "turns", str(number), *name)[index])


def even_out(items: Indices, multiple: int, tail: Tail, *, whole: Indices) -> Indices:
    """Make the number of items a multiple of `multiple`. "wrap" takes from the start of `whole`. No items stay no items."""
    rest = len(items) % multiple
    if rest == 0:
        return items
    if tail == "drop":
        return items[: len(items) - rest]
    source = items[len(items) - rest :] if tail == "pad" else whole
    return np.concatenate([items, np.resize(source, (multiple - rest, *items.shape[1:]))])


def order_batches(buckets: Mapping[tuple[int, ...], Sequence[int]], order: Order, epoch: int) -> Indices:
    """All batches of an epoch, one per row, each of one bucket and `order.size` indices."""
    cut = [np.empty((0, order.size), dtype=np.int64)]
    for bucket, numbers in sorted(buckets.items()):
        indices = np.asarray(numbers, dtype=np.int64)
        if order.shuffle:
            indices = indices[permutation(len(indices), "bucket", str(order.seed), str(epoch), *map(str, bucket))]
        cut.append(even_out(indices, order.size, order.tail, whole=indices).reshape(-1, order.size))
    batches = np.concatenate(cut)
    if order.shuffle:
        return batches[permutation(len(batches), "batches", str(order.seed), str(epoch))]
    return batches[np.argsort(batches[:, 0], kind="stable")]


def count_batches(buckets: Mapping[tuple[int, ...], Sequence[int]], order: Order) -> int:
    """How many batches an epoch has. It is the same for every epoch."""
    return sum(count_even(len(indices), order.size, order.tail) for indices in buckets.values())


def count_even(count: int, multiple: int, tail: Tail) -> int:
    """How many groups of `multiple` `count` items make."""
    return count // multiple if tail == "drop" else -(-count // multiple)
