"""What has gone wrong with each family before, one test for each: batches that change their captions, masks and lengths that mislead."""

import inspect
import json
import logging
import shutil
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from cachestore.core.errors import BadInput, EncodeFailed
from cachestore.core.read_block import parse_latents
from cachestore.encode import recipes
from cachestore.encode.batching.outputs import difference, tolerance
from cachestore.encode.families import lookup as families
from cachestore.encode.families.row import DEFAULT_OF_CALL
from cachestore.encode.models import introspection, modules
from cachestore.encode.models.folders import Component, read_numbers
from cachestore.encode.models.introspection import find_family
from cachestore.encode.models.loaded import read_loaded
from cachestore.encode.models.setup import Padded
from cachestore.encode.pictures import vae
from cachestore.encode.pictures.buckets import Size
from cachestore.encode.recipes import ModelRequest, encoders_for
from cachestore.encode.text import prompts
from cachestore.encode.text.prompts import call_arguments, prompt_arguments
from cachestore.encode.text.tokens import Rewriter
from cachestore.train.latents import read_latents
from tests.encode import tiny, tiny_families
from tests.encode.encoders import Built, batch_of, encoder_of, entries_of
from tests.shares import share

pytestmark = pytest.mark.torch


def group_of(encoder, caption):
    return encoder.prepare(encoder.resolve({"caption": caption}, None)).group


def own(model, captions, **args):
    """What `encode_prompt` of the pipeline in memory returns."""
    with torch.inference_mode():
        given = prompt_arguments(model.pipeline.encode_prompt, args, len(captions), torch.device("cpu"))
        return model.pipeline.encode_prompt(list(captions), **given)


def test_mochis_empty_caption_has_no_rows_and_shares_no_batch(built, digest):
    model = built("mochi")
    assert not own(model, ["a cat", ""])[1].any(), "the last caption being empty no longer empties the batch: `alone` can go"
    encoder = encoder_of(model, digest, "text")
    assert group_of(encoder, "") != group_of(encoder, "a cat")
    assert encoder.batch_limit(group_of(encoder, "")) == 1
    found = entries_of(encoder, ["a cat", ""])
    assert len(found[""]["prompt_embeds"]) == 0
    assert len(found["a cat"]["prompt_embeds"]) > 0
    batch = batch_of(encoder, [""])
    assert batch["prompt_embeds"].shape == (1, 256, 32)
    assert not batch["prompt_attention_mask"].any()


def test_whether_mochi_empties_its_empty_caption_is_part_of_the_recipe(built, digest, tmp_path):
    model = built("mochi")
    folder = tmp_path / "mochi"
    shutil.copytree(model.folder, folder)
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps({**index, "force_zeros_for_empty_prompt": False}))
    before, after = (
        encoders_for(ModelRequest(str(path), encode=["text"], text_dtype="float32"), digest)[0] for path in (model.folder, folder)
    )
    assert before.recipe.fingerprint != after.recipe.fingerprint
    assert len(entries_of(after, [""])[""]["prompt_embeds"]) == 1


def test_qwen_image_returns_no_mask_for_a_full_batch_and_rows_are_kept_whole(built, digest):
    model = built("qwenimage")
    assert own(model, ["a cat"])[1] is None
    assert own(model, ["a cat", "a much longer caption"])[1] is not None
    encoder = encoder_of(model, digest, "text")
    batch = batch_of(encoder, ["a cat", "a much longer caption"])
    lengths = [len(entry["prompt_embeds"]) for entry in entries_of(encoder, ["a cat", "a much longer caption"]).values()]
    assert batch["prompt_embeds_mask"].sum(dim=1).tolist() == lengths
    assert batch_of(encoder, ["a cat"])["prompt_embeds_mask"].all()


def test_qwen_image_is_cut_where_call_cuts_it_not_where_encode_prompt_would(built, digest):
    encoder = encoder_of(built("qwenimage"), digest, "text")
    assert encoder.recipe.make["encode_args"] == {"max_sequence_length": 512}
    assert len(entries_of(encoder, ["x " * 400])["x " * 400]["prompt_embeds"]) == 512


def test_z_images_captions_are_put_into_its_template_once(built, digest):
    model = built("zimage")
    captions = ["a cat"]
    model.pipeline.encode_prompt(captions, device="cpu", do_classifier_free_guidance=False)
    assert captions != ["a cat"], "the pipeline no longer writes into the list it is given"
    encoder = encoder_of(model, digest, "text")
    first, second = (entries_of(encoder, ["a cat"])["a cat"]["prompt_embeds"] for _ in range(2))
    assert first.equal(second)
    assert first.equal(own(model, ["a cat"])[0][0])


