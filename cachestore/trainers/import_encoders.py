"""Finds the family of imported values, and the model and settings that the user declares for them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from cachestore.core.errors import BadInput
from cachestore.core.keys import Json, Recipe
from cachestore.core.spelling import option
from cachestore.encode.batching.unit import Encoder
from cachestore.encode.families import lookup as families
from cachestore.files.paths import Layout
from cachestore.jobs.plan.encoders import encoders_of
from cachestore.jobs.share.workers import host_name
from cachestore.jobs.start.declared_model import IMPORTED, as_made
from cachestore.store.write.model_digests import load_digests
from cachestore.trainers.families import Family, State, Width, families_of_pipeline
from cachestore.trainers.file_encoder import ImportedLatents, ImportedText
from cachestore.trainers.import_matching import CacheScan
from cachestore.trainers.import_request import ImportRequest
from cachestore.trainers.sandbox import CacheFiles
from cachestore.trainers.table import load_formats
from cachestore.trainers.text import THIRD

VERSION: Final = 4
"""Raised if the code makes other tensors from the same files, or matches files to other samples."""

_LIMITS: Final = {"wan": 512, "ltx2": 1024}
"""Rows to which a family's text is padded with zeros, if `encode/families/lookup` leaves that to the request."""


def declared_encoders(layout: Layout, request: ImportRequest) -> dict[str, Encoder]:
    """Return the encoders of the declared model; empty without a model. Its files are digested; nothing is loaded."""
    if request.model is None:
        return {}
    known = load_digests(layout, host_name())
    found: dict[str, Encoder] = {}
    refused: BadInput | None = None
    for encoder in request.encode or ("text", "latents"):
        try:
            made = encoders_of(as_made(request.hints(), encoder, store=request.store), known)
            found |= {one.recipe.encoder: one for one in made}
        except BadInput as error:
            if encoder in request.encode:
                raise
            refused = error  # a VAE alone has no text encoder, which is fine for latents
    if refused is not None and not found:
        raise refused
    return found


def family_of_cache(scan: CacheScan, made: Mapping[str, Encoder]) -> Family:
    """Return the family of a cache, with the declared model's widths. Raises BadInput if it is contradictory or unknown.

    It is the one that the user named, else that of file names (those that match a sample first), else the model's.
    """
    request, matches, trainer = scan.request, scan.matches, scan.format.trainer
    held = {parsed.family.name: parsed.family for those in scan.by_kind.values() for _path, parsed in those if parsed.family is not None}
    named = matches.families or held
    pipeline = made["text"].recipe.make.get("pipeline") if "text" in made else _pipeline_of(request.model)
    declared = families_of_pipeline(str(pipeline)) if pipeline is not None else []
    if matches.family is None and len(named) > 1:
        raise BadInput(
            f"{request.folder} holds caches of {', '.join(sorted(named))}: pass {option('family')} with the one to import", option="family"
        )
    family = matches.family or next(iter(named.values()), None) or (declared[0] if len(declared) == 1 else None)
    alike: Sequence[Family] = () if family is None or not named else trainer.families_called(trainer.written_as(family))
    alike = [one for one in alike if one in declared] or alike
    if matches.family is None and len(alike) > 1:
        names = " or ".join(one.name for one in alike)
        raise BadInput(
            f"{request.format} names the files of several models alike: pass {option('family')} with the right one, {names}",
            option="family",
        )
    if family is None:
        raise BadInput(
            f"neither the files of {request.folder} nor the model say which model family they are of: pass {option('family')}, such as sdxl"
            " or flux",
            option="family",
        )
    if declared and family not in declared:
        raise BadInput(
            f"the files of {request.folder} are of {family.name}, but {request.model} is of {declared[0].name}: pass the model that made"
            " them",
            option="model",
        )
    trainer.written_as(family)  # raises if the trainer has no name for it
    return replace(family, widths={**family.widths, **_widths_of(made.get("text"), family)})


