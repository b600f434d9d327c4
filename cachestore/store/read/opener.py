"""Open a store for reading, wherever it is. What reads stores at addresses is loaded for an address alone, by its module's path."""

import re
from collections.abc import Generator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from cachestore.core.errors import BadInput
from cachestore.core.spelling import option
from cachestore.store.read.fetch import Io, Verify
from cachestore.store.read.reader import Reader

_AT_ADDRESSES: Final = "cachestore.remote.reader"
"""Has `open_address` and `open_whole_address`, with which the functions below open what is at an address."""
_ADDRESS: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")


def is_address(given: object) -> bool:
    """Return whether a text is an address (`scheme://…`) and not a path."""
    return isinstance(given, str) and _ADDRESS.match(given) is not None


def open_reader(path: str | Path, *, verify: Verify, io: Io, local: str | Path | None, limit: int | str | None) -> Reader:
    """Return a reader of the store at a path or address. `local` and `limit` are for addresses. Raises as `Reader`; RemoteFailed."""
    if is_address(path):
        elsewhere: Any = import_module(_AT_ADDRESSES)
        return elsewhere.open_address(path, verify=verify, io=io, local=local, limit=limit)
    if local is not None or limit is not None:
        both = f"{option('local')} and {option('limit')} are for a store at an address, such as s3://bucket/cache"
        raise BadInput(f"{both}, but {str(path)!r} is a folder", option="local" if limit is None else "limit")
    return Reader(path, verify=verify, io=io)


@contextmanager
def open_whole(path: str | Path, name: str | None = None) -> Generator[Reader]:
    """Yield a reader of the store at a path or address, with the newest catalog of each data set, or only of the named one.

    What it brings from an address lies in a temporary folder, and goes with it. Raises as `open_reader`; BadInput for an unknown name.
    """
    elsewhere: Any = import_module(_AT_ADDRESSES) if is_address(path) else None
    with Reader(path) if elsewhere is None else elsewhere.open_whole_address(path, name) as reader:
        yield reader
