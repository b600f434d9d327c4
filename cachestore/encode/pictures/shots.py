"""Pictures and clips that are encoded: found by digests, headers and packets, cut to their bucket, and decoded when they are asked to.

`read_input` reads what is encoded as it is; `kinds` puts the conditions of a model together from several files.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from cachestore.core.errors import EncodeFailed
from cachestore.core.inputs import IMAGES, LIKE, digests_of, is_own_mask, references_of
from cachestore.core.keys import Json, digest_bytes, digest_opened
from cachestore.core.samples import IMAGE, MASK, VIDEO, role_of
from cachestore.core.spelling import option
from cachestore.core.words import plural
from cachestore.encode.batching.unit import Read
from cachestore.encode.families.resamplers import DEFAULT, RESAMPLERS, Resample
from cachestore.encode.pictures import animations, images
from cachestore.encode.pictures.bucket_rules import PixelReading
from cachestore.encode.pictures.buckets import CropBox, Size
from cachestore.encode.pictures.clips import Clip, Shape, as_rate, clip_of
from cachestore.encode.pictures.levels import read_alpha, read_levels
from cachestore.encode.pictures.resizing import Picture, fit, mirror
from cachestore.encode.pictures.variants import Variant, reading_of, same_part, variant_of

if TYPE_CHECKING:
    from PIL import Image

    from cachestore.encode.pictures import video_masks

Pixels = np.ndarray[Any, np.dtype[np.uint8]]
HEAD_BYTES: Final = 200
"""How many bytes `is_video` needs."""
_PICTURE_BRANDS: Final = (b"avif", b"avis", b"heic", b"heix", b"heim", b"heis", b"hevc", b"mif1", b"msf1")
_VIDEO_HEADS: Final = (
    b"\x1aE\xdf\xa3",  # Matroska, WebM
    b"FLV",
    b"OggS",
    b"DKIF",
    b"\x30\x26\xb2\x75\x8e\x66\xcf\x11",  # ASF, WMV
    b"\0\0\1\xba",  # MPEG program stream
    b"\0\0\1\xb3",  # MPEG-1 and 2 alone
)
_WHOLE_FRAME: Final = "pyav-swscale-601/1"
"""Names how a frame of a video becomes a whole picture."""


class Shot(Protocol):
    """What is encoded, not yet decoded."""

    @property
    def bucket(self) -> Size | Shape:
        """The size in which it is encoded."""
        ...

    def pixels(self) -> Pixels:
        """Decode, scale and crop: uint8 [height, width, 3 or 4], for videos [frames, height, width, 3 or 4]."""
        ...


ShotT_co = TypeVar("ShotT_co", bound=Shot, covariant=True)


@dataclass(frozen=True, slots=True)
class Examined(Generic[ShotT_co]):
    """What is known of a request before anything is decoded."""

    shot: ShotT_co
    inputs: Mapping[str, str]
    """SHA-256 (hex) of each file by role, as `digests_of`."""
    keyed: Mapping[str, str]
    """The digests in the key: of the files whose pixels are encoded."""
    transform: Mapping[str, Json]
    """The key's part for bucket, crop and flip."""
    facts: Mapping[str, Json]


class Greys(NamedTuple):
    """The levels of a mask, cut and scaled."""

    pixels: Pixels
    """uint8 [frames, height, width]."""
    has_colours: bool
    """Whether the mask is the luminance of colours (`levels`)."""


