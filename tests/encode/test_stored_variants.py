"""Resolutions, crops, mirrored pictures and masks through a store: planned, encoded, read as a trainer reads them."""

import json
import os
import re
import shutil
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import cachestore as cs
from cachestore.care.losses import needed_by
from cachestore.cli import OK, main
from cachestore.cli.terminal.lines import training_lines
from cachestore.core.errors import BadInput, FormatError, RecipeMismatch
from cachestore.encode.pictures.vae import to_range
from cachestore.files.paths import Layout
from cachestore.jobs.plan.options import PrecomputeRequest
from cachestore.jobs.start.forecast import forecast_of
from cachestore.store.read.reader import Reader
from cachestore.store.read.snapshot import list_segments
from tests.fakes import ROOT, asks_for, catalog, publish_catalog

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore::FutureWarning:diffusers")]

SIZES = {"wide": (100, 60), "wider": (120, 60), "tall": (60, 100), "square": (70, 70), "bare": (80, 50)}
"""Of pictures; the last one has no mask."""
RESOLUTIONS = (64, 48, 32)
VARIANTS = 4
"""Two crops, each also mirrored."""
OPTIONS: dict[str, Any] = {
    "resolution": RESOLUTIONS,
    "bucket_step": 16,
    "variants": 2,
    "crop": "random",
    "flip": True,
    "captions": "all",
    "vae_dtype": "float32",
    "text_dtype": "float32",
}


def save(path, size, seed):
    """Noise, in a file that was modified long ago."""
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), np.uint8)).save(path)
    os.utime(path, (seed + 1, seed + 1))


