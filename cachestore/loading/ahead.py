"""Batches read before they are asked for, by threads that live within one iteration. Knows the order it is told, and no rank.

The threads are joined before this process forks too, so that no child ever starts with a lock that one of them held.
"""

import os
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, NamedTuple, Protocol
from weakref import WeakSet

import numpy as np
import torch
from torch.utils.data import Dataset, get_worker_info

import cachestore.storage.index  # noqa: F401  # pyright: ignore[reportUnusedImport] - see _before_fork
from cachestore.loading.batches import Bucketed
from cachestore.loading.order import Places

Batch = dict[str, Any]

_READER: Final = "cachestore-read"
"""How the names of reading threads begin."""


class Batched(Bucketed, Protocol):
    """A data set that makes batches.

    One that has `make_buffers(pin=...)` and `read_batch(places, into=buffers)` is given the buffers of earlier batches to read into.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...

    def __getitems__(self, indices: Sequence[int], /) -> list[Any]: ...

    def collate(self, samples: Sequence[Any], /) -> Batch:
        """Samples to a batch."""
        ...


class ReadAhead(Dataset[Any]):
    """A data set whose batches are read while the trainer works on those before them.

    For a DataLoader without workers, together with a BucketBatchSampler over this object, which announces what it will yield; then
    every trainer that keeps data set, batch sampler and `collate_fn` when it builds a DataLoader of its own reads ahead too. What was
    not announced, and everything in a DataLoader's worker, is read when it is asked for. An error of a thread is raised where its batch
    is asked for.

    Its tensors are the trainer's for as long as it holds them, or a view of them; buffers that nobody holds any more are used again.
    Belongs to one thread of one process, besides its own.
    """

    def __init__(self, data: Batched, *, batches: int = 2, threads: int = 1, pin_memory: bool = False) -> None:
        """Read so many batches ahead of the one asked for, with so many threads. `pin_memory` hands out pinned memory."""
        self._data = data
        self._batches = batches
        self._threads = threads
        self._pins = pin_memory
        self.begin_anew()

    def begin_anew(self) -> None:
        """Nothing is announced, nothing read. In a forked child, too: what was announced is the parent's."""
        self._guard = threading.RLock()
        """Held while reading is begun and ended, and by a thread that forks for as long as it does."""
        self._ring = Ring(self._batches + 2)
        self._plan: Places = np.empty((0, 0), dtype=np.int64)
        self._at = 0
        """Which batch of the plan is expected next."""
        self._reads: dict[int, Future[Batch]] = {}
        self._pool: ThreadPoolExecutor | None = None
        self._iteration: object = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Begin anew in another process, with what was asked for: no threads, no batches."""
        return partial(ReadAhead, self._data, batches=self._batches, threads=self._threads, pin_memory=self._pins), ()

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> Any:
        return self._data[index]

    def __getitems__(self, indices: Sequence[int]) -> list[Batch]:
        """One batch of these samples, as the only one of a list: what a DataLoader hands on to `collate`."""
        read = self._begin_reads(indices)
        if read is None:
            return [self._read(indices)]
        try:
            return [read.result()]
        except CancelledError:  # another thread forked before this read had begun
            return [self._read(indices)]
        except BaseException:
            with self._guard:
                self._end_reads()
            raise

    def collate(self, samples: Sequence[Any]) -> Batch:
        """The batch that was read, or a batch of single samples."""
        if len(samples) == 1 and isinstance(samples[0], _Read):
            return dict(samples[0])
        return self._data.collate(samples)

    @property
    def buckets(self) -> Mapping[tuple[int, ...], Sequence[int]]:
        """Those of the data set."""
        return self._data.buckets

    @property
    def digest(self) -> str:
        """That of the data set."""
        return self._data.digest

    def set_epoch(self, epoch: int) -> None:
        """Tell the data set."""
        tell = getattr(self._data, "set_epoch", None)
        if tell is not None:
            tell(epoch)

    @contextmanager
    def announce(self, batches: Places) -> Generator[None]:
        """Say which batches will be asked for, one a row, in order. At the end of the context no thread is left."""
        iteration, owner = object(), threading.current_thread()
        with self._guard:
            self._end_reads()
            self._plan, self._at, self._iteration = batches, 0, iteration
            _iterating.add(self)
        try:
            yield
        finally:
            # Dropped late, it must not end its successor. Dropped by the garbage collector in another thread, it must not wait for a
            # thread that waits for this one; the next iteration then ends what is left.
            is_owner, is_reading = threading.current_thread() is owner, threading.current_thread().name.startswith(_READER)
            if self._iteration is iteration and not is_reading and self._guard.acquire(blocking=is_owner):
                try:
                    self._end_reads()
                    self._plan = self._plan[:0]
                    _iterating.discard(self)
                finally:
                    self._guard.release()

    def _begin_reads(self, indices: Sequence[int]) -> Future[Batch] | None:
        """Have the batches read that follow this one; returns the reading of this one, or None where it was not announced."""
        with self._guard:
            place = self._find(indices) if self._batches else None
            if place is None:
                return None
            self._at = place + 1
            self._reads = {number: read for number, read in self._reads.items() if number >= place}
            for number in range(place, min(place + self._batches + 1, len(self._plan))):
                if number not in self._reads:
                    if self._pool is None:
                        self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix=_READER)
                    self._reads[number] = self._pool.submit(self._read, self._plan[number].tolist())
            return self._reads.pop(place)

    def _find(self, indices: Sequence[int]) -> int | None:
        """Where in the plan a batch stands, from the expected place on: trainers that resume skip some."""
        rest = self._plan[self._at :]
        if not len(rest) or len(indices) != rest.shape[1]:
            return None
        if rest[0].tolist() == list(indices):
            return self._at
        found = np.flatnonzero((rest == np.asarray(indices)).all(axis=1))
        return self._at + int(found[0]) if len(found) else None

    def _read(self, indices: Sequence[int]) -> Batch:
        """Read one batch: the one place that knows how. Called by threads."""
        data: Any = self._data
        if not hasattr(data, "read_batch"):
            batch = data.collate(data.__getitems__(indices))
            pins = {name for name, value in batch.items() if self._pins and isinstance(value, torch.Tensor)}
            return _Read({name: value.pin_memory() if name in pins else value for name, value in batch.items()})
        if get_worker_info() is not None:
            return _Read(data.read_batch(indices))  # its memory goes to the trainer's process, and does not come back
        if self._pins:
            # Torch's pinned memory is a ring of its own, which knows of copies to a device that are still under way.
            return _Read(data.read_batch(indices, into=data.make_buffers(pin=True)))
        buffers = self._ring.take(lambda: data.make_buffers(pin=False))
        return _Read(self._ring.lend(buffers, data.read_batch(indices, into=buffers)))

    def _end_reads(self) -> None:
        self._rest()
        self._reads.clear()

    def _rest(self) -> None:
        """Join the threads when they have read what they are at; what they have read stays. They start again when they are needed."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = None
        self._reads = {number: read for number, read in self._reads.items() if not read.cancelled()}

    def rest_for_fork(self) -> None:
        """Join the threads and hold still until `go_on`."""
        self._guard.acquire()
        self._rest()

    def go_on(self) -> None:
        """In the process that forked: read on."""
        self._guard.release()


