"""The proof of `cachestore doctor --model`: encoders of every family against the calls of their own pipelines, as a user starts it."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from cachestore.care.proof import prove
from cachestore.cli import DAMAGE, FAILURES, OK, USAGE, main
from cachestore.encode.pictures.latents import LatentsEncoder
from cachestore.encode.pictures.shots import Still
from cachestore.encode.text.encoder import TextEncoder
from cachestore.jobs.plan.options import PrecomputeRequest
from tests.encode import tiny, tiny_conditions
from tests.encode.footage import moving, write
from tests.encode.tiny_families import FAMILIES

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore::FutureWarning:diffusers"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:diffusers"),
]

CAPTIONS = ["a cat", "", 'a photograph of an astronaut riding a horse, and a "SIGN" with text', "two  spaces & <b>tags</b>"]
SIZES = [(64, 64), (160, 40), (64, 96), (80, 80)]
ORDINARY = {"sdxl", "qwenimage"}
VALUES: dict[str, Any] = {"text_dtype": "float32", "vae_dtype": "float32", "device": "cpu"}
SMALL: dict[str, Any] = {**VALUES, "resolution": 64, "bucket_step": 32}


def slow_but(names, ordinary):
    return [name if name in ordinary else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.fixture
def photos(tmp_path):
    """Four smooth pictures of three shapes, with captions of different lengths."""
    folder = tmp_path / "photos"
    folder.mkdir()
    for number, (size, caption) in enumerate(zip(SIZES, CAPTIONS, strict=True)):
        coarse = np.random.default_rng(number).integers(0, 256, (size[1] // 8 + 1, size[0] // 8 + 1, 3), dtype=np.uint8)
        Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(caption)
    return folder


def proof_of(data, model, **options):
    return prove(PrecomputeRequest(str(data), str(model), "not used", **options))


@pytest.mark.parametrize("name", slow_but(FAMILIES, ORDINARY))
def test_a_familys_values_are_those_of_its_pipelines_own_calls(built, photos, name, record_property):
    model = built(name)
    found = proof_of(photos, model.folder, **SMALL, encode_arg=model.family.encode_args or {})
    assert (found.ok, found.not_compared, found.failures) == (True, (), ())
    assert {row.what.partition(":")[0] for row in found.rows} == {"text", "latents", "pixels"}
    assert {row.compared for row in found.rows if row.what != "text: prompt_embeds"} == {4}
    record_property("apart", {row.what: row.distance for row in found.rows})


def test_a_text_encoder_without_a_pipeline_is_compared_with_its_own_class(tmp_path, photos):
    tiny.plain(tmp_path / "bert")
    found = proof_of(photos, tmp_path / "bert", encode=("text",), device="cpu")
    assert (found.ok, [(row.what, row.compared) for row in found.rows]) == (True, [("text: prompt_embeds", 4)])


# What can be wrong


def test_latents_of_other_pixels_are_named_and_end_with_the_code_of_damage(tiny_model, photos, monkeypatch, capsys):
    real = LatentsEncoder.submit

    def mirrored(self, batch):
        return real(self, [(key, np.ascontiguousarray(pixels[:, ::-1])) for key, pixels in batch])

    monkeypatch.setattr(LatentsEncoder, "submit", mirrored)
    code = main(["doctor", "--model", str(tiny_model("sd15").folder), "--data", str(photos), "--resolution", "64", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert (code, found["ok"]) == (DAMAGE, False)
    assert {row["what"]: row["ok"] for row in found["rows"]} == {"text: prompt_embeds": True, "latents: moments": False, "pixels": True}
    [wrong] = [row for row in found["rows"] if not row["ok"]]
    assert {one["sample"] for one in wrong["differs"]} == {f"{number}.png" for number in range(4)}
    assert wrong["distance"] > 0.1 > wrong["allowed"]


def test_embeddings_of_another_caption_and_pixels_of_another_crop_are_found(tiny_model, photos, monkeypatch):
    prepare, pixels = TextEncoder.prepare, Still.pixels

    def prepare_another(self, resolved):
        caption, shown = resolved.item
        return prepare(self, replace(resolved, item=("a dog" if caption == "a cat" else caption, shown)))

    monkeypatch.setattr(TextEncoder, "prepare", prepare_another)
    monkeypatch.setattr(Still, "pixels", lambda self: np.roll(pixels(self), 4, axis=0))
    found = proof_of(photos, tiny_model("sd15").folder, resolution=64, device="cpu")
    wrong = {row.what: sorted(one["sample"] for one in row.differs) for row in found.rows}
    assert wrong == {"text: prompt_embeds": ["0.png"], "latents: moments": [], "pixels": [f"{number}.png" for number in range(4)]}


def test_a_broken_picture_is_a_failure_and_all_others_are_compared(tiny_model, photos, capsys):
    (photos / "0.png").write_bytes((photos / "0.png").read_bytes()[:200])
    code = main(["doctor", "--model", str(tiny_model("sd15").folder), "--data", str(photos), "--resolution", "64", "--encode", "latents"])
    printed = capsys.readouterr().out
    assert (code, "failed: 0.png" in printed, "latents: moments" in printed) == (FAILURES, True, True)


def test_what_a_trainer_does_differently_is_said_by_sample_and_in_levels(tiny_model, photos, capsys):
    data = ["--data", str(photos), "--resolution", "128", "--encode", "latents", "--device", "cpu"]
    asked = ["doctor", "--model", str(tiny_model("sd15").folder), *data, "--buckets", "diffusers", "--resample", "bilinear"]
    assert main([*asked, "--json"]) == OK
    found = json.loads(capsys.readouterr().out)
    by_sample = {one["sample"]: one for one in found["differences"]}
    first, second = by_sample["0.png"], by_sample["1.png"]
    assert (found["ok"], found["trainer"], first["trainer"], second["levels"]) == (True, "diffusers", first["cachestore"], None)
    assert 0 < first["levels"] < 9
    assert second["trainer"] == {"bucket": [128, 128], "resized": [512, 128]}
    assert second["cachestore"] == {"bucket": [256, 64], "resized": [256, 64]}


def test_pictures_with_transparency_are_not_compared_with_pixels_that_ignore_it(tiny_model, photos):
    Image.new("RGBA", (64, 64), (9, 99, 200, 100)).save(photos / "0.png")
    found = proof_of(photos, tiny_model("sd15").folder, resolution=64, device="cpu", encode=("latents",))
    assert [(row.what, row.compared) for row in found.rows] == [("latents: moments", 4), ("pixels", 3)]
    assert len(found.not_compared) == 1


@pytest.mark.parametrize(
    "given",
    [
        ["--model", "m"],
        ["--data", "d"],
        ["--resolution", "64"],
        ["--n", "3"],
        ["--n", "0", "--model", "m", "--data", "d"],
        ["s", "--model", "m", "--data", "d"],
        ["--model", "m", "--data", "d", "--resolution", "big"],
    ],
)
def test_options_that_do_not_belong_together_are_a_usage_error(given, capsys):
    try:
        code = main(["doctor", *given])
    except SystemExit as ended:
        code = ended.code
    assert (code, capsys.readouterr().out) == (USAGE, "")


# Which samples


def test_the_samples_are_spread_over_shapes_and_lengths_and_the_same_each_time(tmp_path, tiny_model):
    folder = tmp_path / "many"
    folder.mkdir()
    for number in range(15):
        Image.new("RGB", (16 + number, 40), (number, 0, 0)).save(folder / f"{number:02}.png")
        (folder / f"{number:02}.txt").write_text("word " * (14 - number if number % 7 else 60 + number))
    request = PrecomputeRequest(str(folder), str(tiny_model("sd15").folder), "not used", resolution=64, encode=("latents",), device="cpu")
    found = prove(request, 6)
    assert len(found.samples) == 6
    assert {"00.png", "14.png", "07.png"} <= set(found.samples)  # the narrowest, the widest, the one with the longest caption
    assert prove(request, 6).samples == found.samples


# Videos, and what denoisers take besides


CLIP, FRAMES = (64, 48), 9
BESIDE: dict[str, Any] = {**VALUES, "resolution": 56, "bucket_step": 16}


def clip_of(number):
    return write([np.roll(frame, 7 * number, axis=1) for frame in moving(FRAMES, CLIP)])


def picture_of(number, size=CLIP):
    return Image.fromarray(np.random.default_rng(number).integers(0, 256, (*size[::-1], 3), dtype=np.uint8))


@pytest.fixture
def clips(tmp_path):
    """Clips that begin and end with pictures of their own."""
    folder = tmp_path / "clips"
    folder.mkdir()
    for number in range(2):
        (folder / f"{number}.mkv").write_bytes(clip_of(number))
        picture_of(number).save(folder / f"{number}.png")
    rows = [
        {"video": "0.mkv", "caption": "a clip", "first_frame": "0.png"},
        {"video": "1.mkv", "caption": "another clip", "first_frame": "0.png", "last_frame": "1.png"},
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "rows.jsonl"


@pytest.fixture
def guided(tmp_path):
    """A clip with a control video, and one with a picture as its mask."""
    folder = tmp_path / "guided"
    folder.mkdir()
    for number in range(2):
        (folder / f"{number}.mkv").write_bytes(clip_of(number))
    (folder / "0.control.mkv").write_bytes(clip_of(5))
    mask = np.zeros(CLIP[::-1], np.uint8)
    mask[:, 20:] = 255
    Image.fromarray(mask).save(folder / "1.mask.png")
    return folder


@pytest.fixture
def painted(tmp_path):
    """Two pictures with masks."""
    folder = tmp_path / "painted"
    folder.mkdir()
    for number in range(2):
        picture_of(number).save(folder / f"{number}.png")
        mask = np.zeros(CLIP[::-1], np.uint8)
        mask[5 + number : 30, 9:40] = 255
        Image.fromarray(mask).save(folder / f"{number}.mask.png")
    return folder


BESIDES = {
    "wan-i2v": {"condition", "image_embeds"},
    "wan-flf2v": {"condition", "image_embeds"},
    "wan22-i2v": {"condition"},
    "wan22-ti2v": set(),
    "wan-vace": {"conditioning_latents"},
    "ltx-i2v": set(),
    "ltx2-i2v": set(),
    "hunyuan15-i2v": {"image_latents: mean", "image_embeds"},
    "hunyuan-i2v": {"image_latents: mean"},
    "hunyuan-i2v-33ch": {"image_latents: mean"},
    "flux-fill": {"masked_image_latents: moments", "pixels"},
    "sdxl-inpaint": {"masked_image_latents: moments", "pixels"},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BESIDES)
def test_conditions_are_those_of_their_pipelines_own_methods(tmp_path, request, name):
    tiny_conditions.build(name, tmp_path / name)
    is_painted = name in {"flux-fill", "sdxl-inpaint"}
    data = request.getfixturevalue("painted" if is_painted else "guided" if name == "wan-vace" else "clips")
    args = {"prompt_template": tiny_conditions.LLAVA_TEMPLATE} if name.startswith("hunyuan-i2v") else {}
    frames = () if is_painted else (5,) if args else (FRAMES,)
    found = proof_of(data, tmp_path / name, **BESIDE, frames=frames, encode_arg=args)
    assert (found.ok, found.failures) == (True, ())
    assert {row.what for row in found.rows if not row.what.startswith(("text", "latents"))} == BESIDES[name]
    assert any(row.what.startswith("text") for row in found.rows)
    assert [words for words in found.not_compared if not words.startswith(("pixels", "mask"))] == []


@pytest.mark.slow
@pytest.mark.parametrize("pipeline", ["QwenImageEditPipeline", "QwenImageEditPlusPipeline"])
def test_captions_beside_pictures_are_those_of_their_pipeline(edit_built, tmp_path, pipeline):
    for number, name in enumerate("ab"):
        picture_of(number, (64, 64)).save(tmp_path / f"{name}.png")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"image": "a.png", "control": ["b.png"], "caption": "redder"}) + "\n")
    found = proof_of(tmp_path / "rows.jsonl", edit_built(pipeline).folder, **VALUES, resolution=64)
    assert (found.ok, found.not_compared, found.failures) == (True, (), ())
    assert {row.what for row in found.rows} >= {"text: prompt_embeds", "latents: moments"}


def test_single_text_encoders_are_named_as_not_compared(tiny_model, photos):
    found = proof_of(photos, tiny_model("sdxl").folder, encode=("text_encoder_2",), device="cpu")
    assert (found.ok, found.rows, len(found.not_compared)) == (False, (), 1)
