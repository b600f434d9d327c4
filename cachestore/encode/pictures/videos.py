"""Decode frames of video files. Imports PyAV, which only the extra `video` installs.

The rules are part of every video's key, through the name of the transform (`resamplers`):

* The frames are those of the best video stream that is no cover picture, in the order and at the times of its time stamps. Frames that an
  edit list hides are left out.
* A frame is upright 8-bit RGB. Quarter turns and mirroring of the display matrix are applied. Pixels that are not square are as wide as
  they are shown. Transparency is composited on white; that of VP8 and VP9 is a second picture beside each, which libvpx decodes. Colours
  are converted by the frame's own matrix and range, or, if it has none, as FFmpeg does it (BT.601). High dynamic range is refused.
* Interlaced frames are not deinterlaced.
* A file that ends early is refused, and so is one in which a needed frame is damaged.
* Animated GIF, PNG, WebP and AVIF files are videos too; the last two are read by Pillow (`animations`).

No other file is ever opened: playlists, references to other files and network names are refused. FFmpeg runs in the calling thread alone.
"""

from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from fractions import Fraction
from os import SEEK_END
from typing import Any, BinaryIO, Final, cast

import av
import numpy as np
from av.container import InputContainer
from av.stream import Disposition
from av.video.frame import VideoFrame
from av.video.reformatter import Interpolation, VideoReformatter
from av.video.stream import VideoStream
from PIL import Image

from cachestore.core.errors import EncodeFailed
from cachestore.core.words import plural
from cachestore.encode.families.resamplers import DEFAULT, Resample
from cachestore.encode.pictures import animations, images
from cachestore.encode.pictures.buckets import CropBox, Size
from cachestore.encode.pictures.clips import Timeline
from cachestore.encode.pictures.images import Picture
from cachestore.encode.pictures.resizing import fit, size_of

Frames = np.ndarray[Any, np.dtype[np.uint8]]
"""[F, H, W, 3]."""
FORMATS: Final = "mov,matroska,avi,mpegts,mpeg,mpegvideo,flv,asf,ogg,ivf,gif,apng"
"""FFmpeg's demuxers that may open a file. Playlists (hls, concat, dash) and devices are left out on purpose."""
_HEAD_BYTES: Final = 4096
_EBML, _SEGMENT = b"\x1aE\xdf\xa3", b"\x18S\x80g"
_BUFFER_BYTES: Final = 1 << 17
_OPTIONS: Final = {"format_whitelist": FORMATS, "protocol_whitelist": ""}
_MOST_PIXELS: Final = 178_956_970
"""Of a frame: as many as Pillow decodes of a picture. FFmpeg itself would take memory for 268 million as soon as a header states them."""
_MOST_FRAMES: Final = 1 << 24
"""More than a video of a week has. A header may state any number."""
_SCALING: Final = Interpolation.BILINEAR | Interpolation.FULL_CHR_H_INT | Interpolation.ACCURATE_RND
"""How swscale scales the colour planes, which have half the width and height. Without the last two flags it takes the nearest colour, which
is up to 115 levels off beside edges. This takes 6 ms instead of 1 at 1280 x 720; bicubic takes 13."""
_TURNS: Final = {
    (1, 0, 0, 1): None,
    (-1, 0, 0, 1): Image.Transpose.FLIP_LEFT_RIGHT,
    (-1, 0, 0, -1): Image.Transpose.ROTATE_180,
    (1, 0, 0, -1): Image.Transpose.FLIP_TOP_BOTTOM,
    (0, 1, 1, 0): Image.Transpose.TRANSPOSE,
    (0, 1, -1, 0): Image.Transpose.ROTATE_270,
    (0, -1, -1, 0): Image.Transpose.TRANSVERSE,
    (0, -1, 1, 0): Image.Transpose.ROTATE_90,
}
"""The turn that makes a picture upright, by the signs of the first two columns and rows of a display matrix."""
_ON_THEIR_SIDE: Final = frozenset(turn for signs, turn in _TURNS.items() if signs[0] == 0)
_HIGH_RANGE: Final = {16: "PQ, smpte2084", 18: "HLG, arib-std-b67"}
_MEND: Final = "copy it again, or remove its sample"
_LIBVPX: Final[Mapping[str, str]] = {"vp8": "libvpx", "vp9": "libvpx-vp9"}
"""The decoders that read the alpha of a WebM, by codec. FFmpeg's own leave it out in silence."""
_INDEXED: Final = frozenset({"mov", "matroska", "webm", "avi"})
"""Formats that say where their key frames are. In others FFmpeg looks for a time, and may begin within a group of pictures."""
_LATEST_SECONDS: Final = 1.0
"""A Matroska file is incomplete if its packets end more than this before the duration in its header."""


