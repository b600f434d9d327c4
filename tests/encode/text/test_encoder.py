"""Captions to embeddings, compared with what the pipelines themselves return."""

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cachestore.core.errors import BadInput, EncodeFailed
from cachestore.core.keys import digest_text, input_key
from cachestore.encode.families.lookup import stored_names
from cachestore.encode.models.setup import padded_length
from cachestore.encode.recipes import ModelRequest, encoders_for
from cachestore.encode.text import prompts
from scripts.tiny_models import is_transformers_4
from tests.encode import tiny
from tests.encode.encoders import entries_of as encode
from tests.fakes import asks_for, tells_of

pytestmark = pytest.mark.torch

CAPTIONS = ["", "a cat", "a photograph of an astronaut riding a horse on the moon, highly detailed", 'a "SIGN" 漢字 é', "x " * 300]


def text_encoder(folder, digest, **options) -> Any:
    return encoders_for(ModelRequest(model=str(folder), encode=["text"], **options), digest)[0]


def joined(encoder, entry):
    """What a reader makes of an entry's tensors, by the recipe's `read` block."""

    def value(form):
        return entry[form["from"]] if "from" in form else torch.cat([entry[name] for name in form["join"]], dim=form["dim"])

    return {name: value(form) for name, form in encoder.recipe.read["outputs"].items()}


def reference(tiny_model, name, captions):
    """`encode_prompt` of the pipeline in memory, caption by caption, as its own `__call__` would use it."""
    pipeline, device = deepcopy(tiny_model(name).pipeline), torch.device("cpu")
    if name == "flux":
        pipeline.to(torch.bfloat16)
    found = {}
    for caption in captions:
        with torch.inference_mode():
            if name == "flux":
                embeds, pooled, ids = pipeline.encode_prompt([caption], None, device, max_sequence_length=512)
                found[caption] = {"prompt_embeds": embeds[0], "pooled_prompt_embeds": pooled[0], "text_ids": ids}
            elif name == "sdxl":
                embeds, _, pooled, _ = pipeline.encode_prompt([caption], device=device, do_classifier_free_guidance=True)
                found[caption] = {"prompt_embeds": embeds[0], "pooled_prompt_embeds": pooled[0]}
            else:
                embeds, _ = pipeline.encode_prompt([caption], device, 1, True)
                found[caption] = {"prompt_embeds": embeds[0]}
    return found


@pytest.mark.parametrize("name", ["sd15", "sdxl", "flux"])
def test_an_empty_batch_gives_nothing_and_loads_nothing(tiny_model, digest, name):
    encoder = text_encoder(tiny_model(name).folder, digest)
    assert encoder.submit([])() == {}
    assert encoder.count_tokens([]) == []
    assert encoder._modules is None
    assert encoder._tokenizers == {}
    encoder.close()


@pytest.mark.parametrize("name", ["sd15", "sdxl", "flux"])
def test_entries_equal_what_encode_prompt_returns(tiny_model, digest, name):
    expected = reference(tiny_model, name, CAPTIONS)
    encoder = text_encoder(tiny_model(name).folder, digest, batch_size=3)
    found = encode(encoder, CAPTIONS)
    for caption in CAPTIONS:
        assert set(found[caption]) == set(stored_names(encoder.setup.family))
        for output, value in joined(encoder, found[caption]).items():
            torch.testing.assert_close(value, expected[caption][output], rtol=1e-5, atol=1e-5)
    encoder.close()


@pytest.mark.parametrize("name", ["sd15", "sdxl", "flux"])
def test_a_batch_gives_what_single_captions_give(tiny_model, digest, name):
    encoder = text_encoder(tiny_model(name).folder, digest)
    together, alone = encode(encoder, CAPTIONS), encode(encoder, CAPTIONS, together=False)
    for caption in CAPTIONS:
        for stored, tensor in together[caption].items():
            torch.testing.assert_close(tensor, alone[caption][stored], rtol=1e-5, atol=1e-5)


def test_sdxl_keeps_its_two_encoders_apart(tiny_model, digest):
    entry = encode(text_encoder(tiny_model("sdxl").folder, digest), ["a cat"])["a cat"]
    shapes = {name: tuple(tensor.shape) for name, tensor in entry.items()}
    assert shapes == {"prompt_embeds.text_encoder": (77, 32), "prompt_embeds.text_encoder_2": (77, 48), "pooled_prompt_embeds": (48,)}


