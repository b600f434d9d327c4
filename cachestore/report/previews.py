"""Makes pictures from stored latents without the VAE, by a linear map from latent channels to colours.

The map is fitted by least squares to the encoded pictures that still exist with the same digest, scaled down to the size of their latents.
If there are none, the direction in which the channels vary most is shown in grey. The map is not stored: see `docs/design/values.md`.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from importlib.util import find_spec
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cachestore.core import system
from cachestore.core.errors import BadInput, CacheStoreError, FormatError, how_to_install
from cachestore.core.inputs import is_trained_on
from cachestore.core.keys import Key
from cachestore.core.raw_tensors import numbers
from cachestore.core.read_block import parse_latents
from cachestore.core.samples import IMAGE, VIDEO
from cachestore.report.originals import Latents, Original, SampleLatents, find_originals
from cachestore.sources.combined import Moved
from cachestore.store.format.catalog import Catalog, KeyColumn
from cachestore.store.read.reader import Reader
from cachestore.store.read.rows import newest_catalog

MAX_SAMPLES: Final = 20
"""How many samples a report shows; the map is fitted to the same ones."""
_PIXELS_EACH: Final = 10
"""A map is fitted if there are at least so many latent pixels for each channel, counting the constant as one."""
_OUTERMOST: Final = 2.0
"""Per cent of the values at each end that are clipped in grey."""

Pixels = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Colours:
    """The map from latents of one recipe to colours."""

    weights: NDArray[np.float64]
    """`[C + 1, 3]` to RGB in 0..255, or `[C + 1, 1]` to grey; the last row is the constant."""
    fitted_to: int
    """How many pictures and clips it was fitted to; 0 if none was found."""
    explained: float
    """R squared: the part of the fitted pictures' variance that the map explains; 0 if nothing was fitted."""

    def in_words(self) -> str:
        """Return where the colours come from, as a sentence."""
        if self.fitted_to:
            return "Colours are estimated."
        why = "the originals were not found unchanged", "If they moved, pass --source with their new path."
        if find_spec("PIL") is None:
            why = "Pillow is not installed, so the originals cannot be read", f"{how_to_install('encode')}."
        return f"Grey, and perhaps like a negative: {why[0]}, so colours could not be estimated. {why[1]}"

    def paint(self, latents: Latents) -> Pixels:
        """Return latents as RGB `[H, W, 3]` or grey `[H, W]`, uint8."""
        painted = np.clip(np.rint(_with_one(latents) @ self.weights), 0, 255).astype(np.uint8)
        return painted.reshape(*latents.shape[1:], 3) if painted.shape[1] == 3 else painted.reshape(latents.shape[1:])


def picture_columns(catalog: Catalog, row: int | None = None) -> list[KeyColumn]:
    """Return the first columns of latents of pictures and of clips that are trained on, have cells, and can be read here by their recipe.

    With a `row`, they have cells in it.
    """
    trained = [column for column in catalog.columns if is_trained_on(column.role, column.options)]
    known = [one for one in trained if (len(one.keys) if row is None else one.count(row)) and stored_name(catalog, one) is not None]
    found = (next((column for column in known if column.role == role), None) for role in (IMAGE, VIDEO))
    return [column for column in found if column is not None]


def stored_name(catalog: Catalog, column: KeyColumn) -> str | None:
    """Return the name of the tensor with a column's latents; None if it has none, or if this version cannot read them."""
    recipe = catalog.recipes.get(column.fingerprint)
    try:
        return None if recipe is None else parse_latents(recipe).stored
    except FormatError:
        return None


def choose_rows(catalog: Catalog, columns: Sequence[KeyColumn], count: int = MAX_SAMPLES) -> dict[int, KeyColumn]:
    """Return the rows to show, each with the first of these columns in which it has latents: those whose ids have the smallest digests.

    The choice does not depend on the order or the content of samples, and hardly changes when samples are added.
    """
    found: dict[int, KeyColumn] = {}
    for column in columns:
        found |= {row: column for row in range(len(catalog)) if row not in found and any(column.row_keys(row))}
    rows = sorted(found, key=lambda row: hashlib.sha256(catalog.ids[row].encode("utf-8", "surrogatepass")).digest())
    return {row: found[row] for row in rows[:count]}


