"""The encoder of masks. It crops a mask as its picture and shrinks it to the size of the latents, without a model or torch."""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from cachestore.core.inputs import LIKE, digests_of
from cachestore.core.keys import Json, Key, Recipe, digest_bytes, input_key
from cachestore.core.samples import MASK
from cachestore.encode import images
from cachestore.encode.buckets import Size
from cachestore.encode.shots import THRESHOLD, covered, variant_with_mask
from cachestore.encode.unit import Prepared, Read, Resolved, Result

VERSION = 1
"""Raise it when the code makes other values from the same settings."""

BATCH = 64


def mask_recipe(factor: int, *, is_input: bool = False) -> Recipe:
    """Return the recipe of masks for latents whose sides are `factor` times shorter than their picture's. `is_input`: see `MaskEncoder`."""
    make = {
        "kind": "mask",
        "version": VERSION,
        "transform": {"pixels": images.MASK_TRANSFORM, "alpha": "white", "colour": "grey"},
        "factor": factor,
        "outputs": [MASK],
    }
    make |= {"threshold": THRESHOLD, "shrinks": "nearest"} if is_input else {}
    return Recipe(MASK, make, {"format": 1, "stored": MASK, "factor": factor})


class MaskEncoder:
    """Implements `unit.Encoder` for masks. A request is as for pictures, with the picture that the mask belongs to in `"like"`.

    Makes the tensor `mask`, uint8 [1, height, width] in latent pixels. 255 means that this part of the picture is trained on. With
    `is_input` it is an input of the denoiser: 255 where the picture is painted anew, else 0, as the pipelines for inpainting make it.
    """

    def __init__(self, factor: int, *, is_input: bool = False) -> None:
        self.recipe = mask_recipe(factor, is_input=is_input)
        self._factor = factor
        self._is_input = is_input
        self._fingerprint = self.recipe.fingerprint

    def resolve(self, request: Mapping[str, Json], read: Read) -> Resolved:
        """Find the crop of the picture. Raises EncodeFailed if a file is no picture, or if mask and picture differ in aspect ratio."""
        data, picture = read(str(request["image"])), read(str(request[LIKE]))
        inputs = digests_of(request, [digest_bytes(data), digest_bytes(picture)])
        variant = variant_with_mask(request, picture, data)
        # of the picture only the crop box matters, so pictures of one size can share an entry of a mask
        transform = {**variant.transform(), "crop": list(variant.box.crop), "resized": list(variant.box.resized)}
        transform |= {} if variant.within is None else {"size": list(variant.size)}
        return Resolved(
            key=input_key(self._fingerprint, {MASK: inputs[MASK]}, transform),
            item=(data, variant),
            inputs=inputs,
            meta={"input_digest": inputs[MASK], "encoder": MASK, "bucket": list(variant.bucket)},
            facts=variant.facts(),
        )

    def prepare(self, resolved: Resolved) -> Prepared:
        """Crop and shrink a mask: uint8 [1, height, width]."""
        data, variant = resolved.item
        size = self._latents_size(variant.bucket)
        if self._is_input:
            made = covered(data, variant)[:: self._factor, :: self._factor].astype(np.uint8) * 255
        else:
            within = None if variant.within is None else (variant.within, variant.size)
            made = images.fit_mask(images.decode(data), size, variant.box, within)
            made = made[:, ::-1] if variant.is_flipped else made
        return Prepared(np.ascontiguousarray(made)[None], variant.bucket, cost=size.width * size.height)

    def _latents_size(self, bucket: Size) -> Size:
        return Size(bucket.width // self._factor, bucket.height // self._factor)

    @property
    def window(self) -> int:
        """One batch."""
        return BATCH

    def batch_limit(self, group: Hashable) -> int:
        """Return how many masks go into one batch."""
        del group
        return BATCH

    def submit(self, batch: Sequence[tuple[Key, Any]]) -> Result:
        """Return the prepared masks: they are stored as they are."""
        made = {key: {MASK: pixels} for key, pixels in batch}
        return lambda: made

    def close(self) -> None:
        """Do nothing, as no model is loaded."""

    def entry_bytes(self, bucket: Size, frames: int = 1) -> int:
        """Return the bytes of one entry's tensors at this bucket, for estimates."""
        size = self._latents_size(bucket)
        return size.width * size.height * frames
