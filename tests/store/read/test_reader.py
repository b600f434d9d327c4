"""The read side: what was stored for a key, or a miss or a corrupt entry, in every process and at every moment."""

import errno
import os
import pickle
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

import cachestore as cs
from cachestore.care.repair import repair
from cachestore.core.errors import BadInput, CorruptEntry, FormatError, MissingEntry, ReadFailed, StoreNotFound
from cachestore.store.read import fetch as fetching
from cachestore.store.read import snapshot as snapshots
from cachestore.store.read.reader import Reader
from cachestore.store.read.snapshot import list_indexes, list_segments
from cachestore.store.write.commit import commit, create_store
from tests.fakes import asks_for, raising, tells_of
from tests.leaks import held
from tests.store.stores import damage, flip, key_of, location_of, plain, put, tensors_of

BOTH = pytest.mark.parametrize("io", ["pread", "mmap"])


@pytest.fixture
def reader(layout):
    """Opens readers of the store; all are closed at the end."""
    made = []

    def open_one(**options):
        made.append(Reader(layout.root, **options))
        return made[-1]

    yield open_one
    for each in made:
        each.close()


def values(reader, *numbers):
    return [plain(tensors) for tensors in reader.get_raw([key_of(n) for n in numbers])]


def test_a_store_without_entries_is_read_as_empty(reader):
    reading = reader()
    assert (len(reading), list(reading.keys()), reading.get_many([]), reading.generation) == (0, [], [], -1)
    assert key_of(1) not in reading


def test_where_there_is_no_store_it_is_reported_and_nothing_is_made(tmp_path):
    with pytest.raises(StoreNotFound):
        Reader(tmp_path / "missing")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("options", [{"verify": "sometimes"}, {"io": "aio"}, {"verify": None}], ids=str)
def test_an_option_that_is_not_known_is_refused(layout, options):
    with pytest.raises(BadInput, check=asks_for(next(iter(options)))):
        Reader(layout.root, **options)


@BOTH
@pytest.mark.parametrize("verify", ["first", "always", "never"])
def test_entries_come_in_the_order_asked_for(layout, reader, io, verify):
    put(layout, 1, 2, 3, is_committed=True)
    put(layout, 4, 5)
    asked = [5, 1, 4, 1, 3, 2]
    assert values(reader(io=io, verify=verify), *asked) == [tensors_of(n) for n in asked]


def test_entries_are_read_in_the_order_of_their_locations(layout, reader, monkeypatch):
    put(layout, 1, 2, 3)
    put(layout, 4, 5)
    reading, seen = reader(), []
    real = fetching.checksum_of
    monkeypatch.setattr(fetching, "checksum_of", lambda key, *rest: seen.append(key) or real(key, *rest))
    values(reading, 5, 1, 4, 3, 2)
    locations = [reading.locate([key]).location(0) for key in seen]
    assert len(locations) == 5
    assert locations == sorted(locations, key=lambda location: (location.segment.digest, location.offset))


def test_a_key_is_taken_as_a_key_as_bytes_and_as_hex_digits(layout, reader):
    put(layout, 1)
    reading = reader()
    for spelling in (key_of(1), bytes(key_of(1)), str(key_of(1))):
        assert spelling in reading
        assert reading.describe(spelling).key == key_of(1)
        assert reading.get(spelling, as_numpy=True)["narrow"].tolist() == list(tensors_of(1)["narrow"][2])


@pytest.mark.parametrize("key", ["", "xyz", b"short", "0" * 31])
def test_what_is_no_key_is_refused(reader, key):
    reading = reader()
    for call in (reading.get, reading.describe, reading.__contains__):
        with pytest.raises(BadInput):
            call(key)


