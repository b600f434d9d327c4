"""Text encoders that see pictures beside a caption: Qwen-Image-Edit, against its own pipeline with transformers' own processor."""

import hashlib
import json
import shutil
from io import BytesIO
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from cachestore.core.errors import BadInput, EncodeFailed
from cachestore.encode.models.loaded import read_loaded
from cachestore.encode.models.modules import load_processor
from cachestore.encode.pictures import images
from tests.encode import tiny
from tests.encode.encoders import Files, encoder_of

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore::FutureWarning:diffusers")]

EDIT, PLUS = "QwenImageEditPipeline", "QwenImageEditPlusPipeline"
SHOWN = {EDIT: ["wide.png"], PLUS: ["wide.png", "tall.png"]}
CAPTION = "make it <|im_end|> redder"


def picture(seed, width, height):
    file = BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)).save(file, "PNG")
    return file.getvalue()


FILES = Files({"wide.png": picture(1, 90, 50), "tall.png": picture(2, 33, 71), "other.png": picture(3, 90, 50)})


class Reached(Exception):
    """The pipeline has what it wants to know of the text."""


def own(pipeline, monkeypatch, caption, references):
    """The embeddings and mask that `__call__` itself makes of a caption and pictures, before it does anything with them."""
    encode_prompt, made = pipeline.encode_prompt, []

    def listening(**options):
        made.extend(encode_prompt(**options))
        raise Reached

    monkeypatch.setattr(pipeline, "encode_prompt", listening)
    opened = [Image.open(BytesIO(FILES[reference])) for reference in references]
    with pytest.raises(Reached):
        pipeline(image=opened if len(opened) > 1 else opened[0], prompt=caption, num_inference_steps=1)
    return made


def request(caption, references):
    return {"caption": caption, "images": {"control": references}}


def entry_of(encoder, caption, references):
    resolved = encoder.resolve(request(caption, references), FILES)
    prepared = encoder.prepare(resolved)
    return encoder.submit([(resolved.key, prepared.payload)])()[resolved.key], prepared


@pytest.mark.parametrize("caption", ["", CAPTION])
@pytest.mark.parametrize("pipeline", [EDIT, PLUS])
def test_stored_embeddings_are_those_that_call_makes(edit_built, digest, monkeypatch, record_property, pipeline, caption):
    model = edit_built(pipeline)
    encoder = encoder_of(model, digest, "text")
    entry, prepared = entry_of(encoder, caption, SHOWN[pipeline])
    embeds, mask = own(model.pipeline, monkeypatch, caption, SHOWN[pipeline])
    assert mask is None, "a single caption has no padding"
    found, expected = entry["prompt_embeds"].double(), embeds[0].double()
    assert found.shape == expected.shape
    record_property("apart", float((found - expected).norm() / expected.norm()))
    assert (found - expected).norm() <= 1e-6 * expected.norm()
    assert prepared.facts == {"tokens": len(found), "truncated": False}
    others = [*SHOWN[pipeline][:-1], "other.png"]
    shown_another = entry_of(encoder, caption, others)[0]["prompt_embeds"].double()
    assert (shown_another[-5:] - found[-5:]).norm() > 1e-3 * found[-5:].norm(), "the pictures make no difference to this tiny encoder"
    encoder.close()


def test_the_pipeline_with_stored_embeddings_ends_as_with_the_caption(edit_built, digest, monkeypatch, record_property):
    import importlib

    tiny.of_diffusers("QwenImageEditPlusPipeline")
    # Else each picture that the denoiser sees has a megapixel.
    monkeypatch.setattr(importlib.import_module("diffusers.pipelines.qwenimage.pipeline_qwenimage_edit_plus"), "VAE_IMAGE_SIZE", 64 * 64)
    model = edit_built(PLUS)
    encoder = encoder_of(model, digest, "text")
    shown = [Image.open(BytesIO(FILES[name])) for name in SHOWN[PLUS]]

    def run(**given):
        options: dict[str, Any] = {"height": 64, "width": 64, "num_inference_steps": 2, "output_type": "latent"}
        with torch.inference_mode():
            return model.pipeline(image=shown, **options, **given, generator=torch.Generator().manual_seed(0))[0]

    expected = run(prompt=CAPTION)
    stored, _ = entry_of(encoder, CAPTION, SHOWN[PLUS])
    other, _ = entry_of(encoder, CAPTION, ["tall.png", "wide.png"])
    found = run(prompt_embeds=stored["prompt_embeds"][None])
    effect = run(prompt_embeds=other["prompt_embeds"][None])
    assert (effect - expected).norm() > 1e-5 * expected.norm(), "the order of the pictures makes no difference to this tiny denoiser"
    record_property("apart", float((found - expected).norm() / expected.norm()))
    assert (found - expected).norm() <= min(1e-5 * expected.norm(), (effect - expected).norm() / 100)


