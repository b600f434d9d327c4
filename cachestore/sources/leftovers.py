"""Say why a file is not used, by its name and the names around it. Content is looked at only to name what a file is.

Knows names and a few first bytes. It never decides what is used: a data set must not change because more is recognised.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Final

from cachestore.core.spelling import option
from cachestore.core.words import first_of, plural
from cachestore.files.opening import open_foreign
from cachestore.sources.captions import folded
from cachestore.sources.files import MEDIA_SUFFIXES, TEXT_SUFFIXES, UNREAD_SUFFIXES
from cachestore.sources.tables import is_metadata
from cachestore.sources.unused import (
    ARCHIVE,
    NO_DECODER,
    NO_PICTURE,
    NOT_DATA,
    OTHER_SPELLING,
    SECOND_CAPTION,
    TRAINER_CACHE,
    UNKNOWN_ENDING,
    UNREAD_TABLE,
    Unused,
)
from cachestore.sources.walk import Names, split_name

_ARCHIVES: Final = frozenset({".tar", ".tgz", ".tbz2", ".txz", ".zip", ".7z", ".rar", ".gz", ".bz2", ".xz", ".zst"})
_CACHES: Final = frozenset({".npz", ".npy", ".pt", ".pth", ".safetensors", ".ckpt", ".bin", ".pkl", ".lmdb", ".mdb", ".cache"})
_SIMPLETUNER: Final = "aspect_ratio_bucket_"
"""How the names of SimpleTuner's own notes beside pictures begin."""
_TABLES: Final = frozenset({".csv", ".tsv", ".jsonl", ".ndjson", ".parquet", ".arrow", ".xlsx", ".xls", ".ods", ".sqlite"})
_TEXTS: Final = frozenset(
    {
        *(".text", ".tags", ".tag", ".cap", ".captions", ".prompt", ".prompts", ".label", ".labels", ".desc", ".description", ".alt"),
        *(".md", ".rst", ".srt", ".vtt", ".xml", ".yaml", ".yml", ".toml", ".html", ".htm", ".rtf", ".doc", ".docx", ".odt"),
    }
)
"""Endings of texts that people give captions. Other endings are looked at."""
_CAPTIONS: Final = frozenset({".txt", ".caption", ".text", ".captions", ".cap", ".tags", ".prompt", ".prompts"})
"""Endings of texts that are captions even without a picture of their name."""
_NEVER: Final = frozenset(
    {
        *(".xmp", ".aae", ".pp3", ".dop", ".on1", ".cos", ".thm", ".lrv", ".url", ".lnk", ".py", ".log", ".sha256", ".md5", ".ini", ".db"),
        *(".cls", ".cls2", ".id", ".key", ".index", ".idx"),
        *(".wav", ".mp3", ".flac", ".ogg", ".oga", ".opus", ".m4a", ".aac", ".wma", ".aif", ".aiff", ".mid"),
    }
)
"""Endings of files that may have a picture's name and are no captions: settings of photo programs, links, checksums, classes of
WebDataset; and sounds."""
_BY_SUFFIX: Final = {
    **dict.fromkeys(UNREAD_SUFFIXES, NO_DECODER),
    **dict.fromkeys(_ARCHIVES, ARCHIVE),
    **dict.fromkeys(_CACHES, TRAINER_CACHE),
}
_TABLE_TEXTS: Final = frozenset({*TEXT_SUFFIXES, *_TEXTS}) - {".md"}
"""Endings of texts that may be tables, by their names."""
_NAMELY: Final = frozenset({*TEXT_SUFFIXES, *_TEXTS, *_TABLES, *_NEVER})
"""Endings of files that need no look."""
_WORDS: Final = (
    *("captions", "caption", "cap", "texts", "text", "txt", "prompts", "prompt", "tags", "tag", "labels", "label", "descriptions"),
    *("description", "desc", "alt", "blip", "wd14"),
)
_BEFORE: Final = re.compile(rf"(?:{'|'.join(_WORDS)})[ ._-]+(.+)", re.IGNORECASE)
_AFTER: Final = re.compile(rf"(.+?)[ ._-]+(?:{'|'.join(_WORDS)})", re.IGNORECASE)
_TABLE_NAME: Final = re.compile(
    r"(?:.*[^a-z])?(?:captions?|prompts?|labels?|tags|metadata|meta_cap|annotations?|descriptions?|texts)(?:[^a-z].*)?", re.IGNORECASE
)
_README: Final = re.compile(r"(?:read.?me|licen[cs]e|notice|authors|changelog|credits|todo|requirements|copying|terms)\b.*", re.IGNORECASE)
_NAMED: Final = 3
_LOOKS: Final = 100
"""How many files of a source are looked at, at most."""
_LOOKS_EACH: Final = 5
"""How many of those with one ending. The others are taken to be alike."""
LOOK_BYTES: Final = 512
_BOXES: Final = (b"ftyp", b"moov", b"JXL ", b"jP  ")
_STARTS: Final = (
    *(b"\xff\xd8\xff", b"\x89PNG", b"GIF8", b"RIFF", b"II*\0", b"MM\0*", b"\x1aE\xdf\xa3", b"8BPS", b"v/1\x01", b"\xff\x0a"),
    *(b"\xffO\xffQ", b"FLV\x01", b"\0\0\x01\xba", b"\0\0\x01\xb3", b"OggS", b"DDS ", b"qoif", b"0&\xb2u", b"BM"),
)


