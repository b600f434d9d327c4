"""The shapes that a batch has, from the `read` blocks of recipes and the shapes of stored tensors. Numbers only: needs no torch."""

from collections.abc import Mapping, Sequence
from typing import Final, Literal

from cachestore.core.read_block import Form, LatentsBlock, Padding, TextBlock

Shape = tuple[int | None, ...]
"""None for an axis that varies from batch to batch."""
NUM_FRAMES: Final = "num_frames"
FPS: Final = "fps"
"""Names in the batch for data sets with videos."""
SIZES: Final[Mapping[str, str]] = {"original_size": "size", "crop_top_left": "crop", "target_size": "bucket"}
"""Names in the batch, and the catalog's facts whose first two numbers they are, swapped."""
LatentsAs = Literal["sample", "mean", "moments", "raw"]
"""`sample`: drawn from the moments and normalised; if only a mean or one sample is stored, that one, normalised. `mean`: the mean,
normalised. `moments`: mean and log-variance as stored. `raw`: as `mean` but not normalised, as the VAE returned it (if one sample is
stored: that sample)."""


def is_as_stored(block: LatentsBlock, form: LatentsAs) -> bool:
    """Return whether the result equals what is stored, byte for byte."""
    return form == "moments" or block.is_scaled or (form == "raw" and block.stored != "moments")


def batch_shape(block: LatentsBlock, form: LatentsAs, stored: Sequence[int]) -> tuple[int, ...]:
    """Return the shape that `read_latents_into` makes from a batch of this shape."""
    if is_as_stored(block, form):
        return tuple(stored)
    size, channels, *rest = stored
    one = (channels // 2 if block.stored == "moments" else channels, *rest)
    if form == "raw":
        return size, *one
    first, *others = folded_shape(one, block.patchify)
    return size, first + (block.temporal_factor if block.marks else 0) + block.mask_channels, *others


def folded_shape(shape: Sequence[int], patch: int) -> tuple[int, ...]:
    """Return the shape of one sample's latents `[C, ..., H, W]` after folding patch x patch neighbours into channels."""
    if patch == 1:
        return tuple(shape)
    channels, *between, height, width = shape
    return channels * patch * patch, *between, height // patch, width // patch


def round_up(length: int, padding: Padding) -> int:
    """Round a length up to one that a batch may have."""
    return -(-length // padding.multiple) * padding.multiple


def text_shapes(block: TextBlock, stored: Mapping[str, Sequence[int]], size: int) -> dict[str, Shape]:
    """Return the shapes of the tensors that a batch of `size` captions has; `stored` are those of the tensors of one entry, by name."""
    found: dict[str, Shape] = {}
    for name, form in block.outputs.items():
        shape = list[int | None](_form_shape(form, stored))
        if (padding := block.padding.get(name)) is not None:
            shape[padding.dim] = round_up(padding.length, padding) if padding.length else None
            found |= {padding.mask: (size, shape[padding.dim])} if padding.mask is not None else {}
        found[name] = (size, *shape)
    for name, constant in block.constants.items():
        axes = {"S": found[constant.like][-2], "B": size}
        found[name] = tuple(axis if isinstance(axis, int) else axes[axis] for axis in constant.shape)
    return found


def _form_shape(form: Form, stored: Mapping[str, Sequence[int]]) -> list[int]:
    parts = [_form_shape(part, stored) if isinstance(part, Form) else list(stored[part]) for part in form.parts]
    shape = parts[0]
    if form.dim is not None:
        shape[form.dim] = sum(part[form.dim] for part in parts)
        shape[-1] = form.width or shape[-1]
    return shape
