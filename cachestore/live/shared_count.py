"""A count over this process and those that it forks."""

import mmap
from typing import Final

_BYTES: Final = 8


class SharedCount:
    """A number in memory that forked processes share. One process at a time adds to it."""

    def __init__(self) -> None:
        """Begin with 0."""
        self._memory = mmap.mmap(-1, _BYTES)

    @property
    def value(self) -> int:
        """The number."""
        return int.from_bytes(self._memory[:], "little")

    def add(self, number: int) -> None:
        """Add to the number."""
        self._memory[:] = (self.value + number).to_bytes(_BYTES, "little")
