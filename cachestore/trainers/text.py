"""Converts text embeddings between the form of pipelines and one with separate tensors for each text encoder. Pure functions.

SDXL has CLIP-L and bigG; SD3 also has T5. Joined they are `prompt_embeds`. The family gives the widths.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from cachestore.core.errors import EncodeFailed
from cachestore.core.raw_tensors import Raw, Text, as_array, columns, from_array, is_zero, joined, reshaped, rows, widened, without_batch
from cachestore.core.spelling import option
from cachestore.trainers.families import Family, Trainer

CLIP_ROWS: Final = 77

PROMPT: Final = "prompt_embeds"
POOLED: Final = "pooled_prompt_embeds"
FIRST: Final = "text_encoder"
SECOND: Final = "text_encoder_2"
THIRD: Final = "text_encoder_3"


@dataclass(frozen=True, slots=True)
class Plain:
    """How a trainer caches text that is one tensor, `[1, rows, width]`."""

    name: str = PROMPT
    mask: str | None = None
    """The name of its mask, `[1, rows]`: ones, then zeros for rows of padding, which a data set leaves out."""
    rows: int | None = None
    """How many rows each text has; None: as many as it needs."""
    zeros: tuple[str, ...] = ()
    """The tensors that are filled with zeros up to `rows`, which a data set leaves out."""
    ones: str | None = None
    """The name of a mask that leaves out nothing."""
    has_batch: bool = True

    def read(self, tensors: dict[str, Raw], trainer: Trainer) -> Text:
        """Return the text of a file; all that is not its rows stays beside it. Raises EncodeFailed."""
        (raw,) = pop_tensors(tensors, self.name)
        prompt = without_batch(self.name, raw, 2)
        if self.rows is not None and prompt[1][0] != self.rows:
            cut = f"it has {prompt[1][0]} rows, but {trainer.name} makes {self.rows}, and the denoiser needs those of padding too"
            raise EncodeFailed(f"{cut}: encode the text with `cachestore precompute`")
        if self.mask is not None and self.mask in tensors:
            made = unpadded(prompt, tensors[self.mask], self.mask)
            if not is_zero(rows(prompt, made[1][0])):
                raise EncodeFailed(f"its {self.mask} are not ones, followed by zeros for padding")
            return Text({PROMPT: made}, tensors)
        others = {name: without_zeros(without_batch(name, one, 2)) if name in self.zeros else one for name, one in tensors.items()}
        return Text({PROMPT: without_zeros(prompt) if self.name in self.zeros else prompt}, others)

    def written(self, text: Text, trainer: Trainer) -> dict[str, Raw]:
        """Return the tensors of a file, as long as in the one that the text was imported from. Raises EncodeFailed."""
        prompt, others = text.tensors[PROMPT], trainer.own_of(text.others)
        if self.rows is not None and (prompt[1][0] > self.rows or (not self.zeros and prompt[1][0] < self.rows)):
            takes = f"its text has {prompt[1][0]} rows, but {trainer.name} takes {self.rows}"
            raise EncodeFailed(f"{takes}: precompute with {option('encode_arg')} max_sequence_length={self.rows}")
        if (mask := self.mask or self.ones) is not None:
            others.setdefault(mask, from_array(np.ones((1, prompt[1][0]), np.int64)))
        length = others[self.mask][1][-1] if self.mask is not None else self.rows or 0
        filled = padded(prompt, length)
        made = batched(filled) if self.has_batch else filled
        # the text itself, if the trainer has another tensor of the same form, which it does not use
        more = {name: batched(padded(others[name], length)) if name in others else made for name in self.zeros}
        return {**others, **more, self.name: made}


_MASKS: Final = frozenset({"t5_attn_mask", "attention_masks", "attention_mask"})
"""Names that trainers give the mask of T5's rows, `[L]` or `[1, L]`, in an imported text."""


def pop_tensors(tensors: dict[str, Raw], *names: str) -> list[Raw]:
    """Remove these tensors from the dict and return them. Raises EncodeFailed if one is missing."""
    if lacking := [name for name in names if name not in tensors]:
        raise EncodeFailed(f"it has no {lacking[0]}, but {', '.join(sorted(tensors)) or 'nothing'}")
    return [tensors.pop(name) for name in names]


def taken_apart(family: Family, tensors: dict[str, Raw], prompt: str, pooled: str) -> Text:
    """Return the text of a file that has both tensors under these names; all others stay beside it. Raises EncodeFailed."""
    rows, vector = pop_tensors(tensors, prompt, pooled)
    return Text(apart(family, without_batch(PROMPT, rows, 2), without_batch(POOLED, vector, 1)), tensors)


