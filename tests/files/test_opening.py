"""Opening what may be a trap, and reading without trusting sizes."""

import errno
import mmap
import os
import socket
from contextlib import closing
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachestore.core.errors import FormatError, ReadFailed
from cachestore.files import opening
from cachestore.files.checksum import digest_file
from cachestore.files.opening import (
    FileIdentity,
    ask_for,
    ask_for_mapped,
    descriptor_limit,
    free_bytes,
    let_go,
    map_whole,
    names_in,
    open_regular,
    opened,
    read_at,
    read_into,
    read_present,
    read_scattered,
    read_whole,
    status_of,
)
from cachestore.files.records import read_record
from cachestore.files.table import read_table
from tests.fakes import raising, refusing
from tests.leaks import held


def file_of(tmp_path, content=b"0123456789"):
    path = tmp_path / "file"
    path.write_bytes(content)
    return path


def test_names_in_a_missing_folder_are_none(tmp_path):
    assert names_in(tmp_path / "missing") == []


def test_names_in_a_file_are_none(tmp_path):
    assert names_in(file_of(tmp_path)) == []


def test_names_in_a_folder_are_sorted(tmp_path):
    for name in ("b", "a", "c"):
        (tmp_path / name).touch()
    assert names_in(tmp_path) == ["a", "b", "c"]


def test_an_empty_file_reads_as_no_bytes(tmp_path):
    assert read_whole(file_of(tmp_path, b""), limit_bytes=0) == b""


OF_A_THING = {"kind": "thing", "version": 1}


@pytest.mark.parametrize("read", [open_regular, digest_file, partial(read_record, **OF_A_THING), partial(read_table, **OF_A_THING)])
def test_a_missing_file_is_a_file_not_found(tmp_path, read):
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "missing")


def link(path, target):
    path.symlink_to(target)


TRAPS = {
    "a link to a file": lambda path: link(path, file_of(path.parent)),
    "a link to nothing": lambda path: link(path, path.parent / "nothing"),
    "a link to itself": lambda path: link(path, path),
    "a link to a device": lambda path: link(path, "/dev/zero"),
    "a fifo": os.mkfifo,
    "a folder": lambda path: path.mkdir(),
}


@pytest.mark.parametrize("trap", TRAPS)
def test_anything_but_a_regular_file_is_refused_without_waiting(tmp_path, trap):
    path = tmp_path / "trap"
    TRAPS[trap](path)
    before = held()
    with pytest.raises(FormatError):
        read_whole(path, limit_bytes=100)
    assert not held() - before


def test_a_socket_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a socket's path must be short
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("trap")
        with pytest.raises((FormatError, OSError)):
            read_whole(tmp_path / "trap", limit_bytes=100)


def test_a_character_device_is_refused(tmp_path):
    try:
        os.mknod(tmp_path / "trap", 0o600 | 0o020000, os.makedev(1, 5))
        os.close(os.open(tmp_path / "trap", os.O_RDONLY))
    except PermissionError:
        pytest.skip("making and opening a device needs root and a file system that allows devices")
    with pytest.raises(FormatError):
        read_whole(tmp_path / "trap", limit_bytes=100)


def test_a_file_of_exactly_the_limit_is_read(tmp_path):
    assert read_whole(file_of(tmp_path), limit_bytes=10) == b"0123456789"


def test_a_file_above_the_limit_is_refused_without_reading_it(tmp_path, monkeypatch):
    path = file_of(tmp_path)
    os.truncate(path, 1 << 40)
    monkeypatch.setattr(opening, "read_at", None)
    with pytest.raises(FormatError):
        read_whole(path, limit_bytes=10)


@pytest.mark.parametrize("has_preadv", [True, False])
@given(offset=st.integers(0, 15), size=st.integers(0, 15))
def test_a_read_is_the_slice_of_the_file(has_preadv, offset, size, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        if not has_preadv:
            patch.delattr(os, "preadv", raising=False)
        with opened(file_of(tmp_path_factory.getbasetemp())) as (descriptor, status):
            assert status.st_size == 10
            assert read_at(descriptor, size, offset) == b"0123456789"[offset : offset + size]


def test_short_reads_are_put_together(tmp_path, monkeypatch):
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda descriptor, buffers, offset: real(descriptor, [buffers[0][:3]], offset))
    with opened(file_of(tmp_path)) as (descriptor, _status):
        buffer = bytearray(12)
        assert read_into(descriptor, memoryview(buffer), 1) == 9
        assert buffer[:9] == b"123456789"


