"""Append: collect entries in memory, write them as one segment, acknowledge them once the segment is durable."""

import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from cachestore.core.dtypes import RawTensor
from cachestore.core.errors import BadInput, CacheStoreError, FormatError
from cachestore.core.keys import Json, Key, canonical
from cachestore.files.checksum import digest_file
from cachestore.files.container import parse_header
from cachestore.files.failpoints import failpoint
from cachestore.files.opening import look_at
from cachestore.files.paths import Layout
from cachestore.files.publish import make_folder, publish
from cachestore.storage.entry import Entry, make_entry
from cachestore.storage.locations import Location
from cachestore.storage.marked import marked_segments
from cachestore.storage.segment import ENTRY_LIMIT, SegmentContents, build_segment, parse_contents
from cachestore.storage.snapshot import ref_of

_TENSOR_HEADER_BYTES: Final = 160
"""Most header bytes of one tensor, without its name."""

HEADER_BYTES: Final = 4 * 1024 * 1024
"""Most header bytes of the entries of one segment, before JSON escaping. Far below the limit of readers."""


@dataclass(frozen=True, slots=True)
class SegmentLimits:
    """When a segment is closed. The caller checks `age_seconds` through `Appender.is_due`."""

    entries: int = ENTRY_LIMIT
    size_bytes: int = 256 * 1024 * 1024
    header_bytes: int = HEADER_BYTES
    age_seconds: float = 60.0


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """A durable segment and the locations of its entries."""

    digest: str
    contents: SegmentContents
    locations: Mapping[Key, Location]


@dataclass(slots=True)
class Appender:
    """Collects entries and publishes them as segments. Belongs to one thread of one process; starts no thread.

    `put` only collects. An entry is acknowledged when `put` or `close_segment` returns the `Acknowledged` of its segment.
    """

    layout: Layout
    origin: str = ""
    limits: SegmentLimits = field(default_factory=SegmentLimits)
    clock: Callable[[], float] = time.monotonic
    _entries: dict[Key, Entry] = field(default_factory=dict[Key, Entry])
    _size_bytes: int = 0
    _header_bytes: int = 0
    _opened_at: float = 0.0
    _pid: int = field(default_factory=os.getpid)

    def put(self, key: Key, tensors: Mapping[str, RawTensor], meta: Mapping[str, Json]) -> list[Acknowledged]:
        """Collect an entry. Returns the segments that were closed because a limit was reached, usually none.

        The buffers must not change until the entry is acknowledged. A key that is already collected is left as it is.
        Raises BadInput for an entry that cannot be stored, and WriteFailed if a segment could not be published. The collected entries are
        then kept: put the same entry again, and call `close_segment` again.
        """
        self.check_process()
        return [] if key in self._entries else self.add(make_entry(key, tensors, meta))

    def add(self, entry: Entry) -> list[Acknowledged]:
        """Collect an entry that `make_entry` made. Returns and raises as `put`."""
        self.check_process()
        key = entry.key
        if key in self._entries:
            return []
        header_bytes = _TENSOR_HEADER_BYTES + len(canonical(dict(entry.meta)))
        header_bytes += sum(_TENSOR_HEADER_BYTES + len(spec.name) for spec in entry.specs)
        if header_bytes > HEADER_BYTES:
            raise BadInput(
                f"entry {key} has names and a JSON value of {header_bytes} bytes; at most {HEADER_BYTES} can be stored beside its tensors"
            )
        closed: list[Acknowledged] = []
        if self._entries and (
            self._size_bytes + entry.size_bytes > self.limits.size_bytes or self._header_bytes + header_bytes > self.limits.header_bytes
        ):
            closed += self.close_segment()
        if not self._entries:
            self._opened_at = self.clock()
        self._entries[key] = entry
        self._size_bytes += entry.size_bytes
        self._header_bytes += header_bytes
        if len(self._entries) >= self.limits.entries or self._size_bytes >= self.limits.size_bytes:
            closed += self.close_segment()
        return closed

    @property
    def is_due(self) -> bool:
        """Whether the collected entries have waited for `limits.age_seconds`."""
        return bool(self._entries) and self.clock() - self._opened_at >= self.limits.age_seconds

    def close_segment(self) -> list[Acknowledged]:
        """Publish the collected entries; an empty list if there are none. Raises WriteFailed, and keeps the entries then."""
        self.check_process()
        if not self._entries:
            return []
        acknowledged = publish_segment(self.layout, list(self._entries.values()), origin=self.origin)
        self.discard()
        return [acknowledged]

    def discard(self) -> None:
        """Forget the collected entries."""
        self._entries, self._size_bytes, self._header_bytes = {}, 0, 0

    def check_process(self) -> None:
        """Raise CacheStoreError in any process but the one that made this object."""
        if self._pid != os.getpid():
            raise CacheStoreError("a writer belongs to the process that made it; open the store again in this one")


def publish_segment(layout: Layout, entries: list[Entry], *, origin: str, edition: int = 0) -> Acknowledged:
    """Write entries as one durable segment. Raises WriteFailed.

    If a damaged file or a segment marked for deletion has the segment's name, the next edition gets another name. The damaged file is left
    to `repair`. A name that is marked for deletion is never used again, as its file will be removed.
    """
    digest, chunks = build_segment(entries, origin=origin, edition=edition)
    if digest in marked_segments(layout):
        return publish_segment(layout, entries, origin=origin, edition=edition + 1)
    path = layout.segment(digest)
    file_bytes = sum(len(chunk) for chunk in chunks)
    contents = parse_contents(parse_header(bytes(chunks[0])[8:], file_bytes, where=path), file_bytes, where=path)
    make_folder(layout, layout.temporary, path.parent)
    if not publish(layout, path, chunks, read_only=True) and not _is_whole(path, digest, file_bytes):
        return publish_segment(layout, entries, origin=origin, edition=edition + 1)
    failpoint("segment.published")
    ref = ref_of(digest, contents)
    locations = {entry.key: Location(ref, entry.ordinal, entry.offset, entry.specs, entry.checksum) for entry in contents.entries}
    return Acknowledged(digest, contents, locations)


def _is_whole(path: Path, digest: str, file_bytes: int) -> bool:
    with suppress(FormatError, OSError):
        status = look_at(path)
        return status is not None and status.st_size == file_bytes and digest_file(path) == digest
    return False
