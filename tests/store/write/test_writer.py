"""A store that can be written: `cachestore.open`, writers and commits."""

import errno
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cachestore as cs
from cachestore.care.gc import mark
from cachestore.core.errors import BadInput, CacheStoreError, CorruptEntry, MissingEntry, NewerFormat, StoreNotFound, WriteFailed
from cachestore.files.marker import FORMAT
from cachestore.files.records import encode_record
from cachestore.store.read.snapshot import list_segments, visible_segments
from cachestore.store.write.append import SegmentLimits
from tests.fakes import asks_for, refusing
from tests.store.stores import flip

A, B, C = cs.key("a"), cs.key("b"), cs.key("c")


def array(n):
    return {"x": np.full((2, 3), n, np.float32)}


@pytest.fixture
def store(tmp_path):
    with cs.open(tmp_path / "store", mode="a") as store:
        yield store


def put(store, **entries):
    with store.writer() as writer:
        for name, n in entries.items():
            writer.put(cs.key(name), array(n), {"n": n})


def got(store, *keys):
    return [found["x"].flat[0] for found in store.get_many(keys, as_numpy=True)]


class TestOpening:
    def test_to_read_where_there_is_nothing_is_reported_and_makes_nothing(self, tmp_path):
        with pytest.raises(StoreNotFound):
            cs.open(tmp_path / "store")
        assert list(tmp_path.iterdir()) == []

    def test_to_append_makes_a_store_that_can_be_opened_again(self, tmp_path):
        with cs.open(tmp_path / "store", mode="a") as store:
            assert (len(store), list(store.keys()), store.get_many([])) == (0, [], [])
        with cs.open(str(tmp_path / "store")) as store:
            assert len(store) == 0

    def test_a_folder_that_holds_something_else_is_refused(self, tmp_path):
        (tmp_path / "photo.jpg").touch()
        with pytest.raises(BadInput):
            cs.open(tmp_path, mode="a")

    @pytest.mark.parametrize(
        "options", [{"mode": "w"}, {"mode": "a", "verify": "maybe"}, {"mode": "a", "io": "x"}, {"access": "public"}], ids=str
    )
    def test_an_option_that_is_not_known_is_refused(self, tmp_path, options):
        with pytest.raises(BadInput):
            cs.open(tmp_path / "store", **options)

    @pytest.mark.parametrize("mode", ["r", "a"])
    def test_a_newer_store_is_refused_and_left_alone(self, store, mode):
        newer = encode_record(FORMAT, 2, {"mode": "private"})
        store.layout.marker.write_bytes(newer)
        with pytest.raises(NewerFormat):
            cs.open(store.layout.root, mode=mode)
        assert store.layout.marker.read_bytes() == newer

    def test_a_group_may_write_a_store_that_was_made_for_it(self, tmp_path):
        with cs.open(tmp_path / "store", mode="a", access="group") as store:
            put(store, a=1)
        assert (tmp_path / "store").stat().st_mode & 0o7777 == 0o2775
        with cs.open(tmp_path / "store", mode="a") as again:
            put(again, b=2)
            assert all(path.stat().st_mode & 0o7777 == 0o2775 for path in (tmp_path / "store").rglob("*") if path.is_dir())

    @pytest.mark.parametrize(("made", "asked"), [("private", "group"), ("group", "private")])
    def test_a_store_keeps_who_may_write_it_and_another_access_is_refused(self, tmp_path, made, asked):
        with cs.open(tmp_path / "store", mode="a", access=made) as store:
            put(store, a=1)
        with pytest.raises(BadInput, check=asks_for("access")):
            cs.open(tmp_path / "store", mode="a", access=asked)
        for same in (made, None):
            with cs.open(tmp_path / "store", mode="a", access=same) as store:
                assert store.layout.mode.value == made
        with pytest.raises(BadInput, check=asks_for("access")):
            cs.open(tmp_path / "other", mode="a", access="all")  # pyright: ignore[reportArgumentType] - what callers without types pass

    def test_a_path_may_be_relative(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        with cs.open("store", mode="a") as store:
            monkeypatch.chdir("/")
            put(store, a=1)
            assert got(store, A) == [1]


class TestWriting:
    def test_a_writer_that_puts_nothing_makes_nothing(self, store):
        with store.writer():
            pass
        assert list_segments(store.layout) == frozenset()

    def test_what_was_put_is_readable_here_and_elsewhere_after_the_block(self, store):
        with cs.open(store.layout.root) as other:
            with store.writer() as writer:
                writer.put(A, array(1))
                assert A not in store
            assert got(store, A) == got(other, A) == [1]
            assert (len(store), list(store.keys())) == (1, [A])

    def test_entries_come_in_the_order_asked_for(self, store):
        put(store, a=1, b=2)
        put(store, c=3)
        assert got(store, C, A, B, C) == [3, 1, 2, 3]
        assert got(store, str(C), bytes(A)) == [3, 1]

    def test_an_exception_inside_forgets_what_is_pending(self, store):
        def interrupted():
            with store.writer() as writer:
                writer.put(A, array(1))
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            interrupted()
        assert A not in store
        assert list_segments(store.layout) == frozenset()

    def test_the_tensors_are_copied_when_they_are_put(self, store):
        values = np.ones(3, np.float32)
        with store.writer() as writer:
            writer.put(A, {"x": values})
            values[:] = 7
        assert got(store, A) == [1]

    def test_the_value_is_copied_when_it_is_put(self, store):
        meta: dict[str, Any] = {"note": "first", "list": [1]}
        with store.writer() as writer:
            writer.put(A, array(1), meta)
            meta["note"] = "second"
            meta["list"].append(2)
            writer.put(B, array(2), meta)
        assert store.describe(A).meta == {"note": "first", "list": [1]}
        assert store.describe(B).meta == {"note": "second", "list": [1, 2]}

    def test_an_entry_without_a_value_has_an_empty_one(self, store):
        with store.writer() as writer:
            writer.put(A, array(1))
        assert store.describe(A).meta == {}

    @pytest.mark.parametrize(
        ("key", "tensors", "meta"),
        [
            ("short", array(1), {}),
            (A, {"x": [1, 2]}, {}),
            (A, {"x": np.array(["text"])}, {}),
            (A, {"a/b": np.zeros(1)}, {}),
            (A, array(1), {"x": {1, 2}}),
        ],
        ids=["a key", "a list", "an array of texts", "a name", "a value"],
    )
    def test_what_cannot_be_stored_is_refused(self, store, key, tensors, meta):
        with store.writer() as writer:
            writer.put(B, array(2))
            with pytest.raises(BadInput):
                writer.put(key, tensors, meta)
        assert list(store.keys()) == [B]

    def test_a_key_that_is_put_again_keeps_both_copies_and_reads_one(self, store):
        put(store, a=1)
        put(store, a=1)
        put(store, a=2)
        assert len(store) == 1
        assert got(store, A)[0] in (1, 2)

    def test_a_refused_write_leaves_the_store_readable_and_writable(self, store, monkeypatch):
        put(store, a=1)
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", refusing(errno.ENOSPC))
            with pytest.raises(WriteFailed) as caught:
                put(store, b=2)
        assert caught.value.errno == errno.ENOSPC
        assert got(store, A) == [1]
        assert B not in store
        put(store, b=2)
        assert got(store, B) == [2]

    def test_a_store_opened_to_read_has_no_writer(self, store):
        with cs.open(store.layout.root) as reading:
            for call in (reading.writer, reading.commit):
                with pytest.raises(CacheStoreError, match='mode="a"'):
                    call()

    def test_a_damaged_entry_is_a_corrupt_entry(self, store):
        put(store, a=1)
        [digest] = list_segments(store.layout)
        path = store.layout.segment(digest)
        flip(path, path.stat().st_size - 1)
        with pytest.raises(CorruptEntry):
            store.get(A)


class TestReadingBack:
    def test_a_writer_reads_what_it_put_at_once_and_others_do_after_a_flush(self, store):
        put(store, c=3)
        with store.writer() as writer, cs.open(store.layout.root) as other:
            writer.put(A, {**array(1), "none": np.zeros((0, 2), np.int64)})
            assert (A in writer, B in writer, C in writer) == (True, False, True)
            assert writer.get(A, as_numpy=True)["none"].shape == (0, 2)
            assert [writer.get(key, as_numpy=True)["x"].flat[0] for key in (A, str(C))] == [1, 3]
            assert A not in store
            with pytest.raises(MissingEntry):
                other.get(A)
            writer.flush()
            assert got(other, A) == got(store, A) == [1]
            assert A in writer
            writer.put(B, array(2))
            writer.flush()
            writer.flush()
        assert len(list_segments(store.layout)) == 3

    def test_what_it_returns_is_the_callers_own(self, store):
        with store.writer() as writer:
            writer.put(A, array(1))
            writer.get(A, as_numpy=True)["x"][:] = 7
            assert writer.get(A, as_numpy=True)["x"].flat[0] == 1
        assert got(store, A) == [1]

    @settings(max_examples=25)
    @given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=12))
    def test_it_gives_the_bytes_that_were_put_whatever_is_written_meanwhile(self, tmp_path_factory, listed):
        values = [np.random.default_rng(number).integers(0, 255, 300 * number, np.uint8) for number in range(10)]
        with cs.open(tmp_path_factory.mktemp("own") / "s", mode="a") as store, store.writer() as writer:
            writer._appender.limits = SegmentLimits(entries=3)
            there = set()
            for number, asked in listed:
                writer.put(cs.key(str(number)), {"a": values[number], "b": values[number].astype(np.float32)})
                there.add(number)
                assert (cs.key(str(asked)) in writer) == (asked in there)
                if asked in there:
                    found = writer.get(cs.key(str(asked)), as_numpy=True)
                    assert np.array_equal(found["a"], values[asked])
                    assert np.array_equal(found["b"], values[asked].astype(np.float32))

    def test_a_key_in_a_segment_that_gc_will_remove_is_not_there_and_is_written_again(self, store):
        with store.session("own") as session:
            session.put(A, array(1))
        [digest] = list_segments(store.layout)
        mark(store.layout, [digest])
        with store.writer() as writer:
            assert A not in writer
            assert writer.get(A, as_numpy=True)["x"].flat[0] == 1
            writer.put(A, array(1))
            assert A in writer
        assert len(visible_segments(store.layout)) == 1
        store.layout.segment(digest).unlink()
        store.refresh()
        assert got(store, A) == [1]

    def test_after_its_block_a_writer_refuses_what_it_could_not_write(self, store):
        with store.writer() as writer:
            writer.put(A, array(1))
        for call in (writer.flush, lambda: writer.put(B, array(2))):
            with pytest.raises(CacheStoreError, match="ended"):
                call()
        assert writer.get(A, as_numpy=True)["x"].flat[0] == 1

    def test_a_refused_flush_keeps_what_was_put(self, store, monkeypatch):
        with store.writer() as writer:
            writer.put(A, array(1))
            with monkeypatch.context() as patch:
                patch.setattr(os, "write", refusing(errno.ENOSPC))
                with pytest.raises(WriteFailed):
                    writer.flush()
            assert writer.get(A, as_numpy=True)["x"].flat[0] == 1
            writer.flush()
            assert got(store, A) == [1]


