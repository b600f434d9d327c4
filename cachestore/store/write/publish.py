"""Publish data sets: sessions that set and remove rows, whole tables, and the tables and blocks that follow from them.

docs/design/publish.md has the protocol, and what a crash leaves.
"""

import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np

from cachestore.core.arguments import as_mapping, as_text
from cachestore.core.errors import BadInput, CacheStoreError, CorruptEntry, FormatError, Incomplete, MissingEntry, WriteFailed
from cachestore.core.keys import KEY_BYTES, Json, Key
from cachestore.core.tensors import to_raw
from cachestore.core.words import first_of, noun, plural
from cachestore.files.locks import locked
from cachestore.files.marker import noticing_its_end
from cachestore.files.opening import status_of
from cachestore.files.paths import BlockName, Layout, encode_name
from cachestore.files.publish import publish, publish_link
from cachestore.files.table import Digests, open_table, read_header
from cachestore.store.format.catalog import FORMAT as CATALOG_FORMAT
from cachestore.store.format.catalog import VERSION as CATALOG_VERSION
from cachestore.store.format.catalog import Catalog, Kind, Made, kind_of_values
from cachestore.store.format.line import (
    BLOCKS,
    FILLERS,
    OWNER,
    SESSION,
    Changes,
    Entry,
    Line,
    RowChange,
    add_change,
    encode_entry,
    lay,
    list_line,
    read_entry,
    read_start,
    typed_values,
)
from cachestore.store.format.line import FORMAT as CHANGES_FORMAT
from cachestore.store.format.line import VERSION as CHANGES_VERSION
from cachestore.store.read.held import held_keys
from cachestore.store.read.reader import AnyKey
from cachestore.store.read.rows import Rows, cell_of, read_data_set
from cachestore.store.read.snapshot import load_snapshot
from cachestore.store.read.unfinished import list_unfinished
from cachestore.store.write.append import Appender
from cachestore.store.write.catalog_writer import Draft, draft_of, publish_draft

if TYPE_CHECKING:
    from typing_extensions import Self

    from cachestore.store.write.writer import Store

MADE: Final[Mapping[str, str]] = {
    "precompute": "was made by `cachestore precompute`",
    "imported": "was imported from another trainer",
    "published": "was published by a program",
    "files": "holds files",
}
"""What made a data set, in words."""
KINDS: Final[Mapping[Kind, str]] = {"whole": "whole numbers", "float": "floats", "text": "texts"}

_TABLE_ROWS: Final = 4096
"""A flush makes no table for fewer rows than this."""
_BEGIN_TRIES: Final = 20
"""How often a session looks whether there is a data set, while others begin and drop it."""
_TRIES: Final = 10_000
"""How often a flush tries to get a number, while others are faster."""


