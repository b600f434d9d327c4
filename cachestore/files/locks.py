"""Locks that save work and never make anything correct. Made at the moment of use, never kept over a fork.

filelock is imported inside the functions: it takes 60 ms, and readers must not load it.
"""

import errno
import os
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from cachestore.core.errors import LockTimeout
from cachestore.files.paths import Mode

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

if TYPE_CHECKING:
    from filelock import BaseFileLock

_PROBE_FLAGS: Final = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
_HELD: Final = {errno.EACCES, errno.EAGAIN, errno.EWOULDBLOCK}


def _make(path: Path, bits: int) -> "BaseFileLock":
    from filelock import FileLock

    # A soft fall-back would leave a marker that outlives a killed process; a lock that does nothing only costs duplicates.
    return FileLock(path, thread_local=False, mode=bits, fallback_to_soft=False)


@contextmanager
def locked(path: Path, *, seconds: float, mode: Mode = Mode.PRIVATE) -> Generator[None]:
    """Hold a lock for the block. Raises LockTimeout, naming the path, if it is not free within `seconds` or cannot be had at all."""
    from filelock import Timeout

    lock = _make(path, mode.file_bits)
    try:
        if not path.parent.is_dir():
            path.parent.mkdir(exist_ok=True)  # not those above: only creating a store makes its root
            with suppress(OSError):  # another user made it a moment ago
                path.parent.chmod(mode.folder_bits)
        lock.acquire(timeout=seconds, poll_interval=0.02)
    except (Timeout, NotImplementedError, OSError) as error:
        raise LockTimeout(f"could not get the lock {path} within {seconds:g} s") from error
    try:
        yield
    finally:
        with suppress(OSError):  # it goes with the process
            lock.release()


class LifeLock:
    """A lock that a worker holds until it ends, however it ends. Where the file system has no locks it holds nothing, and says so.

    What is granted is probed at once: some file systems grant every lock to everybody. A file whose lock cannot be held is removed,
    so that nobody takes its yielding for a death. `is_held` tells whether the file system granted it, and grants it to nobody else.
    """

    def __init__(self, path: Path, *, bits: int = 0o664) -> None:
        from filelock import Timeout

        self._pid = os.getpid()
        self._lock = _make(path, bits)
        try:
            self._lock.acquire(timeout=0)
            self.is_held = is_locked(path) is True
        except Timeout:  # somebody else's, and so is the file
            self.is_held = False
            return
        except (NotImplementedError, OSError):
            self.is_held = False
        if not self.is_held:
            with suppress(OSError):
                self._lock.release()
            with suppress(OSError):
                path.unlink()

    def release(self) -> None:
        """Give the lock back; a forked child does nothing here. One that the file system does not take back goes with the process."""
        if self.is_held and self._pid == os.getpid():
            self.is_held = False
            with suppress(OSError):
                self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.release()


def is_locked(path: Path) -> bool | None:
    """Whether somebody holds this lock now: True, False, or None where the file system cannot tell or the file is gone.

    The probe makes no file, and two probes do not see each other: one that took the lock itself would look like its holder.
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


def _is_locked_by_taking(path: Path) -> bool | None:
    """The probe where there are no shared locks: take it for a moment. Another probe at that moment may see this one as the holder."""
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
    return False
