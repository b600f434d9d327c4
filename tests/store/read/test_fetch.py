"""Fetching: the bytes that were stored for this key, or an error."""

import errno
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cachestore as cs
from cachestore.core.errors import CorruptEntry, FormatError, ReadFailed
from cachestore.store.format.entry import Specs, make_entry, split
from cachestore.store.format.locations import Located, Location, SegmentRef
from cachestore.store.read import fetch as fetching
from cachestore.store.read.fetch import Checked, Fetcher, is_gone
from cachestore.store.read.snapshot import load_snapshot
from cachestore.store.write.append import publish_segment
from cachestore.store.write.commit import create_store
from tests.fakes import examples, refusing, tells_of
from tests.leaks import held
from tests.store.stores import damage, flip, key_of, location_of, plain, put, tensors_of

LIMIT_SECONDS = 30

BOTH = pytest.mark.parametrize("io", ["pread", "mmap"])


@pytest.fixture
def fetcher(layout):
    """Makes a fetcher over what is in the store now; all are closed at the end."""
    made = []

    def make(**options):
        with closing(load_snapshot(layout)) as snapshot:
            made.append(Fetcher(layout, Checked(snapshot.segments()), **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


@BOTH
@pytest.mark.parametrize("verify", ["first", "always", "never"])
def test_the_bytes_are_those_that_were_stored(layout, fetcher, io, verify):
    put(layout, 1, 2, 3)
    reading = fetcher(io=io, verify=verify)
    for n in (3, 1, 2, 1):
        location = location_of(layout, n)
        assert plain(split(location.specs, reading.fetch(key_of(n), location))) == tensors_of(n)


@BOTH
def test_an_entry_without_bytes_is_fetched(layout, fetcher, io):
    publish_segment(layout, [make_entry(key_of(1), {}, {}), make_entry(key_of(2), {"x": ("F32", (0,), b"")}, {})], origin="")
    reading = fetcher(io=io)
    assert [len(reading.fetch(key_of(n), location_of(layout, n))) for n in (1, 2)] == [0, 0]


def test_pread_gives_fresh_bytes_of_the_callers_own_and_mmap_a_view_that_cannot_be_written_and_outlives_the_fetcher(layout, fetcher):
    put(layout, 1)
    reading, location = fetcher(), location_of(layout, 1)
    first = reading.fetch(key_of(1), location)
    first[:] = bytes(len(first))
    assert plain(split(location.specs, reading.fetch(key_of(1), location))) == tensors_of(1)
    assert fetcher(io="mmap").fetch(key_of(1), location_of(layout, 1)).readonly
    reading, location = fetcher(io="mmap"), location_of(layout, 1)
    view = reading.fetch(key_of(1), location)
    reading.close()
    assert plain(split(location.specs, view)) == tensors_of(1)


@BOTH
@pytest.mark.parametrize("verify", ["first", "always"])
def test_a_damaged_entry_is_a_corrupt_entry_that_names_key_file_and_way_out(layout, fetcher, io, verify):
    digest = put(layout, 1)
    damage(layout, 1)
    with pytest.raises(CorruptEntry, check=tells_of(key_of(1), digest, "cachestore repair")):
        fetcher(io=io, verify=verify).fetch(key_of(1), location_of(layout, 1))


def test_what_to_run_can_be_pasted_also_for_a_store_with_a_space_in_its_path(tmp_path):
    layout = create_store(tmp_path / "my store")
    put(layout, 1)
    damage(layout, 1)
    with closing(load_snapshot(layout)) as snapshot:
        reading = Fetcher(layout, Checked(snapshot.segments()))
    with closing(reading), pytest.raises(CorruptEntry, check=tells_of(f"`cachestore repair '{layout.root}' --refill`")):
        reading.fetch(key_of(1), location_of(layout, 1))


def test_damage_after_the_first_look_is_seen_by_always_and_not_looked_for_by_first(layout, fetcher):
    digest = put(layout, 1)
    location = location_of(layout, 1)
    first, always = fetcher(verify="first"), fetcher(verify="always")
    for reading in (first, always):
        reading.fetch(key_of(1), location)
    flip(layout.segment(digest), location.offset)
    assert first.fetch(key_of(1), location)
    with pytest.raises(CorruptEntry):
        always.fetch(key_of(1), location)


def test_never_does_not_look(layout, fetcher):
    put(layout, 1)
    damage(layout, 1)
    assert fetcher(verify="never").fetch(key_of(1), location_of(layout, 1))


def test_a_damaged_entry_is_never_remembered_as_good(layout, fetcher):
    digest = put(layout, 1)
    location, reading = location_of(layout, 1), fetcher()
    flip(layout.segment(digest), location.offset)
    for _time in range(2):
        with pytest.raises(CorruptEntry):
            reading.fetch(key_of(1), location)
    flip(layout.segment(digest), location.offset)
    assert reading.fetch(key_of(1), location)


def test_right_bytes_under_another_key_are_a_corrupt_entry(layout, fetcher):
    put(layout, 1)
    with pytest.raises(CorruptEntry):
        fetcher().fetch(key_of(2), location_of(layout, 1))


@pytest.mark.parametrize("verify", ["first", "always", "never"])
def test_a_segment_cut_under_an_open_reader_is_a_corrupt_entry(layout, fetcher, verify):
    digest = put(layout, 1, 2)
    location, reading = location_of(layout, 2), fetcher(verify=verify)
    reading.fetch(key_of(1), location_of(layout, 1))
    path = layout.segment(digest)
    path.chmod(0o644)
    os.truncate(path, location.offset + 1)
    with pytest.raises(CorruptEntry):
        reading.fetch(key_of(2), location)


@BOTH
@pytest.mark.parametrize("verify", ["first", "never"])
@pytest.mark.parametrize("change", [-1, 1])
def test_a_segment_of_another_size_is_a_corrupt_entry(layout, fetcher, io, verify, change):
    digest = put(layout, 1)
    location = location_of(layout, 1)
    path = layout.segment(digest)
    path.chmod(0o644)
    os.truncate(path, path.stat().st_size + change)
    before = held()
    with pytest.raises(CorruptEntry):
        fetcher(io=io, verify=verify).fetch(key_of(1), location)
    assert not held() - before


def test_a_segment_replaced_by_a_link_is_refused(layout, fetcher, tmp_path):
    path = layout.segment(put(layout, 1))
    location = location_of(layout, 1)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FormatError):
        fetcher().fetch(key_of(1), location)


def test_a_segment_that_is_gone_is_a_file_not_found(layout, fetcher):
    path = layout.segment(put(layout, 1))
    location = location_of(layout, 1)
    path.unlink()
    with pytest.raises(FileNotFoundError) as caught:
        fetcher().fetch(key_of(1), location)
    assert is_gone(caught.value)


@pytest.mark.parametrize(
    ("error", "gone"),
    [
        (FileNotFoundError(errno.ENOENT, ""), True),
        (OSError(errno.ESTALE, ""), True),
        (CorruptEntry(""), True),
        (FormatError(""), True),
        (OSError(errno.EIO, ""), False),
        (PermissionError(errno.EACCES, ""), False),
    ],
    ids=repr,
)
def test_an_error_that_a_newer_snapshot_may_help_with_is_told_apart(error, gone):
    assert is_gone(error) is gone


@BOTH
def test_more_segments_than_the_limit_are_read_with_few_descriptors(layout, fetcher, monkeypatch, io):
    monkeypatch.setattr(fetching, "descriptor_limit", lambda: 12)
    for n in range(10):
        put(layout, n)
    locations = {n: location_of(layout, n) for n in range(10)}
    reading, before = fetcher(io=io), held()
    for n in [*range(10), *range(10)]:
        assert plain(split(locations[n].specs, reading.fetch(key_of(n), locations[n]))) == tensors_of(n)
        assert len(held() - before) <= (3 if io == "pread" else 6)
    reading.close()
    reading.close()
    assert not held() - before


def test_the_segment_used_longest_ago_is_closed_first(layout, fetcher, monkeypatch):
    monkeypatch.setattr(fetching, "descriptor_limit", lambda: 8)
    for n in range(3):
        put(layout, n)
    locations, reading, opened = {n: location_of(layout, n) for n in range(3)}, fetcher(), []
    real = fetching.open_regular
    monkeypatch.setattr(fetching, "open_regular", lambda path: opened.append(path) or real(path))
    for n in (0, 1, 0, 2, 0, 1):
        reading.fetch(key_of(n), locations[n])
    paths = {layout.segment(locations[n].segment.digest): n for n in range(3)}
    assert [paths[path] for path in opened] == [0, 1, 2, 1]


def test_no_segment_is_closed_while_there_is_room(layout, fetcher, monkeypatch):
    monkeypatch.setattr(fetching, "descriptor_limit", lambda: 16)
    for n in range(4):
        put(layout, n)
    locations, reading, opened = {n: location_of(layout, n) for n in range(4)}, fetcher(), []
    real = fetching.open_regular
    monkeypatch.setattr(fetching, "open_regular", lambda path: opened.append(path) or real(path))
    for n in (0, 1, 2, 3, 0, 1, 2, 3):
        reading.fetch(key_of(n), locations[n])
    assert len(opened) == 4


def test_a_segment_that_is_let_go_of_while_it_is_read_is_read_to_the_end(layout, fetcher, monkeypatch):
    """Another thread may need the room in the middle of a read; the descriptor must not become another file's meanwhile."""
    monkeypatch.setattr(fetching, "descriptor_limit", lambda: 4)
    put(layout, 1)
    put(layout, 2)
    locations, reading, real = {n: location_of(layout, n) for n in (1, 2)}, fetcher(verify="never"), fetching.read_scattered

    def while_another_thread_fetches(descriptor, buffers, offset):
        monkeypatch.setattr(fetching, "read_scattered", real)
        reading.fetch(key_of(2), locations[2])
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(fetching, "read_scattered", while_another_thread_fetches)
    assert plain(split(locations[1].specs, reading.fetch(key_of(1), locations[1]))) == tensors_of(1)


def test_threads_that_share_a_fetcher_read_what_was_stored(layout, fetcher, monkeypatch):
    monkeypatch.setattr(fetching, "descriptor_limit", lambda: 8)
    for n in range(12):
        put(layout, n)
    locations, reading = {n: location_of(layout, n) for n in range(12)}, fetcher(verify="never")

    def read_all(start):
        order = [(start + step) % 12 for step in range(240)]
        return all(plain(split(locations[n].specs, reading.fetch(key_of(n), locations[n]))) == tensors_of(n) for n in order)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # so that threads meet in every line
    try:
        with ThreadPoolExecutor(4) as threads:
            assert all(threads.map(read_all, (0, 3, 6, 9)))
    finally:
        sys.setswitchinterval(interval)


def test_even_one_descriptor_is_enough(layout, fetcher, monkeypatch):
    monkeypatch.setattr(fetching, "descriptor_limit", lambda: 1)
    put(layout, 1)
    put(layout, 2)
    reading = fetcher()
    for n in (1, 2, 1):
        assert plain(split(location_of(layout, n).specs, reading.fetch(key_of(n), location_of(layout, n)))) == tensors_of(n)


class TestFetchingInto:
    ASKED = (3,)
    """How many of three reads are asked for."""

    def wanted(self, layout, *numbers):
        located = Located.of([location_of(layout, n) for n in numbers])
        targets = [[memoryview(bytearray(spec.size_bytes)) for spec in specs] for specs in located.specs]
        return [key_of(n) for n in numbers], located, targets

    def read(self, wanted):
        _keys, located, targets = wanted
        return [
            {spec.name: (spec.dtype, spec.shape, bytes(target)) for spec, target in zip(specs, each, strict=True)}
            for specs, each in zip(located.specs, targets, strict=True)
        ]

    @BOTH
    @pytest.mark.parametrize("verify", ["first", "always", "never"])
    @pytest.mark.parametrize("present", [True, False], ids=["in memory", "cannot tell"])
    def test_the_bytes_are_those_that_were_stored(self, layout, fetcher, io, verify, present, monkeypatch):
        put(layout, *range(5))
        put(layout, 7, 8)
        if not present:
            monkeypatch.setattr(fetching, "read_present", lambda *_arguments: None)
        reading = fetcher(io=io, verify=verify)
        reading.fetch_into(*self.wanted(layout))
        numbers = [8, 3, 0, 1, 4, 7, 1]
        for _time in range(2):
            wanted = self.wanted(layout, *numbers)
            reading.fetch_into(*wanted)
            assert self.read(wanted) == [tensors_of(n) for n in numbers]

    @BOTH
    def test_entries_without_bytes_are_fetched(self, layout, fetcher, io):
        publish_segment(layout, [make_entry(key_of(1), {}, {}), make_entry(key_of(2), {"x": ("F32", (0,), b"")}, {})], origin="")
        fetcher(io=io).fetch_into(*self.wanted(layout, 1, 2))

    def test_neighbours_are_read_at_once_and_others_for_themselves(self, layout, fetcher, monkeypatch):
        put(layout, *range(6))
        order = sorted(range(6), key=lambda n: location_of(layout, n).offset)
        calls = []
        real = fetching.read_scattered  # a file system in memory cannot tell what is present
        monkeypatch.setattr(fetching, "read_present", lambda *given: calls.append(given) or real(*given))
        wanted = self.wanted(layout, *(order[n] for n in (5, 0, 1, 2, 4)))
        fetcher().fetch_into(*wanted)
        assert len(calls) == 2
        assert self.read(wanted) == [tensors_of(order[n]) for n in (5, 0, 1, 2, 4)]

    def test_many_bytes_are_not_read_at_once(self, layout, fetcher, monkeypatch):
        monkeypatch.setattr(fetching, "_READ_BYTES", 200)
        put(layout, *range(6))
        calls = []
        real = fetching.read_scattered  # a file system in memory cannot tell what is present
        monkeypatch.setattr(fetching, "read_present", lambda *given: calls.append(given) or real(*given))
        wanted = self.wanted(layout, *range(6))
        fetcher().fetch_into(*wanted)
        assert len(calls) == 2
        assert self.read(wanted) == [tensors_of(n) for n in range(6)]

    @pytest.mark.parametrize("count", [0, 3])
    def test_what_is_not_in_memory_is_asked_for_once_before_it_is_waited_for(self, layout, fetcher, monkeypatch, count):
        for n in range(3):
            put(layout, n)
        asked = []
        monkeypatch.setattr(fetching, "read_present", lambda *_arguments: count)
        monkeypatch.setattr(fetching, "ask_for", lambda *span: asked.append(span))
        wanted = self.wanted(layout, 0, 1, 2)
        fetcher().fetch_into(*wanted)
        assert len(asked) == len(set(asked))
        assert len(asked) in self.ASKED
        assert self.read(wanted) == [tensors_of(n) for n in range(3)]

    @BOTH
    def test_prefetching_names_what_stands_together_once(self, layout, fetcher, monkeypatch, io):
        put(layout, 1, 2)
        put(layout, 3)
        asked = []
        for name in ("ask_for", "ask_for_mapped"):
            monkeypatch.setattr(fetching, name, lambda *span: asked.append(span[1:]))
        locations = [location_of(layout, n) for n in (1, 2, 3)]
        fetcher(io=io).prefetch(locations)
        low = min(locations[0].offset, locations[1].offset)
        assert sorted(asked) == sorted([(low, max(locations[0].offset, locations[1].offset) + 11 - low), (locations[2].offset, 11)])

    @BOTH
    @pytest.mark.parametrize("verify", ["first", "always"])
    def test_a_damaged_entry_is_a_corrupt_entry_that_names_it(self, layout, fetcher, io, verify):
        digest = put(layout, 1, 2, 3)
        flip(layout.segment(digest), location_of(layout, 2).offset)
        with pytest.raises(CorruptEntry, check=tells_of(key_of(2), digest, "cachestore repair")):
            fetcher(io=io, verify=verify).fetch_into(*self.wanted(layout, 1, 2, 3))

    @pytest.mark.parametrize("verify", ["first", "always", "never"])
    def test_a_segment_cut_under_an_open_reader_is_a_corrupt_entry(self, layout, fetcher, verify):
        digest = put(layout, 1, 2)
        wanted, reading = self.wanted(layout, 1, 2), fetcher(verify=verify)
        reading.fetch_into(*wanted)
        path = layout.segment(digest)
        path.chmod(0o644)
        os.truncate(path, max(wanted[1].offsets) + 1)
        with pytest.raises(CorruptEntry):
            reading.fetch_into(*wanted)

    @BOTH
    def test_what_was_checked_once_is_not_checked_again(self, layout, fetcher, monkeypatch, io):
        put(layout, 1, 2)
        reading, wanted, checked = fetcher(io=io), self.wanted(layout, 1, 2), []
        real = fetching.checksum_of
        monkeypatch.setattr(fetching, "checksum_of", lambda key, *rest: checked.append(key) or real(key, *rest))
        for _time in range(2):
            reading.fetch_into(*wanted)
        assert sorted(checked) == sorted([key_of(1), key_of(2)])


class TestFetchingSideBySide(TestFetchingInto):
    """All of the above by two threads, and what only two can do."""

    ASKED = (2, 3)  # the other thread may be at the first one already

    @pytest.fixture(autouse=True)
    def _by_two(self, monkeypatch):
        monkeypatch.setattr(fetching, "SHARED_BYTES", 0)
        real = Fetcher.fetch_into
        monkeypatch.setattr(Fetcher, "fetch_into", lambda *given: real(*given, side_by_side=True))

    @pytest.fixture
    def meeting(self, monkeypatch):
        """Has two threads meet in their first read; gives who read, thread by thread."""
        barrier, readers, real = threading.Barrier(2, timeout=LIMIT_SECONDS), [], fetching.read_scattered

        def meet(*given):
            if threading.get_ident() not in readers:
                barrier.wait()
            readers.append(threading.get_ident())
            return real(*given)

        monkeypatch.setattr(fetching, "read_present", meet)
        return readers

    def test_two_threads_read_at_once(self, layout, fetcher, meeting):
        for n in range(6):
            put(layout, n)
        wanted = self.wanted(layout, *range(6))
        fetcher().fetch_into(*wanted)
        assert self.read(wanted) == [tensors_of(n) for n in range(6)]
        assert (len(meeting), len(set(meeting))) == (6, 2)

    @pytest.mark.parametrize("fails_here", [False, True], ids=["there", "here"])
    def test_an_error_of_either_thread_ends_both(self, layout, fetcher, meeting, monkeypatch, fails_here):
        for n in range(6):
            put(layout, n)
        here, meet, one_left, real = threading.get_ident(), fetching.read_present, threading.Event(), fetching.run_side_by_side

        def noted(work):
            try:
                work()
            finally:
                one_left.set()

        monkeypatch.setattr(fetching, "run_side_by_side", lambda work: real(lambda: noted(work)))

        def fail_in_one(*given):
            count = meet(*given)
            if (threading.get_ident() == here) == fails_here:
                raise OSError(errno.EIO, "the disk is gone")
            assert one_left.wait(LIMIT_SECONDS)
            return count

        monkeypatch.setattr(fetching, "read_present", fail_in_one)
        with pytest.raises(ReadFailed):
            fetcher().fetch_into(*self.wanted(layout, *range(6)))
        assert len(meeting) == 2, "each had begun one read, and began no other"

    def test_little_is_read_by_one(self, layout, fetcher, monkeypatch):
        put(layout, 1)
        put(layout, 2)
        monkeypatch.setattr(fetching, "SHARED_BYTES", 1 << 20)
        monkeypatch.setattr(fetching, "run_side_by_side", lambda _work: pytest.fail("two threads"))
        wanted = self.wanted(layout, 1, 2)
        fetcher().fetch_into(*wanted)
        assert self.read(wanted) == [tensors_of(1), tensors_of(2)]


def test_a_segment_that_cannot_be_mapped_is_a_refused_read_that_keeps_no_file_open(layout, fetcher, monkeypatch):
    put(layout, 1)
    location, reading = location_of(layout, 1), fetcher(io="mmap")
    monkeypatch.setattr(fetching.mmap, "mmap", refusing(errno.ENOMEM))
    before = held()
    for _time in range(3):
        with pytest.raises(ReadFailed):
            reading.fetch(key_of(1), location)
    assert not held() - before


@BOTH
def test_large_entries_are_copied_whole(layout, fetcher, io):
    large = {"x": ("U8", (300_001,), os.urandom(300_001)), "y": ("U8", (7,), b"seven b")}
    publish_segment(layout, [make_entry(key_of(1), large, {})], origin="")
    located = Located.of([location_of(layout, 1)])
    target = memoryview(bytearray(located.location(0).size_bytes))
    fetcher(io=io).fetch_into([key_of(1)], located, [[target]])
    assert plain(split(located.specs[0], target)) == large


class TestChecked:
    def test_without_segments_nothing_is_remembered(self, layout):
        put(layout, 1)
        checked, location = Checked([]), location_of(layout, 1)
        checked.add(location.segment.digest, location.ordinal)
        assert not checked.holds(location)

    def test_each_copy_is_remembered_for_itself(self, layout):
        put(layout, *range(20))
        put(layout, *range(20), variant=1)
        with closing(load_snapshot(layout)) as snapshot:
            checked = Checked(snapshot.segments())
            locations = [location for n in range(20) for location in snapshot.find([key_of(n)])[0]]
        for number, location in enumerate(locations):
            assert not checked.holds(location)
            checked.add(location.segment.digest, location.ordinal)
            assert [checked.holds(each) for each in locations] == [n <= number for n in range(len(locations))]

    def test_what_lacks_of_nothing_is_nothing(self):
        assert Checked([]).lacks(Located.of([])) == set()

    @examples(50)
    @given(sizes=st.lists(st.integers(1, 20), min_size=1, max_size=4), data=st.data())
    def test_what_lacks_is_what_it_does_not_hold_whether_segments_were_checked_whole_or_not(self, sizes, data):
        refs = [SegmentRef(str(number), 0, size, "") for number, size in enumerate(sizes)]
        locations = [Location(ref, ordinal, 0, Specs(), b"") for ref in refs for ordinal in range(ref.entries)]
        locations.append(Location(SegmentRef("unknown", 0, 1, ""), 0, 0, Specs(), b""))
        checked, asked = Checked(refs), st.lists(st.sampled_from(locations), max_size=8)
        for location in data.draw(st.permutations(locations)):
            checked.add(location.segment.digest, location.ordinal)
            batch = data.draw(asked)
            assert checked.lacks(Located.of(batch)) == {row for row, each in enumerate(batch) if not checked.holds(each)}
        assert checked.lacks(Located.of(locations)) == {len(locations) - 1}
        assert checked.lacks(Located.of(locations[:-1])) == checked.lacks(Located.of(locations[:-1])) == set()


FORKED = """
import json, os, signal, sys
from contextlib import closing
from pathlib import Path
from cachestore.core.errors import CorruptEntry
from cachestore.files.paths import Layout
from cachestore.store.format.entry import split
from cachestore.store.read.fetch import Checked, Fetcher
from cachestore.store.read.snapshot import load_snapshot, open_layout
from tests.store.stores import flip, key_of, plain, tensors_of

layout = open_layout(Layout(Path(sys.argv[1])))
snapshot = load_snapshot(layout)
locations = {n: snapshot.find([key_of(n)])[0][0] for n in (1, 2, 3)}
fetcher = Fetcher(layout, Checked(snapshot.segments()), io=sys.argv[2])

def good(n):
    return plain(split(locations[n].specs, fetcher.fetch(key_of(n), locations[n]))) == tensors_of(n)

good(1)
before = len(os.listdir("/proc/self/fd"))
child = os.fork()
if child == 0:
    signal.alarm(20)
    said = [good(1), good(2), good(3)]
    said.append(len(os.listdir("/proc/self/fd")) - before)
    said.append(fetcher.checked.holds(locations[3]))
    os.write(1, json.dumps(said).encode())
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
assert fetcher.checked.holds(locations[3]) and good(1) and good(2)
"""


def test_in_another_process_everything_is_opened_again(layout, fetcher, monkeypatch):
    put(layout, 1)
    reading, location, opened = fetcher(), location_of(layout, 1), []
    real = fetching.open_regular
    monkeypatch.setattr(fetching, "open_regular", lambda path: opened.append(path) or real(path))
    reading.fetch(key_of(1), location)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    for _time in range(2):
        assert plain(split(location.specs, reading.fetch(key_of(1), location))) == tensors_of(1)
    assert len(opened) == 2


@BOTH
def test_a_forked_child_reads_with_descriptors_of_its_own_and_shares_what_was_checked(layout, io):
    put(layout, 1, 2)
    put(layout, 3)
    command = [sys.executable, "-c", FORKED, str(layout.root), io]
    finished = subprocess.run(
        command, capture_output=True, text=True, timeout=50, check=False, env=os.environ | {"PYTHONPATH": str(Path.cwd())}
    )
    assert finished.returncode == 0, finished.stderr
    more = 1 if io == "pread" else 2
    assert finished.stdout == f"[true, true, true, {more}, true]"


@pytest.mark.parametrize("huge", [0, 1000, 10**9])
@given(sizes=st.lists(st.integers(0, 700), max_size=12))
def test_memory_of_several_entries_has_their_sizes_and_is_shared_by_none(huge, sizes):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fetching, "_HUGE_PAGES", huge)
        patch.setattr(fetching, "_KEPT_BYTES", 64)
        patch.setattr(fetching, "_SHARED_BUFFER", 1024)
        buffers = fetching.new_buffers(sizes)
    assert [len(buffer) for buffer in buffers] == sizes
    for number, buffer in enumerate(buffers):
        buffer[:] = bytes([number]) * len(buffer)
    assert all(bytes(buffer) == bytes([number]) * len(buffer) for number, buffer in enumerate(buffers))


def test_large_entries_that_are_read_together_come_back_each_in_its_own_part(tmp_path):
    values = {key_of(n): np.full(1_500_000, n, np.uint8) for n in range(5)}
    with cs.open(tmp_path / "store", mode="a") as store:
        with store.writer() as writer:
            for key, value in values.items():
                writer.put(key, {"x": value})
        found = store.get_many([*values], as_numpy=True)
    found[1]["x"][:] = 9
    assert [one["x"].tolist() == value.tolist() for one, value in zip(found, values.values(), strict=True)] == [True, False, *[True] * 3]
