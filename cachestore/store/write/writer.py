"""A store that can be written: a Reader with `writer` and `commit`. It belongs to one process."""

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Literal

from cachestore.core.arguments import as_mapping, as_path, as_switch, as_text, as_word
from cachestore.core.errors import CacheStoreError, ReadFailed, WriteFailed
from cachestore.core.keys import Json, Key
from cachestore.core.tensors import to_numpy, to_raw, to_torch
from cachestore.files.marker import noticing_its_end
from cachestore.files.paths import Access, Mode
from cachestore.store.format.marked import marked_segments
from cachestore.store.format.segment import SegmentContents
from cachestore.store.read.fetch import Io, Verify
from cachestore.store.read.reader import AnyKey, Reader
from cachestore.store.write.append import Acknowledged, Appender
from cachestore.store.write.commit import commit, commit_if_due, create_store

if TYPE_CHECKING:
    from typing_extensions import Self

    from cachestore.store.write.files import Files
    from cachestore.store.write.session import Session


_COVERED_PART: Final = 16


class Writer:
    """Puts values of your own, and reads them back. The end of the `with` block appends them: durable, acknowledged, readable here.

        with store.writer() as writer:
            if key not in writer:
                writer.put(key, {"features": tensor})

    If the block raises, values that are not yet published are discarded. Published ones stay. Belongs to one process and one thread.
    """

    def __init__(self, store: "Store") -> None:
        self._store = store
        self._appender = Appender(store.layout)
        self._published: list[Acknowledged] = []
        self._has_ended = False

    def put(self, key: AnyKey, tensors: Mapping[str, Any], meta: Mapping[str, Json] | None = None) -> None:
        """Collect an entry. `tensors` maps names to torch tensors or numpy arrays, `meta` is a small JSON value; both are copied.

        It is written even if the store has the key already. Raises BadInput for what cannot be stored, WriteFailed if a full segment could
        not be published, CacheStoreError for a closed store and after the block.
        """
        self._check_open()
        named = as_mapping("tensors", tensors, "a mapping from names to tensors")
        value: Mapping[str, Json] = {} if meta is None else as_mapping("meta", meta, "a mapping that JSON can hold")
        self._published += self._appender.put(Key.parse(key), to_raw(named), value)

    def get(self, key: AnyKey, *, as_numpy: bool = False) -> dict[str, Any]:
        """Return the tensors of an entry, writable and the caller's own: what was put here, published or not, else what the store has.

        Raises MissingEntry, CorruptEntry, and CacheStoreError for a closed store.
        """
        parsed = Key.parse(key)
        self._show()
        raw = self._appender.find(parsed)
        if raw is None:
            return self._store.get(parsed, as_numpy=as_numpy)
        return to_numpy(raw) if as_numpy else to_torch(raw)

    def __contains__(self, key: AnyKey) -> bool:
        """Whether a key needs no `put`: it was put here, or the store held it when it was opened or refreshed.

        An entry that `gc` will remove, as it lies only in segments marked for deletion, counts as absent.
        """
        parsed = Key.parse(key)
        self._show()
        if self._appender.find(parsed) is not None:
            return True
        [locations] = self._store.snapshot.find([parsed])
        marked = marked_segments(self._store.layout) if locations else frozenset[str]()
        return any(location.segment.digest not in marked for location in locations)

    def flush(self) -> None:
        """Publish what was put. When this returns, it is durable, and readable here and by every process.

        A store that is open elsewhere shows it after `refresh`, or when it is asked for the key. Raises WriteFailed if the disk refused;
        what was put is then kept for the next flush.
        """
        self._check_open()
        self._published += self._appender.close_segment()
        self._show()

    def __enter__(self) -> "Self":
        self._appender.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Publish what is collected, unless the block raised."""
        try:
            if kind is None:
                self._published += self._appender.close_segment()
            else:
                self._appender.discard()
        finally:
            self._appender.__exit__(kind, error, trace)
        self._has_ended = True
        self._show()

    def _check_open(self) -> None:
        _ = self._store.snapshot  # raises if the store is closed
        if self._has_ended:
            raise CacheStoreError(f"the block of this writer has ended; call writer() of the store at {self._store.layout.root} again")

    def _show(self) -> None:
        """Let the store see what was published here."""
        _ = self._store.snapshot
        if self._published:
            published, self._published = self._published, []
            self._store.show_and_commit({segment.digest: segment.contents for segment in published})


class Store(Reader):
    """An open store. With `mode="a"` it can be written."""

    def __init__(
        self, path: str | Path, *, mode: Literal["r", "a"] = "r", verify: Verify = "first", io: Io = "pread", access: Mode | None = None
    ) -> None:
        """Open a store; `mode="a"` makes one if there is none. Raises StoreNotFound, BadInput, FormatError."""
        as_word("mode", mode, ("r", "a"))
        if mode == "a":
            create_store(as_path("path", path), mode=access)
        self.mode: Literal["r", "a"] = mode
        self._pid = os.getpid()
        super().__init__(path, verify=verify, io=io)

    def __repr__(self) -> str:
        return f"Store({str(self.layout.root)!r}, mode={self.mode!r})"

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Open the same store for reading in another process."""
        self.mode = "r"
        self._pid = os.getpid()
        super().__setstate__(state)

    def writer(self) -> Writer:
        """Return a context manager in which you put values. Raises CacheStoreError if this process did not open the store to write."""
        self.check_writable()
        return Writer(self)

    def session(self, name: str) -> "Session":
        """Return a publish of a data set that grows, a context manager. Raises BadInput if something else made this data set."""
        from cachestore.store.write.session import Session

        self.check_writable()
        return Session(self, name)

    def publish(self, name: str, rows: object, *, update: bool = False) -> int:
        """Publish a data set whose values are in the store, as one table that every process sees at once. Returns its generation.

        Args:
            name: the data set's name, such as "train/dino".
            rows: `cs.Rows`, or `{id: {part: key or keys}}`. Of rows of a data set that `precompute` made, ids and keys are taken.
            update: lay these rows over those that are there: parts and columns that they do not name stay. Otherwise they replace all.

        Raises:
            BadInput: a key is not in the store, an id comes twice, or something else made the data set.
            WriteFailed: the disk refused. Then nothing is published.
        """
        from cachestore.store.write.publish import publish_rows

        self.check_writable()
        with noticing_its_end(self.layout):
            return publish_rows(self, as_text("name", name), rows, update=as_switch("update", update))

    def files(self, name: str) -> "Files":
        """Return named tensors, saved and loaded by path. With `mode="r"` they can be loaded only.

        Raises BadInput if a data set of another kind has the name, or, of a store that is open for reading, if there are no such files.
        """
        from cachestore.store.write.files import Files

        _ = self.snapshot  # raises if it is closed
        return Files(self, name)

    def put(self, key: AnyKey, tensors: Mapping[str, Any], meta: Mapping[str, Json] | None = None) -> None:
        """Store one value, as `Writer.put` takes it. When this returns, it is durable, acknowledged and readable here.

        Each call makes a segment: for many values `writer()` is much faster. Raises as `Writer.put` and `writer`.
        """
        with self.writer() as writer:
            writer.put(key, tensors, meta)

    def commit(self) -> None:
        """Publish an index of all that is there, so that others open the store fast. Does nothing when nothing is new."""
        self.check_writable()
        self._replace(lambda before: commit(self.layout, snapshot=before))

    def show_and_commit(self, published: Mapping[str, SegmentContents]) -> None:
        """Show segments that were published here, and publish an index if many have none. If that fails, a later call does it."""
        self.show(published)
        before = self.snapshot
        with suppress(WriteFailed, ReadFailed):
            if (newer := commit_if_due(self.layout, before, part=_COVERED_PART)) is not before:
                self.use(newer)

    @property
    def is_writable(self) -> bool:
        """Whether this process opened the store to write."""
        return self.mode == "a" and self._pid == os.getpid()

    def check_writable(self) -> None:
        """Raise CacheStoreError if the store is closed, or if this process did not open it to write."""
        if not self.is_writable:
            raise CacheStoreError(f'{self.layout.root} is open for reading here; open it with mode="a" in the process that writes')
        _ = self.snapshot  # raises if it is closed


def open_store(
    path: str | Path, mode: Literal["r", "a"] = "r", *, verify: Verify = "first", io: Io = "pread", access: Access | None = None
) -> Store:
    """Open a store: `cachestore.open`.

    Args:
        path: the store's folder.
        mode: "r" to read one that exists, "a" to read and append, making it if needed.
        verify: check each entry against its checksum the "first" time it is read here, "always" or "never".
        io: "pread" copies into new buffers; "mmap" returns views, and a file that is cut short then kills the process (SIGBUS).
        access: who may write the store, if this call makes it: "private", its owner, or "group". By default taken over from its
            folder: "group" if that hands its group on (setgid) and the umask lets the group write.

    Raises:
        StoreNotFound: with mode "r", if there is none.
        FormatError: the store was written by a newer version.
        BadInput: another mode; with mode "a", another access than the store has, or a folder that holds something else.
    """
    return Store(path, mode=mode, verify=verify, io=io, access=Mode.asked(access))
