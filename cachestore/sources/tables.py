"""Files with rows: which of them are the metadata of a folder, and how each kind is read.

Every kind is read row by row into plain mappings, each with its place (file and line). A row that cannot be read is a BadInput in the place
of the mapping. Only a `.json` is in memory as a whole.
"""

import csv
import io
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from importlib import import_module
from math import isnan
from pathlib import Path
from typing import Any, Final, TextIO, cast

from cachestore.core.arguments import is_broken
from cachestore.core.errors import BadInput, MissingExtra
from cachestore.files.opening import open_foreign
from cachestore.files.paths import MARKER
from cachestore.sources.captions import MANIFEST_BYTES, lines_of, parse_json, read_text, refuse_marks
from cachestore.sources.files import MEDIA_SUFFIXES

TABLE_SUFFIXES: Final = (".jsonl", ".csv", ".tsv", ".parquet", ".json")
"""The kinds of files with rows, that of a folder's metadata that is taken first."""
METADATA: Final = "metadata"
FILE_COLUMN: Final = "file_name"
CAPTION_COLUMN: Final = "caption"
_TAGS: Final = "tags"
_DELIMITERS: Final = {".csv": ",;\t|", ".tsv": "\t,;|"}
"""What may stand between cells, by suffix; of equal ones the first."""
_LINE_CHARACTERS: Final = 16 << 20
_NO_BOUNDARY: Final = re.compile(r'[^",;\t|\r\n]+')
_BATCH_ROWS: Final = 1024
_KEYS: Final = 40
Row = Mapping[str, Any]
Rows = Iterator[tuple[str, "Row | BadInput"]]


@dataclass(frozen=True, slots=True)
class MetadataFile:
    """The metadata of a folder, or of one of its sub-folders."""

    below: str
    """What stands before the names in its rows: empty, or the sub-folder's name with a slash."""
    path: Path
    others: Sequence[Path] = ()
    """Further metadata beside it, which is not taken."""


def is_metadata(path: Path) -> bool:
    """Return whether a file has the name of a folder's metadata, in any case."""
    return path.stem.lower() == METADATA and path.suffix.lower() in TABLE_SUFFIXES


def metadata_in(folder: Path, names: Iterable[str]) -> list[str]:
    """Return those of the names in a folder that are its metadata, the one that is taken first. Reads a `metadata.json` to see if it is."""
    called = [name for name in names if name[: len(METADATA)].lower() == METADATA and is_metadata(Path(name))]
    files = [name for name in called if not os.path.isdir(folder / name)]  # noqa: PTH112
    found = sorted(files, key=lambda name: (TABLE_SUFFIXES.index(Path(name).suffix.lower()), name))
    return [name for name in found if Path(name).suffix.lower() != ".json" or _has_rows(folder / name)]


def metadata_of(root: Path) -> list[MetadataFile]:
    """Return the metadata of a folder: its own, else those of its sub-folders, in order. Empty if there is none."""
    names, folders = _names_in(root)
    if own := metadata_in(root, names):
        below = [root / name / one for name in folders for one in _metadata_below(root / name)]
        return [MetadataFile("", root / own[0], (*(root / name for name in own[1:]), *below))]
    found = [(name, _metadata_below(root / name)) for name in folders]
    return [
        MetadataFile(f"{name}/", root / name / those[0], tuple(root / name / one for one in those[1:])) for name, those in found if those
    ]


def _metadata_below(folder: Path) -> list[str]:
    return [] if os.path.lexists(folder / MARKER) else metadata_in(folder, _names_in(folder)[0])


def _names_in(folder: Path) -> tuple[list[str], list[str]]:
    """The names of files and of folders in a folder, sorted, without hidden ones. Empty if it cannot be listed."""
    names: dict[bool, list[str]] = {False: [], True: []}
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if not entry.name.startswith("."):
                names[entry.is_dir()].append(entry.name)
    return sorted(names[False]), sorted(names[True])


