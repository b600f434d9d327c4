"""The formats by name. A new one is a row here, and a module with functions like the others'."""

import re
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from cachestore.core.errors import BadInput
from cachestore.core.raw_tensors import Contents, Latents, Text
from cachestore.core.samples import Sample
from cachestore.core.words import did_you_mean
from cachestore.encode.bucket_rules import BucketSettings
from cachestore.interop.formats import ai_toolkit, diffusion_pipe, ltx, musubi, nemo, sd_scripts, simpletuner
from cachestore.interop.formats.families import AI_TOOLKIT, DIFFUSION_PIPE, LTX, MUSUBI, NEMO, SD_SCRIPTS, SIMPLETUNER, Family
from cachestore.interop.formats.matching import Added, Block, ExportVariant, FileLocation, Listed, Matches, Named, ParsedName

Container = Literal["npz", "safetensors", "torch"]
Resolutions = Literal["one file", "one folder", "a folder each", "a folder within"]
Extra = Literal["flips", "masks", "drawn crops", "own crops", "controls", "videos"]


@dataclass(frozen=True, slots=True)
class Writing:
    """How the files of a format are named and filled."""

    latents: Callable[[Family, Sequence[ExportVariant]], tuple[str, Contents]]
    """Makes the file of these variants: (path relative to the folder, contents). Raises EncodeFailed."""
    text: Callable[[Family, Named, Text], tuple[str, Contents]]
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
    settings: Callable[[Sequence[Block]], list[str]] = field(kw_only=True)
    """Makes the lines of the trainer's configuration with which it takes the files."""


@dataclass(frozen=True, slots=True)
class Reading:
    """How the files of a format are recognised and read."""

    parse_name: Callable[[str], ParsedName | None]
    """What a file holds, by its name only; None if the name does not tell."""
    match: Callable[[Sequence[str], Sequence[Sample], Matches], None] | None
    """Matches files by name; None if each value must be opened (diffusion-pipe)."""
    latents: Callable[[Contents, Family, FileLocation], Latents]
    text: Callable[[Contents, Family, FileLocation], Text]


@dataclass(frozen=True, slots=True)
class Format:
    """One trainer's cache."""

    name: str
    container: Container
    files: re.Pattern[str]
    """Matches the end of a path that may be a file of this cache."""
    reads: Reading | None
    writing: Writing | None
    is_beside: bool = False
    """Whether its files are beside the pictures, so that their paths are those of the source."""
    metadata_files: re.Pattern[str] | None = None
    """Matches the names of side files, beside the pictures or the cache, that report how pictures were cropped."""
    read_metadata: Callable[[str, bytes, Collection[str], Matches], None] | None = None
    """Reads such a side file (name, bytes) for these references. Raises BadInput if it cannot be read."""
    captions_of: Callable[[str, Added], list[str]] | None = None
    """Makes the trainer's captions from a caption file's text; None if they are the text without the white space around it."""
    is_one_caption: bool = True
    """Whether it uses one caption for each picture."""
    has_videos: bool = False
    """Whether it caches latents of videos."""
    text_may_be: str = ""
    """What its text may belong to, in words, if not to captions of the source."""
    why_not_written: str = ""
    """Why it cannot be exported, in words, if `writing` is None."""

    @property
    def reading(self) -> Reading:
        """How its files are recognised and read, if `format_named` returned it."""
        assert self.reads is not None, self.name
        return self.reads


