"""The account of what is not used of a source, and why. The reasons are a fixed list of words, explained in docs/sources.md."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from cachestore.core.keys import Json
from cachestore.core.words import first_of, plural

NO_DECODER, UNKNOWN_ENDING, NO_FRAMES = "no-decoder", "unknown-ending", "video-without-frames"
NO_PICTURE, OTHER_SPELLING, UNREAD_TABLE = "caption-without-picture", "other-spelling", "unread-table"
SECOND_CAPTION, SECOND_METADATA, NO_ROW = "second-caption", "second-metadata", "picture-without-row"
NO_OWNER, ARCHIVE, BESIDE_TARS, REPLACED = "role-without-picture", "archive", "beside-tars", "replaced-member"
BROKEN_LINK, LISTED_TWICE, HIDDEN, STORE = "broken-link", "listed-twice", "hidden", "store"
TRAINER_CACHE, NOT_DATA = "trainer-cache", "not-data"
REASONS: Final[Mapping[str, str]] = {
    NO_DECODER: "a kind of picture or video that is not decoded here: convert it, such as to PNG, JPEG or MP4",
    UNKNOWN_ENDING: "by its content a picture, a video or a tar, but its name ends otherwise: give it the right ending, such as .jpg",
    NO_FRAMES: "a video, or an image that goes with one: pass `frames` to say how many frames of each video to encode",
    OTHER_SPELLING: "it looks like a caption, but is not read: for cat.png it must be cat.txt, or cat.json with a field caption",
    UNREAD_TABLE: "by its name a table of captions, but it is not read: make a metadata.csv or metadata.jsonl of it",
    NO_PICTURE: "a caption, but no picture or video that is used has this name: add the picture, or remove the caption",
    SECOND_CAPTION: "a further caption of a sample whose captions are read from another file: keep the right text in that one",
    SECOND_METADATA: "a further table of rows: only one is read",
    NO_ROW: "a picture or video that no row of the metadata names: add a row, or remove it",
    NO_OWNER: "a mask or another image of a role, but no picture or video that is used has its name, or several have: rename it",
    ARCHIVE: "an archive in a folder of pictures: pass a tar beside the folder (`precompute photos/ more.tar`), and unpack others",
    BESIDE_TARS: "a picture or video in a folder whose tars are the samples: pass it as a source of its own",
    REPLACED: "a member of a tar, where a later member has the same name",
    BROKEN_LINK: "a link that leads nowhere: mend or remove it",
    LISTED_TWICE: "a folder that is listed under another name already, or contains the source itself",
    TRAINER_CACHE: "tensors, such as a cache of another trainer",
    STORE: "a store of cachestore",
    HIDDEN: "a name that begins with a dot; a hidden folder is not looked into",
    NOT_DATA: "neither a picture, a video nor a caption",
}
"""Each reason, with what it says of its files and what to do."""
_QUIET: Final = (TRAINER_CACHE, STORE, HIDDEN, NOT_DATA)
"""Reasons about which there is nothing to do: one line is enough for all of them."""
_NAMED: Final = 10
"""How many files of each reason are named."""


@dataclass(slots=True)
class Unused:
    """Counts the files that are not used, by reason, and keeps the first names of each.

    A hidden folder, a store and a folder that is listed elsewhere count once; nobody looks inside.
    """

    counts: dict[str, int] = field(default_factory=dict[str, int])
    examples: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    texts: int = 0
    """How many files are used as captions or metadata."""

    def add(self, reason: str, name: str) -> None:
        """Count a file. `name` is its path in the source. Raises KeyError for a word that is not in `REASONS`."""
        if reason not in REASONS:
            raise KeyError(reason)
        self.counts[reason] = self.counts.get(reason, 0) + 1
        named = self.examples.setdefault(reason, [])
        if len(named) < _NAMED:
            named.append(name)

    def include(self, other: "Unused", prefix: str = "") -> None:
        """Add the counts of one of several sources, with `prefix` before the names."""
        self.texts += other.texts
        for reason, count in other.counts.items():
            self.counts[reason] = self.counts.get(reason, 0) + count
            named = self.examples.setdefault(reason, [])
            named += [f"{prefix}{name}" for name in other.examples[reason][: _NAMED - len(named)]]

    def as_json(self) -> list[dict[str, Json]]:
        """Return the table as JSON: reason, count and examples of each, in the order of `REASONS`."""
        return [{"reason": one, "count": self.counts[one], "examples": list(self.examples[one])} for one in REASONS if one in self.counts]


def unused_in_words(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield lines for a person about the table of `Unused.as_json`: one for each reason, and one for all of which nothing is lost."""
    quiet = [row for row in rows if row["reason"] in _QUIET]
    for row in rows:
        if row["reason"] not in _QUIET:
            what = REASONS.get(row["reason"], "of this reason a later version of cachestore knows more")
            yield f"not used, {row['reason']}: {plural(row['count'], 'file')} ({first_of(row['examples'], 4)}): {what}"
    if quiet:
        shown = "; ".join(f"{row['count']} {row['reason']} ({first_of(row['examples'], 2)})" for row in quiet)
        yield f"not used, and no data: {shown}"