def apart(family: Family, prompt: Raw, pooled: Raw) -> dict[str, Raw]:
    """Split `prompt_embeds` `[rows, width]` and `pooled_prompt_embeds` `[width]` by text encoder. Raises EncodeFailed."""
    widths = family.widths
    match family.name:
        case "sdxl":
            return {**clip_apart(PROMPT, prompt, family), POOLED: pooled}
        case "sd3":
            both = widths[FIRST].rows + widths[SECOND].rows
            _check(PROMPT, prompt, widths[THIRD].rows)
            clip = rows(prompt, 0, CLIP_ROWS)
            if clip[1][0] < CLIP_ROWS or not is_zero(columns(clip, both, widths[THIRD].rows)):
                fault = f"the first {CLIP_ROWS} rows of prompt_embeds are not CLIP's, padded with zeros"
                raise EncodeFailed(f"{fault}: the file may be of another model; check {option('model')} and {option('family')}")
            third = {f"{PROMPT}.{THIRD}": rows(prompt, CLIP_ROWS)}
            return {**clip_apart(PROMPT, columns(clip, 0, both), family), **third, **clip_apart(POOLED, pooled, family)}
        case _:
            return {PROMPT: prompt, POOLED: pooled}


def clip_apart(name: str, both: Raw, family: Family) -> dict[str, Raw]:
    """Split the joined output of CLIP-L and bigG. Raises EncodeFailed for another width."""
    first, second = ((width.pooled if name == POOLED else width.rows) for width in (family.widths[FIRST], family.widths[SECOND]))
    _check(name, both, first + second)
    return {f"{name}.{FIRST}": columns(both, 0, first), f"{name}.{SECOND}": columns(both, first, first + second)}


def clip_together(name: str, tensors: Mapping[str, Raw]) -> Raw:
    """Join the outputs of CLIP-L and bigG: the inverse of `clip_apart`."""
    return joined([tensors[f"{name}.{FIRST}"], tensors[f"{name}.{SECOND}"]], -1)


def together(family: Family, tensors: Mapping[str, Raw]) -> tuple[Raw, Raw]:
    """Return (`prompt_embeds` `[rows, width]`, `pooled_prompt_embeds` `[width]`): the inverse of `apart`, exact if all have one dtype."""
    match family.name:
        case "sdxl":
            return clip_together(PROMPT, tensors), tensors[POOLED]
        case "sd3":
            third = tensors[f"{PROMPT}.{THIRD}"]
            clip = widened(clip_together(PROMPT, tensors), third[1][-1])
            return joined([clip, third], -2), clip_together(POOLED, tensors)
        case _:
            return tensors[PROMPT], tensors[POOLED]


def check_widths(family: Family, tensors: Mapping[str, Raw]) -> None:
    """Raise EncodeFailed if text does not have the widths of the family's encoders. Families without widths are not checked."""
    widths = family.widths
    if not widths:
        return
    for name, raw in tensors.items():
        kind, _, encoder = name.partition(".")
        if kind == POOLED:
            _check(name, raw, widths[encoder or (SECOND if family.name == "sdxl" else FIRST)].pooled)
        else:
            _check(name, raw, widths[encoder or (SECOND if SECOND in widths else FIRST)].rows)


def mask_of(text: Text, length: int, tokens: int | None) -> Raw:
    """Return T5's mask, int64 `[length]`: that of the imported file, else 1 for each counted token, else all 1."""
    for name, raw in text.others.items():
        if name.partition(".")[2] in _MASKS and raw[1][-1:] == (length,) and len(as_array(raw).reshape(-1)) == length:
            return from_array(as_array(raw).reshape(-1).astype(np.int64))
    real = length if tokens is None else min(tokens, length)
    return from_array((np.arange(length) < real).astype(np.int64))


def unpadded(prompt: Raw, mask: Raw, name: str) -> Raw:
    """Return text without the rows that its mask leaves out. Raises EncodeFailed unless these are the last ones."""
    real = as_array(mask).reshape(-1) != 0
    count = int(real.sum())
    if len(real) != prompt[1][0] or real[count:].any():
        raise EncodeFailed(f"its {name} are not ones, followed by zeros for padding")
    return rows(prompt, 0, count)


def padded(prompt: Raw, length: int) -> Raw:
    """Return text with rows of zeros behind it; unchanged if it is longer. The inverse of `unpadded`, if padding was zeros."""
    lacking = max(0, length - prompt[1][0])
    return from_array(np.pad(as_array(prompt), [(0, lacking), (0, 0)]), prompt[0])


def without_zeros(prompt: Raw) -> Raw:
    """Return text without the rows of zeros at its end, as encoders of Wan's kind are called: they leave at least one row."""
    real = np.flatnonzero(as_array(prompt).any(-1))
    return rows(prompt, 0, int(real[-1]) + 1 if len(real) else 1)


def batched(raw: Raw) -> Raw:
    """Return the tensor with a batch axis of 1 in front."""
    return reshaped(raw, (1, *raw[1]))


def _check(name: str, raw: Raw, width: int) -> None:
    if raw[1][-1:] != (width,):
        shape = f"{name} has the shape {list(raw[1])}, but its last axis should be {width}"
        raise EncodeFailed(f"{shape}: check {option('model')} and {option('family')}")
