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
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Final, Literal, Protocol, TypeVar, cast

from cachestore.core.errors import BadInput
from cachestore.core.inputs import CROP, SIZE
from cachestore.core.keys import Json, canonical, digest_parts, digest_text
from cachestore.core.samples import CONTROL, IMAGE, VIDEO, Sample
from cachestore.core.words import first_of
from cachestore.files.opening import READ_FLAGS
from cachestore.files.paths import MARKER

Item = TypeVar("Item")
CaptionLines = Literal["whole", "each", "first"]
Stat = tuple[int, int]

UNTRUSTED: Final[Stat] = (-1, -1)
FRESH_SECONDS: Final = 2.0
"""A file modified so shortly before it was read may change again within the same time stamp: its time proves nothing."""


IMAGE_SUFFIXES: Final = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".avif"})
VIDEO_SUFFIXES: Final = frozenset({".mp4", ".mkv", ".webm", ".mov", ".avi"})
_SUFFIXES: Final = IMAGE_SUFFIXES | VIDEO_SUFFIXES
_CAPTION_SUFFIXES: Final = (".txt", ".caption")
_METADATA: Final = ("metadata.jsonl", "metadata.csv")
_REFERENCES: Final[Mapping[str, str]] = {"image": IMAGE, "control": CONTROL, "mask": "mask", "video": VIDEO}
_CAPTIONS: Final = ("caption", "text")
"""What a row may call its caption."""
_FILES: Final = ("file_name", "path")
"""What a row may call its picture besides `image`, or its video besides `video`."""
_KNOWN: Final = (*_CAPTIONS, *_REFERENCES, *_FILES)
_EMPTY_IS_NONE: Final = frozenset({*_REFERENCES, *_FILES, CROP, SIZE})
_ROWS_VERSION: Final = 2
"""Raised when the same bytes of a manifest or a metadata file are read as other samples: they then have another plan."""
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
            raise OSError(f"{path} changed while it was read")
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
            raise OSError(f"{path} changed while it was read")

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
    wordless: list[str] = field(default_factory=list[str])
    """Sources that have captions, with no text in any of them: writing them may have failed."""
    multi_line: list[str] = field(default_factory=list[str])
    collapsed: int = 0
    empty: list[str] = field(default_factory=list[str])
    """Of several sources those that list nothing, by what they are called."""
    videos: int = 0
    """Files of a folder that are passed over."""
    replaced: list[str] = field(default_factory=list[str])
    """Members of tars after which another one of their name comes."""
    again: list[str] = field(default_factory=list[str])
    """Folders that are passed over, as they are listed under another name."""
    dead: list[str] = field(default_factory=list[str])
    """Links that lead nowhere and have no picture's name."""
    columns: dict[str, None] = field(default_factory=dict[str, None])
    """The columns of rows; of one source alone."""
    uncaptioned: list[str] = field(default_factory=list[str])
    """For each source whose rows have no caption at all, a sentence that says so."""
    pictureless: list[str] = field(default_factory=list[str])
    """For each source whose rows have no picture or video at all, a sentence that says so: a column may be misspelt."""

    def take(self, other: "Remarks") -> None:
        """Remember what was counted before."""
        for one in fields(self):
            setattr(self, one.name, getattr(other, one.name))

    def add(self, other: "Remarks", prefix: str = "") -> None:
        """Count what was counted of one of several sources, too; `prefix` stands before the ids of its samples."""
        self.missing += [f"{prefix}{sample}" for sample in other.missing]
        self.wordless += other.wordless
        self.multi_line += [f"{prefix}{sample}" for sample in other.multi_line]
        self.collapsed += other.collapsed
        self.videos += other.videos
        self.replaced += [f"{prefix}{name}" for name in other.replaced]
        self.again += [f"{prefix}{name}" for name in other.again]
        self.dead += [f"{prefix}{name}" for name in other.dead]
        self.uncaptioned += other.uncaptioned
        self.pictureless += other.pictureless

    def in_words(self, *, of_videos: str = "--frames says how many frames to take of each") -> tuple[str, ...]:
        """What a user should know before encoding; `of_videos` is what is said of videos that are passed over."""
        told = (
            (self.missing, "{} without a caption ({}): they get the empty one, or what --caption TEXT says"),
            (self.wordless, "no caption has any text in {} source ({}): every sample gets the empty caption"),
            (self.multi_line, "{} captions of several lines ({}), each taken whole (see --caption-lines)"),
            (range(self.collapsed), "{} duplicate prompt lines collapsed"),
            (self.empty, "nothing is listed by {} of the sources ({})"),
            (self.replaced, "{} members of tars have a later one of their name, which counts ({})"),
            (self.again, "{} folders are passed over, as they are listed under another name already or the source lies in them ({})"),
            (self.dead, "{} links lead nowhere ({}): what they should lead to is not in the data set"),
            (range(self.videos), "{} videos passed over (" + of_videos + ")"),
        )
        return (*(words.format(len(some), first_of([*map(str, some[:4])])) for some, words in told if some), *self.pictureless)


