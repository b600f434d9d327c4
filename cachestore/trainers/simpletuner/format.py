r"""SimpleTuner: files of `torch.save`, with text named by a digest of the caption, and latents by one of the picture's name. Opens nothing.

md5(caption)-FAMILY.pt                    text: a dict with a batch axis on sequences; in older files a tuple
md5(ID:path\0prompt\0caption)-FAMILY.pt   the same of a model that edits pictures: its text depends on the picture
SUB/sha256(stem).pt, SUB/stem.pt          latents, scaled: a tensor `[C, h, w]` or, of a video's first frames, `[C, F, h, w]`; the second
                                          name is the older one

Text and latents are in different folders. Beside the pictures are two JSON files for each data set. Only they have sizes and crops:

aspect_ratio_bucket_metadata_ID.json      by the picture's absolute path: sizes (width, height), and the crop's (top, left)
aspect_ratio_bucket_indices_ID.json       by aspect ratio: the paths of the pictures that are trained on
"""

import hashlib
import json
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Final, cast

import numpy as np

from cachestore.core.errors import BadInput
from cachestore.core.raw_tensors import Contents, Latents, Raw, Text, from_array, is_zero, refuse
from cachestore.core.samples import IMAGE, Sample
from cachestore.core.spelling import option
from cachestore.core.words import first_of, plural
from cachestore.encode.pictures.bucket_rules import BucketSettings
from cachestore.trainers.exported import Block, ExportVariant, Listed, Named, check_beginning
from cachestore.trainers.families import MEAN, Cached, Family, Trainer, as_picture, framed
from cachestore.trainers.format import Format, Reading, Writing
from cachestore.trainers.matching import (
    CacheListing,
    CaptionSettings,
    FileLocation,
    Matches,
    ParsedName,
    SideFacts,
    references_of,
    stem_of,
    visuals_of,
)
from cachestore.trainers.text import POOLED, PROMPT, Plain, batched, mask_of, pop_tensors, taken_apart, together

SIMPLETUNER: Final = Trainer(
    "simpletuner",
    {
        "sd15": Cached(("sd1x",)),
        "sdxl": Cached(("sdxl",)),
        "sd3": Cached(("sd3",)),
        "flux": Cached(("flux",)),
        "wan": Cached(("wan",), MEAN),
        "qwen-image": Cached(("qwen_image",)),
        "z-image": Cached(("z_image",), has_text=False),
        "flux2": Cached(("flux2",), MEAN),
        "flux2-klein-4b": Cached(("flux2",), MEAN),
        "flux2-klein-9b": Cached(("flux2",), MEAN),
    },
)
"""How it names and stores each family."""
_TEXT: Final = re.compile(r"(?P<digest>[0-9a-f]{32})-(?P<family>.+)\.pt")
_LATENTS: Final = re.compile(r"[0-9a-f]{64}\.pt")
_WHOLE: Final = "value"
_BOTH: Final = "vae/"
"""The folder of latents inside a folder that holds text too, such as an export."""
_TIME_IDS: Final = "time_ids"
_MASKS: Final = "attention_masks"
SIDE_FILES: Final = re.compile(r"aspect_ratio_bucket_(?P<kind>metadata|indices)_(?P<id>.*)\.json")
_INDICES: Final = "aspect_ratio_bucket_indices"
_SIZES: Final[Mapping[str, str]] = {"original_size": "size", "intermediary_size": "resized", "target_size": "bucket"}
_DROPPED: Final = "__caption_dropout__"
"""Names text of the empty caption of models that edit pictures."""
_WHOLE_TEXT: Final = Plain(rows=512, ones="attention_mask")
_PLAIN: Final[Mapping[str, Plain]] = {
    "sd15": Plain(),
    "qwen-image": Plain(mask=_MASKS),
    "wan": Plain(rows=512, zeros=(PROMPT, _MASKS)),  # its mask is the text of the empty caption
    **dict.fromkeys(("flux2", "flux2-klein-4b", "flux2-klein-9b"), _WHOLE_TEXT),
}
"""By family: how text is cached that is one tensor."""
_TUPLE: Final = (PROMPT, POOLED, _TIME_IDS, _MASKS)
"""The tensors of older files, by position."""


def parse_name(path: str) -> ParsedName | None:
    """Return what a file holds; None for the older name `STEM.pt`, which any file may have."""
    name = PurePosixPath(path).name
    if (found := _TEXT.fullmatch(name)) is not None:
        return ParsedName("text", found["family"], SIMPLETUNER.family_called(found["family"]), found["digest"])
    return ParsedName("latents") if _LATENTS.fullmatch(name) is not None else None


