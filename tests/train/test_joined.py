"""Published tensors beside the rows of a data set, by sample id: in samples, batches, parts, mixes, workers and saved positions."""

import pickle
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import cachestore as cs
from cachestore.core.errors import BadInput, MissingEntry
from cachestore.store.read.rows import Rows
from cachestore.train.batches import BucketBatchSampler
from cachestore.train.dataset import CachedDataset
from cachestore.train.joined import Join, read_state
from cachestore.train.mixed import MixedDataset
from tests.fakes import asks_for
from tests.train.stores import Row, make_store, noise, recipes

pytestmark = pytest.mark.torch

IDS = [f"{number}.png" for number in range(6)]


def vector(sample, turn=0):
    return noise("dino", sample, turn, shape=[5])


def publish(root, name, ids, *, turn=0, tensors=None, part="dino"):
    """Publish a vector for each sample, or what `tensors` makes of its id; returns the generation."""
    make = tensors or (lambda sample: {"value": vector(sample, turn)})
    with cs.open(root, mode="a") as store:
        with store.writer() as writer:
            for sample in ids:
                writer.put(cs.key(name, sample, part, str(turn)), make(sample))
        return store.publish(name, {sample: {part: cs.key(name, sample, part, str(turn))} for sample in ids})


def same(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]) if isinstance(value, torch.Tensor) else value == other[name], name


@pytest.fixture
def root(tmp_path):
    make_store(tmp_path, [Row(sample, bucket=(64, 48) if number % 2 else (48, 64)) for number, sample in enumerate(IDS)], recipes())
    publish(tmp_path, "train/dino", IDS)
    return tmp_path


def test_a_sample_and_a_batch_have_the_joined_tensor_beside_their_own(root):
    plain, data = CachedDataset(root), CachedDataset(root, join={"dino": "train/dino"})
    for index, sample in enumerate(IDS):
        found = data[index]
        assert torch.equal(found.pop("dino"), torch.from_numpy(vector(sample)))
        same(found, plain[index])
    [bucket, *_rest] = data.buckets.values()
    batch = data.read_batch(bucket)
    same(batch, data.collate(data.__getitems__(bucket)))
    assert batch["dino"].shape == (len(bucket), 5)
    assert data.features["dino"].dtype == torch.float32
    assert "dino" in data.fields
    assert set(CachedDataset(root, join={"dino": "train/dino"}, fields={"dino"})[0]) == {"dino", "caption", "sample_id"}
    assert data.joined == {"dino": ("train/dino", data.joined["dino"][1])}


@pytest.mark.parametrize("handed_over", [False, True])
def test_workers_read_the_state_that_was_opened_even_if_it_lies_between_two_tables(root, handed_over):
    with cs.open(root, mode="a") as store, store.session("train/dino") as session:
        session.put(cs.key("late"), {"value": np.full(5, 7, np.float32)})
        session.set(IDS[0], dino=cs.key("late"))
        session.flush()
        data = CachedDataset(root, join={"dino": "train/dino"}, captions="first")
        session.remove(IDS[1])
        session.flush()
    if handed_over:  # as to a worker that spawn starts
        data = pickle.loads(pickle.dumps(data))
    loader = DataLoader(data, batch_sampler=[[0], [1]], collate_fn=data.collate, num_workers=1, multiprocessing_context="fork")
    first, second = loader
    assert first["dino"].tolist() == [[7] * 5]
    assert torch.equal(second["dino"][0], torch.from_numpy(vector(IDS[1])))


def test_samples_without_a_part_are_refused_or_counted_and_named(root, caplog):
    publish(root, "some", IDS[2:])
    with pytest.raises(BadInput, match=IDS[1]) as raised:
        CachedDataset(root, join={"dino": "some"})
    assert raised.value.option == "missing"
    data = CachedDataset(root, join={"dino": "some"}, missing="drop")
    assert list(data.ids) == IDS[2:]
    assert data.missing == {"some": IDS[:2]}
    assert IDS[0] in caplog.text
    with pytest.raises(MissingEntry):
        data.index(IDS[0])
    assert list(pickle.loads(pickle.dumps(data)).ids) == IDS[2:]


def test_a_sample_that_lacks_one_of_several_parts_is_named_with_it(root):
    key = cs.key("train/dino", IDS[0], "dino", "0")
    with cs.open(root, mode="a") as store:
        store.publish("two", {sample: {part: key} for sample, part in zip(IDS, "abbbbb", strict=True)})
    for name, join in (("two", None), ("train", {"dino": "two"})):
        with pytest.raises(BadInput, match=rf"1 sample lacks the part 'b' in 'two': '{IDS[0]}'"):
            CachedDataset(root, name, join=join)


