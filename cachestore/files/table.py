"""A table: named columns with a checksum each in one safetensors file. Plans and catalogs are tables.

There are three kinds of column: numbers (int64), strings (UTF-8 bytes with offsets) and digests (rows of fixed width). A list is a column
of offsets into another column. Columns are views of one buffer, so a million rows cost no objects until they are used, and are written
again as they are. Numbers are little-endian.
"""

import json
import os
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise, repeat
from operator import le
from pathlib import Path
from typing import Any, Final, Literal, TypeVar, overload

from cachestore.core.errors import newer
from cachestore.core.keys import Json, canonical_text
from cachestore.files.checksum import Buffer, digest_of
from cachestore.files.container import ALIGNMENT, TensorInfo, build_header, parse_header, parse_start
from cachestore.files.container import read_header as read_container_header
from cachestore.files.opening import let_go, map_whole, open_regular, opened, read_at, read_whole
from cachestore.files.paths import damaged

TABLE_LIMIT_BYTES: Final = 64 * 1024 * 1024 * 1024
_PIECE_BYTES: Final = 16 * 1024 * 1024
_NUMBER_BYTES: Final = 8
_VERSION_DIGITS: Final = 10
_TEXT: Final = ".text"
T = TypeVar("T")
B = TypeVar("B", bound=bytes)
Column = tuple[str, tuple[int, ...], Buffer]
"""(dtype, shape, bytes) of one column as it is written."""


@dataclass(frozen=True, slots=True)
class Table:
    """A table that was read."""

    header: Mapping[str, Any]
    columns: "Mapping[str, memoryview | Span]"
    digest: str
    """xxh3_128 over the header's text and the columns' dtypes, shapes and checksums: equal tables have equal digests."""
    checksums: Mapping[str, Any]
    """[dtype, shape, xxh3_128] of each column: equal columns have equal checksums, also in different tables."""

    def numbers(self, name: str) -> "memoryview[int] | Numbers":
        """Return a column of int64; empty if the table has no such column. A matrix comes flat."""
        found = self.columns.get(name, memoryview(b""))
        return Numbers(found) if isinstance(found, Span) else found.cast("q")

    def strings(self, name: str) -> "Strings":
        """Return a column of strings; empty if the table has no such column."""
        return Strings(self.columns.get(f"{name}.text", memoryview(b"")), self.numbers(f"{name}.offsets"))

    def floats(self, name: str) -> "memoryview[float]":
        """Return a column of float64, written as the int64 with the same bits; empty if the table has no such column."""
        return memoryview(bytes(self.columns.get(name, b""))).cast("d")

    def digests(self, name: str, width: int) -> "Digests":
        """Return a column of rows of `width` bytes; empty if the table has no such column."""
        return Digests(self.columns.get(name, memoryview(b"")), width)


class Span:
    """A part of an open file that is read when it is used, in place of a view of memory. The file is closed with the last part.

    Takes slices with step 1. FormatError if the file was cut short. Works in a forked child: no read depends on a position.
    """

    __slots__ = ("_end", "_file", "_start")

    def __init__(self, file: "_OpenFile", start: int, end: int) -> None:
        self._file, self._start, self._end = file, start, end

    def __len__(self) -> int:
        return self._end - self._start

    def __getitem__(self, part: slice) -> memoryview:
        first, last, _step = part.indices(len(self))
        return self._file.read(self._start + first, max(0, last - first))

    def __bytes__(self) -> bytes:
        return bytes(self[:])


class _OpenFile:
    __slots__ = ("descriptor", "path")

    def __init__(self, path: Path) -> None:
        self.descriptor, _status = open_regular(path)
        self.path = path

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        if hasattr(self, "descriptor"):  # else it was never opened
            close(self.descriptor)  # `close` is bound here, as modules may be empty at the interpreter's end

    def read(self, start: int, size: int) -> memoryview:
        found = memoryview(read_at(self.descriptor, size, start))
        if len(found) < size:
            raise damaged(f"{self.path} ends before its last column", self.path)
        return found


