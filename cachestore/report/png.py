"""Encodes pixels as PNG without an image library."""

import struct
import zlib

import numpy as np
from numpy.typing import NDArray


def encode_png(pixels: NDArray[np.uint8]) -> bytes:
    """Return a PNG of `[height, width, 3]` RGB or `[height, width]` grey, uint8, with no side of 0. Raises ValueError for anything else."""
    if pixels.ndim not in {2, 3} or 0 in pixels.shape or pixels.shape[2:] not in {(), (3,)} or pixels.dtype != np.uint8:
        raise ValueError(f"a PNG needs uint8 [height, width] or [height, width, 3], not {pixels.dtype} {list(pixels.shape)}")
    height, width = pixels.shape[:2]
    rows = pixels.reshape(height, width, -1)
    # Filter 1 stores differences to the pixel on the left, which compresses smooth pictures to about two thirds.
    filtered = np.diff(rows, axis=1, prepend=np.zeros((height, 1, rows.shape[2]), np.uint8))
    lines = np.concatenate([np.ones((height, 1), np.uint8), filtered.reshape(height, -1)], axis=1)
    header = struct.pack(">IIBBBBB", width, height, 8, 2 if rows.shape[2] == 3 else 0, 0, 0, 0)
    png = b"\x89PNG\r\n\x1a\n"
    for kind, body in ((b"IHDR", header), (b"IDAT", zlib.compress(lines.tobytes(), 9)), (b"IEND", b"")):
        png += struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
    return png
