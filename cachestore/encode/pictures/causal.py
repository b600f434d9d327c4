"""Encode long videos in bounded memory where diffusers does not. Imports torch."""

from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from typing import Final

import torch
from torch import Tensor

from cachestore.encode.models.modules import Foreign

_VAE: Final = "AutoencoderKLHunyuanVideo15"
_ATTENTION: Final = "HunyuanVideo15AttnBlock"


@contextmanager
def frame_by_frame(vae: Foreign) -> Generator[None]:
    """Let the attention of HunyuanVideo 1.5's VAE take one frame at a time within the block; do nothing for another VAE.

    For it diffusers makes a mask of all pairs of latent pixels: 28 GB in 16 bits for 129 frames at 1280 x 720.
    """
    is_meant = type(vae).__name__ == _VAE
    blocks = [module for module in vae.encoder.modules() if type(module).__name__ == _ATTENTION] if is_meant else []
    for block in blocks:
        block.forward = partial(_attend, block)
    try:
        yield
    finally:
        for block in blocks:
            del block.forward


def _attend(block: Foreign, states: Tensor) -> Tensor:
    """As the block's own `forward`, without its mask: the rows of each frame attend to those of all frames up to it."""
    normed = block.norm(states)
    query, key, value = (part(normed).flatten(3).permute(0, 2, 3, 1) for part in (block.to_q, block.to_k, block.to_v))
    attend = torch.nn.functional.scaled_dot_product_attention
    frames = range(1, states.shape[2] + 1)
    made = [attend(query[:, None, last - 1], key[:, None, :last].flatten(2, 3), value[:, None, :last].flatten(2, 3)) for last in frames]
    return states + block.proj_out(torch.cat(made, dim=1).permute(0, 3, 1, 2).unflatten(3, states.shape[3:]))
