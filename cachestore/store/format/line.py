"""A line: the generations and entries of a data set that sessions publish, in one order of numbers (docs/design/publish.md).

The data set is its newest generation, with the entries above it laid over it. An entry is what one flush sets and removes, or a whole
table, or a fence, which does nothing, or the end of the line.
"""

import secrets
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, cast, get_args

from cachestore.core.errors import WRONG_FIELDS, FormatError, NewerFormat
from cachestore.core.keys import KEY_BYTES, Json, Key
from cachestore.files.checksum import Buffer
from cachestore.files.opening import names_in
from cachestore.files.paths import BlockName, Layout, as_stored, damaged, parse_block, parse_catalog, parse_dropped, parse_entry
from cachestore.files.table import (
    Digests,
    Repeated,
    Table,
    digest_column,
    encode_table,
    never_falls,
    number_column,
    offsets_of,
    read_header,
    read_table,
    run_of,
    string_columns,
    take,
)
from cachestore.store.format.catalog import FORMAT as CATALOG_FORMAT
from cachestore.store.format.catalog import NO_INPUT, NO_KEY, Catalog, KeyColumn, Kind, Made, kind_of_values, read_catalog
from cachestore.store.format.catalog import VERSION as CATALOG_VERSION

FORMAT: Final = "cachestore-changes"
VERSION: Final = 1

OWNER: Final = "owner"
"""The field of an entry's JSON value that names the data set for which `fill` made it. Of a session's entries the origin names it."""
VALUE: Final = "value"
"""The part of a row that `fill` publishes."""
FILLED: Final = "values"
"""The encoder that the reports of `fill` name."""
SESSION: Final = "session"
"""How the origin of a session's segments begins: `session/<32 hex digits>/<data set>`."""
BLOCKS: Final = (256, 65_536)
"""How many entries a block has. Blocks begin at 1, 257, 513, ...: all that make one make the same file."""

_NAMES: Final = 1 << 17
"""So many names of entries are remembered."""

FILLERS: Final[Mapping[str, Any]] = {"whole": 0, "float": float("nan"), "text": ""}

What = Literal["changes", "whole", "fence", "dropped"]
"""What an entry is. `changes` are laid over the rows before, `whole` takes their row_before, `dropped` ends the line."""

Cells = tuple[Key, ...]
"""The keys of one row and part, usually one."""


@dataclass(slots=True)
class RowChange:
    """What happens to one row."""

    is_removed: bool = False
    """Whether the row is removed first. If parts are set then, it is a new one, which comes last."""
    parts: dict[str, Cells] = field(default_factory=dict[str, Cells])
    """The new keys of each part that is set; none if the part is taken away."""


Changes = dict[str, RowChange]
"""By sample id, in the order in which rows begin."""


@dataclass(frozen=True, slots=True)
class LineEntry:
    """An entry of a line, or several as one."""

    what: What
    mark: str
    """32 hex digits, drawn by chance for each flush. Of a block: that of its last entry."""
    before: str = ""
    """The mark of the entry before; empty if there was none. It tells a process that slept whether its entry is part of the line."""
    above: int = 0
    """How many rows the entries above the newest table have, this one's included, as its writer knew."""
    changes: Changes = field(default_factory=Changes)
    table: Catalog | None = None
    """The rows of a whole table, if they were read."""
    made: Made | None = None
    """What makes the data set, if the entry says so: `changes` do, so that a lost table can be made again."""
    line: str = ""
    """The id of its line, beside `made`."""


