"""Matches files to samples by a trainer's naming rules. A file that could belong to two samples is used for none."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Final, Literal, NamedTuple

from cachestore.core.keys import Json
from cachestore.core.raw_tensors import Contents
from cachestore.core.samples import IMAGE, VIDEO, Sample
from cachestore.core.words import first_of, plural
from cachestore.trainers.families import Family

_NAMED: Final = 5
"""How many samples a reason names."""


class ClipFrames(NamedTuple):
    """Which frames of a video a clip has: the number of the first one, and how many."""

    start: int
    frames: int


@dataclass(frozen=True, slots=True)
class FileLocation:
    """Where a value of a cache is stored, and what its name says."""

    path: str
    """Relative to the cache's folder, with `/`."""
    start: int = 0
    size: int | None = None
    """Bytes, if the value is a part of a file; None for the whole file."""
    facts: Mapping[str, Json] = field(default_factory=dict[str, Json])
    expected: str | None = None
    """The caption or picture name that the file should contain, if files of its kind contain one."""
    more: tuple["FileLocation", ...] = ()
    """File locations of the other parts of the value."""
    visual: str | None = None
    """The reference of the picture or video, if the text was found by its name."""
    span: ClipFrames | None = None
    """The frames of the video, if the name says them."""


@dataclass(frozen=True, slots=True)
class SideFacts:
    """What one of a trainer's side files reports about a picture."""

    path: str
    facts: Mapping[str, Json]
    """`size`, `bucket` and `resized` (width, height), and `crop` (left, top, right, bottom in the resized picture), in pixels."""
    info: Mapping[str, Json] = field(default_factory=dict[str, Json])
    """All other fields."""


Kind = Literal["text", "latents"]


class CaptionSettings(NamedTuple):
    """What a trainer's settings add to captions."""

    trigger: str | None = None
    """A word in every caption."""
    default: str | None = None
    """Replaces a caption that is missing or blank."""


class ParsedName(NamedTuple):
    """What a file of a cache holds, by its name only."""

    kind: Kind
    named: str | None = None
    """The family as the file's name spells it; None if it names none."""
    family: Family | None = None
    """The family of that name; None if it is not known here."""
    stem: str = ""
    """The part of the name for the picture or caption; empty if there is none, or if it does not matter."""
    facts: Mapping[str, Json] = MappingProxyType({})
    """What else the name says about the picture."""


@dataclass(frozen=True, slots=True)
class CacheListing:
    """The files of a cache, by name, and what was asked for."""

    paths: Sequence[str]
    """Relative to the folder."""
    folder: Path = Path()
    read: Callable[[FileLocation], Contents] | None = None
    """Returns what is at a file location, for trainers whose names do not tell. Raises EncodeFailed, OSError."""
    has_latents: bool = True
    """Whether latents are imported."""
    claims: Mapping[str, Json] = field(default_factory=dict[str, Json])
    fps: float | None = None
    """The rate at which the trainer took frames of videos, if the user gave it."""


