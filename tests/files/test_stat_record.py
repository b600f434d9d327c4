"""Stat records: equal ones prove that a file did not change."""

import os
import time
from types import SimpleNamespace
from typing import Any

import pytest

from cachestore.core import system
from cachestore.core.inputs import NO_STAT
from cachestore.files import stat_record
from cachestore.files.stat_record import proof_of, stat_of

YEAR_2000_NS = 946_684_800 * 10**9
LATER_NS = 20_000_000
"""More than a step of any local file system's clock."""


def old_file(path, content=b"bytes"):
    path.write_bytes(content)
    os.utime(path, ns=(YEAR_2000_NS, YEAR_2000_NS))
    return path


def wait_for_another_time(path):
    """Until a file that changes now has another change time than this one."""
    while time.time_ns() < path.stat().st_ctime_ns + LATER_NS:
        time.sleep(0.001)


def with_fields(status, **fields) -> Any:
    """A stat result with other values in these fields."""
    names = ("st_size", "st_mtime_ns", "st_ctime_ns", "st_ino", "st_dev")
    return SimpleNamespace(**{name: getattr(status, name) for name in names} | fields)


def test_a_file_that_is_only_read_keeps_its_stat_record(tmp_path):
    path = old_file(tmp_path / "a")
    before = stat_of(path.stat())
    assert path.read_bytes() == b"bytes"
    assert stat_of(path.stat()) == before
    assert before[0] == 5


def test_a_file_overwritten_in_place_with_its_size_and_time_has_another_stat_record(tmp_path):
    path = old_file(tmp_path / "a")
    before = stat_of(path.stat())
    wait_for_another_time(path)
    old_file(path, b"BYTES")
    assert stat_of(path.stat()) != before
    assert path.stat().st_mtime_ns == YEAR_2000_NS


def test_another_file_put_in_its_place_with_its_size_and_time_has_another_stat_record(tmp_path):
    path, other = old_file(tmp_path / "a"), old_file(tmp_path / "b", b"BYTES")
    before = stat_of(path.stat())
    other.replace(path)
    assert stat_of(path.stat()) != before


@pytest.mark.parametrize("field", ["st_size", "st_mtime_ns", "st_ctime_ns", "st_ino"])
def test_each_field_counts_alone(tmp_path, field):
    status = old_file(tmp_path / "a").stat()
    assert stat_of(with_fields(status, **{field: getattr(status, field) + 1})) != stat_of(status)


def test_the_device_does_not_count_as_it_may_be_another_one_after_each_mount(tmp_path):
    status = old_file(tmp_path / "a").stat()
    assert stat_of(with_fields(status, st_dev=status.st_dev + 1)) == stat_of(status)


@pytest.mark.parametrize(("kind", "counts"), [("ext4", True), ("nfs4", True), ("fuse.s3fs", False), ("vfat", False), ("exfat", False)])
def test_the_inode_counts_unless_the_file_system_makes_it_up(tmp_path, monkeypatch, kind, counts):
    status = with_fields(old_file(tmp_path / "a").stat(), st_dev=os.makedev(7, 3))
    (tmp_path / "mounts").write_text(f"22 27 7:30 / /x rw - ext4 x rw\n23 27 7:3 /sub /mnt/a rw,relatime shared:1 - {kind} server rw\n")
    monkeypatch.setattr(stat_record, "_MOUNTS", tmp_path / "mounts")
    stat_record._has_lasting_inodes.cache_clear()
    assert (stat_of(with_fields(status, st_ino=1)) != stat_of(with_fields(status, st_ino=2))) == counts
    assert stat_of(with_fields(status, st_ctime_ns=1)) != stat_of(with_fields(status, st_ctime_ns=2))
    stat_record._has_lasting_inodes.cache_clear()


def test_on_windows_the_time_at_which_a_file_was_made_proves_nothing_and_the_inode_counts(tmp_path, monkeypatch):
    status = old_file(tmp_path / "a").stat()
    monkeypatch.setattr(system, "IS_WINDOWS", True)
    assert stat_of(with_fields(status, st_ctime_ns=1)) == stat_of(with_fields(status, st_ctime_ns=2))
    assert stat_of(with_fields(status, st_ino=1)) != stat_of(with_fields(status, st_ino=2))


@pytest.mark.parametrize("field", ["st_mtime_ns", "st_ctime_ns"])
@pytest.mark.parametrize(("age_seconds", "proves"), [(3600, True), (1, False), (0, False), (-60, False), (-10 * 365 * 86400, True)])
def test_a_time_that_is_within_the_steps_of_the_clock_proves_nothing(tmp_path, monkeypatch, field, age_seconds, proves):
    """A time somewhat in the future is that of a server whose clock is ahead."""
    monkeypatch.setattr(stat_record, "WRITTEN_SECONDS", 2.0)
    monkeypatch.setattr(stat_record, "CHANGED_SECONDS", 2.0)
    status = with_fields(old_file(tmp_path / "a").stat(), st_ctime_ns=YEAR_2000_NS)
    status = with_fields(status, **{field: time.time_ns() - age_seconds * 10**9})
    assert proof_of(status) == (stat_of(status) if proves else NO_STAT)


def test_a_copy_with_an_old_time_that_was_made_just_now_proves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(stat_record, "CHANGED_SECONDS", 3600)
    assert proof_of(old_file(tmp_path / "a").stat()) == NO_STAT
