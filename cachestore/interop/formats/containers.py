"""Reads and writes the containers npz and safetensors as bytes. Nothing in them is executed: npz is read without pickles."""

import io
import json
import zipfile
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import safetensors

from cachestore.core.dtypes import DTYPES
from cachestore.core.errors import EncodeFailed
from cachestore.core.raw_tensors import Contents, Raw, from_array
from cachestore.files.container import DTYPE_BYTES, TensorInfo, build_header

if TYPE_CHECKING:
    from cachestore.core.keys import Json

LARGEST_BYTES: Final = 1 << 30
"""The most bytes that a cache file may hold, unpacked: far more than an embedding or a video's latents."""
_MEMBERS: Final = 256
_HEADER_BYTES: Final = 1 << 20
_LENGTH_BYTES: Final = 8

DTYPE_NAMES: Final = {
    name: DTYPES[name].torch for name in ("F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2")
}
"""Torch's names of dtypes, which trainers use, by safetensors name."""


def dtype_name(dtype: str) -> str:
    """Return torch's name of a dtype. Raises EncodeFailed if trainers have none for it."""
    if dtype not in DTYPE_NAMES:
        raise EncodeFailed(f"trainers have no name for the dtype {dtype}: encode in float32, bfloat16 or float16")
    return DTYPE_NAMES[dtype]


def read_npz(data: bytes) -> Contents:
    """Return the arrays of an npz file. Raises EncodeFailed if it is damaged, too large or no npz file, or if it holds objects."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = archive.infolist()
            _check_size(members)
            return Contents({member.filename.removesuffix(".npy"): _read_npy(archive.read(member)) for member in members})
    except EncodeFailed:
        raise
    except Exception as error:  # zipfile and numpy raise a dozen kinds of errors on hostile bytes
        raise EncodeFailed(
            f"it is no readable npz file ({type(error).__name__}: {error}): remove it, and let the trainer write it again"
        ) from error


def _check_size(members: Sequence[zipfile.ZipInfo]) -> None:
    size = sum(member.file_size for member in members)
    if len(members) > _MEMBERS or size > LARGEST_BYTES:
        raise EncodeFailed(
            f"it unpacks to {len(members)} arrays of {size >> 20} MiB; at most {_MEMBERS} arrays of {LARGEST_BYTES >> 20} MiB are read"
        )


def _read_npy(data: bytes) -> Raw:
    return from_array(np.lib.format.read_array(io.BytesIO(data), allow_pickle=False, max_header_size=_HEADER_BYTES))


def write_npz(arrays: Mapping[str, "np.ndarray[Any, Any]"]) -> bytes:
    """Return an npz file as `numpy.savez` makes it; equal arrays give equal bytes."""
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=False, **dict(arrays))
    return buffer.getvalue()


def read_safetensors(data: bytes) -> Contents:
    """Return the tensors of a safetensors file, and its metadata as values. Raises EncodeFailed."""
    library: Any = safetensors  # it has no type hints
    try:
        tensors = {
            str(name): (str(spec["dtype"]), tuple(map(int, spec["shape"])), bytes(spec["data"])) for name, spec in library.deserialize(data)
        }
        length = int.from_bytes(data[:_LENGTH_BYTES], "little")
        header: Mapping[str, Json] = json.loads(data[_LENGTH_BYTES : _LENGTH_BYTES + length])
    except Exception as error:  # the library's own error is no ValueError
        raise EncodeFailed(f"it is no readable safetensors file ({type(error).__name__}: {error})") from error
    return Contents(tensors, dict(header.get("__metadata__") or {}))


def write_safetensors(tensors: Mapping[str, Raw], metadata: Mapping[str, str]) -> bytes:
    """Return a safetensors file that every reader of the format accepts; equal tensors and metadata give equal bytes."""
    infos: dict[str, TensorInfo] = {}
    chunks: list[bytes] = []
    position = 0
    # Widest dtype first, so that each tensor starts at a multiple of its element's size.
    for name, (dtype, shape, buffer) in sorted(tensors.items(), key=lambda item: (-DTYPE_BYTES[item[1][0]], item[0])):
        chunks.append(bytes(buffer))
        infos[name] = TensorInfo(dtype, tuple(shape), position, position + len(chunks[-1]))
        position += len(chunks[-1])
    return build_header(infos, dict(sorted(metadata.items()))) + b"".join(chunks)
