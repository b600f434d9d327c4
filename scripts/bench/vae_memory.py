"""Memory that VAEs need to encode: `python3 scripts/bench/vae_memory.py [CLASS ...]` prints it beside `VaeFamily.working` with no GPU.

Each published VAE is built by its configuration and run on tensors without contents: at each operation the bytes of all tensors that still
exist are added up. A GPU takes about 1.2 times as much (`docs/benchmarks.md`): cuDNN needs memory of its own.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import environment

if __name__ == "__main__":
    environment.enter()

import weakref
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import torch
from bench.models_table import KL_BLOCKS, MODELS
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from cachestore.encode.families.row import VaeFamily
from cachestore.encode.families.vae import VAE_FAMILIES
from cachestore.encode.pictures.causal import frame_by_frame

SIDE = 512
FRAMES = (1, 17, 49)
DEEP = (128, 256, 512, 512, 1024, 1024)
"""The channels of the blocks of Sana's VAE, and of HunyuanImage's."""
_DC = {
    "in_channels": 3,
    **{f"{half}_block_out_channels": DEEP for half in ("encoder", "decoder")},
    **{f"{half}_block_types": ("ResBlock",) * 3 + ("EfficientViTBlock",) * 3 for half in ("encoder", "decoder")},
    **{f"{half}_qkv_multiscales": ((), (), (), (5,), (5,), (5,)) for half in ("encoder", "decoder")},
    "encoder_layers_per_block": (2, 2, 2, 3, 3, 3),
    "decoder_layers_per_block": (3,) * 6,
    "downsample_block_type": "Conv",
    "upsample_block_type": "interpolate",
    "decoder_norm_types": "rms_norm",
    "decoder_act_fns": "silu",
}
CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "AutoencoderKL": {
        "block_out_channels": KL_BLOCKS,
        "down_block_types": ("DownEncoderBlock2D",) * 4,
        "up_block_types": ("UpDecoderBlock2D",) * 4,
        "layers_per_block": 2,
    },
    "AutoencoderDC": _DC,
    "AutoencoderKLHunyuanImage": {
        "in_channels": 3,
        "out_channels": 3,
        "latent_channels": 64,
        "block_out_channels": DEEP,
        "layers_per_block": 2,
        "spatial_compression_ratio": 32,
        "sample_size": 384,
    },
    "AutoencoderKLCogVideoX": {
        "block_out_channels": (128, 256, 256, 512),
        "latent_channels": 16,
        "down_block_types": ("CogVideoXDownBlock3D",) * 4,
        "up_block_types": ("CogVideoXUpBlock3D",) * 4,
        "layers_per_block": 3,
    },
}
"""Published configurations where they are not diffusers' defaults."""


class Watch(TorchDispatchMode):
    """Adds up the bytes of tensors, each storage once, in pieces of 512 as torch's allocator gives them."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.most = 0, 0
        self._alive: dict[int, int] = {}

    def __torch_dispatch__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_iter(made):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        return made

    def _count(self, storage: Any) -> None:
        name = int(storage._cdata)  # noqa: SLF001 - tensors that share memory have one storage, and nothing else names it
        if name in self._alive:
            return
        self._alive[name] = -(-storage.nbytes() // 512) * 512
        self.now += self._alive[name]
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._drop, name)

    def _drop(self, name: int) -> None:
        self.now -= self._alive.pop(name)


def build(class_name: str, dtype: torch.dtype) -> Any:
    """A VAE of published size, without contents."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            made = getattr(import_module("diffusers"), class_name)(**CONFIGS.get(class_name, {}))
    finally:
        torch.set_default_dtype(before)
    return made.to("meta").eval().requires_grad_(requires_grad=False)


def bytes_a_pixel(vae: Any, frames: int, side: int = SIDE) -> float:
    """The most bytes that exist while a picture or clip is encoded, for each of its pixels."""
    row = VAE_FAMILIES[type(vae).__name__]
    shape = (1, 3 + row.has_alpha, *([frames] if row.has_frames else []), side, side)
    pixels, watch = torch.empty(shape, device="meta", dtype=vae.dtype), Watch()
    with torch.no_grad(), frame_by_frame(vae), watch:
        vae.encode(pixels)
    return watch.most / side**2


def estimate_of(row: VaeFamily, frames: int, dtype: torch.dtype) -> float:
    """The same by the row of the VAE."""
    picture, clip, each = row.working
    return (picture if frames == 1 else clip + each * frames) * dtype.itemsize / torch.float32.itemsize


def rows(class_name: str) -> list[str]:
    """A line for each dtype and number of frames."""
    row, lines = VAE_FAMILIES[class_name], list[str]()
    for dtype in (torch.float32, torch.bfloat16):
        vae = build(class_name, dtype)
        for frames in FRAMES if row.has_frames and not row.is_of_pictures else FRAMES[:1]:
            found, estimate = bytes_a_pixel(vae, frames), estimate_of(row, frames, dtype)
            name = str(dtype).removeprefix("torch.")
            lines.append(f"{class_name} {name} {frames}: {found:.0f} bytes a pixel, the table says {estimate:.0f}")
    return lines


if __name__ == "__main__":
    for name in sys.argv[1:] or dict.fromkeys(model.vae.name for model in MODELS):
        print("\n".join(rows(name)), flush=True)
