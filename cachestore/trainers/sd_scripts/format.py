"""kohya's sd-scripts: one npz beside each picture for its latents, one for its text. Knows names, keys and shapes; opens nothing.

    STEM_WWWWxHHHH_{sd,sdxl,sd3,flux}.npz    latents; W x H is the picture's own size
    STEM.npz                                  the older name for SD and SDXL, which does not tell the family
    STEM_te_outputs.npz, STEM_sd3_te.npz, STEM_flux_te.npz

Keys of latents end in `_hxw` (in latent pixels); those of SD and SDXL may lack it.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Final
from zlib import crc32

import numpy as np

from cachestore.core.keys import Json
from cachestore.core.raw_tensors import Contents, Latents, Raw, Text, as_array, from_array, is_zero, refuse, without_batch
from cachestore.core.samples import Sample
from cachestore.core.spelling import option
from cachestore.encode.pictures.bucket_rules import RULES, BucketSettings
from cachestore.encode.pictures.buckets import SHORTEST_SIDE, Size, crop_box
from cachestore.trainers.exported import Block, ExportVariant, Named
from cachestore.trainers.families import RAW, Cached, Family, Trainer
from cachestore.trainers.format import Format, Reading, Writing
from cachestore.trainers.matching import CacheListing, CaptionSettings, FileLocation, Matches, ParsedName, by_name, stem_of, visuals_of
from cachestore.trainers.text import POOLED, PROMPT, SECOND, THIRD, clip_apart, clip_together, mask_of, pop_tensors

SD_SCRIPTS: Final = Trainer(
    "sd-scripts",
    {
        "sd15": Cached(("sd",), RAW, has_text=False),
        "sdxl": Cached(("sdxl",), RAW),
        "sd3": Cached(("sd3",), RAW),
        "flux": Cached(("flux",)),
    },
)
"""How it names and stores each family."""
_LATENTS: Final = re.compile(r"(?P<stem>.+)_(?P<width>\d{4,})x(?P<height>\d{4,})_(?P<family>[a-z0-9]+)\.npz")
_TEXT: Final[Mapping[str, str]] = {"sdxl": "_te_outputs.npz", "sd3": "_sd3_te.npz", "flux": "_flux_te.npz"}
_OTHER_TEXT: Final = re.compile(r".+_(?P<family>[a-z0-9]+)_te\.npz")
_KEY: Final = re.compile(r"latents(_\d+x\d+)?")
_WHOLE_NUMBERS: Final = frozenset({"I8", "U8", "I16", "U16", "I32", "U32", "I64", "U64"})
_SIZED: Final = re.compile(r"_\d+x\d+$")
_NOTE: Final = "cachestore_view"
"""Its value: (width, height) of the whole picture when resized like its part, the crop box in that, and a CRC-32 of the latents.

Exports add it to latents of another part than the centre, which sd-scripts never makes. sd-scripts ignores keys that it does not know.
"""
BARE: Final = frozenset({"sd15", "sdxl"})
"""Families whose keys have no size."""
CASTS: Final[Mapping[str, str]] = {"BF16": "F32"}
"""numpy has no bfloat16; float32 holds each of its numbers."""
LATENTS_CASTS: Final[Mapping[str, str]] = {**CASTS, "F16": "F32", "F64": "F32"}


def parse_name(path: str) -> ParsedName | None:
    """Return what a file holds, by the end of its name; None for the older name `STEM.npz`, which any file may have."""
    for name, suffix in _TEXT.items():
        if path.endswith(suffix):
            return ParsedName("text", name, SD_SCRIPTS.family_called(name), path.removesuffix(suffix))
    if (found := _LATENTS.fullmatch(path)) is not None:
        size = {"size": [int(found["width"]), int(found["height"])]}
        return ParsedName("latents", found["family"], SD_SCRIPTS.family_called(found["family"]), found["stem"], size)
    found = _OTHER_TEXT.fullmatch(path)
    return None if found is None else ParsedName("text", found["family"], SD_SCRIPTS.family_called(found["family"]))


def captions_of(text: str, _added: CaptionSettings) -> list[str]:
    """Return the caption that sd-scripts reads from the text of a caption file: its first line."""
    return [text.replace("\r\n", "\n").replace("\r", "\n").partition("\n")[0].strip()]


def match(cache: CacheListing, samples: Sequence[Sample], matches: Matches) -> None:
    """Match files to pictures, by the picture's path without its extension."""
    pictures = by_name(samples, matches, is_flat=False)
    stems = {stem_of(reference): reference for reference in visuals_of(samples)}
    latents: dict[str, list[FileLocation]] = {}
    for path in cache.paths:
        parsed, older = parse_name(path), path.removesuffix(".npz")
        if parsed is None or parsed.family is None or not parsed.stem:
            parsed = ParsedName("latents", stem=older)
        if parsed.stem not in pictures or not matches.accepts(parsed.family):
            continue
        reference, sharing = pictures[parsed.stem]
        if older != parsed.stem and older in stems:
            those = (reference, stems[older])
            matches.doubt_latents(those, f"{path} may be of {' or '.join(those)}, so it is not used")
        elif parsed.kind == "text":
            matches.take_text_of(sharing, FileLocation(path))
        else:
            latents.setdefault(reference, []).append(FileLocation(path, facts=parsed.facts))
    for reference, locations in latents.items():
        older_names = [location for location in locations if not location.facts]  # sd-scripts itself prefers these
        matches.take_only(reference, older_names or locations)


