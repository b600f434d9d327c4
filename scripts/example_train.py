"""Ten steps of training from the store and ten while encoding on the fly, side by side: `python3 scripts/example_train.py [--json]`.

A tiny SDXL and a tiny FLUX, built from configurations, are trained the way diffusers' scripts train theirs: once on batches of a
CachedDataset, once on what the pipeline's own `encode_prompt` and VAE return for the same samples, with the same seeds. Exit 0 only if
the loss of each step is the same, up to rounding.
"""

import environment

if __name__ == "__main__":
    environment.enter()

import argparse
import copy
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tiny_models

from cachestore.encode.batching.environment import set_library_defaults

STEPS = 10
BATCH_SIZE = 2
RESOLUTION = 128
SEED = 7
SIZES = ((128, 128), (192, 64))
"""(width, height) of the pictures: those of buckets, so that neither side scales or crops them."""
CAPTIONS = ("", "a cat", "a photograph of an astronaut riding a horse", "a cat", 'a sign that says "open"', "x " * 120)

Batch = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Family:
    """How one family of models is built, encoded on the fly, and trained."""

    name: str
    build: Callable[[], Any]
    dtype: str
    denoiser: Callable[[], Any]
    encode: Callable[[Any, Sequence[str]], Batch]
    """What the pipeline itself makes of captions, by the names of a batch."""
    loss: Callable[[Any, Batch, Any], Any]
    """Of a denoiser on a batch, with the noise and times that a generator draws."""
    tolerance: float
    """How far losses may be apart, relative to the larger: rounding of the dtype that is stored."""


# SDXL, as diffusers' train_text_to_image_sdxl does it


def sdxl_denoiser() -> Any:
    """A U-Net of two levels."""
    return tiny_models.library("diffusers").UNet2DConditionModel(
        sample_size=32,
        block_out_channels=(8, 16),
        norm_num_groups=4,
        layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=(1, 2),
        transformer_layers_per_block=(1, 1),
        use_linear_projection=True,
        cross_attention_dim=80,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=96,
    )


def encode_sdxl(pipeline: Any, captions: Sequence[str]) -> Batch:
    """Both text encoders' states, joined, and the pooled ones of the second."""
    embeds, _, pooled, _ = pipeline.encode_prompt(list(captions), device="cpu", do_classifier_free_guidance=False)
    return {"prompt_embeds": embeds, "pooled_prompt_embeds": pooled}


def sdxl_loss(unet: Any, batch: Batch, generator: Any) -> Any:
    """Mean squared error of the noise that a DDPM scheduler adds."""
    import torch

    latents = batch["latents"].float()
    scheduler = tiny_models.library("diffusers").DDPMScheduler()
    noise = torch.randn(latents.shape, generator=generator)
    times = torch.randint(scheduler.config.num_train_timesteps, (len(latents),), generator=generator)
    conditions = {
        "text_embeds": batch["pooled_prompt_embeds"].float(),
        "time_ids": torch.cat([batch["original_size"], batch["crop_top_left"], batch["target_size"]], dim=1),
    }
    noisy = scheduler.add_noise(latents, noise, times)
    states = batch["prompt_embeds"].float()
    predicted = unet(noisy, times, encoder_hidden_states=states, added_cond_kwargs=conditions).sample
    return torch.nn.functional.mse_loss(predicted, noise)


# FLUX.1, as diffusers' train_dreambooth_flux does it


def flux_denoiser() -> Any:
    """A transformer of one double and one single block."""
    return tiny_models.library("diffusers").FluxTransformer2DModel(
        patch_size=1,
        in_channels=64,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
    )


def encode_flux(pipeline: Any, captions: Sequence[str]) -> Batch:
    """T5's states at 512 tokens, padding included, CLIP's pooled ones, and the ids that are all zero."""
    embeds, pooled, ids = pipeline.encode_prompt(list(captions), None, device="cpu", max_sequence_length=512)
    return {"prompt_embeds": embeds, "pooled_prompt_embeds": pooled, "text_ids": ids}


