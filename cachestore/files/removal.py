"""Removes files from a store: by name within an open folder, so that no link is followed and no path is looked up twice.

It removes only regular files and empty folders, one at a time, never recursively. The caller has parsed the name with `paths`, as other
names are not from cachestore. A removal is not synced: a file that comes back after a power cut is unchanged.
"""

import errno
import os
import stat
from collections.abc import Callable, Collection, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, NoReturn

from cachestore.core.errors import FormatError, WriteFailed, numbered
from cachestore.files import in_use
from cachestore.files.marker import check_for_writing
from cachestore.files.opening import is_link, reason_of
from cachestore.files.paths import Layout, to_verify

_HAS_DESCRIPTORS: Final = os.unlink in os.supports_dir_fd and hasattr(os, "O_NOFOLLOW") and hasattr(os, "O_DIRECTORY")
_GONE: Final = {errno.ENOENT, getattr(errno, "ESTALE", errno.ENOENT)}


def remove_file(layout: Layout, path: Path) -> int:
    """Remove a regular file of a store. Returns its bytes, or 0 if it is gone already.

    Raises FormatError if the path, or a folder above it, is a link or not a regular file; nothing is removed then. Raises WriteFailed, also
    if the opened store is no longer at its path: another store may need its file of the same name.
    """
    return _remove(layout, path, stat.S_ISREG, os.unlink, absent=_GONE) or 0


def remove_folder(layout: Layout, path: Path) -> bool:
    """Remove an empty folder of a store. Returns False if it is not empty, or gone. Raises FormatError, WriteFailed as `remove_file`."""
    return _remove(layout, path, stat.S_ISDIR, os.rmdir, absent={*_GONE, errno.ENOTEMPTY, errno.EEXIST}) is not None


def _remove(
    layout: Layout, path: Path, is_kind: Callable[[int], bool], remove: Callable[..., None], *, absent: Collection[int]
) -> int | None:
    """Remove a name of one kind. Returns the bytes that it had, or None if the system's error is one of `absent`."""
    try:
        with _folder_of(layout, path) as folder:
            name = path.name if folder is not None else path
            status = os.stat(name, dir_fd=folder, follow_symlinks=False)
            if not is_kind(status.st_mode):
                _refuse_strange(path)
            in_use.remove_in(name, folder, remove)
            return status.st_size
    except WriteFailed:
        raise
    except OSError as error:
        if error.errno in absent:
            return None
        words = f"cannot remove {path}: {reason_of(error)}; the rest is intact. Remove the cause, then run the same command again"
        raise numbered(WriteFailed(words), error) from error


def age_seconds(path: Path, now: float) -> float | None:
    """Return how long ago a regular file was written, by its mtime and `now` (seconds since the epoch); None for anything else."""
    with suppress(OSError):
        status = path.lstat()
        if stat.S_ISREG(status.st_mode):
            return now - status.st_mtime
    return None


def is_older(path: Path, seconds: float, *, now: float) -> bool:
    """Return whether a regular file was last written more than `seconds` ago."""
    return (age_seconds(path, now) or 0.0) > seconds


@contextmanager
def _folder_of(layout: Layout, path: Path) -> Generator[int | None]:
    """Yield a descriptor of a path's folder, opened from the root one name at a time; None if the system has no such calls."""
    if not _HAS_DESCRIPTORS:
        check_for_writing(layout)
        # This finds a link that is there now, but not one that appears after the check.
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
            try:
                inner = os.open(name, flags | os.O_NOFOLLOW, dir_fd=descriptor)
            except OSError as error:
                if error.errno in {errno.ELOOP, errno.ENOTDIR}:
                    _refuse_strange(path)
                raise
            os.close(descriptor)
            descriptor = inner
        yield descriptor
    finally:
        os.close(descriptor)


def _refuse_strange(path: Path) -> NoReturn:
    raise FormatError(f"{path} is a link, lies behind one, or is no regular file: it is left alone ({to_verify(path)} lists it)")