@dataclass(slots=True)
class Matches:
    """Which files belong to which samples."""

    family: Family | None
    """The only family whose files are used; None: any family."""
    read_as: Mapping[str, Sequence[str]] = field(default_factory=dict[str, Sequence[str]])
    """By caption: how the trainer reads it from the caption file, with spaces and line ends that a data set does not keep."""
    ids: Sequence[str] = ()
    """The trainer's names of data sets, from its side files."""
    text: dict[str, list[FileLocation]] = field(default_factory=dict[str, list[FileLocation]])
    """By caption: every file that belongs to it."""
    latents: dict[str, Sequence[FileLocation]] = field(default_factory=dict[str, Sequence[FileLocation]])
    """By reference: of a picture latents of several resolutions, or plain and mirrored; reading them shows which to use. Of a video one
    for each of its clips."""
    used: dict[str, set[str]] = field(default_factory=dict[str, set[str]])
    """By kind: every file that belongs to a sample."""
    families: dict[str, Family] = field(default_factory=dict[str, Family])
    """By name: the families that file names mention."""
    remarks: list[str] = field(default_factory=list[str])
    unreadable: list[str] = field(default_factory=list[str])
    """Remarks on files that could not be read."""
    fps: float | None = None
    """The rate at which the trainer took frames of videos, if it is known."""
    side_facts: dict[str, list[SideFacts]] = field(default_factory=dict[str, list[SideFacts]])
    """By reference: what side files report."""
    doubtful: dict[str, str] = field(default_factory=dict[str, str])
    """By caption: why a file that may belong to it is not used."""
    doubtful_latents: dict[str, str] = field(default_factory=dict[str, str])
    """By reference: why latents that may belong to it are not used, or why their crop is unknown."""

    def accepts(self, family: Family | None) -> bool:
        """Return whether a file of this family is used; a file without a family is. Notes the family of the file."""
        if family is not None:
            self.families[family.name] = family
        return family is None or self.family is None or family == self.family

    def take_text(self, caption: str, location: FileLocation) -> None:
        """Assign a file to this caption."""
        self.used.setdefault("text", set()).update(one.path for one in (location, *location.more))
        self.text.setdefault(caption, []).append(location)

    def take_text_of(self, samples: Sequence[Sample], location: FileLocation) -> None:
        """Assign a file to the first caption of the samples that share a picture. If these captions differ, the file is not used."""
        captions = list(dict.fromkeys(map(first_caption, samples)))
        if len(captions) == 1:
            self.take_text(captions[0], replace(location, visual=visual_of(samples[0])))
            return
        names = first_of((sample.id for sample in samples), _NAMED)
        self.doubt_text(
            captions,
            f"{location.path} is of one caption, but the {plural(len(samples), 'sample')} of its picture ({names}) have several",
        )

    def doubt_text(self, captions: Iterable[str], reason: str) -> None:
        """Note why a file that may belong to each of these captions is used for none."""
        for caption in captions:
            self.doubtful.setdefault(caption, f"{reason}, so it is not used: encode the text with `cachestore precompute`")

    def take_latents(self, reference: str, locations: Sequence[FileLocation]) -> None:
        """Assign files to this picture; one of them will be used. Earlier doubts about the picture are dropped."""
        self.used.setdefault("latents", set()).update(location.path for location in locations)
        self.latents[reference] = locations
        self.doubtful_latents.pop(reference, None)

    def take_only(self, reference: str, locations: Sequence[FileLocation]) -> None:
        """Assign a file to this picture. If there are several, none is used, and the picture's latents are doubtful."""
        if len(locations) == 1:
            self.take_latents(reference, locations)
        else:
            paths = " and ".join(location.path for location in locations[:3])
            self.doubt_latents([reference], f"{paths} all belong to {reference!r}: keep only the right one in the folder")

    def take_each(self, reference: str, locations: Sequence[FileLocation]) -> None:
        """Assign files to the clips of this video, or one file to this picture. If a clip has several, none of the video's is used."""
        twice = [one for one in locations if sum(other.span == one.span for other in locations) > 1]
        if twice:
            self.take_only(reference, [one for one in twice if one.span == twice[0].span])
        else:
            self.take_latents(reference, locations)

    def spans(self, reference: str | None) -> list[ClipFrames]:
        """Return the clips of a video that files are of, in order; empty if their names do not say it."""
        return sorted(one.span for one in self.latents.get(reference or "", ()) if one.span is not None)

    def doubt_latents(self, references: Iterable[str], reason: str) -> None:
        """Note why the latents of these pictures, or their crop, are unknown."""
        for reference in references:
            self.doubtful_latents.setdefault(reference, reason)


def stem_of(reference: str) -> str:
    """Return a reference without its extension."""
    return str(PurePosixPath(reference).with_suffix(""))


