"""The table of all options of `precompute`.

Each field of PrecomputeRequest is an option. From its metadata come the command line and `--help`, the reading of TOML files, the checks
of Python arguments, the JSON for workers, and the hints in a catalog. Imports neither torch nor numpy, to keep `--help` fast.
"""

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, replace
from pathlib import Path
from typing import Any, Final, Literal, TypedDict, cast, get_args

from cachestore.core.arguments import refuse_address
from cachestore.core.captions import CaptionPolicy
from cachestore.core.errors import BadInput
from cachestore.core.inputs import OWN, OWN_PIXELS, RANDOM, Alpha, Buckets, Pixels
from cachestore.core.keys import Json
from cachestore.core.samples import Source
from cachestore.core.spelling import option
from cachestore.encode.families.resamplers import RESAMPLERS, Resample
from cachestore.encode.families.row import encoder_of
from cachestore.files.paths import Access, is_temporary
from cachestore.jobs.plan.option_types import (
    ARGUMENTS,
    BATCH,
    DEVICES,
    DTYPE,
    ENCODERS,
    FAILURES,
    LATENTS,
    MODEL,
    NUMBERS,
    PATHS,
    POLICY,
    PROMPTS,
    RATE,
    ROLE_NAMES,
    SIZES,
    SOURCES,
    STORE,
    TEXT,
    THREADS,
    OptionType,
    make_option,
    make_switch,
    one_of,
    option_of,
    read_device,
    whole_from,
)
from cachestore.sources.combined import IN_MEMORY, labelled
from cachestore.sources.prompts import Prompts
from cachestore.sources.reading import CaptionLines, ListingOptions, TarNames
from cachestore.sources.roles import split_roles
from cachestore.sources.tars import SUFFIX

_NOT: Final = "no-"
CHOSEN: Final = ("resample", "bucket_step", "bucket_min", "bucket_max")
"""Options that are chosen when a data set is planned, if they are not given."""

LOADED: Final = "(loaded "
"""How the name of a model in memory begins, such as "(loaded FluxPipeline)"."""

Latents = Literal["moments", "mean", "sample"]
Crop = Literal["center", "random"]


