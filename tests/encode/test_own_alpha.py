"""The alpha of pictures and videos as their masks, through a store; and what is said of masks, and of files that will fail."""

import json
import tarfile
from typing import Any

import numpy as np
import pytest
from PIL import Image

import cachestore as cs
from cachestore.cli import FAILURES, OK, main
from cachestore.core.errors import RecipeMismatch
from cachestore.jobs.plan.options import PrecomputeRequest
from tests.encode.footage import moving, write
from tests.encode.pictures.test_animations import animation, transparent
from tests.encode.pictures.test_masks import png

ALPHA = np.zeros((48, 64), np.uint8)
ALPHA[:, :32] = 255
COLOURS = moving(12, (64, 48))


def cut_out(number):
    """A picture whose right half is transparent."""
    return np.concatenate([COLOURS[number], ALPHA[..., None]], axis=-1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Pictures with and without an alpha, one with a mask beside it, and a clip with an alpha."""
    data = tmp_path_factory.mktemp("alpha") / "data"
    data.mkdir()
    (data / "cut.png").write_bytes(png(cut_out(0)))
    (data / "plain.png").write_bytes(png(COLOURS[1]))
    (data / "masked.png").write_bytes(png(cut_out(2)))
    (data / "masked.mask.png").write_bytes(png(ALPHA.T.repeat(3, 0)[:48, :48].repeat(2, 1)[:, :64] * 0))
    (data / "clip.mkv").write_bytes(write(transparent(), codec="ffv1", pix_fmt="bgra"))
    return data


def options(built, **more) -> dict[str, Any]:
    base = {
        "model": built("wan").folder,
        "resolution": 56,
        "bucket_step": 16,
        "encode": "latents",
        "frames": [1, 9],
        "vae_dtype": "float32",
    }
    return base | more


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore::FutureWarning:diffusers")
def test_the_alpha_of_pictures_and_clips_is_their_mask_and_their_pixels_stay(built, folder, tmp_path, capsys):
    """In every kind of source, with every crop; a mask of a sample's own wins, and without alpha all counts."""
    store = tmp_path / "store"
    plain = cs.precompute(folder, store=store, inline=True, **options(built, name="plain"))
    assert (plain.failed, plain.encoded) == (0, 5)
    assert (plain.masks["empty"], plain.masks["empty_names"]) == (1, ["masked.png"])
    report = cs.precompute(folder, store=store, inline=True, alpha="mask", **options(built, name="own"))
    assert (report.failed, report.encoded) == (0, 3)  # three masks, and no latents
    assert report.masks == {"empty": 1, "empty_names": ["masked.png"], "coloured": 0, "coloured_names": [], "alpha": 3, "varying": 2}
    data = cs.CachedDataset(store, "own")
    masks = {name: data[data.index(name)]["mask"] for name in data.ids}
    half = np.where(np.arange(8) < 4, 1, 0)
    for name, expected in (("cut.png", half), ("clip.mkv", half), ("plain.png", half * 0 + 1), ("masked.png", half * 0)):
        np.testing.assert_allclose(masks[name].numpy(), np.broadcast_to(expected, masks[name].shape), atol=0.01)
    assert cs.verify(store, recompute=50).ok
    again = cs.precompute(folder, store=store, inline=True, alpha="mask", **options(built, name="own"))
    assert (again.encoded, again.generation, again.masks) == (0, report.generation, report.masks)

    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"file_name": f"data/{name}"}) for name in ("cut.png", "clip.mkv")))
    rows = folder.parent / "rows.jsonl"
    rows.write_bytes((tmp_path / "rows.jsonl").read_bytes())
    with tarfile.open(tmp_path / "t.tar", "w") as tar:
        for name in ("cut.png", "clip.mkv"):
            tar.add(folder / name, name)
    memory = [cs.Sample("cut", {"image": Image.fromarray(cut_out(0))}), cs.Sample("clip", {"video": (folder / "clip.mkv").read_bytes()})]
    for number, source in enumerate((rows, tmp_path / "t.tar", memory, [cs.Source(rows, name="named")])):
        found = cs.precompute(source, store=store, inline=True, alpha="mask", **options(built, name=f"n{number}"))
        assert (found.failed, found.masks["alpha"], found.masks["varying"]) == (0, 2, 2)
        assert number < 3 or found.encoded == 0

    none = cs.precompute(
        [cs.Sample("a", {"image": png(COLOURS[1])})], store=store, inline=True, alpha="mask", **options(built, name="none")
    )
    assert (none.masks["alpha"], none.masks["varying"]) == (1, 0)
    arguments = ["precompute", str(folder), "--model", str(built("wan").folder), "--store", str(store), "--resolution", "56"]
    arguments += [
        "--bucket-step",
        "16",
        "--encode",
        "latents",
        "--frames",
        "1,9",
        "--vae-dtype",
        "float32",
        "--alpha",
        "mask",
        "--name",
        "own",
    ]
    assert main(arguments) == OK
    shown = capsys.readouterr().out
    assert "1 mask is black everywhere, so nothing of these samples counts (masked.png)" in shown
    assert "the alpha of 2 of 3 pictures and clips leaves a part out" in shown
    assert "1 sample brings a mask (masked.png)" in "\n".join(cs.plan(folder, store=tmp_path / "x", alpha="mask", **options(built)).remarks)


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore::FutureWarning:diffusers")
def test_alphas_can_be_added_to_a_data_set_and_are_not_lost_without_a_word(built, folder, tmp_path):
    store = tmp_path / "store"
    cs.precompute(folder, store=store, inline=True, **options(built))
    assert cs.precompute(folder, store=store, inline=True, alpha="mask", **options(built)).encoded == 3
    with pytest.raises(RecipeMismatch):
        cs.precompute(folder, store=store, inline=True, **options(built))
    assert cs.repair(store, refill=True).missing == 0


