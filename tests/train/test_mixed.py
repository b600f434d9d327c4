"""Several data sets as one: each sample as often as its weight says, one bucket a batch, and the same again for the same (seed, epoch)."""

import json
import pickle
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import cachestore as cs
from cachestore.train.mixed import _apportion
from tests.fakes import asks_for, tells_of
from tests.shares import share
from tests.train.stores import FLUX, PLAIN, SDXL, Row, make_store, recipes
from tests.train.test_dataset import batch_of, equal, loader
from tests.train.test_read_batch import assert_read_straight

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")]


@pytest.fixture
def photos(tmp_path):
    rows = [Row(f"p{n}", (f"photo {n}",), bucket=(64, 48) if n % 3 else (48, 64)) for n in range(9)]
    return cs.CachedDataset(make_store(tmp_path / "photos", rows, recipes()))


@pytest.fixture
def drawings(tmp_path):
    """Of another resolution, but for some."""
    rows = [Row(f"d{n}", (f"drawing {n}",), bucket=(64, 48) if n < 2 else (128, 96)) for n in range(5)]
    return cs.CachedDataset(make_store(tmp_path / "drawings", rows, recipes()))


def ids_of(mixed, epoch=0):
    mixed.set_epoch(epoch)
    return [sample["sample_id"] for sample in mixed.__getitems__(range(len(mixed)))]


def test_no_data_sets_have_no_samples_and_no_batches():
    mixed = cs.MixedDataset([])
    assert (len(mixed), mixed.buckets, mixed.__getitems__([]), mixed.generation, mixed.mask_name) == (0, {}, [], (), None)
    with pytest.raises(cs.BadInput):
        cs.BucketBatchSampler(mixed, batch_size=1)
    with pytest.raises(cs.BadInput):
        mixed.collate([])


def test_an_empty_data_set_and_one_of_weight_nought_give_nothing(photos, drawings):
    assert sorted(ids_of(cs.MixedDataset([photos.select([]), drawings, photos], [5, 1, 0]))) == sorted(drawings.ids)


def test_by_default_every_sample_comes_once_and_equal_buckets_are_one(photos, drawings):
    mixed = cs.MixedDataset([photos, drawings])
    assert sorted(ids_of(mixed)) == sorted([*photos.ids, *drawings.ids])
    assert {bucket: len(indices) for bucket, indices in mixed.buckets.items()} == {(48, 64): 3, (64, 48): 8, (128, 96): 3}
    found = ids_of(mixed)
    for bucket, indices in mixed.buckets.items():
        for data in (photos, drawings):
            ours = {data.ids[index] for index in data.buckets.get(bucket, [])}
            assert {found[index] for index in indices} & set(data.ids) == ours


def test_a_weight_says_how_often_each_sample_comes(photos, drawings):
    assert Counter(ids_of(cs.MixedDataset([photos, drawings], [1, 3]))) == {
        **dict.fromkeys(photos.ids, 1),
        **dict.fromkeys(drawings.ids, 3),
    }


@pytest.mark.parametrize("weight", [1 / 3, 0.5, 1.25, 2.9])
def test_what_is_left_over_whole_times_is_dealt_out_in_turn(photos, weight):
    mixed = cs.MixedDataset([photos], [weight])
    whole, counts = int(weight), Counter()
    for epoch in range(18):
        found = Counter(ids_of(mixed, epoch))
        assert sum(found.values()) == len(mixed) == int(9 * weight + 0.5)
        assert all(found[sample] in {whole, whole + 1} for sample in photos.ids)
        counts += found
    for indices in photos.buckets.values():
        often = [counts[photos.ids[index]] for index in indices]
        assert max(often) - min(often) <= 1


