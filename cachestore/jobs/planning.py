"""What `precompute` is asked for, and the plan that follows from it: source + model + options -> samples, recipes and units.

Everything here is the same on every rank; nothing here encodes.
"""

import importlib.util
import json
import operator
import re
import unicodedata
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import islice
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, cast, get_args

from cachestore.core.arguments import refuse_address
from cachestore.core.captions import CaptionPolicy
from cachestore.core.errors import BadInput, BadUsage, FormatError, MissingExtra, RecipeMismatch, how_to_install
from cachestore.core.inputs import RANDOM, RESOLUTIONS, SHOWN, SOURCE, cells_each, options_for, request_for
from cachestore.core.keys import Json, canonical, digest_parts
from cachestore.core.samples import CAPTION, CONTROL, IMAGE, MASK, VIDEO, Sample, Source
from cachestore.core.words import first_of
from cachestore.encode.family import DTYPES, encoder_of, is_text_encoder
from cachestore.encode.unit import Encoder
from cachestore.files.fingerprints import digest_file
from cachestore.files.paths import Layout, is_temporary
from cachestore.source.captions import CaptionLines
from cachestore.source.combined import (
    IN_MEMORY,
    Brought,
    files_of,
    files_of_sources,
    labelled,
    list_path,
    list_sources,
    resolutions_of,
)
from cachestore.source.files import IMAGE_SUFFIXES, Files
from cachestore.source.listing import Listing
from cachestore.source.remarks import Remarks
from cachestore.source.tars import SUFFIX
from cachestore.storage.catalog import Catalog, KeyColumn, newest_catalog
from cachestore.storage.model_digests import load_digests, publish_digests
from cachestore.work.agreement import Intent, counted, wait_for_rank_0
from cachestore.work.plan import ColumnRequest, Plan, PlanColumn, Request, build_plan, is_published, plan_name, publish_plan, read_plan
from cachestore.work.workers import Beat, host_name

if TYPE_CHECKING:
    from cachestore.encode.loaded import LoadedModel
    from cachestore.encode.needs import Need
    from cachestore.encode.recipes import ModelRequest


