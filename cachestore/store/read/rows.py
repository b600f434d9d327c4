"""The rows of a data set: for each sample id, the keys of its parts, and columns. What `publish` takes and `store.dataset` returns."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from cachestore.core.arguments import as_id, as_many, as_mapping, as_text, normal_id, refuse
from cachestore.core.errors import BadInput, FormatError
from cachestore.core.keys import KEY_BYTES, Key
from cachestore.core.words import did_you_mean, first_of, plural
from cachestore.files.paths import BlockName, Layout, damaged
from cachestore.files.table import Digests, Repeated, offsets_of, run_of
from cachestore.store.format.catalog import NO_KEY, Catalog, KeyColumn, Kind, Made, list_names, read_catalog
from cachestore.store.format.line import lay_entries, list_line, made_column, read_entry, typed_values
from cachestore.store.read.unfinished import not_there

if TYPE_CHECKING:
    import numpy as np
    from typing_extensions import Self

_TRIES = 20
"""How often a data set is read anew because it was folded, and its changes removed, while it was read."""


class Rows:
    """Rows as arrays, without an object for each.

        cs.Rows(["cat", "dog"], {"dino": keys}, columns={"score": [0.5, 0.9]})

    `ids` are texts, each once; they are kept in Unicode form NFC. `parts` maps each part to its keys: a uint8 array of shape [n, 16], or n
    keys; a key of zeros says that the row lacks the part. `columns` maps names to n whole numbers, floats or texts.
    """

    def __init__(self, ids: Iterable[str], parts: Mapping[str, Any], columns: Mapping[str, Any] | None = None) -> None:
        """Raises BadInput for an id that comes twice, or where the lengths differ."""
        listed = [as_id("rows", one) for one in as_many("ids", ids, "the ids of samples")]
        _check_ids(listed)
        named_parts = as_mapping("parts", parts, "a mapping from parts to keys")
        columns_of_parts = [_column_of_keys(part, keys, len(listed)) for part, keys in named_parts.items()]
        columns_of_parts.sort(key=lambda column: column.encoder)
        named_columns: Mapping[Any, Any] = {} if columns is None else as_mapping("columns", columns, "a mapping from names to values")
        values = {as_text("the name of a column", name): _as_values(name, column, len(listed)) for name, column in named_columns.items()}
        self._catalog = _catalog_of(listed, columns_of_parts, values)

    @classmethod
    def of(cls, catalog: Catalog) -> "Self":
        """Return the rows of a catalog."""
        rows = cls.__new__(cls)
        rows._catalog = catalog  # noqa: SLF001 - its own class
        return rows

    @classmethod
    def read(cls, given: object) -> "Rows":
        """Return what a caller passes as rows: Rows, or `{id: {part: key or keys}}`. Of a pass, the keys alone. Raises BadInput."""
        if isinstance(given, Rows):
            return cls.of(_bare(given.parts, given.catalog)) if given.catalog.has_sources else given
        rows = as_mapping("rows", given, "cs.Rows, or a mapping {id: {part: key}}")
        ids = [as_id("rows", sample) for sample in rows]
        cells = [as_mapping(f"rows[{sample!r}]", row, "a mapping {part: key}") for sample, row in rows.items()]
        parts = sorted({as_text("the name of a part", part) for row in cells for part in row})
        columns: list[KeyColumn] = []
        for part in parts:
            keys = [cell_of(row[part]) if part in row else () for row in cells]
            at = offsets_of(map(len, keys)) if any(len(some) != 1 for some in keys) else range(len(ids) + 1)
            flat = Digests(memoryview(b"".join(key for some in keys for key in some)), KEY_BYTES)
            columns.append(made_column(part, at if isinstance(at, range) else list(at), flat))
        _check_ids(ids)
        return cls.of(_catalog_of(ids, columns, {}))

    @property
    def catalog(self) -> Catalog:
        """The rows as a catalog."""
        return self._catalog

    @property
    def ids(self) -> Sequence[str]:
        """The samples' ids, in order."""
        return self._catalog.ids

    @cached_property
    def parts(self) -> tuple[str, ...]:
        """The names of the parts. Of a data set that `precompute` made: `encoder/role`."""
        return tuple(self._catalog.column_names())

    @property
    def generation(self) -> int:
        """The generation that the rows are from; 0 for rows that were made here."""
        return self._catalog.generation

    @property
    def made(self) -> Made:
        """What made the data set."""
        return self._catalog.made

    def keys(self, part: str) -> "np.ndarray[Any, np.dtype[np.uint8]]":
        """Return the keys of a part: uint8 of shape [n, 16], zeros where a row lacks it. Raises BadInput if a row has several."""
        import numpy as np

        column = self._column(part)
        raw = np.frombuffer(run_of(column.keys), np.uint8).reshape(-1, KEY_BYTES)
        if isinstance(column.at, range):
            return raw
        at = np.asarray(column.at, np.int64)
        counts = np.diff(at)
        if (counts > 1).any():
            raise BadInput(f"some rows have several keys of the part {part!r}: `lists({part!r})` gives offsets and keys", option="part")
        keys = np.zeros((len(self), KEY_BYTES), np.uint8)
        keys[counts == 1] = raw
        return keys

    def lists(self, part: str) -> "tuple[np.ndarray[Any, np.dtype[np.int64]], np.ndarray[Any, np.dtype[np.uint8]]]":
        """Return (offsets, keys) of a part: int64 of shape [n + 1], uint8 of shape [all keys, 16]. Row r has `keys[at[r]:at[r + 1]]`."""
        import numpy as np

        column = self._column(part)
        return np.asarray(column.at, np.int64), np.frombuffer(run_of(column.keys), np.uint8).reshape(-1, KEY_BYTES)

    def samples_of(self, keys: set[Key]) -> list[str]:
        """Return the ids of the rows that have one of these keys."""
        columns = self._catalog.columns
        return [sample for row, sample in enumerate(self.ids) if any(keys.intersection(filter(None, c.row_keys(row))) for c in columns)]

    @cached_property
    def columns(self) -> Mapping[str, Sequence[Any]]:
        """The columns by name. Of a data set that `precompute` made: `captions`, the references of each role, and its extra columns."""
        catalog = self._catalog
        if not catalog.has_sources:
            return catalog.values
        found: dict[str, Sequence[Any]] = {"captions": [catalog.row_captions(row) for row in range(len(catalog))]}
        for role, (at, references) in catalog.images.items():
            found[role] = [list(references[at[row] : at[row + 1]]) for row in range(len(catalog))]
        extras: list[Mapping[str, Any]] = [json.loads(text) for text in catalog.extras]
        for name in dict.fromkeys(name for row in extras for name in row):
            found.setdefault(name, [row.get(name) for row in extras])
        return found

    def __len__(self) -> int:
        return len(self._catalog)

    def __iter__(self) -> Iterator[str]:
        return iter(self._catalog.ids)

    def __contains__(self, sample: object) -> bool:
        return isinstance(sample, str) and normal_id(sample) in self._row_of

    def __getitem__(self, sample: str) -> dict[str, Key | list[Key]]:
        """Return the keys of a row by part: a key, or a list of several. Parts that it lacks are left out. Raises KeyError."""
        row = self._row_of[normal_id(sample)]
        found: dict[str, Key | list[Key]] = {}
        for part, column in zip(self.parts, self._catalog.columns, strict=True):
            if keys := [key for key in column.row_keys(row) if key is not None]:
                found[part] = keys[0] if len(keys) == 1 else keys
        return found

    def __repr__(self) -> str:
        where = f"{self._catalog.name!r}, generation={self.generation}, " if self._catalog.name else ""
        return f"Rows({where}{len(self)} rows, parts={list(self.parts)})"

    @cached_property
    def _row_of(self) -> Mapping[str, int]:
        return {sample: row for row, sample in enumerate(self._catalog.ids)}

    def _column(self, part: str) -> KeyColumn:
        if part not in self.parts:
            there = f"the parts are {first_of(map(repr, self.parts))}" if self.parts else "there are no parts"
            raise BadInput(f"there is no part {part!r}: {there}{did_you_mean(part, self.parts)}", option="part")
        return self._catalog.columns[self.parts.index(part)]