def captions_of(text: str, _added: CaptionSettings) -> list[str]:
    """Return the captions that SimpleTuner reads from the text of a caption file: its lines, with spaces but without line ends."""
    return [line for line in text.split("\n") if line] if "\n" in text else [text]


def _md5(caption: str) -> str:
    return hashlib.md5(caption.encode("utf-8", "surrogatepass"), usedforsecurity=False).hexdigest()


def latents_name(reference: str) -> str:
    """Return the path of a picture's latents in the VAE cache."""
    path = PurePosixPath(reference)
    return str(path.parent / f"{hashlib.sha256(path.stem.encode('utf-8', 'surrogatepass')).hexdigest()}.pt")


def match(cache: CacheListing, samples: Sequence[Sample], matches: Matches) -> None:
    """Match files to samples, by the digests of captions and of picture names."""
    own = dict.fromkeys(caption for sample in samples for caption in ("", *sample.captions))
    captions = {_md5(form): caption for caption in own for form in matches.read_as.get(caption, ())} | {_md5(one): one for one in own}
    texts = {path: parsed for path in cache.paths if (parsed := parse_name(path)) is not None and parsed.kind == "text"}
    texts = {path: one._replace(family=SIMPLETUNER.family_called(str(one.named), matches.family)) for path, one in texts.items()}
    known = {path: parsed for path, parsed in texts.items() if parsed.family is not None}
    for path, parsed in known.items():
        if parsed.stem in captions and matches.accepts(parsed.family):
            matches.take_text(captions[parsed.stem], FileLocation(path))
    _match_by_picture({path: parsed for path, parsed in known.items() if parsed.stem not in captions}, samples, matches)
    _match_latents([path for path in cache.paths if path not in texts], samples, matches)


def _match_by_picture(texts: Mapping[str, ParsedName], samples: Sequence[Sample], matches: Matches) -> None:
    """Match text of models that edit pictures. It depends on the picture, so one caption of two pictures has two, and neither is used."""
    digests = _digests_by_picture(samples, matches) if texts else {}
    found: dict[str, dict[str, str]] = {}
    for path, parsed in texts.items():
        if parsed.stem in digests and matches.accepts(parsed.family):
            caption, reference = digests[parsed.stem]
            found.setdefault(caption, {})[path] = reference
    for caption, files in found.items():
        if len(set(files.values())) > 1:
            matches.doubt_text([caption], f"{' and '.join([*files][:3])} are text of one caption with several pictures")
            continue
        for path, reference in files.items():
            matches.take_text(caption, FileLocation(path, visual=reference or None))


def _digests_by_picture(samples: Sequence[Sample], matches: Matches) -> dict[str, tuple[str, str]]:
    """Return (caption, reference) by the digest in the name of such text. Older versions left the caption out of it."""
    found = {_md5(_DROPPED): ("", "")}
    for name in matches.ids:
        for reference, sharing in visuals_of(samples).items():
            own, captions = f"{name}:{reference}", list(dict.fromkeys(caption for sample in sharing for caption in sample.captions))
            for caption in captions:
                forms = (*matches.read_as.get(caption, ()), caption)
                found |= {_md5(f"{own}\0prompt\0{form}"): (caption, reference) for form in forms if form}
            if len(captions) == 1:
                found[_md5(own)] = (captions[0], reference)
    return found


def _match_latents(paths: Sequence[str], samples: Sequence[Sample], matches: Matches) -> None:
    pictures: dict[str, set[str]] = {}
    for reference in visuals_of(samples):
        for name in (latents_name(reference), f"{stem_of(reference)}.pt"):
            pictures.setdefault(name, set()).add(reference)
    latents: dict[str, list[FileLocation]] = {}
    for path in paths:
        references = pictures.get(path, set()) | pictures.get(path.removeprefix(_BOTH), set())
        if len(references) == 1:
            latents.setdefault(next(iter(references)), []).append(FileLocation(path))
        elif references:
            matches.doubt_latents(sorted(references), f"{path} may be of {' or '.join(sorted(references)[:3])}, so it is not used")
    for reference, locations in latents.items():
        digest = PurePosixPath(latents_name(reference)).name
        newer = [location for location in locations if PurePosixPath(location.path).name == digest]  # SimpleTuner now looks for these only
        matches.take_only(reference, newer or locations)


