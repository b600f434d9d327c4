"""Files of a store against a dict, seen from two processes' sides."""

import json
import os
import pickle
import unicodedata
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cachestore as cs
from cachestore.care.collect import compact
from cachestore.core.errors import BadInput, CacheStoreError, CorruptEntry, MissingEntry, WriteFailed
from cachestore.store.format.line import list_line
from cachestore.store.read import reader as reading
from cachestore.store.write import append as appending
from cachestore.store.write import commit as committing
from cachestore.store.write import link as linking
from cachestore.store.write.files import Files
from cachestore.store.write.folding import make_table
from tests.fakes import asks_for
from tests.store.stores import flip

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


def test_metadata_may_have_any_name_and_gc_still_knows_whose_it_is(store):
    """The owner of a value was kept beside the user's own fields, under the name `owner`."""
    metadata = {"owner": "alice", "input_digest": "x", "own": {"owner": 1}}
    with store.files("own") as files, store.session("rows") as session, store.writer() as writer:
        files.save("a", {"x": np.ones(2, np.float32)}, metadata)
        files.save("gone", {"x": np.ones(3, np.float32)}, metadata)
        files.remove("gone")
        assert files.metadata("a") == metadata
        for one in (session, writer):
            one.put(cs.key(type(one).__name__), {"x": np.ones(4, np.float32)}, metadata)
        session.set("r", x=cs.key("Session"))
    assert [store.describe(cs.key(one)).meta for one in ("Session", "Writer")] == [metadata] * 2
    from tests.care.test_lines import collected

    collected(store, 2, keep=1)
    compact(store.layout.root)
    collected(store, 2, keep=1)
    assert (len(store), files.metadata("a")) == (3, metadata)
    assert {ref.origin.partition("/")[0] for ref in store.snapshot.segments()} <= {"", "merged", "session"}


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


def test_a_value_that_gc_removes_between_the_look_and_the_flush_is_saved_again(store, monkeypatch):
    from tests.care.test_lines import collected

    files = store.files("own")
    files.save("a", {"x": np.ones(3, np.float32)})
    files.remove("a")
    holds, left = Files._holds, []

    def collected_after_the_look(files, key):
        is_there = holds(files, key)
        if not left:
            with cs.open(store.layout.root, mode="a") as other:
                collected(other, 3, keep=1)
                left.append(len(other))
        return is_there

    monkeypatch.setattr(Files, "_holds", collected_after_the_look)
    files.save("a", {"x": np.ones(3, np.float32)})
    assert left == [0]
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


BAD = {
    "a tensor's name": ({"a/b": np.zeros(1, np.float32)}, None),
    "no name": ({"": np.zeros(1, np.float32)}, None),
    "a long name": ({"n" * 129: np.zeros(1, np.float32)}, None),
    "no tensor": ({"x": None}, None),
    "large metadata": ({"x": np.zeros(1, np.float32)}, {"a": "x" * 10_000_000}),
    "deep metadata": ({"x": np.zeros(1, np.float32)}, {"a": json.loads("[" * 800 + "]" * 800)}),
    "keys of two kinds": ({"x": np.zeros(1, np.float32)}, {5: 1, "a": 2}),
}


@pytest.mark.parametrize(("tensors", "metadata"), BAD.values(), ids=BAD)
def test_a_save_that_is_refused_leaves_nothing_for_the_next_calls(store, tensors, metadata):
    with store.files("own") as files:
        files.save("one", {"x": np.ones(1, np.float32)})
        with pytest.raises(BadInput) as refused:
            files.save("two", tensors, metadata)
        assert "two" in str(refused.value) or tensors["x"] is None or metadata
        files.save("three", {"x": np.full(1, 3, np.float32)})
        files.remove("one")
        assert files.glob() == ["three"]
    assert store.files("own").glob() == ["three"]


def test_a_change_that_the_disk_refused_is_not_made_by_a_later_one(store, monkeypatch):
    files = store.files("own")
    files.save("kept", {"x": np.ones(1, np.float32)})

    for value, module in enumerate((linking, appending)):
        with monkeypatch.context() as patch:
            patch.setattr(module, "publish", refuse_to_write)
            with pytest.raises(WriteFailed):
                files.save("lost", {"x": np.full(1, 7 + value, np.float32)})
            if module is linking:
                with pytest.raises(WriteFailed):
                    files.remove("kept")
    files.save("next", {"x": np.zeros(1, np.float32)})
    files.close()
    assert files.glob() == ["kept", "next"]


def test_threads_share_files(store):
    """Each saves, looks at and removes its own; none is refused for what another one does."""
    files = store.files("own")

    def work(thread):
        for number in range(6):
            path = f"{thread}/{number}"
            files.save(path, {"x": np.full(2, 10 * thread + number, np.float32)})
            assert files.exists(path)
            assert path in files.glob(f"{thread}/*")
            assert files.load(path)["x"][0].item() == 10 * thread + number
        files.remove(f"{thread}/0")

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
    assert files.glob() == sorted(f"{thread}/{number}" for thread in range(4) for number in range(1, 6))


def test_closed_files_can_be_read_and_not_changed(store):
    files = store.files("own")
    files.save("a", {"x": np.ones(2, np.float32)})
    files.close()
    files.close()
    assert files.load("a")["x"].tolist() == [1, 1]
    for change in (lambda: files.save("b", {"x": np.zeros(2)}), lambda: files.remove("a")):
        with pytest.raises(CacheStoreError):
            change()
    store.close()
    with pytest.raises(CacheStoreError):
        files.exists("a")


