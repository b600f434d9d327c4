"""What a catalog says of its pictures and clips: how many are in each bucket, and what was cut off each. Needs no torch."""

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import Final, NamedTuple

from cachestore.core.inputs import is_trained_on
from cachestore.core.keys import Json
from cachestore.store.format.catalog import Catalog, Cell, KeyColumn

_SIDES: Final = 2


class BucketCounts(NamedTuple):
    """The samples of one resolution in each bucket."""

    resolution: Json
    """None if the catalog does not say."""
    column: KeyColumn
    """The first of its columns."""
    samples: Counter[str]
    """By `<width>x<height>`, for videos also `x<frames>`; empty for an unknown one."""


def count_buckets(catalog: Catalog, rows: Sequence[int]) -> list[BucketCounts]:
    """Count the buckets of these rows for each resolution, by the first variant of the picture or video that is trained on."""
    columns = [column for column in catalog.columns if "bucket" in column.facts]
    trained = [one for one in columns if is_trained_on(one.role, one.options)] or [one for one in columns if one.role == columns[0].role]
    by_resolution: dict[Json, list[KeyColumn]] = {}
    for column in trained:
        by_resolution.setdefault(column.options.get("resolution"), []).append(column)
    counts: list[BucketCounts] = []
    for resolution, those in by_resolution.items():  # the cells of a row are all in one of the columns
        firsts = (column.cell(column.at[row]) for column in those for row in rows if column.count(row))
        samples = Counter("x".join(map(str, cell.facts.get("bucket", ()))) for cell in firsts)
        counts.append(BucketCounts(resolution, those[0], samples))
    return counts


def is_flipped(cell: Cell) -> bool:
    """Whether what was encoded is mirrored."""
    return cell.facts.get("flip") == (1,)


def crop_of(cell: Cell) -> tuple[tuple[int, int], tuple[int, int, int, int]] | None:
    """Return the size to which the file's picture was resized, and the part of it that was encoded (left, top, right, bottom).

    None if the catalog does not say. Raises ValueError for nonsense.
    """
    resized, crop = cell.facts.get("resized", ()), cell.facts.get("crop", ())
    if len(resized) != _SIDES or min(resized) < 1 or len(crop) != 2 * _SIDES:
        return None
    left, top, right, bottom = crop
    if is_flipped(cell):  # such a crop is one of the mirrored picture
        left, right = resized[0] - right, resized[0] - left
    if not (0 <= left < right and 0 <= top < bottom):
        raise ValueError(f"the catalog's crop {list(crop)} is no part of a picture")
    return (resized[0], resized[1]), (left, top, right, bottom)


class Cut(NamedTuple):
    """What scaling and cropping made of a picture; None for what the catalog does not say."""

    scale: float | None
    """How many times longer its sides became."""
    fraction: float | None
    """How much of its area was cut off, 0 to 1."""
    sides: tuple[str, ...]
    """Where it was cut off: `left`, `right`, `top`, `bottom`."""


def cut_of(cell: Cell) -> Cut:
    """Return what was cut off a picture or clip when it was encoded."""
    crop, size = None, cell.facts.get("size", ())
    with suppress(ValueError):  # nonsense, which also keeps the original from being shown
        crop = crop_of(cell)
    if crop is None:
        return Cut(None, None, ())
    (width, height), (left, top, right, bottom) = crop
    scale = max(width / size[0], height / size[1]) if len(size) == _SIDES and min(size) > 0 else None
    over = {"left": left, "right": width - right, "top": top, "bottom": height - bottom}
    kept = (min(right, width) - left) * (min(bottom, height) - top) / (width * height)
    return Cut(scale, max(0.0, 1 - kept), tuple(side for side, pixels in over.items() if pixels > 0))
