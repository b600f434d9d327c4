"""What of a sample's files goes through a VAE: the picture or clip itself, or one of the conditions that a denoiser takes.

One class a kind: `read_files` digests the files of a request and finds bucket and crop, `recipe` says what is made of them, and `setup`
what the VAE has to do. Pixels with a fourth channel say there what is given (255); the rest is encoded as zeros, in the middle between
black and white.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final, Literal

import numpy as np

from cachestore.core.errors import EncodeFailed
from cachestore.core.inputs import IMAGES, digests_of, references_of
from cachestore.core.keys import Json, Recipe, digest_bytes
from cachestore.core.read_block import MASK_BITS
from cachestore.core.samples import CONTROL, FIRST_FRAME, LAST_FRAME, MASK, REFERENCE, VIDEO
from cachestore.encode.batching.unit import Read
from cachestore.encode.families.resamplers import Resample
from cachestore.encode.models.setup import LatentsSetup
from cachestore.encode.pictures import images
from cachestore.encode.pictures.buckets import Size
from cachestore.encode.pictures.clips import Shape
from cachestore.encode.pictures.resizing import letterbox, mirror
from cachestore.encode.pictures.shots import (
    Examined,
    Footage,
    Pixels,
    Shot,
    Still,
    mask_transform,
    read_beside,
    read_clip,
    read_content,
    read_input,
    read_picture_and_mask,
)
from cachestore.encode.pictures.variants import same_part

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
THRESHOLD: Final = 128
"""A mask counts as white from this level on, as in diffusers' pipelines (0.5)."""
CONDITION_VERSION: Final = 1
"""Raise it when the code makes other tensors from the same settings."""
Flags = np.ndarray[Any, np.dtype[np.bool_]]


class Kind:
    """What is encoded: the picture or clip itself, unless a kind says otherwise."""

    name: ClassVar[str] = ""
    roles: tuple[str, ...] = ()
    """The roles of the images that columns give it, the one that decides its column first. A mask comes with its picture."""
    mask: ClassVar[Literal["weight", "input", "within"]] = "weight"
    """What a mask is for: the weight of the loss, an input of the denoiser beside this one, or a part of this one."""
    is_split: ClassVar[bool] = False
    """As of `LatentsSetup`."""
    is_first_alone: ClassVar[bool] = False
    """Whether of a clip one frame alone is encoded."""

    def read(self, latents: Mapping[str, Json]) -> dict[str, Json]:
        """Return the `read` block of its recipe, from that of plain latents."""
        return {**latents}

    def read_files(self, request: Mapping[str, Json], read: Read, resample: Resample) -> Examined[Shot]:
        """Read what decides the key of a request. Raises EncodeFailed, OSError."""
        return read_input(request, read, resample)

    def recipe(self, name: str, latents: Recipe) -> Recipe:
        """Return the recipe of a condition of this name, from that of plain latents."""
        read = {**self.read(latents.read), "name": name}
        outputs = [read["stored"], *([MASK_BITS] if "mask_channels" in read else [])]
        make = {**latents.make, "kind": "condition", "version": CONDITION_VERSION, "makes": self.name, "outputs": outputs}
        return Recipe(name, make | ({"roles": list(self.roles)} if self.roles else {}), read)

    def setup(self, latents: LatentsSetup, read: Mapping[str, Json]) -> LatentsSetup:
        """Return what the VAE has to do, by what it does for plain latents and by the `read` block of the condition."""
        return replace(
            latents,
            stored=read["stored"],
            channels=read["channels"],
            mask_channels=read.get("mask_channels", 0),
            is_split=self.is_split,
            is_of_pictures=latents.is_of_pictures or self.is_first_alone,
        )


@dataclass(frozen=True, slots=True)
class MaskedPicture:
    """A picture without the part that its mask covers."""

    picture: Still
    mask: Still

    @property
    def bucket(self) -> Size:
        """As `Shot.bucket`."""
        return self.picture.bucket

    def pixels(self) -> Pixels:
        """As `Shot.pixels`, with the fourth channel."""
        return _with_mask(self.picture.pixels(), _covered(self.mask))


