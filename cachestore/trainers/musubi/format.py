"""musubi-tuner: one safetensors file for the latents of a picture or clip, and one for text, in one flat folder. Opens nothing.

NAME_WWWWxHHHH_ARCH.safetensors               `latents_{F}x{h}x{w}_{dtype}`, and more `latents_...` of control images
NAME_SSSSS-FFF_WWWWxHHHH_ARCH.safetensors     the same of a clip: its first frame and the number of its frames. The size is the bucket's
NAME_ARCH_te.safetensors                      `{name}_{dtype}`, or `varlen_{name}_{dtype}` if lengths differ
"""

import json
import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Final

import numpy as np

from cachestore.core.keys import Json
from cachestore.core.raw_tensors import Contents, Latents, Raw, Text, from_array, refuse, without_batch
from cachestore.core.samples import IMAGE, VIDEO, Sample
from cachestore.encode.pictures.bucket_rules import RULES, BucketSettings
from cachestore.encode.pictures.buckets import Size
from cachestore.trainers.containers import DTYPE_NAMES, dtype_name
from cachestore.trainers.exported import Block, ExportVariant, Named
from cachestore.trainers.families import MEAN, RAW, RAW_MEAN, Cached, Family, Trainer, unframed
from cachestore.trainers.format import Format, Reading, Writing
from cachestore.trainers.matching import CacheListing, ClipFrames, FileLocation, Matches, ParsedName, by_name, first_caption
from cachestore.trainers.text import POOLED, PROMPT, padded, unpadded

MUSUBI: Final = Trainer(
    "musubi",
    {
        "flux": Cached(("fk", "flux_kontext")),
        "wan": Cached(("wan", "wan"), MEAN),
        "qwen-image": Cached(("qi", "qwen_image")),
        "z-image": Cached(("zi", "z_image"), RAW_MEAN),
        "flux2": Cached(("f2d", "flux_2_dev"), MEAN),
        "flux2-klein-4b": Cached(("f2k4b", "flux_2_klein_4b"), MEAN),
        "flux2-klein-9b": Cached(("f2k9b", "flux_2_klein_9b"), MEAN),
        "hunyuanvideo": Cached(("hv", "hunyuan_video"), RAW),
        "hunyuanvideo15": Cached(("hv15", "hunyuan_video_1_5"), RAW_MEAN, has_text=False),
    },
)
"""How it names and stores each family."""
_DTYPES: Final = "|".join(sorted(DTYPE_NAMES.values(), key=len, reverse=True))
_LATENTS_KEY: Final = re.compile(rf"latents_(?:(?P<frames>\d+)x)?(?P<height>\d+)x(?P<width>\d+)_(?:{_DTYPES})")
_KEY: Final = re.compile(rf"(?P<name>.+)_(?:{_DTYPES})")
_LATENTS: Final = re.compile(r"(?P<stem>.+)_(?P<width>\d{4,})x(?P<height>\d{4,})_(?P<arch>[a-z0-9]+)\.safetensors")
_CLIP: Final = re.compile(r"(?P<video>.+)_(?P<start>\d{5,9})-(?P<frames>\d{3,9})")
_TEXT: Final = re.compile(r"(?P<stem>.+)_(?P<arch>[a-z0-9]+)_te\.safetensors")
_FLUX2: Final = ("flux2", "flux2-klein-4b", "flux2-klein-9b")
_TEXTS: Final[Mapping[str, Mapping[str, str]]] = {
    "flux": {"t5_vec": PROMPT, "clip_l_pooler": POOLED},
    "wan": {"varlen_t5": PROMPT},
    "qwen-image": {"varlen_vl_embed": PROMPT},
    "z-image": {"varlen_llm_embed": PROMPT},
    **{name: {"ctx_vec": PROMPT} for name in _FLUX2},
    "hunyuanvideo": {"llm": PROMPT, "clipL": POOLED},
}
"""By family: the names of its tensors in files, and here."""
_VERSION: Final = "1.0.1"
_SEVERAL_CONTROLS: Final = frozenset({"qwen-image", *_FLUX2})
"""Families whose control images are numbered."""
_NEEDS_CONTROL: Final = frozenset({"flux"})
_MASK, _PADDED_TO = "llm_mask", 256
"""The mask of HunyuanVideo's rows, and how many there are with padding."""
_STEP: Final = 16
"""The sides of its buckets are multiples of this."""


def parse_name(path: str) -> ParsedName | None:
    """Return what a file holds, by the end of its name; None if that does not tell."""
    name = PurePosixPath(path).name
    if (found := _TEXT.fullmatch(name)) is not None:
        return ParsedName("text", found["arch"], MUSUBI.family_called(found["arch"]), found["stem"])
    if (found := _LATENTS.fullmatch(name)) is None:
        return None
    size = {"size": [int(found["width"]), int(found["height"])]}
    return ParsedName("latents", found["arch"], MUSUBI.family_called(found["arch"]), found["stem"], size)


