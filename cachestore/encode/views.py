"""Which part of a picture a unit is made of: bucket, crop and side. Pure: what a request says, a picture's size and its digest.

A mask, and a control image whose crop is drawn, are cut as the picture they go with; two images of one shape are cut alike.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from cachestore.encode.buckets import Placement, Size, choose, placement
from cachestore.inputs import RANDOM
from cachestore.keys import Json, digest_parts

STEP = 64
"""Kohya's step between buckets, where a request gives none."""


@dataclass(frozen=True, slots=True)
class View:
    """A part of a picture, as large as its bucket once it is scaled, and which way round it stands."""

    size: Size
    """Of the whole picture, upright."""
    bucket: Size
    place: Placement
    is_flipped: bool
    """Whether what was cut out is mirrored, left to right."""
    variant: int | None
    """Number of the drawn crop; None where the centre was asked for."""

    @classmethod
    def centred(cls, size: Size, bucket: Size) -> "View":
        """What stands in the middle of a picture, as it is."""
        return cls(size, bucket, placement(size, bucket), is_flipped=False, variant=None)

    @property
    def is_centred(self) -> bool:
        """Whether it is what stands in the middle, drawn or not: then it has the key of the centre."""
        return self.place == placement(self.size, self.bucket)

    def transform(self) -> dict[str, Json]:
        """Its part of a key. The crop stands for seed and variant, so that equal crops have equal keys."""
        transform: dict[str, Json] = {"bucket": list(self.bucket), "crop": "center" if self.is_centred else list(self.place.crop)}
        return {**transform, "flip": True} if self.is_flipped else transform

    def facts(self) -> dict[str, Json]:
        """What a catalog keeps of it. Of a mirrored one the crop is told in the mirrored picture, as diffusers' SDXL script does."""
        left, top, right, bottom = self.place.crop
        if self.is_flipped:
            left, right = self.place.resized.width - right, self.place.resized.width - left
        facts: dict[str, Json] = {
            "size": list(self.size),
            "bucket": list(self.bucket),
            "resized": list(self.place.resized),
            "crop": [left, top, right, bottom],
        }
        facts |= {} if self.variant is None else {"variant": [self.variant]}
        return {**facts, "flip": [1]} if self.is_flipped else facts


def bucket_of(request: Mapping[str, Json], size: Size) -> Size:
    """The bucket that a request puts a picture of this size in. Raises BadInput where there is none."""
    return choose(size, int(request["resolution"]), int(request.get("step", STEP)), upscales=bool(request.get("upscale", True)))


def view_of(request: Mapping[str, Json], size: Size, digest: str) -> View:
    """What a request wants of a picture of this size. `digest` (of the picture it is placed with) decides a drawn crop."""
    bucket = bucket_of(request, size)
    variant = int(request["variant"]) if request.get("crop") == RANDOM else None
    at = None if variant is None else _draw(int(request["seed"]), digest, variant)
    return View(size, bucket, placement(size, bucket, at), bool(request.get("flip", False)), variant)


def _draw(seed: int, digest: str, variant: int) -> Fraction:
    """A share below 1 of what sticks out. It does not depend on the bucket: a variant shows the same part at every resolution."""
    drawn = digest_parts("cachestore-crop", str(seed), digest, str(variant))
    return Fraction(int.from_bytes(drawn[:8], "little"), 1 << 64)