def test_auraflows_mask_is_narrowed_and_its_zeros_are_made_again(built, digest):
    model = built("auraflow")
    embeds, mask, *_ = own(model, ["a cat"])
    assert mask.shape == (1, 256 * 32)
    encoder = encoder_of(model, digest, "text")
    assert len(entries_of(encoder, ["a cat"])["a cat"]["prompt_embeds"]) < 20
    batch = batch_of(encoder, ["a cat"])
    torch.testing.assert_close(batch["prompt_embeds"], embeds, rtol=1e-5, atol=1e-6)
    assert batch["prompt_attention_mask"].shape == (1, 256)
    assert batch["prompt_attention_mask"].sum() == len(entries_of(encoder, ["a cat"])["a cat"]["prompt_embeds"])


def test_wans_zeros_are_dropped_and_made_again_to_calls_own_length(built, digest):
    model = built("wan")
    encoder = encoder_of(model, digest, "text")
    assert encoder.max_tokens == 512
    assert len(entries_of(encoder, ["a cat"])["a cat"]["prompt_embeds"]) < 20
    embeds, _ = own(model, ["a cat"], max_sequence_length=512)
    torch.testing.assert_close(batch_of(encoder, ["a cat"])["prompt_embeds"], embeds, rtol=1e-5, atol=1e-6)


def test_a_caption_cleaned_by_ftfy_has_its_version_in_the_recipe(built, digest):
    wan, pixart, sana = (encoder_of(built(name), digest, "text").recipe.make for name in ("wan", "pixart", "sana"))
    assert wan["packages"] == {"ftfy": version("ftfy")}
    assert pixart["packages"] == {"beautifulsoup4": version("beautifulsoup4"), "ftfy": version("ftfy")}
    assert sana["packages"] == {}


def test_a_missing_cleaner_is_refused_and_not_passed_over(built, digest, monkeypatch):
    def nothing(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(recipes, "version", nothing)
    with pytest.raises(BadInput):
        encoder_of(built("wan"), digest, "text")


def test_pixart_cleans_captions_as_call_does(built, digest):
    model = built("pixart")
    caption = "A <b>CAT</b> &amp; a dog"
    encoder = encoder_of(model, digest, "text")
    cleaned, plain = (own(model, [caption], clean_caption=flag, max_sequence_length=300) for flag in (True, False))
    assert len(entries_of(encoder, [caption])[caption]["prompt_embeds"]) == int(cleaned[1].sum()) != int(plain[1].sum())


def test_ltx_is_encoded_at_full_length_although_it_is_kept_trimmed(built, digest):
    model = built("ltx")
    found = entries_of(encoder_of(model, digest, "text"), ["a cat"])["a cat"]["prompt_embeds"]
    full, short = (own(model, ["a cat"], max_sequence_length=length)[0][0, : len(found)] for length in (128, 16))
    torch.testing.assert_close(found, full, rtol=1e-5, atol=1e-6)
    assert float((full - short).norm() / full.norm()) > 0.05, "padding no longer changes what the encoder makes"


def test_chroma_keeps_its_padding_and_a_mask_that_counts_one_more(built, digest):
    encoder = encoder_of(built("chroma"), digest, "text")
    entry = entries_of(encoder, ["a cat"])["a cat"]
    tokens = encoder.count_tokens(["a cat"])[0]
    assert entry["prompt_embeds"].shape == (512, 32)
    assert entry["prompt_attention_mask"].sum() == tokens + 1
    assert batch_of(encoder, ["a cat"])["text_ids"].shape == (512, 3)


def test_cogview4s_captions_share_a_batch_only_at_one_padded_length(built, digest):
    model = built("cogview4")
    encoder = encoder_of(model, digest, "text")
    assert [group_of(encoder, "x" * count) for count in (1, 15, 16, 31, 5000)] == [16, 16, 32, 32, 1024]
    own_pair, own_alone = own(model, ["a cat", "x" * 40])[0][0], own(model, ["a cat"])[0][0]
    assert own_pair.shape != own_alone.shape
    assert float((entries_of(encoder, ["a cat", "x" * 40])["a cat"]["prompt_embeds"] - own_alone).abs().max()) < 1e-5
    assert batch_of(encoder, ["a cat", "x" * 40])["prompt_attention_mask"][0].tolist() == [0] * 32 + [1] * 16


def test_hunyuanvideo15_has_rows_of_quoted_text_only_where_something_is_quoted(built, digest):
    encoder = encoder_of(built("hunyuanvideo15"), digest, "text")
    found = entries_of(encoder, ["a cat", 'a "SIGN"'])
    assert len(found["a cat"]["prompt_embeds_2"]) == 0
    assert len(found['a "SIGN"']["prompt_embeds_2"]) > 0
    batch = batch_of(encoder, ["a cat"])
    assert batch["prompt_embeds_2"].shape[:2] == (1, 256)
    assert not batch["prompt_embeds_mask_2"].any()


def test_sd3_is_kept_by_component_and_joined_to_what_its_pipeline_makes(built, digest):
    model = built("sd3")
    encoder = encoder_of(model, digest, "text")
    entry = entries_of(encoder, ["a cat"])["a cat"]
    assert {name: tuple(tensor.shape) for name, tensor in entry.items()} == {
        "prompt_embeds.text_encoder": (77, 32),
        "prompt_embeds.text_encoder_2": (77, 48),
        "prompt_embeds.text_encoder_3": (256, 96),
        "pooled_prompt_embeds.text_encoder": (32,),
        "pooled_prompt_embeds.text_encoder_2": (48,),
    }
    embeds, _, pooled, _ = own(model, ["a cat"])
    batch = batch_of(encoder, ["a cat"])
    torch.testing.assert_close(batch["prompt_embeds"], embeds)
    torch.testing.assert_close(batch["pooled_prompt_embeds"], pooled)


@pytest.fixture
def sd3_without_t5(built, tmp_path):
    """A folder as it is saved of a pipeline without T5; of the denoiser only the configuration can be read."""
    folder = shutil.copytree(built("sd3").folder, tmp_path / "sd3")
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps({**index, "text_encoder_3": [None, None], "tokenizer_3": [None, None]}))
    (folder / "transformer/config.json").write_text(json.dumps({"joint_attention_dim": 96}))
    parts = {**built("sd3").pipeline.components, "text_encoder_3": None, "tokenizer_3": None}
    pipeline = type(built("sd3").pipeline)(**parts)
    pipeline.set_progress_bar_config(disable=True)
    return Built(folder, pipeline, built("sd3").family)


