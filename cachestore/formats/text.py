"""Text embeddings between the form that pipelines take and the one in which each text encoder's are kept apart. Pure functions.

SDXL keeps CLIP-L and bigG, SD3 also T5; joined they are `prompt_embeds`. The widths are those of the released encoders, which all caches
of other trainers are of.
"""

from collections.abc import Mapping
from typing import Final

import numpy as np

from cachestore.formats.families import Family
from cachestore.formats.value import Raw, Text, as_array, columns, from_array, is_zero, joined, refuse, reshaped, rows, widened

CLIP_L: Final = 768
BIG_G: Final = 1280
T5: Final = 4096
CLIP_ROWS: Final = 77

PROMPT: Final = "prompt_embeds"
POOLED: Final = "pooled_prompt_embeds"
FIRST: Final = "text_encoder"
SECOND: Final = "text_encoder_2"
THIRD: Final = "text_encoder_3"

_MASKS: Final = ("sd-scripts.t5_attn_mask", "simpletuner.attention_masks", "ai-toolkit.attention_mask")
"""Under which names the mask of T5's rows may stand beside an imported text, `[L]` or `[1, L]`."""


def apart(family: Family, prompt: Raw, pooled: Raw) -> dict[str, Raw]:
    """`prompt_embeds` `[rows, width]` and `pooled_prompt_embeds` `[width]` as each encoder's own. Raises EncodeFailed for other widths."""
    match family.name:
        case "sdxl":
            _check(PROMPT, prompt, CLIP_L + BIG_G)
            _check(POOLED, pooled, BIG_G)
            return {**_two(PROMPT, prompt), POOLED: pooled}
        case "sd3":
            _check(PROMPT, prompt, T5)
            _check(POOLED, pooled, CLIP_L + BIG_G)
            clip = rows(prompt, 0, CLIP_ROWS)
            if clip[1][0] < CLIP_ROWS or not is_zero(columns(clip, CLIP_L + BIG_G, T5)):
                what = f"prompt_embeds do not begin with {CLIP_ROWS} rows of CLIP that are filled up with zeros"
                raise refuse(what)
            third = {f"{PROMPT}.{THIRD}": rows(prompt, CLIP_ROWS)}
            return {**_two(PROMPT, columns(clip, 0, CLIP_L + BIG_G)), **third, **_two(POOLED, pooled)}
        case _:
            _check(PROMPT, prompt, T5)
            _check(POOLED, pooled, CLIP_L)
            return {PROMPT: prompt, POOLED: pooled}


def clip_apart(name: str, both: Raw) -> dict[str, Raw]:
    """What CLIP-L and bigG made, one beside the other, as each one's own. Raises EncodeFailed for another width."""
    _check(name, both, CLIP_L + BIG_G)
    return _two(name, both)


def clip_together(name: str, tensors: Mapping[str, Raw]) -> Raw:
    """The inverse."""
    return joined([tensors[f"{name}.{FIRST}"], tensors[f"{name}.{SECOND}"]], -1)


def together(family: Family, tensors: Mapping[str, Raw]) -> tuple[Raw, Raw]:
    """(`prompt_embeds` `[rows, width]`, `pooled_prompt_embeds` `[width]`): the inverse of `apart`, bit for bit where all have one dtype."""
    match family.name:
        case "sdxl":
            return clip_together(PROMPT, tensors), tensors[POOLED]
        case "sd3":
            third = tensors[f"{PROMPT}.{THIRD}"]
            clip = widened(clip_together(PROMPT, tensors), third[1][-1])
            return joined([clip, third], -2), clip_together(POOLED, tensors)
        case _:
            return tensors[PROMPT], tensors[POOLED]


def mask_of(text: Text, length: int, tokens: int | None) -> Raw:
    """int64 `[length]`, 1 where T5 read a token: as the imported file has it, else by the number of tokens; all 1 where nobody knows."""
    for name in _MASKS:
        raw = text.others.get(name)
        if raw is not None and raw[1][-1:] == (length,) and len(as_array(raw).reshape(-1)) == length:
            return from_array(as_array(raw).reshape(-1).astype(np.int64))
    real = length if tokens is None else min(tokens, length)
    return from_array((np.arange(length) < real).astype(np.int64))


def batched(raw: Raw) -> Raw:
    """With a batch axis of 1 in front."""
    return reshaped(raw, (1, *raw[1]))


def _two(name: str, both: Raw) -> dict[str, Raw]:
    return {f"{name}.{FIRST}": columns(both, 0, CLIP_L), f"{name}.{SECOND}": columns(both, CLIP_L, CLIP_L + BIG_G)}


def _check(name: str, raw: Raw, width: int) -> None:
    if raw[1][-1:] != (width,):
        what = f"{name} is {list(raw[1])}, where its last axis should be {width}"
        raise refuse(what)
