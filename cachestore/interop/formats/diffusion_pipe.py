"""diffusion-pipe: many values in a shard, whose table lies in an SQLite file; each value is a file of `torch.save`. Read only.

    .../cache_ARxWxHxFRAMES/latents/{metadata.db, shard_N.bin}            latents, scaled, with the picture's path and caption
    .../ar_frames_AR_FRAMES/text_embeddings_I/{metadata.db, shard_N.bin}  what text encoder I made, with the picture's path

Writing is left out: diffusion-pipe throws away a cache whose fingerprint, a digest of its own code's state, is another.
"""

import re
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Final

from cachestore.core.errors import EncodeFailed
from cachestore.core.keys import Json
from cachestore.core.raw_tensors import Contents, Latents, Text, refuse, reshaped, without_batch
from cachestore.core.samples import Sample
from cachestore.interop.formats.families import DIFFUSION_PIPE, Family
from cachestore.interop.formats.matching import Looks, Matches, Place, first_caption, pictures_of, references_of
from cachestore.interop.formats.text import POOLED, PROMPT

_TABLE: Final = "metadata.db"
_SHARD: Final = re.compile(r"shard_(\d+)")
_TEXT_FOLDER: Final = re.compile(r"text_embeddings_\d+")
_PREFIX: Final = f"{DIFFUSION_PIPE}."
_SPEC: Final = "image_spec"
_CAPTION: Final = re.compile(r"caption(\.\d+)?")
_LARGEST: Final = 1 << 30


@dataclass(frozen=True, slots=True)
class Item:
    """One value of a shard, and what it says of itself."""

    place: Place
    is_text: bool
    values: Mapping[str, Json]


def is_ours(path: str) -> bool:
    """Whether a file may be of such a cache."""
    return PurePosixPath(path).name == _TABLE or (path.endswith(".bin") and _SHARD.fullmatch(PurePosixPath(path).stem) is not None)


def looks(path: str) -> Looks | None:
    """What a shard or table holds: its folder tells."""
    folder = PurePosixPath(path).parent.name
    return Looks("text" if _TEXT_FOLDER.fullmatch(folder) is not None else "latents") if is_ours(path) else None


def places_in(root: Path, paths: Sequence[str]) -> Iterator[Place]:
    """Every value of these shards, as their tables tell. Raises EncodeFailed, naming the table that cannot be read."""
    for path in paths:
        if PurePosixPath(path).name == _TABLE:
            folder = PurePosixPath(path).parent
            for shard, start, size in _rows_of(root / path):
                yield Place(str(folder / f"shard_{shard}.bin"), start, size)


def _rows_of(path: Path) -> list[tuple[int, int, int]]:
    """(shard, offset, size) of each value. The table is opened for reading alone, and nothing in it can run."""
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro&immutable=1", uri=True)) as table:
            table.execute("PRAGMA trusted_schema=OFF")
            names = [name for (name,) in table.execute("SELECT name FROM sqlite_master WHERE type='table'")]
            shards = sorted((int(found[1]), name) for name in names if (found := _SHARD.fullmatch(name)) is not None)
            rows = [
                (number, *row)
                for number, name in shards
                for row in table.execute(f"SELECT offset, size FROM {name} ORDER BY rowid")  # noqa: S608 - of letters and digits alone
            ]
    except sqlite3.Error as error:
        raise EncodeFailed(f"{path} is no readable table ({error})") from error
    if not all(isinstance(number, int) and 0 <= number < 1 << 50 for row in rows for number in row) or any(
        row[2] > _LARGEST for row in rows
    ):
        raise EncodeFailed(f"{path} tells of values of impossible places or sizes")
    return rows


def item_of(place: Place, contents: Contents) -> Item:
    """A value that was read, for matching."""
    return Item(place, _TEXT_FOLDER.fullmatch(PurePosixPath(place.path).parent.name) is not None, contents.values)


