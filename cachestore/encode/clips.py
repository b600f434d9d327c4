"""Which frames of a video a unit is made of: how many, from where, at what rate. Pure: no file is opened here.

A VAE that makes one latent frame of t frames takes 1, t + 1, 2t + 1, … of them. A video is encoded at the largest such count that was
asked for and that it can fill. Without a rate of its own a clip has the file's frames as they come; with one, frame n of a clip is what is
shown (n + 1/2) frame lengths after its beginning, just before the next one would be due. So time stamps that are rounded, as Matroska's
are to milliseconds, take and leave out the same frames as exact ones, and a variable rate needs no rule of its own.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cachestore.core.errors import BadInput, EncodeFailed
from cachestore.core.keys import Json
from cachestore.encode.views import View

_FINEST = 1001
"""The largest denominator of a rate, as in 24000/1001."""


class Shape(NamedTuple):
    """Width and height in pixels, and frames. Names the bucket of a video."""

    width: int
    height: int
    frames: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """When the frames of a video are shown, in ticks of its stream."""

    times: NDArray[np.int64]
    """Of each frame, rising; at least one."""
    end: int
    """When the last one ends."""
    tick: Fraction
    """Seconds."""

    @property
    def seconds(self) -> Fraction:
        """From the first frame's beginning to the last one's end."""
        return (self.end - int(self.times[0])) * self.tick

    @property
    def rate(self) -> Fraction:
        """Frames a second, on average; 0 where its only frame has no length."""
        return Fraction(0) if self.seconds <= 0 else (len(self.times) / self.seconds).limit_denominator(_FINEST)

    def count(self, rate: Fraction | None) -> int:
        """How many frames it has at a rate, or as it is: at least one."""
        return len(self.times) if rate is None else max(1, int(self.seconds * rate + Fraction(1, 2)))

    def take(self, rate: Fraction | None, start: int, frames: int) -> list[int]:
        """The times of the frames that a clip shows, in order, from its frame `start` on; one may come several times."""
        if rate is None:
            return self.times[start : start + frames].tolist()
        length = 1 / (rate * self.tick)
        middles = [ceil(length * (2 * number + 1) / 2) for number in range(start, start + frames)]
        places = np.searchsorted(self.times - self.times[0], middles, side="left") - 1
        return self.times[np.maximum(places, 0)].tolist()


@dataclass(frozen=True, slots=True)
class Clip:
    """A part of a video: which frames, and which part of each."""

    view: View
    frames: int
    start: int
    """Of the clip, in frames at its own rate."""
    rate: Fraction | None
    """What was asked for; None for the file's own frames."""
    own_rate: Fraction
    """Of the file."""

    @property
    def shape(self) -> Shape:
        """Its bucket."""
        return Shape(*self.view.bucket, self.frames)

    def transform(self) -> dict[str, Json]:
        """Its part of a key. The beginning stands for the number of the clip, so that equal clips have equal keys."""
        rate = None if self.rate is None else str(self.rate)
        return {**self.view.transform(), "bucket": list(self.shape), "start": self.start, "fps": rate}

    def facts(self) -> dict[str, Json]:
        """What a catalog keeps of it; a rate that nothing tells is 0."""
        rate = self.own_rate if self.rate is None else self.rate
        return {**self.view.facts(), "bucket": list(self.shape), "start": [self.start], "fps": [rate.numerator, rate.denominator]}


def check_frames(frames: Sequence[int], factor: int) -> None:
    """Refuse counts of frames that a VAE cannot take. Raises BadInput that names the nearest ones."""
    for count in frames:
        if count < 1 or (count - 1) % factor:
            below = max(0, count - 1) // factor * factor + 1
            raise BadInput(
                f"--frames {count} does not suit this VAE: after the first frame it encodes {factor} frames at a time, so a video"
                f" has 1, {factor + 1}, {2 * factor + 1}, … frames; the nearest are {below} and {below + factor}"
            )


def as_rate(fps: float) -> Fraction:
    """Frames a second as an exact number: 23.976 stays that, and 23.976024 is 24000/1001."""
    return Fraction(fps).limit_denominator(_FINEST)


def clip_of(request: Mapping[str, Json], timeline: Timeline) -> tuple[int, int, Fraction | None]:
    """How many frames a request wants of a video, from which on, and at what rate. Raises EncodeFailed for a video that is too short."""
    fps: Any = request.get("fps")
    rate = None if fps is None else as_rate(fps)
    listed, there = sorted(request["frames"]), timeline.count(rate)
    if listed[0] > there:
        at = "" if rate is None else f" at {float(rate):g} a second"
        raise EncodeFailed(
            f"the video is too short: it has {there} frames{at} ({float(timeline.seconds):.2f} s), but the smallest count of"
            f" --frames is {listed[0]}"
        )
    frames = listed[bisect_right(listed, there) - 1]
    number, clips = int(request.get("clip", 0)), int(request.get("clips", 1))
    left_over = there - frames
    return frames, (2 * number * left_over + clips - 1) // (2 * max(1, clips - 1)), rate