@dataclass(frozen=True, slots=True)
class Still:
    """A picture."""

    data: bytes
    variant: Variant
    resample: Resample = DEFAULT
    """How it is resized. A mask is always shrunk to the mean of the area that each pixel covers."""
    reading: PixelReading | None = None
    """How the picture is read, if as by a trainer."""
    is_own_alpha: bool = False
    """Of a mask: whether it is the alpha of the picture that it belongs to."""

    @property
    def bucket(self) -> Size:
        """As `Shot.bucket`."""
        return self.variant.bucket

    def pixels(self) -> Pixels:
        """As `Shot.pixels`."""
        picture = images.decode_picture(self.data, self.reading)
        picture = picture if self.variant.within is None else images.cut_out(picture, self.variant.within)
        pixels = np.ascontiguousarray(fit(picture, self.variant.bucket, self.variant.box, self.resample)[..., :3])
        return mirror(pixels) if self.variant.is_flipped else pixels

    def greys(self, size: Size) -> Greys:
        """Decode a mask, crop it and shrink it to this size: [1, height, width], each pixel the mean of the area that it covers."""
        within = None if self.variant.within is None else (self.variant.within, self.variant.size)
        levels = (read_alpha if self.is_own_alpha else read_levels)(self.data)
        shrunk = images.fit_mask(levels.grey, size, self.variant.box, within)
        return Greys(np.ascontiguousarray(shrunk[:, ::-1] if self.variant.is_flipped else shrunk)[None], levels.has_colours)

    def transform(self) -> dict[str, Json]:
        """Return a picture's part of a key."""
        return self.variant.transform() | ({} if self.reading is None else {"reading": self.reading.as_json()})


@dataclass(frozen=True, slots=True)
class Footage:
    """A clip, and how to read its video, whose bytes may be gigabytes."""

    read: Read
    reference: str
    clip: Clip
    times: tuple[int, ...]
    """When each frame of the clip is shown, in ticks of the file."""
    resample: Resample = DEFAULT
    """As of `Still`."""
    is_own_alpha: bool = False
    """Of a mask: whether it is the alpha of the video that it belongs to."""

    @property
    def bucket(self) -> Shape:
        """As `Shot.bucket`."""
        return self.clip.shape

    @property
    def variant(self) -> Variant:
        """The part of each frame."""
        return self.clip.variant

    def pixels(self) -> Pixels:
        """As `Shot.pixels`."""
        return self.frames(self.times)

    def frames(self, times: Sequence[int]) -> Pixels:
        """Decode the frames that are shown at these times."""
        from cachestore.encode.pictures import videos

        with self.read.open(self.reference) as file:
            pixels = videos.take(file, times, self.variant.bucket, self.variant.box, self.resample)
        return mirror(pixels) if self.variant.is_flipped else pixels

    def greys(self, size: Size) -> Greys:
        """As `Still.greys`, of each frame: [frames, height, width]."""
        return self._mask_frames(lambda picture: images.fit_mask(images.as_image(picture), size, self.variant.box))

    def levels(self) -> Pixels:
        """Return the levels of a mask at the size of the bucket, scaled as a picture: uint8 [frames, height, width]."""

        def scaled(picture: Picture) -> Pixels:
            rgb = picture if isinstance(picture, np.ndarray) else picture.convert("RGB")
            return fit(rgb, self.variant.bucket, self.variant.box, self.resample)[..., 0]

        return self._mask_frames(scaled).pixels

    def _mask_frames(self, shrink: "video_masks.Shrink") -> Greys:
        from cachestore.encode.pictures import video_masks

        with self.read.open(self.reference) as file:
            levels, has_colours = video_masks.take_masks(file, self.times, shrink, is_own_alpha=self.is_own_alpha)
        return Greys(np.ascontiguousarray(levels[..., ::-1]) if self.variant.is_flipped else levels, has_colours)


def mask_transform(mask: Still | Footage) -> dict[str, Json]:
    """Return what the key of a mask has besides its crop: a picture's own alpha has the digest of the picture."""
    return {"levels": "own-alpha"} if mask.is_own_alpha else {}


@dataclass(frozen=True, slots=True)
class Shown:
    """A whole picture for a text encoder, or the frame with which a clip of a video begins."""

    data: bytes
    """The bytes of a picture; none of a video."""
    digest: str
    read: Read
    reference: str
    rate: Fraction | None

    def transform(self) -> dict[str, Json]:
        """Return what the key of a frame has besides the digest of its video; nothing for a picture."""
        return {} if self.data else {"start": 0, "fps": None if self.rate is None else str(self.rate), "pixels": _WHOLE_FRAME}

    def picture(self) -> "Image.Image":
        """Decode it."""
        if self.data:
            return images.decode(self.data)
        from cachestore.encode.pictures import videos

        with self.read.open(self.reference) as file:
            video = videos.measure(file)
            box = CropBox(video.size, (0, 0, video.size.width, video.size.height))
            return images.as_image(videos.take(file, video.timeline.take(self.rate, 0, 1), video.size, box, DEFAULT)[0])


