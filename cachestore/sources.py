"""Sources on disk -> samples: folders of images, metadata files, manifests and prompt lists. Knows no encoder and no store.

Every rank lists the source for itself; equal listings have equal content digests, whatever the order of the directory, the
modification times or the absolute path of the root.
"""

import codecs
import csv
import errno
import hashlib
import io
import json
import os
import stat
import time
import unicodedata
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Final, Literal, Protocol, cast

from cachestore.errors import BadInput
from cachestore.files.paths import MARKER
from cachestore.inputs import CROP, SIZE
from cachestore.keys import Json, canonical, digest_parts, digest_text
from cachestore.samples import CONTROL, IMAGE, VIDEO, Sample

CaptionLines = Literal["whole", "each", "first"]
Stat = tuple[int, int]

UNTRUSTED: Final[Stat] = (-1, -1)
FRESH_SECONDS: Final = 2.0
"""A file modified so shortly before it was read may change again within the same time stamp: its time proves nothing."""

_OPEN_FLAGS: Final = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)

IMAGE_SUFFIXES: Final = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".avif"})
VIDEO_SUFFIXES: Final = frozenset({".mp4", ".mkv", ".webm", ".mov", ".avi"})
_SUFFIXES: Final = IMAGE_SUFFIXES | VIDEO_SUFFIXES
_CAPTION_SUFFIXES: Final = (".txt", ".caption")
_METADATA: Final = ("metadata.jsonl", "metadata.csv")
_REFERENCES: Final[Mapping[str, str]] = {"image": IMAGE, "control": CONTROL, "mask": "mask", "video": VIDEO}
_EMPTY_IS_NONE: Final = frozenset({*_REFERENCES, CROP, SIZE})
_BATCH_NAMES: Final = frozenset(
    {"latents", "control_latents", "prompt_embeds", "sample_id", "original_size", "crop_top_left", "target_size"}
)
_VIDEO_BATCH_NAMES: Final = frozenset({"num_frames", "fps"})


class Files(Protocol):
    """What is behind references. All of it may be called from several threads."""

    def read(self, reference: str) -> tuple[bytes, Stat]:
        """The bytes behind a reference, with (size, mtime_ns), which is UNTRUSTED where it proves nothing. Raises OSError."""
        ...

    def open(self, reference: str) -> "AbstractContextManager[tuple[BinaryIO, Stat]]":
        """As `read`, but to be read in places. Raises OSError; at the end too, where it is another file by then."""
        ...

    def head(self, reference: str, size: int) -> bytes:
        """The first bytes behind a reference. Raises OSError."""
        ...

    def stat(self, reference: str) -> Stat | None:
        """(size, mtime_ns) of what is behind a reference now; None where it is gone."""
        ...


@dataclass(frozen=True, slots=True)
class Folder:
    """Files on disk; references are paths relative to a folder."""

    root: Path

    def read(self, reference: str) -> tuple[bytes, Stat]:
        """The bytes of a file, with (size, mtime_ns).

        Raises OSError, also for what is no regular file, and if the file changes while it is read.
        """
        path = self.root / reference
        with open_regular(path) as file:
            before = os.fstat(file.fileno())
            data = file.read()
            after = os.fstat(file.fileno())
        if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns) or len(data) != after.st_size:
            message = f"{path} changed while it was read"
            raise OSError(message)
        return data, trusted((after.st_size, after.st_mtime_ns))

    @contextmanager
    def open(self, reference: str) -> Generator[tuple[BinaryIO, Stat]]:
        """A file to be read in places, with (size, mtime_ns). Raises as `read`."""
        path = self.root / reference
        with open_regular(path) as file:
            before = os.fstat(file.fileno())
            yield file, trusted((before.st_size, before.st_mtime_ns))
            after = os.fstat(file.fileno())
        if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
            message = f"{path} changed while it was read"
            raise OSError(message)

    def head(self, reference: str, size: int) -> bytes:
        """The first bytes of a file. Raises OSError."""
        with open_regular(self.root / reference) as file:
            return file.read(size)

    def stat(self, reference: str) -> Stat | None:
        """(size, mtime_ns) of a file now; None where it is gone."""
        try:
            status = (self.root / reference).stat()
        except OSError:
            return None
        return status.st_size, status.st_mtime_ns


