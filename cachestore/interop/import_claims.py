"""What imported values are said to be: their family, and the model and settings that made them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from cachestore.core.errors import BadInput
from cachestore.core.keys import Json, Recipe
from cachestore.encode import families as recipes
from cachestore.encode.unit import Encoder
from cachestore.files.paths import Layout
from cachestore.interop.file_encoder import Captions, FileEncoder, Pictures
from cachestore.interop.formats.families import Family, Width, family_of_pipeline
from cachestore.interop.formats.matching import Matches
from cachestore.interop.formats.table import Format
from cachestore.interop.formats.text import THIRD
from cachestore.interop.import_matching import FilesByKind
from cachestore.interop.import_request import ImportRequest
from cachestore.interop.sandbox import CacheFiles
from cachestore.jobs.declared_model import IMPORTED, as_made
from cachestore.jobs.planning import encoders_of
from cachestore.storage.model_digests import load_digests
from cachestore.work.workers import host_name

VERSION: Final = 4
"""Raised when the code makes other tensors of the same files, or takes them for other samples'."""

_LIMITS: Final = {"wan": 512}
"""Rows that a family's text is filled up to with zeros, where its row in `encode/families` leaves that to the request."""


def claimed_encoders(layout: Layout, request: ImportRequest) -> dict[str, Encoder]:
    """By encoder, who the user says made the cache; nothing without a model. Its files are digested, and nothing is loaded."""
    if request.model is None:
        return {}
    known = load_digests(layout, host_name())
    found: dict[str, Encoder] = {}
    refused: BadInput | None = None
    for encoder in request.encode or ("text", "latents"):
        try:
            made = encoders_of(as_made(request.hints(), encoder, store=request.store), known)
        except BadInput as error:
            if encoder in request.encode:
                raise
            refused = error  # a VAE alone has no text encoder, and says nothing of text
            continue
        found |= {one.recipe.encoder: one for one in made}
    if refused is not None and not found:
        raise refused
    return found


def family_of_cache(request: ImportRequest, matches: Matches, made: Mapping[str, Encoder], there: FilesByKind) -> Family:
    """The family of a cache, with the model's widths: as the user says, else as file names tell, else the model's.

    Names of files that match a sample come first, then those of all files. Raises BadInput where they contradict each other, or none tells.
    """
    held = {look.family.name: look.family for those in there.values() for _path, look in those if look.family is not None}
    named = matches.families or held
    pipeline = made["text"].recipe.make.get("pipeline") if "text" in made else _pipeline_of(request.model)
    told = family_of_pipeline(str(pipeline)) if pipeline is not None else None
    if matches.family is None and len(named) > 1:
        raise BadInput(f"{request.folder} holds caches of {', '.join(sorted(named))}: pass --family with the one to import")
    family = matches.family or next(iter(named.values()), None) or told
    if family is None:
        raise BadInput(
            f"neither the files of {request.folder} nor the model tell which family they are of: pass --family, such as sdxl or flux"
        )
    if told is not None and told != family:
        raise BadInput(
            f"the files of {request.folder} are of {family.name}, and {request.model} is of {told.name}: pass the model that made them"
        )
    if request.format not in family.states:
        family.written_as(request.format)  # raises
    return replace(family, widths={**family.widths, **_widths_of(made.get("text"), family)})


def _widths_of(encoder: Encoder | None, family: Family) -> dict[str, Width]:
    """How wide the text of the claimed model is, by its own configuration; nothing without one."""
    from cachestore.encode.setup import pooled_width, text_width
    from cachestore.encode.text import TextEncoder

    if not isinstance(encoder, TextEncoder):
        return {}
    parts = {name: part for name, part in encoder.setup.components.items() if name in family.widths}
    return {name: Width(text_width(part.config), pooled_width(part.config, part.class_name)) for name, part in parts.items()}


def _pipeline_of(model: str | None) -> str | None:
    """The pipeline whose folder a model is, where it is here; None of a VAE alone, which may be of several families."""
    from cachestore.encode import hub, models

    if model is None or not hub.is_here(model, None):
        return None
    try:
        found = hub.with_folder(model, models.read_model, encode=(), revision=None, variant=None)
    except BadInput:
        return None
    return found.class_name if found.kind == "pipeline" else None


def text_recipe(family: Family, wanted: Format, claims: Mapping[str, Json]) -> Recipe:
    """The recipe of imported text: read as the family's own is."""
    row = recipes.text_family(family.pipeline)
    widened = {THIRD: family.widths[THIRD].rows} if THIRD in family.widths else {}
    read = recipes.text_read(row, limit=_LIMITS.get(family.name), widths=widened)
    return Recipe("text", {**_make(family, wanted, claims), "outputs": recipes.stored_names(row)}, read)


def latents_recipe(family: Family, wanted: Format, claims: Mapping[str, Json], made: Recipe | None) -> Recipe:
    """The recipe of imported latents. The constants are those of the claimed VAE, else those of the family's released one."""
    state = family.states[wanted.name]
    released = {
        "scaling_factor": family.scale.factor,
        "shift_factor": family.scale.shift,
        "latent_channels": family.channels,
        "block_out_channels": [1] * 4,
    }
    read: dict[str, Json] = (
        {**made.read, "stored": state.kind}
        if made is not None
        else recipes.latents_read(recipes.vae_family(family.vae_class), released, state.kind)
    )
    if state.is_scaled:
        read["scaled"] = True
    return Recipe("latents", {**_make(family, wanted, claims), "scaled": state.is_scaled, "outputs": [state.kind]}, read)


def _make(family: Family, wanted: Format, claims: Mapping[str, Json]) -> dict[str, Json]:
    made = {"kind": IMPORTED, "provenance": IMPORTED, "version": VERSION}
    return {**made, "format": wanted.name, "family": family.name, "claimed": dict(claims)}


@dataclass(frozen=True, slots=True)
class _Claimed:
    """What is claimed of the values of a kind, and the recipe of the model that is said to have made them."""

    claims: Mapping[str, Json]
    recipe: Recipe | None


def claimed_makes(request: ImportRequest, made: Mapping[str, Encoder], kinds: Iterable[str]) -> dict[str, _Claimed]:
    """By kind that is imported, what is claimed of it."""
    return {kind: _Claimed(_claims(request, made.get(kind)), None if kind not in made else made[kind].recipe) for kind in kinds}


def file_encoders(cache: CacheFiles, matches: Matches, family: Family, claimed: Mapping[str, _Claimed]) -> "tuple[FileEncoder, ...]":
    """The encoders that read the files of each kind that is claimed. Raises BadInput for text that is not understood."""
    found: list[FileEncoder] = []
    if "text" in claimed:
        if cache.format.name not in family.text:
            able = ", ".join(sorted(family.text)) or "none"
            raise BadInput(
                f"text of {family.name} is not understood in {cache.format.name}'s form (in that of {able}): pass --encode latents"
            )
        recipe = text_recipe(family, cache.format, claimed["text"].claims)
        found.append(FileEncoder(recipe, Captions(recipe, cache, matches.text, matches.doubtful, family), cache))
    if "latents" in claimed:
        recipe = latents_recipe(family, cache.format, claimed["latents"].claims, claimed["latents"].recipe)
        pictures = Pictures(recipe, cache, matches.latents, matches.doubtful_latents, matches.told, family)
        found.append(FileEncoder(recipe, pictures, cache))
    return tuple(found)


def _claims(request: ImportRequest, made: Encoder | None) -> dict[str, Json]:
    return {**request.claims, **({"recipe": dict(made.recipe.make)} if made is not None else {})}