@dataclass(frozen=True, slots=True)
class Video:
    """What is known of a video before its frames are decoded."""

    size: Size
    """The size as shown, upright."""
    timeline: Timeline
    rate: Fraction
    """The average number of frames a second; 0 if it is not known."""
    has_sound: bool = False
    """Whether its file has sound. Only `measure` finds out."""


def measure(file: BinaryIO) -> Video:
    """Return a video's size and times, from its packets and its first frame. Other frames are not decoded. Raises EncodeFailed."""
    if animations.is_read_here(file):
        size, timeline = animations.measure(file)
        return Video(size, timeline, timeline.rate)
    with _opened(file) as container:
        stream = _stream_of(container)
        timeline = _timeline(container, stream)
    with _opened(file) as container:
        stream = _stream_of(container)
        first = next(_decoded(container, stream), None)
        if first is None:
            raise EncodeFailed(f"the video has no frame that can be decoded: {_MEND}")
        _refuse_high_range(first)
        counted, stated = timeline.rate, stream.average_rate  # what the container states counts, if it is within 1 %
        rate = stated if stated and abs(stated - counted) * 100 <= counted else counted
        return Video(_size_of(first, stream), timeline, rate, bool(container.streams.audio))


def estimate(file: BinaryIO) -> Video:
    """Return an estimate of `measure` from the header and the first frame: times are evenly spaced. Raises EncodeFailed."""
    if animations.is_read_here(file):
        size, timeline = animations.estimate(file)
        return Video(size, timeline, timeline.rate)
    with _opened(file) as container:
        stream = _stream_of(container)
        rate = stream.average_rate or stream.guessed_rate or Fraction(25)
        seconds = Fraction(container.duration or 0, av.time_base)
        frames = min(max(1, stream.frames or round(seconds * rate)), _MOST_FRAMES)
        first = next(_decoded(container, stream), None)
        if first is not None:
            _refuse_high_range(first)
        size = Size(stream.width, stream.height) if first is None else _size_of(first, stream)
        if min(size) < 1:
            raise EncodeFailed(f"the video has no pixels ({size.width} x {size.height}): {_MEND}")
        says_nothing, promised = not (stream.frames or container.duration), _promised_bytes(file, stream)
    if says_nothing or promised > file.seek(0, SEEK_END):
        return measure(file)  # a file that seems to end early is counted too
    return Video(size, Timeline(np.arange(frames, dtype=np.int64), frames, 1 / rate), rate)


def _refuse_high_range(frame: VideoFrame) -> None:
    if (transfer := _HIGH_RANGE.get(int(frame.color_trc))) is not None:
        raise EncodeFailed(
            f"the video has high dynamic range ({transfer}), which would look pale: convert it to standard range first, with a tone"
            " mapping that you choose, such as FFmpeg's filter `tonemap`"
        )


def _promised_bytes(file: BinaryIO, stream: VideoStream) -> int:
    """Return how long a file is at least, by its header; 0 if that does not say."""
    last = stream.index_entries[-1] if len(stream.index_entries) else None
    file.seek(0)
    head = file.read(_HEAD_BYTES)
    if head.startswith(b"RIFF"):
        return 8 + int.from_bytes(head[4:8], "little")
    at = head.find(_SEGMENT) if head.startswith(_EBML) else -1
    if at < 0:
        return 0 if last is None else last.pos + last.size
    at += len(_SEGMENT)
    length = 9 - head[at : at + 1][0].bit_length() if head[at : at + 1] else 0
    size = int.from_bytes(head[at : at + length], "big") & ((1 << 7 * length) - 1)
    return 0 if size == (1 << 7 * length) - 1 else at + length + size  # all ones: not known


def take(file: BinaryIO, times: Sequence[int], bucket: Size, box: CropBox, resample: Resample = DEFAULT) -> Frames:
    """Return the frames that are shown at these times, scaled and cropped like a picture: uint8 [F, height, width, 3].

    `times` must rise; one may occur several times. EncodeFailed if a needed frame cannot be decoded, or if their size changes.
    """
    made, at = np.empty((len(times), bucket.height, bucket.width, 3), np.uint8), 0
    for picture, uses in shown_at(file, times):
        opaque = images.on_white(picture) if isinstance(picture, Image.Image) and picture.mode == "RGBA" else picture
        made[at : at + uses] = fit(opaque, bucket, box, resample)
        at += uses
    return made


