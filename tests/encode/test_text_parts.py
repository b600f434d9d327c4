"""Some text encoders of a pipeline without the others: the very tensors that all of them make together."""

import shutil
from typing import Any

import pytest

from cachestore.core.errors import BadInput
from cachestore.encode.families import lookup as families
from cachestore.encode.families.text import TEXT_FAMILIES
from cachestore.encode.models.hub import files_to_fetch
from cachestore.encode.recipes import ModelRequest, encoders_for
from tests.encode import tiny
from tests.encode.encoders import batch_for

CAPTIONS = ["", "a cat", "x " * 300, 'a "SIGN" 漢字 é']


def encoder_of(folder, digest, encode, **options) -> Any:
    return encoders_for(ModelRequest(str(folder), encode=encode, device="cpu", **options), digest)[0]


def entries(encoder):
    return list(encoder.submit(batch_for(encoder, CAPTIONS))().values())


def test_no_encoder_and_unknown_ones_are_refused_with_those_that_can_be_called_alone():
    sdxl = TEXT_FAMILIES["StableDiffusionXLPipeline"]
    for names in ([], ["text_encoder_9"], ["text_encoder", "text_encoder_9"]):
        with pytest.raises(BadInput):
            families.with_encoders(sdxl, names)


def test_all_encoders_by_name_are_the_family_as_it_is():
    for row in TEXT_FAMILIES.values():
        assert families.with_encoders(row, row.encoders) is row


def test_every_part_of_a_row_names_what_the_row_stores_and_takes():
    rows = [row for row in TEXT_FAMILIES.values() if row.parts]
    assert rows
    for row in rows:
        assert set(row.parts) == set(row.encoders)
        stored = sorted(name for part in row.parts.values() for name in (part.rows, part.pooled) if name)
        assert stored == families.stored_names(row)
        assert {name for part in row.parts.values() for name in part.args} == set(row.args)


def test_a_family_whose_encoders_depend_on_each_other_is_refused(tmp_path, digest):
    folder = tiny.look_alike(tmp_path, "HunyuanVideoPipeline")
    with pytest.raises(BadInput):
        encoder_of(folder, digest, ["text_encoder"])


def test_text_and_one_of_its_encoders_together_are_refused(tmp_path, digest):
    with pytest.raises(BadInput):
        encoder_of(tiny.look_alike(tmp_path), digest, ["text", "text_encoder"])


def test_an_encoder_that_stands_alone_is_its_only_part(tmp_path, digest):
    folder = tiny.look_alike_text(tmp_path)
    assert encoder_of(folder, digest, ["text_encoder"]).recipe == encoder_of(folder, digest, ["text"]).recipe
    with pytest.raises(BadInput):
        encoder_of(folder, digest, ["text_encoder_2"])


def test_of_a_hub_model_only_the_encoders_asked_for_are_fetched():
    names = ["model_index.json", *(f"{part}{number}/config.json" for part in ("text_encoder", "tokenizer") for number in ("", "_2", "_3"))]
    found = files_to_fetch([*names, "vae/config.json", "transformer/config.json"], ["text_encoder_2", "latents"], None)
    encoders = ["text_encoder_2/config.json", "tokenizer_2/config.json", "vae/config.json"]
    assert sorted(found) == ["model_index.json", *encoders[:2], "transformer/config.json", encoders[2]]


PARTS = [
    ("sdxl", ["text_encoder"], ["prompt_embeds.text_encoder"]),
    ("sdxl", ["text_encoder_2"], ["pooled_prompt_embeds", "prompt_embeds.text_encoder_2"]),
    ("sd3", ["text_encoder"], ["pooled_prompt_embeds.text_encoder", "prompt_embeds.text_encoder"]),
    ("sd3", ["text_encoder_3"], ["prompt_embeds.text_encoder_3"]),
    (
        "sd3",
        ["text_encoder_2", "text_encoder_3"],
        ["pooled_prompt_embeds.text_encoder_2", "prompt_embeds.text_encoder_2", "prompt_embeds.text_encoder_3"],
    ),
    ("flux", ["text_encoder"], ["pooled_prompt_embeds"]),
    ("flux", ["text_encoder_2"], ["prompt_embeds"]),
]


@pytest.mark.torch
@pytest.mark.parametrize(("name", "encode", "stored"), PARTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_part_makes_what_it_makes_beside_the_others(built, digest, name, encode, stored, dtype):
    folder = built(name).folder
    part, whole = (encoder_of(folder, digest, names, text_dtype=dtype) for names in (encode, ["text"]))
    assert part.recipe.make["outputs"] == stored
    for found, expected in zip(entries(part), entries(whole), strict=True):
        assert sorted(found) == stored
        assert {name: tensor.equal(expected[name]) for name, tensor in found.items()} == dict.fromkeys(stored, True)


@pytest.mark.torch
@pytest.mark.parametrize("name", ["sdxl", "sd3"])
def test_a_part_skips_the_same_layers(built, digest, name):
    folder, stored = built(name).folder, "prompt_embeds.text_encoder_2"
    part, whole = (encoder_of(folder, digest, encode, encode_args={"clip_skip": 1}) for encode in (["text_encoder_2"], ["text"]))
    for found, expected in zip(entries(part), entries(whole), strict=True):
        assert found[stored].equal(expected[stored])


@pytest.mark.torch
def test_only_the_part_is_loaded_and_digested(built, digest, tmp_path):
    shutil.copytree(built("sd3").folder, tmp_path / "model")
    for name in ("text_encoder", "text_encoder_3", "tokenizer", "tokenizer_3", "vae"):
        shutil.rmtree(tmp_path / "model" / name)
    encoder = encoder_of(tmp_path / "model", digest, ["text_encoder_2"])
    assert len(entries(encoder)) == len(CAPTIONS)
    assert {name.partition("/")[0] for name in encoder.recipe.make["files"]} == {"text_encoder_2", "tokenizer_2"}
    assert sorted(encoder.recipe.make["components"]) == ["text_encoder_2", "tokenizer_2"]


@pytest.mark.torch
def test_a_part_takes_its_own_arguments_alone_and_counts_by_its_own_tokenizer(built, digest):
    folder = built("flux").folder
    with pytest.raises(BadInput):
        encoder_of(folder, digest, ["text_encoder"], encode_args={"max_sequence_length": 64})
    assert encoder_of(folder, digest, ["text_encoder_2"], encode_args={"max_sequence_length": 64}).max_tokens == 64
    assert encoder_of(folder, digest, ["text_encoder"]).max_tokens == 77


@pytest.mark.torch
def test_a_part_is_estimated_before_and_read_as_it_is_stored(built, digest):
    from cachestore.core.read_block import parse_text

    for name, encode, stored in PARTS:
        encoder = encoder_of(built(name).folder, digest, encode)
        actual = sum(tensor.nbytes for tensor in entries(encoder)[1].values())
        assert 0.7 * actual <= encoder.entry_bytes(encoder.max_tokens) <= 1.5 * actual, (name, encode)
        block = parse_text(encoder.recipe)
        assert sorted(block.outputs) == stored
        assert set(block.constants) == ({"text_ids"} if name == "flux" and "prompt_embeds" in stored else set())
