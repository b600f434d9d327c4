"""The local cache: its limit, what is removed to make room, and what lies in it."""

import errno
import os
import shutil
from pathlib import Path

import pytest

from cachestore.core.errors import BadInput, FormatError, WriteFailed
from cachestore.files.paths import CACHE_MARKER
from cachestore.files.records import encode_record
from cachestore.remote.cache import (
    FORMAT,
    Room,
    StoreCache,
    copy_file,
    identity_of,
    make_room,
    open_cache,
    parts_in,
    read_cache,
    used_bytes,
)
from tests.fakes import asks_for
from tests.remote.streams import aged

IDS = [f"{n:032x}" for n in range(3)]
OLD = 7200.0


@pytest.fixture
def folder(tmp_path):
    """A cache with three stores, each with two parts of 64 KiB: the first store's were used longest ago."""
    root = tmp_path / "local"
    for age, store in enumerate(IDS):
        cache = StoreCache(root, store)
        cache.open(f"s3://bucket/{store[-1]}")
        for digest in IDS[:2]:
            cache.part(digest).write_bytes(os.urandom(65536))
            cache.have(digest).write_bytes(b"\1")
            for path in (cache.part(digest), cache.have(digest)):
                aged(path, OLD * (3 - age))
    return root


def there(folder):
    return {(part.store, part.digest) for part in parts_in(folder)}


def test_what_was_not_used_for_longest_goes_first(folder):
    limit = used_bytes(folder)
    assert make_room(folder, 100_000, limit, keep=()) >= 100_000
    assert there(folder) == {(store, digest) for store in IDS[1:] for digest in IDS[:2]}


def test_what_the_data_set_needs_stays(folder):
    limit = used_bytes(folder)
    keep = {(IDS[0], IDS[0]), (IDS[1], IDS[1])}
    assert make_room(folder, 10**9, limit, keep) < 10**9
    assert there(folder) == keep


def test_what_a_reader_used_in_the_last_hour_stays(folder):
    os.utime(StoreCache(folder, IDS[0]).have(IDS[1]))
    aged(StoreCache(folder, IDS[2]).have(IDS[0]), -OLD)
    make_room(folder, 10**9, 0, keep=())
    assert there(folder) == {(IDS[0], IDS[1]), (IDS[2], IDS[0])}


def test_nothing_goes_where_there_is_room(folder):
    before = there(folder)
    assert make_room(folder, 1000, used_bytes(folder) + 1000, keep=()) == 1000
    assert there(folder) == before


def test_who_has_a_removed_part_open_reads_on(folder):
    with StoreCache(folder, IDS[0]).part(IDS[0]).open("rb") as file:
        make_room(folder, 10**9, 0, keep=())
        assert len(file.read()) == 65536


def test_files_of_other_people_are_never_removed(folder):
    strange = [
        folder / "notes.txt",
        folder / "photos" / "parts" / IDS[0],
        folder / IDS[0] / "mine.txt",
        folder / IDS[0] / "parts" / "mine",
        folder / IDS[1] / "have" / "not-a-digest",
    ]
    for path in strange:
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text("mine")
    make_room(folder, 10**9, 0, keep=())
    report = read_cache(folder, clear=True)
    assert report.freed_bytes > 0
    assert there(folder) == set()
    assert all(path.read_text() == "mine" for path in strange)


def test_it_lists_what_is_there_by_store(folder):
    (folder / IDS[1] / "catalogs" / "a%2Fb").mkdir(parents=True)
    (folder / IDS[1] / "catalogs" / "a%2Fb" / "3.safetensors").write_bytes(b"x")
    (folder / IDS[2] / "origin.json").write_bytes(b"{")
    report = read_cache(folder)
    assert [store.address for store in report.stores] == ["s3://bucket/0", "s3://bucket/1", ""]
    assert [store.datasets for store in report.stores] == [{}, {"a/b": [3]}, {}]
    assert {store.segments for store in report.stores} == {2}
    assert report.bytes == used_bytes(folder) >= sum(store.bytes for store in report.stores) >= 6 * 65536
    assert report.freed_bytes == 0
    assert read_cache(folder, clear=True).stores == ()