FORMATS: Final = {
    one.name: one
    for one in (
        Format(
            SD_SCRIPTS,
            "npz",
            re.compile(r"\.npz\Z"),
            Reading(sd_scripts.parse_name, sd_scripts.match, sd_scripts.read_latents, sd_scripts.read_text),
            Writing(
                sd_scripts.latents_file,
                sd_scripts.text_file,
                "one file",
                frozenset({"flips", "masks", "drawn crops", "own crops"}),
                sd_scripts.LATENTS_CASTS,
                sd_scripts.CASTS,
                one_resolution=sd_scripts.BARE,
                finds=sd_scripts.finds,
                settings=sd_scripts.settings,
            ),
            is_beside=True,
            captions_of=sd_scripts.captions_of,
        ),
        Format(
            SIMPLETUNER,
            "torch",
            re.compile(r"\.pt\Z"),
            Reading(simpletuner.parse_name, simpletuner.match, simpletuner.read_latents, simpletuner.read_text),
            Writing(
                simpletuner.latents_file,
                simpletuner.text_file,
                "a folder each",
                frozenset({"drawn crops", "own crops", "videos"}),
                text_by="caption",
                stacks=simpletuner.stacks,
                side_data=simpletuner.side_data,
                settings=simpletuner.settings,
            ),
            metadata_files=simpletuner.METADATA_FILES,
            read_metadata=simpletuner.read_metadata,
            captions_of=simpletuner.captions_of,
            is_one_caption=False,
            has_videos=True,
            text_may_be=(
                "validation prompts, to captions behind an instance prompt, to the lines of a file (--caption-lines each --captions all),"
                " or to pictures: for models that edit pictures, text is named by the picture's path, and by ID of a file"
                " aspect_ratio_bucket_metadata_ID.json, which must be beside the pictures or in the folder"
            ),
        ),
        Format(
            MUSUBI,
            "safetensors",
            re.compile(r"\.safetensors\Z"),
            Reading(musubi.parse_name, musubi.match, musubi.read_latents, musubi.read_text),
            Writing(
                musubi.latents_file,
                musubi.text_file,
                "a folder each",
                frozenset({"drawn crops", "controls", "videos"}),
                stacks=musubi.stacks,
                settings=musubi.settings,
            ),
            has_videos=True,
        ),
        Format(
            AI_TOOLKIT,
            "safetensors",
            re.compile(r"(^|/)(_latent_cache|_t_e_cache)/[^/]+\.safetensors\Z"),
            Reading(ai_toolkit.parse_name, ai_toolkit.match, ai_toolkit.read_latents, ai_toolkit.read_text),
            Writing(
                ai_toolkit.latents_file,
                ai_toolkit.text_file,
                "one folder",
                frozenset({"flips"}),
                text_by="picture and caption",
                finds=ai_toolkit.finds,
                settings=ai_toolkit.settings,
            ),
            is_beside=True,
            captions_of=ai_toolkit.captions_of,
            text_may_be=(
                "captions with a trigger word (--trigger-word), to a default caption (--caption TEXT), to shuffled or random words, or to"
                " captions with a control image: each of these changes the digest in the name"
            ),
        ),
        Format(
            DIFFUSION_PIPE,
            "torch",
            re.compile(r"(^|/)(metadata\.db|shard_\d+\.bin)\Z"),
            Reading(diffusion_pipe.parse_name, None, diffusion_pipe.read_latents, diffusion_pipe.read_text),
            writing=None,
            has_videos=True,
            why_not_written="it deletes a cache that its own code did not make",
        ),
        Format(
            LTX,
            "torch",
            ltx.FILES,
            Reading(ltx.parse_name, ltx.match, ltx.read_latents, ltx.read_text),
            Writing(
                ltx.latents_file,
                ltx.text_file,
                "a folder within",
                frozenset({"drawn crops", "own crops", "videos"}),
                stacks=ltx.stacks,
                settings=ltx.settings,
            ),
            has_videos=True,
        ),
        Format(
            NEMO,
            "torch",
            re.compile(r"\.(pt|meta)\Z"),
            reads=None,
            writing=Writing(
                nemo.latents_file,
                nemo.text_file,
                "one folder",
                frozenset({"drawn crops", "own crops", "videos"}),
                stacks=nemo.stacks,
                is_joined=True,
                side_data=nemo.side_data,
                settings=nemo.settings,
            ),
            has_videos=True,
        ),
    )
}


WEBDATASET: Final = "webdataset"
"""The format of exchanged tars, which are no trainer's (`interop/exchange`)."""
_ALSO_CALLED: Final = {"kohya": SD_SCRIPTS, "kohya_ss": SD_SCRIPTS, "ostris": AI_TOOLKIT, "nemo": NEMO, "automodel": NEMO}
"""Other names under which people know these trainers, for suggestions."""


def format_named(name: str) -> Format:
    """Return a format that can be imported, by its name. Raises BadInput that lists those that can."""
    able = (*(one.name for one in FORMATS.values() if one.reads is not None), WEBDATASET)
    if name in able:
        return FORMATS[name]
    if name in FORMATS:
        raise BadInput(f"{name} can be exported, but not imported; what can be imported is {', '.join(able)}")
    raise BadInput(f"the format {name!r} is not known; known are {', '.join(able)}{did_you_mean(name, able, _ALSO_CALLED)}")


def written_format(name: str) -> tuple[Format, Writing]:
    """Return a format that can be exported, by its name. Raises BadInput that lists those that can."""
    able = {one.name: (one, one.writing) for one in FORMATS.values() if one.writing is not None}
    if name in able:
        return able[name]
    if name in FORMATS:
        raise BadInput(
            f"{name} can be imported, but not exported: {FORMATS[name].why_not_written}. Train with"
            f" a script that reads the store, or export for {', '.join(able)}"
        )
    meant = did_you_mean(name, (*able, WEBDATASET), _ALSO_CALLED)
    raise BadInput(f"the format {name!r} is not known; what can be exported is {', '.join(able)}, {WEBDATASET}{meant}")
