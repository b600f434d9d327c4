"""Checksums of files and of what goes into them: xxh3_128. They guard against accidents, not against tampering."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import xxhash

from cachestore.files.opening import opened, read_into

Buffer = bytes | bytearray | memoryview

_BLOCK_BYTES: Final = 1024 * 1024

Checksum = xxhash.xxh3_128
"""A checksum in the making, of its first bytes if there are some: `update`, then `digest` or `hexdigest`."""


def digest_of(chunks: Iterable[Buffer]) -> str:
    """xxh3_128 over the chunks in order, 32 hex digits."""
    state = Checksum()
    for chunk in chunks:
        state.update(chunk)
    return state.hexdigest()


def read_blocks(descriptor: int) -> Iterator[tuple[int, memoryview]]:
    """A file from its start, as (offset, block). The buffer is used again, so each block is good until the next; 1 MiB stays in cache."""
    buffer = memoryview(bytearray(_BLOCK_BYTES))
    offset = 0
    while count := read_into(descriptor, buffer, offset):
        yield offset, buffer[:count]
        offset += count


def digest_file(path: Path) -> str:
    """xxh3_128 of a regular file's content. Raises FormatError for anything but a regular file, OSError as it comes."""
    with opened(path) as (descriptor, _status):
        return digest_of(block for _offset, block in read_blocks(descriptor))
