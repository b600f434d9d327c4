"""Files of `torch.save`: read with `weights_only=True`, which belongs into a limited process (`untrusted`), and written. Imports torch.

What is read is flattened: tensors by the path of names that leads to them (`a.b`), of lists and tuples by number, and plain values beside
them. Nothing else that a pickle can hold comes out, and nothing of it is executed.
"""

import gzip
import io
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, cast

import torch

from cachestore.core.errors import EncodeFailed
from cachestore.core.raw_tensors import Contents, Raw
from cachestore.core.tensors import to_raw, to_torch
from cachestore.interop.formats.containers import LARGEST_BYTES

if TYPE_CHECKING:
    from cachestore.core.keys import Json

_GZIP: Final = b"\x1f\x8b"
_DEPTH: Final = 8
_LEAVES: Final = 4096
WHOLE: Final = "value"
"""The name of a tensor that is all there is."""


def read_torch(data: bytes) -> Contents:
    """The tensors and plain values of a file of `torch.save`, gzip around it or not. Raises EncodeFailed."""
    if data[:2] == _GZIP:
        data = _unpacked(data)
    try:
        loaded: object = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # The boundary to torch's unpickler, which refuses what is no tensor, and fails on damage, in many ways.
        raise EncodeFailed(f"torch refuses it ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''})") from error
    tensors: dict[str, torch.Tensor] = {}
    values: dict[str, Json] = {}
    for number, (name, leaf) in enumerate(_leaves(loaded, "", 0)):
        if number >= _LEAVES:
            raise EncodeFailed(f"it holds more than {_LEAVES} values")
        if isinstance(leaf, torch.Tensor):
            tensors[name or WHOLE] = leaf
        else:
            values[name or WHOLE] = leaf
    return Contents(to_raw(tensors), values)


def _unpacked(data: bytes) -> bytes:
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
            unpacked = file.read(LARGEST_BYTES + 1)
    except (OSError, EOFError) as error:
        raise EncodeFailed(f"it is no readable gzip file ({error})") from error
    if len(unpacked) > LARGEST_BYTES:
        raise EncodeFailed(f"it unpacks to more than {LARGEST_BYTES >> 20} MiB")
    return unpacked


def _leaves(value: object, name: str, depth: int) -> Iterator[tuple[str, Any]]:
    """Tensors and plain values with their names, in order."""
    if depth > _DEPTH:
        raise EncodeFailed(f"it is nested deeper than {_DEPTH}")
    prefix = f"{name}." if name else ""
    if isinstance(value, Mapping):
        for key, inner in cast("Mapping[object, object]", value).items():
            yield from _leaves(inner, f"{prefix}{key}", depth + 1)
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(cast("Sequence[object]", value)):
            yield from _leaves(inner, f"{prefix}{number}", depth + 1)
    elif value is None or isinstance(value, torch.Tensor | bool | int | float | str):
        yield name, value
    else:
        raise EncodeFailed(f"{name or 'it'} is a {type(value).__name__}, which is neither a tensor nor a plain value")


def write_torch(tensors: Mapping[str, Raw]) -> bytes:
    """A file of `torch.save`: a dict of tensors, or the tensor itself where its name is WHOLE. Equal tensors make equal bytes."""
    made = to_torch({name: (dtype, shape, bytearray(buffer)) for name, (dtype, shape, buffer) in tensors.items()})
    buffer = io.BytesIO()
    torch.save(made[WHOLE] if set(made) == {WHOLE} else made, buffer)
    return buffer.getvalue()