class Session:
    """A publish that grows: rows are set and removed, and each flush is visible to every process.

        with store.session("train/dino") as session:
            session.put(key, {"features": tensor})
            session.set("cat", dino=key)

    The end of the block flushes, unless it raised; what was flushed before stays. Belongs to one process and one thread.
    """

    def __init__(self, store: "Store", name: str, *, made: Made = "published") -> None:
        """Begin a data set, or go on with one. Raises BadInput if something else made it, or is making it."""
        self._store, self.name = store, as_text("name", name)
        encode_name(self.name)  # raises for a name that cannot be
        self._appender = Appender(store.layout, origin=f"{SESSION}{secrets.token_hex(16)}")
        self._changes = Changes()
        self._mark = secrets.token_hex(16)
        self._tried = 0
        """The number that the last attempt of a flush took; 0 if none failed."""
        self._began = _begin(store.layout, self.name, made)

    def put(self, key: AnyKey, tensors: Mapping[str, Any], meta: Mapping[str, Json] | None = None) -> None:
        """Put a value that belongs to this data set: once no row names it any more, `gc` may remove it. Else as `Writer.put`."""
        named = as_mapping("tensors", tensors, "a mapping from names to tensors")
        value: Mapping[str, Json] = {} if meta is None else as_mapping("meta", meta, "a mapping that JSON can hold")
        self._show(self._appender.put(Key.parse(key), to_raw(named), {**value, OWNER: self.name}))

    def set(self, sample: str, /, **parts: "AnyKey | Sequence[AnyKey]") -> None:
        """Set parts of a row: each to a key, to several, or to none. Parts that are not named stay. A new row comes last."""
        self._appender.check_process()
        if not parts:
            raise BadInput("set needs at least one part: session.set(id, part=key)", option="parts")
        if not as_text("an id", sample):
            raise BadInput("an id is empty: give each row an id", option="sample")
        add_change(self._changes, sample, RowChange(parts={part: cell_of(keys) for part, keys in parts.items()}))

    def remove(self, sample: str) -> None:
        """Remove a row. A row that is not there is no error."""
        self._appender.check_process()
        add_change(self._changes, as_text("an id", sample), RowChange(is_removed=True))

    def flush(self) -> int:
        """Publish what was put, set and removed since the last flush. When this returns, it is durable, and visible to every process.

        Returns the number of the data set's last entry. Raises BadInput for keys that are not in the store, or if the data set was dropped;
        WriteFailed if the disk refused. Then nothing is published, and what was set is kept for the next flush.
        """
        layout = self._store.layout
        with noticing_its_end(layout):
            self._show(self._appender.close_segment())
            if not self._changes:
                return list_line(layout, self.name).highest
            number = self._tried if self._is_there(self._tried) else self._link()
            self._changes, self._mark, self._tried = Changes(), secrets.token_hex(16), 0
            _fold(layout, self.name, number, least_rows=_TABLE_ROWS, share=2)
        return number

    def close(self) -> None:
        """Flush, and make a table if an eighth of the rows is new. May be called twice."""
        number = self.flush()
        _fold(self._store.layout, self.name, number, least_rows=1, share=8)

    def __enter__(self) -> "Self":
        self._appender.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if kind is None:
                self.close()
            else:
                self._appender.discard()
        finally:
            self._appender.__exit__(kind, error, trace)

    def _show(self, published: Sequence[Any]) -> None:
        if published:
            self._store.take_newer({segment.digest: segment.contents for segment in published})

    def _is_there(self, number: int) -> bool:
        """Whether an attempt that failed has published its entry all the same, as part of the line."""
        try:
            layout = self._store.layout
            is_ours = number > 0 and read_start(layout, self.name, number).mark == self._mark
            return is_ours and _is_in_line(layout, self.name, number, self._mark)
        except (FormatError, OSError):
            return False

    def _link(self) -> int:
        """Publish the changes as the next entry of the line, and return its number."""
        layout, changes = self._store.layout, self._changes
        keys = [key for change in changes.values() for cells in change.parts.values() for key in cells]

        def samples_of(lost: set[Key]) -> list[str]:
            return [sample for sample, change in changes.items() if any(lost.intersection(cells) for cells in change.parts.values())]

        def publish_as(number: int, before: Entry) -> bool:
            self._tried = number
            entry = Entry("changes", self._mark, before.mark, before.above + len(changes), changes)
            return publish(layout, layout.entry(self.name, number), encode_entry(self.name, number, entry), read_only=True)

        named = _Named(np.frombuffer(b"".join(keys), np.uint8).reshape(-1, KEY_BYTES), samples_of)
        return _link_entry(self._store, _Next(self.name, self._began, self._mark, publish_as), named)


@dataclass(frozen=True, slots=True)
class _Named:
    """The keys that an entry names: uint8 of shape [n, 16]."""

    keys: "np.ndarray[Any, np.dtype[np.uint8]]"
    samples_of: Callable[[set[Key]], list[str]]
    """Returns the ids of the rows that name some of these keys."""


