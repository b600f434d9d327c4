"""Sessions: rows are set and removed, and each flush publishes them as one entry of the data set's line (docs/design/publish.md)."""

import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from cachestore.core.arguments import as_id, as_mapping, as_text
from cachestore.core.errors import BadInput, CacheStoreError, FormatError
from cachestore.core.keys import KEY_BYTES, Json, Key
from cachestore.core.tensors import to_raw
from cachestore.files.marker import noticing_its_end
from cachestore.files.paths import as_stored
from cachestore.store.format.catalog import Made
from cachestore.store.format.line import (
    Changes,
    Line,
    LineEntry,
    RowChange,
    add_change,
    add_changes,
    list_line,
    origin_of_session,
    read_start,
)
from cachestore.store.read.reader import AnyKey
from cachestore.store.read.rows import cell_of
from cachestore.store.write.append import Appender
from cachestore.store.write.folding import ends_block, fold
from cachestore.store.write.link import Keys, Linked, check_keys, check_not_ended, is_in_line, link_next, new_mark
from cachestore.store.write.made import begin

if TYPE_CHECKING:
    from typing_extensions import Self

    from cachestore.store.write.writer import Store

_TABLE_ROWS: Final = 4096
"""A flush makes no table for fewer rows than this."""
_CLOSING_SECONDS: Final = 30
"""How long the end of a session waits for another process that makes a table: without the last rows, it may be."""


@dataclass(slots=True)
class _Attempt:
    """What a flush publishes, or has tried to publish, as one entry."""

    changes: Changes = field(default_factory=Changes)
    mark: str = field(default_factory=new_mark)
    number: int = 0
    """The last number that it tried; 0 before it tried one."""
    refused: list[str] = field(default_factory=list[str])
    """The rows that name keys which are nowhere."""

    def keys(self) -> Keys:
        """The keys that are named."""
        keys = [key for change in self.changes.values() for cells in change.parts.values() for key in cells]
        return np.frombuffer(b"".join(keys), np.uint8).reshape(-1, KEY_BYTES)

    def samples_of(self, keys: set[Key]) -> list[str]:
        """The rows that name some of these keys, which are refused."""
        rows = self.changes.items()
        self.refused = [sample for sample, change in rows if any(keys.intersection(cells) for cells in change.parts.values())]
        return self.refused


