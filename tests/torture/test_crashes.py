"""The disk that the power is cut from: what is synced stays, and of the rest anything may be."""

from random import Random
from threading import Thread

import pytest

from tests.fakes import tells_of
from tests.torture import crashes
from tests.torture.crashes import Disk, states
from tests.torture.jobs import Job

MANY = 300


def drawn(*calls):
    """Every state that many draws find after these calls: path -> bytes, None for a folder."""
    disk = Disk()
    for call in calls:
        disk.do(*call)
    found = []
    for seed in range(MANY):
        state = disk.draw(Random(seed))
        if state not in found:
            found.append(state)
    return found


def test_nothing_that_was_done_leaves_nothing():
    assert drawn() == [{}]


def test_what_was_synced_with_its_name_is_always_there():
    calls = [("create", "a"), ("write", "a", "text"), ("fsync", "a"), ("fsync", "")]
    assert drawn(*calls) == [{"a": b"text"}]


def test_a_name_without_a_sync_of_its_folder_may_be_lost():
    found = drawn(("create", "a"), ("write", "a", "text"), ("fsync", "a"))
    assert {} in found
    assert {"a": b"text"} in found
    assert len(found) == 2


def test_bytes_without_a_sync_may_be_lost_cut_or_zero():
    found = [state["a"] for state in drawn(("create", "a"), ("fsync", ""), ("write", "a", "text"))]
    assert {b"", b"text", bytes(4)} <= set(found)
    assert any(0 < len(each) < 4 for each in found)


def test_what_lies_in_a_folder_whose_name_is_lost_is_lost():
    found = drawn(("mkdir", "f"), ("create", "f/a"), ("write", "f/a", "text"), ("fsync", "f/a"), ("fsync", "f"))
    assert len(found) == 2
    assert {} in found
    assert {"f": None, "f/a": b"text"} in found


def test_a_link_is_the_same_file_under_another_name_and_may_be_there_before_the_first():
    calls = [("create", "a"), ("write", "a", "text"), ("fsync", "a"), ("link", "a", "b"), ("unlink", "a")]
    found = drawn(*calls)
    assert {"b": b"text"} in found
    assert {"a": b"text"} in found
    assert {} in found
    torn = [state for state in drawn(("create", "a"), ("write", "a", "text"), ("link", "a", "b")) if len(state) == 2]
    assert all(state["a"] == state["b"] for state in torn)


def test_a_replaced_file_is_the_old_or_the_new_one():
    disk = Disk()
    for call in (("create", "a"), ("write", "a", "old"), ("fsync", "a"), ("fsync", "")):
        disk.do(*call)
    for call in (("create", "t"), ("write", "t", "new"), ("fsync", "t"), ("replace", "t", "a")):
        disk.do(*call)
    assert {disk.draw(Random(seed))["a"] for seed in range(MANY)} == {b"old", b"new"}


def test_a_call_that_nobody_knows_is_refused():
    with pytest.raises(ValueError, match="nobody knows"):
        Disk().do("splice", "a")


def test_states_are_all_different_and_end_where_there_are_no_more():
    calls = [["create", "a"], ["write", "a", "text"], ["fsync", "a"], ["fsync", ""]]
    found = list(states({"one": ("put", Disk(), calls)}, 1000, 1))
    assert 5 < len(found) < 100
    assert len({(tuple(sorted(state.files.items())), state.acknowledged) for state in found}) == len(found)
    assert list(states({"one": ("put", Disk(), calls)}, 4, 1)) == found[:4]
    assert list(states({}, 10, 1)) == []


def test_two_disks_differ_in_names_and_in_bytes():
    one, other = Disk(), Disk()
    for disk in (one, other):
        disk.do("mkdir", "f")
        disk.do("create", "f/a")
    assert one.differs_from(other) == []
    one.do("write", "f/a", "text")
    other.do("create", "b")
    assert one.differs_from(other) == ["b", "f/a"]


def make_folders(root, rank, world):
    def make(name):
        for number in range(25):
            (root.parent / f"{name}.{number}").mkdir(exist_ok=True)

    threads = [Thread(target=make, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_a_recording_of_several_threads_misses_no_call_of_one_that_dies(tmp_path):
    """A call of one thread was done and not recorded when another died, and what stood on it seemed lost."""
    job = Job("folders", lambda root: None, make_folders, lambda root: set())
    for number in range(10):
        folder = tmp_path / str(number)
        folder.mkdir()
        template = folder / "template"
        template.mkdir()
        events = crashes.record(job, template, folder, dead_after=30)
        assert len(events) == 100


def test_a_recording_that_misses_a_call_is_refused(tmp_path, monkeypatch):
    job = Job("folders", lambda root: None, lambda root, rank, world: root.with_name("one").mkdir(), lambda root: set())
    (tmp_path / "template").mkdir()
    monkeypatch.setattr(crashes, "watch", lambda area, around: None)
    with pytest.raises(RuntimeError, check=tells_of("'one'")):
        crashes.record(job, tmp_path / "template", tmp_path)