class TestCommitting:
    def test_an_empty_store_needs_none(self, store):
        store.commit()
        assert store.generation == -1

    def test_it_makes_an_index_and_reading_goes_on(self, store):
        put(store, a=1)
        store.commit()
        assert (store.generation, got(store, A)) == (1, [1])
        store.commit()
        assert store.generation == 1
        put(store, b=2)
        store.commit()
        assert (store.generation, got(store, B, A), len(store)) == (2, [2, 1], 2)

    def test_others_see_it_when_they_look_again(self, store):
        with cs.open(store.layout.root) as other:
            put(store, a=1)
            store.commit()
            assert len(other) == 0
            other.refresh()
            assert (len(other), other.generation) == (1, 1)


class TestProcesses:
    def test_a_pickled_store_opens_for_reading(self, store):
        put(store, a=1)
        store.commit()
        with pickle.loads(pickle.dumps(store)) as again:
            assert (again.mode, got(again, A)) == ("r", [1])
            with pytest.raises(CacheStoreError, match='mode="a"'):
                again.writer()

    def test_a_forked_child_may_read_and_may_not_write(self, store):
        program = """
import os, signal, sys
import cachestore as cs
import numpy as np

store = cs.open(sys.argv[1], mode="a")
with store.writer() as writer:
    writer.put(cs.key("a"), {"x": np.ones(1)})
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        refused = 0
        for call in (store.writer, store.commit, lambda: writer.put(cs.key("b"), {}), lambda: writer.__exit__(None, None, None)):
            try:
                call()
            except cs.CacheStoreError:
                refused += 1
        os._exit(refused + 10 * len(store))
    said = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
print(said, len(store))
"""
        command = [sys.executable, "-c", program, str(store.layout.root)]
        finished = subprocess.run(command, capture_output=True, text=True, timeout=50, check=True)
        assert finished.stdout == "4 1\n"
        assert len(list_segments(store.layout)) == 1

    def test_writing_arrays_loads_no_torch(self, tmp_path):
        program = """
import sys
import cachestore as cs, numpy as np
with cs.open(sys.argv[1], mode="a") as store:
    with store.writer() as writer:
        writer.put(cs.key("a"), {"x": np.ones(3)})
    store.commit()
    print(store.get(cs.key("a"), as_numpy=True)["x"].tolist(), "torch" in sys.modules)
"""
        finished = subprocess.run(
            [sys.executable, "-c", program, str(tmp_path / "s")], capture_output=True, text=True, timeout=50, check=True
        )
        assert finished.stdout == "[1.0, 1.0, 1.0] False\n"


