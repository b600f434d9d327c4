"""Finds the settings of a trainer's buckets from what it cached."""

from collections.abc import Iterator
from itertools import islice
from typing import Final

from cachestore.core.inputs import Buckets
from cachestore.core.keys import Recipe
from cachestore.core.samples import IMAGE, VIDEO
from cachestore.core.spelling import option
from cachestore.core.words import listed
from cachestore.encode.pictures.bucket_rules import RULES, BucketSettings, find_settings
from cachestore.encode.pictures.buckets import Size
from cachestore.files.paths import Layout
from cachestore.store.format.catalog import KeyColumn
from cachestore.store.read.rows import newest_catalog

_MOST: Final = 2000
"""How many pictures are looked at."""


def learned_buckets(column: KeyColumn, recipe: Recipe) -> BucketSettings | None:
    """Return the settings with which the trainer's rule gives the buckets of imported latents.

    None if no settings give all of them, as with another rule's buckets, or if the latents are of a trainer whose rule is not known.
    """
    facts = (column.cell(index).facts for index in range(len(column.keys)))
    sizes = ((Size(*one["size"][:2]), Size(*one["bucket"][:2])) for one in facts if {"size", "bucket"} <= one.keys())
    rule = _rule_of(recipe)
    return None if rule is None else find_settings(rule, set(islice(sizes, _MOST)))


def buckets_in_words(layout: Layout, name: str) -> Iterator[str]:
    """Yield which options of `precompute` give the buckets of a data set's imported latents, if the trainer's rule gives them all."""
    catalog = newest_catalog(layout, name)
    for column in () if catalog is None else catalog.columns:
        recipe = catalog.recipes[column.fingerprint] if catalog is not None else Recipe(column.encoder)
        rule, settings = _rule_of(recipe), learned_buckets(column, recipe) if column.role in (IMAGE, VIDEO) else None
        if rule is not None and settings is not None:
            found: dict[str, object] = {"buckets": rule, "resolution": settings.resolution}
            found |= {} if settings.step == RULES[rule].step(settings.step // 2) else {"bucket_step": settings.step}
            if (settings.shortest, settings.longest) != RULES[rule].limits_at(upscales=settings.upscales):
                found |= {"bucket_min": settings.shortest, "bucket_max": settings.longest}
            found |= {} if settings.upscales else {"no_upscale": True}
            yield (
                f"the imported latents are in the buckets of {rule} at the resolution {settings.resolution}: encode further pictures with"
                f" {listed(option(*one) for one in found.items())}"
            )


def _rule_of(recipe: Recipe) -> Buckets | None:
    return next((name for name in RULES if name == recipe.make.get("format")), None)
