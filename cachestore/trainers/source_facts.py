"""What a picture or video says of itself, and whether imported latents can be of it."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from cachestore.core.errors import EncodeFailed
from cachestore.core.inputs import WITHIN
from cachestore.core.keys import Json, digest_bytes, digest_opened
from cachestore.core.samples import VIDEO
from cachestore.core.words import plural
from cachestore.encode.batching.unit import Read
from cachestore.encode.pictures.buckets import CropBox, Size, crop_box
from cachestore.encode.pictures.clips import as_rate
from cachestore.encode.pictures.variants import Variant, within_of
from cachestore.trainers.matching import ClipFrames, FileLocation

if TYPE_CHECKING:
    from cachestore.encode.pictures.videos import Video

_ENCODE = "run `cachestore precompute` to encode"


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A picture or a video, by its header."""

    reference: str
    digest: str
    upright: tuple[int, int] | None = None
    """(width, height) in pixels; None without Pillow or PyAV, or if it is neither picture nor video."""
    stored: tuple[int, int] | None = None
    """Before it is turned according to its EXIF data."""
    is_video: bool = False
    video: "Video | None" = None

    @property
    def is_turned(self) -> bool:
        """Whether EXIF data turn the picture by a quarter."""
        return self.upright != self.stored

    def check_size(self, words: str, facts: Mapping[str, Json]) -> None:
        """Raise EncodeFailed if the file reports another size of the picture: it belongs to an earlier picture of this name.

        `words` begin the message, up to the size. Trainers take the size before or after they turn a picture upright.
        """
        if "size" not in facts or self.upright is None or tuple(facts["size"]) in (self.upright, self.stored):
            return
        (width, height), own = facts["size"], self.upright
        raise EncodeFailed(
            f"{words} {width} x {height} pixels, but it has {own[0]} x {own[1]}: the file may be of an earlier picture of this name;"
            f" {_ENCODE} this one"
        )

    def clip_facts(self, location: FileLocation, frames: int, fps: float | None) -> dict[str, Json]:
        """Return what a catalog records of a clip with so many frames; empty for a picture. Raises EncodeFailed if it cannot be of it."""
        if not self.is_video:
            if frames > 1:
                raise EncodeFailed(f"{location.path} holds latents of {frames} frames, but {self.reference!r} is a picture; {_ENCODE} it")
            return {}
        span = location.span or ClipFrames(0, frames)
        if span.frames != frames:
            raise EncodeFailed(
                f"{location.path} says that it is of {plural(span.frames, 'frame')}, but holds latents of {frames}; {_ENCODE} the video"
            )
        rate = None if fps is None else as_rate(fps)
        facts: dict[str, Json] = {"start": [span.start]}
        if self.video is None:
            return facts if rate is None else {**facts, "fps": [rate.numerator, rate.denominator]}
        there, last = self.video.timeline.count(rate), span.start + span.frames
        if last > there:
            raise EncodeFailed(
                f"{location.path} is of the frames {span.start} to {last - 1}, but the video has {there}: the file may be of an earlier"
                f" video of this name; {_ENCODE} this one"
            )
        shown = self.video.rate if rate is None else rate
        return {**facts, "fps": [shown.numerator, shown.denominator]}

    def with_crop(self, given: Mapping[str, Json]) -> dict[str, Json]:
        """Return facts for the catalog. If there is no crop among them, the picture is taken to cover its bucket, cut at the centre."""
        facts = dict(given)
        if "size" not in facts and self.upright is not None:
            facts["size"] = list(self.upright)
        if "size" in facts and not {"resized", "crop"} <= facts.keys():
            box = crop_box(Size(*facts["size"]), Size(*facts["bucket"][:2]))
            facts |= {"resized": list(box.resized), "crop": list(box.crop)}
        return facts

    def check_crop(self, request: Mapping[str, Json], facts: Mapping[str, Json], location: FileLocation) -> None:
        """Raise EncodeFailed if a sample has its own crop, unless the file reports that its latents were cut from that part."""
        if WITHIN not in request:
            return
        if self.upright is not None:
            within = within_of(request, Size(*self.upright))
            if within is None or ({"resized", "crop"} <= facts.keys() and _is_within(facts, within, Size(*self.upright))):
                return
        raise EncodeFailed(
            f"it has its own crop {list(request[WITHIN])}, but the latents in {location.path} are taken to be of the whole picture;"
            f" {_ENCODE} the crop"
        )


def read_source(request: Mapping[str, Json], read: Read) -> SourceFile:
    """Return what the file of a request says of itself. Raises OSError."""
    if VIDEO not in request:
        picture = read(reference := str(request["image"]))
        found = SourceFile(reference, digest_bytes(picture))
        try:
            from cachestore.encode.pictures import images

            return replace(found, upright=images.measure(picture), stored=images.measure_stored(picture))
        except (ImportError, EncodeFailed):
            return found
    with read.open(reference := str(request[VIDEO])) as file:
        found = SourceFile(reference, digest_opened(file), is_video=True)
        try:
            from cachestore.encode.pictures import videos

            video = videos.measure(file)
        except (ImportError, EncodeFailed):
            return found
    return replace(found, upright=tuple(video.size), stored=tuple(video.size), video=video)


def _is_within(facts: Mapping[str, Json], within: tuple[int, int, int, int], size: Size) -> bool:
    """Whether the reported crop is a variant of this part of a picture: scaled so that the part covers the bucket, and cut inside of it."""
    part, bucket = Size(within[2] - within[0], within[3] - within[1]), Size(*facts["bucket"])
    scaled = crop_box(part, bucket).resized
    whole = CropBox(scaled, (0, 0, scaled.width, scaled.height))
    all_of_it = Variant(size, bucket, whole, is_flipped=False, crop_number=None, within=within).facts()
    (left, top, right, bottom), (least, first, most, last) = facts["crop"], all_of_it["crop"]
    is_inside = least <= left and first <= top and right <= most and bottom <= last
    return is_inside and list(facts["resized"]) == all_of_it["resized"] and (right - left, bottom - top) == tuple(bucket)
