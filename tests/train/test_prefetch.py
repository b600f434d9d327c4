"""Prefetching in the trainer's process: the same batches, and no thread that anybody could trip over."""

import gc
import os
import pickle
import threading
from contextlib import closing
from itertools import islice
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import cachestore as cs
from cachestore.train.prefetch import Prefetcher, Ring
from tests.fakes import tells_of

pytestmark = pytest.mark.torch

LIMIT_SECONDS = 20


class Samples:
    """A data set of numbers in two buckets, that tells in which thread each batch was read, and can be held up."""

    digest = "d"

    def __init__(self, count=40, fails_at=None):
        self.buckets = {(1, 1): list(range(0, count, 2)), (2, 2): list(range(1, count, 2))}
        self.count, self.fails_at = count, fails_at
        self.epochs, self.readers, self.read = [], [], []
        self.gate = threading.Event()
        self.gate.set()
        self.reached = threading.Semaphore(0)

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return {"number": torch.tensor(index)}

    def __getitems__(self, indices):
        self.reached.release()
        assert self.gate.wait(LIMIT_SECONDS)
        self.readers.append(threading.current_thread())
        self.read.append(list(indices))
        if self.fails_at in indices:
            raise cs.CorruptEntry(f"sample {self.fails_at} is damaged")
        return [self[index] for index in indices]

    def collate(self, samples):
        return {"number": torch.stack([sample["number"] for sample in samples])}

    def set_epoch(self, epoch):
        self.epochs.append(epoch)


def loader_of(data, *, batch_size=4, ahead=2, threads=1) -> Any:
    source = Prefetcher(data, batches=ahead, threads=threads)
    sampler = cs.BucketBatchSampler(source, batch_size=batch_size, rank=0, num_replicas=1)
    return DataLoader(source, batch_sampler=sampler, collate_fn=source.collate)


def numbers(batches):
    return [batch["number"].tolist() for batch in batches]


def collect(batches, seen):
    for batch in batches:
        seen += numbers([batch])


def fail(batches):
    for _batch in batches:
        raise ZeroDivisionError


def reading_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("cachestore-read")]


@pytest.fixture(autouse=True)
def _no_thread_is_left():
    yield
    assert reading_threads() == []


def test_a_data_set_without_samples_starts_no_thread_and_has_no_batch():
    data = Samples(0)
    with pytest.raises(cs.BadInput):
        loader_of(data)
    assert (len(Prefetcher(data)), data.readers) == (0, [])


@given(st.integers(1, 40), st.integers(1, 7), st.integers(1, 5), st.integers(1, 3))
def test_the_batches_are_those_that_are_read_without_it(count, batch_size, ahead, threads):
    data = Samples(count)
    assume(any(len(indices) >= batch_size for indices in data.buckets.values()))
    loader = loader_of(data, batch_size=batch_size, ahead=ahead, threads=threads)
    plain = cs.BucketBatchSampler(Samples(count), batch_size=batch_size, rank=0, num_replicas=1)
    for _epoch in range(2):
        assert numbers(loader) == list(plain)
    assert data.epochs[-1] == 1
    assert sorted(data.read) == sorted(batch for epoch in range(2) for batch in at_epoch(plain, epoch)), "each is read once"


def at_epoch(sampler, epoch):
    sampler.set_epoch(epoch)
    return list(sampler)


def test_batches_are_read_while_the_one_before_them_is_used():
    data = Samples()
    loader = loader_of(data, ahead=2)
    batches = iter(loader)
    next(batches)
    for _batch in range(3):
        assert data.reached.acquire(timeout=LIMIT_SECONDS), "two more are read while nobody asks for them"
    assert set(loader.dataset._reads) == {1, 2}, "and no more than that"
    assert threading.main_thread() not in data.readers
    del batches
    assert reading_threads() == []


def test_no_thread_is_left_after_the_end_a_break_an_error_of_the_trainer_or_of_a_read():
    loader = loader_of(Samples())
    for _batch in loader:
        assert len(reading_threads()) == 1
    assert reading_threads() == []
    for _batch in loader:
        break
    assert reading_threads() == []
    with pytest.raises(ZeroDivisionError):
        fail(loader)
    assert reading_threads() == []
    with pytest.raises(cs.CorruptEntry, check=tells_of("sample 7")):
        list(loader_of(Samples(fails_at=7)))
    assert reading_threads() == []


