"""Appending: gathered, closed by its limits, acknowledged once durable, by one process."""

import errno
import os
import subprocess
import sys
import threading
import time
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachestore.care.verify import verify
from cachestore.core.errors import BadInput, CacheStoreError, FormatError, WriteFailed
from cachestore.core.keys import key
from cachestore.files.container import ALIGNMENT
from cachestore.files.opening import names_in
from cachestore.store.format.entry import split
from cachestore.store.format.segment import ENTRY_LIMIT, read_contents
from cachestore.store.read.fetch import Checked, Fetcher
from cachestore.store.read.snapshot import list_segments, load_snapshot
from cachestore.store.write import append as appending
from cachestore.store.write.append import HEADER_BYTES, Appender, SegmentLimits, publish_segment
from cachestore.store.write.commit import create_store
from tests.fakes import refusing
from tests.store.stores import entry_of, flip, key_of, plain, read, tensors_of


@pytest.fixture
def appender(layout):
    return Appender(layout)


def put(appender, n, size=None):
    tensors = tensors_of(n) if size is None else {"x": ("U8", (size,), bytes(size))}
    return appender.put(key_of(n), tensors, {"n": n})


def keys_in(acknowledged):
    return [set(each.locations) for each in acknowledged]


def test_nothing_pending_makes_no_segment(layout, appender):
    assert appender.close_segment() == []
    assert not appender.is_due
    assert list_segments(layout) == frozenset()


def test_a_terabyte_of_zeros_under_a_segments_name_is_not_read(layout, monkeypatch):
    first = publish_segment(layout, [entry_of(1)], origin="")
    layout.segment(first.digest).chmod(0o644)
    os.truncate(layout.segment(first.digest), 1 << 40)
    monkeypatch.setattr(appending, "digest_file", None)
    second = publish_segment(layout, [entry_of(1)], origin="")
    assert second.digest != first.digest
    assert second.contents.size_bytes < 1 << 20


def test_a_pending_entry_is_not_there_until_its_segment_is_closed(layout, appender):
    assert put(appender, 1) == []
    assert list_segments(layout) == frozenset()
    [acknowledged] = appender.close_segment()
    assert list_segments(layout) == {acknowledged.digest}
    assert read(layout, 1) == tensors_of(1)
    assert appender.close_segment() == []


def test_what_is_acknowledged_says_where_it_stands(layout):
    appender = Appender(layout, origin="p/0")
    put(appender, 1)
    put(appender, 2)
    [acknowledged] = appender.close_segment()
    assert acknowledged.contents == read_contents(layout.segment(acknowledged.digest))
    assert acknowledged.contents.origin == "p/0"
    with closing(load_snapshot(layout)) as snapshot:
        assert snapshot.find(list(acknowledged.locations)) == [[location] for location in acknowledged.locations.values()]
    assert all(location.offset % ALIGNMENT == 0 for location in acknowledged.locations.values())


def test_a_segment_is_closed_at_its_number_of_entries(layout):
    appender = Appender(layout, limits=SegmentLimits(entries=2))
    closed = [put(appender, n) for n in range(5)]
    assert [keys_in(each) for each in closed] == [[], [{key_of(0), key_of(1)}], [], [{key_of(2), key_of(3)}], []]
    assert keys_in(appender.close_segment()) == [{key_of(4)}]


def test_a_segment_is_closed_before_it_would_grow_above_its_size(layout):
    appender = Appender(layout, limits=SegmentLimits(size_bytes=100))
    assert put(appender, 0, 60) == []
    assert keys_in(put(appender, 1, 60)) == [{key_of(0)}]
    assert keys_in(put(appender, 2, 40)) == [{key_of(1), key_of(2)}]
    assert appender.close_segment() == []


def test_a_larger_entry_gets_a_segment_of_its_own(layout):
    appender = Appender(layout, limits=SegmentLimits(size_bytes=100))
    put(appender, 0, 10)
    assert keys_in(put(appender, 1, 500)) == [{key_of(0)}, {key_of(1)}]


