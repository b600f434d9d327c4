"""Reads and writes the containers npz and safetensors as bytes. Nothing in them is executed: npz is read without pickles.

No size that a file states is trusted. What an npz unpacks to is counted while it is unpacked, so a forged size takes no memory.
"""

import io
import json
import struct
import zipfile
import zlib
from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import safetensors

from cachestore.core.dtypes import DTYPES
from cachestore.core.errors import EncodeFailed
from cachestore.core.raw_tensors import Contents, Raw, from_array
from cachestore.files.container import DTYPE_BYTES, HEADER_LIMIT_BYTES, TensorInfo, build_header
from cachestore.files.opening import FOREIGN_LIMIT_BYTES

if TYPE_CHECKING:
    from cachestore.core.keys import Json

LARGEST_BYTES: Final = FOREIGN_LIMIT_BYTES
"""The most bytes that a cache file may hold, unpacked: far more than an embedding or a video's latents."""
_MEMBERS: Final = 256
_DIRECTORY_BYTES: Final = 1 << 20
"""More than the list at the end of a zip takes for so many arrays."""
_END: Final = struct.Struct("<4s8xLLH")
"""The last bytes of a zip: a mark, the size and the start of its list of members, the length of a comment."""
_LOCAL: Final = struct.Struct("<4s22xHH")
"""What stands before a member: a mark, the lengths of its name and of an extra field, which follow."""
_NPY_HEADER_CHARS: Final = 10_000
"""NumPy's own limit: it parses the header as Python literals, and longer ones may be too much for the parser."""
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
        return Contents({name: _read_npy(_unpacked(data, member)) for name, member in _members(data).items()})
    except EncodeFailed:
        raise
    except Exception as error:  # zipfile and numpy raise a dozen kinds of errors on hostile bytes
        raise EncodeFailed(
            f"it is no readable npz file ({type(error).__name__}: {error}): remove it, and let the trainer write it again"
        ) from error


def _members(data: bytes) -> dict[str, zipfile.ZipInfo]:
    mark, size, start, comment = _END.unpack(data[-_END.size :]) if len(data) >= _END.size else (b"", 0, 0, 0)
    has_64_bits = data[-_END.size - 20 :].startswith(b"PK\6\7")  # its list may be anywhere, and of any length
    if mark != b"PK\5\6" or comment or has_64_bits or size > _DIRECTORY_BYTES:
        raise zipfile.BadZipFile("it does not end as a zip of arrays does")
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = sorted(archive.infolist(), key=lambda member: member.header_offset)
    total = sum(member.file_size for member in members)
    if len(members) > _MEMBERS or total > LARGEST_BYTES:
        raise EncodeFailed(
            f"it unpacks to {len(members)} arrays of {total >> 20} MiB; at most {_MEMBERS} arrays of {LARGEST_BYTES >> 20} MiB are read"
        )
    ends = [(member.header_offset, member.header_offset + _LOCAL.size + member.compress_size) for member in members]
    if any(one[1] > other[0] for one, other in pairwise([*ends, (start, start)])):
        raise zipfile.BadZipFile("its arrays overlap")
    by_name = {member.filename.removesuffix(".npy"): member for member in members}
    if len(by_name) < len(members):
        raise zipfile.BadZipFile("two arrays have one name")
    return by_name


def _unpacked(data: bytes, member: zipfile.ZipInfo) -> bytes:
    """Return the bytes of a member, which takes as much memory as the member states. Raises BadZipFile if it does not have as many."""
    mark, *lengths = _LOCAL.unpack_from(data, member.header_offset)
    if mark != b"PK\3\4" or member.flag_bits & 1 or member.compress_type not in {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}:
        raise zipfile.BadZipFile(f"{member.filename!r:.80} is neither stored as it is nor deflated")
    start = member.header_offset + _LOCAL.size + sum(lengths)
    packed = memoryview(data)[start : start + member.compress_size]
    is_stored = member.compress_type == zipfile.ZIP_STORED
    unpacked = bytes(packed) if is_stored else zlib.decompressobj(-zlib.MAX_WBITS).decompress(packed, member.file_size + 1)
    if len(unpacked) != member.file_size or zlib.crc32(unpacked) != member.CRC:
        raise zipfile.BadZipFile(f"{member.filename!r:.80} has another size or checksum than the list of arrays states")
    return unpacked


def _read_npy(data: bytes) -> Raw:
    """Return an array as it lies in memory. Its shape must fit the bytes that are there. Raises ValueError, also for objects."""
    file = io.BytesIO(data)
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    shape, is_by_columns, dtype = readers[np.lib.format.read_magic(file)](file, max_header_size=_NPY_HEADER_CHARS)
    if dtype.hasobject:
        raise ValueError("it holds objects of Python, which are never loaded")
    array = np.frombuffer(data, dtype, offset=file.tell())
    return from_array(array.reshape(shape, order="F" if is_by_columns else "C"))


def write_npz(arrays: Mapping[str, "np.ndarray[Any, Any]"]) -> bytes:
    """Return an npz file as `numpy.savez` makes it; equal arrays give equal bytes."""
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=False, **dict(arrays))
    return buffer.getvalue()


def read_safetensors(data: bytes) -> Contents:
    """Return the tensors of a safetensors file, and its metadata as values. Raises EncodeFailed."""
    library: Any = safetensors  # it has no type hints
    length = int.from_bytes(data[:_LENGTH_BYTES], "little")
    if length > HEADER_LIMIT_BYTES:
        raise EncodeFailed(f"it is no readable safetensors file: its header should have {length:,} bytes")
    try:
        tensors = {
            str(name): (str(spec["dtype"]), tuple(map(int, spec["shape"])), bytes(spec["data"])) for name, spec in library.deserialize(data)
        }
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
