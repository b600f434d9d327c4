"""Read stored entries straight into a batch: once, and to their final position.

Gives bit for bit what `collate` makes of samples, if the samples are alike. Anything unusual (a tensor that is missing, too long or of
another type, a damaged entry) is left to reading samples, which makes the batch or says what is wrong.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, Final, NamedTuple, Protocol, cast

import torch

from cachestore.core.batch_shapes import batch_shape, is_as_stored
from cachestore.core.keys import Key
from cachestore.core.read_block import MASK_BITS, Form, TextBlock, stored_parts
from cachestore.core.tensors import are_bools, torch_dtype
from cachestore.store.format.entry import Specs, TensorSpec
from cachestore.store.format.locations import Located
from cachestore.train.buffers import BatchBuffers, RowBytes
from cachestore.train.latents import mask_shape, read_latents, read_latents_into, read_masks_into
from cachestore.train.parts import ControlsPart, LatentsPart, MaskPart, Part, TextPart
from cachestore.train.texts import fill_mask, fill_padding, pad_rows, padded_length, read_outputs, start_of

_ALIGNMENT: Final = 64
"""Alignment of tensors in scratch memory, enough for a view of any dtype."""


_NOTHING: Final = torch.empty(0)


class EntryReader(Protocol):
    """Looks up and reads entries: a Reader, or an object that stands for several."""

    def locate(self, keys: Sequence[Key]) -> Located:
        """As `Reader.locate`."""
        ...

    def fill(self, keys: Sequence[Key], located: Located, targets: Sequence[Sequence[memoryview]], *, side_by_side: bool = False) -> bool:
        """As `Reader.fill`."""
        ...


class _Irregular(Exception):
    """These entries cannot be read straight into a batch."""


class _StoredTensors(NamedTuple):
    """The tensors of one name, one for each sample."""

    rows: Sequence[int]
    """Rows of the entries."""
    numbers: Sequence[int]
    """Position of the tensor in each entry."""
    specs: Sequence[TensorSpec]
    """All of one dtype."""

    def has_one_shape(self) -> bool:
        return self.specs.count(self.specs[0]) == len(self.specs)


class _Draft:
    """A batch in the making: where each stored tensor goes, and what is left to do after all are read."""

    def __init__(self, keys: Sequence[Key], located: Located, memory: BatchBuffers) -> None:
        self.rows = dict(zip(keys, range(len(keys)), strict=True))
        """The row of each entry in `located` and `targets`. Each key occurs once."""
        self.located = located
        self.memory = memory
        self.targets: list[list[memoryview | None]] = [[None] * len(specs) for specs in located.specs]
        """For each entry, the target of each of its tensors, in the order of its specs."""
        self.unread = sum(map(len, located.specs))
        """How many targets are still None."""
        self.copies: list[tuple[memoryview, memoryview]] = []
        """(target, source) for entries that are needed more than once."""
        self.bools: list[memoryview] = []
        """Targets of bool tensors, whose bytes must be 0 or 1."""
        self.finish: list[Callable[[_Draft], None]] = []
        """Steps to run after reading. They get the draft as an argument: a reference to it would keep the batch's memory until a garbage
        collection."""
        self.batch: dict[str, Any] = {}

    def find(self, keys: Sequence[Key], name: str) -> _StoredTensors:
        """Find the tensor of this name in each entry. Raises _Irregular if one is missing or dtypes differ."""
        rows = [self.rows[key] for key in keys]
        layouts = [self.located.specs[row] for row in rows]
        if layouts.count(layouts[0]) == len(layouts):
            number = _number_of(name, layouts[0])
            return _StoredTensors(rows, [number] * len(rows), [layouts[0][number]] * len(rows))
        chosen = {layout: _number_of(name, layout) for layout in set(layouts)}
        if len({layout[number].dtype for layout, number in chosen.items()}) != 1:
            raise _Irregular
        return _StoredTensors(rows, [chosen[layout] for layout in layouts], [layout[chosen[layout]] for layout in layouts])

    def have_all(self, keys: Sequence[Key], names: frozenset[str]) -> bool:
        """Whether each entry has the tensors of these names, and no others."""
        layouts = [self.located.specs[self.rows[key]] for key in keys]
        unlike = layouts[:1] if layouts.count(layouts[0]) == len(layouts) else set(layouts)
        return all(names == frozenset(spec.name for spec in layout) for layout in unlike)

    def read(self, column: _StoredTensors, targets: Iterable[memoryview]) -> None:
        """Plan to read the stored tensors of a column into these targets."""
        held = self.targets
        if column.specs[0].dtype == "BOOL":
            targets = list(targets)
            self.bools += targets
        for row, number, target in zip(column.rows, column.numbers, targets, strict=True):
            source = held[row][number]
            if source is None:
                held[row][number] = target
                self.unread -= 1
            else:
                self.copies.append((target, source))

    def copy_all(self) -> bool:
        """Fill the targets of entries that are needed more than once. Returns False if a bool tensor has other bytes than 0 and 1."""
        for target, source in self.copies:
            target[:] = source
        return all(are_bools("BOOL", target) for target in self.bools)

    def reserve(self, *names: str | None) -> None:
        """Reserve these names, in this order in the batch. Raises _Irregular if two parts use the same name."""
        for name in names:
            if name in self.batch:
                raise _Irregular
            if name is not None:
                self.batch[name] = _NOTHING

    def take(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return room in the batch for a claimed name."""
        self.batch[name] = tensor = self.memory.take(name, shape, dtype)[0]
        return tensor

    def take_rows(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> tuple[torch.Tensor, RowBytes]:
        taken = self.memory.take_rows(name, shape, dtype)
        self.batch[name] = taken[0]
        return taken

    def all_targets(self) -> list[list[memoryview]]:
        """The targets of all reads. Tensors that no part needs get scratch memory, as they are read with their entry."""
        if self.unread:
            for targets, specs in zip(self.targets, self.located.specs, strict=True):
                rooms = zip(targets, specs, strict=True)
                targets[:] = [memoryview(bytearray(spec.size_bytes)) if target is None else target for target, spec in rooms]
        return cast("list[list[memoryview]]", self.targets)


def _number_of(name: str, specs: Specs) -> int:
    for number, spec in enumerate(specs):
        if spec.name == name:
            return number
    raise _Irregular


def assemble(reader: EntryReader, parts: Sequence[Part], memory: BatchBuffers) -> dict[str, Any] | None:
    """Return the stored tensors of a batch in `memory`, or None if it must be put together of samples. Raises MissingEntry.

    All parts have the same number of samples, at least one. Without parts the batch is empty.
    """
    keys = list(dict.fromkeys(key for part in parts for key in part.keys))
    draft = _Draft(keys, reader.locate(keys), memory)
    try:
        for part in parts:
            if isinstance(part, TextPart):
                _lay_out_text(draft, part)
            elif isinstance(part, LatentsPart):
                _lay_out_latents(draft, part)
            elif isinstance(part, ControlsPart):
                _lay_out_controls(draft, part)
            else:
                _lay_out_masks(draft, part)
        # torch's limit of threads for one operation: 1 in DataLoader workers, and in ranks that torchrun starts beside others
        side_by_side = torch.get_num_threads() > 1
        if not reader.fill(keys, draft.located, draft.all_targets(), side_by_side=side_by_side) or not draft.copy_all():
            return None
        for step in draft.finish:
            step(draft)
    except _Irregular:
        return None
    return draft.batch


def _lay_out_latents(draft: _Draft, part: LatentsPart) -> None:
    draft.reserve(part.name)
    column = draft.find(part.keys, part.block.stored)
    if not column.has_one_shape():
        raise _Irregular
    dtype, stored_shape = torch_dtype(column.specs[0].dtype), (len(part.keys), *column.specs[0].shape)
    made_shape = batch_shape(part.block, part.form, stored_shape)
    out, rows = draft.take_rows(part.name, made_shape, dtype)
    stored = out
    if made_shape != stored_shape or part.block.stored == "moments" != part.form:
        stored, rows = draft.memory.take_rows(f"{part.name} as stored", stored_shape, dtype, pin=False)
    draft.read(column, rows)
    if not is_as_stored(part.block, part.form):
        has_mask, under = bool(part.block.mask_channels), f"mask of {part.name} as stored"
        masks = _read_aside(draft, part.keys, {MASK_BITS}, under)[MASK_BITS] if has_mask else ()
        draft.finish.append(lambda _made: read_latents_into(part.block, part.form, stored, part.seeds, out, masks=masks))


def _lay_out_controls(draft: _Draft, part: ControlsPart) -> None:
    draft.reserve(part.name)
    stored: Sequence[torch.Tensor] = ()
    if keys := part.keys:
        stored = _read_aside(draft, keys, {part.block.stored}, f"{part.name} as stored")[part.block.stored]
    draft.finish.append(lambda made: _put_controls(made, part, stored))


def _put_controls(draft: _Draft, part: ControlsPart, stored: Sequence[torch.Tensor]) -> None:
    """Put tensors of their own into the batch: `Ring` counts uses of the batch's tensors, but does not look into lists."""
    is_as_it_is = is_as_stored(part.block, part.form)
    read = (read_latents(part.block, part.form, {part.block.stored: each}) for each in stored)
    made = (each.clone() if is_as_it_is else each for each in read)
    draft.batch[part.name] = [list(islice(made, len(keys))) for keys in part.lists]


def _lay_out_masks(draft: _Draft, part: MaskPart) -> None:
    draft.reserve(part.name)
    keys, count = part.keys, len(part.cells)
    if part.shape is None and len(keys) < count:
        raise _Irregular
    if not keys and part.shape is not None:
        draft.take(part.name, (count, *part.shape), torch.float32).fill_(1)
        return
    column = draft.find(keys, part.name)
    shape = (len(keys), *column.specs[0].shape)
    made = mask_shape(shape[1:], part.patch, has_frames=part.has_frames)
    if not column.has_one_shape() or part.shape not in {None, made}:
        raise _Irregular
    out = draft.take(part.name, (count, *made), torch.float32)
    stored, rows = draft.memory.take_rows(f"{part.name} as stored", shape, torch_dtype(column.specs[0].dtype), pin=False)
    draft.read(column, rows)
    those = out if part.shape is None else draft.memory.take(f"{part.name} of some", (len(keys), *made), torch.float32, pin=False)[0]
    draft.finish.append(lambda _made: _put_masks(stored, part, those, out))


def _put_masks(stored: torch.Tensor, part: MaskPart, those: torch.Tensor, out: torch.Tensor) -> None:
    read_masks_into(stored, part.patch, those)
    if those is not out:
        out.fill_(1)[[index for index, key in enumerate(part.cells) if key is not None]] = those


def _lay_out_text(draft: _Draft, part: TextPart) -> None:
    """Plan to read the outputs. An output that is a single stored tensor is read in place; joined ones first go to scratch memory."""
    if part.stored and not draft.have_all(part.keys, part.stored):
        raise _Irregular
    later: dict[str, Form] = {}
    for name, form in part.block.outputs.items():
        stored, padding = form.parts[0], part.block.padding.get(name)
        draft.reserve(name, padding.mask if padding is not None else None)
        if form.dim is not None or not isinstance(stored, str) or not _lay_out_straight(draft, part, name, stored):
            later[name] = form
    if not later:
        return
    names = {name for form in later.values() for name in stored_parts(form)}
    stored = _read_aside(draft, part.keys, names, f"{next(iter(later))} as stored")
    block = TextBlock(later, part.block.padding, {}, None)
    draft.finish.append(lambda made: _put_outputs(made, block, stored))


def _lay_out_straight(draft: _Draft, part: TextPart, name: str, stored: str) -> bool:
    """Plan to read an output in place. Returns False if it is not one run of bytes in the batch for each entry."""
    column = draft.find(part.keys, stored)
    specs = column.specs
    dtype, padding = torch_dtype(specs[0].dtype), part.block.padding.get(name)
    if padding is None:
        if not column.has_one_shape():
            raise _Irregular
        draft.read(column, draft.take_rows(name, (len(specs), *specs[0].shape), dtype)[1])
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
    out, rows = draft.take_rows(name, (len(specs), length, *width), dtype)
    step = len(rows[0]) // length if length else 0
    starts = [step * start_of(each, length, padding) for each in lengths]
    draft.read(column, [row[start : start + step * each] for row, start, each in zip(rows, starts, lengths, strict=True)])
    fill_padding(out, lengths, padding)
    if padding.mask is not None:
        fill_mask(draft.take(padding.mask, (len(lengths), length), torch.int64), lengths, padding)
    return True


def _read_aside(draft: _Draft, keys: Sequence[Key], names: set[str], under: str) -> dict[str, list[torch.Tensor]]:
    parts = {name: draft.find(keys, name) for name in sorted(names)}
    room = sum(sum(spec.size_bytes for spec in column.specs) + _ALIGNMENT for column in parts.values())
    flat, view = draft.memory.take(under, (room,), torch.uint8, pin=False)
    stored: dict[str, list[torch.Tensor]] = {name: [] for name in parts}
    position = 0
    for name, column in parts.items():
        position += -position % _ALIGNMENT
        targets: list[memoryview] = []
        for spec in column.specs:
            end = position + spec.size_bytes
            targets.append(view[position:end])
            stored[name].append(flat[position:end].view(torch_dtype(spec.dtype)).view(spec.shape))
            position = end
        draft.read(column, targets)
    return stored


def _put_outputs(draft: _Draft, block: TextBlock, stored: Mapping[str, Sequence[torch.Tensor]]) -> None:
    size = len(next(iter(stored.values())))
    samples = [read_outputs(block, {name: rows[number] for name, rows in stored.items()}) for number in range(size)]
    for name in block.outputs:
        rows = [sample[name] for sample in samples]
        padding = block.padding.get(name)
        if padding is not None:
            batch, mask = pad_rows(rows, padding)
            draft.take(name, batch.shape, batch.dtype).copy_(batch)
            if padding.mask is not None:
                draft.take(padding.mask, mask.shape, mask.dtype).copy_(mask)
        elif any(row.shape != rows[0].shape for row in rows):
            raise _Irregular
        else:
            torch.stack(rows, out=draft.take(name, (size, *rows[0].shape), rows[0].dtype))