@pytest.mark.parametrize("has_preadv", [True, False])
@given(sizes=st.lists(st.integers(0, 9), max_size=6), offset=st.integers(0, 20), least=st.integers(1, 12))
def test_a_scattered_read_is_the_slice_of_the_file(has_preadv, sizes, offset, least, tmp_path_factory):
    """Also where each call reads little, as on a file system over a network."""
    path = tmp_path_factory.mktemp("scattered") / "file"
    path.write_bytes(bytes(range(30)))
    real = os.preadv

    def few(descriptor, buffers, position):
        rest, chosen = least, []
        for buffer in buffers:
            chosen.append(buffer[:rest])
            rest -= len(chosen[-1])
        return real(descriptor, chosen, position)

    buffers = [memoryview(bytearray(size)) for size in sizes]
    with pytest.MonkeyPatch.context() as patch, opened(path) as (descriptor, _status):
        if has_preadv:
            patch.setattr(os, "preadv", few)
        else:
            patch.delattr(os, "preadv")
        count = read_scattered(descriptor, buffers, offset)
    expected = bytes(range(30))[offset : offset + sum(sizes)]
    assert (count, b"".join(buffers)[:count]) == (len(expected), expected)


def test_more_buffers_than_one_call_takes_are_filled(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(n % 251 for n in range(5000)))
    buffers = [memoryview(bytearray(2)) for _n in range(2500)]
    with opened(path) as (descriptor, _status):
        assert read_scattered(descriptor, buffers, 0) == 5000
    assert b"".join(buffers) == path.read_bytes()


@pytest.mark.parametrize(
    ("raised", "reported"), [(BlockingIOError(), 0), (OSError(errno.EOPNOTSUPP, ""), None), (OSError(errno.EINVAL, ""), None)], ids=repr
)
def test_what_is_in_memory_is_read_and_a_system_that_cannot_tell_says_so(tmp_path, monkeypatch, raised, reported):
    path = tmp_path / "file"
    path.write_bytes(b"0123456789")
    buffers = [memoryview(bytearray(4)), memoryview(bytearray(2))]
    with opened(path) as (descriptor, _status):
        if (count := read_present(descriptor, buffers, 1)) is not None:
            assert (count, b"".join(buffers)) in {(6, b"123456"), (0, bytes(6))}
        monkeypatch.setattr(opening, "_PRESENT_ONLY", 1)
        monkeypatch.setattr(os, "preadv", raising(raised))
        assert read_present(descriptor, buffers, 1) == reported
        monkeypatch.setattr(opening, "_PRESENT_ONLY", 0)
        assert read_present(descriptor, buffers, 1) is None


def test_an_input_error_while_looking_into_memory_is_passed_on(tmp_path, monkeypatch):
    monkeypatch.setattr(opening, "_PRESENT_ONLY", 1)
    monkeypatch.setattr(os, "preadv", raising(OSError(errno.EIO, "")))
    with pytest.raises(OSError, match=r"\[Errno 5\]"):
        read_present(-1, [memoryview(bytearray(1))], 0)


def test_asking_for_a_part_of_a_file_is_harmless_everywhere(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_bytes(bytes(10_000))
    with opened(path) as (descriptor, _status), closing(mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)) as mapping:
        ask_for(descriptor, 5, 100)
        ask_for_mapped(mapping, 5000, 100)
        monkeypatch.delattr(os, "posix_fadvise", raising=False)
        ask_for(descriptor, 5, 100)
    ask_for(-1, 0, 1)


def test_positional_reads_move_no_shared_offset(tmp_path):
    with opened(file_of(tmp_path)) as (descriptor, _status):
        read_at(descriptor, 5, 3)
        assert os.lseek(descriptor, 0, os.SEEK_CUR) == 0


def test_a_descriptor_is_closed_when_the_block_raises(tmp_path):
    path, before = file_of(tmp_path), held()
    with pytest.raises(ZeroDivisionError), opened(path):
        raise ZeroDivisionError
    assert not held() - before