def flux_loss(transformer: Any, batch: Batch, generator: Any) -> Any:
    """Mean squared error of the velocity between latents and noise."""
    import torch

    pipeline = tiny_models.library("diffusers").FluxPipeline
    latents = batch["latents"].float()
    count, channels, height, width = latents.shape
    noise = torch.randn(latents.shape, generator=generator)
    times = torch.rand((count,), generator=generator)
    at = times.view(-1, 1, 1, 1)
    pack = pipeline._pack_latents  # noqa: SLF001 - as diffusers' own training scripts do
    ids = pipeline._prepare_latent_image_ids(count, height // 2, width // 2, "cpu", torch.float32)  # noqa: SLF001
    predicted = transformer(
        hidden_states=pack((1 - at) * latents + at * noise, count, channels, height, width),
        timestep=times,
        pooled_projections=batch["pooled_prompt_embeds"].float(),
        encoder_hidden_states=batch["prompt_embeds"].float(),
        txt_ids=batch["text_ids"].float(),
        img_ids=ids,
    ).sample
    return torch.nn.functional.mse_loss(predicted, pack(noise - latents, count, channels, height, width))


FAMILIES = (
    Family("sdxl", tiny_models.sdxl, "float32", sdxl_denoiser, encode_sdxl, sdxl_loss, tolerance=1e-5),
    Family("flux", tiny_models.flux, "bfloat16", flux_denoiser, encode_flux, flux_loss, tolerance=2e-4),
)


# Both ways


def lay_out(folder: Path) -> None:
    """Pictures with captions beside them: one of each caption in each size."""
    import numpy as np
    from PIL import Image

    folder.mkdir()
    for number, (size, caption) in enumerate((size, caption) for size in SIZES for caption in CAPTIONS):
        coarse = np.random.default_rng(number).integers(0, 256, (4, 4, 3), dtype=np.uint8)
        Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC).save(folder / f"{number:02}.png")
        (folder / f"{number:02}.txt").write_text(caption, encoding="utf-8")


def from_store(data: Any, schedule: Iterable[tuple[int, Sequence[int]]]) -> Iterator[Batch]:
    """The batches of a schedule as a DataLoader hands them out."""
    from torch.utils.data import DataLoader

    for epoch, indices in schedule:
        data.set_epoch(epoch)
        yield from DataLoader(data, batch_sampler=[list(indices)], collate_fn=data.collate)


def on_the_fly(
    family: Family, pipeline: Any, pictures: Path, schedule: Iterable[tuple[int, Sequence[str]]], captions: Mapping[str, str]
) -> Iterator[Batch]:
    """The batches of a schedule of sample ids, encoded when they are needed; nothing is read from a store."""
    import numpy as np
    import torch
    from PIL import Image

    from cachestore.train.latents import noise_seed

    config = pipeline.vae.config
    for epoch, ids in schedule:
        pixels = np.stack([np.asarray(Image.open(pictures / sample).convert("RGB")) for sample in ids])
        values = (torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 255 - 0.5) / 0.5
        with torch.inference_mode():
            posterior = pipeline.vae.encode(values.to(pipeline.vae.dtype)).latent_dist
            generators = [torch.Generator().manual_seed(noise_seed(0, epoch, sample)) for sample in ids]
            shape, dtype = posterior.mean.shape[1:], posterior.mean.dtype
            noise = torch.stack([torch.randn(shape, generator=generator, dtype=dtype) for generator in generators])
            latents = (posterior.mean + posterior.std * noise - (config.shift_factor or 0)) * config.scaling_factor
            encoded = dict(family.encode(pipeline, [captions[sample] for sample in ids]))
        size = torch.tensor([pixels.shape[1:3]] * len(ids))
        sizes = {"original_size": size, "crop_top_left": torch.zeros_like(size), "target_size": size}
        yield {"latents": latents.clone(), **{name: value.clone() for name, value in encoded.items()}, **sizes}