def shown_at(file: BinaryIO, times: Sequence[int]) -> Iterator[tuple[Picture, int]]:
    """Yield the frames that are shown at these times, each once, and at how many of the times. Those with alpha are in RGBA."""
    uses, size = Counter(times), None
    if animations.is_read_here(file):
        yield from ((frame, uses[time]) for time, frame in animations.frames_at(file, uses))
        return
    for frame in _frames_at(file, list(uses)):
        picture = _upright(frame)
        if size not in (None, size_of(picture)):
            now = tuple(size_of(picture))
            raise EncodeFailed(
                f"the frame size changes from {tuple(size)} to {now} at {float(frame.time or 0):.2f} s: convert the video to one size"
            )
        size = size_of(picture)
        yield picture, uses[_checked_time(frame.pts)]


def _frames_at(file: BinaryIO, times: Sequence[int]) -> Iterator[VideoFrame]:
    if not times:
        return
    wanted, last = set(times), times[-1]
    with closing(_frames_from(file, times[0])) as frames:
        for frame in frames:
            time = _checked_time(frame.pts)
            if time in wanted:
                wanted.discard(time)
                yield frame
            if time >= last:
                break
    if wanted:
        raise EncodeFailed(
            f"the video is damaged or incomplete: {len(wanted)} of {plural(len(times), 'frame')} that its packets"
            f" promise cannot be decoded: {_MEND}"
        )


def _frames_from(file: BinaryIO, time: int) -> Generator[VideoFrame]:
    """Yield frames in order. The first is not later than `time`: found by seeking, or else the first of the file."""
    with _opened(file) as container:
        stream = _stream_of(container)
        is_indexed = not _INDEXED.isdisjoint(container.format.name.split(","))
        try:
            if is_seeking := is_indexed and time > (stream.start_time or 0):
                container.seek(time, stream=stream)  # to the last key frame before it
        except av.FFmpegError:
            is_seeking = False
        if is_seeking:
            frames = _decoded(container, stream)
            first = next(frames, None)
            if first is not None and _checked_time(first.pts) <= time:
                yield first
                yield from frames
                return
    with _opened(file) as container:
        yield from _decoded(container, _stream_of(container))


@contextmanager
def _opened(file: BinaryIO) -> Generator[InputContainer]:
    file.seek(0)
    if not file.read(1):
        raise EncodeFailed("the file is empty (0 bytes): copy it again, or remove its sample")
    file.seek(0)
    try:
        with av.open(file, mode="r", container_options=_OPTIONS, io_open=_refuse, buffer_size=_BUFFER_BYTES, **reading_tags()) as container:
            yield container
    except EncodeFailed:
        raise
    except av.FFmpegError as error:
        if isinstance(error, MemoryError):
            raise
        raise EncodeFailed(f"the video is damaged, incomplete or of no known format ({error.strerror or error}): {_MEND}") from error


def reading_tags(version: str = av.__version__) -> dict[str, Any]:
    """Return the arguments with which `av.open` reads tags that are not UTF-8. From 19 on it does so by itself, and refuses them."""
    return {"metadata_errors": "replace"} if int(version.partition(".")[0]) < 19 else {}


def _refuse(url: str, *_rest: object) -> Any:
    raise EncodeFailed(f"the video refers to another file ({url!r}), which is not opened: give that file itself")


def _stream_of(container: InputContainer) -> VideoStream:
    streams = [stream for stream in container.streams.video if not stream.disposition & Disposition.attached_pic]
    best = container.streams.best("video")
    stream = next((stream for stream in streams if best is not None and stream.index == best.index), streams[0] if streams else None)
    if stream is None:
        others = ", ".join(sorted({stream.type for stream in container.streams})) or "nothing"
        raise EncodeFailed(f"the file holds no video, but {others}: give a video, or remove its sample")
    if cast("object", stream.codec_context) is None:
        raise EncodeFailed("the video has a codec that this PyAV does not know: convert it, such as to H.264")
    stream.codec_context.thread_count = 1
    stream.codec_context.options = {"err_detect": "explode", "threads": "1", "max_pixels": str(_MOST_PIXELS)}
    return stream


