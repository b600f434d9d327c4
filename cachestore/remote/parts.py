"""The values of one store: the helper brings them into parts of the local cache, or into memory where the cache has no room."""

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Final, NamedTuple

from cachestore.files import in_use
from cachestore.files.opening import read_at
from cachestore.remote.address import Address
from cachestore.remote.cache import Room, StoreCache
from cachestore.remote.downloads import Downloads, HelperRequest, downloads
from cachestore.remote.outline import KEYS, key_of

WINDOW_BYTES: Final = 256 * 1024 * 1024
"""Bytes that may be requested before they are needed."""
_JOINED_BYTES: Final = 2 * 1024 * 1024
"""Most bytes of one request for several entries. More would come faster by several requests at once."""
_GAP_BYTES: Final = 16 * 1024
"""Entries with no more than this between them are neighbours: one request brings them."""


class EntrySpan(NamedTuple):
    """The bytes of an entry in its segment."""

    digest: str
    start: int
    size: int
    ordinal: int


class _RangeRead:
    """One request for the bytes of neighbouring entries."""

    __slots__ = ("has_part", "left", "request", "size", "spans")

    def __init__(self, request: HelperRequest, spans: Sequence[EntrySpan], size: int, *, has_part: bool) -> None:
        self.request = request
        self.spans = spans
        self.size = size
        self.has_part = has_part
        """Whether the bytes are written into a part."""
        self.left = len(spans)
        """How many of its entries were not taken yet."""


class _Here:
    """What belongs to one process."""

    def __init__(self, user: object) -> None:
        self.helper: Downloads = downloads()
        self.helper.hold(user)
        self.guard = threading.Lock()
        """Held while the rest changes."""
        self.reads: dict[EntrySpan, _RangeRead] = {}
        """The request for each entry that was not taken yet."""
        self.order: deque[_RangeRead] = deque()
        """Requests of which the answer was not seen yet."""
        self.bytes = 0
        """Bytes that were requested and are not in a part."""
        self.was_here: bool | None = None
        """Whether all that was prefetched since the last `forget` was in the cache; None if nothing was."""
        self.is_filled = False
        """Whether that was so before the last `forget`, and nothing was requested since then."""

    def let_go(self, span: EntrySpan) -> None:
        read = self.reads.pop(span, None)
        if read is not None:
            read.left -= 1
            self.bytes -= 0 if read.left else read.size