def read_latents(contents: Contents, family: Family, location: FileLocation) -> Latents:
    """Return the latents of one picture, the largest if a file has several sizes. Raises EncodeFailed."""
    keys = [key for key in contents.tensors if _KEY.fullmatch(key)]
    if not keys:
        raise refuse(f"it has no latents, but {', '.join(sorted(contents.tensors)) or 'nothing'}")
    key = max(keys, key=lambda key: (int(np.prod(contents.tensors[key][1])), key))
    suffix, tensor = key.removeprefix("latents"), without_batch(key, contents.tensors[key], 3)
    others = {name.removesuffix(suffix): raw for name, raw in contents.tensors.items() if name not in keys}
    others |= {name: contents.tensors[name] for name in keys if name != key}
    facts = {**location.facts, **_read_note(others.pop(_NOTE, None), tensor)}
    size = others.get("original_size")  # an older file's name does not have it
    if "size" not in facts and size is not None and size[1] == (2,) and size[0] in _WHOLE_NUMBERS:
        sides: list[int] = as_array(size).tolist()
        facts |= {"size": sides} if all(1 <= side < 1 << 31 for side in sides) else {}
    return SD_SCRIPTS.stored_latents(family, tensor, others, facts)


def _note_of(named: Named, latents: Raw) -> dict[str, Raw]:
    """Return the note of which part of the picture the latents show; empty for the centre of the whole picture, or if it is unknown."""
    if named.size is None or named.bucket is None or named.resized is None or named.crop is None:
        return {}
    middle = crop_box(Size(*named.size), Size(*named.bucket))
    if (named.resized, named.crop) == (tuple(middle.resized), middle.crop):
        return {}
    return {_NOTE: from_array(np.array([*named.resized, *named.crop, crc32(latents[2])], np.int64))}


def _read_note(raw: Raw | None, latents: Raw) -> dict[str, Json]:
    """Return `resized` and `crop` as an export noted them; empty if sd-scripts has replaced the latents since."""
    if raw is None or raw[:2] != ("I64", (7,)):
        return {}
    *found, check = as_array(raw).tolist()
    return {"resized": found[:2], "crop": found[2:]} if check == crc32(latents[2]) else {}


def read_text(contents: Contents, family: Family, _location: FileLocation) -> Text:
    """Return the text of one caption. Raises EncodeFailed."""
    tensors = dict(contents.tensors)
    match family.name:
        case "sdxl":
            first, second, pooled = pop_tensors(tensors, "hidden_state1", "hidden_state2", "pool2")
            made = {f"{PROMPT}.text_encoder": _rows(first), f"{PROMPT}.{SECOND}": _rows(second), POOLED: without_batch("pool2", pooled, 1)}
        case "sd3":
            both, pooled, third = pop_tensors(tensors, "lg_out", "lg_pooled", "t5_out")
            made = {f"{PROMPT}.{THIRD}": _rows(third), **clip_apart(PROMPT, _rows(both), family)}
            made |= clip_apart(POOLED, without_batch("lg_pooled", pooled, 1), family)
        case _:
            pooled, rows = pop_tensors(tensors, "l_pooled", "t5_out")
            ids = tensors.pop("txt_ids", None)
            if ids is not None and not is_zero(ids):
                raise refuse("its txt_ids are not zeros")
            made = {PROMPT: _rows(rows), POOLED: without_batch("l_pooled", pooled, 1)}
    return Text(made, tensors)


