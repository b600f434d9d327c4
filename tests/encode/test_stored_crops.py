"""A sample's own crop and stated size, through a store: one picture of several parts, batches, changes, and what says so."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import cachestore as cs
from cachestore.cli import OK, main
from tests.encode import tiny, tiny_families

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore::FutureWarning:diffusers")]

OPTIONS: dict[str, Any] = {"encode": ("latents",), "resolution": 64, "bucket_step": 16, "vae_dtype": "float32", "inline": True}
SIZES = ("original_size", "crop_top_left", "target_size")
PARTS = {"whole": None, "left": [0, 0, 60, 90], "right": [60, 10, 120, 90]}


def write_rows(folder, rows):
    path = folder / "m.jsonl"
    path.write_text("".join(json.dumps({"image": "a.png", "caption": "a", **row}) + "\n" for row in rows))
    return path


def rows_of(parts):
    return [{"id": name} | ({} if part is None else {"crop": part, "size": [120, 90]}) for name, part in parts.items()]


@pytest.fixture(scope="module")
def vae(tmp_path_factory):
    """Of SDXL, by its factor."""
    folder, made = tmp_path_factory.mktemp("vae"), tiny.vae()
    made.register_to_config(scaling_factor=0.13025)
    made.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def flux_vae(tmp_path_factory):
    """Z-Image has the same one."""
    folder = tmp_path_factory.mktemp("flux")
    tiny_families.flux_vae().save_pretrained(folder)
    return folder


@pytest.fixture
def data(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (90, 120, 3), np.uint8)).save(folder / "a.png")
    os.utime(folder / "a.png", (9, 9))
    return folder


def encode(manifest, vae, store, **options):
    return cs.precompute(manifest, model=vae, store=store, **{**OPTIONS, **options})


def test_parts_of_one_picture_are_samples_of_their_own_with_sizes_of_the_whole(tmp_path, data, vae):
    store = tmp_path / "store"
    report = encode(write_rows(data, rows_of(PARTS)), vae, store)
    assert (report.complete, report.encoded) == (True, 3)
    found = cs.CachedDataset(store, latents="mean")
    for name, (left, top, right, bottom) in {"whole": (0, 0, 120, 90), "left": (0, 0, 60, 90), "right": (60, 10, 120, 90)}.items():
        sample = found[found.index(name)]
        assert sample["original_size"].tolist() == [90, 120]
        height, width = sample["target_size"].tolist()
        scale = max(width / (right - left), height / (bottom - top))
        down, across = (bottom - top) * scale - height, (right - left) * scale - width
        expected = [top * scale + down / 2, left * scale + across / 2]
        assert np.abs(np.array(sample["crop_top_left"].tolist()) - expected).max() <= 1
    batch = found.read_batch([found.index("left")])
    assert (batch["crop"], batch["size"]) == ([[0, 0, 60, 90]], [[120, 90]])


def test_a_changed_crop_is_encoded_anew_and_nothing_else(tmp_path, data, vae):
    store = tmp_path / "store"
    encode(write_rows(data, rows_of(PARTS)), vae, store)
    before = cs.CachedDataset(store, latents="mean")
    report = encode(write_rows(data, rows_of({**PARTS, "left": [0, 0, 61, 90]})), vae, store)
    assert (report.complete, report.encoded, report.reused) == (True, 1, 2)
    after = cs.CachedDataset(store, latents="mean")
    changed = {name for name in PARTS if not before[before.index(name)]["latents"].equal(after[after.index(name)]["latents"])}
    assert changed == {"left"}
    again = encode(write_rows(data, rows_of({**PARTS, "left": [0, 0, 61, 90]})), vae, store)
    assert (again.encoded, again.generation) == (0, report.generation)


def test_latents_of_another_crop_leave_their_sample_where_text_alone_is_made(tmp_path, data, vae, plain_model):
    store = tmp_path / "store"
    encode(write_rows(data, rows_of(PARTS)), vae, store)
    changed = write_rows(data, rows_of({**PARTS, "left": [0, 0, 61, 90]}))
    assert cs.precompute(changed, model=plain_model[0], store=store, encode=("text",), inline=True).complete
    assert sorted(cs.CachedDataset(store).ids) == ["right", "whole"]


def test_a_size_that_the_file_has_not_and_a_crop_outside_of_it_fail_their_samples_alone(tmp_path, data, vae):
    rows = [{"id": "fine", "size": [120, 90]}, {"id": "turned", "size": [90, 120]}, {"id": "outside", "crop": [0, 0, 121, 90]}]
    report = encode(write_rows(data, rows), vae, tmp_path / "store")
    reasons = {failure["sample"]: failure["reason"] for failure in report.failures}
    assert "the source says that the picture is 90 x 120, but its file says 120 x 90" in reasons["turned"]
    assert "exceeds the picture, which is 120 x 90" in reasons["outside"]
    assert list(cs.CachedDataset(tmp_path / "store").ids) == ["fine"]


def test_samples_in_memory_have_crops_too(tmp_path, data, vae):
    picture = (data / "a.png").read_bytes()
    samples = [cs.Sample("left", {"image": picture}, crop=(0, 0, 60, 90), size=(120, 90)), cs.Sample("whole", {"image": picture})]
    one = encode(samples, vae, tmp_path / "memory")
    other = encode(write_rows(data, rows_of({"left": PARTS["left"], "whole": None})), vae, tmp_path / "store")
    assert one.complete
    assert other.complete
    assert set(cs.open(tmp_path / "memory").keys()) == set(cs.open(tmp_path / "store").keys())


def test_what_is_checked_and_refilled_is_of_the_same_crop(tmp_path, data, vae):
    store = tmp_path / "store"
    encode(write_rows(data, rows_of(PARTS)), vae, store)
    report = cs.verify(store, recompute=3)
    assert (report.ok, report.recomputed["equal"]) == (True, 3)
    shutil.rmtree(store / "segments")
    repaired = cs.repair(store, refill=True)
    assert (repaired.missing, repaired.refilled) == (0, 3)
    assert cs.verify(store, recompute=3).ok


def test_why_and_the_report_say_which_part_of_the_picture_it_is(tmp_path, data, vae, capsys):
    encode(write_rows(data, rows_of(PARTS)), vae, tmp_path / "store")
    assert main(["why", str(tmp_path / "store"), "right"]) == OK
    assert "latents/image at 64 of the part [60, 10, 120, 90]: present" in capsys.readouterr().out
    assert main(["why", str(tmp_path / "store"), "right", "--json"]) == OK
    assert json.loads(capsys.readouterr().out)["in"][0]["cells"][0]["within"] == [60, 10, 120, 90]
    assert main(["why", str(tmp_path / "store"), "whole"]) == OK
    assert "part" not in capsys.readouterr().out
    assert main(["report", str(tmp_path / "store"), "-o", str(tmp_path / "report.html")]) == OK
    page = (tmp_path / "report.html").read_text()
    assert page.count("of which [60, 10, 120, 90] is used, bucket 48x80") == 1


def test_latents_of_a_part_are_exported_with_its_offset_from_the_left_and_of_the_mirrored_side(tmp_path, data, flux_vae):
    """The part's bucket of 48x80 begins 66 pixels from the left of 120; mirrored, it begins 6 from it."""
    store, out = tmp_path / "store", tmp_path / "out"
    encode(write_rows(data, rows_of({"right": PARTS["right"]})), flux_vae, store)
    cs.export_cache(store, format="sd-scripts", folder=out, family="flux")
    [path] = Path(out).glob("*.npz")
    npz = np.load(path)
    [crop] = [npz[name].tolist() for name in npz if name.startswith("crop_ltrb")]
    assert crop == [66, 10, 48 - 6, 80]


