"""Which part of a picture a unit is made of: bucket, crop and side. Pure: what a request says, a picture's size and its digest.

A mask, and a control image whose crop is drawn, are cut as the picture they go with; two images of one shape are cut alike.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from cachestore.core.errors import EncodeFailed
from cachestore.core.inputs import RANDOM, STATED, WITHIN
from cachestore.core.keys import Json, digest_parts
from cachestore.encode.buckets import Placement, Size, choose, placement, rounded

Box = tuple[int, int, int, int]
"""(left, top, right, bottom) in pixels."""

STEP = 64
"""Kohya's step between buckets, where a request gives none."""


@dataclass(frozen=True, slots=True)
class View:
    """A part of a picture, as large as its bucket once it is scaled, and which way round it stands."""

    size: Size
    """Of the whole picture, upright."""
    bucket: Size
    place: Placement
    """Of the whole picture, or of its part that counts."""
    is_flipped: bool
    """Whether what was cut out is mirrored, left to right."""
    variant: int | None
    """Number of the drawn crop; None where the centre was asked for."""
    within: Box | None = None
    """The part of the picture that counts, which is cut out before anything else; None for all of it."""

    @classmethod
    def centred(cls, size: Size, bucket: Size) -> "View":
        """What stands in the middle of a picture, as it is."""
        return cls(size, bucket, placement(size, bucket), is_flipped=False, variant=None)

    @property
    def is_centred(self) -> bool:
        """Whether it is what stands in the middle, drawn or not: then it has the key of the centre."""
        return self.place == placement(_part(self.size, self.within), self.bucket)

    def transform(self) -> dict[str, Json]:
        """Its part of a key. The crop stands for seed and variant, so that equal crops have equal keys."""
        transform: dict[str, Json] = {"bucket": list(self.bucket), "crop": "center" if self.is_centred else list(self.place.crop)}
        transform |= {} if self.within is None else {WITHIN: list(self.within)}
        return {**transform, "flip": True} if self.is_flipped else transform

    def facts(self) -> dict[str, Json]:
        """What a catalog keeps of it. Of a mirrored one the crop is told in the mirrored picture, as diffusers' SDXL script does.

        Sizes and crop are of the whole picture also where a part of it counts: what was cut off is what the model should know of.
        """
        resized, (left, top, right, bottom) = self._in_whole()
        if self.is_flipped:
            left, right = resized.width - right, resized.width - left
        facts: dict[str, Json] = {"size": list(self.size), "bucket": list(self.bucket), "resized": list(resized)}
        facts |= {"crop": [left, top, right, bottom]}
        facts |= {} if self.variant is None else {"variant": [self.variant]}
        return {**facts, "flip": [1]} if self.is_flipped else facts

    def _in_whole(self) -> tuple[Size, Box]:
        """How large the whole picture is where its part is scaled as it was, and where the crop lies in it."""
        if self.within is None:
            return self.place.resized, self.place.crop
        part, scaled, crop = _part(self.size, self.within), self.place.resized, self.place.crop
        left, top = rounded(self.within[0] * scaled.width, part.width), rounded(self.within[1] * scaled.height, part.height)
        whole = Size(rounded(self.size.width * scaled.width, part.width), rounded(self.size.height * scaled.height, part.height))
        return whole, (left + crop[0], top + crop[1], left + crop[2], top + crop[3])


def _part(size: Size, within: Box | None) -> Size:
    return size if within is None else Size(within[2] - within[0], within[3] - within[1])


def within_of(request: Mapping[str, Json], size: Size) -> Box | None:
    """The part that a request takes; None for all of it. Raises EncodeFailed where it sticks out, or the source states another size."""
    stated = request.get(STATED)
    if stated is not None and tuple(stated) != tuple(size):
        raise EncodeFailed(
            f"the source says that the picture is {stated[0]} x {stated[1]}, but its file says {size.width} x {size.height} (upright)"
        )
    if WITHIN not in request:
        return None
    left, top, right, bottom = map(int, request[WITHIN])
    if not (0 <= left < right <= size.width and 0 <= top < bottom <= size.height):
        raise EncodeFailed(f"the crop {list(request[WITHIN])} exceeds the picture, which is {size.width} x {size.height} (upright)")
    return None if (left, top, right, bottom) == (0, 0, *size) else (left, top, right, bottom)


def bucket_of(request: Mapping[str, Json], size: Size) -> Size:
    """The bucket that a request puts a picture of this size in. Raises BadInput where there is none, and as `within_of`."""
    return _bucket_of(request, _part(size, within_of(request, size)))


def _bucket_of(request: Mapping[str, Json], size: Size) -> Size:
    return choose(size, int(request["resolution"]), int(request.get("step", STEP)), upscales=bool(request.get("upscale", True)))


def view_of(request: Mapping[str, Json], size: Size, digest: str) -> View:
    """The view that is asked for; `digest` decides a drawn crop. Raises BadInput where there is no bucket, and as `within_of`."""
    within = within_of(request, size)
    part = _part(size, within)
    bucket = _bucket_of(request, part)
    variant = int(request["variant"]) if request.get("crop") == RANDOM else None
    at = None if variant is None else _draw(int(request["seed"]), digest, variant)
    return View(size, bucket, placement(part, bucket, at), bool(request.get("flip", False)), variant, within)


def _draw(seed: int, digest: str, variant: int) -> Fraction:
    """A share below 1 of what sticks out. It does not depend on the bucket: a variant shows the same part at every resolution."""
    drawn = digest_parts("cachestore-crop", str(seed), digest, str(variant))
    return Fraction(int.from_bytes(drawn[:8], "little"), 1 << 64)
