"""Checksums of files and of what goes into them: xxh3_128. They guard against accidents, not against tampering."""

from collections.abc import Iterable
from pathlib import Path
from typing import Final

import xxhash

from cachestore.files.opening import opened, read_into

Buffer = bytes | bytearray | memoryview

_BLOCK_BYTES: Final = 4 * 1024 * 1024


def digest_of(chunks: Iterable[Buffer]) -> str:
    """xxh3_128 over the chunks in order, 32 hex digits."""
    state = xxhash.xxh3_128()
    for chunk in chunks:
        state.update(chunk)
    return state.hexdigest()


def digest_file(path: Path) -> str:
    """xxh3_128 of a regular file's content. Raises FormatError for anything but a regular file, OSError as it comes."""
    state = xxhash.xxh3_128()
    buffer = memoryview(bytearray(_BLOCK_BYTES))
    with opened(path) as (descriptor, _status):
        offset = 0
        while count := read_into(descriptor, buffer, offset):
            state.update(buffer[:count])
            offset += count
    return state.hexdigest()
