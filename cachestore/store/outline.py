"""A store in an object store, seen without its values: what is there, and an outline of it in a local folder.

An outline has one index, and for each segment a sparse file of the right size with nothing but the header, and that only if the index does
not cover it. So `load_snapshot` and `commit` work on it as on a store, and it takes next to no disk. It is no store: it has no marker.
"""

import os
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from cachestore.core.errors import FormatError, RemoteFailed, StoreNotFound
from cachestore.files.container import HEADER_LIMIT_BYTES
from cachestore.files.marker import FORMAT as MARKER_FORMAT
from cachestore.files.marker import VERSION as MARKER_VERSION
from cachestore.files.paths import MARKER, IndexName, Layout, decode_name, parse_catalog, parse_index, parse_recipe, parse_segment
from cachestore.files.records import NEWER, decode_record
from cachestore.files.table import read_header
from cachestore.objects.client import PIECE_BYTES, ReadingClient
from cachestore.storage.catalog import FORMAT, VERSION, Catalog, read_catalog
from cachestore.storage.index import Index, check

KEYS: Final = Layout(Path())
"""Its paths are the keys of a store's files."""
_START_BYTES: Final = 256 * 1024
"""How much of a file is read first, in the hope that its header ends there."""


@dataclass(frozen=True, slots=True)
class Inventory:
    """The files of a store in an object store, by listing. Sizes in bytes."""

    segments: Mapping[str, int]
    """By digest."""
    catalogs: Mapping[str, Mapping[int, int]]
    """By data set and generation, oldest first."""
    recipes: Mapping[str, int]
    """By fingerprint."""
    indexes: Mapping[IndexName, int]
    """The one to use first at the front."""


def key_of(path: Path) -> str:
    """Return the key for a path of KEYS."""
    return path.as_posix()


def take_inventory(client: ReadingClient) -> Inventory:
    """List a store. What lists last is written first, so all that a listed catalog names is listed. Raises RemoteFailed."""
    catalogs: dict[str, dict[int, int]] = {}
    for folder, file, size in _files(client, "catalogs"):
        name, generation = decode_name(folder), parse_catalog(file)
        if name is not None and generation is not None:
            catalogs.setdefault(name, {})[generation] = size
    indexes = {name: size for _folder, file, size in _files(client, "index") if (name := parse_index(file)) is not None}
    recipes = {name: size for _folder, file, size in _files(client, "recipes") if (name := parse_recipe(file)) is not None}
    files = _files(client, "segments")
    segments = {digest: size for folder, file, size in files if (digest := parse_segment(file)) is not None and digest[:2] == folder}
    return Inventory(
        segments,
        {name: dict(sorted(some.items())) for name, some in sorted(catalogs.items())},
        recipes,
        dict(sorted(indexes.items(), reverse=True)),
    )


def _files(client: ReadingClient, top: str) -> Iterable[tuple[str, str, int]]:
    """Yield (folder below `top`, name, size) of each object."""
    for page in client.list(top):
        for found in page:
            folder, _slash, file = found.key.removeprefix(f"{top}/").rpartition("/")
            yield folder, file, found.size


def read_remote_marker(client: ReadingClient) -> dict[str, Any] | None:
    """Return the body of a store's marker, or None if there is no store. Raises FormatError, also for a newer format; RemoteFailed."""
    try:
        raw = client.get(MARKER)
    except RemoteFailed as error:
        if error.errno == 2:
            return None
        raise
    with naming_damage(client, Path(MARKER)):
        return decode_record(MARKER_FORMAT, MARKER_VERSION, raw, where=Path(MARKER))


def require_store(client: ReadingClient) -> None:
    """Raise StoreNotFound if there is no store at a client's address."""
    if read_remote_marker(client) is None:
        raise StoreNotFound(
            f"there is no store at {client.address} (no {MARKER} in it); `cachestore push STORE {client.address}` makes one"
        )


@contextmanager
def naming_damage(client: ReadingClient, path: Path) -> Generator[None]:
    """Name the object where the block finds damage in its local copy; `path` is one of KEYS."""
    try:
        yield
    except FormatError as error:
        where = client.address.of(key_of(path))
        if NEWER in str(error):
            raise FormatError(f"{where} was written by a newer cachestore: {NEWER}") from error
        raise FormatError(f"{where} is damaged: remove it there, then push it again from a store that has it") from error