def test_flux_keeps_its_constant_ids_out_of_the_store(tiny_model, digest):
    encoder = text_encoder(tiny_model("flux").folder, digest)
    entry = encode(encoder, ["a cat"])["a cat"]
    assert {name: tuple(tensor.shape) for name, tensor in entry.items()} == {"prompt_embeds": (512, 32), "pooled_prompt_embeds": (32,)}
    constant = encoder.recipe.read["constants"]["text_ids"]
    assert constant == {"kind": "zeros", "shape": ["S", 3], "like": "prompt_embeds"}
    ids = reference(tiny_model, "flux", ["a cat"])["a cat"]["text_ids"]
    made = torch.zeros(entry["prompt_embeds"].shape[-2], 3, dtype=entry[constant["like"]].dtype)
    assert torch.equal(made, ids)
    assert made.dtype == ids.dtype


@pytest.mark.parametrize(("name", "dtype"), [("sd15", "float32"), ("sdxl", "float32"), ("flux", "bfloat16")])
def test_tensors_have_the_recipes_dtype_and_no_gradient(tiny_model, digest, name, dtype):
    encoder = text_encoder(tiny_model(name).folder, digest)
    assert encoder.recipe.make["dtype"] == dtype
    for entry in encode(encoder, CAPTIONS[:3]).values():
        for tensor in entry.values():
            assert tensor.dtype == getattr(torch, dtype)
            assert not tensor.requires_grad


def test_another_dtype_is_honoured(tiny_model, digest):
    entry = encode(text_encoder(tiny_model("sdxl").folder, digest, text_dtype="bf16"), ["a cat"])["a cat"]
    assert {tensor.dtype for tensor in entry.values()} == {torch.bfloat16}


def hidden_states(pipeline, number, caption):
    """What each layer of one of a pipeline's CLIP encoders makes of a caption, and the encoder's last norm."""
    name = f"text_encoder{number}"
    model, tokenizer = getattr(pipeline, name), getattr(pipeline, name.replace("text_encoder", "tokenizer"))
    ids = tokenizer([caption], padding="max_length", max_length=77, truncation=True, return_tensors="pt").input_ids
    with torch.inference_mode():
        states = model(ids, output_hidden_states=True).hidden_states
    return [rows[0] for rows in states], getattr(model, "text_model", model).final_layer_norm


@pytest.mark.parametrize("skip", [0, 1])
def test_clip_skip_of_sd15_is_the_layers_before_the_last_under_the_last_norm(tiny_model, digest, skip):
    made = encode(text_encoder(tiny_model("sd15").folder, digest, encode_args={"clip_skip": skip}), CAPTIONS)
    for caption, entry in made.items():
        states, norm = hidden_states(tiny_model("sd15").pipeline, "", caption)
        with torch.inference_mode():
            expected = norm(states[-1 - skip])
        assert torch.allclose(entry["prompt_embeds"], expected, atol=1e-6)
    others = encode(text_encoder(tiny_model("sd15").folder, digest), CAPTIONS)
    assert all(torch.allclose(made[caption]["prompt_embeds"], others[caption]["prompt_embeds"], atol=1e-6) for caption in CAPTIONS) == (
        skip == 0
    )


@pytest.mark.parametrize("name", ["sdxl", "sd3"])
def test_clip_skip_of_sdxl_and_sd3_counts_from_the_layer_before_the_last(tiny_model, built, digest, name):
    model = tiny_model(name) if name == "sdxl" else built(name)
    made = encode(text_encoder(model.folder, digest, encode_args={"clip_skip": 1}, text_dtype="float32"), ["a cat"])["a cat"]
    for number in ("", "_2"):
        states, _ = hidden_states(model.pipeline, number, "a cat")
        assert torch.allclose(made[f"prompt_embeds.text_encoder{number}"], states[-3], atol=1e-6)


def test_clip_skip_leaves_the_encoder_as_it_was(tiny_model, digest):
    encoder = text_encoder(tiny_model("sd15").folder, digest, encode_args={"clip_skip": 1})
    encode(encoder, ["a cat"])
    (module,) = encoder._modules._modules
    assert ("text_model" in vars(module)) is False
    assert not [name for name in module.state_dict() if name.startswith("text_model.text_model.")]


