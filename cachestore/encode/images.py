"""Decode picture files to upright RGB, and resize by Pillow, which is the reference for every format. Knows no torch.

The rules are part of every key, through the name of the transform (`resamplers`):

* EXIF orientation is applied. The first frame of an animated file is used.
* Transparency is composited on white, as on a web page. Dropping the alpha channel would show the hidden colour of transparent pixels,
  often black or noise.
* 16-bit grey is scaled to 8 bits, not clipped. Floating-point and 32-bit pictures have no defined range and are refused.
* A usable ICC profile other than sRGB is converted to sRGB. An unusable one is ignored, as viewers do.
* A file that ends early is refused.
"""

import importlib
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from io import BytesIO
from math import sqrt
from typing import Any, BinaryIO

import numpy as np
from PIL import Image, ImageCms, UnidentifiedImageError

from cachestore.core.errors import EncodeFailed
from cachestore.encode.buckets import CropBox, Size

Pixels = np.ndarray[Any, np.dtype[np.uint8]]
Picture = Image.Image | Pixels
"""An upright picture in 8-bit RGB as its decoder returned it: Pillow's, or a writable array [height, width, 3]."""

MASK_TRANSFORM = "pillow-box-cover/1"
"""The name of all steps from a mask's bytes to pixels. Raise the number when a rule above changes."""

VIDEO_MASK_TRANSFORM = "pyav-swscale-601-pillow-box/1"
"""The same from a mask's video to pixels."""

AREA_TRANSFORM = "pillow-lanczos-area/1"
"""The same for pictures that keep their aspect ratio (`fit_area`)."""

FORMATS = ("JPEG", "PNG", "WEBP", "AVIF", "GIF", "BMP", "DIB", "TIFF", "PPM", "JPEG2000")
"""The formats that are opened. EPS and similar ones are left out on purpose, as Pillow would run Ghostscript on them."""

ANIMATED = ("GIF", "PNG", "WEBP", "AVIF")
"""Those of them whose files may be animations."""

