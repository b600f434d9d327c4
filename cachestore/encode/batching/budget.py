"""Find a good batch size by measuring. Uses no torch and no clock.

A larger batch is not always faster: at 1024 x 1024 a VAE fills a GPU with a few pictures, and a CPU's cache with less than one.
"""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

GAIN: Final = 1.05
"""A doubled batch size is kept if it is at least 5 % faster. Otherwise the smaller one is used, as it needs less memory."""
MEASURED: Final = 2
"""How many batches of a size are measured. One more runs before them, as the first of a shape also chooses kernels and allocates memory."""
_MEMORY_WORDS: Final = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "not enough memory")


def is_lack_of_memory(error: Exception) -> bool:
    """Return whether an error means that a device or the machine ran out of memory."""
    return isinstance(error, MemoryError) or any(word in str(error) for word in _MEMORY_WORDS)


@dataclass(slots=True)
class Budget:
    """The size of a batch, in tokens or pixels. It begins small and doubles, up to `most`, while that makes encoding faster."""

    size: int
    most: int
    most_units: int = 1 << 30
    _rates: list[float] = field(default_factory=list[float])
    _before: float = 0.0
    _is_warm: bool = False
    _is_settled: bool = False

    def units(self, cost: int) -> int:
        """Return how many units of this cost go into one batch; at least 1."""
        return min(self.most_units, max(1, self.size // max(1, cost)))

    def took(self, units: int, cost: int, seconds: float) -> None:
        """Record the seconds that the device took for a batch of units of this cost. One with room for another unit is ignored."""
        if self._is_settled or seconds <= 0 or units < self.units(cost):
            return
        if not self._is_warm:
            self._is_warm = True
            return
        self._rates.append(units * cost / seconds)
        if len(self._rates) < MEASURED:
            return
        rate = max(self._rates)
        if self._before and rate < GAIN * self._before:
            self.size, self._is_settled = self.size // 2, True
        elif 2 * self.size > self.most:
            self._is_settled = True
        else:
            self.size, self._before = 2 * self.size, rate
        self._rates, self._is_warm = [], False

    def did_not_fit(self) -> None:
        """Record that a batch ran out of memory: halve the size, and do not raise it again."""
        self.size = max(1, self.size // 2)
        self._is_settled = True

    @contextmanager
    def spending(self, units: int) -> Generator[None]:
        """Wrap the encoding of a batch of `units` units: call `did_not_fit` if it runs out of memory and has more than one unit."""
        try:
            yield
        except Exception as error:
            if units > 1 and is_lack_of_memory(error):
                self.did_not_fit()
            raise
