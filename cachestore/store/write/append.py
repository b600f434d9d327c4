"""Append: collect entries in memory, write them as one segment, acknowledge them once the segment is durable."""

import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Final

from cachestore.core.dtypes import RawTensor
from cachestore.core.errors import BadInput, CacheStoreError, FormatError
from cachestore.core.keys import Json, Key
from cachestore.files.checksum import digest_file
from cachestore.files.failpoints import failpoint
from cachestore.files.opening import status_of
from cachestore.files.paths import Layout
from cachestore.files.publish import publish
from cachestore.store.format.entry import Entry, make_entry, split
from cachestore.store.format.locations import Location
from cachestore.store.format.marked import marked_segments
from cachestore.store.format.segment import ENTRY_LIMIT, SegmentContents, SegmentDraft, draft_of
from cachestore.store.read.snapshot import ref_of

if TYPE_CHECKING:
    from typing_extensions import Self

UNDER_WAY: Final = 2
"""How many segments are written at once, while a further one is filled. Each holds up to `SegmentLimits.size_bytes` of memory."""
HEADER_BYTES: Final = 4 * 1024 * 1024
"""Most header bytes of the entries of one segment, before JSON escaping. Far below the limit of readers."""


@dataclass(frozen=True, slots=True)
class SegmentLimits:
    """When a segment is closed. The caller checks `age_seconds` through `Appender.is_due`."""

    entries: int = ENTRY_LIMIT
    size_bytes: int = 64 * 1024 * 1024
    header_bytes: int = HEADER_BYTES
    age_seconds: float = 60.0


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """A durable segment."""

    digest: str
    contents: SegmentContents

    @property
    def keys(self) -> tuple[Key, ...]:
        """The keys of its entries."""
        return self.contents.entries.keys

    @property
    def locations(self) -> dict[Key, Location]:
        """The locations of its entries."""
        ref = ref_of(self.digest, self.contents)
        return {entry.key: Location(ref, entry.ordinal, entry.offset, entry.specs, entry.checksum) for entry in self.contents.entries}


@dataclass(slots=True)
class _Closed:
    """A segment that takes no more entries and is not acknowledged yet."""

    draft: SegmentDraft
    result: "Future[Acknowledged] | None" = None
    """What a thread makes of it; None if no thread has it."""
    is_written: bool = False
    """Whether a thread is done with it, or has failed. Looked at by each `put`, and faster to ask than `result`."""


