"""Chooses what a request leaves open: the resizer, and the step and the limits of buckets. The same on every rank.

A data set keeps what it was made with. A new one gets what the trainer of `--buckets` does.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from cachestore.core.inputs import BUCKET_MAX, BUCKET_MIN, BUCKETS, OWN, OWN_PIXELS
from cachestore.encode.bucket_rules import RULES
from cachestore.encode.resamplers import RESAMPLERS, Resample
from cachestore.encode.unit import Encoder
from cachestore.files.paths import Layout
from cachestore.jobs.options import PrecomputeRequest
from cachestore.storage.catalog import Catalog, newest_catalog


def with_chosen(layout: Layout, request: PrecomputeRequest, encoders: tuple[Encoder, ...]) -> tuple[PrecomputeRequest, tuple[Encoder, ...]]:
    """Return a request in which nothing is open, and its encoders."""
    previous = newest_catalog(layout, request.name, io="mmap")
    request, encoders = _with_resampler(request, encoders, previous)
    return _with_buckets(request, encoders, previous), encoders


def _with_buckets(request: PrecomputeRequest, encoders: Sequence[Encoder], previous: Catalog | None) -> PrecomputeRequest:
    """Decide the step between buckets and their limits if the request leaves these open. The step may depend on the VAE.

    A data set keeps the limits that it was made with: older versions had others, which catalogs do not name.
    """
    from cachestore.encode.latents import LatentsEncoder

    multiple = next((encoder.setup.multiple for encoder in encoders if isinstance(encoder, LatentsEncoder)), 1)
    rule = RULES[request.buckets]
    least, most = rule.limits_at(upscales=not request.no_upscale)
    made = (one.options for one in (() if previous is None else previous.columns) if "resolution" in one.options)
    options = next(made, None)
    if options is not None and (options.get(BUCKETS, OWN), options.get("upscale", True)) == (request.buckets, not request.no_upscale):
        least, most = options.get(BUCKET_MIN), options.get(BUCKET_MAX)
    return replace(
        request,
        bucket_step=request.bucket_step or rule.step(multiple),
        bucket_min=request.bucket_min or least,
        bucket_max=request.bucket_max or most,
    )


def _with_resampler(
    request: PrecomputeRequest, encoders: tuple[Encoder, ...], previous: Catalog | None
) -> tuple[PrecomputeRequest, tuple[Encoder, ...]]:
    """Decide how to resize if the request leaves that open: as the data set was made, so that no value is encoded again.

    Depends on the data set alone, not on what is installed here, so that all ranks decide alike.
    """
    from cachestore.encode.latents import LatentsEncoder

    latents = next((encoder for encoder in encoders if isinstance(encoder, LatentsEncoder)), None)
    if latents is None or request.resample is not None:
        return request, encoders
    made = frozenset[str]() if previous is None else previous.recipes.keys()
    own: Resample | None = next((name for name in RESAMPLERS if latents.resampled(name).recipe.fingerprint in made), None)
    chosen: Resample = RULES[request.buckets].resample if own is None else own
    return replace(request, resample=chosen), resampled(encoders, chosen)


def resampled(encoders: Iterable[Encoder], chosen: Resample) -> tuple[Encoder, ...]:
    """Return the encoders with those of pictures and videos resizing in the chosen way."""
    from cachestore.encode.latents import LatentsEncoder
    from cachestore.encode.vision import VisionEncoder

    return tuple(one.resampled(chosen) if isinstance(one, LatentsEncoder | VisionEncoder) else one for one in encoders)


def as_trainer(request: PrecomputeRequest, encoders: Sequence[Encoder]) -> Iterator[str]:
    """Yield what is done to pictures as the trainer does it, and what is not. Nothing without a trainer, or without pictures."""
    from cachestore.encode.latents import LatentsEncoder

    trainer, rule = request.buckets, RULES[request.buckets]
    if rule.reading is None or not any(isinstance(one, LatentsEncoder) for one in encoders):
        return
    resized = f"pictures are resized by --resample {request.resample}"
    yield f"as {trainer}: {resized}" if request.resample == rule.resample else f"{resized}, while {trainer} resizes by {rule.resample}"
    if request.bucket_min is not None and request.bucket_max is not None:
        own = "" if (request.bucket_min, request.bucket_max) == rule.limits else f" ({trainer}: {rule.limits[0]} to {rule.limits[1]})"
        yield f"buckets have sides of {request.bucket_min} to {request.bucket_max} pixels{own}"
    elif rule.may_limit and not request.no_upscale:
        yield (
            f"buckets have sides of up to twice the resolution, as this data set had before; {trainer} has {rule.limits[0]} to"
            f" {rule.limits[1]} pixels: --bucket-min {rule.limits[0]} --bucket-max {rule.limits[1]} with another --name"
        )
    if request.pixels == OWN_PIXELS:
        yield f"pictures are made upright sRGB on white; --pixels as-trainer does as {trainer}: {rule.reading.in_words()}"
    else:
        yield f"as {trainer}: {rule.reading.in_words()}"
