"""Reading through a store: in the order of the request, with one call for what is missing, and nothing lost that was published."""

import os
import pickle

import numpy as np
import pytest

import cachestore as cs
from cachestore.store.read.snapshot import list_segments
from cachestore.store.write import append
from cachestore.train.encoding.read_through import AGE_SECONDS
from tests.fakes import Clock, asks_for, program, tells_of
from tests.leaks import held


class Encode:
    """Makes an array of each number; counts what it is asked for."""

    def __init__(self, before=None):
        self.calls = []
        self.before = before

    def __call__(self, batch):
        if self.before:
            self.before()
        self.calls.append([item for _key, item in batch])
        return {key: {"value": np.full(3, item, np.float32)} for key, item in batch}


@pytest.fixture
def store(tmp_path):
    with cs.open(tmp_path / "store", mode="a") as store:
        yield store


def wanted(*numbers):
    return [(cs.key("number", str(number)), number) for number in numbers]


def numbers(entries):
    return [None if entry is None else int(entry["value"][0]) for entry in entries]


def ask(read, *asked):
    return numbers(read(wanted(*asked), as_numpy=True))


def others_see(store, *asked):
    """What somebody sees who opens the store now."""
    with cs.open(store.layout.root) as other:
        return [key in other for key, _number in wanted(*asked)]


def segments(store):
    return len(list(list_segments(store.layout)))


@pytest.mark.parametrize("on_miss", ["raise", "encode", "skip"])
def test_asking_for_nothing_gives_nothing_and_calls_nobody(store, on_miss):
    encode = Encode()
    with cs.ReadThrough(store, encode, on_miss) as read:
        assert read([]) == []
    assert (encode.calls, segments(store)) == ([], 0)


def test_what_is_missing_is_made_in_one_call_and_all_comes_in_the_order_asked_for(store):
    cs.fill(store, wanted(3, 1), Encode(), rank=None)
    encode = Encode()
    with cs.ReadThrough(store, encode, "encode") as read:
        assert ask(read, 5, 1, 4, 3, 5, 1) == [5, 1, 4, 3, 5, 1]
        assert ask(read, 4, 6, 5) == [4, 6, 5]
    assert encode.calls == [[5, 4], [6]]
    assert others_see(store, 1, 3, 4, 5, 6) == [True] * 5
    assert numbers(store.get_many([key for key, _item in wanted(6, 4)], as_numpy=True)) == [6, 4]


def test_what_was_made_is_read_here_at_once_and_by_others_after_it_was_published(store):
    with cs.open(store.layout.root) as other, cs.ReadThrough(store, Encode(), "encode") as read:
        ask(read, 1, 2)
        assert ask(read, 2) == [2]
        assert segments(store) == 0
        read.close()
        assert segments(store) == 1
        other.refresh()
        assert wanted(1)[0][0] in other
        assert ask(read, 1, 3) == [1, 3]
    assert segments(store) == 2


def test_an_age_is_enough_to_publish_and_a_call_is_needed(store):
    clock = Clock()
    encode = Encode()
    read = cs.ReadThrough(store, encode, "encode", clock=clock)
    ask(read, 1)
    clock.now += AGE_SECONDS - 1
    ask(read, 2)
    assert segments(store) == 0
    clock.now += 1
    assert ask(read, 1, 2) == [1, 2]
    assert (segments(store), encode.calls) == (1, [[1], [2]])
    assert ask(read, 2, 1) == [2, 1]
    read.close()
    assert segments(store) == 1


def test_a_full_segment_is_published_in_the_middle_of_a_request(store, monkeypatch):
    read = cs.ReadThrough(store, Encode(), "encode")
    read._appender.limits = append.SegmentLimits(entries=2)
    assert ask(read, 1, 2, 3) == [1, 2, 3]
    assert (segments(store), list(read._pending)) == (1, [wanted(3)[0][0]])
    assert ask(read, 3, 2, 1) == [3, 2, 1]
    read.close()