@pytest.mark.parametrize("pipeline", [EDIT, PLUS])
def test_the_pipelines_cut_no_caption_whatever_length_they_are_given(edit_built, pipeline):
    model = edit_built(pipeline).pipeline
    shown = images.fit_area(images.decode(FILES["wide.png"]), 64 * 64, 32)
    short, long = (model.encode_prompt(["x" * 40], image=shown, max_sequence_length=length)[0] for length in (1, 1024))
    assert short.shape == long.shape


@pytest.mark.parametrize("references", [["wide.png"], ["wide.png", "tall.png"]])
def test_texts_and_pictures_are_read_as_by_transformers_own_processor(edit_built, digest, references):
    model = edit_built(PLUS)
    ours = load_processor(encoder_of(model, digest, "text").setup.components["processor"])
    shown = [images.fit_area(images.decode(FILES[name]), 384 * 384, 32) for name in references]
    text = "a" + "<|vision_start|><|image_pad|><|vision_end|>" * len(shown) + "b"
    options: dict[str, Any] = {"padding": True, "return_tensors": "pt"}
    found, expected = ours(text=[text], images=shown, **options), model.pipeline.processor(text=[text], images=shown, **options)
    assert set(found) == {"input_ids", "attention_mask", "pixel_values", "image_grid_thw"} <= set(expected)
    assert all(found[name].equal(expected[name]) for name in found)
    assert ours.count(text, shown) == found["input_ids"].shape[1]


def test_a_processor_as_transformers_5_saves_it_is_read_too(edit_built, digest, tmp_path):
    folder = shutil.copytree(edit_built(EDIT).folder, tmp_path / "model")
    settings = json.loads((folder / "processor/preprocessor_config.json").read_text()) | {"merge_size": 4}
    (folder / "processor/preprocessor_config.json").unlink()
    (folder / "processor/processor_config.json").write_text(
        json.dumps({"image_processor": settings, "processor_class": "Qwen2VLProcessor"})
    )
    encoder = encoder_of(type(edit_built(EDIT))(folder, None, edit_built(EDIT).family), digest, "text")
    assert load_processor(encoder.setup.components["processor"]).image_processor.merge_size == 4
    assert encoder.image_tokens == 1024 * 1024 // 56**2
    assert "processor/processor_config.json" in encoder.recipe.make["files"]


def test_a_text_without_a_picture_is_read_by_the_tokenizer_alone(edit_built, digest):
    ours = load_processor(encoder_of(edit_built(EDIT), digest, "text").setup.components["processor"])
    assert set(ours(text=["a cat"])) == {"input_ids", "attention_mask"}
    assert ours.count("a cat", []) == 5


@pytest.mark.parametrize("size", [(90, 50), (33, 71), (1024, 1024), (1, 1), (3000, 7)])
def test_pictures_have_the_sides_that_the_pipelines_compute(size):
    tiny.of_diffusers("QwenImageEditPlusPipeline")
    from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit_plus import calculate_dimensions

    for area in (384 * 384, 1024 * 1024):
        sides = calculate_dimensions(area, size[0] / size[1])
        if min(sides) > 0:
            assert images.fit_area(Image.new("RGB", size), area, 32).size == sides


def test_a_picture_too_narrow_to_be_shown_is_refused():
    with pytest.raises(EncodeFailed):
        images.fit_area(Image.new("RGB", (5000, 1)), 384 * 384, 32)