@pytest.mark.parametrize("skip", [-1, 2, "one", True, 1.0])
def test_a_clip_skip_that_is_no_count_of_layers_is_refused(tiny_model, digest, skip):
    with pytest.raises(BadInput, check=asks_for("encode_arg", "clip_skip")):
        text_encoder(tiny_model("sd15").folder, digest, encode_args={"clip_skip": skip})


def test_only_the_text_encoders_are_loaded(tiny_model, digest, tmp_path):
    """The denoiser's folder holds no valid file; here the VAE, the scheduler and everything unlisted are gone as well."""
    encoder = text_encoder(tiny_model("sdxl").folder, digest)
    for name in ["model_index.json", *encoder.recipe.make["files"]]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes((tiny_model("sdxl").folder / name).read_bytes())
    bare = text_encoder(tmp_path, digest)
    assert bare.recipe.fingerprint == encoder.recipe.fingerprint
    assert joined(bare, encode(bare, ["a cat"])["a cat"])["prompt_embeds"].equal(
        joined(encoder, encode(encoder, ["a cat"])["a cat"])["prompt_embeds"]
    )


def test_a_captions_key_is_known_without_loading_anything_and_a_long_one_is_not_repeated_in_the_entry(tiny_model, digest):
    encoder = text_encoder(tiny_model("sd15").folder, digest)
    resolved = encoder.resolve({"caption": "a cat"}, None)
    assert resolved.key == input_key(encoder.recipe.fingerprint, {"caption": digest_text("a cat")}, {})
    assert resolved.inputs == {"caption": digest_text("a cat")}
    assert resolved.meta == {"input_digest": digest_text("a cat"), "encoder": "text", "caption": "a cat"}
    assert encoder._tokenizers == {}
    assert "caption" in encoder.resolve({"caption": "x" * 512}, None).meta
    assert "caption" not in encoder.resolve({"caption": "x" * 513}, None).meta


@pytest.mark.parametrize(("name", "limit", "empty"), [("sd15", 77, 2), ("sdxl", 77, 2), ("flux", 512, 1)])
def test_tokens_are_counted_before_the_caption_is_cut(tiny_model, digest, name, limit, empty):
    encoder = text_encoder(tiny_model(name).folder, digest)
    assert encoder.max_tokens == limit
    counts = encoder.count_tokens(["", "abc", "ab " * 400])
    assert counts[0] == empty
    assert counts[1] in (empty + 3, empty + 4)
    assert counts[2] > limit
    facts = [encoder.prepare(encoder.resolve({"caption": caption}, None)).facts for caption in ("", "ab " * 400)]
    assert facts == [{"tokens": empty, "truncated": False}, {"tokens": counts[2], "truncated": True}]


@pytest.mark.parametrize("name", ["sd15", "sdxl", "flux"])
def test_the_size_of_an_entry_is_estimated_before(tiny_model, digest, name):
    encoder = text_encoder(tiny_model(name).folder, digest)
    tensors = encode(encoder, ["a cat"])["a cat"].values()
    assert encoder.entry_bytes(7) == pytest.approx(sum(tensor.nbytes for tensor in tensors), rel=0.05)


def test_a_caption_that_is_no_unicode_text_is_refused_with_a_reason(tiny_model, digest):
    if is_transformers_4():
        pytest.skip("the tokenizer of transformers 4 drops what is no character, and refuses nothing")
    encoder = text_encoder(tiny_model("sd15").folder, digest)
    with pytest.raises(EncodeFailed):
        encoder.prepare(encoder.resolve({"caption": "half a pair \ud800"}, None))


def test_numbers_that_are_not_finite_are_refused_and_named(tiny_model, digest):
    encoder = text_encoder(tiny_model("sd15").folder, digest)
    encode(encoder, ["a cat"])
    resolved = encoder.resolve({"caption": "a cat"}, None)
    encoder._modules._call = lambda payloads: {"prompt_embeds": torch.full((1, 77, 32), float("nan"))}
    with pytest.raises(EncodeFailed, check=tells_of("NaN", "'prompt_embeds'", resolved.key)):
        encoder.submit([(resolved.key, "a cat")])()


