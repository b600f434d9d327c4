"""Stored entries straight to a batch: read once, into the place in the batch where they belong. Knows no data set and no catalog.

What `collate` makes of samples, bit for bit, where the samples are alike; anything out of the ordinary (a tensor that is missing, of
another type or too long, an entry that is damaged) is left to that slower way, which gives the batch or says what is wrong.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch

from cachestore.keys import Key
from cachestore.loading.buffers import BatchBuffers, Taken
from cachestore.loading.latents import LatentsAs, batch_shape, is_as_stored, read_latents_into
from cachestore.loading.read_block import Form, LatentsBlock, Padding, TextBlock
from cachestore.loading.texts import fill_mask, fill_padding, pad_rows, padded_length, read_outputs, start_of
from cachestore.reader import Reader
from cachestore.storage.entry import TensorSpec
from cachestore.storage.fetch import Wanted
from cachestore.storage.places import Place
from cachestore.tensors import torch_dtype

_ALIGNMENT: Final = 64
"""Of what is read to one side: any dtype may be looked at there."""


@dataclass(frozen=True, slots=True)
class TextPart:
    """One text encoder's share of a batch."""

    block: TextBlock
    keys: Sequence[Key]
    """One for each sample."""


@dataclass(frozen=True, slots=True)
class LatentsPart:
    """One VAE's share of a batch, under `name`."""

    name: str
    block: LatentsBlock
    wanted: LatentsAs
    keys: Sequence[Key]
    noise: Sequence[int]
    """A seed for each sample."""


_NOTHING: Final = torch.empty(0)


class _Irregular(Exception):
    """These entries do not make a batch in the straight way."""


