"""The one way to open files for reading: it never waits for a fifo or a device, and trusts no size.

`open_regular` and all that stands on it are for files of a store, and follow no link. `open_foreign` and `read_foreign` are for files that
are not ours: pictures, captions, models, other trainers' caches; they follow links, and raise OSError. Both look at the descriptor that is
open, so nothing can take a file's place between the look and the reading.

Every read of a store's file states its offset, because a forked child shares the position of a descriptor with its parent. Errors of the
file system become ReadFailed, with path, reason and `errno`. A missing file stays FileNotFoundError, as callers then look elsewhere.
"""

import errno
import mmap
import os
import shutil
import stat
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import BufferedReader, FileIO
from pathlib import Path
from typing import Any, BinaryIO, Final, NoReturn

from cachestore.core.errors import CacheStoreError, FormatError, ReadFailed, numbered
from cachestore.files import in_use
from cachestore.files.paths import damaged, to_verify

READ_FLAGS: Final = (
    os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
)
"""Flags of `os.open` for reading, also through links. Without O_BINARY, Windows translates line ends."""
_OPEN_FLAGS: Final = READ_FLAGS | getattr(os, "O_NOFOLLOW", 0)
FOREIGN_LIMIT_BYTES: Final = 1 << 30
"""The most bytes that are read of one file that is not ours, or of one that such a file unpacks to. The largest picture that is decoded
takes as many in RGB of 16 bits."""
_BUFFERS_A_CALL: Final = 1024
"""IOV_MAX of Linux and the BSDs."""
_ABSENT: Final = (FileNotFoundError, NotADirectoryError)
_PRESENT_ONLY: Final[int] = getattr(os, "RWF_NOWAIT", 0)
_seeking: Final = threading.Lock()
"""Held while seeking and reading, on systems without positional reads. Systems that fork have them."""


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """Tells whether a file is still the same: any change of its content or identity changes one of these fields."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> "FileIdentity":
        """Return the identity in a stat result."""
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def open_regular(path: Path, *, folder: int | None = None) -> tuple[int, os.stat_result]:
    """Open a regular file for reading and return (descriptor, status); the caller closes it. Raises FormatError for a link, fifo or folder.

    With a descriptor of its `folder`, the path above is not looked up again. Raises FileNotFoundError, ReadFailed.
    """
    try:
        descriptor = _opened(path, folder)
    except NotADirectoryError as error:  # a file where its folder should be
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path)) from error
    except OSError as error:
        if is_link(path):
            raise FormatError(f"{path} is a link; links inside a store are refused ({to_verify(path)} lists them)") from error
        with suppress(OSError):
            if not stat.S_ISREG(path.lstat().st_mode):  # a socket cannot even be opened
                raise FormatError(_no_regular_file(path)) from error
        refuse_reading(path, error)
    try:
        status = os.fstat(descriptor)
    except OSError as error:
        os.close(descriptor)
        refuse_reading(path, error)
    if stat.S_ISREG(status.st_mode):
        return descriptor, status
    os.close(descriptor)
    raise FormatError(_no_regular_file(path))


def _opened(path: Path, folder: int | None) -> int:
    """Open a file. While it is being replaced or removed, Windows refuses that for a moment; what is no file it always refuses."""
    name = path if folder is None else path.name
    try:
        return os.open(name, _OPEN_FLAGS, dir_fd=folder)
    except PermissionError as error:
        if not in_use.is_in_use(error) or path.is_dir():
            raise
    return in_use.patiently(lambda: os.open(name, _OPEN_FLAGS, dir_fd=folder), seconds=in_use.OPENING_SECONDS)


class _AsOpened(FileIO):
    """A file that gives no more bytes than it had when it was opened: one that grows, or of a system that states no size, soon ends."""

    def __init__(self, descriptor: int, size: int) -> None:
        super().__init__(descriptor, "rb")
        self._size = size

    def readinto(self, buffer: Any, /) -> int | None:
        return super().readinto(memoryview(buffer)[: max(0, self._size - self.tell())])

    def readall(self) -> bytes:
        return self.read(max(0, self._size - self.tell())) or b""


def open_foreign(path: Path, *, limit_bytes: int | None = None) -> BinaryIO:
    """Open a regular file that is not ours, also through links. It ends where it ended when it was opened. Raises OSError.

    So it does for more than `limit_bytes`: a file with holes may state any size, and reading it would take for ever.
    """
    descriptor, size = _open_foreign(path)
    try:
        if limit_bytes is not None:
            refuse_size(path, size, limit_bytes)
        return BufferedReader(_AsOpened(descriptor, size))
    except OSError:
        os.close(descriptor)
        raise


def read_foreign(path: Path, *, limit_bytes: int = FOREIGN_LIMIT_BYTES) -> bytes:
    """Read a regular file that is not ours as a whole, also through links. Raises OSError, as `open_foreign`.

    What is read is counted: a file with more than `limit_bytes`, or with other bytes than the system states, is an OSError too.
    """
    pieces: list[bytes] = []
    descriptor, size = _open_foreign(path)
    left = size + 1
    try:
        refuse_size(path, size, limit_bytes)
        while left and (piece := os.read(descriptor, left)):  # memory is taken only for what is there
            pieces.append(piece)
            left -= len(piece)
    finally:
        os.close(descriptor)
    if left != 1:
        raise OSError(f"{path} changed while it was read; run the same command again")
    return b"".join(pieces)


def refuse_size(path: Path, size: int, limit_bytes: int = FOREIGN_LIMIT_BYTES) -> None:
    """Raise OSError for more bytes than are read of a file that is not ours."""
    if size > limit_bytes:
        raise OSError(errno.EFBIG, f"it has {size:,} bytes, more than the {limit_bytes:,} that are read of such a file", str(path))


def _open_foreign(path: Path) -> tuple[int, int]:
    """Return (descriptor, size in bytes). Raises OSError."""
    try:
        descriptor = os.open(path, READ_FLAGS)
    except OSError as error:
        if error.errno != errno.ENXIO:  # a socket's
            raise
        raise _no_file(path) from error
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode):
        return descriptor, status.st_size
    os.close(descriptor)
    raise _no_file(path)


def _no_file(path: Path) -> OSError:
    return OSError(errno.EINVAL, "it is not a regular file but a fifo, a device, a socket or a folder", str(path))


def is_link(path: Path) -> bool:
    """Return whether a path is a link; False if the file system does not answer. Opening or listing the path then gives the reason."""
    return os.path.islink(path)  # noqa: PTH114 - Path.is_symlink may raise


def _no_regular_file(path: Path) -> str:
    return f"{path} is not a regular file, and is not read: move it out of the store, then run {to_verify(path)}"


@contextmanager
def opened(path: Path, *, folder: int | None = None) -> Generator[tuple[int, os.stat_result]]:
    """`open_regular` as a context manager that closes the descriptor. Errors of the file system in the block become ReadFailed too."""
    descriptor, status = open_regular(path, folder=folder)
    try:
        yield descriptor, status
    except OSError as error:
        refuse_reading(path, error)
    finally:
        os.close(descriptor)


def read_into(descriptor: int, buffer: memoryview, offset: int) -> int:
    """Fill `buffer` from `offset` on. Returns the bytes read, fewer only at the end of the file. The position moves only on Windows."""
    total = 0
    while total < len(buffer):
        count = _read_some(descriptor, buffer[total:], offset + total)
        if count == 0:
            break
        total += count
    return total


def _read_some(descriptor: int, buffer: memoryview, offset: int) -> int:
    """One read at an offset. Windows has none: there one thread at a time seeks and reads."""
    if hasattr(os, "preadv"):
        return os.preadv(descriptor, [buffer], offset)
    if hasattr(os, "pread"):
        data = os.pread(descriptor, len(buffer), offset)
    else:
        with _seeking:
            os.lseek(descriptor, offset, os.SEEK_SET)
            data = os.read(descriptor, len(buffer))
    buffer[: len(data)] = data
    return len(data)


def read_scattered(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
    """Fill these buffers one after the other from `offset` on. Returns the bytes read, fewer only at the end of the file."""
    total = 0
    for start in range(0, len(buffers), _BUFFERS_A_CALL):
        some = buffers[start : start + _BUFFERS_A_CALL]
        size = sum(map(len, some))
        count = os.preadv(descriptor, some, offset + total) if hasattr(os, "preadv") else 0
        if count < size:
            count += _read_rest(descriptor, some, count, offset + total)
        total += count
        if count < size:
            break
    return total


def read_present(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int | None:
    """As `read_scattered`, but stops before the first byte that is not in memory. None if the system cannot tell."""
    if not _PRESENT_ONLY:
        return None
    try:
        return os.preadv(descriptor, buffers[:_BUFFERS_A_CALL], offset, _PRESENT_ONLY)
    except BlockingIOError:
        return 0
    except OSError as error:
        if error.errno in {errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS}:
            return None
        raise


def _read_rest(descriptor: int, buffers: Sequence[memoryview], done: int, offset: int) -> int:
    """Continue after the first `done` bytes of these buffers, with one read each. The first buffer belongs at `offset`."""
    total = 0
    for buffer in buffers:
        skipped = min(done, len(buffer))
        count = read_into(descriptor, buffer[skipped:], offset + skipped)
        total += count
        if skipped + count < len(buffer):
            break
        done -= skipped
        offset += len(buffer)
    return total


@contextmanager
def _optional() -> Generator[None]:
    """Ignore errors of the system, but not those of a signal handler."""
    try:
        yield
    except OSError as error:
        if is_of_a_signal(error):
            raise


def ask_for(descriptor: int, offset: int, size: int) -> None:
    """Ask the system to read a part of a file into memory, without waiting. Does nothing if the system cannot."""
    if hasattr(os, "posix_fadvise"):
        with _optional():  # some file systems do not support it
            os.posix_fadvise(descriptor, offset, size, os.POSIX_FADV_WILLNEED)


def ask_for_mapped(mapping: mmap.mmap, offset: int, size: int) -> None:
    """As `ask_for`, for a mapped file."""
    if hasattr(mapping, "madvise"):
        start = offset - offset % mmap.PAGESIZE
        with _optional():
            mapping.madvise(mmap.MADV_WILLNEED, start, offset + size - start)


def read_at(descriptor: int, size: int, offset: int) -> bytearray:
    """Read `size` bytes at `offset` into a new buffer; shorter only at the end of the file."""
    buffer = bytearray(size)
    count = read_into(descriptor, memoryview(buffer), offset)
    del buffer[count:]
    return buffer


def read_whole(path: Path, *, limit_bytes: int, folder: int | None = None) -> bytearray:
    """Read a regular file; `folder` as in `open_regular`. Raises FormatError above `limit_bytes`, FileNotFoundError, ReadFailed."""
    with opened(path, folder=folder) as (descriptor, status):
        if status.st_size > limit_bytes:
            raise damaged(f"{path} has {status.st_size} bytes, more than the {limit_bytes} such a file may have", path)
        return read_at(descriptor, status.st_size, 0)


def map_whole(path: Path, *, limit_bytes: int) -> memoryview:
    """Return a regular file's bytes as a read-only view that takes memory only for the parts in use. Raises as `read_whole`.

    Only for files that are never shortened: reading beyond the end of a shortened file kills the process (SIGBUS).
    """
    with opened(path) as (descriptor, status):
        if status.st_size > limit_bytes:
            raise damaged(f"{path} has {status.st_size} bytes, more than the {limit_bytes} such a file may have", path)
        if status.st_size == 0:
            return memoryview(b"")
        return memoryview(mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ))


def let_go(view: memoryview) -> None:
    """Release the memory of a mapped view; using it again reads the file again. Does nothing if the system cannot."""
    mapping = view.obj
    if isinstance(mapping, mmap.mmap) and hasattr(mapping, "madvise"):
        mapping.madvise(mmap.MADV_DONTNEED)


def names_in(folder: Path, *, is_root: bool = False) -> list[str]:
    """Return the names in a folder, sorted; empty if it does not exist or is not a folder.

    A store decides by listing whether a file exists: on NFS a name that was missing once stays missing for 30 s, while a fresh listing is
    right at once. Raises ReadFailed if the folder cannot be listed, and FormatError for a link to a folder, because what is behind it is
    not part of the store. Only the store's root may be a link (`is_root`).
    """
    if not is_root and is_link(folder):
        raise FormatError(
            f"{folder} is a link; links inside a store are refused: put the folder in its place, or move the store as a whole"
        )
    try:
        return sorted(os.listdir(folder))  # noqa: PTH208 - names are wanted, not paths: a million of them
    except _ABSENT:
        return []
    except OSError as error:
        refuse_reading(folder, error)


def status_of(path: Path) -> os.stat_result | None:
    """Return the status of a path, through links; None if nothing is there. Raises ReadFailed."""
    try:
        return path.stat()
    except _ABSENT:
        return None
    except OSError as error:
        refuse_reading(path, error)


def free_bytes(folder: Path) -> int:
    """Return how many bytes this user may still write to the file system of a folder. Raises ReadFailed, FileNotFoundError."""
    try:
        return shutil.disk_usage(folder).free
    except OSError as error:
        refuse_reading(folder, error)


def refuse_reading(path: Path, error: OSError) -> NoReturn:
    """Raise ReadFailed for an error of the system. Errors of cachestore, of a missing file and of a signal handler are raised unchanged."""
    if isinstance(error, (CacheStoreError, *_ABSENT)) or is_of_a_signal(error):
        try:
            raise error
        finally:
            del error  # or frame and error would keep each other, and with them all that callers hold, until a collection
    raise numbered(ReadFailed(f"cannot read {path}: {reason_of(error)}; fix that, then run the same command again"), error) from error


def is_of_a_signal(error: Exception) -> bool:
    """Return whether a signal handler raised this, such as a watchdog's TimeoutError. Errors of the system have an `errno`."""
    return isinstance(error, OSError) and type(error) is not OSError and error.errno is None and not isinstance(error, CacheStoreError)


def reason_of(error: OSError) -> str:
    """Return why the system refused something, in its own words."""
    return (error.strerror or (os.strerror(error.errno) if error.errno else str(error))) + in_use.why_in_use(error)


def descriptor_limit(default: int = 1024) -> int:
    """Return how many descriptors this process may open at once; `default` if unknown."""
    try:
        import resource
    except ImportError:  # Windows
        return default
    soft, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return default if soft == resource.RLIM_INFINITY else soft