def test_several_tensors_and_several_parts_have_names_of_their_own(root):
    publish(root, "two", IDS, tensors=lambda sample: {"cls": vector(sample), "map": noise(sample, shape=[2, 3])})
    assert {"dino.cls", "dino.map"} < set(CachedDataset(root, join={"dino": "two"})[0])
    with cs.open(root, mode="a") as store:
        store.publish("parts", {s: {"a": cs.key("two", s, "dino", "0"), "b": cs.key("train/dino", s, "dino", "0")} for s in IDS})
    assert {"dino.a.cls", "dino.a.map", "dino.b"} < set(CachedDataset(root, join={"dino": "parts"})[0])


def test_a_key_for_each_variant_goes_with_it_and_one_of_the_whole_picture_with_all(root):
    with cs.open(root, mode="a") as store:
        one, other = cs.key("train/dino", IDS[0], "dino", "0"), cs.key("train/dino", IDS[1], "dino", "0")
        store.publish("both", {IDS[0]: {"dino": one}, IDS[1]: {"dino": [one, other]}, "not there": {"dino": one}})
        catalog = read_state(store, "train", None)
        [joined] = Join.of(store, "dino", read_state(store, "both", None), catalog, 2).columns
        assert [joined.column.row_keys(row) for row in range(3)] == [[one, one], [one, other], []]
        with pytest.raises(BadInput) as raised:
            Join.of(store, "dino", read_state(store, "both", None), catalog, 3)
    assert raised.value.option == "join"


@pytest.mark.parametrize(
    ("join", "option"),
    [
        ({"dino": "nowhere"}, "join"),
        ({"dino": ("train/dino", 99)}, "join"),
        ({"dino": "train"}, "join"),
        ({"latents": "train/dino"}, "join"),
        ({"prompt_embeds": "train/dino"}, "join"),
        ({"dino": ("train/dino", 1, 2)}, "join"),
        ("train/dino", "join"),
    ],
)
def test_what_cannot_be_joined_is_refused_with_the_argument(root, join, option):
    with pytest.raises(BadInput) as raised:
        CachedDataset(root, join=join)
    assert raised.value.option == option


def test_a_saved_position_is_of_the_joined_generation(root):
    first = CachedDataset(root, join={"dino": "train/dino"})
    state = BucketBatchSampler(first, batch_size=2, rank=0, num_replicas=1).state_dict()
    number = first.joined["dino"][1]
    publish(root, "train/dino", IDS, turn=1)
    newer, pinned = CachedDataset(root, join={"dino": "train/dino"}), CachedDataset(root, join={"dino": ("train/dino", number)})
    BucketBatchSampler(pinned, batch_size=2, rank=0, num_replicas=1).load_state_dict(state)
    with pytest.raises(BadInput) as raised:
        BucketBatchSampler(newer, batch_size=2, rank=0, num_replicas=1).load_state_dict(state)
    assert raised.value.option == "join"
    assert pinned.content != newer.content
    assert not newer.is_pinned
    assert CachedDataset(root, join={"dino": ("train/dino", number)}, generation=newer.generation).is_pinned


def test_a_loader_saves_the_joined_generation_with_its_position(root):
    state = cs.make_loader(CachedDataset(root, join={"dino": "train/dino"}), batch_size=2).state_dict()
    assert state["joined"] == {"dino": ["train/dino", CachedDataset(root, "train/dino").generation]}
    assert state["generation"] == CachedDataset(root).generation
    publish(root, "train/dino", IDS, turn=1)
    with pytest.raises(BadInput) as raised:
        cs.make_loader(CachedDataset(root, join={"dino": "train/dino"}), batch_size=2).load_state_dict(state)
    assert raised.value.option == "join"


def test_a_position_of_another_generation_names_all_that_opens_the_one_of_then(root):
    state = cs.make_loader(CachedDataset(root, join={"dino": "train/dino"}), batch_size=2).state_dict()
    publish(root, "train/dino", IDS, turn=1)
    make_store(root, [Row(sample, captions=["another"]) for sample in IDS], recipes())
    now = CachedDataset(root, join={"dino": "train/dino"})
    assert now.generation > state["generation"]
    then = rf"generation={state['generation']} and join={re.escape(repr(state['joined']))}"
    with pytest.raises(BadInput, match=then, check=asks_for("join")):
        cs.make_loader(now, batch_size=2).load_state_dict(state)
    pinned = CachedDataset(root, generation=state["generation"], join=state["joined"])  # as it is in a checkpoint, lists and all
    cs.make_loader(pinned, batch_size=2).load_state_dict(state)


def test_samples_that_lack_a_part_in_either_of_two_generations_are_named(root):
    first, second = publish(root, "some", IDS[1:]), publish(root, "some", IDS[:-1], turn=1)
    data = CachedDataset(root, join={"a": ("some", first), "b": ("some", second)}, missing="drop")
    assert data.missing == {"some": [IDS[0], IDS[-1]]}
    for turn, name in enumerate("ab"):
        assert torch.equal(data[0][name], torch.from_numpy(vector(IDS[1], turn)))


