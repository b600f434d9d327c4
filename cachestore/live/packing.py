"""Any value that a trainer caches, as named tensors: tensors, arrays, texts and numbers in lists, tuples and mappings."""

import json
from collections.abc import Mapping
from typing import Any, Final

from cachestore.core.keys import Json, Key, key
from cachestore.live.adapter import refuse

SHAPE: Final = "shape"
"""The name of the tensor that says how the others belong together: JSON as bytes."""
_LONGEST: Final = 100
"""A name of more characters is none that a person would read; stores take 128."""


def pack(value: Any) -> dict[str, Any]:
    """Return a value as tensors by name, on the CPU; `unpack` makes the value of them, with numbers to the bit.

    Tensors, numpy arrays, None, bool, int, float, str, and lists, tuples and mappings with texts as keys, of them. Anything else ends the
    run with exit code 2 (Refused).
    """
    import torch

    tensors: dict[str, Any] = {}
    shape = _shape_of(value, "value", tensors)
    tensors[SHAPE] = torch.frombuffer(bytearray(json.dumps(shape).encode()), dtype=torch.uint8)
    return tensors


def unpack(tensors: Mapping[str, Any]) -> Any:
    """Return the value that `pack` was given, with tensors on the CPU."""
    return _made_of(json.loads(bytes(tensors[SHAPE].numpy())), tensors)


def key_of(*what: str, tensors: Mapping[str, Any]) -> Key:
    """Return the key of what `pack` returned, and of texts that say what it is: equal values have equal keys."""
    import torch

    parts: list[str | bytes] = []
    for name, tensor in sorted(tensors.items()):
        parts += [name, str(tensor.dtype), str(list(tensor.shape)), tensor.reshape(-1).view(torch.uint8).numpy().tobytes()]
    return key(*what, *parts)


def _shape_of(value: Any, where: str, tensors: dict[str, Any]) -> Json:
    import numpy as np
    import torch

    given: Any = value
    if isinstance(value, torch.Tensor | np.ndarray):
        is_name = where.isprintable() and len(where) <= _LONGEST and "/" not in where and where not in {SHAPE, *tensors}
        name = where if is_name else f"part {len(tensors)}"
        tensor: Any = value.detach() if isinstance(value, torch.Tensor) else torch.as_tensor(given)
        tensors[name] = tensor.to("cpu", copy=True).contiguous()
        return ["array" if isinstance(value, np.ndarray) else "tensor", name]
    if type(given) is float:
        return ["float", given.hex()]  # JSON has neither infinity nor not-a-number
    if given is None or type(given) in {bool, int, str}:
        return ["value", given]
    if type(given) in {list, tuple}:
        return [type(given).__name__, [_shape_of(one, f"{where}.{number}", tensors) for number, one in enumerate(given)]]
    if isinstance(value, Mapping) and all(type(name) is str for name in given):
        return ["dict", [[name, _shape_of(one, f"{where}.{name}", tensors)] for name, one in given.items()]]
    return refuse(f"the trainer caches a {type(given).__module__}.{type(given).__qualname__} ({where}), which cannot be stored")


def _made_of(shape: Any, tensors: Mapping[str, Any]) -> Any:
    kind, of = shape
    match kind:
        case "tensor":
            return tensors[of]
        case "array":
            return tensors[of].numpy()
        case "float":
            return float.fromhex(of)
        case "value":
            return of
        case "dict":
            return {name: _made_of(one, tensors) for name, one in of}
        case _:
            parts = [_made_of(one, tensors) for one in of]
            return tuple(parts) if kind == "tuple" else parts