class Masked(Kind):
    """Latents of the picture without what its mask covers. The mask is another input of the denoiser."""

    name = "masked"
    mask = "input"

    def read_files(self, request: Mapping[str, Json], read: Read, resample: Resample) -> Examined[Shot]:
        """As `Kind.read_files`."""
        picture, mask, inputs = read_picture_and_mask(request, read, resample)
        return Examined(MaskedPicture(picture, mask), inputs, inputs, picture.transform() | mask_transform(mask), picture.variant.facts())


class Filled(Masked):
    """The same with the mask behind it, folded to the size of latents."""

    name = "filled"
    mask = "within"

    def read(self, latents: Mapping[str, Json]) -> dict[str, Json]:
        """As `Kind.read`."""
        return {**latents, "mask_channels": latents["spatial_factor"] ** 2}


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

    def frames(self) -> Pixels:
        """Decode the ends alone: uint8 [1 or 2, height, width, 3]."""
        times = [time for time, given in zip((self.clip.times[0], self.clip.times[-1]), self.given, strict=False) if given is None]
        own = iter(self.clip.frames(times) if times else ())
        return np.stack([next(own) if given is None else given.pixels() for given in self.given])

    def pixels(self) -> Pixels:
        """As `Shot.pixels`, with the fourth channel: all other frames are not given."""
        whole = np.zeros((self.bucket.frames, self.bucket.height, self.bucket.width, 4), np.uint8)
        for at, frame in zip((0, -1), self.frames(), strict=False):
            whole[at, ..., :3], whole[at, ..., 3] = frame, GIVEN
        return whole


@dataclass(frozen=True, slots=True)
class FirstAlone:
    """The first frame of a clip alone, as a clip of one frame."""

    ends: ClipEnds

    @property
    def bucket(self) -> Shape:
        """As `Shot.bucket`."""
        return self.ends.bucket._replace(frames=1)

    def pixels(self) -> Pixels:
        """As `Shot.pixels`."""
        return self.ends.frames()


@dataclass(frozen=True, slots=True)
class EndFrames(Kind):
    """Latents of the clip's first frame (and last), and zeros in place of the others."""

    roles: tuple[str, ...] = (FIRST_FRAME,)
    name = "ends"

    def read(self, latents: Mapping[str, Json]) -> dict[str, Json]:
        """As `Kind.read`. The channels in front, which say what is given, are made when reading."""
        return {**latents, "stored": "mean", "marks": ["first", "last"][: len(self.roles)]}

    def read_files(self, request: Mapping[str, Json], read: Read, resample: Resample) -> Examined[ClipEnds]:
        """Read the video, and the pictures that the sample brings as its ends."""
        clip = read_clip(request, read, resample)
        footage = clip.shot
        last: Sequence[str] = request.get(IMAGES, {}).get(LAST_FRAME, ())
        ends = [request.get("image"), *([next(iter(last), None)] if LAST_FRAME in self.roles else [])]
        data = [None if reference is None else read(str(reference)) for reference in ends]
        given = [
            None if picture is None else Still(picture, same_part(images.measure(picture), footage.variant), resample) for picture in data
        ]
        digests = {str(reference): digest_bytes(picture) for reference, picture in zip(ends, data, strict=True) if picture is not None}
        digests[footage.reference] = clip.inputs[VIDEO]
        inputs = digests_of(request, [digests[reference] for reference in references_of(request)])
        if None in given:
            keyed, transform = {**inputs, **clip.inputs}, dict(clip.transform)
        else:  # of the video only bucket, crop and flip matter
            keyed = {role: digest for role, digest in inputs.items() if role != VIDEO}
            transform = {name: value for name, value in clip.transform.items() if name in {"bucket", "flip", "pixels"}}
        transform["ends"] = [None if still is None else still.variant.transform()["crop"] for still in given]
        return Examined(ClipEnds(footage, given), inputs, keyed, transform, clip.facts)


class First(Kind):
    """Latents of the clip's first frame alone."""

    name = "first"
    roles = (FIRST_FRAME,)
    is_first_alone = True

    def read(self, latents: Mapping[str, Json]) -> dict[str, Json]:
        """As `Kind.read`."""
        return {**latents, "stored": "mean"}

    def read_files(self, request: Mapping[str, Json], read: Read, resample: Resample) -> Examined[Shot]:
        """Read the frame with which a clip begins, without the others."""
        ends = EndFrames().read_files(request, read, resample)
        first = FirstAlone(ends.shot)
        return Examined(first, ends.inputs, ends.keyed, {**ends.transform, "bucket": list(first.bucket)}, ends.facts)