def test_ids_of_another_unicode_form_are_the_same(tmp_path):
    decomposed, composed = "e\u0301.png", "\u00e9.png"
    make_store(tmp_path, [Row(composed)], recipes())
    publish(tmp_path, "train/dino", [decomposed])
    assert torch.equal(CachedDataset(tmp_path, join={"dino": "train/dino"})[0]["dino"], torch.from_numpy(vector(decomposed)))
    assert CachedDataset(tmp_path, "train/dino").index(composed) == 0


def test_a_published_data_set_without_rows_has_no_samples_and_nothing_to_join(root):
    with cs.open(root, mode="a") as store:
        store.publish("empty", {})
        store.publish("variants", {IDS[0]: {"dino": [cs.key("train/dino", IDS[0], "dino", "0")] * 2}})
    assert len(pickle.loads(pickle.dumps(CachedDataset(root, "empty")))) == 0
    for name, join, option in (("train", {"dino": "empty"}, "join"), ("variants", None, "name")):
        with pytest.raises(BadInput) as raised:
            CachedDataset(root, name, join=join)
        assert raised.value.option == option


def test_tensors_of_other_shapes_in_a_bucket_are_refused_in_a_batch_and_read_alone(root):
    publish(root, "ragged", IDS, tensors=lambda sample: {"value": noise(sample, shape=[int(sample[0]) + 1])})
    data = CachedDataset(root, join={"dino": "ragged"})
    assert data[2]["dino"].shape == (3,)
    with pytest.raises(BadInput, match="batch_size=1"):
        data.read_batch([0, 2])


def test_a_joined_data_set_is_read_from_an_address(root, tmp_path):
    pytest.importorskip("obstore", reason="the extra [objects] is not installed")
    address = f"file://{tmp_path}/there"
    cs.push(root, address)
    own, data = CachedDataset(root, join={"dino": "train/dino"}), CachedDataset(address, join={"dino": "train/dino"}, local=tmp_path / "l")
    assert (data.joined, data.content) == (own.joined, own.content)
    for one, other in zip(cs.make_loader(data, batch_size=2), cs.make_loader(own, batch_size=2), strict=True):
        same(one, other)


def test_the_room_of_a_local_folder_is_for_joined_values_too(root, tmp_path, caplog):
    pytest.importorskip("obstore", reason="the extra [objects] is not installed")
    publish(root, "large", IDS, tensors=lambda sample: {"value": noise(sample, shape=[50_000])})
    cs.push(root, f"file://{tmp_path}/there")
    for name, join in (("train", {"dino": "large"}), ("large", None)):
        caplog.clear()
        CachedDataset(f"file://{tmp_path}/there", name, join=join, local=tmp_path / name, limit=600_000)
        assert "every epoch downloads" in caplog.text


def test_a_published_data_set_is_read_by_itself(root):
    with cs.open(root, mode="a") as store:
        keys = np.frombuffer(b"".join(cs.key("train/dino", s, "dino", "0") for s in IDS), np.uint8).reshape(-1, 16)
        store.publish("scored", Rows(IDS, {"dino": keys}, columns={"score": [0.5] * len(IDS)}))
    data = pickle.loads(pickle.dumps(CachedDataset(root, "scored")))
    assert data[2]["score"] == 0.5
    batch = next(iter(cs.make_loader(data, batch_size=len(IDS), framework="single", shuffle=False)))
    assert torch.equal(batch["dino"], torch.stack([torch.from_numpy(vector(sample)) for sample in batch["sample_id"]]))
    with pytest.raises(BadInput):
        data.check(model=root)


@pytest.mark.parametrize("names", [("cls",), ("cls", "map", "more"), ("other", "map"), ()], ids=", ".join)
@pytest.mark.parametrize("fields", [None, {"dino.cls"}], ids=["all", "one"])
def test_an_entry_with_other_tensors_than_the_first_is_an_error_that_names_its_sample(root, names, fields):
    publish(root, "odd", IDS, tensors=lambda sample: dict.fromkeys(names if sample == IDS[4] else ("cls", "map"), vector(sample)))
    data = CachedDataset(root, join={"dino": "odd"}, fields=fields)
    assert set(data[2]) >= {"dino.cls"}
    assert data.read_batch([0, 2])["dino.cls"].shape == (2, 5)
    mixed = MixedDataset([data, data])
    for read in (lambda: data[4], lambda: data.read_batch([0, 4]), lambda: mixed.read_batch([0, 4]), lambda: data.__getitems__([4])):
        with pytest.raises(BadInput, match=repr(IDS[4]), check=asks_for("join")):
            read()


