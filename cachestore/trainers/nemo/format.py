"""NeMo Automodel: one file of `torch.save` for each picture or clip, with its latents and its text, and lists of them. Opens nothing.

WxH/DIGEST.pt              of a picture: `latent` `[C, h, w]`, `prompt_embeds`, `pooled_prompt_embeds`, and how the picture was cropped
WxH/DIGEST.meta            of a clip or picture of Wan: `video_latents` `[1, C, F, h, w]` and `text_embeddings` `[1, 226, width]`
metadata.json              names the lists
metadata_shard_NNNN.json   a list: the absolute path, bucket and caption of each file, by which the trainer finds it

Files have any names. The trainer makes batches of one bucket, and pads text of pictures to the longest.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from cachestore.core.keys import Json
from cachestore.core.raw_tensors import Contents, Text, refuse
from cachestore.encode.pictures.bucket_rules import BucketSettings
from cachestore.trainers.exported import Block, ExportVariant, Listed, Named
from cachestore.trainers.families import MEAN, Cached, Family, Trainer, as_picture
from cachestore.trainers.format import Format, Writing
from cachestore.trainers.text import POOLED, PROMPT, Plain, batched

NEMO: Final = Trainer(
    "nemo-automodel",
    {
        "flux": Cached(("flux",)),
        "wan": Cached(("wan",), MEAN),
        "qwen-image": Cached(("qwen_image",)),
        "flux2": Cached(("flux2",), MEAN),
    },
)
"""How it names and stores each family."""
_VIDEO: Final = frozenset({"wan"})
"""Families that it trains as videos."""
_PLAIN: Final[Mapping[str, Plain]] = {"wan": Plain("text_embeddings", rows=226, zeros=("text_embeddings",))}
_SHARD: Final = 10_000


def latents_path(family: Family, named: Named) -> str:
    """Return the name of a file. Raises EncodeFailed if the crop, which the trainer reads, is unknown."""
    if named.size is None or named.bucket is None or named.crop is None:
        raise refuse("it is not known how the picture was scaled and cut, which the trainer reads: encode it here, then export again")
    made = repr((named.reference, named.caption, named.resized, named.crop, named.span)).encode("utf-8", "surrogatepass")
    path = f"{named.bucket[0]}x{named.bucket[1]}/{hashlib.md5(made, usedforsecurity=False).hexdigest()}"
    return f"{path}.meta" if family.name in _VIDEO else f"{path}.pt"


def latents_file(family: Family, variants: Sequence[ExportVariant]) -> Contents:
    """Return the contents of a file, without its text."""
    named, raw = variants[0].named, variants[0].latents.tensor
    assert named.crop is not None
    values = {**_facts(family, named, named.reference), "crop_offset": [*named.crop[:2]]}
    return Contents({"video_latents": batched(raw)} if family.name in _VIDEO else {"latent": as_picture(family, raw)}, values)


def _facts(family: Family, named: Named, source: str) -> dict[str, Json]:
    assert named.size is not None
    assert named.bucket is not None
    width, height = named.bucket
    made = dict[str, Json](original_resolution=[*named.size], bucket_resolution=[width, height], prompt=named.caption)
    made |= {"bucket_id": None, "aspect_ratio": width / height, "model_type": NEMO.written_as(family)}
    if family.name in _VIDEO:
        return {**made, "video_path": source, "num_frames": 1 if named.span is None else named.span.frames}
    return {**made, "image_path": source}


def text_path(_family: Family, _named: Named) -> str:
    """Return nothing: the text lies in the file of the latents."""
    return ""


def text_file(family: Family, _named: Named, text: Text) -> Contents:
    """Return the tensors of a file's text."""
    own = _PLAIN.get(family.name)
    if own is not None:
        return Contents(own.written(text, NEMO))
    return Contents({name: batched(text.tensors[name]) for name in (PROMPT, POOLED) if name in text.tensors})


def stacks(named: Named, _settings: BucketSettings) -> tuple[int, int] | None:
    """Return the bucket, by which the trainer makes batches, whatever the number of frames."""
    return named.bucket


def side_data(rows: Sequence[Listed], _name: str, folder: Path) -> Mapping[str, object]:
    """Return the lists of the written files, by name."""
    items = [{"cache_file": str(folder / row.path), **_facts(row.family, row.named, row.source)} for row in rows]
    shards = {f"metadata_shard_{start // _SHARD:04d}.json": items[start : start + _SHARD] for start in range(0, len(items), _SHARD)}
    model = next((NEMO.written_as(row.family) for row in rows), "")
    known = {"processor": model, "model_type": model, "total_items": len(items), "num_shards": len(shards), "shard_size": _SHARD}
    return {"metadata.json": {**known, "shards": [*shards]}, **shards}


def settings(blocks: Sequence[Block]) -> list[str]:
    """Return the lines for the configuration of the training: all sources and resolutions are in one folder."""
    family = next((block.family for block in blocks if block.family is not None), None)
    is_video = family is not None and family.name in _VIDEO
    build = "build_video_multiresolution_dataloader" if is_video else "build_text_to_image_multiresolution_dataloader"
    lines = [f"    _target_: nemo_automodel.components.datasets.diffusion.{build}"]
    lines += [f"    cache_dir: {json.dumps(blocks[0].folder, ensure_ascii=False)}"]
    lines += ["    model_type: wan"] if is_video else []
    return ["data:", "  dataloader:", *lines]


FORMAT: Final = Format(
    NEMO,
    "torch",
    re.compile(r"\.(pt|meta)\Z"),
    reads=None,
    writing=Writing(
        latents_path,
        latents_file,
        text_path,
        text_file,
        "one folder",
        frozenset({"drawn crops", "own crops", "videos"}),
        stacks=stacks,
        is_joined=True,
        side_data=side_data,
        settings=settings,
    ),
    has_videos=True,
)
