"""Prefetch: threads read batches before the trainer asks for them. They live within one iteration.

The threads are also joined before this process forks. So no child starts with a lock that one of them held.
"""

import os
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, Final, NamedTuple, Protocol
from weakref import WeakSet

import numpy as np
import torch
from torch.utils.data import Dataset, get_worker_info

import cachestore.store.format.index  # noqa: F401  # pyright: ignore[reportUnusedImport] - see _before_fork
from cachestore.core.forked import in_one_thread
from cachestore.train.batches import Bucketed
from cachestore.train.order import Indices
from cachestore.train.planned import PlannedBatch, same_epoch

Batch = dict[str, Any]

_READER: Final = "cachestore-read"
"""Prefix of the names of reading threads."""
_REQUESTED_AT_ONCE: Final = 8
"""Most batches that are requested between two reads. So a thread does not walk through a whole epoch that is in the cache already."""


class Batched(Bucketed, Protocol):
    """A data set that makes batches.

    If it has `make_buffers(pin=...)` and `read_batch(indices, into=buffers)`, the buffers of earlier batches are used again.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...

    def __getitems__(self, indices: Sequence[int], /) -> list[Any]: ...

    def collate(self, samples: Sequence[Any], /) -> Batch:
        """Make a batch of samples."""
        ...


class Prefetcher(Dataset[Any]):
    """A data set that reads the next batches while the trainer works on this one.

    For a DataLoader without workers. Use it with a BucketBatchSampler over this object, which announces its batches. Trainers that build a
    DataLoader of their own then prefetch too, if they keep data set, batch sampler and `collate_fn`. Batches that were not announced, and
    all batches in a DataLoader's worker, are read on demand; a worker requests its next batches from an object store before it reads one.
    An error in a thread is raised when its batch is asked for.

    A batch stays valid as long as the trainer holds its tensors or views of them. Buffers without users are used again. Use it from one
    thread of one process.
    """

    def __init__(self, data: Batched, *, batches: int = 2, threads: int = 1, pin_memory: bool = False, workers: int = 0) -> None:
        """Prefetch this many batches with this many threads. With `pin_memory` the tensors are in pinned memory.

        `workers` is the number of workers of the DataLoader.
        """
        self._data = data
        self._workers = workers
        self._batches = batches
        self._threads = threads
        self._pins = pin_memory
        self.begin_anew()

    def begin_anew(self) -> None:
        """Forget all announced and read batches. Also called in a forked child, as these belong to the parent."""
        self._guard = threading.RLock()
        """Held while reads are started and ended, and during a fork of this process."""
        self._ring = Ring(self._batches + 2)
        self._plan: Indices = np.empty((0, 0), dtype=np.int64)
        self._at = 0
        """Number of the batch in the plan that is expected next."""
        self._requested = 0
        """Number of the batch in the plan that is requested from an object store next."""
        self._reads: dict[int, Future[Batch]] = {}
        self._failure: Exception | None = None
        """What a thread's read raised. Later reads end with it too, as the iteration does."""
        self._pool: ThreadPoolExecutor | None = None
        self._iteration: object = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Start anew in another process, with the same options, without threads and batches."""
        options = {"batches": self._batches, "threads": self._threads, "pin_memory": self._pins, "workers": self._workers}
        return partial(Prefetcher, self._data, **options), ()

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> Any:
        return self._data[index]

    @in_one_thread
    def __getitems__(self, indices: Sequence[int]) -> list[Batch]:
        """Return one batch of these samples as a list of one, which a DataLoader passes to `collate`."""
        read = self._begin_reads(indices)
        if read is None:
            if isinstance(indices, PlannedBatch):
                self._request([indices, *(same_epoch(following, indices) for following in indices.upcoming)])
            return [self._read(indices)]
        try:
            return [read.result()]
        except CancelledError:  # another thread forked this process before the read began
            return [self._read(indices)]
        except BaseException:
            with self._guard:
                self._end_reads()
            raise

    def collate(self, samples: Sequence[Any]) -> Batch:
        """Return the batch that was read, or collate single samples."""
        if len(samples) == 1 and isinstance(samples[0], _Read):
            return dict(samples[0])
        return self._data.collate(samples)

    @property
    def workers(self) -> int:
        """How many workers want to know their next batches: none if the data set is in a folder."""
        return self._workers if self._can_request(1) else 0

    @property
    def buckets(self) -> Mapping[tuple[int, ...], Sequence[int]]:
        """The buckets of the data set."""
        return self._data.buckets

    @property
    def digest(self) -> str:
        """The digest of the data set."""
        return self._data.digest

    @property
    def content(self) -> Mapping[str, Any]:
        """What decides the values of the data set's samples, by name: as the data set's, if it has it, else its digest."""
        return getattr(self._data, "content", None) or {"digest": self._data.digest}

    @property
    def joined(self) -> Mapping[str, tuple[str, int]]:
        """The joined data sets of the data set, if it has any."""
        return getattr(self._data, "joined", {})

    @property
    def generation(self) -> int | None:
        """The generation of the data set, if it has one."""
        return getattr(self._data, "generation", None)

    def __repr__(self) -> str:
        return repr(self._data)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the data set, if it has one."""
        tell = getattr(self._data, "set_epoch", None)
        if tell is not None:
            tell(epoch)

    def reading(self, rounds: Indices, own: Indices) -> AbstractContextManager[None]:
        """As the data set's, if it has it."""
        reading: Any = getattr(self._data, "reading", None)
        return nullcontext() if reading is None else reading(rounds, own)

    @contextmanager
    def announce(self, batches: Indices) -> Generator[None]:
        """Announce the batches to come, one per row, in order. When the context ends, no thread is left."""
        iteration, owner = object(), threading.current_thread()
        with self._guard:
            self._end_reads()
            self._plan, self._at, self._requested, self._iteration = batches, 0, 0, iteration
            _iterating.add(self)
        try:
            yield
        finally:
            # If this is closed late, it must not end the iteration that follows. If the garbage collector closes it in another thread, it
            # must not wait for a thread that waits for this one; the next iteration then ends the reads.
            is_owner, is_reading = threading.current_thread() is owner, threading.current_thread().name.startswith(_READER)
            if self._iteration is iteration and not is_reading and self._guard.acquire(blocking=is_owner):
                try:
                    self._end_reads()
                    self._plan = self._plan[:0]
                    _iterating.discard(self)
                finally:
                    self._guard.release()

    def _begin_reads(self, indices: Sequence[int]) -> Future[Batch] | None:
        with self._guard:
            at = self._find(indices) if self._batches else None
            if at is None:
                return None
            self._at = at + 1
            self._reads = {number: read for number, read in self._reads.items() if number >= at}
            for number in range(at, min(at + self._batches + 1, len(self._plan))):
                if number not in self._reads:
                    if self._pool is None:
                        self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix=_READER)
                    with suppress(RuntimeError):  # the interpreter ends, and takes no more work
                        self._reads[number] = self._pool.submit(self._read_next, number, self._plan, indices)
            return self._reads.pop(at, None)

    def _read_next(self, number: int, plan: Indices, asked: Sequence[int]) -> Batch:
        """Read a batch of the plan, in the epoch of the batch that was asked for.

        Before that, request it and later ones, if they come from an object store.
        """
        if self._failure is not None:
            raise self._failure
        first = max(number, self._requested)
        try:
            upcoming = [same_epoch(row, asked) for row in plan[first : first + _REQUESTED_AT_ONCE].tolist()]
            self._requested = first + self._request(upcoming, distance=first - number)
            return self._read(same_epoch(plan[number].tolist(), asked))
        except Exception as error:
            self._failure = error
            raise

    def _can_request(self, distance: int) -> bool:
        data: Any = self._data
        return hasattr(data, "can_prefetch") and data.can_prefetch(distance)

    def _request(self, batches: Sequence[Sequence[int]], *, distance: int = 0) -> int:
        data: Any = self._data
        for count, indices in enumerate(batches):
            if not self._can_request(distance + count):
                return count
            data.prefetch(indices)
        return len(batches)

    def _find(self, indices: Sequence[int]) -> int | None:
        """The number of a batch in the plan, searched from the expected one on, as trainers that resume skip some. None if not found."""
        rest = self._plan[self._at :]
        if not len(rest) or len(indices) != rest.shape[1]:
            return None
        if rest[0].tolist() == list(indices):
            return self._at
        found = np.flatnonzero((rest == np.asarray(indices)).all(axis=1))
        return self._at + int(found[0]) if len(found) else None

    def _read(self, indices: Sequence[int]) -> Batch:
        data: Any = self._data
        if not hasattr(data, "read_batch"):
            batch = data.collate(data.__getitems__(indices))
            pins = {name for name, value in batch.items() if self._pins and isinstance(value, torch.Tensor)}
            return _Read({name: value.pin_memory() if name in pins else value for name, value in batch.items()})
        if get_worker_info() is not None:
            return _Read(data.read_batch(indices))  # its memory goes to the trainer's process, and does not come back
        if self._pins:
            # Torch reuses pinned memory itself, and knows which copies to a device still run.
            return _Read(data.read_batch(indices, into=data.make_buffers(pin=True)))
        buffers = self._ring.take(lambda: data.make_buffers(pin=False))
        return _Read(self._ring.lend(buffers, data.read_batch(indices, into=buffers)))

    def _end_reads(self) -> None:
        self._rest()
        self._reads.clear()
        self._failure = None
        data: Any = self._data
        if hasattr(data, "forget_prefetched"):
            data.forget_prefetched()

    def _rest(self) -> None:
        """Join the threads after their current reads; finished reads are kept. Threads start again when needed."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = None
        self._reads = {number: read for number, read in self._reads.items() if not read.cancelled()}

    def rest_for_fork(self) -> None:
        """Join the threads, and start none until `go_on`."""
        self._guard.acquire()
        self._rest()

    def go_on(self) -> None:
        """Allow reads again, in the process that forked."""
        self._guard.release()


class _Read(dict[str, Any]):
    """A batch. The type distinguishes it from a sample, which is a plain dict."""


class Ring:
    """Buffers of earlier batches, used again when nothing else uses them. Several threads may call it."""

    def __init__(self, limit: int) -> None:
        """Remember the buffers of the last `limit` batches. Older ones are freed with their last user."""
        self._limit = limit
        self._guard = threading.Lock()
        self._lent: list[_Lent] = []

    def take(self, make: Callable[[], Any]) -> Any:
        """Return buffers that are free, else new ones."""
        with self._guard:
            free = next((number for number, lent in enumerate(self._lent) if lent.is_free()), None)
            return make() if free is None else self._lent.pop(free).buffers

    def lend(self, buffers: Any, batch: Mapping[str, Any]) -> Batch:
        """Remember the buffers of a batch. Returns the batch with new tensors on the same memory."""
        tensors = {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}
        lent = _Lent(buffers, [(tensor, _count_uses(tensor)) for tensor in tensors.values()])
        aliases = {name: tensor.detach() for name, tensor in tensors.items()}
        with self._guard:
            self._lent = [*self._lent, lent][-self._limit :]
        return {**batch, **aliases}


class _Lent(NamedTuple):
    """Buffers with their original tensors, which were not handed out.

    Torch counts all other uses of their memory: tensors that were handed out, views of them, and what autograd keeps.
    """

    buffers: Any
    uses: Sequence[tuple[torch.Tensor, int]]

    def is_free(self) -> bool:
        """Whether the memory has no more uses than before it was lent."""
        return all(_count_uses(tensor) <= before for tensor, before in self.uses)


def _count_uses(tensor: torch.Tensor) -> int:
    storage: Any = tensor.untyped_storage()
    # There is no public way to count uses; torch's own CUDA graphs do it like this.
    return int(torch._C._storage_Use_Count(storage._cdata))  # noqa: SLF001  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType, reportAttributeAccessIssue, reportPrivateUsage]


_iterating: Final[WeakSet[Prefetcher]] = WeakSet()
_resting: Final[list[Prefetcher]] = []
"""Those that pause during a fork. Only one fork runs at a time, as `_forking` is held meanwhile."""
_forking: Final = threading.RLock()


def _before_fork() -> None:
    # Hooks run in reverse order of registration. The index's hook blocks all look-ups, so it must run after these threads are joined.
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
