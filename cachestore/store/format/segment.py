"""Segments: immutable safetensors files of many entries, laid out in memory and written once. Only segments hold values.

A segment's name is the xxh3_128 of all its bytes. Entries start at multiples of 64 bytes; the gaps are declared tensors `filler/<n>`.
"""

import json
import mmap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Final, NamedTuple

from cachestore.core.errors import WRONG_FIELDS, FormatError, newer
from cachestore.core.keys import Json, Key
from cachestore.files.checksum import digest_of
from cachestore.files.container import ALIGNMENT, Header, field_start, join_header, read_header
from cachestore.files.opening import opened
from cachestore.files.paths import damaged
from cachestore.store.format.entry import CHECKSUM_BYTES, EMPTY, Buffer, Entry, Specs, TensorSpec, specs_of

FORMAT: Final = "cachestore-segment"
VERSION: Final = 1
ENTRY_LIMIT: Final = 4096
"""Most entries of one segment. Keeps headers small: opening one takes about 1 ms per thousand tensors."""
BLOCK_BYTES: Final = 64 * 1024 * 1024
"""Tensors are copied into blocks of so many bytes. A larger one gets a block of its own.

Most segments fit into one. A thread that hashes them block by block waits for Python's lock after each.
"""
HELD_BYTES: Final = 64 * 1024
"""A smaller tensor is always copied: a chunk of its own costs more."""
_FILLER: Final = "filler"


class StoredEntry(NamedTuple):
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
        return self.specs.size_bytes


@dataclass(frozen=True, slots=True)
class StoredEntries:
    """The entries of a segment in the order of their bytes.

    They are kept as columns: Python's garbage collector then has five objects to look at, and not one for each entry.
    """

    keys: tuple[Key, ...] = ()
    offsets: tuple[int, ...] = ()
    specs: tuple[Specs, ...] = ()
    checksums: tuple[bytes, ...] = ()
    metas: tuple[Mapping[str, Json], ...] = ()

    def __len__(self) -> int:
        return len(self.keys)

    def __iter__(self) -> Iterator[StoredEntry]:
        return map(StoredEntry, self.keys, count(), self.offsets, self.specs, self.checksums, self.metas)

    def without_metas(self) -> "StoredEntries":
        """The same entries with empty JSON values."""
        return replace(self, metas=({},) * len(self))


@dataclass(frozen=True, slots=True)
class SegmentContents:
    """The contents of a segment's header."""

    origin: str
    """`<plan>/<pass>` of the pass that wrote it; empty if a writer did."""
    entries: StoredEntries
    size_bytes: int


class Blocks:
    """The memory in which segments are laid out. Used blocks are kept for the next segment: fresh memory costs more than the copy."""

    def __init__(self) -> None:
        self._free: list[memoryview] = []

    def take(self, size_bytes: int) -> memoryview:
        """Return a block with room for a tensor of this size. Its bytes are whatever was in it before."""
        if size_bytes > BLOCK_BYTES:
            return memoryview(bytearray(size_bytes + -size_bytes % ALIGNMENT))
        if self._free:
            return self._free.pop()
        # Memory that the system gives as it is touched, so a small segment takes little. Not in huge pages: on a virtual machine a pass of
        # 1 GiB then took 0.7 of the time on tmpfs, but 1.5 times as long on ext4.
        flags = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}  # Windows has none
        return memoryview(mmap.mmap(-1, BLOCK_BYTES, **flags))

    def give_back(self, blocks: Iterable[memoryview]) -> None:
        """Keep blocks that are no longer used. Any thread may call this."""
        self._free += [block for block in blocks if len(block) == BLOCK_BYTES]


class Built(NamedTuple):
    """A segment that is ready to be written."""

    digest: str
    """Its name: the digest of all chunks."""
    chunks: list[Buffer]
    contents: SegmentContents
    """What `read_contents` will return."""


class _Laid(NamedTuple):
    """Entries as columns. Python's garbage collector then has five lists to look at, and no object for each entry."""

    starts: list[int]
    keys: list[Key]
    specs: list[Specs]
    checksums: list[bytes]
    metas: list[str]

    def in_order(self) -> "_Laid":
        """These entries by start, and by key where several start at the same byte: those without bytes do."""
        if all(specs.size_bytes for specs in self.specs):
            return self
        return _Laid(*([*column] for column in zip(*sorted(zip(*self, strict=True)), strict=True)))


