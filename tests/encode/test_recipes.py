"""From a request to encoders and recipes: what is in a fingerprint, what is not, and what is refused."""

import json
import subprocess
import sys
from typing import Any

import pytest

from cachestore.core.errors import BadInput, MissingExtra
from cachestore.encode import recipes
from cachestore.encode.families import text as text_families
from cachestore.encode.models.folders import MissingFile
from cachestore.encode.recipes import ModelRequest, encoders_for
from tests.encode import tiny
from tests.fakes import asks_for


def build(digest, model, **options) -> Any:
    return encoders_for(ModelRequest(model=str(model), **options), digest)


def fingerprints(digest, model, **options):
    return {encoder.recipe.encoder: encoder.recipe.fingerprint for encoder in build(digest, model, **options)}


def change_a_byte(path):
    data = bytearray(path.read_bytes() or b" ")
    data[-1] ^= 1
    path.write_bytes(data)


def test_asking_for_nothing_gives_no_encoder_and_opens_no_file(digest):
    assert build(digest, "/no/such/folder", encode=()) == ()


def test_a_cleaner_of_captions_that_is_missing_is_told_with_its_extra(monkeypatch):
    def without(name):
        if name == "ftfy":
            raise recipes.PackageNotFoundError(name)
        return "1"

    monkeypatch.setattr(recipes, "version", without)
    cleaned = next(family for family in text_families.TEXT_FAMILIES.values() if "ftfy" in family.cleaners)
    with pytest.raises(MissingExtra):
        recipes._versions(cleaned)


def test_text_comes_before_latents_whatever_the_order_asked(tmp_path, digest):
    tiny.look_alike(tmp_path)
    assert [encoder.recipe.encoder for encoder in build(digest, tmp_path, encode=("latents", "text"))] == ["text", "latents"]
    assert [encoder.recipe.encoder for encoder in build(digest, tmp_path, encode=["latents"])] == ["latents"]


def test_the_fingerprint_covers_every_file_that_is_loaded(tmp_path, digest):
    folder = tiny.look_alike(tmp_path)
    tiny.write(folder / "tokenizer/tokenizer_config.json", '{"model_max_length": 77} ')
    tiny.write(folder / "vae/config.json", (folder / "vae/config.json").read_text() + " ")
    tiny.write(folder / "text_encoder/config.json", (folder / "text_encoder/config.json").read_text() + " ")
    for path in [*folder.glob("vae/*"), *folder.glob("text_encoder/*"), *folder.glob("tokenizer/*")]:
        before, data = fingerprints(digest, folder), path.read_bytes()
        path.write_bytes(data[:-1] + b"\n" if path.suffix == ".json" and data.endswith(b" ") else data + b"\n")
        after = fingerprints(digest, folder)
        touched = "latents" if path.parent.name == "vae" else "text"
        assert {name for name in before if before[name] != after[name]} == {touched}, path


def test_the_denoiser_and_what_describes_the_model_are_not_in_the_fingerprint(tmp_path, digest):
    folder = tiny.look_alike(tmp_path)
    before = fingerprints(digest, folder)
    for name in ("unet/config.json", "unet/diffusion_pytorch_model.safetensors", "README.md"):
        change_a_byte(folder / name)
    (folder / "text_encoder" / "pytorch_model.bin").touch()
    assert fingerprints(digest, folder) == before
    assert not [path for path in digest.seen if "unet" in path.parts]


def test_no_digest_is_made_twice_and_none_of_other_files(tmp_path, digest):
    folder = tiny.look_alike(tmp_path)
    named = {folder / name for encoder in build(digest, folder) for name in encoder.recipe.make["files"]}
    assert sorted(digest.seen) == sorted(named)


def test_a_moved_model_has_the_same_fingerprint(tmp_path, digest):
    assert fingerprints(digest, tiny.look_alike(tmp_path / "a")) == fingerprints(digest, tiny.look_alike(tmp_path / "b" / "c"))


def test_no_path_is_in_a_recipe(tmp_path, digest):
    for encoder in build(digest, tiny.look_alike(tmp_path)):
        assert str(tmp_path) not in json.dumps(encoder.recipe.as_json())


@pytest.mark.parametrize(
    ("options", "changed"),
    [
        ({"text_dtype": "bfloat16"}, {"text"}),
        ({"vae_dtype": "bf16"}, {"latents"}),
        ({"latents": "mean"}, {"latents"}),
        ({"latents": "sample"}, {"latents"}),
        ({"encode_args": {"clip_skip": 2}}, {"text"}),
        ({"text_dtype": "float32", "vae_dtype": "fp32"}, set()),
        ({"device": "cpu", "batch_size": 3}, set()),
        ({"encode_args": {"clip_skip": None}}, set()),
    ],
)
def test_options_that_change_tensors_change_their_recipe_and_no_other(tmp_path, digest, options, changed):
    folder = tiny.look_alike(tmp_path)
    before, after = fingerprints(digest, folder), fingerprints(digest, folder, **options)
    assert {name for name in before if before[name] != after[name]} == changed