def cell_of(given: Any) -> tuple[Key, ...]:
    """Return the keys of one cell: a key in any form, such as a row of an array of keys, or several. Raises BadInput."""
    if type(given) is Key and given != NO_KEY:  # the usual case, a million times
        return (given,)
    several: Any = given
    if isinstance(given, bytes | bytearray | memoryview | str) or getattr(given, "shape", None) == (KEY_BYTES,):
        several = [given]
    return tuple(map(_as_key, as_many("a key", several, "a key or a list of keys")))


def _as_key(given: Any) -> Key:
    if type(given) in {bytearray, memoryview} or str(getattr(given, "dtype", "")) == "uint8":
        given = bytes(given)
    key = Key.parse(given)
    if key == NO_KEY:
        raise BadInput("a key of zeros says that a row lacks the part: leave the part out, or set it to []", option="rows")
    return key


def _bare(parts: Sequence[str], catalog: Catalog) -> Catalog:
    """Return a catalog with the keys of another one alone, without its empty cells."""
    import numpy as np

    columns: list[KeyColumn] = []
    for part, column in zip(parts, catalog.columns, strict=True):
        raw = np.frombuffer(run_of(column.keys), np.uint8).reshape(-1, KEY_BYTES)
        is_there = raw.any(axis=1)
        at = np.concatenate([[0], np.cumsum(is_there)]).astype(np.int64)[np.asarray(column.at, np.int64)]
        columns.append(made_column(part, memoryview(at.tobytes()).cast("q"), Digests(memoryview(raw[is_there].tobytes()), KEY_BYTES)))
    return _catalog_of(catalog.ids, sorted(columns, key=lambda column: column.encoder), {})


