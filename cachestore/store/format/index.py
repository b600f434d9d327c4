"""The index: an immutable LMDB file that maps keys to the locations of all copies. It is derived from the segments.

Only this module uses LMDB. The numbers of segments and layouts never change from one index to the next, so a new index copies values
unchanged. A damaged LMDB file kills the process that reads it (191 of 1,240 openings of damaged files did), so size and digest are checked
before LMDB opens the file. LMDB also refuses to open a file twice in one process, even in a forked child that inherited the first: `_open`
keeps one environment for each file and process, and closes inherited ones first.
"""

import json
import math
import os
import struct
import threading
import weakref
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final

import lmdb

from cachestore.core.errors import FormatError, WriteFailed, numbered
from cachestore.core.keys import Key, canonical
from cachestore.files import in_use
from cachestore.files.checksum import Checksum, digest_file
from cachestore.files.opening import FileIdentity, opened, read_at
from cachestore.files.paths import IndexName, Layout, to_repair
from cachestore.store.format.entry import Specs, TensorSpec, specs_of
from cachestore.store.format.locations import (
    LOCATION_BYTES,
    Located,
    Location,
    SegmentRef,
    pack_location,
    unpack_first,
    unpack_firsts,
    unpack_locations,
)
from cachestore.store.format.segment import StoredEntry

VERSION: Final = 1
_NUMBER: Final = struct.Struct(">I")
_STANDING: Final = struct.Struct("<IQ")
"""Ordinal and offset, as in a packed entry location."""
_META: Final = struct.Struct("@16xI12xQ")
"""The start of an LMDB file with 8-byte pointers: page header, magic number, version, address, map size."""
_META_WORD: Final = 8
_MAGIC: Final = 0xBEEFC0DE
_WALKED: Final = 1024
"""How many entries a walk over the index reads at a time."""
_SPARE_BYTES: Final = 64 * 1024 * 1024
_OLD_ENGINE: Final[dict[str, Any]] = {"lib_version": 0} if int(lmdb.__version__.split(".")[0]) >= 3 else {}
"""py-lmdb 3 has two engines with incompatible files; lmdb 1 and 2 can read those of the older one."""
NewEntry = tuple[Key, str, int, int, Specs, bytes]
"""(key, segment digest, ordinal, offset, specs, checksum) of an entry to add to an index."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """States that a file matched its digest, and which file it was. It travels with a pickled handle, and counts for no other file."""

    name: IndexName
    identity: FileIdentity


@dataclass(slots=True)
class _Opened:
    environment: lmdb.Environment
    pid: int
    users: int


_environments: dict[tuple[int, int], _Opened] = {}
"""By (device, inode). Entries of another pid were inherited by a fork, and are closed before anything else is opened."""


def check(layout: Layout, name: IndexName) -> Verdict:
    """Compare an index with the digest in its name. Raises FormatError if they differ, FileNotFoundError if it is gone."""
    path = layout.index(name)
    with opened(path) as (descriptor, status):
        identity = FileIdentity.of(status)
        start = read_at(descriptor, _META.size, 0)
    longest = math.inf  # by the LMDB header, if it has this machine's word size and byte order: no terabyte of zeros behind it is digested
    if struct.calcsize("P") == _META_WORD and len(start) == _META.size:
        magic, map_bytes = _META.unpack(start)
        longest = map_bytes if magic == _MAGIC else math.inf
    if identity.size > longest or digest_file(path) != name.digest:
        raise FormatError(f"the index {path} does not match the digest in its name; run {layout.command('repair')} to rebuild it")
    return Verdict(name, identity)


_UNREADABLE: Final = (lmdb.Error, ValueError, TypeError, KeyError, struct.error)
"""What reading a damaged index may raise."""
_STRANGE: Final = (lmdb.InvalidError, lmdb.CorruptedError, lmdb.NotFoundError, ValueError, TypeError, KeyError, struct.error)
"""What only the file's bytes can cause, so that trying again is useless. Failing to open the file is not among these."""


class NoIndex(FormatError):
    """A file that matches its digest is no index at all. Any other error means that it cannot be opened right now."""


