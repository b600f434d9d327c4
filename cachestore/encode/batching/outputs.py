"""Check the tensors that encoders made before they are stored. Imports torch.

Half precision can overflow; fp16 T5 and the VAE of SDXL are known cases. So an entry with a fault is made again in float32. If it is then
still faulty, it is refused. The weights are put back into their own dtypes afterwards.
"""

from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from cachestore.core.errors import EncodeFailed
from cachestore.core.keys import Key
from cachestore.encode.batching.compare import TOLERANCES
from cachestore.encode.batching.transfer import Moved, Transfer

Payload = TypeVar("Payload")
_HALVES = (torch.float16, torch.bfloat16)
_BOUNDS: Mapping[str, float] = {"float32": TOLERANCES["F32"], "bfloat16": TOLERANCES["BF16"], "float16": TOLERANCES["F16"]}
"""Relative differences that another order of additions can make, as in `compare`. Another embedding differs by a tenth or more."""
_TF32_BOUND = 5e-3
_COMPARED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""What torch finds the least and the greatest number of. Others are converted first."""
_FLAGS = " finite"
"""Among outputs, where no other name begins with a space."""


class Made(dict[str, Tensor]):
    """The tensors of one entry. They may share the memory of their batch."""

    def __init__(self, tensors: Mapping[str, Tensor], *, is_finite: bool = False) -> None:
        """`is_finite` says that the device found all numbers of the batch item finite; else `find_fault` looks at them."""
        super().__init__(tensors)
        self.is_finite = is_finite


Entries = dict[Key, Made]


def finite_items(outputs: Iterable[Any], count: int) -> Tensor:
    """Return for each item of a batch whether all its numbers in these outputs are finite, computed on their device without waiting."""
    flags: list[Tensor] = []
    for output in outputs:
        if not isinstance(output, Tensor):
            flags.append(torch.stack([item.isfinite().all() for item in output]))
        elif output.is_floating_point():
            flags.append(output.isfinite().reshape(count, -1).all(1))
    return torch.stack(flags).all(0) if flags else torch.ones(count, dtype=torch.bool)


def fetch(transfer: Transfer, outputs: Moved, names: Iterable[str], count: int) -> Callable[[], tuple[Moved, Sequence[bool]]]:
    """Begin to copy the outputs of a batch to the CPU. Call the returned function for them, and for `Made.is_finite` of each item.

    `names` are the outputs that entries are made of. A GPU looks at their numbers; elsewhere no item is called finite.
    """
    flags = {_FLAGS: finite_items([outputs[name] for name in names], count)} if transfer.is_gpu else {}
    begun = transfer.to_host({**outputs, **flags})

    def wait() -> tuple[Moved, Sequence[bool]]:
        copied = dict(begun())
        found = copied.pop(_FLAGS, None)
        return copied, [False] * count if found is None else found.tolist()

    return wait


def find_fault(tensors: Mapping[str, Tensor], may_be_flat: Collection[str] = ()) -> str | None:
    """Return what is wrong with an entry: NaN, infinity, or the same number everywhere; None if it is sound.

    Only floats are checked. Those in `may_be_flat` may be all zeros or ones: masks, and parts that a caption does not use.
    """
    is_finite = isinstance(tensors, Made) and tensors.is_finite
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() or tensor.numel() == 0 or (is_finite and _varies(tensor)):
            continue
        number = tensor.detach() if tensor.dtype in _COMPARED else tensor.detach().float()
        low, high = (float(bound) for bound in torch.aminmax(number))  # aminmax returns NaN if there is one
        if low != low:  # noqa: PLR0124 - NaN alone differs from itself
            return f"NaN in {name!r}"
        if low == -torch.inf or high == torch.inf:
            return f"infinite numbers in {name!r}"
        if low == high and tensor.numel() > 1 and not (low in (0, 1) and name in may_be_flat):
            return f"only the number {low + 0.0:g} in {name!r}"
    return None


def _varies(tensor: Tensor) -> bool:
    """Whether two numbers of the first row differ. No second number there says nothing."""
    row = tensor[(0,) * (tensor.ndim - 1)] if tensor.ndim > 1 else tensor.reshape(-1)
    return bool((row != row[0]).any())


def make_sound(
    who: str,
    batch: Sequence[tuple[Key, Payload]],
    entries: Entries,
    make: Callable[[Sequence[tuple[Key, Payload]]], Entries],
    modules: Sequence[nn.Module],
    *,
    may_be_flat: Collection[str] = (),
) -> Entries:
    """Return the entries of a batch, all sound. Faulty ones are made again by `make` with the modules in float32.

    `make` must ask the modules for their dtype at each call. EncodeFailed names the first entry that is still faulty, and `who` made it.
    """
    faults = _faults(entries, may_be_flat)
    tried = "in the precision of its weights"
    numbers = (tensor.dtype for module in modules for tensor in (*module.parameters(), *module.buffers()))
    if faults and any(dtype in _HALVES for dtype in numbers):
        with in_float32(modules):
            entries = entries | make([(key, payload) for key, payload in batch if key in faults])
        faults = _faults(entries, may_be_flat)
        tried = "in the precision of its weights and in float32"
    for key, fault in faults.items():
        raise EncodeFailed(f"{who} returned {fault} for entry {key}, {tried}: remove its sample, or use another model or dtype")
    return entries


def _faults(entries: Entries, may_be_flat: Collection[str]) -> dict[Key, str]:
    found = {key: find_fault(tensors, may_be_flat) for key, tensors in entries.items()}
    return {key: fault for key, fault in found.items() if fault is not None}


@contextmanager
def in_float32(modules: Sequence[nn.Module]) -> Generator[None]:
    """Convert 16-bit weights and buffers to float32 within the block, and then back to their own dtypes, which is exact.

    `module.half()` would also convert layers that are in float32 on purpose. Call it outside inference mode.
    """
    tensors = {id(tensor): tensor for module in modules for tensor in (*module.parameters(), *module.buffers())}
    before = {number: tensor.dtype for number, tensor in tensors.items() if tensor.dtype in _HALVES}
    try:
        for number in before:
            tensors[number].data = tensors[number].data.float()
        yield
    finally:
        for number, dtype in before.items():
            tensors[number].data = tensors[number].data.to(dtype)


def tolerance(dtype: str, device: torch.device) -> float:
    """Return the largest relative L2 distance that two encodings of one input may have."""
    return max(_BOUNDS[dtype], _TF32_BOUND) if device.type == "cuda" else _BOUNDS[dtype]


def difference(one: Mapping[str, Tensor], other: Mapping[str, Tensor], bound: float) -> str | None:
    """Return how two entries differ: in names, shapes, or in values by more than `bound` of the norm. None if they are equal."""
    if set(one) != set(other):
        return f"set of tensors ({', '.join(sorted(one))}; {', '.join(sorted(other))})"
    for name, tensor in one.items():
        if tensor.shape != other[name].shape:
            return f"{name} ({list(other[name].shape)} for {list(tensor.shape)})"
        first, second = tensor.double(), other[name].double()
        apart, norm = float((first - second).norm()), float(first.norm())
        if not apart <= bound * max(norm, 1e-12):  # not "greater", so that NaN counts as different
            return f"{name} (which differs by {apart / max(norm, 1e-12):.2g} of its norm)"
    return None