def _has_rows(path: Path) -> bool:
    """Whether a `.json` has rows, and is not a description of the data set. One that cannot be read counts, so that it is an error."""
    try:
        found = parse_json(read_text(path), str(path))
    except (BadInput, OSError):
        return True
    if isinstance(found, list):
        return True
    for name, value in cast("dict[str, object]", found).items():
        is_file = Path(name).suffix.lower() in MEDIA_SUFFIXES
        has_caption = isinstance(value, dict) and not value.keys().isdisjoint((CAPTION_COLUMN, _TAGS))
        if has_caption or (is_file and isinstance(value, str | dict)):
            return True
    return False


def rows_of(path: Path, known: Iterable[str]) -> Rows:
    """Yield (place, row) of each row of a file. A header is looked for `known` columns. Raises BadInput, MissingExtra, OSError."""
    match path.suffix.lower():
        case ".csv" | ".tsv":
            return _cells_of(path, known)
        case ".parquet":
            return _parquet_rows(path)
        case ".json":
            return _json_rows(path)
        case _:
            return _json_lines(path)


def json_row(text: str, where: str) -> dict[str, Any]:
    """Parse a JSON object; `where` names it in errors. Raises BadInput for other JSON, and for text that is not JSON."""
    return _as_row(parse_json(text, where), where)


