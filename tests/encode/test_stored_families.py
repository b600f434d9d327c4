"""A family's entries through a store: precomputed, read as a trainer reads them."""

import json
import os
import shutil
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import cachestore as cs
from cachestore.cli.terminal.lines import training_lines
from cachestore.core.errors import BadInput
from tests.encode import tiny

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore::FutureWarning:diffusers")]


def test_entries_without_rows_and_of_one_frame_come_back_as_a_batch(built, tmp_path):
    """HunyuanVideo 1.5 keeps no row of a caption that quotes nothing, and latents with an axis of frames."""
    data = tmp_path / "data"
    data.mkdir()
    for name, caption in (("a", "a cat"), ("b", 'a longer caption with a "SIGN" on it')):
        Image.new("RGB", (64, 64), (200, 30, len(caption))).save(data / f"{name}.png")
        (data / f"{name}.txt").write_text(caption)
    store = tmp_path / "store"
    report = cs.precompute(str(data), model=str(built("hunyuanvideo15").folder), store=str(store), resolution=64, inline=True)
    assert (report.complete, report.encoded, report.failed) == (True, 5, 0)
    dataset = cs.CachedDataset(str(store), latents="mean")
    batch = dataset.collate([dataset[0], dataset[1]])
    assert batch["latents"].shape == (2, 4, 1, 16, 16)
    assert batch["prompt_embeds"].shape[1] == batch["prompt_embeds_mask"].sum(dim=1).max()
    assert batch["prompt_embeds_2"].shape == (2, 256, 32)
    assert batch["prompt_embeds_mask_2"].any(dim=1).tolist() == [False, True]
    assert dataset.mask_name == "prompt_embeds_mask"
    assert dataset.prompt("")["prompt_embeds_2"].shape == (1, 256, 32)


def test_one_text_encoder_of_several_comes_back_under_its_own_name_and_is_verified(built, tmp_path):
    (tmp_path / "prompts.txt").write_text("a cat\na dog\n")
    store, model = str(tmp_path / "store"), str(built("sdxl").folder)
    report = cs.precompute(str(tmp_path / "prompts.txt"), model=model, store=store, encode=("text_encoder_2",), inline=True)
    assert (report.complete, report.encoded) == (True, 3)
    dataset = cs.CachedDataset(store)
    batch = dataset.collate([dataset[0], dataset[1]])
    assert batch["prompt_embeds.text_encoder_2"].shape[:2] == (2, 77)
    assert batch["pooled_prompt_embeds"].shape[0] == 2
    assert "prompt_embeds" not in batch
    assert "prompt_embeds.text_encoder_2" in "\n".join(training_lines(report))
    assert cs.verify(store, recompute=3).ok
    again = cs.precompute(str(tmp_path / "prompts.txt"), model=model, store=store, encode=("text_encoder_2",), inline=True)
    assert (again.encoded, again.reused) == (0, 3)


@pytest.fixture
def kontext(built, tmp_path):
    """FLUX.1 Kontext: FLUX.1's modules under the other pipeline's name."""
    tiny.of_diffusers("FluxKontextPipeline")
    folder = shutil.copytree(built("flux").folder, tmp_path / "kontext")
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps({**index, "_class_name": "FluxKontextPipeline"}))
    return folder


