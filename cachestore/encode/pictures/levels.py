"""Which numbers of a mask's file say what counts: its alpha or its luminance. Knows no torch.

A mask's levels are numbers, not colours: its profile and gamma are ignored, and 16 bits are scaled to 8. Where its alpha varies, the
alpha is the mask; else its luminance is. It is refused if one cannot tell: if alpha and luminance both vary, or if its values are so small
that it was written in other units. The luminance of colours counts too, but trainers differ in that, so it is reported.
"""

from dataclasses import dataclass, field
from typing import Any, Final, Literal

import numpy as np
from PIL import Image, ImageChops

from cachestore.core.errors import EncodeFailed
from cachestore.encode.pictures import images
from cachestore.encode.pictures.profiles import is_sixteen_bit

Pixels = np.ndarray[Any, np.dtype[np.uint8]]
SLACK: Final = 16
"""By so many levels the luminance of a mask with alpha may vary, and in a video also an alpha: lossy codecs do not keep a constant."""
MOST_COLOUR: Final = 64
"""The channels of a grey mask differ by no more than this: a tint, or the noise of a JPEG."""
_SIXTEEN_BIT: Final = 65_535


@dataclass(slots=True)
class Seen:
    """The least and the greatest of some numbers, over all frames."""

    low: int = 255
    high: int = 0

    def add(self, found: tuple[int, int]) -> None:
        """Take in the (least, greatest) of a frame."""
        self.low, self.high = min(self.low, found[0]), max(self.high, found[1])


@dataclass(slots=True)
class Extremes:
    """What decides how a mask is read: of a picture, or of all frames of a clip."""

    alpha: Seen = field(default_factory=Seen)
    grey: Seen = field(default_factory=Seen)
    shown: Seen = field(default_factory=Seen)
    """The luminance where the alpha is above `SLACK`: the colours of what is transparent say nothing."""
    colour: int = 0
    """The most by which channels differ."""

    def add(self, rgb: Image.Image, grey: Image.Image, alpha: Image.Image | None) -> None:
        """Take in a frame."""
        self.grey.add(_ends(grey))
        if rgb.mode == "RGB":
            red, green, blue = rgb.split()
            pairs = ((red, green), (green, blue), (blue, red))
            self.colour = max(self.colour, *(_ends(ImageChops.difference(one, other))[1] for one, other in pairs))
        if alpha is None:
            self.alpha.add((255, 255))
            return
        self.alpha.add(_ends(alpha))
        if (histogram := grey.histogram(mask=alpha.point([255 if level > SLACK else 0 for level in range(256)]))) and any(histogram):
            there = [level for level, count in enumerate(histogram) if count]
            self.shown.add((there[0], there[-1]))

    def alpha_varies(self, slack: int = 0) -> bool:
        """Return whether the alpha differs by more than `slack`. Raises EncodeFailed for one in other units."""
        if self.alpha.low == self.alpha.high:
            return False
        _refuse_units(self.alpha.high, 255)
        return self.alpha.high - self.alpha.low > slack

    def kind(self, *, slack: int = 0) -> Literal["luminance", "alpha"]:
        """Return what the mask is. Raises EncodeFailed if that is not clear."""
        if self.alpha_varies(slack):
            if self.shown.high - self.shown.low > SLACK:
                raise EncodeFailed(
                    "the mask's alpha varies, and so do its colours where it is not transparent: either may be the mask. Save it without"
                    " alpha, white where it counts"
                )
            return "alpha"
        _refuse_units(self.grey.high, 255)
        return "luminance"


@dataclass(frozen=True, slots=True)
class Levels:
    """A mask as it is read."""

    grey: Image.Image
    """Mode L: 255 where it counts."""
    has_colours: bool = False
    """Whether it is the luminance of colours: some trainers read the red channel instead."""


def read_levels(data: bytes) -> Levels:
    """Decode a mask. Raises EncodeFailed if it is damaged, or cannot be read as one."""
    stored = images.decode_as_stored(data)
    if is_sixteen_bit(stored):
        levels = np.asarray(stored).astype(np.uint32)
        _refuse_units(int(levels.max(initial=0)), _SIXTEEN_BIT)
        return Levels(Image.fromarray(((levels * 255 + _SIXTEEN_BIT // 2) // _SIXTEEN_BIT).astype(np.uint8)))
    rgb, alpha = _colours_of(stored), _alpha_of(stored)
    grey, extremes = rgb.convert("L"), Extremes()
    extremes.add(rgb, grey, alpha)
    if extremes.kind() == "alpha" and alpha is not None:
        return Levels(alpha)
    return Levels(grey, has_colours=extremes.colour > MOST_COLOUR)


def read_alpha(data: bytes) -> Levels:
    """Return the alpha of a picture as its mask: white everywhere if it has none that varies. Raises EncodeFailed as `read_levels`."""
    alpha = _alpha_of(images.decode_as_stored(data)) if images.is_decorated(data) else None
    extremes = Extremes()
    extremes.alpha.add((255, 255) if alpha is None else _ends(alpha))
    return Levels(alpha if alpha and extremes.alpha_varies() else Image.new("L", images.measure(data), 255))


def _alpha_of(stored: Image.Image) -> Image.Image | None:
    """Return the alpha of a picture; None without, and of 16 bits, where a transparent level counts for nothing, as in pictures."""
    return stored.convert("RGBA").getchannel("A") if stored.has_transparency_data and not is_sixteen_bit(stored) else None


def _colours_of(stored: Image.Image) -> Image.Image:
    if stored.mode in ("L", "RGB"):
        return stored
    if stored.mode in ("I", "F"):
        raise EncodeFailed(f"masks of mode {stored.mode!r} (32 bits a pixel) have no defined brightness: save it with 8 or 16 bits a pixel")
    return stored.convert("L") if stored.mode == "1" else stored.convert("RGBA" if stored.has_transparency_data else "RGB").convert("RGB")


def _refuse_units(high: int, whole: int) -> None:
    least = 1 if whole == 255 else 255
    if not 0 < high <= least:
        return
    unit = 1 if high == 1 else 255
    raise EncodeFailed(
        f"the mask has values up to {high} of {whole:,}, so almost nothing of it would count: multiply by {whole // unit}, so that white"
        f" is {whole:,}"
    )


def _ends(band: Image.Image) -> tuple[int, int]:
    low, high = band.getextrema()
    return int(low), int(high)  # pyright: ignore[reportArgumentType] - of one band they are numbers
