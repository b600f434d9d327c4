"""Finds the files that latents were made from, and the part of them that was encoded: of a clip its first, middle and last frame.

A file counts only if its bytes have the digest that the catalog names. So no page shows another file, whatever path a catalog holds.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from io import BytesIO
from math import isqrt
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, cast

import numpy as np
from numpy.typing import NDArray

from cachestore.core.errors import BadInput, EncodeFailed, naming_extras
from cachestore.core.keys import Json, Key, digest_bytes
from cachestore.core.samples import VIDEO, Source
from cachestore.report.numbers import ClipFile, Picture
from cachestore.sources.combined import Moved, at_new_paths, files_of, files_of_sources
from cachestore.sources.files import Files
from cachestore.store.format.catalog import Catalog, Cell, KeyColumn
from cachestore.train.facts import crop_of, is_flipped

if TYPE_CHECKING:
    from PIL.Image import Image

LARGEST_FILE: Final = 256 * 1024 * 1024
LONGEST_SIDE: Final = 192
"""Of an original on a page, in pixels. The frames of a clip have as many pixels together."""
_QUALITY: Final = 80
"""Of its JPEG: photographs take about 6 KiB."""
_SIDES: Final = 2

Latents = NDArray[np.float32]
"""`[C, H, W]` as stored; of moments the mean."""
State = Literal["found", "changed", "missing", "unreadable"]


@dataclass(frozen=True, slots=True)
class SampleLatents:
    """A sample's picture or clip in one column, with its latents."""

    sample: str
    row: int
    cell: Cell
    key: Key
    latents: tuple[Latents, ...]
    """Of a clip the first, the middle and the last one; of a picture one."""
    positions: tuple[Fraction, ...] = (Fraction(0),)
    """Where each of them lies in the clip, 0 to 1."""
    rate: float | None = None
    """For a clip, the requested frames per second."""


@dataclass(frozen=True, slots=True)
class Original:
    """What became of the file that latents were made from."""

    state: State
    shown: tuple[Picture, ...] = ()
    """The part that was encoded, reduced, beside each of the latents; the whole picture if the catalog does not name a part."""
    pixels: tuple[NDArray[np.float64], ...] = ()
    """`[H, W, 3]` of the latents' size: each pixel is the mean over one latent pixel. Empty if the part is unknown."""
    reason: str = ""
    """Why a file that is there is unreadable."""
    footage: ClipFile | None = None
    """Of a clip, what its file says."""


def find_originals(catalog: Catalog, column: KeyColumn, shown: Sequence[SampleLatents], source: Moved | None = None) -> list[Original]:
    """Return the original of each sample's latents.

    `source` is the new path of the data set's pictures if they moved, or a path for each source label. Raises BadInput for one path in
    place of several sources.
    """
    files = _files(catalog, column, source)
    if files is None:
        return [Original("missing")] * len(shown)
    decode = _frames if column.role == VIDEO else partial(_decoded, column.options)
    return [_original(files, catalog.row_images(one.row).get(column.role, ()), one, decode) for one in shown]


def _files(catalog: Catalog, column: KeyColumn, source: Moved | None) -> Files | None:
    found: Json = catalog.request.get(column.encoder)
    hints = cast("dict[str, Json]", found) if isinstance(found, dict) else {}
    listed: Json = hints.get("sources")
    given = cast("list[Json]", listed) if isinstance(listed, list) else []
    try:
        sources = [Source(**one) for one in given]
    except (BadInput, TypeError):  # invalid hints
        return None
    if source is not None and sources:
        sources = list(at_new_paths(sources, source))
    try:
        if not given:
            data = hints.get("data") if source is None or isinstance(source, Mapping) else source
            return files_of(data) if data and isinstance(data, str | Path) else None
        return files_of_sources(sources)
    except (BadInput, OSError, TypeError, ValueError):  # missing sources or invalid hints
        return None


_Decode = Callable[[bytes, SampleLatents], "tuple[list[Image], ClipFile | None]"]


def _original(files: Files, references: Sequence[str], one: SampleLatents, decode: _Decode) -> Original:
    others: list[Original] = []
    for reference in references:
        data = _read(files, reference)
        if isinstance(data, bytes) and digest_bytes(data) == one.cell.input.hex():
            return _shown(data, one, decode)
        others.append(Original("changed") if isinstance(data, bytes) else data)
    return next((other for other in others if other.state != "missing"), Original("missing"))