def start_of(read: Callable[[int, int], bytes], size: int) -> bytes:
    """Return the header of a segment or table and the length before it. `read` takes a start and a size; `size` is that of the file."""
    first = read(0, min(size, _START_BYTES))
    end = min(8 + int.from_bytes(first[:8], "little"), size, HEADER_LIMIT_BYTES + 8)
    return first[:end] if end <= len(first) else first + read(len(first), end - len(first))


def write_sparse(path: Path, start: bytes, size: int) -> None:
    """Make a file of this size that has these bytes at its start and nothing behind them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("xb") as file:
        file.write(start)
        file.truncate(size)


def fetch_file(client: ReadingClient, key: str, size: int, path: Path) -> None:
    """Download an object into a new local file. Raises RemoteFailed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("xb") as file:
        for start in range(0, size, PIECE_BYTES):
            file.write(client.get_range(key, start, min(PIECE_BYTES, size - start)))


def fetch_index(client: ReadingClient, inventory: Inventory, outline: Layout) -> None:
    """Bring the newest good index of a store into an outline, if there is one."""
    for name, size in inventory.indexes.items():
        path = outline.index(name)
        fetch_file(client, key_of(KEYS.index(name)), size, path)
        with suppress(FormatError):
            check(outline, name)
            return
        path.unlink()


def draw_segments(outline: Layout, segments: Mapping[str, int], header_of: Callable[[str, int], bytes]) -> None:
    """Make the segments of an outline. `header_of` gets digest and size of those that its index does not cover."""
    covered = _covered(outline)
    for digest, size in segments.items():
        write_sparse(outline.segment(digest), b"" if digest in covered else header_of(digest, size), size)


def _covered(outline: Layout) -> frozenset[str]:
    name = next((name for name in map(parse_index, _names(outline.indexes)) if name is not None), None)
    if name is None:
        return frozenset()
    with closing(Index(outline, check(outline, name))) as index:
        return frozenset(ref.digest for ref in index.segments.values())


def _names(folder: Path) -> list[str]:
    return os.listdir(folder) if folder.is_dir() else []  # noqa: PTH208 - names are wanted, not paths


def remote_header(client: ReadingClient) -> Callable[[str, int], bytes]:
    """Return a `header_of` for `draw_segments` that reads the headers of a store's segments by range."""

    def header_of(digest: str, size: int) -> bytes:
        key = key_of(KEYS.segment(digest))
        return start_of(lambda start, count: client.get_range(key, start, count), size)

    return header_of


def fetch_catalog_start(client: ReadingClient, name: str, generation: int, size: int, outline: Layout) -> Path:
    """Bring the header of a catalog of this size into an outline, unless it is there, and return the file's path. Raises RemoteFailed."""
    path, key = outline.catalog(name, generation), key_of(KEYS.catalog(name, generation))
    if not path.exists():
        write_sparse(path, start_of(lambda start, count: client.get_range(key, start, count), size), size)
    return path


def fetch_catalog(client: ReadingClient, inventory: Inventory, name: str, generation: int, outline: Layout) -> Catalog:
    """Bring a catalog into an outline, read and check it. Raises FormatError for a damaged one, RemoteFailed."""
    path, key = outline.catalog(name, generation), KEYS.catalog(name, generation)
    fetch_file(client, key_of(key), inventory.catalogs[name][generation], path)
    with naming_damage(client, key):
        return read_catalog(path, generation=generation)


def remote_digest(client: ReadingClient, name: str, generation: int, size: int, outline: Layout) -> str:
    """Return the digest of a catalog in an object store, by its header. Raises FormatError for a damaged one, RemoteFailed."""
    path = fetch_catalog_start(client, name, generation, size, outline)
    with naming_damage(client, KEYS.catalog(name, generation)):
        return catalog_digest(path)


def catalog_digest(path: Path) -> str:
    """Return the digest of a catalog by its header. Raises FormatError, FileNotFoundError."""
    return str(read_header(path, FORMAT, VERSION)["digest"])
