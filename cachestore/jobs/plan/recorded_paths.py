"""The paths that a catalog records: where its sources and models were when it was made. `repair --refill` and `report` open them.

They are in the catalog's header, but not in its digest: rows and values are the same wherever the files are.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from cachestore.core.errors import BadInput
from cachestore.core.keys import Json
from cachestore.sources.tars import tars_at

_OF_SOURCES: Final = ("data", "folder")
"""Fields of a request with a source's path; `folder` is the cache that `import` read."""
_OF_MODELS: Final = ("model", "vae", "text_encoder")


def is_there(path: str) -> bool:
    """Return whether a source or model is at this path: a file, a folder, or a range of tars."""
    try:
        return Path(path).exists() or bool(tars_at(path))
    except (BadInput, OSError):
        return False


def source_paths(request: Mapping[str, Any]) -> list[str]:
    """Return the absolute paths of the sources that the requests of a catalog name, each once."""
    return list(dict.fromkeys(path for hints in request.values() for path in _paths_in(hints, _OF_SOURCES)))


def gone_paths(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the paths in the requests `before` that are gone, and that the requests `now` of the same encoders do not name."""
    both = [(before.get(encoder, {}), hints) for encoder, hints in now.items()]
    fields = (*_OF_SOURCES, *_OF_MODELS)
    left = (path for earlier, later in both for path in set(_paths_in(earlier, fields)) - set(_paths_in(later, fields)))
    return [path for path in dict.fromkeys(sorted(left)) if not is_there(path)]


def with_source_paths(request: Mapping[str, Any], paths: Mapping[str, str]) -> dict[str, dict[str, Json]]:
    """Return the requests of a catalog with the new paths of sources, by their old ones."""
    return {encoder: _with_paths(hints, paths) for encoder, hints in request.items()}


def _with_paths(hints: Mapping[str, Any], paths: Mapping[str, str]) -> dict[str, Json]:
    moved: dict[str, Json] = {name: paths[hints[name]] for name in _OF_SOURCES if hints.get(name) in paths}
    if sources := hints.get("sources"):
        moved["sources"] = [{**source, "data": paths.get(source["data"], source["data"])} for source in sources]
    return {**hints, **moved}


def _paths_in(hints: Mapping[str, Any], fields: tuple[str, ...]) -> list[str]:
    given = [*(hints.get(name) for name in fields), *(source.get("data") for source in hints.get("sources") or ())]
    return [str(path) for path in given if _is_path(path)]


def _is_path(value: object) -> bool:
    """Whether a recorded value is a path: hub ids, and words such as `(in memory)`, are not absolute."""
    return isinstance(value, str) and Path(value).is_absolute()
