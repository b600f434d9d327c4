"""Batch slices: what one data set gives to a batch, and the batch that one or several of them make."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Final, TypeVar

import torch

from cachestore.core.errors import MissingEntry
from cachestore.core.forked import in_one_thread
from cachestore.core.keys import Key
from cachestore.core.read_block import TextBlock
from cachestore.store.format.locations import Located, Location
from cachestore.train.assemble import EntryReader, assemble
from cachestore.train.buffers import BatchBuffers
from cachestore.train.cast import cast
from cachestore.train.collate import constants_of
from cachestore.train.parts import MaskPart, Part

T = TypeVar("T")

_NOTHING: Final[Mapping[str, Any]] = {}

_OF_SAMPLES: Final = {"keys", "seeds", "cells", "lists"}
"""The fields of a part that have one value for each sample."""


@dataclass(frozen=True, slots=True)
class BatchSlice:
    """Samples of one data set, at least one, by column: what to read, and the other values of the batch."""

    reader: EntryReader
    parts: Sequence[Part]
    plain: Mapping[str, list[Any]]
    """One value for each sample."""
    sizes: Mapping[str, Sequence[int]]
    """Two integers for each sample, concatenated."""
    clips: Mapping[str, torch.Tensor]
    """One number for each sample."""
    extras: Sequence[Mapping[str, Any]]
    """The extra columns of each sample; empty if none has any."""
    blocks: Sequence[TextBlock]
    dtype: torch.dtype | None
    """The dtype to cast to; None for the stored one."""


@in_one_thread
def read_slice_or_samples(
    batch_slice: BatchSlice | None, into: BatchBuffers | None, collated_samples: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    """Read a batch straight into its final memory: the buffers, if given. Else put it together of samples.

    That is so without a slice, for tensors that do not fit, and for an entry that is missing or damaged: reading samples finds another
    copy, or says which entry of which data set it is.
    """
    batch = None if batch_slice is None else read_slice(batch_slice, BatchBuffers() if into is None else into)
    if batch is not None:
        return batch
    batch = collated_samples()
    return batch if into is None else into.keep(batch)


def read_slice(batch_slice: BatchSlice, memory: BatchBuffers) -> dict[str, Any] | None:
    """Read the batch into `memory`. None if it must be put together of samples."""
    # Before the reads, which leave little of the interpreter in the CPU cache.
    beside: dict[str, Any] = {**batch_slice.plain}
    beside |= {name: memory.keep_pairs(name, numbers) for name, numbers in batch_slice.sizes.items()} | memory.keep(batch_slice.clips)
    names = dict.fromkeys(name for values in batch_slice.extras for name in values)
    beside |= {name: [values.get(name) for values in batch_slice.extras] for name in names}
    try:
        tensors = assemble(batch_slice.reader, batch_slice.parts, memory)
    except MissingEntry:
        return None
    if tensors is None:
        return None
    batch = cast(tensors, batch_slice.dtype, memory) | beside
    return batch | memory.keep(constants_of(batch, batch_slice.blocks)) if batch_slice.blocks else batch


def join_slices(slices: Sequence[BatchSlice], indices: Sequence[Sequence[int]]) -> BatchSlice | None:
    """Join the slices of several data sets, at least one. Returns None if they differ in their fields.

    `indices` has for each slice the positions of its samples in the batch; together they cover each position once. An entry that several
    stores have is read from one of them, as equal keys hold interchangeable values.
    """
    first = slices[0]
    if len(slices) == 1 and list(indices[0]) == list(range(len(indices[0]))):
        return first
    names = [each.plain.keys() | each.sizes.keys() | each.clips.keys() for each in slices]
    if any(other != names[0] for other in names) or len({len(each.parts) for each in slices}) > 1:
        return None
    parts = [_join_parts(those, indices) for those in zip(*(each.parts for each in slices), strict=True)]
    joined = [part for part in parts if part is not None]
    if len(joined) != len(parts):
        return None
    pairs = {name: [list(zip(each.sizes[name][::2], each.sizes[name][1::2], strict=True)) for each in slices] for name in first.sizes}
    clips = {name: torch.stack(_spread([each.clips[name].unbind() for each in slices], indices)) for name in first.clips}
    extras = [each.extras or [_NOTHING] * len(where) for each, where in zip(slices, indices, strict=True)]
    has_one_reader = all(each.reader is first.reader for each in slices)
    owners = {} if has_one_reader else {key: each.reader for each in slices for part in each.parts for key in part.keys}
    return BatchSlice(
        first.reader if has_one_reader else _SeveralStores(owners),
        joined,
        {name: _spread([each.plain[name] for each in slices], indices) for name in first.plain},
        {name: [number for pair in _spread(those, indices) for number in pair] for name, those in pairs.items()},
        clips,
        _spread(extras, indices) if any(each.extras for each in slices) else (),
        first.blocks,
        first.dtype,
    )


def _spread(values: Sequence[Sequence[T]], indices: Sequence[Sequence[int]]) -> list[T]:
    found = {index: value for some, where in zip(values, indices, strict=True) for index, value in zip(where, some, strict=True)}
    return [found[index] for index in range(len(found))]


def _join_parts(parts: Sequence[Part], indices: Sequence[Sequence[int]]) -> Part | None:
    if any(_without_samples(part) != _without_samples(parts[0]) for part in parts):
        return None
    own = {one.name for one in fields(parts[0])} & _OF_SAMPLES
    joined = replace(parts[0], **{name: _spread([getattr(part, name) for part in parts], indices) for name in own})
    if not isinstance(joined, MaskPart):
        return joined
    shapes = {part.shape for part in parts if isinstance(part, MaskPart) and None in part.cells}
    return None if len(shapes) > 1 or None in shapes else replace(joined, shape=next(iter(shapes), None))


def _without_samples(part: Part) -> list[Any]:
    return [type(part), *(getattr(part, one.name) for one in fields(part) if one.name not in {*_OF_SAMPLES, "shape"})]


class _SeveralStores:
    """Several stores as one `EntryReader`. Each entry is looked up and read in a store whose data set needs it."""

    def __init__(self, owners: Mapping[Key, EntryReader]) -> None:
        self._owners = owners

    def locate(self, keys: Sequence[Key]) -> Located:
        """As `Reader.locate`; asks each store once."""
        found: dict[int, Location] = {}
        for reader, rows in self._by_reader(keys):
            located = reader.locate([keys[row] for row in rows])
            found |= {row: located.location(number) for number, row in enumerate(rows)}
        return Located.of([found[row] for row in range(len(keys))])

    def fill(self, keys: Sequence[Key], located: Located, targets: Sequence[Sequence[memoryview]], *, side_by_side: bool = False) -> bool:
        """As `Reader.fill`; asks each store once."""
        for reader, rows in self._by_reader(keys):
            own = Located.of([located.location(row) for row in rows])
            if not reader.fill([keys[row] for row in rows], own, [targets[row] for row in rows], side_by_side=side_by_side):
                return False
        return True

    def _by_reader(self, keys: Sequence[Key]) -> list[tuple[EntryReader, list[int]]]:
        rows: dict[int, tuple[EntryReader, list[int]]] = {}
        for row, key in enumerate(keys):
            reader = self._owners[key]
            rows.setdefault(id(reader), (reader, []))[1].append(row)
        return list(rows.values())
