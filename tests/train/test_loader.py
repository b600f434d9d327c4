"""The loader that is picked: who deals, what it refuses, and that it knows how far the trainer is."""

import importlib
import multiprocessing.util
import sys
import tempfile
from importlib.util import find_spec
from itertools import chain, islice
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import cachestore as cs
from tests.fakes import asks_for, publish_catalog
from tests.train.stores import Row, catalog_of, make_store, recipes

pytestmark = pytest.mark.torch

ROWS = [Row(str(number), bucket=(64, 48) if number % 3 else (48, 64)) for number in range(31)]


@pytest.fixture(autouse=True)
def _alone(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "NODE_RANK"):
        monkeypatch.delenv(name, raising=False)
    # Other tests of this process may have imported it.
    monkeypatch.delitem(sys.modules, "accelerate.state", raising=False)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return make_store(tmp_path_factory.mktemp("data") / "store", ROWS, recipes())


@pytest.fixture
def data(store):
    return cs.CachedDataset(store)


@pytest.fixture
def pinned(store):
    return cs.CachedDataset(store, generation=1)


def be_rank(monkeypatch, rank, world):
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", str(world))


def ids(batches):
    return [batch["sample_id"] for batch in batches]


def wanted(data, **options):
    """The ids of each batch, by the sampler alone."""
    return [[data.ids[index] for index in batch] for batch in cs.BucketBatchSampler(data, rank=0, num_replicas=1, **options)]


@pytest.mark.parametrize("options", [{}, {"ahead": 0}, {"num_workers": 1}, {"tail": "pad"}, {"framework": "accelerate"}], ids=str)
def test_a_data_set_without_samples_has_no_loader(tmp_path, options: Any):
    empty = cs.CachedDataset(make_store(tmp_path / "store", [], recipes()))
    for data in (empty, cs.MixedDataset([empty, empty])):
        with pytest.raises(cs.BadInput):
            cs.make_loader(data, **options)


def test_an_epoch_without_a_batch_has_no_loader(data):
    with pytest.raises(cs.BadInput, check=asks_for("batch_size")):
        cs.make_loader(data, batch_size=100)


@pytest.mark.parametrize("options", [{}, {"ahead": 0}, {"ahead": 5}, {"num_workers": 2}], ids=str)
def test_alone_it_gives_the_samplers_batches_however_they_are_read(data, options: Any):
    sampler = cs.BucketBatchSampler(data, batch_size=4, seed=3, rank=0, num_replicas=1)
    plain = torch.utils.data.DataLoader(data, batch_sampler=sampler, collate_fn=data.collate)
    loader = cs.make_loader(data, 4, seed=3, **options)
    for _epoch in range(2):
        for batch, expected in zip(loader, plain, strict=True):
            assert batch.keys() == expected.keys()
            assert all(torch.equal(batch[name], value) for name, value in expected.items() if isinstance(value, torch.Tensor))
            assert batch["sample_id"] == expected["sample_id"]


def test_a_reader_that_another_thread_uses_meanwhile_gives_what_it_gives_alone(data):
    """As a validation step between two batches does."""
    for batch, expected in zip(cs.make_loader(data, 4), wanted(data, batch_size=4), strict=True):
        assert batch["sample_id"] == expected
        assert data[5]["sample_id"] == "5"
        assert data.prompt("")["prompt_embeds"].shape[0] == 1


# How far the trainer is


@pytest.mark.parametrize("options", [{}, {"ahead": 0}, {"num_workers": 2}], ids=str)
@pytest.mark.parametrize("taken", [0, 1, 5])
def test_its_state_is_what_the_trainer_had_and_another_kind_of_reading_goes_on_from_it(data, options: Any, taken):
    expected = wanted(data, batch_size=4)
    loader = cs.make_loader(data, 4, **options)
    batches = iter(loader)
    assert ids(islice(batches, taken)) == expected[:taken]
    state = loader.state_dict()
    assert state["consumed"] == taken
    other: Any
    for other in ({}, {"num_workers": 1}):
        resumed = cs.make_loader(data, 4, **other)
        resumed.load_state_dict(state)
        assert ids(resumed) == expected[taken:]
        assert resumed.state_dict()["epoch"] == 1


