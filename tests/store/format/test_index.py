"""The index: derived, extended, checked before LMDB sees it, and one for each file and process."""

import json
import os
import pickle
import resource
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from cachestore.core.errors import FormatError, WriteFailed
from cachestore.files.checksum import digest_file
from cachestore.files.opening import FileIdentity, names_in
from cachestore.files.paths import IndexName
from cachestore.files.publish import publish_file
from cachestore.store.format import index as indexing
from cachestore.store.format.entry import Specs, TensorSpec
from cachestore.store.format.index import Index, Verdict, build, check
from cachestore.store.format.locations import Located, SegmentRef
from cachestore.store.format.segment import read_contents
from cachestore.store.read.snapshot import list_indexes, load_snapshot, ref_of
from cachestore.store.write.append import publish_segment
from cachestore.store.write.commit import commit, create_store
from tests.store.stores import entry_of, flip, key_of, put


@pytest.fixture
def layout(tmp_path):
    layout = create_store(tmp_path / "store")
    layout.indexes.mkdir()
    return layout


def entries_in(layout, *digests):
    contents = {digest: read_contents(layout.segment(digest)) for digest in digests}
    entries = [
        (each.key, digest, each.ordinal, each.offset, each.specs, each.checksum)
        for digest, found in contents.items()
        for each in found.entries
    ]
    return [ref_of(digest, found) for digest, found in contents.items()], entries


def built(layout, number, *digests, base=None, dropped=()):
    segments, entries = entries_in(layout, *digests)
    temporary, name = build(layout, number, base=base, dropped=frozenset(dropped), segments=segments, entries=entries)
    publish_file(layout, temporary, layout.index(name))
    return check(layout, name)


def numbers_in(index):
    return {ref.digest: number for number, ref in index.segments.items()}


def copies(index, n):
    return [location.segment.digest for location in index.find([key_of(n)])[0]]


def test_an_index_of_nothing_is_valid(layout):
    with closing(Index(layout, built(layout, 1))) as index:
        assert (len(index), dict(index.segments), list(index.items()), index.find([])) == (0, {}, [], [])
        assert index.find([key_of(1)]) == [[]]


def test_a_terabyte_of_zeros_behind_an_index_is_not_read(layout, monkeypatch):
    name = built(layout, 1, put(layout, 1)).name
    os.truncate(layout.index(name), 1 << 40)
    monkeypatch.setattr(indexing, "digest_file", None)
    with pytest.raises(FormatError):
        check(layout, name)


@pytest.mark.parametrize("size", [0, 39])
def test_what_is_too_short_for_an_index_is_refused(layout, size):
    name = built(layout, 1, put(layout, 1)).name
    os.truncate(layout.index(name), size)
    with pytest.raises(FormatError):
        check(layout, name)


def test_an_index_holds_the_locations_that_the_segments_say(layout):
    digest = put(layout, 1, 2, 3, origin="p/0")
    contents = read_contents(layout.segment(digest))
    with closing(Index(layout, built(layout, 1, digest))) as index:
        for each in contents.entries:
            [[location]] = index.find([each.key])
            assert (location.ordinal, location.offset, location.specs, location.checksum) == (
                each.ordinal,
                each.offset,
                each.specs,
                each.checksum,
            )
            assert location.segment == ref_of(digest, contents)
        assert len(index) == 3


def test_found_locations_stand_in_the_order_of_the_keys_asked_for(layout):
    digest = put(layout, *range(10))
    asked = [key_of(n) for n in (7, 99, 0, 7)]
    with closing(Index(layout, built(layout, 1, digest))) as index:
        found = index.find(asked)
        assert [bool(locations) for locations in found] == [True, False, True, True]
        assert found[0] == found[3] != found[2]
        assert index.locate([key_of(n) for n in (7, 0, 7)]) == Located.of([found[0][0], found[2][0], found[3][0]])
        assert (index.locate(asked), index.locate([])) == (None, Located.of([]))
        assert (index.locate(asked[1:2]), index.locate(asked[2:3])) == (None, Located.of(found[2]))


