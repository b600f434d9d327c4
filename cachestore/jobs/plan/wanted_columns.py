"""Which columns a request wants of each encoder, and which requests a sample makes for them. Reads no file."""

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Final

from cachestore.core.errors import BadInput, BadUsage
from cachestore.core.inputs import (
    ALPHA,
    BUCKET_MAX,
    BUCKET_MIN,
    BUCKETS,
    IMAGES,
    OWN,
    OWN_CAPTION,
    OWN_PIXELS,
    PIXELS,
    RANDOM,
    RESOLUTIONS,
    cells_each,
    options_for,
    own_captions,
    request_for,
)
from cachestore.core.keys import Json
from cachestore.core.samples import CAPTION, CONTROL, IMAGE, MASK, SHOWN, VIDEO, Sample, has_mask, images_of, role_of
from cachestore.core.spelling import option
from cachestore.core.words import did_you_mean, listed
from cachestore.encode.batching.unit import Encoder
from cachestore.encode.pictures.bucket_rules import STEP
from cachestore.jobs.plan.options import LATENTS, PrecomputeRequest
from cachestore.jobs.share.plan import ColumnRequest, PlanColumn, Request
from cachestore.sources.combined import resolutions_of

FIRST_COLUMNS: Final = (CAPTION, IMAGE, CONTROL)
"""The roles whose columns a plan may have without cells."""
NAMED_ROLES: Final = (*FIRST_COLUMNS, VIDEO)
"""The roles whose columns are in a plan's name."""


def wanted_columns(encoders: Sequence[Encoder], request: PrecomputeRequest) -> list[ColumnRequest]:
    """Return the columns of the encoders, each with the requests that a sample makes for it. Raises BadInput for options that do not fit.

    Images from which a condition is made are not encoded for themselves.
    """
    taken = {role for encoder in encoders for role in _others(encoder)}
    return [column for number, encoder in enumerate(encoders) for column in _columns_of(number, encoder, request, taken)]


def _columns_of(number: int, encoder: Encoder, request: PrecomputeRequest, taken: Collection[str]) -> list[ColumnRequest]:
    name, shown = encoder.recipe.encoder, picture_role(encoder)
    if shown is not None:
        _check_pictures(request, shown)
    if name == "text":
        wanted = [(CAPTION, {} if shown is None else {IMAGES: shown, **_rate(request, shown)})]
    else:
        wanted: list[tuple[str, dict[str, Json]]] = []
        for role in _roles(encoder, request, taken):
            others = (MASK,) if (name, role) == (MASK, VIDEO) else _others(encoder)
            more: dict[str, Json] = {IMAGES: list(others)} if others else {}
            more |= {ALPHA: MASK} if request.alpha == MASK and MASK in (role, *others) else {}
            wanted += [(role, {**_options(request, role, size), **more}) for size in request.resolutions]
    requests = partial(requests_of_masks if name == MASK else requests_of, taken=taken, captioned=getattr(encoder, "captioned", ()))
    return [
        ColumnRequest(PlanColumn(number, name, role, options), partial(requests, role, options), needs_cells=role not in FIRST_COLUMNS)
        for role, options in wanted
    ]


def _roles(encoder: Encoder, request: PrecomputeRequest, taken: Collection[str]) -> tuple[str, ...]:
    """The roles of an encoder's columns: of the latents themselves, of masks, or the one that a condition is made from."""
    name, roles = encoder.recipe.encoder, encoder.recipe.make.get("roles")
    own = (IMAGE, *SHOWN, *request.reading.roles, VIDEO) if name == LATENTS else (MASK, VIDEO)
    found = own if roles is None else (roles[0],)
    found = found if roles is not None else tuple(role for role in found if role not in taken)
    return tuple(role for role in found if request.frames or VIDEO not in (role, role_of(role).follows))


def _others(encoder: Encoder) -> Sequence[str]:
    """The further roles that a condition is made from."""
    return (encoder.recipe.make.get("roles") or ())[1:]


def _check_pictures(request: PrecomputeRequest, role: str) -> None:
    """Raise BadInput for options that do not fit a text encoder which sees each sample's own pictures of this role."""
    refused = (
        (role_of(role).is_own and request.clips > 1, "clips", None, "the frame with which a video begins"),
        (request.flip, "flip", True, "the unmirrored pictures"),
        (request.pixels != OWN_PIXELS, "pixels", request.pixels, "pictures too, read in cachestore's own way"),
        (bool(request.prompts), "prompts", None, "each sample's own pictures, so a prompt alone has no embeddings"),
    )
    for is_given, name, value, what in refused:
        if is_given:
            whose = f"this model, whose text encoder sees {what}"
            raise BadInput(f"{option(name, value)} cannot be used with {whose}: leave it out", option=name)
    if request.policy.dropout:
        own = "this model's text encoder sees each sample's own pictures, so no empty caption fits all samples"
        raise BadInput(f"{own}: leave the dropout of {option('captions')} out", option="captions")