def test_after_an_epoch_its_state_is_the_beginning_of_the_next(data):
    loader = cs.make_loader(data, 4, num_workers=1)
    list(loader)
    assert (loader.state_dict()["epoch"], loader.state_dict()["consumed"]) == (1, 0)
    loader.set_epoch(7)
    assert (loader.state_dict()["epoch"], loader.state_dict()["consumed"]) == (7, 0)


def test_a_state_of_another_catalog_is_refused(data, tmp_path):
    other = cs.CachedDataset(make_store(tmp_path / "store", ROWS[:9], recipes()))
    with pytest.raises(cs.BadInput, check=asks_for("state")):
        cs.make_loader(data, 4).load_state_dict(cs.make_loader(other, 4).state_dict())


class StandIn:
    """torchdata's StatefulDataLoader as far as samplers see it: a state is taken with each batch that is asked for, which may be
    ahead of the trainer, and the one of the last batch that was handed over counts."""

    def __init__(self, loader, ahead):
        self.sampler: Any
        self.source: Any
        self.sampler, self.source, self.collate, self.ahead = loader.batch_sampler, loader.dataset, loader.collate_fn, ahead
        self.state = None

    def __iter__(self):
        batches, waiting = iter(self.sampler), []
        while True:
            while len(waiting) <= self.ahead and (indices := next(batches, None)) is not None:
                waiting.append((indices, self.sampler.state_dict()))
            if not waiting:
                return
            indices, self.state = waiting.pop(0)
            yield self.collate(self.source.__getitems__(indices))


def stateful(loader, ahead):
    """torchdata's own."""
    made = importlib.import_module("torchdata.stateful_dataloader").StatefulDataLoader
    return made(loader.dataset, batch_sampler=loader.batch_sampler, collate_fn=loader.collate_fn, num_workers=ahead)


with_torchdata = pytest.mark.skipif(find_spec("torchdata") is None, reason="torchdata is not installed; a stand-in makes the same calls")


@pytest.mark.filterwarnings("ignore:.*set_vital")  # torchdata's
@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize("kind", [StandIn, pytest.param(stateful, marks=with_torchdata)])
def test_a_stateful_loader_of_torchdata_goes_on_from_its_state(data, ahead, kind):
    def make():
        return kind(cs.make_loader(data, 4, "single"), ahead)

    one: Any
    other: Any
    expected, one, other = wanted(data, batch_size=4), make(), make()
    assert ids(islice(one, 3)) == expected[:3]
    if kind is StandIn:
        other.sampler.load_state_dict(one.state)
    else:
        other.load_state_dict(one.state_dict())
    assert ids(other) == expected[3:]


# Who deals


def test_ranks_that_a_launcher_started_take_turns(pinned, monkeypatch):
    dealt = []
    for rank in range(2):
        be_rank(monkeypatch, rank, 2)
        dealt.append(ids(cs.make_loader(pinned, 4)))
    assert [batch for turn in zip(*dealt, strict=True) for batch in turn] == wanted(pinned, batch_size=4)[:6]


def test_every_process_for_itself_takes_everything(data, monkeypatch):
    be_rank(monkeypatch, 1, 2)
    assert ids(cs.make_loader(data, 4, "single")) == wanted(data, batch_size=4)


def test_a_loader_made_before_its_ranks_were_started_is_shared_all_the_same(pinned, data, monkeypatch):
    """As with Lightning's Trainer, which starts ranks within `fit`."""
    loader, unpinned = cs.make_loader(pinned, 4), cs.make_loader(data, 4)
    assert len(loader) == 7
    be_rank(monkeypatch, 1, 3)
    assert len(loader) == 2
    assert ids(loader) == wanted(pinned, batch_size=4)[1:6:3]
    with pytest.raises(cs.BadInput, check=asks_for("generation")):
        next(iter(unpinned))


@pytest.mark.parametrize("framework", ["auto", "ddp", "accelerate", "fabric", "lightning"])
def test_a_world_above_one_without_a_generation_is_an_error_that_says_so(data, pinned, monkeypatch, framework):
    be_rank(monkeypatch, 0, 2)
    with pytest.raises(cs.BadInput, check=asks_for("generation")):
        cs.make_loader(data, framework=framework)
    assert cs.make_loader(pinned, framework=framework) is not None