@dataclass(frozen=True, slots=True)
class PrecomputeRequest:
    """All options of `precompute` that can be sent to another process; one field for each option of the command."""

    data: str = make_option(MISSING, TEXT, "", "a path; empty if `sources` lists the sources", is_for_files=False)
    model: str = make_option(
        MISSING,
        MODEL,
        "",
        "a diffusers folder or hub id, or a transformers text encoder; the UNet or transformer is never read",
    )
    store: str = make_option(MISSING, STORE, "", "the store's folder; made if it does not exist", is_hint=False)
    encode: tuple[str, ...] = make_option(
        ("text", LATENTS),
        ENCODERS,
        "",
        "text, latents, or both; or single text encoders by their names, such as text_encoder_2",
        "LIST",
    )
    name: str = make_option("train", TEXT, "", "the data set's name")
    captions: Literal["first", "all"] | CaptionPolicy = make_option(
        "first",
        POLICY,
        "captions",
        'if a sample has several: its first, or all of them; or a CaptionPolicy as JSON, such as \'{"choose":"all","dropout":0.1}\'',
        "first|all",
    )
    caption_lines: CaptionLines = make_option(
        "whole",
        one_of(*get_args(CaptionLines)),
        "captions",
        "what a caption of several lines is: one caption, a caption on each line, or only its first line",
        "whole|each|first",
    )
    caption: str | None = make_option(
        None,
        TEXT,
        "captions",
        "the caption for samples that have none (default: the empty caption)",
        "TEXT",
    )
    prompts: Prompts = make_option(
        (),
        PROMPTS,
        "captions",
        "a .txt, .json or .jsonl file with prompts for validation, or a JSON list of them: they are encoded too",
        "FILE|JSON",
    )
    """(prompt, negative prompt) of each: the file is read once, so that workers and `repair --refill` do not need it."""
    caption_column: str | None = make_option(
        None,
        TEXT,
        "captions",
        "the column of rows, or the field of a .json beside a picture, that has the captions (default: caption or text; of a .json also"
        " prompt)",
        "NAME",
    )
    tar_names: TarNames = make_option(
        "first-dot",
        one_of(*get_args(TarNames)),
        "data",
        "where the name of a sample in a tar ends; last-dot is for names with dots, such as 22.05.jpg",
        "first-dot|last-dot",
    )
    sources: tuple[Source, ...] = make_option(
        (),
        SOURCES,
        "data",
        'instead of DATA: several sources with settings of their own, such as \'[{"data":"a/","repeats":2},{"data":"b/"}]\'',
        "JSON",
        is_for_files=False,
    )
    """Used for several sources, or one with its own settings. The `data` of each is a path or IN_MEMORY."""
    roles: tuple[str, ...] = make_option(
        (),
        ROLE_NAMES,
        "data",
        "names of other kinds of images: `--roles depth` makes depth_latents from cat.depth.png, or from the column depth; and where images"
        " of a role are: `--roles mask=masks/` in folders beside the pictures, `mask=-masklabel` in cat-masklabel.png; image=masks/ says"
        " that those are pictures to train on",
        "LIST",
    )
    alpha: Alpha = make_option(
        "white",
        one_of(*get_args(Alpha)),
        "pictures",
        "what the transparency of pictures and videos is for: nothing but to put them on white, or also their mask",
        "white|mask",
    )
    replace: bool = make_switch(
        "",
        "allow changes that are errors otherwise: another model, other settings, fewer resolutions, or DATA with none of the old samples",
        is_hint=False,
    )
    recheck: bool = make_switch(
        "running",
        "read every input and every file of the model again, whatever the file system says of them; says how many had changed",
    )
    resolution: int | tuple[int, ...] = make_option(
        1024,
        SIZES,
        "",
        "scale pictures to buckets of about R*R pixels; with several R, encode each picture at each",
        "R[,R]",
    )
    buckets: Buckets = make_option(
        OWN,
        one_of(*get_args(Buckets)),
        "pictures",
        "choose buckets, crops and --resample as this trainer does; diffusers makes squares",
        "|".join(get_args(Buckets)),
    )
    bucket_step: int | None = make_option(
        None,
        whole_from(1),
        "pictures",
        "the sides of buckets are multiples of N pixels (default: 64, or that of the trainer named by --buckets)",
        "N",
    )
    bucket_min: int | None = make_option(
        None,
        whole_from(1),
        "pictures",
        "the shortest side of a bucket (default: 256, or half the resolution if that is less; sd-scripts: 256)",
        "PIXELS",
    )
    bucket_max: int | None = make_option(
        None, whole_from(1), "pictures", "the longest side of a bucket (default: twice the resolution; sd-scripts: 1024)", "PIXELS"
    )
    no_upscale: bool = make_switch("pictures", "put small pictures into smaller buckets instead of scaling them up")
    pixels: Pixels = make_option(
        OWN_PIXELS,
        one_of(*get_args(Pixels)),
        "pictures",
        "own: sRGB, on white, upright; as-trainer: profiles, transparency and EXIF orientation as the trainer of --buckets leaves them",
        "|".join(get_args(Pixels)),
    )
    crop: Crop = make_option(
        "center", one_of(*get_args(Crop)), "pictures", "which part of a picture to keep if it is larger than its bucket", "center|random"
    )
    variants: int = make_option(1, whole_from(1), "pictures", "encode N random crops of each picture; more than 1 needs --crop random", "N")
    crop_seed: int = make_option(0, whole_from(0), "pictures", "the seed of random crops", "N")
    flip: bool = make_switch("", "also encode each picture mirrored")
    resample: Resample | None = make_option(
        None,
        one_of(*RESAMPLERS),
        "pictures",
        "how to resize; pillow: by Pillow itself, slow (default: as the trainer of --buckets, else lanczos; or what was used before)",
        "|".join(RESAMPLERS),
    )
    frames: tuple[int, ...] = make_option(
        (),
        NUMBERS,
        "videos",
        "lengths of clips in frames, such as 17,49,81: each video gets the longest that fits it. Videos need this option",
        "F[,F]",
    )
    fps: float | None = make_option(None, RATE, "videos", "frames to take from each second (default: all)", "R")
    clips: int = make_option(1, whole_from(1), "videos", "clips from each video, evenly spread; 1 is its beginning", "N")
    vae: str | None = make_option(
        None, MODEL, "", "the VAE, if it is not the model's own: a folder, a hub id, or a .safetensors file", "PATH"
    )
    text_encoder: str | None = make_option(None, MODEL, "model", "the text encoder, if it is not the model's own, as for --vae", "PATH")
    revision: str | None = make_option(None, TEXT, "model", "the revision of a hub model", "R")
    variant: str | None = make_option(None, TEXT, "model", "the variant of the weights, such as fp16", "V")
    encode_arg: Mapping[str, Json] = make_option(
        dict, ARGUMENTS, "model", "an argument for encode_prompt, such as clip_skip=1; JSON or text", "NAME=VALUE"
    )
    text_dtype: str = make_option("auto", DTYPE, "model", "float32, bfloat16 or float16; auto chooses by model family", "D")
    vae_dtype: str = make_option("auto", DTYPE, "model", "float32, bfloat16 or float16; auto chooses by model family", "D")
    latents: Latents = make_option(
        "moments",
        one_of(*get_args(Latents)),
        "model",
        "moments: store mean and variance, and each epoch draws a new sample; mean: the mean; sample: one sample, drawn once",
        "moments|mean|sample",
    )
    procs: int | None = make_option(
        None, whole_from(1), "", "start N processes (default: one for each GPU of this machine, else 1)", "N", is_hint=False
    )
    device: str = make_option("auto", OptionType(f"one of {DEVICES}", read_device), "running", DEVICES)
    batch_size: int | Literal["auto"] = make_option(
        "auto", BATCH, "running", "samples in a batch: a number, or auto, which finds a fast one", "N"
    )
    compile: bool = make_switch("running", "speed up the VAE with torch.compile; sizes with few pictures are not compiled")
    workers: int | None = make_option(
        None, THREADS, "running", "threads in each process that read files (default: by the number of processors)", "N"
    )
    rank: int | None = make_option(
        None, whole_from(0), "running", "the number of this process, from 0, if no launcher sets it", "R", is_for_files=False
    )
    world_size: int | None = make_option(
        None, whole_from(1), "running", "with --rank: how many processes there are", "W", is_for_files=False
    )
    access: Access | None = make_option(
        None,
        one_of(*get_args(Access)),
        "running",
        "who may write a new store (default: group if the folder hands its group on and the umask lets the group write)",
        "private|group",
        is_hint=False,
    )
    max_failures: str = make_option(
        "0",
        FAILURES,
        "running",
        "how many captions and pictures may fail before the exit code is 3; all others are encoded in any case",
        "N|P%",
    )
    strict: bool = make_switch(
        "running",
        "exit with 1 instead of 3 if too many fail; also exit with 2, before encoding, if training this model needs inputs that cachestore"
        " does not make, such as audio",
    )

    @property
    def policy(self) -> CaptionPolicy:
        """The caption policy. Raises BadInput if `captions` is not one."""
        return CaptionPolicy.parse(self.captions)

    @property
    def resolutions(self) -> tuple[int, ...]:
        """The resolutions, each once, in order."""
        return tuple(dict.fromkeys(self.resolution if isinstance(self.resolution, tuple) else (self.resolution,)))

    @property
    def named_data(self) -> str:
        """What is listed, for a person: the path, or how many sources there are."""
        data = [str(source.data) for source in self.sources] or [self.data]
        return "samples in memory" if data[0] == IN_MEMORY else data[0] if len(data) == 1 else f"{len(data)} sources"

    @property
    def reading(self) -> ListingOptions:
        """How the sources are read into samples."""
        roles, locations = split_roles(self.roles)
        return ListingOptions(
            self.caption_lines,
            self.caption,
            bool(self.frames),
            roles,
            locations,
            caption_column=self.caption_column,
            tar_names=self.tar_names,
        )

    def check(self) -> None:
        """Raise BadInput for options that are malformed or cannot be combined."""
        for one in fields(self):
            read_value(one, getattr(self, one.name), option(one.name))
        for name in ("data", "model", "vae", "text_encoder", "store"):
            refuse_address(option(name), getattr(self, name) or "")
        if not self.data and not self.sources:
            raise BadInput(f"{option('data')} is missing: a path, or several", option="data")
        if len(self.resolutions) > 1 and any(source.resolution is not None for source in self.sources):
            both = "a source has its own resolution, and there are several for all: give only one of the two"
            raise BadInput(both, option="resolution")
        if self.variants > 1 and self.crop != RANDOM:
            needs = f"{option('variants', self.variants)} needs {option('crop', RANDOM)}: all centre crops would be the same"
            raise BadInput(needs, option="crop")
        if self.prompts and self.encode == (LATENTS,):
            needs = f"{option('prompts')} needs a text encoder, but {option('encode')} asks for {LATENTS} alone: leave one of them out"
            raise BadInput(needs, option="prompts")
        if (self.fps is not None or self.clips > 1) and not self.frames:
            needs = f"{option('fps')} and {option('clips')} are for videos, which need {option('frames')}: add it, or leave them out"
            raise BadInput(needs, option="frames")
        self._check_buckets()

    def _check_buckets(self) -> None:
        """Raise BadInput for settings that the rule does not have."""
        from cachestore.encode.pictures.bucket_rules import RULES

        rule, buckets = RULES[self.buckets], option("buckets", self.buckets)
        if self.pixels != OWN_PIXELS and rule.reading is None:
            needs = f"{option('pixels', self.pixels)} needs a trainer: add {option('buckets')} with its name, or leave it out"
            raise BadInput(needs, option="buckets")
        has_none = f"cannot be used with {buckets}, which has no such setting: leave one of them out"
        if self.no_upscale and not rule.may_not_upscale:
            raise BadInput(f"{option('no_upscale', value=True)} {has_none}", option="no_upscale")
        if rule.has_own_step and self.bucket_step not in (None, rule.step(1)):
            step = f"{option('bucket_step')} cannot be used with {buckets}, which has its own step: leave one of them out"
            raise BadInput(step, option="bucket_step")
        for name, limit in (("bucket_min", self.bucket_min), ("bucket_max", self.bucket_max)):
            if limit is not None and not rule.may_limit:
                raise BadInput(f"{option(name)} {has_none}", option=name)
            if limit is not None and self.no_upscale and self.buckets != OWN:
                ignores = f"{option('no_upscale', value=True)}, by which {self.buckets} ignores it: leave one of them out"
                raise BadInput(f"{option(name)} cannot be used with {ignores}", option=name)

    def as_json(self) -> dict[str, Json]:
        """Return all options as JSON; the inverse is `from_json`."""
        return {one.name: _as_json(getattr(self, one.name)) for one in fields(self)}

    @classmethod
    def from_json(cls, body: Mapping[str, Any], where: str = "") -> "PrecomputeRequest":
        """Return the request for a JSON object, a TOML table or Python arguments. Unknown names are ignored.

        Raises BadInput for a wrong value; its message begins with `where` and the option's name.
        """
        known = {one.name: one for one in fields(cls)}
        return cls(**{name: read_value(known[name], value, f"{where}{name}") for name, value in body.items() if name in known})

    def absolute(self) -> "PrecomputeRequest":
        """Return the request with absolute paths, for a process in another folder. Paths that do not exist stay as they are."""
        paths = {name: str(Path(path).absolute()) for name in PATHS if (path := getattr(self, name)) and Path(path).exists()}
        sources = tuple(replace(source, data=_as_hint(source.data)) for source in self.sources)
        return replace(self, data=_as_hint(self.data), sources=sources, store=str(Path(self.store).absolute()), **paths)

    def hints(self) -> dict[str, Json]:
        """Return the options that a catalog's header keeps, so that `repair --refill` can encode the same again. Paths are absolute."""
        body = replace(self, sources=tuple(labelled(self.sources))).absolute().as_json()
        return {one.name: body[one.name] for one in fields(self) if option_of(one).is_hint}

    @classmethod
    def from_hints(cls, hints: Mapping[str, Any], *, store: str) -> "PrecomputeRequest":
        """Return the request that made a catalog; `store` may have moved. Raises BadInput if the hints are not enough to run it again."""
        if "imported" in hints:
            raise BadInput(f"this was imported from {hints['imported']}; run `cachestore import` with {hints.get('folder')} again")
        if "data" not in hints or "model" not in hints:
            raise BadInput(
                "this catalog does not say how it was made (other code made it, such as cs.fill); run `cachestore precompute` with"
                " its source and model, or that code, again"
            )
        if str(hints["model"]).startswith(LOADED):
            raise BadInput(f"this was made by a model in memory, {hints['model']}; call cs.precompute with that model again")
        if any(source.get("data") == IN_MEMORY for source in hints.get("sources", ())):
            raise BadInput("this was made of samples in memory; call cs.precompute with them again")
        return cls.from_json({**hints, "store": store})

    def made_by(self, encoders: Collection[str]) -> tuple[str, ...]:
        """Return the names in `encode` that these encoders make; all names if they make none."""
        made = {encoder if encoder == "text" else LATENTS for encoder in encoders}  # "latents" includes masks and all other conditions
        return tuple(name for name in self.encode if encoder_of(name) in made) or self.encode