@dataclass(frozen=True, slots=True)
class PrecomputeRequest:
    """Everything `precompute` takes that can travel to another process: one field for each option of the command."""

    data: str
    """The path of the source; empty where `sources` says what they are."""
    model: str
    store: str
    encode: tuple[str, ...] = ("text", "latents")
    resolution: int | tuple[int, ...] = 1024
    """One, or several: each sample is then encoded at each of them."""
    variants: int = 1
    crop: Literal["center", "random"] = "center"
    crop_seed: int = 0
    flip: bool = False
    bucket_step: int = 64
    no_upscale: bool = False
    frames: tuple[int, ...] = ()
    """Counts of frames, of which a video gets the largest that it can fill; without any no video is encoded."""
    fps: float | None = None
    """Frames a second of videos; None takes each file's own frames as they come."""
    clips: int = 1
    """So many parts of each video, evenly from its beginning to its end; one is the beginning."""
    name: str = "train"
    captions: Literal["first", "all"] | CaptionPolicy = "first"
    caption_lines: CaptionLines = "whole"
    caption: str | None = None
    vae: str | None = None
    text_encoder: str | None = None
    revision: str | None = None
    variant: str | None = None
    encode_arg: Mapping[str, Json] = field(default_factory=dict[str, Json])
    text_dtype: str = "auto"
    vae_dtype: str = "auto"
    latents: Literal["moments", "mean", "sample"] = "moments"
    procs: int | None = None
    device: str = "auto"
    batch_size: int | Literal["auto"] = "auto"
    compile: bool = False
    workers: int | None = None
    rank: int | None = None
    world_size: int | None = None
    strict: bool = False
    max_failures: str = "0"
    """A count, or a share of the units such as `2%`."""
    replace: bool = False
    sources: tuple[Source, ...] = ()
    """Where there are several, or one with settings of its own; the data of each is a path, or IN_MEMORY."""

    @property
    def policy(self) -> CaptionPolicy:
        """Which captions are encoded. Raises BadInput for what is no policy."""
        return CaptionPolicy.parse(self.captions)

    @property
    def resolutions(self) -> tuple[int, ...]:
        """The resolutions, each once, in order."""
        return tuple(dict.fromkeys(self.resolution if isinstance(self.resolution, tuple) else (self.resolution,)))

    def check(self) -> None:
        """Raise BadInput for options that are malformed in themselves."""
        for name, (fits, words) in _FITTING.items():
            if not fits(value := getattr(self, name)):
                raise BadInput(f"--{name.replace('_', '-')} is {words}, not {value!r}")
        for name in ("data", "model", "vae", "text_encoder", "store"):
            refuse_address("DATA" if name == "data" else f"--{name.replace('_', '-')}", getattr(self, name) or "")
        if not self.data and not self.sources:
            raise BadInput("DATA is missing: a path, or several")
        if len(self.resolutions) > 1 and any(source.resolution is not None for source in self.sources):
            raise BadInput("a source has a resolution of its own, and several are given for all: give either")
        if self.variants > 1 and self.crop != RANDOM:
            raise BadInput(f"--variants {self.variants} would be {self.variants} times the same, as there is one centre; add --crop random")
        self._check_videos()

    def _check_videos(self) -> None:
        if any(type(count) is not int or count < 1 for count in self.frames):
            raise BadInput(f"--frames is a number of frames from 1 on, or several with commas between, not {self.frames!r}")
        if self.fps is not None and not (type(self.fps) in {int, float} and isfinite(self.fps) and _LEAST_FPS <= self.fps <= _MOST_FPS):
            raise BadInput(f"--fps is a number of frames a second from {_LEAST_FPS} to {_MOST_FPS}, not {self.fps!r}")
        if type(self.clips) is not int or self.clips < 1:
            raise BadInput(f"--clips is a number from 1 on, not {self.clips!r}")
        if (self.fps is not None or self.clips > 1) and not self.frames:
            raise BadInput("--fps and --clips are for videos, of which none is encoded without --frames")

    def arguments(self) -> list[str]:
        """The request as arguments of `cachestore precompute`; what has its default is left out."""
        are_plain = all(source == Source(source.data) for source in self.sources) and len(self.sources) > 1
        arguments = ["precompute", *(source.data for source in self.sources if are_plain), *([] if self.sources else [self.data])]
        defaults = {one.name: one.default for one in fields(self)}
        for one in fields(self):
            value = getattr(self, one.name)
            option = "--" + one.name.replace("_", "-")
            if one.name == "data" or value is None or value == defaults[one.name]:
                continue
            if one.name == "sources":
                arguments += [] if are_plain else [option, canonical([source.as_json() for source in self.sources]).decode()]
            elif one.name == "encode_arg":
                for argument, given in value.items():
                    arguments += _option(option, f"{argument}={canonical(given).decode()}")
            elif isinstance(value, bool):
                arguments.append(option)
            elif isinstance(value, CaptionPolicy):
                arguments += _option(option, canonical(value.as_json()).decode())
            else:
                arguments += _option(option, ",".join(map(str, cast("tuple[Any, ...]", value))) if isinstance(value, tuple) else str(value))
        return arguments

    def made_by(self, encoders: Collection[str]) -> tuple[str, ...]:
        """What of `encode` these encoders make; all of it where that is nothing."""
        return tuple(name for name in self.encode if _makes(name) & set(encoders)) or self.encode

    def hints(self) -> dict[str, Json]:
        """What a catalog's header keeps of the request, so that `repair --refill` can ask for the same again; paths are absolute."""
        body: dict[str, Any] = {one.name: getattr(self, one.name) for one in fields(self)}
        body["data"] = _as_hint(self.data)
        for name in _PLACES:
            if body[name] is not None and Path(body[name]).exists():
                body[name] = str(Path(body[name]).absolute())
        body["encode"] = list(self.encode)
        body["sources"] = [source.as_json() | {"data": _as_hint(source.data)} for source in labelled(self.sources)]
        if not self.sources:
            del body["sources"]
        body["frames"] = list(self.frames)
        if isinstance(self.resolution, tuple):
            body["resolution"] = list(self.resolution)
        if isinstance(self.captions, CaptionPolicy):
            body["captions"] = self.captions.as_json()
        return {name: value for name, value in body.items() if name not in _NOT_HINTS}

    @classmethod
    def from_hints(cls, hints: Mapping[str, Json], *, store: str) -> "PrecomputeRequest":
        """The request behind a catalog, for a store that may have moved. Raises BadInput where the catalog was not made by `precompute`."""
        known = {one.name for one in fields(cls)}
        body: dict[str, Any] = {name: value for name, value in hints.items() if name in known}
        if "imported" in hints:
            raise BadInput(f"this was imported from {hints['imported']}; run `cachestore import` with {hints.get('folder')} again")
        if "data" not in body or "model" not in body:
            raise BadInput("this catalog does not say how it was made; run `cachestore precompute` with its source and model again")
        if str(body["model"]).startswith(LOADED):
            raise BadInput(f"this was made by a model in memory, {body['model']}; call cs.precompute with that model again")
        body["sources"] = tuple(Source(**source) for source in body.get("sources", ()))
        if any(source.data == IN_MEMORY for source in body["sources"]):
            raise BadInput("this was made of samples in memory; call cs.precompute with them again")
        body |= {"encode": tuple(body.get("encode", ())), "store": store}
        body["frames"] = tuple(body.get("frames", ()))
        if isinstance(body.get("resolution"), list):
            body["resolution"] = tuple(body["resolution"])
        if not isinstance(body.get("captions", "first"), str):
            body["captions"] = CaptionPolicy.parse(body["captions"])
        return cls(**body)


