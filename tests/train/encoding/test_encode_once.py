"""Encoding once: of all that ask for a value, one makes it; who waits gets it, or makes it if the maker died."""

import multiprocessing
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cachestore as cs
from cachestore.jobs.share.key_claims import KeyClaims
from cachestore.jobs.share.workers import Watch
from tests.fakes import asks_for, tells_of


class Encode:
    """Makes an array of each text of digits; counts what it was asked for."""

    def __init__(self):
        self.calls = []
        self._lock = threading.Lock()

    def __call__(self, batch):
        with self._lock:
            self.calls.append([item for _key, item in batch])
        return {key: {"value": np.full(3, int(item), np.float32)} for key, item in batch}

    @property
    def made(self):
        return sorted(item for call in self.calls for item in call)


@pytest.fixture
def store(tmp_path):
    with cs.open(tmp_path / "store", mode="a") as store:
        yield store


def wanted(*numbers):
    return [(cs.key("number", str(number)), str(number)) for number in numbers]


def numbers(entries):
    return [int(entry["value"][0]) for entry in entries]


def claims_of(store, worker="f" * 32):
    return KeyClaims(store.layout, worker, Watch(store.layout))


def test_asking_for_nothing_calls_nobody_and_writes_nothing(store):
    with cs.EncodeOnce(store) as once:
        before = sorted(store.layout.root.rglob("*"))
        assert once([], Encode()) == []
        assert once.make([], Encode()) == 0
    assert sorted(store.layout.root.rglob("*")) == before


def test_values_come_in_the_order_of_the_request_and_only_what_is_missing_is_made(store):
    encode = Encode()
    with cs.EncodeOnce(store) as once:
        assert numbers(once(wanted(3, 1, 2, 1), encode, batch_size=2, as_numpy=True)) == [3, 1, 2, 1]
        assert numbers(once(wanted(2, 5, 3), encode, as_numpy=True)) == [2, 5, 3]
    assert encode.calls == [["3", "1"], ["2"], ["5"]]


def test_what_a_call_returned_is_there_for_all(store):
    with cs.EncodeOnce(store) as once:
        assert once.make(wanted(1, 2), Encode()) == 2
        with cs.open(store.layout.root) as other:
            assert all(key in other for key, _item in wanted(1, 2))


def test_a_batch_holds_one_group(store):
    encode = Encode()
    with cs.EncodeOnce(store) as once:
        once.make(wanted(1, 2, 3, 4, 5), encode, batch_size=2, group_by=lambda item: int(item) % 2)
    assert encode.calls == [["1", "3"], ["5"], ["2", "4"]]


@settings(max_examples=12, deadline=None)
@given(requests=st.lists(st.lists(st.integers(0, 9), max_size=6), min_size=2, max_size=8), size=st.integers(1, 4), publishes=st.booleans())
def test_however_requests_overlap_each_value_is_made_once(tmp_path_factory, requests, size, publishes):
    root, encode = tmp_path_factory.mktemp("store"), Encode()

    def ask(some):
        with cs.open(root, mode="a") as store, cs.EncodeOnce(store, publish_as="mine" if publishes else None) as once:
            return numbers(once(wanted(*some), encode, batch_size=size, as_numpy=True))

    with cs.open(root, mode="a") as store:
        with ThreadPoolExecutor(3) as threads:
            assert list(threads.map(ask, requests)) == requests
        asked = sorted({str(number) for some in requests for number in some})
        assert encode.made == asked
        if publishes and asked:
            rows = store.dataset("mine")
            assert {sample: rows[sample]["value"] for sample in rows} == {item: key for key, item in wanted(*asked)}
    assert not [name for name in os.listdir(root / "tmp") if name.endswith(".tmp")]


def test_threads_share_one(store):
    encode = Encode()
    with cs.EncodeOnce(store) as once, ThreadPoolExecutor(4) as threads:
        asked = [[1, 2, 3], [3, 2], [4, 1], [2, 5]]
        assert [numbers(found) for found in threads.map(lambda some: once(wanted(*some), encode, as_numpy=True), asked)] == asked
    assert encode.made == ["1", "2", "3", "4", "5"]


def test_what_another_makes_is_waited_for(store):
    other, begun = claims_of(store), threading.Event()
    [(key, _item)] = wanted(1)
    with cs.EncodeOnce(store) as once, ThreadPoolExecutor(1) as threads:
        once.make(wanted(2), Encode())
        assert other.take(key)
        encode = Encode()
        asked = threads.submit(lambda: (begun.set(), numbers(once(wanted(1, 3), encode, as_numpy=True)))[1])
        assert begun.wait(5)
        store.put(key, {"value": np.full(3, 1, np.float32)})
        other.release([key])
        assert asked.result(5) == [1, 3]
    assert encode.made == ["3"]


def test_waiting_is_bounded_and_names_what_it_waits_for(store):
    [(key, _item)] = wanted(1)
    with cs.EncodeOnce(store, wait_seconds=0.1) as once:
        once.make(wanted(2), Encode())
        claims_of(store).take(key)
        with pytest.raises(cs.Incomplete, check=tells_of(str(key), "f" * 32, "0.1 s")):
            once.make(wanted(1), Encode())


