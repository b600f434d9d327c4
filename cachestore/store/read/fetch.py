"""Read the bytes of entries into fresh or given buffers, and check them against their keys.

Takes no lock. Starts one thread if the caller asks for it, which ends before the call does.
"""

import errno
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, count
from typing import Final, Literal, NamedTuple, NoReturn, Protocol, TypeVar

from cachestore.core.errors import CorruptEntry, FormatError
from cachestore.core.keys import Key
from cachestore.files.container import ALIGNMENT
from cachestore.files.opening import ask_for, ask_for_mapped, descriptor_limit, open_regular, read_present, read_scattered, refuse_reading
from cachestore.files.paths import Layout
from cachestore.store.format.entry import checksum_of
from cachestore.store.format.locations import Located, Location, SegmentRef
from cachestore.store.read.side_by_side import run_side_by_side

Verify = Literal["first", "always", "never"]
Io = Literal["pread", "mmap"]

DESCRIPTORS: Final = 1024
_READ_BYTES: Final = 256 * 1024
"""Most bytes of one read, unless one entry is larger. They are then checked while they are still in the CPU cache."""
_READ_ENTRIES: Final = 64
SHARED_BYTES: Final = 4 << 20
"""From this size on, two threads read faster than one. Starting the second takes as long as copying about 1 MiB."""
_LARGE_COPY: Final = 64 * 1024
"""From this size on, it pays to release the GIL while copying out of a memory map."""
_SHARED_BUFFER: Final = 32 << 20
"""Most bytes of memory that entries which are read together share. To keep one of them keeps so much."""
_HUGE_PAGES: Final = 4 << 20
"""From so many bytes on, numpy asks for huge pages."""
_KEPT_BYTES: Final = 128 * 1024
"""Memory of fewer bytes is faster by itself: the allocator keeps it for the next one."""
_NOWHERE: Final = memoryview(bytearray(ALIGNMENT))
"""Receives the filler between entries. Never read."""