def _first_bytes(path: Path) -> bytes:
    try:
        with open_foreign(path) as file:
            return file.read(LOOK_BYTES)
    except OSError:
        return b""


@dataclass(slots=True)
class Leftovers:
    """Sorts the files that are not used of a source into the reasons of `unused`."""

    unused: Unused
    stems: dict[str, tuple[str, bool]] = field(default_factory=dict[str, tuple[str, bool]])
    """By the folded stem of a sample's picture or video, with its folder: the stem as it is, and whether the sample has a caption."""
    unread: set[str] = field(default_factory=set[str])
    """The same of pictures and videos that are no samples."""
    folders: set[str] = field(default_factory=set[str])
    """The prefixes of the folders that hold samples' pictures or videos."""
    orphans: int = 0
    """Captions of no picture at all, also of none that is not read."""
    fieldless: dict[str, None] = field(default_factory=dict[str, None])
    """Files beside samples, named as their captions, that hold none."""
    spelled: dict[str, str] = field(default_factory=dict[str, str])
    """For the first captions of another spelling, the names that they should have."""
    media: str = NOT_DATA
    """The reason for pictures and videos that are no samples."""
    metadata: str = UNREAD_TABLE
    """The reason for files with the name of metadata."""
    has_json: bool = False
    """Whether samples have captions in a `.json`."""
    samples: int = 0
    lacking: int = 0
    peek: Callable[[Path], bytes] = _first_bytes
    """Returns the first bytes of a file in one of the folders, or none if it cannot be read."""
    _tails: dict[str, str] = field(default_factory=dict[str, str])
    _kinds: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    _left: int = _LOOKS

    def note(self, stem: str, prefix: str, *, has_caption: bool) -> None:
        """Note the stem of a sample, and the prefix of its folder."""
        key = folded(stem)
        self.stems[key] = (stem, has_caption or (key in self.stems and self.stems[key][1]))
        self.folders.add(prefix)

    def count(self, samples: int = 1, *, has_caption: bool) -> None:
        """Count samples."""
        self.samples += samples
        self.lacking += 0 if has_caption else samples

    def captions_elsewhere(self, where: str) -> list[str]:
        """Return one sentence if most samples have no caption, although files look like captions of another spelling."""
        counts, examples = self.unused.counts, self.unused.examples
        alike = (OTHER_SPELLING, UNREAD_TABLE, *((NO_PICTURE,) if self.orphans * 2 >= self.lacking else ()))
        found = [reason for reason in alike if counts.get(reason)]
        if self.lacking * 2 <= self.samples or not found:
            return []
        named = first_of([name for reason in found for name in examples[reason]])
        advice = [f"name the field of {name} that holds the caption, with {option('caption_column')}" for name in islice(self.fieldless, 1)]
        advice += [f"rename {name} to {meant}" for name, meant in islice(self.spelled.items(), 1)]
        advice += [f"make a metadata.csv, with columns file_name and text, of {name}" for name in examples.get(UNREAD_TABLE, ())[:1]]
        advice += [f"give {examples[NO_PICTURE][0]} the name of its picture"] if NO_PICTURE in found else []
        words = (
            f"{self.lacking} of {plural(self.samples, 'sample')} of {where} would have the empty caption, but"
            f" {plural(sum(counts[reason] for reason in found), 'file looks', 'files look')} like captions that are not read ({named}):"
            f" {', or '.join(advice)}; or pass an empty {option('caption')} if the empty caption is meant"
        )
        return [words]

    def sort(self, names: Names, files: "list[str]") -> None:
        """Count files of one folder, that are not used, by their reasons."""
        for name in files:
            stem, suffix = split_name(name)
            if suffix in UNREAD_SUFFIXES:
                self.unread.add(folded(f"{names.prefix}{stem}"))
        for name in files:
            self.unused.add(self._reason(names, name), f"{names.prefix}{name}")

    def _reason(self, names: Names, name: str) -> str:
        stem, suffix = split_name(name)
        if suffix in MEDIA_SUFFIXES:
            return self.media
        suffix = ".cache" if name.startswith(_SIMPLETUNER) else suffix
        known = _BY_SUFFIX.get(suffix) or (self.metadata if is_metadata(Path(name)) else NOT_DATA if _README.fullmatch(name) else None)
        if known is not None:
            return known
        near = None if suffix in _NEVER else self._near(names.prefix, stem)
        if near is not None and (suffix in _NAMELY or self._kind(names, name, suffix) == "text"):
            sample, has_caption = self.stems[near]
            has_field = f"{names.prefix}{name}" not in self.fieldless
            if has_field and not has_caption and len(self.spelled) < _NAMED:
                self.spelled[f"{names.prefix}{name}"] = f"{sample}.txt"
            return SECOND_CAPTION if has_field and has_caption else OTHER_SPELLING
        if suffix in _TABLES or (suffix in _TABLE_TEXTS and _TABLE_NAME.fullmatch(stem)):
            return UNREAD_TABLE
        if suffix in _CAPTIONS or (suffix == ".json" and (self.has_json or split_name(stem)[1] in MEDIA_SUFFIXES)):
            self.orphans += 0 if folded(f"{names.prefix}{stem}") in self.unread else 1
            return NO_PICTURE
        return UNKNOWN_ENDING if suffix not in _NAMELY and self._kind(names, name, suffix) == "media" else NOT_DATA

    def _near(self, prefix: str, stem: str) -> str | None:
        """The sample's stem that this one may be meant for: with a word such as `_caption`, or in a folder without pictures."""
        stem = folded(stem)
        spelled = [stem, *(found[1] for found in (_AFTER.fullmatch(stem), _BEFORE.fullmatch(stem)) if found)]
        inner, suffix = split_name(stem)
        spelled += [inner] if suffix in MEDIA_SUFFIXES else []
        start = folded(prefix)
        for one in spelled:
            if f"{start}{one}" in self.stems:
                return f"{start}{one}"
        if prefix in self.folders:
            return None
        while start:
            start = start[: start.rstrip("/").rfind("/") + 1]
            if above := next((f"{start}{one}" for one in spelled if f"{start}{one}" in self.stems), None):
                return above
        if not self._tails:
            for one in self.stems:
                self._tails.setdefault(one.rpartition("/")[2], one)
        return next((self._tails[one] for one in spelled if one in self._tails), None)

    def _kind(self, names: Names, name: str, suffix: str) -> str:
        """What the first bytes of a file are: "media" (a picture, a video or a tar), "text" or "other"."""
        seen = self._kinds.setdefault(suffix, [])
        if len(seen) < _LOOKS_EACH and self._left:
            self._left -= 1
            seen.append(_kind_of_bytes(self.peek(names.path / name)[:LOOK_BYTES]))
        return seen[-1] if seen else "other"


def _kind_of_bytes(data: bytes) -> str:
    if data.startswith(_STARTS) or data[4:8] in _BOXES or data[257:262] == b"ustar":
        return "media"
    try:
        text = data.decode(
            "utf-16" if data[:2] in {b"\xff\xfe", b"\xfe\xff"} else "utf-8", "ignore" if len(data) == LOOK_BYTES else "strict"
        )
    except UnicodeDecodeError:
        return "other"
    is_text = any(map(str.isalpha, text)) and all(one.isprintable() or one.isspace() for one in text)
    return "text" if is_text else "other"
