"""Read animated WebP and AVIF files as clips, by Pillow. Animated GIF and PNG are read by FFmpeg, which disposes of frames as browsers do.

A frame is what a viewer shows: whole, with what earlier frames left. It is shown from the end of the frame before it for as long as the
file says; one without a time is shown for 100 ms. How often an animation repeats is ignored.
"""

from collections.abc import Collection, Iterator
from fractions import Fraction
from typing import BinaryIO, Final

import numpy as np
from PIL import Image

from cachestore.core.errors import EncodeFailed
from cachestore.encode.pictures import images
from cachestore.encode.pictures.buckets import Size
from cachestore.encode.pictures.clips import Timeline

_HEAD_BYTES: Final = 12
TICK: Final = Fraction(1, 1_000_000)
_USUAL: Final = 100.0
_MOST_BYTES: Final = 1 << 30
"""As of a picture: the file is in memory while its frames are decoded."""


def is_one(file: BinaryIO) -> bool:
    """Return whether a file is a GIF, PNG, WebP or AVIF of several frames. Leaves it at its beginning."""
    return (_head_of(file).startswith((b"GIF8", b"\x89PNG\r\n\x1a\n")) or _may_be(file)) and images.count_frames(file) > 1


def is_read_here(file: BinaryIO) -> bool:
    """Return whether a file is a WebP or AVIF of several frames. Leaves it at its beginning."""
    return _may_be(file) and images.count_frames(file) > 1


def _may_be(file: BinaryIO) -> bool:
    head = _head_of(file)
    return (head[:4], head[8:12]) == (b"RIFF", b"WEBP") or head[4:12] in (b"ftypavif", b"ftypavis", b"ftypmif1", b"ftypmsf1")


def _head_of(file: BinaryIO) -> bytes:
    file.seek(0)
    head = file.read(_HEAD_BYTES)
    file.seek(0)
    return head


def measure(file: BinaryIO) -> tuple[Size, Timeline]:
    """Return the size of the frames and when each is shown. Decodes all frames. Raises EncodeFailed."""
    times, now, size = list[int](), 0, Size(1, 1)
    for time, end, frame in _shown(file):
        times.append(time)
        now, size = end, Size(*frame.size)
    return size, Timeline(np.array(times, np.int64), now, TICK)


def estimate(file: BinaryIO) -> tuple[Size, Timeline]:
    """Return an estimate of `measure` by the first frame alone: times are evenly spaced. Raises EncodeFailed."""
    count = images.count_frames(file)
    _time, length, frame = next(_shown(file))
    return Size(*frame.size), Timeline(np.arange(count, dtype=np.int64) * length, count * length, TICK)


def frames_at(file: BinaryIO, times: Collection[int]) -> Iterator[tuple[int, Image.Image]]:
    """Yield (time, frame in RGBA) of the frames that are shown from these times on, in order. Raises EncodeFailed."""
    last, left = max(times, default=-1), set(times)
    for time, _end, frame in _shown(file):
        if time in left:
            left.discard(time)
            yield time, frame
        if time >= last:
            break
    if left:
        raise EncodeFailed("the animation changed while it was read: run the same command again")


def _shown(file: BinaryIO) -> Iterator[tuple[int, int, Image.Image]]:
    file.seek(0)
    data = file.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise EncodeFailed(f"the animation has more than {_MOST_BYTES >> 30} GiB: convert it to a video")
    now = 0.0
    for frame, shown in images.decode_frames(data):
        begin, now = now, now + (shown if shown > 0 else _USUAL)
        yield round(begin / 1000 / TICK), round(now / 1000 / TICK), frame
