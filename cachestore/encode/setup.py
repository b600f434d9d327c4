"""What has to be loaded for an encoder, and how it is called: settled when planning, used when loading. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass

from cachestore.encode.families import TextFamily
from cachestore.encode.models import Component
from cachestore.keys import Json

LENGTH_STEP = 16
"""Where padding is trimmed, captions are padded to a multiple of this: few shapes, and a value that does not depend on the batch."""

Payload = str | tuple[int, ...]
"""A caption for a pipeline, which tokenises it again; token ids for a text encoder that stands alone."""


@dataclass(frozen=True, slots=True)
class TextSetup:
    """What has to be loaded, and how it is called."""

    family: TextFamily
    components: Mapping[str, Component]
    max_tokens: int
    args: Mapping[str, Json]
    dtype: str


@dataclass(frozen=True, slots=True)
class LatentsSetup:
    """What has to be loaded, and in which form its output is kept."""

    components: Mapping[str, Component]
    dtype: str
    stored: str
    channels: int
    factor: int
    patch: int

    @property
    def multiple(self) -> int:
        """What both sides of a picture must be a multiple of."""
        return self.factor * self.patch


def padded_length(tokens: int, limit: int) -> int:
    """The length to which a caption of so many tokens is padded, at least 1."""
    return min(max(limit, tokens), max(1, -(-tokens // LENGTH_STEP)) * LENGTH_STEP)