def test_which_samples_come_depends_on_seed_and_epoch_alone(photos, drawings):
    def dealt(seed):
        return [ids_of(cs.MixedDataset([photos, drawings], [0.5, 1.5], seed=seed), epoch) for epoch in (0, 1, 5)]

    assert dealt(0) == dealt(0)
    assert dealt(0) != dealt(1)
    assert dealt(0)[0] != dealt(0)[1]


def test_buckets_and_numbers_of_batches_are_the_same_in_every_epoch(photos, drawings):
    mixed = cs.MixedDataset([photos, drawings], [0.5, 1.5])
    buckets = {bucket: list(indices) for bucket, indices in mixed.buckets.items()}
    for epoch in range(4):
        mixed.set_epoch(epoch)
        assert mixed.buckets == buckets
        for bucket, indices in mixed.buckets.items():
            sizes = {tuple(sample["target_size"].tolist()[::-1]) for sample in mixed.__getitems__(indices)}
            assert sizes == ({bucket} if indices else set())


def test_a_batch_is_one_read_of_each_data_set_in_the_order_asked_for(photos, drawings, monkeypatch):
    mixed = cs.MixedDataset([photos, drawings])
    calls = []
    for data in mixed.datasets:
        read = data._reader.get_raw
        monkeypatch.setattr(data._reader, "get_raw", lambda keys, read=read: calls.append(len(keys)) or read(keys))
    assert batch_of(mixed, 9, 1, 10, 2)["sample_id"] == ["d0", "p1", "d1", "p2"]
    assert calls == [4, 4]


def test_a_batch_that_is_read_straight_is_the_same(photos, drawings):
    mixed = cs.MixedDataset([photos, drawings], [1.5, 1])
    buffers = mixed.make_buffers()
    for epoch in range(3):
        mixed.set_epoch(epoch)
        for indices in mixed.buckets.values():
            mixed.prefetch(indices)
            assert equal(mixed.read_batch(indices), batch_of(mixed, *indices))
            assert equal(mixed.read_batch(indices, into=buffers), batch_of(mixed, *indices))


@pytest.mark.parametrize("latents", ["sample", "mean", "raw", "moments"])
@pytest.mark.parametrize("family", [SDXL, FLUX, PLAIN], ids=lambda family: family.name)
@given(data=st.data())
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_batch_of_several_data_sets_is_read_straight_in_any_order(two_stores, monkeypatch, family, latents, data):
    """Of two stores that share a caption, and of a part of one of them."""
    ours, theirs = (cs.CachedDataset(path, latents=latents) for path in two_stores[family.name])
    mixed = cs.MixedDataset([ours, theirs, ours.select([3, 1])], [1, 2, 1])
    mixed.set_epoch(2)
    indices = data.draw(st.lists(st.sampled_from(range(len(mixed))), min_size=1, max_size=9))
    for into in (None, mixed.make_buffers()):
        assert_read_straight(mixed, indices, monkeypatch, into=into)


@pytest.fixture(scope="module")
def two_stores(tmp_path_factory):
    """By the name of a family: two stores of it whose samples share a bucket and a caption, some with columns of their own."""
    made = {}
    for family in (SDXL, FLUX, PLAIN):
        folder = tmp_path_factory.mktemp("mixed")
        ours = [Row(f"o{n}", ("a photo" if n else "ours",), extras='{"artist": "A"}' if n == 2 else "{}") for n in range(4)]
        theirs = [Row(f"t{n}", ("a photo", "and more") if n else ("theirs",)) for n in range(3)]
        made[family.name] = [make_store(folder / name, rows, recipes(family)) for name, rows in (("ours", ours), ("theirs", theirs))]
    return made


def test_control_images_of_several_data_sets_are_read_straight(tmp_path, monkeypatch):
    rows = [[Row(f"{name}{n}", controls=[(64, 48)]) for n in range(2)] for name in "ab"]
    mixed = cs.MixedDataset([cs.CachedDataset(make_store(tmp_path / str(n), some, recipes())) for n, some in enumerate(rows)])
    assert_read_straight(mixed, [3, 0, 2], monkeypatch)