def visual_of(sample: Sample) -> str | None:
    """Return the reference of the picture or video that a sample is trained on; None if it is a caption alone."""
    return next(iter((*sample.images.get(IMAGE, ()), *sample.images.get(VIDEO, ()))), None)


def visuals_of(samples: Iterable[Sample]) -> dict[str, list[Sample]]:
    """Return the samples of each picture or video that is trained on, by reference. Captions alone are left out."""
    found: dict[str, list[Sample]] = {}
    for sample in samples:
        if (reference := visual_of(sample)) is not None:
            found.setdefault(reference, []).append(sample)
    return found


class Ends(NamedTuple):
    """The references at the ends of paths from another machine."""

    known: dict[str, str]
    """By path: its reference. Paths of other files are left out."""
    doubtful: dict[str, list[str]]
    """By path: the references that it may be, longest first, if nothing decides."""

    def open_to(self) -> list[str]:
        """Return the references that doubtful paths may be."""
        return list(dict.fromkeys(reference for those in self.doubtful.values() for reference in those))

    def may_be(self) -> str:
        """Return what the first doubtful path may be, in words."""
        path, those = next(iter(self.doubtful.items()))
        return " or ".join(those[:3]) if len(those) > 1 else f"{those[0]} or of a picture that the source lacks ({path})"


def references_of(paths: Iterable[str], pictures: Collection[str]) -> Ends:
    """Return which pictures these paths from another machine name, by the references at their ends.

    All paths below one folder are taken to lie there as in the source. If two such folders are possible and one contains the other, the one
    with more matching pictures is used; if both have equally many, neither is. So `b/1.png`, which the source lacks, is not taken for its
    `1.png`.
    """
    ends: dict[str, dict[tuple[str, ...], str]] = {}
    """By path: the references at its end, by the folders before them."""
    for path in dict.fromkeys(paths):
        parts = tuple(path.replace("\\", "/").split("/"))
        ends[path] = {parts[:start]: end for start in range(len(parts)) if (end := "/".join(parts[start:])) in pictures}
    counts = Counter(root for those in ends.values() for root in those)
    pairs = [(one, one[:length]) for one in counts for length in range(len(one)) if one[:length] in counts]
    beaten = {min(pair, key=counts.__getitem__) for pair in pairs if counts[pair[0]] != counts[pair[1]]}
    tied = {root for pair in pairs if counts[pair[0]] == counts[pair[1]] for root in pair}
    left = {path: {root: end for root, end in those.items() if root not in beaten} for path, those in ends.items()}
    known = {path: end for path, those in left.items() for root, end in those.items() if root not in tied}
    return Ends(known, {path: list(those.values()) for path, those in left.items() if those and path not in known})


def by_name(samples: Iterable[Sample], matches: Matches, *, is_flat: bool) -> dict[str, tuple[str, list[Sample]]]:
    """Return (reference, samples) of pictures or videos by their name without an extension, and without folders if the cache `is_flat`.

    Names that several of them share are left out, with a remark.
    """
    found: dict[str, list[tuple[str, list[Sample]]]] = {}
    for reference, sharing in visuals_of(samples).items():
        stem = stem_of(reference)
        found.setdefault(PurePosixPath(stem).name if is_flat else stem, []).append((reference, sharing))
    shared = {name: [reference for reference, _sharing in those] for name, those in found.items() if len(those) > 1}
    for name, references in sorted(shared.items()):
        matches.remarks.append(f"{' and '.join(references[:3])} share the name {name!r}, so files of that name are not used")
    return {name: those[0] for name, those in found.items() if len(those) == 1}


def same_words(one: str, other: str) -> bool:
    """Whether two captions differ only in white space."""
    return one.split() == other.split()


def first_caption(sample: Sample) -> str:
    """Return the caption that a trainer with one text file for each picture encodes; empty if there is none."""
    return sample.captions[0] if sample.captions else ""
