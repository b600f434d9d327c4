"""Decode picture files to upright RGB, resize and crop them. Pillow is the reference for every format.

The rules are part of every key, through the name of the transform (`TRANSFORM`):

* EXIF orientation is applied. The first frame of an animated file is used.
* Transparency is composited on white, as on a web page. Dropping the alpha channel would show the hidden colour of transparent pixels,
  often black or noise.
* 16-bit grey is scaled to 8 bits, not clipped. Floating-point and 32-bit pictures have no defined range and are refused.
* A usable ICC profile other than sRGB is converted to sRGB. An unusable one is ignored, as viewers do.
* A file that ends early is refused.
"""

import importlib
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from functools import cache
from io import BytesIO
from math import sqrt
from typing import Any

import numpy as np
from PIL import Image, ImageCms, UnidentifiedImageError

from cachestore.core.errors import EncodeFailed
from cachestore.encode.buckets import CropBox, Size, crop_box

Pixels = np.ndarray[Any, np.dtype[np.uint8]]

TRANSFORM = "pillow-lanczos-cover-center/1"
"""The name of all steps from bytes to pixels. Raise the number when a rule above changes, so that equal keys stay interchangeable."""

MASK_TRANSFORM = "pillow-box-cover/1"
"""The same for masks."""

AREA_TRANSFORM = "pillow-lanczos-area/1"
"""The same for pictures that keep their aspect ratio (`fit_area`)."""

FORMATS = ("JPEG", "PNG", "WEBP", "AVIF", "GIF", "BMP", "DIB", "TIFF", "PPM", "JPEG2000")
"""The formats that are opened. EPS and similar ones are left out on purpose, as Pillow would run Ghostscript on them."""

_ORIENTATION = 0x0112
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_LATE_PNG_MARKS = (b"eXIf", b"Raw profile type", b"com.adobe.xmp")
_SIXTEEN_BIT = ("I;16", "I;16L", "I;16B", "I;16N")
_COLOUR_SPACES = {"RGB": "RGB", "RGBA": "RGB", "L": "GRAY", "CMYK": "CMYK"}
_SRGB = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB"))


def measure(data: bytes) -> Size:
    """Return the upright (width, height) of a picture, from its header alone. Raises EncodeFailed if it cannot be read."""
    with _opened(data) as image:
        size = Size(*(reversed(image.size) if _orientation(image, data) >= 5 else image.size))
    if min(size) < 1:
        raise EncodeFailed(f"the picture has no pixels: its header says {size.width} x {size.height}")
    return size


def measure_stored(data: bytes) -> Size:
    """Return the size as `measure`, but before the EXIF orientation is applied. Raises EncodeFailed."""
    with _opened(data) as image:
        return Size(*image.size)


def decode(data: bytes) -> Image.Image:
    """Return the picture, upright, as 8-bit RGB in sRGB. Raises EncodeFailed if it is damaged or incomplete."""
    with _opened(data) as image:
        orientation = _orientation(image, data)
        picture = _rgb(_decoded(image, data))
    turn = _TURNS.get(orientation)
    return picture if turn is None else picture.transpose(turn)


def fit(image: Image.Image, bucket: Size, box: CropBox | None = None) -> "Pixels":
    """Scale a picture to cover the bucket (antialiased Lanczos) and crop it as `box` says, else at the centre: uint8 [height, width, 3].

    The crop is resampled directly from the source, so that a picture of 1 x 100,000 pixels needs no huge intermediate picture.
    """
    box = crop_box(Size(*image.size), bucket) if box is None else box
    return np.ascontiguousarray(image.resize(bucket, Image.Resampling.LANCZOS, box=_box(image, box)))


def fit_mask(image: Image.Image, size: Size, box: CropBox, within: tuple[tuple[int, int, int, int], Size] | None = None) -> "Pixels":
    """Crop a mask as its picture is cropped, and shrink it: uint8 [height, width], each pixel the mean of the area that it covers.

    The mask covers the same frame as its picture, at any resolution. If only a part of the picture is used, `within` has its box in pixels
    and the size of the picture.
    """
    return np.ascontiguousarray(image.convert("L").resize(size, Image.Resampling.BOX, box=_box(image, box, within)))


def _box(
    image: Image.Image, box: CropBox, within: tuple[tuple[int, int, int, int], Size] | None = None
) -> tuple[float, float, float, float]:
    """Return the crop box in pixels of the unscaled picture."""
    part, whole = within or ((0, 0, 1, 1), Size(1, 1))
    one_across, one_down = image.width / whole.width, image.height / whole.height
    from_left, from_top = part[0] * one_across, part[1] * one_down
    across, down = (part[2] - part[0]) * one_across / box.resized.width, (part[3] - part[1]) * one_down / box.resized.height
    left, top, right, bottom = box.crop
    ends = min(from_left + right * across, image.width), min(from_top + bottom * down, image.height)
    return from_left + left * across, from_top + top * down, *ends


def fit_area(image: Image.Image, area: int, step: int) -> Image.Image:
    """Scale a picture to about `area` pixels by Lanczos. It keeps its aspect ratio; its sides become multiples of `step`.

    Rounds as the pipelines of Qwen-Image-Edit do. Raises EncodeFailed if a side would be shorter than `step`.
    """
    ratio = image.width / image.height
    width = sqrt(area * ratio)
    sides = (round(width / step) * step, round(width / ratio / step) * step)
    if min(sides) < step:
        raise EncodeFailed(
            f"the picture is too long and thin for the text encoder ({image.width} x {image.height}): crop it, or remove its sample"
        )
    return image.resize(sides, Image.Resampling.LANCZOS)


