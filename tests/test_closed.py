"""A closed store answers nothing: it says that it is closed."""

import pickle

import numpy as np
import pytest

import cachestore as cs
from tests.fakes import encode

KEY = cs.key("closed", "a")
CLOSED = r"the store at .+ is closed here; open it again"


@pytest.fixture
def closed(tmp_path):
    with cs.open(tmp_path / "store", mode="a") as store:
        cs.fill(store, [(KEY, 0)], encode)
    return store


@pytest.mark.parametrize(
    "ask",
    [
        lambda store: KEY in store,
        len,
        lambda store: list(store.keys()),
        lambda store: store.generation,
        lambda store: store.get(KEY),
        lambda store: store.get_many([KEY]),
        lambda store: store.get_many([]),
        lambda store: store.missing([KEY]),
        lambda store: store.missing([]),
        lambda store: store.locate([]),
        lambda store: store.describe(KEY),
        lambda store: store.prefetch([KEY]),
        lambda store: store.refresh(),
        lambda store: store.commit(),
        lambda store: store.writer(),
        lambda store: store.names(),
        lambda store: store.dataset("own"),
        lambda store: store.session("own"),
        lambda store: store.publish("own", {}),
        lambda store: store.files("own"),
        lambda store: store.__enter__(),
        lambda store: cs.fill(store, [], encode),
        lambda store: cs.fill(store, [(KEY, 0)], encode),
        lambda store: cs.ReadThrough(store, encode, on_miss="encode")([(KEY, 0)]),
        lambda store: cs.ReadThrough(store)([]),
        lambda store: cs.ReadThrough(store, on_miss="skip")([(KEY, 0)]),
        pickle.dumps,
    ],
    ids=lambda ask: f"line {ask.__code__.co_firstlineno}" if hasattr(ask, "__code__") else ask.__name__,
)
def test_a_closed_store_says_that_it_is_closed(closed, ask):
    with pytest.raises(cs.CacheStoreError, match=CLOSED):
        ask(closed)


def test_closing_twice_is_fine(closed):
    closed.close()
    closed.close()


def test_a_writer_of_a_store_that_was_closed_meanwhile_takes_nothing(tmp_path):
    store = cs.open(tmp_path / "store", mode="a")
    writer = store.writer()
    store.close()
    with pytest.raises(cs.CacheStoreError, match=CLOSED):
        writer.put(KEY, {"value": np.zeros(2)})


def test_a_session_and_files_of_a_store_that_was_closed_meanwhile_say_so(tmp_path):
    store = cs.open(tmp_path / "store", mode="a")
    session, files = store.session("own"), store.files("files")
    session.set("a", x=KEY)
    store.close()
    for call in (session.flush, lambda: files.exists("a"), lambda: files.save("a", {"x": np.zeros(2)})):
        with pytest.raises(cs.CacheStoreError, match=CLOSED):
            call()


def test_a_store_is_closed_by_its_block_alone(tmp_path):
    with cs.open(tmp_path / "store", mode="a") as store:
        assert len(store) == 0
        packed = pickle.dumps(store)
    with pickle.loads(packed) as another:
        assert len(another) == 0
