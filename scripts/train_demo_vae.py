"""Train the demo's VAE: `python3 scripts/train_demo_vae.py [--steps N]`.

A toy: a small AutoencoderKL of the usual form (four latent channels, factor eight), trained for a quarter of an hour of two cores
on the very photographs that the demo encodes, so that its latents decode to something one recognises. It has seen nothing else.
The result stands in `scripts/demo_model/vae` as a diffusers folder of less than 2 MB and is committed; nobody needs to run this again.
"""

import argparse
import importlib.util
import json
import math
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import environment

if TYPE_CHECKING:
    from torch import Generator, Tensor

Vae = Any
"""An AutoencoderKL; diffusers' annotations contradict what its methods take and return."""
HERE = Path(__file__).resolve().parent
FOLDER = HERE / "demo_model" / "vae"
CHANNELS = (24, 48, 56, 56)
CROP = 64
BATCH = 8
PEAK_RATE = 2e-3
COLOUR_WEIGHT = 2.0
"""Half of the pictures are grey: without it the model spends its latents on brightness alone."""
KL_WEIGHT = 1e-6
WARM_UP_STEPS = 100
REPORT_EVERY = 250


def photographs() -> list[Path]:
    """The pictures of the demo, in the wheel of scikit-image: those that demo_captions.jsonl names."""
    spec = importlib.util.find_spec("skimage")
    if spec is None or spec.origin is None:
        sys.exit("scikit-image is not installed; it belongs to the dependency group `demo`")
    lines = (HERE / "demo_captions.jsonl").read_text(encoding="utf-8").splitlines()
    return [Path(spec.origin).parent / "data" / json.loads(line)["image"] for line in lines]


def load(path: Path) -> "Tensor":
    """A picture as a float tensor [3, height, width] in [-1, 1], its longer side at most 768 pixels."""
    import numpy as np
    import torch
    from PIL import Image

    with Image.open(path) as image:
        picture = image.convert("RGB")
    picture.thumbnail((768, 768), Image.Resampling.LANCZOS)
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1).float() / 127.5 - 1


def draw_batch(pictures: "list[Tensor]", generator: "Generator") -> "Tensor":
    """Random crops of random pictures, at a random scale between half and full size, some of them mirrored."""
    import torch

    def below(limit: int) -> int:
        return int(torch.randint(limit, (), generator=generator))

    crops: list[Tensor] = []
    for _ in range(BATCH):
        picture = pictures[below(len(pictures))]
        side = CROP + below(CROP + 1)
        top, left = (below(length - side + 1) for length in picture.shape[1:])
        crop = picture[:, top : top + side, left : left + side]
        crop = torch.nn.functional.interpolate(crop[None], size=(CROP, CROP), mode="area")
        crops.append(crop.flip(-1) if below(2) else crop)
    return torch.cat(crops)


def build() -> Vae:
    """The untrained model."""
    from diffusers import AutoencoderKL

    kind: Any = AutoencoderKL
    return kind(
        down_block_types=("DownEncoderBlock2D",) * len(CHANNELS),
        up_block_types=("UpDecoderBlock2D",) * len(CHANNELS),
        block_out_channels=CHANNELS,
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=8,
        mid_block_add_attention=False,
        sample_size=256,
    )


def train(vae: Vae, pictures: "list[Tensor]", steps: int) -> None:
    """Fit the model in place: absolute error, that of colour counted extra, and enough of the KL term to keep the latents bounded."""
    import torch

    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(vae.parameters(), lr=PEAK_RATE, betas=(0.9, 0.99), weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / WARM_UP_STEPS) * (0.5 + 0.5 * math.cos(math.pi * step / steps))
    )
    begin = time.monotonic()
    for step in range(1, steps + 1):
        batch = draw_batch(pictures, generator).to(memory_format=torch.channels_last)
        posterior = vae.encode(batch).latent_dist
        error = vae.decode(posterior.sample(generator)).sample - batch
        colour_error = error - error.mean(dim=1, keepdim=True)
        loss = error.abs().mean() + COLOUR_WEIGHT * colour_error.abs().mean() + KL_WEIGHT * posterior.kl().mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % REPORT_EVERY == 0 or step == steps:
            print(f"step {step}/{steps}: loss {loss.item():.4f} after {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)


def measure(vae: Vae, pictures: "list[Tensor]") -> tuple[float, list[float]]:
    """(one over the latents' standard deviation over all pictures, each picture's PSNR in dB)."""
    import torch

    latents: list[Tensor] = []
    ratios: list[float] = []
    with torch.inference_mode():
        for picture in pictures:
            height, width = (length // 8 * 8 for length in picture.shape[1:])
            whole = picture[None, :, :height, :width]
            posterior = vae.encode(whole).latent_dist
            latents.append(posterior.sample(torch.Generator().manual_seed(0)).flatten())
            error = (vae.decode(posterior.mode()).sample.clamp(-1, 1) - whole).square().mean().item()
            ratios.append(10 * math.log10(4 / error))
    return 1 / torch.cat(latents).std().item(), ratios


def main() -> None:
    """Train, measure as it will be stored (half precision), and save with the measured scaling factor."""
    parser = argparse.ArgumentParser(description="Train the demo's VAE on the demo's photographs.")
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, default=FOLDER)
    arguments = parser.parse_args()

    import torch

    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    paths = photographs()
    pictures = [load(path) for path in paths]
    vae = build().to(memory_format=torch.channels_last)
    train(vae, pictures, arguments.steps)
    torch.nn.Module.half(vae).float().eval()  # measured as it is stored; diffusers' own `half` warns of nothing
    factor, ratios = measure(vae, pictures)
    vae.register_to_config(scaling_factor=round(factor, 4))
    torch.nn.Module.half(vae)
    vae.save_pretrained(arguments.output)
    for path, ratio in zip(paths, ratios, strict=True):
        print(f"{path.name:<24} {ratio:5.1f} dB")
    size = sum(file.stat().st_size for file in arguments.output.iterdir())
    print(f"mean PSNR {sum(ratios) / len(ratios):.1f} dB, scaling factor {factor:.4f}, {size:,} bytes in {arguments.output}")


if __name__ == "__main__":
    environment.enter()
    main()