class SharedOptions(TypedDict, total=False):
    """The options of `cs.precompute` that have defaults and are the same on all ranks."""

    name: str
    captions: Literal["first", "all"] | CaptionPolicy
    caption_lines: CaptionLines
    caption: str | None
    caption_column: str | None
    tar_names: TarNames
    roles: str | Sequence[str]
    alpha: Alpha
    prompts: str | os.PathLike[str] | Sequence[str | tuple[str, str]]
    replace: bool
    recheck: bool
    resolution: int | Sequence[int]
    buckets: Buckets
    bucket_step: int | None
    bucket_min: int | None
    bucket_max: int | None
    no_upscale: bool
    pixels: Pixels
    crop: Crop
    variants: int
    crop_seed: int
    flip: bool
    resample: Resample | None
    frames: int | Sequence[int]
    fps: float | None
    clips: int
    vae: str | os.PathLike[str] | None
    text_encoder: str | os.PathLike[str] | None
    revision: str | None
    variant: str | None
    text_dtype: str
    vae_dtype: str
    latents: Latents
    device: str
    batch_size: int | Literal["auto"]
    compile: bool
    access: Access | None
    strict: bool


class Options(SharedOptions, total=False):
    """All options of `cs.precompute` and `cs.plan` that have defaults."""

    procs: int | None
    workers: int | None
    rank: int | None
    world_size: int | None


