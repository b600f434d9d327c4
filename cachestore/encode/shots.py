"""What is encoded of a sample's files: a picture, a clip, a picture without its masked part, the ends of a clip, or what guides a clip.

Each `look_at_…` digests the files of a request and finds bucket and crop from headers and packets; `Shot.pixels` decodes. Shots whose
pixels have a fourth channel say there what is given (255); the rest is encoded as zeros, in the middle between black and white.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import numpy as np

from cachestore.core.errors import EncodeFailed
from cachestore.core.inputs import IMAGES, LIKE, digests_of, is_own_mask, references_of
from cachestore.core.keys import Json, digest_bytes, digest_opened
from cachestore.core.samples import CONTROL, IMAGE, LAST_FRAME, MASK, REFERENCE, VIDEO, role_of
from cachestore.core.words import plural
from cachestore.encode import animations, images
from cachestore.encode.bucket_rules import PixelReading
from cachestore.encode.buckets import CropBox, Size
from cachestore.encode.clips import Clip, Shape, as_rate, clip_of
from cachestore.encode.levels import read_alpha, read_levels
from cachestore.encode.resamplers import FIRST, RESAMPLERS, Resample
from cachestore.encode.resizing import Picture, fit, letterbox, mirror
from cachestore.encode.unit import Read
from cachestore.encode.variants import Variant, reading_of, same_part, variant_of

if TYPE_CHECKING:
    from PIL import Image

    from cachestore.encode import video_masks

Pixels = np.ndarray[Any, np.dtype[np.uint8]]

GIVEN: Final = 255
"""In the fourth channel: this pixel is given."""
COVERED: Final = 0
"""In the fourth channel: this pixel is not given."""
IN_FRONT: Final = 1
"""In the fourth channel: this frame is a reference picture, which is encoded alone and comes in front of the clip."""
BLANK: Final = 2
"""In the fourth channel: there is nothing at all."""
GREY: Final = 128
"""What stands in a clip for pixels that are made anew, as in the example of Wan VACE's pipeline."""
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
THRESHOLD: Final = 128
"""A mask counts as white from this level on, as in diffusers' pipelines (0.5)."""


class Shot(Protocol):
    """What is encoded, not yet decoded."""

    @property
    def bucket(self) -> Size | Shape:
        """The size in which it is encoded."""
        ...

    def pixels(self, resample: Resample) -> Pixels:
        """Decode, scale and crop: uint8 [height, width, 3 or 4], for videos [frames, height, width, 3 or 4]."""
        ...


@dataclass(frozen=True, slots=True)
class Examined:
    """What is known of a request before anything is decoded."""

    shot: Any
    """A `Shot`."""
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
    is_own_alpha: bool = False
    """Of a mask: whether it is the alpha of the picture that it belongs to."""
    reading: PixelReading | None = None
    """How the picture is read, if as by a trainer."""

    @property
    def bucket(self) -> Size:
        """As `Shot.bucket`."""
        return self.variant.bucket

    def pixels(self, resample: Resample) -> Pixels:
        """As `Shot.pixels`."""
        picture = images.decode_picture(self.data, self.reading)
        picture = picture if self.variant.within is None else images.cut_out(picture, self.variant.within)
        pixels = np.ascontiguousarray(fit(picture, self.variant.bucket, self.variant.box, resample)[..., :3])
        return mirror(pixels) if self.variant.is_flipped else pixels

    def greys(self, size: Size) -> Greys:
        """Decode a mask, crop it and shrink it to this size: [1, height, width], each pixel the mean of the area that it covers."""
        within = None if self.variant.within is None else (self.variant.within, self.variant.size)
        found = (read_alpha if self.is_own_alpha else read_levels)(self.data)
        made = images.fit_mask(found.grey, size, self.variant.box, within)
        return Greys(np.ascontiguousarray(made[:, ::-1] if self.variant.is_flipped else made)[None], found.has_colours)

    def transform(self) -> dict[str, Json]:
        """Return a picture's part of a key. Raises EncodeFailed."""
        how = images.transform_of(self.data) if self.reading is None else {"reading": self.reading.as_json()}
        return self.variant.transform() | how

    def mask_transform(self) -> dict[str, Json]:
        """Return a mask's part of a key: how its levels are read, if older versions read them otherwise. Raises EncodeFailed."""
        if self.is_own_alpha:
            return {"levels": "own-alpha"}
        return read_levels(self.data).transform if images.is_decorated(self.data) else {}  # others need not be decoded here