def test_many_segments_are_committed_so_that_others_open_the_store_fast(store, monkeypatch):
    monkeypatch.setattr("cachestore.train.encoding.read_through.UNCOVERED_LIMIT", 2)
    read = cs.ReadThrough(store, Encode(), "encode")
    for number in range(3):
        assert store.generation == -1
        ask(read, number)
        read.close()
    assert store.generation > 0
    assert ask(read, 0, 1, 2) == [0, 1, 2]


def test_made_and_read_values_are_alike_and_the_callers_own(store):
    read = cs.ReadThrough(store, Encode(), "encode")
    made = read(wanted(1, 1), as_numpy=True)
    gathered = read(wanted(1), as_numpy=True)
    read.close()
    for entry in (*made, *gathered, *read(wanted(1, 1), as_numpy=True)):
        assert (entry["value"].dtype, entry["value"].tolist()) == (np.float32, [1, 1, 1])
        entry["value"][:] = 7
    assert ask(read, 1) == [1]


@pytest.mark.torch
def test_tensors_come_as_torch_tensors_on_the_cpu_and_keep_their_type(store):
    import torch

    made = torch.arange(3, dtype=torch.bfloat16)
    with cs.ReadThrough(store, lambda batch: {key: {"value": made} for key, _item in batch}, "encode") as read:
        read(wanted(1))[0]["value"].add_(1)
        made.add_(5)
        assert torch.equal(read(wanted(1))[0]["value"], torch.arange(3, dtype=torch.bfloat16))
    assert torch.equal(store.get(wanted(1)[0][0])["value"], torch.arange(3, dtype=torch.bfloat16))


def test_views_of_a_file_are_copied(tmp_path):
    with cs.open(tmp_path / "store", mode="a", io="mmap") as store:
        cs.fill(store, wanted(1), Encode())
        cs.ReadThrough(store)(wanted(1), as_numpy=True)[0]["value"][:] = 7
        assert numbers(store.get_many([wanted(1)[0][0]], as_numpy=True)) == [1]


# What is missing


def test_by_default_a_missing_key_is_an_error_that_names_it_and_it_can_be_skipped(store):
    cs.fill(store, wanted(1), Encode())
    read = cs.ReadThrough(store)
    assert ask(read, 1) == [1]
    with pytest.raises(cs.MissingEntry, check=tells_of("1 of 2", wanted(2)[0][0], "cachestore.fill")):
        ask(read, 1, 2)
    assert ask(cs.ReadThrough(store, on_miss="skip"), 2, 1, 2) == [None, 1, None]


def test_before_anything_is_made_others_latest_work_is_looked_at(store):
    encode = Encode()
    read = cs.ReadThrough(store, encode, "encode")
    with cs.open(store.layout.root, mode="a") as other:
        cs.fill(other, wanted(1), Encode())
    assert ask(read, 1) == [1]
    assert encode.calls == []


def test_a_damaged_entry_is_an_error_and_not_made_again(store):
    cs.fill(store, wanted(1), Encode())
    location = store.locate([wanted(1)[0][0]]).location(0)
    path = store.layout.segment(location.segment.digest)
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.seek(location.offset)
        file.write(b"?")
    encode = Encode()
    with pytest.raises(cs.CorruptEntry):
        ask(cs.ReadThrough(store, encode, "encode"), 1)
    assert encode.calls == []


# The caller's function


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (lambda batch: {}, "0 keys, not the 2"),
        (lambda batch: {key: {} for key in [*(key for key, _item in batch), cs.key("x")]}, "3 keys"),
        (lambda batch: {key: [1] for key, _item in batch}, r"must return \{key: \{name: tensor\}\}"),
    ],
)
def test_an_answer_that_does_not_fit_keeps_nothing(store, answer, says):
    with cs.ReadThrough(store, answer, "encode") as read, pytest.raises(cs.EncodeFailed, match=says):
        ask(read, 1, 2)
    assert segments(store) == 0


def test_a_value_that_cannot_be_stored_is_refused_with_all_of_its_request(store):
    def encode(batch):
        return {key: {"value": "text" if item == 2 else np.zeros(1)} for key, item in batch}

    with cs.ReadThrough(store, encode, "encode") as read, pytest.raises(cs.BadInput, check=tells_of("'value'")):
        ask(read, 1, 2)
    assert segments(store) == 0