@dataclass(slots=True)
class _Draft:
    """A batch in the making: where each stored tensor is to be read to, and what is left to do when all have been read."""

    places: Mapping[Key, Place]
    memory: BatchBuffers
    targets: dict[Key, dict[str, memoryview]] = field(default_factory=dict[Key, dict[str, memoryview]])
    copies: list[tuple[memoryview, memoryview]] = field(default_factory=list[tuple[memoryview, memoryview]])
    """(target, source): what one entry is wanted for more than once."""
    finish: list[Callable[[], None]] = field(default_factory=list[Callable[[], None]])
    batch: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    names: set[str] = field(default_factory=set[str])

    def specs(self, keys: Sequence[Key], name: str) -> list[TensorSpec]:
        """The tensor of this name of each entry; all are of one dtype."""
        specs = [spec for key in keys for spec in self.places[key].specs if spec.name == name]
        if len(specs) < len(keys) or any(spec.dtype != specs[0].dtype for spec in specs):
            raise _Irregular
        return specs

    def read(self, key: Key, name: str, target: memoryview) -> None:
        """Have one stored tensor read to this place."""
        wanted = self.targets.setdefault(key, {})
        if name in wanted:
            self.copies.append((target, wanted[name]))
        else:
            wanted[name] = target

    def claim(self, *names: str | None) -> None:
        """Have these stand next in the batch. Two parts that make the same would be read into each other."""
        for name in names:
            if name in self.names:
                raise _Irregular
            if name is not None:
                self.names.add(name)
                self.batch[name] = _NOTHING

    def take(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Taken:
        """Room in the batch, under a name that was claimed."""
        taken = self.memory.take(name, shape, dtype)
        self.batch[name] = taken[0]
        return taken

    def wanted(self) -> list[Wanted]:
        """All that is to be read; what nobody asked for, but stands between, goes to one side."""
        chosen: list[Wanted] = []
        for key, targets in self.targets.items():
            place = self.places[key]
            buffers = [targets[spec.name] if spec.name in targets else _aside(spec) for spec in place.specs]
            chosen.append(Wanted(key, place, buffers))
        return chosen


def _aside(spec: TensorSpec) -> memoryview:
    return memoryview(bytearray(spec.size_bytes))


def assemble(reader: Reader, parts: Sequence[TextPart | LatentsPart], memory: BatchBuffers) -> dict[str, torch.Tensor] | None:
    """The stored tensors of a batch, in `memory`; None where they have to be put together in the slower way. Raises MissingEntry.

    The parts name as many samples each, at least one. No parts make an empty batch.
    """
    keys = list(dict.fromkeys(key for part in parts for key in part.keys))
    draft = _Draft(dict(zip(keys, reader.find_first(keys), strict=True)), memory)
    try:
        for number, part in enumerate(parts):
            if isinstance(part, TextPart):
                _lay_out_text(draft, part, number)
            else:
                _lay_out_latents(draft, part)
        if not reader.fill(draft.wanted()):
            return None
        for target, source in draft.copies:
            target[:] = source
        for step in draft.finish:
            step()
    except _Irregular:
        return None
    return draft.batch


def _lay_out_latents(draft: _Draft, part: LatentsPart) -> None:
    draft.claim(part.name)
    specs = draft.specs(part.keys, part.block.stored)
    shape, dtype = specs[0].shape, torch_dtype(specs[0].dtype)
    if any(spec.shape != shape for spec in specs):
        raise _Irregular
    stored_shape = (len(specs), *shape)
    made_shape = batch_shape(part.block, part.wanted, stored_shape)
    out, view = draft.take(part.name, made_shape, dtype)
    stored = out
    if made_shape != stored_shape or part.block.stored == "moments" != part.wanted:
        stored, view = draft.memory.take(f"{part.name} as stored", stored_shape, dtype, pin=False)
    _read_rows(draft, part.keys, part.block.stored, view)
    if not is_as_stored(part.block, part.wanted):
        draft.finish.append(lambda: read_latents_into(part.block, part.wanted, stored, part.noise, out))


def _read_rows(draft: _Draft, keys: Sequence[Key], name: str, view: memoryview) -> None:
    """One row of a batch after the other, all of a size."""
    size = len(view) // len(keys)
    for number, key in enumerate(keys):
        draft.read(key, name, view[number * size : (number + 1) * size])


def _lay_out_text(draft: _Draft, part: TextPart, number: int) -> None:
    """Outputs that are one stored tensor go straight to their place; those that are joined of several are read to one side first."""
    later: dict[str, Form] = {}
    for name, form in part.block.outputs.items():
        stored, padding = form.parts[0], part.block.padding.get(name)
        draft.claim(name, padding.mask if padding is not None else None)
        if form.dim is not None or not isinstance(stored, str) or not _lay_out_straight(draft, part, name, stored):
            later[name] = form
    if not later:
        return
    stored = _read_aside(draft, part.keys, {leaf for form in later.values() for leaf in _leaves(form)}, f"text {number} as stored")
    block = TextBlock(later, part.block.padding, {}, None)
    draft.finish.append(lambda: _join(draft, block, stored))


def _lay_out_straight(draft: _Draft, part: TextPart, name: str, stored: str) -> bool:
    """Whether this output of every entry is one run of bytes in the batch; if so, it will be read there."""
    specs = draft.specs(part.keys, stored)
    dtype, padding = torch_dtype(specs[0].dtype), part.block.padding.get(name)
    if padding is None:
        if any(spec.shape != specs[0].shape for spec in specs):
            raise _Irregular
        _read_rows(draft, part.keys, stored, draft.take(name, (len(specs), *specs[0].shape), dtype)[1])
        return True
    if not specs[0].shape or padding.dim % len(specs[0].shape) != 0:
        return False
    width = specs[0].shape[1:]
    if any(spec.shape[1:] != width or len(spec.shape) != len(width) + 1 for spec in specs):
        raise _Irregular
    lengths = [spec.shape[0] for spec in specs]
    if padding.length is not None and max(lengths) > padding.length:
        raise _Irregular
    length = padded_length(lengths, padding)
    out, view = draft.take(name, (len(specs), length, *width), dtype)
    row = len(view) // len(specs)
    for place, (key, spec) in enumerate(zip(part.keys, specs, strict=True)):
        start = place * row + (row // length * start_of(spec.shape[0], length, padding) if length else 0)
        draft.read(key, stored, view[start : start + spec.size_bytes])
    fill_padding(out, lengths, padding)
    _take_mask(draft, lengths, length, padding)
    return True


def _take_mask(draft: _Draft, lengths: Sequence[int], length: int, padding: Padding) -> None:
    if padding.mask is not None:
        fill_mask(draft.take(padding.mask, (len(lengths), length), torch.int64)[0], lengths, padding)


def _leaves(form: Form) -> set[str]:
    """The stored tensors that an output is joined of."""
    return {leaf for part in form.parts for leaf in (_leaves(part) if isinstance(part, Form) else {part})}


def _read_aside(draft: _Draft, keys: Sequence[Key], names: set[str], under: str) -> dict[str, list[torch.Tensor]]:
    """Have these tensors of each sample read to memory of their own; returns where they will be, those of one name after the other."""
    specs = {name: draft.specs(keys, name) for name in sorted(names)}
    room = sum(sum(spec.size_bytes for spec in found) + _ALIGNMENT for found in specs.values())
    flat, view = draft.memory.take(under, (room,), torch.uint8, pin=False)
    stored: dict[str, list[torch.Tensor]] = {name: [] for name in specs}
    position = 0
    for name, found in specs.items():
        position += -position % _ALIGNMENT
        for key, spec in zip(keys, found, strict=True):
            end = position + spec.size_bytes
            draft.read(key, name, view[position:end])
            stored[name].append(flat[position:end].view(torch_dtype(spec.dtype)).view(spec.shape))
            position = end
    return stored


def _join(draft: _Draft, block: TextBlock, stored: Mapping[str, Sequence[torch.Tensor]]) -> None:
    """Join what was read to one side, and put it into the batch."""
    size = len(next(iter(stored.values())))
    samples = [read_outputs(block, {name: rows[number] for name, rows in stored.items()}) for number in range(size)]
    for name in block.outputs:
        rows = [sample[name] for sample in samples]
        padding = block.padding.get(name)
        if padding is not None:
            batch, mask = pad_rows(rows, padding)
            draft.take(name, batch.shape, batch.dtype)[0].copy_(batch)
            if padding.mask is not None:
                draft.take(padding.mask, mask.shape, mask.dtype)[0].copy_(mask)
        elif any(row.shape != rows[0].shape for row in rows):
            raise _Irregular
        else:
            torch.stack(rows, out=draft.take(name, (size, *rows[0].shape), rows[0].dtype)[0])
