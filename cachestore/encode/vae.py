"""Calling a VAE's encoder. Imports torch.

What is kept is raw: no scaling, no shift. Normalising belongs to reading, so a wrong constant never needs encoding again.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cachestore.encode.modules import DTYPES, Foreign, load_module
from cachestore.encode.setup import LatentsSetup
from cachestore.errors import EncodeFailed
from cachestore.keys import Key

CPU_PIXELS, CPU_MOST = 64 * 64 * 16, 16
"""On a CPU larger batches help tiny pictures only (1.6x at 64 x 64); at 256 x 256 they are slower, as they leave the cache."""
GPU_BYTES_PER_PIXEL, GPU_MOST = 2_800, 32
"""Activations of a VAE's encoder in 16 bits, about 2.8 GB at 1024 x 1024; twice that in 32 bits."""
GPU_SHARE = 0.4
"""How much of a GPU's free memory a batch may take by that estimate."""


def latents_batch(pixels: int, dtype: str, device: torch.device) -> int:
    """How many pictures of so many pixels make a good batch."""
    if device.type != "cuda":
        return max(1, min(CPU_MOST, CPU_PIXELS // max(1, pixels)))
    free, _ = torch.cuda.mem_get_info(device)
    needed = pixels * GPU_BYTES_PER_PIXEL * (2 if dtype == "float32" else 1)
    return max(1, min(GPU_MOST, int(free * GPU_SHARE) // max(1, needed)))


class Vae:
    """A VAE's modules, loaded. Use from one thread."""

    def __init__(self, setup: LatentsSetup, device: torch.device) -> None:
        """Load it onto the device."""
        self._vae = load_module(setup.components["vae"], setup.dtype, device)
        self._dtype = DTYPES[setup.dtype]
        self._stored = setup.stored
        self._device = device

    def encode(self, batch: "Sequence[tuple[Key, np.ndarray[Any, np.dtype[np.uint8]]]]") -> dict[Key, dict[str, Tensor]]:
        """Encode (key, pixels) pairs of one bucket. Raises EncodeFailed where a value is not finite, naming the first such entry."""
        with torch.inference_mode():
            pixels = torch.from_numpy(np.stack([picture for _, picture in batch])).to(self._device)
            posterior = self._vae.encode(to_range(pixels).to(self._dtype)).latent_dist
            kept = self._kept(posterior, [key for key, _ in batch]).to(device="cpu", dtype=self._dtype)
        entries: dict[Key, dict[str, Tensor]] = {}
        for row, (key, _) in enumerate(batch):
            if not bool(torch.isfinite(kept[row]).all()):
                message = f"the VAE made NaN or infinite numbers in {self._stored!r} of {key} in {self._dtype}; try --vae-dtype float32"
                raise EncodeFailed(message)
            entries[key] = {self._stored: kept[row].clone(memory_format=torch.contiguous_format)}
        return entries

    def _kept(self, posterior: Foreign, keys: Sequence[Key]) -> Tensor:
        """The form of the posterior that is stored."""
        if self._stored == "moments":
            return posterior.parameters
        if self._stored == "mean":
            return posterior.mean
        noise = torch.stack([noise_of(key, posterior.mean.shape[1:]) for key in keys])
        return posterior.mean + posterior.std * noise.to(device=self._device, dtype=self._dtype)


def to_range(pixels: Tensor) -> Tensor:
    """uint8 [B, H, W, 3] to float32 [B, 3, H, W] in -1..1, by the very operations of diffusers' training scripts."""
    return pixels.permute(0, 3, 1, 2).contiguous().float().div(255).sub(0.5).div(0.5)


def noise_of(key: Key, shape: Sequence[int]) -> Tensor:
    """Normal noise that depends on the key alone, drawn on the CPU: the same on every device, in every batch."""
    generator = torch.Generator("cpu").manual_seed(int.from_bytes(key[:8], "little") >> 1)
    return torch.randn(tuple(shape), generator=generator)
