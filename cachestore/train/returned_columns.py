"""Which columns of a catalog a data set returns, and how to read each. Reads no entry."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cachestore.core.batch_shapes import LatentsAs
from cachestore.core.errors import BadInput, FormatError
from cachestore.core.inputs import cells_each, is_trained_on
from cachestore.core.read_block import LatentsBlock, MaskBlock, TextBlock, parse_latents, parse_mask, parse_text
from cachestore.core.samples import IMAGE, MASK, VIDEO
from cachestore.store.format.catalog import Catalog, KeyColumn
from cachestore.train.cells import join_columns

CAPTION: Final = "caption"
"""The role of key columns made from captions."""
LATENTS: Final = "latents"
"""The name of a picture's latents in a batch, and of their encoder."""


@dataclass(frozen=True, slots=True)
class TextColumn:
    """The key column of one text encoder."""

    column: KeyColumn
    block: TextBlock

    @property
    def stored(self) -> frozenset[str]:
        """The tensors that each entry has, and no others. Empty if a recipe says which ones are read."""
        return frozenset()


@dataclass(frozen=True, slots=True)
class LatentsColumn:
    """The key column of a VAE: of pictures or videos, of control images, or of a condition."""

    name: str
    """Its name in a batch."""
    column: KeyColumn
    block: LatentsBlock
    form: LatentsAs
    """Control images are never drawn from moments, as pipelines give the denoiser their mean."""


@dataclass(frozen=True, slots=True)
class MaskColumn:
    """The key column of masks."""

    column: KeyColumn
    block: MaskBlock
    patch: int
    """Patch size of the latents that are returned beside them."""
    temporal_factor: int
    """How many frames make one latent frame, after the first; 1 if latents have no axis of frames."""


def text_columns(catalog: Catalog) -> list[TextColumn]:
    """The first caption column of each encoder."""
    firsts: dict[str, KeyColumn] = {}
    for column in catalog.columns:
        if column.role == CAPTION:
            firsts.setdefault(column.encoder, column)
    return [TextColumn(column, parse_text(catalog.recipes[column.fingerprint])) for column in firsts.values()]


def chosen_fields(texts: Sequence[TextColumn], images: Collection[str], asked: frozenset[str] | None) -> frozenset[str]:
    """The names to return: those that were asked for, else all outputs. Raises BadInput for an unknown name."""
    whole = {*images, *(name for text in texts for name in text.block.outputs)}
    if asked is None:
        return frozenset(whole)
    known = whole.union(*(text.block.fields() for text in texts))
    if unknown := sorted(asked - known):
        raise BadInput(f"it has no field {unknown[0]!r}; it has {', '.join(sorted(known)) or 'none'}", option="fields")
    return asked


def chosen_resolution(catalog: Catalog, asked: int | None) -> int | None:
    """The resolution to return, or None if there is only one. Raises BadInput for an unknown one, or if none of several is chosen."""
    trained = [column for column in catalog.columns if is_trained_on(column.role, column.options)]
    found: list[int | None] = list(dict.fromkeys(column.options.get("resolution") for column in trained))
    if asked is not None and asked not in found:
        names = ", ".join(map(str, filter(None, found))) or "none"
        raise BadInput(f"it was not encoded at the resolution {asked!r}; it has {names}", option="resolution")
    if len(found) < 2:
        return None
    if asked is None:
        names = ", ".join(map(str, found))
        raise BadInput(
            f"it was encoded at {len(found)} resolutions: pass resolution=N for one of {names}, or mix them all:"
            f" MixedDataset([CachedDataset(..., resolution=size) for size in ({names})])",
            option="resolution",
        )
    return asked


def check_variants(catalog: Catalog) -> None:
    """Raise FormatError if the cells of a row are not a multiple of the column's variants per image."""
    for column in catalog.columns:
        each = cells_each(column.options)
        if each > 1 and (np.diff(np.asarray(column.at, dtype=np.int64)) % each).any():
            raise FormatError(f"{column.encoder} does not have {each} variants of each {column.role}; run `cachestore precompute` again")


