"""Copy batches to a device and results back; on an NVIDIA GPU while it computes. Imports torch.

Page-locked memory comes from torch's own allocator, which reuses a block once no copy needs it any more. So no ring of buffers is needed.
On other devices copies are synchronous.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

K = TypeVar("K")
T = TypeVar("T")
Moved = Mapping[str, Any]
"""Values by name: tensors, lists of tensors, or anything else, which is passed on unchanged."""
Took = Callable[[float], None]
"""Called with the seconds that a GPU took for a batch; 0 on other devices."""


def ignore(seconds: float) -> None:
    """Do nothing: a `Took` for callers that measure nothing."""
    del seconds


class Transfer:
    """Copies to and from one device. Use it from one thread."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._there, self._back = (torch.cuda.Stream(device) if device.type == "cuda" else None for _way in range(2))

    @property
    def is_gpu(self) -> bool:
        """Whether the device computes beside the caller."""
        return self._there is not None

    def stacked(self, arrays: Sequence[np.ndarray[Any, Any]]) -> Tensor:
        """Return arrays of one shape as one CPU tensor, page-locked for a GPU. A single array is not copied for a CPU."""
        if self._there is None:
            is_shared = len(arrays) == 1 and arrays[0].flags.writeable  # torch warns of others
            return torch.from_numpy(arrays[0][np.newaxis] if is_shared else np.stack(arrays))
        batch = torch.empty((len(arrays), *arrays[0].shape), dtype=torch.from_numpy(arrays[0]).dtype, pin_memory=True)
        np.stack(arrays, out=batch.numpy())
        return batch

    def to_device(self, tensor: Tensor) -> Tensor:
        """Copy a CPU tensor to the device. Later computations wait for the copy; the caller does not."""
        if self._there is None:
            return tensor.to(self._device)
        with torch.cuda.stream(self._there):
            moved = tensor.pin_memory().to(self._device, non_blocking=True)
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._there)
        moved.record_stream(current)
        return moved

    def to_host(self, tensors: Moved) -> Callable[[], Moved]:
        """Begin to copy results to the CPU. Call the returned function to wait for them and get them."""
        if self._back is None:
            copied = {name: each(value, lambda tensor: tensor.to("cpu")) for name, value in tensors.items()}
            return lambda: copied
        back = self._back
        back.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(back):
            begun = {name: each(value, self._copy_back) for name, value in tensors.items()}
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

    def begin(self, keys: Sequence[K], parts: Iterable[Callable[[], Iterable[T]]], took: Took) -> Callable[[], dict[K, T]]:
        """Begin the parts of a batch. Returns a function that waits for their results, calls `took`, and gives them by key."""

        def mark() -> torch.cuda.Event | None:
            if self._there is None:
                return None
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self._device))
            return event

        began, begun, ended = mark(), list(parts), mark()

        def finish() -> dict[K, T]:
            made, seconds = [one for part in begun for one in part()], 0.0
            if began is not None and ended is not None:
                ended.synchronize()
                seconds = began.elapsed_time(ended) / 1000
            took(seconds)
            return dict(zip(keys, made, strict=True))

        return finish


def each(value: Any, move: Callable[[Tensor], Tensor]) -> Any:
    """Return a tensor, or each tensor of a list, as `move` returns it; anything else as it is."""
    if isinstance(value, Tensor):
        return move(value)
    return [move(one) for one in value] if isinstance(value, Sequence) and not isinstance(value, str) else value
