"""ai-toolkit: safetensors files in folders beside the pictures, named by a digest of how they were made. Knows names, keys and shapes.

DIR/_latent_cache/STEM_HASH.safetensors   `latent` `[C, h, w]`, scaled; the metadata has what was digested
DIR/_t_e_cache/STEM_HASH.safetensors      `text_embed`, `pooled_embed`, `attention_mask` with a batch axis, or `text_embed_0` without one;
                                          no metadata, so only the hash tells whether it belongs to the caption
"""

import base64
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Final
from unicodedata import normalize

from cachestore.core.keys import Json
from cachestore.core.raw_tensors import Contents, Latents, Misplaced, Text, refuse
from cachestore.core.samples import Sample
from cachestore.core.spelling import option
from cachestore.encode.pictures.bucket_rules import BucketSettings, fit_box
from cachestore.encode.pictures.buckets import Size
from cachestore.trainers.exported import Block, ExportVariant, Named
from cachestore.trainers.families import Cached, Family, Trainer, as_picture, framed
from cachestore.trainers.format import Format, Reading, Writing
from cachestore.trainers.matching import CacheListing, CaptionSettings, FileLocation, Matches, ParsedName, stem_of, visuals_of
from cachestore.trainers.text import Plain, batched, pop_tensors, taken_apart, together

AI_TOOLKIT: Final = Trainer(
    "ai-toolkit",
    {
        "sd15": Cached(("sd1",)),
        "sdxl": Cached(("sdxl",)),
        "sd3": Cached(("sd3",)),
        "flux": Cached(("flux1", "flux")),
        "wan": Cached(("wan21", "wan21_i2v", "wan22_14b", "wan22_14b_i2v")),
        "qwen-image": Cached(("qwen_image",)),
        "z-image": Cached(("zimage",)),
    },
)
"""How it names and stores each family."""
_LATENTS: Final = "_latent_cache"
_TEXT: Final = "_t_e_cache"
_NAME: Final = re.compile(r"(?P<stem>.+)_(?P<hash>[A-Za-z0-9_-]{22})\.safetensors")
_SPACE: Final = "latent_space_version"
_INFO: Final = ("filename", "scale_to_width", "scale_to_height", "crop_x", "crop_y", "crop_width", "crop_height", _SPACE, "latent_version")
_FLIP: Final = "flip_x"
"""Only mirrored pictures have it in what is digested, and only pictures upside down have `flip_y`."""
_VERSION: Final = 1
_STAND_INS: Final = ("[name]", "[trigger]")
_STEPS: Final[Mapping[str, int]] = {"sd15": 16, "sdxl": 16, "sd3": 32, "flux": 32, "wan": 16, "qwen-image": 32, "z-image": 16}
"""By family: the sides of its buckets are multiples of this."""
_TEXT_SPACES: Final[Mapping[str, tuple[str, ...]]] = {"flux": ("flux", "flux1")}
"""By family: how text names it, if latents name it otherwise."""
_ROWS: Final = "text_embed"
_PLAIN: Final[Mapping[str, Plain]] = {
    "sd15": Plain(_ROWS),
    "wan": Plain(_ROWS, rows=512, zeros=(_ROWS,)),
    "qwen-image": Plain(_ROWS, mask="attention_mask"),
    "z-image": Plain(f"{_ROWS}_0", has_batch=False),  # a list of texts
}
"""By family: how text is cached that is one tensor."""


def parse_name(path: str) -> ParsedName:
    """Return what a file holds, by its folder. No name tells a family."""
    return ParsedName("text" if PurePosixPath(path).parent.name == _TEXT else "latents")


def captions_of(text: str, added: CaptionSettings) -> list[str]:
    """Return the caption that ai-toolkit makes from the text of a caption file, and digests.

    It adds one space after each comma, and keeps the end of the last line. `[trigger]` and `[name]` become the trigger word, which is put
    in front if the caption lacks it.
    """
    trigger = added.trigger or ""
    text = added.default if added.default is not None and not text.strip() else text
    made = ", ".join(text.replace("\r\n", "\n").replace("\r", "\n").split(","))
    for stand_in in _STAND_INS:
        made = made.replace(stand_in, trigger)
    return [f"{trigger} {made}" if trigger.strip() and trigger not in made else made]


def hash_of(info: Mapping[str, Json]) -> str:
    """Return the hash in a file's name, from how the file was made."""
    digest = hashlib.md5(json.dumps(dict(info), sort_keys=True).encode(), usedforsecurity=False).digest()
    return base64.urlsafe_b64encode(digest).decode("ascii").rstrip("=")


