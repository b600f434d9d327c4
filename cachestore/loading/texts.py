"""Stored text embeddings to what a pipeline takes: joining, padding, masks and constants. Knows no store and no data set."""

from collections.abc import Mapping, Sequence

import torch

from cachestore.errors import FormatError
from cachestore.loading.read_block import Constant, Form, Padding, TextBlock


def read_outputs(block: TextBlock, stored: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The outputs of one entry by their diffusers names, without a batch axis, at their own length."""
    return {name: _join(form, stored) for name, form in block.outputs.items()}


def _join(form: Form, stored: Mapping[str, torch.Tensor]) -> torch.Tensor:
    parts = [_join(part, stored) if isinstance(part, Form) else _stored(part, stored) for part in form.parts]
    if form.dim is None:
        return parts[0]
    joined = torch.cat(parts, dim=form.dim)
    if form.width is None:
        return joined
    if form.width < joined.shape[-1]:
        message = f"an entry is {joined.shape[-1]} wide where its recipe makes {form.width} of it; run `cachestore verify`"
        raise FormatError(message)
    return torch.nn.functional.pad(joined, (0, form.width - joined.shape[-1]))


def _stored(name: str, stored: Mapping[str, torch.Tensor]) -> torch.Tensor:
    if name not in stored:
        message = f"an entry holds {', '.join(sorted(stored)) or 'nothing'} where its recipe names {name}; run `cachestore verify`"
        raise FormatError(message)
    return stored[name]


def pad_rows(rows: Sequence[torch.Tensor], padding: Padding) -> tuple[torch.Tensor, torch.Tensor]:
    """(batch, mask): rows of different lengths as one tensor, and an int64 `[B, length]` that is 1 where a row is real."""
    lengths = [row.shape[padding.dim] for row in rows]
    longest = max(lengths)
    if padding.length is not None and longest > padding.length:
        message = f"an entry has length {longest} where its recipe allows {padding.length}; run `cachestore verify`"
        raise FormatError(message)
    length = -(-(padding.length or longest) // padding.multiple) * padding.multiple
    shape = list(rows[0].shape)
    shape[padding.dim] = length
    batch = torch.full((len(rows), *shape), padding.value, dtype=rows[0].dtype)
    mask = torch.zeros((len(rows), length), dtype=torch.int64)
    for number, (row, real) in enumerate(zip(rows, lengths, strict=True)):
        start = 0 if padding.side == "right" else length - real
        batch[number].narrow(padding.dim, start, real).copy_(row)
        mask[number, start : start + real] = 1
    return batch, mask


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
