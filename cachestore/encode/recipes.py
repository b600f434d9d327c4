"""Make encoders and their recipes from a model and options. Reads configurations and digests files; loads no module and no torch.

The `make` block of a recipe has everything that decides the tensors: the class, the digests of exactly the files that are loaded, the
arguments, the lengths, the dtype, and the name of the transform from bytes to pixels. File names in it are relative to the model
(`vae/config.json`), or to the folder of a text encoder without a pipeline. `families` describes the `read` block.
"""

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar, get_args

from cachestore.core.errors import BadInput, MissingExtra, how_to_install
from cachestore.core.keys import Json, Recipe
from cachestore.core.spelling import option
from cachestore.encode.families import lookup as families
from cachestore.encode.families.resamplers import DEFAULT, RESAMPLERS
from cachestore.encode.families.row import DTYPES, EXACT_PADDING, MAX_LENGTH_ARG, SKIP_ARG, TextFamily, encoder_of, is_text_encoder
from cachestore.encode.families.text import PLAIN, TEXT_FAMILIES
from cachestore.encode.models import folders as models
from cachestore.encode.models.folders import Component, Model
from cachestore.encode.models.hub import find_here, with_folder
from cachestore.encode.models.setup import LatentsSetup, TextSetup, text_width
from cachestore.encode.models.single_file import is_single_file, read_shapes, text_prefix, token_embeddings
from cachestore.encode.needs import Need, needs_of
from cachestore.encode.pictures import images
from cachestore.encode.pictures.conditions import DENOISERS, VAE, conditions_of, outline_of, plain_class
from cachestore.encode.pictures.kinds import Embedded
from cachestore.encode.pictures.latents import LatentsEncoder
from cachestore.encode.pictures.vision import VisionEncoder, VisionSetup
from cachestore.encode.text.encoder import TextEncoder

if TYPE_CHECKING:
    from cachestore.encode.models.loaded import LoadedModel

T = TypeVar("T")
Digest = Callable[[Path], str]
Stored = Literal["moments", "mean", "sample"]
ModelEncoder = TextEncoder | LatentsEncoder | VisionEncoder
ENCODERS = ("text", "latents")
"""The encoders that can be asked for, in the order in which they run."""
TEXT_VERSION = 1
LATENTS_VERSION = 1
VISION_VERSION = 1
"""Raise these when the code makes other tensors from the same settings."""
_CLIP_LAYERS = 12
"""The default of transformers, for an old config.json that does not say it."""
_UNSET_LENGTH = 1_000_000
"""A larger `model_max_length` counts as unset: transformers then writes 10^30."""


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """A model, what to encode with it, and how."""

    model: str
    """A diffusers folder, a transformers text-encoder folder, a VAE folder, or a hub id of one of these."""
    encode: Collection[str] = ENCODERS
    """`text` and `latents`. Instead of `text`, names of text encoders (`text_encoder_2`) that can be called alone."""
    vae: str | None = None
    """A folder, a hub id, or a single `.safetensors` file. A file gets the configuration of the model's own VAE."""
    text_encoder: str | None = None
    """The same for a text encoder. A file gets the configuration of the one whose token embedding has the same shape."""
    revision: str | None = None
    variant: str | None = None
    text_dtype: str = "auto"
    vae_dtype: str = "auto"
    latents: Stored = "moments"
    encode_args: Mapping[str, Json] = field(default_factory=dict[str, Json])
    family: TextFamily | None = None
    """The caller's own row for the pipeline. It replaces the one of the table or of introspection."""
    device: str = "auto"
    batch_size: int | Literal["auto"] = "auto"
    compile: bool = False
    """Whether the VAE's encoder goes through `torch.compile` for shapes for which that saves time."""
    loaded: "LoadedModel | None" = None
    """A model in memory. It is used instead of `model`."""


def encoders_for(request: ModelRequest, digest: Digest) -> tuple[ModelEncoder, ...]:
    """Return the encoders that a request asks for: text, latents, and with latents the model's conditions. Loads no weights.

    `digest` returns a file's SHA-256, and is called for exactly the files that will be loaded. BadInput says what would help.
    """
    _check(request)
    if not request.encode:
        return ()
    if request.loaded is not None:
        given = [name for name in ("vae", "text_encoder", "revision", "variant") if getattr(request, name) is not None]
        if given:
            raise BadInput(
                f"{', '.join(given)} cannot be given with a loaded model: put the component into the mapping or the pipeline itself",
                option=given[0],
            )
        return _encoders(request.loaded.model, request, digest)
    # parts of a hub model that are replaced by others are not downloaded
    needed = [name for name in request.encode if not (name == "latents" and request.vae and not is_single_file(request.vae))]
    return with_folder(
        request.model,
        lambda folder: _encoders_of_folder(folder, request, digest),
        encode=needed,
        revision=request.revision,
        variant=request.variant,
    )