class TestMissing:
    def test_the_first_few_are_named_with_their_count_and_the_way_out(self, layout, reader):
        put(layout, 1)
        asked = [key_of(n) for n in (7, 1, 8, 9, 10)]
        with pytest.raises(MissingEntry) as caught:
            reader().get_many(asked)
        text = str(caught.value)
        assert all(str(key_of(n)) in text for n in (7, 8, 9))
        assert str(key_of(10)) not in text
        assert "4 of 5 keys" in text
        assert str(layout.root) in text
        assert "cachestore precompute" in text
        assert "\\n" not in text

    def test_it_is_a_lookup_error_that_survives_a_data_loader(self, reader):
        with pytest.raises(LookupError) as caught:
            reader().get(key_of(1))
        assert str(type(caught.value)(str(caught.value))) == str(caught.value)

    def test_describing_a_missing_entry_is_a_miss(self, reader):
        with pytest.raises(MissingEntry):
            reader().describe(key_of(1))

    def test_an_entry_that_was_published_since_is_found(self, layout, reader):
        reading = reader()
        put(layout, 1)
        assert key_of(1) not in reading
        assert values(reading, 1) == [tensors_of(1)]
        assert key_of(1) in reading

    def test_an_entry_that_was_published_and_committed_since_is_found(self, layout, reader):
        put(layout, 1, is_committed=True)
        reading = reader()
        put(layout, 2, is_committed=True)
        assert values(reading, 2, 1) == [tensors_of(2), tensors_of(1)]
        assert reading.generation == 2


