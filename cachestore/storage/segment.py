"""A segment: an immutable safetensors file of many entries, laid out in memory and written once. The only truth about values.

Its name is the xxh3_128 of all its bytes. Entries start at multiples of 64 bytes, and the gaps are declared tensors `filler/<n>`.
"""

import json
import mmap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, NamedTuple

from cachestore.core.errors import FormatError
from cachestore.core.keys import Json, Key, canonical
from cachestore.files.checksum import digest_of
from cachestore.files.container import ALIGNMENT, Header, field_start, join_header, read_header
from cachestore.files.opening import opened
from cachestore.files.paths import to_repair, to_verify
from cachestore.storage.entry import CHECKSUM_BYTES, LAYOUTS, Buffer, Entry, Specs, TensorSpec, size_of

FORMAT: Final = "cachestore-segment"
VERSION: Final = 1
ENTRY_LIMIT: Final = 4096
"""Entries of one segment at most. Keeps headers small: opening one costs about 1 ms a thousand tensors."""

BLOCK_BYTES: Final = 16 * 1024 * 1024
"""Entries are copied together into blocks of so many bytes; a larger one has a block of its own."""

_FILLER: Final = "filler"


class StoredEntry(NamedTuple):
    """An entry as a segment's header describes it."""

    key: Key
    ordinal: int
    """Its place in the order of bytes, from 0."""
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
    """What a segment's header says."""

    origin: str
    """`<plan>/<pass>` of the pass that wrote it; empty where a writer did."""
    entries: tuple[StoredEntry, ...]
    size_bytes: int


class Blocks:
    """Memory in which segments are laid out. What was used is kept for the next one: fresh memory costs more than the copy into it."""

    def __init__(self) -> None:
        self._free: list[memoryview] = []

    def take(self, size_bytes: int) -> memoryview:
        """A block with room for an entry of this size. It holds whatever was in it before."""
        if size_bytes > BLOCK_BYTES:
            return memoryview(bytearray(size_bytes))
        return self._free.pop() if self._free else memoryview(mmap.mmap(-1, BLOCK_BYTES))

    def give_back(self, blocks: Iterable[memoryview]) -> None:
        """Keep blocks that nobody looks at any more for the next ones who ask."""
        self._free += [block for block in blocks if len(block) == BLOCK_BYTES]


class Built(NamedTuple):
    """A segment that is ready to be written."""

    digest: str
    """Of all chunks: its name."""
    chunks: list[Buffer]
    contents: SegmentContents
    """What `read_contents` will find in it."""


@dataclass(slots=True)
class SegmentDraft:
    """Entries that are laid out as a segment. Their bytes are copied when they are added."""

    blocks: Blocks = field(default_factory=Blocks)
    size_bytes: int = 0
    """Bytes of the data so far, fillers included."""
    _held: list[memoryview] = field(default_factory=list[memoryview])
    _ends: list[int] = field(default_factory=list[int])
    """How far each block is filled."""
    _fields: list[str] = field(default_factory=list[str])
    """Tensors as the header says them, in the order of their bytes."""
    _rows: dict[str, str] = field(default_factory=dict[str, str])
    """Rows of the entry table by key, in hex digits."""
    _laid: list[tuple[int, str, Key, Specs, bytes, Mapping[str, Json]]] = field(
        default_factory=list[tuple[int, str, Key, Specs, bytes, Mapping[str, Json]]]
    )

    def __len__(self) -> int:
        return len(self._laid)

    def __contains__(self, key: Key) -> bool:
        return key.hex() in self._rows

    def add(self, entry: Entry, row: str) -> None:
        """Copy an entry behind those before it; `row` is `row_of` it. Raises FormatError for a key that is there already."""
        key = entry.key.hex()
        if key in self._rows:
            raise FormatError(f"a segment holds each key once; entry {key} was added twice")
        size = entry.size_bytes
        if gap := -self.size_bytes % ALIGNMENT:
            self._fields.append(f"{field_start(f'{_FILLER}/{len(self._rows)}', 'U8', (gap,))}{self.size_bytes},{self.size_bytes + gap}]}}")
            self._copy(bytes(gap))
        start = self.size_bytes
        for field_text, first, end in _fields_of(entry.specs):
            self._fields.append(f'"{key}/{field_text}{start + first},{start + end}]}}')
        if size and (not self._held or self._ends[-1] + size > len(self._held[-1])):
            self._held.append(self.blocks.take(size))
            self._ends.append(0)
        for buffer in entry.buffers:
            self._copy(buffer)
        self._rows[key] = row
        # An entry without tensors stands nowhere: readers take it for one at the start of the data.
        self._laid.append((start if entry.specs else 0, key, entry.key, entry.specs, entry.checksum, entry.meta))

    def _copy(self, buffer: Buffer) -> None:
        if size := len(buffer):  # a gap fits into the block before it: entries and blocks are both cut at multiples of 64
            end = self._ends[-1]
            self._held[-1][end : end + size] = buffer
            self._ends[-1] = end + size
            self.size_bytes += size

    def build(self, *, origin: str = "", edition: int = 0) -> Built:
        """Complete the segment. `edition` gives the same entries another digest, for when the name is taken.

        Raises FormatError above the caps of a header, and where the table cannot be parsed back.
        """
        text = _table_text(self._rows)
        metadata = {
            "format": f"{FORMAT}/{VERSION}",
            "origin": origin,
            "entries": text,
            "entries_checksum": digest_of([text.encode("utf-8", "surrogatepass")]),
        }
        if edition:
            metadata["edition"] = str(edition)
        header = join_header(self._fields, metadata)
        chunks: list[Buffer] = [header, *(block[:end] for block, end in zip(self._held, self._ends, strict=True))]
        entries = tuple(
            StoredEntry(key, ordinal, len(header) + start, specs, checksum, meta)
            for ordinal, (start, _name, key, specs, checksum, meta) in enumerate(sorted(self._laid, key=_by_start))
        )
        return Built(digest_of(chunks), chunks, SegmentContents(origin, entries, len(header) + self.size_bytes))

    def release(self) -> None:
        """Give its memory back. What was built of it must not be looked at any more."""
        self.blocks.give_back(self._held)
        self._held, self._ends = [], []