def needs_for(request: ModelRequest) -> tuple[Need, ...]:
    """Return what training the model needs that is not made here, by configurations alone; nothing if it is not on this machine."""
    if request.loaded is not None:
        return needs_of(*request.loaded.outline()) if request.loaded.class_name is not None else ()
    folder = find_here(request.model, request.revision)
    if folder is None or not (folder / models.INDEX).is_file():
        return ()
    return needs_of(*_outline(models.read_model(folder), request))


def _check(request: ModelRequest) -> None:
    unknown = [name for name in request.encode if name not in ENCODERS and not is_text_encoder(name)]
    if unknown:
        raise BadInput(
            f"cannot encode {', '.join(map(repr, unknown))}; known are {', '.join(ENCODERS)}, and text_encoder, text_encoder_2, ...",
            option="encode",
        )
    if "text" in request.encode and any(map(is_text_encoder, request.encode)):
        raise BadInput(
            f"text already means all text encoders: in {', '.join(request.encode)}, leave out either text or the single encoders",
            option="encode",
        )
    if request.latents not in get_args(Stored):
        raise BadInput(f"latents cannot be stored as {request.latents!r}; known are {', '.join(get_args(Stored))}", option="latents")
    if request.batch_size != "auto" and request.batch_size < 1:
        raise BadInput(f"the batch size must be at least 1, not {request.batch_size}", option="batch_size")


def _encoders(model_of: Callable[[str], Model], request: ModelRequest, digest: Digest) -> tuple[ModelEncoder, ...]:
    asked = {encoder_of(name) for name in request.encode}
    encoders: list[ModelEncoder] = [_text_encoder(model_of("text"), request, digest)] if "text" in asked else []
    if "latents" not in asked:
        return tuple(encoders)
    model = model_of("latents")
    latents = _latents_encoder(model, request, digest)
    encoders.append(latents)
    for condition in conditions_of(outline_of(*_outline(model, request))) if model.kind == "pipeline" else ():
        name, kind = condition.name, condition.kind
        is_shown = isinstance(kind, Embedded)
        encoders.append(_vision_encoder(name, kind, model, request, digest) if is_shown else latents.of_condition(name, kind))
    return tuple(encoders)


def _outline(model: Model, request: ModelRequest) -> tuple[str, dict[str, str], dict[str, Mapping[str, Json]]]:
    if request.loaded is not None:
        return request.loaded.outline()
    parts = {name: str(entry[1]) for name, entry in model.index.items() if isinstance(entry, list) and len(entry) == 2 and entry[0]}
    configs: dict[str, Mapping[str, Json]] = {}
    for name in (*DENOISERS, VAE):
        with suppress(BadInput):  # without it the class alone decides
            configs[name] = model.config_of(name)
    return model.class_name, parts, configs


def _vision_encoder(name: str, kind: Embedded, model: Model, request: ModelRequest, digest: Digest) -> VisionEncoder:
    components = {part: model.component(part, request.variant) for part in kind.parts}
    dtype, device = _dtype_and_device({kind.parts[0]: components[kind.parts[0]]}, request, "auto", "float32", "vision")
    make = {
        "kind": "vision",
        "version": VISION_VERSION,
        "components": {component.name: f"{component.library}.{component.class_name}" for component in components.values()},
        "files": _digests(components.values(), digest, flat=False),
        "transform": {"pixels": RESAMPLERS[DEFAULT].pictures, "alpha": "white", "colour": "srgb"},
        "roles": list(kind.roles),
        "layer": kind.layer,
        "dtype": dtype,
        "outputs": [name],
    }
    recipe = Recipe(name, make, families.plain_read(name))
    return VisionEncoder(recipe, VisionSetup(components, dtype, kind.layer, name), kind, device=device, batch_size=request.batch_size)


def _encoders_of_folder(folder: Path, request: ModelRequest, digest: Digest) -> tuple[ModelEncoder, ...]:
    model = models.read_model(folder)
    encoders = _encoders(lambda _name: model, request, digest)
    if request.variant and not any(component.variant for encoder in encoders for component in encoder.setup.components.values()):
        raise BadInput(
            f"{request.model} has no weights of variant {request.variant!r}; leave {option('variant')} out to use the plain ones",
            option="variant",
        )
    return encoders