def read_side_file(name: str, data: bytes, references: Collection[str], matches: Matches) -> None:
    """Add to `matches` what one of the two JSON files reports about these pictures. Raises BadInput.

    A path must end with a picture's reference; others are ignored. Impossible entries, and paths that may be several pictures, are ignored
    with a remark. The crop of such pictures is then unknown.
    """
    try:
        body: object = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BadInput(
            f"{name} is not JSON ({error}): fix it, or move it away; without it, all crops are assumed to be at the centre"
        ) from error
    found = SIDE_FILES.fullmatch(PurePosixPath(name).name)
    if found is not None and found["kind"] == "indices":
        _read_indices(name, body, references, matches)
        return
    senseless, entries = 0, _as_mapping(body)
    known = references_of(entries, references)
    for path, reference in known.known.items():
        entry = _as_mapping(entries[path])
        if (facts := _facts_of(entry)) is None:
            senseless += 1
        else:
            info = {key: value for key, value in entry.items() if key not in _SIZES and key != "crop_coordinates"}
            matches.side_facts.setdefault(reference, []).append(SideFacts(name, facts, info))
    if known.doubtful:
        what = f"{plural(len(known.doubtful), 'path')} of {name} may be of {known.may_be()}, so nothing is taken from them"
        matches.remarks.append(what)
        matches.doubt_latents((reference for reference in known.open_to() if reference in matches.latents), what)
    if senseless:
        matches.remarks.append(f"{plural(senseless, 'entry')} of {name} with impossible sizes: ignored")


def _read_indices(name: str, body: object, references: Collection[str], matches: Matches) -> None:
    """Add a remark on pictures that the data set left out: they have no latents, and need none."""
    buckets = _as_mapping(_as_mapping(body).get(_INDICES))
    paths = [str(path) for those in buckets.values() if isinstance(those, list) for path in cast("list[object]", those)]
    ends = references_of(paths, references)
    listed = {*ends.known.values(), *ends.open_to()}
    lacking = sorted(set(references) - listed)
    if lacking and len(lacking) < len(references):
        named = first_of(lacking)
        matches.remarks.append(f"{plural(len(lacking), 'picture')} in no bucket of {name}, so left out by SimpleTuner: {named}")


def _as_mapping(value: object) -> Mapping[str, Any]:
    return cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else {}


def _facts_of(entry: Mapping[str, Any]) -> dict[str, Any] | None:
    facts, crop = {fact: entry.get(name) for name, fact in _SIZES.items()}, entry.get("crop_coordinates")
    if not all(_is_pair(size, least=1) for size in facts.values()) or not _is_pair(crop, least=0):
        return None
    (top, left), (width, height) = cast("tuple[list[int], list[int]]", (crop, facts["bucket"]))
    return {**facts, "crop": [left, top, left + width, top + height]}


def _is_pair(value: object, *, least: int) -> bool:
    numbers = cast("list[object]", value) if isinstance(value, list) else []
    return len(numbers) == 2 and all(type(number) is int and least <= number < 1 << 31 for number in numbers)


def read_latents(contents: Contents, family: Family, location: FileLocation) -> Latents:
    """Return the latents of one picture. Raises EncodeFailed."""
    others = dict(contents.tensors)
    (raw,) = pop_tensors(others, _WHOLE if _WHOLE in others and "latents" not in others else "latents")
    return SIMPLETUNER.stored_latents(family, framed(family, raw), others, location.facts)


def read_text(contents: Contents, family: Family, _location: FileLocation) -> Text:
    """Return the text of one caption. Raises EncodeFailed."""
    tensors: dict[str, Raw] = {
        _TUPLE[int(name)] if name.isdecimal() and int(name) < len(_TUPLE) else name: raw for name, raw in contents.tensors.items()
    }
    if family.name in _PLAIN:
        return _PLAIN[family.name].read(tensors, SIMPLETUNER)
    ids = tensors.pop(_TIME_IDS, None)
    text = taken_apart(family, tensors, PROMPT, POOLED)
    if ids is not None and not is_zero(ids):
        raise refuse(f"its {_TIME_IDS} are not zeros")
    return text


def latents_path(_family: Family, named: Named) -> str:
    """Return the name of the latents of a picture or video. Raises EncodeFailed for a clip that is not the video's beginning."""
    check_beginning(named, "SimpleTuner")
    return f"{_BOTH}{latents_name(named.reference)}"


def latents_file(family: Family, variants: Sequence[ExportVariant]) -> Contents:
    """Return the contents of the file of latents."""
    return Contents({_WHOLE: as_picture(family, variants[0].latents.tensor)})


def text_path(family: Family, named: Named) -> str:
    """Return the name of a caption's text file."""
    return f"text/{_md5(named.caption if named.read_as is None else named.read_as)}-{SIMPLETUNER.written_as(family)}.pt"


