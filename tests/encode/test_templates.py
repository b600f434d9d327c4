"""Templates, layers and processors: what stands around the captions of each family, and what is made of an encoder's layers."""

import json
import shutil
from dataclasses import replace
from typing import Any

import pytest
import torch
from PIL import Image

import cachestore as cs
from cachestore.encode.models.processor import Processor
from tests.encode import tiny_families
from tests.encode.encoders import Built, encoder_of, entries_of
from tests.encode.test_traps import LENGTHS, different, facts_of, group_of, own, seen_lengths
from tests.fakes import asks_for

pytestmark = pytest.mark.torch


def test_ltx2_keeps_one_row_a_token_of_the_layers_that_its_encoder_makes(built, digest):
    model = built("ltx2")
    encoder = encoder_of(model, digest, "text")
    entry = entries_of(encoder, ["a cat"])["a cat"]
    raw, mask = own(model, ["a cat"], max_sequence_length=256)[:2]
    assert set(entry) == {"prompt_embeds"}
    assert (entry["prompt_embeds"].shape, raw.shape) == ((int(mask.sum()), 32), (1, 256, 4 * 32))
    assert encoder.entry_bytes(encoder.count_tokens(["a cat"])[0]) == entry["prompt_embeds"].nbytes


def test_ltx2_projects_with_the_connectors_and_leaves_their_transformers_in_place(built, digest):
    model = built("ltx2-audio")
    encoder = encoder_of(model, digest, "text")
    entry = entries_of(encoder, ["a cat"])["a cat"]
    connectors = next(module for module in encoder._modules._modules if hasattr(module, "video_connector"))
    assert type(connectors.video_connector).__name__ == "LTX2ConnectorTransformer1d"
    assert entry["prompt_embeds"].shape == entry["audio_prompt_embeds"].shape
    assert not entry["prompt_embeds"].equal(entry["audio_prompt_embeds"])


def test_krea2_keeps_the_caption_and_the_end_of_the_template_without_the_padding_between(built, digest):
    model = built("krea2")
    entry = entries_of(encoder_of(model, digest, "text"), ["a cat", "x" * 60])["a cat"]
    embeds, mask = own(model, ["a cat"])
    last = int(mask[0].nonzero()[-1])
    assert not mask[0, : last + 1].all(), "the padding is no longer in the middle"
    torch.testing.assert_close(entry["prompt_embeds"], embeds[0][mask[0]], rtol=1e-4, atol=1e-5)


def test_a_caption_beyond_the_limit_of_kandinsky_cuts_no_other_one(built, digest):
    model, short, long = built("kandinsky5"), "a cat", "y" * 1200
    encoder = encoder_of(model, digest, "text")
    lengths = [own(model, [short, *more], max_sequence_length=1024)[2].diff()[0] for more in ([], [long])]
    assert lengths[1] < lengths[0], "the pipeline no longer cuts the others of a batch: captions may share it again"
    assert group_of(encoder, long) != group_of(encoder, short)
    assert encoder.batch_limit(group_of(encoder, long)) == 1
    found = entries_of(encoder, [short, long])
    assert found[short].keys() == {"prompt_embeds_qwen", "prompt_embeds_clip"}
    assert [len(found[one]["prompt_embeds_qwen"]) for one in (short, long)] == [lengths[0], encoder.max_tokens]
    assert facts_of(encoder, long)["truncated"]


def test_a_caption_beyond_the_limit_of_ideogram_fails_alone(built, tmp_path):
    (tmp_path / "prompts.txt").write_text(f"a cat\n{'y' * 300}\n")
    args = {"max_sequence_length": 256}
    report = cs.precompute(
        tmp_path / "prompts.txt",
        model=built("ideogram4").folder,
        store=tmp_path / "store",
        encode=["text"],
        encode_args=args,
        device="cpu",
        inline=True,
    )
    assert (report.encoded, report.failed) == (2, 1)
    assert "exceeds max_sequence_length=256" in report.failures[0]["reason"]


