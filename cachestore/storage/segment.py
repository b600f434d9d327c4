"""Segments: immutable safetensors files of many entries, built in memory and written once. Only segments hold values.

A segment's name is the xxh3_128 of all its bytes. Entries start at multiples of 64 bytes; the gaps are declared tensors `filler/<n>`.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from cachestore.core.errors import FormatError
from cachestore.core.keys import Json, Key, canonical
from cachestore.files.checksum import digest_of
from cachestore.files.container import ALIGNMENT, Header, TensorInfo, build_header, read_header
from cachestore.files.opening import opened
from cachestore.files.paths import to_repair, to_verify
from cachestore.storage.entry import CHECKSUM_BYTES, Buffer, Entry, Specs, TensorSpec, size_of

FORMAT: Final = "cachestore-segment"
VERSION: Final = 1
ENTRY_LIMIT: Final = 4096
"""Most entries of one segment. Keeps headers small: opening one takes about 1 ms per thousand tensors."""

_FILLER: Final = "filler"


@dataclass(frozen=True, slots=True)
class StoredEntry:
    """An entry as a segment's header describes it."""

    key: Key
    ordinal: int
    """Its number in the order of bytes, from 0."""
    offset: int
    """Where its bytes start in the file."""
    specs: Specs
    checksum: bytes
    meta: Mapping[str, Json]

    @property
    def size_bytes(self) -> int:
        """Bytes of all its tensors."""
        return size_of(self.specs)


@dataclass(frozen=True, slots=True)
class SegmentContents:
    """The contents of a segment's header."""

    origin: str
    """`<plan>/<pass>` of the pass that wrote it; empty if a writer did."""
    entries: tuple[StoredEntry, ...]
    size_bytes: int


def build_segment(entries: Iterable[Entry], *, origin: str = "", edition: int = 0) -> tuple[str, list[Buffer]]:
    """Lay out a segment; returns (digest, chunks). Pass another `edition` for another digest, if the name is taken."""
    tensors: dict[str, TensorInfo] = {}
    table: dict[str, Any] = {}
    data: list[Buffer] = []
    position = 0
    for entry in entries:
        if gap := -position % ALIGNMENT:
            tensors[f"{_FILLER}/{len(table)}"] = TensorInfo("U8", (gap,), position, position + gap)
            data.append(bytes(gap))
            position += gap
        table[str(entry.key)] = [entry.checksum.hex(), dict(entry.meta)]
        for spec, buffer in zip(entry.specs, entry.buffers, strict=True):
            tensors[f"{entry.key}/{spec.name}"] = TensorInfo(spec.dtype, spec.shape, position, position + len(buffer))
            data.append(buffer)
            position += len(buffer)
    text = _table_text(table)
    metadata = {
        "format": f"{FORMAT}/{VERSION}",
        "origin": origin,
        "entries": text,
        "entries_checksum": digest_of([text.encode("utf-8", "surrogatepass")]),
    }
    if edition:
        metadata["edition"] = str(edition)
    chunks: list[Buffer] = [build_header(tensors, metadata), *data]
    return digest_of(chunks), chunks


def _table_text(table: Mapping[str, Any]) -> str:
    """The entry table as JSON. Lone surrogates (from file names that are not UTF-8) are escaped, as safetensors refuses them raw."""
    try:
        return canonical(table).decode("utf-8")
    except UnicodeDecodeError:
        return json.dumps(table, sort_keys=True, separators=(",", ":"))


def read_contents(path: Path, *, is_whole: bool = True) -> SegmentContents:
    """Read and check a segment's header. With `is_whole=False` the data behind it may be cut short. Raises FormatError, OSError."""
    with opened(path) as (descriptor, status):
        header = read_header(descriptor, status.st_size, where=path, is_whole=is_whole)
    return parse_contents(header, status.st_size, where=path)


def parse_contents(header: Header, file_bytes: int, *, where: Path) -> SegmentContents:
    """The entries in a parsed header. Raises FormatError if they do not match the tensors, or if the format is newer."""
    _check_format(header.metadata.get("format", ""), where)
    text = header.metadata.get("entries", "")
    if digest_of([text.encode("utf-8", "surrogatepass")]) != header.metadata.get("entries_checksum"):
        raise FormatError(f"the entry table of {where} does not match its checksum; run {to_repair(where)}")
    starts: dict[str, int] = {}
    specs: dict[str, list[TensorSpec]] = {}
    for full_name, info in header.tensors.items():
        owner, _, name = full_name.partition("/")
        starts.setdefault(owner, info.start)
        specs.setdefault(owner, []).append(TensorSpec(name, info.dtype, info.shape))
    try:
        table = {name: _parse_row(row) for name, row in json.loads(text).items()}
        in_order = sorted((starts.get(name, 0), name) for name in table)  # an entry without bytes starts where the data starts
        entries = tuple(
            StoredEntry(Key.parse(name), ordinal, header.data_start + start, tuple(specs.get(name, ())), *table[name])
            for ordinal, (start, name) in enumerate(in_order)
        )
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise FormatError(f"the entry table of {where} does not fit its tensors; run {to_repair(where)}") from error
    if not set(specs) <= {*table, _FILLER}:
        raise FormatError(f"{where} holds tensors that its entry table does not name; run {to_repair(where)}")
    return SegmentContents(header.metadata.get("origin", ""), entries, file_bytes)


def _check_format(found: str, where: Path) -> None:
    kind, _, version = found.partition("/")
    if kind != FORMAT or not version.isdecimal():
        raise FormatError(f"{where} is a safetensors file, but not a segment of cachestore; run {to_verify(where)}")
    if int(version) > VERSION:
        raise FormatError(f"{where} has format {found}; this cachestore reads up to {FORMAT}/{VERSION}: install a newer one")


def _parse_row(row: Json) -> tuple[bytes, dict[str, Json]]:
    checksum, meta = row
    raw = bytes.fromhex(checksum)
    if len(raw) != CHECKSUM_BYTES or not isinstance(meta, dict):
        raise ValueError("a row of the entry table is a checksum and an object")
    return raw, meta  # pyright: ignore[reportUnknownVariableType] - any JSON object