class Index:
    """An open index; close it. A forked child opens its own when it first reads.

    Every look-up raises FormatError if the file is not the checked one or not an index, and FileNotFoundError if it is gone.
    """

    def __init__(self, layout: Layout, verdict: Verdict) -> None:
        self.verdict = verdict
        self._path = layout.index(verdict.name)
        self._pid = -1
        self._environment: lmdb.Environment | None = None
        self._giving_back: weakref.finalize[..., Index] | None = None
        """Releases the environment in the process that opened it, at the latest when this object is garbage."""
        self._tables: dict[bytes, Any] = {}
        self._layouts: dict[int, Specs] = {}
        try:
            with self._reading() as (transaction, tables), transaction.cursor(db=tables[b"segments"]) as cursor:
                self.segments: Mapping[int, SegmentRef] = {
                    _NUMBER.unpack(bytes(number))[0]: SegmentRef(*json.loads(bytes(value))) for number, value in cursor
                }
        except FormatError:
            self.close()
            raise

    def _attached(self) -> lmdb.Environment:
        """The environment of this process, with its tables. After a fork it replaces the inherited one."""
        environment = self._environment if self._pid == os.getpid() else None
        if environment is None:
            with opened(self._path) as (_descriptor, status):
                if FileIdentity.of(status) != self.verdict.identity:
                    raise FormatError(f"{self._path} changed since it was checked; open the store again")
            if self._giving_back is not None:
                self._giving_back.detach()  # it belongs to the parent process
            self._environment = environment = _open(self._path, self.verdict.identity)
            self._pid = os.getpid()
            self._giving_back = weakref.finalize(self, _release, self.verdict.identity, self._pid)
            self._giving_back.atexit = False
            self._tables = {}
        if not self._tables:
            self._tables = {name: environment.open_db(name, create=False) for name in (b"entries", b"segments", b"layouts")}
        return environment

    @contextmanager
    def _reading(self) -> Generator[tuple[lmdb.Transaction, Mapping[bytes, Any]], None, None]:
        """A read transaction in this process. No fork happens during it."""
        try:
            with _lock, self._attached().begin() as transaction:
                yield transaction, self._tables
        except _UNREADABLE as error:
            raise self._complaint(error) from error

    def _complaint(self, error: Exception) -> FormatError:
        kind = NoIndex if isinstance(error, _STRANGE) else FormatError
        return kind(f"{self._path} is not an index that can be read ({error}); run {to_repair(self._path)} to rebuild it")

    def find(self, keys: Sequence[Key]) -> list[list[Location]]:
        """The locations of each key, in the order of `keys`; an empty list for a key that the index lacks."""
        try:  # as `_reading`, without its generator, which takes a third of the time
            with _lock, self._attached().begin() as transaction:
                get, entries = transaction.get, self._tables[b"entries"]
                found = [get(key, db=entries) for key in keys]
            return [self._locations(value) if value is not None else [] for value in found]
        except _UNREADABLE as error:
            raise self._complaint(error) from error

    def locate(self, keys: Sequence[Key]) -> Located | None:
        """The first copy of each key, in the order of `keys`. None if the index lacks one of them. Takes half the time of `find`."""
        try:
            with _lock:
                environment = self._attached()
                with environment.begin(self._tables[b"entries"]) as transaction:
                    values: list[Any] = list(map(transaction.get, keys))
            if None in values:
                return None
            if len(values) == 1:  # one key: the way below would cost twice as much
                number, ordinal, offset, layout, checksum = unpack_first(values[0])
                if layout not in self._layouts:
                    self._read_layouts([layout])
                return Located((self.segments[number],), (ordinal,), (offset,), (self._layouts[layout],), (checksum,))
            if not values:
                return Located.of(())
            numbers, ordinals, offsets, layouts, checksums = zip(*unpack_firsts(values), strict=True)
            refs, known = self.segments, self._layouts
            if not known.keys() >= set(layouts):
                self._read_layouts(layouts)
            return Located(tuple([refs[n] for n in numbers]), ordinals, offsets, tuple([known[n] for n in layouts]), checksums)
        except _UNREADABLE as error:
            raise self._complaint(error) from error

    def _read_layouts(self, layouts: Iterable[int]) -> None:
        with self._reading() as (transaction, tables):
            for layout in layouts:
                raw = transaction.get(_NUMBER.pack(layout), db=tables[b"layouts"])
                found = json.loads(bytes(raw or b"[]"))
                self._layouts[layout] = specs_of(tuple(TensorSpec(name, dtype, tuple(shape)) for name, dtype, shape in found))

    def items(self) -> Iterator[tuple[Key, list[Location]]]:
        """All keys with their locations, in the order of keys."""
        for raw, value in self.raw_entries():
            yield Key(raw), self._locations(value)

    def raw_entries(self) -> Iterator[tuple[bytes, bytes]]:
        """Keys and packed locations, for the next index. Reads some at a time, so that a fork need not wait long."""
        following: bytes | None = b""
        while following is not None:
            with self._reading() as (transaction, tables), transaction.cursor(db=tables[b"entries"]) as cursor:
                cursor.set_range(following)
                some = [(bytes(raw), bytes(value)) for raw, value in islice(cursor.iternext(), _WALKED + 1)]
            following = some.pop()[0] if len(some) > _WALKED else None
            yield from some

    def raw_keys(self) -> bytes:
        """All keys in their order, concatenated."""
        with self._reading() as (transaction, tables), transaction.cursor(db=tables[b"entries"]) as cursor:
            return b"".join(cursor.iternext(keys=True, values=False))

    def table_digests(self) -> dict[int, bytes]:
        """By segment number, the `digest_table` of the entries that the index shows there. One walk, about 1 µs for each entry."""
        states: dict[bytes, Checksum] = {}
        numbers = {number.to_bytes(4, "little"): number for number in self.segments}
        layouts = {number.to_bytes(4, "little"): text for text, number in self.raw_layouts().items()}
        try:
            for key, value in self.raw_entries():
                for start in range(0, len(value), LOCATION_BYTES):
                    state = states.get(value[start : start + 4])
                    if state is None:
                        state = states[value[start : start + 4]] = Checksum()
                    # segment number 4 bytes, ordinal and offset 12, layout 4, checksum 16
                    text = layouts[value[start + 16 : start + 20]]
                    state.update(b"".join((key, value[start + 4 : start + 16], value[start + 20 : start + LOCATION_BYTES], text)))
            return {numbers[number]: state.digest() for number, state in states.items()}
        except KeyError as error:  # the number of no segment or layout
            raise self._complaint(error) from error

    def raw_layouts(self) -> dict[bytes, int]:
        """The number of each layout by its text, for the next index."""
        with self._reading() as (transaction, tables), transaction.cursor(db=tables[b"layouts"]) as cursor:
            return {bytes(value): _NUMBER.unpack(bytes(number))[0] for number, value in cursor}

    def __len__(self) -> int:
        with self._reading() as (transaction, tables):
            return transaction.stat(tables[b"entries"])["entries"]

    def _locations(self, value: bytes) -> list[Location]:
        layouts, segments, packed = self._layouts, self.segments, unpack_locations(value)
        for _segment, _ordinal, _offset, layout, _checksum in packed:
            if layout not in layouts:
                self._read_layouts([layout])
        return [
            Location(segments[number], ordinal, offset, layouts[layout], checksum) for number, ordinal, offset, layout, checksum in packed
        ]

    def close(self) -> None:
        """Release the file. May be called twice; reading afterwards opens it again."""
        giving_back, self._environment, self._giving_back = self._giving_back, None, None
        if giving_back is not None and (found := giving_back.detach()) is not None:
            _release(*found[2])


