"""What a trainer brings: samples, with their images and captions. Values only; the room `source` makes them from folders and files."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from math import isfinite
from typing import Any, cast

from cachestore.core.arguments import as_number, as_place, as_text, as_whole, refuse
from cachestore.core.errors import BadInput
from cachestore.core.keys import Json

IMAGE = "image"
"""The role of the picture that is trained on."""

VIDEO = "video"
"""The role of the video that is trained on, in the place of a picture."""

CONTROL = "control"
"""The role of pictures that the model is shown beside the caption: what is to be edited, references."""

MASK = "mask"
"""The role of masks: grey pictures in the frame of the picture that is trained on, white where it counts."""

CAPTION = "caption"
"""The role of captions; every other role is one of images."""

ROLES = (IMAGE, CONTROL, MASK, VIDEO)
"""The roles of images."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One row of a source: images by role, captions, and columns that travel with it."""

    id: str
    """Unique within the source, NFC-normalised: a relative path with `/` and extension, a manifest's id, or a prompt's digest."""
    images: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """By role a tuple, in order. Of a caller's own sample: paths, bytes of files, or PIL images; one may stand without the tuple.
    Of a listed source: references, which for sources on disk are paths relative to the source, with `/`."""
    captions: tuple[str, ...] = ("",)
    """At least one; a missing caption is the empty one."""
    size: tuple[int, int] | None = None
    """(width, height) in pixels of the upright picture, which is held against its file. Of a listed source it is the column `size`."""
    crop: tuple[int, int, int, int] | None = None
    """(left, top, right, bottom) in pixels of the upright picture: the part that is encoded. Of a listed source it is the column `crop`."""
    extras: Mapping[str, Json] = field(default_factory=dict[str, Json])
    """Every other column of a manifest; comes out in the batch."""


@dataclass(frozen=True, slots=True)
class Source:
    """One of several sources of a data set, and what is particular to its samples.

        cs.precompute([cs.Source("photos/"), cs.Source("faces/", name="faces", resolution=512, repeats=10)], model=..., store=...)

    Raises BadInput for a name, number or text that cannot be meant.
    """

    data: Any
    """What `precompute` takes as data: a path, a sequence of samples, or a data set of Hugging Face."""
    name: str = ""
    """Stands before the ids of its samples, `name/id`, and is `source` in the batch, which else is the last part of the path."""
    resolution: int | None = None
    """Of its pictures, in place of the one for all."""
    repeats: int = 1
    """How often each of its samples comes in an epoch of `MixedDataset.of_sources`. Nothing is encoded or stored more often for it."""
    weight: float = 1.0
    """Times `repeats`: 0.5 has each of its samples come in every second epoch."""
    caption: str | None = None
    """What its samples without a caption get, in place of the one for all."""
    label: str = ""
    """What `source` says of one without a name, in place of the last part of its path, which may move. Does not stand before ids."""

    def __post_init__(self) -> None:
        for what in ("name", "label"):
            value = getattr(self, what)
            if not isinstance(value, str) or "/" in value or not value.isprintable():
                raise BadInput(f"the {what} of a source must be a text without `/`, not {value!r}")
        if isinstance(self.data, str | os.PathLike):
            as_place("data of a source", cast("object", self.data), "a path, samples, or a data set")
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
        """What differs from the default, as a JSON object; the inverse is `Source(**value)`. For data that is a path."""
        return {one.name: getattr(self, one.name) for one in fields(self) if getattr(self, one.name) != one.default}