def test_a_catalog_keeps_the_option():
    asked = PrecomputeRequest("d", "m", "s", alpha="mask")
    assert PrecomputeRequest.from_hints(asked.hints(), store="s").alpha == "mask"


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore::FutureWarning:diffusers")
def test_files_that_will_fail_are_named_by_the_plan(built, tmp_path, capsys):
    """Clips that are too short for every count, and files that do not open, before a model is loaded."""
    data = tmp_path / "data"
    data.mkdir()
    whole = write(moving(20, (64, 48)), kind="mp4", codec="libx264", pix_fmt="yuv420p", path=tmp_path / "w.mp4", **FAST)
    contents = {
        "long.mkv": write(moving(17, (64, 48))),
        "short.mkv": write(moving(8, (64, 48))),
        "short.gif": animation(moving(4, (64, 48))),
        "broken.mp4": b"\0\0\0\x18ftypmp42" + bytes(100),
        "cut.mp4": whole[: len(whole) * 2 // 3],
        "cut.mkv": write(moving(40, (64, 48)))[:27_000],
        "broken.png": b"\x89PNG\r\n\x1a\n" + bytes(40),
        "empty.jpg": b"",
        "fine.png": png(COLOURS[0]),
    }
    for name, content in contents.items():
        (data / name).write_bytes(content)
    (data / "gone.png").symlink_to(data / "nowhere.png")
    asked = options(built, frames=[9, 17])
    forecast = cs.plan(data, store=tmp_path / "store", **asked)
    reasons = {str(one["sample"]): str(one["reason"]) for one in forecast.will_fail}
    assert reasons.keys() == contents.keys() - {"long.mkv", "fine.png"} | {"gone.png"}
    assert forecast.will_fail_count == len(reasons) == 8
    assert "the smallest count of frames is 9" in reasons["short.mkv"]
    assert "ends early" in reasons["cut.mkv"]
    assert json.loads(json.dumps(forecast.as_json()))["will_fail"][0].keys() == {"sample", "reason"}
    report = cs.precompute(data, store=tmp_path / "store", inline=True, **asked)
    assert {str(one["sample"]) for one in report.failures} == reasons.keys()  # what it says comes true
    arguments = ["precompute", str(data), "--model", str(built("wan").folder), "--store", str(tmp_path / "other"), "--plan-only"]
    arguments += ["--resolution", "56", "--bucket-step", "16", "--encode", "latents", "--frames", "9,17"]
    assert main(arguments) in (OK, FAILURES)
    assert "8 samples will fail: " in capsys.readouterr().out


FAST: dict[str, Any] = {"container_options": {"movflags": "faststart"}}


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore::FutureWarning:diffusers")
def test_of_whole_files_the_plan_says_nothing(built, tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    kinds: dict[str, dict[str, Any]] = {
        "mkv": {},
        "avi": {"kind": "avi"},
        "mp4": {"kind": "mp4", "codec": "mpeg4", "pix_fmt": "yuv420p"},
        "webm": {"kind": "webm", "codec": "libvpx", "pix_fmt": "yuv420p"},
    }
    for suffix, how in kinds.items():
        (data / f"a.{suffix}").write_bytes(write(moving(9, (64, 48)), **how))
    (data / "b.gif").write_bytes(animation(moving(9, (64, 48))))
    forecast = cs.plan(data, store=tmp_path / "store", **options(built, frames=[9]))
    assert (forecast.will_fail, forecast.will_fail_count, forecast.buckets) == ((), 0, {"64x48x9": 5})
