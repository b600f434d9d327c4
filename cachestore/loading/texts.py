"""Stored text embeddings to what a pipeline takes: joining, padding, masks and constants. Knows no store and no data set."""

from collections.abc import Mapping, Sequence

import torch

from cachestore.core.errors import FormatError
from cachestore.core.read_block import Constant, Form, Padding, TextBlock


def read_outputs(block: TextBlock, stored: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The outputs of one entry by their diffusers names, without a batch axis, at their own length."""
    return {name: _join(form, stored) for name, form in block.outputs.items()}


def _join(form: Form, stored: Mapping[str, torch.Tensor]) -> torch.Tensor:
    parts = [_join(part, stored) if isinstance(part, Form) else stored_tensor(stored, part) for part in form.parts]
    if form.dim is None:
        return parts[0]
    joined = torch.cat(parts, dim=form.dim)
    if form.width is None:
        return joined
    if form.width < joined.shape[-1]:
        raise FormatError(f"an entry has the width {joined.shape[-1]}, but its recipe makes it {form.width} wide; run `cachestore verify`")
    return torch.nn.functional.pad(joined, (0, form.width - joined.shape[-1]))


def stored_tensor(stored: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    """The tensor of an entry that its recipe names. Raises FormatError where the entry holds none."""
    if name not in stored:
        raise FormatError(f"an entry holds {', '.join(sorted(stored)) or 'nothing'}, but its recipe names {name}; run `cachestore verify`")
    return stored[name]


def pad_rows(rows: Sequence[torch.Tensor], padding: Padding) -> tuple[torch.Tensor, torch.Tensor]:
    """(batch, mask): rows of different lengths as one tensor, and an int64 `[B, length]` that is 1 where a row is real."""
    lengths = [row.shape[padding.dim] for row in rows]
    length = padded_length(lengths, padding)
    shape = list(rows[0].shape)
    shape[padding.dim] = length
    batch = torch.empty((len(rows), *shape), dtype=rows[0].dtype)
    mask = torch.empty((len(rows), length), dtype=torch.int64)
    for row, real, place in zip(rows, lengths, batch.unbind(), strict=True):
        place.narrow(padding.dim, start_of(real, length, padding), real).copy_(row)
    fill_padding(batch, lengths, padding)
    return batch, fill_mask(mask, lengths, padding)


def padded_length(lengths: Sequence[int], padding: Padding) -> int:
    """The length of a batch of rows of these lengths. Raises FormatError where one is longer than its recipe allows."""
    longest = max(lengths)
    if padding.length is not None and longest > padding.length:
        raise FormatError(f"an entry has the length {longest}, but its recipe allows {padding.length}; run `cachestore verify`")
    return round_up(padding.length or longest, padding)


def round_up(length: int, padding: Padding) -> int:
    """The least length from this one on that a batch may have."""
    return -(-length // padding.multiple) * padding.multiple


def start_of(real: int, length: int, padding: Padding) -> int:
    """Where a row of this length starts in a batch."""
    return 0 if padding.side == "right" else length - real


def fill_padding(batch: torch.Tensor, lengths: Sequence[int], padding: Padding) -> None:
    """Write the padding's value wherever a row of the batch is not real."""
    for row, real in zip(batch.unbind(), lengths, strict=True):
        missing = row.shape[padding.dim] - real
        if missing:
            row.narrow(padding.dim, real if padding.side == "right" else 0, missing).fill_(padding.value)


def fill_mask(mask: torch.Tensor, lengths: Sequence[int], padding: Padding) -> torch.Tensor:
    """Write 1 where a row is real, 0 elsewhere; returns the mask."""
    length = mask.shape[1]
    places, real = torch.arange(length), torch.tensor(lengths)[:, None]
    return mask.copy_(places < real if padding.side == "right" else places >= length - real)


def make_constant(constant: Constant, like: torch.Tensor) -> torch.Tensor:
    """What goes with a batched output and is never stored."""
    sizes = {"S": like.shape[-2], "B": like.shape[0]}
    shape = [size if isinstance(size, int) else sizes[size] for size in constant.shape]
    match constant.kind:
        case "zeros":
            return torch.zeros(shape, dtype=like.dtype)
        case "positions":
            made = torch.zeros(shape, dtype=torch.int64)
            made[..., -1] = torch.arange(shape[-2])
            return made