class Checked:
    """Remembers which entries were checked: one bit each, in memory that forked workers share with their parent."""

    def __init__(self, segments: Sequence[SegmentRef]) -> None:
        """Make room for all entries of these segments. Other entries are never remembered."""
        self._first: dict[str, int] = {}
        total = 0
        for ref in segments:
            self._first[ref.digest] = total
            total += ref.entries
        self._bits = mmap.mmap(-1, total // 8 + 1)
        self._entries = {ref.digest: ref.entries for ref in segments}
        self._whole: set[str] = set()
        """Segments in which every entry was found to be checked. Their bits are not looked up again."""

    def holds(self, location: Location) -> bool:
        """Whether this copy was checked."""
        first = self._first.get(location.segment.digest)
        if first is None:
            return False
        bit = first + location.ordinal
        return self._bits[bit >> 3] >> (bit & 7) & 1 == 1

    def lacks(self, located: Located) -> set[int]:
        """The positions in `located` of the copies that were not checked."""
        digests = {ref.digest for ref in located.segments}
        if digests <= self._whole:
            return set()
        first, bits = self._first, self._bits
        lacking: set[int] = set()
        for row, (ref, ordinal) in enumerate(zip(located.segments, located.ordinals, strict=True)):
            bit = first.get(ref.digest, -1 - ordinal) + ordinal
            if bit < 0 or not bits[bit >> 3] >> (bit & 7) & 1:
                lacking.add(row)
        if not lacking:
            self._whole.update(filter(self._is_whole, digests))
        return lacking

    def _is_whole(self, digest: str) -> bool:
        first = self._first[digest]
        last = first + self._entries[digest]
        part = int.from_bytes(self._bits[first >> 3 : (last >> 3) + 1], "little") >> (first & 7)
        return (part & (1 << last - first) - 1).bit_count() == last - first

    def add(self, segment: str, ordinal: int) -> None:
        """Remember that this copy is good. If two workers do so at once, a bit may be lost, and that entry is checked again."""
        first = self._first.get(segment)
        if first is not None:
            bit = first + ordinal
            self._bits[bit >> 3] |= 1 << (bit & 7)


Read = tuple[SegmentRef, int, int, list[int]]
"""One read of neighbouring entries in a segment: (segment, start, size, positions of the entries in the order of their bytes)."""


class _Work(NamedTuple):
    """The work of one `fetch_into`: its arguments, and what follows from them."""

    keys: Sequence[Key]
    located: Located
    targets: Sequence[Sequence[memoryview]]
    reads: Sequence[Read]
    to_check: set[int]
    """Positions of the entries that must be checked."""
    first_wait: Iterator[bool]
    """Gives one True, to the first thread that has to wait. That thread asks the system for all bytes still to come."""


class _HasUse(Protocol):
    used: int
    """The higher, the later it was used."""


OpenFile = TypeVar("OpenFile", bound=_HasUse)


class _Segment:
    """An open segment. It is closed when nothing refers to it, as a descriptor closed during a read could soon be another file's."""

    __slots__ = ("descriptor", "mapping", "used", "view")

    def __init__(self, descriptor: int, mapping: mmap.mmap | None, used: int) -> None:
        self.descriptor = descriptor
        self.mapping = mapping
        self.view = memoryview(mapping) if mapping is not None else None
        self.used = used

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        close(self.descriptor)  # `close` is bound here, as modules may be empty at the interpreter's end


class Fetcher:
    """Reads entries of one store. Several threads may use it.

    Holds at most min(1024, RLIMIT_NOFILE / 4) segments open. A forked child opens its own.
    """

    def __init__(self, layout: Layout, checked: Checked, *, verify: Verify = "first", io: Io = "pread") -> None:
        self._layout = layout
        self._verify: Verify = verify
        self._io: Io = io
        self._limit = max(1, min(DESCRIPTORS, descriptor_limit() // 4))
        self._pid = os.getpid()
        self._uses = count()
        self._open: dict[str, _Segment] = {}
        self._can_tell = True
        self.checked = checked

    def fetch(self, key: Key, location: Location) -> memoryview:
        """Return the bytes of one copy, writable and the caller's own; with `io="mmap"` a read-only view of the file.

        Raises CorruptEntry if they are not what was stored under this key, FileNotFoundError, ReadFailed.
        """
        ref, offset, size = location.segment, location.offset, location.specs.size_bytes
        segment = self._segment(ref)
        if segment.view is not None:
            run = segment.view[offset : offset + size]
        else:
            run = new_buffer(size)
            self._read_waiting(segment, ref, [run], offset, size)
        if self._verify == "always" or (self._verify == "first" and not self.checked.holds(location)):
            self._check(key, Located.of([location]), 0, [run])
        return run

    def fetch_into(
        self, keys: Sequence[Key], located: Located, targets: Sequence[Sequence[memoryview]], *, side_by_side: bool = False
    ) -> None:
        """Read entries into the given buffers, in the order in which they lie on disk.

        For each entry, `targets` holds a writable buffer for each tensor, in the order of its specs, or one for all its bytes. Neighbouring
        entries are read together. If bytes are not in memory, all remaining bytes are requested before waiting. With `side_by_side` a
        second thread takes part if there are many bytes; it has ended when this returns or raises.
        Raises as `fetch`; the contents of the targets are then undefined.
        """
        # Do few steps for each entry, and nothing that can be done before: reading a large entry empties the CPU cache, after which each
        # step takes several times as long.
        reads = plan_reads(located)
        work = _Work(keys, located, targets, reads, self._to_check(located), first_wait=iter((True,)))
        read_all(reads, lambda turns: self._read_each(turns, work), side_by_side=side_by_side)

    def _read_each(self, turns: Iterator[tuple[int, Read]], work: _Work) -> None:
        located, targets = work.located, work.targets
        is_waiting = False
        segment, last = None, None
        for number, (ref, start, size, rows) in turns:
            if segment is None or ref is not last:
                segment, last = self._segment(ref), ref
            buffers = targets[rows[0]] if len(rows) == 1 else join_buffers(start, rows, located, targets)
            if segment.view is not None:
                _copy_out(segment.view, buffers, start)
            elif is_waiting or not self._read_present(segment, ref, buffers, start, size):
                if next(work.first_wait, False):
                    self._ask_for(work.reads[number:])
                is_waiting = True
                self._read_waiting(segment, ref, buffers, start, size)
            for row in rows if work.to_check else ():
                if row in work.to_check:
                    self._check(work.keys[row], located, row, targets[row])

    def _to_check(self, located: Located) -> set[int]:
        match self._verify:
            case "first":
                return self.checked.lacks(located)
            case "always":
                return set(range(len(located.offsets)))
            case "never":
                return set()

    def prefetch(self, locations: Sequence[Location]) -> None:
        """Ask the system to load the bytes of these entries, without waiting. Only a hint."""
        self._ask_for(plan_reads(Located.of(locations)))

    def _ask_for(self, reads: Iterable[Read]) -> None:
        for ref, start, size, _rows in reads:
            segment = self._segment(ref)
            if segment.mapping is None:
                ask_for(segment.descriptor, start, size)
            else:
                ask_for_mapped(segment.mapping, start, size)

    def _read_present(self, segment: _Segment, ref: SegmentRef, buffers: Sequence[memoryview], start: int, size: int) -> bool:
        """Read what is available without waiting. Returns whether that was all."""
        if not self._can_tell:
            return False
        try:
            count = read_present(segment.descriptor, buffers, start)
        except OSError as error:
            self._refuse_reading(ref, error)
        self._can_tell = count is not None
        return count == size

    def _read_waiting(self, segment: _Segment, ref: SegmentRef, buffers: Sequence[memoryview], start: int, size: int) -> None:
        try:
            count = read_scattered(segment.descriptor, buffers, start)
        except OSError as error:
            self._refuse_reading(ref, error)
        if count < size:
            self._open.pop(ref.digest, None)
            raise CorruptEntry(self._damage_in_words("an entry is beyond the end of", ref))

    def _check(self, key: Key, located: Located, row: int, buffers: Sequence[memoryview]) -> None:
        ref = located.segments[row]
        if checksum_of(key, located.specs[row], buffers) != located.checksums[row]:
            self._open.pop(ref.digest, None)
            raise CorruptEntry(self._damage_in_words(f"entry {key} does not match its checksum in", ref))
        self.checked.add(ref.digest, located.ordinals[row])

    def _refuse_reading(self, ref: SegmentRef, error: OSError) -> NoReturn:
        self._open.pop(ref.digest, None)
        refuse_reading(self._layout.segment(ref.digest), error)

    def _segment(self, ref: SegmentRef) -> _Segment:
        if self._pid != os.getpid():
            self.close()  # closes the inherited copies; the parent's descriptors stay open
            self._pid = os.getpid()
        held = self._open.get(ref.digest)
        if held is not None:
            held.used = next(self._uses)
            return held
        close_least_used(self._open, self._limit)
        path = self._layout.segment(ref.digest)
        descriptor, status = open_regular(path)
        if status.st_size != ref.size_bytes:
            os.close(descriptor)
            mend = self._layout.command("repair --refill")
            raise CorruptEntry(f"{path} has {status.st_size} bytes, {ref.size_bytes} were published; run {mend}")
        try:
            mapping = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ) if self._io == "mmap" else None
        except BaseException as error:
            os.close(descriptor)
            if isinstance(error, OSError):  # not enough address space
                refuse_reading(path, error)
            raise
        self._open[ref.digest] = segment = _Segment(descriptor, mapping, next(self._uses))
        return segment

    def close(self) -> None:
        """Close every segment. May be called twice; fetching afterwards opens them again."""
        self._open.clear()

    def _damage_in_words(self, what: str, ref: SegmentRef) -> str:
        where = self._layout.segment(ref.digest).relative_to(self._layout.root)
        return f"{what} {where}; run {self._layout.command('repair --refill')}"


def read_all(reads: Sequence[Read], read_each: Callable[[Iterator[tuple[int, Read]]], None], *, side_by_side: bool) -> None:
    """Call `read_each` with the numbered reads; with `side_by_side` and many bytes also in a second thread.

    Each of the two then takes the next read until none is left.
    """
    turns = enumerate(reads)
    if not side_by_side or len(reads) < 2 or sum(size for _ref, _start, size, _rows in reads) < SHARED_BYTES:
        read_each(turns)
        return

    def read() -> None:
        try:
            read_each(turns)
        finally:  # if one of the two fails, both stop
            for _turn in turns:
                pass

    run_side_by_side(read)


def close_least_used(files: dict[str, OpenFile], limit: int) -> None:
    """Drop those open files that were not used for longest, until there is room for one more below the limit."""
    held = files.copy()  # an OrderedDict would keep the order of use, but threads that share one can damage it for good
    for digest in sorted(held, key=lambda digest: held[digest].used)[: max(0, len(held) - limit + 1)]:
        files.pop(digest, None)


def new_buffer(size: int) -> memoryview:
    """Return memory for an entry. numpy does not clear it first, which in a bytearray takes a third of the time of a read."""
    import numpy as np

    return np.empty(size, np.uint8).data


def new_buffers(sizes: Sequence[int]) -> list[memoryview]:
    """Return memory for several entries, each at a multiple of 64 bytes. Large ones share buffers of at most `_SHARED_BUFFER`.

    numpy asks the system for huge pages from 4 MiB on: to read 16 entries of 2 MiB into buffers of their own takes more than twice as long.
    """
    if sum(sizes) < _HUGE_PAGES:
        return [new_buffer(size) for size in sizes]
    found: list[memoryview] = []
    for first, last in _groups(sizes):
        starts = [0, *accumulate(size + -size % ALIGNMENT for size in sizes[first:last])]
        if starts[-1] < max(_HUGE_PAGES, _KEPT_BYTES * (last - first)):
            found += map(new_buffer, sizes[first:last])
            continue
        shared = new_buffer(starts[-1])
        found += [shared[start : start + size] for start, size in zip(starts, sizes[first:last], strict=False)]
    return found


def _groups(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Cut into runs of sizes that share a buffer, as (first, behind the last)."""
    first, used = 0, 0
    for number, size in enumerate(sizes):
        if number > first and used + size > _SHARED_BUFFER:
            yield first, number
            first, used = number, 0
        used += size + -size % ALIGNMENT
    if first < len(sizes):
        yield first, len(sizes)


def plan_reads(located: Located) -> list[Read]:
    """Plan the reads in the order on disk. Small entries next to each other share one read."""
    sizes = [specs.size_bytes for specs in located.specs]
    digests = [ref.digest for ref in located.segments]
    ordered = sorted(zip(digests, located.offsets, range(len(sizes)), strict=True))
    if 2 * min(sizes, default=0) > _READ_BYTES:  # no two fit into one read
        return [(located.segments[row], offset, sizes[row], [row]) for _digest, offset, row in ordered]
    reads: list[Read] = []
    last, start, end = "", 0, 0
    for digest, offset, row in ordered:
        size = sizes[row]
        if digest == last and 0 <= offset - end < ALIGNMENT and offset + size - start <= _READ_BYTES and len(reads[-1][3]) < _READ_ENTRIES:
            ref, start, _size, rows = reads[-1]
            rows.append(row)
            reads[-1] = (ref, start, offset + size - start, rows)
        else:
            reads.append((located.segments[row], offset, size, [row]))
            last, start = digest, offset
        end = offset + size
    return reads


def join_buffers(start: int, rows: Sequence[int], located: Located, targets: Sequence[Sequence[memoryview]]) -> list[memoryview]:
    """The buffers for one read; bytes between entries go to `_NOWHERE`."""
    buffers: list[memoryview] = []
    end = start
    for row in rows:
        offset = located.offsets[row]
        if offset > end:
            buffers.append(_NOWHERE[: offset - end])
        buffers += targets[row]
        end = offset + located.specs[row].size_bytes
    return buffers


def _copy_out(view: memoryview, buffers: Sequence[memoryview], position: int) -> None:
    import numpy as np

    for buffer in buffers:
        end = position + len(buffer)
        if len(buffer) < _LARGE_COPY:
            buffer[:] = view[position:end]
        else:
            np.copyto(np.frombuffer(buffer, np.uint8), np.frombuffer(view[position:end], np.uint8))
        position = end


def is_gone(error: Exception) -> bool:
    """Whether an error means that a segment was moved away, so that a newer snapshot may help."""
    gone = {errno.ENOENT, getattr(errno, "ESTALE", errno.ENOENT)}
    return isinstance(error, CorruptEntry | FormatError | FileNotFoundError) or (isinstance(error, OSError) and error.errno in gone)