def _text_encoder(model: Model, request: ModelRequest, digest: Digest) -> TextEncoder:
    family, components = _with_override(request.text_encoder, partial(_text_parts, model, request), "text", request)
    dtype, device = _dtype_and_device(components, request, request.text_dtype, family.text_dtype, "text")
    args = _encode_args(family, components, request.encode_args)
    is_bucketed = not args.pop(EXACT_PADDING, True)
    limit = _max_tokens(family, components, args)
    settings = {name: model.index[name] for name in family.settings if name in model.index}
    if MAX_LENGTH_ARG in args:
        args[MAX_LENGTH_ARG] = limit
    make = {
        "kind": "text",
        "version": TEXT_VERSION,
        "pipeline": family.pipeline,
        "components": {component.name: f"{component.library}.{component.class_name}" for component in components.values()},
        "files": _digests(components.values(), digest, flat=family.pipeline is None),
        "settings": settings,
        "packages": _versions(family),
        "max_tokens": limit,
        "encode_args": args,
        "padding": "bucketed" if is_bucketed else "trimmed" if family.pad else "kept",
        "dtype": dtype,
        "outputs": families.stored_names(family),
    }
    if shown := family.pictures:
        resized = {"pixels": images.AREA_TRANSFORM, "area": shown.area, "step": shown.step} if shown.area else {}
        make["pictures"] = {"role": shown.role, "transform": {**resized, "alpha": "white", "colour": "srgb"}}
    asked: dict[str, Json] = {}
    for name in family.asks:  # fields in config.json of components that are not loaded
        component, _, field_name = name.partition(".")
        config = model.config_of(component)
        if field_name not in config:
            where = f"{component}/{models.CONFIG} in {model.folder}"
            raise BadInput(f"{where} does not set {name}, which {family.pipeline} needs: download the model again")
        asked[name] = config[field_name]
    widths = {name: text_width(component.config) for name, component in components.items()} | asked
    recipe = Recipe("text", make, families.text_read(family, limit=limit, widths=widths))
    setup = TextSetup(family, components, max_tokens=limit, args=args, dtype=dtype, settings=settings, asked=asked, is_bucketed=is_bucketed)
    return TextEncoder(recipe, setup, device=device, batch_size=request.batch_size)


def _with_override(name: str | None, read: Callable[[Model | Path | None], T], encode: str, request: ModelRequest) -> T:
    """Call `read` with the model or single file that `--vae` or `--text-encoder` names, or with None, and return its result."""
    if name is None:
        return read(None)
    if is_single_file(name):
        return read(Path(name).expanduser())
    try:
        return with_folder(name, lambda folder: read(models.read_model(folder)), encode=[encode], revision=None, variant=request.variant)
    except models.MissingFile as error:
        raise BadInput(str(error)) from error  # not MissingFile, which would download the model itself


def _text_parts(model: Model, request: ModelRequest, override: Model | Path | None) -> tuple[TextFamily, dict[str, Component]]:
    """Return the family and the components of the text encoder, with the override instead of the component that it replaces."""
    if model.kind == "pipeline":
        family = _family(model, request)
        replaced = None if override is None else _replaced(model, family, override)
        given = {name: override if name == replaced else None for name in family.components}
        return family, {name: model.component(name, request.variant, one) for name, one in given.items()}
    file = override if isinstance(override, Path) else None
    alone = override if isinstance(override, Model) else model
    if alone.kind != "text":
        if file is not None:
            raise BadInput(
                f"{file} has no config.json, and {model.folder} has no text encoder to take it from; give the text encoder's folder"
            )
        raise BadInput(
            f"{alone.folder} is a VAE ({alone.class_name}) and cannot encode text; pass {option('text_encoder', 'PATH')}, or"
            f" {option('encode', 'latents')}",
            option="text_encoder",
        )
    if file is not None:
        _saved_for(file, {"text_encoder": model.index}, model)
    return _chosen(PLAIN, request), {name: alone.component(name, request.variant, file) for name in PLAIN.components}


def _family(model: Model, request: ModelRequest) -> TextFamily:
    """Return the row of the model's pipeline, or the one that introspection makes, for the text encoders that are asked for."""
    family = request.family or TEXT_FAMILIES.get(plain_class(model.class_name))
    if family is None:
        from cachestore.encode.models import introspection

        family = introspection.find_family(model.class_name, model.index)
    return _chosen(families.as_it_comes(family, model.index, model.config_of), request)


def _chosen(family: TextFamily, request: ModelRequest) -> TextFamily:
    return families.with_encoders(family, [name for name in request.encode if is_text_encoder(name)] or family.encoders)