def test_sd3_without_its_t5_keeps_what_clip_makes_and_the_zeros_come_back(sd3_without_t5, digest):
    encoder = encoder_of(sd3_without_t5, digest, "text")
    captions = ["a cat", "a caption of another length"]
    assert {name: tuple(one.shape) for name, one in entries_of(encoder, ["a cat"])["a cat"].items()} == {
        "prompt_embeds.text_encoder": (77, 32),
        "prompt_embeds.text_encoder_2": (77, 48),
        "pooled_prompt_embeds.text_encoder": (32,),
        "pooled_prompt_embeds.text_encoder_2": (48,),
    }
    assert encoder.entry_bytes(3) >= 77 * (32 + 48) * 4
    batch = batch_of(encoder, captions)
    embeds, _, pooled, _ = own(sd3_without_t5, captions)
    assert batch["prompt_embeds"].shape == (2, 77 + 256, 96)
    if embeds.shape != batch["prompt_embeds"].shape:
        tiny.diffusers_lacks("256 rows of zeros in the place of SD3's T5")
    torch.testing.assert_close(batch["prompt_embeds"], embeds)
    torch.testing.assert_close(batch["pooled_prompt_embeds"], pooled)
    assert encoder.count_tokens(["a cat" * 40])[0] > encoder.max_tokens == 77

    def run(**given):
        options: dict[str, Any] = {"height": 64, "width": 64, "num_inference_steps": 2, "output_type": "latent", "guidance_scale": 1.0}
        with torch.inference_mode():
            return sd3_without_t5.pipeline(**options, **given, generator=torch.Generator().manual_seed(0))[0]

    expected = run(prompt=captions)
    stored = {name: batch[name] for name in ("prompt_embeds", "pooled_prompt_embeds")}
    effect = (run(**{name: one.flip(0) for name, one in stored.items()}) - expected).norm()
    assert effect > 1e-5 * expected.norm(), "the captions make no difference to this tiny denoiser"
    assert (run(**stored) - expected).norm() <= min(1e-5 * expected.norm(), effect / 100)


