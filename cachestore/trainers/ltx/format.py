"""The trainer of LTX-2 (ltx-trainer): one file of `torch.save` for each value, named by the path of the picture or video. Opens nothing.

latents/PATH.pt       `latents` `[C, F, h, w]`, normalised; `num_frames`, `height`, `width` (of the latents) and `fps` as plain numbers
conditions/PATH.pt    `video_prompt_embeds` and `audio_prompt_embeds` `[rows, width]`: each token's layers, normalised and projected, before
                      the connectors' transformers; `prompt_attention_mask` `[rows]`. Padding is on the left

Both are in `.precomputed`, beside the list of videos. PATH is relative to the folder of that list, without its extension. The trainer pairs
the two by PATH alone.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Final

import numpy as np

from cachestore.core.raw_tensors import Contents, Latents, Raw, Text, as_array, from_array, refuse, rows, without_batch
from cachestore.core.samples import Sample
from cachestore.core.spelling import option
from cachestore.trainers.exported import Block, ExportVariant, Named, check_beginning
from cachestore.trainers.families import MEAN, Cached, Family, Trainer
from cachestore.trainers.format import Format, Reading, Writing
from cachestore.trainers.matching import CacheListing, FileLocation, Matches, ParsedName, by_name, stem_of
from cachestore.trainers.text import PROMPT, pop_tensors

LTX: Final = Trainer("ltx", {"ltx2": Cached(("ltx2",), MEAN)})
"""How it names and stores each family."""
FILES: Final = re.compile(r"\A(?P<kind>latents|conditions)/(?P<stem>.+)\.pt\Z")
_VIDEO, _AUDIO, _MASK = "video_prompt_embeds", "audio_prompt_embeds", "prompt_attention_mask"
_SIZES: Final = ("num_frames", "height", "width")
_ROWS: Final = 1024
"""The rows of each text with its padding. The connectors take no other number of the same text, as they fill the padding with registers."""
_PICTURE_RATE, _UNKNOWN_RATE = 1.0, 24.0
_OLDER: Final = "latent_"
"""The trainer takes a name that begins so for one of its older version, and looks for the text under another name."""


def parse_name(path: str) -> ParsedName | None:
    """Return what a file holds, by its folder; None for a file of another folder."""
    if (found := FILES.search(path)) is None:
        return None
    return ParsedName("latents" if found["kind"] == "latents" else "text", stem=found["stem"])


def match(cache: CacheListing, samples: Sequence[Sample], matches: Matches) -> None:
    """Match files to pictures and videos by the path without an extension."""
    named = by_name(samples, matches, is_flat=False)
    latents: dict[str, list[FileLocation]] = {}
    for path in cache.paths:
        parsed = parse_name(path)
        if parsed is None or parsed.stem not in named:
            continue
        reference, sharing = named[parsed.stem]
        if parsed.kind == "text":
            matches.take_text_of(sharing, FileLocation(path))
        else:
            latents.setdefault(reference, []).append(FileLocation(path))
    for reference, locations in latents.items():
        matches.take_only(reference, locations)


def read_latents(contents: Contents, family: Family, location: FileLocation) -> Latents:
    """Return the latents of one picture or video. Raises EncodeFailed, also if the file's numbers do not fit its tensor."""
    others = dict(contents.tensors)
    (raw,) = pop_tensors(others, "latents")
    if len(raw[1]) == 2:
        raise refuse(f"its latents have the shape {list(raw[1])} of an older version of the trainer, so install a newer one first")
    tensor = without_batch("latents", raw, 4)
    stated = [contents.values.get(name) for name in _SIZES]
    if stated != [*tensor[1][1:]]:
        raise refuse(f"its {', '.join(_SIZES)} are {stated}, but its latents have the shape {list(tensor[1])}")
    return replace(LTX.stored_latents(family, tensor, others, location.facts), info=contents.values)


