"""Four steps of training with conditions from a store, and four on what the pipeline itself makes of the same files: equal losses."""

import copy
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from PIL import Image

import cachestore as cs
from cachestore.encode.batching.environment import set_library_defaults
from scripts.example_train import SEED, from_store, largest_difference, train
from tests.encode import tiny_conditions, tiny_families
from tests.encode.footage import moving, write

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore::FutureWarning:diffusers")]

STEPS, BATCH, TOLERANCE = 4, 2, 1e-5
SIZE, FRAMES = (64, 48), 9


def drawn(posterior, seed):
    import torch

    noise = torch.randn(posterior.mean.shape[1:], generator=torch.Generator().manual_seed(seed))
    return (posterior.mean + posterior.std * noise)[0]


def frames_of(number):
    return [np.roll(frame, 9 * number, axis=1) for frame in moving(FRAMES, SIZE)]


def lay_out_clips(folder):
    for number in range(6):
        (folder / f"{number}.mkv").write_bytes(write(frames_of(number)))
        (folder / f"{number}.txt").write_text(f"clip number {number}")


CLIPS: Any = {"resolution": 56, "bucket_step": 16, "frames": FRAMES, "text_dtype": "float32", "strict": True}


class WanFromFirstFrames:
    """Wan 2.1 from six short clips, of which one has a first frame of its own."""

    name, denoiser, latents = "wan-i2v", "transformer", "sample"
    options: Any = CLIPS

    def lay_out(self, folder):
        lay_out_clips(folder)
        Image.fromarray(frames_of(9)[4]).save(folder / "3.first_frame.png")

    def direct(self, pipeline, folder, name, epoch):
        """What the pipeline makes of a sample when it is needed."""
        import torch

        from cachestore.train.latents import noise_seed

        del folder
        number, (width, height) = int(Path(name).stem), SIZE
        pictures = [Image.fromarray(frame) for frame in frames_of(number)]
        first = Image.fromarray(frames_of(9)[4]) if number == 3 else pictures[0]
        video = pipeline.video_processor.preprocess_video(pictures, height=height, width=width).to(torch.float32)
        mean, std = (torch.tensor(pipeline.vae.config[key]).view(-1, 1, 1, 1) for key in ("latents_mean", "latents_std"))
        latents = (drawn(pipeline.vae.encode(video).latent_dist, noise_seed(0, epoch, name)) - mean) / std
        image = pipeline.video_processor.preprocess(first, height=height, width=width).to(torch.float32)
        condition = pipeline.prepare_latents(image, 1, 16, height, width, FRAMES, torch.float32, torch.device("cpu"))[1][0]
        embeds, _negative = pipeline.encode_prompt(f"clip number {number}", do_classifier_free_guidance=False, max_sequence_length=512)
        shown = pipeline.encode_image(first, "cpu")[0]
        return {"latents": latents, "condition": condition, "image_embeds": shown, "prompt_embeds": embeds[0]}

    def loss(self, transformer, batch, generator):
        """Flow matching, with the inputs that the pipeline gives its denoiser."""
        import torch

        latents = batch["latents"]
        noise, times = torch.randn(latents.shape, generator=generator), torch.rand((len(latents),), generator=generator)
        at = times.view(-1, 1, 1, 1, 1)
        predicted = transformer(
            hidden_states=torch.cat([(1 - at) * latents + at * noise, batch["condition"]], dim=1),
            timestep=times * 1000,
            encoder_hidden_states=batch["prompt_embeds"],
            encoder_hidden_states_image=batch["image_embeds"],
        ).sample
        return torch.nn.functional.mse_loss(predicted, noise - latents)