@dataclass(frozen=True, slots=True)
class Footage:
    """A clip, and how to read its video, whose bytes may be gigabytes."""

    read: Read
    reference: str
    clip: Clip
    times: tuple[int, ...]
    """When each frame of the clip is shown, in ticks of the file."""
    has_alpha: bool = False
    decoding: Mapping[str, str] = field(default_factory=dict[str, str])
    """As `Video.decoding`."""
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

    def pixels(self, resample: Resample) -> Pixels:
        """As `Shot.pixels`."""
        return self.frames(self.times, resample)

    def frames(self, times: Sequence[int], resample: Resample) -> Pixels:
        """Decode the frames that are shown at these times."""
        from cachestore.encode import videos

        variant = self.variant
        with self.read.open(self.reference) as file:
            pixels = videos.take(file, times, variant.bucket, variant.box, resample)
        return mirror(pixels) if variant.is_flipped else pixels

    def greys(self, size: Size) -> Greys:
        """As `Still.greys`, of each frame: [frames, height, width]."""
        return self._greys(lambda picture: images.fit_mask(images.as_image(picture), size, self.variant.box))

    def levels(self, resample: Resample) -> Pixels:
        """Return the levels of a mask at the size of the bucket, scaled as a picture: uint8 [frames, height, width]."""
        return self._greys(partial(self._scaled, resample)).pixels

    def _greys(self, shrink: "video_masks.Shrink") -> Greys:
        made = self._levels(shrink)
        return Greys(np.ascontiguousarray(made.levels[..., ::-1]) if self.variant.is_flipped else made.levels, made.has_colours)

    def _scaled(self, resample: Resample, picture: Picture) -> Pixels:
        rgb = picture if isinstance(picture, np.ndarray) else picture.convert("RGB")
        return fit(rgb, self.variant.bucket, self.variant.box, resample)[..., 0]

    def mask_transform(self) -> dict[str, Json]:
        """As `Still.mask_transform`. Decodes only videos with an alpha."""
        if self.is_own_alpha:
            return {"levels": "own-alpha"}
        return dict(self._levels(lambda _picture: np.zeros((1, 1), np.uint8)).transform) if self.has_alpha else {}

    def _levels(self, shrink: "video_masks.Shrink") -> "video_masks.MaskFrames":
        from cachestore.encode import video_masks

        with self.read.open(self.reference) as file:
            return video_masks.take_masks(file, self.times, shrink, is_own_alpha=self.is_own_alpha)


@dataclass(frozen=True, slots=True)
class Shown:
    """A whole picture for a text encoder, or the frame with which a clip of a video begins."""

    data: bytes
    """The bytes of a picture; none of a video."""
    digest: str
    read: Read
    reference: str
    rate: Fraction | None
    decoding: Mapping[str, Json] = field(default_factory=dict[str, Json])
    """As `videos.decoding_of`; empty for a picture."""

    def transform(self) -> dict[str, Json]:
        """Return what the key of a frame has besides the digest of its video; nothing for a picture."""
        rate = None if self.rate is None else str(self.rate)
        return {} if self.data else {"start": 0, "fps": rate, "pixels": RESAMPLERS[FIRST].videos, **self.decoding}

    def picture(self) -> "Image.Image":
        """Decode it."""
        if self.data:
            return images.decode(self.data)
        from cachestore.encode import videos

        with self.read.open(self.reference) as file:
            video = videos.look(file)
            box = CropBox(video.size, (0, 0, video.size.width, video.size.height))
            return images.as_image(videos.take(file, video.timeline.take(self.rate, 0, 1), video.size, box)[0])


