"""The trainer of LTX-2 (ltx-trainer): one file of `torch.save` for each value, named by the path of the picture or video. Opens nothing.

latents/PATH.pt       `latents` `[C, F, h, w]`, normalised; `num_frames`, `height`, `width` (of the latents) and `fps` as plain numbers
conditions/PATH.pt    `video_prompt_embeds` and `audio_prompt_embeds` `[rows, width]`: each token's layers, normalised and projected, before
                      the connectors' transformers; `prompt_attention_mask` `[rows]`. Padding is on the left

Both are in `.precomputed`, beside the list of videos. PATH is relative to the folder of that list, without its extension.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from cachestore.core.raw_tensors import Contents, Latents, Text, as_array, refuse, rows, without_batch
from cachestore.core.samples import Sample
from cachestore.interop.formats.families import LTX, Family
from cachestore.interop.formats.matching import FileLocation, Matches, ParsedName, by_name
from cachestore.interop.formats.text import PROMPT, taken

FILES: Final = re.compile(r"\A(?P<kind>latents|conditions)/(?P<stem>.+)\.pt\Z")
_VIDEO, _AUDIO, _MASK = "video_prompt_embeds", "audio_prompt_embeds", "prompt_attention_mask"
_SIZES: Final = ("num_frames", "height", "width")


def parse_name(path: str) -> ParsedName | None:
    """Return what a file holds, by its folder; None for a file of another folder."""
    if (found := FILES.search(path)) is None:
        return None
    return ParsedName("latents" if found["kind"] == "latents" else "text", stem=found["stem"])


def match(paths: Sequence[str], samples: Sequence[Sample], matches: Matches) -> None:
    """Match files to pictures and videos by the path without an extension."""
    named = by_name(samples, matches, is_flat=False)
    latents: dict[str, list[FileLocation]] = {}
    for path in paths:
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
    (raw,) = taken(others, "latents")
    if len(raw[1]) == 2:
        raise refuse(f"its latents have the shape {list(raw[1])} of an older version of the trainer, which cut them into patches")
    tensor = without_batch("latents", raw, 4)
    stated = [contents.values.get(name) for name in _SIZES]
    if stated != [*tensor[1][1:]]:
        raise refuse(f"its {', '.join(_SIZES)} are {stated}, but its latents have the shape {list(tensor[1])}")
    return replace(family.latents(LTX, tensor, others, location.facts), info=contents.values)


def read_text(contents: Contents, _family: Family, _location: FileLocation) -> Text:
    """Return the text of one caption without its padding. Raises EncodeFailed, also for the two projections of LTX-2.3.

    The connectors put registers in the place of padding, so the dropped rows have no effect.
    """
    tensors = dict(contents.tensors)
    video, raw_mask = taken(tensors, _VIDEO, _MASK)
    video, mask = without_batch(_VIDEO, video, 2), as_array(raw_mask).reshape(-1) != 0
    if (audio := tensors.pop(_AUDIO, None)) is not None and (audio[0], audio[1], bytes(audio[2])) != (video[0], video[1], bytes(video[2])):
        raise refuse(
            f"its {_AUDIO} differ from its {_VIDEO}, as those of LTX-2.3 do; only text of LTX-2, which has one projection for both, can be"
            " imported"
        )
    real = np.flatnonzero(mask)
    if len(mask) != video[1][0] or not len(real) or real[-1] - real[0] + 1 != len(real):
        raise refuse(
            f"its {_MASK} has the shape {list(raw_mask[1])} and {len(real)} ones, which are not one range of its {video[1][0]} rows"
        )
    return Text({PROMPT: rows(video, int(real[0]), int(real[-1]) + 1)}, tensors)
