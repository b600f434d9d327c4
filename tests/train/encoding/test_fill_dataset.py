"""`fill_dataset`: a data set beside another one, made by a function of the caller's from its samples."""

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

import cachestore as cs
from cachestore.core.errors import BadInput, EncodeFailed
from cachestore.jobs.plan.remembered import remember
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


def test_a_join_takes_no_value_of_a_picture_or_caption_that_is_another_now(store, pictures, encoder, caplog):
    cs.fill_dataset(store, "train/own", encoder)
    root = store.layout.root
    assert len(cs.CachedDataset(root, join={"own": "train/own"})) == COUNT
    edit(pictures / "1.png", b"another picture")
    edit(pictures / "2.txt", b"another caption")
    precompute(pictures, root)
    with pytest.raises(BadInput, match=r"(?s)2 samples.*'1\.png', '2\.png'.*cs\.fill_dataset", check=asks_for("missing")):
        cs.CachedDataset(root, join={"own": "train/own"})
    data = cs.CachedDataset(root, join={"own": "train/own"}, missing="drop")
    assert (list(data.ids), data.missing) == (["0.png", "3.png", "4.png"], {"train/own": ["1.png", "2.png"]})
    assert "'1.png'" in caplog.text
    cs.fill_dataset(store, "train/own", encoder)
    data = cs.CachedDataset(root, join={"own": "train/own"})
    assert data[data.index("1.png")]["own"].tolist() == [len(b"another picture")]


def test_a_join_of_what_no_caption_went_into_stays_when_one_is_edited(store, pictures, encoder):
    cs.fill_dataset(store, "train/own", encoder, captions=False)
    edit(pictures / "2.txt", b"another caption")
    precompute(pictures, store.layout.root)
    assert len(cs.CachedDataset(store.layout.root, join={"own": "train/own"})) == COUNT


def test_a_join_of_what_a_program_published_is_not_compared(store, pictures):
    with store.session("train/own") as session:
        session.put(cs.key("one"), {"size": np.zeros(1)})
        for name in names():
            session.set(name, value=cs.key("one"))
    edit(pictures / "1.png", b"another picture")
    precompute(pictures, store.layout.root)
    assert len(cs.CachedDataset(store.layout.root, join={"own": "train/own"})) == COUNT


def broken(_batch):
    raise ValueError("no such layer")


def test_an_encoder_that_always_fails_is_said_and_takes_nothing_away(store, encoder, caplog):
    good = cs.fill_dataset(store, "train/own", encoder).generation
    report = cs.fill_dataset(store, "train/own", broken, fingerprint="2")
    assert (report.complete, report.failed, report.generation) == (False, COUNT, good)
    assert "5 of 5 values of 'train/own'" in caplog.text
    assert "'0.png': ValueError: no such layer" in caplog.text
    assert len(cs.CachedDataset(store.layout.root, join={"own": "train/own"})) == COUNT


@pytest.mark.parametrize("allowed", [0, 1, "20%"])
def test_a_strict_run_publishes_nothing_if_more_fail_than_may(store, encoder, allowed):
    cs.fill_dataset(store, "train/own", encoder)
    before = store.dataset("train/own")

    def encode(batch):
        return {} if any(sample.id == "2.png" for _key, sample in batch) else encoder(batch)

    if allowed == 0:
        with pytest.raises(EncodeFailed, match=r"'2\.png'"):
            cs.fill_dataset(store, "train/own", encode, fingerprint="2", strict=True)
        assert store.dataset("train/own").generation == before.generation
    else:
        assert cs.fill_dataset(store, "train/own", encode, fingerprint="2", strict=True, max_failures=allowed).complete
        assert store.dataset("train/own")["2.png"] == {}


def test_what_failed_is_logged_with_ids_and_reasons_and_lacks_a_value(store, encoder, caplog):
    def encode(batch):
        return broken(batch) if any(sample.id == "2.png" for _key, sample in batch) else encoder(batch)

    cs.fill_dataset(store, "train/own", encode)
    assert "1 of 5 values of 'train/own' could not be encoded" in caplog.text
    with pytest.raises(BadInput, match=r"1 sample lacks a value in 'train/own': '2\.png'"):
        cs.CachedDataset(store.layout.root, join={"own": "train/own"})