class Ltx2FromFirstFrames:
    """LTX-2 from six short clips: the first frame takes the place of the first latent frame, and stays without noise."""

    name, denoiser, latents = "ltx2-i2v", "transformer", "mean"
    options: Any = {**CLIPS, "strict": False, "encode_arg": {"max_sequence_length": 256}, "vae_dtype": "float32"}

    def __init__(self):
        self.pipeline: Any = None

    def lay_out(self, folder):
        lay_out_clips(folder)

    def direct(self, pipeline, folder, name, epoch):
        """What the pipeline makes of a sample when it is needed."""
        import torch

        del folder, epoch
        number, (width, height) = int(Path(name).stem), SIZE
        pictures = [Image.fromarray(frame) for frame in frames_of(number)]
        video = pipeline.video_processor.preprocess_video(pictures, height=height, width=width).to(torch.float32)
        vae = pipeline.vae
        latents = pipeline._normalize_latents(vae.encode(video).latent_dist.mode(), vae.latents_mean, vae.latents_std)
        image = pipeline.video_processor.preprocess(pictures[0], height=height, width=width).to(torch.float32)
        given, _mask = pipeline.prepare_latents(image, 1, 4, height, width, FRAMES, dtype=torch.float32, device=torch.device("cpu"))
        first = pipeline._unpack_latents(given, *latents.shape[2:])[:, :, :1]
        caption, plain = f"clip number {number}", {"do_classifier_free_guidance": False, "max_sequence_length": 256}
        embeds, mask, _none, _no = pipeline.encode_prompt(caption, **plain)
        text, sound, _ones = pipeline.connectors(embeds, mask, padding_side="left")
        return {"latents": latents[0], "first": first[0], "text": text[0], "sound": sound[0]}

    def loss(self, transformer, batch, generator):
        """Flow matching of all frames but the first, with the inputs that the pipeline gives its denoiser."""
        import torch

        latents, pack = batch["latents"], self.pipeline._pack_latents
        if "text" in batch:
            text, sound = batch["text"], batch["sound"]
        else:
            connected = tiny_families.ltx2_inputs(self.pipeline, batch)["connectors"]
            text, sound, _ones = connected(batch["prompt_embeds"], batch["prompt_attention_mask"])
        noise, times = torch.randn(latents.shape, generator=generator), torch.rand((len(latents),), generator=generator)
        at = times.view(-1, 1, 1, 1, 1)
        noisy = torch.cat([batch.get("first", latents[:, :, :1]), ((1 - at) * latents + at * noise)[:, :, 1:]], dim=2)
        is_given = torch.zeros_like(latents[:, :1])
        is_given[:, :, 0] = 1
        count, height, width = latents.shape[2:]
        predicted, _sound = transformer(
            hidden_states=pack(noisy),
            audio_hidden_states=torch.randn((len(latents), 3, 4), generator=generator),
            encoder_hidden_states=text,
            audio_encoder_hidden_states=sound,
            timestep=times[:, None] * 1000 * (1 - pack(is_given)[..., 0]),
            audio_timestep=times * 1000,
            sigma=times * 1000,
            num_frames=count,
            height=height,
            width=width,
            fps=16.0,
            audio_num_frames=3,
            return_dict=False,
        )
        wanted = pack(noise - latents)
        return torch.nn.functional.mse_loss(predicted[:, height * width :], wanted[:, height * width :])