class Numbers(Sequence[int]):
    """A read-only sequence of int64 in a file."""

    __slots__ = ("_span",)

    def __init__(self, span: Span) -> None:
        self._span = span

    def __len__(self) -> int:
        return len(self._span) // _NUMBER_BYTES

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> "int | list[int]":
        if isinstance(index, slice):
            first, last, step = index.indices(len(self))
            if step != 1:
                return [self[row] for row in range(first, last, step)]
            return self._span[first * _NUMBER_BYTES : last * _NUMBER_BYTES].cast("q").tolist()
        row = range(len(self))[index]
        return self._span[row * _NUMBER_BYTES : (row + 1) * _NUMBER_BYTES].cast("q")[0]

    def tolist(self) -> list[int]:
        """Return all numbers as a list."""
        return self[:]

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        import numpy as np

        del copy
        return np.frombuffer(bytes(self._span), np.int64).astype(dtype or np.int64)


class Strings(Sequence[str]):
    """A read-only sequence of strings over their bytes. Each is decoded when it is used.

    `offsets` has one number more than there are strings, or is empty for no strings.
    """

    __slots__ = ("_offsets", "_text")

    def __init__(self, text: "memoryview | Span", offsets: "memoryview[int] | Numbers") -> None:
        self._text = text
        self._offsets = offsets

    def __reduce__(self) -> "tuple[Callable[[bytes, bytes], Strings], tuple[bytes, bytes]]":
        """Another process gets a copy of the bytes."""
        text, offsets = self.as_columns()
        return _copied_strings, (bytes(text), offsets.tobytes())

    def __len__(self) -> int:
        return max(len(self._offsets) - 1, 0)

    @property
    def size_bytes(self) -> int:
        """Bytes of all strings, as UTF-8."""
        return len(self._text)

    def as_columns(self) -> tuple[memoryview, "memoryview[int]"]:
        """Return (text, offsets) as they are on disk."""
        offsets = self._offsets[:]
        return self._text[:], offsets if isinstance(offsets, memoryview) else memoryview(array("q", offsets))

    def __iter__(self) -> Iterator[str]:
        """Yield the strings in order. This is faster than one look-up each."""
        text, offsets = bytes(self._text), self._offsets.tolist()
        return (str(text[start:end], "utf-8", "surrogatepass") for start, end in pairwise(offsets))

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> "str | list[str]":
        if isinstance(index, slice):
            return [self[row] for row in range(*index.indices(len(self)))]
        row = range(len(self))[index]  # raises IndexError, and counts negative numbers from the end
        return str(self._text[self._offsets[row] : self._offsets[row + 1]], "utf-8", "surrogatepass")

    def take(self, rows: Iterable[int]) -> list[str]:
        """Return the strings with these numbers, counted from 0 and not checked. This takes half the time of single look-ups."""
        text, offsets = self._text, self._offsets
        return [str(text[offsets[row] : offsets[row + 1]], "utf-8", "surrogatepass") for row in rows]


class Digests(Sequence[bytes]):
    """A read-only sequence of byte strings of `width` bytes each over one buffer."""

    __slots__ = ("_raw", "_width")

    def __init__(self, raw: "memoryview | Span", width: int) -> None:
        self._raw = raw
        self._width = width

    def __reduce__(self) -> "tuple[Callable[[bytes, int], Digests], tuple[bytes, int]]":
        """Another process gets a copy of the bytes."""
        return _copied_digests, (bytes(self._raw), self._width)

    def __len__(self) -> int:
        return len(self._raw) // self._width

    @property
    def raw(self) -> memoryview:
        """All rows, concatenated."""
        return self._raw[:]

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> list[bytes]: ...
    def __getitem__(self, index: int | slice) -> "bytes | list[bytes]":
        if isinstance(index, slice):
            return [self[row] for row in range(*index.indices(len(self)))]
        row = range(len(self))[index] * self._width
        return bytes(self._raw[row : row + self._width])

    def take(self, rows: Iterable[int], kind: type[B] = bytes) -> list[B]:
        """Return the rows with these numbers, counted from 0 and not checked, as `kind`: bytes, or a subclass for values of this width."""
        raw, width, make = self._raw, self._width, bytes.__new__
        return [make(kind, raw[row * width : (row + 1) * width]) for row in rows]

    def __iter__(self) -> Iterator[bytes]:
        """Yield the rows in order. This is much faster than one look-up each."""
        raw, width = bytes(self._raw), self._width
        return (raw[row : row + width] for row in range(0, len(raw), width))