@dataclass(slots=True)
class Problems:
    """What cannot be used in a source, gathered so that one error names all of it."""

    named: list[str] = field(default_factory=list[str])
    count: int = 0

    def add(self, problem: object) -> None:
        """Remember one: a sentence, or an error with it."""
        self.count += 1
        if len(self.named) < _NAMED:
            self.named.append(str(problem))

    def refuse(self, where: object) -> None:
        """Raise BadInput if there is any: the first ones, and how many there are."""
        if self.count == 1:
            raise BadInput(self.named[0])
        if self.count:
            more = f"; and {self.count - len(self.named)} more" if self.count > len(self.named) else ""
            named = "; ".join(one.removeprefix(f"{where}, ") for one in self.named)
            raise BadInput(f"{self.count} things in {where} cannot be used: {named}{more}")


_NAMED: Final = 20


def taken(items: Iterable[Item], parse: Callable[[Item], Iterable[Sample]], where: object) -> Iterator[Sample]:
    """The samples of all items. Raises BadInput at the end: one error for all items that `parse` refused."""
    problems = Problems()
    for item in items:
        try:
            samples = list(parse(item))
        except BadInput as error:
            problems.add(error)
            continue
        yield from samples
    problems.refuse(where)


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
    if os.path.isdir(path):  # noqa: PTH112 - as below
        metadata = next((path / name for name in _METADATA if (path / name).is_file()), None)
        if metadata is None:
            return list_samples(Folder(path.absolute()), partial(_from_folder, path, caption_lines, videos=videos), path, caption)
        return _list_rows(path, metadata, partial(_from_rows, metadata, caption_lines), caption_lines, caption)
    if path.suffix.lower() == ".jsonl" and os.path.isfile(path):  # noqa: PTH113
        return _list_rows(path.parent, path, partial(_from_rows, path, caption_lines), caption_lines, caption)
    if path.suffix.lower() == ".txt" and os.path.isfile(path):  # noqa: PTH113
        return _list_rows(path.parent, path, partial(_from_prompts, path), "whole", caption)
    if not os.path.exists(path):  # noqa: PTH110 - Path's raises where it is refused
        raise BadInput(f"{path} does not exist, or may not be looked at by this user")
    raise BadInput(f"{path} is not a folder of images, a manifest (.jsonl), a list of prompts (.txt) or a tar")


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
            raise BadInput(f"{path} changed while it was read; run the same command again")

    kind = path.name.lower() if path.name in _METADATA else path.suffix.lower()
    if kind != ".txt":
        kind = f"{kind} {_ROWS_VERSION}"
    parts = [kind, before, b"" if caption is None else canonical(caption)]
    if caption_lines != "whole":
        parts.append(caption_lines)
    return Listing(Folder(root.absolute()), digest_parts("cachestore-content", *parts).hex(), walk)


def _digest(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror or error}; let this user read it") from error


def _checked(parse: Parse, where: Path | str, caption: str | None, remarks: Remarks) -> Iterator[Sample]:
    """The samples with their captions; refuses two with one id."""
    ids: set[str] = set()
    has_captions, has_files, has_text = caption is not None, False, caption is not None
    for sample in parse(remarks):
        has_captions |= bool(sample.captions)
        has_text = has_text or any(text.strip() for text in sample.captions)
        has_files |= bool(sample.images)
        if sample.id in ids:
            one, two = _what(next(other for other in parse(Remarks()) if other.id == sample.id)), _what(sample)
            shown = ascii if normal(one) == normal(two) else repr  # two spellings of one letter look alike
            raise BadInput(f"two samples of {where} have the id {sample.id!r}: {shown(one)} and {shown(two)}; ids must differ")
        ids.add(sample.id)
        yield _with_caption(sample, caption, remarks)
    if has_captions and not has_text and not remarks.missing:
        remarks.wordless.append(str(where))
    if ids and remarks.columns:
        _look_at_columns(where, remarks, has_captions=has_captions, has_files=has_files)


