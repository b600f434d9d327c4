"""Files by reference: the pictures, videos and caption files of a source are read through them."""

import os
import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, Protocol

from cachestore.core.inputs import NO_STAT, Stat
from cachestore.files.opening import open_foreign, refuse_size

FRESH_SECONDS: Final = 2.0
"""A file modified less than this before it was read may change again with the same time stamp. So its time proves nothing."""

_VIDEO_BYTES: Final = 1 << 38
"""The most bytes of a video, of which all are read for its digest."""

IMAGE_SUFFIXES: Final = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".avif"})
VIDEO_SUFFIXES: Final = frozenset({".mp4", ".mkv", ".webm", ".mov", ".avi"})


class Files(Protocol):
    """Files by reference. All methods may be called from several threads."""

    def read(self, reference: str) -> tuple[bytes, Stat]:
        """The bytes behind a reference, and (size, mtime_ns), or NO_STAT if the time proves nothing. Raises OSError."""
        ...

    def open(self, reference: str) -> AbstractContextManager[tuple[BinaryIO, Stat]]:
        """As `read`, but gives an open file for seeking. Raises OSError, also at the end if the file has changed."""
        ...

    def stat(self, reference: str) -> Stat | None:
        """(size, mtime_ns) of the file behind a reference now, or None if it is gone."""
        ...


@dataclass(frozen=True, slots=True)
class Folder:
    """Files on disk. References are paths relative to a folder."""

    root: Path

    def read(self, reference: str) -> tuple[bytes, Stat]:
        """As `Files.read`. Raises OSError, also if the path is not a regular file, or is too large, or changes while it is read."""
        with _unchanged(self.root / reference) as (file, found):
            refuse_size(self.root / reference, found[0])
            data = file.read()
            if len(data) != found[0]:
                raise OSError(f"{self.root / reference} changed while it was read; run the same command again")
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
    """Joins several holders of files into one."""

    route: Callable[[str], tuple[Files, str]]
    """Returns the holder of a reference, and its reference there. Raises OSError if there is none."""

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
    """An open file with its (size, mtime_ns). Raises OSError at the end if these have changed."""
    with open_foreign(path, limit_bytes=_VIDEO_BYTES) as file:
        before = stat_of(os.fstat(file.fileno()))
        yield file, before
        if stat_of(os.fstat(file.fileno())) != before:
            raise OSError(f"{path} changed while it was read; run the same command again")


def stat_of(status: os.stat_result) -> Stat:
    """(size, mtime_ns) of a file's status."""
    return status.st_size, status.st_mtime_ns


def trusted(stat: Stat) -> Stat:
    """The (size, mtime_ns) that was just read, or NO_STAT if the file is so new that it may change within the same time stamp."""
    return NO_STAT if abs(time.time() - stat[1] / 1e9) < FRESH_SECONDS else stat
