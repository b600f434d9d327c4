"""Publish tables: of rows that a caller has, over the rows that are there, and of what was made elsewhere (docs/design/publish.md)."""

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np

from cachestore.core.errors import BadInput, Superseded, WriteFailed
from cachestore.core.keys import KEY_BYTES, Key
from cachestore.files.paths import as_stored
from cachestore.store.format.catalog import Catalog, Kind, kind_of_values
from cachestore.store.format.line import FILLERS, Cells, Changes, Line, LineEntry, RowChange, lay, list_line, typed_values
from cachestore.store.read.rows import Rows, newest_catalog, read_data_set
from cachestore.store.write.catalog_writer import draft_of, publish_draft
from cachestore.store.write.commit import publish_recipe
from cachestore.store.write.folding import make_table
from cachestore.store.write.link import TRIES, check_keys, check_not_ended, keys_of, link_next, new_mark, too_busy
from cachestore.store.write.made import begin, check_no_session, what_made
from cachestore.store.write.session import Session

if TYPE_CHECKING:
    from cachestore.store.write.writer import Store

KINDS: Final[Mapping[Kind, str]] = {"whole": "whole numbers", "float": "floats", "text": "texts"}

_TRIES: Final = 100
"""How often a table is made anew because others published since the rows were read."""


def publish_rows(store: "Store", name: str, rows: object, *, update: bool) -> int:
    """Publish a whole table: these rows alone, or with `update` these over what is there. Returns the generation."""
    layout, name, given = store.layout, as_stored(name), Rows.read(rows)
    if update:
        _check_cells(rows, given)
    if not update or what_made(layout, name) is None:
        check_keys(store, name, keys_of(given), given.samples_of)  # before a data set is begun
    changes = _changes_of(given) if update else {}
    if update and not given.catalog.values and all(change.parts for change in changes.values()):
        number = Session(store, name).publish(changes)
        with suppress(WriteFailed):  # it is published: the next fold makes the table
            return make_table(layout, name)
        return number
    lineage = begin(layout, name, "published")
    if update:
        return _link_table(store, name, lineage.number, given, lambda before: _laid_over(before, given, changes))
    table = replace(given.catalog, name=name, made="published", line=lineage.line)
    return _link_table(store, name, lineage.number, Rows.of(table))


def publish_without(store: "Store", name: str, samples: Collection[str]) -> int:
    """Publish a data set that a session made as a whole table without these samples, which no entry names then. Returns the generation."""
    removed = {sample: RowChange(is_removed=True) for sample in samples}
    began = list_line(store.layout, name).highest
    return _link_table(store, name, began, Rows([], {}), lambda before: lay(before, removed))


def _link_table(store: "Store", name: str, began: int, given: Rows, over: Callable[[Catalog], Catalog] | None = None) -> int:
    """Publish a whole table as the next entry: the rows that are given, or what `over` makes of those before it. Returns its number."""
    layout, mark = store.layout, new_mark()

    def next_entry(line: Line, last: LineEntry) -> LineEntry | None:
        check_not_ended(layout, line, last, began)
        table = given.catalog
        if over is not None:
            before = read_data_set(layout, name)
            if before.generation != line.highest:  # others have published since it was listed
                return None
            table = over(before)
        check_keys(store, name, keys_of(given), given.samples_of)
        return LineEntry("whole", mark, table=table)

    return link_next(layout, name, next_entry, tries=TRIES if over is None else _TRIES).number


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


def replace_rows(store: "Store", name: str, part: str, rows: Mapping[str, Cells]) -> int:
    """Make a data set have these rows alone, with this part alone. Returns the number of its last entry.

    Only what differs from the rows that are there is flushed, so one change among a million rows is a small file. Columns stay. If others
    publish at the same time, it is compared again. Raises as `Session.flush`, and Incomplete if others do not stop.
    """
    session = Session(store, name)  # not in a block, whose end would make a table: after few changes each would be kept for 30 days
    for _try in range(_TRIES):
        before = read_data_set(store.layout, name)
        there = {sample: row for row, sample in enumerate(before.ids)}
        changes = {sample: RowChange(is_removed=True) for sample in there if sample not in rows}
        parts = [(column.encoder, column.row_keys) for column in before.columns]
        for sample, keys in rows.items():
            row = there.get(sample)
            had = {} if row is None else {named: cells for named, keys_of in parts if (cells := tuple(filter(None, keys_of(row))))}
            if row is None or had != ({part: keys} if keys else {}):
                changes[sample] = RowChange(parts={**dict.fromkeys(had, ()), part: keys})
        if not changes:
            return before.generation
        session.publish(changes)
    raise too_busy(store.layout, name, _TRIES)


def publish_catalog(store: "Store", catalog: Catalog, keys: Collection[Key], compare: Callable[[Catalog], object]) -> Catalog:
    """Publish a data set that was made elsewhere, with its recipes, unless its newest generation is the same. Returns it as it is there.

    `keys` are all that it names. `compare` gets the newest generation, if there is one, and raises if this must not follow it. Raises
    BadInput for keys that are not in the store, Superseded if a newer listing was published, Incomplete if others do not stop.
    """
    layout, name, draft = store.layout, catalog.name, draft_of(catalog)
    named = np.frombuffer(b"".join(keys), np.uint8).reshape(-1, KEY_BYTES)
    for recipe in catalog.recipes.values():
        publish_recipe(layout, recipe)
    for _try in range(_TRIES):
        last = list_line(layout, name).highest  # before the rest: what is published from here on takes the number
        check_no_session(layout, name)
        previous = newest_catalog(layout, name)
        if previous is not None and previous.listing > catalog.listing:
            raise Superseded(f"another run published the data set {name!r} meanwhile: run the same command again")
        if previous is not None:
            compare(previous)
        check_keys(store, name, named, Rows.of(catalog).samples_of)
        if previous is not None and (draft.digest, tuple(catalog.prompts)) == (previous.digest, tuple(previous.prompts)):
            return replace(catalog, generation=previous.generation, digest=draft.digest)
        if publish_draft(layout, draft, after=last):
            return replace(catalog, generation=last + 1, digest=draft.digest)
    raise too_busy(layout, name, _TRIES)