@dataclass(slots=True)
class SegmentDraft:
    """Entries that are laid out as a segment. `add` copies their bytes, `hold` only those of small tensors."""

    blocks: Blocks = field(default_factory=Blocks)
    size_bytes: int = 0
    """Bytes of the entries and of the gaps between them."""
    _chunks: list[memoryview] = field(default_factory=list[memoryview])
    """The bytes so far, without those since `_begun`."""
    _taken: list[memoryview] = field(default_factory=list[memoryview])
    """The blocks that bytes are copied into, the last one now: from `_begun` to `_filled` it has the newest."""
    _begun: int = 0
    _filled: int = 0
    _laid: _Laid = field(default_factory=lambda: _Laid([], [], [], [], []))

    def __len__(self) -> int:
        return len(self._laid.keys)

    def add(self, entry: Entry) -> None:
        """Add an entry behind those before it. No other entry of the segment may have its key."""
        self._lay(entry)
        for buffer in entry.buffers:
            self._copy(buffer)

    def hold(self, entry: Entry) -> None:
        """As `add`, but large buffers are not copied: they must not change until `release`."""
        self._lay(entry)
        for buffer in entry.buffers:
            if len(buffer) < HELD_BYTES:
                self._copy(buffer)
            else:
                self.end_chunk()
                self._chunks.append(memoryview(buffer))
                self.size_bytes += len(buffer)

    def _lay(self, entry: Entry) -> None:
        """Place an entry whose bytes follow. Readers take one without tensors for one at the start of the data."""
        key, specs, _buffers, meta, checksum = entry
        gap = -self.size_bytes % ALIGNMENT
        if gap and specs:
            self._copy(bytes(gap))
        starts, keys, all_specs, checksums, metas = self._laid
        starts.append(self.size_bytes if specs else 0)
        keys.append(key)
        all_specs.append(specs)
        checksums.append(checksum)
        metas.append(meta)

    def _copy(self, buffer: Buffer) -> None:
        if size := len(buffer):
            if not self._taken or self._filled + size > len(self._taken[-1]):
                self.end_chunk()
                self._taken.append(self.blocks.take(size))
                self._begun = self._filled = 0
            end = self._filled
            self._taken[-1][end : end + size] = buffer
            self._filled = end + size
            self.size_bytes += size

    def end_chunk(self) -> None:
        """Count what was copied last as a chunk. Once no more is added, another thread may `build` while this one calls `find`."""
        if self._filled > self._begun:
            self._chunks.append(self._taken[-1][self._begun : self._filled])
            self._begun = self._filled

    def find(self, key: Key) -> tuple[Specs, memoryview] | None:
        """Return names, dtypes and shapes of an entry and a copy of its bytes; None if it is not here. Do not call it after `release`."""
        if key not in self._laid.keys:
            return None
        self.end_chunk()
        number = self._laid.keys.index(key)
        start, specs = self._laid.starts[number], self._laid.specs[number]
        end, at, found = start + specs.size_bytes, 0, bytearray()
        for chunk in self._chunks:
            found += chunk[max(start - at, 0) : max(end - at, 0)]
            at += len(chunk)
        return specs, memoryview(found)

    def build(self, *, origin: str = "", edition: int = 0) -> Built:
        """Complete the segment; another `edition` gives another digest. Raises FormatError above the limits, or for a key added twice."""
        laid = self._laid.in_order()
        if len(set(laid.keys)) < len(self):
            raise FormatError("a segment holds each key once, but an entry was added twice")
        names = [key.hex() for key in laid.keys]
        text = _table_text(names, laid)
        metadata = {
            "format": f"{FORMAT}/{VERSION}",
            "origin": origin,
            "entries": text,
            "entries_checksum": digest_of([text.encode("utf-8", "surrogatepass")]),
        }
        if edition:
            metadata["edition"] = str(edition)
        header = join_header(_fields_of(names, laid), metadata)
        self.end_chunk()
        chunks: list[Buffer] = [header, *self._chunks]
        offsets = tuple(len(header) + start for start in laid.starts)
        entries = StoredEntries(tuple(laid.keys), offsets, tuple(laid.specs), tuple(laid.checksums), tuple(map(_parsed, laid.metas)))
        return Built(digest_of(chunks), chunks, SegmentContents(origin, entries, len(header) + self.size_bytes))

    def release(self) -> None:
        """Give the blocks back, and let go of held buffers. The chunks of a `Built` must not be used afterwards."""
        taken, self._taken, self._chunks = self._taken, [], []
        self.blocks.give_back(taken)


