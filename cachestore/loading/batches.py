"""Batches of one bucket each, the same number on every rank. Knows ranks only as two numbers, and no collective."""

import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Literal, Protocol, Self

from cachestore.errors import BadInput
from cachestore.loading.order import Order, Tail, count_batches, count_even, even_out, order_batches

_log = logging.getLogger(__name__)

_NAMED_BUCKETS: Final = 5


class Bucketed(Protocol):
    """What the sampler needs of a data set. One with a `set_epoch` is told the epoch too."""

    @property
    def buckets(self) -> Mapping[tuple[int, ...], Sequence[int]]:
        """The places of the samples of each bucket."""
        ...

    @property
    def digest(self) -> str:
        """Equal for equal samples in equal order."""
        ...


class BucketBatchSampler:
    """For a DataLoader's `batch_sampler`: yields lists of places in the data set, each a full batch of one bucket.

    The order is a pure function of (seed, epoch); ranks take turns in it, so they never share a batch, have equally many, and a run may
    be resumed on another number of them. Each iteration that comes to its end is followed by the next epoch, unless `set_epoch` says
    otherwise; the data set is told, so that it draws new latents.

    Alone, or with explicit ranks:         BucketBatchSampler(data, batch_size=8, rank=RANK, num_replicas=WORLD_SIZE)
    With accelerate, which shards itself:  BucketBatchSampler(data, batch_size=8, split="outside")
    With Fabric:                           explicit ranks, and setup_dataloaders(..., use_distributed_sampler=False)

    Deliberately no subclass of torch's BatchSampler, without `drop_last` and with a `batch_size` of None: accelerate would
    otherwise lose or mix short batches, and Fabric would build another sampler in its place. One sampler drives one data set object.
    """

    batch_size: Final = None
    """Not the size of a batch: accelerate takes batches as they come only where this is None."""

    def __init__(
        self,
        data: Bucketed,
        batch_size: int = 8,
        *,
        shuffle: bool = True,
        seed: int = 0,
        tail: Tail = "drop",
        rank: int | None = None,
        num_replicas: int | None = None,
        split: Literal["outside"] | None = None,
    ) -> None:
        """Prepare the batches of a data set.

        Args:
            data: a CachedDataset. An empty one has no batches.
            batch_size: samples in each batch, on each rank.
            shuffle: another order in every epoch; else the data set's order, bucket by bucket.
            seed: of the order.
            tail: what becomes of samples that do not fill a batch of their bucket, and of the at most `num_replicas - 1` batches that
                do not go round all ranks. "drop" leaves them out, "pad" repeats them in turn until they do, "wrap" adds the first ones
                of the bucket (of the epoch). With "drop" no sample comes twice in an epoch, with the others each comes at least once.
            rank: of this process; needs `num_replicas`.
            num_replicas: the number of processes that train together.
            split: "outside" yields all batches everywhere, for accelerate, which hands them out to its processes.

        Raises:
            BadInput: options that do not fit; or several processes were found and neither ranks nor `split` were given.
        """
        if not hasattr(data, "buckets"):
            message = (
                f"a {type(data).__name__} has no buckets; pass a CachedDataset (a part of one is precomputed under a --name of its own)"
            )
            raise BadInput(message)
        if batch_size < 1 or tail not in {"drop", "pad", "wrap"} or split not in {None, "outside"}:
            message = (
                f'batch_size is at least 1, tail "drop", "pad" or "wrap", split None or "outside"; got {batch_size}, {tail!r}, {split!r}'
            )
            raise BadInput(message)
        self._rank, self._world = _place_among_ranks(rank, num_replicas, split)
        self._is_split_outside = split == "outside"
        self._data = data
        self._order = Order(batch_size, shuffle, seed, tail)
        self._epoch = 0
        self._start = 0
        """Batches of the epoch, over all ranks, that came before the iteration."""
        self._yielded = 0
        """Batches that the present iteration has yielded here."""
        self._is_finished = False
        """Whether the present iteration has yielded everything, though its caller may not have asked for more yet."""
        self._is_over = False
        """Whether its caller has seen the end."""
        self._is_resumed = False
        if (_found_ranks()[0] if self._is_split_outside else self._rank) == 0:
            _report_left_out(data, self._order, self._world)

    def __len__(self) -> int:
        """How many batches a whole epoch has on this rank."""
        return count_even(count_batches(self._data.buckets, self._order), self._world, self._order.tail)

    def __iter__(self) -> Iterator[list[int]]:
        """The batches of this rank: of the epoch that was set or resumed, else of the next one."""
        if self._is_finished:
            self._go_to(self._epoch + 1, 0)
        self._yielded = 0
        self._is_resumed = False
        self._tell_data()
        batches = order_batches(self._data.buckets, self._order, self._epoch)
        ours = even_out(batches[self._start :], self._world, self._order.tail, whole=batches)[self._rank :: self._world]
        for batch in ours:
            self._yielded += 1
            # Somebody who takes exactly len(sampler) batches never sees the end, and yet wants the next epoch next.
            self._is_finished = self._yielded == len(ours)
            yield batch.tolist()
        self._is_finished = self._is_over = True

    @property
    def sampler(self) -> Self:
        """This object: accelerate and Fabric call `batch_sampler.sampler.set_epoch`."""
        return self

    @property
    def epoch(self) -> int:
        """The epoch of the latest iteration, or the one that was set since."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch the next iteration is, and tell the data set. Setting the same one again changes nothing."""
        if epoch != self._epoch or self._is_finished:
            if self._is_resumed and self._start:
                _log.warning(
                    "set_epoch(%d) leaves the place this sampler was resumed at (epoch %d, after %d batches); with accelerate, call"
                    " loader.set_epoch(%d) after loading the state",
                    epoch,
                    self._epoch,
                    self._start,
                    self._epoch,
                )
            self._go_to(epoch, 0)
        self._tell_data()

    def resume(self, epoch: int, step: int) -> None:
        """Let the next iteration be the rest of an epoch of which each rank has had `step` batches."""
        if epoch < 0 or step < 0:
            message = f"a sampler is resumed at an epoch and a step from 0 on, not at {epoch} and {step}"
            raise BadInput(message)
        self._go_to(epoch, step * self._ranks())
        self._is_resumed = True
        self._tell_data()

    def state_dict(self, *, batches_consumed: int | None = None) -> dict[str, Any]:
        """Where this sampler is, as JSON, to be resumed on any number of ranks.

        A DataLoader reads ahead of the trainer, so the sampler's own count is right only without workers and with torchdata's
        StatefulDataLoader. With any other say `batches_consumed`: how many batches the trainer has had here since it began the present
        iteration.
        """
        if batches_consumed is not None:
            epoch, consumed = self._epoch, self._start + batches_consumed * self._ranks()
        elif self._is_over:
            epoch, consumed = self._epoch + 1, 0
        else:
            epoch, consumed = self._epoch, self._start + self._yielded * self._world
        return {"epoch": epoch, "consumed": consumed, "digest": self._data.digest, **self._settings()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to where another sampler was. Raises BadInput if it had another data set or another order."""
        missing = sorted({"epoch", "consumed", "digest", *self._settings()} - set(state))
        if missing:
            message = f"this is no state of a BucketBatchSampler: it lacks {', '.join(missing)}"
            raise BadInput(message)
        for name, ours in {"digest": self._data.digest, **self._settings()}.items():
            if state[name] != ours:
                what = "catalog's digest" if name == "digest" else name
                message = (
                    f"the {what} was {state[name]!r} when the state was saved and is {ours!r} now: its place means nothing in this order"
                )
                raise BadInput(message)
        self._go_to(int(state["epoch"]), int(state["consumed"]))
        self._is_resumed = True
        self._tell_data()

    def _settings(self) -> dict[str, Any]:
        return {"seed": self._order.seed, "batch_size": self._order.size, "shuffle": self._order.shuffle, "tail": self._order.tail}

    def _go_to(self, epoch: int, consumed: int) -> None:
        self._epoch, self._start = epoch, consumed
        self._yielded = 0
        self._is_finished = self._is_over = self._is_resumed = False

    def _ranks(self) -> int:
        """How many processes take batches from this order: each of ours, or accelerate's."""
        return _found_ranks()[1] if self._is_split_outside else self._world

    def _tell_data(self) -> None:
        tell = getattr(self._data, "set_epoch", None)
        if tell is not None:
            tell(self._epoch)


def _place_among_ranks(rank: int | None, world: int | None, split: str | None) -> tuple[int, int]:
    """(rank, number of ranks) that share the order: as told. (0, 1) where nobody does, or where somebody else shares it out."""
    if rank is None and world is None:
        found = _found_ranks()[1]
        if split is None and found > 1:
            message = (
                f"{found} processes train together and this sampler was not told how they share the batches: pass"
                ' rank=... and num_replicas=... (Fabric, plain torchrun), or split="outside" (accelerate, which hands them out itself)'
            )
            raise BadInput(message)
        return 0, 1
    if rank is None or world is None or split is not None or not 0 <= rank < world:
        message = (
            f"rank and num_replicas go together, rank from 0 up, and without split; got rank {rank}, num_replicas {world}, split {split!r}"
        )
        raise BadInput(message)
    return rank, world


def _found_ranks() -> tuple[int, int]:
    """(rank, world size) as an initialised torch.distributed says, else the launcher's environment, else (0, 1)."""
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank()), int(distributed.get_world_size())
    rank, world = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    return int(rank) if rank.isdecimal() else 0, int(world) if world.isdecimal() else 1


def _report_left_out(data: Bucketed, order: Order, world: int) -> None:
    """Say once what no epoch will hold."""
    if order.tail != "drop":
        return
    total = sum(map(len, data.buckets.values()))
    rests = {bucket: len(places) % order.size for bucket, places in sorted(data.buckets.items()) if len(places) % order.size}
    batches = count_batches(data.buckets, order) % world
    reasons: list[str] = []
    if rests:
        named = [f"{rest} of {_in_words(bucket)}" for bucket, rest in rests.items()]
        listed = ", ".join([*named[:_NAMED_BUCKETS], *(["…"] if len(named) > _NAMED_BUCKETS else [])])
        reasons.append(f"{sum(rests.values())} that do not fill a batch of {order.size} ({listed})")
    if batches:
        reasons.append(f"{batches * order.size} in batches that do not go round {world} ranks")
    if reasons:
        left = sum(rests.values()) + batches * order.size
        _log.warning('each epoch leaves out %d of %d samples: %s; tail="pad" or "wrap" keeps them', left, total, ", and ".join(reasons))


def _in_words(bucket: Sequence[int]) -> str:
    return "x".join(map(str, bucket)) or "those without a picture"
