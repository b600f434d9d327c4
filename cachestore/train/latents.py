"""Turns stored latents into what a noise scheduler takes, and stored masks into weights of the loss. Knows no store and no data set.

Everything is computed in the stored dtype and with diffusers' order of operations, so that equal noise gives equal bits.
"""

from collections.abc import Mapping, Sequence
from typing import get_args

import torch

from cachestore.core import vector_math
from cachestore.core.arguments import as_word
from cachestore.core.batch_shapes import LatentsAs, batch_shape, folded_shape, is_as_stored
from cachestore.core.errors import BadInput
from cachestore.core.keys import digest_parts
from cachestore.core.read_block import MASK_BITS, LatentsBlock
from cachestore.train.texts import stored_tensor

vector_math.settle()

_LOGVAR_LEAST, _LOGVAR_MOST = -30.0, 20.0
"""The bounds to which diffusers' DiagonalGaussianDistribution clamps the log-variance."""


def check_form(block: LatentsBlock | None, form: LatentsAs) -> None:
    """Raise BadInput for an unknown form, or one that the stored latents cannot give. Without latents any known form is fine."""
    as_word("latents", form, get_args(LatentsAs))
    if block is None:
        return
    if (form == "moments" and block.stored != "moments") or (form == "mean" and block.stored == "sample"):
        raise BadInput(
            f"the store has only the {block.stored} of these latents, which is not enough for {form}; run `cachestore"
            " precompute --latents moments`",
            option="latents",
        )
    if block.is_scaled and form == "raw":
        raise BadInput(
            "these latents were imported as another trainer normalised them, and are returned like that; to get raw ones, run"
            " `cachestore precompute` with their VAE",
            option="latents",
        )


def read_latents(block: LatentsBlock, form: LatentsAs, stored: Mapping[str, torch.Tensor], seed: int = 0) -> torch.Tensor:
    """Return the latents of one entry, without a batch axis. `seed` is used only to draw a sample; `stored` may be overwritten."""
    tensor = stored_tensor(stored, block.stored)
    if is_as_stored(block, form):
        return tensor
    out = torch.empty(batch_shape(block, form, (1, *tensor.shape)), dtype=tensor.dtype)
    masks = [stored_tensor(stored, MASK_BITS)] if block.mask_channels else ()
    read_latents_into(block, form, tensor[None], [seed], out, masks=masks)
    return out[0]


def read_latents_into(
    block: LatentsBlock,
    form: LatentsAs,
    stored: torch.Tensor,
    seeds: Sequence[int],
    out: torch.Tensor,
    *,
    masks: Sequence[torch.Tensor] = (),
) -> None:
    """As `read_latents` for a whole batch `[B, ...]`, bit for bit. `seeds` are for the noise of each sample; `stored` may be overwritten.

    `masks` has the bits of each sample's mask, for a block with `mask_channels`.
    """
    out = _beside_mask(block, masks, out)
    if block.stored != "moments":
        _normalise_into(block, stored, _behind_marks(block, out))
        return
    mean, logvar = torch.chunk(stored, 2, dim=1)
    match form:
        case "raw" | "moments":
            out.copy_(mean)
        case "mean":
            _normalise_into(block, mean, out)
        case "sample":
            drawn = out if out.shape == mean.shape else torch.empty(mean.shape, dtype=mean.dtype)
            generator = torch.Generator()
            for row, seed in zip(drawn.unbind(), seeds, strict=True):
                row.normal_(generator=generator.manual_seed(seed))
            std = logvar.clamp_(_LOGVAR_LEAST, _LOGVAR_MOST).mul_(0.5).exp_()
            _normalise_into(block, drawn.mul_(std).add_(mean), out)


def _behind_marks(block: LatentsBlock, out: torch.Tensor) -> torch.Tensor:
    if not block.marks:
        return out
    marks = out[:, : block.temporal_factor].zero_()
    marks[:, :, 0] = 1
    if "last" in block.marks:
        marks[:, -1, -1] = 1
    return out[:, block.temporal_factor :]


