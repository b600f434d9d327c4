"""The encoders of a request, by the digests of the model's files; no model is loaded. Also what they cannot encode, and do not make."""

import importlib.util
from collections.abc import Callable, MutableMapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

from cachestore.core.errors import BadInput, BadUsage, MissingExtra, how_to_install
from cachestore.core.spelling import option
from cachestore.encode.batching.unit import Encoder
from cachestore.encode.families.resamplers import DEFAULT, check_resampler
from cachestore.encode.pictures.bucket_rules import STEP, BucketSettings
from cachestore.files.fingerprints import digest_file
from cachestore.files.paths import Layout
from cachestore.jobs.plan.chosen import resampled
from cachestore.jobs.plan.options import LATENTS, PrecomputeRequest
from cachestore.jobs.share.plan import Plan
from cachestore.jobs.share.workers import host_name
from cachestore.store.write.model_digests import load_digests, publish_digests

if TYPE_CHECKING:
    from cachestore.encode.models.loaded import LoadedModel
    from cachestore.encode.needs import Need
    from cachestore.encode.recipes import ModelRequest

_PYAV: Final = "av"


def make_encoders(
    layout: Layout, request: PrecomputeRequest, *, is_dry: bool, rise: Callable[[], None] = lambda: None
) -> tuple[Encoder, ...]:
    """Return the encoders by the digests of model files that the store keeps; it keeps new ones too, unless `is_dry`.

    `rise` is called before each file of the model.
    """
    known = {} if request.recheck else load_digests(layout, host_name())
    before = dict(known)
    encoders = encoders_of(request, known, rise=rise)
    if not is_dry:
        publish_digests(layout, host_name(), {name: digest for name, digest in known.items() if name not in before})
    return encoders


def encoders_of(
    request: PrecomputeRequest,
    known: MutableMapping[str, str],
    loaded: "LoadedModel | None" = None,
    *,
    rise: Callable[[], None] = lambda: None,
) -> tuple[Encoder, ...]:
    """Return the encoders of a request, with no model loaded. `known` caches the digests of model files. Raises BadInput.

    A `loaded` model replaces the one that the request names. If there are latents, the last encoder makes masks.
    """
    from cachestore.encode.pictures.masks import mask_encoders
    from cachestore.encode.recipes import encoders_for

    def digest(path: Path) -> str:
        rise()
        return digest_file(path, known)

    encoders = encoders_for(_model_of(request, loaded), digest)
    return resampled((*encoders, *mask_encoders(encoders)), request.resample or DEFAULT)


def _model_of(request: PrecomputeRequest, loaded: "LoadedModel | None") -> "ModelRequest":
    from cachestore.encode.recipes import ModelRequest

    return ModelRequest(
        model=request.model,
        encode=request.encode,
        vae=request.vae,
        text_encoder=request.text_encoder,
        revision=request.revision,
        variant=request.variant,
        text_dtype=request.text_dtype,
        vae_dtype=request.vae_dtype,
        latents=request.latents,
        encode_args=request.encode_arg,
        device=request.device,
        batch_size=request.batch_size,
        compile=request.compile,
        loaded=loaded,
    )


def needs_of_request(request: PrecomputeRequest, loaded: "LoadedModel | None" = None) -> "tuple[Need, ...]":
    """Return the inputs that the model is trained with but that are not made here, as far as its configuration files show.

    Loads and digests nothing; empty for a model that is not downloaded yet. Raises BadUsage if `strict` refuses the model for any source.
    """
    from cachestore.encode.recipes import needs_for

    needs = needs_for(_model_of(request, loaded))
    if request.strict and (always := tuple(need.words for need in needs if need.role is None or LATENTS not in request.encode)):
        refuse_unmade(always)
    return needs


def refuse_unmade(not_made: Sequence[str]) -> NoReturn:
    """Raise BadUsage for inputs that the model is trained with and that are not made, as `strict` asks."""
    from cachestore.encode.needs import in_words

    strict = option("strict", value=True)
    refused = f"{strict} refuses such a model, so nothing was encoded: leave {option('strict')} out to encode the rest"
    raise BadUsage(f"{in_words(not_made)}. {refused}", option="strict")


def check_latents(request: PrecomputeRequest, encoders: Sequence[Encoder]) -> None:
    """Raise BadInput for resolutions, a step or videos that the VAE cannot encode, MissingExtra without PyAV. Loads nothing."""
    from cachestore.encode.pictures.clips import check_frames
    from cachestore.encode.pictures.latents import LatentsEncoder

    for encoder in encoders:
        if not isinstance(encoder, LatentsEncoder) or encoder.recipe.encoder != LATENTS:
            continue
        for resolution in {*request.resolutions, *(source.resolution for source in request.sources if source.resolution is not None)}:
            settings = BucketSettings(resolution, request.bucket_step or STEP, shortest=request.bucket_min, longest=request.bucket_max)
            encoder.check_buckets(settings, request.buckets)
        if not request.frames:
            continue
        if not encoder.setup.has_frames or encoder.setup.is_of_pictures:
            takes = f"{encoder.setup.components['vae'].class_name} takes only pictures"
            raise BadInput(f"{option('frames')} needs a VAE for videos, but {takes}: leave it out", option="frames")
        check_frames(request.frames, encoder.setup.temporal_factor)
        if importlib.util.find_spec(_PYAV) is None:
            raise MissingExtra(f"videos are read by PyAV, which is not installed. {how_to_install('video')}")


def check_resamplers(plan: Plan, encoders: Sequence[Encoder]) -> None:
    """Raise BadInput if the plan has pictures that this rank cannot resize as the others do."""
    from cachestore.encode.pictures.latents import LatentsEncoder

    for number, encoder in enumerate(encoders):
        if isinstance(encoder, LatentsEncoder) and len(plan.units_of(number)):
            check_resampler(encoder.setup.resample)