def _widths_of(encoder: Encoder | None, family: Family) -> dict[str, Width]:
    from cachestore.encode.models.setup import pooled_width, text_width
    from cachestore.encode.text.encoder import TextEncoder

    if not isinstance(encoder, TextEncoder):
        return {}
    parts = {name: part for name, part in encoder.setup.components.items() if name in family.widths}
    return {name: Width(text_width(part.config), pooled_width(part.config, part.class_name)) for name, part in parts.items()}


def _pipeline_of(model: str | None) -> str | None:
    """Return the class of a pipeline's folder; None if it is not here, or is a VAE alone, which may belong to several families."""
    from cachestore.encode.models import folders as models
    from cachestore.encode.models import hub

    if model is None or not hub.is_here(model, None):
        return None
    try:
        found = hub.with_folder(model, models.read_model, encode=(), revision=None, variant=None)
    except BadInput:
        return None
    return found.class_name if found.kind == "pipeline" else None


def _latents_recipe(family: Family, state: State, make: Mapping[str, Json], made: Encoder | None) -> Recipe:
    if made is not None:
        read: dict[str, Json] = {**made.recipe.read, "stored": state.kind}
    else:
        scale = {"scaling_factor": family.scale.factor, "shift_factor": family.scale.shift}
        released = {**scale, "latent_channels": family.channels, "block_out_channels": [1] * 4, **family.vae_config}
        read = families.latents_read(families.vae_family(family.vae_class), released, state.kind)
    if state.is_scaled:  # neighbours that the denoiser takes as channels are folded already
        patch = int(read["patchify"])
        folded = {"channels": read["channels"] * patch**2, "spatial_factor": read["spatial_factor"] * patch, "patchify": 1}
        read |= {"scaled": True, **folded}
    return Recipe("latents", {**make, "scaled": state.is_scaled, "outputs": [state.kind]}, read)


def file_encoders(
    cache: CacheFiles, scan: CacheScan, family: Family, made: Mapping[str, Encoder], kinds: Iterable[str]
) -> tuple[ImportedText | ImportedLatents, ...]:
    """Return the encoders that read the files of these kinds. Raises BadInput for unreadable text, or if the model makes no such kind."""
    trainer, matches = scan.format.trainer, scan.matches
    encoders: list[ImportedText | ImportedLatents] = []
    for kind in sorted({*kinds}, reverse=True):  # text first
        if made and kind not in made:
            part, name, other = ("VAE", "vae", "text") if kind == "latents" else ("text encoder", "text_encoder", "latents")
            fault = f"the cache has {kind}, but {scan.request.model} has no {part}"
            raise BadInput(f"{fault}: pass {option(name, 'PATH')}, or {option('encode', other)}", option=name)
        declared = {**scan.request.claims, **({"recipe": dict(made[kind].recipe.make)} if kind in made else {})}
        make = {
            "kind": IMPORTED,
            "provenance": IMPORTED,
            "version": VERSION,
            "format": trainer.name,
            "family": family.name,
            "claimed": declared,
        }
        if kind == "latents":
            recipe = _latents_recipe(family, trainer.cached[family.name].state, make, made.get(kind))
            encoders.append(ImportedLatents(recipe, cache, family, matches.latents, matches.doubtful_latents, metadata=matches.metadata))
        elif trainer.has_text(family):
            row = families.text_family(family.pipeline)
            widened = {THIRD: family.widths[THIRD].rows} if THIRD in family.widths else {}
            read = families.text_read(row, limit=_LIMITS.get(family.name), widths=widened)
            recipe = Recipe("text", {**make, "outputs": families.stored_names(row)}, read)
            encoders.append(ImportedText(recipe, cache, family, matches.text, matches.doubtful))
        else:
            others = ", ".join(sorted(one.name for one in load_formats() if one.trainer.has_text(family)))
            able = f" (only in that of {others})" if others else ""
            raise BadInput(
                f"text of {family.name} cannot be read in the form of {trainer.name}{able}: pass {option('encode', 'latents')}",
                option="encode",
            )
    return tuple(encoders)