@contextmanager
def _opened(data: bytes) -> Generator[Image.Image]:
    """Yield an opened picture, not yet decoded. Any error inside the block becomes an EncodeFailed with the reason."""
    if not data:
        raise EncodeFailed("the file is empty (0 bytes): copy it again, or remove its sample")
    try:
        Image.init()
        with Image.open(BytesIO(data), formats=FORMATS) as image:
            yield image
    except (EncodeFailed, MemoryError):
        raise
    except UnidentifiedImageError as error:
        raise EncodeFailed(
            f"not a picture that can be read: its {len(data):,} bytes begin with {data[:12]!r}; formats are {', '.join(FORMATS)}"
        ) from error
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise EncodeFailed(
            f"the picture has too many pixels to be decoded safely ({error}): use a smaller copy, or remove its sample"
        ) from error
    except Exception as error:  # on damaged bytes Pillow's decoders raise SyntaxError, struct.error and more
        raise EncodeFailed(f"the picture is damaged or incomplete: {error or type(error).__name__}") from error


def _orientation(image: Image.Image, data: bytes) -> int:
    """Return the EXIF orientation (1 to 8) that is still to be applied; an invalid one counts as 1, upright."""
    if image.format == "TIFF":
        return 1  # Pillow applies it itself when it decodes them, and reports the upright size
    if image.format == "PNG" and not any(mark in data for mark in _LATE_PNG_MARKS):
        return 1  # else Pillow would decode all pixels to look for a chunk behind them: 20 files a second instead of thousands
    value = image.getexif().get(_ORIENTATION)
    return value if isinstance(value, int) and 1 <= value <= 8 else 1


def _decoded(image: Image.Image, data: bytes) -> Image.Image:
    """Decode the pixels of a picture: plain three-channel JPEGs by simplejpeg, if installed, which takes 0.6 of the time.

    Pillow decodes everything else, and what simplejpeg refuses.
    """
    decode_jpeg = _fast_decoder()
    if decode_jpeg is not None and image.format == "JPEG" and image.mode == "RGB" and image.info.get("adobe_transform", 1) == 1:
        with suppress(ValueError):
            fast = Image.fromarray(decode_jpeg(data, colorspace="RGB", fastdct=False, fastupsample=False, strict=True))
            if fast.size == image.size:
                fast.info = image.info
                return fast
    image.load()
    return image


@cache
def _fast_decoder() -> Callable[..., Any] | None:
    """Return simplejpeg's decoder if it is installed and decodes a small picture to exactly the same pixels as Pillow; else None.

    Both use libjpeg-turbo with its exact transform. If one was built on another library, pixels differ and keys would be wrong.
    """
    try:
        simplejpeg: Any = importlib.import_module("simplejpeg")
    except ImportError:
        return None
    for subsampling in (0, 2):
        buffer = BytesIO()
        Image.fromarray(_sample_pixels()).save(buffer, "JPEG", quality=90, subsampling=subsampling)
        with Image.open(buffer) as image:
            expected = np.asarray(image)
        if not np.array_equal(simplejpeg.decode_jpeg(buffer.getvalue(), colorspace="RGB"), expected):
            return None
    return simplejpeg.decode_jpeg


def _sample_pixels() -> "np.ndarray[Any, np.dtype[np.uint8]]":
    rows, columns = np.mgrid[0:61, 0:83]
    channels = [(columns * 3 + rows) % 256, (rows * columns) // 20 % 256, (columns // 9 + rows // 7) % 2 * 255]
    return np.stack(channels, axis=-1).astype(np.uint8)


def _rgb(image: Image.Image) -> Image.Image:
    """Convert a decoded picture of any mode to 8-bit sRGB without alpha."""
    if image.mode in _SIXTEEN_BIT or (image.mode == "I" and image.format in ("PNG", "PPM")):
        return _from_sixteen_bit(image)
    if image.mode in ("I", "F"):
        raise EncodeFailed(
            f"pictures of mode {image.mode!r} (32 bits a pixel) have no defined brightness; save it with 8 or 16 bits a channel"
        )
    profile = image.info.get("icc_profile")
    if image.has_transparency_data:
        return on_white(_in_srgb(image.convert("RGBA"), profile, "RGBA"))
    if image.mode == "P":
        image = image.convert("RGB")
    return _in_srgb(image, profile, "RGB").convert("RGB")


def _from_sixteen_bit(image: Image.Image) -> Image.Image:
    """Scale 0..65535 to 0..255. Pillow's own conversion would clip everything above 255 to white."""
    levels = np.asarray(image).astype(np.uint32)
    return Image.fromarray(((levels * 255 + 32_767) // 65_535).astype(np.uint8)).convert("RGB")


def on_white(image: Image.Image) -> Image.Image:
    """Composite RGBA on white."""
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")


def _in_srgb(image: Image.Image, profile: object, mode: str) -> Image.Image:
    """Convert a picture to sRGB by its ICC profile; return it unchanged if there is no usable profile for its colour mode."""
    space = _COLOUR_SPACES.get(image.mode)
    if not isinstance(profile, bytes) or space is None:
        return image
    try:
        source: Any = ImageCms.ImageCmsProfile(BytesIO(profile))
        if source.profile.xcolor_space.strip() != space or "sRGB" in ImageCms.getProfileDescription(source):
            return image
        converted = ImageCms.profileToProfile(image, source, _SRGB, outputMode=mode)
    except (ImageCms.PyCMSError, OSError):
        return image
    return image if converted is None else converted
