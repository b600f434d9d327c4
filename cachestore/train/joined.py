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
from cachestore.files.table import Digests, Repeated, Texts, run_of
from cachestore.store.format.catalog import HAVE_SOURCES, MADE, Catalog, KeyColumn, read_catalog
from cachestore.store.format.entry import TensorSpec
from cachestore.store.format.line import list_line, made_column
from cachestore.store.read.reader import Reader
from cachestore.store.read.rows import read_data_set
from cachestore.store.read.unfinished import find_generation
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
    def of(cls, reader: Reader, name: str, joined: Catalog, catalog: Catalog, counts: Counts) -> "Self":
        """Lay the parts of a data set beside the rows of a catalog. Raises BadInput, FormatError, MissingEntry."""
        return cls(name, joined.name, joined.generation, _beside(reader, name, joined, catalog, counts))

    @classmethod
    def of_itself(cls, reader: Reader, catalog: Catalog) -> "Self":
        """The parts of a published data set beside its own rows. Raises MissingEntry."""
        return cls("", catalog.name, catalog.generation, _beside(reader, "", catalog, catalog, 1))

    @cached_property
    def digest(self) -> str:
        """Digest of what it adds to the rows. Equal for equal keys, in whichever generation they are."""
        columns = ((*column.tensors, column.column) for column in self.columns)
        parts = [(*names, np.asarray(key_column.at, "<i8").tobytes(), bytes(run_of(key_column.keys))) for *names, key_column in columns]
        return digest_parts("cachestore-joined", self.name, *(one for part in parts for one in part)).hex()

    @property
    def is_there(self) -> NDArray[np.bool_]:
        """Which rows have each of its parts."""
        has = [np.diff(np.asarray(column.column.at, np.int64)) > 0 for column in self.columns]
        return np.logical_and.reduce(has)


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
        raise BadInput(f"{what}: it has no rows with keys yet", option="join")
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


def _beside(reader: Reader, name: str, joined: Catalog, catalog: Catalog, counts: Counts) -> list[JoinedColumn]:
    """The parts of a published catalog beside the rows of another, by sample id."""
    if joined is catalog:
        joined_rows = np.arange(len(catalog), dtype=np.int64)
    else:
        row_of = {sample: row for row, sample in enumerate(joined.ids)}
        joined_rows = np.fromiter((row_of.get(sample, -1) for sample in catalog.ids), np.int64, len(catalog))
    columns: list[JoinedColumn] = []
    for part in joined.columns:
        column = _aligned(part, joined.name, catalog, joined_rows, counts)
        first = [Key(column.keys[0])] if len(column.keys) else []
        prefix = part.encoder if not name else name if len(joined.columns) == 1 else f"{name}.{part.encoder}"
        specs = [] if not first else list(reader.locate(first).specs[0])
        tensors = {prefix if len(specs) == 1 else f"{prefix}.{spec.name}": spec for spec in specs}
        outputs = {output: Form((spec.name,), None) for output, spec in tensors.items()}
        columns.append(JoinedColumn(column, TextBlock(outputs, {}, {}, None), tensors))
    return columns


def _aligned(part: KeyColumn, data_set: str, catalog: Catalog, joined_rows: NDArray[np.int64], counts: Counts) -> KeyColumn:
    """A part's keys in the order of a catalog's rows, one for each variant. `joined_rows` has the row of each, -1 for none."""
    at = np.asarray(part.at, np.int64)
    has = np.append(np.diff(at), 0)[joined_rows]  # the last one is for rows that the other lacks
    variants = np.broadcast_to(np.asarray(counts, np.int64), has.shape)
    if (odd := np.flatnonzero((has > 1) & (has != variants))).size:
        row = int(odd[0])
        what = f"the sample {catalog.ids[row]!r} has {plural(int(has[row]), 'key')} of the part {part.encoder!r} in {data_set!r}"
        if data_set == catalog.name:
            raise BadInput(f"{what}, one for each variant of a picture: join it to the data set that has these pictures", option="name")
        raise BadInput(
            f"{what}, but {plural(int(variants[row]), 'variant')} of its picture: publish one key, or one for each variant", option="join"
        )
    each = np.where(has > 0, variants, 0)
    starts = np.concatenate([[0], np.cumsum(each)])
    rows = np.repeat(np.arange(len(each)), each)
    within = np.arange(int(starts[-1])) - starts[rows]
    source: NDArray[np.int64] = at[joined_rows[rows]] + np.where(has[rows] == 1, 0, within)
    raw = np.frombuffer(run_of(part.keys), np.uint8).reshape(-1, KEY_BYTES)[source]
    at_each = range(len(each) + 1) if (each == 1).all() else array("q", starts.astype(np.int64).tobytes())
    return made_column(part.encoder, at_each, Digests(memoryview(raw.tobytes()), KEY_BYTES))


def lacking(data_set: str, ids: Sequence[str]) -> str:
    """Which samples lack a part, as a sentence."""
    return f"{plural(len(ids), 'sample has', 'samples have')} no part in {data_set!r}: {first_of(map(repr, ids))}"


def refuse_missing(missing: Mapping[str, Sequence[str]]) -> None:
    """Raise BadInput that says which samples lack a part."""
    what = "; ".join(lacking(data_set, ids) for data_set, ids in missing.items())
    raise BadInput(f'{what}; publish these too, or leave the samples out with missing="drop"', option="missing")


def check_names(names: Sequence[str], used: Collection[str]) -> None:
    """Raise BadInput if samples would have two things of one name."""
    for number, name in enumerate(names):
        if name in used or name in names[:number] or name in {CAPTION, SAMPLE_ID}:
            raise BadInput(f"samples would have two things called {name!r}: choose another name for it", option="join")