def trusted(stat: Stat) -> Stat:
    """A (size, mtime_ns) that was read just now, or UNTRUSTED where it may soon stand for other bytes."""
    return UNTRUSTED if abs(time.time() - stat[1] / 1e9) < FRESH_SECONDS else stat


@dataclass(frozen=True, slots=True)
class Listing:
    """What a source lists, and how its files are read."""

    files: Files
    """What references lead to."""
    content: str
    """Digest of what is listed: of a manifest's bytes, or of a folder's ids, captions and references."""
    walk: "Callable[[Remarks], Iterator[Sample]]"

    def samples(self, remarks: "Remarks | None" = None) -> Iterator[Sample]:
        """The samples in order; what a user should know of them is in `remarks` once they were gone through.

        The rows of a manifest are read again each time, so that no million of them is held. Raises BadInput for a malformed row, two
        samples with one id, or a manifest that changed since it was listed.
        """
        return self.walk(remarks or Remarks())

    def read(self, reference: str) -> tuple[bytes, Stat]:
        """As `files`."""
        return self.files.read(reference)

    def open(self, reference: str) -> AbstractContextManager[tuple[BinaryIO, Stat]]:
        """As `files`."""
        return self.files.open(reference)

    def head(self, reference: str, size: int) -> bytes:
        """As `files`."""
        return self.files.head(reference, size)

    def stat(self, reference: str) -> Stat | None:
        """As `files`."""
        return self.files.stat(reference)


@dataclass(slots=True)
class Remarks:
    """What is counted while samples are gone through."""

    missing: list[str] = field(default_factory=list[str])
    multi_line: list[str] = field(default_factory=list[str])
    collapsed: int = 0
    empty: list[str] = field(default_factory=list[str])
    """Of several sources those that list nothing, by what they are called."""
    videos: int = 0
    """Files of a folder that are passed over."""
    replaced: list[str] = field(default_factory=list[str])
    """Members of tars after which another one of their name comes."""

    def take(self, other: "Remarks") -> None:
        """Remember what was counted before."""
        self.missing, self.multi_line = other.missing, other.multi_line
        self.collapsed, self.videos, self.replaced = other.collapsed, other.videos, other.replaced

    def add(self, other: "Remarks", prefix: str = "") -> None:
        """Count what was counted of one of several sources, too; `prefix` stands before the ids of its samples."""
        self.missing += [f"{prefix}{sample}" for sample in other.missing]
        self.multi_line += [f"{prefix}{sample}" for sample in other.multi_line]
        self.collapsed += other.collapsed
        self.videos += other.videos
        self.replaced += [f"{prefix}{name}" for name in other.replaced]

    def in_words(self, *, of_videos: str = "--frames says how many frames to take of each") -> tuple[str, ...]:
        """What a user should know before encoding; `of_videos` is what is said of videos that are passed over."""
        words: list[str] = []
        if self.missing:
            words.append(f"{len(self.missing)} without a caption ({_some(self.missing)}): they get the empty one")
        if self.multi_line:
            words.append(
                f"{len(self.multi_line)} captions of several lines ({_some(self.multi_line)}), each taken whole (see --caption-lines)"
            )
        if self.collapsed:
            words.append(f"{self.collapsed} duplicate prompt lines collapsed")
        if self.empty:
            words.append(f"nothing is listed by {len(self.empty)} of the sources ({_some(self.empty)})")
        if self.replaced:
            words.append(f"{len(self.replaced)} members of tars have a later one of their name, which counts ({_some(self.replaced)})")
        if self.videos:
            words.append(f"{self.videos} videos passed over ({of_videos})")
        return tuple(words)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "")


