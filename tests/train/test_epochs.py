"""What is drawn for a batch depends on the epoch of the loader that gives it, whatever other loaders over the same data set do."""

from itertools import islice, product

import pytest
import torch
from torch.utils.data import DataLoader

import cachestore as cs
from tests.shares import share
from tests.train.stores import Row, make_store, recipes

pytestmark = pytest.mark.torch

ROWS = [Row(str(number), captions=(f"one {number}", f"two {number}", f"three {number}")) for number in range(24)]


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return make_store(tmp_path_factory.mktemp("data") / "store", ROWS, recipes())


def opened(store):
    return cs.CachedDataset(store, captions=cs.CaptionPolicy(choose="all"), generation=1)


def mixed(store):
    return cs.MixedDataset([opened(store), opened(store).select(range(12))], [1, 0.5])


def plain(data, **options):
    """A trainer's own DataLoader, which knows nothing of epochs."""
    return DataLoader(data, batch_sampler=cs.BucketBatchSampler(data, 4, seed=3), collate_fn=data.collate, **options)


def of(batches):
    return [(batch["sample_id"], batch["caption"], batch["latents"].clone()) for batch in batches]


def equal(ours, theirs):
    return len(ours) == len(theirs) and all(
        one[:2] == other[:2] and torch.equal(one[2], other[2]) for one, other in zip(ours, theirs, strict=True)
    )


LOADERS = {
    "prefetching": lambda data: cs.make_loader(data, 4, seed=3),
    "on demand": lambda data: cs.make_loader(data, 4, seed=3, ahead=0),
    "workers": lambda data: cs.make_loader(data, 4, seed=3, num_workers=2),
    "plain": plain,
    "plain, workers that stay": lambda data: plain(data, num_workers=2, persistent_workers=True),
}


@pytest.mark.parametrize("way", share(product(LOADERS, [opened, mixed]), 3), ids=lambda way: f"{way[0]}-{way[1].__name__}")
def test_validation_within_an_epoch_changes_no_batch_of_training(store, way):
    make, kind = LOADERS[way[0]], way[1]
    undisturbed = make(kind(store))
    expected = [of(undisturbed) for _epoch in range(3)]
    data = kind(store)
    training, validation = make(data), cs.make_loader(data, 2, shuffle=False)
    found = []
    for _epoch in range(3):
        batches = []
        for number, batch in enumerate(training):
            batches += of([batch])
            if number in {1, 3}:
                list(validation)  # each time it is at another epoch of its own
        found.append(batches)
    assert all(map(equal, found, expected))
    assert not equal(expected[0], expected[1])


@pytest.mark.parametrize("make", LOADERS.values(), ids=LOADERS)
def test_two_loaders_that_take_turns_give_what_each_gives_alone(store, make):
    alone = opened(store)
    loader = make(alone)
    expected = [of(loader), of(loader)]
    data = opened(store)
    ahead, behind = make(data), make(data)
    list(ahead)
    pairs = list(zip(behind, ahead, strict=True))
    assert equal(of(one for one, _other in pairs), expected[0])
    assert equal(of(other for _one, other in pairs), expected[1])


def test_a_saved_position_is_of_its_own_loader(store):
    data = opened(store)
    training, validation = cs.make_loader(data, 4, seed=3), cs.make_loader(data, 4, shuffle=False)
    list(training)
    first = of(islice(training, 2))
    list(validation)
    list(validation)
    again = cs.make_loader(opened(store), 4, seed=3)
    again.load_state_dict(training.state_dict())
    expected = cs.make_loader(opened(store), 4, seed=3)
    list(expected)
    assert equal([*first, *of(again)], of(expected))


def test_indices_of_a_batch_are_read_in_their_epoch_and_others_in_the_one_that_is_set(store):
    data = opened(store)
    [batch, *_others] = cs.BucketBatchSampler(data, 4)
    data.set_epoch(5)
    first = opened(store).read_batch(list(batch))["latents"]
    assert torch.equal(data.read_batch(batch)["latents"], first)
    assert torch.equal(data.collate(data.__getitems__(batch))["latents"], first)
    assert not torch.equal(data.read_batch(list(batch))["latents"], first)