def draft_of(entries: Iterable[Entry]) -> SegmentDraft:
    """Lay out these entries, in this order."""
    draft = SegmentDraft()
    for entry in entries:
        draft.add(entry)
    return draft


def _fields_of(names: Iterable[str], laid: _Laid) -> list[str]:
    """The header's fields of these entries and of the gaps between them, in the order of their bytes."""
    fields: list[str] = []
    position = 0
    for number, (name, start, specs) in enumerate(zip(names, laid.starts, laid.specs, strict=True)):
        if start > position:
            fields.append(f"{field_start(f'{_FILLER}/{number}', 'U8', (start - position,))}{position},{start}]}}")
            position = start
        for text, first, end in specs.fields:
            fields.append(f'"{name}/{text}{start + first},{start + end}]}}')
        position += specs.size_bytes
    return fields


def _table_text(names: Iterable[str], laid: _Laid) -> str:
    """The entry table as JSON. Lone surrogates (from file names that are not UTF-8) are escaped, as safetensors refuses them raw."""
    rows = sorted([f'"{name}":["{checksum.hex()}",{meta}]' for name, checksum, meta in zip(names, laid.checksums, laid.metas, strict=True)])
    text = f"{{{','.join(rows)}}}"
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return json.dumps(json.loads(text), sort_keys=True, separators=(",", ":"))
    return text


def _parsed(meta: str) -> Mapping[str, Json]:
    """An entry's JSON value, if it can be parsed in the table, which is two levels deep around it."""
    if meta == EMPTY:
        return {}
    try:
        return json.loads(f"[[{meta}]]")[0][0]
    except RecursionError as error:
        raise FormatError("the entries' JSON values are nested too deeply to be parsed back: make them flatter") from error


def read_contents(path: Path, *, is_whole: bool = True) -> SegmentContents:
    """Read and check a segment's header. With `is_whole=False` the data behind it may be cut short. Raises FormatError, OSError."""
    with opened(path) as (descriptor, status):
        header = read_header(descriptor, status.st_size, where=path, is_whole=is_whole)
    return parse_contents(header, status.st_size, where=path)


def parse_contents(header: Header, file_bytes: int, *, where: Path) -> SegmentContents:
    """The entries in a parsed header. Raises FormatError if they do not match the tensors, or if the format is newer."""
    written_as = header.metadata.get("format", "")
    kind, _, version = written_as.partition("/")
    if kind != FORMAT or not version.isdecimal():
        raise damaged(f"{where} is a safetensors file, but not a segment of cachestore", where)
    if int(version) > VERSION:
        raise newer(where, written_as, f"{FORMAT}/{VERSION}")
    text = header.metadata.get("entries", "")
    if digest_of([text.encode("utf-8", "surrogatepass")]) != header.metadata.get("entries_checksum"):
        raise damaged(f"the entry table of {where} does not match its checksum", where)
    starts: dict[str, int] = {}
    specs: dict[str, list[TensorSpec]] = {}
    for full_name, info in header.tensors.items():
        owner, _, name = full_name.partition("/")
        starts.setdefault(owner, info.start)
        specs.setdefault(owner, []).append(TensorSpec(name, info.dtype, info.shape))
    try:
        table = {name: _parse_row(row) for name, row in json.loads(text).items()}
        names = sorted(table, key=lambda name: (starts.get(name, 0), name))  # an entry without bytes starts where the data starts
        entries = StoredEntries(
            tuple(map(Key.parse, names)),
            tuple(header.data_start + starts.get(name, 0) for name in names),
            tuple(specs_of(tuple(specs.get(name, ()))) for name in names),
            tuple(table[name][0] for name in names),
            tuple(table[name][1] for name in names),
        )
    except WRONG_FIELDS as error:
        raise damaged(f"the entry table of {where} does not fit its tensors", where) from error
    if not set(specs) <= {*table, _FILLER}:
        raise damaged(f"{where} holds tensors that its entry table does not name", where)
    return SegmentContents(header.metadata.get("origin", ""), entries, file_bytes)


def _parse_row(row: Json) -> tuple[bytes, dict[str, Json]]:
    checksum, meta = row
    raw = bytes.fromhex(checksum)
    if len(raw) != CHECKSUM_BYTES or not isinstance(meta, dict):
        raise ValueError("a row of the entry table is a checksum and an object")
    return raw, meta  # pyright: ignore[reportUnknownVariableType] - any JSON object