def look_at_shown(reference: str, read: Read, fps: float | None = None) -> Shown:
    """Look at what a text encoder is shown. `fps` is the rate of a video's clip, if it is not the file's own."""
    from cachestore.encode import videos

    # without a rate, the first frame of an animation is that of the picture
    data, digest = _content(reference, read, may_be_animated=fps is not None)
    if data:
        return Shown(data, digest, read, reference, None if fps is None else as_rate(fps))
    with read.open(reference) as file:
        return Shown(data, digest, read, reference, None if fps is None else as_rate(fps), videos.decoding_of(file))


@dataclass(frozen=True, slots=True)
class Masked:
    """A picture without the part that its mask covers."""

    picture: Still
    mask: Still

    @property
    def bucket(self) -> Size:
        """As `Shot.bucket`."""
        return self.picture.bucket

    def pixels(self, resample: Resample) -> Pixels:
        """As `Shot.pixels`, with the fourth channel."""
        return _with_mask(self.picture.pixels(resample), covered(self.mask))


@dataclass(frozen=True, slots=True)
class ClipEnds:
    """The first frame of a clip, or its first and last: pictures, where the sample brings them, else the clip's own."""

    clip: Footage
    given: Sequence[Still | None]
    """One for each end; None stands for the clip's own."""

    @property
    def bucket(self) -> Shape:
        """As `Shot.bucket`."""
        return self.clip.bucket

    def frames(self, resample: Resample) -> Pixels:
        """Decode the ends alone: uint8 [1 or 2, height, width, 3]."""
        times = [time for time, one in zip((self.clip.times[0], self.clip.times[-1]), self.given, strict=False) if one is None]
        own = iter(self.clip.frames(times, resample) if times else ())
        return np.stack([next(own) if one is None else one.pixels(resample) for one in self.given])

    def pixels(self, resample: Resample) -> Pixels:
        """As `Shot.pixels`, with the fourth channel: all other frames are not given."""
        made = np.zeros((self.bucket.frames, self.bucket.height, self.bucket.width, 4), np.uint8)
        for at, frame in zip((0, -1), self.frames(resample), strict=False):
            made[at, ..., :3], made[at, ..., 3] = frame, GIVEN
        return made


@dataclass(frozen=True, slots=True)
class FirstFrame:
    """The first frame of a clip alone, as a clip of one frame."""

    ends: ClipEnds

    @property
    def bucket(self) -> Shape:
        """As `Shot.bucket`."""
        return self.ends.bucket._replace(frames=1)

    def pixels(self, resample: Resample) -> Pixels:
        """As `Shot.pixels`."""
        return self.ends.frames(resample)


@dataclass(frozen=True, slots=True)
class Guided:
    """What guides a clip: frames of its control, and which of their pixels are made anew. Either may be one picture for all frames.

    Without a control the clip's own frames are used, with grey where the mask is white. Without a mask all pixels are made anew; without
    both, nothing is known of any.
    """

    clip: Footage
    control: Footage | Still | None
    mask: Footage | Still | None
    references: Sequence[bytes] = ()
    """Pictures of what is to be seen."""

    @property
    def bucket(self) -> Shape:
        """As `Shot.bucket`, with a frame for each reference picture."""
        return self.clip.bucket._replace(frames=self.clip.bucket.frames + len(self.references))

    def pixels(self, resample: Resample) -> Pixels:
        """As `Shot.pixels`, with the fourth channel. The last reference picture comes first, as in Wan VACE's pipeline."""
        bucket = self.clip.clip.variant.bucket
        shown = [letterbox(images.decode(data), bucket) for data in reversed(self.references)]
        shown = [mirror(frame) for frame in shown] if self.clip.clip.variant.is_flipped else shown
        return np.concatenate([*(_marked(frame, IN_FRONT)[None] for frame in shown), self._guides(resample)])

    def _guides(self, resample: Resample) -> Pixels:
        if self.control is None and self.mask is None:
            return _marked(np.zeros((*self._sides, 3), np.uint8), BLANK)
        frames = np.broadcast_to((self.control or self.clip).pixels(resample), (*self._sides, 3))
        is_covered = self._covered(resample)
        if self.control is None:
            frames = np.where(is_covered[..., None], GREY, frames).astype(np.uint8)
        return _with_mask(frames, is_covered)

    @property
    def _sides(self) -> tuple[int, int, int]:
        return self.clip.bucket.frames, self.clip.bucket.height, self.clip.bucket.width

    def _covered(self, resample: Resample) -> "np.ndarray[Any, np.dtype[np.bool_]]":
        if self.mask is None:
            return np.ones(self._sides, np.bool_)
        if isinstance(self.mask, Still):
            return np.broadcast_to(covered(self.mask), self._sides)
        return self.mask.levels(resample) >= THRESHOLD


