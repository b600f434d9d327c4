"""Trainings of two ranks and more: every sample once an epoch but for the said rest, equal steps, no mixed batch, exact resume."""

import os
import socket
from contextlib import suppress
from importlib.util import find_spec
from itertools import chain, count

import pytest

from tests.scenarios.crowd import Crowd
from tests.train import trainings
from tests.train.trainings import BATCH_SIZE, ROWS, WHOLE_BATCHES

pytestmark = [pytest.mark.torch, pytest.mark.processes, pytest.mark.timeout(180)]  # two ranks import a trainer on what cores there are

with_lightning = pytest.mark.skipif(
    find_spec("lightning") is None, reason="lightning is not installed; the dependency group `lightning` brings it (37 MB)"
)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return trainings.write_data_set(tmp_path_factory.mktemp("data") / "store")


@pytest.fixture(scope="module")
def lightning_crowd(tmp_path_factory):
    made = Crowd(tmp_path_factory.mktemp("lightning"), "tests.train.trainings", "lightning", end_seconds=75)
    yield made
    made.close()


_TRAININGS = count()


def _free_port():
    """A port that is free, below those that the system hands out to other tests' ranks, and another one for each training."""
    for port in range(20_000 + (os.getpid() + 100 * next(_TRAININGS)) % 10_000, 32_000):
        with suppress(OSError), socket.socket() as free:
            free.bind(("127.0.0.1", port))
            return port
    raise OSError("no port below 32,000 is free")


@pytest.fixture(scope="module")
def train(store, tmp_path_factory):
    """Call a part on so many ranks, as torchrun would start them; returns what each gives back."""
    folder, numbers = tmp_path_factory.mktemp("meetings"), count()

    def run(crowd, part, world, **body):
        port = str(_free_port())
        common = {"store": str(store), "world_size": world, "meeting": str(folder / f"meeting {next(numbers)}"), **body}
        bodies = [{**common, "rank": rank, "environment": launched(rank, world, port)} for rank in range(world)]
        ended = crowd.run(f"tests.train.trainings:{part}", *bodies)
        assert [code for code, _result in ended] == [0] * world
        return [result for _code, result in ended]

    return run


def launched(rank, world, port):
    if world == 1:
        return {}
    ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "GROUP_RANK": "0"}
    return {**ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "tests"}


def in_turn(ranks, epoch):
    """The batches of an epoch in the order in which they were dealt; ranks with unequal numbers of them are an error."""
    return [batch for turn in zip(*(rank["epochs"][epoch] for rank in ranks), strict=True) for batch in turn]


def check_epoch(batches, world):
    """Every sample once but for the rest, each batch of one bucket."""
    shown = list(chain.from_iterable(batches))
    assert len(shown) == len(set(shown)) == (WHOLE_BATCHES - WHOLE_BATCHES % world) * BATCH_SIZE
    assert set(shown) <= {row.id for row in ROWS}
    assert {len({sample.split("/")[0] for sample in batch}) for batch in batches} == {1}


@pytest.fixture(scope="module")
def expected(store):
    """What one process is shown in the first epochs: the order in which ranks take turns."""
    loader = trainings.cs.make_loader(trainings.cs.CachedDataset(store, generation=1, latents="raw"), BATCH_SIZE, "single")
    return [[batch["sample_id"] for batch in loader] for _epoch in range(3)]


def up_to(batches, world):
    return batches[: len(batches) - len(batches) % world]


