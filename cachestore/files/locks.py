"""File locks. They avoid double work; correctness does not depend on them. They are made when needed and never kept over a fork.

filelock is imported inside the functions: it takes 60 ms, and readers must not load it.
"""

import errno
import os
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from cachestore.core import system
from cachestore.core.errors import LockTimeout
from cachestore.files import in_use
from cachestore.files.paths import Mode

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

if TYPE_CHECKING:
    from filelock import BaseFileLock
    from typing_extensions import Self

_PROBE_FLAGS: Final = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
_HELD: Final = {errno.EACCES, errno.EAGAIN, errno.EWOULDBLOCK}


def _make(path: Path, bits: int) -> "BaseFileLock":
    from filelock import FileLock

    # filelock's soft lock would leave a file behind when a process is killed. Having no lock only costs double work.
    return FileLock(path, thread_local=False, mode=bits, fallback_to_soft=False)


@contextmanager
def locked(path: Path, *, seconds: float, mode: Mode = Mode.PRIVATE) -> Generator[None]:
    """Hold a lock during the block. Raises LockTimeout with the path if the lock is not free within `seconds`, or does not work there."""
    from filelock import Timeout

    lock = _make(path, mode.file_bits)
    try:
        if not path.parent.is_dir():
            path.parent.mkdir(exist_ok=True)  # without its parents: only creating a store makes its root
            with suppress(OSError):  # another user made it a moment ago
                path.parent.chmod(mode.folder_bits)
        lock.acquire(timeout=seconds, poll_interval=0.02)
    except (Timeout, NotImplementedError, OSError) as error:
        raise LockTimeout(
            f"could not get the lock {path} within {seconds:g} s: another process holds it; run the same command again when that has ended"
        ) from error
    try:
        yield
    finally:
        with suppress(OSError):  # the lock ends with the process
            lock.release()


class LifeLock:
    """A lock that a worker holds until it ends, however it ends. `is_held` is False if the file system gave no lock.

    Whether locks work is tested at once, as some file systems grant every lock to every process. The file of a lock that does not work
    is removed: it would look like that of a dead worker.
    """

    def __init__(self, path: Path, *, bits: int = 0o664) -> None:
        from filelock import Timeout

        self._path = path
        self._pid = os.getpid()
        self._lock = _make(path, bits)
        try:
            self._lock.acquire(timeout=0)
            self.is_held = is_locked(path) is True
        except Timeout:  # another process has the lock and the file
            self.is_held = False
            return
        except (NotImplementedError, OSError):
            self.is_held = False
        if not self.is_held:
            with suppress(OSError):
                self._lock.release()
            with suppress(OSError):
                in_use.unlink(path)

    def release(self) -> None:
        """Release the lock, or leave that to the end of the process if the file system refuses. In a forked child this does nothing."""
        if self.is_held and self._pid == os.getpid():
            self.is_held = False
            with suppress(OSError):
                self._lock.release()
                _keep(self._path)

    def __enter__(self) -> "Self":
        return self

    def __exit__(self, *_exc: object) -> None:
        self.release()


def is_locked(path: Path) -> bool | None:
    """Return whether a process holds this lock now; None if the file system cannot tell or the file is gone.

    The test makes no file. It takes only a shared lock, so two tests at once do not see each other as the holder.
    """
    if fcntl is None:
        return _is_locked_by_taking(path)
    try:
        descriptor = os.open(path, _PROBE_FLAGS)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return True if error.errno in _HELD else None
    finally:
        os.close(descriptor)
    return False


def process_mark(pid: int) -> str:
    """Return what tells a process of this machine from all others: boot, namespace of pids, pid and start. Linux only, else the pid."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()} {pid} {_start_of(pid)}"
    except OSError:
        return str(pid)


def _start_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]


def is_dead(mark: str) -> bool:
    """Return whether the process with this mark is proved to have ended. Raises ValueError for what is no mark."""
    where, pid, start = mark.rsplit(" ", 2)
    if not process_mark(os.getpid()).startswith(f"{where} "):
        return False  # it ran elsewhere
    try:
        os.kill(int(pid), 0)
        return _start_of(int(pid)) != start
    except ProcessLookupError:
        return True
    except OSError:
        return False


def _is_locked_by_taking(path: Path) -> bool | None:
    """The test without shared locks: take the lock for a moment. Another test at that moment may see this one as the holder."""
    from filelock import Timeout

    if not path.exists():
        return None
    lock = _make(path, 0o664)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return True
    except (NotImplementedError, OSError):
        return None
    lock.release()
    _keep(path)
    return False


def _keep(path: Path) -> None:
    """Leave the file of a free lock: it says that its worker has ended. On Windows filelock removes it."""
    if system.IS_WINDOWS:
        path.touch()
