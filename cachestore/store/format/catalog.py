"""Catalogs: the ordered samples of a data set, with captions, images, other columns, and the keys of their values.

A catalog says which key belongs to which sample. A row of a key column has one cell for each caption, or for each image of the role and
variant, in order. docs/design/files.md describes the columns of the table.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

from cachestore.core.errors import WRONG_FIELDS, BadInput, FormatError
from cachestore.core.inputs import caption_key
from cachestore.core.keys import INPUT_BYTES, KEY_BYTES, Json, Key, Recipe
from cachestore.core.samples import CAPTION
from cachestore.core.words import did_you_mean, first_of, plural
from cachestore.files.opening import names_in
from cachestore.files.paths import Layout, damaged, decode_name, encode_name, parse_catalog, parse_dropped, to_verify
from cachestore.files.table import (
    Column,
    Digests,
    Numbers,
    Repeated,
    Strings,
    Table,
    check_table,
    float_column,
    never_falls,
    number_column,
    offsets_of,
    open_table,
    parse_table_start,
    read_table,
    run_of,
    string_columns,
    take,
)

if TYPE_CHECKING:
    import numpy as np

FORMAT: Final = "cachestore-catalog"
VERSION: Final = 1

Made = Literal["precompute", "imported", "published", "files"]
"""What made a data set. One name has one kind for ever, until it is dropped."""

Kind = Literal["whole", "float", "text"]
"""What a column that a publisher gave holds."""

MADE: Final[Mapping[Made, str]] = {
    "precompute": "made by `cachestore precompute`",
    "imported": "imported from another trainer",
    "published": "published by a program",
    "files": "saved as files by a program",
}
"""What made a data set, in words after "was"."""

IMPORTED: Final = "imported"
"""In a request: the format that an encoder's values were imported from. The `kind` of an imported recipe."""

HAVE_SOURCES: Final[frozenset[Made]] = frozenset({"precompute", "imported"})
"""Data sets of these kinds have captions, extra columns, and inputs and stat records for each key. Others have keys alone."""

_FEW: Final = 64
"""So many samples or keys are searched in the bytes of a column one by one."""

NO_KEY: Final = bytes(KEY_BYTES)
NO_INPUT: Final = bytes(INPUT_BYTES)
FACTS: Final[Mapping[str, int]] = {
    "size": 2,
    "bucket": 3,
    "resized": 2,
    "crop": 4,
    "tokens": 1,
    "weight": 1,
    "coloured": 1,
    "variant": 1,
    "flip": 1,
    "fps": 2,
    "start": 1,
}
"""The facts of a cell, and how many numbers each has. In pixels: size (width, height), bucket (width, height, frames), resized (width,
height), crop (left, top, right, bottom; of the resized picture). tokens: their count before truncation. variant: its number. flip: 1 if
mirrored. Of masks: weight, 0 if nothing counts, 2 if all does, else 1; coloured, 1 if it is the luminance of colours. Of clips: fps
(numerator, denominator), and start, the number of the first frame in its video at that rate."""


@dataclass(frozen=True, slots=True)
class Cell:
    """What one encoder made of one caption or image of a sample."""

    key: Key | None = None
    """None if encoding failed, or was not done yet."""
    input: bytes = NO_INPUT
    """SHA-256 of the input; for several inputs `inputs.combined_digest`."""
    stat: tuple[int, int] = (-1, -1)
    """The stat record of the input's file; for several `inputs.combined_stat`. -1 if there is no file, or if that proves nothing."""
    facts: Mapping[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])


