"""Read a store and return tensors. Takes no lock, writes nothing, leaves no thread running, and survives fork and spawn."""

import errno
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, get_args

from cachestore.core.arguments import as_many, as_text, as_whole, as_word
from cachestore.core.dtypes import RawTensor
from cachestore.core.errors import CacheStoreError, CorruptEntry, FormatError, MissingEntry, RemoteFailed
from cachestore.core.keys import Json, Key
from cachestore.core.tensors import to_numpy, to_torch
from cachestore.core.words import first_of, noun, plural
from cachestore.files.marker import check_for_reading, noticing_its_end
from cachestore.files.opening import is_of_a_signal
from cachestore.files.paths import Layout
from cachestore.store.format.catalog import KeyColumn
from cachestore.store.format.entry import split
from cachestore.store.format.index import Verdict
from cachestore.store.format.locations import Located, Location
from cachestore.store.format.segment import SegmentContents, read_contents
from cachestore.store.read.fetch import Checked, Fetcher, Io, Verify, is_gone, new_buffers
from cachestore.store.read.snapshot import Handover, Snapshot, hand_over, load_snapshot, open_layout, take_over
from cachestore.store.read.unfinished import list_data_sets

if TYPE_CHECKING:
    from typing_extensions import Self

    from cachestore.store.format.locations import SegmentRef
    from cachestore.store.read.rows import Rows

_lock = threading.RLock()
"""Held while keys are looked up, and while a newer snapshot replaces one whose index another thread may be using."""


def _renew_lock() -> None:
    """In a forked child: make a new lock, as the parent's thread that held the old one does not exist here."""
    global _lock  # noqa: PLW0603 - one lock for each process
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):  # not on Windows, which does not fork
    os.register_at_fork(after_in_child=_renew_lock)

AnyKey = Key | bytes | str
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Description:
    """What is known about an entry without reading its tensors."""

    key: Key
    tensors: Mapping[str, tuple[str, tuple[int, ...]]]
    """(safetensors dtype, shape) by name."""
    meta: Mapping[str, Json]
    size_bytes: int
    segment: str
    """Path of the segment, relative to the store."""

    def as_json(self) -> dict[str, Json]:
        """Return the object that `cachestore ls --json` lists."""
        tensors = {name: {"dtype": dtype, "shape": list(shape)} for name, (dtype, shape) in self.tensors.items()}
        return {"key": str(self.key), "bytes": self.size_bytes, "segment": self.segment, "tensors": tensors, "meta": dict(self.meta)}


class EntryFetcher(Protocol):
    """Reads the bytes of located entries: a `Fetcher` from a folder, `remote.fetch_parts` from an object store."""

    def fetch(self, key: Key, location: Location) -> memoryview:
        """As `Fetcher.fetch`."""
        ...

    def fetch_into(
        self, keys: Sequence[Key], located: Located, targets: Sequence[Sequence[memoryview]], *, side_by_side: bool = False
    ) -> None:
        """As `Fetcher.fetch_into`."""
        ...

    def prefetch(self, locations: Sequence[Location]) -> None:
        """As `Fetcher.prefetch`."""
        ...

    def close(self) -> None:
        """As `Fetcher.close`."""
        ...


