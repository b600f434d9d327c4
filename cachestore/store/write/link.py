"""Link entries into the line of a data set: each as the next one, once it is sure that what it names stays (docs/design/publish.md)."""

import secrets
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from cachestore.core.errors import BadInput, CorruptEntry, FormatError, Incomplete, MissingEntry, WriteFailed
from cachestore.core.keys import KEY_BYTES, Json, Key
from cachestore.core.words import first_of, noun, plural
from cachestore.files.checksum import Buffer
from cachestore.files.opening import status_of
from cachestore.files.paths import Layout, as_stored
from cachestore.files.publish import publish, publish_link
from cachestore.files.table import Digests
from cachestore.store.format.line import Line, LineEntry, encode_entry, list_line, origin_of_session, read_start
from cachestore.store.read.held import held_keys, reliable_keys
from cachestore.store.read.rows import Rows
from cachestore.store.read.snapshot import load_snapshot
from cachestore.store.write.append import Appender
from cachestore.store.write.catalog_writer import draft_of

if TYPE_CHECKING:
    from cachestore.store.write.writer import Store

Keys = np.ndarray[Any, np.dtype[np.uint8]]
"""Keys as uint8 of shape [n, 16]."""

TRIES: Final = 10_000
"""How often an entry tries to get a number, while others are faster."""
_FEW_KEYS: Final = 1024
"""So many keys are looked up one by one before a new snapshot is taken."""
_NOTHING: Final = LineEntry("fence", "")
"""The last entry of a line that has none."""


@dataclass(frozen=True, slots=True)
class Linked:
    """An entry of a line that was published here, without its rows."""

    number: int
    entry: LineEntry


def new_mark() -> str:
    """Draw 32 hex digits, by which an entry, a line or a session is known."""
    return secrets.token_hex(16)


def link_next(
    layout: Layout,
    name: str,
    next_entry: Callable[[Line, LineEntry], LineEntry | None],
    *,
    tries: int = TRIES,
    over_damage: bool = False,
    known: Linked | None = None,
) -> Linked:
    """Publish an entry under the next number of a line, and return it.

    `next_entry` makes it for a line as it was just listed and its last entry, or returns None if the line has to be listed again. It is the
    one to check that what the entry names is not marked: a collector that marks something afterwards takes the number, or reads this entry.
    If the last entry is `known`, as this process linked it, the line needs no listing before the first try.
    Raises Incomplete if others were faster each time, and FormatError if the last entry is damaged, unless it goes `over_damage`.
    """
    for _try in range(tries):
        last, known = _if_there(layout, name, known), None
        if last is not None:
            line, last = Line(name, (), (last.number,), (), 0), last.entry
        else:
            line = list_line(layout, name)
            try:
                last = last_entry(layout, line)
            except FormatError:
                if not over_damage:
                    raise
                last = _NOTHING
        entry, number = next_entry(line, last), line.highest + 1
        path = layout.entry(name, number)
        if entry is None or status_of(path) is not None:  # another process was faster: write nothing in vain
            continue
        above = last.above + len(entry.changes) if entry.table is None else max(1, len(entry.table))
        entry = replace(entry, before=last.mark, above=above)
        chunks = _encoded(name, number, entry)
        if publish(layout, path, chunks, read_only=True) and is_in_line(layout, name, number, entry.mark):
            if entry.table is not None:
                with suppress(WriteFailed):  # the rows are there: a later fold makes the table
                    publish_link(layout, path, layout.catalog(name, number))
            return Linked(number, replace(entry, changes={}, table=None))
    raise too_busy(layout, name, tries)


def link_fence(layout: Layout, name: str) -> int:
    """Take the next number of a line, and return it: a flush that looked at the marks before has to look again."""
    mark = new_mark()
    return link_next(layout, name, lambda _line, _last: LineEntry("fence", mark)).number


def end_line(layout: Layout, name: str) -> int:
    """End a line, and return the number of its end. It needs nothing of what was before."""
    mark = new_mark()
    return link_next(layout, name, lambda _line, _last: LineEntry("dropped", mark), over_damage=True).number


