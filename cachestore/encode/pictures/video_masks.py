"""Decode the masks of clips. Imports PyAV, which only the extra `video` installs."""

from collections.abc import Callable, Sequence
from typing import BinaryIO, NamedTuple

import numpy as np
from PIL import Image

from cachestore.encode.pictures import images
from cachestore.encode.pictures.images import Picture
from cachestore.encode.pictures.levels import MOST_COLOUR, SLACK, Extremes
from cachestore.encode.pictures.videos import shown_at

Shrink = Callable[[Picture], images.Pixels]
"""Cuts and scales a frame, or one plane of it, as an array [height, width]."""


class MaskFrames(NamedTuple):
    """The frames of a mask's video as they are read."""

    levels: images.Pixels
    """uint8 [F, height, width]."""
    has_colours: bool = False
    """As of `Levels`."""


def take_masks(file: BinaryIO, times: Sequence[int], shrink: Shrink, *, is_own_alpha: bool = False) -> MaskFrames:
    """Return a mask's levels in the frames that are shown at these times, each cut and scaled by `shrink`. Raises EncodeFailed.

    All are read alike. With `is_own_alpha` the mask is the video's alpha, white everywhere if it does not vary.
    """
    extremes = Extremes()
    by_colour, by_alpha = list[images.Pixels](), list[images.Pixels]()
    for picture, uses in shown_at(file, times):
        shown = images.as_image(picture)
        alpha = shown.getchannel("A") if shown.mode == "RGBA" else None
        rgb = shown.convert("RGB")
        extremes.add(rgb, rgb.convert("L"), alpha)
        by_colour += [shrink(picture if alpha is None else rgb)] * uses
        by_alpha += [shrink(Image.new("L", shown.size, 255) if alpha is None else alpha)] * uses
    if is_own_alpha:
        levels = np.stack(by_alpha)
        return MaskFrames(levels if extremes.alpha_varies(SLACK) else np.full_like(levels, 255))
    if extremes.kind(slack=SLACK) == "alpha":
        return MaskFrames(np.stack(by_alpha))
    return MaskFrames(np.stack(by_colour), extremes.colour > MOST_COLOUR)