def test_the_batches_before_a_damaged_one_arrive_and_the_next_iteration_works():
    data = Samples(fails_at=7)
    loader, seen = loader_of(data, ahead=3), list[list[int]]()
    expected = list(cs.BucketBatchSampler(Samples(), batch_size=4, rank=0, num_replicas=1))
    with pytest.raises(cs.CorruptEntry):
        collect(loader, seen)
    assert seen == expected[: next(number for number, batch in enumerate(expected) if 7 in batch)]
    data.fails_at = None
    assert numbers(loader) == expected


def test_after_a_batch_that_fails_no_other_is_read():
    data = Samples(fails_at=7)
    with pytest.raises(cs.CorruptEntry):
        list(loader_of(data, ahead=3))
    assert 7 in data.read[-1]


def test_a_trainer_that_skips_batches_gets_those_after_them():
    data = Samples()
    loader = loader_of(data)
    expected = numbers(loader)
    source, sampler = loader.dataset, loader.batch_sampler
    sampler.set_epoch(0)
    data.read.clear()
    rest = list(islice(sampler, 6, None))
    sampler.set_epoch(0)
    with closing(iter(sampler)) as indices:
        skipped = list(islice(indices, 6))
        assert [source.collate(source.__getitems__(batch))["number"].tolist() for batch in indices] == expected[6:] == rest
    assert data.read == rest
    assert len(skipped) == 6


def test_what_was_not_announced_is_read_when_it_is_asked_for():
    data = Samples()
    source = Prefetcher(data)
    assert numbers([source.collate(source.__getitems__([3, 5]))]) == [[3, 5]]
    assert source[3]["number"] == 3
    assert numbers([source.collate([source[3], source[5]])]) == [[3, 5]]
    with source.announce(np.array([[0, 2], [4, 6]])):
        assert numbers([source.collate(source.__getitems__([4, 2, 8]))]) == [[4, 2, 8]]
        assert numbers([source.collate(source.__getitems__([6, 4]))]) == [[6, 4]]
    assert set(data.readers) == {threading.main_thread()}


def test_an_iteration_that_is_dropped_late_does_not_end_the_next_one():
    loader = loader_of(Samples())
    late = iter(loader)
    next(late)
    batches = iter(loader)
    first = next(batches)
    assert len(reading_threads()) == 1
    del late
    gc.collect()
    assert len(reading_threads()) == 1
    assert len([first, *batches]) == 10


@pytest.mark.filterwarnings("error::DeprecationWarning")  # Python 3.12 warns of a fork beside threads
def test_a_fork_finds_no_thread_and_the_parent_reads_on():
    data = Samples()
    expected = list(cs.BucketBatchSampler(Samples(), batch_size=4, rank=0, num_replicas=1))
    batches = iter(loader_of(data))
    seen = numbers([next(batches)])
    for _turn in range(3):
        assert len(reading_threads()) == 1
        pid = os.fork()
        if pid == 0:
            os._exit(10 + len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else 11)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 11
        assert reading_threads() == []
        seen += numbers([next(batches)])
    assert seen + numbers(batches) == expected
    assert sorted(data.read) == sorted(expected), "what was read before a fork is not read again"


def test_a_child_that_goes_on_with_the_loop_reads_without_threads():
    batches = iter(loader_of(Samples()))
    next(batches)
    expected = list(cs.BucketBatchSampler(Samples(), batch_size=4, rank=0, num_replicas=1))
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(0 if numbers(batches) == expected[1:] and not reading_threads() else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert numbers(batches) == expected[1:]


def test_a_fork_waits_for_the_read_under_way_in_another_thread_and_nothing_is_lost():
    data = Samples()
    batches = iter(loader_of(data, ahead=3))
    seen = numbers([next(batches)])
    data.gate.clear()
    asked: list[list[int]] = []
    trainer = threading.Thread(target=lambda: asked.extend(numbers(batches)))
    trainer.start()
    codes: list[int] = []

    def fork():
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))

    forking = threading.Thread(target=fork)
    forking.start()
    data.gate.set()
    forking.join(LIMIT_SECONDS)
    trainer.join(LIMIT_SECONDS)
    assert codes == [0]
    assert seen + asked == list(cs.BucketBatchSampler(Samples(), batch_size=4, rank=0, num_replicas=1))


def test_it_is_pickled_without_its_threads():
    source = Prefetcher(SimpleNamespace(buckets={(): [0]}, digest="d", collate=len), batches=3, pin_memory=False)  # pyright: ignore[reportArgumentType]
    with source.announce(np.array([[0]])):
        again = pickle.loads(pickle.dumps(source))
    assert again.digest == "d"


