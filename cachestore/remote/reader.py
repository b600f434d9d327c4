"""Read a store in an object store, through a local cache. Lists and downloads by the helper process; a copied reader lists nothing.

Any byte of the cache may be wrong: each copy is compared with its checksums when it is opened, and brought again if it differs.
"""

import logging
import os
import re
import tempfile
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar, get_args

from cachestore.core.arguments import as_path, as_text, as_whole, as_word, refuse
from cachestore.core.errors import BadInput, FormatError
from cachestore.core.keys import Key
from cachestore.core.spelling import option
from cachestore.core.words import human_bytes
from cachestore.files import in_use
from cachestore.files.container import parse_start
from cachestore.files.opening import is_of_a_signal
from cachestore.files.paths import IndexName, Layout, parse_index
from cachestore.remote.address import Address, parse_address
from cachestore.remote.cache import (
    LOCAL,
    Room,
    StoreCache,
    copy_file,
    default_limit,
    identity_of,
    is_store_id,
    make_folder,
    make_room,
    parts_in,
    used_bytes,
)
from cachestore.remote.downloads import HelperClient, downloads
from cachestore.remote.fetch_parts import PartsFetcher
from cachestore.remote.outline import (
    KEYS,
    Inventory,
    ask_until_sure,
    bring_index,
    choose_generations,
    digesting,
    fetch_file,
    key_of,
    remote_header,
    remote_start,
    require_store,
    take_inventory,
)
from cachestore.remote.parts import PartsSource
from cachestore.store.format.catalog import NO_KEY, CatalogStart, KeyColumn, check_catalog_copy, read_catalog
from cachestore.store.format.index import Index, check
from cachestore.store.format.segment import SegmentContents, parse_contents
from cachestore.store.read.fetch import Io, Verify
from cachestore.store.read.reader import AnyKey, Reader
from cachestore.store.read.snapshot import Handover, Snapshot, hand_over, snapshot_of
from cachestore.store.read.stats import StoreStats, count_snapshot, newest_catalogs

if TYPE_CHECKING:
    from cachestore.store.format.locations import SegmentRef
    from cachestore.store.read.rows import Rows

T = TypeVar("T")
_log = logging.getLogger(__name__)

