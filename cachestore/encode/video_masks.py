"""Decode the masks of clips. Imports PyAV, which only the extra `video` installs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
from PIL import Image

from cachestore.encode import images
from cachestore.encode.images import Picture
from cachestore.encode.levels import MOST_COLOUR, SLACK, Extremes
from cachestore.encode.videos import shown_at

Shrink = Callable[[Picture], images.Pixels]
"""Cuts and scales a frame, or one plane of it, as an array [height, width]."""


@dataclass(frozen=True, slots=True)
class MaskFrames:
    """The frames of a mask's video as they are read."""

    levels: images.Pixels
    """uint8 [F, height, width]."""
    transform: dict[str, str]
    """Their part of a key: empty if older versions had the same levels."""
    has_colours: bool = False
    """As of `Levels`."""


def take_masks(file: BinaryIO, times: Sequence[int], shrink: Shrink, *, is_own_alpha: bool = False) -> MaskFrames:
    """Return the levels of a mask (`levels`) in the frames that are shown at these times, each cut and scaled by `shrink`.

    All frames are read alike. With `is_own_alpha` the mask is the video's alpha, white everywhere if it does not vary. Raises EncodeFailed
    as `take`, and for a video that cannot be read as a mask.
    """
    found, is_as_before = Extremes(), {"luminance": True, "alpha": True}
    by_colour, by_alpha = list[images.Pixels](), list[images.Pixels]()
    for picture, uses in shown_at(file, times):
        shown = images.as_image(picture)
        alpha = shown.getchannel("A") if shown.mode == "RGBA" else None
        rgb = shown.convert("RGB")
        grey = rgb.convert("L")
        found.add(rgb, grey, alpha)
        by_colour += [shrink(picture if alpha is None else rgb)] * uses
        plane = Image.new("L", shown.size, 255) if alpha is None else alpha
        by_alpha += [shrink(plane)] * uses
        if alpha is not None:
            before = images.on_white(shown).convert("L").tobytes()
            is_as_before["luminance"] &= grey.tobytes() == before
            is_as_before["alpha"] &= alpha.tobytes() == before
    if is_own_alpha:
        made = np.stack(by_alpha)
        return MaskFrames(made if found.alpha_varies(SLACK) else np.full_like(made, 255), {"levels": "own-alpha"})
    kind = found.kind(slack=SLACK)
    has_colours = kind == "luminance" and found.colour > MOST_COLOUR
    return MaskFrames(np.stack(by_alpha if kind == "alpha" else by_colour), {} if is_as_before[kind] else {"levels": kind}, has_colours)
