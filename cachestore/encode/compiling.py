"""When compiling an encoder for a shape is worth its time. Pure: no torch, no clock.

Nobody knows how much of a shape is still to come. So a shape is compiled once it has taken as long as compiling one takes: then the
whole never takes more than twice what it would have taken with the future known, the bound of the ski-rental problem.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Final

FIRST_GUESS: Final = 60.0
"""Seconds that compiling one shape is taken to cost until the first one was compiled."""
MOST_SHAPES: Final = 8
"""As many variants of one function as torch keeps; further shapes would run as they are, and torch would say so each time."""
GAIN: Final = 1.05
"""Where a compiled shape is not at least 5 % faster, all go on as they are."""
MEASURED: Final = 3


@dataclass(slots=True)
class Compiling:
    """Which shapes are compiled: told how long each batch took, asked before each."""

    cost: float = FIRST_GUESS
    is_given_up: bool = False
    """Set where compiling fails, or does not pay: nothing is compiled any more."""
    _spent: dict[Hashable, float] = field(default_factory=dict[Hashable, float])
    _fastest: dict[Hashable, float] = field(default_factory=dict[Hashable, float])
    """Seconds of a shape's fastest batch, as it is."""
    _compiled: dict[Hashable, list[float]] = field(default_factory=dict[Hashable, list[float]])
    """Seconds of each batch of a compiled shape, until enough are measured; the first compiles."""

    def is_due(self, shape: Hashable) -> bool:
        """Whether a batch of this shape is to go through what is compiled for it."""
        if self.is_given_up:
            return False
        if shape in self._compiled:
            return True
        if len(self._compiled) >= MOST_SHAPES or self._spent.get(shape, 0.0) < self.cost:
            return False
        self._compiled[shape] = []
        return True

    def took(self, shape: Hashable, seconds: float) -> None:
        """Tell how long a batch of this shape took, through whatever `is_due` said."""
        times = self._compiled.get(shape)
        if times is None:
            self._spent[shape] = self._spent.get(shape, 0.0) + seconds
            self._fastest[shape] = min(seconds, self._fastest.get(shape, seconds))
        elif len(times) <= MEASURED:
            times.append(seconds)
            self.cost = max(times[0], self.cost if len(self._compiled) > 1 else 0.0)
            if len(times) > MEASURED and min(times[1:]) * GAIN > self._fastest[shape]:
                self.is_given_up = True
