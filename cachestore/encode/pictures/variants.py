"""Choose the variant of a picture that a unit encodes: bucket, crop and mirroring. It follows from request, size and digest alone.

A mask, and a control image whose crop is drawn, are cropped as the picture they belong to. Two images of one shape are cropped alike.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction

from cachestore.core.errors import EncodeFailed
from cachestore.core.inputs import AS_TRAINER, BUCKETS, OWN, PIXELS, RANDOM, STATED, WITHIN
from cachestore.core.keys import Json, digest_parts
from cachestore.encode.pictures.bucket_rules import RULES, BucketSettings, PixelReading, fit_box, rule_named
from cachestore.encode.pictures.buckets import CropBox, Size, crop_box, rounded

Box = tuple[int, int, int, int]
"""(left, top, right, bottom) in pixels."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A variant of a picture: the part that is scaled to the bucket and encoded, plain or mirrored."""

    size: Size
    """The size of the whole picture, upright."""
    bucket: Size
    box: CropBox
    """How the picture, or its part `within`, is scaled and cropped."""
    is_flipped: bool
    crop_number: int | None
    """The number of the drawn crop; None if it was not drawn."""
    within: Box | None = None
    """The part of the picture that is used; it is cut out first. None for the whole picture."""

    @classmethod
    def centred(cls, size: Size, bucket: Size) -> "Variant":
        """Return the variant with the crop at the centre, not mirrored."""
        return cls(size, bucket, crop_box(size, bucket), is_flipped=False, crop_number=None)

    @property
    def is_centred(self) -> bool:
        """Whether the crop is at the centre, drawn or not. Both have the same key."""
        return self.box == self._usual_box

    @property
    def _usual_box(self) -> CropBox:
        """How the picture would fill its bucket by this project's own rule."""
        return crop_box(_part(self.size, self.within), self.bucket)

    def transform(self) -> dict[str, Json]:
        """Return the variant's part of a key. It has what is done to the picture, not by which rule, so equal crops have equal keys."""
        transform: dict[str, Json] = {"bucket": list(self.bucket), "crop": "center" if self.is_centred else list(self.box.crop)}
        transform |= {} if self.box.resized == self._usual_box.resized else {"resized": list(self.box.resized)}
        transform |= {} if self.within is None else {WITHIN: list(self.within)}
        return {**transform, "flip": True} if self.is_flipped else transform

    def facts(self) -> dict[str, Json]:
        """Return the facts that a catalog records. A mirrored crop is reported in the mirrored picture, as in diffusers' SDXL script.

        Sizes and crop are those of the whole picture even if only a part is used, as the model is to know what was cut off.
        """
        resized, (left, top, right, bottom) = self._in_whole()
        if self.is_flipped:
            left, right = resized.width - right, resized.width - left
        facts: dict[str, Json] = {"size": list(self.size), "bucket": list(self.bucket), "resized": list(resized)}
        facts |= {"crop": [left, top, right, bottom]}
        facts |= {} if self.crop_number is None else {"variant": [self.crop_number]}
        return {**facts, "flip": [1]} if self.is_flipped else facts

    def _in_whole(self) -> tuple[Size, Box]:
        """Return the size of the whole picture, scaled like its part `within`, and the crop box in it."""
        if self.within is None:
            return self.box.resized, self.box.crop
        part, scaled, crop = _part(self.size, self.within), self.box.resized, self.box.crop
        left, top = rounded(self.within[0] * scaled.width, part.width), rounded(self.within[1] * scaled.height, part.height)
        whole = Size(rounded(self.size.width * scaled.width, part.width), rounded(self.size.height * scaled.height, part.height))
        return whole, (left + crop[0], top + crop[1], left + crop[2], top + crop[3])


def _part(size: Size, within: Box | None) -> Size:
    return size if within is None else Size(within[2] - within[0], within[3] - within[1])


