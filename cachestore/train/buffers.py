"""Memory for batches, used again for the next batch."""

from collections.abc import Mapping, Sequence
from math import prod
from struct import pack_into
from typing import Any

import numpy as np
import torch

from cachestore.core.errors import BadInput
from cachestore.files.container import ALIGNMENT

RowBytes = Sequence[memoryview]

Taken = tuple[torch.Tensor, memoryview]
"""A contiguous tensor, and its bytes as a writable view."""


class BatchBuffers:
    """One buffer for each tensor of a batch. It is made when first needed, grows if a batch needs more, and is kept.

        buffers = BatchBuffers(pin=True)
        batch = data.read_batch(indices, into=buffers)        # its tensors are views of the buffers

    Use it in one thread at a time, and in one process, as forked copies differ. A batch is valid until the next one is read into the same
    buffers. Data that must live longer, such as a transfer to a device that still runs, needs other buffers or a copy.
    """

    def __init__(self, *, pin: bool = False) -> None:
        """Allocate nothing yet.

        Args:
            pin: use page-locked memory, from which a device copies while the CPU goes on. Raises BadInput without an accelerator.
        """
        if pin and not torch.accelerator.is_available():
            raise BadInput("pinned memory is for copying to an accelerator, and torch finds none here; leave out pin=True", option="pin")
        self._pin = pin
        self._flat: dict[str, Taken] = {}
        self._made: dict[str, Taken] = {}
        self._rows: dict[str, tuple[memoryview, list[memoryview]]] = {}

    @property
    def size_bytes(self) -> int:
        """How many bytes are held."""
        return sum(len(view) for _flat, view in self._flat.values())

    def take(self, name: str, shape: Sequence[int], dtype: torch.dtype, *, pin: bool | None = None) -> Taken:
        """Return uninitialised room for one tensor of the next batch. Overwrites what had this name before."""
        # Return the same tensor, as making one takes a sixteenth of the time of a batch; but not if the caller changed its shape or dtype.
        if (made := self._made.get(name)) is not None:
            last = made[0]
            if last.dtype == dtype and last.shape == tuple(shape) and last.is_contiguous() and not last.requires_grad:
                return made
        size = prod(shape) * dtype.itemsize
        held = self._flat.get(name)
        if held is None or len(held[1]) < size:
            # Grow by at least half, as ragged batches would otherwise need a little more each time.
            room = size if held is None else max(size, len(held[1]) * 3 // 2)
            is_pinned = self._pin if pin is None else pin
            flat = torch.empty(room, dtype=torch.uint8, pin_memory=True) if is_pinned else _unpinned(room)
            held = self._flat[name] = flat, flat.numpy().data
        flat, view = held
        made = self._made[name] = flat[:size].view(dtype).view(tuple(shape)), view[:size]
        return made

    def take_rows(self, name: str, shape: Sequence[int], dtype: torch.dtype, *, pin: bool | None = None) -> tuple[torch.Tensor, RowBytes]:
        """As `take`, with the bytes of each row."""
        tensor, view = self.take(name, shape, dtype, pin=pin)
        held = self._rows.get(name)
        if held is None or held[0] is not view or len(held[1]) != shape[0]:
            size = len(view) // shape[0] if shape[0] else 0
            held = self._rows[name] = view, [view[row * size : (row + 1) * size] for row in range(shape[0])]
        return tensor, held[1]

    def keep(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Copy the tensors of a batch that was made elsewhere into these buffers."""
        return {
            name: self.take(name, value.shape, value.dtype)[0].copy_(value) if isinstance(value, torch.Tensor) else value
            for name, value in batch.items()
        }

    def keep_pairs(self, name: str, numbers: Sequence[int]) -> torch.Tensor:
        """Pairs of integers, given concatenated, as int64 `[B, 2]`. Written without torch, whose smallest operation takes longer."""
        tensor, view = self.take(name, (len(numbers) // 2, 2), torch.int64)
        pack_into(f"={len(numbers)}q", view, 0, *numbers)
        return tensor


def _unpinned(size: int) -> torch.Tensor:
    """Allocate with numpy, which uses huge pages for large arrays: reading 8 MiB into it takes an eighth less time than with torch.

    It starts on a cache line, as entries do. 16 bytes later, where malloc's memory starts, reading takes a tenth longer.
    """
    held = np.empty(max(size, 1) + ALIGNMENT, np.uint8)
    start = -held.ctypes.data % ALIGNMENT
    return torch.from_numpy(held[start : start + max(size, 1)])  # pyright: ignore[reportUnknownMemberType] - torch's stub has no element type