def _as_row(row: object, where: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise BadInput(f"{where}: each row must be a JSON object such as {{'image': 'a.png'}}, not a {type(row).__name__}")
    return cast("dict[str, Any]", row)


def _json_lines(path: Path) -> Rows:
    for number, text in lines_of(path):
        origin = f"{path}, line {number}"
        if isinstance(text, BadInput):
            yield origin, text
        elif text.strip():
            try:
                row = json_row(text, origin)
            except BadInput as error:
                yield origin, error
            else:
                yield origin, row


def _json_rows(path: Path) -> Rows:
    """The rows of a list; or of an object of objects by file, as sd-scripts' metadata: `{"a.png": {"caption": ..., "tags": ...}}`."""
    found = parse_json(read_text(path), str(path))
    if isinstance(found, dict):
        for name, value in cast("dict[str, object]", found).items():
            origin = f"{path}, {name[:_KEYS]!r}"
            if not isinstance(value, dict | str):
                yield (
                    origin,
                    BadInput(f"{origin}: it must be an object such as {{'caption': 'a cat'}}, or a text, not a {type(value).__name__}"),
                )
                continue
            yield origin, {FILE_COLUMN: _with_suffix(path.parent, name), **_captioned(value)}
        return
    if not isinstance(found, list):
        raise BadInput(f"{path} must be a list of rows, or an object with a row for each file, not a {type(found).__name__}")
    for number, row in enumerate(cast("list[object]", found), 1):
        origin = f"{path}, row {number}"
        try:
            yield origin, _as_row(row, origin)
        except BadInput as error:
            yield origin, error


def _captioned(value: Any) -> dict[str, Any]:
    """A row of sd-scripts' metadata: its tags follow its caption, as there."""
    if isinstance(value, str):
        return {CAPTION_COLUMN: value}
    tags, row = value.get(_TAGS), {column: one for column, one in value.items() if column != _TAGS}
    if not isinstance(tags, str):
        return value
    caption = row.get(CAPTION_COLUMN)
    return row | {CAPTION_COLUMN: tags if caption is None else f"{caption}, {tags}" if tags and isinstance(caption, str) else caption}


def _with_suffix(folder: Path, name: str) -> str:
    """The name of a picture, which may be written without its suffix. Unchanged if there is no such picture."""
    if Path(name).suffix.lower() in MEDIA_SUFFIXES or "\0" in name or is_broken(name):
        return name
    return next((f"{name}{suffix}" for suffix in sorted(MEDIA_SUFFIXES) if os.path.isfile(folder / f"{name}{suffix}")), name)  # noqa: PTH113


@dataclass(slots=True)
class _CellLines:
    """The lines of a file with cells, for a csv.reader. Keeps those of the record that is being read, and takes some back."""

    file: TextIO
    number: int = 0
    """The number of the line that was read last."""
    record: list[str] = field(default_factory=list[str])
    _again: list[str] = field(default_factory=list[str])

    def __iter__(self) -> "_CellLines":
        return self

    def __next__(self) -> str:
        line = part = self._again.pop() if self._again else self.file.readline(_LINE_CHARACTERS)
        if not line:
            raise StopIteration
        while len(part) == _LINE_CHARACTERS and not part.endswith(("\n", "\r")):  # only where its cells end is of interest
            part = self.file.readline(_LINE_CHARACTERS)
            line += _NO_BOUNDARY.sub("x", part)
        self.number += 1
        self.record.append(line)
        return line

    def read_again(self) -> None:
        """Take back all lines of the record but its first one."""
        self._again += self.record[:0:-1]
        self.number -= len(self.record) - 1

    def skip_long(self, delimiter: str) -> int:
        """Skip the rest of a record with a cell that is too long, if it is quoted and goes on in further lines. Returns its first line."""
        first, quoted = self.number - len(self.record) + 1, -1
        for line in self.record:
            quoted = _quoted_at_end(line, delimiter, is_open=quoted >= 0)
        is_open = quoted > csv.field_size_limit() or (quoted >= 0 and len(self.record) > 1)
        while is_open and (line := next(self, None)) is not None:
            self.record.clear()
            is_open = _quoted_at_end(line, delimiter, is_open=True) >= 0
        return first


def _quoted_at_end(line: str, delimiter: str, *, is_open: bool) -> int:
    """How many characters at a line's end are in an open quote, or -1. A quote opens only at the beginning of a cell."""
    at = 0
    while at < len(line):
        if is_open or line[at] == '"':
            at += not is_open
            start = at
            while (close := line.find('"', at)) >= 0 and line.startswith('"', close + 1):
                at = close + 2
            if close < 0:
                return len(line) - start
            at, is_open = close + 1, False
        end = line.find(delimiter, at)
        if end < 0:
            return -1
        at = end + 1
    return 0 if is_open else -1


def _cells_of(path: Path, known: Iterable[str]) -> Rows:
    suffix = path.suffix.lower()
    with open_foreign(path, limit_bytes=MANIFEST_BYTES) as file:
        refuse_marks(cast("Any", file).peek(4)[:4], path)
        lines = _CellLines(io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline=""))
        header = next((line for line in lines if line.strip()), None)
        if header is None:
            return
        columns, delimiter = _columns(header, _DELIMITERS[suffix], frozenset(known), path)
        cells = csv.reader(lines, delimiter=delimiter)
        while True:
            lines.record.clear()
            origin = f"{path}, line {lines.number + 1}"
            try:
                record = next(cells, None)
            except csv.Error as error:
                if "larger than" in str(error):  # else the rest of a long cell would be taken for rows
                    first = lines.skip_long(delimiter)
                    origin = origin if first == lines.number else f"{path}, lines {first} to {lines.number}"
                yield origin, BadInput(f"{origin}: {error}; correct this line")
                continue
            if record is None:
                return
            if len(lines.record) > 1 and not _is_whole(lines.record, delimiter):
                lines.read_again()
                yield origin, BadInput(f"{origin}: a quote in this line is not closed; correct this line")
            elif record:
                yield origin, _row(columns, record, delimiter, origin)


def _columns(header: str, delimiters: str, known: frozenset[str], path: Path) -> tuple[list[str], str]:
    """Return a header's columns and what stands between them: what gives most known columns, else most columns."""
    if "\0" in header or is_broken(header):
        raise BadInput(f"{path} is not UTF-8: save it as UTF-8")
    found: list[tuple[list[str], str]] = []
    for delimiter in delimiters:
        with suppress(csv.Error):
            found.append(([cell.strip() for cell in next(csv.reader([header], delimiter=delimiter))], delimiter))
    if not found:
        raise BadInput(f"{path}, line 1: its columns cannot be read; correct this line")
    columns, delimiter = max(found, key=lambda one: (sum(column in known for column in one[0]), len(one[0])))
    if twice := sorted({column for column in columns if column in known and columns.count(column) > 1}):
        raise BadInput(f"{path}, line 1: two columns are called {twice[0]!r}; give one of them another name")
    return columns, delimiter


