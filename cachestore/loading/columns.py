"""What a data set takes out of a catalog's columns: which rows are complete, their buckets, keys and sizes. Knows no tensors' values.

What is asked of a batch looks at its own rows alone, as a column may lie in a file (`open_catalog`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from cachestore.core.inputs import cells_each
from cachestore.core.keys import INPUT_BYTES, KEY_BYTES, Key
from cachestore.files.table import Digests, Strings, run_of
from cachestore.storage.catalog import FACTS, Catalog, KeyColumn

Bucket = tuple[int, ...]
"""(width, height) of a picture as it was encoded, (width, height, frames) of a video, () of a sample without either."""

NUM_FRAMES: Final = "num_frames"
FPS: Final = "fps"
"""Names in the batch, of data sets with videos."""

SIZES: Final[Mapping[str, str]] = {"original_size": "size", "crop_top_left": "crop", "target_size": "bucket"}
"""Names in the batch, and the catalog's facts whose first two numbers, turned round, they are."""

NO_EXTRAS: Final = "{}"
"""What stands in the catalog for a sample without columns of its own."""

_BUCKET_BITS: Final = 21
_BUCKET_SHIFTS: Final = np.arange(3, dtype=np.int64)[::-1] * _BUCKET_BITS
"""Width, height and frames in one number that sorts as they do."""


def complete_rows(catalog: Catalog) -> NDArray[np.int64]:
    """The rows in which no cell of any column is empty."""
    complete = np.ones(len(catalog), dtype=np.bool_)
    for column in catalog.columns:
        is_empty = np.equal(_raw(column.keys, KEY_BYTES).max(axis=1, initial=0), 0)
        before = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(is_empty)])
        at = np.asarray(column.at, dtype=np.int64)
        complete &= before[at[1:]] == before[at[:-1]]
    return np.flatnonzero(complete)


def is_one_a_bucket(controls: KeyColumn, pictures: KeyColumn | None, rows: NDArray[np.int64]) -> bool:
    """Whether each of these rows has exactly one control image, of a bucket that follows from the row's own: such ones can be stacked."""
    each = cells_each(controls.options)
    if pictures is None or not len(rows) or (np.diff(np.asarray(controls.at, dtype=np.int64))[rows] != each).any():
        return False
    theirs, own = packed_buckets(controls)[rows], packed_buckets(pictures)[rows]
    pairs = np.unique(np.stack([own, theirs]), axis=1)
    return bool(theirs.all()) and pairs.shape[1] == len(np.unique(own))


def packed_buckets(column: KeyColumn) -> NDArray[np.int64]:
    """The bucket of each row's first cell as one number; 0 where it is unknown or the row has no cell."""
    at = np.asarray(column.at, dtype=np.int64)
    packed = np.zeros(len(at) - 1, dtype=np.int64)
    known = np.asarray(column.facts.get("bucket", ()), dtype=np.int64).reshape(-1, 3)
    if len(known):
        has_cell = at[1:] > at[:-1]
        # One more than each number, as -1 stands for unknown.
        packed[has_cell] = ((known + 1) << _BUCKET_SHIFTS).sum(axis=1)[at[:-1][has_cell]]
    return packed


def bucket_groups(column: KeyColumn, rows: NDArray[np.int64]) -> dict[Bucket, list[int]]:
    """Which of these rows, at least one, counted from 0, are of each bucket."""
    packed = packed_buckets(column)[rows]
    order = np.argsort(packed, kind="stable")
    found, starts = np.unique(packed[order], return_index=True)
    numbers = (found[:, None] >> _BUCKET_SHIFTS) % (1 << _BUCKET_BITS) - 1
    buckets = (tuple(number for number in each if number >= 0) for each in numbers.tolist())
    return dict(zip(buckets, (group.tolist() for group in np.split(order, starts[1:])), strict=True))


