"""Conditions through a store, compared with what their pipelines make of the same frames and pictures."""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import cachestore as cs
from tests.encode import tiny_conditions
from tests.encode.footage import moving, write

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore::FutureWarning:diffusers")]

SIZE = (64, 48)
FRAMES = 9
WANTED: dict[str, Any] = {"resolution": 56, "bucket_step": 16, "frames": FRAMES, "inline": True, "text_dtype": "float32"}


@dataclass(frozen=True)
class Tiny:
    folder: Path
    pipeline: Any


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    @cache
    def build(name):
        folder = tmp_path_factory.mktemp(name)
        return Tiny(folder, tiny_conditions.build(name, folder))

    return build


def frames_of(number):
    """The frames of a clip, each of another one."""
    return [np.roll(frame, 7 * number, axis=1) for frame in moving(FRAMES, SIZE)]


def picture_of(number):
    """A picture of a clip's size that is none of its frames."""
    return Image.fromarray(np.random.default_rng(number).integers(0, 256, (*SIZE[::-1], 3), dtype=np.uint8))


@pytest.fixture
def clips(tmp_path):
    """Three clips, the second with a first frame of its own, the third with both."""
    folder = tmp_path / "clips"
    folder.mkdir()
    rows: list[dict[str, Any]] = []
    for number in range(3):
        (folder / f"{number}.mkv").write_bytes(write(frames_of(number)))
        rows.append({"video": f"{number}.mkv", "caption": f"clip {number}"})
    picture_of(1).save(folder / "1.png")
    picture_of(2).save(folder / "2.png")
    rows[1]["first_frame"] = "1.png"
    rows[2] |= {"first_frame": "1.png", "last_frame": "2.png"}
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "rows.jsonl"


def ends_of(number):
    """The first and last pictures of each clip of `clips`."""
    frames = frames_of(number)
    first = Image.fromarray(frames[0]) if number == 0 else picture_of(1)
    return first, picture_of(2) if number == 2 else Image.fromarray(frames[-1])


def encoded(data, tiny_model, store, **options):
    report = cs.precompute(data, model=tiny_model.folder, store=store, **{**WANTED, **options})
    assert report.complete, report.failures
    return report, cs.CachedDataset(store)


def wan_condition(pipeline, first, last):
    """`condition` as `WanImageToVideoPipeline.__call__` makes it."""
    import torch

    width, height = SIZE
    image, last = (
        None if one is None else pipeline.video_processor.preprocess(one, height=height, width=width).to(torch.float32) for one in (first, last)
    )
    return pipeline.prepare_latents(image, 1, 16, height, width, FRAMES, torch.float32, torch.device("cpu"), None, None, last)[1][0]


@pytest.mark.parametrize("name", ["wan-i2v", "wan-flf2v", "wan22-i2v"])
def test_what_wan_is_shown_is_what_its_pipeline_makes_of_the_same_frames(tiny, clips, tmp_path, name):
    import torch

    report, data = encoded(clips, tiny(name), tmp_path / "store")
    assert report.not_made_here == ()
    pipeline, has_last = tiny(name).pipeline, name == "wan-flf2v"
    with torch.inference_mode():
        for number in range(3):
            first, last = ends_of(number)
            shown = [first, last] if has_last else first
            expected = wan_condition(pipeline, first, last if has_last else None)
            sample = data[data.index(f"{number}.mkv")]
            assert sample["condition"].shape == expected.shape == (20, 3, 6, 8)
            torch.testing.assert_close(sample["condition"], expected, rtol=1e-5, atol=1e-5)
            if name == "wan22-i2v":
                assert "image_embeds" not in sample
                continue
            embeds = pipeline.encode_image(shown, "cpu")
            assert sample["image_embeds"].shape == ((2, 5, 16) if has_last else (5, 16))
            torch.testing.assert_close(sample["image_embeds"].reshape(embeds.shape), embeds, rtol=1e-5, atol=1e-5)


# Inpainting


@pytest.fixture
def painted(tmp_path):
    """Three pictures with masks, two of one size."""
    folder = tmp_path / "painted"
    folder.mkdir()
    rows: list[dict[str, Any]] = []
    for number, size in enumerate([(64, 48), (64, 48), (48, 64)]):
        pixels = np.random.default_rng(number).integers(0, 256, (*size[::-1], 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
        mask = np.zeros(size[::-1], np.uint8)
        mask[5 + number : 30, 9:40] = (130, 127, 255)[number]
        mask[20:40, 3:12] = 255
        Image.fromarray(mask).save(folder / f"{number}-mask.png")
        rows.append({"image": f"{number}.png", "mask": f"{number}-mask.png", "caption": f"picture {number}"})
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "rows.jsonl"


PAINTING: dict[str, Any] = {"frames": (), "resolution": 56, "bucket_step": 16}


def inpainting(pipeline, folder, number):
    """`mask` and the moments of the masked picture, as `StableDiffusionXLInpaintPipeline.__call__` makes them."""
    import torch

    picture, mask = (Image.open(folder / f"{number}{end}.png") for end in ("", "-mask"))
    width, height = picture.size
    image = pipeline.image_processor.preprocess(picture, height=height, width=width).to(torch.float32)
    white = pipeline.mask_processor.preprocess(mask, height=height, width=width)
    sampled, _none = pipeline.prepare_mask_latents(white, None, 1, height, width, torch.float32, torch.device("cpu"), None, False)
    return sampled[0], pipeline.vae.encode(image * (white < 0.5)).latent_dist


def test_the_masked_picture_and_its_mask_are_those_of_the_pipeline_for_inpainting(tiny, painted, tmp_path):
    import torch

    from cachestore.loading.latents import noise_seed

    model = tiny("sdxl-inpaint")
    report, data = encoded(painted, model, tmp_path / "store", **PAINTING)
    assert report.not_made_here == ()
    with torch.inference_mode():
        for number in range(3):
            mask, posterior = inpainting(model.pipeline, painted.parent, number)
            name = f"{number}.png"
            sample = data[data.index(name)]
            assert torch.equal(sample["mask"], mask)
            generator = torch.Generator().manual_seed(noise_seed(0, 0, f"{name}/masked_image_latents"))
            noise = torch.randn(posterior.mean.shape[1:], generator=generator)
            expected = model.pipeline.vae.config.scaling_factor * (posterior.mean + posterior.std * noise)[0]
            torch.testing.assert_close(sample["masked_image_latents"], expected, rtol=1e-5, atol=1e-6)