def _look_at_columns(where: Path | str, remarks: Remarks, *, has_captions: bool, has_files: bool) -> None:
    """Remember what no row of a source has: one of its columns may be misspelt."""
    columns = _listed_columns(remarks.columns)
    if not has_captions:
        remarks.uncaptioned.append(
            f"no row of {where} has a caption: its columns are {columns}; a caption's column is called {' or '.join(_CAPTIONS)}: rename it,"
            " or pass --caption TEXT for what each sample gets ('' is the empty caption)"
        )
    if not has_files and remarks.columns.keys() - {"id", *_KNOWN}:
        known = ", ".join(name for name in _KNOWN if name not in _CAPTIONS)
        remarks.pictureless.append(f"no row of {where} has a picture or a video: its columns are {columns}; the known ones are {known}")


def _with_caption(sample: Sample, caption: str | None, remarks: Remarks) -> Sample:
    if sample.captions:
        return sample
    if caption is None:
        remarks.missing.append(sample.id)
    return Sample(sample.id, sample.images, (caption or "",), sample.size, sample.crop, sample.extras)


def _listed_columns(columns: Iterable[str]) -> str:
    """The names of columns, the first of very many."""
    names = list(columns)
    return first_of(names, _NAMED) or "none"


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
                raise BadInput(f"{path} is not UTF-8 (byte {start + len(raw) - len(part) + error.start}): save it as UTF-8") from error
            for line in text.removesuffix("\n").removesuffix("\r").split("\r"):
                number += 1
                yield number, line
            start += len(raw)


def _from_folder(root: Path, caption_lines: CaptionLines, remarks: Remarks, *, videos: bool) -> Iterator[Sample]:
    """Images below a folder, and videos where they are wanted, sorted by id, with side-car captions."""
    walk = _Walk(remarks)
    found = sorted(walk.files_below(root), key=lambda item: (normal(item[0]), item[0]))
    for reference, path in found:
        role = VIDEO if path.suffix.lower() in VIDEO_SUFFIXES else IMAGE
        if role == VIDEO and not videos:
            remarks.videos += 1
            continue
        sample = normal(reference)
        try:
            captions = _side_car(path, caption_lines, sample, remarks)
        except BadInput as error:
            walk.problems.add(error)
            continue
        yield Sample(sample, {role: (reference,)}, captions)
    walk.problems.refuse(root)


@dataclass(slots=True)
class _Walk:
    """Goes through what is below a folder, each real folder once; what cannot be taken is gathered in `problems`."""

    remarks: Remarks
    problems: Problems = field(default_factory=Problems)
    _seen: set[str] = field(default_factory=set[str])
    _above: set[str] = field(default_factory=set[str])
    """The folders that the source lies in: a link to one of them would bring in all that lies beside the source."""
    _links: list[tuple[str, Path]] = field(default_factory=list[tuple[str, Path]])
    """Links to folders that are still to be followed."""

    def files_below(self, root: Path) -> Iterator[tuple[str, Path]]:
        """(reference, path) of every image and video. Stores and hidden names are skipped.

        A folder that has several names is called by its own name, else by the first link to it, in the order of names among those that
        are met first. So every rank calls it the same. Its other names, and links back into a folder they lie in, are passed over with a
        remark.
        """
        self._above = {os.path.realpath(folder) for folder in Path(os.path.realpath(root)).parents}
        self._links = [("", root)]
        while self._links:
            links, self._links = sorted(self._links), []
            for prefix, folder in links:
                yield from self._files_of_tree(prefix, folder)

    def _files_of_tree(self, prefix: str, folder: Path) -> Iterator[tuple[str, Path]]:
        """Of a folder and the folders in it; links to others are left for later."""
        folders = [(prefix, folder)]
        while folders:
            prefix, folder = folders.pop()
            real = os.path.realpath(folder)
            if real in self._seen or real in self._above:
                self.remarks.again.append(prefix.removesuffix("/"))
                continue
            self._seen.add(real)
            for entry in self._entries(folder):
                name, path = f"{prefix}{entry.name}", folder / entry.name
                if self._is_folder(entry, name):
                    (self._links if entry.is_symlink() else folders).append((f"{name}/", path))
                elif _is_named_like_one(entry) and self._is_usable(entry):
                    yield name, path

    def _entries(self, folder: Path) -> "list[os.DirEntry[str]]":
        """What is in a folder, sorted; nothing of a store, and no hidden name."""
        try:
            if (folder / MARKER).exists():
                return []
            with os.scandir(folder) as entries:
                return sorted((entry for entry in entries if not entry.name.startswith(".")), key=lambda entry: entry.name)
        except OSError as error:
            self.problems.add(
                f"the folder {folder} cannot be listed ({error.strerror or error}): let this user read it, or move it out of the source"
            )
            return []

    def _is_folder(self, entry: "os.DirEntry[str]", name: str) -> bool:
        """Whether a name is a folder or leads to one. A link that leads nowhere is none. What may not be looked at is a problem."""
        try:
            if entry.is_dir():
                return True
            leads_nowhere = entry.is_symlink() and not Path(entry.path).exists()
        except OSError as error:
            leads_nowhere = error.errno == errno.ELOOP
            if not leads_nowhere and not _is_named_like_one(entry):
                self.problems.add(
                    f"{entry.path} may not be looked at ({error.strerror or error}): let this user read it, or move it out of the source"
                )
        # One that is named like a picture fails alone, when it is read; one that is named like captions is reported with its picture.
        if leads_nowhere and Path(entry.name).suffix.lower() not in {*_SUFFIXES, *_CAPTION_SUFFIXES}:
            self.remarks.dead.append(name)
        return False

    def _is_usable(self, entry: "os.DirEntry[str]") -> bool:
        """Whether what is named like a picture may be read. To read a fifo or device might never end; the rest fails alone."""
        try:
            is_usable = entry.is_file() or (entry.is_symlink() and not Path(entry.path).exists())
        except OSError:
            return True
        if not is_usable:
            self.problems.add(f"{entry.path} is no regular file but a fifo, a socket or a device: move it out of the folder")
        return is_usable


