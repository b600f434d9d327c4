"""Locks: held by one, given back by the dead, and worth nothing where the file system has none."""

import errno
import fcntl
import os
import signal
import subprocess
import sys

import pytest

from cachestore.core.errors import LockTimeout
from cachestore.files import locks
from cachestore.files.locks import LifeLock, is_locked, locked
from tests.fakes import refusing

HOLDER = """
import sys
from pathlib import Path
from cachestore.files.locks import LifeLock
lock = LifeLock(Path(sys.argv[1]))
print(lock.is_held, flush=True)
sys.stdin.read()
"""

FORKER = """
import os, sys
from pathlib import Path
from cachestore.files.locks import LifeLock, is_locked
path = Path(sys.argv[1])
lock = LifeLock(path)
child = os.fork()
if child == 0:
    lock.release()
    os._exit(0)
os.waitpid(child, 0)
print(is_locked(path), lock.is_held)
"""


@pytest.fixture
def path(tmp_path):
    return tmp_path / "a.lock"


@pytest.fixture
def no_locks(monkeypatch):
    """A file system that refuses every lock."""
    monkeypatch.setattr(fcntl, "flock", refusing(errno.ENOLCK))


def test_whether_a_missing_lock_is_held_is_unknown(path):
    assert is_locked(path) is None
    assert not path.exists()


def test_a_held_lock_is_seen_and_a_released_one_is_not(path):
    with LifeLock(path) as lock:
        assert lock.is_held
        assert is_locked(path) is True
    assert is_locked(path) is False


def test_a_lock_is_had_by_one(path):
    with LifeLock(path), LifeLock(path) as second:
        assert not second.is_held


def test_releasing_twice_is_fine(path):
    lock = LifeLock(path)
    lock.release()
    lock.release()
    assert not lock.is_held


def test_a_block_holds_its_lock_and_makes_the_folder(tmp_path):
    path = tmp_path / "locks" / "a.lock"
    with locked(path, seconds=0):
        assert is_locked(path) is True
    assert is_locked(path) is False


def test_a_block_that_raises_gives_its_lock_back(path):
    with pytest.raises(ZeroDivisionError), locked(path, seconds=0):
        raise ZeroDivisionError
    assert is_locked(path) is False


def test_a_lock_that_is_not_free_in_time_is_a_lock_timeout_that_names_it(path):
    with LifeLock(path), pytest.raises(LockTimeout), locked(path, seconds=0.01):
        pytest.fail("entered")
    with locked(path, seconds=0):
        assert is_locked(path) is True


def test_a_killed_holder_gives_its_lock_back(path):
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"True\n"
        assert is_locked(path) is True
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    assert is_locked(path) is False


def test_a_forked_child_cannot_give_its_parents_lock_back(path):
    finished = subprocess.run([sys.executable, "-c", FORKER, str(path)], capture_output=True, text=True, timeout=30, check=True)
    assert finished.stdout == "True True\n"


def test_a_lock_file_has_the_bits_of_the_store_whatever_the_umask(path):
    before = os.umask(0o077)
    try:
        LifeLock(path, bits=0o664).release()
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o664


def test_without_locks_a_life_lock_holds_nothing_and_says_so(path, no_locks):
    with LifeLock(path) as lock:
        assert not lock.is_held


def test_without_locks_a_block_is_a_lock_timeout(path, no_locks):
    with pytest.raises(LockTimeout), locked(path, seconds=0):
        pytest.fail("entered")


def test_without_locks_nobody_can_tell_who_holds_one(path, no_locks):
    path.touch()
    assert is_locked(path) is None


@pytest.fixture
def idle_locks(monkeypatch):
    """A network file system that grants every lock to everybody."""
    monkeypatch.setattr(fcntl, "flock", lambda _descriptor, _operation: None)


def test_a_life_lock_that_everybody_is_granted_holds_nothing_and_leaves_no_file_that_would_yield(path, idle_locks):
    with LifeLock(path) as lock:
        assert not lock.is_held
        assert is_locked(path) is None


def test_a_life_lock_that_is_refused_leaves_no_file_that_would_yield(path, no_locks):
    with LifeLock(path):
        assert not path.exists()


def test_a_life_lock_that_somebody_else_holds_leaves_his_file(path):
    with LifeLock(path):
        with LifeLock(path):
            pass
        assert is_locked(path) is True


def test_two_probes_do_not_see_each_other(path, monkeypatch):
    """The second one looks while the first holds what it looks with."""
    path.touch()
    seen = []
    really = fcntl.flock

    def flock(descriptor, operation):
        really(descriptor, operation)
        if len(seen) < 1:
            seen.append(None)
            seen.append(is_locked(path))

    monkeypatch.setattr(fcntl, "flock", flock)
    assert is_locked(path) is False
    assert seen == [None, False]


def test_a_probe_makes_no_file_and_writes_none(path):
    path.touch()
    path.chmod(0o444)
    before = path.stat()
    assert is_locked(path) is False
    assert path.stat() == before
    assert [one.name for one in path.parent.iterdir()] == ["a.lock"]


def test_a_probe_follows_no_link(path, tmp_path):
    (tmp_path / "elsewhere").touch()
    path.symlink_to(tmp_path / "elsewhere")
    assert is_locked(path) is None


class TestWithoutSharedLocks:
    """Windows has no fcntl; there a probe takes the lock for a moment."""

    @pytest.fixture(autouse=True)
    def _no_fcntl(self, monkeypatch):
        monkeypatch.setattr(locks, "fcntl", None)

    def test_whether_a_missing_lock_is_held_is_unknown(self, path):
        assert is_locked(path) is None
        assert not path.exists()

    def test_a_held_lock_is_seen_and_a_released_one_is_not(self, path):
        with LifeLock(path) as lock:
            assert lock.is_held
            assert is_locked(path) is True
        assert is_locked(path) is False

    def test_nobody_can_tell_where_locks_are_refused(self, path, no_locks):
        path.touch()
        assert is_locked(path) is None


def test_a_lock_that_the_file_system_does_not_take_back_ends_nothing(tmp_path, monkeypatch):
    lock = LifeLock(tmp_path / "life.lock")
    really = fcntl.flock
    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", lambda descriptor, what: refuse() if what & fcntl.LOCK_UN else really(descriptor, what))
        lock.release()
        with locked(tmp_path / "word.lock", seconds=0):
            pass
    assert not lock.is_held


def test_a_lock_that_cannot_be_probed_counts_for_nothing_and_ends_nothing(tmp_path, monkeypatch):
    really = fcntl.flock
    monkeypatch.setattr(
        fcntl, "flock", lambda descriptor, what: really(descriptor, what) if what == fcntl.LOCK_EX | fcntl.LOCK_NB else refuse()
    )
    assert not LifeLock(tmp_path / "life.lock").is_held
    assert not (tmp_path / "life.lock").exists()


def refuse():
    raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