def test_lists_of_control_images_of_several_data_sets_are_read_straight(tmp_path, monkeypatch):
    rows = [[Row(f"{name}{n}", controls=[(64, 48)] * n) for n in range(3)] for name in "ab"]
    mixed = cs.MixedDataset([cs.CachedDataset(make_store(tmp_path / str(n), some, recipes())) for n, some in enumerate(rows)])
    assert_read_straight(mixed, [5, 0, 1, 3, 2, 4], monkeypatch)


def test_parts_have_their_control_images_as_their_whole_has_and_mix(tmp_path):
    rows = [Row("one", controls=[(64, 48)]), Row("two", controls=[(64, 48), (64, 48)]), Row("three", controls=[(64, 48)])]
    data = cs.CachedDataset(make_store(tmp_path / "store", rows, recipes()))
    mixed = cs.MixedDataset([data.select([0, 2]), data.select([1])], [1, 2])
    assert [len(controls) for controls in mixed.read_batch([0, 2, 1])["control_latents"]] == [1, 2, 1]
    single = cs.CachedDataset(make_store(tmp_path / "single", rows[:1], recipes()))
    with pytest.raises(cs.BadInput):
        cs.MixedDataset([data, single])
    assert len(cs.MixedDataset([data.select([]), single])) == 1
    assert len(cs.MixedDataset([single.select([]), data])) == 3
    nothing = cs.CachedDataset(make_store(tmp_path / "nothing", [Row("broken", controls=[(64, 48)], control_fails=True)], recipes()))
    assert len(cs.MixedDataset([single, nothing])) == 1


@pytest.mark.parametrize("weights", [[1, 2], np.array([1, 2]), np.array([1.0, 2.0])], ids=repr)
def test_equal_weights_have_one_digest_however_they_are_written(photos, drawings, weights):
    digest = cs.MixedDataset([photos, drawings], [1.0, 2.0]).digest
    assert cs.MixedDataset([photos, drawings], weights).digest == digest
    numbers: Any = torch.tensor([1.0, 2.0])
    assert cs.MixedDataset([photos, drawings], numbers).digest == digest


def test_an_entry_that_is_missing_is_reported_with_its_data_set(photos, tmp_path):
    rows = [Row("a", ("gone",)), Row("b", ("gone",))]
    other = cs.CachedDataset(make_store(tmp_path / "other", rows, recipes(), name="other", leave_out=["gone"]), "other")
    indices = cs.MixedDataset([photos, other]).buckets[64, 48]
    with pytest.raises(cs.MissingEntry, check=tells_of("'other'")):
        cs.MixedDataset([photos, other]).read_batch(indices)


def test_samples_of_which_some_alone_have_sizes_are_refused_as_collate_does(tmp_path):
    rows = [[Row("a")], [Row("b", is_measured=False)]]
    mixed = cs.MixedDataset([cs.CachedDataset(make_store(tmp_path / str(n), some, recipes())) for n, some in enumerate(rows)])
    with pytest.raises(cs.BadInput, check=tells_of("original_size", "'b'")):
        mixed.read_batch([0, 1])


def test_what_is_damaged_in_one_of_the_stores_is_an_error_that_names_the_segment(photos, drawings, tmp_path):
    mixed = cs.MixedDataset([photos, drawings])
    (segment,) = (tmp_path / "drawings").glob("segments/*/*")
    whole = segment.read_bytes()
    begin = 8 + int.from_bytes(whole[:8], "little")
    segment.write_bytes(whole[:begin] + bytes(len(whole) - begin))
    with pytest.raises(cs.CorruptEntry):
        mixed.read_batch(mixed.buckets[64, 48])
    assert mixed.read_batch(mixed.buckets[48, 64])["sample_id"] == ["p0", "p3", "p6"]