def _saved_for(file: Path, configs: Mapping[str, Mapping[str, Json]], model: Model) -> str:
    """Return the text encoder whose weights a single file has: the one whose token embedding has the same shape. Raises BadInput."""
    shapes = read_shapes(file)
    alike = [name for name, config in configs.items() if text_prefix(shapes, config) is not None]
    if len(alike) != 1:
        wanted = {name: [config.get("vocab_size"), text_width(config)] for name, config in configs.items()}
        raise BadInput(
            f"{file} fits {len(alike)} text encoders of {model.folder}, but must fit exactly one: its token embeddings are"
            f" {token_embeddings(shapes)}, theirs {wanted}; give one text encoder's weights, or its folder with config.json",
            option="text_encoder",
        )
    return alike[0]


def _versions(family: TextFamily) -> dict[str, str]:
    try:
        return {name: version(name) for name in family.cleaners}
    except PackageNotFoundError as error:
        cleaners = " and ".join(family.cleaners)
        raise MissingExtra(
            f"{family.pipeline} cleans captions with {cleaners}, and {error.name} is not installed. {how_to_install('encode')}"
        ) from error


def _replaced(model: Model, family: TextFamily, override: Model | Path) -> str:
    """Return the text encoder of a pipeline that an override replaces: the one of the same class, else of the same model type."""
    modules = family.encoders
    if isinstance(override, Path):
        return _saved_for(override, {name: model.config_of(name) for name in modules}, model)
    if override.kind != "text":
        raise BadInput(
            f"{override.folder} is no text encoder ({override.class_name}); {option('text_encoder')} takes a transformers folder",
            option="text_encoder",
        )
    classes = {name: models.component_class(model, name)[1] for name in modules}
    alike = [name for name in modules if classes[name] == override.class_name]
    if not alike:
        kind = override.index.get("model_type")
        alike = [name for name in modules if model.config_of(name).get("model_type") == kind]
    if len(alike) != 1:
        raise BadInput(
            f"{override.folder} ({override.class_name}) fits {len(alike)} text encoders of {model.folder}, but must fit exactly"
            f" one: {classes}; give another text encoder",
            option="text_encoder",
        )
    return alike[0]


def _encode_args(family: TextFamily, components: Mapping[str, Component], given: Mapping[str, Json]) -> dict[str, Json]:
    known = {**family.args, EXACT_PADDING: False} if family.is_masked else family.args
    if unknown := sorted(set(given) - set(known)):
        names, who = ", ".join(known) or "none", family.pipeline or "a text encoder"
        raise BadInput(f"{who} knows no {option('encode_arg')} {', '.join(unknown)}; known: {names}", option="encode_arg")
    if not isinstance(given.get(EXACT_PADDING, False), bool):
        what = f"{option('encode_arg')} {EXACT_PADDING}"
        raise BadInput(f"{what} must be true or false, not {given[EXACT_PADDING]!r}", option="encode_arg")
    args = {**known, **given}
    skip = args.get(SKIP_ARG)
    configs = [component.config for component in components.values() if component.class_name.startswith("CLIPText")]
    layers = [(config.get("text_config") or config).get("num_hidden_layers") for config in configs]
    most = min((count for count in layers if isinstance(count, int)), default=_CLIP_LAYERS) - 1
    if skip is not None and (not isinstance(skip, int) or isinstance(skip, bool) or not 0 <= skip <= most):
        what = f"{option('encode_arg')} {SKIP_ARG}"
        raise BadInput(
            f"{what} must be a whole number of layers from 0 to {most}, not {skip!r}; 1 leaves out the last", option="encode_arg"
        )
    return args


def _max_tokens(family: TextFamily, components: Mapping[str, Component], args: Mapping[str, Json]) -> int:
    """Return the largest number of tokens of a caption: as asked for, else what the tokenizer and the model's positions allow."""
    positions = components["text_encoder"].config.get("max_position_embeddings") if family.pipeline is None else None
    most = positions if isinstance(positions, int) and positions > 0 else None
    asked = args.get(MAX_LENGTH_ARG)
    if asked is None:
        limit = components[family.tokenizer].config.get("model_max_length")
        length = int(limit) if isinstance(limit, int | float) and limit < _UNSET_LENGTH else family.max_tokens
        return min(length, most or length) if family.pipeline is None else min(length, family.max_tokens)
    if not isinstance(asked, int) or isinstance(asked, bool) or asked < 1 or (most and asked > most):
        what = f"{option('encode_arg')} {MAX_LENGTH_ARG}"
        raise BadInput(f"{what} must be a whole number from 1{f' to {most}' if most else ''}, not {asked!r}", option="encode_arg")
    return asked


