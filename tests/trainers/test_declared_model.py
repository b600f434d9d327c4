"""Verify with recompute on imported values: whether they are what they were claimed to be."""

import json
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

import cachestore as cs
from cachestore.cli import DAMAGE, main
from cachestore.core.errors import BadInput, RecipeMismatch
from cachestore.core.keys import Recipe, digest_text
from cachestore.encode.batching.unit import Prepared, Resolved
from cachestore.jobs.start.declared_model import DeclaredEncoder
from tests.encode import tiny_families
from tests.fakes import asks_for, tells_of
from tests.trainers import trainers
from tests.trainers.ai_toolkit.files import aitk_paths, write_ai_toolkit
from tests.trainers.caches import bring
from tests.trainers.sd_scripts.files import write_sd_scripts
from tests.trainers.trainers import PICTURES

pytestmark = pytest.mark.torch


class TextModel:
    """Makes of a caption what `trainers` says the family's encoders make, in bfloat16."""

    window = 4
    names: Any = None

    def __init__(self, model):
        self.recipe = Recipe("text", {"kind": "text", "model": model, "pipeline": "FluxPipeline", "files": {}})

    def resolve(self, request, _read):
        digest = digest_text(request["caption"])
        return Resolved(cs.key(digest), request["caption"], {"caption": digest}, {"input_digest": digest})

    def prepare(self, resolved):
        return Prepared(resolved.item, None)

    def batch_limit(self, _group):
        return 4

    def submit(self, batch):
        made = {key: trainers.text_of(caption, "flux", torch.bfloat16) for key, caption in batch}
        return lambda: {key: {"prompt_embeds": one["prompt"], "pooled_prompt_embeds": one["pooled"]} for key, one in made.items()}

    def close(self):
        pass


class Vae(TextModel):
    """Makes moments whose mean is what `trainers` says, as the raw VAE would, a tenth off as by another resizer."""

    def __init__(self, model):
        read = {"format": 1, "stored": "moments", "channels": 16, "spatial_factor": 8, "temporal_factor": 1, "patchify": 1}
        read |= {"scaling_factor": 0.3611, "shift_factor": 0.1159, "latents_mean": None, "latents_std": None}
        self.recipe = Recipe("latents", {"kind": "latents", "model": model, "files": {}}, read)

    def prepare(self, resolved):
        return Prepared((resolved.item.data, resolved.item.bucket), resolved.item.bucket)

    def submit(self, batch):
        return lambda: {key: {"moments": self.moments(data)} for key, (data, _bucket) in batch}

    def moments(self, data):
        latents = trainers.latents_of(self.names[data], "flux") / 0.3611 + 0.1159
        off = 0.1 * trainers.noise("off", shape=latents.shape)
        return torch.cat([latents + off, torch.full_like(latents, -12.0)])


@pytest.fixture
def models(data, monkeypatch, torch_files_read_here):
    """The models behind `--model`, by name; loading one takes nothing."""
    pictures = {(data / picture.reference).read_bytes(): picture for picture in PICTURES}

    def encoders_of(request, _known, **_rise):
        made = {"text": TextModel, "latents": Vae}[request.encode[0]](request.model)
        if request.encode[0] == "latents":
            made.names = pictures
        return (made,)

    monkeypatch.setattr("cachestore.jobs.plan.encoders.encoders_of", encoders_of)
    monkeypatch.setattr("cachestore.jobs.start.declared_model.encoders_of", encoders_of)


def test_what_the_declared_model_makes_matches_the_import(tmp_path, data, models):
    write_ai_toolkit(data, "flux")
    bring("ai-toolkit", data, tmp_path / "store", data, claims=None, model="right")
    assert cs.CachedDataset(tmp_path / "store").recipes["text"].make["claimed"]["recipe"]["model"] == "right"
    report = cs.verify(tmp_path / "store", recompute=10)
    assert (report.ok, report.recomputed["chosen"], report.recomputed["equal"]) == (True, 6, 6)


def test_latents_of_another_picture_and_text_of_another_caption_are_wrong_values(tmp_path, data, models, capsys):
    write_ai_toolkit(data, "flux")
    one, two = (aitk_paths(data, picture, "flux") for picture in PICTURES[:2])
    save_file({"latent": trainers.noise("other", shape=(16, 6, 8))}, one[0])
    two[1].write_bytes(one[1].read_bytes())
    bring("ai-toolkit", data, tmp_path / "store", data, claims=None, model="right")
    assert main(["verify", str(tmp_path / "store"), "--recompute", "10", "--json"]) == DAMAGE
    found = json.loads(capsys.readouterr().out)["findings"]
    assert {(one["kind"], one["sample"]) for one in found} == {("wrong-value", "a/one.png"), ("wrong-value", "two.png")}
    assert any("from what the declared VAE makes" in one["message"] for one in found)
    assert all("not from the declared model" in one["message"] for one in found)