@pytest.mark.parametrize("kind", ["musubi", "ai-toolkit"])
def test_a_sample_with_a_crop_of_its_own_is_a_failure_where_the_trainer_knows_whole_pictures_alone(tmp_path, data, flux_vae, kind):
    store, out = tmp_path / "store", tmp_path / "out"
    encode(write_rows(data, rows_of({"whole": None, "right": PARTS["right"]})), flux_vae, store)
    report = cs.export_cache(store, format=kind, folder=out, family="z-image" if kind == "musubi" else "flux")
    assert [(one["sample"], "its own crop" in one["reason"]) for one in report.failures] == [("right", True)]
    assert report.written == 1


@pytest.mark.usefixtures("torch_files_read_here")
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("sd-scripts", {}),
        ("simpletuner", {"crop": "random"}),
        pytest.param("sd-scripts", {"crop": "random"}, marks=pytest.mark.slow),
        pytest.param("simpletuner", {}, marks=pytest.mark.slow),
    ],
)
def test_what_an_export_writes_of_a_part_comes_back_as_that_part_and_is_nobody_elses(tmp_path, data, vae, kind, options):
    """Bit for bit, with its sizes; a sample with another part of the picture gets nothing."""
    rows = write_rows(data, rows_of({"right": PARTS["right"]}))
    encode(rows, vae, tmp_path / "store", latents="sample", **options)
    cs.export_cache(tmp_path / "store", format=kind, folder=tmp_path / "out", family="sdxl")
    names: Any = {"format": kind, "folder": tmp_path / "out", "family": "sdxl", "model": vae, "encode": ["latents"]}
    assert cs.import_cache(data=rows, store=tmp_path / "back", **names).complete
    form: Any = "raw" if kind == "sd-scripts" else "sample"
    own, back = (cs.CachedDataset(tmp_path / name, latents=form)[0] for name in ("store", "back"))
    assert [own[name].tolist() for name in SIZES] == [back[name].tolist() for name in SIZES]
    assert torch.equal(own["latents"], back["latents"])
    other = write_rows(data, rows_of({"left": PARTS["left"]}))
    [failure] = cs.import_cache(data=other, store=tmp_path / "other", **names).report.failures
    assert "taken to be of the whole picture" in failure["reason"]


