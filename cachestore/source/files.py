"""Files by reference: what the pictures, videos and caption files of a source are read through. Knows no samples."""

import errno
import os
import stat
import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, Protocol

from cachestore.core.inputs import NO_STAT, Stat
from cachestore.files.opening import READ_FLAGS

FRESH_SECONDS: Final = 2.0
"""A file modified so shortly before it was read may change again within the same time stamp: its time proves nothing."""

IMAGE_SUFFIXES: Final = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".avif"})
VIDEO_SUFFIXES: Final = frozenset({".mp4", ".mkv", ".webm", ".mov", ".avi"})


class Files(Protocol):
    """What is behind references. All of it may be called from several threads."""

    def read(self, reference: str) -> tuple[bytes, Stat]:
        """The bytes behind a reference, with (size, mtime_ns), which is NO_STAT where it proves nothing. Raises OSError."""
        ...

    def open(self, reference: str) -> AbstractContextManager[tuple[BinaryIO, Stat]]:
        """As `read`, but to be read in places. Raises OSError; at the end too, where it is another file by then."""
        ...

    def stat(self, reference: str) -> Stat | None:
        """(size, mtime_ns) of what is behind a reference now; None where it is gone."""
        ...


@dataclass(frozen=True, slots=True)
class Folder:
    """Files on disk; references are paths relative to a folder."""

    root: Path

    def read(self, reference: str) -> tuple[bytes, Stat]:
        """As `Files.read`. Raises OSError, also for what is no regular file, and if the file changes while it is read."""
        path = self.root / reference
        with _unchanged(path) as (file, found):
            data = file.read()
        if len(data) != found[0]:
            raise OSError(f"{path} changed while it was read")
        return data, trusted(found)

    @contextmanager
    def open(self, reference: str) -> Generator[tuple[BinaryIO, Stat]]:
        """As `Files.open`. Raises as `read`."""
        with _unchanged(self.root / reference) as (file, found):
            yield file, trusted(found)

    def stat(self, reference: str) -> Stat | None:
        """As `Files.stat`."""
        try:
            return stat_of((self.root / reference).stat())
        except OSError:
            return None


@dataclass(frozen=True, slots=True)
class Routed:
    """Files of several holders as one."""

    route: Callable[[str], tuple[Files, str]]
    """Who holds a reference, and what it is called there. Raises OSError where nobody does."""

    def read(self, reference: str) -> tuple[bytes, Stat]:
        """As the holder's `read`."""
        files, own = self.route(reference)
        return files.read(own)

    def open(self, reference: str) -> AbstractContextManager[tuple[BinaryIO, Stat]]:
        """As the holder's `open`."""
        files, own = self.route(reference)
        return files.open(own)

    def stat(self, reference: str) -> Stat | None:
        """As the holder's `stat`."""
        files, own = self.route(reference)
        return files.stat(own)


@contextmanager
def _unchanged(path: Path) -> Generator[tuple[BinaryIO, Stat]]:
    """An open file with its (size, mtime_ns). Raises OSError at the end if these are others by then."""
    with open_regular(path) as file:
        before = stat_of(os.fstat(file.fileno()))
        yield file, before
        if stat_of(os.fstat(file.fileno())) != before:
            raise OSError(f"{path} changed while it was read")


def stat_of(status: os.stat_result) -> Stat:
    """(size, mtime_ns)."""
    return status.st_size, status.st_mtime_ns


def trusted(stat: Stat) -> Stat:
    """A (size, mtime_ns) that was read just now, or NO_STAT where it may soon stand for other bytes."""
    return NO_STAT if abs(time.time() - stat[1] / 1e9) < FRESH_SECONDS else stat


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading without ever waiting for a fifo's other end. Raises OSError, for what is no regular file too."""
    descriptor = os.open(path, READ_FLAGS)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    raise OSError(errno.EINVAL, "it is not a regular file but a fifo, a device or a folder", str(path))