def _with_mask(pixels: Pixels, is_covered: "np.ndarray[Any, np.dtype[np.bool_]]") -> Pixels:
    return np.concatenate([pixels, np.where(is_covered, COVERED, GIVEN)[..., None].astype(np.uint8)], axis=-1)


def _marked(pixels: Pixels, mark: int) -> Pixels:
    return np.concatenate([pixels, np.full_like(pixels[..., :1], mark)], axis=-1)


def covered(mask: Still) -> "np.ndarray[Any, np.dtype[np.bool_]]":
    """Return where a mask is white, at the size of the bucket: [height, width]."""
    return mask.greys(mask.bucket).pixels[0] >= THRESHOLD


def look_at_input(request: Mapping[str, Json], read: Read, resample: Resample) -> Examined:
    """Look at a picture or video that is encoded as it is. Raises EncodeFailed if it is neither."""
    if VIDEO in request:
        return _look_at_video(request, read, resample)
    role, data = str(request.get("role", IMAGE)), read(str(request["image"]))
    if is_video(data):
        raise EncodeFailed(f"the {role} is a video, which is only made into a condition of Wan VACE: give a picture")
    digest = digest_bytes(data)
    # a drawn crop depends on the digest of the picture that is followed
    inputs = digests_of(request, [digest, *([digest_bytes(read(str(request[LIKE])))] if LIKE in request else [])])
    reading = reading_of(request)
    size = images.measure(data, reading)
    variant = variant_of(request, size, inputs[role_of(role).follows or IMAGE] if LIKE in request else digest)
    shot = Still(data, variant, reading=reading)
    # the role is not part of the key: a picture that is both image and control is encoded once
    return Examined(shot, inputs, {IMAGE: digest}, shot.transform(), variant.facts())


def _look_at_video(request: Mapping[str, Json], read: Read, resample: Resample) -> Examined:
    from cachestore.encode import videos

    reference = str(request.get(VIDEO) or request[LIKE])
    with read.open(reference) as file:
        digest = digest_opened(file)
        video = videos.look(file)
    frames, start, rate = clip_of(request, video.timeline)
    clip = Clip(variant_of(request, video.size, digest), frames, start, rate, video.rate)
    footage = Footage(read, reference, clip, tuple(video.timeline.take(rate, start, frames)), has_alpha=video.has_alpha)
    transform = clip.transform() | {"pixels": RESAMPLERS[resample].videos, **video.decoding}
    return Examined(footage, {VIDEO: digest}, {VIDEO: digest}, transform, clip.facts())


def look_at_masked(request: Mapping[str, Json], read: Read, resample: Resample) -> Examined:
    """Look at a mask and its picture, of which the part that the mask leaves is encoded."""
    del resample
    picture, mask, inputs = _picture_and_mask(request, read)
    transform = picture.transform() | mask.mask_transform()
    return Examined(Masked(picture, mask), inputs, inputs, transform, picture.variant.facts())