@pytest.fixture(scope="module")
def of_one_bucket(tmp_path_factory):
    root = tmp_path_factory.mktemp("law")
    make_store(root, [Row(sample) for sample in IDS], recipes())
    publish(root, "train/dino", IDS)
    publish(root, "some", IDS[1:5])
    return root


@settings(max_examples=15, deadline=None)
@given(st.lists(st.sampled_from(IDS), min_size=1, max_size=8), st.integers(0, 3))
def test_a_join_commutes_with_parts_and_mixes(of_one_bucket, chosen, epoch):
    root = of_one_bucket
    plain, data = CachedDataset(root), CachedDataset(root, join={"dino": "train/dino"})
    part, mixed = data.select(chosen), MixedDataset([data.select(chosen), data], weights=[1, 0.5])
    bare, bare_mix = plain.select(chosen), MixedDataset([plain.select(chosen), plain], weights=[1, 0.5])
    for one, other in ((part, bare), (mixed, bare_mix)):
        one.set_epoch(epoch)
        other.set_epoch(epoch)
        batch, expected = one.read_batch(range(len(one))), other.read_batch(range(len(other)))
        assert torch.equal(batch.pop("dino"), torch.stack([torch.from_numpy(vector(sample)) for sample in batch["sample_id"]]))
        same(batch, expected)


@settings(max_examples=25, deadline=None)
@given(st.floats(0, 1), st.sampled_from(["id", "caption", lambda sample: sample[0] in "024"]), st.integers(0, 9), st.integers(0, 3))
def test_a_join_commutes_with_split(of_one_bucket, share, by, seed, epoch):
    """The parts of a joined data set are those of the bare one, with the joined tensors beside them, also if joining leaves samples out."""
    plain = CachedDataset(of_one_bucket)
    for name, ids in (("train/dino", IDS), ("some", IDS[1:5])):
        joined = CachedDataset(of_one_bucket, join={"dino": name}, missing="drop").split(share, by, seed)
        for one, whole in zip(joined, plain.split(share, by, seed), strict=True):
            assert list(one.ids) == [sample for sample in whole.ids if sample in ids]
            bare = whole.select(list(one.ids))
            one.set_epoch(epoch)
            bare.set_epoch(epoch)
            if len(one):
                batch, expected = one.read_batch(range(len(one))), bare.read_batch(range(len(one)))
                assert torch.equal(batch.pop("dino"), torch.stack([torch.from_numpy(vector(sample)) for sample in batch["sample_id"]]))
                same(batch, expected)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.sampled_from(IDS), min_size=4, max_size=12), st.integers(1, 2), st.integers(1, 2), st.integers(0, 3), st.data())
def test_a_join_commutes_with_resuming(of_one_bucket, chosen, before, after, seed, data):
    """A resumed training reads what it would have read without the join, with the joined tensors beside it."""
    plain = CachedDataset(of_one_bucket).select(chosen)
    joined = CachedDataset(of_one_bucket, join={"dino": "train/dino"}).select(chosen)
    taken = data.draw(st.integers(0, len(chosen) // 2 // before))
    rest = {}
    for own in (plain, joined):
        first = BucketBatchSampler(own, batch_size=2, seed=seed, rank=0, num_replicas=before, tail="pad")
        for _batch in zip(range(taken), first, strict=False):
            pass
        resumed = [BucketBatchSampler(own, batch_size=2, seed=seed, rank=r, num_replicas=after, tail="pad") for r in range(after)]
        for one in resumed:
            one.load_state_dict(first.state_dict())
        rest[own] = [(one.state_dict()["consumed"], [own.read_batch(batch) for batch in one]) for one in resumed]
    for (consumed, batches), (bare_consumed, bare) in zip(rest[joined], rest[plain], strict=True):
        assert (consumed, len(batches)) == (bare_consumed, len(bare))
        for batch, expected in zip(batches, bare, strict=True):
            assert torch.equal(batch.pop("dino"), torch.stack([torch.from_numpy(vector(sample)) for sample in batch["sample_id"]]))
            same(batch, expected)


@pytest.mark.parametrize("like", [{"dtype": np.float16, "shape": [5]}, {"shape": [5, 1]}], ids=["dtype", "axes"])
def test_parts_of_another_kind_are_not_mixed(root, like):
    publish(root, "other", IDS, tensors=lambda sample: {"value": noise(sample, **like)})
    with pytest.raises(BadInput) as raised:
        MixedDataset([CachedDataset(root, join={"dino": name}) for name in ("train/dino", "other")])
    assert raised.value.option == "join"


def test_values_without_tensors_cannot_be_joined(root):
    publish(root, "nothing", IDS, tensors=lambda _sample: {})
    with pytest.raises(BadInput, match="no tensors", check=asks_for("join")):
        CachedDataset(root, join={"dino": "nothing"})