def test_ideograms_captions_are_padded_to_their_own_length(built, digest):
    limit = {"max_sequence_length": 512}  # at its own limit of 2,048, exact padding takes 15 s
    encoder = encoder_of(built("ideogram4"), digest, "text", encode_args=limit)
    exact = encoder_of(built("ideogram4"), digest, "text", encode_args={**limit, "exact_padding": True})
    captions = LENGTHS[:-1:4]
    found, expected = entries_of(encoder, captions), entries_of(exact, captions)
    assert not encoder._modules.is_whole
    assert max(seen_lengths(encoder, captions)) < encoder.max_tokens
    for caption in captions:
        assert different(expected[caption], found[caption]) is None


def test_of_a_processor_that_reads_captions_alone_the_tokenizer_is_loaded(built, digest, tmp_path):
    """FLUX.2 as it is published: its tokenizer is a processor, whose constructor needs torchvision."""
    model = built("flux2")
    folder = shutil.copytree(model.folder, tmp_path / "model")
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps({**index, "tokenizer": ["transformers", "PixtralProcessor"]}))
    plain, processed = (encoder_of(replace(model, folder=one), digest, "text") for one in (model.folder, folder))
    for caption in ("", 'a "cat"'):
        one, other = (entries_of(encoder, [caption])[caption]["prompt_embeds"] for encoder in (plain, processed))
        assert one.equal(other)
        assert plain.count_tokens([caption]) == processed.count_tokens([caption])


def test_a_conversation_is_read_as_by_transformers_own_processors():
    reader = tiny_families.with_pictures(tiny_families.qwen_tokenizer())
    theirs, ours = tiny_families.qwen_processor(reader, None), Processor(reader)
    talk = [[{"role": "user", "content": [{"type": "text", "text": text}]}] for text in ("a cat", "a dog on a mat")]
    options: dict[str, Any] = {"tokenize": True, "return_tensors": "pt", "padding": "max_length", "max_length": 40, "truncation": True}
    for conversation in (talk, talk[0]):
        for is_dict in (True, False):
            one, other = (each.apply_chat_template(conversation, return_dict=is_dict, **options) for each in (theirs, ours))
            for name in ("input_ids", "attention_mask") if is_dict else ("",):
                assert (one[name] if name else one).equal(other[name] if name else other)
        assert ours.apply_chat_template(conversation) == theirs.apply_chat_template(conversation)


@pytest.mark.parametrize("class_name", ["FluxFillPipeline", "FluxControlPipeline"])
def test_the_text_of_flux_fill_and_control_is_that_of_their_own_pipelines(digest, tmp_path, class_name):
    pipeline = tiny_families.flux(class_name)
    tiny_families.save(tiny_families.Family(None), pipeline, tmp_path)
    encoder = encoder_of(Built(tmp_path, pipeline, tiny_families.Family(None)), digest, "text")
    entry = entries_of(encoder, ["a cat", "a dog"])["a cat"]
    embeds, pooled, _ids = own(Built(tmp_path, pipeline, None), ["a cat"], max_sequence_length=512)
    torch.testing.assert_close(entry["prompt_embeds"], embeds[0])
    torch.testing.assert_close(entry["pooled_prompt_embeds"], pooled[0])


def test_frames_are_refused_for_the_vae_of_qwen_image_21_which_takes_pictures_alone(built, tmp_path):
    Image.new("RGB", (64, 64), "red").save(tmp_path / "a.png")
    options: dict[str, Any] = {
        "model": built("qwenimage21").folder,
        "encode": ["latents"],
        "resolution": 64,
        "device": "cpu",
        "inline": True,
    }
    with pytest.raises(cs.BadInput, check=asks_for("frames", "AutoencoderKLQwenImage21")):
        cs.precompute(tmp_path, store=tmp_path / "store", frames=[9], **options)
    assert cs.precompute(tmp_path, store=tmp_path / "store", **options).encoded == 1
