"""What a data set reads from the cells of a key column: complete rows, their buckets, keys and sizes.

Functions for a batch read only its own rows, as a column may be in a file (`open_catalog`).
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from cachestore.core.batch_shapes import FPS, NUM_FRAMES, SIZES
from cachestore.core.inputs import cells_each
from cachestore.core.keys import INPUT_BYTES, KEY_BYTES, Key
from cachestore.files.table import Digests, run_of
from cachestore.store.format.catalog import FACTS, Catalog, KeyColumn

Bucket = tuple[int, ...]
"""(width, height) of an encoded picture, (width, height, frames) of a video, () for a sample without either."""

_BUCKET_BITS: Final = 21
_BUCKET_SHIFTS: Final = np.arange(3, dtype=np.int64)[::-1] * _BUCKET_BITS
"""Shifts that pack width, height and frames into one number, which sorts as they do."""


def complete_rows(catalog: Catalog) -> NDArray[np.int64]:
    """The rows in which no cell of any column is empty."""
    complete = np.ones(len(catalog), dtype=np.bool_)
    for column in catalog.columns:
        is_empty = np.equal(_raw(column.keys, KEY_BYTES).max(axis=1, initial=0), 0)
        before = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(is_empty)])
        at = np.asarray(column.at, dtype=np.int64)
        complete &= before[at[1:]] == before[at[:-1]]
    return np.flatnonzero(complete)


def can_be_stacked(controls: KeyColumn, pictures: KeyColumn | None, rows: NDArray[np.int64]) -> bool:
    """Whether each row has exactly one control image, whose bucket follows from the row's own. These can be stacked."""
    each = cells_each(controls.options)
    if pictures is None or not len(rows) or (np.diff(np.asarray(controls.at, dtype=np.int64))[rows] != each).any():
        return False
    theirs, own = packed_buckets(controls)[rows], packed_buckets(pictures)[rows]
    pairs = np.unique(np.stack([own, theirs]), axis=1)
    return bool(theirs.all()) and pairs.shape[1] == len(np.unique(own))


def packed_buckets(column: KeyColumn) -> NDArray[np.int64]:
    """The bucket of each row's first cell as one number; 0 if it is unknown or there is no cell."""
    at = np.asarray(column.at, dtype=np.int64)
    packed = np.zeros(len(at) - 1, dtype=np.int64)
    known = np.asarray(column.facts.get("bucket", ()), dtype=np.int64).reshape(-1, 3)
    if len(known):
        has_cell = at[1:] > at[:-1]
        # Add one to each number, as -1 means unknown.
        packed[has_cell] = ((known + 1) << _BUCKET_SHIFTS).sum(axis=1)[at[:-1][has_cell]]
    return packed


def bucket_groups(column: KeyColumn, rows: NDArray[np.int64]) -> dict[Bucket, list[int]]:
    """By bucket, the positions in `rows`, which has at least one row."""
    packed = packed_buckets(column)[rows]
    order = np.argsort(packed, kind="stable")
    found, starts = np.unique(packed[order], return_index=True)
    numbers = (found[:, None] >> _BUCKET_SHIFTS) % (1 << _BUCKET_BITS) - 1
    buckets = (tuple(number for number in each if number >= 0) for each in numbers.tolist())
    return dict(zip(buckets, (group.tolist() for group in np.split(order, starts[1:])), strict=True))


def join_columns(pictures: KeyColumn, videos: KeyColumn) -> KeyColumn:
    """Merge the columns of pictures and videos into one that has the cells of both.

    A picture counts as a video of one frame with rate 0. If one column has no cells, the other is returned unchanged. Otherwise the cells
    are in memory, about 150 bytes each.
    """
    if not len(videos.keys):
        return pictures
    both = pictures, videos
    at = [np.asarray(column.at, np.int64) for column in both]
    rows = [np.repeat(np.arange(len(numbers) - 1), np.diff(numbers)) for numbers in at]
    order = np.argsort(np.concatenate(rows), kind="stable")
    facts = {name: [_fact(column, name) for column in both] for name in FACTS if any(name in column.facts for column in both)}
    if "bucket" in facts:
        has_bucket = facts["bucket"][0][:, 0] >= 0
        facts["bucket"][0][has_bucket, 2] = 1
    if "fps" in facts:
        facts["fps"][0][:] = (0, 1)
    keys = np.concatenate([_raw(column.keys, KEY_BYTES) for column in both])[order]
    inputs = np.concatenate([_raw(column.inputs, INPUT_BYTES) for column in both])[order]
    stats = np.concatenate([np.asarray(column.stats, np.int64).reshape(-1, 2) for column in both])[order]
    return replace(
        videos,
        at=_numbers(at[0] + at[1]),
        keys=Digests(memoryview(keys.tobytes()), KEY_BYTES),
        inputs=Digests(memoryview(inputs.tobytes()), INPUT_BYTES),
        stats=_numbers(stats),
        facts={name: _numbers(np.concatenate(values)[order]) for name, values in facts.items()},
    )