def train(family: Family, denoiser: Any, batches: Iterable[Batch]) -> list[float]:
    """The loss of each step of a training run that changes the denoiser."""
    import torch

    optimizer = torch.optim.AdamW(denoiser.parameters(), lr=1e-3)
    losses: list[float] = []
    for step, batch in enumerate(batches):
        loss = family.loss(denoiser, batch, torch.Generator().manual_seed(SEED + step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def largest_difference(one: Sequence[float], two: Sequence[float]) -> float:
    """The largest relative difference of two runs' losses; infinite where one is not finite, or they did not take the same steps."""
    if len(one) != len(two):
        return float("inf")
    differences = [abs(a - b) / max(abs(a), abs(b), 1e-12) for a, b in zip(one, two, strict=True)]
    return max((difference if difference <= 2 else float("inf") for difference in differences), default=float("inf"))  # NaN is not <= 2


def compare(family: Family, folder: Path, captions: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Train both ways and say how far the losses are apart. `captions` takes the place of those that are encoded on the fly."""
    import torch

    import cachestore as cs

    pictures = folder / "pictures"
    if not pictures.exists():
        lay_out(pictures)
    torch.manual_seed(SEED)
    pipeline = family.build()
    pipeline.save_pretrained(folder / family.name)
    store = folder / f"{family.name}-store"
    cs.precompute(pictures, model=folder / family.name, store=store, resolution=RESOLUTION, device="cpu", inline=True, strict=True)

    data = cs.CachedDataset(store)
    schedule = make_schedule(data)
    own = {path.with_suffix(".png").name: path.read_text(encoding="utf-8") for path in pictures.glob("*.txt")}
    by_id = [(epoch, [data.ids[index] for index in indices]) for epoch, indices in schedule]
    denoiser = family.denoiser()
    begin = copy.deepcopy(denoiser.state_dict())
    cached = train(family, denoiser, from_store(data, schedule))
    denoiser.load_state_dict(begin)
    pipeline.to(getattr(torch, family.dtype))
    direct = train(family, denoiser, on_the_fly(family, pipeline, pictures, by_id, captions or own))
    difference = largest_difference(cached, direct)
    return {
        "family": family.name,
        "ok": difference <= family.tolerance,
        "steps": len(cached),
        "largest_difference": difference,
        "tolerance": family.tolerance,
        "cached": cached,
        "on_the_fly": direct,
    }


def make_schedule(data: Any) -> list[tuple[int, list[int]]]:
    """(epoch, indices) of as many batches as there are steps, as the bucket sampler draws them."""
    import cachestore as cs

    sampler = cs.BucketBatchSampler(data, batch_size=BATCH_SIZE, shuffle=True, seed=SEED, rank=0, num_replicas=1)
    schedule: list[tuple[int, list[int]]] = []
    while len(schedule) < STEPS:
        epoch = schedule[-1][0] + 1 if schedule else 0
        sampler.set_epoch(epoch)
        schedule += [(epoch, list(indices)) for indices in sampler]
    return schedule[:STEPS]


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare every family; 0 if the losses of all are the same up to rounding."""
    parser = argparse.ArgumentParser(description="Train from the store and while encoding on the fly, and compare the losses.")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    asked = parser.parse_args(arguments)
    set_library_defaults(os.environ)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="cachestore-train-") as folder:
        families = [compare(family, Path(folder)) for family in FAMILIES]
    result = {"ok": all(family["ok"] for family in families), "seconds": round(time.monotonic() - began, 1), "families": families}
    if asked.json:
        print(json.dumps(result))
    else:
        for family in families:
            tell(family)
        print(f"{'the same losses' if result['ok'] else 'FAILED: other losses'}, {result['seconds']} s")
    return 0 if result["ok"] else 1


def tell(family: Mapping[str, Any]) -> None:
    """One family's losses, for a person."""
    print(f"{family['family']}: step, loss from the store, loss encoding on the fly")
    for step, (cached, direct) in enumerate(zip(family["cached"], family["on_the_fly"], strict=True)):
        print(f"  {step:2}  {cached:.7f}  {direct:.7f}")
    print(f"  largest relative difference {family['largest_difference']:.1e}, allowed {family['tolerance']:.0e}")


if __name__ == "__main__":
    sys.exit(main())