def test_latents_that_sd_scripts_made_beside_a_note_of_ours_are_of_the_whole_picture(tmp_path, data, vae):
    """It keeps keys that it does not know when it writes a file again."""
    rows = write_rows(data, rows_of({"right": PARTS["right"]}))
    encode(rows, vae, tmp_path / "store", latents="sample")
    cs.export_cache(tmp_path / "store", format="sd-scripts", folder=tmp_path / "out", family="sdxl")
    [path] = (tmp_path / "out").glob("*.npz")
    arrays = dict(np.load(path))
    np.savez(path, **arrays | {"latents": arrays["latents"] + 1})
    report = cs.import_cache("sd-scripts", tmp_path / "out", data=rows, store=tmp_path / "back", model=vae, encode=["latents"])
    assert ["of the whole picture" in failure["reason"] for failure in report.report.failures] == [True]


@pytest.mark.usefixtures("torch_files_read_here")
def test_the_note_of_sizes_tells_of_the_sample_whose_latents_the_file_holds(tmp_path, data, vae):
    """Two parts of one picture would share a file: the second one is a failure, and its crop is not said to be the first one's."""
    rows = write_rows(data, rows_of({"left": PARTS["left"], "right": PARTS["right"]}))
    encode(rows, vae, tmp_path / "store", latents="sample")
    report = cs.export_cache(tmp_path / "store", format="simpletuner", folder=tmp_path / "out", family="sdxl")
    assert [failure["sample"] for failure in report.failures] == ["right"]
    names: Any = {"family": "sdxl", "model": vae, "encode": ["latents"]}
    back = cs.import_cache("simpletuner", tmp_path / "out", data=rows, store=tmp_path / "back", **names)
    assert [failure["sample"] for failure in back.report.failures] == ["right"]
    own, came = cs.CachedDataset(tmp_path / "store"), cs.CachedDataset(tmp_path / "back")
    assert torch.equal(own[own.index("left")]["latents"], came[0]["latents"])
    [indices] = (tmp_path / "out").glob("*indices*.json")
    assert [len(paths) for paths in json.loads(indices.read_text())["aspect_ratio_bucket_indices"].values()] == [1]


def test_no_note_of_sizes_tells_of_a_file_that_is_a_strangers(tmp_path, data, vae):
    encode(write_rows(data, rows_of({"right": PARTS["right"]})), vae, tmp_path / "store", latents="sample")
    folder = tmp_path / "out"
    assert cs.export_cache(tmp_path / "store", format="simpletuner", folder=folder, family="sdxl").written == 3
    [latents] = (folder / "vae").iterdir()
    latents.write_bytes(b"a stranger's")
    for path in folder.glob("aspect*"):
        path.unlink()
    assert len(cs.export_cache(tmp_path / "store", format="simpletuner", folder=folder, family="sdxl").foreign) == 1
    assert [json.loads(path.read_text()) for path in folder.glob("*metadata*.json")] in ([], [{}])


def test_a_picture_in_memory_is_exported_by_the_id_of_its_sample(tmp_path, data, vae):
    encode([cs.Sample("some/where.png", {"image": (data / "a.png").read_bytes()})], vae, tmp_path / "store")
    cs.export_cache(tmp_path / "store", format="sd-scripts", folder=tmp_path / "out", family="sdxl")
    assert [path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*.npz")] == [
        "some/where_0120x0090_sdxl.npz"
    ]
