"""What has to be loaded for an encoder, and how it is called: settled when planning, used when loading. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cachestore.core.keys import Json
from cachestore.encode.family import TextFamily
from cachestore.encode.models import Component

LENGTH_STEP = 16
"""Where padding is trimmed, captions are padded to a multiple of this: few shapes, and a value that does not depend on the batch."""


@dataclass(frozen=True, slots=True)
class Padded:
    """A caption for a pipeline, to be padded to no more than `length` rows."""

    caption: str
    length: int


@dataclass(frozen=True, slots=True)
class Shown:
    """A caption for a pipeline, with the pictures that its text encoder is shown: Pillow's, as they are given to `encode_prompt`."""

    caption: str
    pictures: tuple[Any, ...]


Payload = str | Padded | Shown | tuple[int, ...]
"""A caption for a pipeline, which tokenises it again; token ids for a text encoder that stands alone."""


@dataclass(frozen=True, slots=True)
class TextSetup:
    """What has to be loaded, and how it is called."""

    family: TextFamily
    components: Mapping[str, Component]
    max_tokens: int
    args: Mapping[str, Json]
    dtype: str
    settings: Mapping[str, Json] = field(default_factory=dict[str, Json])
    """Plain values that the pipeline is built with."""
    asked: Mapping[str, Json] = field(default_factory=dict[str, Json])
    """What the family asks of components that are not loaded, by `COMPONENT.FIELD`."""
    is_bucketed: bool = False
    """Whether captions are padded to their own length, rounded up, instead of to the limit."""


@dataclass(frozen=True, slots=True)
class LatentsSetup:
    """What has to be loaded, and in which form its output is kept."""

    components: Mapping[str, Component]
    dtype: str
    stored: str
    channels: int
    factor: int
    patch: int
    has_frames: bool = False
    """Whether the VAE takes videos: a picture is one of a single frame."""
    temporal_factor: int = 1
    """So many frames make one of latents after the first."""
    script_resizes: str | None = None
    """How diffusers' own training script of the family resizes pictures, where it is not by Lanczos."""

    @property
    def multiple(self) -> int:
        """What both sides of a picture must be a multiple of."""
        return self.factor * self.patch


def text_width(config: Mapping[str, Json]) -> int:
    """The width of a text encoder's rows by its config.json; 0 where that does not say."""
    inner: Mapping[str, Json] = config.get("text_config") or {}
    return int(config.get("hidden_size") or config.get("d_model") or inner.get("hidden_size") or 0)


def pooled_width(config: Mapping[str, Json], class_name: str) -> int:
    """The width of what a text encoder pools: CLIP's with a projection may be of another width than its rows."""
    projected = config.get("projection_dim") if class_name.endswith("WithProjection") else None
    return int(projected or text_width(config))


def padded_length(tokens: int, limit: int) -> int:
    """The length to which a caption of so many tokens is padded, at least 1."""
    return min(max(limit, tokens), max(1, -(-tokens // LENGTH_STEP)) * LENGTH_STEP)