@pytest.mark.torch
class TestTensors:
    def test_tensors_come_back_and_are_the_callers_own(self, store):
        import torch

        value = torch.randn(2, 3)
        with store.writer() as writer:
            writer.put(A, {"x": value})
        found = store.get(A)["x"]
        assert torch.equal(found, value)
        found.zero_()
        assert torch.equal(store.get(A)["x"], value)

    def test_a_mapped_file_gives_tensors_too(self, store):
        import torch

        with store.writer() as writer:
            writer.put(A, {"x": torch.arange(5), "none": torch.empty(0)})
        with cs.open(store.layout.root, io="mmap") as mapped:
            found = mapped.get(A)
            assert torch.equal(found["x"], torch.arange(5))
            found["x"].zero_()
            assert torch.equal(mapped.get(A)["x"], torch.arange(5))

    def test_bfloat16_and_float8_come_as_numbers_in_numpy_with_their_dtype_in_describe(self, store):
        import torch

        half, byte = torch.tensor([1.0, -2.5]).bfloat16(), torch.tensor([0.5, 2.0]).to(torch.float8_e4m3fn)
        with store.writer() as writer:
            writer.put(A, {"half": half, "byte": byte})
        found = store.get(A, as_numpy=True)
        assert {name: each.dtype.name for name, each in found.items()} == {"half": "uint16", "byte": "uint8"}
        assert torch.equal(torch.from_numpy(found["half"].copy()).view(torch.bfloat16), half)
        assert torch.equal(torch.from_numpy(found["byte"].copy()), byte.view(torch.uint8))
        assert store.describe(A).tensors == {"half": ("BF16", (2,)), "byte": ("F8_E4M3", (2,))}