def _rows(raw: Raw) -> Raw:
    return without_batch("its embedding", raw, 2)


def latents_path(family: Family, named: Named) -> str:
    """Return the name of a picture's latents file. Raises EncodeFailed if the picture's size, which the name needs, is unknown."""
    if named.size is None:
        raise refuse(
            "the size of the original picture is not known, and the file's name needs it: encode the picture here, then export again"
        )
    return f"{stem_of(named.reference)}_{named.size[0]:04d}x{named.size[1]:04d}_{SD_SCRIPTS.written_as(family)}.npz"


def latents_file(family: Family, variants: Sequence[ExportVariant]) -> Contents:
    """Return the contents of a picture's latents file, with all resolutions.

    Raises EncodeFailed if two variants have one bucket but differ.
    """
    size = variants[0].named.size
    assert size is not None
    made: dict[str, Raw] = {}
    for variant in variants:
        for name, raw in _arrays_of(family, variant, size).items():
            if made.setdefault(name, raw) != raw:
                one = option("resolution_only")
                raise refuse(f"two resolutions share the bucket of {name}, but have different values: pass {one} with one of them")
    return Contents(made)


def _arrays_of(family: Family, variant: ExportVariant, size: tuple[int, int]) -> dict[str, Raw]:
    """Return the arrays of one variant. Names for other resolutions, which an imported file had, do not change."""
    height, width = variant.latents.tensor[1][-2:]
    suffix = "" if family.name in BARE else f"_{height}x{width}"
    if variant.named.is_flipped:
        return {f"latents_flipped{suffix}": variant.latents.tensor}
    made = {
        "latents": variant.latents.tensor,
        "original_size": from_array(np.array(size, np.int64)),
        "crop_ltrb": from_array(np.array(_crop(variant.named, variant.named.bucket or (8 * width, 8 * height)), np.float64)),
        **_note_of(variant.named, variant.latents.tensor),
        **({} if variant.mask is None else {"alpha_mask": _alpha(variant.mask, variant.named)}),
        **SD_SCRIPTS.own_of(variant.latents.others),
    }
    return {(name if _SIZED.search(name) else name + suffix): raw for name, raw in made.items()}


def _alpha(mask: Raw, named: Named) -> Raw:
    """Return a mask as sd-scripts stores it: float32 `[H, W]` of the bucket, 0 to 1. Its mean over a latent's pixels is the stored one."""
    array = as_array(mask)[0].astype(np.float32) / np.float32(255)
    factor = 8 if named.bucket is None else named.bucket[0] // array.shape[1]
    return from_array(array.repeat(factor, 0).repeat(factor, 1))


def _crop(named: Named, bucket: tuple[int, int]) -> tuple[float, float, float, float]:
    """Return `crop_ltrb` as sd-scripts notes it, in pixels of the bucket: the box of the whole picture when fitted inside the bucket.

    It notes the same for a random crop. For a mirrored picture, its left is the space to the right of the box. For a part of the picture,
    which sd-scripts never cuts out, we note where the part lies in the whole.
    """
    assert named.size is not None
    width, height = bucket
    if named.is_part and named.crop is not None and named.resized is not None:
        left, top, right, bottom = named.crop
        return left, top, right - (named.resized[0] - width), bottom - (named.resized[1] - height)
    own = named.size[0] / named.size[1]
    across, down = (height * own, height) if width / height > own else (width, width / own)
    left, top = (width - across) // 2, (height - down) // 2
    return left, top, left + across, top + down


