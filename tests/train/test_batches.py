"""Batches of one bucket, for one rank and for many. Needs no torch: the sampler knows indices and buckets, nothing else."""

import json
import logging
import pickle
import re
from contextlib import contextmanager
from itertools import chain, islice
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cachestore as cs
from cachestore.train.batches import BucketBatchSampler
from cachestore.train.seats import find_ranks
from tests.fakes import asks_for

SIZES = st.dictionaries(st.tuples(st.integers(1, 9), st.integers(1, 9)), st.integers(0, 30), max_size=5).flatmap(
    lambda sizes: st.integers(20, 30).map(lambda count: {**sizes, (10, 10): count})
)
"""With one bucket that has a batch of 5 for each of 4 ranks: an epoch without any is an error."""
TAILS = st.sampled_from(["drop", "pad", "wrap"])


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "NODE_RANK"):
        monkeypatch.delenv(name, raising=False)


class Buckets:
    """A data set as far as the sampler looks at it: so many samples of each bucket, dealt round."""

    def __init__(self, sizes, digest="d1"):
        self.digest = digest
        self.epochs = []
        self.buckets = {}
        index = 0
        for bucket, count in sizes.items():
            self.buckets[bucket] = list(range(index, index + count))
            index += count

    def set_epoch(self, epoch):
        self.epochs.append(epoch)


def sampler(sizes: Any = None, *, data: Any = None, **options: Any):
    data = data or Buckets({(64, 48): 20, (48, 64): 13} if sizes is None else sizes)
    options.setdefault("batch_size", 4)
    return cs.BucketBatchSampler(data, **options)


def ranks(sizes, world, **options):
    return [sampler(sizes, rank=rank, num_replicas=world, **options) for rank in range(world)]


def in_turn(batches):
    """The batches of all ranks in the order in which they were dealt."""
    return [batch for turn in zip(*batches, strict=True) for batch in turn]


# What comes


@pytest.mark.parametrize("tail", ["drop", "pad", "wrap"])
@pytest.mark.parametrize("sizes", [{}, {(1, 1): 0}], ids=["no buckets", "an empty bucket"])
def test_no_samples_are_an_error_on_every_rank(sizes, tail):
    for rank in range(3):
        with pytest.raises(cs.BadInput):
            sampler(sizes, rank=rank, num_replicas=3, tail=tail)


FEW = {(64, 48): 31, (48, 64): 20, **{(8, n): 1 for n in range(12)}}
"""63 samples."""


@pytest.mark.parametrize(
    ("world", "batch_size", "most"), [(1, 100, 31), (1, 32, 31), (2, 31, 20), (3, 20, 15), (63, 2, 1), (63, 10**12, 1), (64, 2, 0)]
)
def test_an_epoch_without_a_batch_is_an_error_that_says_the_largest_batch_size_that_gives_one(world, batch_size, most):
    for rank in {0, world - 1}:
        with pytest.raises(cs.BadInput) as refused:
            sampler(FEW, batch_size=batch_size, rank=rank, num_replicas=world)
        assert "63 samples are in 14 buckets (31 of 64x48, 20 of 48x64, 1 of 8x0, 1 of 8x1, 1 of 8x2, …)" in str(refused.value)
        assert (f"batch_size={most} is the largest that gives one" if most else "fewer samples than the 64 ranks") in str(refused.value)
    if most:
        assert all(len(list(sampler(FEW, batch_size=most, rank=rank, num_replicas=world))) >= 1 for rank in {0, world - 1})
        with pytest.raises(cs.BadInput, check=asks_for("batch_size")):
            sampler(FEW, batch_size=most + 1, rank=0, num_replicas=world)


@pytest.mark.parametrize("tail", ["pad", "wrap"])
def test_what_fills_batches_up_has_one_wherever_there_is_a_sample(tail):
    assert [len(list(one)) for one in ranks({(1, 1): 1}, 5, batch_size=100, tail=tail)] == [1] * 5


