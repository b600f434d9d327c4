import os
import signal
import socket
import subprocess
import sys
import tempfile
import time

import pytest

from cachestore.core.errors import WriteFailed
from cachestore.files.locks import LifeLock
from cachestore.files.scratch import scratch_folder
from tests.fakes import ROOT

HERE = socket.gethostname()
HELD = """
import sys, time
from pathlib import Path
from cachestore.files.scratch import scratch_folder
with scratch_folder(Path(sys.argv[1])) as folder:
    (folder / "weights").write_bytes(b"much")
    print(folder, flush=True)
    time.sleep(60)
"""


@pytest.fixture
def above(tmp_path, monkeypatch):
    """The folder for temporary files."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def left_behind(above, machine, *, seconds=120.0):
    """As what a process that was killed so long ago left."""
    folder = above / f"cachestore-{machine}-x"
    (folder / "files").mkdir(parents=True)
    (folder / "lock").touch()
    made = time.time() - seconds
    os.utime(folder, (made, made))
    return folder


def test_a_folder_is_empty_and_ends_with_its_block(above):
    with scratch_folder() as one, scratch_folder() as other:
        assert list(one.iterdir()) == []
        assert one != other
        (one / "file").touch()
    assert list(above.iterdir()) == []


@pytest.mark.processes
def test_what_a_killed_process_left_goes_with_the_next_folder_and_what_a_running_one_uses_stays(above):
    with subprocess.Popen([sys.executable, "-c", HELD, above], stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        try:
            folder = above / process.stdout.readline().strip()
            an_hour_ago = time.time() - 3600
            os.utime(folder.parent, (an_hour_ago, an_hour_ago))
            with scratch_folder():
                assert (folder / "weights").exists()
        finally:
            process.send_signal(signal.SIGKILL)
    assert (folder / "weights").exists()
    with scratch_folder():
        assert not folder.parent.exists()


def test_folders_of_other_users_machines_and_programs_links_and_those_made_just_now_stay(above, monkeypatch):
    kept = [left_behind(above, "elsewhere"), left_behind(above, HERE + "-new", seconds=1)]
    other = above / "other-x"
    other.mkdir()
    linked = above / f"cachestore-{HERE}-link"
    linked.symlink_to(other)
    without_lock = left_behind(above, HERE + "-unlocked")
    (without_lock / "lock").unlink()
    with scratch_folder():
        assert all(folder.exists() for folder in (*kept, other, linked, without_lock))
    mine = left_behind(above, HERE)
    with monkeypatch.context() as patched:
        patched.setattr(os, "getuid", lambda: -1)
        with scratch_folder():
            assert mine.exists(), "it is another user's now"
    with LifeLock(mine / "lock") as lock, scratch_folder():
        assert lock.is_held
        assert mine.exists()


def test_a_folder_that_cannot_be_made_is_an_error_that_names_tmpdir(above, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(above / "missing"))
    with pytest.raises(WriteFailed), scratch_folder():
        pass