@dataclass(slots=True)
class Appender:
    """Collects entries and publishes them as segments. Belongs to one process, and is used by one thread at a time.

    `put` only collects. An entry is acknowledged when `put`, `end_segment` or `close_segment` returns the `Acknowledged` of its segment;
    segments are returned in the order in which they were filled. Inside `with appender`, up to two full segments are written by threads
    while the next one is filled; these threads end with the block. Otherwise segments are written in the caller's thread.
    """

    layout: Layout
    origin: str = ""
    limits: SegmentLimits = field(default_factory=SegmentLimits)
    clock: Callable[[], float] = time.monotonic
    _draft: SegmentDraft = field(default_factory=SegmentDraft)
    _keys: set[Key] = field(default_factory=set[Key])
    """Of all entries that are not acknowledged yet."""
    _header_bytes: int = 0
    """Of the entries in the open segment, at most; 0 if it has none."""
    _opened_at: float = 0.0
    ended: int = 0
    """How many segments take no more entries. As many are acknowledged once all of these are durable."""
    _closed: deque[_Closed] = field(default_factory=deque[_Closed])
    _acknowledged: list[Acknowledged] = field(default_factory=list[Acknowledged])
    """Segments that are durable and not returned yet."""
    _threads: ThreadPoolExecutor | None = None
    _pid: int = field(default_factory=os.getpid)

    def __enter__(self) -> "Self":
        self._threads = ThreadPoolExecutor(UNDER_WAY, thread_name_prefix="cachestore-write")  # starts no thread yet
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown(wait=True)

    def put(self, key: Key, tensors: Mapping[str, RawTensor], meta: Mapping[str, Json]) -> list[Acknowledged]:
        """Collect an entry; its bytes and its JSON value are copied. Returns the segments that are acknowledged by now, usually none.

        A key that is already collected is left as it is. Raises BadInput for an entry that cannot be stored, and WriteFailed if a segment
        could not be published. The collected entries are then kept: put the same entry again, and call `close_segment` again.
        """
        self.check_process()
        if key not in self._keys:
            self._collect(make_entry(key, tensors, meta))
        return self._taken()

    def hold(self, key: Key, tensors: Mapping[str, RawTensor], meta: Mapping[str, Json]) -> list[Acknowledged]:
        """As `put`, but the bytes of large tensors are not copied: they must not change until their segment is acknowledged."""
        self.check_process()
        if key not in self._keys:
            self._collect(make_entry(key, tensors, meta), SegmentDraft.hold)
        return self._taken()

    def add(self, entry: Entry) -> list[Acknowledged]:
        """Collect an entry that `make_entry` made. Returns and raises as `put`."""
        self.check_process()
        if entry.key not in self._keys:
            self._collect(entry)
        return self._taken()

    def find(self, key: Key) -> dict[str, RawTensor] | None:
        """Return the tensors of an entry that is not acknowledged yet, copied; None for any other."""
        self.check_process()
        if key not in self._keys:
            return None
        drafts = (self._draft, *(closed.draft for closed in self._closed))
        specs, run = next(found for found in (draft.find(key) for draft in drafts) if found is not None)
        return split(specs, run)

    @property
    def is_due(self) -> bool:
        """Whether the collected entries have waited for `limits.age_seconds`."""
        return bool(self._draft) and self.clock() - self._opened_at >= self.limits.age_seconds

    def end_segment(self) -> list[Acknowledged]:
        """Begin to publish the collected entries, and return the segments that are acknowledged by now. Raises as `close_segment`."""
        self.check_process()
        self._end()
        return self._taken()

    def close_segment(self) -> list[Acknowledged]:
        """Publish the collected entries and wait. Returns what was not returned yet. Raises WriteFailed, and keeps the entries then."""
        self.check_process()
        if self._draft and not self._closed:
            self._closed.append(self._replaced())  # nothing else is being written, so this thread can do it
            self.ended += 1
        self._end()
        self._take(0)
        return self._taken()

    def discard(self) -> None:
        """Forget the collected entries."""
        self._replaced()
        self._closed.clear()
        self._keys.clear()

    def check_process(self) -> None:
        """Raise CacheStoreError in any process but the one that made this object."""
        if self._pid != os.getpid():
            raise CacheStoreError("a writer belongs to the process that made it; open the store again in this one")

    @property
    def _most_closed(self) -> int:
        return UNDER_WAY if self._threads is not None else 0

    def _collect(self, entry: Entry, add: Callable[[SegmentDraft, Entry], None] = SegmentDraft.add) -> None:
        meta = entry.meta
        header_bytes = entry.specs.header_bytes + (len(meta) if meta.isascii() else len(meta.encode("utf-8", "surrogatepass")))
        if header_bytes > HEADER_BYTES:
            raise BadInput(
                f"entry {entry.key} has names and a JSON value of {header_bytes} bytes, but at most {HEADER_BYTES} can be stored beside its"
                " tensors: shorten the value, or store it as a tensor"
            )
        if self._closed:
            self._take(self._most_closed)
        draft, limits = self._draft, self.limits
        if self._header_bytes and (
            draft.size_bytes + entry.specs.size_bytes > limits.size_bytes or self._header_bytes + header_bytes > limits.header_bytes
        ):
            self._end()
            draft = self._draft
        if not self._header_bytes:
            self._opened_at = self.clock()
        add(draft, entry)
        self._header_bytes += header_bytes
        self._keys.add(entry.key)
        if len(draft) >= limits.entries or draft.size_bytes >= limits.size_bytes:
            self._end()

    def _replaced(self) -> _Closed:
        self._draft.end_chunk()  # a thread that builds the segment then changes nothing that `find` reads
        closed = _Closed(self._draft)
        self._draft, self._header_bytes = SegmentDraft(closed.draft.blocks), 0
        return closed

    def _end(self) -> None:
        if self._draft:
            closed = self._replaced()
            self._closed.append(closed)
            self.ended += 1
            if self._threads is not None:
                closed.result = self._threads.submit(self._write, closed)
        self._take(self._most_closed)

    def _write(self, closed: _Closed) -> Acknowledged:
        try:
            return write_segment(self.layout, closed.draft, origin=self.origin)
        finally:
            closed.is_written = True

    def _take(self, left: int) -> None:
        """Take the results of closed segments in order, waiting until at most `left` are not acknowledged. Raises WriteFailed."""
        while self._closed and (len(self._closed) > left or self._closed[0].is_written):
            closed = self._closed[0]
            result, closed.result = closed.result, None
            try:
                acknowledged = self._write(closed) if result is None else result.result()
            except Exception:
                closed.is_written = False  # it is written again by the next call, in its own thread
                for other in self._closed:  # one error is enough for a full disk: what else failed is written again, too
                    if other.result is not None and other.result.exception() is not None:
                        other.result, other.is_written = None, False
                raise
            self._closed.popleft()
            self._keys.difference_update(acknowledged.keys)
            closed.draft.release()
            self._acknowledged.append(acknowledged)

    def _taken(self) -> list[Acknowledged]:
        if not self._acknowledged:
            return []
        taken, self._acknowledged = self._acknowledged, []
        return taken


def publish_segment(layout: Layout, entries: Iterable[Entry], *, origin: str) -> Acknowledged:
    """Write entries as one durable segment. Raises WriteFailed."""
    return write_segment(layout, draft_of(entries), origin=origin)


def write_segment(layout: Layout, draft: SegmentDraft, *, origin: str, edition: int = 0) -> Acknowledged:
    """Write a segment durably. Raises WriteFailed. Several threads may write segments at once.

    If a damaged file or a segment marked for deletion has the segment's name, the next edition gets another name. The damaged file is left
    to `repair`. A name that is marked for deletion is never used again, as its file will be removed.
    """
    digest, chunks, contents = draft.build(origin=origin, edition=edition)
    if digest in marked_segments(layout):
        return write_segment(layout, draft, origin=origin, edition=edition + 1)
    path = layout.segment(digest)
    if not publish(layout, path, chunks, digest=digest, read_only=True) and not _is_whole(path, digest, contents.size_bytes):
        return write_segment(layout, draft, origin=origin, edition=edition + 1)
    failpoint("segment.published")
    return Acknowledged(digest, contents)


def _is_whole(path: Path, digest: str, file_bytes: int) -> bool:
    with suppress(FormatError, OSError):
        status = status_of(path)
        return status is not None and status.st_size == file_bytes and digest_file(path) == digest
    return False
