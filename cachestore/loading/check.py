"""Compare recipes with the files of a model: did it make the entries? Loads no model."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from cachestore.core.arguments import as_path
from cachestore.core.errors import BadInput
from cachestore.core.keys import Recipe
from cachestore.files.fingerprints import digest_file

_remembered: dict[str, str] = {}
"""Digests of files that this process has read, valid until a file changes."""


def differing_files(
    recipes: Mapping[str, Recipe], *, model: str | Path | None = None, vae: str | Path | None = None, text_encoder: str | Path | None = None
) -> list[str]:
    """One sentence for each file that differs from the recipes; empty if all agree.

    A file under `vae` or `text_encoder` takes precedence over the one under `model`. Raises BadInput for paths that do not exist, and for
    recipes of a model without files.
    """
    given = {"model": model, "vae": vae, "text_encoder": text_encoder}
    places = {name: as_path(name, place) for name, place in given.items() if place is not None}
    if not places:
        raise BadInput("pass the model's folder: data.check(model=...)")
    for name, place in places.items():
        if not place.exists():
            raise BadInput(f"{name} {place} does not exist; of a hub model pass the folder that huggingface_hub.snapshot_download returns")
    return [words for encoder, recipe in sorted(recipes.items()) for words in _differences(encoder, recipe, places)]


def _differences(encoder: str, recipe: Recipe, places: Mapping[str, Path]) -> Iterator[str]:
    files: dict[str, str] | None = recipe.make.get("files")
    if files is None:
        raise BadInput(f"{encoder} was not made from the files of a model, so there is nothing to compare")
    for name, digest in files.items():
        found = [path for path in _candidates(name, places) if path.is_file()]
        if not found:
            yield f"{name} ({encoder}) is missing"
        elif not any(digest_file(path, _remembered) == digest for path in found):
            yield f"{found[0]} ({encoder}) has other contents"


def _candidates(name: str, places: Mapping[str, Path]) -> Iterator[Path]:
    """Where a file of a recipe may lie: in the folder of its component, or in a folder that is this component alone."""
    component, rest = name.split("/", 1) if "/" in name else ("", name)
    override = places.get("vae") if component == "vae" else places.get("text_encoder")
    for place in (override, places.get("model")):
        if place is not None:
            yield from (place / name, place / rest) if place.is_dir() else (place,)
