"""A store in an object store, seen without its values: what is there, and an outline of it in a local folder.

An outline has one index, and for each segment a sparse file of the right size with nothing but the header, and that only if the index does
not cover it. So `load_snapshot` and `commit` work on it as on a store, and it takes next to no disk. It is no store: it has no marker.

Any answer may be wrong: damaged on its way, cut, of another object, or from an old listing. So what an answer says against an object or a
store is believed only when it was said twice (`ask_until_sure`).
"""

import errno
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from cachestore.core.errors import BadInput, CacheStoreError, FormatError, MissingEntry, NewerFormat, RemoteFailed, StoreNotFound
from cachestore.core.words import did_you_mean, first_of
from cachestore.files import in_use
from cachestore.files.checksum import Checksum
from cachestore.files.container import HEADER_LIMIT_BYTES
from cachestore.files.marker import FORMAT as MARKER_FORMAT
from cachestore.files.marker import VERSION as MARKER_VERSION
from cachestore.files.paths import MARKER, IndexName, Layout, decode_name, parse_catalog, parse_index, parse_recipe, parse_segment
from cachestore.files.records import decode_record
from cachestore.files.table import read_header
from cachestore.remote.client import PIECE_BYTES, ObjectRef, ReadingClient
from cachestore.store.format.catalog import FORMAT, VERSION, Catalog, CatalogStart, parse_catalog_start, read_catalog
from cachestore.store.format.index import Index, check

TRIES: Final = 3
"""How often a store is asked for something, at most, before an error about it is raised."""

T = TypeVar("T")

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
    for page in client.list(top):
        for found in page:
            folder, _slash, file = found.key.removeprefix(f"{top}/").rpartition("/")
            yield folder, file, found.size


def choose_generations(
    there: Mapping[str, Iterable[int]], name: str | None, generation: int | None, *, where: object
) -> dict[str, list[int]]:
    """Return the generations that are meant, by data set: all; of a named one the newest, or the given one. Raises BadInput for others."""
    if name is None:
        return {one: sorted(some) for one, some in sorted(there.items())}
    found = sorted(there.get(name, ()))
    if not found:
        names = first_of(map(repr, sorted(there))) or "none"
        raise BadInput(f"{where} has no data set {name!r}; it has {names}{did_you_mean(name, there)}", option="name")
    if generation is not None and generation not in found:
        has = first_of(map(str, reversed(found)))
        raise BadInput(f"{where} has no generation {generation} of {name!r}; it has {has}", option="generation")
    return {name: [generation or found[-1]]}


def read_remote_marker(client: ReadingClient) -> dict[str, Any] | None:
    """Return the body of a store's marker; None if there is no store. Raises WrongAnswer, FormatError for a newer format, RemoteFailed."""
    path = Path(MARKER)
    try:
        with digesting(client, path) as digested:
            return decode_record(MARKER_FORMAT, MARKER_VERSION, digested.get(MARKER), where=path)
    except RemoteFailed as error:
        if error.errno == errno.ENOENT:
            return None
        raise


def require_store(client: ReadingClient) -> dict[str, Any]:
    """Return the body of a store's marker. Raises StoreNotFound if there is no store at a client's address; as `read_remote_marker`."""
    body = read_remote_marker(client)
    if body is None:
        raise StoreNotFound(
            f"there is no store at {client.address} (no {MARKER} in it); `cachestore push STORE {client.address}` makes one"
        )
    return body


class WrongAnswer(FormatError):
    """What came for an object is not what the object should hold."""

    where = ""
    """The object's address."""
    digest = ""
    """Of what came."""


def ask_until_sure(ask: Callable[[], T]) -> T:
    """Return what `ask` returns. It is called again, twice at most, if it raises what a wrong answer or a vanished file may cause.

    Raises its error once two calls raise the same; two that say different things may come of two wrong answers. Wrong bytes are a
    FormatError then; a RemoteFailed if they differ each time.
    """
    heard = set[object]()
    for tries_left in reversed(range(TRIES)):
        try:
            return ask()
        except WrongAnswer as error:
            if (error.where, error.digest) in heard:
                damaged = "is damaged: two reads brought the same wrong bytes; remove it there, then push it again from a store that has it"
                raise FormatError(f"{error.where} {damaged}") from error
            if not tries_left:
                raise reads_differ(error.where) from error
            heard.add((error.where, error.digest))
        except (BadInput, StoreNotFound) as error:
            answer = type(error), error.args
            if answer in heard or not tries_left:
                raise
            heard.add(answer)
        except (CacheStoreError, FileNotFoundError) as error:
            # It may be about something that was replaced or removed meanwhile, or that a wrong listing named.
            is_absent = isinstance(error, RemoteFailed) and error.errno == errno.ENOENT
            if not tries_left or (isinstance(error, CacheStoreError) and not is_absent and not isinstance(error, MissingEntry)):
                raise
    raise AssertionError  # the last try returns or raises


