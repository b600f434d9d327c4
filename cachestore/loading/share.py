"""What a data set gives to a batch, and the batch that the shares of one or several data sets make. Knows no catalog."""

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
"""The fields of a part that have a value of each sample."""


@dataclass(frozen=True, slots=True)
class Share:
    """Some samples of one data set, at least one, column by column: what is to be read of them, and what stands beside it."""

    source: Source
    parts: Sequence[Part]
    plain: Mapping[str, list[Any]]
    """A value of each sample."""
    pairs: Mapping[str, Sequence[int]]
    """Two whole numbers of each sample, those of one after those of the other."""
    tensors: Mapping[str, torch.Tensor]
    """A number of each sample."""
    extras: Sequence[Mapping[str, Any]]
    """The columns of its own of each sample; empty where none has any."""
    blocks: Sequence[TextBlock]


def read_share(share: Share, memory: BatchBuffers) -> dict[str, Any] | None:
    """The batch, in `memory`; None where it has to be put together in the slower way. Raises MissingEntry."""
    # Before the reads, after which the processor's cache holds little of the interpreter.
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
    """The batch of a share, and in the slower way where that gives none; in the buffers, if any."""
    with suppress(MissingEntry):  # the slower way says what is missing, and of which data set
        batch = read_share(share, into if into is not None else BatchBuffers()) if share is not None else None
        if batch is not None:
            return batch
    batch = slower()
    return batch if into is None else into.keep(batch)


def join_shares(shares: Sequence[Share], places: Sequence[Sequence[int]]) -> Share | None:
    """The shares of several data sets as one; None where they are not alike. At least one.

    `places` says of each where in the batch its samples stand; each place of the batch is said once. An entry that several stores have is
    read from one of them, as equal keys hold interchangeable values.
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
    """Values of several data sets in the order of the batch."""
    found = {place: value for some, where in zip(values, places, strict=True) for place, value in zip(where, some, strict=True)}
    return [found[place] for place in range(len(found))]


def _join_parts(parts: Sequence[Part], places: Sequence[Sequence[int]]) -> Part | None:
    """The same part of several data sets; None where it is read otherwise there."""
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
    """Several stores as one `Source`: each entry is looked up and read where somebody who wants it has it."""

    def __init__(self, owners: Mapping[Key, Source]) -> None:
        self._owners = owners

    def locate(self, keys: Sequence[Key]) -> Located:
        """As `Reader.locate`, asking each store once."""
        found: dict[int, Place] = {}
        for source, rows in self._by_source(keys):
            located = source.locate([keys[row] for row in rows])
            found |= {row: located.place(number) for number, row in enumerate(rows)}
        return Located.of([found[row] for row in range(len(keys))])

    def fill(self, keys: Sequence[Key], located: Located, targets: Sequence[Sequence[memoryview]], *, side_by_side: bool = False) -> bool:
        """As `Reader.fill`, asking each store once."""
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
