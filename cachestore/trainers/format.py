"""What a trainer's format says of itself: how its files are named, read and written, and what the trainer does with them."""

import re
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from cachestore.core.raw_tensors import Contents, Latents, Text
from cachestore.core.samples import Sample
from cachestore.encode.pictures.bucket_rules import BucketSettings
from cachestore.trainers.exported import Block, ExportVariant, Listed, Named
from cachestore.trainers.families import Family, Trainer
from cachestore.trainers.matching import CacheListing, CaptionSettings, FileLocation, Matches, ParsedName

Container = Literal["npz", "safetensors", "torch"]
Resolutions = Literal["one file", "one folder", "a folder each", "a folder within"]
Extra = Literal["flips", "masks", "drawn crops", "own crops", "controls", "videos"]


@dataclass(frozen=True, slots=True)
class Writing:
    """How the files of a format are named and filled."""

    latents_path: Callable[[Family, Named], str]
    """Names the file of a picture's latents, relative to the folder. Raises EncodeFailed if something that the name needs is unknown."""
    latents: Callable[[Family, Sequence[ExportVariant]], Contents]
    """Fills the file of these variants. Raises EncodeFailed."""
    text_path: Callable[[Family, Named], str]
    text: Callable[[Family, Named, Text], Contents]
    resolutions: Resolutions
    """Where a picture's latents of several resolutions are stored. `a folder within` lies below the trainer's own folders."""
    takes: frozenset[Extra] = frozenset()
    """What the trainer caches besides latents of whole pictures."""
    latents_casts: Mapping[str, str] = field(default_factory=dict[str, str])
    """Dtypes that the format cannot hold, and what replaces them."""
    text_casts: Mapping[str, str] = field(default_factory=dict[str, str])
    text_by: Literal["picture", "caption", "picture and caption"] = "picture"
    """What names text files. With `caption`, all sources share one folder. Captions are digested as the trainer reads them."""
    is_joined: bool = False
    """Whether a file of latents has the text too."""
    side_data: Callable[[Sequence[Listed], str, Path], Mapping[str, object]] | None = None
    """Makes the trainer's JSON files about the written latents, by path, from the data set's name and the folder."""
    one_resolution: frozenset[str] = frozenset()
    """Families whose files hold only one resolution."""
    finds: Callable[[Family, Named, BucketSettings], bool] | None = None
    """Whether the trainer looks for latents like these; None: it uses all with the right name."""
    stacks: Callable[[Named, BucketSettings], Hashable] | None = None
    """What groups pictures into batches with these settings; each group must have one shape. None: the trainer groups by shape."""
    has_empty_caption: bool = False
    """Whether it has one file for the text of the empty caption, with which captions are dropped."""
    needs_text_and_latents: bool = False
    """Whether the trainer uses only what has both."""
    mixes_shapes: bool = False
    """Whether the trainer puts latents of any shapes into one batch."""
    takes_info: bool = False
    """Whether files need what the trainer wrote beside the tensors that were imported from it."""
    text_remark: str = ""
    """What users should know of exported text, in words."""
    settings: Callable[[Sequence[Block]], list[str]] = field(kw_only=True)
    """Makes the lines of the trainer's configuration with which it takes the files."""


@dataclass(frozen=True, slots=True)
class Reading:
    """How the files of a format are recognised and read."""

    parse_name: Callable[[str], ParsedName | None]
    """What a file holds, by its name only; None if the name does not tell."""
    match: Callable[[CacheListing, Sequence[Sample], Matches], None]
    """Matches files to samples by name, or, where names do not tell, by what is in them."""
    latents: Callable[[Contents, Family, FileLocation], Latents]
    text: Callable[[Contents, Family, FileLocation], Text]


@dataclass(frozen=True, slots=True)
class Format:
    """One trainer's cache."""

    trainer: Trainer
    container: Container
    files: re.Pattern[str]
    """Matches the end of a path that may be a file of this cache."""
    reads: Reading | None
    writing: Writing | None
    is_beside: bool = False
    """Whether its files are beside the pictures, so that their paths are those of the source."""
    side_files: re.Pattern[str] | None = None
    """Matches the names of side files, beside the pictures or the cache, that report how pictures were cropped."""
    read_side_file: Callable[[str, bytes, Collection[str], Matches], None] | None = None
    """Reads such a side file (name, bytes) for these references. Raises BadInput if it cannot be read."""
    captions_of: Callable[[str, CaptionSettings], list[str]] | None = None
    """Makes the trainer's captions from a caption file's text; None if they are the text without the white space around it."""
    is_one_caption: bool = True
    """Whether it uses one caption for each picture."""
    changes_only_caption_files: bool = False
    """Whether captions of other sources, such as tables, are taken as they are."""
    turns_pictures: bool = True
    """Whether it turns pictures upright by their EXIF data before it encodes them."""
    has_videos: bool = False
    """Whether it caches latents of videos."""
    text_may_be: Callable[[], str] | None = None
    """Says what its text may belong to, if not to captions of the source."""
    why_not_written: str = ""
    """Why it cannot be exported, in words, if `writing` is None."""

    @property
    def name(self) -> str:
        """The trainer's name."""
        return self.trainer.name

    @property
    def reading(self) -> Reading:
        """How its files are recognised and read, if it can be imported."""
        assert self.reads is not None, self.name
        return self.reads
