"""A name belongs to passes or to sessions: the later one ends with BadInput, however they meet."""

import pytest

import cachestore as cs
from cachestore.core.errors import BadInput
from cachestore.jobs.run import catalog_maker
from cachestore.store.format.catalog import list_generations
from cachestore.store.write import made as making
from cachestore.store.write.made import what_made
from tests import fakes
from tests.fakes import FakeEncoder, asks_for, captions


@pytest.fixture
def store(root):
    with cs.open(root, mode="a") as store:
        yield store


def pass_over(store, **how):
    return fakes.run(store.layout.root, captions("a", "b"), FakeEncoder(**how))


def test_a_pass_cannot_publish_under_a_name_that_sessions_made(store):
    store.publish("train", {})
    with pytest.raises(BadInput, check=asks_for("name")):
        pass_over(store)
    assert (what_made(store.layout, "train"), list(store.dataset("train"))) == ("published", [])


def test_a_session_cannot_use_the_name_of_a_pass_before_and_after_it_ends(store):
    refused = []

    def begin(_items):
        with pytest.raises(BadInput, check=asks_for("name")):
            store.session("train")
        refused.append(list_generations(store.layout, "train"))

    assert pass_over(store, before_encode=begin).complete
    assert refused == [[]]
    for call in (store.session, store.files, lambda name: store.publish(name, {})):
        with pytest.raises(BadInput, check=asks_for("name")):
            call("train")
    assert what_made(store.layout, "train") == "precompute"


@pytest.mark.parametrize("moment", ["while it encodes", "before its number is taken"])
def test_a_session_that_begins_during_a_pass_keeps_the_name(store, monkeypatch, moment):
    # Its look at unfinished passes was before the pass began.
    monkeypatch.setattr(making, "list_unfinished", lambda _layout: [])
    how = {}
    if moment == "while it encodes":
        how = {"before_encode": lambda _items: store.session("train")}
    else:
        fakes.overtaken(monkeypatch, catalog_maker, "publish_draft", lambda: store.session("train"))
    with pytest.raises(BadInput, check=asks_for("name")):
        pass_over(store, **how)
    assert (what_made(store.layout, "train"), list_generations(store.layout, "train")) == ("published", [1])


def test_a_pass_that_publishes_while_a_session_begins_keeps_the_name(store, monkeypatch):
    fakes.overtaken(monkeypatch, making, "publish_draft", lambda: pass_over(store))
    with pytest.raises(BadInput, check=asks_for("name")):
        store.session("train")
    assert (what_made(store.layout, "train"), list(store.dataset("train"))) == ("precompute", ["0000", "0001"])


def test_a_name_is_free_again_once_it_was_dropped(store):
    store.publish("train", {})
    cs.drop(store.layout.root, "train")
    assert pass_over(store).complete
    cs.drop(store.layout.root, "train")
    store.publish("train", {})
    assert what_made(store.layout, "train") == "published"


@pytest.mark.parametrize("damaged", [0, -1])
def test_a_damaged_table_does_not_hide_that_sessions_made_it(store, damaged):
    for number in range(2):
        store.publish("train", {str(number): {}})
    path = store.layout.catalog("train", list_generations(store.layout, "train")[damaged])
    path.unlink()
    path.write_bytes(b"damaged")
    with pytest.raises(BadInput, check=asks_for("name")):
        pass_over(store)