def test_a_vae_has_one_recipe_alone_in_its_pipeline_and_behind_an_option(tmp_path, digest):
    folder, text = tiny.look_alike(tmp_path / "model"), tiny.look_alike_text(tmp_path / "text")
    expected = fingerprints(digest, folder)["latents"]
    assert fingerprints(digest, folder / "vae", encode=["latents"])["latents"] == expected
    for vae in (folder / "vae", folder):
        assert fingerprints(digest, text, vae=str(vae))["latents"] == expected


def test_another_vae_replaces_the_models_own(tmp_path, digest):
    folder, other = tiny.look_alike(tmp_path / "model"), tiny.look_alike_vae(tmp_path / "vae", scaling_factor=0.5)
    assert build(digest, folder, vae=str(other), encode=["latents"])[0].recipe.read["scaling_factor"] == 0.5
    assert not [path for path in digest.seen if path.is_relative_to(folder)]


def test_a_vaes_dtype_follows_the_pipeline_it_comes_from_then_the_model(tmp_path, digest):
    flux, other = tiny.look_alike(tmp_path / "flux", "FluxPipeline"), tiny.look_alike_vae(tmp_path / "vae")
    text = tiny.look_alike_text(tmp_path / "text")
    dtypes = [
        build(digest, model, vae=str(vae), encode=["latents"])[0].recipe.make["dtype"]
        for model, vae in ((text, flux), (flux, other), (text, other))
    ]
    assert dtypes == ["bfloat16", "bfloat16", "float32"]


def test_what_an_option_lacks_is_not_looked_for_in_a_download_of_the_model(tmp_path, digest):
    folder, broken = tiny.look_alike(tmp_path / "model"), tiny.look_alike_vae(tmp_path / "vae")
    (broken / "diffusion_pytorch_model.safetensors").unlink()
    with pytest.raises(BadInput) as caught:
        build(digest, folder, vae=str(broken), encode=["latents"])
    assert not isinstance(caught.value, MissingFile)
    with pytest.raises(BadInput):
        build(digest, folder, text_encoder="clip_l.safetensors")


def test_options_for_what_is_not_encoded_are_passed_over(tmp_path, digest):
    folder = tiny.look_alike(tmp_path)
    expected = fingerprints(digest, folder, encode=["latents"])
    assert fingerprints(digest, folder, encode=["latents"], text_encoder="/no/such/folder", encode_args={"clip_skip": 1}) == expected
    assert list(fingerprints(digest, folder, encode=["text"], vae="/no/such/folder")) == ["text"]


def test_another_text_encoder_replaces_the_one_of_its_class(tmp_path, digest):
    folder = tiny.look_alike(tmp_path / "model")
    other = tmp_path / "tuned"
    tiny.write(other / "config.json", {"model_type": "clip_text_model", "architectures": ["CLIPTextModel"]})
    tiny.write(other / "model.safetensors", "other weights")
    encoder = build(digest, folder, text_encoder=str(other), encode=["text"])[0]
    assert other / "model.safetensors" in digest.seen
    assert folder / "text_encoder" / "model.safetensors" not in digest.seen
    assert "text_encoder/model.safetensors" in encoder.recipe.make["files"]
    tiny.write(other / "config.json", {"model_type": "clip_text_model", "architectures": ["CLIPModel"]})
    assert build(digest, folder, text_encoder=str(other), encode=["text"])
    tiny.look_alike_text(other)
    with pytest.raises(BadInput):
        build(digest, folder, text_encoder=str(other), encode=["text"])


def test_a_text_encoder_replaces_a_plain_one_whole(tmp_path, digest):
    one, two = tiny.look_alike_text(tmp_path / "one"), tiny.look_alike_text(tmp_path / "two")
    change_a_byte(two / "model.safetensors")
    replaced = fingerprints(digest, one, text_encoder=str(two), encode=["text"])
    assert replaced == fingerprints(digest, two, encode=["text"])


@pytest.mark.parametrize(
    ("options", "option"),
    [
        ({"encode": ["text", "audio"]}, "encode"),
        ({"encode": ["text", "text_encoder"]}, "encode"),
        ({"latents": "mode"}, "latents"),
        ({"batch_size": 0}, "batch_size"),
        ({"text_dtype": "int8"}, "text_dtype"),
        ({"vae_dtype": "float64"}, "vae_dtype"),
        ({"encode_args": {"max_length": 5}}, "encode_arg"),
        ({"encode_args": {"clip_skip": -1}}, "encode_arg"),
        ({"variant": "fp16"}, "variant"),
        ({"vae": "/no/such/vae"}, ""),
    ],
)
def test_what_cannot_be_done_is_refused_with_the_option_to_change(tmp_path, digest, options, option):
    with pytest.raises(BadInput) as refused:
        build(digest, tiny.look_alike(tmp_path), **options)
    assert refused.value.option == option


