"""Safe opening and reading: never follows a link, never blocks on a fifo, never trusts a size.

Positional reads only, because a forked child shares the offset of a descriptor with its parent. What the file system refuses is raised
as ReadFailed, with path, reason and `errno`; a file that is not there as FileNotFoundError, as callers then look elsewhere.
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
from pathlib import Path
from typing import Final, NoReturn

from cachestore.core.errors import CacheStoreError, FormatError, ReadFailed, numbered
from cachestore.files.paths import to_verify

READ_FLAGS: Final = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
"""For `os.open` to read, through links too. Windows translates line ends without O_BINARY."""
_OPEN_FLAGS: Final = READ_FLAGS | getattr(os, "O_NOFOLLOW", 0)

_BUFFERS_A_CALL: Final = 1024
"""IOV_MAX of Linux and the BSDs."""
_ABSENT: Final = (FileNotFoundError, NotADirectoryError)
_PRESENT_ONLY: Final[int] = getattr(os, "RWF_NOWAIT", 0)
_seeking: Final = threading.Lock()
"""Held where there are no positional reads; systems that fork have them."""


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """Tells whether a file is still the one that was looked at: any change of content or identity changes one of these."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> "FileIdentity":
        """The identity in a stat result."""
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def open_regular(path: Path, *, folder: int | None = None) -> tuple[int, os.stat_result]:
    """Open a regular file for reading and return (descriptor, status); the caller closes it.

    With `folder`, the descriptor of the folder that it lies in, the path above is not looked up again.
    Raises FormatError for a link, fifo, device or folder under that name, FileNotFoundError, ReadFailed.
    """
    try:
        descriptor = os.open(path if folder is None else path.name, _OPEN_FLAGS, dir_fd=folder)
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


def is_link(path: Path) -> bool:
    """Whether a name is a link; no, where the file system does not answer: whoever then opens or lists it gets the reason."""
    return os.path.islink(path)  # noqa: PTH114 - the same question of a Path raises


def _no_regular_file(path: Path) -> str:
    return f"{path} is not a regular file, and is not read: move it out of the store, then run {to_verify(path)}"


@contextmanager
def opened(path: Path, *, folder: int | None = None) -> Generator[tuple[int, os.stat_result]]:
    """`open_regular` as a context that closes the descriptor. What is refused inside of it is raised as ReadFailed too."""
    descriptor, status = open_regular(path, folder=folder)
    try:
        yield descriptor, status
    except OSError as error:
        refuse_reading(path, error)
    finally:
        os.close(descriptor)


def read_into(descriptor: int, buffer: memoryview, offset: int) -> int:
    """Fill `buffer` from `offset` on; returns the bytes read, fewer only at the end of the file. Moves no offset where it can be helped."""
    total = 0
    while total < len(buffer):
        count = _read_some(descriptor, buffer[total:], offset + total)
        if count == 0:
            break
        total += count
    return total


def _read_some(descriptor: int, buffer: memoryview, offset: int) -> int:
    """One positional read. Windows has none: there, seek and read, one thread at a time."""
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
    """Fill these buffers one after the other from `offset` on; returns the bytes read, fewer only at the end of the file."""
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
    """As `read_scattered`, but stops before the first byte that a disk would have to be asked for. None where nobody can tell."""
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
    """Go on after the first `done` bytes of these buffers, whose first stands at `offset`; one buffer a read."""
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
    """For what may be refused."""
    try:
        yield
    except OSError as error:
        if is_of_a_signal(error):
            raise


def ask_for(descriptor: int, offset: int, size: int) -> None:
    """Have a part of a file brought into memory, without waiting for it. Does nothing where the system cannot."""
    if hasattr(os, "posix_fadvise"):
        with _optional():  # a file system may know no such advice
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
    """Read a regular file; `folder` as for `open_regular`. Raises FormatError above `limit_bytes`, FileNotFoundError, ReadFailed."""
    with opened(path, folder=folder) as (descriptor, status):
        if status.st_size > limit_bytes:
            raise FormatError(f"{path} has {status.st_size} bytes, more than the {limit_bytes} such a file may have")
        return read_at(descriptor, status.st_size, 0)


def map_whole(path: Path, *, limit_bytes: int) -> memoryview:
    """A regular file's bytes as a read-only view that takes memory only where it is looked at. Raises as `read_whole`.

    Only for files that nobody shortens: looking behind the end of one that was cut ends the process.
    """
    with opened(path) as (descriptor, status):
        if status.st_size > limit_bytes:
            raise FormatError(f"{path} has {status.st_size} bytes, more than the {limit_bytes} such a file may have")
        if status.st_size == 0:
            return memoryview(b"")
        return memoryview(mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ))


def let_go(view: memoryview) -> None:
    """Give back the memory of a mapped view; looking at it again reads the file again. Does nothing where the system cannot."""
    mapping = view.obj
    if isinstance(mapping, mmap.mmap) and hasattr(mapping, "madvise"):
        mapping.madvise(mmap.MADV_DONTNEED)


def names_in(folder: Path, *, is_root: bool = False) -> list[str]:
    """The names in a folder, sorted; one that does not exist, or is no folder, is empty.

    Existence in a store is decided by listing: on NFS a look-up of a name that once was missing stays negative for 30 s,
    while a fresh listing is right at once. Raises ReadFailed, as what cannot be listed is not empty, and FormatError for a link to a
    folder, unless it is the store's root, which is the user's own path: what lies behind another one is not a part of the store.
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


def look_at(path: Path) -> os.stat_result | None:
    """What a path leads to, or None where there is nothing. Raises ReadFailed."""
    try:
        return path.stat()
    except _ABSENT:
        return None
    except OSError as error:
        refuse_reading(path, error)


def free_bytes(folder: Path) -> int:
    """How many bytes this user may still write where a folder lies. Raises ReadFailed, FileNotFoundError."""
    try:
        return shutil.disk_usage(folder).free
    except OSError as error:
        refuse_reading(folder, error)


def refuse_reading(path: Path, error: OSError) -> NoReturn:
    """Raise what a refused look is raised as: ReadFailed; an error of ours, and that of a file that is not there, as they are."""
    if isinstance(error, (CacheStoreError, *_ABSENT)) or is_of_a_signal(error):
        raise error
    raise numbered(ReadFailed(f"cannot read {path}: {reason_of(error)}; fix that, then run the same command again"), error) from error


def is_of_a_signal(error: Exception) -> bool:
    """Whether a signal's handler raised this, such as a watchdog's TimeoutError: what the system refuses bears a number."""
    return isinstance(error, OSError) and type(error) is not OSError and error.errno is None and not isinstance(error, CacheStoreError)


def reason_of(error: OSError) -> str:
    """Why the file system refused something, in its words alone."""
    return error.strerror or (os.strerror(error.errno) if error.errno else str(error))


def descriptor_limit(default: int = 1024) -> int:
    """How many descriptors this process may open at once; `default` where the system does not say."""
    try:
        import resource
    except ImportError:  # Windows
        return default
    soft, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return default if soft == resource.RLIM_INFINITY else soft