def in_command(name: str) -> str:
    """Return an option's name on the command line."""
    return "DATA" if name == "data" else f"--{name.replace('_', '-')}"


def switched_off(switch: str) -> str:
    """Return the option that turns a switch off, which `--again` may have turned on: `--no-flip`, `--upscale`."""
    name = switch.removeprefix("--")
    return f"--{name.removeprefix(_NOT)}" if name.startswith(_NOT) else f"--{_NOT}{name}"


def spelled(default: object) -> str:
    """Return a default as a person would type it; empty for none."""
    if isinstance(default, tuple):
        return ",".join(map(str, cast("tuple[object, ...]", default)))
    return str(default) if isinstance(default, str | int) else ""


def read_value(one: "Field[Any]", value: object, where: str) -> Any:
    """Return a value as a request holds it. Raises BadInput for a wrong value; its message begins with `where`."""
    if value is None and one.default is None:
        return None
    try:
        return option_of(one).kind.read(value)
    except (TypeError, ValueError) as error:  # BadInput is a ValueError too
        raise _refusal(one, where, value, error) from error


def parse_value(one: "Field[Any]", text: Any, where: str) -> Any:
    """Return the value for the text of a command line, or for the texts of an option that may be repeated. Raises BadInput."""
    try:
        value = option_of(one).kind.parse(text)
    except (RecursionError, ValueError) as error:
        raise _refusal(one, where, text, error) from error
    return read_value(one, value, where)


def _refusal(one: "Field[Any]", where: str, value: object, error: Exception) -> BadInput:
    own = f": {error}" if isinstance(error, BadInput) and str(error) else ""
    return BadInput(f"{where} must be {option_of(one).kind.wanted}, not {value!r}{own}", option=one.name)


def _as_json(value: object) -> Json:
    match value:
        case CaptionPolicy() | Source():
            return value.as_json()
        case tuple():
            return [_as_json(one) for one in cast("tuple[object, ...]", value)]
        case Mapping():
            return dict(cast("Mapping[str, Json]", value))
        case _:
            return cast("Json", value)


def _as_hint(data: str) -> str:
    """The absolute path if it exists or is of tars, IN_MEMORY for rows of a source in memory, else `data` itself."""
    if is_temporary(Path(data).name):
        return IN_MEMORY
    is_path = bool(data) and (Path(data).exists() or Path(data).suffix.lower() == SUFFIX)  # a range of tars is no file of that name
    return str(Path(data).absolute()) if is_path else data