def text_info(caption: str, space: str) -> dict[str, Json]:
    """Return what is digested for a caption."""
    return {"caption": caption, "text_embedding_space_version": space, "text_embedding_version": _VERSION}


def match(cache: CacheListing, samples: Sequence[Sample], matches: Matches) -> None:
    """Match files to samples: latents by folder and stem, text also by the digest of the caption."""
    pictures: dict[str, list[tuple[str, list[Sample]]]] = {}
    for reference, sharing in visuals_of(samples).items():
        pictures.setdefault(stem_of(reference), []).append((reference, sharing))
    latents: dict[str, list[FileLocation]] = {}
    for path in cache.paths:
        folder, found = PurePosixPath(path).parent, _NAME.fullmatch(PurePosixPath(path).name)
        those = pictures.get(str(folder.parent / found["stem"]), []) if found is not None else []
        if found is not None and those and folder.name == _TEXT:
            _match_text(path, found["hash"], [sample for _reference, sharing in those for sample in sharing], matches)
        elif len(those) == 1:
            reference = those[0][0]
            latents.setdefault(reference, []).append(FileLocation(path, expected=PurePosixPath(reference).name))
        elif those:
            references = [reference for reference, _sharing in those]
            matches.doubt_latents(references, f"{path} may be of {references[0]} or {references[1]}, so it is not used")
    for reference, locations in latents.items():
        matches.take_latents(reference, locations)


def _match_text(path: str, digest: str, samples: Iterable[Sample], matches: Matches) -> None:
    own = (caption for sample in samples for caption in sample.captions)
    for caption in dict.fromkeys((*own, "")):  # if captions are dropped, each picture has a file of the empty one
        forms = dict.fromkeys((caption, *captions_of(caption, CaptionSettings()), *matches.read_as.get(caption, ())))
        for family in AI_TOOLKIT.families_with_text():
            if any(hash_of(text_info(form, space)) == digest for form in forms for space in _spaces(family)) and matches.accepts(family):
                matches.take_text(caption, FileLocation(path))
                return


def _spaces(family: Family) -> tuple[str, ...]:
    return _TEXT_SPACES.get(family.name, AI_TOOLKIT.cached[family.name].names)


def read_latents(contents: Contents, family: Family, location: FileLocation) -> Latents:
    """Return the latents of one picture. Raises EncodeFailed, also for pixels; Misplaced for latents of another picture or model."""
    others = dict(contents.tensors)
    (raw,) = pop_tensors(others, "latent")
    if raw[0] == "U8":
        raise refuse("it holds pixels, not latents")
    info: dict[str, Json] = {name: str(value) for name, value in contents.values.items() if name not in {"format", "software"}}
    for name, text in info.items():
        with suppress(RecursionError, ValueError):
            info[name] = json.loads(text)
    space = info.get(_SPACE)
    if space is not None and space not in AI_TOOLKIT.cached[family.name].names:
        raise Misplaced(f"it says its latents are of {space!r}, not of {family.name}: pass the right {option('family')}")
    stated, expected = info.get(_INFO[0]), location.expected
    if isinstance(stated, str) and expected is not None and normalize("NFC", stated) != normalize("NFC", expected):
        raise Misplaced(f"it says it is of {stated!r}, but its name says {expected!r}: let ai-toolkit make it again")
    if turned := [name for name in (_FLIP, "flip_y") if info.get(name)]:
        mirrored = f"it says it is of the mirrored picture ({turned[0]}), which a data set does not have"
        raise Misplaced(f"{mirrored}: keep the file of the unmirrored one in the folder")
    facts = dict(location.facts)
    if all(isinstance(info.get(name), int) for name in _INFO[1:7]):
        width, height, left, top, across, down = (int(info[name]) for name in _INFO[1:7])
        facts |= {"resized": [width, height], "crop": [left, top, left + across, top + down]}
    return replace(AI_TOOLKIT.stored_latents(family, framed(family, raw), others, facts), info=info)


def read_text(contents: Contents, family: Family, _location: FileLocation) -> Text:
    """Return the text of one caption. Raises EncodeFailed."""
    tensors, plain = dict(contents.tensors), _PLAIN.get(family.name)
    return taken_apart(family, tensors, _ROWS, "pooled_embed") if plain is None else plain.read(tensors, AI_TOOLKIT)