def _is_whole(record: Sequence[str], delimiter: str) -> bool:
    """Whether lines are one record by the strict rule of quotes. A quote that nothing closes swallows the rows up to the next quote."""
    try:
        return len(list(csv.reader(record, delimiter=delimiter, strict=True))) == 1
    except csv.Error:
        return False


def _row(columns: Sequence[str], record: Sequence[str], delimiter: str, origin: str) -> "Row | BadInput":
    if len(record) > len(columns):
        name = {",": "commas", ";": "semicolons", "\t": "tabs"}.get(delimiter, repr(delimiter))
        return BadInput(f"{origin}: more cells than the first line has columns; put cells that contain {name} into quotes")
    if broken := next((column for column, cell in zip(columns, record, strict=False) if not cell.isascii() and is_broken(cell)), None):
        return BadInput(f"{origin}: the cell of {broken!r} is not UTF-8: save the file as UTF-8")
    return dict.fromkeys(columns) | dict(zip(columns, record, strict=False))


def _parquet_rows(path: Path) -> Rows:
    try:
        arrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
    except ImportError as error:
        raise MissingExtra(f"{path} is read by pyarrow, which is not installed: run `pip install pyarrow`, or save it as .jsonl") from error
    try:
        with open_foreign(path, limit_bytes=MANIFEST_BYTES) as file:
            table = parquet.ParquetFile(file)
            columns = _columns_without_bytes(table.schema_arrow, arrow, path)
            number = 0
            for batch in table.iter_batches(batch_size=_BATCH_ROWS, columns=columns):
                for row in _rows_of_batch(batch):
                    number += 1
                    origin = f"{path}, row {number}"
                    yield origin, row if row is not None else BadInput(f"{origin}: a text is not UTF-8; write it again")
    except BadInput:
        raise
    except (arrow.ArrowException, OSError, ValueError, OverflowError, MemoryError) as error:
        raise BadInput(f"{path} cannot be read as parquet ({str(error)[:200]}): write it again") from error


def _columns_without_bytes(schema: Any, arrow: Any, path: Path) -> list[str] | None:
    """The columns to read, None for all: those that hold bytes of files are left out. Raises BadInput if only they have the pictures."""
    names: list[str] = [one.name for one in schema if not _holds_bytes(one.type, arrow)]
    held = [name for name in schema.names if name not in names]
    if held and not any(name.endswith((FILE_COLUMN, "file_names", "image", "video", "path")) for name in names):
        raise BadInput(
            f"{path} holds files in its column {held[0]!r}: pass datasets.load_dataset('parquet', data_files={str(path)!r},"
            " split='train') to cs.precompute"
        )
    return names if held else None


def _holds_bytes(kind: Any, arrow: Any) -> bool:
    types = arrow.types
    if types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind) or types.is_binary_view(kind):
        return True
    return any(_holds_bytes(kind.field(number).type, arrow) for number in range(kind.num_fields))


def _rows_of_batch(batch: Any) -> Iterator[Row | None]:
    """The rows of a batch; None for one with a text that is not UTF-8."""
    try:
        rows: list[Row | None] = batch.to_pylist()
    except UnicodeDecodeError:
        rows = []
        for number in range(batch.num_rows):
            try:
                rows.append({name: column[number].as_py() for name, column in zip(batch.schema.names, batch.columns, strict=True)})
            except UnicodeDecodeError:
                rows.append(None)
    return (None if row is None else {name: _plain(value) for name, value in row.items()} for row in rows)


def _plain(value: Any) -> Any:
    """A value as JSON has it: times and decimals as text, and a missing number, which pandas writes as NaN, as null."""
    match value:
        case float():
            return None if isnan(value) else value
        case datetime() | date() | time() | timedelta() | Decimal():
            return str(value)
        case list() | tuple():
            return [_plain(one) for one in cast("Sequence[Any]", value)]
        case dict():
            return {str(name): _plain(one) for name, one in cast("dict[Any, Any]", value).items()}
        case _:
            return value
