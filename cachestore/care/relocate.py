"""Record that the sources of data sets have moved. Reads no source and no model; rows and values stay as they are."""

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Final

from cachestore.care.checks import lost_catalogs
from cachestore.care.moved import NewPaths, files_where_they_are
from cachestore.core.arguments import as_mapping, as_path, as_path_str, as_text
from cachestore.core.errors import BadInput, FormatError, NewerFormat, naming_extras
from cachestore.core.keys import Json
from cachestore.core.words import did_you_mean, first_of, in_short
from cachestore.files.marker import check_for_reading, noticing_its_end
from cachestore.files.paths import Layout
from cachestore.jobs.plan.recorded_paths import is_there, source_paths, with_source_paths
from cachestore.sources.combined import IN_MEMORY
from cachestore.sources.tars import tars_at
from cachestore.store.format.catalog import Catalog, list_generations, read_catalog
from cachestore.store.format.line import list_line
from cachestore.store.read.snapshot import open_layout
from cachestore.store.read.unfinished import list_data_sets, not_there
from cachestore.store.write.catalog_writer import draft_of, publish_draft

_MAX_COMPARED: Final = 1000


@dataclass(frozen=True, slots=True, repr=False)
class RelocateReport:
    """What `relocate` recorded."""

    generations: Mapping[str, int] = field(default_factory=dict[str, int])
    """By data set, the new generation that records the new paths. Its digest is that of the generation before."""
    paths: Mapping[str, str] = field(default_factory=dict[str, str])
    """The new path of each recorded path."""

    __repr__ = in_short

    def as_json(self) -> dict[str, Json]:
        """Return the object that `cachestore relocate --json` prints."""
        return asdict(self)


@naming_extras()
def relocate(path: str | Path, source: Mapping[str, str | Path], *, name: str | None = None) -> RelocateReport:
    """Record that sources have moved, so that `repair --refill`, `verify --recompute`, `report` and `show --png` find their files.

    Each data set that was made from a moved source gets a next generation with the same rows and digest: positions of samplers that were
    saved stay valid, and so do pinned generations.

    Args:
        path: the store.
        source: the new path of each source that moved, by its old path. Both may be folders above the sources: `{"/old": "/mnt/new"}`
            moves all sources below `/old`.
        name: the data set; by default all of them.

    Raises:
        StoreNotFound: there is no store at this path.
        BadInput: there is nothing at a new path, or no data set was made from an old one.
        FormatError: the newest catalog of a data set is damaged or lost: run `cachestore repair`.
        WriteFailed: the disk refused to write. The same call continues.
    """
    layout = open_layout(Layout.at(as_path("path", path)))
    given = as_mapping("source", source, "a mapping from old paths to new paths")
    moves = {_absolute(as_path_str("source", old)): _absolute(as_path_str(f"source[{old!r}]", new)) for old, new in given.items()}
    names = list_data_sets(layout)
    check_for_reading(layout)
    if name is not None and as_text("name", name) not in names:
        raise not_there(layout, name, names)
    with noticing_its_end(layout):
        catalogs = [_newest(layout, each) for each in (names if name is None else [name])]
        paths = _new_paths(layout, catalogs, moves)
        concerned = [catalog for catalog in catalogs if not paths.keys().isdisjoint(source_paths(catalog.request))]
        for catalog in concerned:
            _check_pictures(layout, catalog, paths)
        generations = {catalog.name: _publish(layout, catalog.name, paths) for catalog in concerned}
    check_for_reading(layout)
    return RelocateReport(generations, paths)


def _absolute(path: str) -> str:
    return os.path.abspath(Path(path).expanduser())  # noqa: PTH100 - Path's resolves links


def _newest(layout: Layout, name: str) -> Catalog:
    """Return the newest catalog of a data set. Raises FormatError if it is lost: an older one must not take its number."""
    if any(each.name == name for each in lost_catalogs(layout)):
        lost = f"the newest generation of the data set {name!r} is missing, though a pass published it"
        raise FormatError(f"{lost}: run {layout.command('repair')}")
    generations = list_generations(layout, name)
    if not generations:
        raise BadInput(f"the data set {name!r} was dropped meanwhile: nothing of it is left to record")
    return read_catalog(layout.catalog(name, generations[-1]), generation=generations[-1])


def _new_paths(layout: Layout, catalogs: list[Catalog], moves: Mapping[str, str]) -> dict[str, str]:
    """Return the new path of each recorded path that moved. Raises BadInput for a move that none of them makes, or to nowhere."""
    recorded = dict.fromkeys(path for catalog in catalogs for path in source_paths(catalog.request))
    paths: dict[str, str] = {}
    for old, new in moves.items():
        below = {path: str(Path(new, os.path.relpath(path, old))) for path in recorded if _is_below(path, old)}
        if not below and not any(_is_below(path, new) for path in recorded):
            sources = first_of(map(repr, recorded)) or "not known"
            made = f"no data set in {layout.root} was made from {old}"
            raise BadInput(f"{made}; its sources are {sources}{did_you_mean(old, recorded)}", option="source")
        if missing := next((path for path in below.values() if not is_there(path)), None):
            raise BadInput(f"there is nothing at {missing}: pass the path at which the source is now", option="source")
        paths |= below
    return {old: new for old, new in paths.items() if old != new}


def _check_pictures(layout: Layout, catalog: Catalog, paths: Mapping[str, str]) -> None:
    """Raise BadInput if none of a data set's pictures is at the new paths: most likely they are those of another folder."""
    hints = next(hints for hints in catalog.request.values() if not paths.keys().isdisjoint(source_paths({"": hints})))
    moved = with_source_paths({"": hints}, paths)[""]
    if any(tars_at(path) is not None for path in source_paths({"": moved})) or IN_MEMORY in str(moved.get("sources")):
        return  # looking into tars would take reading all of their headers
    files = files_where_they_are(moved, NewPaths(None, {}), layout)
    references = [reference for _at, some in catalog.images.values() for reference in some]
    chosen = references[:: max(1, len(references) // _MAX_COMPARED)]
    if chosen and all(files.stat(reference) is None for reference in chosen):
        where = first_of(paths.values())
        none = f"{where} has none of the pictures of {catalog.name!r}, such as {chosen[0]}"
        raise BadInput(f"{none}: pass the path at which they are now", option="source")


def _is_below(path: str, folder: str) -> bool:
    return Path(os.path.normpath(path)).is_relative_to(folder)


def _publish(layout: Layout, name: str, paths: Mapping[str, str]) -> int:
    """Publish the newest catalog with new paths as the next generation, and return its number.

    If another process publishes a generation meanwhile, that one is taken.
    """
    while True:
        last = list_line(layout, name).highest  # looked up first: what is published from here on takes the number tried below
        catalog = _newest(layout, name)
        request = with_source_paths(catalog.request, paths)
        if request == catalog.request:
            return catalog.generation
        draft = draft_of(replace(catalog, request=request))
        if draft.digest != catalog.digest:
            path = layout.catalog(name, catalog.generation)
            raise NewerFormat(f"{path} was written by a newer cachestore, so this one cannot publish it again: install a newer one")
        if publish_draft(layout, draft, after=last):
            return last + 1
