"""Fetching the bytes of entries: positional reads into fresh buffers, checked against the key. Starts no thread, takes no lock."""

import errno
import mmap
import os
from collections.abc import Sequence
from itertools import count
from typing import Final, Literal

from cachestore.errors import CorruptEntry, FormatError
from cachestore.files.opening import descriptor_limit, open_regular, read_at
from cachestore.files.paths import Layout
from cachestore.keys import Key
from cachestore.storage.entry import checksum_of
from cachestore.storage.places import Place, SegmentRef

Verify = Literal["first", "always", "never"]
Io = Literal["pread", "mmap"]

_DESCRIPTORS: Final = 256


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
        bit = self._bit(place)
        return bit is not None and bool(self._bits[bit >> 3] & (1 << (bit & 7)))

    def add(self, place: Place) -> None:
        """Remember that this copy is good. Two workers at once may lose a bit: that entry is checked again."""
        bit = self._bit(place)
        if bit is not None:
            self._bits[bit >> 3] |= 1 << (bit & 7)

    def _bit(self, place: Place) -> int | None:
        first = self._first.get(place.segment.digest)
        return None if first is None else first + place.ordinal


class _Segment:
    """An open segment, closed when nobody uses it any more: a descriptor closed under a read would be another file's soon."""

    __slots__ = ("descriptor", "mapping", "used")

    def __init__(self, descriptor: int, mapping: mmap.mmap | None, used: int) -> None:
        self.descriptor = descriptor
        self.mapping = mapping
        self.used = used

    def __del__(self) -> None:
        os.close(self.descriptor)


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
        self.checked = checked

    def fetch(self, key: Key, place: Place) -> memoryview:
        """The bytes of one copy, writable and the caller's own (with `io="mmap"`: a read-only view of the file).

        Raises CorruptEntry if they are not what was stored under this key, OSError as it comes.
        """
        run = self._read(place)
        if self._verify == "never" or (self._verify == "first" and self.checked.holds(place)):
            return run
        if checksum_of(key, place.specs, [run]) != place.checksum:
            self._forget(place.segment.digest)
            raise CorruptEntry(self._complain(key, place, "does not match its checksum"))
        self.checked.add(place)
        return run

    def _read(self, place: Place) -> memoryview:
        segment = self._segment(place)
        if segment.mapping is not None:
            return memoryview(segment.mapping)[place.offset : place.offset + place.size_bytes]
        run = memoryview(read_at(segment.descriptor, place.size_bytes, place.offset))
        if len(run) < place.size_bytes:
            self._forget(place.segment.digest)
            raise CorruptEntry(self._complain(Key(bytes(16)), place, "ends before its last entry", named=False))
        return run

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


def is_gone(error: Exception) -> bool:
    """Whether an error means that a segment was moved away under the reader, so that a newer snapshot may help."""
    if isinstance(error, CorruptEntry | FormatError | FileNotFoundError):
        return True
    return isinstance(error, OSError) and error.errno in {errno.ENOENT, getattr(errno, "ESTALE", errno.ENOENT)}