_UNITS: Final = {"kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40, "b": 1, "": 1}
_SIZE: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([a-z]*)", re.IGNORECASE)
_LOCATED_AT_ONCE: Final = 4096
_BATCHES_REQUESTED: Final = 2
"""How many batches are requested before they are needed, whatever their size."""


def open_address(path: str, *, verify: Verify, io: Io, local: str | Path | None, limit: int | str | None) -> "RemoteReader":
    """As `store.opener.open_reader`, for an address."""
    as_word("verify", verify, get_args(Verify))
    as_word("io", io, get_args(Io))
    if io == "mmap":
        cannot = "is for a store in a folder: parts of a local cache may be cut while they are mapped; leave it out"
        raise BadInput(f"{option('io', 'mmap')} {cannot}", option="io")
    folder = os.environ.get(LOCAL, "") if local is None else local
    if not folder:
        raise BadInput(
            f"{path} is an address: pass local=, a folder of this machine for copies of what is read, or set {LOCAL}",
            option="local",
        )
    return RemoteReader.open(parse_address("path", path), as_path("local", folder).absolute(), as_limit(limit), verify)


@contextmanager
def open_whole_address(path: str, name: str | None) -> "Generator[RemoteReader]":
    """As `store.opener.open_whole`, for an address."""
    with (
        tempfile.TemporaryDirectory(prefix="cachestore-", ignore_cleanup_errors=True) as folder,
        RemoteReader.open(parse_address("path", path), Path(folder), None, "first") as reader,
    ):
        for one in reader.inventory.catalogs if name is None else (name,):
            reader.bring_catalog(one, None)
        yield reader


def stats_of(address: str, name: str | None = None) -> StoreStats:
    """Count what is in the store at an address; with a `name`, only that data set. Raises as `store.opener.open_whole`."""
    with open_whole_address(address, name) as reader:
        return count_snapshot(reader.snapshot, newest_catalogs(reader.layout), reader.inventory.recipes)


def as_limit(given: int | str | None) -> int | None:
    """Return a limit in bytes: from a number, or from a text such as "200GB" or "1.5 GiB". None stays None. Raises BadInput."""
    if given is None:
        return None
    if isinstance(given, str):
        found = _SIZE.fullmatch(given.strip())
        if found is None or found[2].lower() not in _UNITS:
            refuse("limit", 'a number of bytes, or a text such as "200GB"', given)
        return int(float(found[1]) * _UNITS[found[2].lower()])
    return as_whole("limit", given, least=0)


class RemoteReader(Reader):
    """A store in an object store, as a `Reader`. It writes nothing there. Its layout has the copies of index and catalogs."""

    _client: HelperClient
    _cache: StoreCache
    _limit: int
    _source: PartsSource
    _inventory: Inventory | None
    """As it was when a snapshot was taken last; None in a copy of a reader before it is needed."""
    _catalogs: dict[tuple[str, int], tuple[int, CatalogStart]]
    """By name and generation, the size and the start of each catalog that is in use."""

    @classmethod
    def open(cls, address: Address, folder: Path, limit: int | None, verify: Verify) -> "RemoteReader":
        """Open the store at an address. Raises StoreNotFound, BadInput for a folder that cannot be a cache, WriteFailed, RemoteFailed."""
        client = HelperClient(address)
        self = cls.__new__(cls)
        downloads().hold(self)
        store_id = ask_until_sure(lambda: require_store(client)).get("store_id")
        if not is_store_id(store_id):
            raise FormatError(f"the marker of {address} has no valid id: remove it there, then push the store again")
        cache = StoreCache(folder, str(store_id))
        cache.open(str(address))
        limit = default_limit(folder) if limit is None else limit
        self._set_up(address, cache, limit, verify)
        self._use(self._load(None))
        return self

    def _set_up(self, address: Address, cache: StoreCache, limit: int, verify: Verify) -> None:
        self.layout = Layout(cache.root, address=str(address))
        self._client = HelperClient(address)
        self._cache = cache
        self._limit = limit
        self._source = PartsSource(address, cache, Room(cache.folder, limit))
        self._catalogs = {}
        self._inventory = None
        self._is_closed = False
        self._verify: Verify = verify
        self._io: Io = "pread"

    def _make_fetcher(self) -> PartsFetcher:
        return PartsFetcher(self._source, verify=self._verify)

    def __getstate__(self) -> dict[str, Any]:
        """As a Reader's, with the address and the folder. There is no credential in it."""
        where = {"address": str(self._client.address), "folder": str(self._cache.folder), "store_id": self._cache.store_id}
        given = {"given": hand_over(self.snapshot), "catalogs": self._catalogs}
        return {**where, "limit": self._limit, "verify": self._verify, **given}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Read the same snapshot in another process. Sends nothing, unless the copy of the index or of a catalog is gone or damaged."""
        cache = StoreCache(Path(state["folder"]), state["store_id"])
        cache.make_folders()
        self._set_up(parse_address("path", state["address"]), cache, state["limit"], state["verify"])
        try:
            snapshot = snapshot_of(self.layout, state["given"])
        except (FormatError, OSError) as error:
            if is_of_a_signal(error):
                raise
            snapshot = self._load(None)
        self._use(snapshot)
        for (name, generation), (size, start) in state["catalogs"].items():
            ask_until_sure(partial(self._copy_catalog, name, generation, size, start))

    def _load(self, earlier: Snapshot | None) -> Snapshot:
        return ask_until_sure(lambda: self._take_snapshot(earlier))

    def _take_snapshot(self, earlier: Snapshot | None) -> Snapshot:
        inventory = self._inventory = take_inventory(self._client)
        index = bring_index(inventory, self._copy_index)
        with closing(index) if index is not None else nullcontext():
            with suppress(OSError):
                for path in self.layout.indexes.iterdir() if index is not None else ():
                    if (name := parse_index(path.name)) is not None and name not in inventory.indexes:  # an older one
                        in_use.unlink(path, seconds=0.0)
            refs: Mapping[int, SegmentRef] = index.segments if index is not None else {}
            covered = {ref.digest for ref in refs.values()}
            vanished = frozenset(number for number, ref in refs.items() if inventory.segments.get(ref.digest) != ref.size_bytes)
            known: Mapping[str, SegmentContents] = earlier.uncovered if earlier is not None else {}
            uncovered: dict[str, SegmentContents] = {}
            for digest in sorted(inventory.segments.keys() - covered):
                with suppress(FormatError):  # its values count as missing
                    uncovered[digest] = known.get(digest) or self._contents(digest, inventory.segments[digest])
            given = Handover(index.verdict if index is not None else None, vanished, uncovered)
        return snapshot_of(self.layout, given)

    def _copy_index(self, name: IndexName, size: int) -> Index:
        return self._copy(self.layout.index(name), KEYS.index(name), size, lambda: Index(self.layout, check(self.layout, name)))

    def _copy(self, path: Path, key: Path, size: int, check: Callable[[], T]) -> T:
        here = identity_of(path)
        try:
            return check()
        except (FormatError, OSError) as error:
            if is_of_a_signal(error):
                raise
        with digesting(self._client, key) as digested:
            copy_file(path, self._cache.temporary, partial(fetch_file, digested, key_of(key), size), instead_of=here)
            return check()

    def _contents(self, digest: str, size: int) -> SegmentContents:
        start = remote_header(self._client)(digest, size)
        where = KEYS.segment(digest)
        return parse_contents(parse_start(start, size, where=where), size, where=where)

    def _contents_of(self, segment: "SegmentRef") -> SegmentContents:
        return ask_until_sure(lambda: self._contents(segment.digest, segment.size_bytes))

    @property
    def inventory(self) -> Inventory:
        """The files at the address, as they were when a snapshot was taken last."""
        if self._inventory is None:
            self._inventory = take_inventory(self._client)
        return self._inventory

    def names(self) -> list[str]:
        """As `Reader.names`, as the address was when the reader was opened or last refreshed."""
        _ = self.snapshot  # raises if it is closed
        return sorted(self.inventory.catalogs)

    def dataset(self, name: str, generation: int | None = None) -> "Rows":
        """As `Reader.dataset`, for the generations at the address: the newest is that of the last refresh."""
        from cachestore.store.read.rows import Rows

        _ = self.snapshot  # raises if it is closed
        number = None if generation is None else as_whole("generation", generation, least=0)
        found = self.bring_catalog(as_text("name", name), number)
        return Rows.of(read_catalog(self.layout.catalog(name, found), generation=found, io="mmap"))

    def bring_catalog(self, name: str, generation: int | None) -> int:
        """Bring a catalog into the cache and return its generation: the given or the newest. Raises BadInput for an unknown one."""
        tries = count()

        def bring() -> int:
            if next(tries):
                self._inventory = take_inventory(self._client)
            [[found]] = choose_generations(self.inventory.catalogs, name, generation, where=self.layout.shown).values()
            size = self.inventory.catalogs[name][found]
            start = remote_start(self._client, name, found, size)
            self._copy_catalog(name, found, size, start)
            return found

        return ask_until_sure(bring)

    def _copy_catalog(self, name: str, generation: int, size: int, start: CatalogStart) -> None:
        with suppress(OSError):
            make_folder(self.layout.catalog_folder(name))
        path = self.layout.catalog(name, generation)
        self._copy(path, KEYS.catalog(name, generation), size, partial(check_catalog_copy, path, start))
        self._catalogs[name, generation] = size, start

    def __contains__(self, key: AnyKey) -> bool:
        """As `Reader.__contains__`; looks into a newer snapshot before it says no, as a listing may have been an old one."""
        return super().__contains__(key) or not self.missing([key])

    def make_room_for(self, columns: Sequence[KeyColumn], called: str) -> None:
        """Remove parts of other data sets if there is no room for this one's values. Logs how much of it fits."""
        folder = self._cache.folder
        sizes = {ref.digest: ref.size_bytes for ref in self.snapshot.segments()}
        if used_bytes(folder) + sum(sizes.values()) <= self._limit:
            return
        needed = _bytes_by_segment(columns, self.snapshot)
        here = {part.digest: part.bytes for part in parts_in(folder) if part.store == self._cache.store_id}
        missing = sum(max(0, size - here.get(digest, 0)) for digest, size in needed.items())
        fits = make_room(folder, missing, self._limit, {(self._cache.store_id, digest) for digest in needed})
        total, lacking = sum(needed.values()), max(0, missing - fits)
        if lacking:
            percent = 100 * (total - lacking) // total
            _log.warning(
                "%d %% of %s fits in %s, within the limit of %s: every epoch downloads about %s; a larger limit avoids that",
                percent,
                called,
                folder,
                human_bytes(self._limit),
                human_bytes(lacking),
            )

    def can_prefetch(self, batches: int) -> bool:
        """As `Reader.can_prefetch`: always for the next two batches, and later while what was requested is below 256 MiB.

        Not after an iteration for which all values were in the cache, until one is missing: looking each of them up twice takes time.
        """
        return not self._source.is_filled and (batches <= _BATCHES_REQUESTED or self._source.has_room)

    def forget_prefetched(self) -> None:
        """Drop what was prefetched and not read."""
        self._source.forget()


def _bytes_by_segment(columns: Sequence[KeyColumn], snapshot: Snapshot) -> dict[str, int]:
    found: dict[str, int] = {}
    keys = [Key(key) for key in {key for column in columns for key in column.keys if key != NO_KEY}]
    for start in range(0, len(keys), _LOCATED_AT_ONCE):
        for locations in snapshot.find(keys[start : start + _LOCATED_AT_ONCE]):
            for location in locations[:1]:
                found[location.segment.digest] = found.get(location.segment.digest, 0) + location.size_bytes
    return found
