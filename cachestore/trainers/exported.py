"""What an export hands to a trainer's format, which names and fills files of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from cachestore.core.keys import Json
from cachestore.core.raw_tensors import Latents, Raw, refuse
from cachestore.core.spelling import option
from cachestore.encode.pictures.bucket_rules import BucketSettings
from cachestore.trainers.families import Family
from cachestore.trainers.matching import ClipFrames


@dataclass(frozen=True, slots=True)
class Named:
    """What the name of an exported file is made from."""

    reference: str
    """Of the picture, relative to the source; the sample's id if it has no picture, or one in memory."""
    caption: str = ""
    size: tuple[int, int] | None = None
    """(width, height) of the source picture in pixels."""
    bucket: tuple[int, int] | None = None
    span: ClipFrames | None = None
    """The frames of a video."""
    fps: float | None = None
    """The rate of these frames; None for a picture, or if it is unknown."""
    resized: tuple[int, int] | None = None
    crop: tuple[int, int, int, int] | None = None
    tokens: int | None = None
    is_part: bool = False
    """Whether the crop was chosen inside of the sample's own crop."""
    is_prompt: bool = False
    """Whether the sample is a caption without a picture."""
    is_flipped: bool = False
    read_as: str | None = None
    """The caption as the trainer reads it from its file; None if no such file is known."""
    info: Mapping[str, Json] = field(default_factory=dict[str, Json])
    """What the trainer wrote beside the tensors of the file that was imported."""


@dataclass(frozen=True, slots=True)
class ExportVariant:
    """One exported variant of a picture: at one resolution, plain or mirrored."""

    named: Named
    latents: Latents
    mask: Raw | None = None
    """uint8 `[1, h, w]`, with the size of the latents; 255 where the picture counts."""
    controls: tuple[Raw, ...] = ()
    """Latents of the control images, in order, in the state and dtype of the picture's latents."""


def check_beginning(named: Named, trainer: str) -> None:
    """Raise EncodeFailed for a clip that is not the video's beginning."""
    if named.span is not None and named.span.start:
        begins = f"its clip begins at frame {named.span.start}, but {trainer} takes frames from the beginning"
        raise refuse(f"{begins}: precompute without {option('clips')}")


class Listed(NamedTuple):
    """A written file of latents, for the lists that a trainer keeps of them."""

    path: str
    """Relative to the exported folder."""
    tree: str
    """The part of the path for its source, resolution and kind; empty if there is one of each."""
    source: str
    """The absolute path of the picture or video."""
    named: Named
    family: Family


@dataclass(frozen=True, slots=True)
class Block:
    """What a block of a trainer's configuration names: the exported pictures or videos of one source at one resolution."""

    name: str
    """The name of the data set, with those of source and resolution if there are several."""
    data: str
    """The folder of the pictures; empty if it is not known."""
    folder: str
    """The folder of the exported files that stand for this block."""
    text_folder: str
    """The folder of the exported text, where it lies elsewhere."""
    role: str
    family: Family | None
    """Of the latents; None if there are none."""
    buckets: BucketSettings | None
    """None if the latents were imported, and no settings give their buckets."""
    has_text: bool = False
    has_flips: bool = False
    has_masks: bool = False
    frames: tuple[int, ...] = ()