@dataclass(frozen=True, slots=True)
class Line:
    """The numbers of a data set's files in order, as one listing shows them. Those up to the last end are left out."""

    name: str
    tables: Sequence[int]
    entries: Sequence[int]
    blocks: Sequence[BlockName]
    dropped: int
    """Where the line ended last; 0 if it never did."""

    @property
    def highest(self) -> int:
        """The highest number in use."""
        return max(self.dropped, *self.tables[-1:], *self.entries[-1:], *(block.last for block in self.blocks), 0)

    @property
    def is_there(self) -> bool:
        """Whether there is a data set: it has tables, or entries from which they can be made again."""
        return bool(self.tables or self.entries or self.blocks)

    @property
    def states(self) -> list[int]:
        """The numbers that can be opened: each table, and each entry that follows one without a gap. The lowest first."""
        ends = {block.first: block.last for block in sorted(self.blocks)} | {number: number for number in self.entries}
        found: list[int] = []
        for table, following in pairwise([*self.tables, self.highest + 1]):
            found.append(table)
            while (last := ends.get(found[-1] + 1, following)) < following:
                found.append(last)
        return found

    def has_all(self, number: int, highest: int) -> bool:
        """Whether no entry above a number up to another is gone."""
        try:
            return bool(self.above(number, highest))
        except FormatError:
            return False

    def above(self, number: int, highest: int) -> list[int | BlockName]:
        """Return the entries above a number up to another, in order, as few files as cover them. Raises FormatError for a gap."""
        ends = {block.first: block for block in sorted(self.blocks) if block.last <= highest}  # of two that begin together the longer one
        singles = set(self.entries)
        found: list[int | BlockName] = []
        following = number + 1
        while following <= highest:
            if (block := ends.get(following)) is not None:
                found.append(block)
                following = block.last + 1
            elif following in singles:
                found.append(following)
                following += 1
            else:
                gone = f"entry {following} of the data set {self.name!r} is gone, though entry {highest} came after it"
                raise FormatError(f"{gone}; run `cachestore repair`")
        return found


def origin_of_session(name: str) -> str:
    """Return the origin of the segments of a new session of a data set, which is the owner of all that is in them."""
    return f"{SESSION}/{secrets.token_hex(16)}/{name}"


def list_line(layout: Layout, name: str) -> Line:
    """List the files of a data set."""
    found = _Numbers([], [], [], [])
    for kind, number in filter(None, map(_parse, names_in(layout.catalog_folder(name)))):
        found[kind].append(number)
    for numbers in found:
        numbers.sort()
    if not found.dropped:
        return Line(name, found.tables, found.entries, found.blocks, 0)
    dropped = found.dropped[-1]
    tables, entries = ([number for number in numbers if number > dropped] for numbers in (found.tables, found.entries))
    return Line(name, tables, entries, [block for block in found.blocks if block.first > dropped], dropped)


class _Numbers(NamedTuple):
    """What the names in a folder say."""

    entries: list[Any]
    tables: list[Any]
    blocks: list[Any]
    dropped: list[Any]


@lru_cache(_NAMES)
def _parse(name: str) -> tuple[int, int | BlockName] | None:
    """Return which list of `_Numbers` a name belongs to, and what it says. A folder is listed at each flush, and most names come again."""
    for kind, parse in enumerate((parse_entry, parse_catalog, parse_block, parse_dropped)):
        if (number := parse(name)) is not None:
            return kind, number
    return None


def encode_entry(name: str, number: int | BlockName, entry: LineEntry) -> list[Buffer]:
    """Return the bytes of an entry that is not whole, or of a block. They contain name and number, so that a renamed file is noticed.

    Columns that say nothing are left out: `removed` if no row is, `set` if all rows have the part, `at` if each has one key of it.
    """
    rows = entry.changes
    parts = sorted({part for row in rows.values() for part in row.parts})
    columns = string_columns("ids", list(rows))
    if any(row.is_removed for row in rows.values()):
        columns["removed"] = number_column(int(row.is_removed) for row in rows.values())
    for index, part in enumerate(parts):
        cells = [row.parts.get(part) for row in rows.values()]
        if None in cells:
            columns[f"part/{index}/set"] = number_column(int(listed is not None) for listed in cells)
        if any(listed is None or len(listed) != 1 for listed in cells):
            columns[f"part/{index}/at"] = number_column(offsets_of(0 if listed is None else len(listed) for listed in cells))
        columns[f"part/{index}/keys"] = digest_column([key for listed in cells for key in listed or ()], width=KEY_BYTES)
    header: dict[str, Json] = {
        "name": name,
        "number": _as_json(number),
        "what": entry.what,
        "mark": entry.mark,
        "before": entry.before,
        "above": entry.above,
        **({} if entry.made is None else {"made": entry.made, "line": entry.line}),
    }
    return encode_table(FORMAT, VERSION, {**header, "parts": [*parts]}, columns)


def _as_json(number: int | BlockName) -> Json:
    return number if isinstance(number, int) else [*number]


def path_of(layout: Layout, name: str, number: int | BlockName) -> Path:
    """The path of an entry or a block."""
    return layout.entry(name, number) if isinstance(number, int) else layout.block(name, number)


