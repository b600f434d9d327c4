"""A caption for each text encoder: each encoder makes what it makes of its own caption, and keys differ only where captions do."""

import inspect
import json
import shutil
from typing import Any

import pytest

import cachestore as cs
from cachestore.core.inputs import caption_key
from cachestore.encode.families.text import TEXT_FAMILIES
from cachestore.encode.recipes import ModelRequest, encoders_for
from tests.encode import tiny
from tests.encode.encoders import encoder_of

A, B, C, D = "a red fox", "fox, snow, 1girl, " * 9, "", 'x "SIGN"'
REQUESTS: list[dict[str, Any]] = [
    {"caption": A},
    {"caption": A, "captions": {"text_encoder_2": B}},
    {"caption": B, "captions": {"text_encoder_2": A}},
    {"caption": A, "captions": {"text_encoder": C, "text_encoder_2": D}},
]
MAKERS: dict[str, dict[str, tuple[str, ...]]] = {
    "sdxl": {
        "text_encoder": ("prompt_embeds.text_encoder",),
        "text_encoder_2": ("prompt_embeds.text_encoder_2", "pooled_prompt_embeds"),
    },
    "flux": {"text_encoder": ("pooled_prompt_embeds",), "text_encoder_2": ("prompt_embeds",)},
    "sd3": {
        **{name: (f"prompt_embeds.{name}", f"pooled_prompt_embeds.{name}") for name in ("text_encoder", "text_encoder_2")},
        "text_encoder_3": ("prompt_embeds.text_encoder_3",),
    },
    "hidream": {"text_encoder_3": ("prompt_embeds_t5",), "text_encoder_4": ("prompt_embeds_llama3",)},
}
"""By tiny family: what each text encoder makes, as far as it is stored apart."""


def resolved(encoder, request) -> Any:
    return encoder.resolve(request, None)


def entries(encoder, requests):
    """The entries of requests, encoded with all others of their group, by index."""
    groups: dict[Any, list[Any]] = {}
    for index, request in enumerate(requests):
        one = resolved(encoder, request)
        prepared = encoder.prepare(one)
        groups.setdefault(prepared.group, []).append((index, one.key, prepared.payload))
    found: dict[int, Any] = {}
    for group in groups.values():
        made = encoder.submit([(key, payload) for _index, key, payload in group])()
        found |= {index: made[key] for index, key, _payload in group}
    return found


@pytest.mark.torch
def test_a_row_has_own_captions_exactly_if_its_pipeline_uses_a_prompt_for_each_encoder():
    import diffusers

    for row in TEXT_FAMILIES.values():
        pipeline = getattr(diffusers, row.pipeline or "", None)
        if pipeline is None:
            continue
        takes = inspect.signature(pipeline.encode_prompt).parameters
        ignores = row.name.startswith("hunyuanvideo")  # their pipelines set prompt_2 and do not read it
        uses = not ignores and all(name.replace("text_encoder", "prompt") in takes for name in row.encoders)
        assert row.captioned == (row.encoders if uses and len(row.encoders) > 1 else ()), row.name


def families(*fast):
    return [name if name in fast else pytest.param(name, marks=pytest.mark.slow) for name in MAKERS]


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore::FutureWarning:diffusers")
@pytest.mark.parametrize("name", families("sdxl", "flux"))
def test_each_encoder_makes_what_it_makes_of_its_own_caption(built, digest, name):
    import torch

    encoder = encoder_of(built(name), digest, "text")
    texts = list(dict.fromkeys(text for request in REQUESTS for text in (request["caption"], *request.get("captions", {}).values())))
    alone = dict(zip(texts, entries(encoder, [{"caption": text} for text in texts]).values(), strict=True))
    made = entries(encoder, REQUESTS)
    for index, request in enumerate(REQUESTS):
        for part, stored in MAKERS[name].items():
            own = request.get("captions", {}).get(part, request["caption"])
            for tensor in stored:
                torch.testing.assert_close(made[index][tensor], alone[own][tensor], rtol=2e-4, atol=2e-5)


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore::FutureWarning:diffusers")
@pytest.mark.parametrize("name", families("sdxl", "flux"))
def test_the_tokens_that_are_counted_are_those_of_the_caption_that_the_counting_encoder_reads(built, digest, name):
    encoder = encoder_of(built(name), digest, "text")
    counting = encoder.setup.family.tokenizer.replace("tokenizer", "text_encoder")
    for request in REQUESTS:
        own = request.get("captions", {}).get(counting, request["caption"])
        assert encoder.counted_caption(request) == own
        assert encoder.prepare(resolved(encoder, request)).facts["tokens"] == encoder.count_tokens([own])[0]


