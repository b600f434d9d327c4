"""diffusion-pipe: shards of many values, with a table in an SQLite file; each value is a file of `torch.save`. Import only.

    .../cache_ARxWxHxFRAMES/latents/{metadata.db, shard_N.bin}            latents, scaled, with the picture's path and caption
    .../ar_frames_AR_FRAMES/text_embeddings_I/{metadata.db, shard_N.bin}  output of text encoder I, with the picture's path
    .../uncond_text_embeddings_I/{metadata.db, shard_N.bin}               the same of the empty caption

A video has one clip, at the model's own rate. Which frames it has is nowhere in the files: `video_clip_mode` of the configuration decides.

There is no export: diffusion-pipe deletes a cache with another fingerprint, which is a digest of its own code's state.
"""

import re
import sqlite3
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Final

from cachestore.core.errors import BadInput, EncodeFailed
from cachestore.core.keys import Json
from cachestore.core.raw_tensors import Contents, Latents, Text, as_array, rows, without_batch
from cachestore.core.samples import VIDEO, Sample
from cachestore.core.spelling import option
from cachestore.core.words import plural
from cachestore.files.opening import open_foreign
from cachestore.trainers.containers import LARGEST_BYTES
from cachestore.trainers.families import MEAN, Cached, Family, Trainer, unframed
from cachestore.trainers.format import Format, Reading
from cachestore.trainers.matching import (
    CacheListing,
    FileLocation,
    Matches,
    ParsedName,
    first_caption,
    references_of,
    visual_of,
    visuals_of,
)
from cachestore.trainers.text import PROMPT, pop_tensors, taken_apart

DIFFUSION_PIPE: Final = Trainer(
    "diffusion-pipe",
    {
        "sdxl": Cached(("sdxl",), has_text=False),
        "flux": Cached(("flux",)),
        "wan": Cached(("wan", "wan_i2v", "wan_flf2v", "wan2.2_i2v", "wan2.2_5b", "skyreels_v2", "skyreels_v2_i2v"), MEAN),
    },
)
"""How it names and stores each family."""
_SHARD: Final = re.compile(r"shard_(\d+)")
_TEXT_FOLDER: Final = re.compile(r"(?P<empty>uncond_)?text_embeddings_\d+")
_CAPTION: Final = re.compile(r"caption(\.\d+)?")
_CELL_BYTES: Final = 1 << 20
_MODE, _BEGINNING = "video_clip_mode", "single_beginning"
_RATE: Final = 16
_RATES: Final[Mapping[str, int]] = {"wan2.2_5b": 24, "skyreels_v2": 24, "skyreels_v2_i2v": 24}
"""The rate at which it takes frames for a model, by the name of the cache's folder, if that is not 16."""


@dataclass(frozen=True, slots=True)
class Item:
    """One value of a shard, with its metadata."""

    location: FileLocation
    values: Mapping[str, Json]

    @property
    def path(self) -> str:
        """The picture's path when it was cached."""
        return str(self.values.get("image_spec.1") or "")

    @property
    def is_empty_caption(self) -> bool:
        """Whether it is text of the empty caption, which belongs to no picture."""
        found = _TEXT_FOLDER.fullmatch(PurePosixPath(self.location.path).parent.name)
        return found is not None and found["empty"] is not None

    @property
    def captions(self) -> list[str]:
        """The captions that the metadata of latents name: a list in the file, or a single one."""
        own = (value for name, value in self.values.items() if _CAPTION.fullmatch(name))
        return [value for value in own if isinstance(value, str)]


def parse_name(path: str) -> ParsedName:
    """Return what a shard or table holds, by its folder."""
    return ParsedName("text" if _TEXT_FOLDER.fullmatch(PurePosixPath(path).parent.name) is not None else "latents")


def is_table(path: str) -> bool:
    """Whether a file is the table of a folder's shards."""
    return PurePosixPath(path).name == "metadata.db"