def digest_table(entries: Iterable[StoredEntry]) -> bytes:
    """A digest over the location, layout and checksum of each entry of a segment, in the order of keys."""
    state = Checksum()
    for entry in sorted(entries, key=lambda entry: entry.key):
        state.update(b"".join((entry.key, _STANDING.pack(entry.ordinal, entry.offset), entry.checksum, entry.specs.text)))
    return state.digest()


def build(
    layout: Layout, number: int, *, base: Index | None, dropped: frozenset[int], segments: Iterable[SegmentRef], entries: Iterable[NewEntry]
) -> tuple[Path, IndexName]:
    """Write an index: the entries of `base` outside the `dropped` segments, and the new ones. A WriteFailed leaves no file.

    It is built on a private path in one transaction, in the order of keys. Returns the path, and the name to publish it under.
    """
    temporary = layout.new_temporary()
    before: Mapping[int, SegmentRef] = base.segments if base is not None else {}
    kept = {n: ref for n, ref in before.items() if n not in dropped}
    everything = {**kept, **dict(enumerate(segments, max(before, default=-1) + 1))}
    layouts = base.raw_layouts() if base is not None else {}
    fresh = _pack_new(entries, {ref.digest: n for n, ref in everything.items()}, layouts)
    tables = {
        b"segments": (
            (_NUMBER.pack(n), canonical([ref.digest, ref.size_bytes, ref.entries, ref.origin])) for n, ref in sorted(everything.items())
        ),
        b"layouts": ((_NUMBER.pack(n), text) for text, n in sorted(layouts.items(), key=lambda item: item[1])),
        b"entries": _merged(base, fresh, dropped, {n: ref.digest for n, ref in everything.items()}),
    }
    size = base.verdict.identity.size if base is not None else 0
    size += sum(len(value) + 64 for value in fresh.values()) + sum(len(text) + 64 for text in layouts) + 256 * len(everything)
    try:  # reserves at most about four times the expected size, as `ulimit -v` refuses very large maps
        _write(temporary, tables, map_bytes=_SPARE_BYTES + (4 * size >> 20 << 20))
        return temporary, IndexName(number, digest_file(temporary))
    except (lmdb.Error, OSError) as error:
        with suppress(OSError):
            in_use.unlink(temporary)
        what = f"cannot write the index {temporary}, which takes about {size} bytes: {error}"
        raise numbered(
            WriteFailed(f"{what}; nothing was reported as stored. Run the same command again: it continues from here"), error
        ) from error


