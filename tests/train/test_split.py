"""A data set in two parts whose samples keep their side."""

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

import cachestore as cs
from tests.fakes import asks_for
from tests.train.stores import Row, make_store, recipes
from tests.train.test_dataset import batch_of, equal

pytestmark = pytest.mark.torch

SHARES = st.floats(0, 1)
SEEDS = st.integers(0, 2**40)


def rows_of(count, *, step=1):
    return [Row(f"{n % 7}/{n}.png", (f"caption {n % 9}",), None, extras=f'{{"artist": {n % 13}}}') for n in range(0, count, step)]


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """(a data set of 150 samples, the same with twice as many)."""
    root = tmp_path_factory.mktemp("split")
    few, many = (make_store(root / str(step), rows_of(300, step=step), recipes(stored=None)) for step in (2, 1))
    return cs.CachedDataset(few), cs.CachedDataset(many)


def folder_of(sample):
    return sample.rsplit("/", 1)[0]


WAYS = st.sampled_from(["id", "caption", "artist", folder_of])


@given(SHARES, WAYS, SEEDS)
def test_the_parts_are_disjoint_and_together_the_whole_in_its_order(stores, share, by, seed):
    for data in stores:
        stay, held_out = data.split(share, by, seed)
        assert sorted([*stay.ids, *held_out.ids], key=data.index) == list(data.ids)
        assert [*map(data.index, held_out.ids)] == sorted(map(data.index, held_out.ids))
        assert len(stay) + len(held_out) == len(data)


@given(SHARES, WAYS, SEEDS)
def test_no_sample_changes_its_side_when_others_are_added(stores, share, by, seed):
    few, many = stores
    assert set(few.split(share, by, seed)[1].ids) == set(many.split(share, by, seed)[1].ids) & set(few.ids)


@given(SHARES, SHARES, WAYS, SEEDS)
def test_a_larger_share_holds_out_what_a_smaller_one_does(stores, one, other, by, seed):
    data = stores[1]
    smaller, larger = (set(data.split(share, by, seed)[1].ids) for share in sorted((one, other)))
    assert smaller <= larger


@given(SHARES, SEEDS)
def test_all_samples_of_a_group_come_to_one_side(stores, share, seed):
    data = stores[1]
    groups = {"artist": lambda n: n % 13, "caption": lambda n: n % 9, folder_of: lambda n: n % 7}
    for by, group in groups.items():
        sides = [{group(int(one.split("/")[1][:-4])) for one in part.ids} for part in data.split(share, by, seed)]
        assert not sides[0] & sides[1]


@given(st.floats(0.01, 0.99), SEEDS)
def test_the_share_is_within_six_deviations(stores, share, seed):
    data = stores[1]
    held_out = len(data.split(share, seed=seed)[1])
    assert abs(held_out - share * len(data)) <= 6 * (share * (1 - share) * len(data)) ** 0.5 + 6


def test_other_seeds_hold_out_others_and_the_ends_hold_out_none_and_all(stores):
    data = stores[1]
    assert data.split(0.3, seed=1)[1].ids != data.split(0.3, seed=2)[1].ids
    assert [len(part) for share in (0, 1) for part in data.split(share)] == [300, 0, 0, 300]
    assert [len(part) for part in data.select([]).split(0.5)] == [0, 0]


def test_a_part_is_split_as_the_whole_and_is_the_same_in_another_process(stores):
    data = stores[1]
    held_out = data.split(0.3)[1]
    part = data.select(range(100))
    assert set(part.split(0.3)[1].ids) == set(held_out.ids) & set(part.ids)
    twin = pickle.loads(pickle.dumps(data)).split(0.3)[1]
    assert (list(twin.ids), twin.digest) == (list(held_out.ids), held_out.digest)
    assert equal(batch_of(twin, 0, 2), batch_of(held_out, 0, 2))
    again = data.select(list(data.ids[:2]) * 2).split(0.5)
    assert all(len(part) == 2 * len(set(part.ids)) for part in again)


def test_the_parts_are_batched_by_rank_and_mixed_and_a_state_is_of_its_part(stores):
    stay, held_out = stores[1].split(0.3)
    seen = []
    for rank in range(2):
        sampler = cs.BucketBatchSampler(stay, batch_size=1, rank=rank, num_replicas=2)
        seen += [stay.ids[int(index)] for batch in sampler for index in batch]
    assert len(seen) == len(set(seen)) >= len(stay) - 1
    assert set(seen) <= set(stay.ids)
    state = cs.BucketBatchSampler(stay, batch_size=1).state_dict()
    with pytest.raises(cs.BadInput, check=asks_for("state")):
        cs.BucketBatchSampler(held_out, batch_size=1).load_state_dict(state)
    cs.BucketBatchSampler(stores[1].split(0.3)[0], batch_size=1).load_state_dict(state)
    assert len(cs.MixedDataset([stay, held_out])) == 300


def test_what_cannot_be_split_by_is_refused(stores):
    data = stores[1]
    for share in (2, -0.1, "0.1", float("nan")):
        with pytest.raises(cs.BadInput, check=asks_for("share")):
            data.split(share)
    with pytest.raises(cs.BadInput, check=asks_for("seed")):
        data.split(0.1, seed=-1)
    for by in ("artits", 5, None, lambda _id: object()):
        with pytest.raises(cs.BadInput, check=asks_for("by")):
            data.split(0.1, by)  # pyright: ignore[reportArgumentType]


def test_a_sample_without_the_column_is_named(tmp_path):
    rows = [Row("a", bucket=None, extras='{"artist": "x"}'), Row("b", bucket=None)]
    data = cs.CachedDataset(make_store(tmp_path / "store", rows, recipes(stored=None)))
    with pytest.raises(cs.BadInput, check=asks_for("by", "'b'", "artist")):
        data.split(0.1, "artist")