@pytest.mark.parametrize("split", ["found", "outside"])
def test_an_epoch_without_a_batch_is_found_when_the_ranks_are_too(monkeypatch, split):
    one = sampler(FEW, batch_size=31, split=split)
    assert len(list(one)) == 1
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(cs.BadInput, check=asks_for("batch_size")):
        list(one)


@given(SIZES, st.integers(1, 5), st.integers(1, 4), TAILS, st.booleans(), st.integers(0, 9))
def test_every_batch_is_full_and_of_one_bucket_and_all_ranks_have_as_many_as_they_say(sizes, batch_size, world, tail, shuffle, epoch):
    bucket_of = {index: bucket for bucket, indices in Buckets(sizes).buckets.items() for index in indices}
    every = ranks(sizes, world, batch_size=batch_size, tail=tail, shuffle=shuffle)
    for one in every:
        one.set_epoch(epoch)
    batches = [list(one) for one in every]
    assert {len(ours) for ours in batches} == {len(every[0])}
    for batch in in_turn(batches):
        assert len(batch) == batch_size
        assert len({bucket_of[index] for index in batch}) == 1


@given(SIZES, st.integers(1, 5), st.integers(1, 4), st.integers(0, 9))
def test_dropping_shows_no_sample_twice_and_leaves_out_no_more_than_the_tails(sizes, batch_size, world, epoch):
    every = ranks(sizes, world, batch_size=batch_size)
    for one in every:
        one.set_epoch(epoch)
    shown = [index for one in every for batch in one for index in batch]
    whole = sum(count // batch_size for count in sizes.values())
    assert len(set(shown)) == len(shown) == (whole - whole % world) * batch_size


@given(SIZES, st.integers(1, 5), st.integers(1, 4), st.sampled_from(["pad", "wrap"]))
def test_padding_and_wrapping_show_every_sample_at_least_once(sizes, batch_size, world, tail):
    shown = [index for one in ranks(sizes, world, batch_size=batch_size, tail=tail) for batch in one for index in batch]
    assert set(shown) == set(range(sum(sizes.values())))


def test_a_short_batch_is_padded_with_itself_and_wrapped_with_the_first_of_its_bucket():
    assert list(sampler({(1, 1): 6}, shuffle=False, tail="pad")) == [[0, 1, 2, 3], [4, 5, 4, 5]]
    assert list(sampler({(1, 1): 6}, shuffle=False, tail="wrap")) == [[0, 1, 2, 3], [4, 5, 0, 1]]
    assert list(sampler({(1, 1): 6}, shuffle=False)) == [[0, 1, 2, 3]]
    assert list(sampler({(1, 1): 1}, shuffle=False, tail="wrap")) == [[0, 0, 0, 0]]


def test_batches_that_do_not_go_round_are_dropped_repeated_or_taken_from_the_start():
    def batches(tail):
        return [list(one) for one in ranks({(1, 1): 5}, 3, batch_size=1, shuffle=False, tail=tail)]

    assert batches("drop") == [[[0]], [[1]], [[2]]]
    assert batches("pad") == [[[0], [3]], [[1], [4]], [[2], [3]]]
    assert batches("wrap") == [[[0], [3]], [[1], [4]], [[2], [0]]]


def test_without_shuffling_batches_follow_the_data_set():
    assert list(sampler({(9, 9): 4, (1, 1): 4}, shuffle=False, batch_size=2)) == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_the_order_is_a_fixed_function_of_seed_and_epoch():
    """Golden: a change here breaks the resuming of every run that was saved before it."""
    one = sampler({(64, 48): 6, (48, 64): 5}, batch_size=2, seed=7)
    assert list(one) == GOLDEN[0]
    assert list(one) == GOLDEN[1]


GOLDEN = [[[0, 4], [10, 7], [3, 5], [9, 6], [2, 1]], [[4, 1], [2, 5], [9, 10], [8, 7], [3, 0]]]


def test_epochs_and_seeds_differ_in_order_and_hold_the_same_number_of_samples():
    orders = [list(sampler({(1, 1): 40}, seed=seed)) for seed in (0, 1)]
    one = sampler({(1, 1): 40})
    assert list(one) == orders[0]
    assert list(one) not in orders
    assert orders[0] != orders[1]
    for order in orders:
        assert sorted(chain.from_iterable(order)) == list(range(40))


def test_shuffling_is_even_over_indices():
    firsts = [0] * 5
    one = sampler({(1, 1): 5}, batch_size=1)
    for _epoch in range(2000):
        firsts[next(iter(one))[0]] += 1
        one.set_epoch(one.epoch + 1)
    assert all(330 < count < 470 for count in firsts)


# Epochs


def test_the_next_epoch_follows_by_itself_and_the_data_set_is_told_when_it_begins():
    data = Buckets({(64, 48): 20, (48, 64): 13})
    one = sampler(data=data)
    batches = list(one)
    assert data.epochs == [0]
    assert list(one) != batches
    assert (one.epoch, data.epochs) == (1, [0, 1])
    one.set_epoch(0)
    assert list(one) == batches


def test_a_trainer_that_takes_as_many_batches_as_there_are_goes_on_with_the_next_epoch():
    one = sampler()
    other = sampler()
    for _epoch in range(3):
        assert list(islice(one, len(one))) == list(other)


def test_an_iteration_that_is_broken_off_begins_again():
    one = sampler()
    batches = list(sampler())
    assert list(islice(one, 2)) == batches[:2]
    assert list(one) == batches


def test_setting_an_epoch_twice_is_setting_it_once():
    one, other = sampler(), sampler()
    one.set_epoch(3)
    for _time in range(2):
        other.sampler.set_epoch(3)
    assert list(one) == list(other)
    assert one.epoch == other.epoch == 3


def test_a_data_set_without_epochs_is_fine():
    assert sorted(sampler(data=SimpleNamespace(buckets={(): [0, 1, 2]}, digest="d"), batch_size=1)) == [[0], [1], [2]]


# Resuming


@given(SIZES, st.integers(1, 4), st.integers(1, 3), TAILS, st.integers(0, 3), st.integers(0, 12))
def test_resuming_at_a_step_is_going_on_from_it(sizes, batch_size, world, tail, epoch, step):
    for rank in range(world):
        options = {"batch_size": batch_size, "tail": tail, "rank": rank, "num_replicas": world}
        one, resumed = sampler(sizes, **options), sampler(sizes, **options)
        one.set_epoch(epoch)
        resumed.resume(epoch, step)
        assert list(resumed) == list(one)[step:]
        assert list(resumed) == list(one)


@given(SIZES, st.integers(1, 3), TAILS, st.integers(0, 40))
def test_a_state_taken_between_two_batches_goes_on_with_the_second(sizes, world, tail, taken):
    every = ranks(sizes, world, tail=tail)
    states, rest = [], []
    for one in every:
        batches = iter(one)
        for _batch in islice(batches, taken):
            pass
        states.append(one.state_dict())
        rest.append(list(batches))
    assert all(state == states[0] for state in states)
    for rank, (one, expected) in enumerate(zip(ranks(sizes, world, tail=tail), rest, strict=True)):
        one.load_state_dict(states[0])
        # After the end the state names the beginning of the next epoch.
        assert list(one) == (expected if states[0]["epoch"] == 0 else at_epoch(1, sizes, (rank, world), tail))


def at_epoch(epoch, sizes, given, tail):
    again = sampler(sizes, tail=tail, rank=given[0], num_replicas=given[1])
    again.set_epoch(epoch)
    return list(again)


@given(SIZES, st.integers(1, 4), st.lists(st.tuples(st.integers(1, 4), st.integers(0, 5)), min_size=1, max_size=4), st.integers(0, 3))
def test_an_epoch_that_changes_its_number_of_ranks_shows_each_sample_once_but_for_the_said_rest(sizes, batch_size, parts, epoch):
    """1 -> 2 -> 3 ranks and any other way: after each part the state is loaded by another number of ranks, the last part to the end."""
    whole = list(sampler(sizes, batch_size=batch_size))
    state, shown = {**sampler(sizes, batch_size=batch_size).state_dict(), "epoch": epoch}, []
    left, every = 0, []
    for number, (world, steps) in enumerate(parts):
        every = ranks(sizes, world, batch_size=batch_size)
        for one in every:
            one.load_state_dict(state)
        assert len({one.left_out for one in every}) == 1
        left = every[0].left_out
        batches = [iter(one) for one in every]
        taken = [list(one if number == len(parts) - 1 else islice(one, steps)) for one in batches]
        assert len({len(ours) for ours in taken}) == 1
        shown += in_turn(taken)
        # A rank that took all it has is not asked again before the state is saved.
        state = every[0].state_dict(batches_consumed=len(taken[0]))
    flat = list(chain.from_iterable(shown))
    assert len(flat) == len(set(flat)) == sum(sizes.values()) - left
    assert left - (sum(sizes.values()) - len(whole) * batch_size) <= (parts[-1][0] - 1) * batch_size


@given(SIZES, st.integers(1, 5), st.integers(1, 4), TAILS)
def test_what_is_left_out_is_what_nobody_is_shown(sizes, batch_size, world, tail):
    every = ranks(sizes, world, batch_size=batch_size, tail=tail)
    shown = {index for one in every for batch in one for index in batch}
    assert {one.left_out for one in every} == {sum(sizes.values()) - len(shown)}


def test_a_run_resumed_on_another_number_of_ranks_takes_exactly_what_is_left():
    sizes = {(1, 1): 40, (2, 2): 32}
    two = ranks(sizes, 2)
    had = in_turn([list(islice(one, 4)) for one in two])
    state = two[0].state_dict()
    rest = []
    for one in ranks(sizes, 5):
        one.load_state_dict(state)
        rest.append(list(one))
    assert had + in_turn(rest) == list(sampler(sizes))
    assert state["consumed"] == 8


def test_the_trainer_says_how_many_batches_it_had_because_a_loader_prefetches():
    one = sampler(rank=1, num_replicas=2)
    batches = iter(one)
    assert len(list(islice(batches, 3))) == 3
    state = one.state_dict(batches_consumed=1)
    assert (state["epoch"], state["consumed"]) == (0, 2)
    other = sampler(rank=1, num_replicas=2)
    other.load_state_dict(state)
    assert list(other) == list(sampler(rank=1, num_replicas=2))[1:]
    assert next(iter(other)) is not None


def test_a_loader_that_prefetches_says_what_it_delivered():
    one = sampler(rank=0, num_replicas=2)
    list(one)
    one.count_delivered(1)
    assert (one.state_dict()["epoch"], one.state_dict()["consumed"]) == (0, 2)
    one.count_delivered(None)
    assert (one.state_dict()["epoch"], one.state_dict()["consumed"]) == (1, 0)
    one.count_delivered(3)
    one.resume(4, 1)
    assert one.state_dict()["consumed"] == 2, "what was delivered before belongs to another iteration"


def test_counts_go_on_from_where_a_run_was_resumed():
    one = sampler()
    one.resume(2, 3)
    batches = iter(one)
    next(batches)
    assert (one.state_dict()["consumed"], one.state_dict(batches_consumed=2)["consumed"]) == (4, 5)


def test_a_state_of_another_catalog_is_an_error_that_names_both():
    state = sampler().state_dict()
    other = sampler(data=Buckets({(1, 1): 9}, digest="d2"))
    with pytest.raises(cs.BadInput, check=asks_for("state")):
        other.load_state_dict(state)


@pytest.mark.parametrize(
    "change", [{"seed": 1}, {"batch_size": 2}, {"shuffle": False}, {"tail": "pad"}], ids=lambda change: next(iter(change))
)
def test_a_state_of_another_order_is_an_error(change):
    with pytest.raises(cs.BadInput, check=asks_for(next(iter(change)))):
        sampler(**change).load_state_dict(sampler().state_dict())


def test_what_is_no_state_is_an_error():
    with pytest.raises(cs.BadInput, check=asks_for("state")):
        sampler().load_state_dict({"epoch": 1, "digest": "d1"})
    with pytest.raises(cs.BadInput):
        sampler().resume(0, -1)


def test_leaving_a_resumed_position_is_said_aloud(caplog):
    one = sampler()
    one.resume(3, 2)
    one.set_epoch(3)
    assert caplog.records == [record for record in caplog.records if "leaves out" in record.message]
    one.set_epoch(1)
    assert "epoch 3, which was resumed after 2 batches" in caplog.text
    assert list(one) == at_epoch(1, None, (0, 1), "drop")


def test_a_trainer_that_counts_epochs_from_0_again_goes_on_from_the_resumed_one():
    """As Fabric's loaders and accelerate's do, which set their own count before each iteration."""
    one = sampler()
    one.resume(3, 2)
    for count in range(3):
        one.set_epoch(count)
        assert list(one) == at_epoch(3 + count, None, (0, 1), "drop")[2 if count == 0 else 0 :]
    one.resume(5, 0)
    one.set_epoch(5)
    assert list(one) == at_epoch(5, None, (0, 1), "drop")


def test_what_the_rest_of_an_epoch_leaves_out_on_more_ranks_is_reported_by_one_of_them(caplog):
    every = ranks({(1, 1): 36}, 3)
    for one in every:
        one.load_state_dict({**one.state_dict(), "consumed": 4})
    (reported,) = caplog.messages
    assert "rest of epoch 0 leaves out 2 batches of 4 samples at its end, which cannot be divided among 3 ranks" in reported
    assert {one.left_out for one in every} == {8}


# Ranks


@pytest.mark.parametrize("options", [{"rank": 0}, {"num_replicas": 2}, {"rank": 2, "num_replicas": 2}, {"rank": -1, "num_replicas": 2}])
def test_a_rank_without_its_world_is_an_error(options):
    with pytest.raises(cs.BadInput, check=asks_for("rank")):
        sampler(**options)


def test_ranks_and_somebody_who_splits_outside_exclude_each_other():
    with pytest.raises(cs.BadInput, check=asks_for("rank")):
        sampler(rank=0, num_replicas=2, split="outside")


def test_a_world_that_is_found_and_not_told_is_an_error_that_names_both_spellings(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(cs.BadInput, check=asks_for("split")):
        sampler()
    assert len(sampler(rank=0, num_replicas=2)) == 4
    assert len(sampler({(1, 1): 28}, split="outside")) == 6, "what accelerate is handed goes round"
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert len(sampler()) == 8


def test_ranks_that_start_after_the_sampler_was_made_are_not_passed_over(monkeypatch):
    """Lightning starts its ranks within `fit`: the first process was alone when it made its loaders."""
    one, reported, outside = sampler(), sampler(split="found"), sampler(split="outside")
    assert len(one) == len(reported) == len(outside) == 8
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    for use in (len, list, BucketBatchSampler.state_dict):
        with pytest.raises(cs.BadInput, check=asks_for("split")):
            use(one)
    assert (len(reported), list(reported)) == (2, list(sampler(rank=1, num_replicas=3)))
    assert in_turn([list(one) for one in ranks(None, 3)]) == list(outside), "what somebody outside deals goes round, with no batch over"
    assert len(outside) == 6


@pytest.mark.parametrize(
    ("environment", "world"),
    [
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}, 4),
        ({"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "4"}, 4),
        ({"NODE_RANK": "0", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}, 2),
        ({"SLURM_ARRAY_TASK_ID": "1", "SLURM_ARRAY_TASK_COUNT": "4", "SLURM_ARRAY_TASK_MIN": "0"}, 1),
        ({"CACHESTORE_RANK": "1", "CACHESTORE_WORLD_SIZE": "4"}, 1),
    ],
    ids=["mpirun", "srun", "Fabric", "a job array trains many models", "ranks that only encode"],
)
def test_a_world_is_found_under_launchers_that_start_ranks_of_one_training(monkeypatch, environment, world):
    for name, text in environment.items():
        monkeypatch.setenv(name, text)
    assert find_ranks().world_size == world
    assert len(sampler(split="found")) == 8 // world


def test_a_rank_that_nothing_tells_is_an_error(monkeypatch):
    for name, text in {"NODE_RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, text)
    with pytest.raises(cs.BadInput, check=asks_for("split")):
        sampler(split="found")


def test_an_initialised_process_group_counts_more_than_the_environment(monkeypatch):
    group = SimpleNamespace(is_available=lambda: True, is_initialized=lambda: True, get_rank=lambda: 0, get_world_size=lambda: 3)
    monkeypatch.setitem(__import__("sys").modules, "torch.distributed", group)
    with pytest.raises(cs.BadInput, check=asks_for("split")):
        sampler()


def test_a_state_saved_under_accelerate_counts_the_batches_of_all_its_processes(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    one = sampler(split="outside")
    assert one.state_dict(batches_consumed=3)["consumed"] == 6
    one.resume(0, 3)
    assert list(one) == list(sampler(split="outside"))[6:]


@pytest.mark.torch
@pytest.mark.parametrize("count", [8, 9, 3])
def test_accelerate_hands_every_batch_to_one_process_whole(count):
    from accelerate.data_loader import BatchSamplerShard

    samplers: list[Any] = [sampler({(1, 1): 4 * count}, split="outside") for _process in range(2)]
    every = [BatchSamplerShard(one, num_processes=2, process_index=process) for process, one in enumerate(samplers)]
    batches = [list(shard) for shard in every]
    assert len(batches[0]) == len(batches[1]) == len(every[0]) == -(-count // 2)
    assert in_turn(batches)[:count] == list(sampler({(1, 1): 4 * count}))


@pytest.mark.torch
def test_accelerate_reaches_the_sampler_when_it_sets_the_epoch():
    from accelerate.data_loader import prepare_data_loader
    from torch.utils.data import DataLoader

    one = sampler(split="outside")
    indices: Any = range(33)
    loader = prepare_data_loader(DataLoader(indices, batch_sampler=one), num_processes=2, process_index=0, put_on_device=False)
    assert len(loader) == 4
    epochs = [[batch.tolist() for batch in loader] for _epoch in range(2)]
    assert (one.epoch, epochs[0] != epochs[1]) == (1, True)
    assert epochs[0] == list(sampler())[::2]


def test_a_loader_sees_neither_a_size_nor_a_way_to_drop_the_last():
    one = sampler()
    assert (one.batch_size, one.sampler is one, hasattr(one, "drop_last")) == (None, True, False)


# Options


def test_a_data_set_that_wants_to_know_is_told_which_batches_come_and_when_the_iteration_ends():
    data: Any = Buckets({(1, 1): 30})
    reported = []

    @contextmanager
    def announce(batches):
        reported.append(batches.tolist())
        try:
            yield
        finally:
            reported.append("end")

    data.announce = announce
    one = sampler(data=data, rank=1, num_replicas=2)
    batches = list(one)
    assert reported == [batches, "end"]
    one.resume(0, 2)
    following: Any = iter(one)
    next(following)
    assert reported[2:] == [batches[2:]]
    following.close()
    assert reported[3:] == ["end"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"batch_size": 0}, "batch_size must be a whole number of at least 1, not 0"),
        ({"batch_size": "8"}, "batch_size must be a whole number of at least 1, not '8'"),
        ({"batch_size": True}, "batch_size must be a whole number of at least 1, not True"),
        ({"batch_size": 2.0}, "batch_size must be a whole number of at least 1, not 2.0"),
        ({"seed": "x"}, "seed must be a whole number of at least 0, not 'x'"),
        ({"seed": -1}, "seed must be a whole number of at least 0, not -1"),
        ({"shuffle": "no"}, "shuffle must be True or False, not 'no'"),
        ({"tail": "keep"}, 'tail must be "drop", "pad" or "wrap", not \'keep\''),
        ({"tail": ["drop"]}, "not ['drop']"),
        ({"split": "inside"}, 'split must be "outside" or "found", not \'inside\''),
        ({"rank": "0", "num_replicas": 2}, "rank must be a whole number, not '0'"),
    ],
    ids=str,
)
def test_an_option_that_cannot_be_meant_is_an_error_that_names_it(options, says):
    with pytest.raises(cs.BadInput, match=re.escape(says)):
        sampler(**options)


def test_numbers_of_numpy_are_numbers_and_its_state_is_json():
    made: Any = sampler(batch_size=np.int64(2), seed=np.int32(3), rank=np.int64(0), num_replicas=np.int64(1))
    made.set_epoch(np.int64(4))
    state = json.loads(json.dumps(made.state_dict()))
    assert (state["batch_size"], state["seed"], state["epoch"]) == (2, 3, 4)


@pytest.mark.parametrize("state", [None, "state", [1, 2], 5])
def test_what_is_no_state_is_an_error_that_says_where_one_comes_from(state):
    with pytest.raises(cs.BadInput):
        sampler().load_state_dict(state)


@pytest.mark.parametrize("wrong", [{"epoch": "x"}, {"epoch": -1}, {"consumed": None}, {"consumed": -4}], ids=str)
def test_a_state_with_a_position_that_is_none_is_an_error(wrong):
    state = {**sampler().state_dict(), **wrong}
    with pytest.raises(cs.BadInput):
        sampler().load_state_dict(state)


@pytest.mark.parametrize("epoch", [-1, "x", None, 1.5])
def test_what_is_no_epoch_is_an_error(epoch):
    with pytest.raises(cs.BadInput):
        sampler().set_epoch(epoch)


def test_what_is_no_data_set_is_an_error_that_says_what_to_pass():
    with pytest.raises(cs.BadInput, check=asks_for("data")):
        sampler(data=[1, 2, 3])


def test_what_is_left_out_is_reported_once_and_by_one_rank(caplog):
    with caplog.at_level(logging.WARNING):
        ranks({(64, 48): 20, (48, 64): 13}, 3)
        ranks({(64, 48): 20, (48, 64): 13}, 3, tail="pad")
        ranks({(64, 48): 12}, 3)
    (reported,) = caplog.messages
    assert (
        "leaves out 9 of 33 samples: 1 that does not fill a batch of 4 (1 of 48x64), and 8 in batches that cannot be divided among 3 ranks"
        in reported
    )


@given(SIZES, st.integers(1, 3), st.integers(1, 3), st.sampled_from(["found", "outside"]))
def test_a_worker_is_told_which_batches_it_gets_next(sizes, workers, world, split):
    """Workers take turns in the batches of their rank, and ranks in those that accelerate deals."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"RANK": "0", "WORLD_SIZE": str(world), "LOCAL_RANK": "0"}.items():
            patch.setenv(name, value)
        data: Any = Buckets(sizes)
        data.workers = workers
        batches: list[Any] = list(sampler(data=data, split=split))
    ours = batches if split == "found" else batches[::world]
    for worker in range(workers):
        own = ours[worker::workers]
        assert [batch.upcoming for batch in own] == [own[number + 1 : number + 3] for number in range(len(own))]
        copies = pickle.loads(pickle.dumps(own))
        assert [copy.upcoming for copy in copies] == [batch.upcoming for batch in own]
