"""The index: an immutable LMDB file, key -> places of all copies, derived from segments. The only module that knows LMDB.

Numbers of segments and layouts never change from one index to the next, so extending one copies values as they are. A damaged LMDB file
kills the process that reads it (191 of 1,240 openings of damaged files did), so size and digest are checked before LMDB sees the file.
LMDB also refuses a second open of one file in a process, even in a forked child that inherited the first: `_open` keeps one environment
for each file and process, and closes inherited ones first.
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
from cachestore.files.checksum import Checksum, digest_file
from cachestore.files.opening import FileIdentity, opened, read_at
from cachestore.files.paths import IndexName, Layout, to_repair
from cachestore.storage.entry import Specs, TensorSpec, text_of
from cachestore.storage.places import PLACE_BYTES, Located, Place, SegmentRef, pack_place, unpack_first, unpack_firsts, unpack_places
from cachestore.storage.segment import StoredEntry

VERSION: Final = 1
_NUMBER: Final = struct.Struct(">I")
_STANDING: Final = struct.Struct("<IQ")
"""Ordinal and offset, as they stand in a packed place."""
_META: Final = struct.Struct("@16xI12xQ")
"""The start of an LMDB file where a pointer has eight bytes: a page's header, a magic number, a version, an address, the map's size."""
_META_WORD: Final = 8
_MAGIC: Final = 0xBEEFC0DE
_WALKED: Final = 1024
"""Entries that one look of a walk over all of them takes."""
_SPARE_BYTES: Final = 64 * 1024 * 1024
_OLD_ENGINE: Final[dict[str, Any]] = {"lib_version": 0} if int(lmdb.__version__.split(".")[0]) >= 3 else {}
"""py-lmdb 3 bundles two engines whose files exclude each other; the older one is what lmdb 1 and 2 can read."""

NewEntry = tuple[Key, str, int, int, Specs, bytes]
"""(key, segment digest, ordinal, offset, specs, checksum) of one entry that is added to an index."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """That a file was checked against its digest, and which file it was. Travels with a pickled handle; never believed for another file."""

    name: IndexName
    identity: FileIdentity


@dataclass(slots=True)
class _Opened:
    environment: lmdb.Environment
    pid: int
    users: int


_environments: dict[tuple[int, int], _Opened] = {}
"""By (device, inode). Entries of another pid were inherited by a fork and are closed before anything else is opened."""


def check(layout: Layout, name: IndexName) -> Verdict:
    """Compare an index with the digest in its name. Raises FormatError if they differ, FileNotFoundError if it is gone."""
    path = layout.index(name)
    with opened(path) as (descriptor, status):
        identity = FileIdentity.of(status)
        is_too_long = status.st_size > _longest(descriptor)
    if is_too_long or digest_file(path) != name.digest:
        raise FormatError(f"the index {path} does not match the digest in its name; run {layout.command('repair')} to rebuild it")
    return Verdict(name, identity)


def _longest(descriptor: int) -> float:
    """How many bytes an index may have by what LMDB notes at its start, so that nobody digests a terabyte of zeros behind it.

    LMDB keeps that note for each machine's word: of another machine's, anything may be.
    """
    raw = read_at(descriptor, _META.size, 0)
    if struct.calcsize("P") != _META_WORD or len(raw) < _META.size:
        return math.inf
    magic, map_bytes = _META.unpack(raw)
    return map_bytes if magic == _MAGIC else math.inf


_UNREADABLE: Final = (lmdb.Error, ValueError, TypeError, KeyError, struct.error)
"""What reading a damaged index raises."""

_STRANGE: Final = (lmdb.InvalidError, lmdb.CorruptedError, lmdb.NotFoundError, ValueError, TypeError, KeyError, struct.error)
"""What only its bytes can be the reason of: no other look will find an index in them. A file that cannot be opened is none of these."""


def is_no_index(error: FormatError) -> bool:
    """Whether a file that bears its digest is no index all the same, as somebody else's is; else it cannot be opened just now."""
    return isinstance(error.__cause__, _STRANGE)