def test_one_location_that_is_looked_up_first_is_as_one_of_many(layout):
    with closing(Index(layout, built(layout, 1, put(layout, 1, 2)))) as index:
        assert index.locate([key_of(2)]) == Located.of(index.find([key_of(2)])[0])


def test_items_come_in_the_order_of_keys(layout):
    with closing(Index(layout, built(layout, 1, put(layout, *range(50))))) as index:
        keys = [key for key, _locations in index.items()]
        assert keys == sorted(key_of(n) for n in range(50))
        assert [raw for raw, _value in index.raw_entries()] == [bytes(key) for key in keys]


def test_its_name_is_its_digest(layout):
    verdict = built(layout, 7, put(layout, 1))
    assert verdict.name == IndexName(7, digest_file(layout.index(verdict.name)))
    assert layout.index(verdict.name).stat().st_mode & 0o777 == 0o444
    assert names_in(layout.temporary) == []


def test_equal_content_makes_an_equal_index(layout):
    digest = put(layout, 1, 2)
    assert built(layout, 1, digest).name == built(layout, 1, digest).name


def test_copies_stand_in_the_order_of_their_segments_names(layout):
    digests = [put(layout, 1, variant=variant) for variant in range(5)]
    with closing(Index(layout, built(layout, 1, *digests))) as index:
        assert copies(index, 1) == sorted(digests)


def test_an_extended_index_holds_old_and_new_and_sorts_copies(layout):
    old, new = [put(layout, n, 9, variant=n) for n in (1, 3)], [put(layout, n, 9, variant=n) for n in (2, 4)]
    with closing(Index(layout, built(layout, 1, *old))) as base, closing(Index(layout, built(layout, 2, *new, base=base))) as index:
        assert [bool(copies(index, n)) for n in (1, 2, 3, 4, 5)] == [True] * 4 + [False]
        assert copies(index, 9) == sorted([*old, *new])
        assert [key for key, _locations in index.items()] == sorted(key_of(n) for n in (1, 2, 3, 4, 9))


def test_the_segments_of_the_base_keep_their_numbers(layout):
    first, second, third = put(layout, 1), put(layout, 2), put(layout, 3)
    with closing(Index(layout, built(layout, 1, first, second))) as base:
        before = numbers_in(base)
        with closing(Index(layout, built(layout, 2, third, base=base, dropped=[before[first]]))) as index:
            after = numbers_in(index)
    assert after[second] == before[second]
    assert after[third] not in before.values()
    assert first not in after


def test_entries_of_dropped_segments_leave_and_copies_elsewhere_stay(layout):
    gone, stays = put(layout, 1, 2), put(layout, 2, 3, variant=1)
    with closing(Index(layout, built(layout, 1, gone, stays))) as base:
        number = numbers_in(base)[gone]
        with closing(Index(layout, built(layout, 2, base=base, dropped=[number]))) as index:
            assert [copies(index, n) for n in (1, 2, 3)] == [[], [stays], [stays]]
            assert len(index) == 2


def test_equal_shapes_share_one_layout(layout):
    with closing(Index(layout, built(layout, 1, put(layout, *range(20))))) as index:
        assert len(index.raw_layouts()) == 1
        assert len({id(location.specs) for _key, [location] in index.items()}) == 1


@pytest.fixture(autouse=True)
def _environments_of_this_test(monkeypatch):
    """Other tests may have left theirs open."""
    monkeypatch.setattr(indexing, "_environments", {})


def test_two_indexes_on_one_file_share_it_and_close_apart(layout):
    verdict = built(layout, 1, put(layout, 1))
    first, second = Index(layout, verdict), Index(layout, verdict)
    first.close()
    first.close()
    assert second.find([key_of(1)])[0]
    second.close()
    assert indexing._environments == {}


def test_an_index_that_nobody_has_any_more_gives_its_file_back(layout):
    verdict = built(layout, 1, put(layout, 1))
    first, second = Index(layout, verdict), Index(layout, verdict)
    assert first.find([key_of(1)])[0]
    del first
    assert second.find([key_of(1)])[0]
    del second
    assert indexing._environments == {}


