"""List the sources of a data set as one.

With several sources, references begin with the source's label: `label/reference`. Ids begin with its name, if it was given one.
"""

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final, cast

from cachestore.core.arguments import as_path_str
from cachestore.core.errors import BadInput
from cachestore.core.inputs import SOURCE, SOURCE_WEIGHT
from cachestore.core.keys import Json, canonical, digest_parts, digest_text
from cachestore.core.samples import Sample, Source
from cachestore.core.words import first_of
from cachestore.files.paths import is_temporary
from cachestore.sources.files import Folder, Routed, SourceFiles
from cachestore.sources.folders import beside_tars, list_source
from cachestore.sources.listing import Listing
from cachestore.sources.memory import asked_files, list_objects, list_rows
from cachestore.sources.pipe import pipe_files
from cachestore.sources.reading import PLAIN, ListingOptions
from cachestore.sources.remarks import Problems, RefusedItem, Remarks
from cachestore.sources.tars import list_tars, tars_at
from cachestore.sources.unused import Unused

IN_MEMORY: Final = "(in memory)"
"""Stands for data that is not a path."""
InMemory = Mapping[int, Listing]
"""By number of the source, the listings of sources in memory."""


def list_path(data: str | Path, how: ListingOptions = PLAIN) -> Listing:
    """List what a path names: a folder, a manifest, a prompt list, or tars. Raises BadInput."""
    tars = tars_at(data)
    if tars is not None:
        listing = list_tars(tars, how)
        if os.path.isdir(data):  # noqa: PTH112 - Path's raises if access is refused
            beside_tars(Path(data), tars, listing.seen.unused)
        return listing
    if is_temporary(Path(data).name) and Path(data).is_file():
        return list_rows(Path(data), pipe_files(os.environ))
    return list_source(data, how)


def files_of(data: str | Path) -> SourceFiles:
    """The files that references of a path lead to. Lists tars only. Raises BadInput."""
    tars = tars_at(data)
    if tars is not None:
        return list_tars(tars).files
    path = Path(data)
    return Folder((path if os.path.isdir(path) else path.parent).absolute())  # noqa: PTH112 - Path's raises if access is refused


def as_sources(data: object) -> tuple[str, tuple[Source, ...], dict[int, object]]:
    """Split what `precompute` was given: (path, (), {}) for one path, else ("", sources, objects by source number). Raises BadInput."""
    if isinstance(data, str | os.PathLike):
        return as_path_str("data", cast("object", data)), (), {}
    given: Sequence[object] = (data,)
    if isinstance(data, list | tuple):
        listed = cast("Sequence[object]", data)
        are_sources = [isinstance(one, Source | str | os.PathLike) for one in listed]
        if any(are_sources) and not all(are_sources):
            index = are_sources.index(False)
            raise BadInput(f"a list must hold sources and paths, or samples, but {index} is {type(listed[index]).__name__}")
        given = listed if any(are_sources) else given
    sources = [one if isinstance(one, Source) else Source(one) for one in given]
    held = {number: source.data for number, source in enumerate(sources) if not isinstance(source.data, str | os.PathLike)}
    paths: list[str] = [IN_MEMORY if number in held else os.fspath(source.data) for number, source in enumerate(sources)]
    return "", tuple(replace(source, data=index) for source, index in zip(sources, paths, strict=True)), held


def list_in_memory(sources: Sequence[Source], held: Mapping[int, object], how: ListingOptions = PLAIN) -> InMemory:
    """List the sources in memory. Raises BadInput."""
    return {number: list_objects(data, _of(sources[number], how)) for number, data in held.items()}


def _of(source: Source, how: ListingOptions) -> ListingOptions:
    return how if source.caption is None else replace(how, caption=source.caption)


def labels_of(sources: Sequence[Source]) -> list[str]:
    """Name each source: its name, its label, or the last part of its path without suffix. Raises BadInput if two are equal."""
    labels = [source.name or source.label or _label(source) for source in sources]
    if twice := next((label for label, count in Counter(labels).items() if count > 1), None):
        one, other = [source for source, label in zip(sources, labels, strict=True) if label == twice][:2]
        raise BadInput(
            f"two sources are called {twice!r}: {one.data} and {other.data}; give one of them another name (cs.Source(data, name=...))"
        )
    return labels


def _label(source: Source) -> str:
    path = Path(source.data)
    if source.data == IN_MEMORY or is_temporary(path.name):
        return "memory"  # also in a worker, whose rows are in a file
    return (path.name if os.path.isdir(path) else path.stem) or "data"  # noqa: PTH112


def resolutions_of(sources: Sequence[Source], resolution: int) -> tuple[int, Mapping[str, int]]:
    """(resolution, {}) if all sources have the same, else the default resolution and each source's own by label."""
    own = [source.resolution or resolution for source in sources]
    if len(set(own)) <= 1:
        return (own[0] if own else resolution), {}
    return resolution, dict(zip(labels_of(sources), own, strict=True))


