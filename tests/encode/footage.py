"""Videos of a few kilobytes, written by PyAV, whose frames can be told apart."""

from fractions import Fraction
from io import BytesIO
from typing import Any

import av
import numpy as np
from av.stream import Disposition

LOSSLESS: dict[str, Any] = {"kind": "matroska", "codec": "ffv1", "pix_fmt": "bgr0"}
"""Gives back the very pixels."""


def numbered(count, size=(32, 16), first=0):
    """So many frames [height, width, 3] of noise, of which the first pixel says which one it is."""
    width, height = size
    frames = [np.random.default_rng(number).integers(0, 256, (height, width, 3), np.uint8) for number in range(first, first + count)]
    for number, frame in enumerate(frames, start=first):
        frame[0, 0] = (number % 256, number // 256, 0)
    return frames


def moving(count, size=(96, 64)):
    """So many frames of slopes that move: what a codec keeps about as it is."""
    width, height = size
    down, across = np.mgrid[0:height, 0:width]
    return [np.stack([across + 2 * n, 2 * down + n, across + down], axis=-1).astype(np.uint8) for n in range(count)]


def numbers_of(frames):
    """Which frames of `numbered` these are."""
    return [int(frame[0, 0, 0]) + 256 * int(frame[0, 0, 1]) for frame in frames]


def write(
    frames,
    *,
    rate=16,
    times=None,
    kind="matroska",
    codec="ffv1",
    pix_fmt="bgr0",
    options=None,
    turn=None,
    path=None,
    container_options=None,
    has_sound=False,
    **tags,
):
    """The bytes of a video: one frame after the other at a rate, or at these times, in ticks of a thousandth; perhaps with silence.

    With a path it is written there first, as FFmpeg puts the table of an mp4 in front only in a file of its own.
    """
    buffer = BytesIO()
    with av.open(buffer if path is None else str(path), "w", format=kind, container_options=container_options or {}) as container:
        stream: Any = container.add_stream(codec, rate=rate, options=options or {})
        stream.height, stream.width = frames[0].shape[:2] if frames else (16, 32)
        stream.pix_fmt = pix_fmt
        for name, value in tags.items():
            setattr(stream.codec_context, name, value)
        if turn is not None:
            stream.set_display_rotation(turn)
        sound: Any = container.add_stream("aac", rate=8000) if has_sound else None
        tick = Fraction(1, 1000) if times is not None else 1 / Fraction(rate)
        if times is not None:
            stream.codec_context.time_base = tick
        container.start_encoding()
        for number, pixels in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(pixels, format="rgba" if pixels.shape[2] == 4 else "rgb24")
            frame = frame.reformat(format=pix_fmt, **({"dst_colorspace": tags["colorspace"]} if "colorspace" in tags else {}))
            frame.pts, frame.time_base = number if times is None else times[number], tick
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
        if sound is not None:
            container.mux([*sound.encode(_silence()), *sound.encode(None)])
    return buffer.getvalue() if path is None else path.read_bytes()


def _silence():
    frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
    frame.sample_rate, frame.pts = 8000, 0
    return frame


def write_sound(*, cover=None):
    """The bytes of a file with a second of silence, and perhaps a cover picture, a JPEG's bytes."""
    buffer = BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        sound = container.add_stream("aac", rate=8000)
        picture: Any = None
        if cover is not None:
            picture = container.add_stream("mjpeg", rate=1)
            picture.width, picture.height, picture.pix_fmt = 8, 8, "yuvj420p"
            picture.disposition = Disposition.attached_pic
        container.mux(sound.encode(_silence()))
        if picture is not None:
            packet = av.Packet(cover)
            packet.stream, packet.pts, packet.dts, packet.time_base = picture, 0, 0, Fraction(1, 1000)
            container.mux(packet)
        container.mux(sound.encode(None))
    return buffer.getvalue()
