"""What inputs a value of `fill_dataset` was made of: the last bytes of its key say it, so that a join compares them with a catalog.

They follow from columns of the catalog alone: what is compared at a join is what it takes no file to know.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from cachestore.core.inputs import cells_each, is_trained_on
from cachestore.core.keys import INPUT_BYTES, KEY_BYTES, Json, canonical, digest_parts
from cachestore.files.table import Strings, run_of
from cachestore.store.format.catalog import FACTS, Catalog, KeyColumn
from cachestore.train.returned_columns import LATENTS

Seen = NDArray[np.uint64]
"""A number for what each row, or each cell, was made of."""

MADE_OF: Final = "made_of"
"""The field of an entry's JSON value that says what its encoder saw."""
SEEN_BYTES: Final = 6
"""How many bytes at the end of a key are compared. Those before them decide where it lies in an index, so they are spread evenly."""
SHOWN_FACTS: Final = ("bucket", "resized", "crop", "flip", "start", "fps")
"""Facts of a cell that decide its pixels, with its file."""
_ODD: Final = np.uint64(0x9E3779B97F4A7C15)
_OTHER: Final = np.uint64(0xBF58476D1CE4E5B9)
_NO_EXTRAS: Final = b"{}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shows:
    """What an encoder gets of a sample, besides its id, columns and files."""

    pixels: bool
    captions: bool

    @classmethod
    def parse(cls, meta: Mapping[str, Any]) -> "Shows | None":
        """What an entry's JSON value says; None if `fill_dataset` did not make it."""
        listed = meta.get(MADE_OF)
        return cls(pixels="pixels" in listed, captions="captions" in listed) if isinstance(listed, list) else None

    def as_json(self) -> list[Json]:
        """The names of what it gets."""
        return [name for name in ("captions", "pixels") if getattr(self, name)]


def pixels_of(catalog: Catalog, resolution: int | None) -> list[KeyColumn]:
    """The columns of the latents that are trained on: of pictures, and of videos."""
    trained = [column for column in catalog.columns if column.encoder == LATENTS and is_trained_on(column.role, column.options)]
    return [column for column in trained if resolution is None or column.options.get("resolution") == resolution]


def seen_by_row(catalog: Catalog, *, captions: bool) -> Seen:
    """What the encoder of a row sees: the digests of pictures that latents are made of, extra columns, and captions if it gets them."""
    seen = np.zeros(len(catalog), np.uint64)
    by_role: dict[str, KeyColumn] = {}
    for column in catalog.columns:
        if column.encoder == LATENTS:
            by_role.setdefault(column.role, column)
    for role, column in sorted(by_role.items()):
        firsts = _within(column.at) % cells_each(column.options) == 0
        own = np.where(firsts, _mixed(_inputs(column), _number_of(role)), np.uint64(0))
        seen = _mixed(seen, _sums(own, column.at))
    seen = _mixed(seen, _texts(catalog.extras, _NO_EXTRAS))
    return _mixed(seen, _sums(_texts(catalog.captions, b""), catalog.captions_at)) if captions else seen


def seen_by_cell(catalog: Catalog, column: KeyColumn) -> Seen:
    """What the pixels of each cell of a column are: of which input, which part of it, and how it was resized."""
    transform: Json = catalog.recipes[column.fingerprint].make.get("transform")
    seen = _mixed(_inputs(column), _number_of(canonical(transform)))
    for name in SHOWN_FACTS:
        known = column.facts.get(name)
        numbers = np.full((1, FACTS[name]), -1) if known is None else np.asarray(known, np.int64).reshape(-1, FACTS[name])
        for each in numbers.T:
            seen = _mixed(seen, each.astype(np.uint64))
    return seen


def with_rows(by_row: Seen, cells: Seen, at: Sequence[int]) -> Seen:
    """What the encoder of each cell sees: its pixels, and what it sees of the row."""
    return _mixed(by_row.repeat(np.diff(np.asarray(at, np.int64))), cells)


