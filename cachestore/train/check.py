"""Compare recipes with the files of a model: did it make the entries? Loads no model."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from cachestore.core.arguments import as_path
from cachestore.core.errors import BadInput, RecipeMismatch
from cachestore.core.keys import Recipe
from cachestore.files.fingerprints import digest_file

_NAMED_FILES: Final = 5

_remembered: dict[str, str] = {}
"""Digests of files that this process has read, valid until a file changes."""


def check_model(
    recipes: Mapping[str, Recipe], *, model: str | Path | None = None, vae: str | Path | None = None, text_encoder: str | Path | None = None
) -> None:
    """Raise RecipeMismatch, which names the first files that differ, if another model made the entries. Raises as `differing_files`."""
    if found := differing_files(recipes, model=model, vae=vae, text_encoder=text_encoder):
        named = "; ".join(found[:_NAMED_FILES]) + ("; …" if len(found) > _NAMED_FILES else "")
        raise RecipeMismatch(
            f"this is not the model that it was made with: {named}. Train with that model, or run `cachestore precompute --replace`"
            " with this one"
        )


def differing_files(
    recipes: Mapping[str, Recipe], *, model: str | Path | None = None, vae: str | Path | None = None, text_encoder: str | Path | None = None
) -> list[str]:
    """One sentence for each file that differs from the recipes; empty if all agree.

    A file under `vae` or `text_encoder` takes precedence over the one under `model`. Raises BadInput for paths that do not exist, and for
    recipes of a model without files.
    """
    given = {"model": model, "vae": vae, "text_encoder": text_encoder}
    paths = {name: as_path(name, path) for name, path in given.items() if path is not None}
    if not paths:
        raise BadInput("pass the model's folder: data.check(model=...)", option="model")
    for name, path in paths.items():
        if not path.exists():
            help_text = "of a hub model pass the folder that huggingface_hub.snapshot_download returns"
            raise BadInput(f"{name} {path} does not exist; {help_text}", option=name)
    differences: list[str] = []
    for encoder, recipe in sorted(recipes.items()):
        files: dict[str, str] | None = recipe.make.get("files")
        if files is None:
            raise BadInput(f"{encoder} was not made from the files of a model, so `check` cannot compare it: leave the call out")
        for name, digest in files.items():
            there = [path for path in _candidates(name, paths) if path.is_file()]
            if not there:
                differences.append(f"{name} ({encoder}) is missing")
            elif not any(digest_file(path, _remembered) == digest for path in there):
                differences.append(f"{there[0]} ({encoder}) has other contents")
    return differences


def _candidates(name: str, paths: Mapping[str, Path]) -> Iterator[Path]:
    """Where a file of a recipe may lie: in the folder of its component, or in a folder that is this component alone."""
    component, rest = name.split("/", 1) if "/" in name else ("", name)
    override = paths.get("vae") if component == "vae" else paths.get("text_encoder")
    for path in (override, paths.get("model")):
        if path is not None:
            yield from (path / name, path / rest) if path.is_dir() else (path,)
