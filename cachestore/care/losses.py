"""Which entries are needed, and which of those are lost: by catalogs, by the lists of `repair`, by an index that shows missing segments."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from cachestore.core.errors import WRONG_FIELDS, FormatError
from cachestore.core.keys import KEY_BYTES, Key
from cachestore.core.words import named_prompt
from cachestore.files.opening import names_in
from cachestore.files.paths import Layout, damaged, parse_lost
from cachestore.files.records import read_record
from cachestore.files.table import Digests
from cachestore.store.format.arrays import Bytes, Mask, numbers, rows
from cachestore.store.format.catalog import Catalog, Made, list_names
from cachestore.store.format.line import list_line
from cachestore.store.format.marked import marked_segments
from cachestore.store.read.held import are_among, as_text
from cachestore.store.read.rows import newest_catalog
from cachestore.store.read.snapshot import Snapshot

if TYPE_CHECKING:
    from typing_extensions import Self

LOST_FORMAT: Final = "cachestore-lost"
LOST_VERSION: Final = 1

NamedSample = tuple[str, str]
"""The name of a data set, and the id of one of its samples."""


def needed_by(catalog: Catalog) -> Iterator[tuple[Key, str]]:
    """Each key that a catalog names, with the id of its sample. A prompt has none: it is called "(prompt) TEXT" instead."""
    for column in catalog.columns:
        for row in range(len(catalog)):
            for key in column.row_keys(row):
                if key is not None:
                    yield key, catalog.ids[row]
    yield from ((key, named_prompt(text)) for key, text in catalog.prompt_keys())


def keys_needed_by(catalogs: Sequence[Catalog]) -> Bytes:
    """The keys that catalogs name, each once, in their order: uint8 of shape [n, 16]."""
    prompts = _array_of([key for catalog in catalogs for key, _text in catalog.prompt_keys()])
    keys = np.concatenate([prompts, *(rows(column.keys, KEY_BYTES) for catalog in catalogs for column in catalog.columns)])
    return np.unique(as_text(keys[keys.any(axis=1)])).view(np.uint8).reshape(-1, KEY_BYTES)


@dataclass(frozen=True, slots=True)
class NamedBy:
    """Why an entry is needed."""

    where: str
    """The path of a catalog that names it, or of the newest changes laid over one."""
    name: str
    sample: str
    """The first sample that needs it."""
    made: Made
    """What made the data set: only `precompute` and importing can say how a value was made."""


@dataclass(frozen=True, slots=True)
class Needed:
    """What the newest catalogs need, as they were when this was read."""

    catalogs: Sequence[tuple[str, Catalog]]
    """Each with its path, or that of the newest changes laid over it."""

    @classmethod
    def of(cls, layout: Layout) -> "Self":
        """Read the newest catalogs of a store."""
        found: list[tuple[str, Catalog]] = []
        for name in list_names(layout):
            if (catalog := newest_catalog(layout, name)) is not None:
                path, line = layout.catalog(name, catalog.generation), list_line(layout, name)
                if catalog.generation not in line.tables and catalog.generation in line.entries:
                    path = layout.entry(name, catalog.generation)
                found.append((layout.relative(path), catalog))
        return cls(found)

    def among(self, keys: Collection[Key]) -> dict[Key, NamedBy]:
        """Those of these keys that are needed, each with why."""
        asked = _array_of(keys)
        return self._which(lambda named: are_among(named, asked)) if len(asked) else {}

    def without(self, keys: Collection[Key]) -> dict[Key, NamedBy]:
        """All needed keys but these, each with why."""
        others = _array_of(keys)
        return self._which(lambda named: ~are_among(named, others))

    def _which(self, are_asked: Callable[[Bytes], Mask]) -> dict[Key, NamedBy]:
        found: dict[Key, NamedBy] = {}
        for where, catalog in self.catalogs:
            for column in catalog.columns:
                keys = rows(column.keys, KEY_BYTES)
                cells = np.flatnonzero(keys.any(axis=1) & are_asked(keys))
                owners = np.searchsorted(numbers(column.at), cells, side="right") - 1
                for cell, row in zip(cells.tolist(), owners.tolist(), strict=True):
                    named = NamedBy(where, catalog.name, catalog.ids[int(row)], catalog.made)
                    found.setdefault(Key(keys[cell].tobytes()), named)
            prompts = [*catalog.prompt_keys()]
            for (key, text), is_asked in zip(prompts, are_asked(_array_of([key for key, _text in prompts])).tolist(), strict=True):
                if is_asked:
                    found.setdefault(key, NamedBy(where, catalog.name, named_prompt(text), catalog.made))
        return found


def _array_of(keys: Collection[Key]) -> Bytes:
    return np.frombuffer(b"".join(keys), np.uint8).reshape(-1, KEY_BYTES)


def needed_samples(layout: Layout, among: Collection[Key]) -> dict[Key, NamedSample]:
    """The keys of `among` that the newest catalogs need, each with the first sample that needs it. Reads nothing if `among` is empty."""
    return {key: (named.name, named.sample) for key, named in Needed.of(layout).among(among).items()} if among else {}


def wanted_keys(layout: Layout, snapshot: Snapshot) -> set[Key]:
    """Every key whose absence `verify` reports: what the newest catalogs need, and what was lost, as far as it can be read."""
    needed = keys_needed_by([catalog for _where, catalog in Needed.of(layout).catalogs])
    wanted = {Key(raw) for raw in Digests(memoryview(needed.tobytes()), KEY_BYTES)}
    for name in filter(parse_lost, names_in(layout.quarantine)):
        with suppress(FormatError, OSError):
            wanted.update(key for key, _sample in still_wanted(layout, read_lost(layout.quarantine / name)))
    return wanted.union(*vanished_keys(layout, snapshot).values())


def read_lost(path: Path) -> dict[Key, NamedSample | None]:
    """The entries that a list calls lost, each with a sample that needed it then, or None. Raises FormatError, OSError."""
    try:
        body = read_record(path, LOST_FORMAT, LOST_VERSION)
        needed = {Key.parse(text): (str(name), str(sample)) for text, (name, sample) in body.get("needed", {}).items()}
        keys, is_at_home = {Key.parse(text): None for text in body["keys"]} | needed, parse_lost(path.name) == body["segment"]
    except WRONG_FIELDS as error:
        raise damaged(f"{path} is not a list of lost entries", path) from error
    if not is_at_home:
        raise damaged(f"{path} lists the lost entries of another segment", path)
    return keys


def still_wanted(layout: Layout, keys: Mapping[Key, NamedSample | None]) -> Iterator[tuple[Key, NamedSample | None]]:
    """Leave out lost entries that are not wanted any more.

    An entry of a sample is wanted if the newest catalog lists the sample, has an empty cell for it, and does not name the entry. Otherwise
    the sample is gone, or has new values, or is reported without a list. Entries without a sample are always wanted.
    """
    yield from ((key, None) for key, sample in keys.items() if sample is None)
    for name in {sample[0] for sample in keys.values() if sample is not None}:
        catalog = newest_catalog(layout, name)
        rows = {sample: row for row, sample in enumerate(catalog.ids)} if catalog is not None else {}
        for key, sample in keys.items():
            if catalog is not None and sample is not None and sample[0] == name and sample[1] in rows:
                named = [each for column in catalog.columns for each in column.row_keys(rows[sample[1]])]
                if None in named and key not in named:
                    yield key, sample


def vanished_keys(layout: Layout, snapshot: Snapshot) -> dict[str, list[Key]]:
    """By segment, the keys that a writer put into segments which are gone and were never marked for deletion."""
    if snapshot.index is None or not snapshot.vanished:
        return {}
    marked = marked_segments(layout)
    gone = {snapshot.index.segments[number] for number in snapshot.vanished}
    lost = {ref.digest for ref in gone if ref.digest not in marked and not ref.origin}
    found: dict[str, list[Key]] = {}
    for key, locations in snapshot.index.items() if lost else ():
        for location in locations:
            if location.segment.digest in lost and key not in snapshot:
                found.setdefault(location.segment.digest, []).append(key)
    return found
