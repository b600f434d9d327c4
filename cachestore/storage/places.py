"""Where an entry stands: the value of the index, and the unit in which readers ask for bytes. Pure.

On disk a place is 36 bytes, little-endian: segment number u32, ordinal u32, offset u64, layout number u32, checksum 16 bytes.
Copies of one key follow each other.
"""

import struct
from dataclasses import dataclass
from typing import Final, NamedTuple

from cachestore.storage.entry import CHECKSUM_BYTES, Specs, size_of

_PACKED: Final = struct.Struct(f"<IIQI{CHECKSUM_BYTES}s")
PLACE_BYTES: Final = _PACKED.size


@dataclass(frozen=True, slots=True)
class SegmentRef:
    """A segment as index and snapshot know it."""

    digest: str
    size_bytes: int
    entries: int
    origin: str


class Place(NamedTuple):
    """One copy of an entry: enough to read and check it without looking at the segment's header."""

    segment: SegmentRef
    ordinal: int
    offset: int
    specs: Specs
    checksum: bytes

    @property
    def size_bytes(self) -> int:
        """Bytes of the entry's tensors."""
        return size_of(self.specs)


def pack_place(segment: int, ordinal: int, offset: int, layout: int, checksum: bytes) -> bytes:
    """One place as it stands in the index."""
    return _PACKED.pack(segment, ordinal, offset, layout, checksum)


def unpack_first(value: bytes) -> tuple[int, int, int, int, bytes]:
    """The first place in an index value: the copy that is read."""
    return _PACKED.unpack_from(value)


def unpack_places(value: bytes) -> list[tuple[int, int, int, int, bytes]]:
    """All places in an index value: (segment number, ordinal, offset, layout number, checksum)."""
    return [_PACKED.unpack(value)] if len(value) == PLACE_BYTES else list(_PACKED.iter_unpack(value))
