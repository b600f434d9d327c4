"""Reads files of `torch.save` with `weights_only=True`, and writes them. Reading belongs into a limited process (`sandbox`). Imports torch.

Nested values are flattened: the name is the path of keys or numbers (`a.b`). Only tensors and plain values are returned.
"""

import gzip
import io
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, Final, cast

import torch

from cachestore.core.errors import EncodeFailed
from cachestore.core.keys import Json
from cachestore.core.raw_tensors import Contents, Raw
from cachestore.core.tensors import to_raw, to_torch
from cachestore.trainers.containers import LARGEST_BYTES

_GZIP: Final = b"\x1f\x8b"
_DEPTH: Final = 8
_LEAVES: Final = 4096
WHOLE: Final = "value"
"""The name of a tensor that is the whole file."""


def read_torch(data: bytes) -> Contents:
    """Return the tensors and plain values of a file of `torch.save`, with or without gzip. Raises EncodeFailed."""
    if data[:2] == _GZIP:
        data = _unpacked(data)
    try:
        loaded: object = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # torch's unpickler raises many kinds of errors, for forbidden objects and for damage
        reason = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}".removesuffix(": ")
        raise EncodeFailed(f"torch cannot read the file ({reason})") from error
    leaves = [(name or WHOLE, leaf) for name, leaf in islice(_leaves(loaded, "", 0), _LEAVES + 1)]
    if len(leaves) > _LEAVES:
        raise EncodeFailed(f"it holds more than {_LEAVES} values: this is no cache of a trainer")
    tensors = {name: leaf for name, leaf in leaves if isinstance(leaf, torch.Tensor)}
    return Contents(to_raw(tensors), {name: leaf for name, leaf in leaves if not isinstance(leaf, torch.Tensor)})


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
    if depth > _DEPTH:
        raise EncodeFailed(f"it is nested deeper than {_DEPTH} levels")
    if isinstance(value, Mapping | list | tuple):
        parts = cast("Mapping[object, object]", value).items() if isinstance(value, Mapping) else enumerate(cast("list[object]", value))
        for key, part in parts:
            yield from _leaves(part, f"{name}.{key}" if name else str(key), depth + 1)
    elif value is None or isinstance(value, torch.Tensor | bool | int | float | str):
        yield name, value
    else:
        known = "a cache of a trainer has only tensors and plain values: check the folder"
        raise EncodeFailed(f"{name or 'it'} is a {type(value).__name__}, but {known}")


def write_torch(tensors: Mapping[str, Raw], values: Mapping[str, Json]) -> bytes:
    """Return a file of `torch.save`: a dict of tensors and plain values, or the tensor itself if its name is WHOLE.

    Equal ones give equal bytes. A tensor under two names is written once.
    """
    first = {id(raw): name for name, raw in tensors.items()}
    made = to_torch({name: (tensors[name][0], tensors[name][1], bytearray(tensors[name][2])) for name in first.values()})
    named = {name: made[first[id(raw)]] for name, raw in tensors.items()}
    buffer = io.BytesIO()
    torch.save(named[WHOLE] if set(named) == {WHOLE} else {**named, **values}, buffer)
    return buffer.getvalue()