def _options(request: PrecomputeRequest, role: str, resolution: int) -> dict[str, Json]:
    """The options of an image column. Options at their default are left out."""
    resolution, by_source = resolutions_of(request.sources, resolution)
    options: dict[str, Json] = {"resolution": resolution, "step": request.bucket_step or STEP}
    options |= {BUCKETS: request.buckets} if request.buckets != OWN else {}
    limits = {BUCKET_MIN: request.bucket_min, BUCKET_MAX: request.bucket_max}
    options |= {name: limit for name, limit in limits.items() if limit is not None}
    options |= {RESOLUTIONS: dict(by_source)} if by_source else {}
    options |= {"crop": RANDOM, "seed": request.crop_seed} if request.crop == RANDOM else {}
    options |= {"variants": request.variants} if request.variants > 1 else {}
    options |= {"flip": True} if request.flip else {}
    if VIDEO in (role, role_of(role).follows):
        options |= {"frames": sorted(set(request.frames)), **_rate(request, role)}
        options |= {"clips": request.clips} if request.clips > 1 else {}
    elif request.pixels != OWN_PIXELS:
        options |= {PIXELS: request.pixels}
    return options | ({"upscale": False} if request.no_upscale else {})


def _rate(request: PrecomputeRequest, role: str) -> dict[str, Json]:
    if request.fps is None or VIDEO not in (role, role_of(role).follows):
        return {}
    return {"fps": int(request.fps) if request.fps == int(request.fps) else request.fps}


def requests_of(
    role: str, options: Mapping[str, Json], sample: Sample, *, taken: Collection[str] = (), captioned: Sequence[str] = ()
) -> list[Request]:
    """Return a sample's requests for a column, in the order of the cells.

    `taken` are the roles from which conditions are made, `captioned` the text encoders that may read captions of their own.

    Raises BadInput for images that cannot be combined and for a caption of a text encoder that is not in `captioned`, with which the
    sample fails alone; BadUsage if no text encoder may read captions of its own.
    """
    if role == CAPTION:
        _check_own_captions(sample, captioned)
        captions = own_captions(sample.extras)
        return [request_for(role, options, value, sample.images, captions=captions) for value in sample.captions]
    values = images_of(sample.images, role)
    if values:
        _check_companions(role, sample)
    if values and role == VIDEO:
        _check_video(options, sample, taken)
    own = options_for(options, sample.extras)
    return [request_for(role, own, value, sample.images, number) for value in values for number in range(cells_each(options))]


def requests_of_masks(
    role: str, options: Mapping[str, Json], sample: Sample, *, taken: Collection[str] = (), captioned: Sequence[str] = ()
) -> list[Request]:
    """As `requests_of`, for a column of masks: of pictures (role `mask`), or of videos (role `video`)."""
    return requests_of(role, options, sample, taken=taken, captioned=captioned) if has_mask(sample.images, role) else []


def _check_own_captions(sample: Sample, captioned: Sequence[str]) -> None:
    for column, text in sample.extras.items():
        if not column.startswith(OWN_CAPTION):
            continue
        known = [f"{OWN_CAPTION}{name}" for name in captioned]
        if not known:
            raise BadUsage(
                f"sample {sample.id!r} has a column {column!r}, but all text encoders of this model read one caption: rename the column"
            )
        if column not in known:
            raise BadInput(
                f"sample {sample.id!r} has a column {column!r}, but for this model there are {listed(known)}{did_you_mean(column, known)}"
            )
        if text is not None and not isinstance(text, str):
            raise BadInput(f"sample {sample.id!r}: the column {column} must be one text, not {text!r:.200}")


def _check_companions(role: str, sample: Sample) -> None:
    """Raise BadInput for an image that shows the same frame as a picture or video which the sample lacks."""
    row = role_of(role)
    if row.is_cut_alike and not sample.images.get(row.follows or ""):
        what = "picture or video" if role == MASK else row.follows
        raise BadInput(f"sample {sample.id!r} has a {role}, but no {what} that it belongs to: add it, or remove the {role}")
    if row.is_own and len(sample.images.get(role, ())) > 1:
        raise BadInput(
            f"sample {sample.id!r} has {len(sample.images[role])} images in the column {role}: give one, as a video has only one"
        )


def _check_video(options: Mapping[str, Json], sample: Sample, taken: Collection[str]) -> None:
    if sample.images.get(IMAGE) or len(sample.images[VIDEO]) > 1:
        raise BadInput(
            f"sample {sample.id!r} has a video and {'a picture' if sample.images.get(IMAGE) else 'another one'}, but only one of"
            " them can be trained on: leave one out, or give each a row; a picture that the model is shown goes into the column"
            " `control`"
        )
    shown = [role for role in sample.images if role not in taken and role_of(role).follows == IMAGE and role != MASK]
    if shown and (options.get("crop") == RANDOM or "clips" in options):
        cannot = f"{option('crop', RANDOM)} and {option('clips')} cannot cut in the same way as the video: leave these options out"
        raise BadUsage(f"sample {sample.id!r} has a video with control images, which {cannot}", option="crop")


def picture_role(encoder: Encoder) -> str | None:
    """Return the role of the images that a text encoder sees with a caption; None if it reads captions alone."""
    pictures: Mapping[str, Json] = encoder.recipe.make.get("pictures") or {}
    return pictures.get("role")