@dataclass(frozen=True, slots=True)
class _Next:
    """An entry that waits for a number."""

    name: str
    began: int
    """The highest number when its session began: if the line has ended since, it is not the session's any more."""
    mark: str
    publish_as: Callable[[int, Entry], bool]
    """Publishes it under a number, given the entry before. Returns False if the number was taken."""


def _link_entry(store: "Store", entry: _Next, named: _Named) -> int:
    """Publish an entry under the next number of its line, after the keys that it names were checked. Returns its number."""
    layout = store.layout
    for _try in range(_TRIES):
        line = list_line(layout, entry.name)
        if line.dropped > entry.began:
            raise BadInput(f"the data set {entry.name!r} in {layout.root} was dropped meanwhile: begin a new session", option="name")
        _check_keys(store, entry.name, named)
        number = line.highest + 1
        if status_of(layout.entry(entry.name, number)) is not None:  # another process was faster: write nothing in vain
            continue
        if entry.publish_as(number, _last_entry(layout, line)) and _is_in_line(layout, entry.name, number, entry.mark):
            return number
    raise _too_busy(layout, entry.name)


def _too_busy(layout: Layout, name: str) -> Incomplete:
    return Incomplete(f"the data set {name!r} in {layout.root}: others published faster, {_TRIES} times; run the same again")


def _last_entry(layout: Layout, line: Line) -> Entry:
    """Return the entry with the highest number, without its rows. After a table that no entry made: one with an empty mark."""
    number = line.highest
    blocks = [block for block in line.blocks if block.last == number]
    if number not in line.entries and not blocks:
        return Entry("fence", "", "")
    try:
        found = read_start(layout, line.name, number if number in line.entries else blocks[0])
    except FileNotFoundError:  # this process slept, and it was removed: the link will fail, or not be in the line
        return Entry("fence", "", "")
    return replace(found, above=0) if number in line.tables else found


def _is_in_line(layout: Layout, name: str, number: int, mark: str) -> bool:
    """Whether a published entry is part of the line: it is the last, or the next one names it.

    If not, this process slept while others went on, and its number was free because what they had published there was removed. The number
    of the newest table stays taken, as no entry of that number is removed.
    """
    line = list_line(layout, name)
    if line.highest == number or number <= line.dropped:
        return number > line.dropped
    try:
        return read_start(layout, name, number + 1).before == mark
    except FileNotFoundError:
        return False


def _check_keys(store: "Store", name: str, named: _Named) -> None:
    """Make sure that each key lies in a segment that is not marked for deletion; copy those that do not. Raises BadInput for absent keys.

    Call it after the line was listed: then a collector that marked a segment since takes the number, or reads this entry.
    """
    layout = store.layout
    with closing(load_snapshot(layout, earlier=store.snapshot, for_planning=True)) as snapshot:
        doubtful = named.keys[~held_keys(snapshot, named.keys)]
    if not len(doubtful):
        return
    store.refresh()
    lost: set[Key] = set()
    with Appender(layout, origin=f"{SESSION}{secrets.token_hex(16)}") as appender:
        for key in dict.fromkeys(map(Key, Digests(memoryview(doubtful.tobytes()), KEY_BYTES))):
            try:
                [raw] = store.get_raw([key])
                appender.put(key, raw, store.describe(key).meta)
            except (MissingEntry, CorruptEntry):
                lost.add(key)
        appender.close_segment()
    store.refresh()
    if lost:
        samples = named.samples_of(lost)
        rows = f"{plural(len(samples), 'row')} {noun(len(samples), 'names', 'name')} {plural(len(lost), 'key')}"
        where = f"not in {layout.root}: {first_of(map(repr, samples))} with {first_of(sorted(lost))}"
        raise BadInput(f"{rows} {where}; put the values first, then publish {name!r}", option="rows")