def list_sources(sources: Sequence[Source], in_memory: InMemory, how: ListingOptions = PLAIN) -> Listing:
    """List several sources as one. `in_memory` are listings by number. Raises BadInput, also if two samples have the same id."""
    labels = labels_of(sources)
    listings: list[Listing] = []
    problems = Problems()
    for number, source in enumerate(sources):
        try:
            there = in_memory.get(number) or list_path(source.data, _of(source, how))
        except BadInput as error:
            problems.add(error)
        else:
            listings.append(there)
    problems.refuse("these sources")
    if is_alone(sources):
        return listings[0]
    listed = list(zip(labels, sources, listings, strict=True))
    parts = [canonical([label, source.name, source.share, listing.content]) for label, source, listing in listed]
    files = _together({label: listing for label, _source, listing in listed})
    seen = Remarks()
    for label, _source, listing in listed:
        seen.add(listing.seen, f"{label}/")
    return Listing(files, digest_parts("cachestore-sources", *parts).hex(), partial(_walk, listed), seen, partial(_unused, listed))


def _unused(listed: Sequence[tuple[str, Source, Listing]], references: Iterable[str]) -> Unused:
    own: dict[str, list[str]] = {label: [] for label, _source, listing in listed if listing.left is not None}
    for reference in references if own else ():
        label, _slash, rest = reference.partition("/")
        if label in own:
            own[label].append(rest)
    together = Unused()
    for label, _source, listing in listed:
        together.include(listing.unused(own.get(label, ())), f"{label}/")
    return together


Moved = str | os.PathLike[str] | Mapping[str, str | os.PathLike[str]]
"""Where a source is now: its path; for several sources, a path by label for each one that moved."""


def labelled(sources: Sequence[Source]) -> tuple[Source, ...]:
    """The same sources with their present labels, which they keep when they move."""
    if is_alone(sources):
        return tuple(sources)
    called = zip(sources, labels_of(sources), strict=True)
    return tuple(source if source.name or source.label else replace(source, label=label) for source, label in called)


def at_new_paths(sources: Sequence[Source], moved: Moved) -> tuple[Source, ...]:
    """The same sources at new paths, with their old labels. Ignores unknown labels. Raises BadInput for one path instead of several."""
    labels = labels_of(sources)
    if isinstance(moved, str | os.PathLike):
        if len(sources) > 1:
            named = first_of(labels, 5)
            raise BadInput(
                f"this was made from {len(sources)} sources ({named}): pass --source NAME=PATH for each one that moved", option="source"
            )
        moved = dict.fromkeys(labels, moved)
    called = zip(labelled(sources), labels, strict=True)
    return tuple(replace(source, data=os.fspath(moved[label])) if label in moved else source for source, label in called)


def is_alone(sources: Sequence[Source]) -> bool:
    """Whether this is a single source whose ids and references stay unchanged. Otherwise they begin with its name and label."""
    return len(sources) == 1 and not sources[0].name and sources[0].share == 1


def _together(holders: Mapping[str, SourceFiles]) -> SourceFiles:
    def route(reference: str) -> tuple[SourceFiles, str]:
        label, _slash, own = reference.partition("/")
        if label not in holders:
            raise FileNotFoundError(f"no source is called {label!r}, but {reference!r} should be in it")
        return holders[label], own

    return Routed(route)


def files_in_memory(in_memory: InMemory) -> SourceFiles:
    """The files that workers may ask for, as `number/reference`. `list_rows` uses the same form."""
    return _together({str(number): listing for number, listing in in_memory.items()})


def files_of_sources(sources: Sequence[Source]) -> SourceFiles:
    """The files that references of these sources lead to. Lists tars only. Raises BadInput."""
    files = [
        asked_files(pipe_files(os.environ), str(number)) if source.data == IN_MEMORY else files_of(source.data)
        for number, source in enumerate(sources)
    ]
    return files[0] if is_alone(sources) else _together(dict(zip(labels_of(sources), files, strict=True)))


def _walk(listed: Sequence[tuple[str, Source, Listing]], remarks: Remarks) -> Iterator[Sample]:
    owners: dict[str, Source] = {}
    is_weighted = any(source.share != 1 for _label, source, _listing in listed)
    for label, source, listing in listed:
        seen, before = Remarks(), len(owners)
        columns: dict[str, Json] = {SOURCE: label} | ({SOURCE_WEIGHT: float(source.share)} if is_weighted else {})
        for sample in listing.samples(seen):
            if named_twice := next((column for column in columns if column in sample.extras), None):
                reason = (
                    f"sample {sample.id!r} of {source.data} has its own column {named_twice!r}, but cachestore uses that name for the"
                    " source: rename the column"
                )
                seen.refused.append(RefusedItem(sample.id, reason))
                continue
            images = {role: tuple(f"{label}/{reference}" for reference in references) for role, references in sample.images.items()}
            name = f"{source.name}/{sample.id}" if source.name else sample.id
            named = replace(sample, id=name, images=images, extras={**sample.extras, **columns})
            owner = owners.setdefault(named.id, source)
            if owner is source:
                yield named
            elif not named.images and named.id == digest_text(named.captions[0]):  # only a prompt, which two sources may share
                remarks.collapsed += 1
            else:
                raise BadInput(
                    f"two samples have the id {named.id!r}: one of {owner.data} and one of {source.data}; give one of these"
                    " sources a name, which is then put before the ids of its samples"
                )
        if len(owners) == before and not seen.collapsed:
            seen.refused.refuse_all(source.data)
        remarks.add(seen, f"{label}/", f"{source.name}/" if source.name else "")
        remarks.empty += [label] if len(owners) == before and not seen.collapsed else []
