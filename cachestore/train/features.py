"""What a batch will have, by the recipes alone: dtypes and shapes by name. Reads no entry; unknown facts are None."""

from dataclasses import dataclass

import torch

from cachestore.core.batch_shapes import FPS, NUM_FRAMES, SIZES, Shape, batch_shape, round_up
from cachestore.core.dtypes import TORCH_NAMES
from cachestore.core.keys import Recipe
from cachestore.core.read_block import TextBlock
from cachestore.core.samples import MASK
from cachestore.core.tensors import torch_dtype
from cachestore.store.format.entry import TensorSpec
from cachestore.train.returned_columns import LATENTS, LatentsColumn
from cachestore.train.selection import Selection


@dataclass(frozen=True, slots=True, repr=False)
class Feature:
    """Dtype and shape of a tensor in a batch, such as `Feature(bfloat16 [?, 512, ?])`."""

    dtype: torch.dtype | None
    """None if the recipe does not say it."""
    shape: Shape | None
    """None for an axis that varies (samples, a picture's sides, a caption's length) or is unknown. None instead of a shape if even the
    number of axes is unknown."""

    def is_unlike(self, other: "Feature") -> bool:
        """Whether dtypes or numbers of axes differ, as far as both are known."""
        if None not in {self.dtype, other.dtype} and self.dtype != other.dtype:
            return True
        return self.shape is not None and other.shape is not None and len(self.shape) != len(other.shape)

    def __repr__(self) -> str:
        """One line, with `?` for None, and `...` for unknown axes."""
        dtype = "?" if self.dtype is None else str(self.dtype).removeprefix("torch.")
        axes = ["..."] if self.shape is None else ["?" if size is None else str(size) for size in self.shape]
        return f"Feature({dtype} [{', '.join(axes)}])"


def features_of(selection: Selection) -> dict[str, Feature]:
    """By name, what a batch of these samples may have, without lists of plain values."""
    recipes, latents = selection.catalog.recipes, selection.latents
    cast = selection.options.dtype
    found: dict[str, Feature] = {}
    if latents is not None:
        found[LATENTS] = _latents(recipes[latents.column.fingerprint], latents, cast)
    if (masks := selection.masks) is not None:
        found[MASK] = Feature(cast or torch.float32, (None, 1, *[None] * (3 if masks.temporal_factor > 1 else 2)))
    found |= {one.name: _latents(recipes[one.column.fingerprint], one, cast) for one in (*selection.conditions, *selection.controls)}
    found |= {one.name: Feature(found[one.name].dtype, None) for one in selection.controls if one.name not in selection.stacked}
    for text in (*selection.embeds, *selection.texts):
        found |= _texts(recipes[text.column.fingerprint], text.block, cast)
    for join in selection.options.joins:
        tensors = (item for column in join.columns for item in column.tensors.items() if item[0] in selection.fields)
        found |= {name: _joined(spec, cast) for name, spec in tensors}
    facts = frozenset[str]() if latents is None else latents.column.facts.keys()
    found |= {name: Feature(torch.int64, (None, 2)) for name, fact in SIZES.items() if fact in facts}
    return found | ({NUM_FRAMES: Feature(torch.int64, (None,)), FPS: Feature(torch.float32, (None,))} if "fps" in facts else {})


def _dtype(recipe: Recipe, cast: torch.dtype | None) -> torch.dtype | None:
    """The dtype of floating point tensors: the one they are cast to, else the model's. None if an imported recipe does not say it."""
    if cast is not None:
        return cast
    name = recipe.make.get("dtype")
    return getattr(torch, name) if name in TORCH_NAMES else None


def _joined(spec: TensorSpec, cast: torch.dtype | None) -> Feature:
    """Sides may differ from sample to sample; their number does not."""
    dtype = torch_dtype(spec.dtype)
    return Feature(cast if cast is not None and dtype.is_floating_point else dtype, (None, *[None] * len(spec.shape)))


def _latents(recipe: Recipe, latents: LatentsColumn, cast: torch.dtype | None) -> Feature:
    channels, frames = recipe.read.get("channels"), recipe.read.get("temporal_factor")
    if not isinstance(channels, int) or not isinstance(frames, int):
        return Feature(_dtype(recipe, cast), None)
    patch = latents.block.patchify
    stored = (1, channels * (2 if latents.block.stored == "moments" else 1), patch, patch)
    frames_axis: Shape = (None,) if frames > 1 else ()
    return Feature(_dtype(recipe, cast), (None, batch_shape(latents.block, latents.form, stored)[1], *frames_axis, None, None))


def _texts(recipe: Recipe, block: TextBlock, cast: torch.dtype | None) -> dict[str, Feature]:
    """Outputs, masks and constants. Embeddings have the model's dtype. The dtype of a mask that a pipeline returned is unknown."""
    found: dict[str, Feature] = {}
    for name, form in block.outputs.items():
        dtype, padding = _dtype(recipe, cast) if "embed" in name else None, block.padding.get(name)
        found[name] = Feature(dtype, None)
        if padding is not None:
            length = round_up(padding.length, padding) if padding.length else None
            found |= {padding.mask: Feature(torch.int64, (None, length))} if padding.mask is not None else {}
            if padding.dim == -2:  # pads rows; a join may widen them
                found[name] = Feature(dtype, (None, length, form.width))
    for name, constant in block.constants.items():
        like = found[constant.like]
        letters = {"S": None if like.shape is None else like.shape[-2], "B": None}
        shape = tuple(size if isinstance(size, int) else letters[size] for size in constant.shape)
        found[name] = Feature(torch.int64 if constant.kind == "positions" else like.dtype, shape)
    return found
