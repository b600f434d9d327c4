"""A model in memory: used as it is, told by what it holds, and left as it was."""

import gc
import os
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from PIL import Image

import cachestore as cs
from cachestore.core.errors import BadInput
from cachestore.encode.models import loaded
from cachestore.encode.models.loaded import read_loaded
from cachestore.encode.recipes import ModelRequest, encoders_for
from tests.encode import encoders, tiny, tiny_families
from tests.encode.encoders import batch_for

pytestmark = pytest.mark.torch

CAPTIONS = ["", "a cat", "a dog in the rain"]


def made_of(model, encode, **options) -> Any:
    return encoders_for(ModelRequest("", encode=[encode], loaded=read_loaded(model), **options), no_file)[0]


def no_file(path) -> str:
    raise AssertionError(path)


def of_folder(folder, digest, encode, **options) -> Any:
    dtypes: dict[str, Any] = {"text_dtype": "float32", "vae_dtype": "float32"}
    return encoders_for(ModelRequest(str(folder), encode=[encode], device="cpu", **dtypes, **options), digest)[0]


def entries(encoder):
    batch = batch_for(encoder, CAPTIONS)
    groups = [batch] if len({type(payload) for _, payload in batch}) == 1 and isinstance(batch[0][1], str) else [[one] for one in batch]
    return [entry for group in groups for entry in encoder.submit(group)().values()]


def latents(encoder):
    return list(encoders.latents(encoder).values())


