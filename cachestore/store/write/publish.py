"""Publish data sets: sessions that set and remove rows, whole tables, and the tables and blocks that follow from them.

docs/design/publish.md has the protocol, and what a crash leaves.
"""

import secrets
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Literal, cast

import numpy as np

from cachestore.core.arguments import as_id, as_mapping, as_text
from cachestore.core.errors import (
    BadInput,
    CacheStoreError,
    CorruptEntry,
    FormatError,
    Incomplete,
    MissingEntry,
    Superseded,
    WriteFailed,
)
from cachestore.core.keys import KEY_BYTES, Json, Key
from cachestore.core.tensors import to_raw
from cachestore.core.words import first_of, noun, plural
from cachestore.files.locks import locked
from cachestore.files.marker import noticing_its_end
from cachestore.files.opening import status_of
from cachestore.files.paths import BlockName, Layout, as_stored
from cachestore.files.publish import publish, publish_link
from cachestore.files.table import Digests, open_table, read_header, run_of
from cachestore.store.format.catalog import FORMAT as CATALOG_FORMAT
from cachestore.store.format.catalog import HAVE_SOURCES, MADE, Catalog, Kind, Made, kind_of_values
from cachestore.store.format.catalog import VERSION as CATALOG_VERSION
from cachestore.store.format.line import (
    BLOCKS,
    FILLERS,
    Cells,
    Changes,
    Line,
    LineEntry,
    RowChange,
    add_change,
    empty_table,
    encode_entry,
    lay,
    list_line,
    origin_of_session,
    read_entry,
    read_start,
    typed_values,
)
from cachestore.store.format.line import FORMAT as CHANGES_FORMAT
from cachestore.store.format.line import VERSION as CHANGES_VERSION
from cachestore.store.read.held import held_keys, reliable_keys
from cachestore.store.read.reader import AnyKey
from cachestore.store.read.rows import Rows, cell_of, newest_catalog, read_data_set
from cachestore.store.read.snapshot import load_snapshot
from cachestore.store.read.unfinished import list_data_sets, list_unfinished, not_there
from cachestore.store.write.append import Appender
from cachestore.store.write.catalog_writer import Draft, draft_of, mark_dropped, publish_draft
from cachestore.store.write.commit import publish_recipe

if TYPE_CHECKING:
    from typing_extensions import Self

    from cachestore.store.write.writer import Store

KINDS: Final[Mapping[Kind, str]] = {"whole": "whole numbers", "float": "floats", "text": "texts"}

_CLOSING_SECONDS: Final = 30
"""How long the end of a session waits for another process that makes a table: without the last rows, it may be."""
_TABLE_ROWS: Final = 4096
"""A flush makes no table for fewer rows than this."""
_FEW_KEYS: Final = 1024
"""So many keys are looked up one by one before a new snapshot is taken."""
_BEGIN_TRIES: Final = 20
"""How often a session looks whether there is a data set, while others begin and drop it."""
_TRIES: Final = 10_000
"""How often a flush tries to get a number, while others are faster."""
_UPDATE_TRIES: Final = 100
"""How often new columns are laid over rows while others publish. Each try reads and writes the whole table."""


@dataclass(slots=True)
class _Attempt:
    """What a flush publishes, or has tried to publish, as one entry."""

    changes: Changes = field(default_factory=Changes)
    mark: str = field(default_factory=lambda: secrets.token_hex(16))
    number: int = 0
    """The last number that it tried; 0 before it tried one."""


