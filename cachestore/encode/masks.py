"""The encoder of masks. It crops a mask as its picture and shrinks it to the size of the latents, without a model or torch."""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from cachestore.core.errors import EncodeFailed
from cachestore.core.inputs import LIKE
from cachestore.core.keys import Json, Key, Recipe, digest_bytes, input_key
from cachestore.core.samples import IMAGE, MASK
from cachestore.encode import images
from cachestore.encode.buckets import Size
from cachestore.encode.unit import Prepared, Read, Resolved, Result
from cachestore.encode.variants import variant_of

VERSION = 1
"""Raise it when the code makes other values from the same settings."""

BATCH = 64


def mask_recipe(factor: int) -> Recipe:
    """Return the recipe of masks for latents whose sides are `factor` times shorter than their picture's."""
    make = {
        "kind": "mask",
        "version": VERSION,
        "transform": {"pixels": images.MASK_TRANSFORM, "alpha": "white", "colour": "grey"},
        "factor": factor,
        "outputs": [MASK],
    }
    return Recipe(MASK, make, {"format": 1, "stored": MASK, "factor": factor})


class MaskEncoder:
    """Implements `unit.Encoder` for masks. A request is as for pictures, with the picture that the mask belongs to in `"like"`.

    Makes the tensor `mask`, uint8 [1, height, width] in latent pixels. 255 means that this part of the picture is trained on.
    """

    def __init__(self, factor: int) -> None:
        self.recipe = mask_recipe(factor)
        self._factor = factor
        self._fingerprint = self.recipe.fingerprint

    def resolve(self, request: Mapping[str, Json], read: Read) -> Resolved:
        """Find the crop of the picture. Raises EncodeFailed if a file is no picture, or if mask and picture differ in aspect ratio."""
        data, picture = read(str(request["image"])), read(str(request[LIKE]))
        digest, digest_of_picture = digest_bytes(data), digest_bytes(picture)
        size, own = images.measure(picture), images.measure(data)
        if abs(own.width * size.height - own.height * size.width) > size.width + size.height:
            raise EncodeFailed(
                f"the mask has {own.width} x {own.height} pixels, but its picture {size.width} x {size.height}: they need the"
                " same aspect ratio"
            )
        variant = variant_of(request, size, digest_of_picture)
        # of the picture only the crop box matters, so pictures of one size can share an entry of a mask
        transform = {**variant.transform(), "crop": list(variant.box.crop), "resized": list(variant.box.resized)}
        transform |= {} if variant.within is None else {"size": list(variant.size)}
        return Resolved(
            key=input_key(self._fingerprint, {MASK: digest}, transform),
            item=(data, variant),
            inputs={MASK: digest, IMAGE: digest_of_picture},
            meta={"input_digest": digest, "encoder": MASK, "bucket": list(variant.bucket)},
            facts=variant.facts(),
        )

    def prepare(self, resolved: Resolved) -> Prepared:
        """Crop and shrink a mask: uint8 [1, height, width]."""
        data, variant = resolved.item
        size = self._latents_size(variant.bucket)
        made = images.fit_mask(images.decode(data), size, variant.box, None if variant.within is None else (variant.within, variant.size))
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

    def entry_bytes(self, bucket: Size) -> int:
        """Return the bytes of one entry's tensors at this bucket, for estimates."""
        size = self._latents_size(bucket)
        return size.width * size.height
