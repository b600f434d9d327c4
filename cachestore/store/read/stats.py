"""Count what is in a store, from catalogs, index, names and headers. Reads no value."""

from collections.abc import Iterable
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from cachestore.core.errors import BadInput, FormatError
from cachestore.core.keys import Json
from cachestore.core.words import in_short
from cachestore.files.marker import check_for_reading
from cachestore.files.opening import names_in
from cachestore.files.paths import Layout, parse_recipe
from cachestore.store.format.catalog import Catalog, Made
from cachestore.store.format.line import list_line
from cachestore.store.read.held import ready_rows
from cachestore.store.read.rows import newest_catalog, read_data_set
from cachestore.store.read.snapshot import Snapshot, load_snapshot, open_layout
from cachestore.store.read.unfinished import list_data_sets


@dataclass(frozen=True, slots=True)
class CatalogStats:
    """Counts of a data set's newest catalog."""

    name: str
    generation: int
    samples: int
    complete: int
    """Samples for which every encoder succeeded and all entries are present."""
    columns: tuple[str, ...]
    """The name of each key column: `encoder/role`, with `@resolution` if there are several."""
    prompts: int = 0
    """Prompts for validation whose texts were encoded."""
    made: Made = "precompute"
    """What made it."""


@dataclass(frozen=True, slots=True, repr=False)
class StoreStats:
    """Counts of a store."""

    entries: int
    segments: int
    bytes: int
    generation: int
    """Number of the index, -1 without one."""
    recipes: tuple[str, ...]
    catalogs: tuple[CatalogStats, ...]
    unreadable: tuple[str, ...] = ()
    """Data sets that cannot be read as they are now: `verify` says why. An older generation is among `catalogs`, if one can be read."""

    __repr__ = in_short

    def as_json(self) -> dict[str, Json]:
        """The object that `cachestore stats --json` prints."""
        return asdict(self)


def stats(path: str | Path) -> StoreStats:
    """Count a store's entries, segments and bytes, and list recipes and catalogs. Raises StoreNotFound, FormatError."""
    layout = open_layout(Layout.at(path))
    # Catalogs are published after the segments that they need, so they are read first.
    newest = newest_catalogs(layout)
    recipes = [fingerprint for fingerprint in map(parse_recipe, names_in(layout.recipes)) if fingerprint]
    with closing(load_snapshot(layout)) as snapshot:
        found = count_snapshot(snapshot, newest, recipes)
    unreadable = unreadable_names(layout, newest)
    check_for_reading(layout)
    return replace(found, unreadable=tuple(unreadable))


def newest_catalogs(layout: Layout) -> list[Catalog]:
    """Return the newest readable catalog of each data set, sorted by name."""
    return [catalog for name in list_data_sets(layout) if (catalog := newest_catalog(layout, name)) is not None]


def unreadable_names(layout: Layout, newest: Iterable[Catalog]) -> list[str]:
    """Return the data sets that cannot be read as they are now. `newest` are the newest states that can."""
    read = {catalog.name: catalog.generation for catalog in newest}
    names: list[str] = []
    for name in list_data_sets(layout):
        if read.get(name, -1) < list_line(layout, name).highest:  # or it has grown meanwhile
            try:
                read_data_set(layout, name)
            except BadInput:  # dropped meanwhile
                pass
            except (FormatError, OSError):
                names.append(name)
    return names


def count_snapshot(snapshot: Snapshot, catalogs: Iterable[Catalog], recipes: Iterable[str]) -> StoreStats:
    """Count the entries, segments and bytes of a snapshot, and the samples of these catalogs."""
    segments = snapshot.segments()
    return StoreStats(
        entries=len(snapshot),
        segments=len(segments),
        bytes=sum(ref.size_bytes for ref in segments),
        generation=snapshot.generation,
        recipes=tuple(recipes),
        catalogs=tuple(_count(catalog, snapshot) for catalog in catalogs),
    )


def _count(catalog: Catalog, snapshot: Snapshot) -> CatalogStats:
    complete, columns = int(ready_rows(catalog, snapshot).sum()), tuple(catalog.column_names())
    return CatalogStats(catalog.name, catalog.generation, len(catalog), complete, columns, len(catalog.prompts), catalog.made)