def list_source(data: str | Path, *, caption_lines: CaptionLines = "whole", caption: str | None = None, videos: bool = False) -> Listing:
    """List a folder, a manifest (`.jsonl`) or a prompt list (`.txt`).

    Args:
        data: the path. An empty folder or file lists nothing, which is fine.
        caption_lines: how a caption file is read: `whole` is one caption, `each` one a line, `first` the first line.
        caption: what a sample without a caption gets; default the empty one.
        videos: whether the videos of a folder are samples too; else they are counted and passed over.

    Raises:
        BadInput: no such path, an unknown kind of file, a malformed row, or two samples with one id.
    """
    path = Path(data)
    if path.is_dir():
        metadata = next((path / name for name in _METADATA if (path / name).is_file()), None)
        if metadata is None:
            return list_samples(Folder(path.absolute()), partial(_from_folder, path, caption_lines, videos=videos), path, caption)
        return _list_rows(path, metadata, partial(_from_metadata, metadata, caption_lines), caption_lines, caption)
    if path.suffix.lower() == ".jsonl" and path.is_file():
        return _list_rows(path.parent, path, partial(_from_manifest, path, caption_lines), caption_lines, caption)
    if path.suffix.lower() == ".txt" and path.is_file():
        return _list_rows(path.parent, path, partial(_from_prompts, path), "whole", caption)
    message = f"{path} is not a folder of images, a manifest (.jsonl) or a list of prompts (.txt), or does not exist"
    raise BadInput(message)


Parse = Callable[["Remarks"], Iterator[Sample]]
"""Goes through the samples of a source; of one without a caption `captions` is empty."""


def list_samples(files: Files, parse: Parse, where: Path | str, caption: str | None) -> Listing:
    """The listing of a source that is gone through once, as its content is known only then. Raises BadInput for two samples of one id."""
    seen = Remarks()
    samples = tuple(_checked(parse, where, caption, seen))

    def walk(remarks: Remarks) -> Iterator[Sample]:
        remarks.take(seen)
        return iter(samples)

    return Listing(files, _content(samples), walk)


def _list_rows(root: Path, path: Path, parse: Parse, caption_lines: CaptionLines, caption: str | None) -> Listing:
    """A manifest's content is known by its bytes: whoever finds a plan of them reads no row."""
    before = _digest(path)

    def walk(remarks: Remarks) -> Iterator[Sample]:
        yield from _checked(parse, path, caption, remarks)
        if _digest(path) != before:
            message = f"{path} changed while it was read; run the same command again"
            raise BadInput(message)

    kind = path.name.lower() if path.name in _METADATA else path.suffix.lower()
    parts = [kind, before, b"" if caption is None else canonical(caption)]
    if caption_lines != "whole":
        parts.append(caption_lines)
    return Listing(Folder(root.absolute()), digest_parts("cachestore-content", *parts).hex(), walk)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _checked(parse: Parse, where: Path | str, caption: str | None, remarks: Remarks) -> Iterator[Sample]:
    """The samples with their captions; refuses two with one id."""
    ids: set[str] = set()
    for sample in parse(remarks):
        if sample.id in ids:
            one, two = _what(next(other for other in parse(Remarks()) if other.id == sample.id)), _what(sample)
            shown = ascii if normal(one) == normal(two) else repr  # two spellings of one letter look alike
            message = f"two samples of {where} have the id {sample.id!r}: {shown(one)} and {shown(two)}; ids must differ"
            raise BadInput(message)
        ids.add(sample.id)
        yield _with_caption(sample, caption, remarks)


def _with_caption(sample: Sample, caption: str | None, remarks: Remarks) -> Sample:
    if sample.captions:
        return sample
    if caption is None:
        remarks.missing.append(sample.id)
    return Sample(sample.id, sample.images, (caption or "",), sample.size, sample.crop, sample.extras)