def test_two_stores_can_be_open_at_once(layout, tmp_path):
    other = create_store(tmp_path / "other")
    other.indexes.mkdir()
    with closing(Index(layout, built(layout, 1, put(layout, 1)))) as one, closing(Index(other, built(other, 1, put(other, 2)))) as two:
        assert [copies(one, 1) == [], copies(one, 2) == [], copies(two, 1) == [], copies(two, 2) == []] == [False, True, True, False]


@pytest.fixture
def never_opened(monkeypatch):
    """LMDB must not see the files of this test."""

    def fail(*_arguments, **_named):
        pytest.fail("LMDB was given a damaged file")

    monkeypatch.setattr(indexing.lmdb, "open", fail)


DAMAGES = {
    "a flipped bit in the first page": lambda path: flip(path, 100, 1),
    "a flipped bit in the middle": lambda path: flip(path, path.stat().st_size // 2, 1),
    "a flipped bit in the last byte": lambda path: flip(path, path.stat().st_size - 1, 1),
    "a cut": lambda path: os.truncate(path, path.stat().st_size - 1),
    "a cut to nothing": lambda path: os.truncate(path, 0),
    "a tail": lambda path: os.truncate(path, path.stat().st_size + 4096),
    "a link": lambda path: (path.rename(path.with_suffix(".moved")), path.symlink_to(path.with_suffix(".moved"))),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "a fifo": lambda path: (path.unlink(), os.mkfifo(path)),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_index_is_a_format_error_before_lmdb_sees_it(layout, damage, never_opened):
    name = prepared(layout).name
    path = layout.index(name)
    path.chmod(0o644)
    DAMAGES[damage](path)
    with pytest.raises(FormatError):
        check(layout, name)
    with closing(load_snapshot(layout)) as snapshot:
        assert snapshot.index is None
        assert key_of(1) in snapshot


def prepared(layout):
    """An index that was built in another process, so that this one has not opened LMDB."""
    digest = put(layout, 1)
    program = """
import sys
from pathlib import Path
from cachestore.store.write.commit import commit, create_store
snapshot = commit(create_store(Path(sys.argv[1])))
"""
    subprocess.run([sys.executable, "-c", program, str(layout.root)], check=True, timeout=30)
    [name] = list_indexes(layout)
    assert layout.segment(digest).exists()
    return check(layout, name)


def test_a_missing_index_is_a_file_not_found(layout):
    with pytest.raises(FileNotFoundError):
        check(layout, IndexName(1, "0" * 32))


def test_a_verdict_is_not_believed_for_another_file(layout):
    verdict = built(layout, 1, put(layout, 1))
    path = layout.index(verdict.name)
    raw = path.read_bytes()
    path.unlink()
    path.write_bytes(raw)
    with pytest.raises(FormatError):
        Index(layout, verdict)


def test_an_index_whose_file_was_only_touched_is_checked_again_and_used(layout):
    put(layout, 1)
    with closing(commit(layout)) as snapshot:
        verdict = snapshot.index.verdict
        layout.index(verdict.name).chmod(0o440)
        with closing(load_snapshot(layout, verdict=verdict)) as again, closing(load_snapshot(layout, earlier=snapshot)) as newer:
            assert again.generation == newer.generation == 1


def test_a_file_that_lmdb_cannot_read_is_passed_over(layout):
    put(layout, 1)
    alien = layout.indexes / "a"
    alien.write_bytes(b"not LMDB at all" * 1000)
    alien.rename(layout.index(IndexName(9, digest_file(alien))))
    with closing(load_snapshot(layout)) as snapshot:
        assert snapshot.index is None
        assert key_of(1) in snapshot
    with closing(commit(layout)) as snapshot:
        assert snapshot.generation == 10
    assert indexing._environments == {}


def test_a_verdict_travels_to_another_process(layout):
    put(layout, 1)
    with closing(commit(layout)) as snapshot:
        verdict = pickle.loads(pickle.dumps(snapshot.index.verdict))
    assert verdict == Verdict(verdict.name, FileIdentity.of(layout.index(verdict.name).stat()))
    with closing(Index(layout, verdict)) as index:
        assert len(index) == 1


def test_a_full_disk_while_building_is_a_write_failed_that_leaves_nothing(layout):
    digest = put(layout, *range(200))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16 * 1024, before[1]))
    try:
        with pytest.raises(WriteFailed):
            built(layout, 1, digest)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert names_in(layout.temporary) == []
    assert list_indexes(layout) == []
    with closing(Index(layout, built(layout, 1, digest))) as index:
        assert len(index) == 200


