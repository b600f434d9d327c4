"""The dtypes that safetensors knows: one table for files, for numpy and for torch. Imports neither."""

from collections.abc import Mapping
from typing import Final, NamedTuple

RawTensor = tuple[str, tuple[int, ...], bytes | bytearray | memoryview]
"""(safetensors dtype, shape, contiguous little-endian bytes)."""


class Dtype(NamedTuple):
    """One dtype and its names in torch and numpy."""

    size: int
    """Bytes of one element."""
    torch: str
    numpy: str
    """If numpy lacks the dtype: an integer of the same size."""


DTYPES: Final[Mapping[str, Dtype]] = {
    "BOOL": Dtype(1, "bool", "bool"),
    "U8": Dtype(1, "uint8", "uint8"),
    "I8": Dtype(1, "int8", "int8"),
    "F8_E4M3": Dtype(1, "float8_e4m3fn", "uint8"),
    "F8_E5M2": Dtype(1, "float8_e5m2", "uint8"),
    "I16": Dtype(2, "int16", "int16"),
    "U16": Dtype(2, "uint16", "uint16"),
    "F16": Dtype(2, "float16", "float16"),
    "BF16": Dtype(2, "bfloat16", "uint16"),
    "I32": Dtype(4, "int32", "int32"),
    "U32": Dtype(4, "uint32", "uint32"),
    "F32": Dtype(4, "float32", "float32"),
    "I64": Dtype(8, "int64", "int64"),
    "U64": Dtype(8, "uint64", "uint64"),
    "F64": Dtype(8, "float64", "float64"),
    "C64": Dtype(8, "complex64", "complex64"),
}
TORCH_NAMES: Final = {dtype.torch: name for name, dtype in DTYPES.items()}
"""safetensors names by torch name."""
NUMPY_NAMES: Final = {dtype.numpy: name for name, dtype in DTYPES.items() if dtype.numpy == dtype.torch}
"""safetensors names by numpy name, for the dtypes that numpy has."""