class Index:
    """One index, open for reading; close it. A forked child opens its own when it first reads.

    Every look raises FormatError where the file is not the one that was checked, or not an index; FileNotFoundError where it is gone.
    """

    def __init__(self, layout: Layout, verdict: Verdict) -> None:
        self.verdict = verdict
        self._path = layout.index(verdict.name)
        self._pid = -1
        self._environment: lmdb.Environment | None = None
        self._giving_back: weakref.finalize[..., Index] | None = None
        """Gives the environment back in the process that opened it, at the latest when nobody has this object any more."""
        self._tables: dict[bytes, Any] = {}
        self._layouts: dict[int, Specs] = {}
        try:
            self.segments: Mapping[int, SegmentRef] = self._read_segments()
        except FormatError:
            self.close()
            raise

    def _attached(self) -> lmdb.Environment:
        """The environment in this process, with its tables. After a fork the inherited one is replaced first."""
        environment = self._environment if self._pid == os.getpid() else None
        if environment is None:
            with opened(self._path) as (_descriptor, status):
                if FileIdentity.of(status) != self.verdict.identity:
                    raise FormatError(f"{self._path} changed since it was checked; open the store again")
            if self._giving_back is not None:
                self._giving_back.detach()  # of the process that forked this one
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
        """A read transaction in this process, which no fork interrupts."""
        try:
            with _looking, self._attached().begin() as transaction:
                yield transaction, self._tables
        except _UNREADABLE as error:
            raise self._complaint(error) from error

    def _complaint(self, error: Exception) -> FormatError:
        return FormatError(f"{self._path} is not an index that can be read ({error}); run {to_repair(self._path)} to rebuild it")

    def _read_segments(self) -> dict[int, SegmentRef]:
        with self._reading() as (transaction, tables), transaction.cursor(db=tables[b"segments"]) as cursor:
            found = ((number, json.loads(bytes(value))) for number, value in cursor)
            return {
                _NUMBER.unpack(bytes(number))[0]: SegmentRef(digest, size, entries, origin)
                for number, (digest, size, entries, origin) in found
            }

    def find(self, keys: Sequence[Key]) -> list[list[Place]]:
        """The places of each key, in the order of `keys`; an empty list for a key that the index does not hold."""
        try:  # as `_reading` does, without the third of the time that a generator takes
            with _looking, self._attached().begin() as transaction:
                get, entries = transaction.get, self._tables[b"entries"]
                found = [get(key, db=entries) for key in keys]
            return [self._places(value) if value is not None else [] for value in found]
        except _UNREADABLE as error:
            raise self._complaint(error) from error

    def locate(self, keys: Sequence[Key]) -> Located | None:
        """The first copy of each key, in the order of `keys`: half the time of `find`. None where the index lacks one of them."""
        try:
            with _looking:
                environment = self._attached()
                with environment.begin(self._tables[b"entries"]) as transaction:
                    values: list[Any] = list(map(transaction.get, keys))
            if None in values:
                return None
            if len(values) == 1:  # a get; in the way of many it costs twice as much
                return self._located(*unpack_first(values[0]))
            if not values:
                return Located.of(())
            numbers, ordinals, offsets, layouts, checksums = zip(*unpack_firsts(values), strict=True)
            refs, known = self.segments, self._layouts
            if not known.keys() >= set(layouts):
                self._read_layouts(layouts)
            return Located(tuple([refs[n] for n in numbers]), ordinals, offsets, tuple([known[n] for n in layouts]), checksums)
        except _UNREADABLE as error:
            raise self._complaint(error) from error

    def _located(self, number: int, ordinal: int, offset: int, layout: int, checksum: bytes) -> Located:
        if layout not in self._layouts:
            self._read_layouts([layout])
        return Located((self.segments[number],), (ordinal,), (offset,), (self._layouts[layout],), (checksum,))

    def _read_layouts(self, layouts: Iterable[int]) -> None:
        with self._reading() as (transaction, tables):
            for layout in layouts:
                raw = transaction.get(_NUMBER.pack(layout), db=tables[b"layouts"])
                found = json.loads(bytes(raw or b"[]"))
                self._layouts[layout] = tuple(TensorSpec(name, dtype, tuple(shape)) for name, dtype, shape in found)

    def items(self) -> Iterator[tuple[Key, list[Place]]]:
        """All keys with their places, in the order of keys."""
        for raw, value in self.raw_entries():
            yield Key(raw), self._places(value)

    def raw_entries(self) -> Iterator[tuple[bytes, bytes]]:
        """Keys and packed places as they stand, for the next index. Looks at some at a time, so as not to hold up a fork in between."""
        following: bytes | None = b""
        while following is not None:
            with self._reading() as (transaction, tables), transaction.cursor(db=tables[b"entries"]) as cursor:
                cursor.set_range(following)
                some = [(bytes(raw), bytes(value)) for raw, value in islice(cursor.iternext(), _WALKED + 1)]
            following = some.pop()[0] if len(some) > _WALKED else None
            yield from some

    def raw_keys(self) -> bytes:
        """All keys in their order, one after the other."""
        with self._reading() as (transaction, tables), transaction.cursor(db=tables[b"entries"]) as cursor:
            return b"".join(cursor.iternext(keys=True, values=False))

    def table_digests(self) -> dict[int, bytes]:
        """By number, what `digest_table` gives of the entries that the index shows in a segment; none of one without entries.

        One walk over the index that keeps nothing of an entry: about 1 µs for each.
        """
        states: dict[bytes, Checksum] = {}
        numbers = {number.to_bytes(4, "little"): number for number in self.segments}
        layouts = {number.to_bytes(4, "little"): text for text, number in self.raw_layouts().items()}
        try:
            for key, value in self.raw_entries():
                for start in range(0, len(value), PLACE_BYTES):
                    state = states.get(value[start : start + 4])
                    if state is None:
                        state = states[value[start : start + 4]] = Checksum()
                    # number 4, ordinal and offset 12, layout 4, checksum 16
                    text = layouts[value[start + 16 : start + 20]]
                    state.update(b"".join((key, value[start + 4 : start + 16], value[start + 20 : start + PLACE_BYTES], text)))
            return {numbers[number]: state.digest() for number, state in states.items()}
        except KeyError as error:  # a number that no segment or layout bears
            raise self._complaint(error) from error

    def raw_layouts(self) -> dict[bytes, int]:
        """Numbers of layouts by their text, for the next index."""
        with self._reading() as (transaction, tables), transaction.cursor(db=tables[b"layouts"]) as cursor:
            return {bytes(value): _NUMBER.unpack(bytes(number))[0] for number, value in cursor}

    def __len__(self) -> int:
        with self._reading() as (transaction, tables):
            return transaction.stat(tables[b"entries"])["entries"]

    def _places(self, value: bytes) -> list[Place]:
        layouts, segments, packed = self._layouts, self.segments, unpack_places(value)
        for _segment, _ordinal, _offset, layout, _checksum in packed:
            if layout not in layouts:
                self._read_layouts([layout])
        return [Place(segments[number], ordinal, offset, layouts[layout], checksum) for number, ordinal, offset, layout, checksum in packed]

    def close(self) -> None:
        """Give the file back. Calling it twice is fine; so is reading afterwards, which opens it again."""
        giving_back, self._environment, self._giving_back = self._giving_back, None, None
        if giving_back is not None and (found := giving_back.detach()) is not None:
            _release(*found[2])


