"""Stored masks to what a loss is weighted by. Knows no store."""

from collections.abc import Mapping, Sequence

import torch

from cachestore.core.read_block import MaskBlock
from cachestore.loading.texts import stored_tensor


def mask_shape(shape: Sequence[int], patch: int) -> tuple[int, ...]:
    """The shape of a mask `[..., H, W]` beside latents in which patch x patch neighbours are folded into channels."""
    *before, height, width = shape
    return (*before, height // patch, width // patch)


def read_mask(block: MaskBlock, stored: Mapping[str, torch.Tensor], patch: int) -> torch.Tensor:
    """The mask of an entry, stored as uint8 [1, H, W]: float32 in 0..1, [1, H / patch, W / patch], the mean of each patch.

    Raises FormatError where the entry holds none.
    """
    mask = stored_tensor(stored, block.stored)
    out = torch.empty(mask_shape(mask.shape, patch), dtype=torch.float32)
    read_masks_into(mask[None], patch, out[None])
    return out


def read_masks_into(stored: torch.Tensor, patch: int, out: torch.Tensor) -> None:
    """As `read_mask` for a batch `[B, 1, H, W]`, into `out`. Sums are exact, so a batch has the bits of single masks."""
    if patch == 1:
        out.copy_(stored).div_(255)
        return
    size, channels, height, width = stored.shape
    split = stored.reshape(size, channels, height // patch, patch, width // patch, patch)
    out.copy_(split.sum(dim=(3, 5))).div_(255 * patch * patch)