class Reader:
    """A store as it was when it was opened or last refreshed. Picklable: another process gets the path and the snapshot.

    Several threads of one process may share a reader. After `close` every read raises CacheStoreError.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        verify: Verify = "first",
        io: Io = "pread",
        verdict: Verdict | None = None,
        handover: Handover | None = None,
        store_id: str = "",
    ) -> None:
        """Open a store for reading. Raises StoreNotFound, FormatError for a newer format.

        A `verdict` saves checking the index. With a `handover` nothing is listed: the store is seen as it was when that was made. With
        a `store_id`, another store at the path raises ReadFailed.
        """
        as_word("verify", verify, get_args(Verify))
        as_word("io", io, get_args(Io))
        self.layout = open_layout(replace(Layout.at(path), store_id=store_id))
        self._is_closed = False
        self._verify: Verify = verify
        self._io: Io = io
        self._use(take_over(self.layout, handover) if handover is not None else load_snapshot(self.layout, verdict=verdict))

    def _use(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._fetcher = self._make_fetcher()
        self._values: dict[str, dict[Key, Mapping[str, Json]]] = {}

    def _make_fetcher(self) -> EntryFetcher:
        return Fetcher(self.layout, Checked(self._snapshot.segments()), verify=self._verify, io=self._io)

    @property
    def snapshot(self) -> Snapshot:
        """The snapshot that every answer comes from. Raises CacheStoreError after `close`."""
        if self._is_closed:
            raise CacheStoreError(f"the store at {self.layout.root} is closed here; open it again")
        return self._snapshot

    def __getstate__(self) -> dict[str, Any]:
        """Return path, options, store id and snapshot. There is no descriptor, no lock and no data of entries in it."""
        options = {"verify": self._verify, "io": self._io, "store_id": self.layout.store_id}
        return {"path": str(self.layout.root), "options": options, "handover": hand_over(self.snapshot)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Open the same store in another process, with the same snapshot. It lists nothing and reads no header.

        Raises ReadFailed if another store is at the path.
        """
        Reader.__init__(self, state["path"], **state["options"], handover=state["handover"])

    def refresh(self) -> None:
        """Take a new snapshot, to see what was published since the last one."""
        self.take_newer({})

    def take_newer(self, known: Mapping[str, SegmentContents]) -> None:
        """As `refresh`, without reading the headers of `known` segments."""
        with _lock:
            self._replace(lambda before: self._load(replace(before, uncovered={**before.uncovered, **known})))

    def show(self, published: Mapping[str, SegmentContents]) -> None:
        """Show segments that were published here, at once: without a look at what others did."""
        with _lock:
            self._snapshot = self.snapshot.with_segments(published)

    def use(self, newer: Snapshot) -> None:
        """Use a newer snapshot."""
        with _lock:
            self._replace(lambda _before: newer)

    def _load(self, earlier: Snapshot) -> Snapshot:
        return load_snapshot(self.layout, earlier=earlier)

    def _replace(self, newer: Callable[[Snapshot], Snapshot]) -> None:
        before = self.snapshot
        self._fetcher.close()
        self._use(newer(before))
        before.close()

    def get(self, key: AnyKey, *, as_numpy: bool = False) -> dict[str, Any]:
        """Return the tensors of one entry, writable and the caller's own. Raises MissingEntry, CorruptEntry."""
        parsed = Key.parse(key)
        location = self.locate([parsed]).location(0)
        try:
            raw = self._fetch(parsed, location)
        except (CorruptEntry, FormatError, OSError) as error:
            if _ends_here(error):
                raise
            raw = self._try_all(parsed, self._find_all([parsed])[0], self._fetch)
        return to_numpy(raw) if as_numpy else to_torch(raw)

    def get_many(self, keys: Sequence[AnyKey], *, as_numpy: bool = False) -> list[dict[str, Any]]:
        """Return the tensors of many entries in the order of `keys`, but read in the order of their locations. No keys give an empty list.

        They are writable and the caller's own. Large entries share memory, 32 MiB at most: `clone` a tensor that you keep.
        Raises MissingEntry with the first missing keys and their count, or CorruptEntry.
        """
        convert = to_numpy if as_numpy else to_torch
        return [convert(raw) for raw in self.get_raw([Key.parse(key) for key in as_many("keys", keys, "several keys")])]

    def get_raw(self, keys: Sequence[Key]) -> list[dict[str, RawTensor]]:
        """As `get_many`, with each tensor as (dtype, shape, buffer)."""
        if self._io == "pread":
            located = self.locate(keys)
            runs = new_buffers([specs.size_bytes for specs in located.specs])
            if self.fill(keys, located, [[run] for run in runs]):
                return list(map(split, located.specs, runs))
        # After a failure each entry is read by itself, as its other copies may be elsewhere.
        copies = self._find_all(keys)
        order = sorted(range(len(keys)), key=lambda n: (copies[n][0].segment.digest, copies[n][0].offset))
        entries = {n: self._try_all(keys[n], copies[n], self._fetch) for n in order}
        return [entries[n] for n in range(len(keys))]

    def names(self) -> list[str]:
        """Return the names of the store's data sets, sorted."""
        _ = self.snapshot  # raises if it is closed
        return list_data_sets(self.layout)

    def dataset(self, name: str, generation: int | None = None) -> "Rows":
        """Return the rows of a data set: ids, keys and columns, without torch and without reading a value.

        Args:
            name: the data set's name.
            generation: as it was then; by default as it is now, with what sessions have flushed.

        Raises:
            BadInput: there is no such data set or generation.
            FormatError: a file of it is damaged or gone.
        """
        from cachestore.store.read.rows import Rows, read_data_set

        _ = self.snapshot  # raises if it is closed
        named, number = as_text("name", name), None if generation is None else as_whole("generation", generation, least=0)
        with noticing_its_end(self.layout):
            return Rows.of(read_data_set(self.layout, named, number))

    def missing(self, keys: Sequence[AnyKey], *, refresh: bool = True) -> list[Key]:
        """Return which of these keys are not in the store, each once and in order. Reads no entry.

        With `refresh` it also asks a newer snapshot, and raises ReadFailed if the store is no longer at its path.
        """
        asked = list(dict.fromkeys(map(Key.parse, keys)))
        absent = [key for key, locations in zip(asked, self._find(asked), strict=True) if not locations]
        if refresh and absent:
            self.refresh()
            return [key for key, locations in zip(absent, self._find(absent), strict=True) if not locations]
        if refresh:
            check_for_reading(self.layout)
        return absent

    def locate(self, keys: Sequence[Key]) -> Located:
        """Return the location of each entry's first copy, which tells what memory `fill` needs. Raises MissingEntry."""
        with _lock:
            try:
                located = self.snapshot.locate(keys)
            except (FormatError, FileNotFoundError):
                located = None
        return located if located is not None else Located.of([locations[0] for locations in self._find_all(keys)])

    def fill(self, keys: Sequence[Key], located: Located, targets: Sequence[Sequence[memoryview]], *, side_by_side: bool = False) -> bool:
        """Read entries, located by `locate`, directly into `targets`, and check them as `get` does.

        `targets` and `side_by_side` are those of `Fetcher.fetch_into`. Returns False if an entry is gone, damaged or cannot be read. Then
        discard what was written and call `get_raw`: it looks for other copies and into a newer snapshot, or raises the error. Raises
        CacheStoreError after `close`.
        """
        _ = self.snapshot
        try:
            self._fetcher.fetch_into(keys, located, targets, side_by_side=side_by_side)
        except (CorruptEntry, FormatError, OSError) as error:
            if _ends_here(error):
                raise
            return False
        return True

    def prefetch(self, keys: Sequence[AnyKey]) -> None:
        """Ask the system to read these entries into memory, without waiting: those of the next batch, while this one is used.

        It is a hint: missing keys and segments are ignored. Of a store in an object store the helper process brings them into the cache.
        """
        locations = [locations[0] for locations in self._find([Key.parse(key) for key in keys]) if locations]
        try:
            self._fetcher.prefetch(locations)
        except (CorruptEntry, FormatError, OSError) as error:
            if not is_gone(error) and not isinstance(error, RemoteFailed):
                raise

    def can_prefetch(self, batches: int) -> bool:
        """Whether `prefetch` may be called for a batch that is so many batches later. No: the system reads ahead in a folder by itself."""
        del batches
        return False

    def forget_prefetched(self) -> None:
        """Drop what was prefetched and not read. A store in a folder has nothing to drop."""

    def bring_catalog(self, name: str, generation: int | None) -> int | None:
        """Bring a catalog that lies elsewhere, and return its generation. None: in a folder it is where it belongs."""
        del name, generation
        return None

    def make_room_for(self, columns: Sequence[KeyColumn], called: str) -> None:
        """Make room in the local cache for the values of a data set. A store in a folder has no cache."""

    def _find(self, keys: Sequence[Key]) -> list[list[Location]]:
        """Return locations by this snapshot; by a newer one if its index is damaged, or was gone before a forked child could open it."""
        with _lock:
            try:
                return self.snapshot.find(keys)
            except (FormatError, FileNotFoundError):
                self.refresh()
                return self.snapshot.find(keys)

    def _find_all(self, keys: Sequence[Key]) -> list[list[Location]]:
        """As `_find`, and by a newer snapshot if a key is not in this one. Raises MissingEntry."""
        found = self._find(keys)
        if not all(found):
            self.refresh()
            found = self._find(keys)
        if missing := [key for key, locations in zip(keys, found, strict=True) if not locations]:
            named = first_of(missing)
            help_text = f"put it again (`cachestore precompute` puts what it made), or run {self.layout.command('repair')}"
            raise MissingEntry(
                f"{len(missing)} of {plural(len(keys), 'key')} {noun(len(missing), 'is', 'are')} not in {self.layout.shown}: {named};"
                f" {help_text}"
            )
        return found

    def _try_all(self, key: Key, locations: list[Location], use: Callable[[Key, Location], T]) -> T:
        """Return what `use` makes of an entry: of its first copy, else of another, else of those in a newer snapshot."""
        try:
            return _try_copies(key, locations, use)
        except (CorruptEntry, FormatError, OSError) as error:
            if not is_gone(error):
                raise
        self.refresh()
        return _try_copies(key, self._find_all([key])[0], use)

    def _fetch(self, key: Key, location: Location) -> dict[str, RawTensor]:
        return split(location.specs, self._fetcher.fetch(key, location))

    def describe(self, key: AnyKey) -> Description:
        """Return names, dtypes, shapes and the JSON value of an entry. Raises MissingEntry, FormatError."""
        parsed = Key.parse(key)
        return self._try_all(parsed, self._find_all([parsed])[0], self._describe)

    def _describe(self, key: Key, location: Location) -> Description:
        digest = location.segment.digest
        path = self.layout.segment(digest)
        if digest not in self._values:
            self._values[digest] = {entry.key: entry.meta for entry in self._contents_of(location.segment).entries}
        where = path.relative_to(self.layout.root)
        if key not in self._values[digest]:
            mend = self.layout.command("repair --refill")
            raise CorruptEntry(f"entry {key} is missing in {where}, where it was published; run {mend}")
        tensors = {spec.name: (spec.dtype, spec.shape) for spec in location.specs}
        return Description(key, tensors, self._values[digest][key], location.size_bytes, str(where))

    def _contents_of(self, segment: "SegmentRef") -> SegmentContents:
        return read_contents(self.layout.segment(segment.digest))

    def __contains__(self, key: AnyKey) -> bool:
        """Whether the store held this key when it was opened or refreshed."""
        return bool(self._find([Key.parse(key)])[0])

    def __len__(self) -> int:
        with _lock:
            return len(self.snapshot)

    def keys(self) -> Iterator[Key]:
        """All keys, each once."""
        return self.snapshot.keys()

    @property
    def generation(self) -> int:
        """The number of the index in use, or -1 without one."""
        return self.snapshot.generation

    def close(self) -> None:
        """Close every file. Calling it twice is fine."""
        self._is_closed = True
        self._fetcher.close()
        self._snapshot.close()

    def __enter__(self) -> "Self":
        """Return the open reader. Raises CacheStoreError if it is closed."""
        _ = self.snapshot
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _ends_here(error: Exception) -> bool:
    """Whether another copy or a newer snapshot is no help: a signal handler raised this, or an object store does not answer."""
    return is_of_a_signal(error) or (isinstance(error, RemoteFailed) and error.errno != errno.ENOENT)


def _try_copies(key: Key, locations: list[Location], use: Callable[[Key, Location], T]) -> T:
    """Return what the first copy gives that is not gone, damaged or unreadable. Raises the last copy's error if there is none."""
    *others, last = locations
    for location in others:
        try:
            return use(key, location)
        except (CorruptEntry, FormatError, OSError) as error:
            if _ends_here(error):
                raise
    return use(key, last)
