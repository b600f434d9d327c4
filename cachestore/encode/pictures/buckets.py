"""Aspect-ratio buckets as kohya's scripts make them, and how a picture is fitted into one. Opens no picture.

A bucket is the size at which a picture is encoded. Every bucket of a resolution R has sides that are multiples of the step, and an area
of at most R², so that one batch size suits them all. A picture goes to the bucket with the nearest aspect ratio (width / height). It is
scaled until it covers the bucket, and then cropped: at the centre, or at a drawn position.
"""

from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import isqrt
from typing import NamedTuple

from cachestore.core.errors import BadInput
from cachestore.core.spelling import option

SHORTEST_SIDE = 256
"""The shortest side of a bucket in pixels, if nothing else is given."""


class Size(NamedTuple):
    """Width and height in pixels, of a picture or a bucket."""

    width: int
    height: int


@dataclass(frozen=True, slots=True)
class CropBox:
    """How a picture fills a bucket: scale it to `resized`, then cut out `crop`."""

    resized: Size
    crop: tuple[int, int, int, int]
    """(left, top, right, bottom) in pixels of the resized picture; as large as the bucket."""


@lru_cache(maxsize=64)
def bucket_list(resolution: int, step: int, shortest: int | None = None, longest: int | None = None) -> tuple[Size, ...]:
    """Return all buckets of a resolution, sorted by width, then height. The square is always among them.

    Sides go from `shortest`, rounded down to the step, to `longest`, rounded up to it. If they are not given, they go from 256, or from
    half the resolution if that is less, to twice the resolution. Raises BadInput if the step is below 1 or above the resolution, or the
    resolution outside these limits.
    """
    if step < 1 or resolution < step:
        raise BadInput(
            f"resolution {resolution} with bucket step {step} gives no bucket: the step must be at least 1, and the resolution at"
            " least the step",
            option="resolution",
        )
    area = resolution * resolution
    least = max(step, (min(SHORTEST_SIDE, resolution // 2) if shortest is None else shortest) // step * step)
    most = 2 * resolution // step * step if longest is None else -(-longest // step) * step
    if (shortest is not None and resolution < least) or (longest is not None and resolution > most):
        raise BadInput(
            f"resolution {resolution} is not between the shortest and the longest side of its buckets, {least} and {most} pixels: set these"
            f" by {option('bucket_min')} and {option('bucket_max')}",
            option="resolution",
        )
    square = resolution // step * step
    found = {Size(square, square)}
    for width in range(least, most + 1, step):
        height = min(most, area // width // step * step)
        if height >= least:
            found |= {Size(width, height), Size(height, width)}
    return tuple(sorted(found))


def aspect_error(size: Size, bucket: Size) -> Fraction:
    """Return how far a bucket's aspect ratio is from a picture's, as an exact number, so that every machine finds the same ties."""
    return abs(Fraction(size.width, size.height) - Fraction(bucket.width, bucket.height))


def choose(
    size: Size, resolution: int, step: int, *, upscales: bool = True, shortest: int | None = None, longest: int | None = None
) -> Size:
    """Return the bucket for a picture of this size: the bucket of exactly this size, else the one with the nearest aspect ratio.

    If several are equally near, the larger wins, then the narrower. Small pictures are scaled up. If `upscales` is false, a picture that
    would be scaled up gets a bucket of its own sides, rounded down to the step, as kohya's `bucket_no_upscale` does it. A side that is
    shorter than the step is still scaled up to the step.
    """
    buckets = bucket_list(resolution, step, shortest, longest)
    if size in buckets:
        return size
    bucket = min(buckets, key=lambda bucket: (aspect_error(size, bucket), -bucket.width * bucket.height, bucket.width))
    if upscales or (bucket.width <= size.width and bucket.height <= size.height):
        return bucket
    (width, height), area = size, resolution * resolution
    if width * height > area:  # such as 3000 x 300: it is first shrunk to the area
        width, height = isqrt(area * size.width // size.height), isqrt(area * size.height // size.width)
    return Size(max(step, width // step * step), max(step, height // step * step))


def crop_box(size: Size, bucket: Size, at: Fraction | None = None) -> CropBox:
    """Return how a picture is scaled to cover a bucket, and its crop box. One scaled side equals the bucket's; the other is rounded.

    `at` says where to crop: 0 is the left or top edge, just below 1 the right or bottom edge, None the centre.
    """
    if size.width * bucket.height > size.height * bucket.width:
        resized = Size(rounded(size.width * bucket.height, size.height), bucket.height)
    else:
        resized = Size(bucket.width, rounded(size.height * bucket.width, size.width))
    left, top = offset(resized.width - bucket.width, at), offset(resized.height - bucket.height, at)
    return CropBox(resized, (left, top, left + bucket.width, top + bucket.height))


def offset(excess: int, at: Fraction | None) -> int:
    """Return how many pixels are cut off at the left or top. If `at` is uniform in [0, 1), so are the numbers 0 to `excess`."""
    return excess // 2 if at is None else int((excess + 1) * at)


def rounded(numerator: int, denominator: int) -> int:
    """Return the quotient of two non-negative numbers, rounded to the nearest integer; halves are rounded up."""
    return (2 * numerator + denominator) // (2 * denominator)