def _as_hint(data: str) -> str:
    """A path that will be found from anywhere; what was in memory, as such; nothing for nothing."""
    if is_temporary(Path(data).name):
        return IN_MEMORY
    is_place = bool(data) and (Path(data).exists() or Path(data).suffix.lower() == SUFFIX)  # a range of tars exists under no name
    return str(Path(data).absolute()) if is_place else data


def _makes(name: str) -> set[str]:
    """The encoders that work where this is asked for: masks are made beside the latents of their pictures."""
    return {encoder_of(name), MASK} if name == LATENTS else {encoder_of(name)}


def _option(name: str, value: str) -> list[str]:
    """An option with its value, joined where argparse would take the value for another option."""
    return [f"{name}={value}"] if value.startswith("-") else [name, value]


LOADED = "(loaded "
"""How the model of a request is called that has no name, as it is an object of the caller's."""

PLAN_SECONDS = 5.0
"""For so long a rank other than 0 looks for the plan where it sees no rank 0, before it lays it out itself."""

LATENTS = "latents"
"""The encoder of pictures and videos."""

_LEAST_FPS, _MOST_FPS = 0.1, 1000
_PYAV = "av"

_IDS = ("ids.text", "ids.offsets")
_PLACES = ("model", "vae", "text_encoder")


def _is_whole(least: int, value: object) -> bool:
    return type(value) is int and value >= least


def _are_whole(value: object) -> bool:
    several = cast("tuple[object, ...]", value) if isinstance(value, tuple) else (value,)
    return bool(several) and all(_is_whole(1, one) for one in several)


def _is_whole_or(other: object, least: int, value: object) -> bool:
    return value == other or _is_whole(least, value)


def _is_any_of(kinds: tuple[type, ...], value: object) -> bool:
    return isinstance(value, kinds)


def _is_one_of(words: Collection[str], value: object) -> bool:
    return isinstance(value, str) and value in words