def test_a_folder_that_is_no_cache_is_refused_and_left_alone(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(BadInput, match="no folder with copies of stores"):
        read_cache(tmp_path, clear=True)
    (tmp_path / "cachestore.json").write_text("{}")
    with pytest.raises(BadInput, check=asks_for("local")):
        open_cache(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cachestore.json", "file"]


def test_a_cache_of_a_newer_version_is_refused_and_a_damaged_marker_is_made_again(tmp_path):
    open_cache(tmp_path)
    whole = (tmp_path / CACHE_MARKER).read_bytes()
    for damaged in (b"", whole[:10], whole.replace(b"}", b"]")):
        (tmp_path / CACHE_MARKER).write_bytes(damaged)
        open_cache(tmp_path)
        assert (tmp_path / CACHE_MARKER).read_bytes() == whole
    for make in (os.mkdir, os.mkfifo, lambda path: os.symlink("/etc/passwd", path)):
        (tmp_path / CACHE_MARKER).unlink()
        make(tmp_path / CACHE_MARKER)
        open_cache(tmp_path)
        assert (tmp_path / CACHE_MARKER).read_bytes() == whole
    (tmp_path / CACHE_MARKER).write_bytes(encode_record(FORMAT, 9, {}))
    with pytest.raises(FormatError, match="install a newer one"):
        open_cache(tmp_path)


def test_a_copy_is_whole_and_the_first_one_stays(tmp_path):
    copy_file(tmp_path / "a" / "b", tmp_path / "tmp", b"first")
    copy_file(tmp_path / "a" / "b", tmp_path / "tmp", lambda path: path.write_bytes(b"second"))
    assert (tmp_path / "a" / "b").read_bytes() == b"first"
    with pytest.raises(ZeroDivisionError):
        copy_file(tmp_path / "c", tmp_path / "tmp", lambda path: path.write_bytes(b"half") / 0)
    assert not (tmp_path / "c").exists()
    assert list((tmp_path / "tmp").iterdir()) == []


def test_a_copy_takes_the_place_of_the_damaged_one_and_of_no_other(tmp_path):
    path = tmp_path / "a" / "b"
    copy_file(path, tmp_path / "tmp", b"damaged")
    here = identity_of(path)
    copy_file(path, tmp_path / "tmp", b"right", instead_of=here)
    assert path.read_bytes() == b"right"
    copy_file(path, tmp_path / "tmp", b"of somebody who was late", instead_of=here)
    assert path.read_bytes() == b"right"


def test_a_folder_in_place_of_a_file_keeps_what_is_in_it(tmp_path):
    path = tmp_path / "a" / "b"
    path.mkdir(parents=True)
    (path / "notes.txt").write_text("mine")
    copy_file(path, tmp_path / "tmp", b"right", instead_of=identity_of(path))
    assert path.read_bytes() == b"right"
    assert [one.read_text() for one in tmp_path.glob("a/*/notes.txt")] == ["mine"]


@pytest.mark.parametrize("name", ["", "parts", "have", "catalogs", "index", "tmp"])
@pytest.mark.parametrize("kind", ["file", "fifo", "link", "dangling"])
def test_what_lies_in_place_of_a_folder_makes_way(tmp_path, name, kind):
    cache = StoreCache(tmp_path / "local", IDS[0])
    cache.open("s3://bucket/cache")
    place = cache.root / name
    shutil.rmtree(place)
    match kind:
        case "file":
            place.write_text("mine")
        case "fifo":
            os.mkfifo(place)
        case _:
            place.symlink_to(tmp_path if kind == "link" else tmp_path / "nowhere")
    cache.open("s3://bucket/cache")
    assert all((cache.root / one).is_dir() for one in ("parts", "have", "catalogs", "index", "tmp"))
    assert not place.is_symlink()
    assert read_cache(tmp_path / "local").stores[0].address == "s3://bucket/cache"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO])
def test_a_cache_with_all_in_it_is_opened_without_writing(tmp_path, monkeypatch, number):
    cache = StoreCache(tmp_path, IDS[0])
    cache.open("s3://bucket/cache")
    aged(cache.root, 2 * 86400)

    def refuse(*_given, **_named):
        raise OSError(number, os.strerror(number))

    for name in ("link", "unlink", "rename", "replace", "rmdir", "truncate", "ftruncate", "write", "pwrite"):
        monkeypatch.setattr(os, name, refuse)
    monkeypatch.setattr(Path, "write_bytes", refuse)
    cache.open("s3://bucket/cache")
    with pytest.raises(WriteFailed, match=r"make room there, or pass another folder as local") as said:
        copy_file(cache.root / "index" / "x", cache.temporary, b"x")
    assert said.value.errno == number


@pytest.mark.parametrize("damage", [b"", b"{", b"\0" * 200])
def test_a_damaged_note_of_the_address_is_written_again(tmp_path, damage):
    cache = StoreCache(tmp_path, IDS[0])
    cache.open("s3://bucket/cache")
    (cache.root / "origin.json").write_bytes(damage)
    cache.open("s3://bucket/cache")
    assert read_cache(tmp_path).stores[0].address == "s3://bucket/cache"


def test_copies_that_a_killed_process_left_go_after_a_day(tmp_path):
    cache = StoreCache(tmp_path, IDS[0])
    cache.open("s3://bucket/cache")
    for name, age in (("old", 2), ("young", 0)):
        (cache.temporary / name).mkdir()
        (cache.temporary / name / "file").write_bytes(b"x")
        aged(cache.temporary / name, age * 86400)
    cache.open("s3://bucket/cache")
    assert [path.name for path in cache.temporary.iterdir()] == ["young"]


@pytest.mark.parametrize("limit", [0, 10_000, 300_000, 3_000_000])
def test_takers_stay_below_the_limit_also_before_they_write(tmp_path, limit):
    cache = StoreCache(tmp_path, IDS[0])
    cache.open("s3://bucket/cache")
    copies = used_bytes(tmp_path)
    rooms = [Room(tmp_path, copies + limit) for _process in range(3)]
    written = 0
    for number in range(400):
        room = rooms[number % 3]
        if room.take(6144):
            with cache.part(IDS[0]).open("ab") as file:
                file.write(bytes(6144))
            room.written(6144)
            written += 6144
    assert used_bytes(tmp_path) - copies <= limit
    assert written >= limit // 2 - 3 * 16384 if limit < 400 * 6144 else written == 400 * 6144
    alone = Room(tmp_path, copies + written + 100_000)
    assert sum(alone.take(6144) for _one in range(100)) * 6144 <= 100_000 + 8192
