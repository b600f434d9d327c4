"""Find the sources and models of a data set that were moved since it was made."""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from cachestore.core.arguments import as_path_str
from cachestore.core.errors import BadInput
from cachestore.core.keys import Json
from cachestore.core.samples import Source
from cachestore.files.paths import Layout
from cachestore.jobs.plan.options import PrecomputeRequest
from cachestore.jobs.plan.planning import files_of_request
from cachestore.sources.combined import Moved, at_new_paths, files_of, labels_of
from cachestore.sources.files import SourceFiles
from cachestore.store.format.catalog import Catalog


@dataclass(frozen=True, slots=True)
class NewPaths:
    """The new paths of sources and models that were moved."""

    source: Moved | None
    models: Mapping[str, str]
    """New paths or hub ids, by the field of a request."""

    @property
    def data(self) -> dict[str, str]:
        """The field `data` of a request, with the new path of its only source; empty unless `source` is one path."""
        return {"data": os.fspath(self.source)} if isinstance(self.source, str | os.PathLike) else {}


def new_paths(source: Moved | None, **paths: str | Path | None) -> NewPaths:
    """Return the new paths from the arguments of `repair` and `verify`. Raises BadInput if one is no path."""
    if isinstance(source, Mapping):
        source = {name: as_path_str(f"source[{name!r}]", path) for name, path in source.items()}
    elif source is not None:
        source = as_path_str("source", source)
    models = {name: as_path_str(name, path, "a path or a hub id") for name, path in paths.items() if path is not None}
    return NewPaths(source, models)


def check_source_names(catalogs: Iterable[Catalog], source: Moved | None) -> None:
    """Raise BadInput if `source` names a source that no data set was made from."""
    if not isinstance(source, Mapping):
        return
    listed = [one for catalog in catalogs for hints in catalog.request.values() for one in (hints.get("sources") or ())]
    known = {label for one in listed for label in labels_of([Source(**one)])}
    if unknown := sorted(set(source) - known):
        sources = ", ".join(sorted(known)) or "not named"
        raise BadInput(f"no data set here was made from a source called {unknown[0]!r}; sources are {sources}", option="source")


def request_at(request: PrecomputeRequest, moved: NewPaths) -> PrecomputeRequest:
    """Return a request with the new paths. Raises BadInput if one path is given for several sources."""
    if moved.source is None:
        return replace(request, **moved.models)
    if request.sources:
        return replace(request, sources=at_new_paths(request.sources, moved.source), **moved.models)
    return replace(request, **moved.models, **moved.data)


def files_where_they_are(hints: Mapping[str, Json], moved: NewPaths, layout: Layout) -> SourceFiles:
    """Return a reader of a pass's files, from the request that the pass recorded. Files of a source in memory are reported as missing."""
    try:
        return files_of_request(request_at(PrecomputeRequest.from_hints(hints, store=str(layout.root)), moved))
    except BadInput:
        return files_of(moved.data.get("data") or str(hints.get("data", layout.root)))