def test_a_data_set_without_values_cannot_be_joined_and_its_generation_is_named(store):
    cs.fill_dataset(store, "train/own", broken)
    for wanted in ("train/own", ("train/own", 1)):
        with pytest.raises(BadInput, match="generation 1 it has no rows", check=asks_for("join")):
            cs.CachedDataset(store.layout.root, join={"own": wanted})


def test_the_error_for_an_unknown_generation_names_those_that_can_be_joined(store, encoder):
    numbers = [cs.fill_dataset(store, "train/own", encoder, fingerprint=str(number)).generation for number in range(3)]
    with pytest.raises(BadInput, match=f"it has {', '.join(map(str, reversed(numbers)))}", check=asks_for("join")):
        cs.CachedDataset(store.layout.root, join={"own": ("train/own", 99)})
    for number in numbers:
        assert len(cs.CachedDataset(store.layout.root, join={"own": ("train/own", number)})) == COUNT


def test_a_source_that_moved_is_said_with_the_command_that_records_it(store, pictures, encoder):
    moved = pictures.rename(pictures.with_name("moved"))
    with pytest.raises(BadInput, match=rf"relocate .*--source {pictures}=", check=asks_for("like")):
        cs.fill_dataset(store, "train/own", encoder)
    cs.relocate(store.layout.root, {pictures: moved})
    assert cs.fill_dataset(store, "train/own", encoder).complete
    assert encoder.ids() == names()


def test_no_command_makes_it_again_and_the_error_says_what_made_it(store, encoder):
    cs.fill_dataset(store, "train/own", encoder)
    with pytest.raises(BadInput, match="published by a program", check=asks_for("name")):
        remember(store.layout, "train/own")


def without_data(batch):
    return {key: {"x": torch.zeros(2, device="meta")} for key, _sample in batch}


@pytest.mark.parametrize(
    ("encode", "reason"),
    [
        (without_data, "tensor 'x' on the device meta"),
        (lambda batch: {key: {} for key, _sample in batch}, "tensors with names"),
        (lambda batch: {key: {0: np.zeros(1)} for key, _sample in batch}, "tensors with names"),
        (lambda _batch: {cs.key("another"): {"x": np.zeros(1)}}, "keys of its batch"),
    ],
    ids=["without data", "no tensor", "a number as name", "another key"],
)
def test_what_encode_returned_wrongly_is_the_reason_of_failures(store, encode, reason, caplog):
    report = cs.fill_dataset(store, "train/own", encode)
    assert [reason in failure["reason"] for failure in report.failures] == [True] * COUNT
    assert reason in caplog.text


def test_an_encode_that_returns_too_few_keys_is_said_once(store, encoder, caplog):
    assert cs.fill_dataset(store, "train/own", lambda batch: encoder(batch[:1])).complete
    assert caplog.text.count("in halves") == 1


def test_keys_of_its_own_are_refused_with_the_ones_to_return(store):
    with pytest.raises(BadInput, match="the keys of its batch"):
        cs.fill_dataset(store, "train/own", lambda batch: {sample.id: {"x": np.zeros(1)} for _key, sample in batch})


def test_a_join_at_an_address_takes_no_value_of_another_picture(store, pictures, encoder, tmp_path):
    pytest.importorskip("obstore", reason="the extra [objects] is not installed")
    address, root = f"file://{tmp_path}/there", store.layout.root
    cs.fill_dataset(store, "train/own", encoder)
    cs.push(root, address)
    assert len(cs.CachedDataset(address, join={"own": "train/own"}, local=tmp_path / "l")) == COUNT
    edit(pictures / "1.png", b"another picture")
    precompute(pictures, root)
    cs.push(root, address)
    data = cs.CachedDataset(address, join={"own": "train/own"}, local=tmp_path / "l", missing="drop")
    assert data.missing == {"train/own": ["1.png"]}