def _begin(layout: Layout, name: str, made: Made) -> int:
    """Return the highest number of a data set of this kind, which is begun with an empty table if there is none.

    Raises BadInput, and FormatError if all tables of a data set are lost: an empty one above its entries would hide them.
    """
    for _try in range(_BEGIN_TRIES):
        line = list_line(layout, name)
        there = kind_of(layout, name)
        if there is not None and there != made:
            why = f"the data set {name!r} in {layout.root} {MADE[there]}"
            raise BadInput(f"{why}: choose another name, or drop it", option="name")
        if there is not None:
            return line.highest
        if line.tables or line.entries or line.blocks:  # dropped meanwhile
            continue
        if unfinished := next((one for one in list_unfinished(layout) if one.name == name), None):
            raise BadInput(f"{layout.root}: {unfinished.in_words(layout)}; choose another name for what you publish", option="name")
        publish_draft(layout, draft_of(Catalog(name, {}, {}, [], [0], [], {}, [], (), made=made)), after=line.highest)
    lost = f"the data set {name!r} in {layout.root} has entries, but every generation of it is gone"
    raise FormatError(f"{lost}: put one back from a copy of the store, or choose another name")


def publish_rows(store: "Store", name: str, rows: object, *, update: bool) -> int:
    """Publish a whole table: these rows alone, or with `update` these over what is there. Returns the generation."""
    layout, given, mark = store.layout, Rows.read(rows), secrets.token_hex(16)
    named = _Named(np.concatenate([np.empty((0, KEY_BYTES), np.uint8), *(given.lists(part)[1] for part in given.parts)]), given.samples_of)
    _check_keys(store, name, named)
    began = _begin(layout, name, "published")
    for _try in range(_TRIES):
        before = read_data_set(layout, name)
        table = _laid_over(before, given) if update else given.catalog
        draft = draft_of(replace(table, name=name, made="published"))

        def publish_as(number: int, last: Entry, draft: Draft = draft, read: int = before.generation) -> bool:
            if update and number != read + 1:
                raise _Overtaken
            chunks = draft.chunks(number, entry={"what": "whole", "mark": mark, "before": last.mark, "above": len(draft.catalog)})
            return publish(layout, layout.entry(name, number), chunks, read_only=True)

        with suppress(_Overtaken):
            number = _link_entry(store, _Next(name, began, mark, publish_as), named)
            with suppress(WriteFailed):  # the rows are there: a later fold makes the table
                publish_link(layout, layout.entry(name, number), layout.catalog(name, number))
            return number
    raise _too_busy(layout, name)


class _Overtaken(Exception):
    """Another process published since the rows were read."""


def _laid_over(before: Catalog, given: Rows) -> Catalog:
    """Return a table with rows over it: the parts and columns that they have are set."""
    parts = [(part, column.row_keys) for part, column in zip(given.parts, given.catalog.columns, strict=True)]
    changes: Changes = {}
    for row, sample in enumerate(given.ids):
        cells = {part: tuple(key for key in keys_of(row) if key is not None) for part, keys_of in parts}
        changes[sample] = RowChange(parts={part: keys for part, keys in cells.items() if keys} or dict.fromkeys(given.parts, ()))
    laid = lay(before, changes)
    row_of = {sample: row for row, sample in enumerate(laid.ids) if sample in changes}
    values = dict(laid.values)
    for name, column in given.catalog.values.items():
        kind, there = kind_of_values(column), values.get(name)
        if there is not None and kind_of_values(there) != kind:
            raise BadInput(f"the column {name!r} holds {KINDS[kind_of_values(there)]}, but the new rows have {KINDS[kind]}", option="rows")
        listed = [FILLERS[kind]] * len(laid) if there is None else list(there)
        for sample, value in zip(given.ids, column, strict=True):
            listed[row_of[sample]] = value
        values[name] = typed_values(listed, kind)
    return replace(laid, values=values)