class TestFilling:
    def wanted(self, reading, *numbers):
        keys = [key_of(n) for n in numbers]
        located = reading.locate(keys)
        return keys, located, [[memoryview(bytearray(spec.size_bytes)) for spec in specs] for specs in located.specs]

    @BOTH
    def test_each_tensor_is_read_to_where_it_belongs(self, layout, reader, io):
        put(layout, 1, 2, 3)
        put(layout, 4)
        reading = reader(io=io)
        wanted = self.wanted(reading, 4, 1, 3)
        assert reading.fill(*wanted)
        assert reading.fill(*self.wanted(reading))
        _keys, located, targets = wanted
        for n, specs, each in zip((4, 1, 3), located.specs, targets, strict=True):
            found = {spec.name: bytes(target) for spec, target in zip(specs, each, strict=True)}
            assert found == {name: raw for name, (_dtype, _shape, raw) in tensors_of(n).items()}

    def test_what_is_missing_is_named_before_anything_is_read(self, layout, reader):
        put(layout, 1)
        with pytest.raises(MissingEntry, check=tells_of(key_of(2))):
            reader().locate([key_of(1), key_of(2)])

    def test_it_says_where_an_entry_is_gone_or_damaged_and_getting_gives_the_error(self, layout, reader):
        put(layout, 1, 2)
        reading = reader()
        wanted = self.wanted(reading, 1, 2)
        damage(layout, 2)
        assert not reading.fill(*wanted)
        with pytest.raises(CorruptEntry, check=tells_of(key_of(2))):
            reading.get_raw([key_of(1), key_of(2)])

    def test_an_error_that_another_copy_cannot_help_with_is_what_getting_gives(self, layout, reader, monkeypatch):
        put(layout, 1)
        reading = reader()
        wanted = self.wanted(reading, 1)
        monkeypatch.setattr(fetching, "open_regular", raising(PermissionError(errno.EACCES, "it is locked away")))
        assert not reading.fill(*wanted)
        with pytest.raises(PermissionError):
            values(reading, 1)
        with pytest.raises(PermissionError):
            reading.prefetch([key_of(1)])

    @BOTH
    def test_prefetching_passes_over_what_is_not_there(self, layout, reader, io):
        digest = put(layout, 1)
        reading = reader(io=io)
        reading.prefetch([])
        reading.prefetch([key_of(1), key_of(2)])
        assert values(reading, 1) == [tensors_of(1)]
        other = reader(io=io)
        layout.segment(digest).unlink()
        other.prefetch([key_of(1)])

    def test_a_forked_child_looks_up_although_another_thread_held_the_lock(self, layout):
        put(layout, 1, is_committed=True)
        program = """
import threading
from cachestore.store.read import reader as module
reader = Reader(sys.argv[1])
held, done = threading.Event(), threading.Event()
def hold():
    with module._lock:
        held.set()
        done.wait(30)
thread = threading.Thread(target=hold)
thread.start()
held.wait(30)
said = child(lambda: good(reader, 1))
done.set()
thread.join()
print(said)
"""
        assert run(program, layout.root) == "True"

    def test_a_fork_waits_until_no_thread_is_inside_of_lmdb(self, layout):
        put(layout, 1, is_committed=True)
        program = """
import threading, time
from cachestore.store.format import index
reader, began, over = Reader(sys.argv[1]), threading.Event(), []
def take_long():
    with index._lock:
        began.set()
        time.sleep(0.5)
        over.append(True)
thread = threading.Thread(target=take_long)
thread.start()
began.wait(30)
said = child(lambda: [list(over), good(reader, 1)])
thread.join()
print(said)
"""
        assert run(program, layout.root) == "[[True], True]"

    @pytest.mark.processes
    @pytest.mark.parametrize("does", ["good(reader, 0, 1, 2, 3)", "len(list(reader.keys())) == 4", "Reader(sys.argv[1]).close() is None"])
    @pytest.mark.parametrize("children", [12, pytest.param(100, marks=[pytest.mark.slow, pytest.mark.timeout(300)])])
    def test_threads_that_read_and_children_that_are_forked_meanwhile_go_on(self, layout, does, children):
        for n in range(4):
            put(layout, n)
        commit(layout).close()
        program = f"""
import threading
reader, stop, wrong = Reader(sys.argv[1]), threading.Event(), []
def go_on():
    while not stop.is_set():
        if not ({does}):
            wrong.append(True)
threads = [threading.Thread(target=go_on) for _ in range(2)]
for thread in threads:
    thread.start()
said = [child(lambda: good(reader, 1)) for _ in range({children})]
stop.set()
for thread in threads:
    thread.join()
print(all(said), wrong)
"""
        assert run(program, layout.root) == "True []"

    @BOTH
    def test_an_exception_of_a_signals_handler_is_not_taken_for_the_disks(self, layout, reader, monkeypatch, io):
        put(layout, 1)
        reading = reader(io=io)
        wanted = self.wanted(reading, 1)
        for name in ("read_present", "_copy_out", "read_scattered"):
            monkeypatch.setattr(fetching, name, raising(TimeoutError("the watchdog")))
        with pytest.raises(TimeoutError):
            reading.fill(*wanted)
        if io == "pread":
            with pytest.raises(TimeoutError):
                values(reading, 1)

    @pytest.mark.parametrize("call", ["open", "fstat", "mmap"])
    def test_a_watchdog_over_a_segment_that_cannot_be_opened_is_heard(self, layout, reader, monkeypatch, call):
        put(layout, 1)
        put(layout, 2)
        reading = reader(io="mmap")
        wanted = self.wanted(reading, 1)
        time_out = raising(TimeoutError("the watchdog"))
        with monkeypatch.context() as patch:
            patch.setattr(fetching.mmap if call == "mmap" else os, call, time_out)
            for look in (lambda: reading.fill(*wanted), lambda: values(reading, 1)):
                with pytest.raises(TimeoutError):
                    look()
        put(layout, 3)
        monkeypatch.setattr(snapshots, "read_contents", time_out)
        with pytest.raises(TimeoutError):
            reading.refresh()


class TestRefreshing:
    def test_what_was_published_since_is_seen(self, layout, reader):
        reading = reader()
        put(layout, 1)
        assert len(reading) == 0
        reading.refresh()
        assert (len(reading), list(reading.keys())) == (1, [key_of(1)])

    def test_an_index_that_is_still_the_newest_is_not_checked_again(self, layout, reader, monkeypatch):
        put(layout, 1, is_committed=True)
        reading = reader()
        monkeypatch.setattr(snapshots, "check", None)
        reading.refresh()
        assert values(reading, 1) == [tensors_of(1)]


