"""Decode picture files to upright RGB, and resize by Pillow, which is the reference for every format. Knows no torch.

The rules are part of every key, through the name of the transform (`resamplers`). docs/numerics.md has them whole:

* EXIF orientation is applied. The first frame of an animated file is used.
* Transparency is composited on white, as on a web page. Dropping the alpha channel would show the hidden colour of transparent pixels,
  often black or noise. Alpha that is zero everywhere in a BMP, TIFF or WebP was not set by its writer, and hides nothing.
* Colours are converted to sRGB in every mode and depth, by what the file says of them (`profiles`). HDR is refused.
* 16-bit grey is scaled to 8 bits, not clipped. Floating-point and 32-bit pictures have no defined range and are refused.
* Metadata that is damaged or large fails no picture. Damage to pixels does, and so does a file that ends early.
"""

import importlib
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache, partial
from io import BytesIO
from math import sqrt
from typing import Any, BinaryIO, Final, TypeVar

import numpy as np
from PIL import Image, UnidentifiedImageError

from cachestore.core.errors import EncodeFailed
from cachestore.core.plugins import picture_plugins
from cachestore.encode.pictures.bucket_rules import PixelReading
from cachestore.encode.pictures.buckets import CropBox, Size
from cachestore.encode.pictures.colours import in_srgb
from cachestore.encode.pictures.headers import PNG_START, mended, tiff_without_alpha
from cachestore.encode.pictures.profiles import DAMAGED_EXIF, Conversion, conversion_of, is_sixteen_bit

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
_OFTEN_BLANK: Final = ("BMP", "DIB", "TIFF", "WEBP")
"""Formats whose writers may leave alpha at zero. A PNG, a GIF or an AVIF that is transparent everywhere is meant to be."""
_PLUGIN_FORMATS: Final = {"pillow_heif": ("HEIF",), "pillow_jxl": ("JXL",)}


def measure(data: bytes, reading: PixelReading | None = None) -> Size:
    """Return a picture's size by its header: upright, unless it is read as by a trainer that does not turn it. Raises EncodeFailed."""
    if reading is not None and not reading.is_turned:
        return measure_stored(data)
    size = _with_opened(data, lambda image, data: Size(*(reversed(image.size) if _orientation(image, data) >= 5 else image.size)))
    if min(size) < 1:
        raise EncodeFailed(f"the picture has no pixels: its header says {size.width} x {size.height}; copy it again, or remove its sample")
    return size


def measure_stored(data: bytes) -> Size:
    """Return the size as `measure`, but before the EXIF orientation is applied. Raises EncodeFailed."""
    return _with_opened(data, lambda image, _data: Size(*image.size))


def decode(data: bytes) -> Image.Image:
    """Return the picture, upright, as 8-bit RGB in sRGB. Raises EncodeFailed if it is damaged or incomplete."""
    return as_image(decode_picture(data))


def decode_picture(data: bytes, reading: PixelReading | None = None) -> Picture:
    """Decode as `decode`, but leave the pixels where the decoder put them; or as a trainer decodes it. Raises EncodeFailed."""
    return _with_opened(data, _upright_rgb if reading is None else partial(_read_as, reading))


def is_turned(data: bytes) -> bool:
    """Return whether EXIF data turn or mirror a picture. Raises EncodeFailed."""
    return _with_opened(data, _orientation) in _TURNS


def open_upright(data: bytes) -> Image.Image:
    """Return the picture, upright, in 8-bit sRGB: RGBA, with the file's colours of transparent pixels, or RGB. Raises EncodeFailed."""

    def upright(image: Image.Image, data: bytes) -> Image.Image:
        picture, orientation = _layers(image, data), _orientation(image, data)
        return as_image(_turned(picture, orientation) if orientation in _TURNS else picture)

    return _with_opened(data, upright)


def decode_as_stored(data: bytes) -> Image.Image:
    """Return the picture upright, in its own mode, before any profile or transparency is applied. Raises EncodeFailed."""

    def upright(image: Image.Image, data: bytes) -> Image.Image:
        image.load()
        stored = transposed(image.copy(), _orientation(image, data))
        stored.format = image.format
        return stored

    return _with_opened(data, upright)


def is_decorated(data: bytes) -> bool:
    """Return whether a picture has an alpha or a profile, from its header. Raises EncodeFailed."""
    return _with_opened(data, lambda image, _data: bool(image.has_transparency_data) or "icc_profile" in image.info)


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
        orientation, how = _orientation(image, data), conversion_of(image, data)
        for number in range(int(getattr(image, "n_frames", 1))):
            image.seek(number)
            image.load()
            frame = image.convert("RGBA")
            frame = in_srgb(frame, how.profile, "RGBA") if how.profile is not None and how.space == "RGB" else frame
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
    """Scale a picture to cover the bucket by a filter of Pillow's, cropped at its source: uint8 [height, width, 3]."""
    return np.array(image.resize(bucket, resampling, box=_box(image, box)))


