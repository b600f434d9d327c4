"""Make pipeline inputs from stored text embeddings: join, pad, add masks and constants."""

from collections.abc import Mapping, Sequence

import torch

from cachestore.core.batch_shapes import round_up
from cachestore.core.errors import FormatError
from cachestore.core.read_block import Constant, Form, Padding, TextBlock


def read_outputs(block: TextBlock, stored: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The outputs of one entry under diffusers' names, without a batch axis, at their own length."""
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
    """The tensor of an entry that its recipe names. Raises FormatError if the entry has none."""
    if name not in stored:
        holds = ", ".join(sorted(stored)) or "nothing"
        raise FormatError(
            f"an entry has no tensor {name!r}; it has {holds}. All entries of a published part need the same names; if it is not one, run "
            "`cachestore verify`"
        )
    return stored[name]


def pad_rows(rows: Sequence[torch.Tensor], padding: Padding) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad rows of different lengths to one tensor. Returns (batch, mask); the mask is int64 `[B, length]`, 1 for real positions."""
    lengths = [row.shape[padding.dim] for row in rows]
    length = padded_length(lengths, padding)
    shape = list(rows[0].shape)
    shape[padding.dim] = length
    batch = torch.empty((len(rows), *shape), dtype=rows[0].dtype)
    mask = torch.empty((len(rows), length), dtype=torch.int64)
    for row, real, target in zip(rows, lengths, batch.unbind(), strict=True):
        target.narrow(padding.dim, start_of(real, length, padding), real).copy_(row)
    fill_padding(batch, lengths, padding)
    return batch, fill_mask(mask, lengths, padding)


def padded_length(lengths: Sequence[int], padding: Padding) -> int:
    """The padded length of a batch whose rows have these lengths. Raises FormatError if one is longer than its recipe allows."""
    longest = max(lengths)
    if padding.length is not None and longest > padding.length:
        raise FormatError(f"an entry has the length {longest}, but its recipe allows {padding.length}; run `cachestore verify`")
    return round_up(padding.length or longest, padding)


def start_of(real: int, length: int, padding: Padding) -> int:
    """Where a row of `real` positions starts in a batch of this length."""
    return 0 if padding.side == "right" else length - real


def fill_padding(batch: torch.Tensor, lengths: Sequence[int], padding: Padding) -> None:
    """Write the padding value to all positions of the batch that are not real."""
    for row, real in zip(batch.unbind(), lengths, strict=True):
        missing = row.shape[padding.dim] - real
        if missing:
            row.narrow(padding.dim, real if padding.side == "right" else 0, missing).fill_(padding.value)


def fill_mask(mask: torch.Tensor, lengths: Sequence[int], padding: Padding) -> torch.Tensor:
    """Write 1 to real positions and 0 to others; returns the mask."""
    length = mask.shape[1]
    positions, real = torch.arange(length), torch.tensor(lengths)[:, None]
    return mask.copy_(positions < real if padding.side == "right" else positions >= length - real)


def make_constant(constant: Constant, like: torch.Tensor) -> torch.Tensor:
    """Make a tensor that belongs to a batched output and is never stored, such as position ids."""
    sizes = {"S": like.shape[-2], "B": like.shape[0]}
    shape = [size if isinstance(size, int) else sizes[size] for size in constant.shape]
    match constant.kind:
        case "zeros":
            return torch.zeros(shape, dtype=like.dtype)
        case "positions":
            made = torch.zeros(shape, dtype=torch.int64)
            made[..., -1] = torch.arange(shape[-2])
            return made