@pytest.mark.slow
@pytest.mark.parametrize(("num_workers", "epochs"), [(0, 2), (2, 1)])
def test_plain_ddp_shows_two_ranks_every_sample_once(torch_crowd, train, expected, num_workers, epochs):
    ranks = train(torch_crowd, "ddp", 2, epochs=epochs, options={"num_workers": num_workers})
    for epoch in range(epochs):
        check_epoch(in_turn(ranks, epoch), 2)
        assert in_turn(ranks, epoch) == up_to(expected[epoch], 2)
    assert {rank["left_out"] for rank in ranks} == {len(ROWS) - len(up_to(expected[0], 2)) * BATCH_SIZE}
    assert {rank["steps"] for rank in ranks} == {WHOLE_BATCHES // 2}


@pytest.mark.slow
def test_an_epoch_begun_on_one_rank_goes_on_on_two_and_ends_on_three(torch_crowd, train, expected):
    """With another number of workers each time."""
    (first,) = train(torch_crowd, "ddp", 1, steps=21, options={"num_workers": 2})
    second = train(torch_crowd, "ddp", 2, steps=15, state=first["state"])
    assert second[0]["state"] == second[1]["state"]
    third = train(torch_crowd, "ddp", 3, state=second[0]["state"], options={"num_workers": 1})
    dealt = first["epochs"][0] + in_turn(second, 0) + in_turn(third, 0)
    over = (WHOLE_BATCHES - 21 - 30) % 3
    assert over > 0
    assert dealt == expected[0][: WHOLE_BATCHES - over]
    assert {rank["left_out"] for rank in third} == {len(ROWS) - len(dealt) * BATCH_SIZE}
    assert third[0]["state"]["epoch"] == 1, "the rest came to its end"


SAVED = 50
"""Steps in the second epoch after which states are saved: 12 are left on each of two ranks."""


@pytest.fixture(scope="module")
def accelerated(torch_crowd, train):
    """Two epochs of a diffusers loop on two ranks."""
    return train(torch_crowd, "accelerated", 2, epochs=2, saves_at=(1, SAVED))


@pytest.mark.slow  # `test_page` runs the lines for accelerate, also those that go on, each time
def test_accelerate_deals_two_ranks_every_sample_once_in_a_loop_of_diffusers(accelerated, expected):
    for epoch in range(2):
        check_epoch(in_turn(accelerated, epoch), 2)
        assert in_turn(accelerated, epoch) == up_to(expected[epoch], 2)
    assert {(rank["steps"], rank["updates"]) for rank in accelerated} == {(WHOLE_BATCHES // 2, 2 * accelerated[0]["updates_in_epoch"])}


@pytest.mark.slow
def test_accelerate_deals_three_ranks_no_batch_twice(torch_crowd, train, expected):
    """Left alone it would repeat the epoch's first batches until they go round."""
    assert WHOLE_BATCHES % 3
    assert in_turn(train(torch_crowd, "accelerated", 3, epochs=1), 0) == up_to(expected[0], 3)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["skip", "state"])
def test_a_loop_of_diffusers_goes_on(torch_crowd, train, expected, accelerated, way):
    state = accelerated[0]["state"]
    assert (state["epoch"], state["consumed"]) == (1, 2 * SAVED)
    resumed = train(torch_crowd, "accelerated", 2, epochs=3, first_epoch=1, skipped=SAVED, way=way, state=state, steps=12)
    assert in_turn(resumed, 0) == up_to(expected[1], 2)[2 * SAVED :]
    assert in_turn(resumed, 1) == expected[2][:24]


def test_a_loader_that_accelerate_was_not_given_is_an_error(torch_crowd, train):
    for reported in train(torch_crowd, "forgotten", 2):
        assert "pass it to `accelerator.prepare`" in reported


@with_lightning
@pytest.mark.slow  # the trainer below goes the same way each time
def test_fabric_shows_two_ranks_every_sample_once_and_goes_on_where_it_was(lightning_crowd, train, expected):
    """Fabric sets the epoch before each iteration, and counts from 0 in each process."""
    ranks = train(lightning_crowd, "fabric", 2, epochs=2)
    for epoch in range(2):
        check_epoch(in_turn(ranks, epoch), 2)
        assert in_turn(ranks, epoch) == up_to(expected[epoch], 2)
    assert "use_distributed_sampler=False" in ranks[0]["refused"]
    state = {**ranks[0]["state"], "epoch": 1, "consumed": 2 * SAVED}
    resumed = train(lightning_crowd, "fabric", 2, epochs=2, state=state, steps=12)
    assert in_turn(resumed, 0) == up_to(expected[1], 2)[2 * SAVED :]
    assert in_turn(resumed, 1) == expected[2][:24]


@with_lightning
def test_lightnings_trainer_shows_two_ranks_every_sample_once_and_goes_on_from_its_checkpoint(lightning_crowd, train, expected, tmp_path):
    checkpoint = str(tmp_path / "trainer.ckpt")
    ranks = train(lightning_crowd, "trainer", 2, epochs=2, saves_at=WHOLE_BATCHES // 2 + SAVED, saves_to=checkpoint)
    for epoch in range(2):
        check_epoch(in_turn(ranks, epoch), 2)
        assert in_turn(ranks, epoch) == up_to(expected[epoch], 2)
    resumed = train(lightning_crowd, "trainer", 2, epochs=2, checkpoint=checkpoint)
    assert in_turn(resumed, 0) == up_to(expected[1], 2)[2 * SAVED :]
