"""By what a picture is converted to sRGB: its own profile, one made of what its file says, or nothing. Knows no torch.

Decided from the header alone. `colours` judges the profile.
"""

import struct
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from PIL import Image

from cachestore.core.errors import EncodeFailed
from cachestore.encode.pictures.colours import CLOSE, adobe_rgb, judged, profile_of_codes, profile_of_png
from cachestore.encode.pictures.headers import Boxed, bmp_profile, heif_colours, jp2_colours, png_colours, png_profile

DAMAGED_EXIF: Final = (ArithmeticError, AttributeError, LookupError, OSError, SyntaxError, TypeError, ValueError, Warning, struct.error)
"""What Pillow raises on EXIF that is damaged, which fails no picture. Its warnings may be made errors."""
_SIXTEEN_BIT = ("I;16", "I;16L", "I;16B", "I;16N")
_BASES: Final[Mapping[str, str]] = {
    **dict.fromkeys(("L", "LA", "La", "I", *_SIXTEEN_BIT), "L"),
    **dict.fromkeys(("RGB", "RGBA", "RGBa", "RGBX", "P", "PA", "YCbCr", "HSV"), "RGB"),
    "CMYK": "CMYK",
}
"""The colours of each of Pillow's modes without alpha, as profiles know them. Of mode 1, black and white are what they are."""
_OWN_SPACES: Final[Mapping[str, str]] = {"RGB": "RGB", "RGBA": "RGB", "P": "RGB", "L": "GRAY"}
"""The colours of the modes whose own profile is followed even where it changes little, unless it calls itself sRGB."""
_JPEG_2000_SPACES: Final = (0, 12, 15, 16, 17, 18)
"""The enumerated colour spaces that Pillow decodes: black and white, CMYK, sRGB, grey, sYCC."""
_EXIF, _INTEROP, _COLOUR_SPACE = 0x8769, 0xA005, 0xA001


@dataclass(frozen=True, slots=True)
class Conversion:
    """By what a picture is converted to sRGB."""

    profile: bytes | None = None
    """None if it is taken as sRGB."""
    space: str = ""
    is_exact: bool = False
    """Whether grey of 8 bits is converted without lcms's table, which is the usual way of an embedded profile."""


def conversion_of(image: Image.Image, data: bytes) -> Conversion:
    """Decide by what a picture is converted, from its header. Raises EncodeFailed for HDR."""
    is_grey = image.format == "PNG" and data[25:26] == b"\x04"  # grey and alpha, which Pillow gives as RGBA if it has 16 bits
    base = "L" if is_grey else _BASES.get(image.mode, image.mode)
    if base not in ("L", "RGB", "CMYK"):
        return Conversion()
    profile = _described_by(image, data)
    judgement = None if profile is None else judged(profile, base)
    if judgement is None:
        return Conversion()
    is_usual = profile == image.info.get("icc_profile") and judgement.space == _OWN_SPACES.get(image.mode)
    is_usual = is_usual and not judgement.calls_itself_srgb
    followed = profile if is_usual or judgement.change > CLOSE else None
    return Conversion(followed, judgement.space, is_exact=judgement.space == "GRAY" and not is_usual)


def _described_by(image: Image.Image, data: bytes) -> bytes | None:
    embedded = image.info.get("icc_profile")
    embedded = embedded if isinstance(embedded, bytes) and embedded else None
    if image.format == "PNG":
        return _described_by_png(embedded, data)
    boxed = Boxed()
    if image.format in ("AVIF", "HEIF"):
        boxed = heif_colours(data)
    elif image.format == "JPEG2000":
        boxed = jp2_colours(data)
    elif image.format in ("BMP", "DIB"):
        embedded = bmp_profile(data)
    embedded = embedded or boxed.profile
    if embedded is None and boxed.codes is not None:
        return profile_of_codes(*boxed.codes)
    if boxed.space is not None and boxed.space not in _JPEG_2000_SPACES:
        raise EncodeFailed(
            f"the picture's colours are in space {boxed.space} of JPEG 2000, which is not converted here: save it as sRGB, or remove its"
            " sample"
        )
    return adobe_rgb() if embedded is None and _is_adobe_rgb(image) else embedded


def _described_by_png(embedded: bytes | None, data: bytes) -> bytes | None:
    """Follow the order of the PNG specification (third edition, 4.3): cICP, iCCP, sRGB, then gAMA and cHRM."""
    chunks = png_colours(data)
    if len(chunks.get(b"cICP", b"")) == 4:
        primaries, transfer, matrix, is_full = chunks[b"cICP"]
        if matrix or not is_full:
            raise EncodeFailed("the picture's cICP chunk says that its levels are those of video: save it as sRGB, or remove its sample")
        return profile_of_codes(primaries, transfer)
    if b"iCCP" in chunks:
        return embedded or png_profile(chunks[b"iCCP"])
    return None if b"sRGB" in chunks else profile_of_png(chunks.get(b"gAMA", b""), chunks.get(b"cHRM", b""))


def _is_adobe_rgb(image: Image.Image) -> bool:
    """Whether a camera marked a picture as Adobe RGB, as DCF 2.0 has it: in the EXIF alone, without a profile."""
    exif = image.info.get("exif")
    if not isinstance(exif, bytes) or b"R03" not in exif:
        return False
    with suppress(*DAMAGED_EXIF):  # EXIF is metadata: Pillow raises SyntaxError, struct.error and more where it is damaged
        read = image.getexif()
        return str(read.get_ifd(_INTEROP).get(1, "")).strip("\0 ") == "R03" and read.get_ifd(_EXIF).get(_COLOUR_SPACE) != 1
    return False


def is_sixteen_bit(image: Image.Image) -> bool:
    """Return whether a picture is grey with 16 bits a pixel."""
    return image.mode in _SIXTEEN_BIT or (image.mode == "I" and image.format in ("PNG", "PPM"))