def test_of_sd3_without_its_t5_one_text_encoder_alone_asks_the_denoiser_for_nothing(sd3_without_t5, digest):
    (sd3_without_t5.folder / "transformer/config.json").unlink()
    encoder = encoder_of(sd3_without_t5, digest, "text_encoder")
    assert batch_of(encoder, ["a cat"])["prompt_embeds.text_encoder"].shape == (1, 77, 32)
    with pytest.raises(BadInput):
        encoder_of(sd3_without_t5, digest, "text")
    (sd3_without_t5.folder / "transformer/config.json").write_text("{}")
    with pytest.raises(BadInput):
        encoder_of(sd3_without_t5, digest, "text")


def test_sd3_without_its_t5_in_memory_makes_what_its_folder_does(sd3_without_t5, digest):
    folder = encoder_of(sd3_without_t5, digest, "text")
    loaded = encoders_for(ModelRequest("", encode=["text"], loaded=read_loaded(sd3_without_t5.pipeline)), digest)[0]
    assert loaded.recipe.read == folder.recipe.read
    torch.testing.assert_close(batch_of(loaded, ["a cat"])["prompt_embeds"], batch_of(folder, ["a cat"])["prompt_embeds"])
    parts = {name: one for name, one in sd3_without_t5.pipeline.components.items() if name != "transformer"}
    given = read_loaded({"_class_name": "StableDiffusion3Pipeline", **parts})
    with pytest.raises(BadInput):
        encoders_for(ModelRequest("", encode=["text"], loaded=given), digest)


def test_the_layers_that_flux2_puts_side_by_side_are_counted_in_its_size(built, digest):
    encoder = encoder_of(built("flux2klein"), digest, "text")
    entry = entries_of(encoder, ["a cat"])["a cat"]
    assert encoder.entry_bytes(7) == entry["prompt_embeds"].nbytes == 512 * 3 * 32 * 4


@pytest.mark.parametrize(("name", "ids"), [("flux2klein", 1), ("flux", 2), ("chroma", 1)])
def test_ids_are_made_again_as_encode_prompt_makes_them(built, digest, name, ids):
    model = built(name)
    batch = batch_of(encoder_of(model, digest, "text"), ["a cat", "a dog"])
    expected = own(model, ["a cat", "a dog"])[ids]
    assert batch["text_ids"].equal(expected)
    assert batch["text_ids"].dtype == expected.dtype


def test_sana_is_given_calls_own_instruction_which_is_not_written_into_the_recipe(built, digest):
    model = built("sana")
    encoder = encoders_for(ModelRequest(str(model.folder), encode=["text"], text_dtype="float32"), digest)[0]
    assert len(str(encoder.recipe.make["encode_args"])) < 300
    instruction = inspect.signature(model.pipeline.__call__).parameters["complex_human_instruction"].default
    instructed, plain = (own(model, ["a cat"], complex_human_instruction=given)[0][0] for given in (instruction, None))
    found = entries_of(encoder, ["a cat"])["a cat"]["prompt_embeds"]
    assert float((found - instructed[: len(found)]).abs().max()) < 1e-5
    assert float((found - plain[: len(found)]).norm() / found.norm()) > 0.05


def test_another_default_of_call_than_the_recipe_knows_is_refused(built, digest):
    pipeline = built("sana").pipeline
    with pytest.raises(BadInput) as refused:
        call_arguments(pipeline, {"complex_human_instruction": {DEFAULT_OF_CALL: "0" * 64}})
    assert refused.value.option == "encode_arg"
    assert call_arguments(pipeline, {"max_sequence_length": 300}) == {"max_sequence_length": 300}


# Lengths: how many rows a caption takes, and padding it to no more than those

MASKED = (
    *("pixart", "sana", "lumina2", "wan", "qwenimage", "zimage", "hunyuanvideo", "mochi", "auraflow"),
    *("wan22", "ltx2", "ltx2-audio", "krea2", "cosmos", "cosmos2", "sanavideo"),
)
LENGTHS = ("", "a cat", "x" * 14, "A <b>Photograph</b>  of a &amp; a dog", "x" * 60, "y" * 700)
"""Captions that are cleaned, that end where a step of lengths does, and that are cut."""


def facts_of(encoder, caption):
    return encoder.prepare(encoder.resolve({"caption": caption}, None)).facts