def read_text(contents: Contents, _family: Family, _location: FileLocation) -> Text:
    """Return the text of one caption without its padding. Raises EncodeFailed, also for the two projections of LTX-2.3.

    The connectors put registers in the place of padding, so the dropped rows have no effect.
    """
    tensors = dict(contents.tensors)
    video, raw_mask = pop_tensors(tensors, _VIDEO, _MASK)
    video, mask = without_batch(_VIDEO, video, 2), as_array(raw_mask).reshape(-1) != 0
    if (audio := tensors.pop(_AUDIO, None)) is not None and (audio[0], audio[1], bytes(audio[2])) != (video[0], video[1], bytes(video[2])):
        raise refuse(
            f"its {_AUDIO} differ from its {_VIDEO}, as those of LTX-2.3 do; only text of LTX-2, which has one projection for both, can be"
            f" imported: pass {option('encode', 'latents')} for the latents alone"
        )
    real = np.flatnonzero(mask)
    if len(mask) != video[1][0] or not len(real) or real[-1] - real[0] + 1 != len(real):
        raise refuse(
            f"its {_MASK} has the shape {list(raw_mask[1])} and {len(real)} ones, which are not one range of its {video[1][0]} rows"
        )
    return Text({PROMPT: rows(video, int(real[0]), int(real[-1]) + 1)}, {**tensors, _MASK: raw_mask})


def latents_path(_family: Family, named: Named) -> str:
    """Return the path of the latents of a picture or video. Raises EncodeFailed for a clip that is not the video's beginning."""
    check_beginning(named, "ltx")
    if PurePosixPath(named.reference).name.startswith(_OLDER):
        raise refuse(f"ltx does not find text of a file whose name begins with {_OLDER}: rename it, and run `cachestore precompute` again")
    return f"latents/{stem_of(named.reference)}.pt"


def latents_file(_family: Family, variants: Sequence[ExportVariant]) -> Contents:
    """Return the contents of the file of latents."""
    named, latents = variants[0].named, variants[0].latents
    tensor = without_batch("latents", latents.tensor, 4)
    sizes = dict(zip(_SIZES, tensor[1][1:], strict=True))
    stated = named.info.get("fps")
    if isinstance(stated, int | float) and 0 < stated < 1e6:
        rate = float(stated)
    else:
        rate = named.fps or (_PICTURE_RATE if named.span is None else _UNKNOWN_RATE)
    return Contents({"latents": tensor, **LTX.own_of(latents.others)}, {**sizes, "fps": rate})


def text_path(_family: Family, named: Named) -> str:
    """Return the path of the text of a picture or video."""
    return f"conditions/{stem_of(named.reference)}.pt"


def text_file(_family: Family, _named: Named, text: Text) -> Contents:
    """Return the contents of the text of a picture or video, padded as its file was that was imported, else on the left.

    Raises EncodeFailed if the text has more rows than the trainer's.
    """
    video = text.tensors[PROMPT]
    audio, count = text.others.get(_AUDIO, video), video[1][0]  # LTX-2.3 has a projection for each
    mask = LTX.own_of(text.others).get(_MASK)
    if mask is None and count > _ROWS:
        takes = f"its text has {count} rows, but ltx takes {_ROWS}"
        raise refuse(f"{takes}: precompute with {option('encode_arg')} max_sequence_length={_ROWS}")
    if mask is None:
        mask = from_array((np.arange(_ROWS) >= _ROWS - count).astype(np.int64))
    made = _padded(video, mask)
    return Contents({_VIDEO: made, _MASK: mask, _AUDIO: made if audio is video else _padded(audio, mask)})


def _padded(raw: Raw, mask: Raw) -> Raw:
    real = as_array(mask).reshape(-1) != 0
    made = np.zeros((len(real), raw[1][1]), as_array(raw).dtype)
    made[real] = as_array(raw)
    return from_array(made, raw[0])


def settings(blocks: Sequence[Block]) -> list[str]:
    """Return the lines for the configuration of the training: all sources and resolutions are in one folder."""
    return ["data:", f"  preprocessed_data_root: {json.dumps(blocks[0].text_folder, ensure_ascii=False)}"]


FORMAT: Final = Format(
    LTX,
    "torch",
    FILES,
    Reading(parse_name, match, read_latents, read_text),
    Writing(
        latents_path,
        latents_file,
        text_path,
        text_file,
        "a folder within",
        frozenset({"drawn crops", "own crops", "videos"}),
        needs_text_and_latents=True,
        mixes_shapes=True,
        takes_info=True,
        settings=settings,
    ),
    has_videos=True,
)