def test_a_catalog_published_between_two_ranks_opens_does_not_reach_those_given_one_generation(tmp_path, monkeypatch):
    path = make_store(tmp_path / "store", ROWS, recipes())
    opened = [cs.CachedDataset(path, generation=1)]
    with cs.open(path) as store:
        publish_catalog(store.layout, catalog_of(ROWS[:20], recipes(), "train"))
    opened.append(cs.CachedDataset(path, generation=1))
    assert (len(cs.CachedDataset(path)), cs.CachedDataset(path).generation) == (20, 2), "who names none gets the newer one"
    dealt = []
    for rank, data in enumerate(opened):
        be_rank(monkeypatch, rank, 2)
        loader = cs.make_loader(data, 4)
        dealt.append(ids(loader))
        assert loader.state_dict()["digest"] == opened[0].digest
    flat = list(chain.from_iterable(chain.from_iterable(dealt)))
    assert [batch for turn in zip(*dealt, strict=True) for batch in turn] == wanted(opened[0], batch_size=4)[:6]
    assert len(flat) == len(set(flat)) == 24


def accelerate_state(monkeypatch, *, is_initialized):
    monkeypatch.setitem(sys.modules, "accelerate.state", SimpleNamespace(is_initialized=lambda: is_initialized))


def test_with_an_accelerator_it_is_left_to_deal(pinned, monkeypatch):
    accelerate_state(monkeypatch, is_initialized=True)
    be_rank(monkeypatch, 1, 2)
    loader = cs.make_loader(pinned, 4)
    assert [[pinned.ids[index] for index in batch] for batch in loader.batch_sampler] == wanted(pinned, batch_size=4)[:6]
    with pytest.raises(cs.BadInput, check=asks_for("split")):
        list(loader)


def test_where_accelerate_may_still_come_it_refuses_to_guess(pinned, monkeypatch):
    """Ranks that deal for themselves, dealt once more, would lose half of the samples without a word."""
    accelerate_state(monkeypatch, is_initialized=False)
    assert cs.make_loader(pinned, 4) is not None, "alone there is nothing to guess"
    be_rank(monkeypatch, 1, 2)
    with pytest.raises(cs.BadInput, check=asks_for("framework")):
        cs.make_loader(pinned, 4)
    assert ids(cs.make_loader(pinned, 4, "ddp")) == wanted(pinned, batch_size=4)[1:6:2]
    group = SimpleNamespace(is_available=lambda: True, is_initialized=lambda: True, get_rank=lambda: 0, get_world_size=lambda: 2)
    monkeypatch.setitem(sys.modules, "torch.distributed", group)
    assert len(cs.make_loader(pinned, 4)) == 3, "a process group that somebody else began tells"


# Options


@pytest.mark.parametrize(
    "options",
    [
        {"framework": "jax"},
        {"framework": ["ddp"]},
        {"ahead": -1},
        {"ahead": None},
        {"num_workers": "2"},
        {"batch_size": "8"},
        {"seed": "x"},
        {"pin_memory": "yes"},
    ],
    ids=str,
)
def test_an_option_that_does_not_fit_is_an_error_that_names_it(data, options: Any):
    with pytest.raises(cs.BadInput, check=asks_for(next(iter(options)))):
        cs.make_loader(data, **options)


def test_workers_whose_sockets_would_have_too_long_names_are_refused_before_they_wait_for_ever(data, tmp_path, monkeypatch):
    monkeypatch.delattr(multiprocessing.util, "_get_base_temp_dir", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", "/tmp/".ljust(76, "x"))
    assert cs.make_loader(data, 4), "this process needs no sockets"
    with pytest.raises(cs.BadInput, check=asks_for("num_workers")):
        cs.make_loader(data, 4, num_workers=1)
    monkeypatch.setattr(tempfile, "tempdir", "/tmp/".ljust(75, "x"))
    assert cs.make_loader(data, 4, num_workers=1)


@pytest.mark.parametrize("given", [None, "cache/"])
def test_what_is_no_data_set_is_named_as_it_was_given(given):
    with pytest.raises(cs.BadInput, check=asks_for("data")):
        cs.make_loader(given)


def test_pinning_without_an_accelerator_is_reported_and_does_nothing(data, monkeypatch, caplog):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    batch = next(iter(cs.make_loader(data, 4, pin_memory=True)))
    assert "has no effect without an accelerator" in caplog.text
    assert not batch["latents"].is_pinned()