def _timeline(container: InputContainer, stream: VideoStream) -> Timeline:
    """Return the times of all frames, from their packets. Raises EncodeFailed if there are none, or if the file ends early."""
    shown: list[tuple[int, int]] = []
    count, until = 0, Fraction(0)
    for packet in container.demux():
        if packet.is_corrupt:
            raise EncodeFailed(f"the file ends early, or a part of it is damaged: {_MEND}")
        if packet.size <= 0:
            continue
        time, length = packet.pts if packet.pts is not None else packet.dts, packet.duration or 0
        until = until if time is None else max(until, (time + length) * Fraction(packet.time_base))
        if packet.stream_index == stream.index:
            count += 1
            if count > _MOST_FRAMES:
                raise EncodeFailed(f"the video has more than {_MOST_FRAMES:,} frames: cut it into parts")
            # of VP8 a packet may have a reference frame that is not shown; other codecs put those into packets of shown frames
            is_invisible = stream.codec_context.name == "vp8" and not memoryview(packet)[0] & 0x10
            if not packet.is_discard and not is_invisible:
                shown.append((_checked_time(time), length))
    _check_whole(container, stream, count, until)
    if not shown:
        raise EncodeFailed(f"the video has no frames: {_MEND}")
    times = np.unique(np.array([time for time, _length in shown], np.int64))
    last, length = max(shown)
    if length <= 0 and len(times) > 1:
        length = int(times[-1] - times[-2])
    return Timeline(times, last + max(0, length), stream.time_base or Fraction(1, av.time_base))


def _checked_time(time: int | None) -> int:
    if time is None:
        raise EncodeFailed("its frames have no time stamps: convert the video, such as to .mp4")
    return time


def _check_whole(container: InputContainer, stream: VideoStream, packets: int, until: Fraction) -> None:
    """Raise EncodeFailed if the header says that the file has noticeably more. FFmpeg reads most incomplete files without an error."""
    formats = container.format.name.split(",")
    lacking = stream.frames - packets
    is_cut = lacking > 0 if "mov" in formats else lacking > 1 + stream.frames // 50
    if "matroska" in formats and container.duration is not None:
        is_cut = is_cut or Fraction(container.duration, av.time_base) - until > _LATEST_SECONDS
    if is_cut:
        raise EncodeFailed(
            f"the file ends early: it has {plural(packets, 'frame')}, the last at {float(until):.2f} s, but its header says there is"
            f" more: {_MEND}"
        )


def _alpha_decoder(stream: VideoStream) -> str | None:
    """Return the decoder for a stream of Matroska whose alpha is a second picture beside each; None without. Raises EncodeFailed."""
    if ("alpha_mode", "1") not in {(name.lower(), value) for name, value in stream.metadata.items()}:
        return None
    codec = stream.codec_context.name
    coded = stream.codec_context.codec.canonical_name
    if (decoder := _LIBVPX.get(coded)) in av.codecs_available:
        return decoder
    raise EncodeFailed(
        f"the video has an alpha beside its {codec} pictures, which this PyAV cannot decode: convert it, such as to ProRes 4444, or to a"
        " video without alpha"
    )


def _decoded(container: InputContainer, stream: VideoStream) -> Iterator[VideoFrame]:
    decoder = _alpha_decoder(stream)
    for frame in container.decode(stream) if decoder is None else _decoded_by(container, stream, decoder):
        if frame.is_corrupt:
            raise EncodeFailed(f"the video is damaged at {float(frame.time or 0):.2f} s: {_MEND}")
        yield frame


def _decoded_by(container: InputContainer, stream: VideoStream, name: str) -> Iterator[VideoFrame]:
    decoder = cast("av.VideoCodecContext", av.CodecContext.create(name, "r"))
    decoder.extradata, decoder.thread_count = stream.codec_context.extradata, 1
    decoder.options = dict(stream.codec_context.options)
    for packet in container.demux(stream):
        yield from decoder.decode(packet)


def _upright(frame: VideoFrame) -> Picture:
    has_alpha = any(component.is_alpha for component in frame.format.components)
    converted = VideoReformatter().reformat(frame, format="rgba" if has_alpha else "rgb24", interpolation=_SCALING, threads=1)
    pixels, turn = cast("images.Pixels", converted.to_ndarray()), _turn_of(frame)
    if turn is not None:
        return images.as_image(pixels).transpose(turn)
    return images.as_image(pixels) if has_alpha else pixels


def _turn_of(frame: VideoFrame) -> Image.Transpose | None:
    """Return the turn that makes a frame upright by its display matrix; None if no turn is needed, or none would."""
    matrix = frame.side_data.get("DISPLAYMATRIX")
    if matrix is None:
        return None
    numbers = np.frombuffer(bytes(matrix), "<i4").astype(np.int64)
    first = numbers[[0, 1, 3, 4]]
    signs = tuple(np.sign(np.where(np.abs(first) * 100 < np.abs(first).max(), 0, first)).tolist())
    return _TURNS.get(signs)


def _size_of(frame: VideoFrame, stream: VideoStream) -> Size:
    width, height = frame.width, frame.height
    if min(width, height) < 1:
        raise EncodeFailed(f"the video has no pixels ({width} x {height}): {_MEND}")
    shown = Size(max(1, round(width * (stream.sample_aspect_ratio or 1))), height)
    return Size(*reversed(shown)) if _turn_of(frame) in _ON_THEIR_SIDE else shown
