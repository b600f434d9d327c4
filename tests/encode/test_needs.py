"""What a model's training also needs and is not made here is said before anything is encoded, and `--strict` refuses it."""

import json
import logging
import shutil
from typing import Any

import pytest
from PIL import Image

import cachestore as cs
from cachestore.cli import OK, USAGE, main
from cachestore.core.errors import BadUsage
from cachestore.core.samples import CONTROL
from cachestore.encode.families.text import TEXT_FAMILIES
from cachestore.encode.models.loaded import read_loaded
from cachestore.encode.needs import needs_of
from tests import fakes
from tests.encode import tiny_families
from tests.shares import share

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore::FutureWarning:diffusers")]

CHANNELS = {
    "StableDiffusionPipeline": [(4, 4)],
    "StableDiffusionXLPipeline": [(4, 4)],
    "StableDiffusion3Pipeline": [(16, 16)],
    "FluxPipeline": [(64, 16)],
    "Flux2KleinPipeline": [(128, 32)],
    "PixArtSigmaPipeline": [(4, 4)],
    "SanaPipeline": [(32, 32)],
    "Lumina2Pipeline": [(16, 16)],
    "WanPipeline": [(16, 16), (48, 48)],
    "QwenImagePipeline": [(64, 16)],
    "LTXPipeline": [(128, 128)],
    "CogVideoXPipeline": [(16, 16)],
    "ZImagePipeline": [(16, 16)],
    "ChromaPipeline": [(64, 16)],
    "HunyuanVideo15Pipeline": [(65, 32)],
    "CogView4Pipeline": [(16, 16)],
    "HunyuanVideoPipeline": [(16, 16)],
    "MochiPipeline": [(12, 12)],
    "AuraFlowPipeline": [(4, 4)],
    "Flux2Pipeline": [(128, 32)],
    "Krea2Pipeline": [(64, 16)],
    "HiDreamImagePipeline": [(16, 16)],
    "Ideogram4Pipeline": [(128, 32)],
    "ErnieImagePipeline": [(128, 32)],
    "Kandinsky5T2VPipeline": [],
    "Kandinsky5T2IPipeline": [],
    "HunyuanImagePipeline": [(64, 64)],
    "CosmosTextToWorldPipeline": [(16, 16)],
    "Cosmos2TextToImagePipeline": [(16, 16)],
    "QwenImage21Pipeline": [(64, 64)],
    "SanaVideoPipeline": [(16, 16), (128, 128)],
}
"""What the denoiser and the VAE of published models take and give: the channels."""
WITH_NEEDS = {
    "FluxFillPipeline",
    "FluxControlPipeline",
    "FluxKontextPipeline",
    "QwenImageEditPipeline",
    "QwenImageEditPlusPipeline",
    "LTX2Pipeline",
    "HunyuanVideoImageToVideoPipeline",
}
PLAIN_PARTS = {"text_encoder": "A", "tokenizer": "B", "vae": "C", "transformer": "D", "scheduler": "E", "feature_extractor": "F"}


def words_of(class_name, channels=None, **parts):
    takes, gives = channels or (None, None)
    configs = {"transformer": {"in_channels": takes}, "vae": {"latent_channels": gives}} if channels else {}
    return "; ".join(need.words for need in needs_of(class_name, {**PLAIN_PARTS, **parts}, configs))


def test_nothing_is_reported_of_any_family_of_the_table_as_it_is_published():
    assert CHANNELS.keys() | WITH_NEEDS == TEXT_FAMILIES.keys()
    for class_name, published in CHANNELS.items():
        assert [words_of(class_name, channels) for channels in published] == [""] * len(published)
        assert words_of(class_name) == ""
        assert words_of(class_name, image_encoder="CLIPVisionModelWithProjection") == ""  # an adapter's


@pytest.mark.parametrize("name", share(sorted(tiny_families.FAMILIES), 4))
def test_nothing_is_reported_of_a_loaded_pipeline_of_any_family(built, name):
    class_name, parts, configs = read_loaded(built(name).pipeline).outline()
    assert (needs_of(class_name, parts, configs) == ()) == (class_name not in WITH_NEEDS)