def locations_in(root: Path, table: str) -> list[FileLocation]:
    """Return the file location of every value in the shards beside a table. Raises EncodeFailed that names an unreadable table."""
    path, folder = root / table, PurePosixPath(table).parent
    try:  # opened read-only, and nothing in it is executed
        open_foreign(path).close()  # SQLite would wait for a fifo
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro&immutable=1", uri=True)) as opened:
            opened.execute("PRAGMA trusted_schema=OFF")
            if sys.version_info >= (3, 11):  # before, SQLite's own limit of 1 GB holds
                opened.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _CELL_BYTES)  # a table may say that its cells are computed
            names = [name for (name,) in opened.execute("SELECT name FROM sqlite_master WHERE type='table'")]
            shards = sorted((int(found[1]), name) for name in names if (found := _SHARD.fullmatch(name)) is not None)
            rows = [
                (number, *row)
                for number, name in shards
                for row in opened.execute(f"SELECT offset, size FROM {name} ORDER BY rowid")  # noqa: S608 - `shard_` and digits only
            ]
    except (OSError, sqlite3.Error, ValueError, OverflowError) as error:  # a damaged table may hold names that are no UTF-8
        raise EncodeFailed(f"{path} is no readable table ({error}): copy it again, or let diffusion-pipe make this cache again") from error
    are_whole = all(isinstance(number, int) and 0 <= number < 1 << 50 for row in rows for number in row)
    if not are_whole or any(row[2] > LARGEST_BYTES for row in rows):
        raise EncodeFailed(
            f"{path} is damaged: values have impossible offsets or sizes. Let diffusion-pipe make this cache again, then import it"
        )
    return [FileLocation(str(folder / f"shard_{shard}.bin"), start, size) for shard, start, size in rows]


def families_in(names: Iterable[str]) -> dict[str, Family]:
    """Return the families that folders are named after, by the folder's name."""
    return {name: family for name in sorted(names) if (family := DIFFUSION_PIPE.family_called(name)) is not None}


def rate_of_videos(models: Iterable[str], claims: Mapping[str, Json], fps: float | None) -> float:
    """Return the rate at which frames of videos were taken. Raises BadInput if it is unknown, or which frames a clip has."""
    if claims.get(_MODE) != _BEGINNING:
        raise BadInput(
            f"no file of diffusion-pipe says which frames of a video it is of: if {_MODE} in its configuration is {_BEGINNING}, or is"
            f" missing, pass {option('claim')} {_MODE}={_BEGINNING}; clips from the middle of videos cannot be imported",
            option="claims",
        )
    rates = {_RATES.get(model, _RATE) for model in models}
    if fps is None and len(rates) != 1:
        raise BadInput(
            f"nothing says at which rate diffusion-pipe took frames: pass {option('fps', 16)}, or {option('fps', 24)} if the"
            " model is Wan 2.2 5B or SkyReels V2",
            option="fps",
        )
    return rates.pop() if fps is None else fps


def match(cache: CacheListing, samples: Sequence[Sample], matches: Matches) -> None:
    """Match values to pictures by what each says, and find the rate of videos. Raises BadInput if that is unknown."""
    match_items(list(_items(cache, matches)), samples, matches)
    tables = [path for path in cache.paths if is_table(path)]
    for kind in ("text", "latents"):
        matches.used.setdefault(kind, set()).update(tables)
    names = {part for path in cache.paths for part in PurePosixPath(path).parts} | {cache.folder.absolute().name}
    models = families_in(names)
    if matches.family is None:
        matches.families |= {family.name: family for family in models.values()}
    if cache.has_latents and any(VIDEO in sample.images and visual_of(sample) in matches.latents for sample in samples):
        matches.fps = rate_of_videos(models, cache.claims, cache.fps)


def _items(cache: CacheListing, matches: Matches) -> Iterator[Item]:
    assert cache.read is not None
    for path in filter(is_table, cache.paths):
        try:
            locations = locations_in(cache.folder, path)
        except EncodeFailed as error:
            matches.unreadable.append(str(error))
            continue
        for location in locations:
            try:
                yield Item(location, cache.read(location).values)
            except (EncodeFailed, OSError) as error:
                matches.unreadable.append(f"{location.path}, byte {location.start}: {error}; let diffusion-pipe make it again")