@pytest.mark.parametrize("name", share(MASKED, 3, 1))
def test_the_tokens_of_a_caption_are_the_rows_it_has_with_its_template_after_cleaning(built, digest, name):
    encoder = encoder_of(built(name), digest, "text")
    captions = [caption for caption in LENGTHS if caption not in encoder.setup.family.alone]
    # Krea 2 takes the end of its template for 5 tokens, as it has for the published tokenizer; letter by letter it has 13.
    more = 13 - 5 if name == "krea2" else 0
    for caption, entry in entries_of(encoder, captions).items():
        facts = facts_of(encoder, caption)
        assert min(facts["tokens"], encoder.max_tokens) + more == len(entry["prompt_embeds"])
        assert facts["truncated"] == (facts["tokens"] > encoder.max_tokens) == (caption == LENGTHS[-1])


@pytest.mark.parametrize("name", ["lumina2", "zimage", "qwenimage", "flux2klein"])
def test_a_caption_that_fits_without_its_template_and_not_with_it_counts_as_truncated(built, digest, name):
    encoder = encoder_of(built(name), digest, "text")
    around = encoder.count_tokens([""])[0]
    fits, does_not = "x" * (encoder.max_tokens - around - 2), "x" * (encoder.max_tokens - 1)
    assert around > 2
    assert [facts_of(encoder, caption)["truncated"] for caption in (fits, does_not)] == [False, True]


def test_tokens_in_front_that_are_not_kept_are_not_counted_and_yet_make_batches_smaller(built, digest):
    encoder = encoder_of(built("qwenimage"), digest, "text")
    before = encoder.batch_limit(64)
    encoder.count_tokens(["a cat"])
    assert encoder._rewriter.dropped == 34
    assert encoder.batch_limit(64) < before


def test_counting_loads_a_tokenizer_and_no_weights_and_closing_gives_it_back(built, digest):
    encoder = encoder_of(built("zimage"), digest, "text")
    assert encoder.count_tokens([]) == []
    assert encoder._rewriter is None
    encoder.count_tokens(["a cat"])
    assert encoder._modules is None
    encoder.close()
    assert encoder._rewriter is None


def test_a_caption_that_is_no_unicode_text_is_refused_before_a_pipeline_gets_it(built, digest):
    encoder = encoder_of(built("lumina2"), digest, "text")
    with pytest.raises(EncodeFailed):
        encoder.count_tokens(["half a pair \ud800"])


def test_a_pipeline_that_cuts_no_caption_is_refused_when_it_is_asked_for_a_count(built, digest):
    rewriter = Rewriter(encoder_of(built("zimage"), digest, "text").setup)
    rewriter._encode_prompt = lambda prompt, **arguments: prompt
    with pytest.raises(BadInput):
        rewriter.count("a cat")


@pytest.mark.parametrize("name", share(MASKED, 4))
def test_captions_padded_to_their_own_length_equal_those_padded_to_the_limit(built, digest, name):
    model = built(name)
    own_args = model.family.encode_args or {}
    bucketed, exact = (encoder_of(model, digest, "text", encode_args={**own_args, **more}) for more in ({}, {"exact_padding": True}))
    assert (bucketed.recipe.make["padding"], exact.recipe.make["padding"]) == ("bucketed", "trimmed")
    assert bucketed.recipe.make["encode_args"] == exact.recipe.make["encode_args"]
    lengths = seen_lengths(bucketed, LENGTHS)
    found, expected = entries_of(bucketed, LENGTHS), entries_of(exact, LENGTHS)
    assert not bucketed._modules.is_whole
    for caption in LENGTHS:
        assert different(expected[caption], found[caption]) is None
    assert set(lengths) > {bucketed.max_tokens}, "nothing was padded to less than the limit"
    assert {length % 16 for length in lengths if length < bucketed.max_tokens} == {0}
    assert seen_lengths(exact, LENGTHS) == []


def different(one, other):
    """What differs between two entries by more than rounding, in words."""
    return difference(one, other, 1e-5)


def seen_lengths(encoder, captions):
    payloads = [encoder.prepare(encoder.resolve({"caption": caption}, None)).payload for caption in captions]
    return [payload.length for payload in payloads if isinstance(payload, Padded)]


def test_short_captions_come_to_the_text_encoder_with_short_padding(built, digest):
    encoder = encoder_of(built("pixart"), digest, "text")
    entries_of(encoder, ["a cat"])
    shapes = []
    model = next(module for module in encoder._modules._modules)
    hook = model.register_forward_pre_hook(
        lambda _module, given, named: shapes.append(tuple(given[0].shape if given else named["input_ids"].shape)), with_kwargs=True
    )
    entries_of(encoder, ["a cat", "a dog", "x" * 60, "y" * 700])
    hook.remove()
    assert sorted(shapes) == [(1, 64), (1, 300), (2, 16)]


