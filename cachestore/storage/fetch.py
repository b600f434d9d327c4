"""Fetching the bytes of entries: positional reads into fresh buffers or the caller's, checked against the key. No thread, no lock."""

import errno
import mmap
import os
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import Final, Literal, NamedTuple, NoReturn

from cachestore.errors import CorruptEntry, FormatError
from cachestore.files.container import ALIGNMENT
from cachestore.files.opening import (
    ask_for,
    ask_for_mapped,
    descriptor_limit,
    open_regular,
    read_at,
    read_present,
    read_scattered,
    refuse_reading,
)
from cachestore.files.paths import Layout
from cachestore.keys import KEY_BYTES, Key
from cachestore.storage.entry import checksum_of, size_of
from cachestore.storage.places import Place, SegmentRef

Verify = Literal["first", "always", "never"]
Io = Literal["pread", "mmap"]

_DESCRIPTORS: Final = 256
_RUN_BYTES: Final = 256 * 1024
"""Read at once at most, unless one entry is larger: what was read is checked while it is still in the processor's cache."""
_RUN_ENTRIES: Final = 64
_NOWHERE: Final = memoryview(bytearray(ALIGNMENT))
"""Takes the filler between neighbours. Never looked at."""
_NOBODY: Final = Key(bytes(KEY_BYTES))


