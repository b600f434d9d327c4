"""Finds the family of imported values, and the model and settings that the user declares for them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from cachestore.core.errors import BadInput
from cachestore.core.keys import Json, Recipe
from cachestore.core.spelling import option
from cachestore.encode.batching.unit import Encoder
from cachestore.encode.families import lookup
from cachestore.files.paths import Layout
from cachestore.jobs.plan.encoders import make_encoders
from cachestore.jobs.start.declared_model import as_made
from cachestore.store.format.catalog import IMPORTED
from cachestore.trainers.cache_files import CacheFiles
from cachestore.trainers.cache_scan import CacheScan
from cachestore.trainers.families import Family, State, Width, families_of_pipeline
from cachestore.trainers.file_encoder import ImportedLatents, ImportedText
from cachestore.trainers.import_request import ImportRequest
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
    declared: dict[str, Encoder] = {}
    refused: BadInput | None = None
    for encoder in request.encode or ("text", "latents"):
        try:
            made = make_encoders(layout, as_made(request.hints(), encoder, store=request.store), is_dry=True)
            declared |= {one.recipe.encoder: one for one in made}
        except BadInput as error:
            if encoder in request.encode:
                raise
            refused = error  # a VAE alone has no text encoder, which is fine for latents
    if refused is not None and not declared:
        raise refused
    return declared


def family_of_cache(scan: CacheScan, declared: Mapping[str, Encoder]) -> Family:
    """Return the family of a cache, with the declared model's widths. Raises BadInput if it is contradictory or unknown.

    It is the one that the user named, else that of file names (those that match a sample first), else the model's.
    """
    request, matches, trainer = scan.request, scan.matches, scan.format.trainer
    in_names = {
        parsed.family.name: parsed.family for those in scan.by_kind.values() for _path, parsed in those if parsed.family is not None
    }
    named = matches.families or in_names
    pipeline = declared["text"].recipe.make.get("pipeline") if "text" in declared else _pipeline_of(request.model)
    of_model = families_of_pipeline(str(pipeline)) if pipeline is not None else []
    if matches.family is None and len(named) > 1:
        raise BadInput(
            f"{request.folder} holds caches of {', '.join(sorted(named))}: pass {option('family')} with the one to import", option="family"
        )
    family = matches.family or next(iter(named.values()), None) or (of_model[0] if len(of_model) == 1 else None)
    alike: Sequence[Family] = () if family is None or not named else trainer.families_called(trainer.written_as(family))
    alike = [one for one in alike if one in of_model] or alike
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
    if of_model and family not in of_model:
        raise BadInput(
            f"the files of {request.folder} are of {family.name}, but {request.model} is of {of_model[0].name}: pass the model that made"
            " them",
            option="model",
        )
    trainer.written_as(family)  # raises if the trainer has no name for it
    return replace(family, widths={**family.widths, **_widths_of(declared.get("text"), family)})


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


def _latents_recipe(family: Family, state: State, make: Mapping[str, Json], declared: Encoder | None) -> Recipe:
    if declared is not None:
        read: dict[str, Json] = {**declared.recipe.read, "stored": state.kind}
    else:
        scale = {"scaling_factor": family.scale.factor, "shift_factor": family.scale.shift}
        released = {**scale, "latent_channels": family.channels, "block_out_channels": [1] * 4, **family.vae_config}
        read = lookup.latents_read(lookup.vae_family(family.vae_class), released, state.kind)
    if state.is_scaled:  # neighbours that the denoiser takes as channels are folded already
        patch = int(read["patchify"])
        folded = {"channels": read["channels"] * patch**2, "spatial_factor": read["spatial_factor"] * patch, "patchify": 1}
        read |= {"scaled": True, **folded}
    return Recipe("latents", {**make, "scaled": state.is_scaled, "outputs": [state.kind]}, read)


def file_encoders(
    cache: CacheFiles, scan: CacheScan, family: Family, declared: Mapping[str, Encoder], kinds: Iterable[str]
) -> tuple[ImportedText | ImportedLatents, ...]:
    """Return the encoders that read the files of these kinds. Raises BadInput for unreadable text, or if the model makes no such kind."""
    trainer, matches = scan.format.trainer, scan.matches
    encoders: list[ImportedText | ImportedLatents] = []
    for kind in sorted({*kinds}, reverse=True):  # text first
        if declared and kind not in declared:
            part, name, other = ("VAE", "vae", "text") if kind == "latents" else ("text encoder", "text_encoder", "latents")
            fault = f"the cache has {kind}, but {scan.request.model} has no {part}"
            raise BadInput(f"{fault}: pass {option(name, 'PATH')}, or {option('encode', other)}", option=name)
        claimed = {**scan.request.claims, **({"recipe": dict(declared[kind].recipe.make)} if kind in declared else {})}
        make = {
            "kind": IMPORTED,
            "provenance": IMPORTED,
            "version": VERSION,
            "format": trainer.name,
            "family": family.name,
            "claimed": claimed,
        }
        if kind == "latents":
            recipe = _latents_recipe(family, trainer.cached[family.name].state, make, declared.get(kind))
            encoders.append(
                ImportedLatents(recipe, cache, family, matches.latents, matches.doubtful_latents, side_facts=matches.side_facts)
            )
        elif trainer.has_text(family):
            row = lookup.text_family(family.pipeline)
            widened = {THIRD: family.widths[THIRD].rows} if THIRD in family.widths else {}
            read = lookup.text_read(row, limit=_LIMITS.get(family.name), widths=widened)
            recipe = Recipe("text", {**make, "outputs": lookup.stored_names(row)}, read)
            encoders.append(ImportedText(recipe, cache, family, matches.text, matches.doubtful))
        else:
            others = ", ".join(sorted(one.name for one in load_formats() if one.trainer.has_text(family)))
            able = f" (only in that of {others})" if others else ""
            raise BadInput(
                f"text of {family.name} cannot be read in the form of {trainer.name}{able}: pass {option('encode', 'latents')}",
                option="encode",
            )
    return tuple(encoders)