class TestDamage:
    @pytest.mark.parametrize("copy", [0, 1])
    def test_another_copy_is_read_where_one_is_damaged(self, layout, reader, copy):
        put(layout, 1, 2)
        put(layout, 1, 3)
        damage(layout, 1, copy)
        assert values(reader(), 1) == [tensors_of(1)]

    @pytest.mark.parametrize("copy", [0, 1])
    def test_another_copy_is_read_where_one_is_gone(self, layout, reader, copy):
        put(layout, 1, 2)
        put(layout, 1, 3, is_committed=True)
        path = layout.segment(location_of(layout, 1, copy).segment.digest)
        reading = reader()
        path.unlink()
        assert values(reading, 1) == [tensors_of(1)]
        assert reading.describe(key_of(1)).meta == {"n": 1}

    @pytest.mark.parametrize("copy", [0, 1])
    def test_another_copy_is_read_where_one_cannot_be(self, layout, reader, monkeypatch, copy):
        put(layout, 1, 2)
        put(layout, 1, 3)
        path, open_regular = layout.segment(location_of(layout, 1, copy).segment.digest), fetching.open_regular

        def refuse(asked):
            if asked == path:
                raise ReadFailed("Input/output error")
            return open_regular(asked)

        monkeypatch.setattr(fetching, "open_regular", refuse)
        assert values(reader(), 1, 1) == [tensors_of(1)] * 2
        with pytest.raises(ReadFailed):
            values(reader(), 1, 2, 3)

    def test_with_every_copy_damaged_it_is_a_corrupt_entry(self, layout, reader):
        put(layout, 1, 2)
        put(layout, 1, 3)
        for copy in (0, 1):
            damage(layout, 1, copy)
        with pytest.raises(CorruptEntry):
            values(reader(), 1)

    def test_of_good_copies_the_one_in_the_smallest_segment_name_is_read(self, layout, reader):
        digests = {put(layout, 1, variant=variant): variant for variant in range(4)}
        assert values(reader(), 1) == [tensors_of(1, digests[min(digests)])]

    def test_a_segment_that_repair_moved_away_is_followed(self, layout, reader):
        put(layout, 1, 2, is_committed=True)
        damage(layout, 2)
        reading = reader()
        repair(layout.root)
        assert reading.describe(key_of(1)).meta == {"n": 1}
        assert values(reading, 1) == [tensors_of(1)]
        with pytest.raises(MissingEntry):
            values(reading, 2)

    def test_a_segment_that_is_gone_for_good_is_a_miss(self, layout, reader):
        digest = put(layout, 1)
        reading = reader()
        layout.segment(digest).unlink()
        for call in (reading.get_raw, lambda keys: reading.describe(keys[0])):
            with pytest.raises(MissingEntry):
                call([key_of(1)])

    @pytest.mark.parametrize("verify", ["first", "always", "never"])
    def test_a_segment_cut_under_an_open_reader_is_a_corrupt_entry(self, layout, reader, verify):
        digest = put(layout, 1, 2)
        reading = reader(verify=verify)
        values(reading, 1, 2)
        path = layout.segment(digest)
        path.chmod(0o644)
        os.truncate(path, min(location_of(layout, n).offset for n in (1, 2)) + 1)
        for n in (1, 2):
            with pytest.raises(CorruptEntry):
                values(reading, n)

    @pytest.mark.parametrize("copies", [1, 2])
    def test_an_error_that_a_newer_snapshot_cannot_help_with_is_passed_on(self, layout, reader, monkeypatch, copies):
        for n in range(copies):
            put(layout, 1, 2 + n)
        reading = reader()
        monkeypatch.setattr(fetching, "open_regular", raising(PermissionError))
        with pytest.raises(PermissionError):
            values(reading, 1)

    @pytest.mark.parametrize("error", [FormatError("changed"), FileNotFoundError()], ids=repr)
    def test_an_index_that_cannot_be_opened_again_is_passed_over(self, layout, reader, monkeypatch, error):
        put(layout, 1, is_committed=True)
        for look in (lambda reading: values(reading, 1) == [tensors_of(1)], lambda reading: key_of(1) in reading):
            reading = reader()
            monkeypatch.setattr(reading.snapshot.index, "find", raising(error))
            assert look(reading)

    def test_an_index_that_was_removed_under_an_open_reader_does_not_matter(self, layout, reader):
        put(layout, 1, 2, is_committed=True)
        reading = reader()
        for name in list_indexes(layout):
            layout.index(name).unlink()
        assert values(reading, 1) == [tensors_of(1)]
        reading.refresh()
        assert values(reading, 2) == [tensors_of(2)]