def match(cache: CacheListing, samples: Sequence[Sample], matches: Matches) -> None:
    """Match files to pictures and to clips of videos, by the name without folder and extension."""
    pictures, videos = (by_name((one for one in samples if role in one.images), matches, is_flat=True) for role in (IMAGE, VIDEO))
    latents: dict[str, list[FileLocation]] = {}
    for path in cache.paths:
        parsed = parse_name(path)
        if parsed is None or parsed.family is None:
            continue
        those, span = _of(parsed, pictures, videos)
        if not those or not matches.accepts(parsed.family):
            continue
        if parsed.kind == "text":
            sharing = [sample for _reference, some in those for sample in some]
            matches.take_text_of(sharing, FileLocation(path, expected=first_caption(sharing[0])))
        elif len(those) > 1:
            matches.doubt_latents((one for one, _some in those), f"{path} may be of {those[0][0]} or of {those[1][0]}, so it is not used")
        else:
            latents.setdefault(those[0][0], []).append(FileLocation(path, facts=parsed.facts, span=span))
    for reference, locations in latents.items():
        matches.take_each(reference, locations)


_ByName = Mapping[str, tuple[str, list[Sample]]]


def _of(parsed: ParsedName, pictures: _ByName, videos: _ByName) -> tuple[list[tuple[str, list[Sample]]], ClipFrames | None]:
    clip = _CLIP.fullmatch(parsed.stem) if parsed.kind == "latents" else None
    video = videos.get(clip["video"] if clip else parsed.stem) if clip or parsed.kind == "text" else None
    span = ClipFrames(int(clip["start"]), int(clip["frames"])) if clip and video else None
    return [one for one in (pictures.get(parsed.stem), video) if one is not None], span


def read_latents(contents: Contents, family: Family, location: FileLocation) -> Latents:
    """Return the latents of one picture or clip. Raises EncodeFailed."""
    keys = [key for key in contents.tensors if _LATENTS_KEY.fullmatch(key)]
    if len(keys) != 1:
        raise refuse(f"it has {len(keys)} latents, among {', '.join(sorted(contents.tensors)) or 'nothing'}")
    raw = contents.tensors[keys[0]]
    tensor = without_batch("latents", raw, 4) if family.has_frames else unframed(raw)
    others = {name: other for name, other in contents.tensors.items() if name != keys[0]}
    facts = dict(location.facts) if location.span is None else dict[str, Json]()  # the size in a clip's name is that of its bucket
    return replace(MUSUBI.stored_latents(family, tensor, others, facts), info=contents.values)


def read_text(contents: Contents, family: Family, location: FileLocation) -> Text:
    """Return the text of one caption. Raises EncodeFailed, also if the file names another caption."""
    stated = contents.values.get("caption1")
    if stated is not None and location.expected is not None and stated != "\n".join(location.expected.splitlines()):
        raise refuse(f"it says its caption is {stated[:60]!r}, but the picture's caption is {location.expected[:60]!r} now")
    names = _TEXTS[family.name]
    found = {key: names.get(parts["name"]) for key in contents.tensors if (parts := _KEY.fullmatch(key)) is not None}
    others = {key: raw for key, raw in contents.tensors.items() if found.get(key) is None}
    made = {name: without_batch(key, contents.tensors[key], 1 if name == POOLED else 2) for key, name in found.items() if name is not None}
    if lacking := sorted(set(names.values()) - set(made)):
        raise refuse(f"it has no {', '.join(lacking)}, but {', '.join(sorted(contents.tensors)) or 'nothing'}")
    if _MASK in others:
        made[PROMPT] = unpadded(made[PROMPT], others.pop(_MASK), _MASK)
    return Text(made, others, contents.values)


def latents_path(family: Family, named: Named) -> str:
    """Return the name of a latents file. Raises EncodeFailed if a picture's size, which the name needs, is unknown."""
    width, height = _named_size(named)
    stem = PurePosixPath(named.reference).stem
    if named.span is not None:
        stem = f"{stem}_{named.span.start:05d}-{named.span.frames:03d}"
    return f"{stem}_{width:04d}x{height:04d}_{MUSUBI.written_as(family)}.safetensors"