def test_a_segment_is_closed_before_its_header_would_grow_above_its_limit(layout):
    appender = Appender(layout, limits=SegmentLimits(header_bytes=2000))
    closed = [keys_in(appender.put(key_of(n), {}, {"note": "x" * 1000})) for n in range(3)]
    assert closed == [[], [{key_of(0)}], [{key_of(1)}]]


@pytest.mark.parametrize("text", ['"', "\\", "\x01", "猫", "\udcff", "x"])
def test_an_entry_whose_value_is_as_large_as_it_may_be_is_stored(layout, text):
    appender = Appender(layout)
    size = len(text.encode("utf-8", "surrogatepass"))
    size = {'"': 2, "\\": 2, "\x01": 6}.get(text, size)
    meta = {"x": text * ((HEADER_BYTES - 400) // size)}
    appender.put(key_of(1), {}, meta)
    [acknowledged] = appender.close_segment()
    assert read_contents(layout.segment(acknowledged.digest)).entries.metas == (meta,)


@pytest.mark.parametrize(
    ("tensors", "meta"),
    [
        ({}, {"x": "y" * HEADER_BYTES}),
        ({str(n): ("U8", (0,), b"") for n in range(30_000)}, {}),
        ({"x": ("U8", (1,) * 17, b"1")}, {}),
        ({"x": ("U8", (2,), b"1")}, {}),
        ({}, {"x": float("inf")}),
    ],
    ids=["a large value", "many tensors", "many dimensions", "too few bytes", "no JSON"],
)
def test_an_entry_that_cannot_be_stored_is_refused_and_spoils_no_other(layout, appender, tensors, meta):
    put(appender, 1)
    with pytest.raises(BadInput):
        appender.put(key_of(2), tensors, meta)
    assert keys_in(appender.close_segment()) == [{key_of(1)}]


def test_a_segment_is_due_when_its_first_entry_has_waited(layout):
    now = 1000.0
    appender = Appender(layout, clock=lambda: now)
    now = 2000.0
    put(appender, 1)
    now = 2059.0
    put(appender, 2)
    assert not appender.is_due
    now = 2060.0
    assert appender.is_due
    appender.close_segment()
    assert not appender.is_due
    put(appender, 3)
    assert not appender.is_due


def test_a_key_that_is_pending_already_is_kept_as_it_is(layout, appender):
    appender.put(key_of(1), tensors_of(1), {})
    assert appender.put(key_of(1), tensors_of(1, variant=9), {}) == []
    appender.close_segment()
    assert read(layout, 1) == tensors_of(1)


def test_what_is_discarded_is_forgotten(layout, appender):
    put(appender, 1)
    appender.discard()
    assert appender.close_segment() == []
    put(appender, 2)
    assert keys_in(appender.close_segment()) == [{key_of(2)}]


@given(sizes=st.lists(st.integers(0, 150), max_size=12), entries=st.integers(1, 4), size_bytes=st.integers(1, 200))
def test_every_entry_is_acknowledged_once_and_no_segment_is_above_its_limits(sizes, entries, size_bytes, tmp_path_factory):
    layout = create_store(tmp_path_factory.mktemp("store"))
    appender = Appender(layout, limits=SegmentLimits(entries=entries, size_bytes=size_bytes))
    closed = [each for n, size in enumerate(sizes) for each in put(appender, n, size)] + appender.close_segment()
    assert sorted(key for each in closed for key in each.locations) == sorted(key_of(n) for n in range(len(sizes)))
    for each in closed:
        assert len(each.locations) <= entries
        assert len(each.locations) == 1 or sum(location.size_bytes for location in each.locations.values()) <= size_bytes


def test_the_limits_keep_a_segment_below_the_caps_of_readers(layout):
    limits = SegmentLimits()
    assert (limits.entries, limits.size_bytes, limits.age_seconds) == (ENTRY_LIMIT, 64 << 20, 60)


class TestRefusedWrites:
    @pytest.fixture
    def full(self, monkeypatch):
        """A disk that is full until it is called."""
        real = os.write
        monkeypatch.setattr(os, "write", refusing(errno.ENOSPC))
        return lambda: monkeypatch.setattr(os, "write", real)

    def test_the_entries_stay_pending_and_are_published_when_there_is_room(self, layout, appender, full):
        put(appender, 1)
        with pytest.raises(WriteFailed):
            appender.close_segment()
        assert list_segments(layout) == frozenset()
        full()
        assert keys_in(appender.close_segment()) == [{key_of(1)}]

    def test_an_entry_that_was_put_in_vain_may_be_put_again(self, layout, full):
        appender = Appender(layout, limits=SegmentLimits(entries=1))
        with pytest.raises(WriteFailed):
            put(appender, 1)
        with pytest.raises(WriteFailed):
            put(appender, 2)
        full()
        acknowledged = put(appender, 1) + put(appender, 2) + appender.close_segment()
        assert {k for each in acknowledged for k in each.locations} == {key_of(1), key_of(2)}
        assert verify(layout.root).entries == 2
        assert names_in(layout.temporary) == []


class TestBesideTheCaller:
    """`with appender`: full segments are written by threads while the next one is filled."""

    def test_a_full_segment_is_written_while_the_next_one_is_filled(self, layout, monkeypatch):
        goes_on = hold_back(monkeypatch)
        with Appender(layout, limits=SegmentLimits(entries=1)) as appender:
            assert put(appender, 0) == put(appender, 1) == []
            assert list_segments(layout) == frozenset()
            goes_on.set()
            assert keys_in(appender.close_segment()) == [{key_of(0)}, {key_of(1)}]

    def test_no_third_segment_is_begun_while_two_are_written(self, layout, monkeypatch):
        goes_on, begun = hold_back(monkeypatch), []
        real = appending.write_segment
        monkeypatch.setattr(appending, "write_segment", lambda *given, **named: (begun.append(1), real(*given, **named))[1])
        with Appender(layout, limits=SegmentLimits(entries=1)) as appender, ThreadPoolExecutor(1) as other:
            put(appender, 0)
            put(appender, 1)
            third = other.submit(put, appender, 2)
            with pytest.raises(futures.TimeoutError):  # before 3.11 it is not the built-in one
                third.result(timeout=0.2)
            assert len(begun) == 2
            goes_on.set()
            acknowledged = third.result(timeout=20) + appender.close_segment()
        assert keys_in(acknowledged) == [{key_of(n)} for n in range(3)]

    def test_segments_are_acknowledged_in_the_order_in_which_they_were_filled(self, layout, monkeypatch):
        first_is_held, real = threading.Event(), appending.write_segment

        def write(layout, draft, *, origin):
            if draft.build().contents.entries.keys[0] == key_of(0):
                assert first_is_held.wait(20)
            return real(layout, draft, origin=origin)

        monkeypatch.setattr(appending, "write_segment", write)
        with Appender(layout, limits=SegmentLimits(entries=1)) as appender:
            put(appender, 0)
            put(appender, 1)
            while not list_segments(layout):
                time.sleep(0.001)
            assert put(appender, 0) == []  # the second is durable, and waits for the first
            first_is_held.set()
            assert keys_in(appender.close_segment()) == [{key_of(0)}, {key_of(1)}]

    def test_a_segment_that_could_not_be_written_is_written_again_by_the_next_call(self, layout, monkeypatch):
        with Appender(layout, limits=SegmentLimits(entries=1)) as appender:
            with monkeypatch.context() as patch:
                patch.setattr(os, "write", refusing(errno.ENOSPC))
                with pytest.raises(WriteFailed):
                    [put(appender, n) for n in range(4)]
            acknowledged = [each for n in range(4) for each in put(appender, n)] + appender.close_segment()
        assert {key for each in acknowledged for key in each.keys} == {key_of(n) for n in range(4)}
        assert verify(layout.root).ok

    def test_its_threads_end_with_the_block(self, layout):
        with Appender(layout, limits=SegmentLimits(entries=1)) as appender:
            put(appender, 0)
            put(appender, 1)
            assert any(thread.name.startswith("cachestore-write") for thread in threading.enumerate())
        assert not any(thread.name.startswith("cachestore-write") for thread in threading.enumerate())

    def test_a_single_segment_needs_no_thread(self, layout):
        with Appender(layout) as appender:
            put(appender, 0)
            appender.close_segment()
            assert not any(thread.name.startswith("cachestore-write") for thread in threading.enumerate())


def hold_back(monkeypatch):
    """Segments are written once this event is set."""
    goes_on, real = threading.Event(), appending.write_segment

    def write(*given, **named):
        assert goes_on.wait(20)
        return real(*given, **named)

    monkeypatch.setattr(appending, "write_segment", write)
    return goes_on


def test_what_was_put_may_be_changed_afterwards(layout, appender):
    buffer, meta = bytearray(b"first"), {"list": [1]}
    appender.put(key_of(1), {"x": ("U8", (5,), buffer)}, meta)
    buffer[:] = b"other"
    meta["list"].append(2)
    [acknowledged] = appender.close_segment()
    assert plain(read(layout, 1)) == {"x": ("U8", (5,), b"first")}
    assert acknowledged.contents.entries.metas == ({"list": [1]},)


def test_memory_that_a_segment_used_leaves_nothing_in_the_next_one(layout):
    appender = Appender(layout)
    appender.put(key_of(1), {"x": ("U8", (999,), b"x" * 999)}, {})
    appender.close_segment()
    appender.put(key_of(2), {"x": ("U8", (1,), b"y")}, {})
    appender.put(key_of(3), {"x": ("U8", (1,), b"z")}, {})
    [acknowledged] = appender.close_segment()
    assert b"xx" not in layout.segment(acknowledged.digest).read_bytes()


class TestTakenNames:
    def test_an_equal_segment_is_acknowledged_as_it_is(self, layout):
        first = publish_segment(layout, [entry_of(1)], origin="")
        assert publish_segment(layout, [entry_of(1)], origin="") == first

    @pytest.mark.parametrize(
        "spoil", [lambda path: flip(path, path.stat().st_size - 1), lambda path: (path.unlink(), path.mkdir())], ids=["flip", "folder"]
    )
    def test_beside_a_damaged_segment_of_the_same_name_another_one_is_published(self, layout, appender, spoil):
        for expected in (1, 2, 3):
            put(appender, 1)
            [acknowledged] = appender.close_segment()
            location = acknowledged.locations[key_of(1)]
            with closing(Fetcher(layout, Checked([]))) as fetcher:
                assert plain(split(location.specs, fetcher.fetch(key_of(1), location))) == tensors_of(1)
            assert len(list_segments(layout)) == expected
            spoil(layout.segment(acknowledged.digest))

    def test_what_cannot_be_parsed_back_is_not_published(self, layout):
        with pytest.raises(FormatError):
            publish_segment(layout, [entry_of(1), entry_of(1)], origin="")
        assert list_segments(layout) == frozenset()


FORKED = """
import os, signal, sys
from pathlib import Path
from cachestore.core.errors import CacheStoreError
from cachestore.store.write.append import Appender
from cachestore.store.write.commit import create_store
from tests.store.stores import key_of, tensors_of

appender = Appender(create_store(Path(sys.argv[1])))
appender.put(key_of(1), tensors_of(1), {})
child = os.fork()
if child == 0:
    signal.alarm(20)
    refused = 0
    for call in (lambda: appender.put(key_of(2), tensors_of(2), {}), appender.close_segment):
        try:
            call()
        except CacheStoreError:
            refused += 1
    os._exit(refused)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), len(appender.close_segment()))
"""


def test_a_forked_child_cannot_write_and_its_parent_goes_on(layout):
    command = [sys.executable, "-c", FORKED, str(layout.root)]
    finished = subprocess.run(
        command, capture_output=True, text=True, timeout=50, check=True, env=os.environ | {"PYTHONPATH": str(Path.cwd())}
    )
    assert finished.stdout == "2 1\n"
    assert verify(layout.root).entries == 1


def test_a_process_with_another_number_is_refused(appender, monkeypatch):
    monkeypatch.setattr(os, "getpid", lambda: -1)
    with pytest.raises(CacheStoreError, match="belongs to the process"):
        put(appender, 1)


def test_an_entry_without_tensors_is_stored(layout, appender):
    appender.put(key("a"), {}, {"only": "a note"})
    [acknowledged] = appender.close_segment()
    assert read_contents(layout.segment(acknowledged.digest)).entries.metas == ({"only": "a note"},)