def test_where_a_sample_is_from_can_be_asked(photos, drawings):
    mixed = cs.MixedDataset([photos, drawings], [0.5, 1])
    for index, sample_id in enumerate(ids_of(mixed, 3)):
        number, inner = mixed.where(index)
        assert mixed.datasets[number].ids[inner] == sample_id
    with pytest.raises(IndexError):
        mixed.where(len(mixed))
    with pytest.raises(IndexError):
        mixed[len(mixed)]


@pytest.mark.parametrize("method", share(["fork", "spawn"], 2))
def test_workers_read_the_epoch_that_the_sampler_is_in(photos, drawings, method):
    mixed = cs.MixedDataset([photos, drawings], [0.5, 2])
    sampler = cs.BucketBatchSampler(mixed, batch_size=2, tail="pad")
    here = [list(loader(mixed, batch_sampler=sampler)) for _epoch in range(2)]
    sampler.set_epoch(0)
    there = loader(mixed, batch_sampler=sampler, num_workers=2, multiprocessing_context=method, persistent_workers=True)
    assert not all(map(equal, *here))
    for expected in here:
        assert all(map(equal, list(there), expected))


def test_make_loader_takes_a_mix_and_goes_on_where_it_stopped(photos, drawings):
    mixed = cs.MixedDataset([photos, drawings], [0.5, 2])
    whole = [batch["sample_id"] for batch in cs.make_loader(mixed, batch_size=2)]
    first, steps = cs.make_loader(mixed, batch_size=2), []
    for batch in first:
        steps.append(batch["sample_id"])
        if len(steps) == 2:
            break
    rest = cs.make_loader(cs.MixedDataset([photos, drawings], [0.5, 2]), batch_size=2)
    rest.load_state_dict(first.state_dict())
    assert steps + [batch["sample_id"] for batch in rest] == whole
    other = cs.make_loader(cs.MixedDataset([photos, drawings], [0.5, 1]), batch_size=2)
    with pytest.raises(cs.BadInput, check=asks_for("state")):
        other.load_state_dict(first.state_dict())


def test_a_mix_is_pinned_where_all_its_data_sets_are(photos, tmp_path):
    pinned = cs.CachedDataset(tmp_path / "photos", generation=1)
    assert (cs.MixedDataset([pinned, photos]).is_pinned, cs.MixedDataset([pinned, pinned]).is_pinned) == (False, True)
    assert cs.MixedDataset([pinned, photos]).generation == (1, 1)


def test_a_pickled_mix_is_the_same_mix(photos, drawings):
    mixed = cs.MixedDataset([photos, drawings], [0.5, 2], seed=7)
    mixed.set_epoch(3)
    twin = pickle.loads(pickle.dumps(mixed))
    assert (twin.epoch, twin.digest, twin.buckets) == (3, mixed.digest, mixed.buckets)
    assert ids_of(twin, 3) == ids_of(mixed, 3)


@pytest.mark.parametrize("weights", [[1], [1, 2, 3], [1, -1], [1, float("nan")], [1, float("inf")]])
def test_weights_that_do_not_fit_are_refused(photos, drawings, weights):
    with pytest.raises(cs.BadInput, check=asks_for("weights")):
        cs.MixedDataset([photos, drawings], weights)


def test_data_sets_whose_samples_do_not_fit_into_one_batch_are_refused(photos, tmp_path):
    drawings = tmp_path / "other"
    make_store(drawings, [Row("d", bucket=(64, 48))], recipes())
    with pytest.raises(cs.BadInput, check=asks_for("fields")):
        cs.MixedDataset([photos, cs.CachedDataset(drawings, fields={"latents"})])
    with pytest.raises(cs.BadInput, check=asks_for("fields")):
        cs.MixedDataset([photos, cs.CachedDataset(drawings, latents="mean")])
    make_store(drawings, [Row("d")], recipes(stored="mean"), name="another")
    with pytest.raises(cs.BadInput, check=asks_for("datasets", "latents")):
        cs.MixedDataset([photos, cs.CachedDataset(drawings, "another")])
    make_store(drawings, [Row("d")], recipes(PLAIN), name="third")
    latents = [cs.CachedDataset(tmp_path / "photos", fields={"latents"}), cs.CachedDataset(drawings, "third", fields={"latents"})]
    assert len(cs.MixedDataset(latents)) == 10, "what is not handed out does not matter"