def _is_named_like_one(entry: "os.DirEntry[str]") -> bool:
    """Whether a name is that of an image or a video."""
    return Path(entry.name).suffix.lower() in _SUFFIXES


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading without ever waiting for a fifo's other end. Raises OSError, for what is no regular file too."""
    descriptor = os.open(path, READ_FLAGS)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    raise OSError(errno.EINVAL, "it is no regular file but a fifo, a device or a folder", str(path))


def _side_car(path: Path, caption_lines: CaptionLines, sample: str, remarks: Remarks) -> tuple[str, ...]:
    """The captions in the file beside an image; none if there is no such file, the empty one if it is empty."""
    for suffix in _CAPTION_SUFFIXES:
        beside = path.with_suffix(suffix)
        try:
            text = _decode(beside)
        except OSError as error:
            if os.path.isdir(beside) or not os.path.lexists(beside):  # noqa: PTH112 - Path's raise where it is refused
                continue
            raise BadInput(f"the captions {beside} cannot be read: {error.strerror or error}") from error
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
        raise BadInput(f"{where} is not UTF-8 (byte {error.start}): save it as UTF-8") from error


def _from_rows(path: Path, caption_lines: CaptionLines, remarks: Remarks) -> Iterator[Sample]:
    """The rows of a manifest, or of a folder's metadata file, in which every row has a file."""
    rows = _csv_rows(path) if path.suffix == ".csv" else _json_lines(path)
    is_metadata = path.name in _METADATA

    def parse(line: tuple[int, Any]) -> tuple[Sample]:
        number, content = line
        where = f"{path}, line {number}"
        row = _cells(cast("dict[Any, Any]", content), where) if isinstance(content, dict) else _json_row(content, where)
        if is_metadata and not any(row.get(column) for column in (*_FILES, IMAGE, VIDEO)):
            raise BadInput(f"{where}: a row needs `file_name`; its columns are {_listed_columns(row)}")
        named = _with_file(named_row(row, where, remarks), where)
        check_row(named, where, row)
        return (from_row(named, where, caption_lines, remarks),)

    return taken(rows, parse, path)


def _csv_rows(path: Path) -> Iterator[tuple[int, dict[Any, Any]]]:
    """Rows of a table with the line each ends on."""
    rows = csv.DictReader(io.StringIO(_decode(path), newline=""))
    try:
        for row in rows:
            yield rows.line_num, row
    except csv.Error as error:
        raise BadInput(f"{path}, line {rows.reader.line_num}: {error}") from error


def _cells(row: Mapping[Any, Any], where: str) -> dict[str, Any]:
    """The values of a table's row. An empty cell of a reference is none."""
    if None in row:
        raise BadInput(f"{where}: more cells than the first line has columns")
    return {column: _cell(column, value) for column, value in row.items() if value or column not in _EMPTY_IS_NONE}


def _cell(column: str, text: Any) -> Any:
    """The value of a table's cell: of a crop or size the list that it spells, of all others the text itself."""
    if column not in {CROP, SIZE}:
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text


def _json_lines(path: Path) -> Iterator[tuple[int, str]]:
    return ((line, text) for line, text in _lines_of(path) if text.strip())