def look_alike(folder, digest, encode) -> Any:
    """The text encoder of a folder that says that it is SDXL's, whose weights are a few letters."""
    index = json.loads((tiny.look_alike(folder, "StableDiffusionXLPipeline") / "model_index.json").read_text())
    for part in ("text_encoder", "tokenizer"):
        shutil.copytree(folder / part, folder / f"{part}_2")
        index[f"{part}_2"] = index[part]
    (folder / "model_index.json").write_text(json.dumps(index))
    return encoders_for(ModelRequest(str(folder), encode=encode, device="cpu"), digest)[0]


def test_a_key_is_that_of_the_caption_alone_wherever_all_encoders_read_the_same(tmp_path, digest):
    encoder = look_alike(tmp_path, digest, ["text"])
    plain = caption_key(encoder.recipe.fingerprint, A)
    same = [{"caption": A}, {"caption": A, "captions": {"text_encoder_2": A}}, {"caption": A, "captions": {}}]
    same.append({"caption": B, "captions": {"text_encoder": A, "text_encoder_2": A}})
    assert {resolved(encoder, request).key for request in same} == {plain}
    assert resolved(encoder, same[0]).inputs == resolved(encoder, same[-1]).inputs
    swapped = {"caption": B, "captions": {"text_encoder": A}}
    assert resolved(encoder, swapped).key == resolved(encoder, {"caption": A, "captions": {"text_encoder_2": B}}).key
    assert len({resolved(encoder, request).key for request in REQUESTS}) == len(REQUESTS)
    assert resolved(encoder, REQUESTS[1]).meta["caption.text_encoder_2"] == B


def test_an_encoder_alone_has_the_keys_of_the_captions_that_it_reads(tmp_path, digest):
    for number, name in enumerate(("text_encoder", "text_encoder_2")):
        encoder = look_alike(tmp_path / name, digest, [name])
        keys = [resolved(encoder, request).key for request in REQUESTS]
        assert keys == [caption_key(encoder.recipe.fingerprint, one) for one in ((A, A, B, C), (A, B, A, D))[number]]


def test_an_encoder_that_stands_alone_reads_the_samples_caption(tmp_path, digest):
    encoder = encoders_for(ModelRequest(str(tiny.look_alike_text(tmp_path)), encode=["text"], device="cpu"), digest)[0]
    assert {resolved(encoder, request).key for request in (REQUESTS[0], REQUESTS[1])} == {caption_key(encoder.recipe.fingerprint, A)}


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore::FutureWarning:diffusers")
def test_through_a_store_a_batch_has_both_and_verify_encodes_the_same_again(built, tmp_path):
    rows = [{"id": "both", "caption": A, "caption.text_encoder_2": B}, {"id": "a", "caption": A}, {"id": "b", "caption": B}]
    manifest, store, model = tmp_path / "rows.jsonl", tmp_path / "store", str(built("sdxl").folder)
    manifest.write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = cs.precompute(manifest, model=model, store=store, encode=("text",), inline=True)
    assert (report.complete, report.encoded) == (True, 4), "the empty caption too"
    data = cs.CachedDataset(store, generation=report.generation)
    both, one, two = (data[data.index(name)] for name in ("both", "a", "b"))
    width = built("sdxl").pipeline.text_encoder.config.hidden_size
    assert both["prompt_embeds"][:, :width].equal(one["prompt_embeds"][:, :width])
    assert both["prompt_embeds"][:, width:].equal(two["prompt_embeds"][:, width:])
    assert both["pooled_prompt_embeds"].equal(two["pooled_prompt_embeds"])
    assert (both["caption"], both["caption.text_encoder_2"]) == (A, B)
    checked = cs.verify(store, recompute=4)
    assert (checked.ok, (checked.recomputed or {}).get("equal")) == (True, 3), "the empty caption belongs to no sample"
