"""Decide when compiling an encoder for a shape is worth its time. Uses no torch and no clock.

How many batches of a shape are still to come is not known. So a shape is compiled once its batches have taken as long as compiling
takes. Then the total time is at most twice the best possible (the bound of the ski-rental problem).
"""

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Final

FIRST_GUESS: Final = 60.0
"""Seconds that compiling a shape is assumed to take, until one was compiled."""
MOST_SHAPES: Final = 8
"""torch keeps this many compiled versions of a function. It would run further shapes uncompiled, with a warning each time."""
GAIN: Final = 1.05
"""If a compiled shape is not at least 5 % faster, all shapes run uncompiled from then on."""
MEASURED: Final = 3


@dataclass(slots=True)
class Compiling:
    """Decides which shapes are compiled. Call `is_due` before each batch and `took` after it."""

    cost: float = FIRST_GUESS
    is_given_up: bool = False
    """Set if compiling failed or made nothing faster: from then on all shapes run uncompiled."""
    _spent: dict[Hashable, float] = field(default_factory=dict[Hashable, float])
    _fastest: dict[Hashable, float] = field(default_factory=dict[Hashable, float])
    """Seconds of the fastest uncompiled batch of each shape."""
    _compiled: dict[Hashable, list[float]] = field(default_factory=dict[Hashable, list[float]])
    """Seconds of the first batches of each compiled shape. The first batch includes compiling."""

    def is_due(self, shape: Hashable) -> bool:
        """Return whether a batch of this shape is to run compiled."""
        if self.is_given_up:
            return False
        if shape in self._compiled:
            return True
        if len(self._compiled) >= MOST_SHAPES or self._spent.get(shape, 0.0) < self.cost:
            return False
        self._compiled[shape] = []
        return True

    def took(self, shape: Hashable, seconds: float) -> None:
        """Record how many seconds a batch of this shape took, run as `is_due` said."""
        times = self._compiled.get(shape)
        if times is None:
            self._spent[shape] = self._spent.get(shape, 0.0) + seconds
            self._fastest[shape] = min(seconds, self._fastest.get(shape, seconds))
        elif len(times) <= MEASURED:
            times.append(seconds)
            self.cost = max(times[0], self.cost if len(self._compiled) > 1 else 0.0)
            if len(times) > MEASURED and min(times[1:]) * GAIN > self._fastest[shape]:
                self.is_given_up = True