def test_the_key_is_of_the_caption_and_of_each_picture_in_order(edit_built, digest):
    encoder = encoder_of(edit_built(PLUS), digest, "text")

    def key(caption, *references):
        return encoder.resolve(request(caption, list(references)), FILES).key

    keys = {
        key("a", "wide.png"),
        key("b", "wide.png"),
        key("a", "tall.png"),
        key("a", "wide.png", "tall.png"),
        key("a", "tall.png", "wide.png"),
    }
    assert len(keys) == 5
    resolved = encoder.resolve(request("a", ["wide.png", "tall.png"]), FILES)
    sha = {name: hashlib.sha256(content).hexdigest() for name, content in FILES.items()}
    named = {"caption": hashlib.sha256(b"a").hexdigest(), "control": sha["wide.png"], "control.2": sha["tall.png"]}
    assert resolved.inputs == resolved.meta["input_digest"] == named
    assert list(resolved.inputs) == list(named)


@pytest.mark.parametrize(
    ("pipeline", "count", "message"),
    [(EDIT, 0, "exactly one control image beside a caption, but this sample has 0"), (EDIT, 2, "sample has 2"), (PLUS, 0, "at least one")],
)
def test_another_number_of_pictures_than_the_pipeline_shows_fails_before_they_are_read(edit_built, digest, pipeline, count, message):
    encoder = encoder_of(edit_built(pipeline), digest, "text")
    with pytest.raises(EncodeFailed, match=message):
        encoder.resolve(request("a", ["gone.png"] * count), FILES)


def test_a_file_that_is_no_picture_fails(edit_built, digest):
    encoder = encoder_of(edit_built(EDIT), digest, "text")
    with pytest.raises(EncodeFailed):
        encoder.prepare(encoder.resolve(request("a", ["a.png"]), Files({"a.png": b"no picture"})))


def test_such_captions_are_encoded_one_by_one_and_few_wait(edit_built, digest):
    encoder = encoder_of(edit_built(EDIT), digest, "text", batch_size=8)
    resolved = [encoder.resolve(request("a", [name]), FILES) for name in ("wide.png", "tall.png")]
    assert {encoder.batch_limit(encoder.prepare(one).group) for one in resolved} == {1}
    assert encoder.window < 32


def test_a_forecast_counts_the_caption_and_knows_about_how_much_a_picture_adds(edit_built, digest):
    encoder = encoder_of(edit_built(EDIT), digest, "text")
    [tokens] = encoder.count_tokens(["a cat"])
    counted = encoder.prepare(encoder.resolve(request("a cat", ["wide.png"]), FILES)).facts["tokens"]
    assert abs(tokens + encoder.image_tokens - counted) < 0.1 * counted
    assert encoder.entry_bytes(counted) == counted * 32 * 4


def test_the_recipe_says_which_pictures_are_shown_and_how_and_digests_the_processor(edit_built, digest):
    recipes = {name: encoder_of(edit_built(name), digest, "text").recipe for name in (EDIT, PLUS)}
    assert recipes[EDIT].make["pictures"]["role"] == "control"
    assert [recipes[name].make["pictures"]["transform"]["area"] for name in (EDIT, PLUS)] == [1024 * 1024, 384 * 384]
    files = set(recipes[EDIT].make["files"])
    assert {"processor/preprocessor_config.json", "processor/tokenizer_config.json", "text_encoder/config.json"} <= files
    assert not any(name.startswith(("tokenizer/", "vae/", "transformer/")) for name in files)


def test_a_processor_without_its_settings_or_of_an_unknown_class_is_refused(edit_built, digest, tmp_path):
    folder = shutil.copytree(edit_built(EDIT).folder, tmp_path / "model")
    model = type(edit_built(EDIT))(folder, None, edit_built(EDIT).family)
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps({**index, "processor": ["transformers", "NoProcessor"]}))
    encoder = encoder_of(model, digest, "text")
    with pytest.raises(BadInput):
        encoder.prepare(encoder.resolve(request("a", ["wide.png"]), FILES))
    (folder / "processor/preprocessor_config.json").unlink()
    (folder / "processor/processor_config.json").unlink(missing_ok=True)
    with pytest.raises(BadInput):
        encoder_of(model, digest, "text")


def test_a_processor_in_memory_is_refused_with_what_to_do(edit_built, digest):
    with pytest.raises(BadInput):
        read_loaded(edit_built(EDIT).pipeline).component("processor")
