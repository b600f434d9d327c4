"""The safetensors container: the header's length (8 bytes), a JSON header padded to 64 bytes with spaces, and data without gaps.

The safetensors library opens these files. It also opens files that are refused here: with a name twice, odd alignment, unknown fields,
names with NUL, zero-size shapes of 2^62, or headers of a million tensors.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from json.encoder import encode_basestring
from math import prod
from pathlib import Path
from typing import Any, Final, NamedTuple

from cachestore.core.dtypes import DTYPES
from cachestore.core.errors import FormatError
from cachestore.core.words import plural
from cachestore.files.opening import read_at
from cachestore.files.paths import damaged

ALIGNMENT: Final = 64
"""Data starts at a multiple of this; so do the entries of a segment."""
HEADER_LIMIT_BYTES: Final = 16 * 1024 * 1024
TENSOR_LIMIT: Final = 65_536
_NAME_LIMIT: Final = 256
_RANK_LIMIT: Final = 16
_SIZE_LIMIT: Final = 1 << 50
_METADATA: Final = "__metadata__"
_FIELDS: Final = {"dtype", "shape", "data_offsets"}
_LENGTH_BYTES: Final = 8
DTYPE_BYTES: Final[Mapping[str, int]] = {name: dtype.size for name, dtype in DTYPES.items()}
"""Bytes of one element by safetensors dtype name."""


class TensorInfo(NamedTuple):
    """One tensor of a container; offsets in bytes from the start of the data."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Header:
    """A parsed header: tensors in the order of their bytes."""

    tensors: Mapping[str, TensorInfo]
    metadata: Mapping[str, str]
    data_start: int


def size_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Return the bytes of a tensor. Raises FormatError for a dtype that safetensors does not know."""
    if dtype not in DTYPE_BYTES:
        raise FormatError(f"dtype {dtype!r} cannot be stored; safetensors knows {', '.join(DTYPE_BYTES)}")
    return DTYPE_BYTES[dtype] * prod(shape)


def is_shape(shape: tuple[int, ...]) -> bool:
    """Return whether a container can hold a tensor of this shape: at most 16 dimensions, each from 0 to below 2^50."""
    return len(shape) <= _RANK_LIMIT and _are_sizes(list(shape))


def build_header(tensors: Mapping[str, TensorInfo], metadata: Mapping[str, str]) -> bytes:
    """Return the length field and the header, padded so that data starts at a multiple of 64. Raises FormatError above the limits."""
    fields = [f"{field_start(name, info.dtype, info.shape)}{info.start},{info.end}]}}" for name, info in tensors.items()]
    return join_header(fields, metadata)


def field_start(name: str, dtype: str, shape: tuple[int, ...]) -> str:
    """A tensor's field of a header, up to its offsets. `START,END]}` completes it."""
    return f'{encode_basestring(name)}:{{"dtype":"{dtype}","shape":[{",".join(map(str, shape))}],"data_offsets":['


def join_header(fields: Sequence[str], metadata: Mapping[str, str]) -> bytes:
    """As `build_header`, of fields that are JSON already. Raises FormatError above the limits."""
    of_file = json.dumps({_METADATA: dict(metadata)}, separators=(",", ":"), ensure_ascii=False)
    text = ",".join([of_file[:-1], *fields]).encode("utf-8", "surrogatepass") + b"}"
    text += b" " * (-(len(text) + _LENGTH_BYTES) % ALIGNMENT)
    if len(text) > HEADER_LIMIT_BYTES or len(fields) > TENSOR_LIMIT:
        size = f"{plural(len(fields), 'tensor')} with a header of {len(text)} bytes"
        raise FormatError(f"a file of {size} is above the limits of {TENSOR_LIMIT} and {HEADER_LIMIT_BYTES}; store fewer tensors")
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def read_header(descriptor: int, file_bytes: int, *, where: Path, is_whole: bool = True) -> Header:
    """Read and check the header of an open container. `is_whole=False` accepts a file that was cut short, or grew. Raises FormatError."""
    raw = read_at(descriptor, _LENGTH_BYTES, 0)
    length = int.from_bytes(raw, "little")
    if len(raw) < _LENGTH_BYTES or length > min(HEADER_LIMIT_BYTES, file_bytes - _LENGTH_BYTES):
        size = f"should have {length} bytes, but the file has {file_bytes} (limit {HEADER_LIMIT_BYTES})"
        raise damaged(f"the header of {where} {size}", where)
    return parse_header(read_at(descriptor, length, _LENGTH_BYTES), file_bytes if is_whole else None, where=where)