class PartsSource:
    """Brings values of one store. Several threads may use it; a forked child goes on with a helper of its own."""

    def __init__(self, address: Address, cache: StoreCache, room: Room) -> None:
        self.address = address
        self.cache = cache
        self.room = room
        self._here = _Here(self)

    def _state(self) -> _Here:
        if self._here.helper is not downloads():  # this is a forked child
            self._here = _Here(self)
        return self._here

    def where(self, digest: str) -> str:
        """Return the address of a segment, for messages."""
        return self.address.of(key_of(KEYS.segment(digest)))

    def bring(self, spans: Sequence[EntrySpan], sizes: Mapping[str, int], *, again: bool = False) -> dict[EntrySpan, memoryview]:
        """Bring entries and wait for them. `sizes` has the sizes of their segments.

        They are in their parts afterwards, but for those that are returned: for these the cache had no room. With `again` all are fetched
        anew, written into the parts, and returned too. Raises RemoteFailed, with `errno` ENOENT if a segment does not exist any more.
        """
        here = self._state()
        with here.guard:
            known = {} if again else {span: read for span in spans if (read := here.reads.get(span)) and read.request.error is None}
            mine = known | self._request(here, [span for span in spans if span not in known], sizes, both=again)
        try:
            here.helper.wait(read.request for read in mine.values())
        finally:
            with here.guard:
                for span in spans:
                    here.let_go(span)
        bodies = ((span, read.spans[0].start, read.request.result()) for span, read in mine.items())
        return {span: memoryview(body)[span.start - start :][: span.size] for span, start, body in bodies if body}

    def clear(self, span: EntrySpan) -> None:
        """Note that an entry is not in its part."""
        with suppress(OSError):
            descriptor = os.open(self.cache.have(span.digest), in_use.WRITE_FLAGS)
            try:
                in_use.write_at(descriptor, b"\0", span.ordinal)
            finally:
                os.close(descriptor)

    def prefetch(self, spans: Iterable[EntrySpan], sizes: Mapping[str, int]) -> None:
        """Ask for entries that will be needed, without waiting."""
        here = self._state()
        with here.guard:
            here.was_here = here.was_here is not False
            self._request(here, [span for span in spans if span not in here.reads], sizes, soon=False)

    @property
    def is_filled(self) -> bool:
        """Whether the last iteration found all values in the cache, and nothing was missing since then. So looking for them is no use."""
        return self._state().is_filled

    @property
    def has_room(self) -> bool:
        """Whether more may be requested before it is needed."""
        here = self._state()
        here.helper.take()
        with here.guard:
            self._see_answers(here)
            return here.bytes < WINDOW_BYTES

    def forget(self) -> None:
        """Drop what was requested and not needed yet."""
        here = self._state()
        with here.guard:
            here.reads.clear()
            here.bytes = 0
            here.is_filled, here.was_here = here.is_filled if here.was_here is None else here.was_here, None

    def _see_answers(self, here: _Here) -> None:
        """Let go of what is in its part now, or failed. Answers come nearly in the order of their requests."""
        while here.order and not here.order[0].request.is_open:
            read = here.order.popleft()
            head = read.request.head or {}
            if read.has_part:
                self.room.written(read.size)
            self.room.is_full |= "full" in head
            if not read.request.body:
                for span in read.spans:
                    if here.reads.get(span) is read:
                        here.let_go(span)

    def _request(
        self, here: _Here, spans: Sequence[EntrySpan], sizes: Mapping[str, int], *, both: bool = False, soon: bool = True
    ) -> dict[EntrySpan, _RangeRead]:
        self._see_answers(here)
        reads: dict[EntrySpan, _RangeRead] = {}
        if spans:
            here.was_here = here.is_filled = False
        for joined in _join(spans):
            digest, start = joined[0].digest, joined[0].start
            key = key_of(KEYS.segment(digest))
            size = joined[-1].start + joined[-1].size - start
            body = {"do": "range", "address": str(self.address), "key": key, "start": start, "size": size, "soon": soon}
            has_part = self.room.take(size)
            if has_part:
                ordinals = [span.ordinal for span in joined]
                paths = {"path": str(self.cache.part(digest)), "have": str(self.cache.have(digest))}
                body |= {"part": {**paths, "bytes": sizes[digest], "ordinals": ordinals}, "both": both}
            read = _RangeRead(here.helper.send(body), joined, size, has_part=has_part)
            here.order.append(read)
            reads |= dict.fromkeys(joined, read)
            here.bytes += size
        for span in reads:
            here.let_go(span)
        here.reads |= reads
        return reads


def _join(spans: Sequence[EntrySpan]) -> list[list[EntrySpan]]:
    groups: list[list[EntrySpan]] = []
    for span in sorted(set(spans)):
        last = groups[-1][-1] if groups else None
        is_near = last is not None and last.digest == span.digest and span.start - (last.start + last.size) <= _GAP_BYTES
        if is_near and span.start + span.size - groups[-1][0].start <= _JOINED_BYTES:
            groups[-1].append(span)
        else:
            groups.append([span])
    return groups


class OpenPart:
    """An open part. `checked` says which of its entries were compared with their checksums, here and in this very file."""

    __slots__ = ("_have", "checked", "descriptor", "used")

    def __init__(self, descriptor: int, have: int, entries: int, used: int) -> None:
        self.descriptor = descriptor
        self._have = have
        self.checked = bytearray(entries)
        self.used = used

    def holds(self, ordinal: int) -> bool:
        """Whether an entry was written into the part. A hint."""
        with suppress(OSError):
            return bool(self.checked[ordinal]) or bytes(read_at(self._have, 1, ordinal)) == b"\1"
        return False

    def touch(self) -> None:
        """Note that the part is in use."""
        with suppress(OSError):
            os.utime(self._have)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        close(self.descriptor)  # `close` is bound here, as modules may be empty at the interpreter's end
        close(self._have)