def _image_columns(catalog: Catalog, resolution: int | None) -> list[KeyColumn]:
    columns = (column for column in catalog.columns if column.role != CAPTION)
    return [column for column in columns if resolution is None or column.options.get("resolution") == resolution]


def _images_column(catalog: Catalog, encoder: str, role: str, resolution: int | None) -> KeyColumn | None:
    columns = _image_columns(catalog, resolution)
    return next((column for column in columns if (column.encoder, column.role) == (encoder, role)), None)


def control_columns(catalog: Catalog, resolution: int | None, form: LatentsAs) -> list[LatentsColumn]:
    """The latents of control images, references and the like: `ROLE_latents` in a batch."""
    found: dict[str, LatentsColumn] = {}
    for column in _image_columns(catalog, resolution):
        if column.encoder == LATENTS and column.role not in (IMAGE, VIDEO):
            block = parse_latents(catalog.recipes[column.fingerprint])
            own: LatentsAs = "mean" if form == "sample" and block.stored == "moments" else form
            found.setdefault(column.role, LatentsColumn(f"{column.role}_{LATENTS}", column, block, own))
    return list(found.values())


def condition_columns(catalog: Catalog, resolution: int | None) -> tuple[list[LatentsColumn], list[TextColumn]]:
    """The inputs of the denoiser that are made from further images: latents as the pipeline makes them, and embeddings."""
    latents: dict[str, LatentsColumn] = {}
    embeds: dict[str, TextColumn] = {}
    for column in _image_columns(catalog, resolution):
        recipe = catalog.recipes[column.fingerprint]
        if column.encoder in {LATENTS, MASK}:
            continue
        if "outputs" in recipe.read:
            embeds.setdefault(column.encoder, TextColumn(column, parse_text(recipe)))
        else:
            block = parse_latents(recipe)
            latents.setdefault(column.encoder, LatentsColumn(block.name or column.encoder, column, block, "sample"))
    return list(latents.values()), list(embeds.values())


def trained_column(catalog: Catalog, resolution: int | None, form: LatentsAs) -> LatentsColumn | None:
    """The column to train on: of pictures, of videos, or both as one."""
    columns = (_images_column(catalog, LATENTS, role, resolution) for role in (IMAGE, VIDEO))
    pictures, videos = (
        None if column is None else LatentsColumn(LATENTS, column, parse_latents(catalog.recipes[column.fingerprint]), form)
        for column in columns
    )
    if pictures is None or videos is None:
        return pictures or videos
    if not len(pictures.column.keys) or not len(videos.column.keys):
        return videos if len(videos.column.keys) else pictures
    if pictures.column.fingerprint != videos.column.fingerprint:
        raise FormatError("its pictures and videos were encoded by two VAEs; run `cachestore precompute` again")
    return replace(videos, column=join_columns(pictures.column, videos.column))


def count_variants(catalog: Catalog, trained: LatentsColumn | None, resolution: int | None) -> int | NDArray[np.int64]:
    """The number of variants of what is trained on; an array by row if pictures and videos differ."""
    columns = (_images_column(catalog, LATENTS, role, resolution) for role in (IMAGE, VIDEO))
    found = [column for column in columns if column is not None and len(column.keys)]
    each = [cells_each(column.options) for column in found]
    if trained is None or not found or len(set(each)) == 1:
        return each[0] if each else 1
    has_cells = np.diff(np.asarray(found[1].at, np.int64)) > 0
    return np.where(has_cells, each[1], each[0])


def mask_column(catalog: Catalog, resolution: int | None, pictures: LatentsColumn | None) -> MaskColumn | None:
    """The column of masks, of pictures and videos as one; None if there is none, or nothing to go with them."""
    found = (_images_column(catalog, MASK, role, resolution) for role in (MASK, VIDEO))
    columns = [column for column in found if column is not None]
    if not columns or pictures is None:
        return None
    patch = pictures.block.patchify if pictures.form in {"sample", "mean"} else 1
    column = reduce(join_columns, columns)
    return MaskColumn(column, parse_mask(catalog.recipes[column.fingerprint]), patch, pictures.block.temporal_factor)
