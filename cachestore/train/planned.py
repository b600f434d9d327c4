"""The indices of a batch that a sampler planned. Imports no torch, as the sampler."""

from collections.abc import Iterable, Sequence


class PlannedBatch(list[int]):
    """The indices of a batch that a sampler planned, and its epoch.

    So what is drawn for a batch does not depend on other loaders over the same data set, in no process to which the indices are sent.
    """

    def __init__(self, indices: Iterable[int], upcoming: Sequence[Sequence[int]] = (), *, epoch: int | None = None) -> None:
        super().__init__(indices)
        self.upcoming = upcoming
        """What the same worker of a DataLoader gets next, in order: workers take turns. Empty if it need not know."""
        self.epoch = epoch
        """None: the one that is set for the data set."""


def same_epoch(indices: Iterable[int], batch: object, upcoming: Sequence[Sequence[int]] = ()) -> PlannedBatch:
    """Return indices with the epoch of a batch."""
    return PlannedBatch(indices, upcoming, epoch=getattr(batch, "epoch", None))