def _is_named(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def _are_names(value: object) -> bool:
    names = cast("tuple[object, ...]", value) if isinstance(value, tuple) else ()
    return bool(names) and all(isinstance(name, str) and (name in ("text", LATENTS) or is_text_encoder(name)) for name in names)


def _is_device(value: object) -> bool:
    return isinstance(value, str) and _DEVICE.fullmatch(value) is not None


_DEVICES = ("auto", "cpu", "cuda", "cuda:N", "mps", "xpu", "xpu:N")
_DEVICE = re.compile(r"auto|cpu(:0)?|mps(:0)?|(cuda|xpu)(:(0|[1-9][0-9]{0,3}))?")
_ONE_ON = "a whole number from 1 on"
_FITTING: Mapping[str, tuple[Callable[[object], bool], str]] = {
    "resolution": (_are_whole, "a whole number of pixels from 1 on, or several with commas between (from Python a list of them)"),
    "variants": (partial(_is_whole, 1), _ONE_ON),
    "bucket_step": (partial(_is_whole, 1), _ONE_ON),
    "crop_seed": (partial(_is_whole, 0), "a whole number from 0 on"),
    "procs": (partial(_is_whole_or, None, 1), _ONE_ON),
    "workers": (partial(_is_whole_or, None, 0), "a number of threads from 0 on"),
    "batch_size": (partial(_is_whole_or, "auto", 1), f"auto or {_ONE_ON}"),
    "crop": (lambda value: value in ("center", RANDOM), "center or random"),
    **dict.fromkeys(
        ("flip", "no_upscale", "compile", "strict", "replace"),
        (partial(_is_any_of, (bool,)), "given or not (from Python True or False)"),
    ),
    **dict.fromkeys(("text_dtype", "vae_dtype"), (partial(_is_one_of, ("auto", *DTYPES)), f"auto or one of {', '.join(DTYPES)}")),
    "device": (_is_device, f"one of {', '.join(_DEVICES)}"),
    "latents": (partial(_is_one_of, ("moments", "mean", "sample")), "moments, mean or sample"),
    "caption_lines": (partial(_is_one_of, get_args(CaptionLines)), "whole, each or first"),
    "encode": (_are_names, "a list of names, such as text,latents or text_encoder,text_encoder_2 (from Python a tuple of them)"),
    **dict.fromkeys(("model", "store"), (_is_named, "a path, or of a model its id")),
    "name": (partial(_is_any_of, (str,)), "a text"),
    **dict.fromkeys(("caption", "revision", "variant"), (partial(_is_any_of, (str, type(None))), "a text")),
    **dict.fromkeys(("vae", "text_encoder"), (lambda value: value is None or _is_named(value), "a path or a hub id")),
}
"""By option whether a value can be meant, and what it should be, in words."""
_NOT_HINTS = frozenset(
    {"store", "procs", "rank", "world_size", "device", "batch_size", "compile", "workers", "strict", "max_failures", "replace"}
)


@dataclass(frozen=True, slots=True)
class Wanted:
    """A request that was looked at: what the source lists, who encodes, and the plan. Nothing is loaded."""

    layout: Layout
    request: PrecomputeRequest
    listing: Listing
    encoders: tuple[Encoder, ...]
    plan: Plan
    previous: Catalog | None
    """The newest catalog of the name before this pass."""
    remarks: tuple[str, ...]
    """What a user should know beforehand, in words."""
    intent: Intent
    """What other starts see of it."""
    not_made_here: tuple[str, ...] = ()
    """What the model is trained with beside what is made of it, in words."""
    unlike_scripts: tuple[str, ...] = ()
    """How the values differ from what diffusers' own training script makes, in words."""


def list_request(request: PrecomputeRequest, brought: Brought | None = None) -> Listing:
    """What the sources of a request list; `brought` are those in memory. Raises BadInput."""
    if not request.sources:
        return list_path(request.data, caption_lines=request.caption_lines, caption=request.caption, videos=bool(request.frames))
    return list_sources(
        request.sources,
        brought or {},
        caption_lines=request.caption_lines,
        caption=request.caption,
        videos=bool(request.frames),
    )


def files_of_request(request: PrecomputeRequest) -> Files:
    """What the references of a request lead to, with as little listed as can be. Raises BadInput."""
    return files_of_sources(request.sources) if request.sources else files_of(request.data)


def look_at_request(
    layout: Layout,
    request: PrecomputeRequest,
    *,
    beat: Beat | None = None,
    loaded: "LoadedModel | None" = None,
    brought: Brought | None = None,
    listing: Listing | None = None,
) -> Wanted:
    """List the source, digest the model's files and lay out the plan; publish the plan if nobody has.

    `brought` are the listings of sources in memory; `listing` is that of all sources, where it was made already. With a `beat`, which
    rises meanwhile, others see what this start is about to do, and a rank other than 0 leaves it to rank 0 to lay out the plan.

    Raises BadInput for a source or model that cannot be used, BadUsage for a source without what is asked for, RecipeMismatch
    where a name is used already for something else.
    """
    request.check()
    request = replace(request, name=unicodedata.normalize("NFC", request.name))  # as its folder is spelled
    captions = _named(request.policy)
    listing = listing or list_request(request, brought)
    encoders = _encoders(layout, request) if loaded is None else encoders_of(request, {}, loaded)
    needs = needs_of_request(request, loaded)
    _check_buckets(request, encoders)
    columns = [column for number, encoder in enumerate(encoders) for column in _columns(number, encoder, request)]
    # Masks follow from the rest, and whether there are any is known only once the source was gone through.
    asked_for = [encoder for encoder in encoders if encoder.recipe.encoder != MASK]
    named = [column for column in columns if column.column.encoder != MASK]
    asked = _digest_request(request, named, asked_for)
    content = digest_parts(listing.content, captions).hex()
    name = plan_name(asked, content)
    intent = Intent(_digest_arguments(request, named), _fingerprints(asked_for), content, name)
    if beat is not None:
        beat.detail = intent.as_json()
        beat.write()
        if beat.rank not in {0, None}:
            wait_for_rank_0(layout, beat, lambda: is_published(layout, name), unseen_seconds=PLAN_SECONDS)
    previous = newest_catalog(layout, request.name, io="mmap")
    plan = published = _published(layout, name)
    if plan is None:
        seen = Remarks()
        samples = listing.samples(seen) if beat is None else counted(listing.samples(seen), beat)
        plan = replace(_build(request, samples, encoders, columns, (asked, content)), remarks=seen.in_words())
        _refuse_without_captions(request, seen)
    _refuse_nothing(request, plan, previous)
    if published is None:
        publish_plan(layout, plan)
        plan = _published(layout, name) or plan  # as read it takes less memory
    encoders = encoders[: len(plan.recipes)]
    remarks = (
        *plan.remarks,
        *_nothing(plan, request),
        *_without_pictures(plan),
        *compare(plan, previous, replace_allowed=request.replace),
    )
    not_made = _not_made(needs, plan)
    if request.strict and not_made:
        _refuse(not_made)
    return Wanted(layout, request, listing, encoders, plan, previous, remarks, intent, not_made, _unlike_scripts(encoders))


def needs_of_request(request: PrecomputeRequest, loaded: "LoadedModel | None" = None) -> "tuple[Need, ...]":
    """What the model is trained with that is not made here, as far as its configurations tell; nothing of it is loaded or digested.

    Of a model that is still to be downloaded nothing is known. Raises BadUsage where `strict` refuses it whatever the source lists.
    """
    from cachestore.encode.recipes import needs_for

    needs = needs_for(_model_request(request, loaded))
    if request.strict and (always := tuple(need.words for need in needs if need.role is None)):
        _refuse(always)
    return needs


def _not_made(needs: "Sequence[Need]", plan: Plan) -> tuple[str, ...]:
    """Those of the needs that are not made, in words: all but those that the samples' own pictures meet."""
    roles = {column.role for column, (_starts, units) in zip(plan.columns, plan.cells, strict=True) if len(units)}
    return tuple(need.words for need in needs if need.role not in roles)


def _refuse(not_made: Sequence[str]) -> NoReturn:
    from cachestore.encode.needs import in_words

    raise BadUsage(f"{in_words(not_made)}. --strict refuses such a model, and nothing was encoded: leave --strict out to make the rest")


def _unlike_scripts(encoders: Sequence[Encoder]) -> tuple[str, ...]:
    """How what is made differs from what diffusers' own training script of the family makes by its defaults, in words."""
    from cachestore.encode.scripts import unlike_script

    return tuple(words for encoder in encoders for words in unlike_script(encoder))


def _build(
    request: PrecomputeRequest,
    samples: Iterable[Sample],
    encoders: Sequence[Encoder],
    columns: Sequence[ColumnRequest],
    digests: tuple[str, str],
) -> Plan:
    """Lay out the plan of a request: (request, content) are its digests."""
    return build_plan(
        catalog=request.name,
        request=digests[0],
        content=digests[1],
        recipes=[encoder.recipe for encoder in encoders],
        samples=_with_texts(_of_asked_kinds(request, samples), request.policy),
        columns=columns,
        texts=request.policy.encoding(),
        # Where a text encoder is shown images, the empty caption is another value for each sample, and without any it is none.
        extra=[(n, {"caption": ""}) for n, encoder in enumerate(encoders) if encoder.recipe.encoder == "text" and not _shown_to(encoder)],
    )


def _check_buckets(request: PrecomputeRequest, encoders: Sequence[Encoder]) -> None:
    """Raise BadInput for a resolution without buckets, or a step that does not suit the VAE, before anything is loaded."""
    from cachestore.encode.latents import LatentsEncoder

    for encoder in encoders:
        if isinstance(encoder, LatentsEncoder):
            for resolution in {*request.resolutions, *(source.resolution for source in request.sources if source.resolution is not None)}:
                encoder.check_buckets(resolution, request.bucket_step)


def _published(layout: Layout, name: str) -> Plan | None:
    """The plan that another rank or an earlier run published; None without one, or where it is damaged: this one's own is the same."""
    if not is_published(layout, name):
        return None
    try:
        return read_plan(layout, name)
    except FormatError:
        return None


def _encoders(layout: Layout, request: PrecomputeRequest) -> tuple[Encoder, ...]:
    known = load_digests(layout, host_name())
    before = dict(known)
    encoders = encoders_of(request, known)
    publish_digests(layout, host_name(), {name: digest for name, digest in known.items() if name not in before})
    return encoders


def encoders_of(request: PrecomputeRequest, known: MutableMapping[str, str], loaded: "LoadedModel | None" = None) -> tuple[Encoder, ...]:
    """The encoders that a request asks for, with nothing loaded. `known` remembers the digests of model files. Raises BadInput.

    A model that the caller has `loaded` takes the place of the one that the request names. Beside latents the last one makes masks.
    """
    from cachestore.encode.latents import LatentsEncoder
    from cachestore.encode.masks import MaskEncoder
    from cachestore.encode.recipes import encoders_for

    found = encoders_for(_model_request(request, loaded), lambda path: digest_file(path, known))
    return (*found, *(MaskEncoder(encoder.setup.factor) for encoder in found if isinstance(encoder, LatentsEncoder)))


def _model_request(request: PrecomputeRequest, loaded: "LoadedModel | None") -> "ModelRequest":
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


def _of_asked_kinds(request: PrecomputeRequest, samples: Iterable[Sample]) -> Iterable[Sample]:
    return samples if request.frames or LATENTS not in request.encode else _without_videos(samples)


def _without_videos(samples: Iterable[Sample]) -> Iterable[Sample]:
    """The samples. Raises BadUsage for one with a video, as nothing says how many frames to take of it."""
    for sample in samples:
        if sample.images.get(VIDEO):
            raise BadUsage(
                f"sample {sample.id!r} has a video, and nothing says how many frames to take of it: pass --frames, such as 17,49,81"
            )
        yield sample


def _with_texts(samples: Iterable[Sample], policy: CaptionPolicy) -> Iterable[Sample]:
    """The samples with the texts that are encoded of their captions, in place of these."""
    for sample in samples:
        texts = policy.texts(sample.captions)
        yield sample if texts == sample.captions else replace(sample, captions=texts)


def _named(policy: CaptionPolicy) -> str:
    """What a policy has encoded, for digests."""
    encoding = policy.encoding()
    if policy.each > 1 or policy.prefix:
        return canonical(encoding).decode()
    return "all" if encoding else "first"


def _columns(number: int, encoder: Encoder, request: PrecomputeRequest) -> list[ColumnRequest]:
    """What an encoder is asked to make of each sample, a column for each role and resolution.

    Each caption; each image or video that is trained on, and each image that controls; or each mask.
    """
    name, shown = encoder.recipe.encoder, _shown_to(encoder)
    if shown is not None:
        _check_shown(request)
    if name == "text":
        wanted = [(CAPTION, {} if shown is None else {SHOWN: shown})]
    else:
        roles = (MASK,) if name == MASK else (IMAGE, CONTROL, VIDEO) if request.frames else (IMAGE, CONTROL)
        wanted = [(role, _options(request, role, size)) for role in roles for size in request.resolutions]
        if name == LATENTS and request.frames:
            _check_can_take_frames(encoder, request)
    return [
        ColumnRequest(PlanColumn(number, name, role, options), partial(_requests, role, options), needs_cells=role in {MASK, VIDEO})
        for role, options in wanted
    ]


def _check_shown(request: PrecomputeRequest) -> None:
    """Refuse what does not go with a text encoder that is shown pictures. Raises BadInput."""
    if request.flip:
        raise BadInput("--flip mirrors pictures, and this model's text encoder sees them as they are: leave it out")
    if request.policy.dropout:
        raise BadInput(
            "captions are to be dropped, and this model's text encoder is shown each sample's own pictures, so that no embeddings stand for"
            " the empty caption of all of them: leave the dropout of --captions out"
        )


def _check_can_take_frames(encoder: Encoder, request: PrecomputeRequest) -> None:
    """Refuse videos that could not be encoded, before a model is loaded. Raises BadInput."""
    from cachestore.encode.clips import check_frames
    from cachestore.encode.latents import LatentsEncoder

    if not isinstance(encoder, LatentsEncoder):
        return
    if not encoder.setup.has_frames:
        raise BadInput(
            f"--frames is for VAEs of videos, and {encoder.setup.components['vae'].class_name} takes pictures alone: leave it out"
        )
    check_frames(request.frames, encoder.setup.temporal_factor)
    if importlib.util.find_spec(_PYAV) is None:
        raise MissingExtra(f"videos are read by PyAV, which is not installed. {how_to_install('video')}")


def _options(request: PrecomputeRequest, role: str, resolution: int) -> dict[str, Json]:
    """What tells a column of images from others: nothing that has its default, so that a store made before it existed is found again."""
    resolution, by_source = resolutions_of(request.sources, resolution)
    options: dict[str, Json] = {"resolution": resolution, "step": request.bucket_step}
    options |= {RESOLUTIONS: dict(by_source)} if by_source else {}
    options |= {"crop": RANDOM, "seed": request.crop_seed} if request.crop == RANDOM else {}
    options |= {"variants": request.variants} if request.variants > 1 else {}
    options |= {"flip": True} if request.flip else {}
    if role == VIDEO:
        options["frames"] = sorted(set(request.frames))
        options |= {} if request.fps is None else {"fps": int(request.fps) if request.fps == int(request.fps) else request.fps}
        options |= {"clips": request.clips} if request.clips > 1 else {}
    return options | ({"upscale": False} if request.no_upscale else {})


def _requests(role: str, options: Mapping[str, Json], sample: Sample) -> list[Request]:
    """What a column asks of a sample, in the order of its cells. Raises BadInput for images that do not go together."""
    if role == CAPTION:
        return [request_for(role, options, value, sample.images) for value in sample.captions]
    values = sample.images.get(role, ())
    if values and role == MASK and not sample.images.get(IMAGE):
        raise BadInput(f"sample {sample.id!r} has a mask and no picture that it belongs to")
    if values and role == VIDEO:
        _check_video(options, sample)
    own = options_for(options, sample.extras)
    return [request_for(role, own, value, sample.images, number) for value in values for number in range(cells_each(options))]


def _check_video(options: Mapping[str, Json], sample: Sample) -> None:
    """Refuse a video beside what does not go with it. Raises BadInput."""
    if sample.images.get(IMAGE) or len(sample.images[VIDEO]) > 1:
        raise BadInput(
            f"sample {sample.id!r} has a video and {'a picture' if sample.images.get(IMAGE) else 'another one'}, and one of them is trained"
            " on: leave one out, or give each a row; a picture that the model is shown is `control`"
        )
    if sample.images.get(CONTROL) and (options.get("crop") == RANDOM or "clips" in options):
        raise BadInput(
            f"sample {sample.id!r} has a video with control images, which --crop random and --clips would not cut as the video: leave them"
            " out"
        )


def _shown_to(encoder: Encoder) -> str | None:
    """The role of the images that a text encoder is shown beside a caption; None for one that reads captions alone."""
    pictures: Mapping[str, Json] = encoder.recipe.make.get("pictures") or {}
    return pictures.get("role")


def _digest_arguments(request: PrecomputeRequest, columns: Sequence[ColumnRequest]) -> str:
    """What was asked for, whatever the models turn out to be."""
    described = [[one.column.encoder, one.column.role, dict(one.column.options)] for one in columns]
    return digest_parts("cachestore-arguments", request.name, _named(request.policy), canonical(described)).hex()


def _fingerprints(encoders: Sequence[Encoder]) -> dict[str, str]:
    return {encoder.recipe.encoder: encoder.recipe.fingerprint for encoder in encoders}


def _digest_request(request: PrecomputeRequest, columns: Sequence[ColumnRequest], encoders: Sequence[Encoder]) -> str:
    fingerprints = [encoder.recipe.fingerprint for encoder in encoders]
    return digest_parts("cachestore-request", _digest_arguments(request, columns), *fingerprints).hex()


def check_listing(request: PrecomputeRequest, listing: Listing) -> None:
    """Raise BadUsage for a source from which this request would encode nothing. Reads no more of it than that takes.

    Only for a data set that does not exist yet: samples may leave one that exists.
    """
    count, seen, is_wanted, needs_text = 0, Remarks(), False, _asks_for_text(request)
    for sample in _of_asked_kinds(request, listing.samples(seen)):
        count += 1
        is_wanted |= needs_text or bool({IMAGE, CONTROL, VIDEO} & sample.images.keys())
        if is_wanted and not (needs_text and seen.missing):
            return
    if not is_wanted:
        raise BadUsage(_nothing_in_words(request, count, seen.in_words()))
    _refuse_without_captions(request, seen)


def _asks_for_text(request: PrecomputeRequest) -> bool:
    return any(name != LATENTS for name in request.encode)


def _refuse_without_captions(request: PrecomputeRequest, seen: Remarks) -> None:
    """Raise BadUsage if text is to be encoded and a source has rows, but no row has a caption."""
    if seen.uncaptioned and _asks_for_text(request):
        raise BadUsage("; ".join(seen.uncaptioned))


def _refuse_nothing(request: PrecomputeRequest, plan: Plan, previous: Catalog | None) -> None:
    """Raise BadUsage for a plan without a unit, unless it is for a data set whose samples all leave, which has rules of its own."""
    if not plan.unit_count and (plan.ids or previous is None):
        raise BadUsage(_nothing_in_words(request, len(plan.ids), plan.remarks))


def _nothing_in_words(request: PrecomputeRequest, samples: int, remarks: Sequence[str]) -> str:
    """Why a source has nothing to encode: most likely another one was meant. `samples` is how many it lists."""
    paths = [source.data for source in request.sources] or [request.data]
    places = ", ".join("memory" if path == IN_MEMORY else path for path in paths)
    if samples:
        asked = ", ".join(request.encode)
        return f"there is nothing to encode in {places}: none of {samples} samples has a picture, and --encode asks for {asked} alone"
    kinds = ", ".join(sorted(IMAGE_SUFFIXES))
    return "; ".join((f"there is nothing to encode in {places}: no picture ({kinds}), no row, no prompt", *remarks))


def _nothing(plan: Plan, request: PrecomputeRequest) -> tuple[str, ...]:
    """What to say where a data set loses all of its samples."""
    return () if plan.ids else (_nothing_in_words(request, 0, ()),)


def _without_pictures(plan: Plan) -> tuple[str, ...]:
    """What to say where pictures are encoded and only some samples, or none of them, have one: a manifest's column may be misspelt.

    Captions alone are a data set of their own kind: nothing is said of these.
    """
    seen = [starts for column, (starts, _units) in zip(plan.columns, plan.cells, strict=True) if column.role in {IMAGE, VIDEO}]
    counts = zip(*(map(operator.sub, islice(starts, 1, None), starts) for starts in seen), strict=True)
    lacking = [row for row, each in enumerate(counts) if not any(each)]
    if not lacking or (len(lacking) == len(plan.ids) and plan.unit_count):
        return ()
    named = first_of(plan.ids[row] for row in lacking)
    return (f"{len(lacking)} samples have no picture ({named}): their batches hold no latents",)


def compare(plan: Plan, previous: Catalog | None, *, replace_allowed: bool) -> tuple[str, ...]:
    """Hold a plan against the newest catalog of its name: what changes, in words. Raises RecipeMismatch where it must be asked for.

    It is called when a plan is laid out, and again before its catalog takes the place of one that was published meanwhile.
    """
    if previous is None:
        return ()
    words: list[str] = []
    is_same = bool(plan.checksums) and all(plan.checksums.get(name) == previous.checksums.get(name) for name in _IDS)
    ids, before = (set[str](), set[str]()) if is_same else (set(plan.ids), set(previous.ids))
    if before and not ids & before and not replace_allowed:
        raise RecipeMismatch(
            f"the data set {plan.catalog!r} has {len(before)} samples, and none of them is in this source, which lists {len(ids)}: "
            "pass another --name, or --replace if this source is to take its place"
        )
    for column in () if replace_allowed else previous.columns:
        _compare_column(plan, column, previous)
    if ids - before:
        words.append(f"{len(ids - before)} new samples under the name {plan.catalog!r}")
    if before - ids:
        words.append(f"{len(before - ids)} samples are no longer listed and leave {plan.catalog!r}")
    return tuple(words)


def _compare_column(plan: Plan, earlier: KeyColumn, previous: Catalog) -> None:
    """Raise RecipeMismatch where a column that the plan makes anew would lose what it has: a resolution that is added loses nothing."""
    columns = [column for column in plan.columns if (column.encoder, column.role) == (earlier.encoder, earlier.role)]
    if not columns:
        return
    column = next((column for column in columns if _covers(plan, column.options, previous, earlier.options)), columns[0])
    now = plan.recipes[column.recipe]
    if earlier.fingerprint != now.fingerprint:
        changed = _differences(previous.recipes[earlier.fingerprint].make, now.make)
        raise RecipeMismatch(
            f"{column.encoder} of the data set {plan.catalog!r} was made with another model or other settings ({', '.join(changed[:5])}): "
            "pass --replace to make it anew, or another --name"
        )
    if not _covers(plan, column.options, previous, earlier.options):
        raise RecipeMismatch(
            f"{column.encoder} of the data set {plan.catalog!r} was made with {dict(earlier.options)}, now it is {dict(column.options)}: "
            "pass --replace to make it anew, or another --name"
        )


def _are_same_options(plan: Plan, now: Mapping[str, Json], previous: Catalog, before: Mapping[str, Json]) -> bool:
    """Whether samples of both would be made alike: a source that came or went since says nothing about the others."""
    if dict(now) == dict(before):
        return True
    if RESOLUTIONS not in now and RESOLUTIONS not in before:
        return False
    both = _sources_in(plan.extras) & _sources_in(previous.extras)
    return all(options_for(now, {SOURCE: label}) == options_for(before, {SOURCE: label}) for label in both)


def _sources_in(extras: Sequence[str]) -> set[str]:
    """The sources that samples are of; empty for those of one alone."""
    return {str(json.loads(text).get(SOURCE, "")) for text in set(extras)}


def _covers(plan: Plan, now: Mapping[str, Json], previous: Catalog, before: Mapping[str, Json]) -> bool:
    """Whether a column with these options has all that one with the earlier ones has: more variants and flips are added to it."""
    one, other = ({name: option for name, option in some.items() if name not in {"variants", "flip"}} for some in (now, before))
    is_no_less = int(now.get("variants", 1)) >= int(before.get("variants", 1)) and bool(now.get("flip")) >= bool(before.get("flip"))
    return is_no_less and _are_same_options(plan, one, previous, other)


def _differences(before: Mapping[str, Json], now: Mapping[str, Json], prefix: str = "") -> list[str]:
    """The fields in which two recipes differ, by their path."""
    found: list[str] = []
    for name in sorted({*before, *now}):
        one, other = before.get(name), now.get(name)
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            found += _differences(cast("Mapping[str, Json]", one), cast("Mapping[str, Json]", other), f"{prefix}{name}.")
        elif one != other:
            found.append(f"{prefix}{name}")
    return found