def test_an_error_of_the_function_reaches_the_caller_and_what_was_made_before_is_published(store):
    def fail():
        if encode.calls:
            raise KeyboardInterrupt

    encode = Encode(fail)
    read = cs.ReadThrough(store, encode, "encode")
    ask(read, 1)
    with pytest.raises(KeyboardInterrupt), read:
        ask(read, 2)
    assert others_see(store, 1, 2) == [True, False]


def test_keys_may_be_answered_in_any_form(store):
    with cs.ReadThrough(store, lambda batch: {str(key): {"value": np.full(1, item)} for key, item in batch}, "encode") as read:
        assert ask(read, 1) == [1]


def test_a_disk_that_refuses_loses_nothing(store, monkeypatch):
    read = cs.ReadThrough(store, Encode(), "encode")
    ask(read, 1)
    with monkeypatch.context() as patch:
        patch.setattr("cachestore.store.write.append.publish", refuse)
        with pytest.raises(cs.WriteFailed):
            read.close()
    assert ask(read, 1) == [1]
    read.close()
    assert others_see(store, 1) == [True]


def refuse(*_arguments, **_options):
    raise cs.WriteFailed("no space left")


# Options and processes


@pytest.mark.parametrize("options", [{"on_miss": "encode"}, {"encode": Encode(), "on_miss": "ask"}])
def test_options_that_do_not_fit_are_refused(store, options):
    with pytest.raises(cs.BadInput):
        cs.ReadThrough(store, **options)


def test_nothing_is_made_through_a_store_that_is_open_for_reading(store):
    with cs.open(store.layout.root) as other, pytest.raises(cs.BadInput, check=asks_for("on_miss")):
        cs.ReadThrough(other, Encode(), "encode")


def test_a_pickled_one_reads_elsewhere_and_does_not_encode(store):
    cs.fill(store, wanted(1), Encode())
    assert ask(pickle.loads(pickle.dumps(cs.ReadThrough(store))), 1) == [1]
    with pytest.raises(cs.BadInput, check=asks_for("on_miss")):
        pickle.loads(pickle.dumps(cs.ReadThrough(store, Encode(), "encode")))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_reads_what_its_parent_made_makes_nothing_and_publishes_nothing(store):
    clock = Clock()
    read = cs.ReadThrough(store, Encode(), "encode", clock=clock)
    ask(read, 1)
    child = os.fork()
    if child == 0:
        found = []
        try:
            clock.now += 2 * AGE_SECONDS
            found.append(ask(read, 1) == [1])
            with pytest.raises(cs.CacheStoreError):
                ask(read, 2)
            read.close()
            found.append(segments(store) == 0)
        finally:
            os._exit(0 if found == [True, True] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    read.close()
    assert others_see(store, 1, 2) == [True, False]


@pytest.mark.processes
def test_several_processes_at_once_make_and_read_the_same_keys(store):
    source = """
import sys
import numpy as np
import cachestore as cs

def encode(batch):
    return {key: {"value": np.full(3, item, np.float32)} for key, item in batch}

start = int(sys.argv[2])
with cs.open(sys.argv[1], mode="a") as store, cs.ReadThrough(store, encode, "encode") as read:
    for step in range(20):
        numbers = [(start + step + n) % 40 for n in range(8)]
        found = read([(cs.key("number", str(number)), number) for number in numbers], as_numpy=True)
        assert [int(entry["value"][0]) for entry in found] == numbers
        if step % 5 == 4:
            read.close()
"""
    for one in [program(source, str(store.layout.root), str(10 * n)) for n in range(3)]:
        _out, err = one.communicate(timeout=50)
        assert one.returncode == 0, err
    assert cs.verify(store.layout.root).ok
    assert ask(cs.ReadThrough(cs.open(store.layout.root)), *range(40)) == list(range(40))


def test_reading_through_starts_no_thread(store):
    before = held()
    with cs.ReadThrough(store, Encode(), "encode") as read:
        ask(read, 1)
        assert not held() - before
