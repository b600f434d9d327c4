"""A DataLoader for each way of training on several ranks. It imports none of the frameworks, but looks which of them are loaded."""

import logging
import sys
from collections.abc import Iterator, Mapping
from typing import Any, Literal, cast, get_args

import torch
from torch.utils.data import DataLoader

from cachestore.core import system
from cachestore.core.arguments import as_switch, as_whole, as_word
from cachestore.core.errors import BadInput
from cachestore.core.spelling import option
from cachestore.train.batches import BucketBatchSampler, check_buckets
from cachestore.train.order import Tail
from cachestore.train.prefetch import Batch, Batched, Prefetcher
from cachestore.train.seats import Split, find_ranks

_log = logging.getLogger(__name__)

Framework = Literal["auto", "single", "ddp", "accelerate", "fabric", "lightning"]


class Loader(DataLoader[Any]):
    """A DataLoader over a BucketBatchSampler that counts the batches it yielded: its `state_dict` is exact with and without workers.

    Each further iteration is the next epoch. `loader.batch_sampler` is the sampler.
    """

    batch_sampler: BucketBatchSampler  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, data: Batched, source: Prefetcher, sampler: BucketBatchSampler, *, is_shared: bool, **options: Any) -> None:
        """Use `make_loader` instead. `source` reads `data`, and `sampler` is one over `source`."""
        super().__init__(source, batch_sampler=sampler, collate_fn=source.collate, **options)  # pyright: ignore[reportUnknownMemberType]
        self._data = data
        self._is_shared = is_shared

    def __iter__(self) -> Iterator[Batch]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Yield the batches of this rank. Raises BadInput if ranks might read different catalogs, and as the sampler's iteration."""
        if self._is_shared and find_ranks().world_size > 1:
            _refuse_unpinned(self._data)
        sampler = self.batch_sampler
        batches: Iterator[Batch]
        if self.num_workers and getattr(self._data, "not_encoded", ""):  # it is encoded in this process, so no worker reads it
            source: Any = self.dataset
            batches = (source.collate(source.__getitems__(indices)) for indices in sampler)
        else:
            batches = super().__iter__()
        for number, batch in enumerate(batches, 1):
            sampler.count_delivered(number)
            yield batch
        sampler.count_delivered(None)

    def __repr__(self) -> str:
        return f"Loader({self._data!r}, num_workers={self.num_workers})"

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration."""
        self.batch_sampler.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return how far the trainer is, as JSON. It can be loaded on any number of ranks and with any number of workers."""
        return self.batch_sampler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where another loader was. Raises BadInput if it had another catalog or another order."""
        self.batch_sampler.load_state_dict(state)


def make_loader(
    data: Batched,
    batch_size: int = 8,
    framework: Framework = "auto",
    *,
    shuffle: bool = True,
    seed: int = 0,
    tail: Tail = "drop",
    rank: int | None = None,
    num_replicas: int | None = None,
    mesh: object = None,
    check_ranks: bool | None = None,
    dtype: torch.dtype | None = None,
    num_workers: int = 0,
    ahead: int = 2,
    pin_memory: bool = False,
) -> Loader:
    """Return a DataLoader for the way in which this process trains. Each batch has one bucket; every rank gets the same number of batches.

        loader = make_loader(data, batch_size=8)                                             # one process, or plain DDP
        loader = accelerator.prepare(make_loader(data, batch_size=8))                        # accelerate
        loader = fabric.setup_dataloaders(make_loader(data), use_distributed_sampler=False)  # Lightning Fabric
        Trainer(..., use_distributed_sampler=False).fit(model, make_loader(data))            # Lightning Trainer

    By default a thread of this process prefetches batches until the iteration ends; `docs/benchmarks.md` compares that with workers.

    Args:
        data: a CachedDataset. If several ranks train, it must be opened with `generation=`. Or what `ReadThrough.of(...).open` returns: if
            it is not wholly encoded, a warning says how much is missing.
        batch_size: samples in each batch, on each rank.
        framework: how batches are dealt to ranks: "accelerate" does it itself; with "ddp", "fabric" and "lightning" each rank takes its
            own, by the rank that is found when the loader is used; with "single" every process takes all. "auto" is "accelerate" if an
            Accelerator exists, else each rank takes its own.
        shuffle: as in `BucketBatchSampler`.
        seed: the seed of the order.
        tail: "drop" samples that do not fill a batch, and batches that are not enough for all ranks; or fill up by repeating
            them ("pad") or with the first ones ("wrap").
        rank: which of the `num_replicas` equal parts of the batches this process takes, if it is not to be found: ranks with the same
            number read the same batches.
        num_replicas: the number of such parts; needs `rank`.
        mesh: the same for ranks that share batches, as in context, sequence, tensor and pipeline parallelism: a DeviceMesh whose
            dimensions for data are called "dp..." or "data", `(mesh, "name")`, `(mesh, ("name", ...))`, or the process group of the ranks
            that read different batches.
        check_ranks: before the first batch, and the first one after a state was loaded, ranks compare what they are about to read,
            through the key-value store of torch.distributed's process group. By default, a rank that does not begin the same loader (made
            at the same lines of the script) within 30 s is only a warning; True makes that an error, False compares nothing. With
            "single", False is the default.
        dtype: cast floating point tensors to this one, as `CachedDataset(..., dtype=)`; by default as the data set has them.
        num_workers: processes that read, as in DataLoader; 0 reads in this process. An epoch that encodes is read in this process.
        ahead: batches that this process prefetches; 0 reads each one when it is needed. Has no effect with workers.
        pin_memory: return pinned memory if there is an accelerator; useful if batches are copied with `non_blocking=True`.

    Raises:
        BadInput: options that do not fit; an epoch without a batch for each rank; several ranks and a data set opened without
            `generation=`; or with "auto", several ranks while it is unclear whether accelerate deals the batches; workers, and a TMPDIR
            that is too long for their sockets. The iteration also raises it if batches are dealt to ranks twice, or not at all.
        RanksDiffer: by the iteration, on every rank: the ranks are about to read batches that do not belong together.
    """
    check_buckets(data)
    if dtype is not None:
        if not hasattr(data, "with_dtype"):
            raise BadInput(
                f"dtype= casts a CachedDataset or a MixedDataset, not a {type(data).__name__}: let its `collate` cast instead",
                option="dtype",
            )
        data = cast("Any", data).with_dtype(dtype)
    ahead, num_workers = as_whole("ahead", ahead, least=0), as_whole("num_workers", num_workers, least=0)
    if num_workers and torch.multiprocessing.get_sharing_strategy() == "file_descriptor" and (too_long := system.too_long_for_workers()):
        leave = "set TMPDIR to a shorter one, such as /tmp, or leave num_workers out"
        raise BadInput(f"{too_long}, so they would wait for ever: {leave}", option="num_workers")
    as_word("framework", framework, get_args(Framework))
    is_numbered = rank is not None or num_replicas is not None
    if (is_numbered and framework not in {"auto", "ddp"}) or (mesh is not None and framework == "single"):
        deals = f"{option('framework', framework)} says itself which batches a rank takes"
        raise BadInput(f"{deals}: leave rank, num_replicas and mesh out", option="framework")
    split = None if is_numbered else _split_of(framework)
    if mesh is not None and split == "found":
        split = None
    seats: dict[str, Any] = {"rank": rank, "num_replicas": num_replicas, "mesh": mesh, "split": split, "check_ranks": check_ranks}
    is_shared = is_numbered or framework != "single"
    if not is_shared:  # every process takes all batches, and may have a data set of its own
        seats |= {"rank": 0, "num_replicas": 1, "check_ranks": bool(check_ranks)}
    elif find_ranks().world_size > 1:
        _refuse_unpinned(data)

    pins = as_switch("pin_memory", pin_memory) and torch.accelerator.is_available()
    if pin_memory and not pins:
        _log.warning("pin_memory=True has no effect without an accelerator: leave it out")
    if not_encoded := getattr(data, "not_encoded", ""):
        _log.warning("%s", not_encoded)
    source = Prefetcher(data, batches=0 if num_workers else ahead, pin_memory=pins and num_workers == 0, workers=num_workers)
    sampler = BucketBatchSampler(source, batch_size, shuffle=shuffle, seed=seed, tail=tail, **seats)
    return Loader(data, source, sampler, is_shared=is_shared, num_workers=num_workers, pin_memory=pins and num_workers > 0)


def _split_of(framework: Framework) -> Split | None:
    match framework:
        case "single":
            return None
        case "accelerate":
            return "outside"
        case "ddp" | "fabric" | "lightning":
            return "found"
        case "auto":
            state: Any = sys.modules.get("accelerate.state")
            if state is not None and state.is_initialized():
                return "outside"
            found = find_ranks()
            if state is not None and found.world_size > 1 and found.found_in != "torch.distributed":
                raise BadInput(
                    f"{found.world_size} processes train together ({found.found_in}) and accelerate is imported, but nothing says yet"
                    f" whether it will deal the batches: make the Accelerator first, or pass {option('framework', 'accelerate')} or"
                    f" {option('framework', 'ddp')}",
                    option="framework",
                )
            return "found"


def _refuse_unpinned(data: Batched) -> None:
    if getattr(data, "is_pinned", True):
        return
    joined: Mapping[str, tuple[str, int]] = getattr(data, "joined", {})
    beside = f" and join={dict(joined)}" if joined else ""
    raise BadInput(
        "several processes train together, and each one opened the newest catalog, which may differ: open the data set with"
        f" generation=... on every rank, such as generation={getattr(data, 'generation', 'report.generation')}{beside}; got {data!r}",
        option="generation",
    )