def test_a_caption_with_more_rows_than_were_counted_is_not_cut(built, digest):
    encoder = encoder_of(built("pixart"), digest, "text")
    caption, short = "x" * 60, "a cat"
    expected = entries_of(encoder, [caption, short])
    keys = {one: encoder.resolve({"caption": one}, None).key for one in (caption, short)}
    made = encoder.submit([(keys[one], Padded(one, 32)) for one in (caption, short)])()
    for one in (caption, short):
        assert different(expected[one], made[keys[one]]) is None


def test_an_encoder_without_a_mask_is_found_out_and_padded_to_the_limit(built, digest, caplog):
    """LTX-Video, were its row to say what it must not."""
    model = built("ltx")
    row = replace(families.text_family("LTXPipeline"), is_masked=True)
    request = ModelRequest(str(model.folder), encode=["text"], text_dtype="float32", family=row)
    wrong, right = encoders_for(request, digest)[0], encoder_of(model, digest, "text")
    with caplog.at_level(logging.WARNING):
        found = entries_of(wrong, ["a cat", "x" * 60])
    assert "LTXPipeline: the caption '' gives another prompt_embeds" in caplog.text
    assert "captions are padded to the limit" in caplog.text
    assert wrong.batch_limit(16) == wrong.batch_limit(128)
    for caption, entry in entries_of(right, ["a cat", "x" * 60]).items():
        assert different(entry, found[caption]) is None


@pytest.mark.parametrize("name", sorted(set(tiny_families.FAMILIES) - {*MASKED, "ideogram4"}))
def test_a_family_whose_padding_counts_is_never_padded_to_less(built, digest, name):
    model = built(name)
    encoder = encoder_of(model, digest, "text")
    assert not encoder.setup.is_bucketed
    assert seen_lengths(encoder, LENGTHS) == []
    with pytest.raises(BadInput):
        encoders_for(ModelRequest(str(model.folder), encode=["text"], encode_args={"exact_padding": True}), digest)


def test_exact_padding_is_true_or_false(built, digest):
    with pytest.raises(BadInput):
        encoders_for(ModelRequest(str(built("wan").folder), encode=["text"], encode_args={"exact_padding": 1}), digest)


# The probe


def test_a_pipeline_whose_batch_differs_is_encoded_one_by_one_and_says_so(built, digest, monkeypatch, caplog):
    """Mochi without the rule for its empty caption, which is then the last of the probe's batch."""
    model = built("mochi")
    row = replace(families.text_family("MochiPipeline"), alone=frozenset())
    monkeypatch.setattr(prompts, "PROBES", ("a cat", "a photograph of a horse", ""))
    request = ModelRequest(str(model.folder), encode=["text"], text_dtype="float32", family=row)
    encoder = encoders_for(request, digest)[0]
    with caplog.at_level(logging.WARNING):
        found = entries_of(encoder, ["a dog", "a horse", ""])
    assert "MochiPipeline: the caption 'a cat' gives another prompt_embeds" in caplog.text
    assert "captions are encoded one by one" in caplog.text
    assert encoder.batch_limit("captions") == 1
    assert [len(entry["prompt_embeds"]) > 0 for entry in found.values()] == [True, True, False]


def test_a_batch_that_raises_is_encoded_one_by_one_and_says_so(built, digest, caplog):
    encoder = encoder_of(built("sd15"), digest, "text")
    entries_of(encoder, ["a cat"])
    call = encoder._modules._call

    def only_single(captions):
        if len(captions) > 1:
            raise ValueError("one at a time")
        return call(captions)

    encoder._modules._call = only_single
    alone = entries_of(encoder, ["", "a cat"], together=False)
    assert encoder._modules._why_single(alone, torch.device("cpu")) == "a batch of 2 captions ends in ValueError (one at a time)"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_difference_is_one_of_names_of_shapes_or_of_more_than_rounding(dtype):
    bound = tolerance(dtype, torch.device("cpu"))
    one = torch.ones(4, 8)
    assert difference({}, {}, bound) is None
    assert difference({"a": one[:0]}, {"a": one[:0]}, bound) is None
    assert difference({"a": one}, {"a": one * (1 + bound / 2)}, bound) is None
    assert "differs by" in str(difference({"a": one}, {"a": one * (1 + bound * 2)}, bound))
    assert "differs by" in str(difference({"a": one}, {"a": one * float("nan")}, bound))
    assert "set of tensors" in str(difference({"a": one}, {"b": one}, bound))
    assert "[3, 8] for [4, 8]" in str(difference({"a": one}, {"a": one[:3]}, bound))