def assert_equal(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert set(one) == set(other)
        assert {name: tensor.equal(other[name]) for name, tensor in one.items()} == dict.fromkeys(one, True)


def pipeline_of(folder):
    """A pipeline of one's own, loaded without its denoiser."""
    load = tiny.library("diffusers").StableDiffusionXLPipeline.from_pretrained
    return tiny.without_denoiser(partial(load, folder, local_files_only=True))


def test_nothing_and_what_is_no_model_are_refused():
    for model in (None, 5, torch.nn.Linear(2, 2)):
        with pytest.raises(BadInput):
            read_loaded(model)
    with pytest.raises(BadInput):
        made_of({}, "text")


@pytest.mark.parametrize("name", ["sd15", "sdxl", "flux"])
def test_a_pipeline_makes_what_its_folder_makes(tiny_model, digest, name):
    model = tiny_model(name)
    assert_equal(entries(made_of(model.pipeline, "text")), entries(of_folder(model.folder, digest, "text")))
    found, expected = made_of(model.pipeline, "latents"), of_folder(model.folder, digest, "latents")
    assert_equal(latents(found), latents(expected))
    assert found.recipe.read == expected.recipe.read


def test_a_vae_that_its_weights_normalise_is_read_like_its_folder(built, digest):
    model = built("flux2klein")
    found, expected = made_of(model.pipeline, "latents"), of_folder(model.folder, digest, "latents")
    assert found.recipe.read["latents_std"] == pytest.approx(expected.recipe.read["latents_std"])
    assert found.recipe.read["latents_mean"] == pytest.approx(expected.recipe.read["latents_mean"])


def test_some_encoders_of_a_mapping_need_no_others(tiny_model, digest):
    pipeline = tiny_model("sdxl").pipeline
    mapping = {"_class_name": "StableDiffusionXLPipeline", "text_encoder_2": pipeline.text_encoder_2, "tokenizer_2": pipeline.tokenizer_2}
    expected = of_folder(tiny_model("sdxl").folder, digest, "text_encoder_2")
    assert_equal(entries(made_of(mapping, "text_encoder_2")), entries(expected))
    with pytest.raises(BadInput):
        made_of(mapping, "text")


def test_a_text_encoder_and_a_vae_may_stand_alone_and_several_must_say_of_what(plain_model, tiny_model, digest):
    folder, model, tokenizer = plain_model
    alone = {"text_encoder": model, "tokenizer": tokenizer, "vae": tiny_model("sd15").pipeline.vae}
    assert_equal(entries(made_of(alone, "text")), entries(of_folder(folder, digest, "text")))
    assert_equal(latents(made_of(alone, "latents")), latents(of_folder(tiny_model("sd15").folder, digest, "latents")))
    with pytest.raises(BadInput):
        made_of({**alone, "text_encoder_2": model}, "text")


def test_equal_weights_have_equal_keys_whatever_was_done_with_them_before(tiny_model):
    one, other = (pipeline_of(tiny_model("sdxl").folder) for _ in range(2))
    other.tokenizer(["a long caption"], padding="max_length", truncation=True)
    other.vae.to(memory_format=tiny.library("torch").channels_last)
    other.text_encoder.train().requires_grad_(requires_grad=False)
    for encode in ("text", "latents"):
        assert made_of(one, encode).recipe == made_of(other, encode).recipe


def test_other_weights_dtypes_settings_and_tokenizers_have_other_keys(tiny_model):
    def changed(change):
        pipeline = pipeline_of(tiny_model("sdxl").folder)
        with torch.no_grad():
            change(pipeline)
        return made_of(pipeline, "text").recipe.fingerprint

    changes = [
        lambda pipeline: None,
        lambda pipeline: next(pipeline.text_encoder_2.parameters())[0].add_(1e-3),
        lambda pipeline: pipeline.text_encoder.to(torch.bfloat16) and pipeline.text_encoder_2.to(torch.bfloat16),
        lambda pipeline: setattr(pipeline.text_encoder.config, "hidden_act", "gelu"),
        lambda pipeline: pipeline.tokenizer.add_tokens(["<new>"]),
    ]
    assert len({changed(change) for change in changes}) == len(changes)


def test_a_digest_is_of_all_bytes_in_blocks(monkeypatch):
    module = torch.nn.Linear(50, 3)
    whole = loaded.digest_state("x", module)
    monkeypatch.setattr(loaded, "BLOCK_NUMBERS", 7)
    assert loaded.digest_state("x", module) == whole
    with torch.no_grad():
        module.weight[-1, -1] += 1
    assert loaded.digest_state("x", module) != whole
    assert len(loaded.digest_state("x", torch.nn.Identity())) == 64


def test_what_cannot_be_told_by_its_weights_is_refused(tiny_model):
    def mapping(**parts):
        return {"tokenizer": tiny_model("sd15").pipeline.tokenizer, **parts}

    with torch.device("meta"):
        nowhere = tiny.clip_text()
    with pytest.raises(BadInput):
        made_of(mapping(text_encoder=nowhere), "text")
    adapted = tiny.clip_text()
    adapted.extra = type("LoraLayer", (torch.nn.Module,), {"__module__": "peft.tuners.lora"})()
    with pytest.raises(BadInput):
        made_of(mapping(text_encoder=adapted), "text")
    with pytest.raises(BadInput):
        made_of(mapping(text_encoder=torch.nn.DataParallel(tiny.clip_text())), "text")


def test_options_that_would_change_the_model_are_refused(tiny_model):
    pipeline = tiny_model("sdxl").pipeline
    refused: list[tuple[dict[str, Any], str]] = [
        ({"text_dtype": "bfloat16"}, "the loaded modules are float32"),
        ({"device": "cuda"}, "the loaded modules are on cpu"),
        ({"text_encoder": "/some/path", "vae": "/other"}, "vae, text_encoder cannot be given with a loaded model"),
        ({"variant": "fp16"}, "variant cannot be given"),
    ]
    for options, message in refused:
        with pytest.raises(BadInput, match=message):
            made_of(pipeline, "text", **options)
    mixed = pipeline_of(tiny_model("sdxl").folder)
    mixed.text_encoder_2.to(tiny.library("torch").bfloat16)
    with pytest.raises(BadInput):
        made_of(mixed, "text")


# Through a store


@pytest.fixture
def data(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    for number, caption in enumerate(CAPTIONS[1:]):
        Image.new("RGB", (64, 64), (200, 30, 40 * number)).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(caption)
    return folder


def precompute(data, model, **options):
    return cs.precompute(data, model=model, store=data.parent / "store", resolution=64, **options)


def state_of(pipeline):
    parts = {name: part for name, part in pipeline.components.items() if hasattr(part, "parameters")}
    flags = {(name, inner): module.training for name, part in parts.items() for inner, module in part.named_modules()}
    weights = {
        (name, inner): (value.dtype, value.device, value.stride(), value.requires_grad, value.grad, value.double().sum().item())
        for name, part in parts.items()
        for inner, value in part.named_parameters()
    }
    return flags, weights, pipeline.vae.use_tiling, pipeline.vae.use_slicing, list(pipeline.text_encoder.state_dict())


def test_a_pipeline_fills_a_store_once_and_is_left_as_it_was_and_let_go(tiny_model, data):
    pipeline = pipeline_of(tiny_model("sdxl").folder)
    pipeline.text_encoder.train()
    next(module for name, module in pipeline.text_encoder.named_modules() if name.endswith("layers.0")).eval()
    pipeline.text_encoder_2.requires_grad_(requires_grad=False)
    pipeline.vae.train().enable_tiling()
    before, environment = state_of(pipeline), dict(os.environ)
    report = precompute(data, pipeline)
    assert (report.complete, report.encoded) == (True, 5)
    assert precompute(data, pipeline).encoded == 0
    assert state_of(pipeline) == before
    assert dict(os.environ) == environment
    pipeline.text_encoder(tiny.library("torch").zeros(1, 8, dtype=int)).last_hidden_state.sum().backward()
    batch = cs.CachedDataset(data.parent / "store").collate([cs.CachedDataset(data.parent / "store")[0]])
    assert batch["prompt_embeds"].shape[0] == batch["latents"].shape[0] == 1
    gone = weakref.ref(pipeline.text_encoder)
    del pipeline, before
    gc.collect()
    assert gone() is None


def test_a_pipeline_is_left_as_it_was_when_the_work_fails(tiny_model, data):
    pipeline = pipeline_of(tiny_model("sdxl").folder)
    pipeline.text_encoder.train()
    pipeline.vae.enable_tiling()
    before = state_of(pipeline)
    with pytest.raises(BadInput):
        precompute(data, pipeline, encode_args={"clip_skip": 99})
    assert state_of(pipeline) == before


@pytest.mark.parametrize("is_skipping", [False, True])
def test_training_mode_and_tiling_of_the_caller_change_no_value(tiny_model, data, is_skipping):
    args: Any = {"clip_skip": 1} if is_skipping else {}
    precompute(data, str(tiny_model("sd15").folder), encode_args=args, inline=True, name="folder", vae_dtype="float32")
    load = partial(tiny.library("diffusers").StableDiffusionPipeline.from_pretrained, tiny_model("sd15").folder, local_files_only=True)
    pipeline = tiny.without_denoiser(load, safety_checker=None, requires_safety_checker=False)
    pipeline.text_encoder.train()
    for module in pipeline.text_encoder.modules():
        if hasattr(module, "dropout") and isinstance(module.dropout, float):
            module.dropout = 0.5
    pipeline.vae.enable_tiling()
    pipeline.vae.tile_sample_min_size, pipeline.vae.tile_latent_min_size = 16, 8
    precompute(data, pipeline, encode_args=args)
    stored = [cs.CachedDataset(data.parent / "store", name=name, latents="mean") for name in ("folder", "train")]
    one, other = (dataset.collate([dataset[0], dataset[1]]) for dataset in stored)
    for name in ("prompt_embeds", "latents"):
        assert one[name].equal(other[name])


def test_what_was_made_by_a_model_in_memory_is_not_refilled_by_another(tiny_model, data):
    precompute(data, tiny_model("sd15").pipeline)
    for path in (data.parent / "store" / "segments").rglob("*.safetensors"):
        path.unlink()
    with pytest.raises(BadInput):
        cs.repair(data.parent / "store", refill=True)


@pytest.mark.parametrize("make", ["vae", "hunyuan_vae", "ltx_vae", "mochi_vae"])
def test_within_a_run_a_vae_has_tiles_and_slices_as_just_loaded_and_as_it_was_afterwards(make):
    given = getattr(tiny if make == "vae" else tiny_families, make)()
    names = [name for name in ("use_tiling", "use_slicing", "use_framewise_encoding", "use_framewise_decoding") if hasattr(given, name)]
    fresh = {name: getattr(given, name) for name in names}
    changed = {name: not value for name, value in fresh.items()}
    vars(given).update(changed)
    with read_loaded({"vae": given}).evaluating():
        assert {name: getattr(given, name) for name in names} == fresh
    assert {name: getattr(given, name) for name in names} == changed
