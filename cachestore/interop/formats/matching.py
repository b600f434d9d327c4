"""Whose file is it, by a trainer's naming rules. Pure. What could be of two samples is of none: nothing is ever paired by luck."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import Final, Literal, NamedTuple

from cachestore.core.keys import Json
from cachestore.core.raw_tensors import Latents, Raw
from cachestore.core.samples import IMAGE, Sample
from cachestore.core.words import first_of
from cachestore.interop.formats.families import Family

_NAMED: Final = 5
"""Samples that a reason names."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a value of a cache lies, and what its name says."""

    path: str
    """Relative to the cache's folder, with `/`."""
    start: int = 0
    size: int | None = None
    """Of a part of a file, in bytes; None for all of it."""
    facts: Mapping[str, Json] = field(default_factory=dict[str, Json])
    expected: str | None = None
    """The caption, or the picture's own name, that the file should say it is of, where files of its kind say so."""
    more: tuple["Place", ...] = ()
    """Further places that hold the rest of the value."""
    beside: str | None = None
    """Of text that is found by its picture's name that picture's reference."""


@dataclass(frozen=True, slots=True)
class Told:
    """What one of a trainer's further files says of a picture."""

    path: str
    facts: Mapping[str, Json]
    """`size`, `bucket` and `resized` (width, height), and `crop` (left, top, right, bottom of what was resized), in pixels."""
    info: Mapping[str, Json] = field(default_factory=dict[str, Json])
    """The rest."""


Kind = Literal["text", "latents"]


class Added(NamedTuple):
    """What a trainer's settings make of captions."""

    trigger: str | None = None
    """A word that stands in every caption."""
    default: str | None = None
    """What stands for a caption that is missing or blank."""


class Looks(NamedTuple):
    """What a file of a cache holds, by its name alone."""

    kind: Kind
    named: str | None = None
    """How its name calls the family; None where it calls none."""
    family: Family | None = None
    """The family of that name; None of one that is not known here."""
    stem: str = ""
    """What stands in the name for the picture or caption; empty where nothing does, or where it counts for nothing."""
    facts: Mapping[str, Json] = MappingProxyType({})
    """What else the name tells of the picture."""


class Rule(NamedTuple):
    """By what a data set's pictures are put into buckets."""

    resolution: int
    step: int = 64
    upscales: bool = True


@dataclass(slots=True)
class Matches:
    """Which file each sample's values lie in."""

    family: Family | None
    """The only one whose files count; None while any may come."""
    read_as: Mapping[str, Sequence[str]] = field(default_factory=dict[str, Sequence[str]])
    """By caption, how else the trainer has it: as it reads the caption's file, with spaces and line ends that a data set is without."""
    text: dict[str, list[Place]] = field(default_factory=dict[str, list[Place]])
    """By caption, every file that is of it."""
    latents: dict[str, Sequence[Place]] = field(default_factory=dict[str, Sequence[Place]])
    """By the picture's reference, latents of several resolutions or of either side: which counts is seen when they are read."""
    used: dict[str, set[str]] = field(default_factory=dict[str, set[str]])
    """By kind every file that is some sample's."""
    families: dict[str, Family] = field(default_factory=dict[str, Family])
    """Those that names of files tell, by name."""
    remarks: list[str] = field(default_factory=list[str])
    told: dict[str, list[Told]] = field(default_factory=dict[str, list[Told]])
    """What further files say, by the picture's reference."""
    doubtful: dict[str, str] = field(default_factory=dict[str, str])
    """By caption, why a file that may be of it is nobody's."""
    doubtful_latents: dict[str, str] = field(default_factory=dict[str, str])
    """By the picture's reference, why latents that may be of it are nobody's, or nobody knows how they were cut."""

    def counts(self, family: Family | None) -> bool:
        """Whether a file of this family counts, which is remembered; one whose name tells none does."""
        if family is not None:
            self.families[family.name] = family
        return family is None or self.family is None or family == self.family

    def take_text(self, caption: str, place: Place) -> None:
        """A file is of this caption."""
        self.used.setdefault("text", set()).update(one.path for one in (place, *place.more))
        self.text.setdefault(caption, []).append(place)

    def take_text_of(self, samples: Sequence[Sample], place: Place) -> None:
        """A file is of the picture that these samples share, so of their first caption. Where they have several it is nobody's."""
        captions = list(dict.fromkeys(map(first_caption, samples)))
        if len(captions) == 1:
            self.take_text(captions[0], replace(place, beside=samples[0].images[IMAGE][0]))
            return
        names = first_of((sample.id for sample in samples), _NAMED)
        self.doubt_text(captions, f"{place.path} belongs to a picture that {len(samples)} samples with different captions share ({names})")

    def doubt_text(self, captions: Iterable[str], reason: str) -> None:
        """A file may be of each of these captions, and is of none."""
        for caption in captions:
            self.doubtful.setdefault(caption, f"{reason}, so it is not used")

    def take_latents(self, reference: str, places: Sequence[Place]) -> None:
        """One of these files is of this picture. What else may be of it no longer matters."""
        self.used.setdefault("latents", set()).update(place.path for place in places)
        self.latents[reference] = places
        self.doubtful_latents.pop(reference, None)

    def take_only(self, reference: str, places: Sequence[Place]) -> None:
        """A file is of this picture; of several none is taken, and the picture's latents are doubtful."""
        if len(places) == 1:
            self.take_latents(reference, places)
        else:
            paths = " and ".join(place.path for place in places[:3])
            self.doubt_latents([reference], f"{paths} all belong to {reference!r}: keep only the right one in the folder")

    def doubt_latents(self, references: Iterable[str], reason: str) -> None:
        """Of these pictures it is not known which latents are theirs, or how they were cut."""
        for reference in references:
            self.doubtful_latents.setdefault(reference, reason)


