"""How fast a pass goes now, and how long it will still take: from what one observer has seen in about the last minute."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import exp
from typing import Final

from cachestore.core.keys import Json
from cachestore.files.paths import Layout
from cachestore.jobs.share.progress import Observer, PassStatus

MEMORY_SECONDS: Final = 60.0
"""What was seen so long ago counts for about a third of what is seen now."""

FIRST_SECONDS: Final = 3.0
"""How long an encoder is watched before its rate is shown."""


@dataclass(slots=True)
class _Track:
    """What was seen of one encoder: units in seconds, older ones counting less."""

    at: float
    through: int
    units: float = 0.0
    seconds: float = 0.0

    @property
    def rate(self) -> float | None:
        return self.units / self.seconds if self.seconds >= FIRST_SECONDS and self.units else None


@dataclass(slots=True)
class Pace:
    """The rate of each encoder while it encodes. Units count when they are encoded, which is before they are published.

    What was done before the first look never counts, so the rate after a resume is that of the present run. Loading and waiting do not
    count either: they say nothing about the units that are left.
    """

    _tracks: dict[str, _Track] = field(default_factory=dict[str, _Track])
    _encoding: frozenset[str] = frozenset()

    def see(self, status: PassStatus, now: float) -> None:
        """Take in how far the pass is now, by the caller's clock."""
        doings = {one.doing for one in status.at_work}
        self._encoding = frozenset(one.encoder for one in status.encoders if f"encoding {one.encoder}" in doings)
        for one in status.encoders:
            through = one.done + one.unpublished
            track = self._tracks.get(one.encoder)
            if track is None:
                if one.encoder in self._encoding:
                    self._tracks[one.encoder] = _Track(now, through)
                continue
            passed, made = now - track.at, max(0, through - track.through)
            track.at, track.through = now, max(through, track.through)
            if one.encoder in self._encoding or made:
                kept = exp(-passed / MEMORY_SECONDS)
                track.units, track.seconds = track.units * kept + made, track.seconds * kept + passed

    @property
    def rate(self) -> float | None:
        """Units a second over the encoders that encode now; None if it is not known yet."""
        rates = [rate for one in self._encoding if one in self._tracks and (rate := self._tracks[one].rate) is not None]
        return sum(rates) if rates else None

    def seconds_left(self, status: PassStatus) -> float | None:
        """Return how long the rest takes; None while the rate of an encoder that has units left is not known."""
        left = {one.encoder: one.total - one.done - one.unpublished for one in status.encoders}
        seconds = 0.0
        for encoder, units in left.items():
            rate = self._tracks[encoder].rate if encoder in self._tracks else None
            if units > 0 and rate is None:
                return None
            seconds += units / rate if units > 0 and rate is not None else 0.0
        return seconds


def with_pace(
    on_progress: Callable[[Mapping[str, Json]], None], clock: Callable[[], float] = time.monotonic
) -> Callable[[PassStatus], None]:
    """Return a function that gives `on_progress` the counts of a pass, with `rate` and `seconds_left`: None where they are not known."""
    pace = Pace()

    def tell(status: PassStatus) -> None:
        pace.see(status, clock())
        on_progress({**status.counts(), "rate": pace.rate, "seconds_left": pace.seconds_left(status)})

    return tell


def followed(layout: Layout, on_progress: Callable[[Mapping[str, Json]], None] | None) -> Callable[[Mapping[str, Json]], None] | None:
    """Return a callback for one worker's counts that gives `on_progress` those of the whole pass; None without `on_progress`."""
    return None if on_progress is None else Observer(layout).following(with_pace(on_progress))