def _fact(column: KeyColumn, name: str) -> NDArray[np.int64]:
    known = column.facts.get(name)
    unknown = np.full((len(column.keys), FACTS[name]), -1, np.int64)
    return unknown if known is None else np.array(known, np.int64).reshape(unknown.shape)


def _numbers(values: NDArray[np.int64]) -> "memoryview[int]":
    return memoryview(values.tobytes()).cast("q")


def _raw(values: Sequence[bytes], width: int) -> NDArray[np.uint8]:
    return np.frombuffer(run_of(values), np.uint8).reshape(-1, width)


def cells_at(column: KeyColumn, rows: Sequence[int], variants: Sequence[int]) -> list[int]:
    """The index of one cell for each row: its first cell plus the row's variant. Skips rows without cells."""
    at = column.at
    return [at[row] + variant for row, variant in zip(rows, variants, strict=True) if at[row] < at[row + 1]]


def variant_keys(column: KeyColumn, rows: Sequence[int], variants: Sequence[int]) -> list[Key]:
    """The key of one cell for each row, as in `cells_at`. These cells must not be empty."""
    keys, cells = column.keys, cells_at(column, rows, variants)
    return keys.take(cells, Key) if isinstance(keys, Digests) else [Key(keys[cell]) for cell in cells]


def control_keys(column: KeyColumn, row: int, variant: int) -> list[Key]:
    """The keys of one variant of each control image of a row."""
    indices = range(column.at[row] + variant, column.at[row + 1], cells_each(column.options))
    return [Key(column.keys[index]) for index in indices]


def batch_sizes(column: KeyColumn, rows: Sequence[int], variants: Sequence[int]) -> dict[str, list[int]] | None:
    """By name, the (height, width) or (top, left) of the chosen cells, concatenated. None if only some are known."""
    sizes: dict[str, list[int]] = {}
    known = [(name, column.facts[fact], FACTS[fact]) for name, fact in SIZES.items() if fact in column.facts]
    cells = cells_at(column, rows, variants) if known else []
    for name, values, width in known:
        numbers = [number for cell in cells for number in (values[cell * width + 1], values[cell * width])]
        unknown = sum(number < 0 for number in numbers)
        if 0 < unknown < len(numbers):
            return None
        if not unknown:
            sizes[name] = numbers
    return sizes


def batch_clips(column: KeyColumn, rows: Sequence[int], variants: Sequence[int]) -> dict[str, torch.Tensor] | None:
    """Frames and rates of the chosen cells. Empty for a column without clips; None if only some are known."""
    if "fps" not in column.facts or "bucket" not in column.facts:
        return {}
    cells, buckets, rates = cells_at(column, rows, variants), column.facts["bucket"], column.facts["fps"]
    frames = [buckets[cell * FACTS["bucket"] + 2] for cell in cells]
    known = [(rates[cell * 2], rates[cell * 2 + 1]) for cell in cells]
    if min(frames, default=0) < 0 or min(known, default=(0, 1)) < (0, 1):
        return None
    return {
        NUM_FRAMES: torch.tensor(frames, dtype=torch.int64),
        FPS: torch.tensor([above / below for above, below in known], dtype=torch.float32),
    }


def sizes_of(column: KeyColumn, row: int, variant: int) -> dict[str, torch.Tensor]:
    """As `batch_sizes` and `batch_clips`, for one row and without the batch axis."""
    sizes, clips = batch_sizes(column, [row], [variant]) or {}, batch_clips(column, [row], [variant]) or {}
    return {name: torch.tensor(pair) for name, pair in sizes.items()} | {name: one[0] for name, one in clips.items()}
