"""Stored latents to what a trainer hands to its noise scheduler: drawing and normalising. Knows no store and no data set.

Everything is computed in the dtype that was stored and in the order in which diffusers computes it, so that equal noise gives equal bits.
"""

from collections.abc import Mapping
from typing import Literal

import torch

from cachestore.errors import BadInput, FormatError
from cachestore.keys import digest_parts
from cachestore.loading.read_block import LatentsBlock

LatentsAs = Literal["sample", "mean", "moments", "raw"]
"""`sample`: drawn from the moments, normalised; where only a mean or one sample is stored, that one, normalised.
`mean`: the mean, normalised. `moments`: mean and log-variance as stored. `raw`: as `mean` but not normalised, straight from the VAE
(where one sample is stored: that sample)."""

_LOGVAR_LEAST, _LOGVAR_MOST = -30.0, 20.0
"""Where diffusers' DiagonalGaussianDistribution clamps."""


def check_form(block: LatentsBlock | None, wanted: LatentsAs) -> None:
    """Raise BadInput for an unknown form, and where what is stored cannot give it. Without latents any known form is fine."""
    if wanted not in {"sample", "mean", "moments", "raw"}:
        message = f'latents are handed out as "sample", "mean", "moments" or "raw", not {wanted!r}'
        raise BadInput(message)
    if block is None:
        return
    if (wanted == "moments" and block.stored != "moments") or (wanted == "mean" and block.stored == "sample"):
        message = (
            f"the store keeps the {block.stored} of these latents, which gives no {wanted}; run `cachestore precompute --latents moments`"
        )
        raise BadInput(message)


def read_latents(block: LatentsBlock, wanted: LatentsAs, stored: Mapping[str, torch.Tensor], noise: torch.Generator) -> torch.Tensor:
    """The latents of one entry, without a batch axis. `noise` is used only to draw a sample."""
    if block.stored not in stored:
        message = f"an entry holds {', '.join(sorted(stored)) or 'nothing'} where its recipe names {block.stored}; run `cachestore verify`"
        raise FormatError(message)
    tensor = stored[block.stored]
    if wanted == "moments":
        return tensor
    if block.stored != "moments":
        return tensor if wanted == "raw" else normalise(block, tensor)
    mean, logvar = torch.chunk(tensor, 2, dim=0)
    match wanted:
        case "raw":
            return mean.clone()
        case "mean":
            return normalise(block, mean)
        case "sample":
            std = torch.exp(0.5 * torch.clamp(logvar, _LOGVAR_LEAST, _LOGVAR_MOST))
            return normalise(block, mean + std * torch.randn(mean.shape, generator=noise, dtype=mean.dtype))


def normalise(block: LatentsBlock, latents: torch.Tensor) -> torch.Tensor:
    """What diffusers' training scripts do between the VAE and the noise scheduler. Returns a tensor of its own."""
    folded = _fold(latents, block.patchify)
    if block.mean is not None and block.std is not None:
        each_channel = (-1, *[1] * (folded.ndim - 1))
        mean = torch.tensor(block.mean, dtype=folded.dtype).view(each_channel)
        std = torch.tensor(block.std, dtype=folded.dtype).view(each_channel)
        return (folded - mean) * block.scaling_factor / std
    if block.shift_factor is None:
        return folded * block.scaling_factor
    return (folded - block.shift_factor) * block.scaling_factor


def _fold(latents: torch.Tensor, patch: int) -> torch.Tensor:
    """Fold patch x patch neighbours into channels, as FLUX.2 does; a patch of 1 changes nothing."""
    if patch == 1:
        return latents
    channels, *between, height, width = latents.shape
    split = latents.reshape(channels, *between, height // patch, patch, width // patch, patch)
    last = split.ndim
    inner = [last - 3, last - 1]
    outer = [*range(1, last - 4), last - 4, last - 2]
    return split.permute(0, *inner, *outer).reshape(channels * patch * patch, *between, height // patch, width // patch)


def noise_for(seed: int, epoch: int, sample_id: str) -> torch.Generator:
    """The generator of one sample in one epoch: the same in every process, batch and resumed run."""
    digest = digest_parts("cachestore-latents", str(seed), str(epoch), sample_id)
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