def test_closing_gives_the_modules_back_and_encoding_loads_them_again(tiny_model, digest):
    encoder = text_encoder(tiny_model("sd15").folder, digest)
    before = encode(encoder, ["a cat"])["a cat"]
    encoder.close()
    encoder.close()
    assert encoder._modules is None
    assert encoder._tokenizers == {}
    assert encode(encoder, ["a cat"])["a cat"]["prompt_embeds"].equal(before["prompt_embeds"])


def test_weights_that_do_not_fill_the_model_are_refused_instead_of_being_made_up(tiny_model, digest, tmp_path):
    folder = tmp_path / "broken"
    subprocess.run(["cp", "-r", str(tiny_model("sd15").folder), str(folder)], check=True)
    weights = load_file(folder / "text_encoder/model.safetensors")
    dropped = next(name for name in weights if "fc1.weight" in name)
    save_file(
        {name: tensor for name, tensor in weights.items() if name != dropped}, folder / "text_encoder/model.safetensors", {"format": "pt"}
    )
    with pytest.raises(BadInput):
        encode(text_encoder(folder, digest), ["a cat"])


def test_a_batch_size_is_chosen_by_length_or_taken_as_given(tiny_model, digest):
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    budget, larger = prompts.text_budget(cpu), prompts.text_budget(gpu)
    assert larger.size < larger.most
    assert budget.size == budget.most
    assert 1 <= budget.units(512) < budget.units(77) <= 32
    assert budget.units(512) < larger.units(512)
    assert budget.units(10**6) == budget.units(0) // 32 == 1
    folder = tiny_model("sd15").folder
    assert text_encoder(folder, digest, batch_size=5).batch_limit("captions") == 5
    assert text_encoder(folder, digest, device="cpu").batch_limit("captions") == budget.units(77)


def test_an_unknown_device_is_bad_input(tiny_model, digest):
    with pytest.raises(BadInput):
        encode(text_encoder(tiny_model("sd15").folder, digest, device="gpu7"), ["a cat"])


# What encode_prompt is called with


def test_encode_prompt_gets_the_recipes_arguments_the_batchs_and_none_where_it_insists():
    def encode_prompt(prompt, prompt_2, device=None, num_videos_per_prompt=4, max_sequence_length=226, batch_size=1, extra="kept"):
        raise NotImplementedError

    given = prompts.prompt_arguments(encode_prompt, {"max_sequence_length": 512}, 3, torch.device("cpu"))
    assert given == {
        "prompt_2": None,
        "device": torch.device("cpu"),
        "num_videos_per_prompt": 1,
        "max_sequence_length": 512,
        "batch_size": 3,
    }


def test_an_argument_that_the_installed_diffusers_does_not_take_is_named():
    with pytest.raises(BadInput):
        prompts.prompt_arguments(lambda prompt, device: None, {"clip_skip": 1}, 1, torch.device("cpu"))


def test_the_callers_list_is_not_the_one_a_pipeline_may_write_into(tiny_model, digest):
    encoder = text_encoder(tiny_model("sd15").folder, digest)
    encode(encoder, ["a cat"])
    received = []

    class Vandal:
        def encode_prompt(self, prompt, device, num_images_per_prompt, do_classifier_free_guidance, clip_skip=None):
            received.append(list(prompt))
            prompt[:] = ["vandalised"] * len(prompt)
            return torch.rand(len(received[-1]), 77, 32), None

    encoder._modules._call = prompts._pipeline_call(Vandal(), encoder.setup, torch.device("cpu"))
    for _ in range(2):
        encode(encoder, ["a cat"])
    assert received == [["a cat"], ["a cat"]]


# A text encoder that stands alone


def test_a_plain_text_encoder_gives_its_last_hidden_states_without_padding(plain_model, digest):
    folder, model, tokenizer = plain_model
    encoder = text_encoder(folder, digest)
    captions = ["", "a cat", "a photograph of a horse", "word " * 50]
    found = encode(encoder, captions)
    for caption in captions:
        ids = tokenizer(caption, return_tensors="pt", truncation=True, max_length=64)
        with torch.inference_mode():
            expected = model(input_ids=ids.input_ids, attention_mask=ids.attention_mask).last_hidden_state[0]
        torch.testing.assert_close(found[caption]["prompt_embeds"], expected, rtol=1e-5, atol=1e-5)
    assert found[""]["prompt_embeds"].shape == (2, 32)
    assert encoder.recipe.read["mask_name"] == "prompt_attention_mask"


