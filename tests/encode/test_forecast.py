"""What a forecast says of pictures before they are encoded: how they fit their buckets, and which samples lack an image."""

import json
import shutil

import pytest
from PIL import Image

import cachestore as cs
from cachestore.cli import OK, main

pytestmark = pytest.mark.torch

SIZES = {"wide": (3000, 120), "tall": (60, 400), "square": (128, 128), "small": (70, 70), "photo": (150, 100), "edge": (96, 96)}


@pytest.fixture
def pictures(tmp_path):
    folder = tmp_path / "pictures"
    folder.mkdir()
    for name, size in SIZES.items():
        Image.new("RGB", size, "green").save(folder / f"{name}.png")
    return folder


def planned(folder, model, tmp_path, **options):
    return cs.plan(folder, model=model, store=tmp_path / "store", encode="latents", resolution=128, **options)


def test_samples_that_lose_more_than_a_third_to_the_crop_and_those_scaled_up_are_counted_and_the_worst_come_first(
    pictures, built, tmp_path, capsys
):
    model = built("sdxl").folder
    body = planned(pictures, model, tmp_path).as_json()
    assert [one["sample"] for one in body["cut"]["worst"]] == ["wide.png", "tall.png"]
    assert body["cut"]["count"] == 2
    [wide, _tall] = body["cut"]["worst"]
    width, height = wide["bucket"]
    assert wide["amount"] == pytest.approx(1 - (width / height) / (3000 / 120), abs=0.01)
    assert {one["sample"]: one["amount"] for one in body["scaled_up"]["worst"]} == {"small.png": pytest.approx(128 / 70, abs=0.01)}
    asked = ["precompute", str(pictures), "--model", str(model), "--store", str(tmp_path / "store"), "--encode", "latents"]
    assert main([*asked, "--resolution", "128", "--device", "cpu", "--plan-only"]) == OK
    printed = capsys.readouterr().out
    assert "2 samples lose more than a third" in printed
    assert "wide.png" in printed
    assert "1 sample is scaled up" in printed


def test_a_crop_of_the_source_counts_as_the_picture_and_a_sample_of_several_crops_counts_once(pictures, built, tmp_path):
    rows = [
        {"image": "wide.png", "id": "cropped", "crop": [0, 0, 120, 120]},
        {"image": "wide.png", "id": "drawn"},
    ]
    (pictures / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = planned(pictures / "rows.jsonl", built("sdxl").folder, tmp_path, crop="random", variants=3, flip=True)
    assert (found.fits.cut.count, [one.sample for one in found.fits.cut.worst]) == (1, ["drawn"])


def test_no_upscale_scales_nothing_up(pictures, built, tmp_path):
    assert planned(pictures, built("sdxl").folder, tmp_path, no_upscale=True).fits.scaled_up.count == 0


def test_only_the_five_worst_are_named_and_all_are_counted(built, tmp_path):
    for number in range(9):
        Image.new("RGB", (600 + 20 * number, 40)).save(tmp_path / f"{number}.png")
    cut = planned(tmp_path, built("sdxl").folder, tmp_path).fits.cut
    assert (cut.count, [one.sample for one in cut.worst]) == (9, [f"{number}.png" for number in (8, 7, 6, 5, 4)])


@pytest.mark.parametrize("class_name", ["FluxPipeline", "FluxKontextPipeline"])
def test_a_sample_without_the_control_image_that_others_have_is_named(class_name, pictures, built, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(built("flux").folder, model)
    index = json.loads((model / "model_index.json").read_text())
    (model / "model_index.json").write_text(json.dumps({**index, "_class_name": class_name}))
    for one in ("wide", "tall", "square", "small", "edge"):
        Image.new("RGB", (64, 64)).save(pictures / f"{one}.control.png")
    found = planned(pictures, model, tmp_path)
    [said] = [line for line in (*found.remarks, *found.not_made_here) if "no control" in line]
    assert "1 of 6 samples" in said
    assert "photo.png" in said


def test_a_sample_without_the_mask_that_others_have_is_named_and_a_data_set_without_any_is_not(pictures, built, tmp_path):
    model = built("sdxl").folder
    assert not any("no mask" in line for line in planned(pictures, model, tmp_path).remarks)
    Image.new("L", SIZES["photo"], 255).save(pictures / "photo.mask.png")
    [said] = [line for line in planned(pictures, model, tmp_path).remarks if "no mask" in line]
    assert "5 of 6 samples have no mask" in said


def test_captions_that_are_truncated_are_named(built, tmp_path):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"id": n, "caption": "a " * int(n)}) + "\n" for n in ("3", "400", "500")))
    found = cs.plan(tmp_path / "rows.jsonl", model=built("sdxl").folder, store=tmp_path / "store", encode="text")
    assert (found.truncated_captions, set(found.truncated_samples)) == (2, {"400", "500"})
