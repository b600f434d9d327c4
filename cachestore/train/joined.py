"""Tensors that somebody published (`store.publish`, `store.session`, `fill_dataset`) beside the rows of a data set, by sample id.

A joined part becomes a key column like that of a condition: one cell for each variant of the sample's picture. So whatever reads
columns reads it too. A published data set that is opened by itself has its own parts beside its ids.
"""

from array import array
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from cachestore.core.arguments import as_many, as_mapping, as_text, as_whole, refuse
from cachestore.core.batch_shapes import FPS, NUM_FRAMES, SIZES
from cachestore.core.errors import BadInput
from cachestore.core.keys import KEY_BYTES, Key, digest_parts
from cachestore.core.read_block import Form, TextBlock
from cachestore.core.samples import MASK
from cachestore.core.words import first_of, plural
from cachestore.files.table import Digests, Repeated, Strings, Texts, run_of
from cachestore.store.format.catalog import HAVE_SOURCES, MADE, Catalog, KeyColumn, read_catalog
from cachestore.store.format.entry import TensorSpec
from cachestore.store.format.line import OWNER, VALUE, list_line, made_column
from cachestore.store.read.reader import Reader
from cachestore.store.read.rows import read_data_set
from cachestore.store.read.unfinished import find_generation
from cachestore.train.made_of import Expected, Shows
from cachestore.train.returned_columns import CAPTION, LATENTS, TextColumn

if TYPE_CHECKING:
    from typing_extensions import Self

Missing = Literal["error", "drop"]
"""What becomes of samples that lack a part of a joined data set."""
Counts = int | NDArray[np.int64]
"""The number of variants of each row's picture; an array by row if these differ."""
SAMPLE_ID: Final = "sample_id"
_RESERVED: Final = frozenset({CAPTION, SAMPLE_ID, LATENTS, MASK, NUM_FRAMES, FPS, *SIZES})
"""Names that samples have, or may have, by themselves."""


@dataclass(frozen=True, slots=True)
class JoinedColumn(TextColumn):
    """A part beside a data set's rows. A row that lacks it has no cell."""

    tensors: Mapping[str, TensorSpec]
    """By their names in a batch, the tensors of the first row's entry. The shapes of others may differ."""
    outdated: NDArray[np.int64]
    """Rows that lack it as their value was made of another picture, part of it or caption than they have now."""

    @property
    def stored(self) -> frozenset[str]:
        """The tensors that each entry has, and no others."""
        return frozenset(spec.name for spec in self.tensors.values())


@dataclass(frozen=True)
class Join:
    """The parts of one state of a published data set, beside the rows of another (or its own)."""

    name: str
    """Its name in samples; empty for a data set's own parts."""
    data_set: str
    generation: int
    columns: Sequence[JoinedColumn]

    @classmethod
    def of(cls, reader: Reader, name: str, joined: Catalog, catalog: Catalog, counts: Counts, *, resolution: int | None = None) -> "Self":
        """Lay the parts of a data set beside the rows of a catalog. `counts` and `resolution` are of the latents that are trained on.

        Raises BadInput, FormatError, MissingEntry.
        """
        return cls(name, joined.name, joined.generation, _beside(reader, name, joined, _Base(catalog, counts, resolution)))

    @classmethod
    def of_itself(cls, reader: Reader, catalog: Catalog) -> "Self":
        """The parts of a published data set beside its own rows. Raises MissingEntry."""
        return cls("", catalog.name, catalog.generation, _beside(reader, "", catalog, _Base(catalog, 1)))

    @cached_property
    def digest(self) -> str:
        """Digest of what it adds to the rows. Equal for equal keys, in whichever generation they are."""
        columns = ((*column.tensors, column.column) for column in self.columns)
        parts = [(*names, np.asarray(key_column.at, "<i8").tobytes(), bytes(run_of(key_column.keys))) for *names, key_column in columns]
        return digest_parts("cachestore-joined", self.name, *(one for part in parts for one in part)).hex()

    @property
    def is_there(self) -> NDArray[np.bool_]:
        """Which rows have each of its parts."""
        return np.logical_and.reduce([_has(column) for column in self.columns])

    def lacking(self, complete: NDArray[np.int64], ids: Sequence[str]) -> list[str]:
        """Which of the complete rows lack a part, and why, in words."""
        found: list[str] = []
        for column in self.columns:
            lacks = complete[~_has(column)[complete]]
            is_old = np.isin(lacks, column.outdated)
            old, absent = ([ids[row] for row in rows.tolist()] for rows in (lacks[is_old], lacks[~is_old]))
            part = f"the part {column.column.encoder!r}" if len(self.columns) > 1 else "a value"
            if absent:
                lack = plural(len(absent), "sample lacks", "samples lack")
                found.append(f"{lack} {part} in {self.data_set!r}: {first_of(map(repr, absent))}")
            if old:
                have, were = plural(len(old), "sample has", "samples have"), "was made of another picture, crop, caption or column"
                listed = first_of(map(repr, old))
                found.append(f"{have} a value in {self.data_set!r} that {were} than there is now: {listed}; call `cs.fill_dataset` again")
        return found


