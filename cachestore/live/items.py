"""Items of trainers that cache whatever `torch.save` takes: tensors in lists, tuples and mappings, with texts and numbers among them."""

from typing import Any, cast

from cachestore.core.errors import BadInput
from cachestore.core.keys import Json


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
            return {key: unpack(one, tensors) for key, one in value}
        case "list" | "tuple":
            several = [unpack(one, tensors) for one in value]
            return several if kind == "list" else tuple(several)
        case _:
            return value


def contents(tensor: Any) -> tuple[str, str, bytes]:
    """Return a tensor on the CPU as dtype, shape and bytes: parts of a key."""
    import torch

    return str(tensor.dtype), str(list(tensor.shape)), tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


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
    if isinstance(value, dict) and all(type(key) is str for key in cast("dict[Any, Any]", value)):
        return ["dict", [[key, _pack(one, key, tensors)] for key, one in cast("dict[str, Any]", value).items()]]
    known = "tensors, texts, numbers, None, and lists, tuples and mappings of them"
    raise BadInput(f"{name} is a {kind}; what can be kept: {known}")