class Session:
    """A publish that grows: rows are set and removed, and each flush is visible to every process.

        with store.session("train/dino") as session:
            session.put(key, {"features": tensor})
            session.set("cat", dino=key)

    The end of the block flushes, unless it raised; what was flushed before stays. Belongs to one process. Threads may share it: each
    flush publishes what all of them have set.
    """

    def __init__(self, store: "Store", name: str, *, made: Made = "published") -> None:
        """Begin a data set, or go on with one. Raises BadInput if something else made it, or is making it."""
        self._store, self.name = store, as_stored(as_text("name", name))
        self._appender = Appender(store.layout, origin=origin_of_session(self.name))
        self._changes = Changes()
        """Since the last flush began."""
        self._attempt = _Attempt()
        """Of a flush that failed or was interrupted: its entry may be there all the same."""
        self.lock = threading.RLock()
        self._lineage = begin(store.layout, self.name, made)
        self._has_ended = False
        self._last: Linked | None = None
        """The entry that the last flush linked; None if the line must be listed."""

    def put(self, key: AnyKey, tensors: Mapping[str, Any], meta: Mapping[str, Json] | None = None) -> None:
        """Put a value that belongs to this data set: once no row names it any more, `gc` may remove it.

        Copies, and raises, as `Writer.put`. Of two values under one key readers get either: use another key for another value.
        """
        named = as_mapping("tensors", tensors, "a mapping from names to tensors")
        value: Mapping[str, Json] = {} if meta is None else as_mapping("meta", meta, "a mapping that JSON can hold")
        self._check_open()
        with self.lock:
            self._show(self._appender.put(Key.parse(key), to_raw(named), value))

    def set(self, sample: str, /, **parts: "AnyKey | Sequence[AnyKey]") -> None:
        """Set parts of a row: each to a key, to several, or to none. Parts that are not named stay. A new row comes last."""
        self._check_open()
        if not parts:
            raise BadInput("set needs at least one part: session.set(id, part=key)", option="parts")
        named = as_id("sample", sample)
        change = RowChange(parts={part: cell_of(keys) for part, keys in parts.items()})
        with self.lock:
            add_change(self._changes, named, change)

    def remove(self, sample: str) -> None:
        """Remove a row. A row that is not there is no error."""
        self._check_open()
        with self.lock:
            add_change(self._changes, as_id("sample", sample), RowChange(is_removed=True))

    def flush(self) -> int:
        """Publish what was put, set and removed since the last flush. When this returns, it is durable, and visible to every process.

        Returns the number of the data set's last entry. If it raises, nothing is published, and what was set is kept for the next flush;
        but not the rows that were refused. Raises BadInput for keys that are not in the store, or if the data set was dropped; WriteFailed
        if the disk refused.
        """
        number, rows = self._link_changes()
        above = self._last.entry.above if self._last is not None else 0
        every = max(1, _TABLE_ROWS // 16)  # it takes two listings to see whether a table is due
        if rows and (ends_block(number) or (above >= _TABLE_ROWS and above // every > (above - rows) // every)):
            fold(self._store.layout, self.name, number, least_rows=_TABLE_ROWS, part=2)
        return number

    def publish(self, changes: Changes) -> int:
        """Flush these changes too, and return the number of the entry."""
        with self.lock:
            add_changes(self._changes, changes)
        return self.flush()

    @property
    def has_changes(self) -> bool:
        """Whether rows were set or removed since the last flush."""
        return bool(self._changes or self._attempt.changes)

    def discard(self) -> None:
        """Forget what was put, set and removed since the last flush."""
        with self.lock:
            self._appender.discard()
            self._changes, self._attempt = Changes(), _Attempt()

    def close(self) -> None:
        """Flush, make a table if an eighth of the rows is new, and end the session. May be called twice."""
        if self._has_ended:
            return
        number, _rows = self._link_changes()
        self._has_ended = True
        fold(self._store.layout, self.name, number, least_rows=1, part=8, seconds=_CLOSING_SECONDS)

    def __enter__(self) -> "Self":
        self._appender.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if kind is None:
                self.close()
            else:
                self.discard()
        finally:
            self._has_ended = True
            self._appender.__exit__(kind, error, trace)

    def _check_open(self) -> None:
        self._appender.check_process()
        _ = self._store.snapshot  # raises if the store is closed
        if self._has_ended:
            raise CacheStoreError(f"this session of {self.name!r} has ended; begin another one in the store at {self._store.layout.root}")

    def _show(self, published: Sequence[Any]) -> None:
        if published:
            self._store.show_and_commit({segment.digest: segment.contents for segment in published})

    def _link_changes(self) -> tuple[int, int]:
        """Publish values, and then what names them as the next entry. Returns the number of the last entry, and how many rows it has."""
        layout = self._store.layout
        self._check_open()
        with self.lock, noticing_its_end(layout):
            self._show(self._appender.close_segment())
            changes = Changes() if self._is_there(self._attempt) else {**self._attempt.changes}
            add_changes(changes, self._changes)
            attempt = self._attempt = _Attempt(changes)
            self._changes = Changes()
            if not changes:
                return list_line(layout, self.name).highest, 0
            last, self._last = self._last, None
            try:
                self._last = link_next(layout, self.name, self._next_entry, known=last)
            except BadInput:
                for sample in attempt.refused or [*changes]:
                    del changes[sample]
                self._attempt = _Attempt(changes)
                raise
            self._attempt = _Attempt()
            return self._last.number, len(changes)

    def _is_there(self, attempt: _Attempt) -> bool:
        """Whether an attempt that failed has published its entry all the same."""
        layout, name, number, mark = self._store.layout, self.name, attempt.number, attempt.mark
        with suppress(FormatError, OSError):
            return number > 0 and read_start(layout, name, number).mark == mark and is_in_line(layout, name, number, mark)
        return False

    def _next_entry(self, line: Line, last: LineEntry) -> LineEntry:
        attempt, lineage = self._attempt, self._lineage
        check_not_ended(self._store.layout, line, last, lineage.number)
        check_keys(self._store, self.name, attempt.keys(), attempt.samples_of)
        attempt.number = line.highest + 1
        return LineEntry("changes", attempt.mark, changes=attempt.changes, made=lineage.made, line=lineage.line)