def _beside_mask(block: LatentsBlock, masks: Sequence[torch.Tensor], out: torch.Tensor) -> torch.Tensor:
    if not block.mask_channels:
        return out
    for row, bits in zip(out[:, -block.mask_channels :], masks, strict=True):
        for number, channel in enumerate(row):
            channel.copy_((bits[number // 8] >> (7 - number % 8)) & 1)
    return out[:, : -block.mask_channels]


def _normalise_into(block: LatentsBlock, latents: torch.Tensor, out: torch.Tensor) -> None:
    """Normalise a batch as diffusers' scripts do between VAE and noise scheduler. Without folding, `out` may be `latents` itself."""
    folded = _fold(latents, block.patchify, patches_first=block.patches_first)
    if block.mean is not None and block.std is not None:
        mean, std = _statistics(block.mean, folded), _statistics(block.std, folded)
        torch.sub(folded, mean, out=out).mul_(block.scaling_factor).div_(std)
    elif block.shift_factor is None:
        torch.mul(folded, block.scaling_factor, out=out)
    else:
        torch.sub(folded, block.shift_factor, out=out).mul_(block.scaling_factor)


def _statistics(numbers: Sequence[float], latents: torch.Tensor) -> torch.Tensor:
    """Return numbers for each channel of latents `[B, C, ...]`, or for each channel and latent frame, in a shape that fits them."""
    each_channel = torch.tensor(numbers, dtype=latents.dtype).view(latents.shape[1], -1, *[1] * (latents.ndim - 3))
    return each_channel if latents.ndim == 3 or each_channel.shape[1] == 1 else each_channel[:, : latents.shape[2]]


def _fold(latents: torch.Tensor, patch: int, *, patches_first: bool) -> torch.Tensor:
    if patch == 1:
        return latents
    size, channels, *between, height, width = latents.shape
    split = latents.reshape(size, channels, *between, height // patch, patch, width // patch, patch)
    last = split.ndim
    channel = (last - 3, last - 1, 1) if patches_first else (1, last - 3, last - 1)
    inward = split.permute(0, *channel, *range(2, last - 3), last - 2)
    return inward.reshape(size, *folded_shape(latents.shape[1:], patch))


def noise_seed(seed: int, epoch: int, sample_id: str) -> int:
    """Return the generator's seed for one sample in one epoch: the same in every process, batch and resumed run."""
    digest = digest_parts("cachestore-latents", str(seed), str(epoch), sample_id)
    return int.from_bytes(digest[:8], "little", signed=True)


def mask_shape(shape: Sequence[int], patch: int, *, has_frames: bool = False) -> tuple[int, ...]:
    """Return the shape of a stored mask `[1, H, W]` or `[1, F, H, W]` for latents in which patch x patch neighbours are folded.

    `has_frames` says that the latents have an axis of frames; then a picture is one frame.
    """
    *before, height, width = shape
    return (*before, *([1] if has_frames and len(before) == 1 else ()), height // patch, width // patch)


def read_mask(name: str, stored: Mapping[str, torch.Tensor], patch: int, *, has_frames: bool = False) -> torch.Tensor:
    """Return the mask of an entry, stored under this name as uint8: float32 in 0..1, the mean of each patch, in the shape of `mask_shape`.

    Raises FormatError if the entry has no mask.
    """
    mask = stored_tensor(stored, name)
    out = torch.empty(mask_shape(mask.shape, patch, has_frames=has_frames), dtype=torch.float32)
    read_masks_into(mask[None], patch, out[None])
    return out


def read_masks_into(stored: torch.Tensor, patch: int, out: torch.Tensor) -> None:
    """As `read_mask` for a batch `[B, 1, ..., H, W]`, into `out`. Sums are exact, so a batch gives the same bits as single masks."""
    if patch == 1:
        out.copy_(stored.view(out.shape)).div_(255)
        return
    *before, height, width = stored.shape
    split = stored.reshape(*before, height // patch, patch, width // patch, patch)
    out.copy_(split.sum(dim=(-3, -1)).view(out.shape)).div_(255 * patch * patch)