def parse_start(start: bytes, file_bytes: int, *, where: Path) -> Header:
    """Parse the header in the first bytes of a file of this size. Raises FormatError, also if they end before it does."""
    length = int.from_bytes(start[:_LENGTH_BYTES], "little")
    if len(start) < _LENGTH_BYTES or length > len(start) - _LENGTH_BYTES:
        raise FormatError(f"{where} is too short for its header")
    return parse_header(start[_LENGTH_BYTES : _LENGTH_BYTES + length], file_bytes, where=where)


def parse_header(text: bytes | bytearray, file_bytes: int | None, *, where: Path) -> Header:
    """Parse a header's text and check every rule above; with `file_bytes` None the file's size is not checked. Raises FormatError."""
    try:
        return _parse(text, file_bytes)
    except _Malformed as error:
        raise damaged(f"{where} is not a container that cachestore can read: {error}", where) from error


class _Malformed(ValueError):
    """The header breaks a rule. It becomes FormatError where the file's name is known."""


def _parse(text: bytes | bytearray, file_bytes: int | None) -> Header:
    if not text.startswith(b"{"):
        raise _Malformed("the header does not start with {")
    try:
        # Decoded here, because `json.loads` would guess UTF-16 and UTF-32 from bytes.
        fields: Any = json.loads(text.decode("utf-8", "surrogatepass"), object_pairs_hook=_no_duplicates, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise _Malformed(f"the header is not JSON ({type(error).__name__}: {error})") from error
    if not isinstance(fields, dict) or len(fields) > TENSOR_LIMIT + 1:  # pyright: ignore[reportUnknownArgumentType] - JSON
        raise _Malformed(f"the header is not an object of at most {TENSOR_LIMIT} tensors")
    metadata: Any = fields.pop(_METADATA, {})  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
        raise _Malformed("__metadata__ does not map names to strings")
    tensors = {name: _parse_info(name, value) for name, value in fields.items()}  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType, reportUnknownArgumentType]
    ordered: dict[str, TensorInfo] = dict(sorted(tensors.items(), key=lambda item: (item[1].start, item[1].end)))  # pyright: ignore[reportUnknownArgumentType]
    position = 0
    for info in ordered.values():
        if info.start != position:
            raise _Malformed(f"there is a hole or an overlap at byte {min(position, info.start)} of the data")
        position = info.end
    data_start = _LENGTH_BYTES + len(text)
    if file_bytes is not None and position != file_bytes - data_start:
        raise _Malformed(f"the tensors end at byte {position}, the data at {file_bytes - data_start}")
    return Header(ordered, metadata, data_start)  # pyright: ignore[reportUnknownArgumentType]


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise _Malformed("a name appears twice")
    return fields


def _no_constant(name: str) -> None:
    raise _Malformed(f"{name} is not JSON")


def _parse_info(name: str, value: Any) -> TensorInfo:
    if not name or len(name) > _NAME_LIMIT or "\0" in name:
        raise _Malformed(f"a tensor's name has 1 to {_NAME_LIMIT} characters and no NUL; {name[:40]!r} does not")
    if not isinstance(value, dict) or value.keys() != _FIELDS:  # pyright: ignore[reportUnknownArgumentType]
        raise _Malformed(f"{name[:80]!r} must have exactly dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]  # pyright: ignore[reportUnknownVariableType]
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise _Malformed(f"{name[:80]!r} has the unknown dtype {dtype!r}")
    if not (_are_sizes(shape) and _are_sizes(offsets) and len(offsets) == 2 and len(shape) <= _RANK_LIMIT):  # pyright: ignore[reportUnknownArgumentType]
        raise _Malformed(f"{name[:80]!r} has a shape or offsets that are not small whole numbers")
    info = TensorInfo(dtype, tuple(shape), offsets[0], offsets[1])  # pyright: ignore[reportUnknownArgumentType]
    need = DTYPE_BYTES[dtype] * prod(info.shape)
    if info.end - info.start != need:
        raise _Malformed(f"{name[:80]!r} has {info.end - info.start} bytes, but its dtype and shape need {need}")
    if info.start % DTYPE_BYTES[dtype]:
        raise _Malformed(f"{name[:80]!r} does not start at a multiple of its element's size")
    return info


def _are_sizes(values: Any) -> bool:
    if not isinstance(values, list) or not {int}.issuperset(map(type, values)):  # pyright: ignore[reportUnknownArgumentType]
        return False
    return not values or (min(values) >= 0 and max(values) < _SIZE_LIMIT)  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