def read_samples(reader: Reader, catalog: Catalog, column: KeyColumn, rows: Iterable[int]) -> list[SampleLatents]:
    """Return the first latents of each row. Rows whose entry is missing, damaged or no picture, or has other channels, are left out."""
    name = stored_name(catalog, column)
    found: list[SampleLatents] = []
    for row in rows:
        cell = next((cell for cell in column.row_cells(row) if cell.key is not None), None)
        values = None if cell is None or cell.key is None else _read(reader, cell.key, name)
        if cell is None or cell.key is None or values is None or (found and len(found[0].latents[0]) != len(values)):
            continue
        last = values.shape[1] - 1
        shown = sorted({0, (last + 1) // 2, last}) if column.role == VIDEO else [0]
        positions = tuple(Fraction(one, max(1, last)) for one in shown)
        latents = tuple(values[:, one] for one in shown)
        found.append(SampleLatents(catalog.ids[row], row, cell, cell.key, latents, positions, column.options.get("fps")))
    return found


def _read(reader: Reader, key: Key, name: str | None) -> NDArray[np.float32] | None:
    """Return latents `[C, F, H, W]`; of a picture F is 1."""
    try:
        raw = reader.get_raw([key])[0].get(name or "")
        values = None if raw is None else np.asarray(numbers(raw), np.float32)
    except (CacheStoreError, OSError):
        return None
    if values is None or values.ndim not in {3, 4} or 0 in values.shape or not np.isfinite(values).all():
        return None
    values = values[:, None] if values.ndim == 3 else values
    return values[: len(values) // 2] if name == "moments" else values


def find_colours(shown: Sequence[SampleLatents], originals: Sequence[Original]) -> Colours:
    """Return the map for latents of one column, at least one: fitted to the originals that were found, else grey."""
    found = [(one, original) for one, original in zip(shown, originals, strict=True) if original.pixels]
    pairs = [pair for one, original in found for pair in zip(one.latents, original.pixels, strict=True)]
    if sum(latents[0].size for latents, _pixels in pairs) < _PIXELS_EACH * (len(shown[0].latents[0]) + 1):
        return _grey([latents for one in shown for latents in one.latents])
    return replace(fit([latents for latents, _pixels in pairs], [pixels for _latents, pixels in pairs]), fitted_to=len(found))


def fit(latents: Sequence[Latents], pixels: Sequence[NDArray[np.float64]]) -> Colours:
    """Fit the map from latents to pixels `[H, W, 3]` of the same size by least squares over at least one picture."""
    channels = len(latents[0])
    square, product = np.zeros((channels + 1, channels + 1)), np.zeros((channels + 1, 3))
    total, total_square, count = np.zeros(3), 0.0, 0
    for one, colours in zip(latents, pixels, strict=True):
        values, flat = _with_one(one), colours.reshape(-1, 3)
        square += values.T @ values
        product += values.T @ flat
        total += flat.sum(axis=0)
        total_square += float((flat**2).sum())
        count += len(flat)
    weights = np.linalg.lstsq(square, product, rcond=None)[0].astype(np.float64)
    # Squared errors, and squared distances from the mean, computed from the sums.
    error = total_square - 2 * float((weights * product).sum()) + float((weights * (square @ weights)).sum())
    spread = total_square - float((total**2).sum()) / count
    return Colours(weights, len(latents), max(0.0, 1 - error / spread) if spread > 0 else 1.0)


def _grey(latents: Sequence[Latents]) -> Colours:
    values = np.concatenate([_with_one(one)[:, :-1] for one in latents])
    centred = values - values.mean(axis=0)
    direction = np.linalg.eigh(centred.T @ centred)[1][:, -1]
    along = values @ direction
    low, high = np.percentile(along, [_OUTERMOST, 100 - _OUTERMOST])
    scale = 255 / (high - low) if high > low else 0.0
    return Colours(np.append(direction * scale, -low * scale if scale else 127.0)[:, None], 0, 0.0)


def _with_one(latents: Latents) -> NDArray[np.float64]:
    """Return `[H x W, C + 1]`; the last column is 1."""
    flat = latents.reshape(len(latents), -1).T.astype(np.float64)
    return np.concatenate([flat, np.ones((len(flat), 1))], axis=1)


def reduce(pixels: Pixels, longest: int) -> Pixels:
    """Return the picture with sides of at most `longest`, each pixel the mean of a square of k x k; unchanged if it fits already."""
    step = -(-max(pixels.shape[:2]) // longest)
    if step <= 1:
        return pixels
    height, width = (max(1, side // step) for side in pixels.shape[:2])
    step_down, step_across = min(step, pixels.shape[0]), min(step, pixels.shape[1])
    cut = pixels[: height * step_down, : width * step_across].reshape(height, step_down, width, step_across, -1)
    return np.rint(cut.mean(axis=(1, 3))).astype(np.uint8).reshape(height, width, *pixels.shape[2:])


@dataclass(frozen=True, slots=True)
class Preview:
    """One sample's picture, made from its latents."""

    name: str
    """The data set."""
    sample: str
    pixels: Pixels
    colours: Colours


def preview_sample(reader: Reader, names: Sequence[str], sample: str, source: Moved | None = None) -> Preview:
    """Return a picture of a sample's first latents, from the first of these data sets that has some. Raises BadInput if none has."""
    for name in names:
        catalog = newest_catalog(reader.layout, name)
        row = list(catalog.ids).index(sample) if catalog is not None and sample in catalog.ids else None
        if catalog is None or row is None:
            continue
        for column in picture_columns(catalog, row):
            shown = read_samples(reader, catalog, column, [row])
            if not shown:
                continue
            shown += read_samples(reader, catalog, column, [one for one in choose_rows(catalog, [column]) if one != row])
            colours = find_colours(shown, find_originals(catalog, column, shown, source))
            return Preview(name, sample, colours.paint(shown[0].latents[0]), colours)
    why = reader.layout.command(f"why {system.quoted(sample)}")
    raise BadInput(f"{reader.layout.root} has no latents of the sample {sample!r} to make a picture from ({why} says what there is)")