@dataclass(frozen=True, slots=True)
class KeyColumn:
    """The cells of one encoder and role, in the order of rows."""

    encoder: str
    role: str
    fingerprint: str
    options: Mapping[str, Json]
    """What else distinguishes this column from others of the encoder: resolution, bucket step, images shown beside captions."""
    at: Sequence[int]
    keys: Sequence[bytes]
    inputs: Sequence[bytes]
    stats: Sequence[int]
    facts: Mapping[str, Sequence[int]]

    def count(self, row: int) -> int:
        """How many cells a row has."""
        return self.at[row + 1] - self.at[row]

    def row_keys(self, row: int) -> list[Key | None]:
        """The keys of a row, with None for empty cells."""
        raw = (self.keys[index] for index in range(self.at[row], self.at[row + 1]))
        return [Key(key) if key != NO_KEY else None for key in raw]

    def cell(self, index: int) -> Cell:
        """The cell with this index in the column."""
        raw = self.keys[index]
        facts = {
            name: tuple(n for n in values[index * FACTS[name] : (index + 1) * FACTS[name]] if n >= 0) for name, values in self.facts.items()
        }
        return Cell(
            Key(raw) if raw != NO_KEY else None,
            self.inputs[index],
            (self.stats[2 * index], self.stats[2 * index + 1]),
            {name: values for name, values in facts.items() if values},
        )

    def row_cells(self, row: int) -> list[Cell]:
        """The cells of a row."""
        return [self.cell(index) for index in range(self.at[row], self.at[row + 1])]


def make_column(encoder: str, role: str, fingerprint: str, options: Mapping[str, Json], rows: Iterable[Sequence[Cell]]) -> KeyColumn:
    """Make a key column from the cells of each row."""
    listed = [list(row) for row in rows]
    cells = [cell for row in listed for cell in row]
    facts = {
        name: [number for cell in cells for number in (*cell.facts.get(name, ()), *[-1] * width)[:width]]
        for name, width in FACTS.items()
        if any(name in cell.facts for cell in cells)
    }
    keys = [cell.key if cell.key is not None else NO_KEY for cell in cells]
    inputs = [cell.input for cell in cells]
    stats = [number for cell in cells for number in cell.stat]
    return KeyColumn(encoder, role, fingerprint, options, list(offsets_of(map(len, listed))), keys, inputs, stats, facts)


def made_by(request: Mapping[str, Any]) -> Made:
    """Return what made a data set with sources, by the options of its encoders: it counts as imported if any of its values is."""
    return "imported" if any(IMPORTED in hints for hints in request.values()) else "precompute"


