"""The file that makes a folder a store, and checks that the store at a path is still the one that was opened.

While a store is open, its disk may be unmounted or its folder moved, and another store may appear at the path. The id in the marker tells
stores apart. It is read again at every check. Device and inode numbers do not count, so the same store may be mounted again.
"""

import os
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from cachestore.core.errors import CacheStoreError, FormatError, ReadFailed, WriteFailed, numbered
from cachestore.files.opening import read_whole, refuse_reading
from cachestore.files.paths import Layout
from cachestore.files.records import decode_record

FORMAT: Final = "cachestore-store"
VERSION: Final = 1
_LIMIT_BYTES: Final = 1 << 20
_HAS_DESCRIPTORS: Final = {os.open, os.stat} <= os.supports_dir_fd and hasattr(os, "O_DIRECTORY")


def read_marker(layout: Layout) -> dict[str, Any]:
    """Return the marker's body. Raises FormatError, FileNotFoundError, ReadFailed."""
    return decode_record(FORMAT, VERSION, _read(layout), where=layout.marker)


def _read(layout: Layout, folder: int | None = None) -> bytes:
    return bytes(read_whole(layout.marker, limit_bytes=_LIMIT_BYTES, folder=folder))


@lru_cache(16)
def _id_in(raw: bytes, where: Path) -> object:
    """The id in a marker's bytes, which are read at every check and parsed once."""
    return decode_record(FORMAT, VERSION, raw, where=where).get("store_id")


def check_for_reading(layout: Layout) -> None:
    """Raise ReadFailed if the opened store is no longer at its path: listing that says nothing then. Not for a layout without an id."""
    if layout.store_id:
        with _root_of(layout) as folder:
            _check(layout, folder, None)


def check_for_writing(layout: Layout, published: Path | None = None, *, folder: int | None = None) -> None:
    """As `check_for_reading`, but raises WriteFailed; also if the file that was `published` is not in the store that was opened.

    Both use one descriptor of the root, so that the file cannot be in another store that was at the path for a moment.
    """
    if layout.store_id:
        try:
            with _root_of(layout) if folder is None else nullcontext(folder) as root:
                _check(layout, root, published)
        except ReadFailed as error:
            raise numbered(WriteFailed(f"{error}; nothing was reported as stored"), error) from error


@contextmanager
def noticing_its_end(layout: Layout) -> Generator[None]:
    """Turn the FileNotFoundError for a file that existed a moment ago into ReadFailed: the store may have gone away."""
    try:
        yield
    except FileNotFoundError as error:
        if isinstance(error, CacheStoreError):
            raise
        check_for_reading(layout)
        if not str(error.filename).startswith(f"{layout.root}{os.sep}"):
            raise
        raise ReadFailed(f"{error.filename} existed a moment ago and is missing now; run the same command again") from error


@contextmanager
def _root_of(layout: Layout) -> Generator[int | None]:
    """Yield a descriptor of the store's root; None if the system has no descriptors of folders (Windows)."""
    if not _HAS_DESCRIPTORS:
        yield None
        return
    try:
        descriptor = os.open(layout.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise _gone(layout) from error
    except OSError as error:
        refuse_reading(layout.root, error)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _check(layout: Layout, folder: int | None, published: Path | None) -> None:
    try:
        found = _id_in(_read(layout, folder), layout.marker)
    except FileNotFoundError as error:
        raise _gone(layout) from error
    except FormatError as error:
        raise ReadFailed(
            f"cannot tell whether the store at {layout.root} is the one that was opened: {error}; then run the same command again"
        ) from error
    if found != layout.store_id:
        raise ReadFailed(
            f"the store at {layout.root} is not the one that was opened (was another disk mounted, or another folder moved"
            " there?); put the first one back, or open this one, then run the same command again"
        )
    if published is None:
        return
    try:
        os.stat(published if folder is None else published.relative_to(layout.root), dir_fd=folder, follow_symlinks=False)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ReadFailed(
            f"{published} is not in the store that was opened (was its disk unmounted during the write?); run the same command again"
        ) from error
    except OSError as error:
        refuse_reading(published, error)


def _gone(layout: Layout) -> ReadFailed:
    return ReadFailed(
        f"the store at {layout.root} is not there any more (was its disk unmounted, or the folder moved?); put it back, then run the same"
        " command again"
    )