class TestDescribing:
    def test_it_tells_names_dtypes_shapes_value_and_segment(self, layout, reader):
        digest = put(layout, 1)
        found = reader().describe(key_of(1))
        assert found.tensors == {"wide": ("F32", (2, 1)), "narrow": ("U8", (3,)), "none": ("F16", (0, 4))}
        assert (found.meta, found.size_bytes, found.segment) == ({"n": 1}, 11, f"segments/{digest[:2]}/{digest}.safetensors")

    def test_it_is_shown_as_json(self, layout, reader):
        digest = put(layout, 1)
        assert reader().describe(key_of(1)).as_json() == {
            "key": str(key_of(1)),
            "bytes": 11,
            "segment": f"segments/{digest[:2]}/{digest}.safetensors",
            "tensors": {
                "wide": {"dtype": "F32", "shape": [2, 1]},
                "narrow": {"dtype": "U8", "shape": [3]},
                "none": {"dtype": "F16", "shape": [0, 4]},
            },
            "meta": {"n": 1},
        }

    def test_no_tensor_is_read_for_it(self, layout, reader, monkeypatch):
        put(layout, 1)
        reading = reader()
        monkeypatch.setattr(reading._fetcher, "fetch", None)
        assert reading.describe(key_of(1)).size_bytes == 11

    def test_a_segments_header_is_read_once(self, layout, reader):
        digest = put(layout, 1, 2)
        reading = reader()
        reading.describe(key_of(1))
        flip(layout.segment(digest), 9)
        assert reading.describe(key_of(2)).meta == {"n": 2}

    def test_a_damaged_header_is_a_format_error_unless_there_is_another_copy(self, layout, reader):
        flip(layout.segment(put(layout, 1, 2, is_committed=True)), 9)
        with pytest.raises(FormatError):
            reader().describe(key_of(1))
        put(layout, 1, variant=1)
        assert reader().describe(key_of(1)).meta == {"n": 1}


class TestAsNumpy:
    def test_arrays_are_what_was_stored_and_the_callers_own_and_of_a_mapped_file_views_that_cannot_be_written(self, layout, reader):
        put(layout, 1)
        reading = reader()
        reading.get(key_of(1), as_numpy=True)["narrow"][:] = 0
        assert reading.get(key_of(1), as_numpy=True)["narrow"].tolist() == list(tensors_of(1)["narrow"][2])
        found = reader().get(key_of(1), as_numpy=True)
        assert {name: (each.dtype, each.shape) for name, each in found.items()} == {
            "wide": (np.dtype("<f4"), (2, 1)),
            "narrow": (np.dtype("u1"), (3,)),
            "none": (np.dtype("<f2"), (0, 4)),
        }
        assert not reader(io="mmap").get(key_of(1), as_numpy=True)["narrow"].flags.writeable


