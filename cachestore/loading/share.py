"""Batch slices: what one data set gives to a batch, and the batch that one or several of them make."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from typing import Any, Final, TypeVar

import torch

from cachestore.core.errors import MissingEntry
from cachestore.core.keys import Key
from cachestore.core.read_block import TextBlock
from cachestore.loading.assemble import MaskPart, Part, Source, assemble
from cachestore.loading.buffers import BatchBuffers
from cachestore.loading.collate import constants_of
from cachestore.storage.places import Located, Place

T = TypeVar("T")

_NOTHING: Final[Mapping[str, Any]] = {}

_OF_SAMPLES: Final = {"keys", "noise", "cells"}
"""The fields of a part that have one value for each sample."""


@dataclass(frozen=True, slots=True)
class Share:
    """Samples of one data set, at least one, by column: what to read, and the other values of the batch."""

    source: Source
    parts: Sequence[Part]
    plain: Mapping[str, list[Any]]
    """One value for each sample."""
    pairs: Mapping[str, Sequence[int]]
    """Two integers for each sample, concatenated."""
    tensors: Mapping[str, torch.Tensor]
    """One number for each sample."""
    extras: Sequence[Mapping[str, Any]]
    """The extra columns of each sample; empty if none has any."""
    blocks: Sequence[TextBlock]


def read_share(share: Share, memory: BatchBuffers) -> dict[str, Any] | None:
    """Read the batch into `memory`. Returns None if the slower way must make it. Raises MissingEntry."""
    # Before the reads, which leave little of the interpreter in the CPU cache.
    beside: dict[str, Any] = {**share.plain}
    beside |= {name: memory.keep_pairs(name, numbers) for name, numbers in share.pairs.items()} | memory.keep(share.tensors)
    names = dict.fromkeys(name for values in share.extras for name in values)
    beside |= {name: [values.get(name) for values in share.extras] for name in names}
    tensors = assemble(share.source, share.parts, memory)
    if tensors is None:
        return None
    batch = tensors | beside
    return batch | memory.keep(constants_of(batch, share.blocks)) if share.blocks else batch


def read_or(share: Share | None, into: BatchBuffers | None, slower: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Read the batch of a slice, or make it in the slower way; in the buffers, if given."""
    with suppress(MissingEntry):  # the slower way names what is missing, and the data set
        batch = read_share(share, into if into is not None else BatchBuffers()) if share is not None else None
        if batch is not None:
            return batch
    batch = slower()
    return batch if into is None else into.keep(batch)


def join_shares(shares: Sequence[Share], places: Sequence[Sequence[int]]) -> Share | None:
    """Join the slices of several data sets, at least one. Returns None if they differ in their fields.

    `places` has for each slice the positions of its samples in the batch; together they cover each position once. An entry that several
    stores have is read from one of them, as equal keys hold interchangeable values.
    """
    first = shares[0]
    if len(shares) == 1 and list(places[0]) == list(range(len(places[0]))):
        return first
    columns = [share.plain.keys() | share.pairs.keys() | share.tensors.keys() for share in shares]
    if any(column != columns[0] or len(share.parts) != len(first.parts) for share, column in zip(shares, columns, strict=True)):
        return None
    parts = [_join_parts(those, places) for those in zip(*(share.parts for share in shares), strict=True)]
    known = [part for part in parts if part is not None]
    if len(known) != len(parts):
        return None
    pairs = {
        name: _spread([list(zip(share.pairs[name][::2], share.pairs[name][1::2], strict=True)) for share in shares], places)
        for name in first.pairs
    }
    tensors = {name: torch.stack(_spread([share.tensors[name].unbind() for share in shares], places)) for name in first.tensors}
    extras = [share.extras or [_NOTHING] * len(where) for share, where in zip(shares, places, strict=True)]
    is_one_source = all(share.source is first.source for share in shares)
    return Share(
        first.source if is_one_source else _Sources({key: share.source for share in shares for part in share.parts for key in part.keys}),
        known,
        {name: _spread([share.plain[name] for share in shares], places) for name in first.plain},
        {name: [number for pair in each for number in pair] for name, each in pairs.items()},
        tensors,
        _spread(extras, places) if any(share.extras for share in shares) else (),
        first.blocks,
    )


def _spread(values: Sequence[Sequence[T]], places: Sequence[Sequence[int]]) -> list[T]:
    """Put the values of several data sets into the order of the batch."""
    found = {place: value for some, where in zip(values, places, strict=True) for place, value in zip(where, some, strict=True)}
    return [found[place] for place in range(len(found))]


def _join_parts(parts: Sequence[Part], places: Sequence[Sequence[int]]) -> Part | None:
    """Join the same part of several data sets. Returns None if they read it differently."""
    if any(_without_samples(part) != _without_samples(parts[0]) for part in parts):
        return None
    own = {one.name for one in fields(parts[0])} & _OF_SAMPLES
    joined = replace(parts[0], **{name: _spread([getattr(part, name) for part in parts], places) for name in own})
    if not isinstance(joined, MaskPart):
        return joined
    shapes = {part.shape for part in parts if isinstance(part, MaskPart) and None in part.cells}
    return None if len(shapes) > 1 or None in shapes else replace(joined, shape=next(iter(shapes), None))


def _without_samples(part: Part) -> list[Any]:
    return [type(part), *(getattr(part, one.name) for one in fields(part) if one.name not in {*_OF_SAMPLES, "shape"})]


class _Sources:
    """Several stores as one `Source`. Each entry is looked up and read in a store whose data set needs it."""

    def __init__(self, owners: Mapping[Key, Source]) -> None:
        self._owners = owners

    def locate(self, keys: Sequence[Key]) -> Located:
        """As `Reader.locate`; asks each store once."""
        found: dict[int, Place] = {}
        for source, rows in self._by_source(keys):
            located = source.locate([keys[row] for row in rows])
            found |= {row: located.place(number) for number, row in enumerate(rows)}
        return Located.of([found[row] for row in range(len(keys))])

    def fill(self, keys: Sequence[Key], located: Located, targets: Sequence[Sequence[memoryview]], *, side_by_side: bool = False) -> bool:
        """As `Reader.fill`; asks each store once."""
        for source, rows in self._by_source(keys):
            own = Located.of([located.place(row) for row in rows])
            if not source.fill([keys[row] for row in rows], own, [targets[row] for row in rows], side_by_side=side_by_side):
                return False
        return True

    def _by_source(self, keys: Sequence[Key]) -> list[tuple[Source, list[int]]]:
        rows: dict[int, tuple[Source, list[int]]] = {}
        for row, key in enumerate(keys):
            source = self._owners[key]
            rows.setdefault(id(source), (source, []))[1].append(row)
        return list(rows.values())