def _if_there(layout: Layout, name: str, known: Linked | None) -> Linked | None:
    """Return the last entry as this process knows it, unless it is gone. Above a table that was made since, no rows are counted."""
    if known is None or status_of(layout.entry(name, known.number)) is None:
        return None
    has_table = status_of(layout.catalog(name, known.number)) is not None
    return replace(known, entry=replace(known.entry, above=0)) if has_table else known


def too_busy(layout: Layout, name: str, tries: int) -> Incomplete:
    """Return the error for what others prevented so many times."""
    return Incomplete(f"the data set {name!r} in {layout.root}: others published faster, {tries} times; run the same again")


def _encoded(name: str, number: int, entry: LineEntry) -> list[Buffer]:
    if entry.table is None:
        return encode_entry(name, number, entry)
    start: dict[str, Json] = {"what": entry.what, "mark": entry.mark, "before": entry.before, "above": entry.above}
    return draft_of(entry.table).chunks(number, entry=start)


def last_entry(layout: Layout, line: Line) -> LineEntry:
    """Return the entry with the highest number, without its rows. After a table that no entry made: one with an empty mark."""
    number = line.highest
    files = [*(entry for entry in line.entries if entry == number), *(block for block in line.blocks if block.last == number)]
    try:
        last = read_start(layout, line.name, files[0]) if files else _NOTHING
    except FileNotFoundError:  # this process slept, and it was removed: the link will fail, or not be in the line
        return _NOTHING
    return replace(last, above=0) if number in line.tables else last


def check_not_ended(layout: Layout, line: Line, last: LineEntry, began: int) -> None:
    """Raise BadInput if a line has ended since `began` was its highest number."""
    if line.dropped >= began or last.what == "dropped":
        raise BadInput(f"the data set {line.name!r} in {layout.root} was dropped meanwhile: begin a new session", option="name")


def is_in_line(layout: Layout, name: str, number: int, mark: str) -> bool:
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


def keys_of(rows: Rows) -> Keys:
    """Return the keys of all parts, one part after the other."""
    return np.concatenate([np.empty((0, KEY_BYTES), np.uint8), *(rows.lists(part)[1] for part in rows.parts)])


def check_keys(store: "Store", name: str, keys: Keys, samples_of: Callable[[set[Key]], list[str]]) -> None:
    """Make sure that each key lies in a segment that is not marked for deletion; copy those that do not. Raises BadInput for absent keys.

    `samples_of` returns the ids of the rows that name some of the keys.
    """
    if lost := copy_marked(store, name, keys):
        samples = samples_of(lost)
        rows = f"{plural(len(samples), 'row')} {noun(len(samples), 'names', 'name')} {plural(len(lost), 'key')}"
        where = f"{first_of(map(repr, samples))} with {first_of(sorted(lost))}"
        absent = f"{noun(len(lost), 'is', 'are')} not in {store.layout.root}"
        raise BadInput(f"{rows} that {absent}: {where}; put the values first, then publish {name!r}", option="rows")


def copy_marked(store: "Store", name: str, keys: Keys) -> set[Key]:
    """Copy the values that are in marked segments alone, as those of this data set. Returns the keys that are nowhere."""
    doubtful, lost = keys, set[Key]()
    if len(keys) <= _FEW_KEYS:
        with suppress(FormatError, FileNotFoundError):
            doubtful = keys[~reliable_keys(store.snapshot, keys)]
    if len(doubtful):
        with closing(load_snapshot(store.layout, earlier=store.snapshot, for_planning=True)) as snapshot:
            doubtful = doubtful[~held_keys(snapshot, doubtful)]
    if not len(doubtful):
        return lost
    store.refresh()
    with Appender(store.layout, origin=origin_of_session(as_stored(name))) as appender:
        for key in dict.fromkeys(map(Key, Digests(memoryview(doubtful.tobytes()), KEY_BYTES))):
            try:
                [raw] = store.get_raw([key])
                appender.put(key, raw, store.describe(key).meta)
            except (MissingEntry, CorruptEntry):
                lost.add(key)
        appender.close_segment()
    store.refresh()
    return lost