def _read(files: Files, reference: str) -> bytes | Original:
    try:
        stat = files.stat(reference)
        if stat is None:
            return Original("missing")
        if stat[0] > LARGEST_FILE:
            return Original("unreadable", reason=f"the file has more than {LARGEST_FILE >> 20} MiB")
        return files.read(reference)[0]
    except (FileNotFoundError, ValueError):  # ValueError: a name that no file can have
        return Original("missing")
    except OSError as error:
        return Original("unreadable", reason=error.strerror or "the file cannot be read")


def _shown(data: bytes, one: SampleLatents, decode: _Decode) -> Original:
    try:
        with naming_extras():
            pictures, footage = decode(data, one)
            reduced = [_reduced(picture, one) for picture in pictures]
    except (ImportError, EncodeFailed, OSError, ValueError) as error:
        return Original("unreadable", reason=str(error))
    pixels = tuple(pixels for _picture, pixels in reduced if pixels is not None)
    return Original("found", tuple(picture for picture, _pixels in reduced), pixels, footage=footage)


def _reduced(picture: "Image", one: SampleLatents) -> tuple[Picture, NDArray[np.float64] | None]:
    from PIL import Image

    left, top, right, bottom = 0.0, 0.0, *map(float, picture.size)
    if (found := crop_of(one.cell)) is not None:
        resized, crop = found
        across, down = picture.size[0] / resized[0], picture.size[1] / resized[1]
        left, top = crop[0] * across, crop[1] * down
        right, bottom = min(crop[2] * across, picture.size[0]), min(crop[3] * down, picture.size[1])
    scale = min(1.0, longest_side(LONGEST_SIDE, len(one.latents)) / max(right - left, bottom - top))
    size = max(1, round(scale * (right - left))), max(1, round(scale * (bottom - top)))
    small = picture.resize(size, Image.Resampling.LANCZOS, box=(left, top, right, bottom), reducing_gap=2.0)
    _channels, height, width = one.latents[0].shape
    pixels = None
    if found is not None:
        fitted = picture.resize((width, height), Image.Resampling.BOX, box=(left, top, right, bottom))
        pixels = np.asarray(fitted, np.float64)
    if is_flipped(one.cell):
        small = small.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        pixels = None if pixels is None else pixels[:, ::-1]
    buffer = BytesIO()
    small.save(buffer, "JPEG", quality=_QUALITY, optimize=True)
    return Picture("jpeg", buffer.getvalue(), *size), pixels


def longest_side(alone: int, pictures: int) -> int:
    """Return the longest side of each of so many pictures that have as many pixels together as one alone."""
    return isqrt(alone * alone // pictures)


def _decoded(options: Mapping[str, Json], data: bytes, _one: SampleLatents) -> "tuple[list[Image], ClipFile | None]":
    from cachestore.encode.pictures.images import as_image, decode_picture
    from cachestore.encode.pictures.variants import reading_of

    return [as_image(decode_picture(data, reading_of(options))).convert("RGB")], None


def _frames(data: bytes, one: SampleLatents) -> "tuple[list[Image], ClipFile | None]":
    from PIL import Image

    from cachestore.encode.pictures import videos
    from cachestore.encode.pictures.buckets import CropBox
    from cachestore.encode.pictures.clips import as_rate

    start = next(iter(one.cell.facts.get("start", ())), None)
    if start is None:
        raise EncodeFailed("the catalog does not say when the clip begins")
    rate = None if one.rate is None else as_rate(one.rate)
    video = videos.measure(BytesIO(data))
    whole = CropBox(video.size, (0, 0, video.size.width, video.size.height))
    frames = next(iter(one.cell.facts.get("bucket", ())[_SIDES:]), 1)
    if start + frames > video.timeline.count(rate):
        raise EncodeFailed("the catalog names frames that the file does not have")
    times = video.timeline.take(rate, start, frames)
    chosen = [times[round(position * (len(times) - 1))] for position in one.positions]
    taken = videos.take(BytesIO(data), chosen, video.size, whole)
    return [Image.fromarray(frame) for frame in taken], ClipFile(float(video.rate), len(times) - len(set(times)), video.has_sound)