def test_latents_of_a_text_encoder_and_text_of_a_vae_are_refused(tmp_path, digest):
    with pytest.raises(BadInput):
        build(digest, tiny.look_alike_text(tmp_path / "text"))
    with pytest.raises(BadInput):
        build(digest, tiny.look_alike_vae(tmp_path / "vae"))
    with pytest.raises(BadInput):
        build(digest, tiny.look_alike(tmp_path / "model"), text_encoder=str(tmp_path / "vae"))


@pytest.mark.torch
def test_an_unknown_pipeline_or_vae_is_refused_with_the_known_ones(tmp_path, digest):
    with pytest.raises(BadInput):
        build(digest, tiny.look_alike(tmp_path / "model", "NewPipeline"), encode=["text"])
    tiny.look_alike_vae(tmp_path / "vae", _class_name="AutoencoderNew")
    with pytest.raises(BadInput):
        build(digest, tmp_path / "vae", encode=["latents"])


def test_a_vae_that_overflows_in_half_precision_is_refused_in_it(tmp_path, digest):
    tiny.look_alike_vae(tmp_path, force_upcast=True)
    with pytest.raises(BadInput):
        build(digest, tmp_path, encode=["latents"], vae_dtype="fp16")
    assert build(digest, tmp_path, encode=["latents"], vae_dtype="bf16")
    tiny.look_alike_vae(tmp_path, force_upcast=False)
    assert build(digest, tmp_path, encode=["latents"], vae_dtype="fp16")


def test_a_variant_changes_the_recipe(tmp_path, digest):
    folder = tiny.look_alike(tmp_path)
    tiny.write(folder / "text_encoder/model.fp16.safetensors", "half")
    plain, half = fingerprints(digest, folder), fingerprints(digest, folder, variant="fp16")
    assert plain["text"] != half["text"]
    assert plain["latents"] == half["latents"]


@pytest.mark.parametrize(
    ("tokenizer", "positions", "asked", "expected"),
    [
        ({"model_max_length": 256}, 512, None, 256),
        ({"model_max_length": 512}, 64, None, 64),
        ({"model_max_length": 10**30}, 128, None, 128),
        ({}, None, None, 512),
        ({"model_max_length": 256}, 512, 300, 300),
    ],
)
def test_the_longest_caption_is_what_tokenizer_and_positions_allow_or_what_was_asked(
    tmp_path, digest, tokenizer, positions, asked, expected
):
    tiny.look_alike_text(tmp_path)
    tiny.write(tmp_path / "config.json", {"model_type": "bert", "max_position_embeddings": positions})
    tiny.write(tmp_path / "tokenizer_config.json", tokenizer)
    args = {} if asked is None else {"max_sequence_length": asked}
    encoder = build(digest, tmp_path, encode=["text"], encode_args=args)[0]
    assert encoder.max_tokens == encoder.recipe.make["max_tokens"] == encoder.recipe.make["encode_args"]["max_sequence_length"] == expected


@pytest.mark.parametrize("asked", [0, -1, 65, "77", True, 1.5])
def test_an_impossible_length_is_refused(tmp_path, digest, asked):
    with pytest.raises(BadInput, check=asks_for("encode_arg", "max_sequence_length", 64)):
        build(digest, tiny.look_alike_text(tmp_path), encode=["text"], encode_args={"max_sequence_length": asked})


PLANNING = """
import json, sys
from cachestore.files.fingerprints import digest_file
from cachestore.encode.models.folders import MissingFile
from cachestore.encode.recipes import ModelRequest, encoders_for
text, latents = encoders_for(ModelRequest(sys.argv[1]), lambda path: digest_file(path, {}))
picture = open(sys.argv[2], "rb").read()
keys = [text.resolve({"caption": caption}, None).key for caption in ("", "a cat")]
keys.append(latents.resolve({"image": "a.png", "resolution": 128, "step": 64}, lambda name: picture).key)
text.close(), latents.close()
print(json.dumps({"keys": [str(key) for key in keys], "modules": [*sys.modules]}))
"""
HEAVY = {"torch", "transformers", "diffusers", "tokenizers", "accelerate", "huggingface_hub", "safetensors"}


def test_planning_and_resolving_import_neither_torch_nor_transformers(tmp_path):
    from PIL import Image

    tiny.look_alike(tmp_path / "model")
    Image.new("RGB", (100, 70)).save(tmp_path / "a.png")
    command = [sys.executable, "-c", PLANNING, str(tmp_path / "model"), str(tmp_path / "a.png")]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert HEAVY.isdisjoint(found["modules"])
    assert len(set(found["keys"])) == 3


@pytest.mark.torch
def test_the_list_of_heavy_modules_would_show_torch():
    import torch

    assert torch.__name__ in HEAVY & set(sys.modules)
