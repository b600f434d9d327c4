"""Read entries of a store in an object store: from its parts in the local cache, where the helper puts those that are missing.

The checksum of an entry decides whether its bytes are right, and nothing else. So it does not matter what killed processes, full disks and
other readers left in the cache. What was checked is remembered for an open file only: another file under its name may have holes.
"""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Final, NamedTuple

from cachestore.core.errors import CorruptEntry
from cachestore.core.keys import Key
from cachestore.files.opening import READ_FLAGS, ask_for, descriptor_limit, is_of_a_signal, read_present, read_scattered
from cachestore.remote.cache import TOUCH_SECONDS
from cachestore.remote.outline import reads_differ
from cachestore.remote.parts import EntrySpan, OpenPart, PartsSource
from cachestore.store.format.entry import checksum_of
from cachestore.store.format.locations import Located, Location, SegmentRef
from cachestore.store.read.fetch import (
    DESCRIPTORS,
    Read,
    Verify,
    close_least_used,
    join_buffers,
    new_buffer,
    plan_reads,
    read_all,
)

_CALLS: Final = 3
"""How often an entry is fetched again, at most."""


class _PartsWork(NamedTuple):
    """The work of one `fetch_into`."""

    keys: Sequence[Key]
    located: Located
    targets: Sequence[Sequence[memoryview]]
    reads: Sequence[Read]
    rows: Sequence[int]
    """Positions in `located` of what the reads number."""
    parts: Mapping[str, OpenPart | None]
    wrong: list[int]
    """Receives the positions of entries that do not match their checksums."""
    first_wait: Iterator[bool]
    """As in `Fetcher`."""


