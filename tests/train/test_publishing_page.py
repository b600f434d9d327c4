"""The lines of `docs/publishing.md`, run where a store of a few samples stands."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import cachestore as cs
from tests.fakes import captioned
from tests.pages import python_by_title
from tests.train.encoders import BUCKET, ReadableEncoder

pytestmark = pytest.mark.torch

COUNT = 4


def lines():
    return {title: some for title, [some] in python_by_title("publishing.md").items()}


@pytest.fixture
def names(tmp_path, monkeypatch, makers):
    """What the lines suppose: a store with the data set `train` in this folder, and pictures."""
    monkeypatch.chdir(tmp_path)
    makers.make = ReadableEncoder
    photos = captioned(tmp_path / "photos", COUNT)
    for number in range(COUNT):
        Image.new("RGB", BUCKET, (number, 0, 0)).save(photos / f"{number}.png")
    cs.precompute(photos, model="model", store="cache/", inline=True)
    for model in ("dino", "clip"):
        Path(model).mkdir()
        Path(model, "model.safetensors").write_bytes(model.encode())
    return {"cs": cs, "paths": sorted(photos.glob("*.png"))}


def rows(name):
    with cs.open("cache/") as store:
        found: Any = store.dataset(name)
        return {sample: {part: store.get(key, as_numpy=True) for part, key in found[sample].items()} for sample in found}


def test_the_page_has_lines_for_each_of_these():
    assert list(lines()) == [
        "Features beside latents: a whole example",
        "Join and resume",
        "Publish a table at once",
        "Publish as you go: a session",
        "The cache of a trainer, as named files",
        "An encoder for any inputs",
        "Making what is missing",
    ]


def test_the_whole_example_trains_with_features_of_each_sample(names):
    def train_step(latents, prompt_embeds, dino):
        steps.append((latents.shape[0], prompt_embeds.shape[0]))
        seen.extend(dino.tolist())

    steps, seen, to_input = [], [], lambda pixels: torch.from_numpy(pixels).permute(2, 0, 1).float()
    names |= {"to_input": to_input, "dino": lambda pictures: pictures.mean((2, 3)), "train_step": train_step}
    exec(lines()["Features beside latents: a whole example"].replace("batch_size=8", "batch_size=2"), names)
    assert steps == [(2, 2)] * (COUNT // 2)
    assert sorted(seen) == [[number, 0, 0] for number in range(COUNT)]


def test_the_lines_on_resuming_go_on_where_the_generations_of_then_are(names):
    def fill(fingerprint):
        with cs.open("cache/", mode="a") as store:
            cs.fill_dataset(store, "train/dino", lambda batch: {key: {"x": np.zeros(2)} for key, _sample in batch}, fingerprint=fingerprint)

    fill("1")
    names["loader"] = loader = cs.make_loader(cs.CachedDataset("cache/", join={"dino": "train/dino"}), batch_size=2)
    next(iter(loader))
    saved, resumed = lines()["Join and resume"].split("\n\n")
    exec(saved, names)
    fill("2")
    exec(resumed.replace("batch_size=8", "batch_size=2"), names)
    assert names["data"].joined == {"dino": ("train/dino", names["state"]["joined"]["dino"][1])}
    assert len(list(names["loader"])) == COUNT // 2 - 1


def test_the_lines_on_a_table_publish_a_score_of_each_picture(names):
    names |= {"score": lambda path: np.array([int(path.stem)]), "widths": [10 * number for number in range(COUNT)]}
    exec(lines()["Publish a table at once"], names)
    with cs.open("cache/") as store:
        assert list(store.dataset("train/score", names["generation"]).columns["width"]) == names["widths"]
    assert [int(row["score"]["score"][0]) for row in rows("train/score").values()] == [*range(COUNT)]
    data = cs.CachedDataset("cache/", join={"score": "train/score"})
    assert {sample["sample_id"]: int(sample["score"]) for sample in data} == {f"{number}.png": number for number in range(COUNT)}


def test_the_lines_on_a_session_publish_what_is_new_or_changed(names):
    made = []
    names |= {"depth": lambda path: made.append(path.name) or np.zeros(2)}
    exec(lines()["Publish as you go: a session"], names)
    assert made == list(rows("train/depth")) == [path.name for path in names["paths"]]
    names["paths"][1].write_bytes(b"another picture")
    exec(lines()["Publish as you go: a session"], names)
    assert made[COUNT:] == [names["paths"][1].name]


def test_the_lines_on_files_are_the_cache_of_a_trainer(names):
    encoded = []

    def encode(picture, size):
        encoded.append(picture.name)
        return torch.full(size, float(picture.stat().st_size))

    exec(lines()["The cache of a trainer, as named files"], names)
    picture, size = names["paths"][0], (2, 3)
    other = picture.parent / "[0].png"
    other.write_bytes(b"of brackets")
    with cs.open("cache/", mode="a") as store:
        cache = names["LatentCache"](store, encode, "vae 1")
        assert torch.equal(cache.load(picture, size), cache.load(picture, size))
        assert encoded == [picture.name]
        picture.write_bytes(b"another picture")
        assert torch.equal(cache.load(picture, size), torch.full(size, 15.0))
        changed = names["LatentCache"](store, encode, "vae 2")
        assert [changed.load(picture, size).shape for _time in range(2)] == [size, size]
        assert encoded == [picture.name] * 3
    for path in store.layout.segments.rglob("*.safetensors"):
        path.unlink()
    with cs.open("cache/", mode="a") as store:
        cache = names["LatentCache"](store, encode, "vae 2")
        assert torch.equal(cache.load(picture, size), cache.load(picture, size))
        cache.load(other, size)
        assert encoded[3:] == [picture.name, other.name]
        cache.drop(other)
        assert [Path(name).parent for name in store.files("my-trainer").glob()] == [picture]
        cache.drop(picture)
        assert store.files("my-trainer").glob() == []


def test_the_lines_on_an_encoder_make_all_but_what_fails(names, capsys):
    def look_at(paths):
        if any(path.name == "1.png" for path in paths):
            raise OSError("it is no picture")
        return np.arange(len(paths), dtype=np.float32)[:, None]

    names |= {"look_at": look_at}
    exec(lines()["An encoder for any inputs"], names)
    assert (names["report"].encoded, names["report"].failed) == (COUNT - 1, 1)
    assert capsys.readouterr().out == "1.png it is no picture\n"
    assert {sample for sample, parts in rows("train/clip").items() if parts} == {"0.png", "2.png", "3.png"}


def test_the_lines_on_what_is_missing_make_it(names):
    first, second, *_others = names["paths"]
    encode = lambda batch: {key: {"clip": np.zeros(2, np.float32)} for key, _item in batch}  # noqa: E731 - a name of the page
    names |= {"batches": [[first, second], [second]], "model": "my model", "encode": encode}
    exec(lines()["Making what is missing"], names)
    assert len(names["entries"]) == 1
    assert cs.key("my model", second.read_bytes()) in cs.open("cache/")
