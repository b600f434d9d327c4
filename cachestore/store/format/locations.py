"""Entry locations: the values of the index, and what readers ask for. Reads no file.

On disk a location has 36 bytes, little-endian: segment number u32, ordinal u32, offset u64, layout number u32, checksum 16 bytes. The
copies of a key follow each other.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from cachestore.store.format.entry import CHECKSUM_BYTES, Specs

if TYPE_CHECKING:
    from typing_extensions import Self

_PACKED: Final = struct.Struct(f"<IIQI{CHECKSUM_BYTES}s")
LOCATION_BYTES: Final = _PACKED.size


@dataclass(frozen=True, slots=True)
class SegmentRef:
    """A segment as the index and snapshots describe it."""

    digest: str
    size_bytes: int
    entries: int
    origin: str


class Location(NamedTuple):
    """The location of one copy of an entry: enough to read and check it without the segment's header."""

    segment: SegmentRef
    ordinal: int
    offset: int
    specs: Specs
    checksum: bytes

    @property
    def size_bytes(self) -> int:
        """Bytes of the entry's tensors."""
        return self.specs.size_bytes


class Located(NamedTuple):
    """The locations of several entries, one copy each, as columns. That is faster for a batch than a list of `Location`."""

    segments: Sequence[SegmentRef]
    ordinals: Sequence[int]
    offsets: Sequence[int]
    specs: Sequence[Specs]
    checksums: Sequence[bytes]

    @classmethod
    def of(cls, locations: Sequence[Location]) -> "Self":
        """Make columns from a list of locations."""
        return cls(*zip(*locations, strict=True)) if locations else cls((), (), (), (), ())

    def location(self, row: int) -> Location:
        """The location in this row."""
        return Location(self.segments[row], self.ordinals[row], self.offsets[row], self.specs[row], self.checksums[row])


def pack_location(segment: int, ordinal: int, offset: int, layout: int, checksum: bytes) -> bytes:
    """Encode one location for the index."""
    return _PACKED.pack(segment, ordinal, offset, layout, checksum)


def unpack_firsts(values: Sequence[bytes]) -> list[tuple[int, int, int, int, bytes]]:
    """The first location in each of these index values: the copy that is read."""
    if set(map(len, values)) <= {LOCATION_BYTES}:
        return list(_PACKED.iter_unpack(b"".join(values)))
    return [_PACKED.unpack_from(value) for value in values]


def unpack_first(value: bytes) -> tuple[int, int, int, int, bytes]:
    """As `unpack_firsts`, for one value."""
    return _PACKED.unpack_from(value)


def unpack_locations(value: bytes) -> list[tuple[int, int, int, int, bytes]]:
    """All locations in an index value: (segment number, ordinal, offset, layout number, checksum)."""
    return [_PACKED.unpack(value)] if len(value) == LOCATION_BYTES else list(_PACKED.iter_unpack(value))