def test_an_abandoned_iteration_that_is_collected_in_a_reading_thread_waits_for_nobody():
    source = Prefetcher(SimpleNamespace(buckets={(): [0]}, digest="d", collate=len), batches=3, pin_memory=False)  # pyright: ignore[reportArgumentType]
    abandoned = [source.announce(np.array([[0]])) for _ in range(2)]
    for each in abandoned:
        each.__enter__()
    with source._guard:  # as while the trainer's thread starts the reading one
        reading = [threading.Thread(target=each.__exit__, args=(None, None, None), daemon=True) for each in abandoned]
        for thread in reading:
            thread.start()
            thread.join(LIMIT_SECONDS)
            assert not thread.is_alive()


# Buffers that are used again


class Buffers:
    def __init__(self, size, pin):
        self.flat = torch.empty(size, dtype=torch.int64)
        self.pin = pin
        self.view = self.flat.numpy()


class Buffered(Samples):
    def __init__(self, count=40):
        super().__init__(count)
        self.made = []

    def make_buffers(self, *, pin):
        self.made.append(Buffers(8, pin))
        return self.made[-1]

    def read_batch(self, indices, *, into=None):
        into = into or Buffers(8, pin=False)
        into.view[: len(indices)] = indices
        return {"number": into.flat[: len(indices)], "names": list(map(str, indices))}


def test_buffers_nobody_holds_are_used_again():
    data = Buffered(400)
    expected = list(cs.BucketBatchSampler(Samples(400), batch_size=4, rank=0, num_replicas=1))
    for batch, wanted in zip(loader_of(data, ahead=1), expected, strict=True):
        assert batch["number"].tolist() == wanted
        assert batch["names"] == list(map(str, wanted))
    assert len(data.made) <= 4


def test_a_batch_that_is_kept_in_whole_or_in_part_is_never_written_again():
    loader = loader_of(Buffered(), ahead=2)
    expected = list(cs.BucketBatchSampler(Samples(), batch_size=4, rank=0, num_replicas=1))
    kept: list[Any] = [batch["number"][1:3] if number % 2 else batch for number, batch in enumerate(loader)]
    for number, wanted in enumerate(expected):
        assert (kept[number].tolist() == wanted[1:3]) if number % 2 else (kept[number]["number"].tolist() == wanted)


def test_what_no_buffers_are_given_for_is_pinned_by_the_thread_that_read_it(monkeypatch):
    data = Samples()
    source = Prefetcher(data, pin_memory=True)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor + 1000)
    with source.announce(np.array([[0, 2], [4, 6]])):
        assert numbers([source.collate(source.__getitems__([0, 2]))]) == [[1000, 1002]]
    assert threading.main_thread() not in data.readers


def test_in_a_worker_every_batch_has_memory_of_its_own():
    """It becomes the trainer's process's."""
    loader = cs.make_loader(Buffered(), 4, "single", num_workers=1)  # pyright: ignore[reportArgumentType]
    kept = list(loader)
    assert [batch["number"].tolist() for batch in kept] == list(cs.BucketBatchSampler(Samples(), batch_size=4, rank=0, num_replicas=1))


def test_without_prefetched_batches_nothing_is_read_by_a_thread():
    data = Samples()
    assert numbers(loader_of(data, ahead=0)) == list(cs.BucketBatchSampler(Samples(), batch_size=4, rank=0, num_replicas=1))
    assert set(data.readers) == {threading.main_thread()}


def test_pinned_buffers_are_left_to_torch_which_knows_of_copies_under_way():
    data = Buffered()
    source = Prefetcher(data, pin_memory=True)
    for _time in range(3):
        source.collate(source.__getitems__([1, 2]))
    assert [buffers.pin for buffers in data.made] == [True, True, True]


def test_a_ring_remembers_no_more_than_it_was_told_to():
    ring, made = Ring(2), []

    def make():
        made.append(torch.zeros(3))
        return made[-1]

    lent = []
    for _time in range(3):
        buffers = ring.take(make)
        lent.append(ring.lend(buffers, {"a": buffers, "name": "x"}))
    assert (len(made), lent[0]["name"]) == (3, "x")
    lent.clear()
    assert [ring.take(make) is made[number] for number in (1, 2)] == [True, True]
    assert ring.take(make) is made[3]


def test_a_ring_waits_for_what_autograd_keeps():
    ring = Ring(2)
    weight = torch.ones(3, requires_grad=True)
    buffers = torch.arange(3.0)
    loss = (weight * ring.lend(buffers, {"a": buffers})["a"]).sum()
    assert ring.take(lambda: None) is None
    loss.backward()
    del loss
    assert ring.take(lambda: None) is buffers
