"""What a trainer brings: samples, with their images and captions. Values only; `sources` makes them from folders and files."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from cachestore.keys import Json

IMAGE = "image"
"""The role of the picture that is trained on. Other roles are `control`, `mask` and `video`."""

CONTROL = "control"
"""The role of pictures that the model is shown beside the caption: what is to be edited, references."""

CAPTION = "caption"
"""The role of captions; every other role is one of images."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One row of a source: images by role, captions, and columns that travel with it."""

    id: str
    """Unique within the source, NFC-normalised: a relative path with `/` and extension, a manifest's id, or a prompt's digest."""
    images: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    """References by role, in order. For sources on disk: paths relative to the source, with `/`."""
    captions: tuple[str, ...] = ("",)
    """At least one; a missing caption is the empty one."""
    size: tuple[int, int] | None = None
    """(width, height) in pixels, where a manifest says it."""
    crop: tuple[int, int, int, int] | None = None
    """(left, top, right, bottom) in pixels of the upright image, where a manifest says it."""
    extras: Mapping[str, Json] = field(default_factory=dict[str, Json])
    """Every other column of a manifest; comes out in the batch."""
