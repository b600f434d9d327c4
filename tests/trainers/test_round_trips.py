"""What was encoded here goes to a trainer's files and comes back: the same tensors, and from them the same files."""

import contextlib
import io
import json
import random
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import cachestore as cs
from cachestore.files.paths import Layout
from cachestore.store.read.rows import newest_catalog
from tests.trainers.caches import equal, send

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("torch_files_read_here")]

PIPELINES = {"sdxl": "sdxl", "sd3": "sd3", "flux": "flux", "z-image": "zimage", "qwen-image": "qwenimage", "wan": "wan", "ltx2": "ltx2"}
SLOW = [
    *((kind, family) for kind in ("sd-scripts", "simpletuner", "ai-toolkit") for family in ("sdxl", "sd3", "flux")),
    ("simpletuner", "qwen-image"),
    *(("musubi", family) for family in ("flux", "z-image", "qwen-image", "wan")),
    ("ltx", "ltx2"),
]


def pictures(folder, count):
    """Pictures in two folders, and control images beside them, with captions of several words."""
    draw = random.Random(3)
    rows = []
    for number in range(count):
        name = f"{'a/' if number % 3 else ''}{number:03d}.png"
        for path in (folder / name, folder.parent / "controls" / name):
            path.parent.mkdir(parents=True, exist_ok=True)
        pixels = Image.fromarray(np.random.default_rng(number).integers(0, 256, (3, 3, 3), np.uint8))
        picture = pixels.resize((draw.randint(64, 300), draw.randint(64, 300)))
        picture.save(folder / name)
        picture.rotate(180).save(folder.parent / "controls" / name)
        caption = ", ".join(draw.sample(["a red fox", "snow", "ein grüner Vogel", "looking up"], draw.randint(1, 3))) + f" {number}"
        (folder / name).with_suffix(".txt").write_text(caption, encoding="utf-8")
        rows.append({"id": name, "image": name, "caption": caption, "control": f"../controls/{name}"})
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return folder


def tiny_model(family, folder, monkeypatch):
    import tiny_models

    from tests.encode import tiny_families

    torch.manual_seed(0)
    monkeypatch.setattr(tiny_families.tiny, "vae", partial(tiny_models.vae, widths=(8, 8, 8, 8)))
    folder.mkdir()
    with contextlib.redirect_stderr(io.StringIO()):
        tiny_families.save(tiny_families.FAMILIES[PIPELINES[family]], tiny_families.FAMILIES[PIPELINES[family]].build(), folder)
    return folder


def encoded(data, model, store, **options):
    """Make a store of latents as the trainers keep them (a sample, or the mean), in float32; return the report."""
    dtypes = {"vae_dtype": "float32", "text_dtype": "float32"}
    report = cs.precompute(data, model=model, store=store, resolution=128, inline=True, **dtypes, **options)
    assert report.complete, report
    return report


def check_round_trip(kind, family, store, data, model, folder):
    """Of every sample, what a data set gives is the same, bit for bit; and the files that are written again."""
    written = send(kind, store, folder / "files", family=family)
    assert not written.failures
    cache = folder / "files"
    report = cs.import_cache(kind, cache, store=folder / "back", data=data, model=model, family=family)
    assert report.complete, report.report.failures
    assert not report.unmatched
    ours, back = cs.CachedDataset(store), cs.CachedDataset(folder / "back")
    assert sorted(ours.ids) == sorted(back.ids)
    held = {"latents", "prompt_embeds"}
    for sample in ours:
        its = back[back.index(sample["sample_id"])]
        assert held <= its.keys()
        assert its["caption"] == sample["caption"]
        differ = [
            name for name, value in its.items() if name in sample and isinstance(value, torch.Tensor) and not equal(value, sample[name])
        ]
        assert not differ, (sample["sample_id"], differ)
    assert not send(kind, folder / "back", folder / "again", family=family).failures
    assert files_of(cache) == files_of(folder / "again")


def check_tars(store, folder, again):
    """The data set that comes of its tars is the same: its digest, and the bytes of each entry. `again` encodes nothing there."""
    assert send("webdataset", store, folder / "tars").complete
    back = cs.import_cache("webdataset", folder / "tars", store=folder / "back")
    assert back.complete
    ours, theirs = (newest_catalog(Layout(root), "train") for root in (store, folder / "back"))
    assert ours is not None
    assert theirs is not None
    assert theirs.digest == ours.digest
    with cs.open(store) as one, cs.open(folder / "back") as other:
        keys = list(one.keys())
        assert sorted(keys) == sorted(other.keys())
        for start in range(0, len(keys), 100):
            assert one.get_raw(keys[start : start + 100]) == other.get_raw(keys[start : start + 100])
    assert cs.verify(folder / "back").ok
    assert again(folder / "back").encoded == 0


def files_of(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name[0] != "."}


@pytest.mark.timeout(180)  # it may be the first test that imports diffusers
def test_what_was_encoded_here_comes_back_from_each_trainers_files(tmp_path, monkeypatch):
    data = pictures(tmp_path / "data", 2)
    model = tiny_model("flux", tmp_path / "model", monkeypatch)
    store = tmp_path / "store"
    encoded(data / "rows.jsonl", model, store, latents="sample")
    for kind in ("sd-scripts", "simpletuner", "musubi", "ai-toolkit"):
        check_round_trip(kind, "flux", store, data / "rows.jsonl", model, tmp_path / kind)
    check_tars(store, tmp_path / "tars", lambda there: encoded(data / "rows.jsonl", model, there, latents="sample"))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("family", ["sdxl", "flux"])
def test_200_pictures_with_flips_masks_and_captions_come_back_from_tars(tmp_path, monkeypatch, family):
    data = pictures(tmp_path / "data", 200)
    for path in sorted(data.rglob("*.png")):
        with Image.open(path) as picture:
            picture.convert("L").save(path.with_suffix(".mask.png"))
        path.with_suffix(".txt").write_text(f"{path.stem} first\n{path.stem} second\nshared", encoding="utf-8")
    (data / "rows.jsonl").unlink()
    model = tiny_model(family, tmp_path / "model", monkeypatch)
    dtypes: dict[str, Any] = {"vae_dtype": "float32", "text_dtype": "bfloat16"}

    def encode(store):
        captions = cs.CaptionPolicy(choose="all", dropout=0.1)
        options: dict[str, Any] = {"resolution": 128, "flip": True, "captions": captions, "caption_lines": "each", "inline": True}
        return cs.precompute(data, model=model, store=store, **dtypes, **options)

    first = encode(tmp_path / "store")
    assert first.complete
    check_tars(tmp_path / "store", tmp_path / "round", encode)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("kind", "family"), SLOW)
def test_200_pictures_come_back_from_a_trainers_files(tmp_path, monkeypatch, kind, family):
    data = pictures(tmp_path / "data", 200)
    source = data / "rows.jsonl" if kind == "musubi" and family == "flux" else data
    model = tiny_model(family, tmp_path / "model", monkeypatch)
    kept = "mean" if (kind, family) in {("musubi", "wan"), ("musubi", "z-image"), ("ltx", "ltx2")} else "sample"
    more: Any = {"encode_args": {"max_sequence_length": 256}} if family == "ltx2" else {"buckets": kind}
    encoded(source, model, tmp_path / "store", latents=kept, **more)
    check_round_trip(kind, family, tmp_path / "store", source, model, tmp_path / "round")
