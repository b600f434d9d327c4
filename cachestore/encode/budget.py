"""How much of the work goes into one batch, found by measuring. Pure: no torch, no clock.

A larger batch is not always a faster one: a VAE at 1024 x 1024 fills a GPU with a few pictures, and a CPU's cache with less than one.
"""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

GAIN: Final = 1.05
"""A doubled batch is kept where it makes at least 5 % more in the same time; else the smaller one is, which takes less memory."""
MEASURED: Final = 2
"""Batches of a size that are measured, after one that warms it up: the first of a shape also chooses kernels and takes memory."""
FULL: Final = 0.75
"""A batch with a smaller share of its size tells nothing of the size."""
_MEMORY_WORDS: Final = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "not enough memory")


def is_lack_of_memory(error: Exception) -> bool:
    """Whether an error says that memory ran out, of a device or of the machine."""
    return isinstance(error, MemoryError) or any(word in str(error) for word in _MEMORY_WORDS)


@dataclass(slots=True)
class Budget:
    """The size of a batch in what its units cost (tokens, pixels): begins small, and doubles up to `most` while that pays."""

    size: int
    most: int
    most_units: int = 1 << 30
    _rates: list[float] = field(default_factory=list[float])
    _before: float = 0.0
    _is_warm: bool = False
    _is_settled: bool = False

    def units(self, cost: int) -> int:
        """How many units of a cost go into one batch; at least 1."""
        return min(self.most_units, max(1, self.size // max(1, cost)))

    def took(self, cost: int, seconds: float) -> None:
        """Tell what a batch cost, and how long the device was at it; 0 where nothing measures that."""
        if self._is_settled or seconds <= 0 or cost < FULL * self.size:
            return
        if not self._is_warm:
            self._is_warm = True
            return
        self._rates.append(cost / seconds)
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
        """Tell that a batch ran out of memory: half of the size, for good."""
        self.size = max(1, self.size // 2)
        self._is_settled = True

    @contextmanager
    def spending(self, units: int) -> Generator[None]:
        """Around the encoding of so many units: an error that says that memory ran out counts, unless there was but one."""
        try:
            yield
        except Exception as error:
            if units > 1 and is_lack_of_memory(error):
                self.did_not_fit()
            raise