def _latents_encoder(model: Model, request: ModelRequest, digest: Digest) -> LatentsEncoder:
    family, vae = _with_override(request.vae, partial(_vae, model, request), "latents", request)
    dtype, device = _dtype_and_device({"vae": vae}, request, request.vae_dtype, family.vae_dtype, "vae")
    if dtype == "float16" and vae.config.get("force_upcast") is True:
        raise BadInput(
            f"the VAE in {vae.folder} overflows in float16 (`force_upcast` in its config.json); use {option('vae_dtype', 'bfloat16')} or"
            " float32",
            option="vae_dtype",
        )
    row = families.vae_family(vae.class_name)
    statistics = models.read_numbers(vae, row.statistics)
    read = families.latents_read(row, {**vae.config, **family.vae_config}, request.latents, statistics)
    read |= {"patches_first": True} if family.patches_first else {}
    make = {
        "kind": "latents",
        "version": LATENTS_VERSION,
        "components": {vae.name: f"{vae.library}.{vae.class_name}"},
        "files": _digests([vae], digest, flat=False),
        "transform": {"pixels": RESAMPLERS[DEFAULT].pictures, "alpha": "white", "colour": "srgb", "range": [-1, 1]},
        "dtype": dtype,
        "outputs": [read["stored"]],
    }
    setup = latents_setup(family, vae, read, dtype)
    return LatentsEncoder(Recipe("latents", make, read), setup, device=device, batch_size=request.batch_size, compiles=request.compile)


def latents_setup(family: TextFamily, vae: Component, read: Mapping[str, Json], dtype: str) -> LatentsSetup:
    """Return what a VAE needs, from the `read` block of its recipe and from its row."""
    row = families.vae_family(vae.class_name)
    return LatentsSetup(
        components={vae.name: vae},
        dtype=dtype,
        stored=read["stored"],
        channels=read["channels"],
        factor=read["spatial_factor"],
        patch=family.vae_patch * read["patchify"],
        has_frames=row.has_frames,
        is_of_pictures=row.is_of_pictures,
        has_alpha=row.has_alpha,
        temporal_factor=read["temporal_factor"],
        script_resizes=family.script_resizes,
    )


def _dtype_and_device(components: Mapping[str, Component], request: ModelRequest, asked: str, auto: str, what: str) -> tuple[str, str]:
    """Return the canonical name of a dtype, and a device. `auto` depends on the family alone, as the dtype is part of the key."""
    name = f"{what}_dtype"
    if asked not in ("auto", *DTYPES):
        known = ", ".join(sorted(set(DTYPES.values())))
        raise BadInput(f"{option(name, asked)} is unknown; known are auto, {known}", option=name)
    if request.loaded is None:
        return DTYPES[auto if asked == "auto" else asked], request.device
    from cachestore.encode.models import loaded

    dtype = loaded.common_dtype(components, name, DTYPES.get(asked, "auto"))
    if dtype not in DTYPES:
        raise BadInput(f"the loaded {what} module is {dtype}, which cannot be stored: convert it to one of {', '.join(DTYPES)}")
    return dtype, loaded.common_device(components, request.device)


def _vae(model: Model, request: ModelRequest, override: Model | Path | None) -> tuple[TextFamily, Component]:
    file = override if isinstance(override, Path) else None
    if file is not None:
        read_shapes(file)
    source = override if isinstance(override, Model) else model
    family = TEXT_FAMILIES.get(plain_class(source.class_name)) or TEXT_FAMILIES.get(plain_class(model.class_name), PLAIN)
    if source.kind != "text":
        return family, source.component("vae", request.variant, file)
    if file is not None:
        raise BadInput(f"{file} has no config.json, and {model.folder} has no VAE to take it from; give the VAE's folder")
    if source is override:
        raise BadInput(
            f"{source.folder} is a text encoder ({source.class_name}), not a VAE: pass the folder of a VAE as {option('vae')}", option="vae"
        )
    raise BadInput(
        f"{source.folder} is a text encoder ({source.class_name}) and has no VAE; pass {option('vae', 'PATH')}, or"
        f" {option('encode', 'text')}",
        option="vae",
    )


def _digests(components: Collection[Component], digest: Digest, *, flat: bool) -> dict[str, str]:
    named = {(file if flat else f"{component.name}/{file}"): path for component in components for file, path in component.files.items()}
    held = {f"{component.name}/({what})": value for component in components for what, value in component.digests.items()}
    return {**held, **{name: digest(path) for name, path in sorted(named.items())}}
