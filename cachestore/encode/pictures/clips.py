"""Choose which frames of a video make up a clip: how many, from which one on, and at what rate. Opens no file.

A VAE that makes one latent frame from t frames takes 1, t + 1, 2t + 1, … frames. A clip gets the largest count that was asked for and
that the video has. If no rate was asked for, a clip has the file's own frames, one after the other. Otherwise frame n of a clip is the
one that is shown (n + 1/2) frame lengths after the beginning. This chooses the same frames if time stamps are rounded (Matroska rounds
them to milliseconds), and it also works for a variable rate.
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
from cachestore.core.spelling import option
from cachestore.core.words import plural
from cachestore.encode.pictures.variants import Variant

_FINEST = 1001
"""The largest denominator of a rate, as in 24000/1001."""


class Shape(NamedTuple):
    """The bucket of a video: width and height in pixels, and the number of frames."""

    width: int
    height: int
    frames: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """When the frames of a video are shown, in ticks of its stream."""

    times: NDArray[np.int64]
    """When each frame begins, rising; at least one."""
    end: int
    tick: Fraction
    """The length of a tick in seconds."""

    @property
    def seconds(self) -> Fraction:
        """The time from the beginning of the first frame to the end of the last."""
        return (self.end - int(self.times[0])) * self.tick

    @property
    def rate(self) -> Fraction:
        """The average number of frames a second; 0 if the only frame has no length."""
        return Fraction(0) if self.seconds <= 0 else (len(self.times) / self.seconds).limit_denominator(_FINEST)

    def count(self, rate: Fraction | None) -> int:
        """Return how many frames the video has at this rate, or of its own if `rate` is None; at least one."""
        return len(self.times) if rate is None else max(1, int(self.seconds * rate + Fraction(1, 2)))

    def take(self, rate: Fraction | None, start: int, frames: int) -> list[int]:
        """Return the times of the `frames` frames of a clip that begins at frame `start`, in order. A time may occur several times."""
        if rate is None:
            return self.times[start : start + frames].tolist()
        length = 1 / (rate * self.tick)
        middles = [ceil(length * (2 * number + 1) / 2) for number in range(start, start + frames)]
        indices = np.searchsorted(self.times - self.times[0], middles, side="left") - 1
        return self.times[np.maximum(indices, 0)].tolist()


@dataclass(frozen=True, slots=True)
class Clip:
    """A part of a video: which frames, and which part of each."""

    variant: Variant
    frames: int
    start: int
    """The first frame, counted at the rate of the clip."""
    rate: Fraction | None
    """The rate that was asked for; None for the file's own frames."""
    own_rate: Fraction

    @property
    def shape(self) -> Shape:
        """The bucket of the clip."""
        return Shape(*self.variant.bucket, self.frames)

    def transform(self) -> dict[str, Json]:
        """Return the clip's part of a key. It has the first frame instead of the clip's number, so that equal clips have equal keys."""
        rate = None if self.rate is None else str(self.rate)
        return {**self.variant.transform(), "bucket": list(self.shape), "start": self.start, "fps": rate}

    def facts(self) -> dict[str, Json]:
        """Return the facts that a catalog records. An unknown rate is 0."""
        rate = self.own_rate if self.rate is None else self.rate
        return {**self.variant.facts(), "bucket": list(self.shape), "start": [self.start], "fps": [rate.numerator, rate.denominator]}


def check_frames(frames: Sequence[int], factor: int) -> None:
    """Raise BadInput if the VAE cannot take one of these numbers of frames. The message names the nearest possible ones."""
    for count in frames:
        if count < 1 or (count - 1) % factor:
            below = max(0, count - 1) // factor * factor + 1
            raise BadInput(
                f"{option('frames', count)} does not suit this VAE: after the first frame it encodes {factor} frames at a time, so a video"
                f" has 1, {factor + 1}, {2 * factor + 1}, … frames; the nearest are {below} and {below + factor}",
                option="frames",
            )


def as_rate(fps: float) -> Fraction:
    """Return frames a second as an exact number: 23.976 stays 23.976, and 23.976024 becomes 24000/1001."""
    return Fraction(fps).limit_denominator(_FINEST)


def clip_of(request: Mapping[str, Json], timeline: Timeline) -> tuple[int, int, Fraction | None]:
    """Return a clip's number of frames, its first frame, and its rate. Raises EncodeFailed if the video is too short."""
    fps: Any = request.get("fps")
    rate = None if fps is None else as_rate(fps)
    listed, there = sorted(request["frames"]), timeline.count(rate)
    if listed[0] > there:
        at = "" if rate is None else f" at {float(rate):g} a second"
        raise EncodeFailed(
            f"the video is too short: it has {plural(there, 'frame')}{at} ({float(timeline.seconds):.2f} s), but the smallest count of"
            f" {option('frames')} is {listed[0]}: add a smaller count, or remove the sample"
        )
    frames = listed[bisect_right(listed, there) - 1]
    number, clips = int(request.get("clip", 0)), int(request.get("clips", 1))
    left_over = there - frames
    return frames, (2 * number * left_over + clips - 1) // (2 * max(1, clips - 1)), rate