def _by_start(laid: tuple[Any, ...]) -> tuple[int, str]:
    return laid[0], laid[1]


def row_of(entry: Entry) -> str:
    """An entry's row of the entry table, as it stands in the header."""
    meta = canonical(dict(entry.meta)).decode("utf-8", "surrogatepass") if entry.meta else "{}"
    return f'"{entry.key.hex()}":["{entry.checksum.hex()}",{meta}]'


@lru_cache(LAYOUTS)
def _fields_of(specs: Specs) -> tuple[tuple[str, int, int], ...]:
    """The tensors of an entry as a header says them: what stands between the key and the offsets, and the bytes within the entry."""
    found: list[tuple[str, int, int]] = []
    position = 0
    for spec in specs:
        found.append((field_start(spec.name, spec.dtype, spec.shape)[1:], position, position + spec.size_bytes))
        position += spec.size_bytes
    return tuple(found)


def build_segment(entries: Iterable[Entry], *, origin: str = "", edition: int = 0) -> tuple[str, list[Buffer]]:
    """Lay out a segment; returns (digest, chunks). Raises as `SegmentDraft` does."""
    draft = SegmentDraft()
    for entry in entries:
        draft.add(entry, row_of(entry))
    built = draft.build(origin=origin, edition=edition)
    return built.digest, built.chunks


def _table_text(rows: Mapping[str, str]) -> str:
    """The entry table as JSON. Half a surrogate pair (a file name that is not UTF-8) is escaped: the stock library refuses it raw."""
    text = f"{{{','.join(rows[key] for key in sorted(rows))}}}"
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FormatError("the entries' JSON values cannot be parsed back: they are nested too deeply") from error
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return json.dumps(parsed, sort_keys=True, separators=(",", ":"))
    return text


def read_contents(path: Path, *, is_whole: bool = True) -> SegmentContents:
    """Read and check a segment's header; with `is_whole=False` also of a file that was cut short behind it. Raises FormatError, OSError."""
    with opened(path) as (descriptor, status):
        header = read_header(descriptor, status.st_size, where=path, is_whole=is_whole)
    return parse_contents(header, status.st_size, where=path)


def parse_contents(header: Header, file_bytes: int, *, where: Path) -> SegmentContents:
    """The entries in a parsed header. Raises FormatError if they do not fit the tensors, or the segment is newer than this code."""
    _check_format(header.metadata.get("format", ""), where)
    text = header.metadata.get("entries", "")
    if digest_of([text.encode("utf-8", "surrogatepass")]) != header.metadata.get("entries_checksum"):
        raise FormatError(f"the entry table of {where} does not match its checksum; run {to_repair(where)}")
    starts: dict[str, int] = {}
    specs: dict[str, list[TensorSpec]] = {}
    for full_name, place in header.tensors.items():
        owner, _, name = full_name.partition("/")
        starts.setdefault(owner, place.start)
        specs.setdefault(owner, []).append(TensorSpec(name, place.dtype, place.shape))
    try:
        table = {name: _parse_row(row) for name, row in json.loads(text).items()}
        in_order = sorted((starts.get(name, 0), name) for name in table)  # an entry without bytes starts at the data's start
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