@pytest.mark.parametrize(
    ("class_name", "channels", "parts", "expected"),
    [
        (
            "WanImageToVideoPipeline",
            (36, 16),
            {"image_encoder": "CLIPVisionModel"},
            ("first frame", "image embeddings (image_encoder, CLIP"),
        ),
        ("WanImageToVideoPipeline", (36, 16), {}, ("first frame",)),
        ("WanVACEPipeline", (16, 16), {}, ("role `control` or `mask`",)),
        ("WanAnimatePipeline", (36, 16), {"image_encoder": "CLIPVisionModel"}, ("pose video", "face video", "image embeddings")),
        ("LTXImageToVideoPipeline", None, {}, ("first frame",)),
        ("CogVideoXImageToVideoPipeline", (32, 16), {}, ("first frame",)),
        ("HunyuanVideo15ImageToVideoPipeline", (65, 32), {"image_encoder": "SiglipVisionModel"}, ("first frame", "image embeddings")),
        ("FluxFillPipeline", (384, 16), {}, ("masked picture",)),
        ("FluxControlPipeline", (128, 16), {}, ("control picture",)),
        ("FluxKontextPipeline", (64, 16), {}, ("control picture",)),
        ("QwenImageEditPlusPipeline", (64, 16), {}, ("control picture",)),
        ("FluxControlNetPipeline", (64, 16), {"controlnet": "FluxControlNetModel"}, ("control pictures (controlnet",)),
        ("StableDiffusionXLInpaintPipeline", (9, 4), {}, ("masked picture",)),
        ("StableDiffusionInpaintPipeline", None, {}, ("masked picture",)),
        ("StableDiffusion3InpaintPipeline", (33, 16), {}, ("masked picture",)),
        ("StableDiffusionInstructPix2PixPipeline", (8, 4), {}, ("control picture",)),
        ("StableDiffusionDepth2ImgPipeline", (5, 4), {"depth_estimator": "DPTForDepthEstimation"}, ("depth maps",)),
        ("JoyImageEditPipeline", (16, 16), {}, ("control picture",)),
        ("QwenImageLayeredPipeline", (64, 16), {}, ("picture's layers",)),
        ("StableDiffusionUpscalePipeline", (7, 4), {}, ("small picture",)),
        (
            "LTX2Pipeline",
            (128, 128),
            {"audio_vae": "AutoencoderKLLTX2Audio", "vocoder": "LTX2Vocoder", "connectors": "LTX2TextConnectors"},
            ("audio latents",),
        ),
        ("LTX2ImageToVideoPipeline", (128, 128), {"audio_vae": "AutoencoderKLLTX2Audio"}, ("audio latents",)),
        (
            "LTX2FuturePipeline",
            (128, 128),
            {"audio_vae": "AutoencoderKLLTX2Audio", "vocoder": "LTX2Vocoder", "connectors": "LTX2TextConnectors"},
            ("audio latents (audio_vae", "connectors"),
        ),
        (
            "FuturePipeline",
            (40, 16),
            {"mind_encoder": "Mind"},
            ("it takes 40, latents have 16", "the output of another encoder (mind_encoder, Mind)"),
        ),
    ],
)
def test_what_a_model_is_trained_with_besides_is_named(class_name, channels, parts, expected):
    words = words_of(class_name, channels, **parts)
    assert all(one in words for one in expected), words
    assert words.count(";") == len(expected) - 1


@pytest.mark.parametrize(("class_name", "channels"), [("StableDiffusionXLPipeline", (9, 4)), ("FluxPipeline", (384, 16))])
def test_weights_for_inpainting_are_recognised_under_the_plain_class_too(class_name, channels):
    assert "masked picture" in words_of(class_name, channels)


@pytest.mark.parametrize(
    ("class_name", "channels"),
    [
        ("StableDiffusionXLInpaintPipeline", (4, 4)),
        ("FluxInpaintPipeline", (64, 16)),
        ("StableDiffusionXLImg2ImgPipeline", (4, 4)),
        ("WanVideoToVideoPipeline", (16, 16)),
        # the first frame takes the place of the clip's own first latent frame
        ("WanImageToVideoPipeline", (48, 48)),
        ("LTXImageToVideoPipeline", (128, 128)),
        ("MotifVideoPipeline", (33, 16)),
    ],
)
def test_plain_weights_under_another_class_need_nothing_else(class_name, channels):
    assert words_of(class_name, channels) == ""


def test_a_control_picture_is_needed_only_where_no_sample_has_one():
    assert [need.role for need in needs_of("FluxControlPipeline", {}, {})] == [CONTROL]


def as_class(built, name, class_name, folder, **index):
    """A tiny pipeline's folder under another class, with more in its index."""
    shutil.copytree(built(name).folder, folder)
    found = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps({**found, "_class_name": class_name, **index}))
    return folder


@pytest.fixture
def inpainting(built, tmp_path):
    """Stable Diffusion XL for inpainting, as far as a folder tells."""
    folder = as_class(built, "sdxl", "StableDiffusionXLPipeline", tmp_path / "model")
    (folder / "unet" / "config.json").write_text(json.dumps({"in_channels": 9}))
    return folder