def parse_joins(join: object) -> dict[str, str | tuple[str, int]]:
    """Parse `join=`: by the name in samples, a data set or (data set, generation). Raises BadInput."""
    form = 'a mapping from names in samples to data sets, such as {"dino": "train/dino"} or {"dino": ("train/dino", 3)}'
    found: dict[str, str | tuple[str, int]] = {}
    given: Mapping[Any, Any] = {} if join is None else as_mapping("join", join, form)
    for name, wanted in given.items():
        if not isinstance(name, str) or not name:
            refuse("join", form, join)
        if name in _RESERVED:
            raise BadInput(f"samples have {name!r} by themselves: choose another name in join", option="join")
        if isinstance(wanted, str):
            found[name] = wanted
            continue
        pair = list(as_many(f"join[{name!r}]", wanted, "a data set's name, or (name, generation)"))
        if len(pair) != 2:
            refuse(f"join[{name!r}]", "a data set's name, or (name, generation)", wanted)
        found[name] = as_text(f"join[{name!r}]", pair[0]), as_whole(f"join[{name!r}][1]", pair[1], least=0)
    return found


def read_joined(reader: Reader, wanted: "str | tuple[str, int]") -> Catalog:
    """Read a data set that is to be joined. Raises BadInput, FormatError; RemoteFailed for an address."""
    name, asked = (wanted, None) if isinstance(wanted, str) else wanted
    try:
        joined = read_state(reader, name, asked)
    except BadInput as error:
        raise BadInput(str(error), option="join") from error
    what = f"the data set {name!r} of {reader.layout.shown} cannot be joined"
    if joined.made in HAVE_SOURCES:
        raise BadInput(f"{what}: it was {MADE[joined.made]}; join takes what `store.publish` or `cs.fill_dataset` made", option="join")
    if not joined.columns:
        rows = f"none of its {plural(len(joined), 'row')} has a value" if len(joined) else "it has no rows, as every data set begins"
        raise BadInput(f"{what}: in generation {joined.generation} {rows}", option="join")
    return joined


def read_state(reader: Reader, name: str, asked: int | None) -> Catalog:
    """Read a data set: the generation that is asked for, or as it is now. Raises BadInput, FormatError; RemoteFailed for an address.

    The state of a published one may lie between two generations: one, with the entries above it.
    """
    layout, number = reader.layout, reader.bring_catalog(name, asked)
    if number is None:
        line = list_line(layout, name)
        has_entries = bool(line.entries or line.blocks)
        if has_entries and asked not in line.tables:
            return read_data_set(layout, name, asked)
        number = find_generation(layout, name, asked)
    return read_catalog(layout.catalog(name, number), generation=number)


def without_parts(catalog: Catalog) -> Catalog:
    """A published data set as rows alone, which can be pickled: its parts are what `Join.of_itself` gives."""
    ids, values = Texts(), {name: list(column) for name, column in catalog.values.items()}
    for sample in catalog.ids:
        ids.append(sample)
    described = [part for name, column in values.items() for part in (name, repr(column))]
    digest = digest_parts("cachestore-rows", catalog.name, *catalog.ids, "columns", *described).hex()
    none, extras = Repeated(0, len(ids) + 1), Repeated("{}", len(ids))
    number, made = catalog.generation, catalog.made
    return Catalog(
        catalog.name, {}, {}, ids.strings(), none, [], {}, extras, (), generation=number, made=made, values=values, digest=digest
    )


def _has(column: JoinedColumn) -> NDArray[np.bool_]:
    return np.diff(np.asarray(column.column.at, np.int64)) > 0


@dataclass(frozen=True, slots=True)
class _Base:
    """The rows that parts are laid beside."""

    catalog: Catalog
    counts: Counts
    resolution: int | None = None
    """Of the latents that are trained on; None if there is only one."""


def _beside(reader: Reader, name: str, joined: Catalog, base: _Base) -> list[JoinedColumn]:
    """The parts of a published catalog beside the rows of another, by sample id."""
    catalog = base.catalog
    if joined is catalog or _are_equal(joined.ids, catalog.ids):
        joined_rows = np.arange(len(catalog), dtype=np.int64)
    else:
        row_of = {sample: row for row, sample in enumerate(joined.ids)}
        joined_rows = np.fromiter((row_of.get(sample, -1) for sample in catalog.ids), np.int64, len(catalog))
    columns: list[JoinedColumn] = []
    for part in joined.columns:
        shows = None if joined is catalog else _shows_of(reader, joined, part, joined_rows)
        expected = None if shows is None else Expected.of(catalog, shows, base.resolution)
        column, outdated = _aligned(part, joined.name, base, joined_rows, expected)
        first = [Key(column.keys[0])] if len(column.keys) else []
        prefix = part.encoder if not name else name if len(joined.columns) == 1 else f"{name}.{part.encoder}"
        specs = [] if not first else list(reader.locate(first).specs[0])
        tensors = {prefix if len(specs) == 1 else f"{prefix}.{spec.name}": spec for spec in specs}
        if first and not specs:
            raise BadInput(f"the values of the part {part.encoder!r} in {joined.name!r} have no tensors: publish some", option="join")
        outputs = {output: Form((spec.name,), None) for output, spec in tensors.items()}
        columns.append(JoinedColumn(column, TextBlock(outputs, {}, {}, None), tensors, outdated))
    return columns