_REPLACE_TRIES: Final = 20
"""How often rows are compared again because others published."""


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
        self._made: Made = made
        self._appender = Appender(store.layout, origin=origin_of_session(self.name))
        self._changes = Changes()
        """Since the last flush began."""
        self._attempt = _Attempt()
        """Of a flush that failed or was interrupted: its entry may be there all the same."""
        self.lock = threading.RLock()
        self._has_ended = False
        self._began, self._line = begin(store.layout, self.name, made)
        self._last: tuple[int, LineEntry] | None = None
        """The entry that the last flush published, without its rows; None if the line must be listed."""

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
        layout = self._store.layout
        self._check_open()
        with self.lock, noticing_its_end(layout):
            self._show(self._appender.close_segment())
            changes = Changes() if self._is_there(self._attempt) else self._attempt.changes
            for sample, change in self._changes.items() if changes else ():
                add_change(changes, sample, change)
            changes = changes or self._changes
            self._attempt, self._changes = _Attempt(changes), Changes()
            if not changes:
                return list_line(layout, self.name).highest
            last, self._last = self._last, None
            number, above = self._link(self._attempt, last)
            self._last = number, LineEntry("changes", self._attempt.mark, "", above)
            self._attempt = _Attempt()
            every = max(1, _TABLE_ROWS // 16)  # it takes two listings to see whether a table is due
            if number % BLOCKS[0] == 0 or (above >= _TABLE_ROWS and above // every > (above - len(changes)) // every):
                _fold(layout, self.name, number, least_rows=_TABLE_ROWS, part=2)
        return number

    def publish(self, changes: Changes) -> int:
        """Flush these changes too, and return the number of the entry."""
        with self.lock:
            for sample, change in changes.items():
                add_change(self._changes, sample, change)
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
        number = self.flush()
        self._has_ended = True
        _fold(self._store.layout, self.name, number, least_rows=1, part=8, seconds=_CLOSING_SECONDS)

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

    def _is_there(self, attempt: _Attempt) -> bool:
        """Whether an attempt that failed has published its entry all the same."""
        layout, number = self._store.layout, attempt.number
        try:
            is_its = number > 0 and read_start(layout, self.name, number).mark == attempt.mark
            return is_its and _is_in_line(layout, self.name, number, attempt.mark)
        except (FormatError, OSError):
            return False

    def _link(self, attempt: _Attempt, last: tuple[int, LineEntry] | None) -> tuple[int, int]:
        """Publish changes as the next entry of the line. Returns its number, and how many rows are above the newest table then."""
        layout, changes = self._store.layout, attempt.changes
        keys = [key for change in changes.values() for cells in change.parts.values() for key in cells]

        refused, above = list[str](), 0

        def samples_of(lost: set[Key]) -> list[str]:
            refused[:] = [sample for sample, change in changes.items() if any(lost.intersection(cells) for cells in change.parts.values())]
            return refused

        def publish_as(number: int, before: LineEntry) -> bool:
            nonlocal above
            attempt.number, above = number, before.above + len(changes)
            entry = LineEntry("changes", attempt.mark, before.mark, above, changes, made=self._made, line=self._line)
            return publish(layout, layout.entry(self.name, number), encode_entry(self.name, number, entry), read_only=True)

        named = _Named(np.frombuffer(b"".join(keys), np.uint8).reshape(-1, KEY_BYTES), samples_of)
        try:
            return _link_entry(self._store, _Next(self.name, self._began, attempt.mark, publish_as, last), named), above
        except BadInput:
            for sample in refused or [*changes]:
                del changes[sample]
            self._attempt = _Attempt(changes)
            raise


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
    publish_as: Callable[[int, LineEntry], bool]
    """Publishes it under a number, given the entry before. Returns False if the number was taken."""
    last: tuple[int, LineEntry] | None = None
    """The last entry, as this process knows it from its own flush: the line needs no listing before the first try."""


def _link_entry(store: "Store", entry: _Next, named: _Named) -> int:
    """Publish an entry under the next number of its line, after the keys that it names were checked. Returns its number."""
    layout, known = store.layout, _if_there(store.layout, entry.name, entry.last)
    for _try in range(_TRIES):
        if known is None:
            line = list_line(layout, entry.name)
            known = line.highest, _last_entry(layout, line)
            if line.dropped > entry.began or known[1].what == "dropped":
                raise BadInput(f"the data set {entry.name!r} in {layout.root} was dropped meanwhile: begin a new session", option="name")
        (number, last), known = known, None
        number += 1
        _check_keys(store, entry.name, named)
        if status_of(layout.entry(entry.name, number)) is not None:  # another process was faster: write nothing in vain
            continue
        if entry.publish_as(number, last) and _is_in_line(layout, entry.name, number, entry.mark):
            return number
    raise _too_busy(layout, entry.name, _TRIES)


def _if_there(layout: Layout, name: str, last: tuple[int, LineEntry] | None) -> tuple[int, LineEntry] | None:
    """Return the last entry as a process knows it, unless it is gone. Above a table that was made since, no rows are counted."""
    if last is None or status_of(layout.entry(name, last[0])) is None:
        return None
    return last[0], replace(last[1], above=0) if status_of(layout.catalog(name, last[0])) is not None else last[1]


def _too_busy(layout: Layout, name: str, tries: int = _TRIES) -> Incomplete:
    return Incomplete(f"the data set {name!r} in {layout.root}: others published faster, {tries} times; run the same again")


def _last_entry(layout: Layout, line: Line) -> LineEntry:
    """Return the entry with the highest number, without its rows. After a table that no entry made: one with an empty mark."""
    number = line.highest
    blocks = [block for block in line.blocks if block.last == number]
    if number not in line.entries and not blocks:
        return LineEntry("fence", "", "")
    try:
        found = read_start(layout, line.name, number if number in line.entries else blocks[0])
    except FileNotFoundError:  # this process slept, and it was removed: the link will fail, or not be in the line
        return LineEntry("fence", "", "")
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
    if lost := _copy_marked(store, name, named.keys):
        samples = named.samples_of(lost)
        rows = f"{plural(len(samples), 'row')} {noun(len(samples), 'names', 'name')} {plural(len(lost), 'key')}"
        where = f"{first_of(map(repr, samples))} with {first_of(sorted(lost))}"
        absent = f"{noun(len(lost), 'is', 'are')} not in {store.layout.root}"
        raise BadInput(f"{rows} that {absent}: {where}; put the values first, then publish {name!r}", option="rows")


def _copy_marked(store: "Store", name: str, keys: "np.ndarray[Any, np.dtype[np.uint8]]") -> set[Key]:
    """Copy the values that are in marked segments alone, as those of this data set. Returns the keys that are nowhere."""
    layout = store.layout
    doubtful, lost = keys, set[Key]()
    if len(keys) <= _FEW_KEYS:
        with suppress(FormatError, FileNotFoundError):
            doubtful = keys[~reliable_keys(store.snapshot, keys)]
    if len(doubtful):
        with closing(load_snapshot(layout, earlier=store.snapshot, for_planning=True)) as snapshot:
            doubtful = doubtful[~held_keys(snapshot, doubtful)]
    if not len(doubtful):
        return lost
    store.refresh()
    with Appender(layout, origin=origin_of_session(as_stored(name))) as appender:
        for key in dict.fromkeys(map(Key, Digests(memoryview(doubtful.tobytes()), KEY_BYTES))):
            try:
                [raw] = store.get_raw([key])
                appender.put(key, raw, store.describe(key).meta)
            except (MissingEntry, CorruptEntry):
                lost.add(key)
        appender.close_segment()
    store.refresh()
    return lost


def begin(layout: Layout, name: str, made: Made) -> tuple[int, str]:
    """Return the highest number and the id of the line of a data set of this kind, which is begun with an empty table if there is none.

    Raises BadInput if something else made it, or is making it, and FormatError if all its tables are lost: an empty one above its entries
    would hide them.
    """
    for _try in range(_BEGIN_TRIES):
        line = list_line(layout, name)
        there = newest_header(layout, name)
        if there is not None and _last_entry(layout, line).what == "dropped":
            mark_dropped(layout, name, line.highest)  # `drop` was killed after it ended the line
            continue
        if there is not None and there["made"] != made:
            raise _of_another_kind(layout, name, there["made"])
        if there is not None:
            return line.highest, there.get("line", "")
        if line.tables or line.entries or line.blocks:  # dropped meanwhile
            continue
        if unfinished := next((one for one in list_unfinished(layout) if one.name == name), None):
            raise BadInput(f"{layout.root}: {unfinished.in_words(layout)}; choose another name for what you publish", option="name")
        empty = empty_table(name, made, secrets.token_hex(16))
        publish_draft(layout, draft_of(empty), after=line.highest)
    lost = f"the data set {name!r} in {layout.root} has entries, but every generation of it is gone"
    raise FormatError(f"{lost}: run {layout.command('repair')}, or put one back from a copy of the store")


def publish_rows(store: "Store", name: str, rows: object, *, update: bool) -> int:
    """Publish a whole table: these rows alone, or with `update` these over what is there. Returns the generation."""
    layout, name, given = store.layout, as_stored(name), Rows.read(rows)
    named = _Named(np.concatenate([np.empty((0, KEY_BYTES), np.uint8), *(given.lists(part)[1] for part in given.parts)]), given.samples_of)
    if update:
        _check_cells(rows, given)
    if not update or newest_header(layout, name) is None:
        _check_keys(store, name, named)  # before a data set is begun
    changes = _changes_of(given) if update else {}
    if update and not given.catalog.values and all(change.parts for change in changes.values()):
        number = Session(store, name).publish(changes)
        with suppress(WriteFailed):  # it is published: the next fold makes the table
            return make_table(layout, name)
        return number
    began, line = begin(layout, name, "published")

    def table_over(before: Catalog | None) -> Catalog:
        table = given.catalog if before is None else _laid_over(before, given, changes)
        return replace(table, name=name, made="published", line=line)

    return _publish_table(store, name, began, named, table_over, is_alone=not update)


def publish_without(store: "Store", name: str, samples: Collection[str]) -> int:
    """Publish a data set that a session made as a whole table without these samples, which no entry names then. Returns the generation."""
    removed = {sample: RowChange(is_removed=True) for sample in samples}
    named = _Named(np.empty((0, KEY_BYTES), np.uint8), lambda _lost: [])
    began = list_line(store.layout, name).highest
    return _publish_table(store, name, began, named, lambda before: lay(before, removed))


def _publish_table(
    store: "Store", name: str, began: int, named: _Named, table_over: Callable[[Any], Catalog], *, is_alone: bool = False
) -> int:
    """Publish a whole table as the next entry, made from the rows before it, and the same file as a generation. Returns its number.

    If another process publishes meanwhile, the table is made anew, unless it `is_alone`: made without the rows before it, which are None.
    """
    layout, mark = store.layout, secrets.token_hex(16)
    for _try in range(_UPDATE_TRIES):
        before = None if is_alone else read_data_set(layout, name)
        draft = draft_of(table_over(before))

        def publish_as(number: int, last: LineEntry, draft: Draft = draft, before: Catalog | None = before) -> bool:
            if before is not None and number != before.generation + 1:
                raise _Overtaken
            chunks = draft.chunks(number, entry={"what": "whole", "mark": mark, "before": last.mark, "above": max(1, len(draft.catalog))})
            return publish(layout, layout.entry(name, number), chunks, read_only=True)

        with suppress(_Overtaken):
            number = _link_entry(store, _Next(name, began, mark, publish_as), named)
            with suppress(WriteFailed):
                publish_link(layout, layout.entry(name, number), layout.catalog(name, number))
            return number
    raise _too_busy(layout, name, _UPDATE_TRIES)


def _check_cells(rows: Any, given: Rows) -> None:
    """Raise BadInput if a mapping has an empty cell: laid over a row, it would not say whether the part stays."""
    listed: list[tuple[str, Mapping[str, Any]]] = [*cast("Mapping[str, Any]", rows).items()] if isinstance(rows, Mapping) else []
    for part, column in zip(given.parts, given.catalog.columns, strict=True) if listed else ():
        for row, (sample, cells) in enumerate(listed):
            if column.count(row) == 0 and part in cells:
                takes = f"`session.set({sample!r}, {part}=[])` takes the part away, and leaving it out lets it stay"
                raise BadInput(f"rows[{sample!r}][{part!r}] has no key: {takes}", option="rows")


def _changes_of(given: Rows) -> Changes:
    """Return the cells that rows have as changes."""
    parts = [(part, column.row_keys) for part, column in zip(given.parts, given.catalog.columns, strict=True)]
    changes: Changes = {}
    for row, sample in enumerate(given.ids):
        cells = {part: tuple(key for key in keys_of(row) if key is not None) for part, keys_of in parts}
        changes[sample] = RowChange(parts={part: keys for part, keys in cells.items() if keys})
    return changes


def replace_rows(store: "Store", name: str, part: str, rows: Mapping[str, Cells]) -> int:
    """Make a data set have these rows alone, with this part alone. Returns the number of its last entry.

    Only what differs from the rows that are there is flushed, so one change among a million rows is a small file. Columns stay. If others
    publish at the same time, it is compared again. Raises as `Session.flush`, and Incomplete if others do not stop.
    """
    session = Session(store, name)  # not in a block, whose end would make a table: after few changes each would be kept for 30 days
    for _try in range(_REPLACE_TRIES):
        before = read_data_set(store.layout, name)
        there = {sample: row for row, sample in enumerate(before.ids)}
        for sample in there:
            if sample not in rows:
                session.remove(sample)
        parts = [(column.encoder, column.row_keys) for column in before.columns]
        for sample, keys in rows.items():
            row = there.get(sample)
            had = {} if row is None else {named: tuple(filter(None, keys_of(row))) for named, keys_of in parts}
            if row is None or {named: cells for named, cells in had.items() if cells} != ({part: keys} if keys else {}):
                session.set(sample, **{**dict.fromkeys(had, ()), part: keys})
        if not session.has_changes:
            return before.generation
        session.flush()
    raise _too_busy(store.layout, name, _REPLACE_TRIES)


def publish_known(store: "Store", name: str, read: Callable[[], Catalog]) -> int:
    """Publish the rows that are still known of a damaged data set as a whole table, and return its number. For `repair`.

    `read` returns them with the highest number of the line. Values that are nowhere stay named: `verify` says so.
    """
    layout, mark = store.layout, secrets.token_hex(16)
    for _try in range(_TRIES):
        line, catalog = list_line(layout, name), read()
        if line.highest != catalog.generation:
            continue
        for column in catalog.columns:
            _copy_marked(store, name, np.frombuffer(run_of(column.keys), np.uint8).reshape(-1, KEY_BYTES))
        number, before = line.highest + 1, ""
        with suppress(FormatError):
            before = _last_entry(layout, line).mark
        entry: dict[str, Json] = {"what": "whole", "mark": mark, "before": before, "above": max(1, len(catalog))}
        chunks = draft_of(catalog).chunks(number, entry=entry)
        if publish(layout, layout.entry(name, number), chunks, read_only=True) and _is_in_line(layout, name, number, mark):
            with suppress(WriteFailed):  # the rows are there: a later fold makes the table
                publish_link(layout, layout.entry(name, number), layout.catalog(name, number))
            return number
    raise _too_busy(layout, name)


def publish_catalog(store: "Store", catalog: Catalog, keys: Collection[Key], compare: Callable[[Catalog], object]) -> Catalog:
    """Publish a data set that was made elsewhere, with its recipes, unless its newest generation is the same. Returns it as it is there.

    `keys` are all that it names. `compare` gets the newest generation, if there is one, and raises if this must not follow it. Raises
    BadInput for keys that are not in the store, Superseded if a newer listing was published, Incomplete if others do not stop.
    """
    layout, name, draft = store.layout, catalog.name, draft_of(catalog)
    named = _Named(np.frombuffer(b"".join(keys), np.uint8).reshape(-1, KEY_BYTES), Rows.of(catalog).samples_of)
    for recipe in catalog.recipes.values():
        publish_recipe(layout, recipe)
    for _try in range(_UPDATE_TRIES):
        last = list_line(layout, name).highest  # before the rest: what is published from here on takes the number
        check_no_session(layout, name)
        previous = newest_catalog(layout, name)
        if previous is not None and previous.listing > catalog.listing:
            raise Superseded(f"another run published the data set {name!r} meanwhile: run the same command again")
        if previous is not None:
            compare(previous)
        _check_keys(store, name, named)
        if previous is not None and (draft.digest, tuple(catalog.prompts)) == (previous.digest, tuple(previous.prompts)):
            return replace(catalog, generation=previous.generation, digest=draft.digest)
        if publish_draft(layout, draft, after=last):
            return replace(catalog, generation=last + 1, digest=draft.digest)
    raise _too_busy(layout, name, _UPDATE_TRIES)


class _Overtaken(Exception):
    """Another process published since the rows were read."""


def _laid_over(before: Catalog, given: Rows, changes: Changes) -> Catalog:
    """Return a table with rows over it: the parts and columns that they have are set. A new row without keys is made too."""
    bare = {sample for sample, change in changes.items() if not change.parts}.difference(before.ids)
    laid = lay(before, {**changes, **{sample: RowChange(parts={"": ()}) for sample in given.ids if sample in bare}})
    row_of = {sample: row for row, sample in enumerate(laid.ids) if sample in changes}
    values = dict(laid.values)
    for name, column in given.catalog.values.items():
        kind, there = kind_of_values(column), values.get(name) if len(before) else None
        if there is not None and kind_of_values(there) != kind:
            raise BadInput(f"the column {name!r} holds {KINDS[kind_of_values(there)]}, but the new rows have {KINDS[kind]}", option="rows")
        listed = [FILLERS[kind]] * len(laid) if there is None else list(there)
        for sample, value in zip(given.ids, column, strict=True):
            listed[row_of[sample]] = value
        values[name] = typed_values(listed, kind)
    return replace(laid, values=values)


def _fold(layout: Layout, name: str, number: int, *, least_rows: int, part: int, seconds: float = 0) -> None:
    """Make blocks that end with an entry, and a table if at least so many rows, and one in `part` of the table's, are above the newest one.

    Never raises: what was flushed is there without them, and a later fold makes what could not be made now.
    """

    def is_due() -> bool:
        rows = rows_above(layout, name)
        return rows >= least_rows and part * rows >= _table_rows(layout, name)

    with suppress(CacheStoreError, OSError):
        make_blocks(layout, name, number)
        if is_due():
            with locked(layout.lock("table"), seconds=seconds, mode=layout.mode):  # or all that flush meanwhile would make one each
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
        known = next((entry for entry in entries if entry.made is not None), entries[-1])
        last = entries[-1]
        whole = LineEntry("changes", last.mark, entries[0].before, last.above, changes, made=known.made, line=known.line)
        publish(layout, layout.block(name, block), encode_entry(name, block, whole), read_only=True)


def publish_bare(layout: Layout, name: str, what: Literal["fence", "dropped"]) -> int:
    """Publish an entry without rows as the next of a line, and return its number.

    After a fence, a flush that looked at the marks before has to look again. `dropped` ends the line.
    """
    mark = secrets.token_hex(16)
    for _try in range(_TRIES):
        line = list_line(layout, name)
        number, before = line.highest + 1, LineEntry("fence", "", "")
        try:
            before = _last_entry(layout, line)
        except FormatError:
            if what != "dropped":  # which needs nothing of what was before
                raise
        chunks = encode_entry(name, number, LineEntry(what, mark, before.mark, before.above))
        if publish(layout, layout.entry(name, number), chunks, read_only=True) and _is_in_line(layout, name, number, mark):
            return number
    raise _too_busy(layout, name, _TRIES)


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
    header = newest_header(layout, name)
    return None if header is None else header["made"]


def check_kind(layout: Layout, name: str, made: Made) -> None:
    """Raise BadInput if there is no data set of this name, or if something else made it. FormatError if its newest table is damaged."""
    kind = kind_of(layout, name)
    if kind is None:
        raise not_there(layout, name, list_data_sets(layout))
    if kind != made:
        raise _of_another_kind(layout, name, kind)


def newest_header(layout: Layout, name: str) -> Mapping[str, Any] | None:
    """Return the header of the newest table of a data set; None if there is none. Raises FormatError if it is damaged."""
    for _try in range(_BEGIN_TRIES):
        for number in reversed(list_line(layout, name).tables):
            with suppress(FileNotFoundError):  # a newer one has taken its place: list again
                return read_header(layout.catalog(name, number), CATALOG_FORMAT, CATALOG_VERSION)
        if not list_line(layout, name).tables:
            break
    return None


def check_no_session(layout: Layout, name: str) -> None:
    """Raise BadInput if sessions made the data set of this name: a pass cannot publish under it. Damaged tables do not hide that."""
    line = list_line(layout, name)
    kind: Made | None = "published" if line.entries or line.blocks else None
    for number in reversed(line.tables):
        with suppress(FormatError, OSError):
            kind = read_header(layout.catalog(name, number), CATALOG_FORMAT, CATALOG_VERSION)["made"]
            break
    if kind is not None and kind not in HAVE_SOURCES:
        raise _of_another_kind(layout, name, kind)


def _of_another_kind(layout: Layout, name: str, kind: Made) -> BadInput:
    return BadInput(f"the data set {name!r} in {layout.root} was {MADE[kind]}: choose another name, or drop it", option="name")


def _table_rows(layout: Layout, name: str) -> int:
    """The rows of the newest table."""
    tables = list_line(layout, name).tables
    with suppress(FormatError, OSError):
        return len(open_table(layout.catalog(name, tables[-1]), CATALOG_FORMAT, CATALOG_VERSION).strings("ids")) if tables else 0
    return 0
