"""Parts of a data set: torch's, and ours, which keeps the buckets for the sampler."""

import pickle

import numpy as np
import pytest
from torch.utils.data import Subset, random_split

import cachestore as cs
from tests.fakes import asks_for, tells_of
from tests.train.stores import Row, make_store, recipes
from tests.train.test_dataset import ROWS, batch_of, equal, loader

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")]


@pytest.fixture
def data(tmp_path):
    rows = [*ROWS, Row("broken", fails=True), Row("e.png", ("a horse",), bucket=(48, 64))]
    return cs.CachedDataset(make_store(tmp_path / "store", rows, recipes()))


def test_no_samples_are_an_empty_data_set(data):
    part = data.select([])
    assert (len(part), part.ids, part.buckets, part.__getitems__([])) == (0, [], {}, [])
    with pytest.raises(cs.BadInput):
        cs.BucketBatchSampler(part, batch_size=1)


def test_a_part_has_its_samples_in_the_order_asked_for_and_its_own_indices(data):
    part = data.select(["c.png", 0, np.int64(-1)])
    assert (list(part.ids), part.buckets, part.index("e.png")) == (["c.png", "a.png", "e.png"], {(48, 64): [0, 2], (64, 48): [1]}, 2)
    assert equal(batch_of(part, 0, 2), batch_of(data, 2, 4))
    assert equal(part.read_batch([0, 2]), batch_of(data, 2, 4))
    with pytest.raises(cs.BadInput, check=tells_of("part", "'train'", "'b.png'")):
        part.index("b.png")


def test_a_part_of_a_part_is_a_part_of_the_whole(data):
    part = data.select([4, 3, 2, 1]).select(["b.png", 0])
    assert list(part.ids) == ["b.png", "e.png"]
    assert part.digest == data.select([1, 4]).digest


def test_a_sample_that_is_named_twice_comes_twice(data):
    part = data.select([0, 0, 1])
    assert (len(part), part.buckets, part.index("a.png")) == (3, {(64, 48): [0, 1, 2]}, 0)


def test_what_is_not_there_is_reported(data):
    with pytest.raises(IndexError):
        data.select([5])
    with pytest.raises(cs.BadInput, check=tells_of("'z'")):
        data.select(["z"])
    with pytest.raises(cs.MissingEntry):
        data.select(["broken"])
    with pytest.raises(cs.BadInput, check=asks_for("samples")):
        data.select("a.png")


def test_a_sampler_goes_through_a_part_alone_and_its_state_is_of_that_part(data):
    part = data.select([0, 1, 3])
    sampler = cs.BucketBatchSampler(part, batch_size=1, seed=4)
    batches = list(loader(part, batch_sampler=sampler, num_workers=1, multiprocessing_context="fork"))
    assert sorted(batch["sample_id"][0] for batch in batches) == ["a.png", "b.png", "d.png"]
    with pytest.raises(cs.BadInput, check=asks_for("state")):
        cs.BucketBatchSampler(data, batch_size=1, seed=4).load_state_dict(sampler.state_dict())


def test_parts_have_epochs_of_their_own(data):
    data.set_epoch(3)
    part = data.select([0])
    part.set_epoch(5)
    assert (data.epoch, part.epoch, data.select([0]).epoch) == (3, 5, 3)


def test_a_pickled_part_is_the_same_part(data):
    part = data.select(["e.png", "c.png"])
    twin = pickle.loads(pickle.dumps(part))
    assert (list(twin.ids), twin.digest) == (list(part.ids), part.digest)
    assert equal(batch_of(twin, 0, 1), batch_of(part, 0, 1))


def test_a_part_that_torch_cut_has_batched_reads_and_for_a_sampler_select_has_its_indices(data, monkeypatch):
    part = Subset(data, [4, 0])
    calls = []
    read = data._reader.get_raw
    monkeypatch.setattr(data._reader, "get_raw", lambda keys: calls.append(keys) or read(keys))
    assert [sample["sample_id"] for sample in part.__getitems__([0, 1])] == ["e.png", "a.png"]
    assert len(calls) == 1
    with pytest.raises(cs.BadInput, check=asks_for("data")):
        cs.BucketBatchSampler(part, batch_size=1)  # pyright: ignore[reportArgumentType]
    one, other = random_split(data, [3, 2])
    assert sorted([*data.select(one.indices).ids, *data.select(other.indices).ids]) == sorted(data.ids)