# Pipelines without a row


@pytest.fixture
def without_rows(monkeypatch):
    monkeypatch.setattr(recipes, "TEXT_FAMILIES", {})


@pytest.mark.parametrize("name", ["sd15", "sdxl", "pixart", "ltx", "wan", "cogvideox"])
def test_a_pipeline_without_a_row_is_understood_and_kept_whole(built, digest, without_rows, name):
    model = built(name)
    encoder = encoder_of(model, digest, "text")
    assert encoder.setup.family.is_found
    assert "diffusers" in encoder.recipe.make["packages"]
    caption = "a cat on a mat"
    entry = entries_of(encoder, [caption, "", "another one"])[caption]
    returned = own(model, [caption], **encoder.setup.args)
    assert set(entry) >= {"prompt_embeds"}
    torch.testing.assert_close(entry["prompt_embeds"], returned[0][0], rtol=1e-5, atol=1e-5)
    if "prompt_attention_mask" in entry:
        assert entry["prompt_attention_mask"].equal(returned[1][0])
    assert batch_of(encoder, [caption, ""])["prompt_embeds"].shape == (2, *entry["prompt_embeds"].shape)


def test_a_pipeline_without_a_row_whose_length_changes_is_refused_with_what_is_not_known(built, digest, without_rows):
    encoder = encoder_of(built("zimage"), digest, "text")
    with pytest.raises(BadInput):
        entries_of(encoder, ["a cat"])


@pytest.mark.parametrize(
    ("name", "index", "message"),
    [
        ("NoSuchPipeline", {}, "is not known"),
        ("FluxPipeline", {}, "it has no tokenizer and text encoder"),
        (
            "QwenImageEditInpaintPipeline",
            {"text_encoder": ["a", "b"], "tokenizer": ["a", "b"]},
            "sees pictures too .encode_prompt takes image",
        ),
        ("KandinskyV22Pipeline", {}, "it has no encode_prompt"),
        ("Flux2KleinPipeline", {}, "it puts several layers of its text encoder side by side"),
        ("LTX2Pipeline", {"connectors": ["ltx2", "LTX2TextConnectors"]}, "it also has connectors to make its embeddings"),
        ("Cosmos2_5_PredictBasePipeline", {}, "it puts several layers"),
        ("AudioLDM2Pipeline", {"projection_model": ["a", "b"]}, "it also has projection_model"),
    ],
)
def test_a_pipeline_that_cannot_be_understood_is_refused_with_what_is_missing(without_rows, name, index, message):
    if name != "NoSuchPipeline":
        tiny.of_diffusers(name)
    with pytest.raises(BadInput, match=message):
        find_family(name, index)


def test_a_pipeline_that_diffusers_cannot_import_is_refused_with_the_reason(without_rows, monkeypatch):
    class Diffusers:
        """As diffusers 0.33 without torchvision."""

        def __getattr__(self, name):
            raise RuntimeError(
                f"Failed to import {name} because of the following error (look up to see its traceback):\nNo module named 'torchvision'"
            )

    monkeypatch.setattr(introspection.importlib, "import_module", lambda name: Diffusers())
    with pytest.raises(BadInput):
        introspection.find_family("OmniGenPipeline", {})


@pytest.mark.parametrize("ask", ["count_tokens", "submit"])
def test_a_family_that_is_newer_than_the_installed_diffusers_ends_the_run_and_says_so(built, digest, ask):
    """As Z-Image with diffusers 0.33: what it lacks is no fault of a caption."""
    import diffusers

    row = replace(families.text_family("StableDiffusionPipeline"), pipeline="FuturePipeline", rewrites_captions=True)
    encoder: Any = encoders_for(ModelRequest(str(built("sd15").folder), encode=["text"], family=row), digest)[0]
    argument = ["a cat"] if ask == "count_tokens" else [(encoder.resolve({"caption": "a cat"}, None).key, "a cat")]
    message = f"needs FuturePipeline, which diffusers {diffusers.__version__} does not have; pip install -U diffusers"
    with pytest.raises(BadInput, match=message):
        getattr(encoder, ask)(argument)