@dataclass(frozen=True, slots=True)
class Embedded(EndFrames):
    """What a vision encoder makes of the same frames: embeddings in place of latents."""

    layer: int | None = None
    """Which of the vision encoder's hidden states; None for the last ones, which are normalised."""
    parts: tuple[str, str] = ("image_encoder", "image_processor")
    """The pipeline's names of the vision encoder and its image processor."""
    name = "embeds"


@dataclass(frozen=True, slots=True)
class GuidedClip:
    """What guides a clip: frames of its control, and which of their pixels are made anew. Either may be one picture for all frames.

    Without a control, the clip's own, grey where the mask is white; without a mask all is made anew; without both nothing is known.
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

    def pixels(self) -> Pixels:
        """As `Shot.pixels`, with the fourth channel. The last reference picture comes first, as in Wan VACE's pipeline."""
        variant = self.clip.variant
        shown = [letterbox(images.decode(data), variant.bucket) for data in reversed(self.references)]
        shown = [mirror(frame) for frame in shown] if variant.is_flipped else shown
        return np.concatenate([*(_marked(frame, IN_FRONT)[None] for frame in shown), self._guides()])

    def _guides(self) -> Pixels:
        sides = self.clip.bucket.frames, self.clip.bucket.height, self.clip.bucket.width
        if self.control is None and self.mask is None:
            return _marked(np.zeros((*sides, 3), np.uint8), BLANK)
        frames = np.broadcast_to((self.control or self.clip).pixels(), (*sides, 3))
        if self.mask is None:
            is_covered = np.ones(sides, np.bool_)
        elif isinstance(self.mask, Still):
            is_covered = np.broadcast_to(_covered(self.mask), sides)
        else:
            is_covered = self.mask.levels() >= THRESHOLD
        if self.control is None:
            frames = np.where(is_covered[..., None], GREY, frames).astype(np.uint8)
        return _with_mask(frames, is_covered)


class Guided(Kind):
    """Latents of a control video's pixels that stay, of those that are made anew, and the mask; in front those of reference pictures."""

    name = "guided"
    mask = "within"
    roles = (VIDEO, CONTROL, MASK, REFERENCE)
    is_split = True

    def read(self, latents: Mapping[str, Json]) -> dict[str, Json]:
        """As `Kind.read`."""
        twice = {name: latents[name] and 2 * latents[name] for name in ("latents_mean", "latents_std", "channels")}
        return {**latents, "stored": "mean", "mask_channels": latents["spatial_factor"] ** 2, **twice}

    def read_files(self, request: Mapping[str, Json], read: Read, resample: Resample) -> Examined[Shot]:
        """Read a video, and the control and mask that the sample brings: videos, or one picture for all frames."""
        clip = read_clip(request, read, resample)
        shots, digests = read_beside((CONTROL, MASK), request, clip, read)
        references: list[bytes] = []
        for reference in request.get(IMAGES, {}).get(REFERENCE, ()):
            data, digests[reference] = read_content(reference, read)
            if not data:
                raise EncodeFailed(f"the {REFERENCE} is a video, but this model takes pictures: give a frame of it")
            references.append(data)
        inputs = digests_of(request, [digests[reference] for reference in references_of(request)])
        transform = {**clip.transform, "beside": {role: shot.variant.transform()["crop"] for role, shot in shots.items()}}
        transform |= mask_transform(shots[MASK]) if MASK in shots else {}
        guided = GuidedClip(clip.shot, shots.get(CONTROL), shots.get(MASK), references)
        return Examined(guided, inputs, inputs, transform, clip.facts)


def _with_mask(pixels: Pixels, is_covered: Flags) -> Pixels:
    return np.concatenate([pixels, np.where(is_covered, COVERED, GIVEN)[..., None].astype(np.uint8)], axis=-1)


def _marked(pixels: Pixels, mark: int) -> Pixels:
    return np.concatenate([pixels, np.full_like(pixels[..., :1], mark)], axis=-1)


def _covered(mask: Still) -> Flags:
    """Where a mask is white, at the size of the bucket: [height, width]."""
    return mask.greys(mask.bucket).pixels[0] >= THRESHOLD
