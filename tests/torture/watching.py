"""Stands between the package and the file system: every call that concerns a store goes through one function, which may do anything.

Calls of `os`, locks, and what LMDB does as a whole (open, commit, close) are watched; a file that is mapped is read without calls.
Replaces functions for as long as a process lives, so it belongs into forked ones.
"""

import errno
import fcntl
import os
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import lmdb

Around = Callable[["Call", Callable[[], Any]], Any]
"""What is done with a call: it is given the call, and how to make it."""

_OF_PATHS: Final = ("open", "unlink", "remove", "mkdir", "rmdir", "chmod", "stat", "lstat", "listdir", "scandir", "statvfs", "truncate")
_OF_TWO: Final = ("link", "rename", "replace")
_OF_DESCRIPTORS: Final = ("write", "read", "pread", "preadv", "fsync", "fstat", "ftruncate")


@dataclass(frozen=True, slots=True)
class Call:
    """One call of the file system that concerns a store."""

    name: str
    path: str
    other: str = ""
    """Where a link or a new name is."""
    creates: bool = False
    """Whether it is an `open` that makes a file."""
    data: Any = None
    """What is written."""

    @property
    def changes(self) -> bool:
        """Whether it may change what is on disk."""
        return self.creates or self.name in {
            *("write", "fsync", "mkdir", "rmdir", "unlink", "remove", "chmod", "truncate", "ftruncate"),
            *(*_OF_TWO, "lmdb.create", "lmdb.commit", "lmdb.close"),
        }


@dataclass(slots=True)
class _Watching:
    root: str
    around: Around
    names: dict[int, str] = field(default_factory=dict[int, str])
    """Paths of open descriptors."""
    inside: threading.local = field(default_factory=threading.local)

    def is_ours(self, path: str) -> bool:
        return path == self.root or path.startswith(self.root + "/")

    def path_of(self, given: Any, folder: int | None = None) -> str:
        """The path behind an argument, empty where it is none of ours."""
        if isinstance(given, int):
            return self.names.get(given, "")
        text = os.fsdecode(given)
        if folder is not None:
            text = f"{self.names.get(folder, '')}/{text}"
        return text if self.is_ours(text) else ""

    def do(self, call: Call, real: Callable[[], Any]) -> Any:
        """Hand a call over; what is done with it may make calls of its own, which are nobody's."""
        if getattr(self.inside, "now", False):
            return real()
        self.inside.now = True
        try:
            return self.around(call, real)
        finally:
            self.inside.now = False


def watch(root: Path, around: Around) -> None:
    """Let every call that concerns the store at `root` go through `around`, in this process, from now on."""
    watching = _Watching(str(root), around)
    for name in _OF_PATHS:
        setattr(os, name, _of_path(watching, name, getattr(os, name)))
    for name in _OF_TWO:
        setattr(os, name, _of_two(watching, name, getattr(os, name)))
    for name in _OF_DESCRIPTORS:
        setattr(os, name, _of_descriptor(watching, name, getattr(os, name)))
    os.close = _closing(watching, os.close)
    fcntl.flock = _of_descriptor(watching, "flock", fcntl.flock)
    lmdb.open = _opening(watching, lmdb.open)


def _of_path(watching: _Watching, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    def call(*given: Any, **named: Any) -> Any:
        path = watching.path_of(given[0] if given else named.get("path", "."), named.get("dir_fd"))
        if not path:
            return real(*given, **named)
        creates = name == "open" and bool(given[1] & os.O_CREAT)
        found = watching.do(Call(name, path, creates=creates), lambda: real(*given, **named))
        if name == "open":
            watching.names[found] = path
        return found

    return call


def _of_two(watching: _Watching, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    def call(*given: Any, **named: Any) -> Any:
        path, other = map(watching.path_of, given[:2])
        return watching.do(Call(name, path, other), lambda: real(*given, **named)) if path else real(*given, **named)

    return call


def _of_descriptor(watching: _Watching, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    def call(descriptor: int, *given: Any) -> Any:
        path = watching.names.get(descriptor, "")
        if not path:
            return real(descriptor, *given)
        data = given[0] if name == "write" else None
        return watching.do(Call(name, path, data=data), lambda *other: real(descriptor, *(other or given)))

    return call


def _closing(watching: _Watching, real: Callable[[int], None]) -> Callable[[int], None]:
    def call(descriptor: int) -> None:
        watching.names.pop(descriptor, None)
        real(descriptor)

    return call


def _opening(watching: _Watching, real: Callable[..., Any]) -> Callable[..., Any]:
    def call(path: str, **options: Any) -> Any:
        if not watching.is_ours(path):
            return real(path, **options)
        is_new = not options.get("readonly", False)
        with _as_lmdb_says(path):
            name = "lmdb.create" if is_new else "lmdb.open"
            opened = watching.do(Call(name, path, creates=is_new), lambda: real(path, **options))
        return _Environment(watching, path, opened) if is_new else opened

    return call


@contextmanager
def _as_lmdb_says(path: str) -> Generator[None]:
    """Errors of the file system, as LMDB raises them."""
    kinds = {errno.ENOSPC: lmdb.DiskError, errno.EACCES: lmdb.ReadonlyError}
    try:
        yield
    except OSError as error:
        raise kinds.get(error.errno or 0, lmdb.Error)(f"{path}: {error.strerror}") from None


@dataclass(slots=True)
class _Environment:
    """An LMDB file that is being written."""

    watching: _Watching
    path: str
    real: Any

    def open_db(self, *given: Any, **named: Any) -> Any:
        return self.real.open_db(*given, **named)

    @contextmanager
    def begin(self, **named: Any) -> Generator[Any]:
        with self.real.begin(**named) as transaction:
            yield transaction
            with _as_lmdb_says(self.path):
                self.watching.do(Call("lmdb.commit", self.path), lambda: None)

    def close(self) -> None:
        self.watching.do(Call("lmdb.close", self.path), self.real.close)