class _Read(dict[str, Any]):
    """A batch, told apart from a sample, which is a plain dict too."""


class Ring:
    """Buffers that batches were read into, to be read into again once nobody else uses them. Several threads may call."""

    def __init__(self, limit: int) -> None:
        """Remember the buffers of at most so many batches; those beyond are left to whoever holds them."""
        self._limit = limit
        self._guard = threading.Lock()
        self._lent: list[_Lent] = []

    def take(self, make: Callable[[], Any]) -> Any:
        """Buffers that nobody uses any more, else new ones."""
        with self._guard:
            free = next((number for number, lent in enumerate(self._lent) if lent.is_free()), None)
            return make() if free is None else self._lent.pop(free).buffers

    def lend(self, buffers: Any, batch: Mapping[str, Any]) -> Batch:
        """Remember these buffers, which a batch was read into; returns the batch with tensors of its own on the same memory."""
        tensors = {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}
        lent = _Lent(buffers, [(tensor, _count_uses(tensor)) for tensor in tensors.values()])
        aliases = {name: tensor.detach() for name, tensor in tensors.items()}
        with self._guard:
            self._lent = [*self._lent, lent][-self._limit :]
        return {**batch, **aliases}


class _Lent(NamedTuple):
    """Buffers, and the tensors on them that nobody else has seen.

    Torch counts who uses a tensor's memory besides: what was handed out, views of it, what autograd keeps.
    """

    buffers: Any
    uses: Sequence[tuple[torch.Tensor, int]]

    def is_free(self) -> bool:
        """Whether nobody uses the memory who did not when it was lent."""
        return all(_count_uses(tensor) <= before for tensor, before in self.uses)


def _count_uses(tensor: torch.Tensor) -> int:
    storage: Any = tensor.untyped_storage()
    # Nothing public tells; torch's own CUDA graphs ask in this way.
    return int(torch._C._storage_Use_Count(storage._cdata))  # noqa: SLF001  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType, reportAttributeAccessIssue, reportPrivateUsage]


_iterating: Final[WeakSet[ReadAhead]] = WeakSet()
_resting: Final[list[ReadAhead]] = []
"""Those that hold still while a fork is under way. Forks of one process come one after the other: the first guard orders them."""
_forking: Final = threading.RLock()


def _before_fork() -> None:
    # What was registered last comes first: the index's hook, which holds up all looking, must come after the threads here are joined.
    _forking.acquire()
    for each in list(_iterating):
        each.rest_for_fork()
        _resting.append(each)


def _after_fork_here() -> None:
    while _resting:
        _resting.pop().go_on()
    _forking.release()


def _after_fork_in_child() -> None:
    while _resting:
        _resting.pop().begin_anew()
    _forking.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_here, after_in_child=_after_fork_in_child)
