"""Counting what is in a store, from index, names and headers; no value is read."""

from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path

from cachestore.files.opening import names_in
from cachestore.files.paths import Layout, parse_recipe
from cachestore.keys import Json
from cachestore.storage.catalog import list_names, newest_catalog
from cachestore.storage.snapshot import load_snapshot, open_layout


@dataclass(frozen=True, slots=True)
class CatalogStats:
    """One data set's newest catalog."""

    name: str
    generation: int
    samples: int
    complete: int
    """Samples for which every encoder succeeded."""
    columns: tuple[str, ...]
    """`encoder/role` of each key column."""


@dataclass(frozen=True, slots=True)
class StoreStats:
    """What is in a store."""

    entries: int
    segments: int
    bytes: int
    generation: int
    """Number of the index, -1 without one."""
    recipes: tuple[str, ...]
    catalogs: tuple[CatalogStats, ...]

    def as_json(self) -> dict[str, Json]:
        """The object that `cachestore stats --json` prints."""
        return asdict(self)


def stats(path: str | Path) -> StoreStats:
    """Count a store's entries, segments and bytes, and list recipes and catalogs. Raises StoreNotFound, FormatError."""
    layout = open_layout(Layout(Path(path).absolute()))
    catalogs: list[CatalogStats] = []
    for name in list_names(layout):
        catalog = newest_catalog(layout, name)
        if catalog is not None:
            complete = sum(1 for row in range(len(catalog)) if catalog.is_complete(row))
            columns = tuple(f"{column.encoder}/{column.role}" for column in catalog.columns)
            catalogs.append(CatalogStats(name, catalog.generation, len(catalog), complete, columns))
    with closing(load_snapshot(layout)) as snapshot:
        segments = snapshot.segments()
        return StoreStats(
            entries=len(snapshot),
            segments=len(segments),
            bytes=sum(ref.size_bytes for ref in segments),
            generation=snapshot.generation,
            recipes=tuple(fingerprint for fingerprint in map(parse_recipe, names_in(layout.recipes)) if fingerprint),
            catalogs=tuple(catalogs),
        )