def read_entry(layout: Layout, name: str, number: int | BlockName) -> LineEntry:
    """Read an entry or a block. Raises FormatError, FileNotFoundError."""
    path = path_of(layout, name, number)
    entry = read_start(layout, name, number)
    if entry.what == "whole":
        return replace(entry, table=read_catalog(path, generation=number if isinstance(number, int) else number.last, io="mmap"))
    table = read_table(path, FORMAT, VERSION)
    ids, parts = table.strings("ids"), table.header.get("parts")
    removed = table.numbers("removed") if "removed" in table.columns else Repeated(0, len(ids))
    rows = {sample: RowChange(bool(gone)) for sample, gone in zip(ids, removed, strict=False)}
    is_whole = len(removed) == len(ids) == len(rows) and isinstance(parts, list)
    for index, part in enumerate(cast("list[Any]", parts) if is_whole else ()):
        is_whole = is_whole and _read_part(table, f"part/{index}", str(part), list(rows.values()))
    if not is_whole:
        raise damaged(f"{path} holds changes that its columns contradict", path)
    return replace(entry, changes=rows)


def read_start(layout: Layout, name: str, number: int | BlockName) -> LineEntry:
    """Read what an entry or block says of itself, without its rows. Raises FormatError, FileNotFoundError."""
    path = path_of(layout, name, number)
    header: dict[str, Any]
    try:
        header = {**read_header(path, FORMAT, VERSION)}
    except NewerFormat:
        raise
    except FormatError as error:
        try:
            table = read_header(path, CATALOG_FORMAT, CATALOG_VERSION)
        except NewerFormat:
            raise
        except FormatError:  # neither: most entries are changes
            raise error from None
        header = {**table, "number": table.get("generation"), "entry": table.get("entry", {})}
    try:
        header = {**header, **header.pop("entry", {})}
        what: Any = header["what"]
        mark, before = str(header["mark"]), str(header["before"])
        above = int(header["above"])
        made: Any = header.get("made")
        is_home = (header["name"], header["number"]) == (as_stored(name), _as_json(number)) and what in get_args(What)
        is_home = is_home and made in {None, *get_args(Made)}
    except WRONG_FIELDS as error:
        raise damaged(f"{path} lacks a field of an entry, or has a wrong one ({error})", path) from error
    if not is_home:
        raise damaged(f"{path} is another entry than its name says", path)
    return LineEntry(what, mark, before, above, made=made, line=str(header.get("line", "")))


def _read_part(table: Table, prefix: str, part: str, rows: Sequence[RowChange]) -> bool:
    """Add the keys of a part to rows. Returns whether the columns fit the rows."""
    keys = table.digests(f"{prefix}/keys", KEY_BYTES)
    at = table.numbers(f"{prefix}/at") if f"{prefix}/at" in table.columns else range(len(rows) + 1)
    is_set = table.numbers(f"{prefix}/set") if f"{prefix}/set" in table.columns else Repeated(1, len(rows))
    if not (len(is_set) == len(rows) == len(at) - 1 and at[0] == 0 and at[-1] == len(keys) and never_falls(at)):
        return False
    for row, (change, was_set) in enumerate(zip(rows, is_set, strict=True)):
        if was_set:
            change.parts[part] = tuple(keys.take(range(at[row], at[row + 1]), Key))
    return True


def add_change(rows: Changes, sample: str, change: RowChange) -> None:
    """Add a later change of a row. An id that begins anew goes last, as it would if each change were folded by itself."""
    earlier = rows.get(sample)
    if earlier is not None and (change.is_removed or (earlier.is_removed and not earlier.parts)):
        del rows[sample]
    if earlier is not None and not change.is_removed:
        change = RowChange(earlier.is_removed, {**earlier.parts, **change.parts})
    rows[sample] = change


def add_changes(rows: Changes, later: Changes) -> None:
    """Add later changes of rows."""
    for sample, change in later.items():
        add_change(rows, sample, change)


def lay_entries(catalog: Catalog, entries: Iterable[LineEntry]) -> Catalog:
    """Return a catalog with entries laid over it, in their order."""
    changes = Changes()
    for entry in entries:
        if entry.table is not None:
            catalog, changes = entry.table, Changes()
        add_changes(changes, entry.changes)
    return lay(catalog, changes)