@dataclass(frozen=True, slots=True)
class Catalog:
    """The rows of a catalog. `generation` and `digest` are known once it was read or published."""

    name: str
    request: Mapping[str, Json]
    """By encoder, the options it was made with. Hints for `repair --refill`, such as the paths of DATA and the model. Not in the digest."""
    recipes: Mapping[str, Recipe]
    """By fingerprint, every recipe that a key column names."""
    ids: Sequence[str]
    captions_at: Sequence[int]
    captions: Sequence[str]
    images: Mapping[str, tuple[Sequence[int], Sequence[str]]]
    """By role: where the references of each row start, and the references."""
    extras: Sequence[str]
    columns: tuple[KeyColumn, ...]
    texts: Mapping[str, Json] = field(default_factory=dict[str, Json])
    """How the captions were chosen from those in the source (`CaptionPolicy.encoding`). Empty: the first caption, unchanged."""
    prompts: Sequence[tuple[str, str]] = ()
    """(prompt, negative prompt) of each prompt for validation whose texts were encoded. Not in the digest: rows stay the same."""
    generation: int = 0
    listing: int = 0
    """The listing number of its rows (`store/write/listing_numbers`); 0 if there was no store yet when they were listed."""
    made: Made = "precompute"
    line: str = ""
    """32 hex digits, drawn when a line began: where it goes on, its tables have the same. Empty for what a pass makes."""
    values: Mapping[str, Sequence[Any]] = field(default_factory=dict[str, Sequence[Any]])
    """Columns that a publisher gave, by name: whole numbers, floats or texts, one for each row."""
    digest: str = ""
    """Covers the rows and recipes, but not the request, times or the files' stat records."""
    checksums: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Checksums of the columns as they were read; empty for a catalog that was just built."""

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def has_sources(self) -> bool:
        """Whether it has captions, extra columns, and inputs and stat records for each key. Otherwise it has keys and `values` alone."""
        return self.made in HAVE_SOURCES

    def row_captions(self, row: int) -> list[str]:
        """The captions of a row."""
        return [self.captions[index] for index in range(self.captions_at[row], self.captions_at[row + 1])]

    def row_images(self, row: int) -> dict[str, Sequence[str]]:
        """The references of a row's images by role; roles without any are left out."""
        found = {role: references[at[row] : at[row + 1]] for role, (at, references) in self.images.items()}
        return {role: some for role, some in found.items() if len(some)}

    def prompt_keys(self) -> Iterator[tuple[Key, str]]:
        """The key of each text of the prompts, for each text encoder, with the text."""
        texts = dict.fromkeys(text for pair in self.prompts for text in pair)
        for column in self.columns if texts else ():
            if column.role == CAPTION:
                yield from ((caption_key(column.fingerprint, text), text) for text in texts)

    def column(self, encoder: str, role: str) -> KeyColumn | None:
        """The first key column of this encoder and role, or None."""
        return next((column for column in self.columns if (column.encoder, column.role) == (encoder, role)), None)

    def column_names(self) -> list[str]:
        """The name of each key column: `encoder/role`, with `@resolution` if several columns share that name."""
        names = [f"{column.encoder}/{column.role}" if column.role else column.encoder for column in self.columns]
        return [
            f"{name}@{column.options.get('resolution')}" if names.count(name) > 1 else name
            for name, column in zip(names, self.columns, strict=True)
        ]

    def lacking_parts(self, row: int) -> list[str]:
        """The parts of other rows that a row lacks, of what a program published. A row of a table without parts needs a column.

        Encoders of a pass may have nothing to make of a row, such as one without a picture, so nothing is lacking there.
        """
        if self.has_sources:
            return []
        none = [] if self.values or self.columns else ["value"]
        return none + [column.encoder for column in self.columns if not column.count(row)]

    def is_complete(self, row: int) -> bool:
        """Whether every encoder succeeded for every cell of this row, and it lacks no part."""
        return not self.lacking_parts(row) and all(
            column.keys[index] != NO_KEY for column in self.columns for index in range(column.at[row], column.at[row + 1])
        )


def rows_with_parts(catalog: Catalog) -> "np.ndarray[Any, np.dtype[np.bool_]]":
    """Return which rows have `lacking_parts` of none."""
    import numpy as np

    found = np.ones(len(catalog), np.bool_)
    if catalog.has_sources:
        return found
    for column in catalog.columns:
        found &= np.diff(np.asarray(column.at, np.int64)) > 0
    return found if catalog.columns or catalog.values else ~found


def without_rows(catalog: Catalog, samples: Collection[str]) -> Catalog | None:
    """Return a catalog of a pass without the rows of these samples; None if it has none of them. The others keep their order."""
    import numpy as np

    if not (gone := rows_of(catalog, samples)):
        return None
    rows = np.delete(np.arange(len(catalog)), gone)
    captions_at, captions = _kept_cells(catalog.captions_at, rows)
    images: dict[str, tuple[Sequence[int], Sequence[str]]] = {}
    for role, (at, references) in catalog.images.items():
        starts, cells = _kept_cells(at, rows)
        images[role] = starts, _kept_texts(references, cells)
    return replace(
        catalog,
        ids=_kept_texts(catalog.ids, rows),
        captions_at=captions_at,
        captions=_kept_texts(catalog.captions, captions),
        images=images,
        extras=_kept_texts(catalog.extras, rows),
        columns=tuple(_kept_column(column, rows) for column in catalog.columns),
    )


def rows_of(catalog: Catalog, samples: Collection[str]) -> list[int]:
    """Return the rows of these samples. A few are searched in the bytes of all ids, as decoding a million takes a second."""
    ids = catalog.ids
    if not isinstance(ids, Strings) or len(samples) > _FEW or "" in samples:
        return [row for row, sample in enumerate(ids) if sample in samples]
    text, offsets = ids.as_columns()
    every = bytes(text)
    starts = ((sample, at) for sample in samples for at in _found_in(every, sample.encode("utf-8", "surrogatepass")))
    rows = ((sample, at, bisect_left(offsets, at)) for sample, at in starts)
    return sorted(row for sample, at, row in rows if row < len(ids) and offsets[row] == at and ids[row] == sample)