@given(st.lists(st.integers(0, 50), max_size=6), st.floats(0, 1, exclude_max=True))
def test_a_fraction_is_dealt_out_whole_and_nobody_gives_more_than_he_has(sizes, fraction):
    counts = _apportion(sizes, fraction)
    assert sum(counts) == int(sum(sizes) * fraction + 0.5)
    assert all(0 <= count <= size for count, size in zip(counts, sizes, strict=True))
    assert np.allclose(counts, [size * fraction for size in sizes], atol=1)


# The sources of one data set


def of_sources(path, *sources, extras=None):
    """A mix of the sources of one data set: (name, number of samples, weight) of each."""
    rows = [
        Row(f"{name}/{n}", (f"caption {name} {n}",), extras=extras or json.dumps({"source": name, "source_weight": weight}))
        for name, count, weight in sources
        for n in range(count)
    ]
    return cs.MixedDataset.of_sources(cs.CachedDataset(make_store(path, rows, recipes())))


def test_sources_of_nothing_are_a_mix_of_nothing(tmp_path):
    assert len(of_sources(tmp_path / "store")) == 0


def test_each_source_comes_as_often_as_it_says(tmp_path):
    mixed = of_sources(tmp_path / "store", ("a", 3, 1.0), ("b", 2, 10.0), ("c", 4, 0.5), ("d", 2, 0.0))
    assert Counter(mixed[index]["sample_id"].partition("/")[0] for index in range(len(mixed))) == {"a": 3, "b": 20, "c": 2}


@pytest.mark.parametrize("extras", ["{}", '{"source": "the web"}', '{"source": 7, "source_weight": "heavy"}'])
def test_a_data_set_without_such_sources_is_mixed_of_itself(tmp_path, extras):
    assert len(of_sources(tmp_path / "store", ("a", 3, 1.0), extras=extras)) == 3


def test_the_sources_of_several_data_sets_come_by_both_weights(tmp_path):
    mixed = of_sources(tmp_path / "store", ("a", 3, 1.0), ("b", 2, 10.0))
    data = cs.CachedDataset(tmp_path / "store", name=mixed.datasets[0].name)
    both = cs.MixedDataset.of_sources([data, data], weights=[2, 1])
    once = Counter(mixed[index]["sample_id"] for index in range(len(mixed)))
    assert Counter(both[index]["sample_id"] for index in range(len(both))) == {name: 3 * count for name, count in once.items()}


def test_sources_of_no_data_sets_are_none_and_a_mix_of_mixes_is_refused():
    assert len(cs.MixedDataset.of_sources([])) == 0
    mixes: list[Any] = [cs.MixedDataset([])]
    with pytest.raises(cs.BadInput, check=asks_for("datasets")):
        cs.MixedDataset(mixes)


def test_samples_that_a_small_weight_never_lets_come_are_reported(tmp_path, caplog):
    rows = [Row(f"p{n}", bucket=(64, 48) if n else (48, 64)) for n in range(9)]
    data = cs.CachedDataset(make_store(tmp_path / "photos", rows, recipes()))
    mixed = cs.MixedDataset([data], [0.25])
    seen = {sample for epoch in range(40) for sample in ids_of(mixed, epoch)}
    [reported] = [record.getMessage() for record in caplog.records]
    assert reported.startswith(f"with a weight of 0.25, {9 - len(seen)} of 9 samples of data set 0 of the mix are never used")
    caplog.clear()
    cs.MixedDataset([data], [1])
    assert caplog.records == []