def _killed_while_encoding(root, after):
    made = Encode()

    def encode(batch):
        if sum(map(len, made.calls)) >= after:
            os.kill(os.getpid(), signal.SIGKILL)
        return made(batch)

    with cs.open(root, mode="a") as store, cs.EncodeOnce(store) as once:
        once.make(wanted(*range(8)), encode, batch_size=2)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills a child")
@pytest.mark.parametrize("after", [0, 4])
def test_if_the_maker_is_killed_who_asks_makes_it(store, after):
    child = multiprocessing.get_context("fork").Process(target=_killed_while_encoding, args=(store.layout.root, after))
    child.start()
    child.join(10)
    assert child.exitcode == -signal.SIGKILL
    assert [name for name in os.listdir(store.layout.temporary) if name.endswith(".tmp")]
    encode = Encode()
    with cs.EncodeOnce(store) as once:
        assert numbers(once(wanted(*range(8)), encode, as_numpy=True)) == list(range(8))
    assert set(encode.made) >= {str(number) for number in range(after, 8)}
    assert not [name for name in os.listdir(store.layout.temporary) if name.endswith(".tmp")]


def test_after_an_error_what_was_made_stays_and_others_may_try(store):
    def encode(batch):
        if batch[0][1] == "3":
            raise ZeroDivisionError
        return Encode()(batch)

    with cs.EncodeOnce(store) as once, cs.EncodeOnce(store) as other:
        with pytest.raises(ZeroDivisionError):
            once.make(wanted(1, 2, 3, 4), encode, batch_size=1)
        assert [number for number, (key, _item) in enumerate(wanted(1, 2, 3, 4), 1) if key in store] == [1, 2]
        assert other.make(wanted(1, 2, 3, 4), Encode()) == 2


@pytest.mark.parametrize(
    "answer",
    [lambda batch: {}, lambda batch: {cs.key("x"): {}}, lambda batch: dict.fromkeys(dict(batch), 5)],
    ids=["none", "another", "a number"],
)
def test_an_answer_that_does_not_fit_stores_nothing(store, answer):
    with cs.EncodeOnce(store) as once:
        with pytest.raises(cs.EncodeFailed):
            once.make(wanted(1), answer)
        assert len(store) == 0
        assert once.make(wanted(1), Encode()) == 1


def test_a_full_disk_is_told_and_nothing_stays_claimed(store, monkeypatch):
    with cs.EncodeOnce(store) as once, monkeypatch.context() as patched:
        once.make(wanted(1), Encode())

        def refuse(*_args, **_more):
            raise cs.WriteFailed("no room")

        patched.setattr("cachestore.store.write.append.publish", refuse)
        with pytest.raises(cs.WriteFailed):
            once.make(wanted(2), Encode())
        patched.undo()
        with cs.EncodeOnce(store) as other:
            assert other.make(wanted(2), Encode()) == 1


def test_rows_name_the_newest_key_of_an_item_and_are_written_only_where_they_are_new(store):
    pairs = [(cs.key("a", number), {"id": "cat", "n": number}) for number in "12"]

    def encode(batch):
        return {key: {"value": np.full(1, int(item["n"]))} for key, item in batch}

    with cs.EncodeOnce(store, publish_as="mine") as once:
        for pair in pairs:
            once.make([pair], encode)
        assert store.dataset("mine")["cat"]["value"] == pairs[1][0]
    with cs.EncodeOnce(store, publish_as="mine") as once:
        before = sorted(store.layout.catalogs.rglob("*.changes"))
        assert once.make([pairs[1]], encode) == 0
        assert sorted(store.layout.catalogs.rglob("*.changes")) == before
        assert once.make([pairs[0]], encode) == 0
        assert store.dataset("mine")["cat"]["value"] == pairs[0][0]


def test_a_store_that_is_open_for_reading_gives_what_it_has(store):
    store.put(wanted(1)[0][0], {"value": np.ones(3, np.float32)})
    with cs.open(store.layout.root) as reader, cs.EncodeOnce(reader, publish_as="mine") as once:
        assert numbers(once(wanted(1), Encode(), as_numpy=True)) == [1]
        with pytest.raises(cs.CacheStoreError, match="open for reading"):
            once(wanted(2), Encode())


def test_an_item_without_an_id_is_refused_before_anything_is_made(store):
    encode = Encode()
    with cs.EncodeOnce(store, publish_as="mine") as once, pytest.raises(cs.BadInput, check=asks_for("wanted")):
        once.make([(cs.key("a"), 5)], encode)
    assert encode.calls == []


def test_it_says_what_it_is(store):
    assert repr(cs.EncodeOnce(store)) == f"EncodeOnce({store!r})"
    assert repr(cs.EncodeOnce(store, publish_as="mine")) == f"EncodeOnce({store!r}, publish_as='mine')"