def _copied_strings(text: bytes, offsets: bytes) -> Strings:
    return Strings(memoryview(text), memoryview(offsets).cast("q"))


def _copied_digests(raw: bytes, width: int) -> Digests:
    return Digests(memoryview(raw), width)


class Repeated(Sequence[T]):
    """A read-only sequence of one value, which takes no memory. A table leaves out such a column, and its reader makes it again."""

    __slots__ = ("_count", "_value")

    def __init__(self, value: T, count: int) -> None:
        self._value = value
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[T]:
        return repeat(self._value, self._count)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> "Repeated[T]": ...
    def __getitem__(self, index: int | slice) -> "T | Repeated[T]":
        if isinstance(index, slice):
            return Repeated(self._value, len(range(self._count)[index]))
        _ = range(self._count)[index]  # raises IndexError
        return self._value


class Texts:
    """Collects strings without an object for each; `strings` returns them."""

    __slots__ = ("_offsets", "_text")

    def __init__(self) -> None:
        self._text = bytearray()
        self._offsets = array("q", [0])

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def append(self, value: "str | bytes") -> None:
        """Add one string, or its UTF-8 bytes."""
        self._text += value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value
        self._offsets.append(len(self._text))

    def strings(self) -> Strings:
        """Return all collected strings. Add nothing afterwards."""
        return Strings(memoryview(self._text), memoryview(self._offsets))


def take(values: Sequence[T], rows: Sequence[int]) -> list[T]:
    """Return the items with these numbers, counted from 0 and not checked."""
    if isinstance(values, Strings | Digests):
        return values.take(rows)  # pyright: ignore[reportReturnType] - a column of strings is a sequence of strings
    return [values[row] for row in rows]