def _json_row(text: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(text, parse_constant=_no_constant)
    except ValueError as error:
        raise BadInput(f"{where}: not JSON ({error})") from error
    if not isinstance(row, dict):
        raise BadInput(f"{where}: a row is an object, this is a {type(row).__name__}")
    return cast("dict[str, Any]", row)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def named_row(row: Mapping[str, Any], where: str, remarks: Remarks) -> Mapping[str, Any]:
    """The row with its caption in `caption`, whichever known name the column has. Raises BadInput for two that differ."""
    if not row.keys() <= remarks.columns.keys():
        remarks.columns.update(dict.fromkeys(row))
    return _under_one_name(row, _CAPTIONS, where)


def _with_file(row: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """The row with its picture in `image` or its video in `video`. The suffix decides if the column's name does not.

    Raises BadInput for two that differ.
    """
    if row.keys().isdisjoint(_FILES):
        return row
    references = (reference for column in _FILES for reference in _texts(row.get(column), f"{where}: {column}"))
    role = VIDEO if any(Path(reference).suffix.lower() in VIDEO_SUFFIXES for reference in references) else IMAGE
    return _under_one_name(row, (role, *_FILES), where)


def check_row(named: Mapping[str, Any], where: str, row: Mapping[str, Any]) -> None:
    """Raise BadInput for a row with neither a file nor a caption: a column may be misspelt. `row` is as it was written."""
    if named.get("caption") in (None, []) and all(named.get(column) in (None, []) for column in _REFERENCES):
        raise BadInput(
            f"{where}: the row has neither a picture, a video nor a caption: its columns are {_listed_columns(row)}; the known"
            f" ones are {', '.join(_KNOWN)}"
        )


def _under_one_name(row: Mapping[str, Any], names: Sequence[str], where: str) -> Mapping[str, Any]:
    """The row with the value of these columns under the first of their names, or without them if all are missing or null."""
    if row.keys().isdisjoint(names[1:]):
        return row
    found = {name: texts for name in names if (texts := _texts(row.get(name), f"{where}: {name}"))}
    if len(set(found.values())) > 1:
        one, other = list(found.items())[:2]
        raise BadInput(
            f"{where}: {one[0]} and {other[0]} mean the same and differ ({_shortened(one[1])} and {_shortened(other[1])}): remove one, or"
            " give it another name"
        )
    named = {column: value for column, value in row.items() if column not in names}
    if found:
        named[names[0]] = list(next(iter(found.values())))
    return named


def _shortened(texts: Sequence[str]) -> str:
    return first_of([repr(text[:60]) for text in texts], 2)


def from_row(row: Mapping[str, Any], where: str, caption_lines: CaptionLines, remarks: Remarks) -> Sample:
    """One row of a manifest; what it does not name itself is an extra column. `where` names it in errors. Raises BadInput."""
    captions = _texts(row.get("caption"), f"{where}: caption")
    images = {role: _texts(row.get(column), f"{where}: {column}") for column, role in _REFERENCES.items()}
    images = {role: references for role, references in images.items() if references}
    if empty := next((role for role, references in images.items() if "" in references), None):
        raise BadInput(f"{where}: the reference of {empty} is empty; leave the column out, or write null")
    given = row.get("id")
    if given is not None and (given == "" or isinstance(given, bool) or not isinstance(given, str | int)):
        raise BadInput(f"{where}: an id is a text or a whole number, not {given!r}")
    default = next((images[role][0] for role in (IMAGE, VIDEO) if role in images), digest_text("\n".join(captions)))
    extras: dict[str, Json] = {column: value for column, value in row.items() if column not in {"id", "caption", *_REFERENCES}}
    taken = sorted((_BATCH_NAMES | _VIDEO_BATCH_NAMES if VIDEO in images else _BATCH_NAMES) & extras.keys())
    extras = _with_framing(extras, where, has_picture=IMAGE in images)
    if taken:
        raise BadInput(f"{where}: a batch has a value of its own named {taken[0]!r}; give the column another name")
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
        raise BadInput(
            f"{where}: size is [width, height] of the picture in whole pixels, not {size!r}; a column of your own needs another name"
        )
    if crop is None:
        return extras
    if not _are_whole(crop, 4) or not (0 <= crop[0] < crop[2] and 0 <= crop[1] < crop[3]):
        raise BadInput(f"{where}: crop is [left, top, right, bottom] in whole pixels of the picture, not {crop!r}")
    if not has_picture:
        raise BadInput(f"{where}: crop is a part of the picture, and this row has no image")
    if size is not None and (crop[2] > size[0] or crop[3] > size[1]):
        raise BadInput(f"{where}: the crop {crop} sticks out of a picture of the size {size}")
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
        raise BadInput(f"{where} is a text or a list of texts, not {value!r}")
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
