"""Several data sets as one, each as often as its weight says. It deals their samples to epochs and knows nothing of a store.

An index of the mix has the same bucket in every epoch, so a sampler has equally many batches in every epoch. Which sample is at an index
may change from epoch to epoch, as a pure function of (seed, epoch).
"""

import inspect
import logging
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, SupportsIndex

import numpy as np
import torch
from torch.utils.data import Dataset

from cachestore.core.arguments import as_many, as_number, as_whole, refuse
from cachestore.core.errors import BadInput
from cachestore.core.keys import canonical, digest_parts
from cachestore.core.words import plural
from cachestore.train.batch_slice import join_slices, read_slice_or_samples
from cachestore.train.buffers import BatchBuffers
from cachestore.train.collate import SampleDict, collate, refuse_foreign_collate
from cachestore.train.dataset import Bucket, CachedDataset
from cachestore.train.epoch import Epoch
from cachestore.train.order import Indices, permutation
from cachestore.train.planned import same_epoch

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Turns:
    """Indices of the mix at which the samples of one bucket of one data set take turns."""

    start: int
    count: int
    samples: Indices

    def of_epoch(self, epoch: int) -> Indices:
        return self.samples[(epoch * self.count + np.arange(self.count)) % len(self.samples)]


class MixedDataset(Dataset[SampleDict]):
    """Several data sets of one model as one, of any resolutions: for a DataLoader, a BucketBatchSampler, `make_loader`.

        mixed = MixedDataset([photos, drawings.select(range(100))], weights=[1, 2.5])
        loader = make_loader(mixed, batch_size=8)

    A weight says how often each sample of a data set comes in an epoch: 1 once, 2 twice, 0.25 in every fourth epoch, 0 never. With a
    fractional weight, the samples of a bucket take turns in an order that depends on `seed`. So every epoch has the same size, and every
    sample of a bucket comes equally often. With a weight below 1, samples of very small buckets never come, which is logged as a warning.
    Batches mix samples of several data sets if their buckets are equal. Each data set is read once per batch. A MixedDataset belongs to one
    thread of one process, as its data sets do.
    """

    def __init__(self, datasets: Sequence[CachedDataset], weights: Sequence[float] | None = None, *, seed: int = 0) -> None:
        """Mix data sets. An empty list gives a mix without samples.

        Args:
            datasets: CachedDatasets with the same fields, made by the same recipes. Parts (`select`) are fine.
            weights: one number of at least 0 for each data set; 1 by default.
            seed: decides the order in which samples with a fractional weight take turns.

        Raises:
            BadInput: weights that do not fit, or data sets whose samples do not fit into one batch.
        """
        if isinstance(datasets, CachedDataset):
            refuse("datasets", "a list of CachedDatasets", datasets)
        self.datasets: tuple[CachedDataset, ...] = tuple(as_many("datasets", datasets, "a list of CachedDatasets"))
        for data in self.datasets:
            if not isinstance(data, CachedDataset):  # pyright: ignore[reportUnnecessaryIsInstance] - what callers without types pass
                kind = type(data).__name__
                raise BadInput(f"MixedDataset takes CachedDatasets and parts of them (`select`), not a {kind}", option="datasets")
        given = [1.0] * len(self.datasets) if weights is None else as_many("weights", weights, "a list of numbers, one for each data set")
        self._weights = [float(as_number(f"weights[{number}]", weight)) for number, weight in enumerate(given)]
        if len(self._weights) != len(self.datasets) or not all(math.isfinite(weight) and weight >= 0 for weight in self._weights):
            each = f"one weight of at least 0 for each of the {len(self.datasets)} data sets"
            raise BadInput(f"pass {each}; got {weights!r}", option="weights")
        first = next((data for data in self.datasets if len(data)), None)
        for data in self.datasets:
            _check_alike(self.datasets[0] if first is None else first, data)
        self._seed = as_whole("seed", seed, least=0)
        self._epoch = Epoch(self.datasets[0].epoch if self.datasets else 0)
        self._lay_out()
        for number, (data, weight) in enumerate(zip(self.datasets, self._weights, strict=True)):
            self._say_what_never_comes(number, data, weight)

    @classmethod
    def of_sources(
        cls, data: CachedDataset | Sequence[CachedDataset], weights: Sequence[float] | None = None, *, seed: int = 0
    ) -> "MixedDataset":
        """Mix data sets by their sources (`cs.Source`): a sample comes as often as `repeats` times `weight` of its source.

        With several data sets, such as one per resolution, `weights` says how often each comes besides: 1 by default. A data set without
        such sources comes once. Raises BadInput as the class does.
        """
        whole = cls([data] if isinstance(data, CachedDataset) else data, weights)
        rates: list[float] = []
        parts: list[CachedDataset] = []
        for one, weight in zip(whole.datasets, whole._weights, strict=True):
            of_one, indices = one.source_weights()
            rates += [weight * rate for rate in of_one]
            parts += [one.select(some) for some in indices]
        return cls(parts, rates, seed=seed)

    def _lay_out(self) -> None:
        self._owners: Indices = np.empty(0, dtype=np.int64)
        self._samples: Indices = np.empty(0, dtype=np.int64)
        self._turns: list[_Turns] = []
        self._buckets: dict[Bucket, list[int]] = {}
        for number, (data, weight) in enumerate(zip(self.datasets, self._weights, strict=True)):
            for _time in range(int(weight)):
                self._append(number, np.arange(len(data), dtype=np.int64), data.buckets)
            buckets = sorted(data.buckets.items())
            counts = _apportion([len(indices) for _bucket, indices in buckets], weight - int(weight))
            for (bucket, indices), count in zip(buckets, counts, strict=True):
                if count:
                    order = permutation(len(indices), "mixed", str(self._seed), str(number), *map(str, bucket))
                    turns = _Turns(len(self), count, np.asarray(indices, dtype=np.int64)[order])
                    self._turns.append(turns)
                    self._append(number, turns.of_epoch(0), {bucket: range(count)})

    def _say_what_never_comes(self, number: int, data: CachedDataset, weight: float) -> None:
        if not 0 < weight < 1:
            return
        sizes = [len(indices) for _bucket, indices in sorted(data.buckets.items())]
        never = [size for size, count in zip(sizes, _apportion(sizes, weight), strict=True) if size and not count]
        if never:
            what = (
                "with a weight of %g, %d of %d samples of data set %d of the mix are never used: they are in %d buckets that are"
                " too small for"
            )
            what += " this weight; a weight of 1 uses all"
            _log.warning(what, weight, sum(never), sum(sizes), number, len(never))

    def _append(self, number: int, samples: Indices, buckets: Mapping[Bucket, Sequence[int]]) -> None:
        for bucket, indices in buckets.items():
            self._buckets.setdefault(bucket, []).extend(len(self) + index for index in indices)
        self._owners = np.concatenate([self._owners, np.full(len(samples), number, dtype=np.int64)])
        self._samples = np.concatenate([self._samples, samples])

    def __getstate__(self) -> dict[str, Any]:
        """Return the data sets and the settings; the indices are computed again when unpickled."""
        return {name: getattr(self, name) for name in ("datasets", "_weights", "_seed", "_epoch")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._lay_out()

    def __repr__(self) -> str:
        return f"MixedDataset({plural(len(self), 'sample')} an epoch of {', '.join(map(repr, self.datasets))})"

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: SupportsIndex) -> SampleDict:
        """Return one sample of this epoch. Raises IndexError, MissingEntry, CorruptEntry."""
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[SupportsIndex]) -> list[SampleDict]:
        """Return many samples of this epoch, with one read for each data set. No indices give an empty list."""
        refuse_foreign_collate(inspect.currentframe())
        found: dict[int, SampleDict] = {}
        for number, positions, inner in self._by_owner(indices):
            found |= zip(positions, self.datasets[number].__getitems__(inner), strict=True)
        return [found[index] for index in range(len(indices))]

    def collate(self, samples: Sequence[SampleDict]) -> dict[str, Any]:
        """Return a batch of these samples, as the data sets make it. Raises BadInput for no samples, or for mixed buckets."""
        return self.datasets[0].collate(samples) if self.datasets else collate(samples, [])

    def read_batch(self, indices: Sequence[SupportsIndex], *, into: BatchBuffers | None = None) -> dict[str, Any]:
        """As `CachedDataset.read_batch`. An entry that several of the stores have is read from one of them."""
        slices = [(self.datasets[number].batch_slice(inner), positions) for number, positions, inner in self._by_owner(indices)]
        there = [batch_slice for batch_slice, _positions in slices if batch_slice is not None]
        batch_slice = join_slices(there, [positions for _slice, positions in slices]) if slices and len(there) == len(slices) else None
        return read_slice_or_samples(batch_slice, into, lambda: self.collate(self.__getitems__(indices)))

    def prefetch(self, indices: Sequence[SupportsIndex]) -> None:
        """Ask the system to read the entries of these samples into memory, without waiting."""
        for number, _positions, inner in self._by_owner(indices):
            self.datasets[number].prefetch(inner)

    def can_prefetch(self, batches: int) -> bool:
        """As `CachedDataset.can_prefetch`. In a mix with a store in a folder, the system reads that one's batches into memory."""
        return any(data.can_prefetch(batches) for data in self.datasets)

    def forget_prefetched(self) -> None:
        """As `CachedDataset.forget_prefetched`."""
        for data in self.datasets:
            data.forget_prefetched()

    def with_dtype(self, dtype: torch.dtype | None) -> "MixedDataset":
        """Return this mix, cast to a dtype as `CachedDataset.with_dtype`. It shares the epoch."""
        found = MixedDataset.__new__(MixedDataset)
        found.__setstate__({**self.__getstate__(), "datasets": tuple(data.with_dtype(dtype) for data in self.datasets)})
        return found

    make_buffers = staticmethod(CachedDataset.make_buffers)

    def where(self, index: SupportsIndex) -> tuple[int, int]:
        """Return (number of the data set, index in it) of a sample in this epoch. Raises IndexError."""
        at = range(len(self))[operator.index(index)]
        return int(self._owners[at]), int(self._at([at], self._epoch.get())[0])

    def _by_owner(self, indices: Sequence[SupportsIndex]) -> Iterator[tuple[int, list[int], list[int]]]:
        """Yield for each data set that is needed: its number, the positions in `indices` that it answers, and its own indices for them."""
        at = [range(len(self))[operator.index(index)] for index in indices]
        owners, inner = self._owners[at], self._at(at, self._epoch.of(indices))
        for number in np.unique(owners).tolist():
            positions = np.flatnonzero(owners == number)
            yield number, positions.tolist(), same_epoch(inner[positions].tolist(), indices)

    def _at(self, indices: Sequence[int], epoch: int) -> Indices:
        found = self._samples[indices]
        numbers = np.asarray(indices, dtype=np.int64)
        for turns in self._turns:
            inside = np.flatnonzero((numbers >= turns.start) & (numbers < turns.start + turns.count))
            if len(inside):
                found[inside] = turns.of_epoch(epoch)[numbers[inside] - turns.start]
        return found

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch to read, here and in all DataLoader workers, also for the data sets."""
        self._epoch.set(epoch)
        for data in self.datasets:
            data.set_epoch(epoch)

    @property
    def epoch(self) -> int:
        """The current epoch."""
        return self._epoch.get()

    @property
    def buckets(self) -> Mapping[Bucket, Sequence[int]]:
        """The indices of the samples of each bucket, the same in every epoch."""
        return self._buckets

    @property
    def digest(self) -> str:
        """A digest of the data sets in order, the weights and the seed."""
        settings = canonical([self._weights, self._seed])
        return digest_parts("cachestore-mixed", settings, *(data.digest for data in self.datasets)).hex()

    @property
    def content(self) -> Mapping[str, Any]:
        """As `CachedDataset.content`, of the mix and of each data set in it."""
        parts = {f"{name} of part {at}": value for at, data in enumerate(self.datasets) for name, value in data.content.items()}
        return {"digest": self.digest, "weights": self._weights, "seed": self._seed, **parts}

    @property
    def joined(self) -> Mapping[str, tuple[str, int]]:
        """The joined data sets of each data set, as `CachedDataset.joined`."""
        return {f"{name} of part {at}": wanted for at, data in enumerate(self.datasets) for name, wanted in data.joined.items()}

    @property
    def generation(self) -> tuple[int, ...]:
        """The generation of each data set."""
        return tuple(data.generation for data in self.datasets)

    @property
    def is_pinned(self) -> bool:
        """Whether each data set was opened with a generation, which training on several ranks needs."""
        return all(data.is_pinned for data in self.datasets)

    @property
    def mask_name(self) -> str | None:
        """The `mask_name` of the data sets; None without data sets."""
        return self.datasets[0].mask_name if self.datasets else None


def _apportion(sizes: Sequence[int], fraction: float) -> list[int]:
    """Return `fraction` of each size as whole numbers with the right sum. The largest remainders are rounded up, the first of equals."""
    exact = [size * fraction for size in sizes]
    counts = [int(number) for number in exact]
    left = int(sum(sizes) * fraction + 0.5) - sum(counts)
    by_remainder = sorted(range(len(sizes)), key=lambda number: (counts[number] - exact[number], number))
    for number in by_remainder[: max(0, left)]:
        counts[number] += 1
    return counts


def _check_alike(one: CachedDataset, other: CachedDataset) -> None:
    why, differing = "", "datasets"
    if one.fields != other.fields or one.latents_form != other.latents_form:
        what = [f"{', '.join(sorted(data.fields)) or 'nothing'} (latents={data.latents_form!r})" for data in (one, other)]
        why, differing = f"one returns {what[0]}, the other {what[1]}; pass both the same fields=, latents= and join=", "fields"
    elif len(one) and len(other) and one.has_control_lists != other.has_control_lists:
        counts = "the samples of one have exactly one control image each, those of the other have lists of them"
        why = f"{counts}. Encode both with one for each sample, or train on them one after the other"
    elif one.dtype != other.dtype:
        why, differing = f"one was opened with dtype={one.dtype}, the other with dtype={other.dtype}; pass both the same", "dtype"
    else:
        ours, theirs = one.recipes_in_use, other.recipes_in_use
        for name in sorted({*ours, *theirs}):
            if ours.get(name) != theirs.get(name):
                why = f"{name} was made by another model or with other settings; encode both with the same"
                break
        there = other.features
        for name, feature in one.features.items():  # of what was published, which has no recipe
            if name in there and feature.is_unlike(there[name]):
                why, differing = f"{name} of one is {feature}, of the other {there[name]}; join both to tensors of one kind", "join"
                break
    if why:
        raise BadInput(f"{one!r} and {other!r} cannot be mixed: {why}", option=differing)