def match_items(items: Sequence[Item], samples: Sequence[Sample], matches: Matches) -> None:
    """Match values to pictures: the path that a value names must end with a reference of the source."""
    pictures = visuals_of(samples)
    latents: dict[str, list[Item]] = {}
    text: dict[str, list[Item]] = {}
    strangers = doubted = 0
    _match_empty_caption([item for item in items if item.is_empty_caption], matches)
    items = [item for item in items if not item.is_empty_caption]
    known = references_of((item.path for item in items), pictures)
    for item in items:
        reference = known.known.get(item.path)
        if item.path in known.doubtful:
            doubted += 1
        elif reference is None:
            strangers += 1
        else:
            (text if parse_name(item.location.path).kind == "text" else latents).setdefault(reference, []).append(item)
    for reference, those in latents.items():
        matches.take_latents(reference, [item.location for item in those])
    for reference, those in text.items():
        stated = list(dict.fromkeys(caption for item in latents.get(reference, ()) for caption in item.captions))
        _match_text(reference, those, stated, pictures[reference], matches)
    if doubted:
        what = f"{plural(doubted, 'value is', 'values are')} of paths that may be of {known.may_be()}"
        matches.doubt_latents((reference for reference in known.open_to() if reference not in latents), f"{what}, so they are not used")
        samples_of = (sample for reference in known.open_to() if reference not in text for sample in pictures[reference])
        matches.doubt_text(map(first_caption, samples_of), what)
    if strangers:
        matches.remarks.append(f"{plural(strangers, 'value is', 'values are')} of pictures that the source does not have")


def _match_empty_caption(items: Sequence[Item], matches: Matches) -> None:
    """Assign the text of the empty caption; of one text, each encoder's part is in a folder beside the others'."""
    texts: dict[PurePosixPath, list[FileLocation]] = {}
    for item in sorted(items, key=lambda item: item.location.path):
        texts.setdefault(PurePosixPath(item.location.path).parent.parent, []).append(item.location)
    for first, *rest in texts.values():
        matches.take_text("", replace(first, more=tuple(rest)))


def _match_text(reference: str, those: Sequence[Item], stated: Sequence[str], samples: Sequence[Sample], matches: Matches) -> None:
    """Assign the parts of a picture's text; `stated` are the captions that its latents name, if any."""
    if len({PurePosixPath(item.location.path).parent for item in those}) != len(those):
        what = f"{those[0].location.path} holds one of {len(those)} texts of {reference!r}, and nothing says which is the right one"
        matches.doubt_text(map(first_caption, samples), what)
        return
    first, *rest = (item.location for item in sorted(those, key=lambda item: item.location.path))
    captions = dict.fromkeys(map(first_caption, samples))
    if stated and len(captions) == 1 and not captions.keys() & set(stated):
        named = " or ".join(repr(caption[:60]) for caption in stated[:3])
        what = f"{first.path} is beside latents that say their caption is {named}, but the picture has another caption now"
        matches.doubt_text(captions, what)
    else:
        matches.take_text_of(samples, replace(first, more=tuple(rest)))


def read_latents(contents: Contents, family: Family, location: FileLocation) -> Latents:
    """Return the latents of one picture or clip. Raises EncodeFailed."""
    others = dict(contents.tensors)
    (raw,) = pop_tensors(others, "latents")
    tensor = without_batch("latents", raw, 4) if family.has_frames else unframed(raw)
    return DIFFUSION_PIPE.stored_latents(family, tensor, others, location.facts)


def read_text(contents: Contents, family: Family, _location: FileLocation) -> Text:
    """Return the text of one caption, from all its encoders. Raises EncodeFailed."""
    tensors = dict(contents.tensors)
    if family.name == "wan":  # rows after the caption are padding, which its denoiser never sees
        raw, length = pop_tensors(tensors, "text_embeddings", "seq_lens")
        return Text({PROMPT: rows(without_batch(PROMPT, raw, 2), 0, int(as_array(length)))}, tensors)
    return taken_apart(family, tensors, "t5_embed", "clip_embed")


FORMAT: Final = Format(
    DIFFUSION_PIPE,
    "torch",
    re.compile(r"(^|/)(metadata\.db|shard_\d+\.bin)\Z"),
    Reading(parse_name, match, read_latents, read_text),
    writing=None,
    has_videos=True,
    why_not_written="it deletes a cache that its own code did not make",
)