def _catalog_of(ids: Sequence[str], columns: Sequence[KeyColumn], values: Mapping[str, Sequence[Any]]) -> Catalog:
    captions_at, extras = Repeated(0, len(ids) + 1), Repeated("{}", len(ids))
    return Catalog("", {}, {}, ids, captions_at, [], {}, extras, tuple(columns), values=values, made="published")


def _check_ids(ids: Sequence[str]) -> None:
    if len(set(ids)) < len(ids):
        seen: set[str] = set()
        twice = next(one for one in ids if one in seen or seen.add(one))
        raise BadInput(f"the id {twice!r} comes twice: give each row an id of its own", option="rows")


def _column_of_keys(part: object, keys: Any, rows: int) -> KeyColumn:
    import numpy as np

    named = as_text("the name of a part", part)
    if hasattr(keys, "dtype"):
        if keys.dtype != np.uint8 or keys.shape != (rows, KEY_BYTES):
            refuse(f"parts[{named!r}]", f"uint8 of shape [{rows}, {KEY_BYTES}]", f"{keys.dtype} of shape {list(keys.shape)}")
        raw = np.frombuffer(keys.tobytes(), np.uint8).reshape(-1, KEY_BYTES)
    else:
        joined = b"".join(NO_KEY if one == NO_KEY else _as_key(one) for one in as_many(f"parts[{named!r}]", keys, "keys"))
        raw = np.frombuffer(joined, np.uint8).reshape(-1, KEY_BYTES)
    if len(raw) != rows:
        raise BadInput(f"the part {named!r} has {plural(len(raw), 'key')}, but there are {plural(rows, 'id')}", option="rows")
    is_there = raw.any(axis=1)
    if is_there.all():
        return made_column(named, range(rows + 1), Digests(memoryview(raw.tobytes()), KEY_BYTES))
    at = np.concatenate([[0], np.cumsum(is_there)]).astype(np.int64)
    return made_column(named, memoryview(at.tobytes()).cast("q"), Digests(memoryview(raw[is_there].tobytes()), KEY_BYTES))