class PartsFetcher:
    """Reads entries of one store, as a `Fetcher` does. Several threads may use it; a forked child opens its own files."""

    def __init__(self, source: PartsSource, *, verify: Verify = "first") -> None:
        """Read from this source. Without checks a hole would be read as data, so `verify="never"` checks what it reads first too."""
        self._source = source
        self._verify: Verify = verify
        self._limit = max(1, min(DESCRIPTORS, descriptor_limit() // 8))
        self._pid = os.getpid()
        self._uses = count()
        self._open: dict[str, OpenPart] = {}
        self._touched: dict[str, float] = {}
        self._can_tell = True

    def fetch(self, key: Key, location: Location) -> memoryview:
        """As `Fetcher.fetch`."""
        run = new_buffer(location.specs.size_bytes)
        self.fetch_into([key], Located.of([location]), [[run]])
        return run

    def fetch_into(
        self, keys: Sequence[Key], located: Located, targets: Sequence[Sequence[memoryview]], *, side_by_side: bool = False
    ) -> None:
        """As `Fetcher.fetch_into`, and asks the helper for what is not in the cache. Raises RemoteFailed too."""
        absent = self._absent(located)
        sent = self._bring(located, absent) if absent else {}
        rows = [row for row in range(len(keys)) if row not in sent] if sent else range(len(keys))
        part = Located.of([located.location(row) for row in rows]) if sent else located
        reads = plan_reads(part)
        parts = {ref.digest: self._part(ref) for ref in part.segments}
        wanted = _PartsWork(keys, located, targets, reads, rows, parts, [], iter((True,)))
        read_all(reads, lambda turns: self._read_each(turns, wanted, part), side_by_side=side_by_side)
        for row, data in sent.items():
            _spread(data, targets[row])
            if not _matches(keys[row], located, row, targets[row]):
                wanted.wrong.append(row)
        if wanted.wrong:
            self._mend(wanted)

    def _absent(self, located: Located) -> list[int]:
        parts = {ref.digest: self._part(ref) for ref in located.segments}
        rows = zip(located.segments, located.ordinals, located.specs, strict=True)
        return [
            row
            for row, (ref, ordinal, specs) in enumerate(rows)
            if ((part := parts[ref.digest]) is None or not part.holds(ordinal)) and specs.size_bytes
        ]

    def _bring(self, located: Located, rows: Sequence[int], *, again: bool = False) -> dict[int, memoryview]:
        spans = {row: _span(located, row) for row in rows}
        sizes = {located.segments[row].digest: located.segments[row].size_bytes for row in rows}
        found = self._source.bring(list(spans.values()), sizes, again=again)
        return {row: found[span] for row, span in spans.items() if span in found}

    def _read_each(self, turns: Iterator[tuple[int, Read]], wanted: _PartsWork, located: Located) -> None:
        targets = [wanted.targets[row] for row in wanted.rows]
        is_waiting = False
        for number, (ref, start, size, own) in turns:
            part = wanted.parts[ref.digest]
            buffers = targets[own[0]] if len(own) == 1 else join_buffers(start, own, located, targets)
            is_here = part is not None and not is_waiting and self._read_present(part, buffers, start, size)
            if part is not None and not is_here:
                if next(wanted.first_wait, False):
                    self._ask_for(wanted.reads[number:], wanted.parts)
                is_waiting = True
                with suppress(OSError):  # the disk refuses: the entry comes from the address
                    is_here = read_scattered(part.descriptor, buffers, start) == size
            for row in own:
                self._check(wanted, part if is_here else None, wanted.rows[row])

    def _read_present(self, part: OpenPart, buffers: Sequence[memoryview], start: int, size: int) -> bool:
        """Read what is available without waiting. Returns whether that was all."""
        if not self._can_tell:
            return False
        try:
            found = read_present(part.descriptor, buffers, start)
        except OSError:
            return False
        self._can_tell = found is not None
        return found == size

    def _check(self, wanted: _PartsWork, part: OpenPart | None, row: int) -> None:
        ordinal = wanted.located.ordinals[row]
        if part is not None and self._verify != "always" and part.checked[ordinal]:
            return
        # An entry without bytes is right in any case, and needs no part.
        is_empty = not wanted.located.specs[row].size_bytes
        if (part is None and not is_empty) or not _matches(wanted.keys[row], wanted.located, row, wanted.targets[row]):
            wanted.wrong.append(row)
        elif part is not None:
            part.checked[ordinal] = 1

    @staticmethod
    def _ask_for(reads: Sequence[Read], parts: Mapping[str, OpenPart | None]) -> None:
        for ref, start, size, _rows in reads:
            if (part := parts[ref.digest]) is not None:
                ask_for(part.descriptor, start, size)

    def _mend(self, wanted: _PartsWork) -> None:
        """Fetch entries again that do not match their checksums.

        Raises CorruptEntry for those of which the same wrong bytes come twice, and RemoteFailed if others come each time.
        """
        wrong, before = list(wanted.wrong), dict[int, bytes]()
        for _call in range(_CALLS):
            for row in wrong:
                self._source.clear(_span(wanted.located, row))
                self._open.pop(wanted.located.segments[row].digest, None)  # another file may have its name now
            found = self._bring(wanted.located, wrong, again=True)
            wrong = [row for row in wrong if not self._is_mended(wanted, row, found.get(row))]
            if not wrong:
                return
            for row in wrong:
                data = bytes(found.get(row, b""))
                if before.get(row) == data:
                    where = self._source.where(wanted.located.segments[row].digest)
                    mend = f"run `cachestore push STORE {self._source.address} --check` from a store that has it"
                    raise CorruptEntry(f"entry {wanted.keys[row]} does not match its checksum in {where}, as two reads say; {mend}")
                before[row] = data
        raise reads_differ(self._source.where(wanted.located.segments[wrong[0]].digest))

    @staticmethod
    def _is_mended(wanted: _PartsWork, row: int, data: memoryview | None) -> bool:
        if data is not None:
            _spread(data, wanted.targets[row])
        return data is not None and _matches(wanted.keys[row], wanted.located, row, wanted.targets[row])

    def prefetch(self, locations: Sequence[Location]) -> None:
        """Ask the helper for those of these entries that are not in the cache, without waiting."""
        located = Located.of(locations)
        rows = self._absent(located)
        sizes = {located.segments[row].digest: located.segments[row].size_bytes for row in rows}
        self._source.prefetch((_span(located, row) for row in rows), sizes)

    def _part(self, ref: SegmentRef) -> OpenPart | None:
        """The part of a segment, open; None if there is none, or none that can be read."""
        if self._pid != os.getpid():
            self.close()  # closes the inherited copies; the parent's descriptors stay open
            self._pid = os.getpid()
        part = self._open.get(ref.digest)
        if part is None:
            close_least_used(self._open, self._limit)
            have = _open(self._source.cache.have(ref.digest))
            if have is None:
                return None
            descriptor = _open(self._source.cache.part(ref.digest))
            if descriptor is None:
                os.close(have)
                return None
            self._open[ref.digest] = part = OpenPart(descriptor, have, ref.entries, next(self._uses))
        part.used = next(self._uses)
        now = time.monotonic()
        if now - self._touched.get(ref.digest, -TOUCH_SECONDS) >= TOUCH_SECONDS:
            self._touched[ref.digest] = now
            part.touch()
        return part

    def close(self) -> None:
        """Close every part. May be called twice; fetching afterwards opens them again."""
        self._open.clear()


def _open(path: Path) -> int | None:
    """Open a file of the cache; None if there is none, or what is there cannot be opened. Reading then fails if it is no file."""
    try:
        return os.open(path, READ_FLAGS | getattr(os, "O_NOFOLLOW", 0))
    except OSError as error:
        if is_of_a_signal(error):
            raise
        return None


def _span(located: Located, row: int) -> EntrySpan:
    return EntrySpan(located.segments[row].digest, located.offsets[row], located.specs[row].size_bytes, located.ordinals[row])


def _matches(key: Key, located: Located, row: int, buffers: Sequence[memoryview]) -> bool:
    return checksum_of(key, located.specs[row], buffers) == located.checksums[row]


def _spread(data: memoryview, buffers: Sequence[memoryview]) -> None:
    """Copy an entry's bytes into the buffers of its tensors; fewer, if the object is shorter than it was."""
    start = 0
    for buffer in buffers:
        some = data[start : start + len(buffer)]
        buffer[: len(some)] = some
        start += len(buffer)
