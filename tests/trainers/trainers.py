"""Caches made by hand as the trainers make them, and the rules by which their readers accept a file. Nothing here uses our own formats.

Writers and readers follow docs/design/trainers.md and the tables of docs/interop.md: names, keys, shapes, dtypes and scaling states.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image

CHANNELS = {"sd15": 4, "sdxl": 4, "sd3": 16, "flux": 16, "wan": 16, "qwen-image": 16, "z-image": 16}
ROWS = 6
"""T5's rows, of which real caches have hundreds."""
T5_MASK = [1, 1, 1, 0, 0, 0]


@dataclass(frozen=True)
class Picture:
    """A sample of the source, and how large it and its latents are."""

    reference: str
    caption: str
    size: tuple[int, int]
    latent: tuple[int, int]
    """(height, width)."""

    @property
    def stem(self):
        return self.reference.rpartition(".")[0]


PICTURES = (
    Picture("a/one.png", "a red fox, in snow", (100, 80), (6, 8)),
    Picture("two.png", "ein grüner Vogel", (64, 64), (8, 8)),
    Picture("a/three.v2.png", "", (90, 120), (8, 6)),
)


def make_source(root: Path, pictures=PICTURES) -> Path:
    for number, picture in enumerate(pictures):
        path = root / picture.reference
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", picture.size, (40 * number, 80, 200)).save(path)
        (root / f"{picture.stem}.txt").write_text(picture.caption, encoding="utf-8")
    return root


def noise(*parts, shape, dtype=torch.float32):
    seed = int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:7], "little")
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def latents_of(picture, family, dtype=torch.float32, *, frames=None):
    height, width = picture.latent
    shape = (CHANNELS[family], height, width) if frames is None else (CHANNELS[family], frames, height, width)
    return noise(picture.reference, family, shape=shape, dtype=dtype)


def text_of(caption, family, dtype=torch.float32) -> dict[str, torch.Tensor]:
    """What a family's encoders make of a caption: joined as pipelines take it, without a batch axis."""
    if family == "sdxl":
        return {"prompt": noise(caption, shape=(77, 2048), dtype=dtype), "pooled": noise(caption, 1, shape=(1280,), dtype=dtype)}
    if family == "sd3":
        clip = torch.nn.functional.pad(noise(caption, shape=(77, 2048), dtype=dtype), (0, 2048))
        t5 = noise(caption, 2, shape=(ROWS, 4096), dtype=dtype)
        return {"prompt": torch.cat([clip, t5]), "pooled": noise(caption, 1, shape=(2048,), dtype=dtype)}
    return {"prompt": noise(caption, shape=(ROWS, 4096), dtype=dtype), "pooled": noise(caption, 1, shape=(768,), dtype=dtype)}