def reads_differ(where: str) -> RemoteFailed:
    """Return the error about an object of which each read brings other bytes."""
    return RemoteFailed(f"each read of {where} brings other bytes: something on the way there damages data; run the same command again")


class _DigestingClient:
    """A client for the reads of one object, which digests all that comes."""

    def __init__(self, client: ReadingClient) -> None:
        self._client = client
        self.address = client.address
        self.checksum = Checksum()

    def list(self, folder: str = "") -> Iterator[list[ObjectRef]]:
        return self._client.list(folder)

    def get(self, key: str) -> bytes:
        return self._noted(self._client.get(key))

    def get_range(self, key: str, start: int, size: int) -> bytes:
        return self._noted(self._client.get_range(key, start, size))

    def _noted(self, data: bytes) -> bytes:
        self.checksum.update(data)
        return data


@contextmanager
def digesting(client: ReadingClient, path: Path) -> Generator[ReadingClient]:
    """Give the block a client for all reads of one object, whose `path` is one of KEYS. Damage that it finds raises WrongAnswer."""
    digested = _DigestingClient(client)
    try:
        yield digested
    except NewerFormat as error:
        raise NewerFormat(f"{client.address.of(key_of(path))} was written by a newer cachestore: install a newer one") from error
    except FormatError as error:
        where, digest = client.address.of(key_of(path)), digested.checksum.hexdigest()
        wrong = WrongAnswer(f"what came for {where} is not what it should hold (digest {digest})")
        wrong.where, wrong.digest = where, digest
        raise wrong from error


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


def bring_index(inventory: Inventory, bring: Callable[[IndexName, int], T]) -> T | None:
    """Return what `bring` makes of the newest index of a store that is good; None if none is. It gets name and size.

    An index that came damaged is brought once more.
    """
    for name, size in inventory.indexes.items():
        for _try in range(2):
            try:
                return bring(name, size)
            except FormatError:
                continue
            except RemoteFailed as error:
                if error.errno != errno.ENOENT:
                    raise
                break  # it is not there, whatever the listing says
    return None


def fetch_index(client: ReadingClient, inventory: Inventory, outline: Layout) -> None:
    """Bring the newest good index of a store into an outline, if there is one."""

    def bring(name: IndexName, size: int) -> None:
        try:
            fetch_file(client, key_of(KEYS.index(name)), size, outline.index(name))
            check(outline, name)
        except CacheStoreError:
            in_use.unlink(outline.index(name))
            raise

    bring_index(inventory, bring)


def draw_segments(outline: Layout, segments: Mapping[str, int], header_of: Callable[[str, int], bytes]) -> None:
    """Make the segments of an outline. `header_of` gets digest and size of those that its index does not cover."""
    covered: frozenset[str] = frozenset()
    names = os.listdir(outline.indexes) if outline.indexes.is_dir() else []  # noqa: PTH208 - names are wanted, not paths
    for name in filter(None, map(parse_index, names)):
        with closing(Index(outline, check(outline, name))) as index:
            covered = frozenset(ref.digest for ref in index.segments.values())
    for digest, size in segments.items():
        write_sparse(outline.segment(digest), b"" if digest in covered else header_of(digest, size), size)


def remote_header(client: ReadingClient) -> Callable[[str, int], bytes]:
    """Return a `header_of` for `draw_segments` that reads the headers of a store's segments by range.

    A digest covers whole segments alone, so each header is read until two reads agree. Raises RemoteFailed.
    """

    def header_of(digest: str, size: int) -> bytes:
        key = key_of(KEYS.segment(digest))
        found = [_start_of_object(client, key, size)]
        for _try in range(TRIES):
            found.append(_start_of_object(client, key, size))
            if found[-1] == found[-2]:
                return found[-1]
        raise reads_differ(client.address.of(key))

    return header_of


def _start_of_object(client: ReadingClient, key: str, size: int) -> bytes:
    return start_of(lambda start, count: client.get_range(key, start, count), size)


def fetch_catalog(client: ReadingClient, inventory: Inventory, name: str, generation: int, outline: Layout) -> Catalog:
    """Bring a catalog into an outline, read and check it. Raises WrongAnswer, RemoteFailed."""
    path, key = outline.catalog(name, generation), KEYS.catalog(name, generation)
    with digesting(client, key) as digested:
        fetch_file(digested, key_of(key), inventory.catalogs[name][generation], path)
        return read_catalog(path, generation=generation)


def remote_start(client: ReadingClient, name: str, generation: int, size: int) -> CatalogStart:
    """Read the header of a catalog of this size in an object store. Raises WrongAnswer, RemoteFailed."""
    key = KEYS.catalog(name, generation)
    with digesting(client, key) as digested:
        return parse_catalog_start(_start_of_object(digested, key_of(key), size), size, name, generation, where=key)


def catalog_digest(path: Path) -> str:
    """Return the digest of a catalog by its header. Raises FormatError, FileNotFoundError."""
    return str(read_header(path, FORMAT, VERSION)["digest"])