def test_a_model_that_is_not_the_declared_one_is_refused_before_anything_is_encoded(tmp_path, data, models):
    write_ai_toolkit(data, "flux")
    bring("ai-toolkit", data, tmp_path / "store", data, claims=None, model="right")
    with pytest.raises(RecipeMismatch, check=asks_for("model", "wrong", "declared")):
        cs.verify(tmp_path / "store", recompute=1, model="wrong")


def test_what_was_imported_on_a_users_word_can_be_held_against_a_model_named_later(tmp_path, data, models):
    write_sd_scripts(data, "flux")
    bring("sd-scripts", data, tmp_path / "store", data)
    with pytest.raises(cs.BadInput, check=asks_for("recompute", "none of 6")):
        cs.verify(tmp_path / "store", recompute=10)
    assert cs.verify(tmp_path / "store", recompute=10, model="right").recomputed["equal"] == 6


@pytest.mark.parametrize(
    ("facts", "crop"),
    [
        ({"resized": [84, 55], "crop": [12, 3, 76, 51]}, (12, 3, 76, 51)),
        ({}, (0, 1, 64, 49)),
        ({"resized": [84, 55]}, (0, 1, 64, 49)),
        ({"resized": [84, 55], "crop": [30, 3, 94, 51]}, (0, 1, 64, 49)),
        ({"resized": [84, 55], "crop": [0, 0, 84, 55]}, (0, 1, 64, 49)),
    ],
)
def test_a_picture_is_made_again_from_the_crop_that_its_cache_told_and_else_from_the_centre(data, facts, crop):
    vae: Any = Vae("right")
    declared: Any = DeclaredEncoder(vae, Recipe("latents", {}))
    request = {"key": "0" * 32, "image": "a/one.png", "role": "image", "bucket": [64, 48], **facts}
    variant = declared.resolve(request, lambda reference: (data / reference).read_bytes()).item.variant
    assert (variant.bucket, variant.box.crop) == ((64, 48), crop)


def test_a_model_that_cannot_be_found_is_an_error_and_no_empty_claim(tmp_path, data):
    write_sd_scripts(data, "flux")
    with pytest.raises(BadInput, check=tells_of(tmp_path / "nowhere")):
        bring("sd-scripts", data, tmp_path / "store", data, claims=None, model=tmp_path / "nowhere")


def test_latents_of_another_size_than_the_catalog_says_are_wrong(tmp_path, data, models):
    write_ai_toolkit(data, "flux")
    bring("ai-toolkit", data, tmp_path / "store", data, claims=None, model="right", encode=["latents"])
    before = Vae.moments
    try:
        Vae.moments = lambda self, data: before(self, data)[:, :-1]
        report = cs.verify(tmp_path / "store", recompute=10)
    finally:
        Vae.moments = before
    assert {finding.kind for finding in report.findings} == {"wrong-value"}
    assert "but the declared VAE makes" in report.findings[0].message


@pytest.mark.slow
def test_a_real_vae_recognises_its_own_latents_and_no_others(tmp_path):
    """A tiny FLUX: its latents, scaled and sampled as a trainer does, are imported with the model as the claim."""
    family, model = tiny_families.FAMILIES["flux"], tmp_path / "model"
    pipeline = family.build()
    with torch.no_grad():  # as little noise, and as much of the picture, as in trained ones
        last = pipeline.vae.encoder.conv_out
        channels = len(last.bias) // 2
        last.bias[:channels], last.bias[channels:] = 0.0, -8.0
        last.weight[:channels] *= 10
    tiny_families.save(family, pipeline, model)
    data = tmp_path / "data"
    data.mkdir()
    for number in range(4):
        pixels = np.random.default_rng(number).integers(0, 256, (64, 64, 3), np.uint8)
        Image.fromarray(pixels).save(data / f"{number}.png")
        (data / f"{number}.txt").write_text("a caption")
    cs.precompute(data, model=model, store=tmp_path / "ours", resolution=64, encode=("latents",), inline=True)
    cs.export_cache(tmp_path / "ours", format="simpletuner", folder=tmp_path / "cache", family="flux")
    vae = tmp_path / "cache" / "vae"
    names = sorted(vae.iterdir())
    swapped = names[0].read_bytes()
    names[0].write_bytes(names[1].read_bytes())
    names[1].write_bytes(swapped)
    bring("simpletuner", vae, tmp_path / "theirs", data, claims=None, model=model, family="flux", encode=["latents"])
    report = cs.verify(tmp_path / "theirs", recompute=4)
    assert (report.recomputed["equal"], report.recomputed["wrong"]) == (2, 2)