class SdxlInpainting:
    """SDXL from pictures with masks."""

    name, denoiser, latents = "sdxl-inpaint", "unet", "sample"
    options: Any = {"resolution": 64, "strict": True}

    def lay_out(self, folder):
        for number in range(6):
            pixels = np.random.default_rng(number).integers(0, 256, (64, 64, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / f"{number}.png")
            mask = np.zeros((64, 64), np.uint8)
            mask[number : 20 + number, 10:50] = 255
            Image.fromarray(mask).save(folder / f"{number}.mask.png")
            (folder / f"{number}.txt").write_text(f"picture number {number}")

    def direct(self, pipeline, folder, name, epoch):
        """What the pipeline makes of a sample when it is needed."""
        import torch

        from cachestore.train.latents import noise_seed

        stem, scale = Path(name).stem, pipeline.vae.config.scaling_factor
        image = pipeline.image_processor.preprocess(Image.open(folder / name), height=64, width=64).to(torch.float32)
        white = pipeline.mask_processor.preprocess(Image.open(folder / f"{stem}.mask.png"), height=64, width=64)
        mask, _none = pipeline.prepare_mask_latents(white, None, 1, 64, 64, torch.float32, torch.device("cpu"), None, False)
        embeds, _no, pooled, _other = pipeline.encode_prompt(f"picture number {stem}", do_classifier_free_guidance=False)
        masked = pipeline.vae.encode(image * (white < 0.5)).latent_dist
        return {
            "latents": scale * drawn(pipeline.vae.encode(image).latent_dist, noise_seed(0, epoch, name)),
            "masked_image_latents": scale * drawn(masked, noise_seed(0, epoch, f"{name}/masked_image_latents")),
            "mask": mask[0],
            "prompt_embeds": embeds[0],
            "pooled_prompt_embeds": pooled[0],
            "time_ids": torch.tensor([64, 64, 0, 0, 64, 64]),
        }

    def loss(self, unet, batch, generator):
        """The noise of a DDPM scheduler, with the inputs that the pipeline gives its denoiser."""
        import torch
        from diffusers import DDPMScheduler

        latents, scheduler = batch["latents"], DDPMScheduler()
        noise = torch.randn(latents.shape, generator=generator)
        times = torch.randint(1000, (len(latents),), generator=generator)
        sizes = [batch[name] for name in ("original_size", "crop_top_left", "target_size") if name in batch]
        added = {"text_embeds": batch["pooled_prompt_embeds"], "time_ids": torch.cat(sizes, dim=1) if sizes else batch["time_ids"]}
        inputs = torch.cat([scheduler.add_noise(latents, noise, cast("Any", times)), batch["mask"], batch["masked_image_latents"]], dim=1)
        predicted = unet(inputs, times, encoder_hidden_states=batch["prompt_embeds"], added_cond_kwargs=added).sample
        return torch.nn.functional.mse_loss(predicted, noise)


FAMILIES = [WanFromFirstFrames(), *(pytest.param(family(), marks=pytest.mark.slow) for family in (Ltx2FromFirstFrames, SdxlInpainting))]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_four_steps_from_the_store_have_the_losses_of_encoding_on_the_fly(family, tmp_path):
    import torch

    set_library_defaults(os.environ)
    family.pipeline = pipeline = tiny_conditions.build(family.name, tmp_path / "model")
    (tmp_path / "data").mkdir()
    family.lay_out(tmp_path / "data")
    report = cs.precompute(
        tmp_path / "data", model=tmp_path / "model", store=tmp_path / "store", device="cpu", inline=True, **family.options
    )
    assert report.complete
    data = cs.CachedDataset(tmp_path / "store", latents=family.latents)
    sampler = cs.BucketBatchSampler(data, batch_size=BATCH, shuffle=True, seed=SEED, rank=0, num_replicas=1)
    schedule = [(epoch, list(indices)) for epoch in range(2) for indices in (sampler.set_epoch(epoch), *sampler)[1:]][:STEPS]
    denoiser, steps = getattr(pipeline, family.denoiser), cast("Any", SimpleNamespace(loss=family.loss))
    began = copy.deepcopy(denoiser.state_dict())
    cached = train(steps, denoiser, from_store(data, schedule))
    denoiser.load_state_dict(began)

    def on_the_fly():
        for epoch, indices in schedule:
            with torch.no_grad():
                samples = [family.direct(pipeline, tmp_path / "data", data.ids[index], epoch) for index in indices]
            yield {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}

    direct = train(steps, denoiser, on_the_fly())
    assert len(cached) == STEPS
    difference = largest_difference(cached, direct)
    assert difference <= TOLERANCE, (cached, direct)
