"""Finds the files that latents were made from, and the part of them that was encoded.

A file counts only if its bytes have the digest that the catalog names. So no page shows another file, whatever path a catalog holds.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, cast

import numpy as np
from numpy.typing import NDArray

from cachestore.core.errors import BadInput, EncodeFailed, naming_extras
from cachestore.core.keys import Json, Key, digest_bytes
from cachestore.core.samples import VIDEO, Source
from cachestore.source.combined import Moved, at_new_paths, files_of, files_of_sources
from cachestore.source.files import Files
from cachestore.storage.catalog import Catalog, Cell, KeyColumn

if TYPE_CHECKING:
    from PIL.Image import Image

LARGEST_FILE: Final = 256 * 1024 * 1024
LONGEST_SIDE: Final = 192
"""Of an original on a page, in pixels."""
_QUALITY: Final = 80
"""Of its JPEG: photographs take about 6 KiB."""
_SIDES: Final = 2

Latents = NDArray[np.float32]
"""`[C, H, W]` as stored; of moments the mean, of a video the first frame."""
State = Literal["found", "changed", "missing", "unreadable"]


@dataclass(frozen=True, slots=True)
class SampleLatents:
    """A sample's picture in one column, with its latents."""

    sample: str
    row: int
    cell: Cell
    key: Key
    latents: Latents
    rate: float | None = None
    """For a clip, the requested frames per second."""


@dataclass(frozen=True, slots=True)
class Original:
    """What became of the file that latents were made from."""

    state: State
    jpeg: bytes = b""
    """The part that was encoded, reduced; the whole picture if the catalog does not name a part. Empty if it cannot be shown."""
    size: tuple[int, int] = (0, 0)
    """Of the JPEG: (width, height)."""
    pixels: NDArray[np.float64] | None = None
    """`[H, W, 3]` of the latents' size: each pixel is the mean over one latent pixel. None if the part is unknown."""
    reason: str = ""
    """Why a file that is there is unreadable."""


def find_originals(catalog: Catalog, column: KeyColumn, shown: Sequence[SampleLatents], source: Moved | None = None) -> list[Original]:
    """Return the original of each sample's latents.

    `source` is the new path of the data set's pictures if they moved, or a path for each source label. Raises BadInput for one path in
    place of several sources.
    """
    files = _files(catalog, column, source)
    if files is None:
        return [Original("missing")] * len(shown)
    decode = _first_frame if column.role == VIDEO else partial(_decoded, column.options)
    return [_original(files, references_of(catalog, column, one.row), one, decode) for one in shown]


def references_of(catalog: Catalog, column: KeyColumn, row: int) -> list[str]:
    """Return the references of a row's pictures, as its source names them."""
    if column.role not in catalog.images:
        return []
    at, references = catalog.images[column.role]
    return [references[index] for index in range(at[row], at[row + 1])]


def _files(catalog: Catalog, column: KeyColumn, source: Moved | None) -> Files | None:
    """Return access to the files of a data set, present or not; None if the catalog does not name its sources. Raises BadInput."""
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


_Decode = Callable[[bytes, SampleLatents], "Image"]


def _original(files: Files, references: Sequence[str], one: SampleLatents, decode: _Decode) -> Original:
    """Look for the file of a cell among the files of its row."""
    others: list[Original] = []
    for reference in references:
        data = _read(files, reference)
        if isinstance(data, bytes) and digest_bytes(data) == one.cell.input.hex():
            return _shown(data, one, decode)
        others.append(Original("changed") if isinstance(data, bytes) else data)
    return next((other for other in others if other.state != "missing"), Original("missing"))


def _read(files: Files, reference: str) -> bytes | Original:
    """Return the bytes of a file; if there is none or it cannot be read, an original that says so."""
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
            return _reduced(decode(data, one), one)
    except (ImportError, EncodeFailed, OSError, ValueError) as error:
        return Original("unreadable", reason=str(error))


def _reduced(picture: "Image", one: SampleLatents) -> Original:
    """Return the encoded part of a decoded picture in two sizes."""
    from PIL import Image

    box = _box(picture.size, one.cell)
    left, top, right, bottom = box or (0, 0, *picture.size)
    scale = min(1.0, LONGEST_SIDE / max(right - left, bottom - top))
    size = max(1, round(scale * (right - left))), max(1, round(scale * (bottom - top)))
    small = picture.resize(size, Image.Resampling.LANCZOS, box=(left, top, right, bottom), reducing_gap=2.0)
    _channels, height, width = one.latents.shape
    pixels = None if box is None else np.asarray(picture.resize((width, height), Image.Resampling.BOX, box=box), np.float64)
    if one.cell.facts.get("flip") == (1,):
        small = small.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        pixels = None if pixels is None else pixels[:, ::-1]
    buffer = BytesIO()
    small.save(buffer, "JPEG", quality=_QUALITY, optimize=True)
    return Original("found", buffer.getvalue(), size, pixels)


def _box(size: tuple[int, int], cell: Cell) -> tuple[float, float, float, float] | None:
    """Return the part of a picture that was encoded, in its pixels; None if the catalog does not say. Raises ValueError for nonsense."""
    resized, crop = cell.facts.get("resized", ()), cell.facts.get("crop", ())
    if len(resized) != _SIDES or min(resized) < 1 or len(crop) != 2 * _SIDES:
        return None
    left, top, right, bottom = crop
    if cell.facts.get("flip") == (1,):  # such a crop is one of the mirrored picture
        left, right = resized[0] - right, resized[0] - left
    if not (0 <= left < right and 0 <= top < bottom):
        raise ValueError(f"the catalog's crop {list(crop)} is no part of a picture")
    across, down = size[0] / resized[0], size[1] / resized[1]
    return left * across, top * down, min(right * across, size[0]), min(bottom * down, size[1])


def _decoded(options: Mapping[str, Json], data: bytes, _one: SampleLatents) -> "Image":
    from cachestore.encode.images import as_image, decode_picture
    from cachestore.encode.variants import reading_of

    return as_image(decode_picture(data, reading_of(options))).convert("RGB")


def _first_frame(data: bytes, one: SampleLatents) -> "Image":
    """Return the first frame of the encoded clip, whole. Raises EncodeFailed, also if its start is unknown."""
    from PIL import Image

    from cachestore.encode import videos
    from cachestore.encode.buckets import CropBox
    from cachestore.encode.clips import as_rate

    start = next(iter(one.cell.facts.get("start", ())), None)
    if start is None:
        raise EncodeFailed("the catalog does not say when the clip begins")
    rate = None if one.rate is None else as_rate(one.rate)
    video = videos.look(BytesIO(data))
    whole = CropBox(video.size, (0, 0, video.size.width, video.size.height))
    return Image.fromarray(videos.take(BytesIO(data), video.timeline.take(rate, start, 1), video.size, whole)[0])