def test_a_row_of_ones_own_takes_the_place_of_the_tables(built, digest):
    row = replace(families.text_family("ZImagePipeline"), name="mine", constants={}, args={"max_sequence_length": 64})
    encoder = encoders_for(ModelRequest(str(built("zimage").folder), encode=["text"], family=row), digest)[0]
    assert encoder.recipe.read["family"] == "mine"
    assert len(entries_of(encoder, ["x" * 99])["x" * 99]["prompt_embeds"]) == 64


def test_flux_kontext_is_encoded_as_flux_is(built, digest, tmp_path):
    tiny.of_diffusers("FluxKontextPipeline")
    shutil.copytree(built("flux").folder, tmp_path / "kontext")
    index = json.loads((tmp_path / "kontext/model_index.json").read_text())
    (tmp_path / "kontext/model_index.json").write_text(json.dumps({**index, "_class_name": "FluxKontextPipeline"}))
    kontext = encoders_for(ModelRequest(str(tmp_path / "kontext"), encode=["text"], text_dtype="float32"), digest)[0]
    flux = encoder_of(built("flux"), digest, "text")
    one, other = (entries_of(encoder, ["a cat"])["a cat"] for encoder in (kontext, flux))
    assert one["prompt_embeds"].equal(other["prompt_embeds"])
    assert kontext.recipe.read["constants"] == flux.recipe.read["constants"]


# VAEs


def test_flux2_is_normalised_by_its_weights_as_its_pipeline_does(built, digest):
    model = built("flux2klein")
    encoder = encoder_of(model, digest, "latents")
    assert encoder.setup.multiple == 4
    pixels = torch.rand(1, 3, 64, 64) * 2 - 1
    with torch.inference_mode():
        raw = model.pipeline.vae.encode(pixels).latent_dist.parameters[0]
        expected = model.pipeline._encode_vae_image(pixels, torch.Generator())[0]
    found = read_latents(parse_latents(encoder.recipe), "mean", {"moments": raw})
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_statistics_are_read_from_weights_of_any_dtype_and_from_shards(built, digest, tmp_path):
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        save_file({"a": torch.tensor([1.5, -2.0], dtype=dtype)}, tmp_path / "one.safetensors")
        save_file({"b": torch.tensor([3.0], dtype=dtype)}, tmp_path / "two.safetensors")
        files = {name: tmp_path / name for name in ("one.safetensors", "two.safetensors")}
        component = Component("vae", "diffusers", "AutoencoderKLFlux2", tmp_path, files)
        assert read_numbers(component, {"mean": "a", "std": "b"}) == {"mean": [1.5, -2.0], "std": [3.0]}
        assert read_numbers(component, {}) == {}
    with pytest.raises(BadInput):
        read_numbers(component, {"mean": "c"})
    (tmp_path / "one.safetensors").write_bytes(b"no weights")
    with pytest.raises(BadInput):
        read_numbers(component, {"mean": "a"})


@pytest.mark.parametrize("name", ["wan", "qwenimage", "ltx", "cogvideox", "hunyuanvideo", "hunyuanvideo15", "mochi"])
def test_a_picture_is_a_video_of_one_frame(built, digest, name):
    encoder = encoder_of(built(name), digest, "latents")
    assert encoder.setup.has_frames
    assert encoder.recipe.read["temporal_factor"] > 1


def test_a_vae_that_takes_one_picture_at_a_time_gets_one_at_a_time(built, digest, monkeypatch):
    """As HunyuanVideo 1.5's does with its own attention."""
    monkeypatch.setattr(vae, "frame_by_frame", nullcontext)
    encoder = encoder_of(built("hunyuanvideo15"), digest, "latents", batch_size=8)
    assert encoder.batch_limit(Size(64, 64)) == 8
    encoder._vae = vae.Vae(encoder.setup, torch.device("cpu"))
    assert encoder._vae.is_single
    assert encoder.batch_limit(Size(64, 64)) == 1


def test_a_vae_whose_batch_differs_is_called_one_by_one_and_says_so(built, digest, monkeypatch, caplog):
    real = vae.load_module

    def mixing(*arguments):
        """A VAE that mixes the pictures of a batch, as normalising over a batch would."""
        module = deepcopy(real(*arguments))
        encode = module.encode
        module.encode = lambda pixels: encode(pixels - pixels.mean(dim=0, keepdim=True) if len(pixels) > 1 else pixels)
        return module

    monkeypatch.setattr(vae, "load_module", mixing)
    assert vae.Vae(encoder_of(built("sd15"), digest, "latents").setup, modules.choose_device("cpu")).is_single
    assert "AutoencoderKL: a picture gives other latents in a batch than alone" in caplog.text