def make_data(folder):
    """A manifest of pictures with two captions each, and masks that are white in their left third."""
    folder.mkdir()
    rows = []
    for seed, (name, (width, height)) in enumerate(SIZES.items()):
        save(folder / f"{name}.png", (width, height), seed)
        row: dict[str, Any] = {"id": name, "image": f"{name}.png", "caption": [f"a {name} picture", f"{name}, noise"]}
        if name != "bare":
            mask = np.zeros((height * 3, width * 3), np.uint8)
            mask[:, :width] = 255
            Image.fromarray(mask).save(folder / f"{name} mask.png")
            os.utime(folder / f"{name} mask.png", (9, 9))
            row["mask"] = f"{name} mask.png"
        rows.append(row)
    (folder / "m.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "m.jsonl"


@pytest.fixture(scope="module")
def made(built, tmp_path_factory):
    """A FLUX-like data set with three resolutions, two crops, mirrored pictures, masks and two caption sets: (manifest, store, report)."""
    folder = tmp_path_factory.mktemp("variants")
    manifest, store = make_data(folder / "data"), folder / "store"
    forecast = forecast_of(PrecomputeRequest(str(manifest), str(built("flux").folder), str(store), **OPTIONS))
    report = cs.precompute(manifest, model=built("flux").folder, store=store, inline=True, **OPTIONS)
    return manifest, store, report, forecast


PICTURES = len(SIZES) * len(RESOLUTIONS) * VARIANTS
MASKS = (len(SIZES) - 1) * len(RESOLUTIONS) * VARIANTS
CAPTIONS = 2 * len(SIZES) + 1


def test_every_variant_is_planned_at_every_resolution_and_encoded(made, built):
    manifest, store, report, forecast = made
    assert (forecast.samples, forecast.wanted, forecast.to_encode) == (5, PICTURES + MASKS + CAPTIONS, PICTURES + MASKS + CAPTIONS)
    assert sum(forecast.buckets.values()) == len(SIZES) * len(RESOLUTIONS)
    assert report.bytes <= forecast.estimated_bytes < 2 * report.bytes
    assert (report.complete, report.samples, report.wanted, report.failed) == (True, 5, forecast.wanted, 0)
    # Crops that are drawn alike, as where nothing sticks out of a bucket, are made once.
    assert PICTURES / 2 < report.encoded <= report.wanted
    again = cs.precompute(manifest, model=built("flux").folder, store=store, inline=True, **OPTIONS)
    assert (again.encoded, again.reused, again.generation) == (0, again.wanted, report.generation)


def variants_by_epoch(data, name):
    """What a sample has in each of the epochs in which every variant comes once."""
    found = []
    for epoch in range(VARIANTS):
        data.set_epoch(epoch)
        found.append(data[data.index(name)])
    return found


@pytest.mark.parametrize("resolution", RESOLUTIONS)
def test_each_variant_comes_once_in_as_many_epochs_with_the_sizes_that_it_was_cut_by(made, resolution):
    data = cs.CachedDataset(made[1], resolution=resolution, latents="mean")
    found = catalog(made[1])
    column = next(column for column in found.columns if column.role == "image" and column.options["resolution"] == resolution)
    with closing(Reader(made[1])) as reader:
        for row, name in enumerate(found.ids):
            cells = column.row_cells(row)
            variants = variants_by_epoch(data, name)
            tops = sorted(tuple(variant["crop_top_left"].tolist()) for variant in variants)
            assert tops == sorted((cell.facts["crop"][1], cell.facts["crop"][0]) for cell in cells)
            stored = [reader.get(cell.key, as_numpy=True)["moments"][:16] for cell in cells]
            for variant in variants:
                raw = variant["latents"].numpy() / np.float32(0.3611) + np.float32(0.1159)
                assert any(np.allclose(raw, one, atol=1e-4) for one in stored)
            assert {tuple(variant["target_size"].tolist()) for variant in variants} == {cells[0].facts["bucket"][1::-1]}
            assert {tuple(variant["original_size"].tolist()) for variant in variants} == {SIZES[name][::-1]}


@pytest.mark.parametrize("resolution", RESOLUTIONS)
def test_masks_are_cut_and_mirrored_as_their_pictures(made, resolution):
    data = cs.CachedDataset(made[1], resolution=resolution)
    found = catalog(made[1])
    column = next(column for column in found.columns if column.role == "image" and column.options["resolution"] == resolution)
    sides = set()
    for row, name in enumerate(found.ids):
        cells = column.row_cells(row)
        for variant in variants_by_epoch(data, name):
            assert variant["mask"].shape == (1, *variant["latents"].shape[-2:])
            if name == "bare":
                assert bool((variant["mask"] == 1).all())
                continue
            left = int(variant["crop_top_left"][1])
            alike = [cell.facts for cell in cells if cell.facts["crop"][0] == left]
            width = alike[0]["resized"][0]
            centres = left + 2 * np.arange(variant["mask"].shape[-1]) + 1
            plain, mirrored = centres < width / 3, centres > width * 2 / 3
            edge = (abs(centres - width / 3) < 2) | (abs(centres - width * 2 / 3) < 2)
            shown = variant["mask"][0, 0].numpy() > 0.5
            expected = {bool(facts.get("flip")): mirrored if facts.get("flip") else plain for facts in alike}
            matches = [side for side, columns in expected.items() if (shown == columns)[~edge].all()]
            assert matches, (name, left, shown)
            sides.update(matches)
    assert sides == {True, False}


def test_a_batch_read_in_one_go_is_that_of_its_samples_bit_for_bit(made):
    for resolution in RESOLUTIONS:
        data = cs.CachedDataset(made[1], resolution=resolution, captions=cs.CaptionPolicy(choose="all"))
        for epoch in range(3):
            data.set_epoch(epoch)
            for indices in (*data.buckets.values(), [data.index("bare")], [data.index("wide")]):
                batch, expected = data.read_batch(indices), data.collate(data.__getitems__(indices))
                assert set(batch) == set(expected)
                for name, value in batch.items():
                    assert value.equal(expected[name]) if isinstance(value, torch.Tensor) else value == expected[name]
                assert batch["mask"].shape == (len(indices), 1, *batch["latents"].shape[-2:])
                assert (batch["mask"].dtype, float(batch["mask"].min()) >= 0, float(batch["mask"].max()) <= 1) == (
                    torch.float32,
                    True,
                    True,
                )


def test_one_resolution_is_chosen_or_all_are_mixed(made):
    with pytest.raises(BadInput):
        cs.CachedDataset(made[1])
    with pytest.raises(BadInput):
        cs.CachedDataset(made[1], resolution=40)
    sizes = [cs.CachedDataset(made[1], resolution=size) for size in RESOLUTIONS]
    assert [data.resolution for data in sizes] == list(RESOLUTIONS)
    assert len({data.digest for data in sizes}) == 3
    mixed = cs.MixedDataset(sizes)
    sizes = [tuple(batch["latents"].shape[-2:]) for batch in cs.make_loader(mixed, batch_size=1)]
    assert (len(sizes), len(set(sizes))) == (15, len(mixed.buckets))


@pytest.mark.parametrize("repeats", [1, 2])
def test_the_printed_lines_train_from_all_resolutions(made, repeats):
    names: dict[str, Any] = {}
    lines = training_lines(made[2], batch_size=1, sources=[cs.Source("data", repeats=repeats)])
    exec("\n".join(lines).replace("num_workers=2", "num_workers=0"), names)
    assert len(names["data"]) == 15
    assert any("mask: float32" in line for line in lines)


def test_what_is_there_is_what_is_made_again_of_every_column(made):
    report = cs.verify(made[1], recompute=60)
    assert (report.ok, report.recomputed["equal"], report.recomputed["chosen"]) == (True, 60, 60)


def test_every_variant_is_needed_by_the_data_set(made):
    assert {key for key, _sample in needed_by(catalog(made[1]))} == {key for keys in keys_of(made[1]).values() for key in keys}


def test_a_sample_is_named_once_for_a_picture_and_once_for_a_mask_that_cannot_be_cut(built, tmp_path):
    manifest = make_data(tmp_path / "data")
    (tmp_path / "data/wide.png").write_bytes(b"no picture")
    Image.new("L", (30, 30)).save(tmp_path / "data/tall mask.png")
    fixed: dict[str, Any] = {"model": built("flux").folder, "store": tmp_path / "store", "encode": ("latents",), "inline": True}
    report = cs.precompute(manifest, resolution=(64, 48), bucket_step=16, flip=True, **fixed)
    assert (report.complete, report.failed) == (False, 4 + 4 + 4)
    named = [(failure["sample"], failure["encoder"]) for failure in report.failures]
    assert sorted(named) == [("tall", "mask"), ("wide", "latents"), ("wide", "mask")]
    assert list(cs.CachedDataset(tmp_path / "store", resolution=48).ids) == ["wider", "square", "bare"]


def test_what_is_lost_is_made_again_by_the_request_that_made_it(made, tmp_path):
    store, layout = Path(shutil.copytree(made[1], tmp_path / "store")), Layout(tmp_path / "store")
    before = catalog(store).digest
    for digest in list_segments(layout):
        layout.segment(digest).unlink()
    report = cs.repair(store, refill=True)
    assert (report.missing, report.refilled) == (0, made[2].encoded)
    assert (catalog(store).digest, cs.verify(store).ok) == (before, True)


def test_why_names_resolution_crop_and_side(made, capsys):
    assert main(["why", str(made[1]), "wide"]) == OK
    reported = capsys.readouterr().out
    assert "latents/image at 48 crop 1 mirrored: present" in reported
    assert "mask/mask at 32 crop 0: present" in reported


def keys_of(store):
    found = catalog(store)
    return {
        (sample, column.role, column.options.get("resolution")): column.row_keys(row)
        for column in found.columns
        for row, sample in enumerate(found.ids)
    }


def test_of_a_replaced_picture_only_its_own_entries_are_encoded(made, built, tmp_path):
    manifest, store = Path(shutil.copytree(made[0].parent, tmp_path / "data")) / "m.jsonl", shutil.copytree(made[1], tmp_path / "store")
    before = keys_of(store)
    save(manifest.parent / "wide.png", SIZES["wide"], seed=77)
    report = cs.precompute(manifest, model=built("flux").folder, store=store, inline=True, **OPTIONS)
    after = keys_of(store)
    changed = {name for name in before if before[name] != after[name]}
    assert {(sample, role) for sample, role, _size in changed} == {("wide", "image"), ("wide", "mask")}
    own = {key for name in changed for key in after[name]} - {key for keys in before.values() for key in keys}
    assert (report.complete, report.encoded) == (True, len(own))
    pictures = {key for (sample, role, _size), keys in after.items() if (sample, role) == ("wide", "image") for key in keys}
    assert pictures <= own
    assert cs.verify(store).ok


def test_variants_stay_while_text_is_made_anew_and_go_with_their_picture(made, built, tmp_path):
    """A run for text alone keeps the columns of pictures, but for what is made from other bytes now."""
    manifest, store = Path(shutil.copytree(made[0].parent, tmp_path / "data")) / "m.jsonl", shutil.copytree(made[1], tmp_path / "store")
    before = keys_of(store)
    manifest.write_text("".join(manifest.read_text().splitlines(keepends=True)[::-1]))  # rows are told by their ids
    save(manifest.parent / "tall.png", SIZES["tall"], seed=78)
    report = cs.precompute(manifest, model=built("flux").folder, store=store, encode=("text",), inline=True, **OPTIONS)
    assert report.complete
    after = keys_of(store)
    assert {name[:2] for name, keys in after.items() if keys and not any(keys)} == {("tall", "image"), ("tall", "mask")}
    assert all(after[name] == before[name] for name in before if name[0] != "tall" and name[1] != "caption")
    assert list(cs.CachedDataset(store, resolution=64).ids) == ["bare", "square", "wider", "wide"]


def test_control_images_are_cut_and_mirrored_as_the_picture_they_go_with(built, tmp_path):
    for name in ("a", "b"):
        save(tmp_path / f"{name}.png", (120, 60), seed=3 if name == "a" else 4)
        shutil.copyfile(tmp_path / f"{name}.png", tmp_path / f"{name} control.png")
    rows = [{"image": f"{name}.png", "control": f"{name} control.png"} for name in ("a", "b")]
    (tmp_path / "m.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options: dict[str, Any] = {"resolution": 64, "bucket_step": 16, "variants": 3, "crop": "random", "flip": True}
    fixed: dict[str, Any] = {"model": built("flux").folder, "store": tmp_path / "store", "encode": ("latents",), "inline": True}
    assert cs.precompute(tmp_path / "m.jsonl", **options, **fixed).complete
    data = cs.CachedDataset(tmp_path / "store", latents="mean")
    seen = set()
    for epoch in range(6):
        data.set_epoch(epoch)
        batch = data.read_batch([0, 1])
        assert batch["control_latents"].equal(batch["latents"])
        assert batch["latents"].equal(data.collate(data.__getitems__([0, 1]))["control_latents"])
        seen.add(batch["latents"][0].float().numpy().tobytes())
    assert len(seen) >= 4


def test_a_resolution_and_variants_are_added_without_encoding_what_is_there(built, tmp_path):
    manifest, store = make_data(tmp_path / "data"), tmp_path / "store"
    fixed: dict[str, Any] = {"model": built("flux").folder, "store": store, "encode": ("latents",), "bucket_step": 16, "inline": True}
    first = cs.precompute(manifest, resolution=64, crop="random", **fixed)
    before = keys_of(store)
    more = cs.precompute(manifest, resolution=[64, 48], variants=2, crop="random", flip=True, **fixed)
    after = keys_of(store)
    assert more.complete
    for name, keys in before.items():
        assert after[name][:1] == keys
    kept = {key for keys in before.values() for key in keys}
    assert more.encoded == len({key for keys in after.values() for key in keys} - kept)
    assert first.encoded == len(kept)
    for less in ({"resolution": 48}, {"resolution": (64, 48), "variants": 1}, {"resolution": (64, 48), "flip": False}):
        with pytest.raises(RecipeMismatch):
            cs.precompute(manifest, **{"variants": 2, "crop": "random", "flip": True, **less}, **fixed)
    assert cs.precompute(manifest, resolution=48, replace=True, **fixed).complete
    assert {role_and_size[1:] for role_and_size in keys_of(store)} == {("image", 48), ("mask", 48)}


def test_the_lines_of_the_page_encode_and_mix_two_resolutions(built, tmp_path, monkeypatch):
    block = re.search(
        r"## Resolutions, crops and mirrored pictures\n+```python\n(.*?)```", (ROOT / "docs/datasets.md").read_text(), re.DOTALL
    )
    assert block is not None
    monkeypatch.chdir(tmp_path)
    (tmp_path / "images").mkdir()
    for seed in range(4):
        save(tmp_path / f"images/{seed}.png", (150, 130), seed)
    lines = (
        block[1]
        .replace("1024", "128")
        .replace("512", "64")
        .replace("batch_size=8", "batch_size=2")
        .replace("path-or-id", str(built("flux").folder))
    )
    names: dict[str, Any] = {"cs": cs}
    exec(lines.replace("flip=True", "flip=True, inline=True"), names)
    assert (len(names["at_64"]), len(names["both"])) == (4, 6)
    assert names["at_64"].resolution == 64


def test_a_catalog_with_another_number_of_variants_than_it_says_is_refused(made, tmp_path):
    store = shutil.copytree(made[1], tmp_path / "store")
    found = catalog(store)
    columns = tuple(replace(one, options={**one.options, "variants": 3}) if one.role == "image" else one for one in found.columns)
    publish_catalog(Layout(store), replace(found, columns=columns))
    with pytest.raises(FormatError):
        cs.CachedDataset(store, resolution=64)


@pytest.mark.parametrize("resolution", [64, 32])
def test_fill_dataset_gives_the_pixels_that_each_cell_of_the_latents_was_made_of(made, built, tmp_path, resolution):
    root = tmp_path / "store"
    shutil.copytree(made[1], root)
    vae, shapes = built("flux").pipeline.vae, set()

    def encode(batch):
        shapes.add(frozenset(sample.pixels.shape for _key, sample in batch))
        with torch.inference_mode():
            inputs = to_range(torch.from_numpy(np.stack([sample.pixels for _key, sample in batch])))
            moments = vae.encode(inputs).latent_dist.parameters
        return {key: {"moments": row} for (key, _sample), row in zip(batch, moments, strict=True)}

    with cs.open(root, mode="a") as store:
        with pytest.raises(BadInput, check=asks_for("resolution")):
            cs.fill_dataset(store, "train/own", encode, pixels=True)
        report = cs.fill_dataset(store, "train/own", encode, pixels=True, resolution=resolution, batch_size=3)
        assert (report.complete, report.samples) == (True, len(SIZES))
        assert len(SIZES) < report.wanted <= len(SIZES) * VARIANTS
        found, rows = catalog(root), store.dataset("train/own")
        column = next(column for column in found.columns if column.role == "image" and column.options["resolution"] == resolution)
        for row, name in enumerate(found.ids):
            keys = rows[name]["value"]
            assert isinstance(keys, list)
            values = store.get_many(keys, as_numpy=True)
            stored = store.get_many(column.row_keys(row), as_numpy=True)
            assert len(values) == VARIANTS
            assert all(np.allclose(ours["moments"], theirs["moments"], atol=1e-4) for ours, theirs in zip(values, stored, strict=True))
        assert cs.fill_dataset(store, "train/own", encode, pixels=True, resolution=resolution).encoded == 0
    assert all(len(one) == 1 for one in shapes)


def test_a_join_takes_no_value_of_pixels_that_are_cut_in_another_way(made, tmp_path):
    root = tmp_path / "store"
    shutil.copytree(made[1], root)

    def encode(batch):
        return {key: {"mean": np.array([0 if sample.pixels is None else sample.pixels.mean()])} for key, sample in batch}

    def opened(resolution, **options):
        return cs.CachedDataset(root, resolution=resolution, join={"own": "own"}, **options)

    with cs.open(root, mode="a") as store:
        cs.fill_dataset(store, "own", encode, pixels=True, resolution=64)
        assert len(opened(64)) == len(SIZES)
        with pytest.raises(BadInput, check=asks_for("missing")):
            opened(32)
        assert list(opened(32, missing="drop").missing) == ["own"]
        cs.fill_dataset(store, "own", encode)
        assert [len(opened(each)) for each in RESOLUTIONS] == [len(SIZES)] * len(RESOLUTIONS)  # of whole pictures: right for all


def test_a_join_takes_no_plain_pixels_for_mirrored_ones(built, tmp_path):
    manifest, root = make_data(tmp_path / "data"), tmp_path / "store"

    def precompute(**options):
        plain: dict[str, Any] = {**OPTIONS, "resolution": 32, "variants": 1, "crop": "center", **options}
        cs.precompute(manifest, model=built("flux").folder, store=root, inline=True, **plain)

    def encode(batch):
        return {key: {"left": sample.pixels[:, 0].astype(np.float32)} for key, sample in batch}

    precompute(flip=False)
    with cs.open(root, mode="a") as store:
        cs.fill_dataset(store, "own", encode, pixels=True, batch_size=1)
        precompute(flip=True)
        with pytest.raises(BadInput, check=asks_for("missing")):
            cs.CachedDataset(root, join={"own": "own"})
        cs.fill_dataset(store, "own", encode, pixels=True, batch_size=1)
        data = cs.CachedDataset(root, join={"own": "own"})
        precompute(flip=False, replace=True)
        with pytest.raises(BadInput, check=asks_for("missing")):
            cs.CachedDataset(root, join={"own": "own"})
    found = []
    for epoch in range(2):
        data.set_epoch(epoch)
        found.append(data[0]["own"])
    assert not torch.equal(*found)
