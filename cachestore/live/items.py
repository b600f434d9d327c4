"""Items of trainers that cache whatever `torch.save` takes: tensors in lists, tuples and mappings, with texts and numbers among them."""

import json
from collections.abc import Mapping
from typing import Any, cast

from cachestore.core.errors import BadInput
from cachestore.core.keys import Json, Key, key


def pack(item: Any) -> tuple[Json, dict[str, Any]]:
    """Return an item's form, which JSON can hold, and its tensors by name, for `put` and its `meta`. `unpack` makes the item of them.

    Tensors, None, bool, int, float, str, and lists, tuples and mappings with texts as keys, of them. Raises BadInput for anything else.
    """
    tensors: dict[str, Any] = {}
    return _pack(item, "item", tensors), tensors


def unpack(form: Json, tensors: dict[str, Any]) -> Any:
    """Return the item: lists as lists, tuples as tuples, and numbers to the bit."""
    kind, value = form  # type: ignore[misc]  # pyright: ignore[reportGeneralTypeIssues]
    match kind:
        case "tensor":
            return tensors[value]
        case "float":
            return float.fromhex(value)
        case "dict":
            return {name: unpack(one, tensors) for name, one in value}
        case "list" | "tuple":
            several = [unpack(one, tensors) for one in value]
            return several if kind == "list" else tuple(several)
        case _:
            return value


def key_of(*what: str, form: Json, tensors: Mapping[str, Any]) -> Key:
    """Return the key of an item's content, and of texts that say what it is."""
    import torch

    parts = [
        part
        for tensor in tensors.values()
        for part in (str(tensor.dtype), str(list(tensor.shape)), tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    ]
    return key(*what, json.dumps(form), *parts)


def _pack(value: Any, name: str, tensors: dict[str, Any]) -> Json:
    import torch

    if isinstance(value, torch.Tensor):
        number = f"{name}-{len(tensors)}"
        tensors[number] = value.detach().cpu().contiguous()
        return ["tensor", number]
    if type(value) is float:
        return ["float", value.hex()]
    if value is None or type(value) in {bool, int, str}:
        return ["value", value]
    if type(value) in {list, tuple}:
        return [type(value).__name__, [_pack(one, name, tensors) for one in value]]
    if isinstance(value, dict) and all(type(one) is str for one in cast("dict[Any, Any]", value)):
        return ["dict", [[text, _pack(one, text, tensors)] for text, one in cast("dict[str, Any]", value).items()]]
    kind = type(cast("object", value)).__name__
    known = "tensors, texts, numbers, None, and lists, tuples and mappings of them"
    raise BadInput(f"{name} is a {kind}; what can be kept: {known}")
