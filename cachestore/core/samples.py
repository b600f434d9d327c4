"""Samples with their images and captions, as plain values. The room `sources` makes them from folders and files."""

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from math import isfinite
from typing import Any, Final, cast

from cachestore.core.arguments import as_number, as_path_str, as_text, as_whole, refuse
from cachestore.core.errors import BadInput
from cachestore.core.keys import Json

IMAGE = "image"
"""The role of the picture that is trained on."""
VIDEO = "video"
"""The role of the video that is trained on instead of a picture."""
CONTROL = "control"
"""The role of pictures that the model sees beside the caption: a picture to edit, or references."""
REFERENCE = "reference"
"""The role of further pictures that the model sees, such as a person or an object."""
MASK = "mask"
"""The role of masks: greyscale pictures or videos with the frame of what is trained on, white where it counts."""
NOTHING, SOME, EVERYTHING = 0, 1, 2
"""How much of a mask counts: the fact `weight` of its cell."""
FIRST_FRAME, LAST_FRAME = "first_frame", "last_frame"
"""The roles of the pictures with which a video begins and ends. By default they are the video's own frames."""
CAPTION = "caption"
"""The role of captions. All other roles are of images."""


@dataclass(frozen=True, slots=True)
class Role:
    """What an image may be, and what decides its crop. A new role is a new row of `ROLES`."""

    name: str
    follows: str | None = None
    """The role of the sample's picture or video that it belongs to."""
    is_cut_alike: bool = False
    """Whether it shows the same frame as what it follows: then it gets the same bucket and crop, and cannot be without it. Otherwise it has
    a bucket of its own, and follows only the place of a drawn crop."""
    is_own: bool = False
    """Whether it is taken from the video itself if the sample has none."""


ROLES: Final[Mapping[str, Role]] = {
    row.name: row
    for row in (
        Role(IMAGE),
        Role(CONTROL, IMAGE),
        Role(MASK, IMAGE, is_cut_alike=True),
        Role(VIDEO),
        Role(REFERENCE, IMAGE),
        Role(FIRST_FRAME, VIDEO, is_cut_alike=True, is_own=True),
        Role(LAST_FRAME, VIDEO, is_cut_alike=True, is_own=True),
    )
}
SHOWN: Final = (CONTROL, REFERENCE)
"""The roles whose latents every VAE makes: `control_latents`, `reference_latents` in a batch."""
BESIDE: Final = tuple(name for name in ROLES if name not in (IMAGE, VIDEO))
"""The roles that a file can have beside its sample's picture or video, by its name: `cat.mask.png`."""


def role_of(name: str) -> Role:
    """Return the row of a role; of one of the user's own, a row like that of control images."""
    return ROLES.get(name, Role(name, IMAGE))


def goes_with(role: str, kind: str, kinds: Collection[str]) -> bool:
    """Return whether an image of this role belongs to the picture or the video of one name, of which there may be both."""
    return len(kinds) == 1 or role_of(role).follows == kind


def images_of(images: Mapping[str, Any], role: str) -> Sequence[Any]:
    """Return a sample's images of a role; of a role that `is_own` the sample's video, if it brings none."""
    found: Sequence[Any] = images.get(role, ())
    return images.get(VIDEO, ()) if not found and role_of(role).is_own else found


def has_mask(images: Mapping[str, Any], role: str) -> bool:
    """Return whether a sample has a mask in the column of masks with this role: `VIDEO` for masks of videos, else `MASK`."""
    return bool(images.get(MASK)) and bool(images.get(VIDEO)) == (role == VIDEO)


@dataclass(frozen=True, slots=True)
class Sample:
    """One row of a source: images by role, captions, and other columns."""

    id: str
    """Unique within the source, NFC-normalised: a relative path with `/` and extension, a manifest's id, or a prompt's digest."""
    images: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """By role a tuple, in order. In your own samples: paths, bytes of files, or PIL images; a single one may stand without a tuple. In a
    listed source: references; for sources on disk they are paths relative to the source, with `/`."""
    captions: tuple[str, ...] = ("",)
    """At least one. A missing caption is the empty text."""
    size: tuple[int, int] | None = None
    """(width, height) in pixels of the upright picture; it is compared with the file. In a listed source it is the column `size`."""
    crop: tuple[int, int, int, int] | None = None
    """(left, top, right, bottom) in pixels of the upright picture: the part to encode. In a listed source it is the column `crop`."""
    extras: Mapping[str, Json] = field(default_factory=dict[str, Json])
    """All other columns of a manifest. They come out in the batch."""


@dataclass(frozen=True, slots=True)
class Source:
    """One of several sources of a data set, with settings for its samples.

        cs.precompute([cs.Source("photos/"), cs.Source("faces/", name="faces", resolution=512, repeats=10)], model=..., store=...)

    Raises BadInput for an invalid name, number or text.
    """

    data: Any
    """What `precompute` takes as data: a path, a sequence of samples, or a data set of Hugging Face."""
    name: str = ""
    """Comes before the ids of its samples, `name/id`, and is `source` in the batch. By default `source` is the last part of the path."""
    resolution: int | None = None
    """The resolution of its pictures, instead of the one for all sources."""
    repeats: int = 1
    """How often each of its samples comes in an epoch of `MixedDataset.of_sources`. Each is encoded and stored once."""
    weight: float = 1.0
    """A factor for `repeats`: with 0.5 each of its samples comes in every second epoch."""
    caption: str | None = None
    """The caption of its samples that have none, instead of the one for all sources."""
    label: str = ""
    """What `source` is in the batch without a name, instead of the last part of the path, which may move. It is not part of ids."""

    def __post_init__(self) -> None:
        for what in ("name", "label"):
            value = getattr(self, what)
            if not isinstance(value, str) or "/" in value or not value.isprintable():
                raise BadInput(f"the {what} of a source must be a text without `/`, not {value!r}", option=what)
        if isinstance(self.data, str | os.PathLike):
            as_path_str("data of a source", cast("object", self.data), "a path, samples, or a data set")
        if self.resolution is not None:
            object.__setattr__(self, "resolution", as_whole("resolution of a source", self.resolution, least=1))
        object.__setattr__(self, "repeats", as_whole("repeats of a source", self.repeats, least=1))
        object.__setattr__(self, "weight", as_number("weight of a source", self.weight))
        if not isfinite(self.weight) or self.weight < 0:
            refuse("weight of a source", "a number from 0 on", self.weight)
        if self.caption is not None:
            as_text("caption of a source", self.caption)

    @property
    def share(self) -> float:
        """How often each of its samples comes in an epoch."""
        return self.repeats * self.weight

    def as_json(self) -> dict[str, Json]:
        """Return the fields that differ from their defaults, as JSON; `Source(**value)` is the inverse. For data that is a path."""
        return {one.name: getattr(self, one.name) for one in fields(self) if getattr(self, one.name) != one.default}
