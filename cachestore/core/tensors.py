"""Conversion between tensors and bytes: torch tensors or numpy arrays <-> (dtype, shape, buffer).

torch is imported only if torch tensors are asked for or passed in.
"""

import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, cast

from cachestore.core.arguments import as_text
from cachestore.core.dtypes import DTYPES, NUMPY_NAMES, TORCH_NAMES, RawTensor
from cachestore.core.errors import BadInput, FormatError, importing
from cachestore.core.forked import in_one_thread

if TYPE_CHECKING:
    import numpy as np
    import torch

_CAN_BE_STORED = f"use dense tensors of {', '.join(NUMPY_NAMES)}, bfloat16, float8_e4m3fn or float8_e5m2"


def to_raw(tensors: Mapping[str, Any]) -> dict[str, RawTensor]:
    """Return torch tensors, numpy arrays or (dtype, shape, bytes) as bytes. Contiguous CPU tensors share memory. Raises BadInput."""
    raw: dict[str, RawTensor] = {}
    for name, value in tensors.items():
        raw[as_text("the name of a tensor", name)] = dtype, _shape, buffer = _raw(name, value)
        if dtype == "BOOL" and not are_bools(dtype, buffer):
            raise BadInput(
                f"the bool tensor {name!r} holds a byte that is neither 0 nor 1, so it cannot be stored; make it with a"
                " comparison, such as `tensor != 0`"
            )
    return raw


def fill_their_memory(entries: Iterable[Mapping[str, Any]]) -> bool:
    """Return whether all values are torch tensors that use at least half of the memory they keep. Parts of a batch keep all of it."""
    torch = sys.modules.get("torch")
    used, kept = 0, dict[int, int]()
    for value in (value for tensors in entries for value in tensors.values()):
        if torch is None or not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
            return False
        try:
            memory = value.untyped_storage()
            used += value.nbytes
            kept[memory.data_ptr()] = memory.nbytes()
        except (RuntimeError, ValueError):  # it has no data: `to_raw` says so
            return False
    return 2 * used >= sum(kept.values())


def are_bools(dtype: str, buffer: bytes | bytearray | memoryview) -> bool:
    """Return whether all bytes of a BOOL are 0 or 1: libraries may do anything with others. True for every other dtype."""
    return dtype != "BOOL" or not bytes(buffer).strip(b"\0\1")


def _check_bools(raw: Mapping[str, RawTensor]) -> None:
    for name, (dtype, _shape, buffer) in raw.items():
        if not are_bools(dtype, buffer):
            raise FormatError(
                f"the BOOL tensor {name!r} holds a byte that is neither 0 nor 1: cachestore did not write it; run `cachestore verify`"
            )


def _raw(name: str, value: Any) -> RawTensor:
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray):
        return _raw_from_numpy(name, value)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return _raw_from_torch(name, value)
    if isinstance(value, tuple):
        return _raw_from_bytes(name, cast("tuple[Any, ...]", value))
    raise BadInput(f"tensor {name!r} is a {type(value).__name__}; a torch tensor or a numpy array is needed")


def _raw_from_bytes(name: str, value: Sequence[Any]) -> RawTensor:
    try:
        dtype, shape, buffer = value
        elements = memoryview(buffer)
        flat = elements.cast("B") if elements.nbytes else memoryview(b"")
    except (TypeError, ValueError) as error:
        raise BadInput(f"tensor {name!r} is a tuple, but not one of dtype, shape and contiguous bytes") from error
    if not isinstance(dtype, str) or not isinstance(shape, tuple) or not {int}.issuperset(map(type, cast("tuple[Any, ...]", shape))):
        raise BadInput(f"tensor {name!r} has dtype {dtype!r} and shape {shape!r}; a name and a tuple of whole numbers are needed")
    return dtype, cast("tuple[int, ...]", shape), flat


