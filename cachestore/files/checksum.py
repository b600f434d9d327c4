"""xxh3_128 checksums of files and of their parts. They detect accidents, not tampering."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import xxhash

from cachestore.files.opening import opened, read_into

Buffer = bytes | bytearray | memoryview
_BLOCK_BYTES: Final = 1024 * 1024
Checksum = xxhash.xxh3_128
"""A checksum to `update` with bytes; then take `digest` or `hexdigest`."""


def digest_of(chunks: Iterable[Buffer]) -> str:
    """Return the xxh3_128 over the chunks in order, 32 hex digits."""
    state = Checksum()
    for chunk in chunks:
        state.update(chunk)
    return state.hexdigest()


def read_blocks(descriptor: int) -> Iterator[tuple[int, memoryview]]:
    """Yield a file from its start as (offset, block) with up to 1 MiB, which stays in the CPU's cache. The next block reuses the buffer."""
    buffer = memoryview(bytearray(_BLOCK_BYTES))
    offset = 0
    while count := read_into(descriptor, buffer, offset):
        yield offset, buffer[:count]
        offset += count


def digest_file(path: Path) -> str:
    """Return the xxh3_128 of a file. Raises FormatError for anything but a regular file, FileNotFoundError, ReadFailed."""
    with opened(path) as (descriptor, _status):
        return digest_of(block for _offset, block in read_blocks(descriptor))
