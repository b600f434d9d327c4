"""What `gc` and `drop` do with the lines of data sets that sessions publish (docs/design/publish.md)."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from cachestore.core.keys import Key
from cachestore.files.opening import names_in
from cachestore.files.paths import BlockName, Layout, parse_block, parse_entry
from cachestore.files.removal import is_older
from cachestore.store.format.catalog import HAVE_SOURCES
from cachestore.store.format.line import list_line, path_of, read_entry
from cachestore.store.read.rows import read_data_set
from cachestore.store.write.publish import kind_of, make_table, publish_bare, rows_above

COVERED_SECONDS: Final = 86_400.0
"""Entries that a table covers stay for so long: a reader may have listed them."""


def tidy_line(layout: Layout, name: str, *, with_fence: bool) -> None:
    """Make a table if there are changes above the newest one, then a fence if asked for. Does nothing to what a pass made."""
    kind = kind_of(layout, name)
    if kind is None or kind in HAVE_SOURCES:
        return
    if with_fence:
        publish_bare(layout, name, "fence")
    if rows_above(layout, name):
        make_table(layout, name)


def keys_of_entries(layout: Layout, name: str, *, now: float) -> Iterator[Key]:
    """Yield the keys of a data set as it is now, and of its entries younger than a day. Raises FormatError if one is damaged or gone."""
    line = list_line(layout, name)
    if not line.tables or not (line.entries or line.blocks):
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
    numbers: list[tuple[int, int | BlockName]] = [(number, number) for number in line.entries if number <= covered]
    numbers += [(block.first, block) for block in line.blocks if block.last <= covered]
    paths = [path_of(layout, name, number) for _first, number in sorted(numbers, key=lambda each: each[0])]
    return [path for path in paths if is_older(path, COVERED_SECONDS, now=now)]


def entry_numbers(layout: Layout, name: str) -> list[tuple[int, int | BlockName]]:
    """All entries and blocks of a data set, each with its last number, lowest first."""
    names = names_in(layout.catalog_folder(name))
    entries = [(number, number) for number in filter(None, map(parse_entry, names))]
    return sorted([*entries, *((block.last, block) for block in filter(None, map(parse_block, names)))], key=lambda each: each[0])


def entry_paths(layout: Layout, name: str, last: int) -> list[Path]:
    """The entries and blocks of a data set up to a number, lowest first: what is above may be of a session that began after a drop."""
    return [path_of(layout, name, number) for end, number in entry_numbers(layout, name) if end <= last]