def test_kontexts_control_images_come_as_its_pipeline_shows_them_to_the_denoiser(kontext, built, tmp_path):
    import diffusers

    pixels = {name: np.random.default_rng(seed).integers(0, 256, (64, 64, 3), np.uint8) for seed, name in enumerate("abcd")}
    for name, one in pixels.items():
        Image.fromarray(one).save(tmp_path / f"{name}.png")
    # The second sample edits what the first one is to become: one picture in two roles, encoded once.
    rows = [{"image": "a.png", "control": "b.png", "caption": "wider"}, {"image": "c.png", "control": "a.png", "caption": "redder"}]
    (tmp_path / "edits.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    store = tmp_path / "store"
    report = cs.precompute(
        tmp_path / "edits.jsonl", model=kontext, store=store, resolution=64, inline=True, vae_dtype="float32", text_dtype="float32"
    )
    assert (report.complete, report.wanted, report.encoded, report.reused) == (True, 7, 6, 1)
    data = cs.CachedDataset(store)
    batch = data.collate([data[0], data[1]])
    assert batch["control_latents"].shape == batch["latents"].shape == (2, 16, 32, 32)
    parts = built("flux").pipeline.components
    pipeline = diffusers.FluxKontextPipeline(**{name: parts[name] for name in parts if name not in ("image_encoder", "feature_extractor")})
    shown = torch.stack([pipeline.image_processor.preprocess(Image.fromarray(pixels[name]))[0] for name in "ba"])
    with torch.inference_mode():
        expected = pipeline._encode_vae_image(shown, torch.Generator())
    torch.testing.assert_close(batch["control_latents"], expected, rtol=1e-4, atol=1e-5)
    assert cs.verify(store, recompute=10).ok

    small: dict[str, Any] = {"_auto_resize": False, "max_area": 64 * 64}  # it would make everything a megapixel

    def run(**given):
        options: dict[str, Any] = {"height": 64, "width": 64, "num_inference_steps": 2, "output_type": "latent", "guidance_scale": 1.0}
        with torch.inference_mode():
            return pipeline(**options, **given, **small, generator=torch.Generator().manual_seed(0))[0]

    pipeline.set_progress_bar_config(disable=True)
    prompts = {name: batch[name][1:] for name in ("prompt_embeds", "pooled_prompt_embeds")}
    own, stored, other = (
        run(image=Image.fromarray(pixels["a"]), prompt=["redder"]),
        run(image=batch["control_latents"][1:], **prompts),
        run(image=batch["control_latents"][:1], **prompts),
    )
    assert (stored - own).norm() <= min(1e-5, float((other - own).norm()) / 100)


@pytest.fixture
def edits(tmp_path):
    """A manifest of two edits, with pictures of small sides; the first is shown two pictures."""
    for seed, name in enumerate("abcd"):
        save_picture(tmp_path / f"{name}.png", seed)
    rows = [
        {"image": "a.png", "control": ["b.png", "d.png"], "caption": "wider"},
        {"image": "c.png", "control": ["b.png"], "caption": "wider"},
    ]
    (tmp_path / "edits.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "edits.jsonl"


def save_picture(path, seed):
    """A file that was modified long ago."""
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (64, 64, 3), np.uint8)).save(path)
    os.utime(path, (seed, seed))


def test_text_that_saw_pictures_is_paired_with_them_made_anew_with_them_and_verified(edit_built, edits, tmp_path):
    store, model = str(tmp_path / "store"), str(edit_built("QwenImageEditPlusPipeline").folder)
    options: dict[str, Any] = {"model": model, "store": store, "resolution": 64, "inline": True, "text_dtype": "float32"}
    report = cs.precompute(str(edits), **options)
    assert (report.complete, report.wanted, report.encoded) == (True, 6, 6)  # two texts, no empty caption; two pictures in each role
    data = cs.CachedDataset(store, latents="mean")
    batch = data.collate([data[0], data[1]])
    assert batch["prompt_embeds"].shape[:2] == batch["prompt_embeds_mask"].shape
    first, second = batch["prompt_embeds_mask"].sum(dim=1).tolist()
    assert first > second, "two pictures take more rows than one"
    assert data.mask_name == "prompt_embeds_mask"
    with pytest.raises(BadInput):
        data.prompt("")
    with pytest.raises(BadInput):
        cs.CachedDataset(store, captions=cs.CaptionPolicy(dropout=0.1))
    assert cs.verify(store, recompute=6).ok
    assert cs.precompute(str(edits), **options).encoded == 0
    save_picture(edits.parent / "d.png", 9)
    again = cs.precompute(str(edits), **options)
    assert (again.complete, again.encoded) == (True, 2)  # the first sample's text, and the picture's latents
    newer = cs.CachedDataset(store, latents="mean")
    assert not newer[0]["prompt_embeds"].equal(data[0]["prompt_embeds"])
    assert newer[1]["prompt_embeds"].equal(data[1]["prompt_embeds"])


def test_empty_captions_beside_the_same_pictures_are_a_data_set_of_their_own(edit_built, edits, tmp_path):
    rows = [json.loads(line) | {"caption": ""} for line in edits.read_text().splitlines()]
    (tmp_path / "empty.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    store, model = str(tmp_path / "store"), str(edit_built("QwenImageEditPlusPipeline").folder)
    for source, name in ((edits, "train"), (tmp_path / "empty.jsonl", "empty")):
        report = cs.precompute(str(source), model=model, store=store, name=name, encode=("text",), inline=True)
        assert (report.complete, report.encoded) == (True, 2)
    data, empty = cs.CachedDataset(store), cs.CachedDataset(store, "empty")
    assert data.ids == empty.ids
    assert empty[0]["prompt_embeds"].shape[0] < data[0]["prompt_embeds"].shape[0]
