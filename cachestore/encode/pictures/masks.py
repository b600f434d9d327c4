"""The encoder of masks. It cuts a mask as its picture or clip and shrinks it to the size of the latents, without a model or torch."""

from collections.abc import Hashable, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from cachestore.core.keys import Json, Key, Recipe, input_key
from cachestore.core.samples import EVERYTHING, MASK, NOTHING, SOME, VIDEO
from cachestore.encode.batching.unit import Encoder, Prepared, Read, Resolved, Result
from cachestore.encode.pictures import images
from cachestore.encode.pictures.buckets import Size
from cachestore.encode.pictures.kinds import THRESHOLD
from cachestore.encode.pictures.latents import LatentsEncoder
from cachestore.encode.pictures.shots import Footage, Still, read_mask

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


def mask_encoders(encoders: Sequence[Encoder]) -> tuple["MaskEncoder", ...]:
    """Return the encoder of the masks that go with these encoders; none without latents, or if the latents of a condition hold the mask."""
    latents = [encoder for encoder in encoders if isinstance(encoder, LatentsEncoder)]
    uses = {encoder.kind.mask for encoder in latents}
    if not latents or "within" in uses:
        return ()
    return (MaskEncoder(latents[0].setup.factor, latents[0].setup.temporal_factor, is_input="input" in uses),)


class MaskEncoder:
    """Implements `unit.Encoder` for masks.

    A request is as for pictures, with the picture that the mask belongs to in `"like"`; or as for videos, with the mask in `"images"`.
    With `"alpha": "mask"` a picture or video that is its own mask gives its alpha. `levels` says what is read of a mask.
    Makes the tensor `mask`, uint8 [1, height, width] in latent pixels, of a clip [1, frames, height, width] in latent frames. 255 means
    that this part is trained on. With `is_input` it is an input of the denoiser: 255 where the picture is painted anew, else 0, as the
    pipelines for inpainting make it.
    """

    def __init__(self, factor: int, temporal_factor: int = 1, *, is_input: bool = False) -> None:
        self.recipe = mask_recipe(factor, is_input=is_input)
        self._factor = factor
        self._temporal_factor = temporal_factor
        self._is_input = is_input
        self._fingerprint = self.recipe.fingerprint

    def resolve(self, request: Mapping[str, Json], read: Read) -> Resolved:
        """Find the crop of the picture or clip. Raises EncodeFailed if a file is neither, or if mask and picture differ in aspect ratio."""
        examined = read_mask(request, read)
        transform = {**examined.transform, **({"temporal_factor": self._temporal_factor} if VIDEO in request else {})}
        bucket: list[int] = examined.transform["bucket"]
        return Resolved(
            key=input_key(self._fingerprint, examined.keyed, transform),
            item=(examined.shot, tuple(bucket)),
            inputs=examined.inputs,
            meta={"input_digest": examined.inputs[MASK], "encoder": MASK, "bucket": bucket},
            facts=examined.facts,
        )

    def prepare(self, resolved: Resolved) -> Prepared:
        """Cut and shrink a mask."""
        shot: Still | Footage = resolved.item[0]
        bucket: tuple[int, ...] = resolved.item[1]
        frames = bucket[2:]
        is_sampled = self._is_input and isinstance(shot, Still)
        made, has_colours = shot.greys(Size(*bucket[:2]) if is_sampled else self._latents_size(Size(*bucket[:2])))
        if is_sampled:
            made = (made >= THRESHOLD)[:, :: self._factor, :: self._factor].astype(np.uint8) * 255
        if frames:
            # the mean of the frames that each latent frame is made of: the first alone, then `temporal_factor` at a time
            each, greys = self._temporal_factor, np.broadcast_to(made, (*frames, *made.shape[1:]))
            sums = greys[1:].reshape(-1, each, *greys.shape[1:]).sum(axis=1, dtype=np.uint32)
            made = np.concatenate([greys[:1], ((sums + each // 2) // each).astype(np.uint8)])[None]
        weight = NOTHING if not made.any() else EVERYTHING if made.min(initial=255) == 255 else SOME
        facts: dict[str, Json] = {"weight": [weight], **({"coloured": [1]} if has_colours else {})}
        return Prepared(np.ascontiguousarray(made), bucket, facts, prod(made.shape))

    def _latents_size(self, bucket: Size) -> Size:
        return Size(bucket.width // self._factor, bucket.height // self._factor)

    @property
    def window(self) -> int:
        """One batch."""
        return BATCH

    def batch_limit(self, _group: Hashable) -> int:
        """Return how many masks go into one batch."""
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
        return size.width * size.height * ((frames - 1) // self._temporal_factor + 1)