def joined(pictures: KeyColumn, videos: KeyColumn) -> KeyColumn:
    """The columns of pictures and of videos as one, whose rows have the cells of either: what is trained on, whichever it is.

    A picture counts as a video of one frame, which has no rate (0). Where one of them has no cell at all it is the other one, as it is.
    Else its cells are in memory, about 150 bytes each.
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
    """A fact of each cell, to be written to; -1 where it is unknown."""
    known = column.facts.get(name)
    unknown = np.full((len(column.keys), FACTS[name]), -1, np.int64)
    return unknown if known is None else np.array(known, np.int64).reshape(unknown.shape)


def _numbers(values: NDArray[np.int64]) -> "memoryview[int]":
    return memoryview(values.tobytes()).cast("q")


def _raw(values: Sequence[bytes], width: int) -> NDArray[np.uint8]:
    return np.frombuffer(run_of(values), np.uint8).reshape(-1, width)


def has_extras(extras: Sequence[str]) -> bool:
    """Whether any sample has columns of its own."""
    if isinstance(extras, Strings):
        return extras.size_bytes > len(NO_EXTRAS) * len(extras)  # nothing else is as short
    return any(text != NO_EXTRAS for text in extras)


def cells_at(column: KeyColumn, rows: Sequence[int], views: Sequence[int]) -> list[int]:
    """The place of one cell of each of these rows, the first of its views or a later one, but for rows without one."""
    at = column.at
    return [at[row] + view for row, view in zip(rows, views, strict=True) if at[row] < at[row + 1]]


def view_keys(column: KeyColumn, rows: Sequence[int], views: Sequence[int]) -> list[Key]:
    """The key of one cell of each of these rows, which is not empty, but for rows without one."""
    keys, cells = column.keys, cells_at(column, rows, views)
    return keys.take(cells, Key) if isinstance(keys, Digests) else [Key(keys[cell]) for cell in cells]


def control_keys(column: KeyColumn, row: int, view: int) -> list[Key]:
    """The keys of this view of each of a row's control images."""
    places = range(column.at[row] + view, column.at[row + 1], cells_each(column.options))
    return [Key(column.keys[place]) for place in places]


def batch_sizes(column: KeyColumn, rows: Sequence[int], views: Sequence[int]) -> dict[str, list[int]] | None:
    """(height, width) or (top, left) of the chosen cell of each row, one pair after the other; None where only some are known."""
    sizes: dict[str, list[int]] = {}
    known = [(name, column.facts[fact], FACTS[fact]) for name, fact in SIZES.items() if fact in column.facts]
    cells = cells_at(column, rows, views) if known else []
    for name, values, width in known:
        numbers = [number for cell in cells for number in (values[cell * width + 1], values[cell * width])]
        unknown = sum(number < 0 for number in numbers)
        if 0 < unknown < len(numbers):
            return None
        if not unknown:
            sizes[name] = numbers
    return sizes


def batch_clips(column: KeyColumn, rows: Sequence[int], views: Sequence[int]) -> dict[str, torch.Tensor] | None:
    """The frames and rates of the chosen cell of each row; none of a column without clips, None where only some are known."""
    if "fps" not in column.facts or "bucket" not in column.facts:
        return {}
    cells, buckets, rates = cells_at(column, rows, views), column.facts["bucket"], column.facts["fps"]
    frames = [buckets[cell * FACTS["bucket"] + 2] for cell in cells]
    known = [(rates[cell * 2], rates[cell * 2 + 1]) for cell in cells]
    if min(frames, default=0) < 0 or min(known, default=(0, 1)) < (0, 1):
        return None
    return {
        NUM_FRAMES: torch.tensor(frames, dtype=torch.int64),
        FPS: torch.tensor([above / below for above, below in known], dtype=torch.float32),
    }


def sizes_of(column: KeyColumn, row: int, view: int) -> dict[str, torch.Tensor]:
    """As `batch_sizes` and `batch_clips` have them, of one row and without the axis of samples."""
    sizes, clips = batch_sizes(column, [row], [view]) or {}, batch_clips(column, [row], [view]) or {}
    return {name: torch.tensor(pair) for name, pair in sizes.items()} | {name: one[0] for name, one in clips.items()}
