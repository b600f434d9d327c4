"""Moving batches to a device and results back, on an NVIDIA GPU beside what it computes. Imports torch.

Page-locked memory comes from torch's own allocator, which keeps what was used and gives it out again only when no copy needs it any
more: it is the ring of buffers. Everywhere else copies are plain.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Moved = Mapping[str, Any]
"""Tensors by name, lists of tensors, or anything else, which is passed on as it is."""
Took = Callable[[float], None]
"""Told how many seconds a GPU was at a batch."""


def ignore(seconds: float) -> None:
    """A `Took` that does nothing."""
    del seconds


class Transfer:
    """The two directions of one device. Use from one thread."""

    def __init__(self, device: torch.device) -> None:
        """Make the streams on which copies run, where the device has such."""
        self._device = device
        self._there = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._back = torch.cuda.Stream(device) if device.type == "cuda" else None

    def to_device(self, tensor: Tensor) -> Tensor:
        """A CPU tensor on the device. What is computed from it then waits for the copy; the caller does not."""
        if self._there is None:
            return tensor.to(self._device)
        with torch.cuda.stream(self._there):
            moved = tensor.pin_memory().to(self._device, non_blocking=True)
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._there)
        moved.record_stream(current)
        return moved

    def to_host(self, tensors: Moved) -> Callable[[], Moved]:
        """Begin to copy results to the CPU; what is returned waits for them and gives them, page-locked where that helped."""
        if self._back is None:
            copied = {name: _each(value, lambda tensor: tensor.to("cpu")) for name, value in tensors.items()}
            return lambda: copied
        back = self._back
        back.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(back):
            begun = {name: _each(value, self._copy_back) for name, value in tensors.items()}
            done = torch.cuda.Event()
            done.record(back)

        def wait() -> Moved:
            done.synchronize()
            return begun

        return wait

    def _copy_back(self, tensor: Tensor) -> Tensor:
        if not tensor.is_cuda or self._back is None:
            return tensor
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        tensor.record_stream(self._back)
        return host

    def stopwatch(self) -> "Stopwatch | None":
        """A clock for what the device does from now on; None where the caller's own clock tells."""
        return Stopwatch(self._device) if self._there is not None else None


class Stopwatch:
    """How long a GPU was at what was handed to it between construction and `stop`."""

    def __init__(self, device: torch.device) -> None:
        """Begin."""
        self._stream = torch.cuda.current_stream(device)
        self._begun = torch.cuda.Event(enable_timing=True)
        self._ended = torch.cuda.Event(enable_timing=True)
        self._begun.record(self._stream)

    def stop(self) -> None:
        """End, after what was handed over so far."""
        self._ended.record(self._stream)

    def seconds(self) -> float:
        """Wait for the end, and tell."""
        self._ended.synchronize()
        return self._begun.elapsed_time(self._ended) / 1000


def _each(value: Any, move: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return move(value)
    return [move(one) for one in value] if isinstance(value, Sequence) and not isinstance(value, str) else value