def latents_file(family: Family, variants: Sequence[ExportVariant]) -> Contents:
    """Return the contents of a latents file. Raises EncodeFailed if the family needs a control image, or takes only one."""
    named, latents = variants[0].named, variants[0].latents
    made = {
        _key(family, "latents_", latents.tensor): latents.tensor,
        **MUSUBI.own_of(latents.others),
        **_controls(family, variants[0].controls),
    }
    if family.name in _NEEDS_CONTROL and not any(name.startswith("latents_control_") for name in made):
        raise refuse(
            f"musubi-tuner's {MUSUBI.written_as(family)} is FLUX.1 Kontext, which is also trained on latents of control images,"
            " but this sample has none: precompute the source with a column `control`"
        )
    width, height = _named_size(named)
    metadata = {"architecture": MUSUBI.cached[family.name].names[1], "width": f"{width}", "height": f"{height}", "format_version": _VERSION}
    metadata |= {} if named.span is None else {"frame_count": f"{named.span.frames}"}
    return Contents(made, metadata)


def _named_size(named: Named) -> tuple[int, int]:
    """Return the size in a file's name: the picture's own, or the bucket of a clip, as its frames are resized first."""
    size = named.size if named.span is None else named.bucket
    if size is None:
        raise refuse(
            "the size of the original picture is not known, and the file's name needs it: encode the picture here, then export again"
        )
    return size


def _key(family: Family, prefix: str, raw: Raw) -> str:
    frames, (height, width) = raw[1][1] if len(raw[1]) == 4 else 1, raw[1][-2:]
    return f"{prefix}{'' if family.name in _FLUX2 else f'{frames}x'}{height}x{width}_{dtype_name(raw[0])}"


def _controls(family: Family, controls: Sequence[Raw]) -> dict[str, Raw]:
    """Return the latents of control images by key, numbered if the trainer takes several. Raises EncodeFailed for more than it takes."""
    if len(controls) > 1 and family.name not in _SEVERAL_CONTROLS:
        takes = f"musubi-tuner takes one for {family.name}: keep one, and run `cachestore precompute` again"
        raise refuse(f"it has {len(controls)} control images, but {takes}")
    is_numbered = family.name in _SEVERAL_CONTROLS
    return {
        _key(family, f"latents_control_{number}_" if is_numbered else "latents_control_", raw): raw for number, raw in enumerate(controls)
    }


def text_path(family: Family, named: Named) -> str:
    """Return the name of a picture's text file."""
    return f"{PurePosixPath(named.reference).stem}_{MUSUBI.written_as(family)}_te.safetensors"


def text_file(family: Family, named: Named, text: Text) -> Contents:
    """Return the contents of a picture's text file."""
    made = {f"{key}_{dtype_name(text.tensors[name][0])}": text.tensors[name] for key, name in _TEXTS[family.name].items()}
    if family.name == "hunyuanvideo":
        key, count = f"llm_{dtype_name(text.tensors[PROMPT][0])}", text.tensors[PROMPT][1][0]
        made |= {key: padded(made[key], _PADDED_TO), _MASK: from_array((np.arange(_PADDED_TO) < count).astype(np.int64))}
    metadata = {"architecture": MUSUBI.cached[family.name].names[1], "caption1": named.caption, "format_version": _VERSION}
    return Contents({**made, **MUSUBI.own_of(text.others)}, metadata)


def stacks(named: Named, settings: BucketSettings) -> Hashable:
    """Return musubi-tuner's own bucket, by which it makes batches, with a clip's frames."""
    bucket = RULES["musubi"].bucket(Size(*_named_size(named)), settings._replace(step=_STEP))
    return bucket if named.span is None else (*bucket, named.span.frames)


def settings(blocks: Sequence[Block]) -> list[str]:
    """Return the lines for the data set's TOML."""
    lines = ["[general]", 'caption_extension = ".txt"', "enable_bucket = true"]
    for block in blocks:
        own, kind = block.buckets, "video" if block.role == VIDEO else "image"
        lines += ["", "[[datasets]]", f"{kind}_directory = {json.dumps(block.data, ensure_ascii=False)}"]
        lines += [f"cache_directory = {json.dumps(block.folder, ensure_ascii=False)}"]
        if own is not None:
            lines += [f"resolution = [{own.resolution}, {own.resolution}]", f"bucket_no_upscale = {json.dumps(not own.upscales)}"]
        lines += [f"target_frames = {list(block.frames)}"] if block.frames else []
    return lines


FORMAT: Final = Format(
    MUSUBI,
    "safetensors",
    re.compile(r"\.safetensors\Z"),
    Reading(parse_name, match, read_latents, read_text),
    Writing(
        latents_path,
        latents_file,
        text_path,
        text_file,
        "a folder each",
        frozenset({"drawn crops", "controls", "videos"}),
        stacks=stacks,
        settings=settings,
    ),
    has_videos=True,
)