def look_at_mask(request: Mapping[str, Json], read: Read) -> Examined:
    """Look at the mask of a picture or of a clip, of which only bucket, crop and times matter: equal ones can share an entry."""
    if VIDEO not in request:
        _picture, mask, inputs = _picture_and_mask(request, read)
        variant = mask.variant
        transform = _exactly(variant) | ({} if variant.within is None else {"size": list(variant.size)}) | mask.mask_transform()
        return Examined(mask, inputs, {MASK: inputs[MASK]}, transform, variant.facts())
    video = _look_at_video(request, read, FIRST)
    shots, digests = _all_beside((MASK,), request, video, read)
    inputs = digests_of(request, [digests[reference] for reference in references_of(request)])
    mask, clip = shots[MASK], video.shot.clip
    transform = _exactly(mask.variant) | {"bucket": list(clip.shape)}
    if isinstance(mask, Footage):
        transform |= {"pixels": images.VIDEO_MASK_TRANSFORM, "start": clip.start, "fps": clip.transform()["fps"]}
    transform |= mask.mask_transform()
    return Examined(mask, inputs, {MASK: inputs[MASK]}, transform, video.facts)


def _exactly(variant: Variant) -> dict[str, Json]:
    """Return a variant's part of the key of a mask, whose own size says nothing of the crop."""
    return {**variant.transform(), "crop": list(variant.box.crop), "resized": list(variant.box.resized)}


def _picture_and_mask(request: Mapping[str, Json], read: Read) -> tuple[Still, Still, Mapping[str, str]]:
    """Return a picture, its mask, and their digests by role. Raises EncodeFailed if the two do not lie on each other."""
    mask, picture, reading = read(str(request["image"])), read(str(request[LIKE])), reading_of(request)
    if reading is not None and not reading.is_turned and images.is_turned(picture):
        raise EncodeFailed(
            "the trainer ignores the EXIF orientation of this picture, so its mask would lie on another part: turn the picture itself, or"
            " leave --pixels as-trainer out"
        )
    size, digest = images.measure(picture), digest_bytes(picture)
    _check_alike(images.measure(mask), size, "picture")
    variant = variant_of(request, size, digest)
    shot = Still(mask, variant, is_own_alpha=is_own_mask(request, str(request["image"])))
    return Still(picture, variant, reading=reading), shot, digests_of(request, [digest_bytes(mask), digest])


def _check_alike(own: Size, size: Size, what: str) -> None:
    if abs(own.width * size.height - own.height * size.width) > size.width + size.height:
        raise EncodeFailed(
            f"the mask has {own.width} x {own.height} pixels, but its {what} {size.width} x {size.height}: they need the same aspect ratio"
        )


@dataclass(frozen=True, slots=True)
class LookAtEnds:
    """Looks at the frames with which a clip begins (and ends, with `LAST_FRAME` among the `others`)."""

    others: Sequence[str] = field(default_factory=tuple[str, ...])

    def __call__(self, request: Mapping[str, Json], read: Read, resample: Resample) -> Examined:
        """Look at the video, and at the pictures that the sample brings as its ends."""
        video = _look_at_video(request, read, resample)
        footage: Footage = video.shot
        shown: Mapping[str, Sequence[str]] = request.get(IMAGES, {})
        ends = [request.get("image"), *(next(iter(shown.get(role, ())), None) for role in self.others if role == LAST_FRAME)]
        data = [None if reference is None else read(str(reference)) for reference in ends]
        given = [None if one is None else Still(one, same_part(images.measure(one), footage.clip.variant)) for one in data]
        digests = {str(reference): digest_bytes(one) for reference, one in zip(ends, data, strict=True) if one is not None}
        digests[footage.reference] = video.inputs[VIDEO]
        inputs = digests_of(request, [digests[reference] for reference in references_of(request)])
        if None in given:
            keyed, transform = {**inputs, **video.inputs}, dict(video.transform)
        else:  # of the video only bucket, crop and flip matter
            keyed = {role: digest for role, digest in inputs.items() if role != VIDEO}
            transform = {name: value for name, value in video.transform.items() if name in {"bucket", "flip", "pixels"}}
        transform["ends"] = [None if one is None else one.variant.transform()["crop"] for one in given]
        transform |= images.transform_of(*(one.data for one in given if one is not None))
        return Examined(ClipEnds(footage, given), inputs, keyed, transform, video.facts)


