"""Memory that a batch is read into, used again for the next. Knows no store and no recipe."""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch

from cachestore.errors import BadInput

Taken = tuple[torch.Tensor, memoryview]
"""A contiguous tensor, and the same bytes as they are written to."""


class BatchBuffers:
    """One buffer for each tensor of a batch, made when first needed, grown when a batch needs more, and never given back before.

        buffers = BatchBuffers(pin=True)
        batch = data.read_batch(places, into=buffers)        # its tensors are views of the buffers

    Belongs to who made it: to one thread at a time, and to one process, as forked copies fall apart. A batch is good until the next one
    is read into the same buffers; what is to live longer, such as a transfer to a device that is still under way, needs buffers of
    its own or a copy.
    """

    def __init__(self, *, pin: bool = False) -> None:
        """Takes no memory yet.

        Args:
            pin: page-locked memory, from which a device copies while the processor goes on. Raises BadInput without an accelerator.
        """
        if pin and not torch.accelerator.is_available():
            message = "pinned memory is for copying to an accelerator, and torch finds none here; leave out pin=True"
            raise BadInput(message)
        self._pin = pin
        self._flat: dict[str, Taken] = {}
        self._made: dict[str, Taken] = {}

    @property
    def size_bytes(self) -> int:
        """How much memory is held."""
        return sum(len(view) for _flat, view in self._flat.values())

    def take(self, name: str, shape: Sequence[int], dtype: torch.dtype, *, pin: bool | None = None) -> Taken:
        """Room for one tensor of the next batch under this name, holding anything. What was taken under the name before is overwritten."""
        made = self._made.get(name)
        if made is not None and made[0].dtype == dtype and made[0].shape == tuple(shape):
            return made[0].view(made[0].shape), made[1]  # a tensor of its own, as whoever has the one before may change its shape
        size = prod(shape) * dtype.itemsize
        held = self._flat.get(name)
        if held is None or len(held[1]) < size:
            # Half as much again, as ragged batches would otherwise ask for a little more each time.
            room = size if held is None else max(size, len(held[1]) * 3 // 2)
            flat = torch.empty(room, dtype=torch.uint8, pin_memory=self._pin if pin is None else pin)
            held = self._flat[name] = flat, flat.numpy().data
        flat, view = held
        made = self._made[name] = flat[:size].view(dtype).view(tuple(shape)), view[:size]
        return made[0].view(made[0].shape), made[1]

    def keep(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """A batch that was made elsewhere, its tensors copied into these buffers."""
        return {name: self._copied(name, value) if isinstance(value, torch.Tensor) else value for name, value in batch.items()}

    def _copied(self, name: str, value: torch.Tensor) -> torch.Tensor:
        tensor, _bytes = self.take(name, value.shape, value.dtype)
        return tensor.copy_(value)