def test_a_plain_caption_is_padded_alike_in_every_batch_so_its_value_does_not_depend_on_it(plain_model, digest):
    encoder = text_encoder(plain_model[0], digest)
    captions = ["a", "ab", "abc", "abcd efgh"]
    together, alone = encode(encoder, captions), encode(encoder, captions, together=False)
    for caption in captions:
        assert together[caption]["prompt_embeds"].equal(alone[caption]["prompt_embeds"])


def test_plain_captions_are_grouped_by_length_rounded_up(plain_model, digest):
    encoder = text_encoder(plain_model[0], digest)
    assert encoder.entry_bytes(5) == 5 * 32 * 4
    assert encoder.entry_bytes(500) == 64 * 32 * 4
    groups = [
        encoder.prepare(encoder.resolve({"caption": caption}, None)).group
        for caption in ("", "abcdefghijklmn", "abcdefghijklmno", "x " * 99)
    ]
    assert groups == [16, 16, 32, 64]


def test_a_plain_encoders_batches_follow_from_their_length_also_once_it_is_loaded(plain_model, digest):
    encoder = text_encoder(plain_model[0], digest, device="cpu")
    before = [encoder.batch_limit(length) for length in (16, 512)]
    encode(encoder, ["a"])
    assert [encoder.batch_limit(length) for length in (16, 512)] == before
    assert before[0] > before[1]


@pytest.mark.parametrize(
    ("tokens", "limit", "padded"), [(0, 77, 16), (1, 77, 16), (16, 77, 16), (17, 77, 32), (77, 77, 77), (3, 8, 8), (512, 512, 512)]
)
def test_lengths_are_rounded_up_to_sixteen_but_not_above_the_limit(tokens, limit, padded):
    assert padded_length(tokens, limit) == padded


def test_an_encoder_with_a_decoder_is_loaded_and_called_without_it(tmp_path, digest):
    transformers = tiny.library("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 120, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4}
    config = transformers.T5Config(**sizes, decoder_start_token_id=0, pad_token_id=0)
    model = transformers.T5ForConditionalGeneration(config).eval()
    model.save_pretrained(tmp_path)
    tokenizer = tiny.t5_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    for caption, entry in encode(text_encoder(tmp_path, digest), ["", "a cat"]).items():
        ids = tokenizer(caption, return_tensors="pt")
        with torch.inference_mode():
            expected = model.encoder(input_ids=ids.input_ids, attention_mask=ids.attention_mask).last_hidden_state[0]
        torch.testing.assert_close(entry["prompt_embeds"], expected, rtol=1e-4, atol=1e-5)


# Threads


def test_captions_can_be_prepared_from_several_threads_while_others_are_encoded(tiny_model, digest):
    encoder = text_encoder(tiny_model("flux").folder, digest)
    captions = [f"{'word ' * (index % 7)}{index}" for index in range(60)]
    counts = dict(zip(captions, encoder.count_tokens(captions), strict=True))
    stop = threading.Event()

    def encode_meanwhile():
        while not stop.is_set():
            encode(encoder, ["a cat"])

    with ThreadPoolExecutor(5) as pool:
        background = pool.submit(encode_meanwhile)
        prepared = list(pool.map(lambda caption: encoder.prepare(encoder.resolve({"caption": caption}, None)), captions))
        stop.set()
        background.result()
    assert [value.facts["tokens"] for value in prepared] == list(counts.values())


COUNT_THREADS = """
import os, sys
from pathlib import Path
from cachestore.encode.batching.environment import set_library_defaults
set_library_defaults(os.environ)
from cachestore.files.fingerprints import digest_file
from cachestore.encode.recipes import ModelRequest, encoders_for
encoder, = encoders_for(ModelRequest(sys.argv[1], encode=["text"]), lambda path: digest_file(path, {}))
encoder.count_tokens([""])
before = len(os.listdir("/proc/self/task"))
encoder.count_tokens(["a cat on a mat"] * 2000)
encoder._tokenizers["tokenizer"](["a cat on a mat"] * 2000)
print(len(os.listdir("/proc/self/task")) - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts threads in /proc")
def test_tokenising_starts_no_threads(tiny_model):
    environment = {name: value for name, value in os.environ.items() if name != "TOKENIZERS_PARALLELISM"}
    command = [sys.executable, "-c", COUNT_THREADS, str(tiny_model("sd15").folder)]
    assert subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout.strip() == "0"