def finds(_family: Family, named: Named, settings: BucketSettings) -> bool:
    """Whether sd-scripts would put the picture into the bucket of its latents, with `bucket_no_upscale` if the data set has that.

    Its `min_bucket_reso` and `max_bucket_reso` must allow the data set's buckets.
    """
    if named.size is None or named.bucket is None:
        return True  # without these facts nothing can differ
    return named.bucket == RULES["sd-scripts"].bucket(Size(*named.size), settings)


def text_path(family: Family, named: Named) -> str:
    """Return the name of a picture's text file."""
    return stem_of(named.reference) + _TEXT[family.name]


def text_file(family: Family, named: Named, text: Text) -> Contents:
    """Return the contents of a picture's text file. Masks and flags are those of an imported file, or of an encoder without masks."""
    no = from_array(np.array(False))  # noqa: FBT003 - a value, not a flag
    match family.name:
        case "sdxl":
            names = {"hidden_state1": f"{PROMPT}.text_encoder", "hidden_state2": f"{PROMPT}.{SECOND}", "pool2": POOLED}
            made = {key: text.tensors[name] for key, name in names.items()}
        case "sd3":
            both, third = clip_together(PROMPT, text.tensors), text.tensors[f"{PROMPT}.{THIRD}"]
            ones = from_array(np.ones(both[1][0], np.int64))
            made = {"lg_out": both, "lg_pooled": clip_together(POOLED, text.tensors), "t5_out": third}
            made |= {"clip_l_attn_mask": ones, "clip_g_attn_mask": ones, "t5_attn_mask": mask_of(text, third[1][0], named.tokens)}
            made |= {"apply_lg_attn_mask": no, "apply_t5_attn_mask": no}
        case _:
            rows = text.tensors[PROMPT]
            ids = from_array(np.zeros((rows[1][0], 3), np.float32))
            made = {"l_pooled": text.tensors[POOLED], "t5_out": rows, "txt_ids": ids}
            made |= {"t5_attn_mask": mask_of(text, rows[1][0], named.tokens), "apply_t5_attn_mask": no}
    return Contents({**made, **SD_SCRIPTS.own_of(text.others)})


def settings(blocks: Sequence[Block]) -> list[str]:
    """Return the lines for the file of `--dataset_config`, then the arguments of the command."""
    lines: list[str] = []
    for block in blocks:
        own = block.buckets
        lines += ["[[datasets]]"]
        if own is not None:
            least, most = _limits(own)
            lines += [f"resolution = {own.resolution}", "enable_bucket = true", f"min_bucket_reso = {least}", f"max_bucket_reso = {most}"]
            lines += [f"bucket_reso_steps = {own.step}", f"bucket_no_upscale = {json.dumps(not own.upscales)}"]
        lines += ["  [[datasets.subsets]]", f"  image_dir = {json.dumps(block.folder, ensure_ascii=False)}", '  caption_extension = ".txt"']
        lines += ["  flip_aug = true"] * block.has_flips + ["  alpha_mask = true"] * block.has_masks
    words = ["cache_latents_to_disk"] if any(block.family is not None for block in blocks) else []
    words += ["cache_text_encoder_outputs_to_disk"] if any(block.has_text for block in blocks) else []
    return [*lines, f"# on the command line: {' '.join(f'--{word}' for word in words)}"]


def _limits(own: BucketSettings) -> tuple[int, int]:
    least, most = RULES["sd-scripts"].limits
    if not own.upscales:
        return min(least or own.step, own.resolution), max(most or own.resolution, own.resolution)
    least = min(SHORTEST_SIDE, own.resolution // 2) // own.step * own.step if own.shortest is None else own.shortest
    return max(own.step, least), 2 * own.resolution // own.step * own.step if own.longest is None else own.longest


FORMAT: Final = Format(
    SD_SCRIPTS,
    "npz",
    re.compile(r"\.npz\Z"),
    Reading(parse_name, match, read_latents, read_text),
    Writing(
        latents_path,
        latents_file,
        text_path,
        text_file,
        "one file",
        frozenset({"flips", "masks", "drawn crops", "own crops"}),
        LATENTS_CASTS,
        CASTS,
        one_resolution=BARE,
        finds=finds,
        settings=settings,
    ),
    is_beside=True,
    captions_of=captions_of,
    changes_only_caption_files=True,
    turns_pictures=False,
)
