"""Fake encoders whose values a trainer can read: what is stored follows from caption or bytes, as in `stores`."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cachestore.core.keys import Recipe
from cachestore.encode.pictures.masks import mask_recipe
from tests.fakes import FakeEncoder
from tests.train.stores import CHANNELS, noise, recipes, stored_text

BUCKET = (64, 48)
FRAMES = 5
LATENT_FRAMES = 2


@dataclass
class ReadableEncoder(FakeEncoder):
    """Makes what training reads of captions, pictures, videos, masks and first frames."""

    def __post_init__(self) -> None:
        self._recipe = self._make_recipe()

    def _make_recipe(self) -> Recipe:
        made: Any = recipes()
        if self.encoder == "mask":
            return mask_recipe(8)
        found: Recipe = made.text if self.encoder == "text" else made.latents
        roles = {"roles": [*self.roles]} if self.roles else {}
        return replace(found, encoder=self.encoder, make={**found.make, "model": self.model, **roles})

    @property
    def recipe(self):
        return self._recipe

    def facts_of(self, request):
        frames = [FRAMES] if "frames" in request and "video" in request else []
        facts = {"size": [*BUCKET], "bucket": [*BUCKET, *frames], "resized": [*BUCKET], "crop": [0, 0, *BUCKET]}
        return facts | ({"fps": [24, 1], "start": [0]} if frames else {})

    def encode(self, batch):
        super().encode(batch)
        return {key: self._value(item) for key, item in batch}

    def _value(self, item):
        if self.encoder == "text":
            return stored_text(self.recipe, item)
        width, height = BUCKET
        if self.encoder == "mask":
            return {"mask": (noise("mask", item, shape=(1, height // 8, width // 8)) > 0).astype(np.uint8) * 255}
        frames = (LATENT_FRAMES,) if b".mp4" in item else ()
        return {"moments": noise("moments", item, shape=(2 * CHANNELS, *frames, height // 8, width // 8))}
