"""One entry as bytes: its layout, its checksum, and the buffers it is written from. Reads and writes no file.

The tensors of an entry follow each other, widest dtype first, so each is aligned to its element size without filler. The checksum covers
the key, names, dtypes, shapes and every byte. So intact bytes under a wrong key are noticed.
"""

import json
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Final, NamedTuple

from cachestore.core.dtypes import RawTensor
from cachestore.core.errors import BadInput
from cachestore.core.keys import Json, Key, canonical, canonical_text
from cachestore.files.checksum import Buffer, Checksum
from cachestore.files.container import DTYPE_BYTES, field_start, is_shape, size_bytes

CHECKSUM_BYTES: Final = 16
EMPTY: Final = "{}"
"""The JSON value of an entry that has none."""
_NAME_LIMIT: Final = 128
_NESTED: Final = 300
"""So many more levels a reader may have around an entry's JSON value."""


class TensorSpec(NamedTuple):
    """Name, dtype and shape of one tensor of an entry."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of the tensor."""
        return size_bytes(self.dtype, self.shape)


class Specs(tuple[TensorSpec, ...]):  # noqa: SLOT001 - slots could not keep what follows from them
    """The tensors of an entry in the order of their bytes, and what follows from them. `specs_of` makes one for all entries alike."""

    @cached_property
    def size_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(spec.size_bytes for spec in self)

    @cached_property
    def text(self) -> bytes:
        """Names, dtypes and shapes as canonical JSON, for the checksum and the index."""
        return canonical([[spec.name, spec.dtype, list(spec.shape)] for spec in self])

    @cached_property
    def parts(self) -> tuple[slice, ...]:
        """Where each tensor lies among the entry's bytes."""
        ends = tuple(accumulate(spec.size_bytes for spec in self))
        return tuple(map(slice, (0, *ends), ends))

    @cached_property
    def fields(self) -> tuple[tuple[str, int, int], ...]:
        """Of each tensor: its field in a header from its name to the offsets, and where its bytes start and end in the entry."""
        starts = (field_start(spec.name, spec.dtype, spec.shape)[1:] for spec in self)
        return tuple((start, part.start, part.stop) for start, part in zip(starts, self.parts, strict=True))

    @cached_property
    def header_bytes(self) -> int:
        """The most bytes of an entry in a segment's header, without its JSON value and before JSON escaping."""
        return _TENSOR_HEADER_BYTES * (1 + len(self)) + sum(len(spec.name) for spec in self)


_Given = tuple[str, str, tuple[int, ...], int]
"""Name, dtype, shape and bytes of a tensor."""
_LAYOUTS: Final = 4096
"""How many `Specs` are kept for further entries. A store has one for each shape, not for each entry."""
_TENSOR_HEADER_BYTES: Final = 160
"""Most header bytes of one tensor without its name, and of the row and the filler of an entry without its JSON value."""


class Entry(NamedTuple):
    """An entry that is about to be written."""

    key: Key
    specs: Specs
    buffers: tuple[Buffer, ...]
    meta: str
    """Its JSON value, by `text_of`."""
    checksum: bytes


def make_entry(key: Key, tensors: Mapping[str, RawTensor], meta: Mapping[str, Json]) -> Entry:
    """Order an entry's tensors and compute its checksum. It may have no tensors, only its JSON value, which is copied.

    Raises BadInput for a bad name, dtype or length, or for a value that is not JSON.
    """
    text = text_of(meta)
    given: list[_Given] = []
    buffers: list[Buffer] = []
    for name, (dtype, shape, buffer) in sorted(tensors.items(), key=_width_and_name) if len(tensors) > 1 else tensors.items():
        given.append((name, dtype, shape, len(buffer)))
        buffers.append(buffer)
    specs = _specs_of_given(tuple(given))
    if specs is None:
        name, dtype, shape, size = next(tensor for tensor in given if _specs_of_given((tensor,)) is None)
        if not _is_name(name):
            raise BadInput(f"a tensor's name has 1 to 128 printable characters and no '/'; {name!r} in entry {key} does not")
        wanted = "its dtype, shape and bytes must agree, with at most 16 dimensions"
        raise BadInput(f"tensor {name!r} of entry {key} cannot be {dtype} {list(shape)} of {size} bytes: {wanted}")
    return Entry(key, specs, tuple(buffers), text, checksum_of(key, specs, buffers))


def text_of(meta: Mapping[str, Json]) -> str:
    """An entry's JSON value as it is written. Raises BadInput for what is not JSON, and for what readers could not parse."""
    if not meta:
        return EMPTY
    text = canonical_text(dict(meta))
    if text.count("[") + text.count("{") > _NESTED:
        try:
            json.loads(f"{'[' * _NESTED}{text}{']' * _NESTED}")
        except RecursionError as error:
            raise BadInput("a JSON value is nested too deeply to be parsed again: make it flatter", option="meta") from error
    return text


def _width_and_name(named: tuple[str, RawTensor]) -> tuple[int, str]:
    return -DTYPE_BYTES.get(named[1][0], 0), named[0]


@lru_cache(_LAYOUTS)
def specs_of(specs: "tuple[TensorSpec, ...]") -> Specs:
    """Return the specs of these tensors, the same object for all entries alike."""
    return Specs(specs)


@lru_cache(_LAYOUTS)
def _specs_of_given(given: "tuple[_Given, ...]") -> Specs | None:
    """As `specs_of`, but None if one of the tensors cannot be stored."""
    specs = specs_of(tuple(TensorSpec(name, dtype, shape) for name, dtype, shape, _size in given))
    for spec, (_name, _dtype, _shape, size) in zip(specs, given, strict=True):
        if not (_is_name(spec.name) and spec.dtype in DTYPE_BYTES and is_shape(spec.shape) and spec.size_bytes == size):
            return None
    return specs


def _is_name(name: str) -> bool:
    return bool(name) and len(name) <= _NAME_LIMIT and "/" not in name and name.isprintable()


def checksum_of(key: Key, specs: Specs, buffers: Sequence[Buffer]) -> bytes:
    """xxh3_128 over key, names, dtypes, shapes and bytes. `buffers` is one buffer for all bytes, or one for each tensor."""
    state = begin_checksum(key, specs)
    for buffer in buffers:
        state.update(buffer)
    return state.digest()


def begin_checksum(key: Key, specs: Specs) -> Checksum:
    """Start an entry's checksum with its key, names, dtypes and shapes. The bytes follow."""
    return Checksum(key + specs.text)


def split(specs: Specs, run: memoryview) -> dict[str, RawTensor]:
    """Cut an entry's bytes into its tensors, without copying."""
    return {name: (dtype, shape, run[part]) for (name, dtype, shape), part in zip(specs, specs.parts, strict=True)}