class TestPickling:
    def test_a_reader_opens_again_elsewhere_without_checking_the_index(self, layout, reader, monkeypatch):
        put(layout, 1, is_committed=True)
        raw = pickle.dumps(reader(verify="always", io="mmap"))
        monkeypatch.setattr(snapshots, "check", None)
        with pickle.loads(raw) as again:
            assert (again._verify, again._io, again.generation) == ("always", "mmap", 1)
            assert values(again, 1) == [tensors_of(1)]

    def test_a_reader_without_an_index_opens_again(self, layout, reader):
        put(layout, 1)
        with pickle.loads(pickle.dumps(reader())) as again:
            assert values(again, 1) == [tensors_of(1)]

    def test_a_verdict_on_an_index_that_changed_is_not_believed(self, layout, reader):
        put(layout, 1, is_committed=True)
        raw = pickle.dumps(reader())
        flip(layout.index(list_indexes(layout)[0]), 5000)
        with pickle.loads(raw) as again:
            assert again.generation == -1
            assert values(again, 1) == [tensors_of(1)]

    def test_a_pickled_reader_sees_what_the_first_one_saw_without_a_listing_or_a_header(self, layout, reader, monkeypatch):
        put(layout, 1, 2, is_committed=True)
        put(layout, 3)
        raw = pickle.dumps(reader())
        put(layout, 4)
        for name in ("names_in", "read_contents", "check"):
            monkeypatch.setattr(snapshots, name, None)
        with pickle.loads(raw) as again:
            assert values(again, 3, 1, 2) == [tensors_of(n) for n in (3, 1, 2)]
            assert (len(again), key_of(4) in again) == (3, False)

    def test_what_was_published_after_pickling_is_found_when_it_is_asked_for(self, layout, reader):
        put(layout, 1, is_committed=True)
        raw = pickle.dumps(reader())
        put(layout, 2)
        with pickle.loads(raw) as again:
            assert values(again, 2) == [tensors_of(2)]

    def test_a_pickled_reader_reads_on_where_index_and_segments_were_replaced_meanwhile(self, layout, reader):
        put(layout, 1, 2, is_committed=True)
        put(layout, 3)
        raw = pickle.dumps(reader())
        damage(layout, 2)
        repair(layout.root)
        for name in list_indexes(layout)[1:]:
            layout.index(name).unlink()
        with pickle.loads(raw) as again:
            assert values(again, 1, 3) == [tensors_of(1), tensors_of(3)]
            with pytest.raises(MissingEntry):
                values(again, 2)

    def test_a_pickled_reader_holds_no_bytes_of_the_store(self, layout, reader):
        put(layout, *range(100), is_committed=True)
        assert len(pickle.dumps(reader())) < 2000


PROCESS = """
import json, os, pickle, signal, sys
from pathlib import Path
from cachestore.store.read.reader import Reader
from tests.store.stores import key_of, plain, tensors_of

def good(reader, n):
    return plain(reader.get_raw([key_of(n)])[0]) == tensors_of(n)

def child(action):
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        os.write(writing, json.dumps(action()).encode())
        os._exit(0)
    os.close(writing)
    said = os.read(reading, 10_000)
    assert os.waitpid(pid, 0)[1] == 0, said
    return json.loads(said)
"""


