"""Fold the entries of a line into tables and blocks, so that fewer files are read. No rows follow from it (docs/design/publish.md)."""

from contextlib import suppress
from pathlib import Path

from cachestore.core.errors import CacheStoreError, FormatError
from cachestore.files.locks import locked
from cachestore.files.paths import BlockName, Layout
from cachestore.files.publish import publish
from cachestore.files.table import open_table
from cachestore.store.format import catalog as catalogs
from cachestore.store.format import line as lines
from cachestore.store.format.catalog import Catalog
from cachestore.store.format.line import BLOCKS, Changes, LineEntry, add_changes, encode_entry, list_line, read_entry, read_start
from cachestore.store.read.rows import read_data_set
from cachestore.store.write.catalog_writer import draft_of, publish_draft
from cachestore.store.write.link import last_entry


def fold(layout: Layout, name: str, number: int, *, least_rows: int, part: int, seconds: float = 0) -> None:
    """Make blocks that end with an entry, and a table if at least so many rows, and one in `part` of the table's, are above the newest one.

    Never raises: what was flushed is there without them, and a later fold makes what could not be made now.
    """

    def is_due() -> bool:
        rows, own = rows_above(layout, name), 0
        if rows < least_rows:
            return False
        with suppress(FormatError, OSError, IndexError):  # where no table can be read, one is made
            own = _count_rows(layout.catalog(name, list_line(layout, name).tables[-1]), catalogs.FORMAT, catalogs.VERSION)
        return part * rows >= own

    with suppress(CacheStoreError, OSError):
        make_blocks(layout, name, number)
        if is_due():
            with locked(layout.lock("table"), seconds=seconds, mode=layout.mode):  # or all that flush meanwhile would make one each
                if is_due():
                    make_table(layout, name)


def ends_block(number: int) -> bool:
    """Whether a block can end with the entry of this number."""
    return number % BLOCKS[0] == 0


def make_table(layout: Layout, name: str) -> int:
    """Publish a data set as it is now as a generation, unless there is one already. Returns its number."""
    return publish_state(layout, read_data_set(layout, name))


def publish_state(layout: Layout, catalog: Catalog) -> int:
    """Publish rows as the generation of the entry after which they are so, unless there is one already. Returns its number."""
    if catalog.generation not in list_line(layout, catalog.name).tables:
        publish_draft(layout, draft_of(catalog), after=catalog.generation - 1)
    return catalog.generation


def make_blocks(layout: Layout, name: str, number: int) -> None:
    """Write the entries of each block that ends with this number as one file, if no table lies within it."""
    for size in BLOCKS:
        if number % size:
            return
        block, line = BlockName(number - size + 1, number), list_line(layout, name)
        if block.first <= line.dropped or any(table >= block.first for table in line.tables):
            return
        try:
            entries = [read_entry(layout, name, one) for one in line.above(block.first - 1, number)]
        except (FormatError, FileNotFoundError):  # a loss: who reads these entries says so
            return
        if any(entry.what in {"whole", "dropped"} for entry in entries):
            return
        changes = Changes()
        for entry in entries:
            add_changes(changes, entry.changes)
        known = next((entry for entry in entries if entry.made is not None), entries[-1])
        last = entries[-1]
        whole = LineEntry("changes", last.mark, entries[0].before, last.above, changes, made=known.made, line=known.line)
        publish(layout, layout.block(name, block), encode_entry(name, block, whole), read_only=True)


def rows_above(layout: Layout, name: str) -> int:
    """Return how many rows the entries above the newest table change, at least."""
    line = list_line(layout, name)
    newest = max(line.tables, default=0)
    if line.highest <= newest:
        return 0
    rows = last_entry(layout, line).above
    with suppress(FormatError, OSError):
        # The table may have been made after the next entry was linked: then its rows are counted from an earlier table on.
        before, following = read_start(layout, name, newest), read_start(layout, name, newest + 1)
        own = _count_rows(layout.entry(name, newest + 1), lines.FORMAT, lines.VERSION)
        rows -= before.above if following.above > own else 0
    return rows


def _count_rows(path: Path, kind: str, version: int) -> int:
    return len(open_table(path, kind, version).strings("ids"))