def test_files_travel_to_another_process_for_reading(store):
    files = store.files("own")
    files.save("a", {"x": np.ones(2, np.float32)}, {"n": 1})
    there = pickle.loads(pickle.dumps(files))
    assert (there.load("a")["x"].tolist(), there.metadata("a"), there.glob()) == ([1, 1], {"n": 1}, ["a"])
    files.save("b", {"x": np.zeros(2, np.float32)})
    assert there.load("b")["x"].tolist() == [0, 0]
    for change in (lambda: there.save("a", {"x": np.zeros(2)}), lambda: there.remove("a")):
        with pytest.raises(CacheStoreError):
            change()
    assert files.glob() == ["a", "b"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_reads_files_though_a_thread_was_using_them(store):
    files = store.files("own")
    files.save("a", {"x": np.ones(2, np.float32)})
    with files._lock, files._session.lock:
        child = os.fork()
        if child == 0:
            code = 2
            try:
                code = int(not (files.metadata("a") == {} and files.glob() == ["a"]))
                with suppress(CacheStoreError):
                    files.save("b", {"x": np.ones(2, np.float32)})
                    code = 3
            finally:
                os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("path", [5, None, b"bytes", ("a", "b"), ""])
def test_what_is_no_path_is_refused(store, path):
    files = store.files("own")
    for call in (files.exists, files.load, files.metadata, files.keys, files.remove, lambda path: files.save(path, {"x": np.zeros(1)})):
        with pytest.raises(BadInput, check=asks_for("path")):
            call(path)


def test_a_lost_value_is_named_by_its_file(store):
    files = store.files("own")
    files.save("cat", {"x": np.ones(2, np.float32)})
    for path in store.layout.segments.rglob("*.safetensors"):
        path.unlink()
    for call in (files.load, files.metadata, files.keys):
        with pytest.raises(MissingEntry, match="file 'cat'"):
            call("cat")
    assert files.exists("cat")
    files.save("cat", {"x": np.ones(2, np.float32)})
    assert files.load("cat")["x"].tolist() == [1, 1]


def test_a_save_lists_no_segment_and_reads_no_header(store, monkeypatch):
    """Each one took longer than the one before, as it took a new snapshot of the whole store."""
    files = store.files("own")
    files.save("first", {"x": np.zeros(2, np.float32)})

    def refused(*_arguments, **_options):
        raise AssertionError("a save takes a snapshot of the whole store")

    for module in (linking, reading):
        monkeypatch.setattr(module, "load_snapshot", refused)
    listed = []
    monkeypatch.setattr(linking, "list_line", lambda layout, name: listed.append(name) or list_line(layout, name))
    for number in range(5):
        files.save("a", {"x": np.full(2, number, np.float32)})
        assert files.load("a")["x"][0].item() == number
    assert len(listed) == 5


def test_files_that_are_saved_one_by_one_come_into_an_index(store, monkeypatch):
    monkeypatch.setattr(committing, "UNCOVERED_LIMIT", 4)
    files = store.files("own")
    for number in range(30):
        files.save(f"{number}", {"x": np.full(2, number, np.float32)})
    assert len(store.snapshot.uncovered) <= 5
    assert len(cs.open(store.layout.root).snapshot.uncovered) <= 5
    assert [files.load(f"{number}")["x"][0].item() for number in range(30)] == [*range(30)]
    monkeypatch.setattr(committing, "publish_file", refuse_to_write)
    for number in range(30, 40):
        files.save(f"{number}", {"x": np.full(2, number, np.float32)})
    assert [store.files("own").load(f"{number}")["x"][0].item() for number in range(40)] == [*range(40)]


def refuse_to_write(*_arguments, **_options):
    raise WriteFailed("the disk is full")


@pytest.mark.parametrize("same_session", [True, False])
def test_a_damaged_value_that_is_saved_again_can_be_loaded(store, same_session):
    files = store.files("own")
    files.save("cat", {"x": np.ones(2, np.float32)}, {"n": 1})
    [segment] = store.layout.segments.rglob("*.safetensors")
    flip(segment, segment.stat().st_size - 1)
    with pytest.raises(CorruptEntry):
        files.load("cat")
    again = files if same_session else cs.open(store.layout.root, mode="a").files("own")
    again.save("cat", {"x": np.ones(2, np.float32)}, {"n": 1})
    for one in (files, again, cs.open(store.layout.root).files("own")):
        assert (one.load("cat")["x"].tolist(), one.metadata("cat")) == ([1, 1], {"n": 1})


def test_a_look_that_was_interrupted_leaves_nothing_unread(store, monkeypatch):
    files, other = store.files("own"), store.files("own")
    files.save("a", {"x": np.ones(1, np.float32)})
    folder = store.layout.catalog_folder("own")
    assert other.exists("a")
    files.save("b", {"x": np.ones(1, np.float32)})
    os.utime(folder, ns=(0, 0))
    with monkeypatch.context() as patch:
        patch.setattr("cachestore.store.write.files.read_entry", refuse_to_write)
        with pytest.raises(WriteFailed):
            other.exists("b")
    assert other.exists("b")


def test_a_value_that_was_moved_while_it_was_looked_for_is_read(store, monkeypatch):
    files = store.files("own")
    files.save("a", {"x": np.ones(1, np.float32)}, {"n": 1})
    other = cs.open(store.layout.root)
    names, refused = other.files("own"), []
    own = other.describe

    def describe(key):
        if not refused:
            refused.append(key)
            raise MissingEntry("a collector moved it, and a day passed")
        return own(key)

    monkeypatch.setattr(other, "describe", describe)
    assert names.metadata("a") == {"n": 1}
