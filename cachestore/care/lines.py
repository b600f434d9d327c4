"""What `gc`, `drop`, `verify` and `repair` do with the lines of data sets that sessions publish (docs/design/publish.md)."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Final

from cachestore.core.errors import FormatError, NewerFormat
from cachestore.core.keys import Key
from cachestore.core.words import first_of, noun, plural
from cachestore.files.opening import names_in
from cachestore.files.paths import BlockName, Layout, parse_block, parse_catalog, parse_entry
from cachestore.files.removal import is_older
from cachestore.store.format.catalog import HAVE_SOURCES, Catalog, read_catalog
from cachestore.store.format.line import Line, LineEntry, empty_table, lay_entries, list_line, path_of, read_entry
from cachestore.store.read.rows import Rows, read_data_set
from cachestore.store.read.unfinished import list_data_sets
from cachestore.store.write.folding import make_table, publish_state, rows_above
from cachestore.store.write.link import copy_marked, keys_of, link_fence, link_next, new_mark
from cachestore.store.write.made import what_made
from cachestore.store.write.writer import Store, open_store

COVERED_SECONDS: Final = 86_400.0
"""Entries that a table covers stay for so long: a reader may have listed them."""


MANY_ENTRIES: Final = 256
"""From so many covered entries on, `gc` says that they stay for now."""


def tidy_line(layout: Layout, name: str, *, with_fence: bool) -> None:
    """Make a table if there are changes above the newest one, then a fence if asked for. Does nothing to what a pass made."""
    if what_made(layout, name) in {None, *HAVE_SOURCES}:
        return
    if with_fence:
        link_fence(layout, name)
    if rows_above(layout, name):
        make_table(layout, name)


def keys_of_entries(layout: Layout, name: str, *, now: float) -> Iterator[Key]:
    """Yield the keys of a data set as it is now, and of its entries younger than a day. Raises FormatError if one is damaged or gone."""
    line = list_line(layout, name)
    if not (line.entries or line.blocks):
        return
    for column in read_data_set(layout, name).columns:
        yield from map(Key, column.keys)
    for number in line.entries:
        if number not in line.tables and not is_older(layout.entry(name, number), COVERED_SECONDS, now=now):
            for change in read_entry(layout, name, number).changes.values():
                yield from (key for cells in change.parts.values() for key in cells)


def covered_entries(layout: Layout, name: str, kept: Sequence[int], *, now: float) -> list[Path]:
    """The entries and blocks that the second newest of the kept tables covers and that are older than a day, lowest first.

    If one table is kept, those below it. The entry with the number of the newest table stays: a process that slept must not get its number.
    """
    line = list_line(layout, name)
    covered = kept[-2] if len(kept) > 1 else max(kept, default=0) - 1
    paths = [path_of(layout, name, number) for last, number in entry_numbers(layout, name) if line.dropped < last <= covered]
    return [path for path in paths if is_older(path, COVERED_SECONDS, now=now)]


def count_below_newest(layout: Layout, name: str) -> int:
    """How many entries are below the newest table: they will not be needed for long."""
    line = list_line(layout, name)
    return sum(number < max(line.tables, default=0) for number in line.entries)


def entry_numbers(layout: Layout, name: str) -> list[tuple[int, int | BlockName]]:
    """All entries and blocks of a data set, each with its last number, lowest first."""
    names = names_in(layout.catalog_folder(name))
    entries = [(number, number) for number in filter(None, map(parse_entry, names))]
    return sorted([*entries, *((block.last, block) for block in filter(None, map(parse_block, names)))], key=lambda each: each[0])


def files_of_line(layout: Layout, name: str, last: int) -> list[Path]:
    """All tables, entries and blocks of a data set up to a number, lowest first, tables first; those that an interrupted drop left too.

    What is above may be of a session that began after a drop.
    """
    names = names_in(layout.catalog_folder(name))
    tables = [layout.catalog(name, number) for number in sorted(filter(None, map(parse_catalog, names))) if number <= last]
    return [*tables, *(path_of(layout, name, number) for end, number in entry_numbers(layout, name) if end <= last)]


@dataclass(frozen=True, slots=True)
class Known:
    """What the files of a line still say of its data set."""

    catalog: Catalog
    """Its rows, as after the last entry."""
    lost: tuple[int, ...] = ()
    """The numbers of entries that nothing gives any more, and that no later table covers."""
    has_base: bool = True
    """Whether there is a table below the entries, so that most rows are known."""

    @property
    def is_beyond_repair(self) -> bool:
        """Whether so much is lost that a table of the rest would hide it, and let `gc` remove the values of lost rows."""
        return bool(self.lost) and not self.has_base

    def lost_in_words(self) -> str:
        """Return what is lost, as a sentence without a full stop."""
        flushes = plural(len(self.lost), "flush", "flushes")
        which = f"{noun(len(self.lost), 'entry', 'entries')} {first_of(map(str, self.lost))}"
        sets = f"what {flushes} set and removed is lost ({which})"
        return f"data set {self.catalog.name!r}: {sets}; {plural(len(self.catalog), 'row')} {noun(len(self.catalog), 'is', 'are')} known"


def read_known(layout: Layout, name: str) -> Known | None:
    """Return what is still known of a data set; None if no entries are above its newest table that can be read.

    Damaged files count as missing. Raises NewerFormat, and OSError for a file that cannot be read: what it says is not lost.
    """
    line = list_line(layout, name)
    if not (line.entries or line.blocks):
        return None
    table = _newest_table(layout, line)
    number = start = 1 + (line.dropped if table is None else table.generation)
    if start > line.highest:
        return None
    entries, lost = list[LineEntry](), list[int]()
    while number <= line.highest:
        entry, last = _entry_from(layout, line, number)
        if entry is None:
            lost += [number]
        elif entry.what == "dropped":
            return None
        else:
            entries.append(entry)
            lost = [] if entry.table is not None else lost
        number = last + 1
    has_base = table is not None or any(entry.table is not None for entry in entries)
    if table is None:  # a data set begins with an empty table, which no entry has
        known = next((entry for entry in entries if entry.made is not None), LineEntry("fence", "", made="published"))
        table, lost = empty_table(name, known.made or "published", known.line), [one for one in lost if has_base or one != start]
    return Known(replace(lay_entries(table, entries), generation=line.highest), tuple(lost), has_base)


def _newest_table(layout: Layout, line: Line) -> Catalog | None:
    for number in reversed(line.tables):
        try:
            return read_catalog(layout.catalog(line.name, number), generation=number, io="mmap")
        except NewerFormat:
            raise
        except (FormatError, FileNotFoundError):  # an older one and the entries above it may give the same rows
            pass
    return None


def _entry_from(layout: Layout, line: Line, number: int) -> tuple[LineEntry | None, int]:
    """Return the longest block that begins with this number, or the entry, that can be read; and its last number."""
    blocks = sorted((block for block in line.blocks if block.first == number), reverse=True)
    for which in [*blocks, *([number] if number in line.entries else [])]:
        try:
            return read_entry(layout, line.name, which), number if isinstance(which, int) else which.last
        except NewerFormat:
            raise
        except (FormatError, FileNotFoundError):
            pass
    return None, number


def lost_tables(layout: Layout, name: str) -> list[int]:
    """Return the numbers above the newest table at which there was a table, as the entries after them say.

    It costs only time: an older table and the entries give the same rows. Raises FormatError, OSError.
    """
    line = list_line(layout, name)
    found: list[int] = []
    singles = [number for number in line.entries if number > max(line.tables, default=line.dropped)]
    for number, following in pairwise(singles):
        if following == number + 1:
            before, after = read_entry(layout, name, number), read_entry(layout, name, following)
            if after.above == len(after.changes) < before.above + len(after.changes):
                found.append(number)
    return found


def known_with_losses(layout: Layout) -> list[Known]:
    """Return what is known of each data set of which entries are missing or damaged, so that something is lost."""
    found: list[Known] = []
    for name in list_data_sets(layout):
        with suppress(NewerFormat, OSError):
            known = read_known(layout, name)
            found += [known] if known is not None and known.lost else []
    return found


def stays_as_it_is(layout: Layout, paths: Sequence[str], known: Sequence[Known]) -> list[str]:
    """Return those of the damaged paths that `repair` must not move: they alone say that a data set has lost nearly everything."""
    folders = {layout.relative(layout.catalog_folder(one.catalog.name)) for one in known if one.is_beyond_repair}
    return [path for path in paths if Path(path).parent.as_posix() in folders]


def close_gaps(layout: Layout) -> list[str]:
    """Publish what is known of each data set of which something is lost, as a new whole table. Returns what is lost, in words.

    Do it before damaged files are moved away: their numbers are not used again.
    """
    lost: list[str] = []
    for known in known_with_losses(layout):
        name = known.catalog.name
        if known.is_beyond_repair:
            continue
        with open_store(layout.root, "a") as store:
            _publish_known(store, name)
        lost.append(known.lost_in_words())
    return lost


def _publish_known(store: Store, name: str) -> None:
    """Publish what is known of a data set as a whole table. Values that are nowhere stay named: `verify` says so."""
    layout, mark = store.layout, new_mark()

    def next_entry(line: Line, _last: LineEntry) -> LineEntry | None:
        known = read_known(layout, name)
        if known is None:
            raise FormatError(f"the data set {name!r} in {layout.root} changed while it was repaired; run the same command again")
        if known.catalog.generation != line.highest:
            return None
        copy_marked(store, name, keys_of(Rows.of(known.catalog)))
        return LineEntry("whole", mark, table=known.catalog)

    link_next(layout, name, next_entry, over_damage=True)


def tables_to_remake(layout: Layout, damaged: Sequence[str]) -> list[str]:
    """Return the data sets that have lost a table which their entries give again: missing ones, and those at these damaged paths."""
    names: list[str] = []
    for name in list_data_sets(layout):
        with suppress(FormatError, OSError):
            line, known = list_line(layout, name), read_known(layout, name)
            if known is None or known.lost:
                continue
            newest = line.tables and layout.relative(layout.catalog(name, line.tables[-1]))
            names += [name] if not newest or newest in damaged or lost_tables(layout, name) else []
    return names


def remake_tables(layout: Layout, names: Sequence[str]) -> list[str]:
    """Make a table of each of these data sets as it is now, once damaged files were moved away. Returns those that have one."""
    made: list[str] = []
    for name in names:
        with suppress(FormatError, OSError):
            if (known := read_known(layout, name)) is not None and not known.lost:
                publish_state(layout, known.catalog)
                made.append(name)
    return made
