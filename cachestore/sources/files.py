"""Files by reference: the pictures, videos and caption files of a source are read through them."""

import os
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, Protocol

from cachestore.core.inputs import Stat
from cachestore.core.plugins import picture_plugins
from cachestore.files.opening import open_foreign, refuse_size
from cachestore.files.stat_record import proof_of, stat_of

_VIDEO_BYTES: Final = 1 << 38
"""The most bytes of a video, of which all are read for its digest."""
IMAGE_SUFFIXES: Final = frozenset(
    {
        *(".jpg", ".jpeg", ".jpe", ".jfif", ".jif", ".mpo", ".png", ".apng", ".webp", ".avif", ".avifs", ".gif", ".bmp", ".dib"),
        *(".tif", ".tiff", ".jp2", ".j2k", ".j2c", ".jpc", ".jpf", ".jpx", ".ppm", ".pgm", ".pbm", ".pnm"),
        *picture_plugins(),
    }
)
VIDEO_SUFFIXES: Final = frozenset(
    {
        *(".mp4", ".m4v", ".mkv", ".webm", ".mov", ".qt", ".avi", ".ts", ".m2ts", ".mts", ".mpg", ".mpeg", ".m2v", ".vob", ".wmv", ".asf"),
        *(".flv", ".f4v", ".3gp", ".3g2", ".ogv", ".ivf"),
    }
)
MEDIA_SUFFIXES: Final = IMAGE_SUFFIXES | VIDEO_SUFFIXES
TEXT_SUFFIXES: Final = (".txt", ".caption", ".json")
"""Endings of files with captions, the best first."""
UNREAD_SUFFIXES: Final = (
    frozenset(
        {
            *(".heic", ".heif", ".hif", ".jxl", ".psd", ".psb", ".xcf", ".kra", ".clip", ".ora", ".sai", ".ai", ".eps", ".ps", ".pdf"),
            *(".svg", ".svgz", ".exr", ".hdr", ".pfm", ".pam", ".tga", ".dds", ".ktx", ".ktx2", ".qoi", ".bpg", ".flif", ".jxr", ".wdp"),
            *(".hdp", ".jls", ".jph", ".jphc", ".ico", ".cur", ".icns", ".pcx", ".sgi", ".rgb", ".xbm", ".xpm", ".wmf", ".emf", ".dpx"),
            *(".cin", ".fits", ".fit", ".dcm", ".nii", ".djvu", ".fli", ".flc", ".lottie", ".swf", ".rm", ".rmvb", ".insv", ".braw"),
            *(".r3d", ".h264", ".264", ".h265", ".265", ".hevc", ".obu", ".av1", ".mxf", ".dv", ".y4m"),
            # of cameras: most are TIFFs inside, but what is in them is no picture before it is developed
            *(".dng", ".cr2", ".cr3", ".crw", ".nef", ".nrw", ".arw", ".srf", ".sr2", ".orf", ".rw2", ".rwl", ".raf", ".pef", ".ptx"),
            *(".srw", ".x3f", ".3fr", ".fff", ".iiq", ".erf", ".kdc", ".dcr", ".k25", ".mef", ".mos", ".mrw", ".gpr", ".raw"),
        }
    )
    - IMAGE_SUFFIXES
)
"""Endings of pictures and videos that are not decoded here. They are known only to name such files."""


class SourceFiles(Protocol):
    """Files by reference. All methods may be called from several threads."""

    def read(self, reference: str) -> tuple[bytes, Stat]:
        """The bytes behind a reference, and the file's stat record, or NO_STAT if that proves nothing. Raises OSError."""
        ...

    def open(self, reference: str) -> AbstractContextManager[tuple[BinaryIO, Stat]]:
        """As `read`, but gives an open file for seeking. Raises OSError, also at the end if the file has changed."""
        ...

    def stat(self, reference: str) -> Stat | None:
        """The stat record of the file behind a reference now, or None if it is gone."""
        ...


@dataclass(frozen=True, slots=True)
class Folder:
    """Files on disk. References are paths relative to a folder."""

    root: Path

    def read(self, reference: str) -> tuple[bytes, Stat]:
        """As `SourceFiles.read`. Raises OSError, also if the path is not a regular file, or is too large, or changes while it is read."""
        path = self.root / reference
        with _unchanged(path) as (file, before):
            refuse_size(path, before.st_size)
            found, data = proof_of(before), file.read()
            if len(data) != before.st_size:
                raise OSError(f"{path} changed while it was read; run the same command again")
        return data, found

    @contextmanager
    def open(self, reference: str) -> Generator[tuple[BinaryIO, Stat]]:
        """As `SourceFiles.open`. Raises as `read`."""
        with _unchanged(self.root / reference) as (file, before):
            yield file, proof_of(before)

    def stat(self, reference: str) -> Stat | None:
        """As `SourceFiles.stat`."""
        try:
            return stat_of(os.stat(os.path.join(self.root, reference)))  # noqa: PTH116, PTH118 - of a million files: a third of the time
        except OSError:
            return None


@dataclass(frozen=True, slots=True)
class Routed:
    """Joins several holders of files into one."""

    route: Callable[[str], tuple[SourceFiles, str]]
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


def leads_nowhere(path: str | Path) -> bool:
    """Return whether this is a link to nothing, or to itself."""
    return os.path.islink(path) and not os.path.exists(path)  # noqa: PTH110, PTH114 - Path's raise if access is refused


@contextmanager
def _unchanged(path: Path) -> Generator[tuple[BinaryIO, os.stat_result]]:
    with open_foreign(path, limit_bytes=_VIDEO_BYTES) as file:
        before = os.fstat(file.fileno())
        yield file, before
        if stat_of(os.fstat(file.fileno())) != stat_of(before):
            raise OSError(f"{path} changed while it was read; run the same command again")