def digest_table(entries: Iterable[StoredEntry]) -> bytes:
    """A digest over where a segment's entries stand, how they are laid out, and their checksums, in the order of keys."""
    state = Checksum()
    for entry in sorted(entries, key=lambda entry: entry.key):
        state.update(b"".join((entry.key, _STANDING.pack(entry.ordinal, entry.offset), entry.checksum, text_of(entry.specs))))
    return state.digest()


def build(
    layout: Layout, number: int, *, base: Index | None, dropped: frozenset[int], segments: Iterable[SegmentRef], entries: Iterable[NewEntry]
) -> tuple[Path, IndexName]:
    """Write an index: the entries of `base` without those in `dropped` segments, and the new ones.

    Built on a private path in one transaction, in the order of keys. Returns that path, and the name to publish it under.
    Raises WriteFailed, and leaves no file then.
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
    try:  # not more than four times what is expected is reserved, as `ulimit -v` refuses what is endless
        _write(temporary, tables, map_bytes=_SPARE_BYTES + (4 * size >> 20 << 20))
        return temporary, IndexName(number, digest_file(temporary))
    except (lmdb.Error, OSError) as error:
        with suppress(OSError):
            temporary.unlink()
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
        text = text_of(specs)
        if text not in layouts:
            layouts[text] = following
            following += 1
        packed[bytes(key)] = packed.get(bytes(key), b"") + pack_place(numbers[segment], ordinal, offset, layouts[text], checksum)
    return packed


def _merged(
    base: Index | None, fresh: dict[bytes, bytes], dropped: frozenset[int], digests: Mapping[int, str]
) -> Iterator[tuple[bytes, bytes]]:
    """All (key, places) in the order of keys; copies of one key in the order of their segments' names."""
    waiting = sorted(fresh.items(), reverse=True)
    for key, value in base.raw_entries() if base is not None else ():
        while waiting and waiting[-1][0] < key:
            following, places = waiting.pop()
            yield following, _sorted_copies(places, dropped, digests)
        joined = value + waiting.pop()[1] if waiting and waiting[-1][0] == key else value
        if kept := _sorted_copies(joined, dropped, digests):
            yield key, kept
    for following, places in reversed(waiting):
        yield following, _sorted_copies(places, dropped, digests)


