"""Aspect buckets by kohya's convention, and where a picture lands in one. Pure geometry: no picture is opened here.

A bucket is the size a picture is encoded at. Every bucket of a resolution R has sides that are multiples of the step and an area of
at most R², so that one batch size suits them all. A picture goes to the bucket whose aspect ratio (width / height) is nearest to its
own, is scaled until it covers the bucket, and loses what sticks out: the same amount on both sides, or as a crop is drawn.
"""

from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import isqrt
from typing import NamedTuple

from cachestore.core.errors import BadInput

SHORTEST_SIDE = 256
"""Kohya's least side of a bucket."""


class Size(NamedTuple):
    """Width and height in pixels. Also names a bucket."""

    width: int
    height: int


@dataclass(frozen=True, slots=True)
class Placement:
    """How a picture fills a bucket: scale it to `resized`, then cut out `crop`."""

    resized: Size
    crop: tuple[int, int, int, int]
    """(left, top, right, bottom) in pixels of the resized picture; as large as the bucket."""


@lru_cache(maxsize=64)
def bucket_list(resolution: int, step: int) -> tuple[Size, ...]:
    """All buckets of a resolution, sorted by width, then height; at least one, the square.

    Sides run from 256, or from half the resolution where that is less, to twice the resolution: kohya's defaults at 512 (256 to 1024)
    and its usual settings at 1024 (256 to 2048), and every resolution has buckets. Raises BadInput when no bucket fits.
    """
    if step < 1 or resolution < step:
        raise BadInput(
            f"resolution {resolution} with bucket step {step} gives no bucket: the step must be at least 1, and the resolution at"
            " least the step"
        )
    area = resolution * resolution
    shortest = max(step, min(SHORTEST_SIDE, resolution // 2) // step * step)
    longest = 2 * resolution // step * step
    square = resolution // step * step
    found = {Size(square, square)}
    for width in range(shortest, longest + 1, step):
        height = min(longest, area // width // step * step)
        if height >= shortest:
            found |= {Size(width, height), Size(height, width)}
    return tuple(sorted(found))


def aspect_error(size: Size, bucket: Size) -> Fraction:
    """How far a bucket's aspect ratio is from a picture's: exact, so that ties are ties on every machine."""
    return abs(Fraction(size.width, size.height) - Fraction(bucket.width, bucket.height))


def choose(size: Size, resolution: int, step: int, *, upscales: bool = True) -> Size:
    """The bucket for a picture of this size: one of exactly its size, else the nearest aspect ratio.

    Of equally near buckets the larger wins, then the narrower. Small pictures are scaled up; without `upscales` one that would be goes
    to a bucket of its own sides, rounded down to the step, as by kohya's `bucket_no_upscale`. A side shorter than the step is still
    scaled up to it.
    """
    buckets = bucket_list(resolution, step)
    if size in buckets:
        return size
    bucket = min(buckets, key=lambda bucket: (aspect_error(size, bucket), -bucket.width * bucket.height, bucket.width))
    if upscales or (bucket.width <= size.width and bucket.height <= size.height):
        return bucket
    return _without_upscaling(size, resolution * resolution, step)


def _without_upscaling(size: Size, area: int, step: int) -> Size:
    """The largest bucket inside a picture, which is first shrunk to the area where it is larger: such as one of 3000 x 300 pixels."""
    width, height = size
    if width * height > area:
        width, height = isqrt(area * size.width // size.height), isqrt(area * size.height // size.width)
    return Size(max(step, width // step * step), max(step, height // step * step))


def placement(size: Size, bucket: Size, at: Fraction | None = None) -> Placement:
    """Scale to cover, and crop the centre; or at a share of what sticks out, from 0 (at the left or top) to below 1.

    The side that fits exactly is exact; the other is rounded to the nearest pixel.
    """
    if size.width * bucket.height > size.height * bucket.width:
        resized = Size(rounded(size.width * bucket.height, size.height), bucket.height)
    else:
        resized = Size(bucket.width, rounded(size.height * bucket.width, size.width))
    left, top = _share(resized.width - bucket.width, at), _share(resized.height - bucket.height, at)
    return Placement(resized, (left, top, left + bucket.width, top + bucket.height))


def _share(excess: int, at: Fraction | None) -> int:
    """How much is lost before the crop: each number up to the excess has an equal part of the shares below 1."""
    return excess // 2 if at is None else int((excess + 1) * at)


def rounded(numerator: int, denominator: int) -> int:
    """A quotient of numbers from 0 on, to the nearest whole one; a half upwards."""
    return (2 * numerator + denominator) // (2 * denominator)
