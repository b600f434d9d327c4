"""Files of a store against a dict, seen from two processes' sides."""

import os
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cachestore as cs
from cachestore.core.errors import BadInput, CacheStoreError, MissingEntry
from cachestore.store.write.folding import make_table
from tests.fakes import asks_for

PATHS = ["a", "b/c", "b/d"]
operations = st.lists(
    st.one_of(
        st.tuples(st.just("save"), st.sampled_from(PATHS), st.integers(0, 3)),
        st.tuples(st.just("remove"), st.sampled_from(PATHS), st.none()),
        st.tuples(st.just("table"), st.none(), st.none()),
    ),
    max_size=10,
)


@pytest.fixture
def store(tmp_path):
    return cs.open(tmp_path / "store", mode="a")


@settings(max_examples=30)
@given(operations)
def test_two_processes_see_the_files_of_a_dict(tmp_path_factory, listed):
    root = tmp_path_factory.mktemp("files") / "store"
    sides = [cs.open(root, mode="a").files("own"), cs.open(root, mode="a").files("own")]
    model = {}
    for number, (what, path, value) in enumerate(listed):
        writer, reader = sides[number % 2], sides[1 - number % 2]
        if what == "save":
            writer.save(path, {"x": np.full(3, value, np.float32)}, {"value": value})
            model[path] = value
        elif what == "remove":
            writer.remove(path)
            model.pop(path, None)
        else:
            make_table(writer._store.layout, "own")
        assert reader.glob() == sorted(model)
        assert {path for path in PATHS if reader.exists(path)} == set(model)
        assert {path: reader.metadata(path)["value"] for path in model} == model
        assert {path: reader.load(path)["x"][0].item() for path in model} == model


def test_a_file_has_its_tensors_and_its_metadata(store):
    with store.files("own") as files:
        files.save(Path("folder") / "cat", {"latents": np.ones((4, 8), np.float32), "mask": np.zeros(2, bool)}, {"size": [8, 4]})
        assert files.keys("folder/cat") == ["latents", "mask"]
        assert files.metadata("folder//cat") == {"size": [8, 4]}
        assert files.glob("folder/*") == ["folder/cat"]
        assert files.glob("*.png") == []
    assert store.dataset("own").made == "files"


def test_what_is_not_there_is_named(store):
    files = store.files("own")
    files.save("cat_latents", {"x": np.ones(1, np.float32)})
    for call in (files.load, files.metadata, files.keys):
        with pytest.raises(MissingEntry, match="cat_latent'"):
            call("cat_latent")
    files.remove("never there")
    with pytest.raises(BadInput):
        files.exists("")


def test_equal_contents_are_stored_once_and_stay_while_one_path_has_them(store):
    files = store.files("own")
    files.save("a", {"x": np.ones(4, np.float32)})
    files.save("b", {"x": np.ones(4, np.float32)})
    files.remove("a")
    assert (len(store), files.glob()) == (1, ["b"])
    assert files.load("b")["x"].tolist() == [1, 1, 1, 1]


def test_names_of_another_kind_are_refused(store):
    store.publish("rows", {})
    with pytest.raises(BadInput):
        store.files("rows")
    store.files("own")
    with pytest.raises(BadInput):
        store.publish("own", {})


def test_what_was_saved_before_and_collected_since_is_saved_again(store):
    """The store was opened long ago, and believes that the value is still there."""
    with store.files("own") as files:
        files.save("a", {"x": np.ones(2, np.float32)})
        files.remove("a")
        for path in store.layout.segments.rglob("*.safetensors"):
            path.unlink()
        files.save("b", {"x": np.ones(2, np.float32)})
        assert files.load("b")["x"].tolist() == [1, 1]


def test_a_value_that_gc_removed_meanwhile_is_saved_again(store):
    """The open store still showed it, and the flush said that the caller should put it first."""
    from tests.care.test_lines import collected

    files = store.files("own")
    files.save("a", {"x": np.ones(3, np.float32)})
    files.remove("a")
    assert files.glob() == []
    with cs.open(store.layout.root, mode="a") as other:
        collected(other, 3, keep=1)
        assert len(other) == 0
    files.save("a", {"x": np.ones(3, np.float32)})
    assert files.load("a")["x"].tolist() == [1, 1, 1]