@dataclass(frozen=True, slots=True)
class Named:
    """What the name of an exported file is made of."""

    reference: str
    """Of the picture, relative to the source; of a sample without one, or with one in memory, its id."""
    caption: str = ""
    size: tuple[int, int] | None = None
    """(width, height) of the source picture in pixels."""
    bucket: tuple[int, int] | None = None
    resized: tuple[int, int] | None = None
    crop: tuple[int, int, int, int] | None = None
    tokens: int | None = None
    is_part: bool = False
    """Whether the crop was chosen inside of a part of the picture that is the sample's own."""
    is_prompt: bool = False
    """Whether it is a caption without a picture."""
    read_as: str | None = None
    """The caption as the trainer reads it from its file; None where no such file is known."""


@dataclass(frozen=True, slots=True)
class View:
    """One view of a picture that is exported: at one resolution, as it is or mirrored."""

    named: Named
    latents: Latents
    is_flipped: bool = False
    mask: Raw | None = None
    """uint8 `[1, h, w]`, as large as the latents, 255 where the picture counts."""
    controls: tuple[Raw, ...] = ()
    """Latents of the images that the model is shown, in order, in the state and dtype of the picture's."""


def stem_of(reference: str) -> str:
    """A reference without its extension."""
    return str(PurePosixPath(reference).with_suffix(""))


def pictures_of(samples: Iterable[Sample]) -> dict[str, list[Sample]]:
    """By its reference, the samples of each picture that is trained on; a sample without one is of none."""
    found: dict[str, list[Sample]] = {}
    for sample in samples:
        for reference in sample.images.get(IMAGE, ())[:1]:
            found.setdefault(reference, []).append(sample)
    return found


class Ends(NamedTuple):
    """What paths as they were on another machine end with."""

    known: dict[str, str]
    """By path the reference that it is; nothing of a path that is no picture's."""
    doubtful: dict[str, list[str]]
    """By path the references that it may be, longest first, where nothing decides."""

    def open_to(self) -> list[str]:
        """The references that doubtful paths may be."""
        return list(dict.fromkeys(reference for those in self.doubtful.values() for reference in those))

    def may_be(self) -> str:
        """What the first of the doubtful paths may be, in words."""
        path, those = next(iter(self.doubtful.items()))
        return " or ".join(those[:3]) if len(those) > 1 else f"{those[0]} or of a picture that the source lacks ({path})"


def references_of(paths: Iterable[str], pictures: Collection[str]) -> Ends:
    """Which pictures these paths are, as they were on another machine: by the references at their ends.

    All paths below one folder lay there as they do in the source: of two such folders, one in the other, that counts from which more paths
    lead to pictures, and of equally many neither. So `b/1.png`, which the source lacks, is not taken for its `1.png`.
    """
    ends = {path: _ends_of(path, pictures) for path in dict.fromkeys(paths)}
    counts = Counter(root for those in ends.values() for root in those)
    pairs = [(one, one[:length]) for one in counts for length in range(len(one)) if one[:length] in counts]
    beaten = {min(pair, key=counts.__getitem__) for pair in pairs if counts[pair[0]] != counts[pair[1]]}
    tied = {root for pair in pairs if counts[pair[0]] == counts[pair[1]] for root in pair}
    left = {path: {root: end for root, end in those.items() if root not in beaten} for path, those in ends.items()}
    known = {path: end for path, those in left.items() for root, end in those.items() if root not in tied}
    return Ends(known, {path: list(those.values()) for path, those in left.items() if those and path not in known})


def _ends_of(path: str, pictures: Collection[str]) -> dict[tuple[str, ...], str]:
    """References at the end of a path, by what stands before them."""
    parts = tuple(path.replace("\\", "/").split("/"))
    return {parts[:start]: end for start in range(len(parts)) if (end := "/".join(parts[start:])) in pictures}


def by_name(samples: Iterable[Sample], matches: Matches, *, is_flat: bool) -> dict[str, tuple[str, list[Sample]]]:
    """(reference, samples) of pictures by their name without an extension, and without folders where the cache `is_flat`.

    Names that several pictures share are left out, and said.
    """
    found: dict[str, list[tuple[str, list[Sample]]]] = {}
    for reference, sharing in pictures_of(samples).items():
        stem = stem_of(reference)
        found.setdefault(PurePosixPath(stem).name if is_flat else stem, []).append((reference, sharing))
    shared = {name: [reference for reference, _sharing in those] for name, those in found.items() if len(those) > 1}
    for name, references in sorted(shared.items()):
        matches.remarks.append(f"{' and '.join(references[:3])} share the name {name!r}, so files of that name are not used")
    return {name: those[0] for name, those in found.items() if len(those) == 1}


def same_words(one: str, other: str) -> bool:
    """Whether two captions differ in nothing but white space."""
    return one.split() == other.split()


def first_caption(sample: Sample) -> str:
    """The caption that a trainer with one file a picture means."""
    return sample.captions[0] if sample.captions else ""