_ORIENTATION = 0x0112
_TURNS: Mapping[int, Callable[[Any], Any]] = {
    2: lambda pixels: pixels[:, ::-1],
    3: lambda pixels: pixels[::-1, ::-1],
    4: lambda pixels: pixels[::-1],
    5: np.transpose,
    6: lambda pixels: np.rot90(pixels, -1),
    7: lambda pixels: np.transpose(pixels[::-1, ::-1]),
    8: np.rot90,
}
"""What sets a picture upright, by its EXIF orientation."""
_TRANSPOSES = {
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
        raise EncodeFailed(f"the picture has no pixels: its header says {size.width} x {size.height}; copy it again, or remove its sample")
    return size


def measure_stored(data: bytes) -> Size:
    """Return the size as `measure`, but before the EXIF orientation is applied. Raises EncodeFailed."""
    with _opened(data) as image:
        return Size(*image.size)


def decode(data: bytes) -> Image.Image:
    """Return the picture, upright, as 8-bit RGB in sRGB. Raises EncodeFailed if it is damaged or incomplete."""
    return as_image(decode_picture(data))


def decode_picture(data: bytes) -> Picture:
    """Decode as `decode`, but leave the pixels where the decoder put them. Raises EncodeFailed."""
    with _opened(data) as image:
        orientation = _orientation(image, data)
        picture = _rgb(_decoded(image, data), image.info)
    return _turned(picture, orientation) if orientation in _TURNS else picture


def decode_as_stored(data: bytes) -> Image.Image:
    """Return the picture upright, in its own mode, before any profile or transparency is applied. Raises EncodeFailed."""
    with _opened(data) as image:
        orientation = _orientation(image, data)
        image.load()
        stored = transposed(image.copy(), orientation)
        stored.format = image.format
    return stored


def is_decorated(data: bytes) -> bool:
    """Return whether a picture has an alpha or a profile, from its header. Raises EncodeFailed."""
    with _opened(data) as image:
        return bool(image.has_transparency_data) or "icc_profile" in image.info


def transposed(image: Image.Image, orientation: int) -> Image.Image:
    """Set a picture of any mode upright by its EXIF orientation."""
    return image.transpose(_TRANSPOSES[orientation]) if orientation in _TRANSPOSES else image


def count_frames(file: BinaryIO) -> int:
    """Return how many frames a file of pictures has; 0 if it is none that can be opened. Leaves the file at its beginning."""
    try:
        Image.init()
        with Image.open(file, formats=ANIMATED) as image:
            return int(getattr(image, "n_frames", 1)) - int(getattr(image, "default_image", False))
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001 - as in `_opened`: on damaged bytes Pillow's decoders raise anything
        return 0
    finally:
        file.seek(0)


def decode_frames(data: bytes) -> Iterator[tuple[Image.Image, float]]:
    """Yield each frame of a WebP or AVIF, upright and whole, as sRGB in RGBA, and how many milliseconds it is shown. Raises EncodeFailed.

    Pillow's other animations are not for this: it restores what was before a frame of a PNG wrongly, if that was decoded.
    """
    with _opened(data) as image:
        orientation, profile = _orientation(image, data), image.info.get("icc_profile")
        for number in range(int(getattr(image, "n_frames", 1))):
            image.seek(number)
            image.load()
            frame = _in_srgb(image.convert("RGBA"), profile, "RGBA")
            yield transposed(frame, orientation), float(image.info.get("duration") or 0)


def as_image(picture: Picture) -> Image.Image:
    """Return a picture as Pillow's."""
    return picture if isinstance(picture, Image.Image) else Image.fromarray(picture)


def as_pixels(picture: Picture) -> Pixels:
    """Return a picture as a writable array, which torch can use."""
    return np.array(picture) if isinstance(picture, Image.Image) else picture


def cut_out(picture: Picture, box: tuple[int, int, int, int]) -> Picture:
    """Return the part of a picture inside a box (left, top, right, bottom)."""
    left, top, right, bottom = box
    return picture.crop(box) if isinstance(picture, Image.Image) else np.ascontiguousarray(picture[top:bottom, left:right])


def resize_crop(image: Image.Image, bucket: Size, box: CropBox, resampling: Image.Resampling = Image.Resampling.LANCZOS) -> Pixels:
    """Scale a picture to cover the bucket by one of Pillow's antialiased filters, and crop it: uint8 [height, width, 3].

    The crop is resampled directly from the source, so that a picture of 1 x 100,000 pixels needs no huge intermediate picture.
    """
    return np.array(image.resize(bucket, resampling, box=_box(image, box)))


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
        raise EncodeFailed(
            f"the picture is damaged or incomplete ({error or type(error).__name__}): copy it again, or remove its sample"
        ) from error


def _orientation(image: Image.Image, data: bytes) -> int:
    """Return the EXIF orientation (1 to 8) that is still to be applied; an invalid one counts as 1, upright."""
    if image.format == "TIFF":
        return 1  # Pillow applies it itself when it decodes them, and reports the upright size
    if image.format == "PNG" and not any(mark in data for mark in _LATE_PNG_MARKS):
        return 1  # else Pillow would decode all pixels to look for a chunk behind them: 20 files a second instead of thousands
    value = image.getexif().get(_ORIENTATION)
    return value if isinstance(value, int) and 1 <= value <= 8 else 1


def _decoded(image: Image.Image, data: bytes) -> Picture:
    """Decode the pixels of a picture: plain three-channel JPEGs by simplejpeg, if installed, which takes 0.6 of the time.

    Pillow decodes everything else, and what simplejpeg refuses.
    """
    decode_jpeg = _fast_decoder()
    if decode_jpeg is not None and image.format == "JPEG" and image.mode == "RGB" and image.info.get("adobe_transform", 1) == 1:
        with suppress(ValueError):
            fast = decode_jpeg(data, colorspace="RGB", fastdct=False, fastupsample=False, strict=True)
            if fast.shape[1::-1] == image.size:
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


def _turned(picture: Picture, orientation: int) -> Pixels:
    """Set a picture upright. Each pixel is moved as a whole, which takes half the time of moving its three bytes."""
    whole = as_pixels(picture).view("V3")[..., 0]
    turned = np.ascontiguousarray(_TURNS[orientation](whole))
    return turned.view(np.uint8).reshape(*turned.shape, 3)


def _rgb(picture: Picture, info: Mapping[Any, Any]) -> Picture:
    """Convert a decoded picture of any mode to 8-bit sRGB without alpha. `info` is what Pillow read beside the pixels."""
    profile = info.get("icc_profile")
    if not isinstance(picture, Image.Image):
        return picture if _foreign_profile("RGB", profile) is None else _in_srgb(Image.fromarray(picture), profile, "RGB")
    if picture.mode in _SIXTEEN_BIT or (picture.mode == "I" and picture.format in ("PNG", "PPM")):
        return _from_sixteen_bit(picture)
    if picture.mode in ("I", "F"):
        raise EncodeFailed(
            f"pictures of mode {picture.mode!r} (32 bits a pixel) have no defined brightness; save it with 8 or 16 bits a channel"
        )
    if picture.has_transparency_data:
        return on_white(_in_srgb(picture.convert("RGBA"), profile, "RGBA"))
    found = _in_srgb(picture.convert("RGB") if picture.mode == "P" else picture, profile, "RGB")
    return found if found.mode == "RGB" else found.convert("RGB")


def _from_sixteen_bit(image: Image.Image) -> Image.Image:
    """Scale 0..65535 to 0..255. Pillow's own conversion would clip everything above 255 to white."""
    levels = np.asarray(image).astype(np.uint32)
    return Image.fromarray(((levels * 255 + 32_767) // 65_535).astype(np.uint8)).convert("RGB")


def on_white(image: Image.Image) -> Image.Image:
    """Composite RGBA on white."""
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")


def _in_srgb(image: Image.Image, profile: object, mode: str) -> Image.Image:
    """Convert a picture to sRGB by its ICC profile; return it unchanged if there is no usable profile for its colour mode."""
    source = _foreign_profile(image.mode, profile)
    try:
        converted = None if source is None else ImageCms.profileToProfile(image, source, _SRGB, outputMode=mode)
    except (ImageCms.PyCMSError, OSError):
        return image
    return image if converted is None else converted


def _foreign_profile(mode: str, profile: object) -> Any:
    """Return a usable ICC profile for pictures of this mode, unless it is sRGB; else None."""
    space = _COLOUR_SPACES.get(mode)
    if not isinstance(profile, bytes) or space is None:
        return None
    try:
        source: Any = ImageCms.ImageCmsProfile(BytesIO(profile))
        is_foreign = source.profile.xcolor_space.strip() == space and "sRGB" not in ImageCms.getProfileDescription(source)
    except (ImageCms.PyCMSError, OSError):
        return None
    return source if is_foreign else None
