"""What must be loaded for an encoder, and how it is called. It is decided when planning. Does not import torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cachestore.core.keys import Json
from cachestore.encode.families.resamplers import DEFAULT, Resample
from cachestore.encode.families.row import TextFamily
from cachestore.encode.models.folders import Component

LENGTH_STEP = 16
"""Captions are padded to a multiple of this if padding is dropped later. So there are few shapes, and values do not depend on the batch."""


@dataclass(frozen=True, slots=True)
class OwnCaptions:
    """The caption of each text encoder of a pipeline, in the order of `TextFamily.encoders`. They are not all equal."""

    each: tuple[str, ...]


Caption = str | OwnCaptions
"""A caption for all text encoders, or one for each."""


def caption_at(caption: Caption, index: int) -> str:
    """Return the caption that the text encoder with this index reads."""
    return caption if isinstance(caption, str) else caption.each[index]


@dataclass(frozen=True, slots=True)
class Padded:
    """A caption for a pipeline, which pads it to at most `length` rows."""

    caption: Caption
    length: int


@dataclass(frozen=True, slots=True)
class WithPictures:
    """A caption for a pipeline, with the Pillow pictures that are passed to `encode_prompt`."""

    caption: str
    pictures: tuple[Any, ...]


Payload = Caption | Padded | WithPictures | tuple[int, ...]
"""A caption for a pipeline, which tokenises it again; token ids for a text encoder without a pipeline."""


@dataclass(frozen=True, slots=True)
class TextSetup:
    """What must be loaded for a text encoder, and how it is called."""

    family: TextFamily
    components: Mapping[str, Component]
    max_tokens: int
    args: Mapping[str, Json]
    dtype: str
    settings: Mapping[str, Json] = field(default_factory=dict[str, Json])
    asked: Mapping[str, Json] = field(default_factory=dict[str, Json])
    """The values of the family's `asks`, by `COMPONENT.FIELD`."""
    is_bucketed: bool = False
    """Whether captions are padded to their own length, rounded up, instead of to the limit."""


@dataclass(frozen=True, slots=True)
class LatentsSetup:
    """What must be loaded for a VAE, and in which form its output is stored."""

    components: Mapping[str, Component]
    dtype: str
    stored: str
    channels: int
    factor: int
    patch: int
    has_frames: bool = False
    """Whether the VAE takes videos. A picture is then a video of one frame."""
    is_of_pictures: bool = False
    """Whether it is given no clip of more than one frame, though it has an axis of frames."""
    has_alpha: bool = False
    """Whether the VAE takes a fourth channel."""
    mask_channels: int = 0
    """If pixels say which of them are given: into how many channels the mask of the others is folded; 0 to leave it out."""
    is_split: bool = False
    """Whether the pixels that are not given are encoded too, behind those that are given. Both have zeros in place of the others."""
    temporal_factor: int = 1
    """How many frames make one latent frame, after the first."""
    script_resizes: str | None = None
    """The interpolation with which diffusers' own training script of the family resizes pictures, if it is not Lanczos."""
    resample: Resample = DEFAULT

    @property
    def multiple(self) -> int:
        """Both sides of a bucket must be multiples of this."""
        return self.factor * self.patch


def text_width(config: Mapping[str, Json]) -> int:
    """Return the width of a text encoder's rows by its config.json; 0 if it is not there."""
    inner: Mapping[str, Json] = config.get("text_config") or {}
    return int(config.get("hidden_size") or config.get("d_model") or inner.get("hidden_size") or 0)


def pooled_width(config: Mapping[str, Json], class_name: str) -> int:
    """Return the width of a text encoder's pooled output. With a projection it may differ from the width of the rows."""
    projected = config.get("projection_dim") if class_name.endswith("WithProjection") else None
    return int(projected or text_width(config))


def padded_length(tokens: int, limit: int) -> int:
    """Return the length to which a caption of this many tokens is padded: a multiple of LENGTH_STEP, or the limit."""
    return min(max(limit, tokens), max(1, -(-tokens // LENGTH_STEP)) * LENGTH_STEP)
