"""Single segments: what is damaged in one, and what is only unreadable."""

import errno
import os
from pathlib import Path

import pytest

from cachestore.care.verify import verify
from cachestore.files import checksum
from cachestore.store.format.entry import make_entry
from cachestore.store.write.append import publish_segment
from tests.store.stores import damage, entry_of, flip, found, key_of, put, segment_of, where


def hit(layout, *arguments):
    """The entries of the only finding, as (key, sample, has_copy)."""
    [finding] = verify(layout.root, *arguments).findings
    return [(entry.key, entry.sample, entry.has_copy) for entry in finding.entries]


def test_a_damaged_entry_is_one_finding_with_the_sample_that_it_hits(full):
    path, entry = segment_of(full, 1)
    flip(path, entry.offset)
    assert found(full) == {("corrupt-entry", where(full, path), str(key_of(1)), "1")}
    assert hit(full) == [(str(key_of(1)), "1", False)]
    assert "repair" in verify(full.root).findings[0].message
    assert "--refill" in verify(full.root).findings[0].message


def test_two_damaged_entries_of_a_segment_are_one_finding_that_lists_both(full):
    for number in (1, 2):
        path, entry = segment_of(full, number)
        flip(path, entry.offset)
    assert len(verify(full.root).findings) == 1
    assert sorted(hit(full)) == sorted((str(key_of(number)), str(number), False) for number in (1, 2))


def test_damaged_entries_of_two_segments_are_two_findings(full):
    for number in (1, 3):
        path, entry = segment_of(full, number)
        flip(path, entry.offset)
    assert [finding.kind for finding in verify(full.root).findings] == ["corrupt-entry"] * 2


def test_a_damaged_entry_with_another_copy_is_not_lost(full):
    put(full, 1, variant=1)
    path, entry = segment_of(full, 1)
    flip(path, entry.offset)
    assert {kind for kind, *_rest in found(full)} == {"corrupt-entry"}
    assert hit(full) == [(str(key_of(1)), "1", True)]
    assert "--refill" not in verify(full.root).findings[0].message


def test_quick_looks_at_no_entry(full):
    damage(full, 1)
    assert found(full, "quick") == set()


def test_damage_between_entries_is_a_corrupt_segment_whose_entries_are_good(full):
    path, entry = segment_of(full, 1)
    flip(path, entry.offset + entry.size_bytes if entry.ordinal == 0 else entry.offset - 1)
    assert found(full) == {("corrupt-segment", where(full, path), None, None)}
    assert hit(full) == []


@pytest.mark.parametrize("level", ["full", "quick"])
def test_a_damaged_header_is_a_corrupt_segment_that_lists_its_entries_as_the_index_knows_them(full, level):
    path, _entry = segment_of(full, 1)
    flip(path, 9)
    assert found(full, level) == {("corrupt-segment", where(full, path), None, None)}
    assert sorted(hit(full, level)) == sorted((str(key_of(number)), str(number), False) for number in (1, 2))


def test_without_an_index_the_entries_of_a_damaged_header_are_found_by_the_catalog(full):
    for index in full.indexes.iterdir():
        index.unlink()
    path, _entry = segment_of(full, 3)
    flip(path, 9)
    assert found(full) == {
        ("corrupt-segment", where(full, path), None, None),
        ("missing-entry", "catalogs/train/1.safetensors", str(key_of(3)), "3"),
    }


@pytest.mark.parametrize("level", ["full", "quick"])
@pytest.mark.parametrize("change", [-1, 1])
def test_another_size_is_a_corrupt_segment(full, level, change):
    path, _entry = segment_of(full, 3)
    path.chmod(0o644)
    os.truncate(path, path.stat().st_size + change)
    assert ("corrupt-segment", where(full, path), None, None) in found(full, level)


def test_a_segment_under_another_segments_name_is_a_corrupt_segment(full):
    (path, _), (other, _) = segment_of(full, 1), segment_of(full, 3)
    raw = path.read_bytes()
    other.unlink()
    other.write_bytes(raw)
    assert {kind for kind, *_rest in found(full)} == {"corrupt-segment", "missing-entry"}


@pytest.mark.parametrize("trap", ["link", "dangling link", "fifo", "folder"])
def test_what_is_no_regular_file_is_a_corrupt_segment(full, tmp_path, trap):
    path, _entry = segment_of(full, 3)
    path.rename(tmp_path / "elsewhere")
    if trap == "fifo":
        os.mkfifo(path)
    elif trap == "folder":
        path.mkdir()
    else:
        path.symlink_to(tmp_path / "elsewhere" if trap == "link" else "nothing")
    assert ("corrupt-segment", where(full, path), None, None) in found(full)


def test_a_segment_that_is_gone_makes_its_entries_missing(full):
    path, _entry = segment_of(full, 3)
    path.unlink()
    assert found(full) == {("missing-entry", "catalogs/train/1.safetensors", str(key_of(3)), "3")}


@pytest.mark.parametrize("block", [1, 7, 64, 1000])
def test_entries_are_checked_wherever_the_blocks_of_a_read_end(full, monkeypatch, block):
    monkeypatch.setattr(checksum, "_BLOCK_BYTES", block)
    publish_segment(
        full,
        [*(entry_of(n) for n in range(4, 9)), make_entry(key_of(9), {}, {}), make_entry(key_of(10), {"x": ("U8", (0,), b"")}, {})],
        origin="",
    )
    assert verify(full.root).ok
    path, entry = segment_of(full, 6)
    flip(path, entry.offset + entry.size_bytes - 1)
    assert found(full) == {("corrupt-entry", where(full, path), str(key_of(6)), None)}


def test_an_input_error_is_unreadable_and_nothing_is_called_missing(full, monkeypatch):
    path, _entry = segment_of(full, 3)
    real = os.preadv

    def fail(descriptor, buffers, offset):
        if Path(f"/proc/self/fd/{descriptor}").readlink() == path:
            raise OSError(errno.EIO, "Input/output error")
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", fail)
    assert found(full) == {("unreadable", where(full, path), None, None)}


def test_a_mismatch_that_a_second_look_does_not_see_is_none(full, monkeypatch):
    path, _entry = segment_of(full, 3)
    real, bad = os.preadv, [1]

    def once_wrong(descriptor, buffers, offset):
        count = real(descriptor, buffers, offset)
        if Path(f"/proc/self/fd/{descriptor}").readlink() == path and count > 1000 and bad:
            bad.pop()
            buffers[0][count - 1] ^= 1
        return count

    publish_segment(full, [make_entry(key_of(8), {"x": ("U8", (5000,), bytes(5000))}, {})], origin="")
    path, _entry = segment_of(full, 8)
    monkeypatch.setattr(os, "preadv", once_wrong)
    assert verify(full.root).ok
    assert bad == []
