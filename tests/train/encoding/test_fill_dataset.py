"""`fill_dataset`: a data set beside another one, made by a function of the caller's from its samples."""

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import cachestore as cs
from cachestore.core.errors import BadInput
from tests.fakes import asks_for, captioned
from tests.train.encoders import ReadableEncoder

pytestmark = pytest.mark.torch

COUNT = 5


class Encoder:
    """Makes a value of each sample's picture, and keeps what it got."""

    def __init__(self):
        self.got = []

    def __call__(self, batch):
        self.got += [sample for _key, sample in batch]
        return {key: {"size": np.array([len(sample.read())], np.int64)} for key, sample in batch}

    def ids(self):
        found, self.got = sorted(sample.id for sample in self.got), []
        return found


@pytest.fixture
def encoder():
    return Encoder()


@pytest.fixture
def pictures(tmp_path, makers):
    makers.make = ReadableEncoder
    return captioned(tmp_path / "pictures", COUNT)


def precompute(pictures, root, **options):
    return cs.precompute(pictures, model="model", store=root, inline=True, **options)


@pytest.fixture
def store(root, pictures):
    precompute(pictures, root)
    with cs.open(root, mode="a") as store:
        yield store


def names(count=COUNT):
    return [f"{number}.png" for number in range(count)]


def edit(path, content):
    path.write_bytes(content)
    os.utime(path, (99, 99))


def test_samples_come_with_id_captions_and_paths_and_become_a_data_set_with_one_key_each(store, pictures, encoder):
    report = cs.fill_dataset(store, "train/own", encoder, like="train", batch_size=2)
    assert (report.complete, report.name, report.samples, report.encoded) == (True, "train/own", COUNT, COUNT)
    first = encoder.got[0]
    number = first.id.removesuffix(".png")
    assert (first.captions, first.images, first.pixels) == ((f"caption {number}",), {"image": (first.id,)}, None)
    assert first.paths == {"image": (str(pictures / first.id),)}
    rows = store.dataset("train/own")
    assert (list(rows), rows.parts, rows.made) == (list(store.dataset("train").ids), ("value",), "published")
    assert store.get(rows["0.png"]["value"], as_numpy=True)["size"].tolist() == [len((pictures / "0.png").read_bytes())]
    assert store.describe(rows["0.png"]["value"]).meta["owner"] == "train/own"


def test_again_it_encodes_what_is_new_or_changed_and_what_left_leaves(store, pictures, encoder):
    cs.fill_dataset(store, "train/own", encoder)
    encoder.ids()
    assert cs.fill_dataset(store, "train/own", encoder).encoded == 0
    edit(pictures / "1.png", b"another picture")
    edit(pictures / "2.txt", b"another caption")
    (pictures / "3.png").unlink()
    edit(pictures / "9.png", b"new")
    precompute(pictures, store.layout.root)
    cs.fill_dataset(store, "train/own", encoder)
    assert encoder.ids() == ["1.png", "2.png", "9.png"]
    assert set(store.dataset("train/own")) == {"0.png", "1.png", "2.png", "4.png", "9.png"}
    cs.fill_dataset(store, "train/own", encoder, fingerprint="another")
    assert len(encoder.ids()) == COUNT


def test_without_captions_an_edited_one_encodes_nothing_again(store, pictures, encoder):
    cs.fill_dataset(store, "train/own", encoder, captions=False)
    assert {sample.captions for sample in encoder.got} == {()}
    encoder.ids()
    edit(pictures / "2.txt", b"another caption")
    precompute(pictures, store.layout.root)
    cs.fill_dataset(store, "train/own", encoder, captions=False)
    assert encoder.ids() == []


def test_a_file_that_changed_since_fails_its_sample_until_precompute_knows_it(store, pictures, encoder):
    edit(pictures / "1.png", b"another picture")
    (pictures / "2.png").unlink()
    report = cs.fill_dataset(store, "train/own", encoder)
    assert (report.complete, sorted(row["sample"] for row in report.failures)) == (False, ["1.png", "2.png"])
    assert [store.dataset("train/own")[name] != {} for name in names(3)] == [True, False, False]
    precompute(pictures, store.layout.root)
    report = cs.fill_dataset(store, "train/own", encoder)
    assert (report.complete, len(store.dataset("train/own"))) == (True, COUNT - 1)


def test_a_sample_that_was_not_encoded_there_is_left_out_and_said(root, pictures, encoder, caplog):
    edit(pictures / "1.png", b"undecodable")
    precompute(pictures, root)
    with cs.open(root, mode="a") as store:
        assert cs.fill_dataset(store, "train/own", encoder).samples == COUNT - 1
    assert "1 sample of 5" in caplog.text


def test_pictures_of_which_there_are_no_latents_are_known_by_their_bytes(root, pictures, encoder):
    precompute(pictures, root, encode=("text",))
    with cs.open(root, mode="a") as store:
        cs.fill_dataset(store, "train/own", encoder)
        encoder.ids()
        edit(pictures / "1.png", b"another picture")
        cs.fill_dataset(store, "train/own", encoder)
    assert encoder.ids() == ["1.png"]


def test_ranks_share_the_samples(store, encoder):
    def work(rank):
        with cs.open(store.layout.root, mode="a") as own:
            return cs.fill_dataset(own, "train/own", encoder, rank=rank, world_size=2, batch_size=1)

    with ThreadPoolExecutor(2) as threads:
        reports = list(threads.map(work, range(2)))
    assert sum(report.encoded_here for report in reports) == COUNT
    assert encoder.ids() == names()
    assert len({report.generation for report in reports}) == 1


@pytest.mark.parametrize(
    ("options", "option"),
    [
        ({"like": "trian"}, "name"),
        ({"like": "own"}, "like"),
        ({"name": "train"}, "name"),
        ({"generation": 7}, "generation"),
        ({"pixels": True, "like": "text"}, "pixels"),
        ({"pixels": "yes"}, "pixels"),
        ({"resolution": 77}, "resolution"),
    ],
    ids=str,
)
def test_what_cannot_be_used_is_refused_before_anything_is_encoded(store, pictures, encoder, options, option):
    given: dict[str, Any] = {"name": "new", "encode": encoder, **options}
    store.publish("own", {})
    precompute(pictures, store.layout.root, encode=("text",), name="text")
    with pytest.raises(BadInput, check=asks_for(option)):
        cs.fill_dataset(store, **given)
    assert (encoder.got, "new" in store.names()) == ([], False)


def test_a_sample_without_a_file_of_a_role_says_which_it_has():
    with pytest.raises(BadInput, check=asks_for("role")):
        cs.FillSample("a", (), {}, {}, {}).read()
