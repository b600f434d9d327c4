"""The number of the epoch, shared with DataLoader workers. Knows nothing of data sets or samplers."""

import mmap
from typing import Any

import torch

from cachestore.core.arguments import as_whole


class Epoch:
    """A whole number that the trainer's process sets and its workers see, also those that live through several epochs.

    Forked workers share its pages; workers started by spawn or forkserver share the tensor, which torch moves into shared memory
    when it is pickled for them. A copy that is pickled or copied otherwise has a number of its own. Starts nothing.
    """

    __slots__ = ("_pages", "_tensor")

    def __init__(self, number: int = 0) -> None:
        self._pages = mmap.mmap(-1, 8)
        self._tensor: torch.Tensor = torch.frombuffer(self._pages, dtype=torch.int64)  # pyright: ignore[reportUnknownMemberType]
        self.set(number)

    def get(self) -> int:
        """The number as it stands now."""
        return int(self._tensor.item())

    def set(self, number: int) -> None:
        """Change it for this process and its workers. Raises BadInput for what is no epoch."""
        number = as_whole("epoch", number, least=0)
        self._tensor.fill_(number)
        # After the tensor was pickled for a spawned worker it no longer stands in these pages, but earlier forked workers still look there.
        self._pages[:] = number.to_bytes(8, "little", signed=True)

    def __getstate__(self) -> dict[str, Any]:
        """The tensor: torch decides whether it travels as shared memory or by value."""
        return {"tensor": self._tensor}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Look at the shared number, or take over its value where none is shared."""
        tensor: torch.Tensor = state["tensor"]
        Epoch.__init__(self, int(tensor.item()))
        if tensor.is_shared():
            self._tensor = tensor