def _sorted_copies(value: bytes, dropped: frozenset[int], digests: Mapping[int, str]) -> bytes:
    places = unpack_places(value)
    if len(places) == 1 and places[0][0] not in dropped:
        return value
    kept = sorted((place for place in places if place[0] not in dropped), key=lambda place: (digests[place[0]], place[1]))
    return b"".join(pack_place(*place) for place in kept)


_looking = threading.RLock()
"""Held while LMDB is at work. Two threads that open one file at the same moment share it; and a process forks when no thread is inside
of LMDB, since closing an inherited environment waits for looks that nobody ends in the child. Never held over a `yield`."""


def _hold_still() -> None:
    _looking.acquire()


def _go_on() -> None:
    _looking.release()


def _renew_lock() -> None:
    """In a forked child: a lock of its own, as after any fork."""
    global _looking  # noqa: PLW0603 - one lock for each process
    _looking = threading.RLock()


if hasattr(os, "register_at_fork"):  # not on Windows, which does not fork
    os.register_at_fork(before=_hold_still, after_in_parent=_go_on, after_in_child=_renew_lock)


def _open(path: Path, identity: FileIdentity) -> lmdb.Environment:
    pid = os.getpid()
    with _looking:
        for file, held in list(_environments.items()):
            if held.pid != pid:
                del _environments[file]
                held.environment.close()
        file = (identity.device, identity.inode)
        while (held := _environments.get(file)) is not None:
            held.users += 1
            if _environments.get(file) is held:  # else it was given back in between, by the finalizer of an index that nobody had any more
                return held.environment
        environment = lmdb.open(
            str(path), subdir=False, readonly=True, lock=False, max_dbs=4, max_spare_txns=0, readahead=False, **_OLD_ENGINE
        )
        _environments[file] = _Opened(environment, pid, 1)
        return environment


def _release(identity: FileIdentity, pid: int) -> None:
    """Give an environment back that this process opened; what was inherited by a fork is closed when another one is opened."""
    if pid != os.getpid():
        return
    file = (identity.device, identity.inode)
    with _looking:
        held = _environments.get(file)
        if held is None or held.pid != pid:
            return
        held.users -= 1
        if held.users == 0:
            del _environments[file]  # first: whatever happens then, nobody finds one that is closed
            held.environment.close()
