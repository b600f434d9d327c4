"""Two sides of one folder that look at each other: on one disk, over mounts with stale caches and no common locks, and alone."""

import json
import os
import subprocess
import sys
import time
from ctypes.util import find_library
from importlib.util import find_spec
from pathlib import Path

import pytest

from cachestore.care.doctor import NOTE, OK, PROBLEM
from cachestore.care.peer import meet
from cachestore.jobs.share.workers import Heartbeat
from tests.fakes import ROOT

COMMAND = (sys.executable, "-m", "cachestore", "doctor")


def both(one, other):
    """What two processes that look at the same time say of each other, each by its own path; and how long it took."""
    began = time.monotonic()
    running = [
        subprocess.Popen([*COMMAND, str(path), "--peer", "--json"], stdout=subprocess.PIPE, cwd=ROOT, text=True) for path in (one, other)
    ]
    reported = [json.loads(process.communicate(timeout=50)[0])["checks"] for process in running]
    found = [{check["name"]: check for check in checks if check["name"].startswith("peer")} for checks in reported]
    return found, time.monotonic() - began


@pytest.mark.slow
@pytest.mark.processes
def test_on_one_folder_both_sides_see_files_and_locks(layout):
    found, _seconds = both(layout.root, layout.root)
    for side in found:
        assert {name: check["state"] for name, check in side.items()} == {"peer files": OK, "peer locks": OK}
    assert os.listdir(layout.temporary) == []


@pytest.mark.slow  # what is seen late takes long to be seen
@pytest.mark.skipif(
    find_spec("mfusepy") is None or not (find_library("fuse") or find_library("fuse3")) or not os.access("/dev/fuse", os.W_OK),
    reason="file systems of one's own cannot be mounted here: it needs libfuse, /dev/fuse and the dependency group `engines`",
)
def test_on_two_mounts_with_stale_caches_both_sides_say_how_late_they_see_and_that_locks_do_not_reach(layout, tmp_path):
    mounts = [tmp_path / "here", tmp_path / "there"]
    servers = []
    for mount in mounts:
        mount.mkdir()
        program = Path(__file__).with_name("stale_folder.py")
        servers.append(subprocess.Popen([sys.executable, str(program), str(layout.root), str(mount), "6"]))
    try:
        deadline = time.monotonic() + 20
        while not all(os.path.ismount(mount) for mount in mounts):
            assert time.monotonic() < deadline, "the folder was not mounted"
            time.sleep(0.05)
        found, seconds = both(*mounts)
    finally:
        for mount, server in zip(mounts, servers, strict=True):
            subprocess.run(["umount", "-l", str(mount)], check=False)
            server.terminate()
            server.wait(10)
    assert seconds < 30
    for side in found:
        assert {name: check["state"] for name, check in side.items()} == {"peer files": NOTE, "peer locks": NOTE}
        longest = float(side["peer files"]["found"].split(", ")[1].split()[0])
        assert 3.0 < longest < 8.0


def test_a_side_alone_says_how_to_start_the_other(layout):
    [check] = meet(layout, seconds=0.3)
    assert check.state == PROBLEM
    assert f"doctor {layout.root} --peer" in check.advice
    assert os.listdir(layout.temporary) == []


def test_a_side_that_was_killed_before_is_not_met(layout):
    with Heartbeat(layout, "", 0, "doctor --peer", None, 1):
        [check] = meet(layout, seconds=0.5)
    assert check.name == "peer"


@pytest.mark.processes
def test_a_peer_without_a_store_is_refused():
    ended = subprocess.run([*COMMAND, "--peer"], capture_output=True, text=True, check=False, cwd=ROOT)
    assert ended.returncode == 2
    assert "doctor STORE --peer" in ended.stderr
