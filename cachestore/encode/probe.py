"""Whether two encodings of one input are the same but for rounding. Imports torch."""

from collections.abc import Mapping

import torch
from torch import Tensor

from cachestore.encode.compare import TOLERANCES

_BOUNDS: Mapping[str, float] = {"float32": TOLERANCES["F32"], "bfloat16": TOLERANCES["BF16"], "float16": TOLERANCES["F16"]}
"""What another order of additions makes, as when entries are compared; another embedding differs by a tenth and more."""
_TF32_BOUND = 5e-3


def tolerance(dtype: str, device: torch.device) -> float:
    """How far apart, relative to their norm, two encodings of one input may be."""
    return max(_BOUNDS[dtype], _TF32_BOUND) if device.type == "cuda" else _BOUNDS[dtype]


def difference(one: Mapping[str, Tensor], other: Mapping[str, Tensor], bound: float) -> str | None:
    """What differs between two entries, in words: names, shapes, or values by more than `bound` of the norm. None where nothing does."""
    if set(one) != set(other):
        return f"set of tensors ({', '.join(sorted(one))}; {', '.join(sorted(other))})"
    for name, tensor in one.items():
        if tensor.shape != other[name].shape:
            return f"{name} ({list(other[name].shape)} for {list(tensor.shape)})"
        first, second = tensor.double(), other[name].double()
        apart, norm = float((first - second).norm()), float(first.norm())
        if not apart <= bound * max(norm, 1e-12):  # not "greater", so that NaN counts as different
            return f"{name} (apart by {apart / max(norm, 1e-12):.2g} of its norm)"
    return None