class Checked:
    """Which entries were checked once: one bit each, in memory that forked workers share with their parent."""

    def __init__(self, segments: Sequence[SegmentRef]) -> None:
        """Room for all entries of these segments; others are never remembered."""
        self._first: dict[str, int] = {}
        total = 0
        for ref in segments:
            self._first[ref.digest] = total
            total += ref.entries
        self._bits = mmap.mmap(-1, total // 8 + 1)

    def holds(self, place: Place) -> bool:
        """Whether this copy was checked."""
        first = self._first.get(place.segment.digest)
        if first is None:
            return False
        bit = first + place.ordinal
        return self._bits[bit >> 3] >> (bit & 7) & 1 == 1

    def add(self, place: Place) -> None:
        """Remember that this copy is good. Two workers at once may lose a bit: that entry is checked again."""
        first = self._first.get(place.segment.digest)
        if first is not None:
            bit = first + place.ordinal
            self._bits[bit >> 3] |= 1 << (bit & 7)


class Wanted(NamedTuple):
    """One copy of an entry, and where its tensors are to go: a writable buffer for each of `place.specs`, in their order."""

    key: Key
    place: Place
    targets: Sequence[memoryview]


class _Run(NamedTuple):
    """Entries that one read can take: next to each other in one segment."""

    start: int
    size: int
    entries: list[Wanted]

    def buffers(self) -> Sequence[memoryview]:
        """Where the bytes go, those between entries to nowhere."""
        if len(self.entries) == 1:
            return self.entries[0].targets
        buffers: list[memoryview] = []
        end = self.start
        for _key, place, targets in self.entries:
            if place.offset > end:
                buffers.append(_NOWHERE[: place.offset - end])
            buffers += targets
            end = place.offset + place.size_bytes
        return buffers


class _Segment:
    """An open segment, closed when nobody uses it any more: a descriptor closed under a read would be another file's soon."""

    __slots__ = ("descriptor", "mapping", "used")

    def __init__(self, descriptor: int, mapping: mmap.mmap | None, used: int) -> None:
        self.descriptor = descriptor
        self.mapping = mapping
        self.used = used

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        close(self.descriptor)  # held here, as at the end of the interpreter modules are emptied before this is called


class Fetcher:
    """Reads entries of one store. Holds at most min(256, RLIMIT_NOFILE / 4) segments open; a forked child opens its own.

    Several threads may fetch.
    """

    def __init__(self, layout: Layout, checked: Checked, *, verify: Verify = "first", io: Io = "pread") -> None:
        """Opens nothing yet."""
        self._layout = layout
        self._verify: Verify = verify
        self._io: Io = io
        self._limit = max(1, min(_DESCRIPTORS, descriptor_limit() // 4))
        self._pid = os.getpid()
        self._uses = count()
        self._open: dict[str, _Segment] = {}
        self._can_tell = True
        self.checked = checked

    def fetch(self, key: Key, place: Place) -> memoryview:
        """The bytes of one copy, writable and the caller's own (with `io="mmap"`: a read-only view of the file).

        Raises CorruptEntry if they are not what was stored under this key, FileNotFoundError, ReadFailed.
        """
        run = self._read(place)
        if self._verify != "never":
            self._check(key, place, [run])
        return run

    def fetch_into(self, wanted: Sequence[Wanted]) -> None:
        """Read entries straight to where they belong, in the order of their places. Nothing wanted, nothing read.

        Neighbours are read at once. Where bytes turn out not to be in memory, all that is still to come is asked for before waiting.
        Raises as `fetch`; the targets then hold anything.
        """
        runs = _runs(sorted(wanted, key=_position))
        checks, has_asked = self._verify != "never", False
        segment, digest = None, ""
        for number, run in enumerate(runs):
            place = run.entries[0].place
            if segment is None or place.segment.digest != digest:
                segment, digest = self._segment(place), place.segment.digest
            if segment.mapping is not None:
                _copy_run(run, segment.mapping)
            elif not self._read_present(run, segment):
                if not has_asked:
                    self._ask_for_runs(runs[number:])
                    has_asked = True
                self._read_run(run, segment)
            if checks:
                for key, place, targets in run.entries:
                    self._check(key, place, targets)

    def ask_ahead(self, places: Iterable[Place]) -> None:
        """Have the bytes of these entries brought into memory, without waiting: what is wanted next. Changes no answer."""
        self._ask_for_runs(_runs([Wanted(_NOBODY, place, ()) for place in sorted(places, key=_file_position)]))

    def _ask_for_runs(self, runs: Iterable[_Run]) -> None:
        for run in runs:
            segment = self._segment(run.entries[0].place)
            if segment.mapping is None:
                ask_for(segment.descriptor, run.start, run.size)
            else:
                ask_for_mapped(segment.mapping, run.start, run.size)

    def _read_present(self, run: _Run, segment: _Segment) -> bool:
        """Read what can be had without waiting; whether that was all."""
        if not self._can_tell:
            return False
        try:
            count = read_present(segment.descriptor, run.buffers(), run.start)
        except OSError as error:
            self._refuse_reading(run.entries[0].place, error)
        self._can_tell = count is not None
        return count == run.size

    def _read_run(self, run: _Run, segment: _Segment) -> None:
        try:
            count = read_scattered(segment.descriptor, run.buffers(), run.start)
        except OSError as error:
            self._refuse_reading(run.entries[0].place, error)
        if count < run.size:
            raise self._cut_short(run.entries[-1].place)

    def _check(self, key: Key, place: Place, buffers: Sequence[memoryview]) -> None:
        """Compare an entry with its checksum, unless once is enough and it was. Raises CorruptEntry."""
        if self._verify == "first" and self.checked.holds(place):
            return
        if checksum_of(key, place.specs, buffers) != place.checksum:
            self._forget(place.segment.digest)
            raise CorruptEntry(self._complain(key, place, "does not match its checksum"))
        self.checked.add(place)

    def _cut_short(self, place: Place) -> CorruptEntry:
        self._forget(place.segment.digest)
        return CorruptEntry(self._complain(_NOBODY, place, "ends before its last entry", named=False))

    def _read(self, place: Place) -> memoryview:
        segment = self._segment(place)
        if segment.mapping is not None:
            return memoryview(segment.mapping)[place.offset : place.offset + place.size_bytes]
        try:
            run = memoryview(read_at(segment.descriptor, place.size_bytes, place.offset))
        except OSError as error:
            self._refuse_reading(place, error)
        if len(run) < place.size_bytes:
            raise self._cut_short(place)
        return run

    def _refuse_reading(self, place: Place, error: OSError) -> NoReturn:
        self._forget(place.segment.digest)
        refuse_reading(self._layout.segment(place.segment.digest), error)

    def _segment(self, place: Place) -> _Segment:
        if self._pid != os.getpid():
            self.close()  # this process's copies of the inherited descriptors; the parent's stay open
            self._pid = os.getpid()
        digest = place.segment.digest
        held = self._open.get(digest)
        if held is not None:
            held.used = next(self._uses)
            return held
        self._make_room()
        descriptor, status = open_regular(self._layout.segment(digest))
        if status.st_size != place.segment.size_bytes:
            os.close(descriptor)
            sizes = f"{status.st_size} bytes, {place.segment.size_bytes} were published"
            message = f"{self._layout.segment(digest)} has {sizes}; run `cachestore repair {self._layout.root}`"
            raise CorruptEntry(message)
        mapping = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ) if self._io == "mmap" else None
        self._open[digest] = segment = _Segment(descriptor, mapping, next(self._uses))
        return segment

    def _make_room(self) -> None:
        # An OrderedDict would keep this order for us, but threads that share one leave it inconsistent for good.
        held = self._open.copy()
        for digest in sorted(held, key=lambda digest: held[digest].used)[: max(0, len(held) - self._limit + 1)]:
            self._forget(digest)

    def _forget(self, digest: str) -> None:
        self._open.pop(digest, None)

    def close(self) -> None:
        """Close every segment. Calling it twice is fine; fetching afterwards opens them again."""
        self._open.clear()

    def _complain(self, key: Key, place: Place, what: str, *, named: bool = True) -> str:
        where = self._layout.segment(place.segment.digest).relative_to(self._layout.root)
        subject = f"entry {key} {what} in {where}" if named else f"{where} {what}"
        return f"{subject}; run `cachestore repair {self._layout.root}`"


def _position(wanted: Wanted) -> tuple[str, int]:
    return _file_position(wanted.place)


def _file_position(place: Place) -> tuple[str, int]:
    return place.segment.digest, place.offset


def _runs(ordered: Sequence[Wanted]) -> list[_Run]:
    """Entries in the order of their places, those together that one read can take: next to each other, and not many bytes."""
    runs: list[_Run] = []
    digest, start, end = "", 0, 0
    for each in ordered:
        place = each.place
        offset, size = place.offset, size_of(place.specs)
        if (
            0 <= offset - end < ALIGNMENT
            and place.segment.digest == digest
            and offset + size - start <= _RUN_BYTES
            and len(runs[-1].entries) < _RUN_ENTRIES
        ):
            runs[-1].entries.append(each)
            runs[-1] = _Run(start, offset + size - start, runs[-1].entries)
        else:
            runs.append(_Run(offset, size, [each]))
            digest, start = place.segment.digest, offset
        end = offset + size
    return runs


def _copy_run(run: _Run, mapping: mmap.mmap) -> None:
    view = memoryview(mapping)
    for _key, place, targets in run.entries:
        position = place.offset
        for target in targets:
            target[:] = view[position : position + len(target)]
            position += len(target)


def is_gone(error: Exception) -> bool:
    """Whether an error means that a segment was moved away under the reader, so that a newer snapshot may help."""
    if isinstance(error, CorruptEntry | FormatError | FileNotFoundError):
        return True
    return isinstance(error, OSError) and error.errno in {errno.ENOENT, getattr(errno, "ESTALE", errno.ENOENT)}