def read_shown(reference: str, read: Read, fps: float | None = None) -> Shown:
    """Read what a text encoder is shown. `fps` is the rate of a video's clip, if it is not the file's own."""
    # without a rate, the first frame of an animation is that of the picture
    data, digest = read_content(reference, read, may_be_animated=fps is not None)
    return Shown(data, digest, read, reference, None if fps is None else as_rate(fps))


def read_input(request: Mapping[str, Json], read: Read, resample: Resample) -> Examined[Still | Footage]:
    """Read a picture or video that is encoded as it is. Raises EncodeFailed if it is neither."""
    if VIDEO in request:
        return read_clip(request, read, resample)
    role, data = str(request.get("role", IMAGE)), read(str(request["image"]))
    if is_video(data):
        raise EncodeFailed(f"the {role} is a video, which is only made into a condition of Wan VACE: give a picture")
    digest = digest_bytes(data)
    # a drawn crop depends on the digest of the picture that is followed
    inputs = digests_of(request, [digest, *([digest_bytes(read(str(request[LIKE])))] if LIKE in request else [])])
    reading = reading_of(request)
    size = images.measure(data, reading)
    variant = variant_of(request, size, inputs[role_of(role).follows or IMAGE] if LIKE in request else digest)
    shot = Still(data, variant, resample, reading)
    # the role is not part of the key: a picture that is both image and control is encoded once
    return Examined(shot, inputs, {IMAGE: digest}, shot.transform(), variant.facts())


def read_clip(request: Mapping[str, Json], read: Read, resample: Resample) -> Examined[Footage]:
    """Read the times of a video's frames, and choose those of a clip. Raises EncodeFailed."""
    from cachestore.encode.pictures import videos

    reference = str(request.get(VIDEO) or request[LIKE])
    with read.open(reference) as file:
        digest = digest_opened(file)
        video = videos.measure(file)
    frames, start, rate = clip_of(request, video.timeline)
    clip = Clip(variant_of(request, video.size, digest), frames, start, rate, video.rate)
    footage = Footage(read, reference, clip, tuple(video.timeline.take(rate, start, frames)), resample)
    transform = clip.transform() | {"pixels": RESAMPLERS[resample].videos}
    return Examined(footage, {VIDEO: digest}, {VIDEO: digest}, transform, clip.facts())


def read_mask(request: Mapping[str, Json], read: Read) -> Examined[Still | Footage]:
    """Read the mask of a picture or of a clip, of which only bucket, crop and times matter: equal ones can share an entry."""

    def exactly(variant: Variant) -> dict[str, Json]:  # the mask's own size says nothing of the crop
        return {**variant.transform(), "crop": list(variant.box.crop), "resized": list(variant.box.resized)}

    if VIDEO not in request:
        _picture, mask, inputs = read_picture_and_mask(request, read, DEFAULT)
        variant = mask.variant
        transform = exactly(variant) | ({} if variant.within is None else {"size": list(variant.size)}) | mask_transform(mask)
        return Examined(mask, inputs, {MASK: inputs[MASK]}, transform, variant.facts())
    clip = read_clip(request, read, DEFAULT)
    shots, digests = read_beside((MASK,), request, clip, read)
    inputs = digests_of(request, [digests[reference] for reference in references_of(request)])
    mask = shots[MASK]
    transform = exactly(mask.variant) | {"bucket": list(clip.shot.bucket)} | mask_transform(mask)
    if isinstance(mask, Footage):
        transform |= {"pixels": images.VIDEO_MASK_TRANSFORM, "start": clip.transform["start"], "fps": clip.transform["fps"]}
    return Examined(mask, inputs, {MASK: inputs[MASK]}, transform, clip.facts)