def text_file(family: Family, named: Named, text: Text) -> Contents:
    """Return the contents of a caption's text file."""
    if family.name in _PLAIN:
        return Contents(_PLAIN[family.name].written(text, SIMPLETUNER))
    masks = SIMPLETUNER.own_of(text.others)
    prompt, pooled = together(family, text.tensors)
    made = {PROMPT: batched(prompt), POOLED: pooled}
    if family.name == "flux":
        length = prompt[1][0]
        made[_TIME_IDS] = from_array(np.zeros((1, length, 3), np.float32))
        made[_MASKS] = masks[_MASKS] if _MASKS in masks else batched(mask_of(text, length, named.tokens))
    return Contents(made)


def stacks(named: Named, _settings: BucketSettings) -> str | None:
    """Return the aspect ratio by which SimpleTuner makes batches, as the exported JSON has it; None if the bucket is unknown."""
    return None if named.bucket is None else str(_ratio(named.bucket))


def _ratio(bucket: tuple[int, int]) -> float:
    return round(bucket[0] / bucket[1], 2)


def side_data(rows: Sequence[Listed], name: str, _folder: Path) -> Mapping[str, object]:
    """Return the two JSON files of sizes and crops by path, for each of SimpleTuner's data sets.

    They list only samples whose own latents were written. For latents of another sample, the crop would be wrong.
    """
    made: dict[str, dict[str, Any]] = {}
    for _path, tree, path, named, _family in rows:
        own = "-".join([name, *tree.split("/")[:-1]])
        known = made.setdefault(f"{tree}aspect_ratio_bucket_metadata_{own}.json", {})
        indices = made.setdefault(f"{tree}aspect_ratio_bucket_indices_{own}.json", {"config": {}, _INDICES: {}})
        if named.size is None or named.bucket is None or named.resized is None or named.crop is None:
            continue
        ratio = _ratio(named.bucket)
        known[path] = {
            "original_size": list(named.size),
            "intermediary_size": list(named.resized),
            "target_size": list(named.bucket),
            "crop_coordinates": [named.crop[1], named.crop[0]],
            "aspect_ratio": ratio,
            **({} if named.span is None else {"num_frames": named.span.frames}),
        }
        indices[_INDICES].setdefault(str(ratio), []).append(path)
    return made


def settings(blocks: Sequence[Block]) -> list[str]:
    """Return the lines of `multidatabackend.json`, behind those for the general configuration."""
    backends: list[dict[str, object]] = []
    for block in blocks:
        own = block.buckets
        backend: dict[str, object] = {"id": block.name, "type": "local", "instance_data_dir": block.data, "caption_strategy": "textfile"}
        backend |= {} if block.role == IMAGE else {"dataset_type": "video", "video": {"num_frames": max(block.frames, default=1)}}
        backend |= {} if own is None else {"resolution": own.resolution, "resolution_type": "pixel_area"}
        backend |= {"crop": True, "crop_style": "center", "crop_aspect": "preserve"}
        backend |= {"cache_dir_vae": f"{block.folder}/vae", "vae_cache_clear_each_epoch": False, "preserve_data_backend_cache": True}
        backends.append(backend)
    if any(block.has_text for block in blocks):
        folder = f"{blocks[0].text_folder}/text"
        backends.append({"id": "text", "dataset_type": "text_embeds", "default": True, "type": "local", "cache_dir": folder})
    steps = sorted({block.buckets.step for block in blocks if block.buckets is not None})
    lines = [f"# in the general configuration: aspect_bucket_alignment = {step}" for step in steps]
    lines += [f"# copy aspect_ratio_bucket_*_{block.name}.json from {block.folder} to {block.data}" for block in blocks]
    return [*lines, *json.dumps(backends, indent=1, ensure_ascii=False).splitlines()]


def _text_may_be() -> str:
    lines = f"{option('caption_lines', 'each')} {option('captions', 'all')}"
    return (
        f"validation prompts, to captions behind an instance prompt, to the lines of a file ({lines}), or to pictures: for models that edit"
        " pictures, text is named by the picture's path, and by ID of a file aspect_ratio_bucket_metadata_ID.json, which must be beside the"
        " pictures or in the folder"
    )


FORMAT: Final = Format(
    SIMPLETUNER,
    "torch",
    re.compile(r"\.pt\Z"),
    Reading(parse_name, match, read_latents, read_text),
    Writing(
        latents_path,
        latents_file,
        text_path,
        text_file,
        "a folder each",
        frozenset({"drawn crops", "own crops", "videos"}),
        text_by="caption",
        has_empty_caption=True,
        stacks=stacks,
        side_data=side_data,
        settings=settings,
    ),
    side_files=SIDE_FILES,
    read_side_file=read_side_file,
    captions_of=captions_of,
    is_one_caption=False,
    has_videos=True,
    text_may_be=_text_may_be,
)