def as_bytes(seen: Seen) -> "NDArray[np.uint8]":
    """The end of keys: uint8 of shape [n, SEEN_BYTES]."""
    return np.ascontiguousarray(seen.astype("<u8")).view(np.uint8).reshape(-1, 8)[:, :SEEN_BYTES]


@dataclass(frozen=True, slots=True)
class Expected:
    """What the values of a catalog's rows would be made of now, in the order of rows: of each, one for each cell."""

    at: NDArray[np.int64]
    ends: NDArray[np.uint8]

    @classmethod
    def of(cls, catalog: Catalog, shows: Shows, resolution: int | None) -> "Expected":
        """Without pixels a row has one value, of its whole pictures."""
        by_row = seen_by_row(catalog, captions=shows.captions)
        if not shows.pixels:
            return cls(np.arange(len(catalog) + 1), as_bytes(by_row))
        columns = pixels_of(catalog, resolution)
        ats = [np.asarray(column.at, np.int64) for column in columns] or [np.zeros(len(catalog) + 1, np.int64)]
        cells = [with_rows(by_row, seen_by_cell(catalog, column), column.at) for column in columns] or [np.zeros(0, np.uint64)]
        if len(columns) < 2:
            return cls(ats[0], as_bytes(cells[0]))
        order = np.argsort(np.concatenate([np.repeat(np.arange(len(catalog)), np.diff(at)) for at in ats]), kind="stable")
        return cls(np.sum(ats, axis=0), as_bytes(np.concatenate(cells)[order]))

    def differ(self, rows: NDArray[np.int64], within: NDArray[np.int64], keys: NDArray[np.uint8]) -> NDArray[np.bool_]:
        """Which keys, uint8 [n, 16], are not of what they would be made of now: those of these rows, each of a variant `within` it."""
        counts = np.diff(self.at)[rows]
        known = counts > 0
        index = np.where(known, self.at[rows] + np.minimum(within, np.maximum(counts, 1) - 1), 0)
        ends = self.ends[index] if len(self.ends) else np.zeros((len(rows), SEEN_BYTES), np.uint8)
        return ~known | (ends != keys[:, KEY_BYTES - SEEN_BYTES :]).any(axis=1)


def _mixed(seen: Seen, more: "Seen | np.uint64") -> Seen:
    found = (seen * _ODD) ^ more
    found ^= found >> np.uint64(32)
    found *= _OTHER
    return found ^ (found >> np.uint64(29))


def _number_of(text: str | bytes) -> np.uint64:
    return np.uint64(int.from_bytes(digest_parts("cachestore-made-of", text)[:8], "little"))


def _inputs(column: KeyColumn) -> Seen:
    raw = np.frombuffer(run_of(column.inputs), np.uint8).reshape(-1, INPUT_BYTES)[:, :8]
    return np.ascontiguousarray(raw).view("<u8").reshape(-1).astype(np.uint64)


def _within(at: Sequence[int]) -> NDArray[np.int64]:
    """The number of each cell in its row."""
    starts = np.asarray(at, np.int64)
    return np.arange(int(starts[-1])) - starts[:-1].repeat(np.diff(starts))


def _sums(cells: Seen, at: Sequence[int]) -> Seen:
    """One number for the cells of each row, in their order."""
    starts = np.asarray(at, np.int64)
    totals = np.concatenate([np.zeros(1, np.uint64), np.cumsum(_mixed(cells, _within(at).astype(np.uint64)))])
    return totals[starts[1:]] - totals[starts[:-1]]


def _texts(texts: Sequence[str], usual: bytes) -> Seen:
    """A number for each text."""
    if not isinstance(texts, Strings):
        return np.array([crc32(text.encode("utf-8", "surrogatepass")) for text in texts], np.uint64)
    text, offsets = texts.as_columns()
    if usual and len(text) == len(usual) * len(texts):  # any other text of this column is longer
        return np.full(len(texts), crc32(usual), np.uint64)
    ends = offsets.tolist()
    slices = map(slice, ends, ends[1:])  # no step of this loop is one of Python's, as there may be millions
    return np.fromiter(map(crc32, map(bytes(text).__getitem__, slices)), np.uint64, len(texts))