def look_at_first(request: Mapping[str, Json], read: Read, resample: Resample) -> Examined:
    """Look at the frame with which a clip begins, without the others."""
    found = LookAtEnds()(request, read, resample)
    first = FirstFrame(found.shot)
    return replace(found, shot=first, transform={**found.transform, "bucket": list(first.bucket)})


def look_at_guided(request: Mapping[str, Json], read: Read, resample: Resample) -> Examined:
    """Look at a video, and at the control and the mask that the sample brings for it: videos, or one picture for all frames.

    Reference pictures are cut by nothing.
    """
    video = _look_at_video(request, read, resample)
    shots, digests = _all_beside((CONTROL, MASK), request, video, read)
    shown: Mapping[str, Sequence[str]] = request.get(IMAGES, {})
    references: list[bytes] = []
    for reference in shown.get(REFERENCE, ()):
        data, digests[reference] = _content(reference, read)
        if not data:
            raise EncodeFailed(f"the {REFERENCE} is a video, but this model takes pictures: give a frame of it")
        references.append(data)
    inputs = digests_of(request, [digests[reference] for reference in references_of(request)])
    transform = {**video.transform, "beside": {role: shot.variant.transform()["crop"] for role, shot in shots.items()}}
    stills = [shot.data for role, shot in shots.items() if role != MASK and isinstance(shot, Still)]
    transform |= images.transform_of(*references, *stills) | (shots[MASK].mask_transform() if MASK in shots else {})
    if decoding := {role: dict(shot.decoding) for role, shot in shots.items() if isinstance(shot, Footage) and shot.decoding}:
        transform["decoding"] = decoding
    shot = Guided(video.shot, shots.get(CONTROL), shots.get(MASK), references)
    return Examined(shot, inputs, inputs, transform, video.facts)


def _all_beside(
    roles: Sequence[str], request: Mapping[str, Json], video: Examined, read: Read
) -> tuple[dict[str, Footage | Still], dict[str, str]]:
    """Return what a sample brings of these roles beside its clip, and by reference the digests of these files and of the video."""
    footage: Footage = video.shot
    shots, digests = dict[str, Footage | Still](), {footage.reference: video.inputs[VIDEO]}
    shown: Mapping[str, Sequence[str]] = request.get(IMAGES, {})
    for role in roles:
        if len(shown.get(role, ())) > 1:
            raise EncodeFailed(f"a video has one {role}, but this sample has {len(shown[role])}: leave the others out")
        for reference in shown.get(role, ()):
            is_own_alpha = role == MASK and is_own_mask(request, reference)
            shots[role], digests[reference] = _beside(role, reference, footage, read, is_own_alpha=is_own_alpha)
    return shots, digests


def _beside(role: str, reference: str, footage: Footage, read: Read, *, is_own_alpha: bool) -> tuple[Footage | Still, str]:
    """Return what belongs to a clip, cut in the same way, and its digest."""
    from cachestore.encode import videos

    own = footage.clip.variant
    data, digest = _content(reference, read, may_be_animated=True)
    found = None
    if not data:
        with read.open(reference) as file:
            found = videos.look(file)
    size = images.measure(data) if found is None else found.size
    if role == MASK:
        _check_alike(size, own.size, "video")
    if found is None:  # a mask is measured as a part of its picture, at any resolution
        return Still(data, own if role == MASK else same_part(size, own), is_own_alpha=is_own_alpha), digest
    clip = replace(footage.clip, variant=same_part(size, own), own_rate=found.rate)
    last, there = clip.start + clip.frames, found.timeline.count(clip.rate)
    if there < last:
        raise EncodeFailed(f"the {role} video is too short: it has {plural(there, 'frame')}, but the clip of its sample ends after {last}")
    times = tuple(found.timeline.take(clip.rate, clip.start, clip.frames))
    return Footage(read, reference, clip, times, found.has_alpha, found.decoding, is_own_alpha=is_own_alpha), digest


def _content(reference: str, read: Read, *, may_be_animated: bool = False) -> tuple[bytes, str]:
    """Return the bytes of a picture, but none of a video, which may have gigabytes; and the file's digest.

    An animation is a video if `may_be_animated`, else its first frame is a picture.
    """
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
