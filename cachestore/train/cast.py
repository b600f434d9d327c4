"""Cast what was read to the dtype in which a trainer computes."""

from typing import Any, Final
from typing import cast as cast_type

import torch

from cachestore.core.arguments import refuse
from cachestore.core.words import listed
from cachestore.train.buffers import BatchBuffers

_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def as_dtype(given: object) -> torch.dtype | None:
    """Return the dtype to cast to, or None for the stored one. Raises BadInput for anything else."""
    if given is not None and given not in _DTYPES:
        refuse("dtype", f"{listed(_DTYPES, 'or')}, or None for the stored one", given)
    return cast_type("torch.dtype | None", given)


def cast(values: dict[str, Any], dtype: torch.dtype | None, memory: BatchBuffers | None = None) -> dict[str, Any]:
    """Cast the floating point tensors, also those in lists; into `memory`, if given. All else stays, and with None everything."""
    return values if dtype is None else {name: _cast(name, value, dtype, memory) for name, value in values.items()}


def _cast(name: str, value: Any, dtype: torch.dtype, memory: BatchBuffers | None) -> Any:
    if isinstance(value, list):
        return [_cast(name, each, dtype, None) for each in value]  # pyright: ignore[reportUnknownVariableType] - control latents
    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.dtype == dtype:
        return value
    return value.to(dtype) if memory is None else memory.take(f"{name} as {dtype}", value.shape, dtype)[0].copy_(value)