def within_of(request: Mapping[str, Json], size: Size) -> Box | None:
    """Return the part that a request uses; None for all.

    Raises EncodeFailed if it exceeds the picture, or the source states another size.
    """
    stated = request.get(STATED)
    if stated is not None and tuple(stated) != tuple(size):
        raise EncodeFailed(
            f"the source says that the picture is {stated[0]} x {stated[1]}, but its file says {size.width} x {size.height} (upright):"
            " correct `size` in the manifest, or leave it out"
        )
    if WITHIN not in request:
        return None
    left, top, right, bottom = map(int, request[WITHIN])
    if not (0 <= left < right <= size.width and 0 <= top < bottom <= size.height):
        raise EncodeFailed(
            f"the crop {list(request[WITHIN])} exceeds the picture, which is {size.width} x {size.height} (upright): correct"
            " `crop` in the manifest"
        )
    return None if (left, top, right, bottom) == (0, 0, *size) else (left, top, right, bottom)


@dataclass(frozen=True, slots=True)
class Fit:
    """How a picture, or the part of it that is used, fits its bucket."""

    size: Size
    bucket: Size
    resized: Size

    @property
    def kept(self) -> float:
        """The share of its area that the crop keeps, 0 to 1."""
        return self.bucket.width * self.bucket.height / (self.resized.width * self.resized.height)

    @property
    def scale(self) -> float:
        """How many times longer its sides become; below 1 it is shrunk."""
        return max(self.resized.width / self.size.width, self.resized.height / self.size.height)


def fit_of(request: Mapping[str, Json], size: Size) -> Fit:
    """Return how a picture of this size fits the bucket that a request gives it. Raises as `fit_box` and `within_of`."""
    part = _part(size, within_of(request, size))
    bucket, box = _fitted(request, part)
    return Fit(part, bucket, box.resized)


def _fitted(request: Mapping[str, Json], size: Size, at: Fraction | None = None) -> tuple[Size, CropBox]:
    rule = rule_named(str(request.get(BUCKETS, OWN)))
    return fit_box(rule, size, BucketSettings.of(request), at, is_flipped=bool(request.get("flip", False)))


def reading_of(request: Mapping[str, Json]) -> PixelReading | None:
    """Return how a request's pictures are read; None for this project's own way."""
    return RULES[rule_named(str(request[BUCKETS]))].reading if request.get(PIXELS) == AS_TRAINER else None


def variant_of(request: Mapping[str, Json], size: Size, digest: str) -> Variant:
    """Return the variant that is asked for. A drawn crop depends on `digest`. Raises as `fit_box` and `within_of`."""
    within = within_of(request, size)
    part = _part(size, within)
    crop_number, at = None, None
    if request.get("crop") == RANDOM:  # drawn in [0, 1), whatever the bucket: a variant shows the same part at every resolution
        crop_number = int(request["variant"])
        drawn = digest_parts("cachestore-crop", str(int(request["seed"])), digest, str(crop_number))
        at = Fraction(int.from_bytes(drawn[:8], "little"), 1 << 64)
    bucket, box = _fitted(request, part, at)
    return Variant(size, bucket, box, bool(request.get("flip", False)), crop_number, within)


def same_part(size: Size, variant: Variant) -> Variant:
    """Return the variant of a picture of this size that fills the bucket of `variant` and shows the same part.

    If the two shapes differ, it is scaled to cover the bucket, and cut at the same place: at the centre, or in proportion.
    """
    resized, crop = variant.box.resized, variant.box.crop
    over = max(resized.width - variant.bucket.width, 0), max(resized.height - variant.bucket.height, 0)
    at = next((Fraction(crop[side], over[side] + 1) for side in (0, 1) if over[side]), None)
    own = Variant.centred(size, variant.bucket)
    box = own.box if variant.is_centred or at is None else crop_box(size, variant.bucket, at)
    box = variant.box if size == variant.size and variant.within is None else box
    return replace(own, box=box, is_flipped=variant.is_flipped, crop_number=variant.crop_number)
