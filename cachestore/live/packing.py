"""Any value that a trainer caches, as named arrays: tensors in lists, tuples and mappings, with numbers and texts beside them."""

import json
from collections.abc import Mapping
from typing import Any, Final

from cachestore.core.keys import Json
from cachestore.live.adapter import refuse

SHAPE: Final = "shape"
"""The name of the array that says how the tensors belong together: JSON as bytes."""
_LONGEST: Final = 100
"""A name of more characters is none that a person would read; stores take 128."""


def pack(value: Any) -> dict[str, Any]:
    """Return a value as tensors by name, on the CPU. What no store can hold ends the run with exit code 2 (Refused)."""
    import torch

    tensors: dict[str, Any] = {}
    shape = _shape_of(value, "value", tensors)
    tensors[SHAPE] = torch.frombuffer(bytearray(json.dumps(shape).encode()), dtype=torch.uint8)
    return tensors


def unpack(tensors: Mapping[str, Any]) -> Any:
    """Return the value that `pack` was given, with tensors on the CPU."""
    return _made_of(json.loads(bytes(tensors[SHAPE].numpy())), tensors)


def _shape_of(value: Any, where: str, tensors: dict[str, Any]) -> Json:
    import numpy as np
    import torch

    given: Any = value
    if value is None or isinstance(value, bool | int | float | str):
        return {"is": value}
    if isinstance(value, torch.Tensor | np.ndarray):
        tensor: Any = value.detach() if isinstance(value, torch.Tensor) else torch.as_tensor(given)
        is_name = where.isprintable() and len(where) <= _LONGEST and "/" not in where and where not in {SHAPE, *tensors}
        name = where if is_name else f"part {len(tensors)}"
        tensors[name] = tensor.to("cpu", copy=True).contiguous()
        return {"array" if isinstance(value, np.ndarray) else "tensor": name}
    if isinstance(value, list | tuple):
        parts = [_shape_of(one, f"{where}.{number}", tensors) for number, one in enumerate(given)]
        return {"list" if isinstance(value, list) else "tuple": parts}
    if isinstance(value, Mapping) and all(isinstance(name, str) for name in given):
        return {"dict": {name: _shape_of(one, f"{where}.{name}", tensors) for name, one in given.items()}}
    return refuse(f"the trainer caches a {type(given).__module__}.{type(given).__qualname__} ({where}), which cannot be stored")


def _made_of(shape: Mapping[str, Any], tensors: Mapping[str, Any]) -> Any:
    [(kind, of)] = shape.items()
    match kind:
        case "is":
            return of
        case "tensor":
            return tensors[of]
        case "array":
            return tensors[of].numpy()
        case "dict":
            return {name: _made_of(one, tensors) for name, one in of.items()}
        case _:
            parts = [_made_of(one, tensors) for one in of]
            return tuple(parts) if kind == "tuple" else parts