def match(items: Sequence[Item], samples: Sequence[Sample], matches: Matches) -> None:
    """Find whose values these are: by the picture's path as it was when it was cached, whose end must be a reference of the source."""
    pictures = pictures_of(samples)
    latents: dict[str, list[Item]] = {}
    text: dict[str, list[Item]] = {}
    strangers = doubted = 0
    known = references_of(map(_path_of, items), pictures)
    for item in items:
        reference = known.known.get(_path_of(item))
        if _path_of(item) in known.doubtful:
            doubted += 1
        elif reference is None:
            strangers += 1
        else:
            (text if item.is_text else latents).setdefault(reference, []).append(item)
    for reference, (one, *others) in latents.items():
        matches.take_latents(reference, replace(one.place, rivals=tuple(item.place for item in others)))
    for reference, those in text.items():
        said = list(dict.fromkeys(caption for item in latents.get(reference, ()) for caption in _captions_of(item)))
        _match_text(reference, those, said, pictures[reference], matches)
    if doubted:
        what = f"{doubted} values are of paths that may be of {known.may_be()}"
        matches.doubt_latents((reference for reference in known.open_to() if reference not in latents), f"{what}, so they are nobody's")
        samples_of = (sample for reference in known.open_to() if reference not in text for sample in pictures[reference])
        matches.doubt_text(map(first_caption, samples_of), what)
    if strangers:
        matches.remarks.append(f"{strangers} values are of pictures that the source does not have")


def _match_text(reference: str, those: Sequence[Item], said: Sequence[str], samples: Sequence[Sample], matches: Matches) -> None:
    """Take the parts of a picture's text; `said` are the captions that its latents name, if any."""
    if len({PurePosixPath(item.place.path).parent for item in those}) != len(those):
        what = f"{those[0].place.path} holds one of {len(those)} texts of {reference!r}, and nothing says which counts"
        matches.doubt_text(map(first_caption, samples), what)
        return
    first, *rest = (item.place for item in sorted(those, key=lambda item: item.place.path))
    captions = dict.fromkeys(map(first_caption, samples))
    if said and len(captions) == 1 and not captions.keys() & set(said):
        named = " or ".join(repr(caption[:60]) for caption in said[:3])
        what = f"{first.path} is beside latents that say they are of the caption {named}, and the picture's is another now"
        matches.doubt_text(captions, what)
    else:
        matches.take_text_of(samples, replace(first, more=tuple(rest)))


def _captions_of(item: Item) -> list[str]:
    """The captions that latents say they are of: a list of them in the file, or a single one."""
    own = (value for name, value in item.values.items() if _CAPTION.fullmatch(name))
    return [value for value in own if isinstance(value, str)]


def _path_of(item: Item) -> str:
    """The picture's path as it was when it was cached."""
    return str(item.values.get(f"{_SPEC}.1", ""))


def read_latents(contents: Contents, family: Family, place: Place) -> Latents:
    """Latents of one picture. Raises EncodeFailed."""
    raw = contents.tensors.get("latents")
    if raw is None:
        raise refuse(f"it has no latents, but {', '.join(sorted(contents.tensors)) or 'nothing'}")
    shape = raw[1]
    tensor = reshaped(raw, (shape[0], *shape[2:])) if len(shape) == 4 and shape[1] == 1 else without_batch("latents", raw, 3)
    others = {_PREFIX + name: other for name, other in contents.tensors.items() if name != "latents"}
    state = family.states[DIFFUSION_PIPE]
    return Latents(tensor, is_scaled=state.is_scaled, kind=state.kind, others=others, facts=place.facts)


def read_text(contents: Contents, family: Family, place: Place) -> Text:
    """Text of one caption, of all its encoders. Raises EncodeFailed."""
    del place, family
    tensors = dict(contents.tensors)
    if "t5_embed" not in tensors or "clip_embed" not in tensors:
        raise refuse(f"it has no t5_embed with clip_embed, but {', '.join(sorted(tensors)) or 'nothing'}")
    made = {PROMPT: without_batch(PROMPT, tensors.pop("t5_embed"), 2), POOLED: without_batch(POOLED, tensors.pop("clip_embed"), 1)}
    return Text(made, {_PREFIX + name: raw for name, raw in tensors.items()})
