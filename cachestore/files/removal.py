"""How a file leaves a store: by its name within an open folder, so that no link is followed and no path looked up twice.

Only regular files and empty folders are ever removed, one name at a time and never recursively. Who calls has parsed the name with
`paths`: what does not parse is not ours. A removal is not synced: a file that comes back after a power cut is as it was.
"""

import errno
import os
import stat
from collections.abc import Callable, Collection, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from cachestore.core.errors import FormatError, WriteFailed, numbered
from cachestore.files.marker import check_for_writing
from cachestore.files.opening import is_link, reason_of
from cachestore.files.paths import Layout, to_verify

_HAS_DESCRIPTORS: Final = os.unlink in os.supports_dir_fd and hasattr(os, "O_NOFOLLOW") and hasattr(os, "O_DIRECTORY")
_GONE: Final = {errno.ENOENT, getattr(errno, "ESTALE", errno.ENOENT)}


def remove_file(layout: Layout, path: Path) -> int:
    """Remove a regular file of a store; returns its bytes, 0 where it is gone already.

    Raises FormatError where the name, or a folder on the way to it, is a link or no regular file: it is left alone. Raises WriteFailed,
    also where the store that was opened is not at its path any more: what has the same name in another one is not superfluous there.
    """
    return _remove(layout, path, stat.S_ISREG, os.unlink, absent=_GONE) or 0


def remove_folder(layout: Layout, path: Path) -> bool:
    """Remove an empty folder of a store; False where it is not empty, or gone. Raises FormatError, WriteFailed as `remove_file`."""
    return _remove(layout, path, stat.S_ISDIR, os.rmdir, absent={*_GONE, errno.ENOTEMPTY, errno.EEXIST}) is not None


def _remove(
    layout: Layout, path: Path, is_kind: Callable[[int], bool], remove: Callable[..., None], *, absent: Collection[int]
) -> int | None:
    """Remove a name of one kind; returns the bytes that it had, or None where the system's answer is one of `absent`."""
    try:
        with _folder_of(layout, path) as folder:
            name = path.name if folder is not None else path
            status = os.stat(name, dir_fd=folder, follow_symlinks=False)
            if not is_kind(status.st_mode):
                _refuse_strange(path)
            remove(name, dir_fd=folder)
            return status.st_size
    except WriteFailed:
        raise
    except OSError as error:
        if error.errno in absent:
            return None
        words = f"cannot remove {path}: {reason_of(error)}; the rest is intact. Remove the cause, then run the same command again"
        raise numbered(WriteFailed(words), error) from error


def age_seconds(path: Path, now: float) -> float | None:
    """For how long a regular file was not written, by its time and `now` (seconds since the epoch); None for anything else."""
    with suppress(OSError):
        status = path.lstat()
        if stat.S_ISREG(status.st_mode):
            return now - status.st_mtime
    return None


def is_older(path: Path, seconds: float, *, now: float) -> bool:
    """Whether a regular file was not written for longer than so many seconds."""
    return (age_seconds(path, now) or 0.0) > seconds


@contextmanager
def _folder_of(layout: Layout, path: Path) -> Generator[int | None]:
    """The folder that a path lies in, opened from the root on, one name after the other; None where the system has no such calls."""
    if not _HAS_DESCRIPTORS:
        check_for_writing(layout)
        # A link on the way is refused, one that is put there just now is not.
        if any(is_link(folder) for folder in path.parents if folder != layout.root and folder.is_relative_to(layout.root)):
            _refuse_strange(path)
        yield None
        return
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    try:
        descriptor = os.open(layout.root, flags)
    except FileNotFoundError:
        check_for_writing(layout)
        raise
    try:
        check_for_writing(layout, folder=descriptor)
        for name in path.parent.relative_to(layout.root).parts:
            inner = _open_inside(descriptor, name, flags, path)
            os.close(descriptor)
            descriptor = inner
        yield descriptor
    finally:
        os.close(descriptor)


def _open_inside(descriptor: int, name: str, flags: int, path: Path) -> int:
    try:
        return os.open(name, flags | os.O_NOFOLLOW, dir_fd=descriptor)
    except OSError as error:
        if error.errno in {errno.ELOOP, errno.ENOTDIR}:
            _refuse_strange(path)
        raise


def _refuse_strange(path: Path) -> None:
    raise FormatError(f"{path} is a link, lies behind one, or is no regular file: it is left alone ({to_verify(path)} lists it)")