def cells_of(column: KeyColumn, keys: Collection[Key]) -> list[tuple[int, Key]]:
    """Return the row of each cell that has one of these keys, with the key."""
    raw = column.keys
    if isinstance(raw, Digests) and len(keys) <= _FEW:
        every = bytes(raw.raw)
        cells = sorted((at // KEY_BYTES, key) for key in keys for at in _found_in(every, key) if at % KEY_BYTES == 0)
    else:
        cells = [(cell, Key(key)) for cell, key in enumerate(raw) if key in keys]
    return [(bisect_right(column.at, cell) - 1, key) for cell, key in cells]


def _found_in(text: bytes, wanted: bytes) -> Iterator[int]:
    at = text.find(wanted)
    while at >= 0:
        yield at
        at = text.find(wanted, at + 1)


def _kept_cells(at: Sequence[int], rows: Any) -> "tuple[memoryview[int], Any]":
    """Return where the cells of each of these rows begin once the others are gone, and the numbers of these cells."""
    import numpy as np

    before: Any = np.asarray(at, np.int64)
    counts: Any = np.diff(before)[rows]
    starts: Any = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    cells: np.ndarray[Any, Any] = (before[rows] - starts[:-1]).repeat(counts) + np.arange(int(starts[-1]))
    return _as_numbers(starts), cells


def _kept_texts(texts: Sequence[str], cells: Any) -> Sequence[str]:
    import numpy as np

    if not isinstance(texts, Strings):
        return take(texts, cells.tolist())
    text, offsets = texts.as_columns()
    at = np.asarray(offsets, np.int64)
    runs = np.split(cells, np.flatnonzero(np.diff(cells) != 1) + 1)  # few are longer than one cell only if most cells go
    joined = b"".join(text[at[run[0]] : at[run[-1] + 1]] for run in runs if len(run))
    return Strings(memoryview(joined), _as_numbers(np.concatenate([[0], np.cumsum(np.diff(at)[cells])])))


def _kept_column(column: KeyColumn, rows: Any) -> KeyColumn:
    import numpy as np

    at, cells = _kept_cells(column.at, rows)

    def kept(values: Sequence[int], width: int) -> Sequence[int]:
        return _as_numbers(np.asarray(values, np.int64).reshape(-1, width)[cells])

    def kept_bytes(values: Sequence[bytes], width: int) -> Sequence[bytes]:
        return Digests(memoryview(np.frombuffer(run_of(values), np.uint8).reshape(-1, width)[cells].tobytes()), width)

    facts = {name: kept(values, FACTS[name]) for name, values in column.facts.items()}
    keys, inputs = kept_bytes(column.keys, KEY_BYTES), kept_bytes(column.inputs, INPUT_BYTES)
    return replace(column, at=at, keys=keys, inputs=inputs, stats=kept(column.stats, 2), facts=facts)


def _as_numbers(array: Any) -> "memoryview[int]":
    return memoryview(array.astype("int64").tobytes()).cast("q")


def read_catalog(path: Path, *, generation: int, io: Literal["pread", "mmap"] = "pread") -> Catalog:
    """Read and check a catalog; `io` as in `read_table`. Raises FormatError or FileNotFoundError."""
    catalog = _parse(read_table(path, FORMAT, VERSION, io=io), path)
    _check_home(catalog, path, generation)
    _check_shape(catalog, path)
    return catalog


def read_stray(path: Path) -> Catalog:
    """Read and check a catalog outside its folder. Raises FormatError, FileNotFoundError."""
    catalog = _parse(read_table(path, FORMAT, VERSION), path)
    _check_shape(catalog, path)
    return catalog


def open_catalog(path: Path, *, generation: int, digest: str) -> Catalog:
    """Open a catalog that another process read and checked, and whose `digest` it has. Raises as `read_catalog`.

    Rows are read when they are used, and take no memory; that raises FormatError if the file was cut short meanwhile.
    """
    catalog = _parse(open_table(path, FORMAT, VERSION), path)
    _check_home(catalog, path, generation)
    if catalog.digest != digest:
        raise FormatError(f"{path} is not the catalog that was opened before; run {to_verify(path)}")
    return catalog


@dataclass(frozen=True, slots=True)
class CatalogStart:
    """What the start of a catalog's file says."""

    samples: int
    digest: str
    """As `Catalog.digest`."""
    line: str
    """As `Catalog.line`."""
    file_digest: str
    """Of the whole file: only equal files have it."""


def parse_catalog_start(start: bytes, size_bytes: int, name: str, generation: int, *, where: Path) -> CatalogStart:
    """Return what the start of this generation's file says; the file has this size. Raises FormatError, also for another generation."""
    table = parse_table_start(start, size_bytes, FORMAT, VERSION, where=where)
    try:
        named, number = _text(table.header["name"]), table.header["generation"]
        [rows] = table.checksums["ids.offsets"][1]
        found = CatalogStart(max(rows - 1, 0), _text(table.header["digest"]), _text(table.header.get("line", "")), table.digest)
        is_home = (encode_name(named), number) == (encode_name(name), generation)
    except WRONG_FIELDS as error:
        raise FormatError(f"{where} lacks a field of a catalog, or has a wrong one ({type(error).__name__}: {error})") from error
    if not is_home:
        raise FormatError(f"{where} is generation {number!r} of {named!r}")
    return found


def check_catalog_copy(path: Path, expected: CatalogStart) -> None:
    """Read a copy of a catalog, one piece at a time in memory. Raises FormatError if it is damaged or another one, FileNotFoundError."""
    if check_table(path, FORMAT, VERSION) != expected.file_digest:
        raise FormatError(f"{path} is a copy of another catalog")


def _parse(table: Table, path: Path) -> Catalog:
    header, ids = table.header, table.strings("ids")
    try:
        made = _as_made(header["made"])
        has_sources = made in HAVE_SOURCES
        recipes = [Recipe.from_json(recipe) for recipe in header["recipes"]]
        catalog = Catalog(
            name=_text(header["name"]),
            request=dict(header["request"]),
            recipes={recipe.fingerprint: recipe for recipe in recipes},
            ids=ids,
            captions_at=table.numbers("captions/at") if has_sources else Repeated(0, len(ids) + 1),
            captions=table.strings("captions"),
            images={role: (table.numbers(f"images/{role}/at"), table.strings(f"images/{role}")) for role in map(_text, header["roles"])},
            extras=table.strings("extras") if has_sources else Repeated("{}", len(ids)),
            columns=tuple(_read_column(table, f"key/{n}", column, len(ids), has_sources) for n, column in enumerate(header["columns"])),
            texts=dict(header.get("texts", {})),
            prompts=tuple((_text(prompt), _text(negative)) for prompt, negative in header.get("prompts", ())),
            generation=header["generation"],
            listing=header["listing"],
            made=made,
            line=_text(header.get("line", "")),
            values={_text(name): read_values(table, f"value/{n}", kind) for n, (name, kind) in enumerate(header.get("values", ()))},
            digest=_text(header["digest"]),
            checksums=table.checksums,
        )
        encode_name(catalog.name)
    except WRONG_FIELDS as error:
        raise damaged(f"{path} lacks a field of a catalog, or has a wrong one ({type(error).__name__}: {error})", path) from error
    if type(catalog.generation) is not int or type(catalog.listing) is not int:
        raise damaged(f"{path} does not say which generation and listing it is", path)
    return catalog


def _check_home(catalog: Catalog, path: Path, generation: int) -> None:
    """Raise FormatError for the catalog of another data set or generation: its rows have other keys."""
    if encode_name(catalog.name) != path.parent.name or catalog.generation != generation:
        raise damaged(f"{path} is generation {catalog.generation} of {catalog.name!r}, but its folder and name say otherwise", path)


def _read_column(table: Table, prefix: str, described: Mapping[str, Any], rows: int, has_sources: bool) -> KeyColumn:  # noqa: FBT001 - a fact of the catalog
    encoder, role, fingerprint = (_text(described[name]) for name in ("encoder", "role", "fingerprint"))
    keys = table.digests(f"{prefix}/keys", KEY_BYTES)
    if has_sources:
        inputs, stats = table.digests(f"{prefix}/inputs", INPUT_BYTES), table.numbers(f"{prefix}/stat")
    else:
        inputs, stats = Repeated(NO_INPUT, len(keys)), Repeated(-1, 2 * len(keys))
    is_one_each = not has_sources and f"{prefix}/at" not in table.columns
    at = range(rows + 1) if is_one_each else table.numbers(f"{prefix}/at")
    facts = {name: table.numbers(f"{prefix}/{name}") for name in described["facts"] if name in FACTS}
    return KeyColumn(encoder, role, fingerprint, dict(described["options"]), at, keys, inputs, stats, facts)


def read_values(table: Table, name: str, kind: str) -> Sequence[Any]:
    """Return a column that a publisher gave, of this kind. Raises ValueError for a kind that there is not."""
    if kind not in get_args(Kind):
        raise ValueError(f"a column of {kind!r:.80}")
    return table.strings(name) if kind == "text" else table.numbers(name) if kind == "whole" else table.floats(name)


def encode_values(name: str, values: Sequence[Any]) -> tuple[str, dict[str, Column]]:
    """Return the kind of a column that a publisher gave, and it as columns of a table."""
    kind = kind_of_values(values)
    if kind == "text":
        return kind, string_columns(name, values)
    return kind, {name: number_column(values) if kind == "whole" else float_column(values)}


def kind_of_values(values: Sequence[Any]) -> Kind:
    """Return the kind of a column that a publisher gave."""
    code = getattr(values, "typecode", getattr(values, "format", "q" if isinstance(values, Numbers) else ""))
    return "whole" if code == "q" else "float" if code == "d" else "text"


def _as_made(value: Any) -> Made:
    if value not in get_args(Made):
        raise ValueError(f"made by {value!r:.80}")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.80} is no text")
    return value


def _check_shape(catalog: Catalog, path: Path) -> None:
    """Raise FormatError unless each list column covers exactly the rows. Otherwise a look-up could read the cells of another row."""
    rows = len(catalog.ids)
    lists = [(catalog.captions_at, len(catalog.captions)), *((at, len(values)) for at, values in catalog.images.values())]
    lists += [(column.at, len(column.keys)) for column in catalog.columns]
    fits = all(len(at) == rows + 1 and at[0] == 0 and at[-1] == total and never_falls(at) for at, total in lists)
    cells = all(
        len(column.inputs) == len(column.keys)
        and len(column.stats) == 2 * len(column.keys)
        and all(len(values) == FACTS[name] * len(column.keys) for name, values in column.facts.items())
        for column in catalog.columns
    )
    if not (fits and cells and len(catalog.extras) == rows and all(len(values) == rows for values in catalog.values.values())):
        raise damaged(f"the columns of {path} do not have one row for each of its {plural(rows, 'sample')}", path)


def list_names(layout: Layout) -> list[str]:
    """The names of all data sets in a store."""
    return [name for name in map(decode_name, names_in(layout.catalogs)) if name is not None]


def no_data_set(layout: Layout, name: str, names: Collection[str]) -> BadInput:
    """Return the error for a name that no data set has; `names` are those that there are."""
    there = first_of(map(repr, sorted(names))) or "none"
    lists = layout.command("stats")
    none = f"{layout.root} has no data set {name!r}"
    return BadInput(f"{none}; it has {there} ({lists} lists them){did_you_mean(name, names)}", option="name")


def list_generations(layout: Layout, name: str) -> list[int]:
    """The generations of a data set, oldest first. Those that `drop` has not removed yet do not count."""
    names = names_in(layout.catalog_folder(name))
    dropped = max(filter(None, map(parse_dropped, names)), default=0)
    return sorted(n for n in map(parse_catalog, names) if n is not None and n > dropped)