def pictures(folder, **row):
    folder.mkdir()
    for number, name in enumerate("ab"):
        Image.new("RGB", (64, 64), (200, 30 * number, 7)).save(folder / f"{name}.png")
    rows = [{"image": f"{name}.png", "caption": f"a {name}", **row} for name in "ab"]
    (folder / "rows.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    return folder / "rows.jsonl"


def test_it_is_reported_before_encoding_in_the_plan_in_the_report_and_when_all_is_there(inpainting, tmp_path, capsys, monkeypatch):
    fakes.work_here(monkeypatch)
    asked = ["precompute", str(pictures(tmp_path / "data")), "--model", str(inpainting), "--store", str(tmp_path / "store")]
    asked += ["--resolution", "64", "--device", "cpu"]
    line = "not made here: latents of the masked picture, and its mask as the denoiser takes it"
    assert main([*asked, "--plan-only"]) == OK
    assert capsys.readouterr().out.startswith(line)
    assert main([*asked, "--plan-only", "--json"]) == OK
    assert "masked picture" in json.loads(capsys.readouterr().out)["not_made_here"][0]
    assert main(asked) == OK
    reported = capsys.readouterr()
    assert line in reported.err
    assert line in reported.out
    assert main([*asked, "--json"]) == OK
    again = capsys.readouterr()
    assert line in again.err
    assert json.loads(again.out)["encoded"] == 0
    assert "masked picture" in json.loads(again.out)["not_made_here"][0]


def test_strict_refuses_it_before_a_store_is_made(inpainting, tmp_path, capsys):
    (tmp_path / "prompts.txt").write_text("a cat\n")
    store = tmp_path / "store"
    asked = ["precompute", str(tmp_path / "prompts.txt"), "--model", str(inpainting), "--store", str(store), "--encode", "text", "--strict"]
    assert main(asked) == USAGE
    assert "not made here: latents of the masked picture" in capsys.readouterr().err
    assert main([*asked, "--json", "--plan-only"]) == USAGE
    assert json.loads(capsys.readouterr().out)["kind"] == "BadUsage"
    for inline in (True, False):
        with pytest.raises(BadUsage):
            cs.precompute(tmp_path / "prompts.txt", model=inpainting, store=store, encode=["text"], strict=True, inline=inline)
    assert not store.exists()


def test_ranks_that_refuse_it_end_with_the_same_code(inpainting, tmp_path):
    (tmp_path / "prompts.txt").write_text("a cat\n")
    asked = [
        "precompute",
        str(tmp_path / "prompts.txt"),
        "--model",
        str(inpainting),
        "--store",
        str(tmp_path / "store"),
        "--encode",
        "text",
    ]
    assert main([*asked, "--strict", "--procs", "2"]) == USAGE


def test_a_pipeline_without_a_row_and_one_in_memory_say_it_too(built, tmp_path, caplog):
    (tmp_path / "prompts.txt").write_text("a cat\n")
    model = as_class(built, "wan", "WanImageToVideoPipeline", tmp_path / "model", image_encoder=["transformers", "CLIPVisionModel"])
    with caplog.at_level(logging.WARNING, "cachestore"):
        report = cs.precompute(tmp_path / "prompts.txt", model=model, store=tmp_path / "store", encode=["text"], inline=True)
    assert report.complete
    why = "(role `first_frame`, no sample has a video, or latents are not encoded)"
    assert report.not_made_here == (f"the first frame's latents {why}", f"image embeddings (image_encoder, CLIPVisionModel) {why}")
    assert [one.message for one in caplog.records if one.message.startswith(f"not made here: the first frame's latents {why}; image emb")]
    parts = {name: getattr(built("wan").pipeline, name) for name in ("text_encoder", "tokenizer", "vae", "transformer")}
    loaded = {"_class_name": "WanVACEPipeline", **parts}
    report = cs.precompute(tmp_path / "prompts.txt", model=loaded, store=tmp_path / "other", encode=["text"])
    assert [one.partition(" (")[0] for one in report.not_made_here] == ["latents of the control video, with its mask"]
    with pytest.raises(BadUsage):
        cs.precompute(tmp_path / "prompts.txt", model=loaded, store=tmp_path / "third", encode=["text"], strict=True)


def test_control_pictures_that_samples_have_are_made_and_not_missed(built, tmp_path):
    model = as_class(built, "flux", "FluxControlPipeline", tmp_path / "model")
    (model / "transformer" / "config.json").write_text(json.dumps({"in_channels": 128}))
    options: dict[str, Any] = {"model": model, "resolution": 64, "encode": ["latents"], "inline": True, "strict": True}
    with pytest.raises(BadUsage):
        cs.precompute(pictures(tmp_path / "without"), store=tmp_path / "store", **options)
    report = cs.precompute(pictures(tmp_path / "with", control="a.png"), store=tmp_path / "store", **options)
    assert (report.complete, report.not_made_here) == (True, ())
