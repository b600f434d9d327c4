"""Find the folder of a model by its path or Hugging Face id. The local cache is used first; a denoiser is never downloaded."""

import re
from collections.abc import Callable, Collection, Iterable
from glob import escape
from pathlib import Path
from typing import TypeVar

from cachestore.core.errors import BadInput
from cachestore.encode.models.folders import INDEX, MissingFile
from cachestore.encode.models.single_file import is_single_file, why_no_model

T = TypeVar("T")
_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
_REACH_SECONDS = 10.0
"""How long the hub may take to answer whether it has a model."""
_FOLDERS = {
    "text": r"(text_encoder|tokenizer)(_\d+)?|processor|connectors",
    "latents": r"vae|image_encoder|image_processor|feature_extractor",
}
_ASKED = ("transformer/config.json", "unet/config.json", "vae/config.json")
"""Configurations that are downloaded too: they show whether the denoiser takes more than latents, and some pipelines read them to encode
text (SD3 without T5 needs a width)."""
_SETTINGS = (".json", ".txt", ".model", ".jinja")
_WEIGHTS = re.compile(r"(?:model|diffusion_pytorch_model)(?:\.(?P<variant>\w+))?(?:-\d+-of-\d+)?\.safetensors")


def with_folder(name: str, read: Callable[[Path], T], *, encode: Collection[str], revision: str | None, variant: str | None) -> T:
    """Call `read` with the folder of a path or hub id, and return its result.

    Raises BadInput if there is none, or the hub cannot be reached.

    If the cached copy of a hub model lacks a file that `read` needs, the model is downloaded and `read` is called again.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return read(path)
    if is_single_file(name) and path.is_file():
        raise BadInput(why_no_model(path))
    if path.exists() or is_single_file(name) or name.startswith((".", "/", "~")) or not _HUB_ID.fullmatch(name):
        reason = "is no folder" if path.exists() else "does not exist"
        raise BadInput(f"{name} {reason}; give a model's folder, or its id on the Hugging Face hub")
    cached = _cached(name, revision)
    if cached is None and _is_taken_for_path(name):
        raise BadInput(
            f"{name} does not exist. It is read as a path, because the folder {path.parent} exists: give the model's folder, or"
            f" if you mean a model of the Hugging Face hub, download it first (`hf download {name}`)"
        )
    if cached is not None:
        try:
            return read(cached)
        except MissingFile as missing:
            return read(_download(name, encode, revision, variant, str(missing)))
    return read(_download(name, encode, revision, variant, f"no folder {name!r}, and no such model in the local cache of the hub"))


def find_here(name: str, revision: str | None) -> Path | None:
    """Return the folder of a path or hub id; None if it is not on this machine."""
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    return _cached(name, revision) if _HUB_ID.fullmatch(name) else None


def is_here(name: str, revision: str | None) -> bool:
    """Return whether nothing must be downloaded for a path or hub id, as far as this can be known without asking the hub."""
    return (
        Path(name).expanduser().exists() or not _HUB_ID.fullmatch(name) or _is_taken_for_path(name) or _cached(name, revision) is not None
    )


def _is_taken_for_path(name: str) -> bool:
    return "/" in name and Path(name).expanduser().parent.is_dir()


def files_to_fetch(names: Iterable[str], encode: Collection[str], variant: str | None) -> list[str]:
    """Return the files that `encode` needs: settings, tokenizers and safetensors weights, which are of the variant if a folder has it."""
    listed = sorted(names)
    usual = (_FOLDERS.get(name) or f"{re.escape(name)}|{re.escape(name.replace('text_encoder', 'tokenizer'))}" for name in encode)
    parts = [*usual] if INDEX in listed else [""]
    wanted = re.compile("|".join(f"(?:{part})" for part in parts))
    by_folder: dict[str, list[str]] = {}
    for name in listed:
        folder, _, base = name.rpartition("/")
        if name != INDEX and wanted.fullmatch(folder) and (base.endswith(_SETTINGS) or _WEIGHTS.fullmatch(base)):
            by_folder.setdefault(folder, []).append(name)
    chosen = [name for name in (INDEX, *_ASKED) if name in listed and INDEX in listed]
    for files in by_folder.values():
        variants = {name: match["variant"] for name in files if (match := _WEIGHTS.fullmatch(name.rpartition("/")[2]))}
        kept = variant if variant in variants.values() else None
        chosen += [name for name in files if name not in variants or variants[name] == kept]
    return list(dict.fromkeys(chosen))


def _cached(name: str, revision: str | None) -> Path | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        return None


def _download(name: str, encode: Collection[str], revision: str | None, variant: str | None, missing: str) -> Path:
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    is_reached = False
    try:
        HfApi().model_info(name, revision=revision, timeout=_REACH_SECONDS)  # asks once; listing files would retry for 24 s
        is_reached = True
        files = files_to_fetch(HfApi().list_repo_files(name, revision=revision), encode, variant)
        return Path(snapshot_download(name, revision=revision, allow_patterns=[escape(file) for file in files]))
    except Exception as error:  # the hub's client raises errors of httpx, of requests and its own
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        if is_reached or isinstance(error, HfHubHTTPError):
            raise BadInput(
                f"{missing}; the hub does not give {name!r} either ({first}): check the name, or give a model's folder"
            ) from error
        raise BadInput(f"{missing}; and the hub could not be asked for {name!r} ({first}): give a model's folder") from error