def run(program, *arguments):
    environment = os.environ | {"PYTHONPATH": str(Path.cwd()), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", PROCESS + program, *map(str, arguments)]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False, env=environment)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout.strip()


class TestProcesses:
    @pytest.fixture
    def committed(self, layout):
        put(layout, 1, 2, is_committed=True)
        put(layout, 3)
        return layout

    def test_a_spawned_process_reads_through_a_pickled_reader(self, committed, reader, tmp_path):
        (tmp_path / "pickle").write_bytes(pickle.dumps(reader()))
        program = (
            "reader = pickle.loads(Path(sys.argv[1]).read_bytes())\nprint([good(reader, n) for n in (1, 2, 3)], 'torch' in sys.modules)"
        )
        assert run(program, tmp_path / "pickle") == "[True, True, True] False"

    @BOTH
    def test_a_forked_child_reads_what_its_parent_reads(self, committed, io):
        program = """
reader = Reader(sys.argv[1], io=sys.argv[2])
said = [good(reader, 1), good(reader, 3)]
said += child(lambda: [good(reader, n) for n in (1, 2, 3)] + child(lambda: [good(reader, n) for n in (3, 2)]))
print(all([*said, good(reader, 2)]), len(said))
"""
        assert run(program, committed.root, io) == "True 7"

    def test_a_forked_child_reads_on_although_the_index_was_removed(self, committed):
        program = """
reader = Reader(sys.argv[1])
good(reader, 1)
for path in (Path(sys.argv[1]) / "index").iterdir():
    path.unlink()
print(child(lambda: [good(reader, n) for n in (1, 2, 3)] + [key_of(1) in reader, len(reader)]))
"""
        assert run(program, committed.root) == "[True, True, True, True, 3]"

    def test_a_forked_child_may_look_again_first(self, committed):
        program = """
reader = Reader(sys.argv[1])
def look_again():
    reader.refresh()
    return [good(reader, n) for n in (1, 2, 3)]
print(child(look_again), good(reader, 1))
"""
        assert run(program, committed.root) == "[True, True, True] True"

    def test_reading_loads_no_torch_and_no_lock(self, committed):
        program = "reader = Reader(sys.argv[1])\nprint(good(reader, 1), [name for name in ('torch', 'filelock') if name in sys.modules])"
        assert run(program, committed.root) == "True []"


@pytest.fixture
def locked_away():
    """A store that nobody may write, in a folder that everybody may look into."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    layout = create_store(folder / "store")
    put(layout, 1, 2, is_committed=True)
    put(layout, 3)
    everything = [layout.root, *layout.root.rglob("*")]
    for path in everything:
        path.chmod(path.stat().st_mode & ~(stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH))
    yield layout
    for path in everything:
        path.chmod(0o755)
    shutil.rmtree(folder)


def test_reading_needs_no_permission_to_write_and_leaves_no_trace(locked_away):
    program = """
from cachestore.store.read.stats import stats
from cachestore.care.verify import verify

def look():
    with Reader(sys.argv[1]) as reader:
        return [good(reader, n) for n in (1, 2, 3)], verify(sys.argv[1]).ok, stats(sys.argv[1]).entries

look()  # imports what is needed while this user may still read the interpreter's files
if os.getuid() == 0:
    os.setegid(65534)
    os.seteuid(65534)
print(os.access(sys.argv[1], os.W_OK, effective_ids=True), *look())
"""
    before = {path: path.stat().st_mtime_ns for path in locked_away.root.rglob("*")}
    assert run(program, locked_away.root) == "False [True, True, True] True 3"
    assert {path: path.stat().st_mtime_ns for path in locked_away.root.rglob("*")} == before


def test_many_segments_are_read_with_few_descriptors(layout, reader, monkeypatch):
    monkeypatch.setattr(fetching, "descriptor_limit", lambda: 16)
    for n in range(12):
        put(layout, n)
    assert len(list_segments(layout)) == 12
    before = held()
    assert values(reader(), *range(12)) == [tensors_of(n) for n in range(12)]
    assert len(held() - before) <= 4


def test_closing_gives_every_descriptor_back(layout):
    put(layout, 1, is_committed=True)
    before = held()
    with Reader(layout.root) as reading:
        values(reading, 1)
        reading.refresh()
        values(reading, 1)
    reading.close()
    assert not held() - before


def test_the_public_names_are_there():
    assert cs.MissingEntry is MissingEntry
    assert issubclass(cs.MissingEntry, cs.CacheStoreError)


def test_missing_keys_are_reported_in_order_and_looked_for_in_a_newer_snapshot(tmp_path):
    one, two, three = cs.key("1"), cs.key("2"), cs.key("3")
    with cs.open(tmp_path / "store", mode="a") as store, cs.open(tmp_path / "store") as reader:
        assert reader.missing([]) == []
        with store.writer() as writer:
            writer.put(two, {"a": np.zeros(1)})
        assert reader.missing([str(three), two, one, three], refresh=False) == [three, two, one]
        assert reader.missing([three, two, one]) == [three, one]
        assert reader.missing([two]) == []


def test_a_script_that_ends_with_a_store_open_ends_in_silence(tmp_path):
    with cs.open(tmp_path / "store", mode="a") as store:
        with store.writer() as writer:
            writer.put(cs.key("a"), {"x": np.ones(2)})
        store.commit()
    script = f"import cachestore as cs; store = cs.open({str(tmp_path / 'store')!r}); store.get(cs.key('a'), as_numpy=True)"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=50)
    assert ended.stderr == ""