FORK = """
import json, os, signal, sys
from pathlib import Path
from contextlib import closing
from cachestore.files.paths import Layout
from cachestore.store.read.snapshot import load_snapshot, open_layout
from tests.store.stores import key_of

layout = open_layout(Layout(Path(sys.argv[1])))

def say(snapshot):
    return [bool(locations) for locations in snapshot.find([key_of(1), key_of(2), key_of(3)])]

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
"""A program that reads in a forked child; an alarm bounds the wait."""


def forked(layout, program):
    finished = subprocess.run(
        [sys.executable, "-c", FORK + program, str(layout.root)],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
        env=os.environ | {"PYTHONPATH": str(Path.cwd())},
    )
    assert finished.returncode == 0, finished.stderr
    return json.loads(finished.stdout)


@pytest.fixture
def committed(layout):
    """Entries 1 and 2 in the index, 3 in a segment that it does not cover."""
    put(layout, 1, 2, is_committed=True)
    put(layout, 3)
    return layout


def test_a_forked_child_reads_what_its_parent_has_open(committed):
    program = """
snapshot = load_snapshot(layout)
before = say(snapshot)
print(json.dumps([before, child(lambda: say(snapshot)), child(lambda: child(lambda: say(snapshot))), say(snapshot)]))
"""
    assert forked(committed, program) == [[True] * 3] * 4


def test_a_forked_child_uses_no_environment_of_its_parents(committed, tmp_path):
    other = create_store(tmp_path / "other")
    put(other, 2, is_committed=True)
    program = f"""
from cachestore.store.format.index import _environments
one, two = load_snapshot(layout), load_snapshot(open_layout(Layout(Path({str(other.root)!r}))))
def read():
    say(one)
    return [held.pid == os.getpid() for held in _environments.values()]
print(json.dumps([child(read), len(_environments)]))
"""
    assert forked(committed, program) == [[True], 2]


def test_a_forked_child_that_looks_again_before_it_reads_goes_on_reading(committed):
    program = """
snapshot = load_snapshot(layout)
def look_again():
    newer = load_snapshot(layout, earlier=snapshot)
    snapshot.close()
    return say(newer)
print(json.dumps([child(look_again), say(snapshot)]))
"""
    assert forked(committed, program) == [[True] * 3] * 2


def test_closing_one_of_two_snapshots_in_a_forked_child_leaves_the_other_open(committed):
    program = """
one, other = load_snapshot(layout), load_snapshot(layout)
def close_the_other():
    before = say(one)
    other.close()
    return [before, say(one)]
print(json.dumps([child(close_the_other), say(one), say(other)]))
"""
    assert forked(committed, program) == [[[True] * 3] * 2, [True] * 3, [True] * 3]


def test_a_forked_child_reads_two_stores(committed, tmp_path):
    other = create_store(tmp_path / "other")
    put(other, 2, is_committed=True)
    program = f"""
