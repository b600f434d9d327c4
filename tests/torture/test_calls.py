"""Striking calls: which are watched, which point is struck, and that a strike does what it says."""

import errno
import json
import os
import signal
from itertools import islice

import pytest

from tests.torture.calls import APPLIES, Point, Strike, _Striker, chosen
from tests.torture.watching import Call, watch

POINTS = [Point(job, world, 0, number, Strike(kill="before")) for job in ("put", "gc") for world in (1, 2) for number in range(5)]


def in_a_fork(act):
    """What a function returns, or the number of the signal that ended it, from a process of its own."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(writing, json.dumps(act()).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as reported:
        text = reported.read()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return json.loads(text) if code == 0 else -code


def write(folder):
    """Make a file of eight bytes, by two writes."""
    descriptor = os.open(folder / "file", os.O_WRONLY | os.O_CREAT)
    left = b"12345678"
    while left:
        left = left[os.write(descriptor, left[:4]) :]
    os.close(descriptor)


def struck(tmp_path, strike, number=0):
    """What is left of `write` when a strike befalls a call, and how it ended."""
    note = tmp_path / "struck"
    folder = tmp_path / "store"
    folder.mkdir()

    def act():
        watch(folder, _Striker(Point("put", 1, 0, number, strike), note))
        try:
            write(folder)
        except OSError as error:
            return error.errno
        return 0

    ended = in_a_fork(act)
    path = folder / "file"
    return ended, path.read_bytes() if path.exists() else None, note.exists()


@pytest.mark.parametrize(
    ("kill", "number", "left"),
    [("before", 0, None), ("after", 0, b""), ("before", 1, b""), ("within", 1, b"12"), ("after", 2, b"12345678")],
)
def test_a_process_dies_where_it_is_told_to(tmp_path, kill, number, left):
    assert struck(tmp_path, Strike(kill=kill), number) == (signal.SIGKILL, left, True)


def test_a_call_is_refused_once_or_a_write_is_short(tmp_path):
    assert struck(tmp_path, Strike(error="ENOSPC"), 2) == (errno.ENOSPC, b"1234", True)


@pytest.mark.parametrize("is_sticky", [False, True])
def test_a_short_write_is_followed_by_the_rest(tmp_path, is_sticky):
    assert struck(tmp_path, Strike(error="short write", is_sticky=is_sticky), 1) == (0, b"12345678", True)


def test_a_call_that_is_never_made_is_not_struck(tmp_path):
    assert struck(tmp_path, Strike(kill="before"), 100) == (0, b"12345678", False)


def test_calls_that_concern_something_else_are_not_watched(tmp_path):
    seen = []

    def act():
        watch(tmp_path / "store", lambda call, real: (seen.append(call.name), real())[1])
        (tmp_path / "other").mkdir()
        write(tmp_path / "other")
        (tmp_path / "store").mkdir()
        write(tmp_path / "store")
        return seen

    assert in_a_fork(act) == ["mkdir", "open", "write", "write"]


def test_every_error_befalls_some_call_and_a_short_write_only_writes():
    calls = [Call(name, "") for name in ("open", "write", "mkdir", "link", "preadv", "listdir")]
    assert all(any(applies(call) for call in calls) for applies in APPLIES.values())
    assert [call.name for call in calls if APPLIES["short write"](call)] == ["write"]
    assert not Strike(kill="before").befalls(Call("preadv", ""))


def test_points_are_chosen_from_every_job_and_world_alike_and_by_the_seed():
    some = list(islice(chosen(POINTS, 1), 8))
    assert {(point.job, point.world) for point in some} == {(job, world) for job in ("put", "gc") for world in (1, 2)}
    assert some == list(islice(chosen(POINTS, 1), 8))
    assert some != list(islice(chosen(POINTS, 2), 8))
    assert sorted(map(repr, chosen(POINTS, 1))) == sorted(map(repr, POINTS))
    assert list(chosen([], 1)) == []