def _are_equal(ids: Sequence[str], others: Sequence[str]) -> bool:
    """Whether two data sets have the same ids in one order: as bytes, as a mapping of a million texts takes seconds."""
    if not (isinstance(ids, Strings) and isinstance(others, Strings)):
        return False
    return all(one == other for one, other in zip(ids.as_columns(), others.as_columns(), strict=True))


def _shows_of(reader: Reader, joined: Catalog, part: KeyColumn, joined_rows: NDArray[np.int64]) -> Shows | None:
    """What the encoder of a part saw, if `fill_dataset` made it: the entry of the first row that is joined says so."""
    if part.encoder != VALUE:
        return None
    has = np.append(np.diff(np.asarray(part.at, np.int64)) > 0, False)[joined_rows]
    if not has.any():
        return None
    meta = reader.describe(Key(part.keys[part.at[int(joined_rows[int(has.argmax())])]])).meta
    return Shows.parse(meta) if meta.get(OWNER) == joined.name else None


def _aligned(
    part: KeyColumn, data_set: str, base: _Base, joined_rows: NDArray[np.int64], expected: Expected | None
) -> tuple[KeyColumn, NDArray[np.int64]]:
    """A part's keys in the order of a catalog's rows, one for each variant, and which rows have outdated ones, which are left out.

    `joined_rows` has the row of each, -1 for none. Of a part that `fill_dataset` made, `expected` says what each key would be made of now.
    """
    at, catalog = np.asarray(part.at, np.int64), base.catalog
    has = np.append(np.diff(at), 0)[joined_rows]  # the last one is for rows that the other lacks
    variants = np.broadcast_to(np.asarray(base.counts, np.int64), has.shape)
    odd = np.flatnonzero((has > 1) & (has != variants))
    if odd.size and expected is None:
        row = int(odd[0])
        what = f"the sample {catalog.ids[row]!r} has {plural(int(has[row]), 'key')} of the part {part.encoder!r} in {data_set!r}"
        if data_set == catalog.name:
            raise BadInput(f"{what}, one for each variant of a picture: join it to the data set that has these pictures", option="name")
        raise BadInput(
            f"{what}, but {plural(int(variants[row]), 'variant')} of its picture: publish one key, or one for each variant", option="join"
        )
    each = np.where(has > 0, variants, 0)
    each[odd] = 0
    starts, rows, within, raw = _spread(part, at, joined_rows, has, each)
    if expected is not None:
        differ = expected.differ(rows, within, raw)
        odd = np.union1d(odd, rows[differ])
        if odd.size:
            each[odd] = 0
            starts, rows, within, raw = _spread(part, at, joined_rows, has, each)
    at_each = range(len(each) + 1) if (each == 1).all() else array("q", starts.astype(np.int64).tobytes())
    return made_column(part.encoder, at_each, Digests(memoryview(raw.tobytes()), KEY_BYTES)), odd


def _spread(
    part: KeyColumn, at: NDArray[np.int64], joined_rows: NDArray[np.int64], has: NDArray[np.int64], each: NDArray[np.int64]
) -> "tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.uint8]]":
    """Where the cells of each row start if it has `each`, the row of each cell, its number in it, and its key."""
    starts = np.concatenate([[0], np.cumsum(each)])
    rows = np.repeat(np.arange(len(each)), each)
    within = np.arange(int(starts[-1])) - starts[rows]
    source: NDArray[np.int64] = at[joined_rows[rows]] + np.where(has[rows] == 1, 0, within)
    return starts, rows, within, np.frombuffer(run_of(part.keys), np.uint8).reshape(-1, KEY_BYTES)[source]


def refuse_missing(lacking: Sequence[str]) -> None:
    """Raise BadInput that says which samples lack a part."""
    raise BadInput(f'{"; ".join(lacking)}; publish these too, or leave the samples out with missing="drop"', option="missing")


def check_names(names: Sequence[str], used: Collection[str]) -> None:
    """Raise BadInput if samples would have two things of one name."""
    for number, name in enumerate(names):
        if name in used or name in names[:number] or name in {CAPTION, SAMPLE_ID}:
            raise BadInput(f"samples would have two things called {name!r}: choose another name for it", option="join")