def latents_path(family: Family, named: Named) -> str:
    """Return the name of a picture's latents file. Raises EncodeFailed if the crop, which the name needs, is unknown."""
    path = PurePosixPath(named.reference)
    return str(path.parent / _LATENTS / f"{path.stem}_{hash_of(_latents_info(family, named))}.safetensors")


def _latents_info(family: Family, named: Named) -> dict[str, Json]:
    """Return what is digested for a picture's latents."""
    info: dict[str, Json] = dict(named.info) if _SPACE in named.info else {}
    if not info:
        if named.resized is None or named.crop is None:
            raise refuse(
                "it is not known how the picture was scaled and cut, and the name depends on it: encode it here, then export again"
            )
        left, top, right, bottom = named.crop
        values = (PurePosixPath(named.reference).name, *named.resized, left, top, right - left, bottom - top)
        info = dict(zip(_INFO, (*values, AI_TOOLKIT.written_as(family), _VERSION), strict=True))
    return info | ({_FLIP: True} if named.is_flipped else {})


def latents_file(family: Family, variants: Sequence[ExportVariant]) -> Contents:
    """Return the contents of a picture's latents file."""
    latents, info = variants[0].latents, _latents_info(family, variants[0].named)
    metadata = {name: json.dumps(value) for name, value in info.items()} | {"format": "pt", "software": "{}"}
    return Contents({"latent": as_picture(family, latents.tensor), **AI_TOOLKIT.own_of(latents.others)}, metadata)


def text_path(family: Family, named: Named) -> str:
    """Return the name of a picture's text file."""
    path = PurePosixPath(named.reference)
    caption = captions_of(named.caption, CaptionSettings())[0] if named.read_as is None else named.read_as
    digest = hash_of(text_info(caption, _spaces(family)[0]))
    return str(path.parent / _TEXT / f"{path.stem}_{digest}.safetensors")


def text_file(family: Family, _named: Named, text: Text) -> Contents:
    """Return the contents of a picture's text file."""
    if (plain := _PLAIN.get(family.name)) is not None:
        return Contents(plain.written(text, AI_TOOLKIT))
    prompt, pooled = together(family, text.tensors)
    return Contents({_ROWS: batched(prompt), "pooled_embed": batched(pooled), **AI_TOOLKIT.own_of(text.others)})


def finds(family: Family, named: Named, settings: BucketSettings) -> bool:
    """Whether ai-toolkit looks for latents under their exported name: only if it would resize and crop the picture in the same way.

    Its own step counts, whatever the data set's step is.
    """
    if named.size is None:
        return False
    _bucket, box = fit_box("ai-toolkit", Size(*named.size), settings._replace(step=_STEPS[family.name]))
    return (named.resized, named.crop) == (box.resized, box.crop)


def settings(blocks: Sequence[Block]) -> list[str]:
    """Return the lines for `datasets` in the YAML of a job: a block for each source, with all its resolutions."""
    lines = ["datasets:"]
    for folder in dict.fromkeys(block.folder for block in blocks):
        those = [block for block in blocks if block.folder == folder]
        resolutions = [block.buckets.resolution for block in those if block.buckets is not None]
        lines += [f"  - folder_path: {json.dumps(folder, ensure_ascii=False)}", '    caption_ext: "txt"']
        lines += [f"    resolution: {resolutions}"] if resolutions else []
        lines += ["    cache_latents_to_disk: true"] * (those[0].family is not None) + ["    cache_text_embeddings: true"] * those[
            0
        ].has_text
        lines += ["    flip_x: true"] * those[0].has_flips
    return lines


def _text_may_be() -> str:
    return (
        f"captions with a trigger word ({option('trigger_word')}), to a default caption ({option('caption', 'TEXT')}), to shuffled or"
        " random words, or to captions with a control image: each of these changes the digest in the name"
    )


FORMAT: Final = Format(
    AI_TOOLKIT,
    "safetensors",
    re.compile(r"(^|/)(_latent_cache|_t_e_cache)/[^/]+\.safetensors\Z"),
    Reading(parse_name, match, read_latents, read_text),
    Writing(
        latents_path,
        latents_file,
        text_path,
        text_file,
        "one folder",
        frozenset({"flips"}),
        text_by="picture and caption",
        finds=finds,
        takes_info=True,
        text_remark="with caption_dropout_rate above 0 ai-toolkit encodes the empty caption itself, once for each picture",
        settings=settings,
    ),
    is_beside=True,
    captions_of=captions_of,
    text_may_be=_text_may_be,
)
