"""Chooses what a request leaves open: the resizer, and the step and the limits of buckets. The same on every rank.

A data set keeps what it was made with. A new one gets what the trainer of `--buckets` does.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from cachestore.core.inputs import BUCKET_MAX, BUCKET_MIN, BUCKETS, OWN, OWN_PIXELS
from cachestore.core.spelling import option
from cachestore.encode.batching.unit import Encoder
from cachestore.encode.families.resamplers import RESAMPLERS, Resample
from cachestore.encode.pictures.bucket_rules import RULES
from cachestore.files.paths import Layout
from cachestore.jobs.plan.options import PrecomputeRequest
from cachestore.store.read.rows import newest_catalog


def with_chosen(layout: Layout, request: PrecomputeRequest, encoders: tuple[Encoder, ...]) -> tuple[PrecomputeRequest, tuple[Encoder, ...]]:
    """Return a request in which nothing is open, and its encoders.

    Depends on the data set and the VAE alone, not on what is installed here, so that all ranks decide alike.
    """
    from cachestore.encode.pictures.latents import LatentsEncoder

    previous = newest_catalog(layout, request.name, io="mmap")
    rule, latents = RULES[request.buckets], next((encoder for encoder in encoders if isinstance(encoder, LatentsEncoder)), None)
    if latents is not None and request.resample is None:
        made = frozenset[str]() if previous is None else previous.recipes.keys()
        own: Resample | None = next((name for name in RESAMPLERS if latents.resampled(name).recipe.fingerprint in made), None)
        chosen: Resample = rule.resample if own is None else own
        request, encoders = replace(request, resample=chosen), resampled(encoders, chosen)
    least, most = rule.limits_at(upscales=not request.no_upscale)
    columns = (one.options for one in (() if previous is None else previous.columns) if "resolution" in one.options)
    options = next(columns, None)
    if options is not None and (options.get(BUCKETS, OWN), options.get("upscale", True)) == (request.buckets, not request.no_upscale):
        least, most = options.get(BUCKET_MIN), options.get(BUCKET_MAX)
    return replace(
        request,
        bucket_step=request.bucket_step or rule.step(1 if latents is None else latents.setup.multiple),
        bucket_min=request.bucket_min or least,
        bucket_max=request.bucket_max or most,
    ), encoders


def resampled(encoders: Iterable[Encoder], chosen: Resample) -> tuple[Encoder, ...]:
    """Return the encoders with those of pictures and videos resizing in the chosen way."""
    from cachestore.encode.pictures.latents import LatentsEncoder
    from cachestore.encode.pictures.vision import VisionEncoder

    return tuple(one.resampled(chosen) if isinstance(one, LatentsEncoder | VisionEncoder) else one for one in encoders)


def as_trainer(request: PrecomputeRequest, encoders: Sequence[Encoder]) -> Iterator[str]:
    """Yield what is done to pictures as the trainer does it, and what is not. Nothing without a trainer, or without pictures."""
    from cachestore.encode.pictures.latents import LatentsEncoder

    trainer, rule = request.buckets, RULES[request.buckets]
    if rule.reading is None or not any(isinstance(one, LatentsEncoder) for one in encoders):
        return
    resized = f"pictures are resized by {option('resample', request.resample)}"
    yield f"as {trainer}: {resized}" if request.resample == rule.resample else f"{resized}, while {trainer} resizes by {rule.resample}"
    if request.bucket_min is not None and request.bucket_max is not None:
        own = "" if (request.bucket_min, request.bucket_max) == rule.limits else f" ({trainer}: {rule.limits[0]} to {rule.limits[1]})"
        yield f"buckets have sides of {request.bucket_min} to {request.bucket_max} pixels{own}"
    if request.pixels == OWN_PIXELS:
        other = option("pixels", "as-trainer")
        yield f"pictures are made upright sRGB on white; {other} does as {trainer}: {rule.reading.in_words()}"
    else:
        yield f"as {trainer}: {rule.reading.in_words()}"