def _raw_from_torch(name: str, value: "torch.Tensor") -> RawTensor:
    import torch

    dtype = TORCH_NAMES.get(str(value.dtype).removeprefix("torch."))
    if dtype is None or value.layout is not torch.strided or value.is_nested:
        kind = "a nested tensor" if value.is_nested else value.layout
        raise BadInput(f"tensor {name!r} ({value.dtype}, {kind}) cannot be stored: {_CAN_BE_STORED}")
    try:
        plain = value.detach()
        if plain.is_conj() or plain.is_neg():
            plain = plain.resolve_conj().resolve_neg()
        flat = plain.cpu().contiguous().reshape(-1)
    except (NotImplementedError, ValueError) as error:  # on the device "meta", or a parameter that is not initialised
        raise BadInput(f"tensor {name!r} on the device {value.device} has no data that can be stored") from error
    try:
        buffer = flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")
    except RuntimeError as error:  # it stands for others, as inside torch.vmap
        raise BadInput(f"tensor {name!r} is a {type(value).__name__} without data of its own") from error
    return dtype, tuple(value.shape), buffer


def _raw_from_numpy(name: str, value: "np.ndarray[Any, Any]") -> RawTensor:
    kind = value.dtype
    dtype = _name_of(kind)
    if hasattr(value, "mask"):
        raise BadInput(f"array {name!r} is masked, and a mask is not stored: use `array.filled(...)`")
    if dtype is None:
        raise BadInput(f"array {name!r} ({kind}) cannot be stored: {_CAN_BE_STORED}")
    if not value.size:
        return dtype, value.shape, memoryview(b"")
    if sys.byteorder == "little" and kind.isnative and value.flags.c_contiguous:
        return dtype, value.shape, value.data.cast("B")
    import numpy as np

    little = np.ascontiguousarray(value, dtype=kind.newbyteorder("<"))
    return dtype, value.shape, little.reshape(-1).view(np.uint8).data


@lru_cache
def _name_of(dtype: "np.dtype[Any]") -> str | None:
    """The safetensors name of a numpy dtype. numpy takes 5 us to name a dtype."""
    return NUMPY_NAMES.get(dtype.name)


@in_one_thread
def to_torch(raw: Mapping[str, RawTensor]) -> "dict[str, torch.Tensor]":
    """Return torch tensors on the CPU. They share memory with writable buffers; read-only ones (views of a file) are copied.

    Raises FormatError for a BOOL with bytes other than 0 or 1, MissingExtra without torch.
    """
    _check_bools(raw)
    return {name: _torch_of(*tensor) for name, tensor in raw.items()}


def _torch_of(name: str, shape: tuple[int, ...], buffer: bytes | bytearray | memoryview) -> "torch.Tensor":
    dtype = torch_dtype(name)
    import torch

    if len(buffer) == 0:
        return torch.empty(shape, dtype=dtype)
    own = bytearray(buffer) if memoryview(buffer).readonly else buffer
    return torch.frombuffer(own, dtype=dtype).view(shape)  # pyright: ignore[reportUnknownMemberType]


@cache
def torch_dtype(name: str) -> "torch.dtype":
    """Return the torch dtype for a safetensors dtype name. Raises MissingExtra without torch."""
    with importing("torch"):
        import torch

    return getattr(torch, DTYPES[name].torch)


def to_numpy(raw: Mapping[str, RawTensor]) -> "dict[str, np.ndarray[Any, Any]]":
    """Return numpy arrays that share memory with the buffers; bfloat16 as uint16, float8 as uint8. Raises as `to_torch`."""
    import numpy as np

    _check_bools(raw)
    return {name: np.frombuffer(buffer, _numpy_dtype(dtype)).reshape(shape) for name, (dtype, shape, buffer) in raw.items()}


@cache
def _numpy_dtype(name: str) -> "np.dtype[Any]":
    import numpy as np

    return np.dtype(DTYPES[name].numpy).newbyteorder("<")