def _as_values(name: str, column: Any, rows: int) -> Sequence[Any]:
    whole = column.tolist() if hasattr(column, "tolist") else column
    listed = [one.item() if getattr(one, "shape", None) == () else one for one in as_many(f"columns[{name!r}]", whole, "values")]
    if len(listed) != rows:
        raise BadInput(f"the column {name!r} has {len(listed)} values for {rows} ids", option="columns")
    kinds: set[type] = set(map(type, listed))
    if not (kinds <= {str} or kinds <= {int, float, bool}):
        refuse(f"columns[{name!r}]", "whole numbers, floats or texts", listed)
    kind: Kind = "text" if str in kinds else "float" if float in kinds else "whole"
    try:
        return typed_values(listed if kind == "text" else list(map(float if kind == "float" else int, listed)), kind)
    except OverflowError:
        refuse(f"columns[{name!r}]", "whole numbers of 64 bits, floats or texts", max(listed, key=abs))


def read_data_set(layout: Layout, name: str, number: int | None = None) -> Catalog:
    """Return a data set as it is now, or as it was after entry `number`: a generation with the entries above it.

    Its `generation` is the number of its last entry. Raises BadInput if there is none, FormatError or OSError if a file is damaged, missing
    or cannot be read.
    """
    error: Exception | None = None
    for _try in range(_TRIES):
        line = list_line(layout, name)
        tables = [n for n in line.tables if number is None or n <= number]
        if not tables:
            if line.is_there and number is None:
                raise damaged(f"{layout.root}: all tables of the data set {name!r} are missing", layout.catalog(name, line.highest))
            there = [each for each in list_names(layout) if list_line(layout, each).is_there]
            raise not_there(layout, name, there) if number is None or name not in there else _no_number(layout, name, number)
        if number is not None and (number > line.highest or not (line.entries or line.blocks or number in line.tables)):
            raise _no_number(layout, name, number)
        last = line.highest if number is None else number
        if last > line.highest or (last not in line.tables and last < line.tables[-1] and not line.has_all(tables[-1], last)):
            raise _no_number(layout, name, last)
        try:
            return _read_state(layout, name, tables[-1], line.above(tables[-1], last), last)
        except FileNotFoundError as gone:  # a newer table covers it, and it was removed
            error = gone
        except FormatError as gap:
            if last < line.tables[-1] and number not in {*line.entries, *tables}:  # `gc` or `forget` removed it
                raise _no_number(layout, name, last) from gap
            raise
    raise FormatError(
        f"the data set {name!r} in {layout.shown} changed {_TRIES} times while it was read; run the same command again"
    ) from error


def _no_number(layout: Layout, name: str, number: int) -> BadInput:
    line = list_line(layout, name)
    there = first_of(map(str, reversed(line.states))) or "none"
    return BadInput(f"the data set {name!r} of {layout.shown} has no generation {number}; it has {there}", option="generation")


def _read_state(layout: Layout, name: str, table: int, entries: Sequence[int | BlockName], last: int) -> Catalog:
    catalog = read_catalog(layout.catalog(name, table), generation=table, io="mmap")
    above = [read_entry(layout, name, number) for number in entries]
    if any(entry.what == "dropped" for entry in above):
        raise _no_number(layout, name, last)
    return replace(lay_entries(catalog, above), generation=last) if entries else catalog


def newest_catalog(layout: Layout, name: str, *, io: Literal["pread", "mmap"] = "pread") -> Catalog | None:
    """The newest state of a data set that can be read, or None: as it is now, or else an older generation."""
    line = list_line(layout, name)
    if line.entries or line.blocks:
        with suppress(FormatError, OSError, BadInput):
            return read_data_set(layout, name)
        for table in reversed(line.tables[:-1]):  # the newest one is damaged, but these entries may give the same rows
            with suppress(FormatError, OSError, BadInput):
                return _read_state(layout, name, table, line.above(table, line.highest), line.highest)
    for generation in reversed(line.tables):
        with suppress(FormatError, OSError):
            return read_catalog(layout.catalog(name, generation), generation=generation, io=io)
    return None
