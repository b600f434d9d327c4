"""Where text and latents differ from those of diffusers' own training scripts is said, and what is said makes the script's text."""

import json
import shutil

import pytest
import torch
from PIL import Image

from cachestore.cli import OK, main
from cachestore.encode.families.text import TEXT_FAMILIES
from tests.encode.encoders import batch_of, encoder_of

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore::FutureWarning:diffusers")]

REPORTED = {
    "sd3": ("max_sequence_length=77", {"max_sequence_length": 77}),
    "flux2klein": ("text_encoder_out_layers=[10, 20, 30]", {"text_encoder_out_layers": [10, 20, 30]}),
    "pixart": ("clean_caption=false", {"clean_caption": False}),
    "sana": ("complex_human_instruction=null", {"complex_human_instruction": None}),
}
CAPTIONS = ["a Cat &amp; a dog", "a photograph of a red car in front of a blue house"]


def test_the_families_whose_script_passes_something_else_are_those():
    differing = {name for name, row in TEXT_FAMILIES.items() if row.script_args}
    assert differing == {"StableDiffusion3Pipeline", "Flux2KleinPipeline", "PixArtSigmaPipeline", "SanaPipeline"}
    assert all(set(row.script_args) <= set(row.args) for row in TEXT_FAMILIES.values())


@pytest.mark.parametrize("name", sorted(REPORTED))
def test_what_the_script_passes_is_reported_with_the_argument_that_makes_its_text(built, name, tmp_path, capsys):
    (tmp_path / "prompts.txt").write_text("a cat\n")
    asked = ["precompute", str(tmp_path / "prompts.txt"), "--model", str(built(name).folder), "--store", str(tmp_path / "store")]
    asked += ["--encode", "text", "--plan-only"]
    argument, _ = REPORTED[name]
    assert main(asked) == OK
    assert f"pass --encode-arg '{argument}' to get the script's text" in capsys.readouterr().out
    others = [["--encode-arg", argument], *([["--buckets", "ai-toolkit"]] if name == "pixart" else [])]
    for other in others:
        assert main([*asked, *other]) == OK
        assert "training script" not in capsys.readouterr().out


@pytest.mark.parametrize("name", sorted(REPORTED))
def test_the_argument_makes_the_text_that_the_script_makes(built, name, digest):
    model, (_, args) = built(name), REPORTED[name]
    batch = batch_of(encoder_of(model, digest, "text", encode_args=args), CAPTIONS)
    with torch.inference_mode():
        expected = model.pipeline.encode_prompt(CAPTIONS, **script_arguments(name))
    rows = batch["prompt_embeds"].shape[1]
    mask = batch.get("prompt_attention_mask", torch.ones(batch["prompt_embeds"].shape[:2]))[..., None]
    torch.testing.assert_close(batch["prompt_embeds"] * mask, expected[0][:, :rows] * mask, rtol=1e-4, atol=1e-5)
    default = batch_of(encoder_of(model, digest, "text", encode_args={}), CAPTIONS[:1]) if name != "sana" else None
    assert (
        default is None
        or default["prompt_embeds"].shape != batch["prompt_embeds"][:1].shape
        or not torch.allclose(default["prompt_embeds"], batch["prompt_embeds"][:1])
    )


def script_arguments(name):
    """What the scripts of diffusers 0.42.1 pass to `encode_prompt` by default; PixArt's calls its tokenizer itself, without cleaning."""
    common = {"device": "cpu"}
    if name == "sd3":
        return {**common, "prompt_2": None, "prompt_3": None, "do_classifier_free_guidance": False, "max_sequence_length": 77}
    if name == "flux2klein":
        return {**common, "max_sequence_length": 512, "text_encoder_out_layers": [10, 20, 30]}
    more = {"clean_caption": False} if name == "pixart" else {"complex_human_instruction": None}
    return {**common, "do_classifier_free_guidance": False, "max_sequence_length": 300, **more}


def test_another_way_of_resizing_is_reported_of_latents_and_nothing_of_what_is_not_encoded(built, tmp_path, capsys):
    (tmp_path / "data").mkdir()
    Image.new("RGB", (64, 64), (200, 30, 7)).save(tmp_path / "data" / "a.png")
    asked = ["precompute", str(tmp_path / "data"), "--store", str(tmp_path / "store"), "--resolution", "64", "--plan-only", "--json"]

    def reported(model, *more):
        assert main([*asked, "--model", str(model), *more]) == OK
        return [one for one in json.loads(capsys.readouterr().out)["remarks"] if "training script" in one]

    kontext = shutil.copytree(built("flux").folder, tmp_path / "kontext")
    index = (kontext / "model_index.json").read_text()
    (kontext / "model_index.json").write_text(index.replace('"FluxPipeline"', '"FluxKontextPipeline"'))
    (bilinear,) = reported(kontext)
    assert "resizes pictures by bilinear interpolation, cachestore by Lanczos" in bilinear
    assert reported(kontext, "--encode", "text") == []
    assert reported(built("sdxl").folder) == []
    assert len(reported(built("flux2klein").folder)) == 2
