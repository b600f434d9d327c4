"""Which epoch a batch belongs to: the one that its sampler gave it, else the one that is set for the whole data set."""

import mmap
from typing import Any

import torch

from cachestore.core.arguments import as_whole


class Epoch:
    """An integer that the trainer's process sets and its workers see, even workers that live through several epochs.

    Forked workers share its memory pages. Workers started by spawn or forkserver share the tensor, which torch moves into shared memory
    when it is pickled for them. Any other copy has its own number.
    """

    __slots__ = ("_pages", "_tensor")

    def __init__(self, number: int = 0) -> None:
        self._pages = mmap.mmap(-1, 8)
        self._tensor: torch.Tensor = torch.frombuffer(self._pages, dtype=torch.int64)  # pyright: ignore[reportUnknownMemberType]
        self.set(number)

    def get(self) -> int:
        """The current number."""
        return int(self._tensor.item())

    def of(self, batch: object) -> int:
        """The epoch of a batch: its own, else the current number."""
        own: int | None = getattr(batch, "epoch", None)
        return self.get() if own is None else own

    def set(self, number: int) -> None:
        """Set the number for this process and its workers. Raises BadInput if it is not an epoch."""
        number = as_whole("epoch", number, least=0)
        self._tensor.fill_(number)
        # Pickling for a spawned worker moves the tensor out of these pages, but workers forked earlier still read them.
        self._pages[:] = number.to_bytes(8, "little", signed=True)

    def __getstate__(self) -> dict[str, Any]:
        """The tensor. Torch sends it as shared memory or by value."""
        return {"tensor": self._tensor}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Use the shared number, or copy its value if it is not shared."""
        tensor: torch.Tensor = state["tensor"]
        Epoch.__init__(self, int(tensor.item()))
        if tensor.is_shared():
            self._tensor = tensor