def fit_mask(image: Image.Image, size: Size, box: CropBox, within: tuple[tuple[int, int, int, int], Size] | None = None) -> "Pixels":
    """Crop a mask as its picture is cropped, and shrink it: uint8 [height, width], each pixel the mean of the area that it covers.

    It has any resolution. If only a part of the picture is used, `within` has its box in pixels, and the picture's size.
    """
    return np.ascontiguousarray(image.convert("L").resize(size, Image.Resampling.BOX, box=_box(image, box, within)))


def _box(
    image: Image.Image, box: CropBox, within: tuple[tuple[int, int, int, int], Size] | None = None
) -> tuple[float, float, float, float]:
    part, whole = within or ((0, 0, 1, 1), Size(1, 1))
    one_across, one_down = image.width / whole.width, image.height / whole.height
    from_left, from_top = part[0] * one_across, part[1] * one_down
    across, down = (part[2] - part[0]) * one_across / box.resized.width, (part[3] - part[1]) * one_down / box.resized.height
    left, top, right, bottom = box.crop
    ends = min(from_left + right * across, image.width), min(from_top + bottom * down, image.height)
    return from_left + left * across, from_top + top * down, *ends


def fit_area(image: Image.Image, area: int, step: int) -> Image.Image:
    """Scale a picture by Lanczos to about `area` pixels, with sides rounded as by Qwen-Image-Edit.

    Raises EncodeFailed if it is too thin.
    """
    ratio = image.width / image.height
    width = sqrt(area * ratio)
    sides = (round(width / step) * step, round(width / ratio / step) * step)
    if min(sides) < step:
        raise EncodeFailed(
            f"the picture is too long and thin for the text encoder ({image.width} x {image.height}): crop it, or remove its sample"
        )
    return image.resize(sides, Image.Resampling.LANCZOS)


_Found = TypeVar("_Found")


def _with_opened(data: bytes, use: Callable[[Image.Image, bytes], _Found]) -> _Found:
    """Return what `use` makes of a picture and its file; if that fails, once more without damaged metadata. Raises EncodeFailed."""
    try:
        with _opened(data) as image:
            return use(image, data)
    except EncodeFailed as error:
        whole = None if error.__cause__ is None else mended(data)  # without a cause it is not damaged, but refused
        if whole is None:
            raise
    with _opened(whole) as image:
        return use(image, data)


@contextmanager
def _opened(data: bytes) -> Generator[Image.Image]:
    if not data:
        raise EncodeFailed("the file is empty (0 bytes): copy it again, or remove its sample")
    try:
        formats = _formats()
        with Image.open(BytesIO(data), formats=formats) as image:
            yield image
    except (EncodeFailed, MemoryError):
        raise
    except UnidentifiedImageError as error:
        raise EncodeFailed(
            f"not a picture that can be read: its {len(data):,} bytes begin with {data[:12]!r}; formats are {', '.join(_formats())}"
        ) from error
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise EncodeFailed(
            f"the picture has too many pixels to be decoded safely ({error}): use a smaller copy, or remove its sample"
        ) from error
    except Exception as error:  # on damaged bytes Pillow's decoders raise SyntaxError, struct.error and more
        raise EncodeFailed(
            f"the picture is damaged or incomplete ({error or type(error).__name__}): copy it again, or remove its sample"
        ) from error


@cache
def _formats() -> tuple[str, ...]:
    Image.init()
    found = list(FORMATS)
    for module in sorted(set(picture_plugins().values())):
        with suppress(Exception):  # a plugin that does not work here counts as not installed
            plugin: Any = importlib.import_module(module)
            if module == "pillow_heif":
                plugin.register_heif_opener()
            found += [name for name in _PLUGIN_FORMATS[module] if name in Image.OPEN]
    return tuple(found)


def _orientation(image: Image.Image, data: bytes) -> int:
    """Return the EXIF orientation (1 to 8) that is still to be applied; an invalid or unreadable one counts as 1, upright."""
    if image.format == "TIFF":
        return 1  # Pillow applies it itself when it decodes them, and reports the upright size
    if image.format == "PNG" and not any(mark in data for mark in _LATE_PNG_MARKS):
        return 1  # else Pillow would decode all pixels to look for a chunk behind them: 20 files a second instead of thousands
    if image.format == "PNG" and "exif" not in image.info:
        image.load()
    value: object = None
    with suppress(*DAMAGED_EXIF):
        value = image.getexif().get(_ORIENTATION)
    return value if isinstance(value, int) and 1 <= value <= 8 else 1