def lay(catalog: Catalog, changes: Changes) -> Catalog:
    """Return a catalog with changes laid over it. Rows keep their order; new ones come last.

    A new row has 0, not-a-number or an empty text in a column that a publisher gave.
    """
    if not changes:
        return catalog
    import numpy as np

    ids_before = list(catalog.ids)
    row_before = {sample: row for row, sample in enumerate(ids_before) if sample in changes}
    gone = [row for sample, row in row_before.items() if changes[sample].is_removed]
    new = [sample for sample, change in changes.items() if change.parts and (change.is_removed or sample not in row_before)]
    stays = np.ones(len(catalog), np.bool_)
    stays[gone] = False
    kept = np.flatnonzero(stays)
    ids = [*_taken(ids_before, kept), *new]
    row_of = {sample: int(row) for sample, row in zip(row_before, np.searchsorted(kept, [*row_before.values()]), strict=True)}
    row_of |= {sample: len(kept) + number for number, sample in enumerate(new)}
    touched = [(row_of[sample], change) for sample, change in changes.items() if change.parts]
    before = {column.encoder: column for column in catalog.columns}
    parts = sorted({*before, *(part for _row, change in touched for part in change.parts)})
    columns = [_laid_column(part, before.get(part), kept, touched, len(ids)) for part in parts]
    values = {name: _laid_values(column, kept, len(new)) for name, column in catalog.values.items()}
    nothing: dict[str, Any] = {"captions_at": Repeated(0, len(ids) + 1), "extras": Repeated("{}", len(ids))}
    return replace(catalog, ids=ids, columns=tuple(filter(None, columns)), values=values, **nothing)


def _taken(values: Sequence[Any], rows: Any) -> Sequence[Any]:
    return list(values) if len(rows) == len(values) else take(values, rows.tolist())


def _laid_values(column: Sequence[Any], kept: Any, new: int) -> Sequence[Any]:
    kind = kind_of_values(column)
    return typed_values([*_taken(column, kept), *[FILLERS[kind]] * new], kind)


def typed_values(values: Sequence[Any], kind: Kind) -> Sequence[Any]:
    """Return a column of whole numbers or floats as an array, which keeps its kind when it is empty; texts as they are."""
    return values if kind == "text" else array("q" if kind == "whole" else "d", values)


def _laid_column(part: str, before: KeyColumn | None, kept: Any, touched: Sequence[tuple[int, RowChange]], rows: int) -> KeyColumn | None:
    """Return a part's column after changes; None if no row has the part any more."""
    import numpy as np

    counts, first = np.zeros(rows, np.int64), np.zeros(rows, np.int64)
    if before is not None:
        at = np.asarray(before.at, np.int64)
        counts[: len(kept)], first[: len(kept)] = np.diff(at)[kept], at[kept]
    source = counts.copy()  # how many keys of each row are taken over
    new_keys: list[tuple[int, Cells]] = []
    for row, change in touched:
        cells = change.parts.get(part, () if change.is_removed else None)
        if cells is not None:
            counts[row], source[row] = len(cells), 0
            new_keys.append((row, cells))
    starts = np.concatenate([[0], np.cumsum(counts)])
    total = int(starts[-1])
    if not total:
        return None
    raw = np.zeros((total, KEY_BYTES), np.uint8)
    if before is not None and source.any():
        old = np.frombuffer(run_of(before.keys), np.uint8).reshape(-1, KEY_BYTES)
        within = np.arange(int(source.sum())) - np.repeat(np.cumsum(source) - source, source)
        raw[np.repeat(starts[:-1], source) + within] = old[np.repeat(first, source) + within]
    for row, cells in new_keys:
        for number, key in enumerate(cells):
            raw[starts[row] + number] = np.frombuffer(key or NO_KEY, np.uint8)
    is_one_each = bool((counts == 1).all())
    at_each = range(rows + 1) if is_one_each else memoryview(starts.tobytes()).cast("q")
    return made_column(part, at_each, Digests(memoryview(raw.tobytes()), KEY_BYTES))


def empty_table(name: str, made: Made, line: str) -> Catalog:
    """Return the table with which a data set begins. `line` is the id of its line."""
    return Catalog(name, {}, {}, [], [0], [], {}, [], (), made=made, line=line)


def made_column(part: str, at: Sequence[int], keys: Sequence[bytes]) -> KeyColumn:
    """Return the column of a part that somebody published: it has no recipe, and no inputs and stat records of its keys."""
    return KeyColumn(part, "", "", {}, at, keys, Repeated(NO_INPUT, len(keys)), Repeated(-1, 2 * len(keys)), {})