def _write(path: Path, tables: Mapping[bytes, Iterable[tuple[bytes, bytes]]], *, map_bytes: int) -> None:
    environment = lmdb.open(str(path), map_size=map_bytes, subdir=False, lock=False, sync=False, metasync=False, max_dbs=4, **_OLD_ENGINE)
    try:
        handles = {name: environment.open_db(name) for name in tables}
        with environment.begin(write=True) as transaction:
            for name, items in tables.items():
                with transaction.cursor(db=handles[name]) as cursor:
                    cursor.putmulti(items, append=True)
    finally:
        environment.close()


def _pack_new(entries: Iterable[NewEntry], numbers: Mapping[str, int], layouts: dict[bytes, int]) -> dict[bytes, bytes]:
    packed: dict[bytes, bytes] = {}
    following = max(layouts.values(), default=-1) + 1
    for key, segment, ordinal, offset, specs, checksum in entries:
        text = specs.text
        if text not in layouts:
            layouts[text] = following
            following += 1
        packed[bytes(key)] = packed.get(bytes(key), b"") + pack_location(numbers[segment], ordinal, offset, layouts[text], checksum)
    return packed


def _merged(
    base: Index | None, fresh: dict[bytes, bytes], dropped: frozenset[int], digests: Mapping[int, str]
) -> Iterator[tuple[bytes, bytes]]:
    """All (key, packed locations) in the order of keys; the copies of a key in the order of their segments' names."""
    waiting = sorted(fresh.items(), reverse=True)
    for key, value in base.raw_entries() if base is not None else ():
        while waiting and waiting[-1][0] < key:
            following, locations = waiting.pop()
            yield following, _sorted_copies(locations, dropped, digests)
        joined = value + waiting.pop()[1] if waiting and waiting[-1][0] == key else value
        if kept := _sorted_copies(joined, dropped, digests):
            yield key, kept
    for following, locations in reversed(waiting):
        yield following, _sorted_copies(locations, dropped, digests)


def _sorted_copies(value: bytes, dropped: frozenset[int], digests: Mapping[int, str]) -> bytes:
    locations = unpack_locations(value)
    if len(locations) == 1 and locations[0][0] not in dropped:
        return value
    kept = sorted(
        (location for location in locations if location[0] not in dropped), key=lambda location: (digests[location[0]], location[1])
    )
    return b"".join(pack_location(*location) for location in kept)


_lock = threading.RLock()
"""Held while LMDB works. So threads that open one file share it, and the process forks only when no thread is inside LMDB: in the child,
closing the inherited environment would wait forever for that thread's transaction. No iterator holds it between two items."""


def _hold_still() -> None:
    _lock.acquire()


def _go_on() -> None:
    _lock.release()


def _renew_lock() -> None:
    global _lock  # noqa: PLW0603 - one lock for each process
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):  # not on Windows, which does not fork
    os.register_at_fork(before=_hold_still, after_in_parent=_go_on, after_in_child=_renew_lock)


def _open(path: Path, identity: FileIdentity) -> lmdb.Environment:
    pid = os.getpid()
    with _lock:
        for file, held in list(_environments.items()):
            if held.pid != pid:
                del _environments[file]
                held.environment.close()
        file = (identity.device, identity.inode)
        while (held := _environments.get(file)) is not None:
            held.users += 1
            if _environments.get(file) is held:  # else the finalizer of an unused index released it in between
                return held.environment
        environment = lmdb.open(
            str(path), subdir=False, readonly=True, lock=False, max_dbs=4, max_spare_txns=0, readahead=False, **_OLD_ENGINE
        )
        _environments[file] = _Opened(environment, pid, 1)
        return environment


def _release(identity: FileIdentity, pid: int) -> None:
    """Release an environment that this process opened. Inherited ones are closed when another one is opened."""
    if pid != os.getpid():
        return
    file = (identity.device, identity.inode)
    with _lock:
        held = _environments.get(file)
        if held is None or held.pid != pid:
            return
        held.users -= 1
        if held.users == 0:
            del _environments[file]  # first, so that no later call finds a closed one
            held.environment.close()