def _fold(layout: Layout, name: str, number: int, *, least_rows: int, share: int) -> None:
    """Make blocks that end with an entry, and a table if at least so many rows, and a `share`-th of the table's, are above the newest one.

    Never raises: what was flushed is there without them, and a later fold makes what could not be made now.
    """

    def is_due() -> bool:
        rows = rows_above(layout, name)
        return rows >= least_rows and share * rows >= _table_rows(layout, name)

    with suppress(CacheStoreError, OSError):
        make_blocks(layout, name, number)
        if is_due():
            with locked(layout.lock("table"), seconds=0, mode=layout.mode):  # or all that flush meanwhile would make one each
                if is_due():
                    make_table(layout, name)


def make_table(layout: Layout, name: str) -> int:
    """Publish a data set as it is now as a generation, unless there is one already. Returns its number."""
    catalog = read_data_set(layout, name)
    if catalog.generation not in list_line(layout, name).tables:
        publish_draft(layout, draft_of(catalog), after=catalog.generation - 1)
    return catalog.generation


def make_blocks(layout: Layout, name: str, number: int) -> None:
    """Write the entries of each block that ends with this number as one file, if no table lies within it."""
    for size in BLOCKS:
        block = BlockName(number - size + 1, number)
        line = list_line(layout, name)
        if number % size or block.first <= line.dropped or any(table >= block.first for table in line.tables):
            return
        try:
            entries = [read_entry(layout, name, one) for one in line.above(block.first - 1, number)]
        except (FormatError, FileNotFoundError):  # a loss: who reads these entries says so
            return
        if any(entry.what in {"whole", "dropped"} for entry in entries):
            return
        changes = Changes()
        for entry in entries:
            for sample, change in entry.changes.items():
                add_change(changes, sample, change)
        whole = Entry("changes", entries[-1].mark, entries[0].before, entries[-1].above, changes)
        publish(layout, layout.block(name, block), encode_entry(name, block, whole), read_only=True)


def publish_bare(layout: Layout, name: str, what: Literal["fence", "dropped"]) -> int:
    """Publish an entry without rows as the next of a line, and return its number.

    After a fence, a flush that looked at the marks before has to look again. `dropped` ends the line.
    """
    mark = secrets.token_hex(16)
    for _try in range(_TRIES):
        line = list_line(layout, name)
        number, before = line.highest + 1, _last_entry(layout, line)
        chunks = encode_entry(name, number, Entry(what, mark, before.mark, before.above))
        if publish(layout, layout.entry(name, number), chunks, read_only=True) and _is_in_line(layout, name, number, mark):
            return number
    raise _too_busy(layout, name)


def rows_above(layout: Layout, name: str) -> int:
    """Return how many rows the entries above the newest table change, at least."""
    line = list_line(layout, name)
    newest = max(line.tables, default=0)
    if line.highest <= newest:
        return 0
    rows = _last_entry(layout, line).above
    with suppress(FormatError, OSError):
        # The table may have been made after the next entry was linked: then its rows are counted from an earlier table on.
        before, following = read_start(layout, name, newest), read_start(layout, name, newest + 1)
        own = len(open_table(layout.entry(name, newest + 1), CHANGES_FORMAT, CHANGES_VERSION).strings("ids"))
        rows -= before.above if following.above > own else 0
    return rows


def kind_of(layout: Layout, name: str) -> Made | None:
    """Return what made a data set; None if there is none. Raises FormatError if its newest table is damaged."""
    for _try in range(_BEGIN_TRIES):
        for number in reversed(list_line(layout, name).tables):
            with suppress(FileNotFoundError):  # a newer one has taken its place: list again
                return read_header(layout.catalog(name, number), CATALOG_FORMAT, CATALOG_VERSION)["made"]
        if not list_line(layout, name).tables:
            break
    return None


def _table_rows(layout: Layout, name: str) -> int:
    """The rows of the newest table."""
    tables = list_line(layout, name).tables
    with suppress(FormatError, OSError):
        return len(open_table(layout.catalog(name, tables[-1]), CATALOG_FORMAT, CATALOG_VERSION).strings("ids")) if tables else 0
    return 0