def _decoded(image: Image.Image, data: bytes) -> Picture:
    """Decode pixels: plain three-channel JPEGs by simplejpeg, if installed, in 0.6 of the time; all else by Pillow."""
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
    rows, columns = np.mgrid[0:61, 0:83]
    channels = [(columns * 3 + rows) % 256, (rows * columns) // 20 % 256, (columns // 9 + rows // 7) % 2 * 255]
    sample = Image.fromarray(np.stack(channels, axis=-1).astype(np.uint8))
    for subsampling in (0, 2):
        buffer = BytesIO()
        sample.save(buffer, "JPEG", quality=90, subsampling=subsampling)
        with Image.open(buffer) as image:
            expected = np.asarray(image)
        if not np.array_equal(simplejpeg.decode_jpeg(buffer.getvalue(), colorspace="RGB"), expected):
            return None
    return simplejpeg.decode_jpeg


def _turned(picture: Picture, orientation: int) -> Pixels:
    """Set a picture upright. Each pixel is moved as a whole, which takes half the time of moving its bytes."""
    pixels = as_pixels(picture)
    turned = np.ascontiguousarray(_TURNS[orientation](pixels.view(f"V{pixels.shape[2]}")[..., 0]))
    return turned.view(np.uint8).reshape(*turned.shape, pixels.shape[2])


def _upright_rgb(image: Image.Image, data: bytes) -> Picture:
    picture = _layers(image, data)
    picture = on_white(picture) if isinstance(picture, Image.Image) and picture.mode == "RGBA" else picture
    orientation = _orientation(image, data)
    return _turned(picture, orientation) if orientation in _TURNS else picture


def _read_as(reading: PixelReading, image: Image.Image, data: bytes) -> Picture:
    """Decode a picture as a trainer does: in 8 bits as Pillow converts it; RGBA stays if it loses its alpha only after resizing."""
    picture = _decoded(image, data)
    if isinstance(picture, Image.Image) and picture.mode not in (("RGB", "RGBA") if reading.keeps_alpha else ("RGB",)):
        picture = picture.convert("RGB")
    orientation = _orientation(image, data) if reading.is_turned else 1
    return _turned(picture, orientation) if orientation in _TURNS else picture


def _layers(image: Image.Image, data: bytes) -> Picture:
    how = conversion_of(image, data)
    picture = _decoded(image, data)
    if not isinstance(picture, Image.Image):
        return picture if how.profile is None else in_srgb(Image.fromarray(picture), how.profile, "RGB")
    if is_sixteen_bit(picture):
        return _from_sixteen_bit(picture, how)
    if picture.mode in ("I", "F"):
        raise EncodeFailed(
            f"pictures of mode {picture.mode!r} (32 bits a pixel) have no defined brightness; save it with 8 or 16 bits a channel"
        )
    if picture.has_transparency_data:
        if "transparency" in picture.info:
            picture.info["transparency"] = _key_colour(picture, data)
        may_be_blank = picture.format in _OFTEN_BLANK and picture.mode in ("LA", "RGBA")
        is_opaque = may_be_blank and picture.getchannel("A").getextrema() == (0, 0)
        whole = tiff_without_alpha(data) if is_opaque and picture.format == "TIFF" else None
        return _with_alpha(picture.convert("RGBA"), how, is_opaque=is_opaque) if whole is None else _with_opened(whole, _layers)
    if how.profile is None:
        return picture if picture.mode == "RGB" else picture.convert("RGB")
    mode = {"RGB": "RGB", "GRAY": "L"}.get(how.space, picture.mode)
    plain = picture if picture.mode == mode else picture.convert(mode)
    converted = in_srgb(plain, how.profile, "RGB", is_exact=how.is_exact)
    return converted if converted.mode == "RGB" else converted.convert("RGB")


def _with_alpha(layers: Image.Image, how: Conversion, *, is_opaque: bool) -> Image.Image:
    if how.profile is None or how.space == "RGB":
        made = layers if how.profile is None else in_srgb(layers, how.profile, "RGBA")
        return made.convert("RGB") if is_opaque else made
    made = in_srgb(layers.getchannel("R"), how.profile, "RGB", is_exact=True).convert("RGB")
    if not is_opaque:
        made.putalpha(layers.getchannel("A"))
    return made


def _from_sixteen_bit(image: Image.Image, how: Conversion) -> Image.Image:
    """Scale 0..65535 to 0..255. Pillow's own conversion would clip everything above 255 to white."""
    levels = np.asarray(image).astype(np.uint32)
    made = Image.fromarray(((levels * 255 + 32_767) // 65_535).astype(np.uint8)).convert("RGB")
    if how.profile is not None and how.space == "GRAY":  # lcms has 16 bits; 8 would be too coarse for a linear curve
        made = in_srgb(Image.fromarray(levels.astype(np.uint16)), how.profile, "RGB", is_exact=True)
    elif how.profile is not None:
        made = in_srgb(made, how.profile, "RGB")
    if "transparency" in image.info:
        made.putalpha(Image.fromarray(np.where(levels == image.info["transparency"], 0, 255).astype(np.uint8)))
    return made


def _key_colour(image: Image.Image, data: bytes) -> Any:
    """Return the transparent colour of a PNG in the 8 bits of the decoded pixels. Pillow leaves it in the bits of the file."""
    given, depth = image.info["transparency"], data[24] if data.startswith(PNG_START) else 8
    if depth == 16 and isinstance(given, tuple):
        return tuple(level >> 8 for level in given)
    most = 2**depth - 1
    return (given & most) * (255 // most) if image.mode == "L" and depth in (2, 4) else given


def on_white(image: Image.Image) -> Image.Image:
    """Composite RGBA on white."""
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
