"""Tell animated GIF, WebP, PNG and AVIF files from still ones. Knows their containers, and decodes nothing."""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final

from cachestore.files.opening import open_foreign

SUFFIXES: Final = frozenset({".gif", ".webp", ".png", ".apng", ".avif", ".avifs"})
_MOST_BYTES: Final = 1 << 24
"""No further is looked for the second frame of a GIF, whose blocks have at most 255 bytes each."""
_MOST_PARTS: Final = 10_000
_PNG: Final = b"\x89PNG\r\n\x1a\n"


def is_animated_path(path: Path) -> bool:
    """Return whether a file on disk is an animation. One that cannot be read is not: it fails when its sample is read."""
    if path.suffix.lower() not in SUFFIXES:
        return False
    try:
        with open_foreign(path) as file:
            return is_animated(file)
    except (OSError, ValueError):  # a name with a NUL is no path
        return False


def is_animated(file: BinaryIO) -> bool:
    """Return whether a file, at its beginning, has several frames. A damaged one has as many as its whole parts."""
    head = file.read(12)
    if head.startswith(b"GIF8"):
        file.seek(0)
        return _frames_of_gif(file.read(_MOST_BYTES)) > 1
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return _frames_of_webp(file) > 1
    if head.startswith(_PNG):
        return any(_frames_of_png(file))
    return head[4:12] == b"ftypavis"


def _frames_of_png(file: BinaryIO) -> Iterator[bool]:
    at = len(_PNG)
    for _number in range(_MOST_PARTS):
        file.seek(at)
        size, name, count = struct.unpack(">I4sI", file.read(12).ljust(12, b"\0"))
        if name in (b"IDAT", bytes(4)):
            return
        if name == b"acTL":
            yield count > 1
        at += 12 + size


def _frames_of_webp(file: BinaryIO) -> int:
    """Count the frames of a WebP, up to 2."""
    found, at = 0, 12
    for _number in range(_MOST_PARTS):
        file.seek(at)
        name, size = struct.unpack("<4sI", file.read(8).ljust(8, b"\0"))
        if name == bytes(4) or found > 1:
            break
        found, at = found + (name == b"ANMF"), at + 8 + size + size % 2
    return found


def _frames_of_gif(data: bytes) -> int:
    """Count the frames of a GIF, up to 2."""
    found, at = 0, 13 + _table_bytes(data[10:11])
    while found < 2 and at < len(data):
        kind = data[at]
        if kind == 0x2C:
            found += 1
            at += 11 + _table_bytes(data[at + 9 : at + 10])
        elif kind == 0x21:
            at += 2
        else:
            break
        while at < len(data) and data[at]:
            at += data[at] + 1
        at += 1
    return found


def _table_bytes(flags: bytes) -> int:
    return 3 << (flags[0] & 7) + 1 if flags and flags[0] & 0x80 else 0