one, two = load_snapshot(layout), load_snapshot(open_layout(Layout(Path({str(other.root)!r}))))
print(json.dumps([child(lambda: [say(one), say(two), say(one)]), say(one), say(two)]))
"""
    assert forked(committed, program) == [[[True] * 3, [False, True, False], [True] * 3], [True] * 3, [False, True, False]]


def test_in_another_process_an_index_opens_an_environment_of_its_own_and_closes_only_that(committed, monkeypatch):
    with closing(load_snapshot(committed)) as one, closing(load_snapshot(committed)) as other:
        monkeypatch.setattr(os, "getpid", lambda: -1)
        assert other.find([key_of(1)])[0]
        [held] = indexing._environments.values()
        assert (held.pid, held.users) == (-1, 1)
        one.close()
        assert other.find([key_of(1)])[0]
    assert indexing._environments == {}


def test_many_readers_in_one_process_share_one_environment(committed):
    with ExitStack() as stack:
        snapshots = [stack.enter_context(closing(load_snapshot(committed))) for _ in range(5)]
        assert len(indexing._environments) == 1
        assert all(snapshot.find([key_of(1)])[0] for snapshot in snapshots)
    assert indexing._environments == {}


@pytest.mark.parametrize("spare", [1 << 20, 64 << 20])
def test_the_room_that_is_reserved_is_enough_whatever_the_values_are(layout, monkeypatch, spare):
    """Many keys, many copies of one key, many layouts and long ones: each could fill more pages than its bytes."""
    monkeypatch.setattr(indexing, "_SPARE_BYTES", spare)
    refs = [SegmentRef(f"{n:032x}", 1, 1, "x" * 64) for n in range(500)]
    long = tuple(TensorSpec(f"{n:0128}", "F32", (1, 2, 3, 4)) for n in range(30))
    entries = [(key_of(0), ref.digest, 0, 0, Specs(), bytes(16)) for ref in refs]
    specs = {n: Specs((TensorSpec("a", "U8", (n,)), *long[: n % 31])) for n in range(1, 3000)}
    entries += [(key_of(n), refs[n % 500].digest, 0, 0, specs[n], bytes(16)) for n in range(1, 3000)]

    def published(number, base, segments, part):
        temporary, name = build(layout, number, base=base, dropped=frozenset(), segments=segments, entries=part)
        publish_file(layout, temporary, layout.index(name))
        return Index(layout, check(layout, name))

    with closing(published(1, None, refs, entries[:1500])) as base, closing(published(2, base, [], entries[1500:])) as index:
        assert len(index) == 3000
        assert len(copies(index, 0)) == 500


def test_little_address_space_is_enough(layout):
    put(layout, 1)
    program = """
import resource, sys
from pathlib import Path
from cachestore.store.write.commit import commit, create_store
resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
print(commit(create_store(Path(sys.argv[1]))).generation)
"""
    finished = subprocess.run([sys.executable, "-c", program, str(layout.root)], capture_output=True, text=True, timeout=50, check=False)
    assert finished.stdout == "1\n", finished.stderr


def test_an_index_grows_with_many_entries(layout):
    digests = [publish_segment(layout, [entry_of(n) for n in range(start, start + 500)], origin="").digest for start in range(0, 2000, 500)]
    with closing(Index(layout, built(layout, 1, *digests))) as index:
        assert len(index) == 2000
        assert all(index.find([key_of(n) for n in range(2000)]))


def test_threads_that_open_and_close_one_file_at_the_same_moment_share_it(layout):
    put(layout, 1)
    verdict = built(layout, 1, *(ref.digest for ref in load_snapshot(layout).segments()))

    def look(_time):
        with closing(Index(layout, verdict)) as index:
            return len(index.find([key_of(1)])[0])

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            assert set(threads.map(look, range(200))) == {1}
    finally:
        sys.setswitchinterval(interval)
    assert indexing._environments == {}


def test_a_child_forked_while_a_thread_opens_an_index_can_open_its_own(layout):
    put(layout, 1)
    verdict = built(layout, 1, *(ref.digest for ref in load_snapshot(layout).segments()))
    holding = threading.Event()

    def hold():
        with indexing._lock:
            holding.set()
            time.sleep(0.5)

    thread = threading.Thread(target=hold)
    thread.start()
    holding.wait(30)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            with closing(Index(layout, verdict)) as index:
                code = 0 if index.find([key_of(1)])[0] else 2
        finally:
            os._exit(code)
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