def read_picture_and_mask(request: Mapping[str, Json], read: Read, resample: Resample) -> tuple[Still, Still, Mapping[str, str]]:
    """Read a picture and its mask; also returns their digests by role. Raises EncodeFailed if the two do not lie on each other."""
    mask, picture, reading = read(str(request["image"])), read(str(request[LIKE])), reading_of(request)
    if reading is not None and not reading.is_turned and images.is_turned(picture):
        raise EncodeFailed(
            "the trainer ignores the EXIF orientation of this picture, so its mask would lie on another part: turn the picture itself, or"
            f" leave {option('pixels', 'as-trainer')} out"
        )
    size, digest = images.measure(picture), digest_bytes(picture)
    _check_alike(images.measure(mask), size, "picture")
    variant = variant_of(request, size, digest)
    shot = Still(mask, variant, is_own_alpha=is_own_mask(request, str(request["image"])))
    return Still(picture, variant, resample, reading), shot, digests_of(request, [digest_bytes(mask), digest])


def _check_alike(own: Size, size: Size, what: str) -> None:
    if abs(own.width * size.height - own.height * size.width) > size.width + size.height:
        raise EncodeFailed(
            f"the mask has {own.width} x {own.height} pixels, but its {what} {size.width} x {size.height}: they need the same aspect ratio"
        )


def read_beside(
    roles: Sequence[str], request: Mapping[str, Json], clip: Examined[Footage], read: Read
) -> tuple[dict[str, Footage | Still], dict[str, str]]:
    """Read what a sample brings of these roles beside its clip, cut as the clip: a video, or one picture for all frames.

    Also returns the digests of these files and of the video, by reference. Raises EncodeFailed.
    """
    from cachestore.encode.pictures import videos

    footage = clip.shot
    shots, digests = dict[str, Footage | Still](), {footage.reference: clip.inputs[VIDEO]}
    for role in roles:
        references: Sequence[str] = request.get(IMAGES, {}).get(role, ())
        if len(references) > 1:
            raise EncodeFailed(f"a video has one {role}, but this sample has {len(references)}: leave the others out")
        if not references:
            continue
        is_own_alpha = role == MASK and is_own_mask(request, references[0])
        data, digests[references[0]] = read_content(references[0], read, may_be_animated=True)
        video = None
        if not data:
            with read.open(references[0]) as file:
                video = videos.measure(file)
        size = images.measure(data) if video is None else video.size
        if role == MASK:
            _check_alike(size, footage.variant.size, "video")
        if video is None:  # a mask is measured as a part of its picture, at any resolution
            variant = footage.variant if role == MASK else same_part(size, footage.variant)
            shots[role] = Still(data, variant, footage.resample, is_own_alpha=is_own_alpha)
            continue
        own = replace(footage.clip, variant=same_part(size, footage.variant), own_rate=video.rate)
        last, there = own.start + own.frames, video.timeline.count(own.rate)
        if there < last:
            raise EncodeFailed(
                f"the {role} video is too short: it has {plural(there, 'frame')}, but the clip of its sample ends after {last}"
            )
        times = tuple(video.timeline.take(own.rate, own.start, own.frames))
        shots[role] = Footage(read, references[0], own, times, footage.resample, is_own_alpha)
    return shots, digests


def read_content(reference: str, read: Read, *, may_be_animated: bool = False) -> tuple[bytes, str]:
    """Return the bytes of a picture, none of a video, and the digest. An animation is a video only if `may_be_animated`."""
    with read.open(reference) as file:
        head = file.read(HEAD_BYTES)
        file.seek(0)
        if is_video(head) or (may_be_animated and animations.is_one(file)):
            return b"", digest_opened(file)
    data = read(reference)
    return data, digest_bytes(data)


def is_video(head: bytes) -> bool:
    """Return whether a file that begins with these bytes is a video in one of `videos.FORMATS`, but no picture (AVIF, HEIF)."""
    is_mp4 = head[4:8] in (b"ftyp", b"moov", b"mdat", b"wide", b"free") and head[8:12] not in _PICTURE_BRANDS
    is_stream = any(head[at : at + 1] == head[at + 188 + at : at + 189 + at] == b"G" for at in (0, 4))  # packets of 188 or 192 bytes
    return head.startswith(_VIDEO_HEADS) or (head[:4] == b"RIFF" and head[8:12] == b"AVI ") or is_mp4 or is_stream