def _content(samples: Iterable[Sample]) -> str:
    """Digest of everything that a plan takes from a source."""
    rows = (canonical([s.id, list(s.captions), {role: list(refs) for role, refs in s.images.items()}, dict(s.extras)]) for s in samples)
    return digest_parts("cachestore-content", *rows).hex()


def _what(sample: Sample) -> str:
    return next((refs[0] for refs in sample.images.values() if refs), (sample.captions or ("",))[0][:60])


def normal(text: str) -> str:
    """Text as ids are spelled: NFC, so that one letter has one spelling."""
    return unicodedata.normalize("NFC", text)


def _lines(text: str) -> list[str]:
    """The lines of a file. U+2028, form feeds and the like end none: captions hold them, and JSON allows them inside a text."""
    return text.replace("\r\n", "\n").replace("\r", "\n").split("\n")


def _lines_of(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a file with their numbers, from 1 on, without holding the file."""
    number = start = 0
    with path.open("rb") as file:
        for raw in file:
            part = raw.removeprefix(codecs.BOM_UTF8) if start == 0 else raw
            try:
                text = part.decode("utf-8")
            except UnicodeDecodeError as error:
                message = f"{path} is not UTF-8 (byte {start + len(raw) - len(part) + error.start}): save it as UTF-8"
                raise BadInput(message) from error
            for line in text.removesuffix("\n").removesuffix("\r").split("\r"):
                number += 1
                yield number, line
            start += len(raw)


def _from_folder(root: Path, caption_lines: CaptionLines, remarks: Remarks, *, videos: bool) -> Iterator[Sample]:
    """Images below a folder, and videos where they are wanted, sorted by id, with side-car captions."""
    found = sorted(_files_below(root, "", ()), key=lambda item: (normal(item[0]), item[0]))
    for reference, path in found:
        role = VIDEO if path.suffix.lower() in VIDEO_SUFFIXES else IMAGE
        if role == VIDEO and not videos:
            remarks.videos += 1
            continue
        sample = normal(reference)
        captions = _side_car(path, caption_lines, sample, remarks)
        yield Sample(sample, {role: (reference,)}, captions)


def _files_below(folder: Path, prefix: str, above: tuple[str, ...]) -> Iterator[tuple[str, Path]]:
    """(reference, path) of every image and video. Linked folders are followed, but not back into one they lie in; stores are skipped."""
    real = os.path.realpath(folder)
    if real in above:
        return
    for name, is_folder in _listed(folder):
        path = folder / name
        if is_folder:
            yield from _files_below(path, f"{prefix}{name}/", (*above, real))
        elif path.suffix.lower() in _SUFFIXES:
            yield f"{prefix}{name}", path


def _listed(folder: Path) -> list[tuple[str, bool]]:
    """(name, whether it is a folder) of what is in a folder, sorted; nothing of a store, and no hidden name. Raises BadInput.

    A name that ends like a picture's and is a fifo or device is refused: reading it might never end.
    """
    found: list[tuple[str, bool]] = []
    try:
        if (folder / MARKER).exists():
            return []
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                is_folder = entry.is_dir()
                if not is_folder and Path(entry.name).suffix.lower() in _SUFFIXES and not _is_readable(entry):
                    message = f"{entry.path} is no regular file but a fifo, a socket or a device: move it out of the folder"
                    raise BadInput(message)
                found.append((entry.name, is_folder))
    except OSError as error:
        message = f"the folder {folder} cannot be listed ({error.strerror or error}): let this user read it, or move it out of the source"
        raise BadInput(message) from error
    return sorted(found)


def _is_readable(entry: "os.DirEntry[str]") -> bool:
    """Whether a name is a regular file or a link; one that leads nowhere fails when it is read, and alone."""
    return entry.is_file() or (entry.is_symlink() and not Path(entry.path).exists())


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading without ever waiting for a fifo's other end. Raises OSError, for what is no regular file too."""
    descriptor = os.open(path, _OPEN_FLAGS)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    raise OSError(errno.EINVAL, "it is no regular file but a fifo, a device or a folder", str(path))


def _side_car(path: Path, caption_lines: CaptionLines, sample: str, remarks: Remarks) -> tuple[str, ...]:
    """The captions in the file beside an image; none if there is no such file, the empty one if it is empty."""
    for suffix in _CAPTION_SUFFIXES:
        try:
            text = _decode(path.with_suffix(suffix))
        except FileNotFoundError:
            continue
        except OSError as error:
            if path.with_suffix(suffix).is_dir():
                continue
            message = f"the captions {path.with_suffix(suffix)} cannot be read: {error.strerror or error}"
            raise BadInput(message) from error
        return captions_in(text, caption_lines, sample, remarks)
    return ()


def captions_in(text: str, caption_lines: CaptionLines, sample: str, remarks: Remarks) -> tuple[str, ...]:
    """The captions that the text of a file is, at least one; blank text is the empty caption."""
    lines = [line.strip() for line in _lines(text) if line.strip()]
    if caption_lines == "each":
        return tuple(lines) or ("",)
    if caption_lines == "first":
        return (lines[0] if lines else "",)
    if len(lines) > 1:
        remarks.multi_line.append(sample)
    return (text.strip(),)


def _decode(path: Path) -> str:
    with open_regular(path) as file:
        return decode_text(file.read(), path)


def decode_text(raw: bytes, where: Path | str) -> str:
    """Text of UTF-8, with or without a mark in front. Raises BadInput."""
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        message = f"{where} is not UTF-8 (byte {error.start}): save it as UTF-8"
        raise BadInput(message) from error


def _from_metadata(path: Path, caption_lines: CaptionLines, remarks: Remarks) -> Iterator[Sample]:
    """The Hugging Face imagefolder form: `file_name` and `text`, every other column an extra."""
    rows = _json_rows(path) if path.suffix == ".jsonl" else _csv_rows(path)
    for line, row in rows:
        name = row.get("file_name")
        if not isinstance(name, str) or not name:
            message = f"{path}, line {line}: a row needs `file_name`"
            raise BadInput(message)
        renamed = {
            ("caption" if column == "text" else "image" if column == "file_name" else column): value for column, value in row.items()
        }
        yield from_row({"id": name, **renamed}, f"{path}, line {line}", caption_lines, remarks)


def _csv_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Rows of a table with the line each ends on. An empty cell of a reference is none."""
    rows = csv.DictReader(io.StringIO(_decode(path), newline=""))
    try:
        for row in rows:
            if None in row:
                message = f"{path}, line {rows.line_num}: more cells than the first line has columns"
                raise BadInput(message)
            yield rows.line_num, {column: _cell(column, value) for column, value in row.items() if value or column not in _EMPTY_IS_NONE}
    except csv.Error as error:
        message = f"{path}, line {rows.reader.line_num}: {error}"
        raise BadInput(message) from error


def _cell(column: str, text: Any) -> Any:
    """The value of a table's cell: of a crop or size the list that it spells, of all others the text itself."""
    if column not in {CROP, SIZE}:
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text


def _from_manifest(path: Path, caption_lines: CaptionLines, remarks: Remarks) -> Iterator[Sample]:
    for line, row in _json_rows(path):
        yield from_row(row, f"{path}, line {line}", caption_lines, remarks)


def _json_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    for line, text in _lines_of(path):
        if not text.strip():
            continue
        try:
            row = json.loads(text, parse_constant=_no_constant)
        except ValueError as error:
            message = f"{path}, line {line}: not JSON ({error})"
            raise BadInput(message) from error
        if not isinstance(row, dict):
            message = f"{path}, line {line}: a row is an object, this is a {type(row).__name__}"
            raise BadInput(message)
        yield line, row


def _no_constant(name: str) -> Any:
    message = f"{name} is no JSON"
    raise ValueError(message)


def from_row(row: Mapping[str, Any], where: str, caption_lines: CaptionLines, remarks: Remarks) -> Sample:
    """One row of a manifest; what it does not name itself is an extra column. `where` names it in errors. Raises BadInput."""
    captions = _texts(row.get("caption"), f"{where}: caption")
    images = {role: _texts(row.get(column), f"{where}: {column}") for column, role in _REFERENCES.items()}
    images = {role: references for role, references in images.items() if references}
    if empty := next((role for role, references in images.items() if "" in references), None):
        message = f"{where}: the reference of {empty} is empty; leave the column out, or write null"
        raise BadInput(message)
    given = row.get("id")
    if given is not None and (given == "" or isinstance(given, bool) or not isinstance(given, str | int)):
        message = f"{where}: an id is a text or a whole number, not {given!r}"
        raise BadInput(message)
    default = next((images[role][0] for role in (IMAGE, VIDEO) if role in images), digest_text("\n".join(captions)))
    extras: dict[str, Json] = {column: value for column, value in row.items() if column not in {"id", "caption", *_REFERENCES}}
    taken = sorted((_BATCH_NAMES | _VIDEO_BATCH_NAMES if VIDEO in images else _BATCH_NAMES) & extras.keys())
    extras = _with_framing(extras, where, has_picture=IMAGE in images)
    if taken:
        message = f"{where}: a batch has a value of its own named {taken[0]!r}; give the column another name"
        raise BadInput(message)
    sample = normal(str(given)) if given is not None else normal(default)
    if caption_lines != "whole":
        captions = tuple(one for caption in captions for one in captions_in(caption, caption_lines, sample, remarks))
    elif any("\n" in caption.strip() for caption in captions):
        remarks.multi_line.append(sample)
    return Sample(sample, images, captions, extras=extras)


def _with_framing(extras: Mapping[str, Json], where: str, *, has_picture: bool) -> dict[str, Json]:
    """The columns with `size` and `crop` checked; null is left out. Raises BadInput for what neither can be."""
    extras = {column: value for column, value in extras.items() if value is not None or column not in {CROP, SIZE}}
    size, crop = extras.get(SIZE), extras.get(CROP)
    if size is not None and not (_are_whole(size, 2) and min(size) >= 1):
        message = f"{where}: size is [width, height] of the picture in whole pixels, not {size!r}; a column of your own needs another name"
        raise BadInput(message)
    if crop is None:
        return extras
    if not _are_whole(crop, 4) or not (0 <= crop[0] < crop[2] and 0 <= crop[1] < crop[3]):
        message = f"{where}: crop is [left, top, right, bottom] in whole pixels of the picture, not {crop!r}"
        raise BadInput(message)
    if not has_picture:
        message = f"{where}: crop is a part of the picture, and this row has no image"
        raise BadInput(message)
    if size is not None and (crop[2] > size[0] or crop[3] > size[1]):
        message = f"{where}: the crop {crop} sticks out of a picture of the size {size}"
        raise BadInput(message)
    return extras


def _are_whole(value: object, count: int) -> bool:
    numbers = cast("list[object]", value) if isinstance(value, list) else []
    return len(numbers) == count and all(type(number) is int for number in numbers)


def _texts(value: object, where: str) -> tuple[str, ...]:
    """One text or a list of them; none where the column is missing or null."""
    if value is None:
        return ()
    values: list[object] = [*value] if isinstance(value, list) else [value]
    if not all(isinstance(one, str) for one in values):
        message = f"{where} is a text or a list of texts, not {value!r}"
        raise BadInput(message)
    return tuple(map(str, values))


def _from_prompts(path: Path, remarks: Remarks) -> Iterator[Sample]:
    """One prompt a line; blank lines are passed over, duplicates collapse."""
    seen: set[str] = set()
    for _line, text in _lines_of(path):
        prompt = text.strip()
        if prompt in seen:
            remarks.collapsed += 1
        elif prompt:
            seen.add(prompt)
            yield Sample(digest_text(prompt), {}, (prompt,))