def number_column(values: "Iterable[int] | memoryview[int]", *, width: int = 1) -> Column:
    """Return a column of int64 with `width` numbers a row."""
    raw = values if isinstance(values, memoryview) else memoryview(array("q", values))
    shape = (len(raw),) if width == 1 else (len(raw) // width, width)
    return ("I64", shape, raw.cast("B"))


def float_column(values: Iterable[float]) -> Column:
    """Return a column of float64, as the int64 with the same bits."""
    return number_column(memoryview(array("d", values)).cast("B").cast("q"))


def digest_column(rows: Sequence[bytes], *, width: int) -> Column:
    """Return a column of byte strings, all `width` long."""
    return ("U8", (len(rows), width), run_of(rows))


def run_of(rows: Sequence[bytes]) -> bytes | memoryview:
    """Return byte strings concatenated, without a copy if they already are."""
    return rows.raw if isinstance(rows, Digests) else b"".join(rows)


def string_columns(name: str, values: Sequence[str]) -> dict[str, Column]:
    """Return the two columns of a sequence of strings: their bytes and their offsets."""
    if isinstance(values, Strings) and len(values):
        text, offsets = values.as_columns()
        return {f"{name}.text": ("U8", (len(text),), text), f"{name}.offsets": number_column(offsets)}
    encoded = [value.encode("utf-8", "surrogatepass") for value in values]
    text = b"".join(encoded)
    return {f"{name}.text": ("U8", (len(text),), text), f"{name}.offsets": number_column(offsets_of(map(len, encoded)))}


def never_falls(numbers: Sequence[int]) -> bool:
    """Return whether no number is smaller than the one before it. It runs in C, as a million rows are checked each time."""
    listed = numbers.tolist() if isinstance(numbers, memoryview) else numbers
    return all(map(le, listed, islice(listed, 1, None)))


def offsets_of(lengths: Iterable[int]) -> Iterator[int]:
    """Yield where each list starts, and where the last one ends: one number more than there are lists."""
    position = 0
    yield position
    for length in lengths:
        position += length
        yield position


def encode_table(kind: str, version: int, header: Mapping[str, Json], columns: Mapping[str, Column]) -> list[Buffer]:
    """Return the chunks of a table's file; they depend only on the arguments. Numbers come first, so that each is aligned."""
    ordered = sorted(columns.items(), key=lambda item: (item[1][0] != "I64", item[0]))
    tensors: dict[str, TensorInfo] = {}
    position = 0
    for name, (dtype, shape, raw) in ordered:
        tensors[name] = TensorInfo(dtype, shape, position, position + len(raw))
        position += len(raw)
    metadata = {
        "format": f"{kind}/{version}",
        "header": canonical_text(dict(header)),
        "checksums": canonical_text({name: [dtype, list(shape), digest_of([raw])] for name, (dtype, shape, raw) in ordered}),
    }
    metadata["digest"] = _digest(metadata["header"], metadata["checksums"], metadata["format"])
    return [build_header(tensors, metadata), *(raw for _name, (_dtype, _shape, raw) in ordered)]


def read_table(path: Path, kind: str, version: int, *, io: Literal["pread", "mmap"] = "pread") -> Table:
    """Read a whole table and check it. Raises FormatError if it is damaged, of another kind or newer than `version`; FileNotFoundError.

    With `io="mmap"` only the parts in use take memory, but a file that is cut short afterwards kills the process (SIGBUS).
    """
    raw = (map_whole if io == "mmap" else read_whole)(path, limit_bytes=TABLE_LIMIT_BYTES)
    length = int.from_bytes(raw[:8], "little")
    if len(raw) < ALIGNMENT or length > len(raw) - 8:
        raise damaged(f"{path} is too short for its header", path)
    container = parse_header(bytes(raw[8 : 8 + length]), len(raw), where=path)
    header, checksums = _parse_metadata(container.metadata, kind, version, where=path)
    whole = memoryview(raw)
    view = whole[container.data_start :]
    columns = {name: view[info.start : info.end] for name, info in container.tensors.items()}
    found = {name: [info.dtype, list(info.shape), digest_of(_pieces(columns[name]))] for name, info in container.tensors.items()}
    if checksums != found:
        raise damaged(f"{path} does not match its checksums", path)
    for name, column in columns.items():
        if name.endswith(_TEXT) and not _are_strings(column, columns.get(f"{name.removesuffix(_TEXT)}.offsets", memoryview(b""))):
            raise damaged(f"{path} holds damaged strings in {name!r}", path)
    return Table(header, columns, container.metadata["digest"], found)


def _are_strings(text: memoryview, raw: memoryview) -> bool:
    """Return whether offsets cut a text into whole UTF-8 strings. Of a mapped text, one piece at a time is in memory."""
    import numpy as np

    if len(raw) % _NUMBER_BYTES or not len(raw):
        return not len(raw) and not len(text)
    offsets = np.frombuffer(raw, np.int64)
    if offsets[0] != 0 or offsets[-1] != len(text) or (np.diff(offsets) < 0).any():
        return False
    start = 0
    while start < len(text):
        # A piece starts and ends where a string starts, so it cuts no character of valid strings.
        row = int(np.searchsorted(offsets, start + _PIECE_BYTES, side="right")) - 1
        end = int(offsets[row]) if offsets[row] > start else int(offsets[np.searchsorted(offsets, start, side="right")])
        if not _is_text(text[start:end], offsets[(offsets >= start) & (offsets < end)] - start):
            return False
        let_go(text)
        start = end
    return True


def _is_text(piece: memoryview, starts: Any) -> bool:
    """Return whether bytes are UTF-8, and every string starts with a whole character."""
    import numpy as np

    try:
        str(piece, "utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return False
    return not ((np.frombuffer(piece, np.uint8)[starts] & 0xC0) == 0x80).any()


def open_table(path: Path, kind: str, version: int) -> Table:
    """Open a table whose columns are read when they are used, and not checked: for a table that was just checked elsewhere.

    It takes no memory, but one read for each look-up. Raises as `read_table`, except for damage to columns.
    """
    with opened(path) as (descriptor, status):
        container = read_container_header(descriptor, status.st_size, where=path)
    header, checksums = _parse_metadata(container.metadata, kind, version, where=path)
    file = _OpenFile(path)
    start = container.data_start
    columns = {name: Span(file, start + info.start, start + info.end) for name, info in container.tensors.items()}
    return Table(header, columns, container.metadata["digest"], checksums)


def _pieces(column: memoryview) -> Iterator[memoryview]:
    """Yield the bytes of a column. Of a mapped one, one piece at a time is in memory."""
    for start in range(0, len(column), _PIECE_BYTES):
        yield column[start : start + _PIECE_BYTES]
        let_go(column)


def check_table(path: Path, kind: str, version: int) -> str:
    """Compare a table with its checksums, one piece at a time in memory, and return its digest. Raises as `read_table`."""
    with opened(path) as (descriptor, status):
        container = read_container_header(descriptor, status.st_size, where=path)
        _header, checksums = _parse_metadata(container.metadata, kind, version, where=path)

        def pieces(info: TensorInfo) -> Iterator[bytearray]:
            first, last = container.data_start + info.start, container.data_start + info.end
            return (read_at(descriptor, min(_PIECE_BYTES, last - start), start) for start in range(first, last, _PIECE_BYTES))

        found = {name: [info.dtype, list(info.shape), digest_of(pieces(info))] for name, info in container.tensors.items()}
    if checksums != found:
        raise damaged(f"{path} does not match its checksums", path)
    return container.metadata["digest"]


def read_header(path: Path, kind: str, version: int) -> Mapping[str, Any]:
    """Read and check a table's header. The columns are neither read nor checked. Raises as `read_table`."""
    with opened(path) as (descriptor, status):
        container = read_container_header(descriptor, status.st_size, where=path)
    return _parse_metadata(container.metadata, kind, version, where=path)[0]


def parse_table_start(start: bytes, file_bytes: int, kind: str, version: int, *, where: Path) -> Table:
    """Return a table without its columns, from the first bytes of its file, which has this size. Raises FormatError as `read_table`."""
    container = parse_start(start, file_bytes, where=where)
    header, checksums = _parse_metadata(container.metadata, kind, version, where=where)
    return Table(header, {}, container.metadata["digest"], checksums)


def _parse_metadata(metadata: Mapping[str, str], kind: str, version: int, *, where: Path) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return (header, checksums of the columns) from a container's metadata, checked against their digest."""
    found = metadata.get("format", "")
    found_kind, _, number = found.partition("/")
    if found_kind != kind or not (number.isascii() and number.isdecimal() and len(number) < _VERSION_DIGITS):
        raise damaged(f"{where} holds {found!r}, but should hold {kind}/{version}", where)
    header_text, checksums_text, digest = (metadata.get(name, "") for name in ("header", "checksums", "digest"))
    if digest != _digest(header_text, checksums_text, found):
        raise damaged(f"{where} does not match its checksums", where)
    if int(number) > version:
        raise newer(where, found, f"{kind}/{version}")
    try:
        header, checksums = json.loads(header_text), json.loads(checksums_text)
    except (ValueError, RecursionError) as error:
        raise damaged(f"{where} lacks a header or checksums", where) from error
    if not isinstance(header, dict) or not isinstance(checksums, dict):
        raise damaged(f"{where} has a header or checksums that are no objects", where)
    return header, checksums  # pyright: ignore[reportUnknownVariableType] - read field by field where it is used


def _digest(header: str, checksums: str, written_as: str) -> str:
    """Digest a header's two texts, and the format: so a flipped bit in its number never looks like a newer one."""
    parts = [header.encode("utf-8", "surrogatepass"), b"\0", checksums.encode("utf-8", "surrogatepass"), b"\0", written_as.encode()]
    return digest_of(parts)