def test_the_segments_of_a_writer_open_in_the_stock_library(store):
    import safetensors

    put(store, a=1)
    [path] = Path(store.layout.segments).rglob("*.safetensors")
    with safetensors.safe_open(path, "np") as file:
        assert file.get_tensor(f"{A}/x").tolist() == [[1.0] * 3] * 2


def test_one_value_that_was_put_is_durable_and_readable_when_the_call_returns(tmp_path):
    with cs.open(tmp_path, mode="a") as store:
        store.put(cs.key("a"), {"x": np.arange(3)}, meta={"note": "mine"})
        assert store.get(cs.key("a"), as_numpy=True)["x"].tolist() == [0, 1, 2]
    with cs.open(tmp_path) as again:
        assert again.describe(cs.key("a")).meta["note"] == "mine"


def test_a_store_opened_for_reading_refuses_a_value(tmp_path):
    cs.open(tmp_path, mode="a").close()
    with cs.open(tmp_path) as store, pytest.raises(cs.CacheStoreError, match="open for reading"):
        store.put(cs.key("a"), {"x": np.arange(3)})


def test_leaving_a_writer_reads_no_header_of_what_it_published(tmp_path, monkeypatch):
    with cs.open(tmp_path / "store", mode="a") as store:
        with monkeypatch.context() as patch:
            patch.setattr("cachestore.store.read.snapshot.read_contents", None)
            with store.writer() as writer:
                writer.put(cs.key("a"), {"x": np.arange(3)})
            assert store.get(cs.key("a"), as_numpy=True)["x"].tolist() == [0, 1, 2]
            described = store.describe(cs.key("a"))
        store.refresh()
        assert store.describe(cs.key("a")) == described
