"""Named tensors in a store, as a trainer would keep them in files: `store.files(name)`. A data set of the kind `files`, one row a path."""

import os
import threading
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, TypeVar

from cachestore.core.arguments import as_mapping, as_text, normal_id, refuse
from cachestore.core.errors import BadInput, CacheStoreError, CorruptEntry, FormatError, MissingEntry
from cachestore.core.keys import KEY_BYTES, Json, Key, canonical, digest_parts
from cachestore.core.tensors import to_raw
from cachestore.core.words import did_you_mean
from cachestore.files.marker import noticing_its_end
from cachestore.files.paths import Layout, as_stored
from cachestore.store.format.line import LineEntry, list_line, read_entry
from cachestore.store.read.rows import Rows, read_data_set
from cachestore.store.read.unfinished import list_data_sets, not_there
from cachestore.store.write.made import check_made, what_made
from cachestore.store.write.session import Session

if TYPE_CHECKING:
    from typing_extensions import Self

    from cachestore.store.write.writer import Store

T = TypeVar("T")

_PART: Final = "file"
_TICK_NANOSECONDS: Final = 2_000_000_000
"""Longer than the steps in which file systems tell time: 2 s on FAT, 1 s on old NFS, 4 ms elsewhere."""


class Files:
    """Tensors by path. What `save` and `remove` did is visible to every process when they return, and survives a crash.

        with store.files("my-trainer") as files:
            if not files.exists("cat_latents"):
                files.save("cat_latents", {"latents": tensor}, {"size": [1024, 768]})
            latents = files.load("cat_latents")["latents"]

    Paths are names: slashes separate parts, and nothing is read from or written to them. Threads may share it. In another process, by fork
    or pickle, it can be read only.
    """

    def __init__(self, store: "Store", name: str) -> None:
        """Open the files of this name; make them if the store can be written. Raises BadInput if there are none, or another kind."""
        self._store, self.name = store, as_stored(as_text("name", name))
        self._session = Session(store, name, made="files") if store.is_writable else None
        if self._session is None:
            if (made := what_made(store.layout, self.name)) is None:
                raise not_there(store.layout, self.name, list_data_sets(store.layout))
            check_made(store.layout, self.name, made, {"files"})
        self._forget_names()

    def __getstate__(self) -> dict[str, Any]:
        """Return the store and the name. There is no session in it."""
        return {"store": self._store, "name": self.name}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Open the same files for reading in another process."""
        self._store, self.name, self._session = state["store"], state["name"], None
        self._forget_names()

    def exists(self, path: "str | os.PathLike[str]") -> bool:
        """Whether there is a file at this path now. Its value may be lost all the same: then `load` and `metadata` raise MissingEntry."""
        return _name_of(path) in self._names()

    def save(self, path: "str | os.PathLike[str]", tensors: Mapping[str, Any], metadata: Mapping[str, Json] | None = None) -> None:
        """Save torch tensors or numpy arrays, and a small JSON value. Replaces what is at the path.

        If it raises, nothing changes. Raises BadInput, WriteFailed, and CacheStoreError after `close`, or if the store is open for reading.
        """
        name = _name_of(path)
        raw = to_raw(as_mapping("tensors", tensors, "a mapping from names to tensors"))
        value: dict[str, Json] = {} if metadata is None else dict(as_mapping("metadata", metadata, "a mapping that JSON can hold"))
        specs: list[Json] = [[name, dtype, list(shape)] for name, (dtype, shape, _buffer) in sorted(raw.items())]
        contents = [bytes(raw[tensor][2]) for tensor in sorted(raw)]
        content = digest_parts("cachestore-files", self.name, canonical(specs), canonical(value), *contents)
        key = Key(content[:KEY_BYTES])
        with self._changing() as session:
            is_there = self._holds(key)
            if not is_there:
                try:
                    session.put(key, raw, value)
                except BadInput as error:
                    raise BadInput(f"the file {name!r} cannot be saved: {error}", option=error.option) from error
            session.set(name, **{_PART: key})
            try:
                number = session.flush()
            except BadInput:  # unless `gc` has removed the value since the store was opened or refreshed here
                if not is_there:
                    raise
                self._store.refresh()
                session.put(key, raw, value)
                session.set(name, **{_PART: key})
                number = session.flush()
            self._note(number, name, key)

    def load(self, path: "str | os.PathLike[str]") -> dict[str, Any]:
        """Return the tensors at a path as torch tensors. Raises MissingEntry if there is no such file, CorruptEntry if it is damaged."""
        return self._read(path, self._store.get)

    def metadata(self, path: "str | os.PathLike[str]") -> dict[str, Json]:
        """Return the JSON value at a path. Raises as `load`."""
        return dict(self._read(path, self._store.describe).meta)

    def keys(self, path: "str | os.PathLike[str]") -> list[str]:
        """Return the names of the tensors at a path, without reading them. Raises as `load`."""
        return sorted(self._read(path, self._store.describe).tensors)

    def glob(self, pattern: str = "*") -> list[str]:
        """Return the paths that match a pattern, sorted: `*` also matches slashes, and `glob.escape(text)` matches a text as it is."""
        wanted = normal_id(as_text("pattern", pattern))
        return sorted(path for path in [*self._names()] if fnmatchcase(path, wanted))

    def remove(self, path: "str | os.PathLike[str]") -> None:
        """Remove what is at a path; nothing there is no error. Its value goes with a later `gc`, unless something else needs it.

        Raises WriteFailed, and CacheStoreError as `save`.
        """
        name = _name_of(path)
        with self._changing() as session:
            session.remove(name)
            self._note(session.flush(), name, None)

    def close(self) -> None:
        """End saving and removing, so that others open these files faster; what is there can still be read. May be called twice."""
        if self._session is not None:
            self._session.close()

    def __enter__(self) -> "Self":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self.close()

    @contextmanager
    def _changing(self) -> Generator[Session]:
        """One change at a time. Nothing of one that raises is left for the next."""
        self._store.check_writable()
        if self._session is None:
            raise CacheStoreError(f"these files of {self.name!r} are open for reading; call files() of a store that is open to write")
        with self._session.lock:
            try:
                yield self._session
            except BaseException:
                self._session.discard()
                raise

    def _holds(self, key: Key) -> bool:
        """Whether the value of a key can be read. If it is damaged it is saved again, and readers take the copy that is whole."""
        try:
            return key in self._store and bool(self._store.get_raw([key]))
        except (MissingEntry, CorruptEntry, FormatError):
            return False

    def _read(self, path: "str | os.PathLike[str]", read: Callable[[Key], T]) -> T:
        """Read the value at a path as it is now. Raises MissingEntry."""
        key, is_again = self._key(path), False
        while True:
            try:
                return read(key)
            except MissingEntry as error:
                before, key = key, self._key(path)  # it may have been replaced since its name was read, and `gc` has removed it
                if is_again and key == before:
                    lost = f"the value of the file {_name_of(path)!r} in {self.name!r} of {self._store.layout.root} is lost"
                    raise MissingEntry(f"{lost}: save or remove the file, or put the value back from a copy of the store") from error
                if is_again := key == before:
                    self._store.refresh()  # this call may have slept while a collector moved the value and a day passed

    def _key(self, path: "str | os.PathLike[str]") -> Key:
        name, there = _name_of(path), self._names()
        if (key := there.get(name)) is None:
            raise MissingEntry(f"{self._store.layout.root} has no file {name!r} in {self.name!r}{did_you_mean(name, [*there])}")
        return key

    def _forget_names(self) -> None:
        self._pid, self._lock = os.getpid(), threading.Lock()
        self._keys: dict[str, Key] = {}
        self._number = -1
        """The number of the last entry that `_keys` has; -1 before the first look."""
        self._state: tuple[int, int] | None = None
        """What `_state_of` said before the last look."""

    def _note(self, number: int, name: str, key: Key | None) -> None:
        """Note what an entry of this process did, unless others must be read first."""
        with self._lock:
            if number != self._number + 1:
                return
            self._number = number
            if key is None:
                self._keys.pop(name, None)
            else:
                self._keys[name] = key

    def _names(self) -> Mapping[str, Key]:
        """Return the key of each path now: reads only entries that are new. Other threads may change what it returned."""
        _ = self._store.snapshot  # raises if it is closed
        if self._pid != os.getpid():  # a thread of the parent may have held the lock
            self._forget_names()
        layout = self._store.layout
        with self._lock, noticing_its_end(layout):
            state = _state_of(layout.catalog_folder(self.name))
            if state is None or state != self._state:
                self._state = None  # unless all is read
                self._read_changes(layout)
                self._state = state
            return self._keys

    def _read_changes(self, layout: Layout) -> None:
        line = list_line(layout, self.name)
        if line.highest == self._number:
            return
        entries: list[LineEntry] = []
        try:
            entries = [read_entry(layout, self.name, number) for number in line.above(self._number, line.highest)]
            is_known = self._number >= 0 and all(entry.what in {"changes", "fence"} for entry in entries)
        except (FormatError, FileNotFoundError):  # covered by a table that is newer than what was seen
            is_known = False
        if not is_known:
            rows = Rows.of(read_data_set(layout, self.name))
            self._number = rows.generation
            self._keys = {path: Key(bytes(key)) for path, key in zip(rows.ids, rows.keys(_PART) if rows.parts else (), strict=False)}
            return
        for entry in entries:
            for path, change in entry.changes.items():
                if change.is_removed:
                    self._keys.pop(path, None)
                if cells := change.parts.get(_PART):
                    self._keys[path] = cells[0]
        self._number = line.highest


def _state_of(folder: Path) -> tuple[int, int] | None:
    """Return what changes when a file comes into a folder. None if it changed so lately that a file may come within the same tick."""
    try:
        status = folder.stat()
    except OSError:  # dropped meanwhile; what lists it says so
        return None
    if time.time_ns() - status.st_mtime_ns < _TICK_NANOSECONDS:
        return None
    return status.st_ino, status.st_mtime_ns


def _name_of(path: "str | os.PathLike[str]") -> str:
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else path  # pyright: ignore[reportUnnecessaryIsInstance]
    if not isinstance(text, str) or not text:  # pyright: ignore[reportUnnecessaryIsInstance] - what callers without types pass
        refuse("path", "a text or a path that is not empty", text)
    return normal_id(str(PurePosixPath(text)))