@pytest.mark.parametrize("change", ["content", "length", "replacement", "permissions"])
def test_a_files_identity_changes_with_it(tmp_path, change):
    path = file_of(tmp_path)
    os.utime(path, ns=(0, 0))
    before = FileIdentity.of(path.stat())
    if change == "content":
        path.write_bytes(b"9876543210")
    elif change == "length":
        os.truncate(path, 5)
    elif change == "replacement":
        (tmp_path / "other").write_bytes(b"0123456789")
        (tmp_path / "other").replace(path)
    else:
        path.chmod(0o600)
        os.utime(path, ns=(0, 0))
    assert FileIdentity.of(path.stat()) != before


def test_identities_of_an_untouched_file_are_equal(tmp_path):
    path = file_of(tmp_path)
    assert FileIdentity.of(path.stat()) == FileIdentity.of(path.stat())


def test_an_input_error_is_passed_on(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "preadv", refusing(errno.EIO))
    with pytest.raises(OSError, match="Input/output"):
        read_whole(file_of(tmp_path), limit_bytes=100)


def test_the_descriptor_limit_is_what_the_system_says(monkeypatch):
    import resource

    monkeypatch.setattr(resource, "getrlimit", lambda _what: (100, 200))
    assert descriptor_limit() == 100
    monkeypatch.setattr(resource, "getrlimit", lambda _what: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert descriptor_limit(default=7) == 7


def test_without_the_resource_module_there_is_a_default_limit(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "resource", None)
    assert descriptor_limit(default=7) == 7


# Mapped files


def test_an_empty_file_is_mapped_as_nothing(tmp_path):
    (tmp_path / "f").touch()
    assert map_whole(tmp_path / "f", limit_bytes=1) == b""


def test_a_mapped_file_shows_its_bytes_also_after_its_memory_was_given_back(tmp_path):
    (tmp_path / "f").write_bytes(b"abc" * 5000)
    view = map_whole(tmp_path / "f", limit_bytes=1 << 20)
    assert view == b"abc" * 5000
    let_go(view[3:])
    assert view[-3:] == b"abc"


def test_a_system_that_cannot_give_memory_back_keeps_it(tmp_path):
    let_go(memoryview(b"not mapped"))


def test_a_file_that_is_larger_than_it_may_be_and_a_link_are_not_mapped(tmp_path):
    (tmp_path / "f").write_bytes(b"abc")
    with pytest.raises(FormatError):
        map_whole(tmp_path / "f", limit_bytes=2)
    (tmp_path / "link").symlink_to(tmp_path / "f")
    with pytest.raises(FormatError):
        map_whole(tmp_path / "link", limit_bytes=9)


@pytest.mark.parametrize("name", ["open", "fstat", "preadv"])
def test_a_look_that_is_refused_says_the_path_and_the_reason(tmp_path, monkeypatch, name):
    path = tmp_path / "file"
    path.write_bytes(b"content")
    with monkeypatch.context() as patch:
        patch.setattr(os, name, refusing(errno.EIO))
        with pytest.raises(ReadFailed) as caught:
            read_whole(path, limit_bytes=100)
    assert caught.value.errno == errno.EIO
    assert read_whole(path, limit_bytes=100) == b"content"


def test_a_folder_that_cannot_be_listed_is_not_an_empty_one(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "listdir", refusing(errno.EMFILE))
    with pytest.raises(ReadFailed):
        names_in(tmp_path)


def test_looking_at_nothing_is_no_error_and_being_refused_is_one(tmp_path, monkeypatch):
    assert status_of(tmp_path / "nothing") is None
    assert status_of(tmp_path) is not None
    monkeypatch.setattr(os, "stat", refusing(errno.ESTALE))
    with pytest.raises(ReadFailed):
        status_of(tmp_path)


def test_room_that_cannot_be_asked_for_is_reported(tmp_path, monkeypatch):
    assert free_bytes(tmp_path) > 0
    monkeypatch.setattr(os, "statvfs", refusing(errno.EIO))
    with pytest.raises(ReadFailed):
        free_bytes(tmp_path)