def test_paths_that_differ_in_their_unicode_form_alone_are_one(store):
    composed, decomposed = (unicodedata.normalize(form, "é/ö") for form in ("NFC", "NFD"))
    with store.files("own") as files:
        files.save(decomposed, {"x": np.zeros(2, np.float32)})
        assert files.exists(composed)
        assert files.glob(decomposed) == [composed]
        files.remove(composed)
        assert not files.exists(decomposed)


def test_files_of_a_store_that_is_open_for_reading_can_be_loaded_and_not_changed(store):
    root = store.layout.root
    files = store.files("own")
    files.save("a", {"x": np.ones(2, np.float32)}, {"n": 1})
    before = sorted(root.rglob("*"))
    with cs.open(root).files("own") as reading:
        assert (reading.exists("a"), reading.exists("b"), reading.glob()) == (True, False, ["a"])
        assert (reading.load("a")["x"].tolist(), reading.metadata("a"), reading.keys("a")) == ([1, 1], {"n": 1}, ["x"])
        for change in (lambda: reading.save("a", {"x": np.zeros(2)}), lambda: reading.remove("a")):
            with pytest.raises(CacheStoreError):
                change()
        reading.flush()
        assert sorted(root.rglob("*")) == before
        files.save("b", {"x": np.zeros(2, np.float32)})
        files.remove("a")
        assert reading.glob() == ["b"]
        with pytest.raises(MissingEntry):
            reading.load("a")


def test_a_store_that_is_open_for_reading_makes_no_files_and_takes_no_other_kind(store):
    store.publish("rows", {})
    before = sorted(store.layout.root.rglob("*"))
    reading = cs.open(store.layout.root)
    for name in ("none", "rows", ""):
        with pytest.raises(BadInput, check=asks_for("name")):
            reading.files(name)
    reading.close()
    with pytest.raises(CacheStoreError):
        reading.files("rows")
    assert sorted(store.layout.root.rglob("*")) == before


def test_a_value_that_was_replaced_and_collected_while_it_is_read_is_read_anew(store, monkeypatch):
    """`load` knew the key of the old value; before it read that, the path was saved again and `gc` removed what it had."""
    files = store.files("own")
    files.save("a", {"x": np.ones(2, np.float32)})
    read, calls = store.get, []

    def replaced(key, **options):
        calls.append(key)
        if len(calls) == 1:
            files.save("a", {"x": np.zeros(2, np.float32)})
            raise MissingEntry("collected")
        return read(key, **options)

    monkeypatch.setattr(store, "get", replaced)
    assert files.load("a")["x"].tolist() == [0, 0]
    assert len(set(calls)) == 2


def test_a_folder_that_has_not_changed_is_not_listed_again(store, monkeypatch):
    files, other = store.files("cache"), store.files("cache")
    for name in ("a", "b"):
        files.save(name, {"one": np.zeros(1)})
    folder = store.layout.catalog_folder("cache")
    os.utime(folder, ns=(0, 0))
    assert other.exists("a")
    with monkeypatch.context() as patch:
        patch.setattr("cachestore.store.write.files.list_line", None)
        assert other.glob() == ["a", "b"]
        assert np.array_equal(other.load("b")["one"], np.zeros(1))
    files.save("c", {"one": np.zeros(1)})
    assert other.exists("c")


def test_what_came_within_the_tick_of_the_last_look_is_seen(store):
    files, other = store.files("cache"), store.files("cache")
    files.save("a", {"one": np.zeros(1)})
    folder = store.layout.catalog_folder("cache")
    assert other.exists("a")
    before = folder.stat().st_mtime_ns
    files.save("b", {"one": np.zeros(1)})
    os.utime(folder, ns=(before, before))
    assert other.exists("b")
