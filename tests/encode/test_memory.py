"""What encoding takes of a GPU: counted from the headers of a model's files, and told by `precompute --plan-only`."""

import json
import os

import numpy as np
import pytest
from PIL import Image

import cachestore as cs
from cachestore.cli import OK, main
from cachestore.encode.families.vae import VAE_FAMILIES
from cachestore.encode.memory import CARDS, KEPT_FREE, LONGEST, MARGIN, memory_of, text_working, vae_working
from cachestore.encode.pictures.buckets import Size
from cachestore.jobs.start.forecast import memory_in_words
from tests.encode.encoders import encoder_of

pytestmark = pytest.mark.torch


@pytest.fixture
def photos(tmp_path):
    folder = tmp_path / "photos"
    folder.mkdir()
    for number, size in enumerate([(64, 64), (96, 64)]):
        Image.fromarray(np.full((*size[::-1], 3), 40 * number, np.uint8)).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(f"picture {number}")
        os.utime(folder / f"{number}.png", (1, 1))  # modified long ago
    return folder


def bytes_of(pipeline, prefix, item):
    parts = [part for name, part in pipeline.components.items() if name.startswith(prefix) and hasattr(part, "parameters")]
    return sum(one.numel() * item for part in parts for one in part.parameters())


@pytest.mark.parametrize(("dtype", "item"), [("float32", 4), ("bfloat16", 2)])
def test_weights_are_those_of_all_text_encoders_or_of_the_vae_in_the_dtype_for_encoding(built, digest, dtype, item):
    model = built("sdxl")
    text, latents = (encoder_of(model, digest, kind, text_dtype=dtype, vae_dtype=dtype) for kind in ("text", "latents"))
    found = memory_of(text, ()), memory_of(latents, (64, 64))
    assert [one and one.weights for one in found] == [
        pytest.approx(bytes_of(model.pipeline, prefix, item), rel=0.01) for prefix in ("text_encoder", "vae")
    ]
    assert all(one is not None and one.working > 0 for one in found)


def test_the_modules_of_a_model_in_memory_count_as_they_are(tiny_model, photos, tmp_path):
    model = tiny_model("sd15")
    found = cs.plan(photos, model=model.pipeline, store=tmp_path / "store", resolution=64).as_json()
    assert [one["weights"] for one in found["memory"]] == [bytes_of(model.pipeline, prefix, 4) for prefix in ("text_encoder", "vae")]


def test_an_estimate_grows_with_the_picture_the_frames_and_the_dtype():
    row = VAE_FAMILIES["AutoencoderKLLTXVideo"]
    one = vae_working(row, Size(512, 512), 17, 4)
    assert one == MARGIN * 512 * 512 * 17 * row.working[2]
    assert vae_working(row, Size(1024, 512), 17, 4) == 2 * one == 4 * vae_working(row, Size(512, 512), 17, 2)
    assert vae_working(row, Size(512, 512), 1, 4) < one


def test_a_class_that_scores_the_vocabulary_needs_more_and_a_tokenizer_needs_nothing():
    config = {"hidden_size": 3840, "num_hidden_layers": 48, "intermediate_size": 15_360, "num_attention_heads": 16, "vocab_size": 262_208}
    plain, scoring = (text_working(config, name, 1024, 2) for name in ("Gemma3Model", "Gemma3ForConditionalGeneration"))
    assert scoring - plain == MARGIN * 1024 * 262_208 * 2
    assert text_working({"text_config": config}, "Gemma3Model", 1024, 2) == plain
    assert text_working({"model_max_length": 77}, "CLIPTokenizer", 1024, 2) == 0


def test_without_a_limit_of_its_own_the_longest_caption_that_was_counted_decides(built, digest):
    encoder = encoder_of(built("qwenimage"), digest, "text")
    encoder.max_tokens = 131_072
    needed = [memory_of(encoder, (), tokens).working for tokens in (0, LONGEST, 2 * LONGEST)]  # pyright: ignore[reportOptionalMemberAccess]
    assert needed[0] == needed[1] < needed[2]


def test_a_plan_names_the_least_bytes_and_what_is_in_the_store_needs_none(tiny_model, photos, tmp_path, capsys):
    asked = ["precompute", str(photos), "--model", str(tiny_model("sd15").folder), "--store", str(tmp_path / "store"), "--resolution", "64"]
    assert main([*asked, "--plan-only", "--json"]) == OK
    body = json.loads(capsys.readouterr().out)
    assert [one["encoder"] for one in body["memory"]] == ["text", "latents"]
    [way] = body["fits"]
    assert way == {
        "way": "resident",
        "bytes": max(one["weights"] + one["working"] for one in body["memory"]),
        "per_second": None,
        "exact": True,
    }
    cs.precompute(photos, model=tiny_model("sd15").folder, store=tmp_path / "store", resolution=64, inline=True, encode="text")
    assert main([*asked, "--plan-only", "--json"]) == OK
    assert [one["encoder"] for one in json.loads(capsys.readouterr().out)["memory"]] == ["latents"]
    cs.precompute(photos, model=tiny_model("sd15").folder, store=tmp_path / "store", resolution=64, inline=True)
    assert main([*asked, "--plan-only", "--json"]) == OK
    body = json.loads(capsys.readouterr().out)
    assert (body["memory"], body["fits"]) == ([], [])


@pytest.mark.parametrize(("needed", "card"), [(1 << 20, 8), (11 << 30, 12), ((11 << 30) + 1, 16), (79 << 30, 80), (80 << 30, None)])
def test_a_card_is_named_that_has_room_for_the_driver_too(needed, card):
    [line] = memory_in_words([{"encoder": "text", "weights": needed, "working": 0}])
    assert (f"a card of {card} GB has enough" in line) if card else ("more than a card of 80 GB has" in line)
    assert ("docs/models.md" in line) == (card not in {8, 12})
    assert (memory_in_words([]), CARDS[0] > KEPT_FREE) == ([], True)
