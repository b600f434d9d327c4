"""Removes, replaces and syncs files that other processes may have open: what Windows refuses, and Linux and macOS do not.

On Windows a file that is open or mapped cannot be removed, renamed or replaced; an indexer or a scanner of viruses opens each new file for
a moment. So it is tried again for 10 s, and then raised. A file with the read-only attribute cannot be removed or replaced either: our
files get none there, and one that has it, from an earlier version or another system, loses it first. And only a descriptor that may write
can be synced. Elsewhere each of these is the plain call.
"""

import os
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TypeVar

from cachestore.core import system

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

PATIENCE_SECONDS: float = 10.0
"""How long a file that is in use is waited for."""
OPENING_SECONDS: float = 1.0
"""As that, for opening: a file that is just being replaced or removed cannot be opened for a moment."""
WRITE_FLAGS: Final = (
    os.O_WRONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
)
"""Flags of `os.open` for writing at offsets. Without O_BINARY, Windows translates line ends."""
_FIRST_PAUSE: Final = 0.005
_LAST_PAUSE: Final = 0.25
_IN_USE: Final = frozenset({5, 32, 33, 1224})
"""Errors of Windows: ERROR_ACCESS_DENIED (also for the target of a replacement), ERROR_SHARING_VIOLATION, ERROR_LOCK_VIOLATION and
ERROR_USER_MAPPED_FILE."""
_PATH_CHARACTERS: Final = 259
"""The longest path that Windows takes, unless long paths are allowed or it begins with the prefix for them."""
_FULL_SYNC: Final[int | None] = getattr(fcntl, "F_FULLFSYNC", None)
"""The call of macOS that empties the cache of the disk."""
LONG_PATHS: Final = "\\\\?\\"
"""The prefix of Windows for paths of any length."""
T = TypeVar("T")


def read_only_bits() -> int:
    """Return the permission bits of a file that never changes: without the read-only attribute where such a file cannot be removed."""
    return 0o644 if system.IS_WINDOWS else 0o444


def is_in_use(error: OSError) -> bool:
    """Return whether the system may have refused because a file is open somewhere. Opening has no number of Windows's own."""
    return system.IS_WINDOWS and isinstance(error, PermissionError) and getattr(error, "winerror", None) in {None, *_IN_USE}


def patiently(call: Callable[[], T], *, seconds: float | None = None, before: Callable[[], object] | None = None) -> T:
    """Return what a call returns; while a file is in use, try again for `seconds` (10). Calls `before` ahead of the second try."""
    until, pause = 0.0, _FIRST_PAUSE
    while True:
        try:
            return call()
        except OSError as error:
            if not is_in_use(error) or (until and time.monotonic() >= until):
                raise
        if not until:
            until = time.monotonic() + (PATIENCE_SECONDS if seconds is None else seconds)
            if before is not None:
                before()
        time.sleep(pause)
        pause = min(2 * pause, _LAST_PAUSE)


def why_in_use(error: OSError) -> str:
    """Return what else to say of an error of the system, as the end of a sentence; empty if nothing."""
    if is_in_use(error) and getattr(error, "winerror", None) is not None:
        return f" (tried for {PATIENCE_SECONDS:.0f} s: another program, such as a training that reads it, has it open; end that first)"
    path = str(error.filename or "")
    if system.IS_WINDOWS and len(path) > _PATH_CHARACTERS and not path.startswith(LONG_PATHS):
        return f" ({_too_long(path)})"
    return ""


def unlink(path: Path, *, missing_ok: bool = False, seconds: float | None = None) -> None:
    """Remove a name. Raises OSError as `Path.unlink`. `seconds` as in `patiently`: 0 for what another process may remove later."""
    patiently(lambda: path.unlink(missing_ok=missing_ok), seconds=seconds, before=lambda: _make_writable(path))


def remove_in(name: str | Path, folder: int | None, remove: Callable[..., None]) -> None:
    """Remove a name in an open folder by `os.unlink` or `os.rmdir`; `folder` is None where folders cannot be opened."""
    patiently(lambda: remove(name, dir_fd=folder), before=lambda: None if folder is not None else _make_writable(Path(name)))


def replace(source: Path, target: Path) -> None:
    """Rename over an existing file. Raises OSError as `Path.replace`."""
    patiently(lambda: source.replace(target), before=lambda: _make_writable(target))


def rename(source: Path, target: Path) -> None:
    """Rename a file or folder. On Windows that never replaces a file. Raises OSError as `Path.rename`."""
    patiently(lambda: source.rename(target))


def _make_writable(path: Path) -> None:
    with suppress(OSError):
        status = path.lstat()
        if stat.S_ISREG(status.st_mode) and not status.st_mode & stat.S_IWUSR:
            path.chmod(read_only_bits())


def sync(descriptor: int) -> None:
    """Make the bytes of an open file durable; on macOS in the disk's own cache too, which `fsync` leaves there. Raises OSError."""
    if fcntl is None or _FULL_SYNC is None:
        os.fsync(descriptor)
        return
    try:
        fcntl.fcntl(descriptor, _FULL_SYNC)
    except OSError:  # a file system that has only the other one
        os.fsync(descriptor)


def sync_file(path: Path, bits: int) -> None:
    """Give a file its permission bits and make its bytes durable, through a descriptor that may write. Raises OSError."""
    descriptor = os.open(path, WRITE_FLAGS)
    try:
        path.chmod(bits)
        sync(descriptor)
    finally:
        os.close(descriptor)


def write_at(descriptor: int, data: Any, offset: int) -> int:
    """Write at an offset, and return how many bytes were taken. On Windows the position moves: only for a descriptor of one thread."""
    if hasattr(os, "pwrite"):
        return os.pwrite(descriptor, data, offset)
    os.lseek(descriptor, offset, os.SEEK_SET)
    return os.write(descriptor, data)


def refused_length(root: Path, below: int) -> str:
    """Return why Windows may refuse paths of so many characters below a folder; empty if it takes them."""
    path = str(root)
    if not system.IS_WINDOWS or path.startswith(LONG_PATHS) or len(path) + below <= _PATH_CHARACTERS or _allows_long_paths():
        return ""
    return _too_long(path, below)


def _too_long(path: str, below: int = 0) -> str:
    length = f"{len(path) + below} characters" + (f" with the names below {path}" if below else "")
    return (
        f"the path has {length}, and Windows takes {_PATH_CHARACTERS}: use a shorter folder, or allow long paths (LongPathsEnabled in the"
        " registry), or write the folder with the prefix " + LONG_PATHS
    )


def _allows_long_paths() -> bool:
    """Return whether this Windows was told to take long paths; Python's own programs ask for them."""
    try:
        registry = system.windows_module("winreg")
        with registry.OpenKey(registry.HKEY_LOCAL_MACHINE, r"SYSTEM\CurrentControlSet\Control\FileSystem") as key:
            return bool(registry.QueryValueEx(key, "LongPathsEnabled")[0])
    except (ImportError, OSError):
        return False
