"""Tensors of a weight file that no module takes: which ones a right model may have, and the error for all others. Imports torch.

A tensor that is left out may have been a part of the weights, such as a scale. So each is refused, except for those that are known by name
not to concern what is encoded.
"""

import importlib
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from cachestore.core.errors import BadInput
from cachestore.core.words import first_of, plural
from cachestore.encode.models.folders import QUANTIZATION, Component

_KNOWN: tuple[tuple[str, str, str], ...] = (
    ("", r"(^|\.)position_ids$", "a buffer of counted numbers, which older versions of the libraries saved"),
    ("", r"\binv_freq$", "the same, of rotary positions"),
    ("", r"^spiece_model$", "the tokenizer's vocabulary, in ComfyUI's files"),
    ("", r"(^|\.)lm_head\.", "the head that predicts tokens; a class that uses it has it"),
    ("", r"^cls\.", "the heads with which BERT was trained"),
    ("CLIP|Siglip", r"(^|\.)logit_(scale|bias)$", "of the loss that compares texts and pictures"),
    (
        "CLIPText|SiglipText",
        r"^(vision_model|visual_projection)\.",
        "the encoder of pictures, where a whole CLIP is given for that of texts",
    ),
    ("CLIPText", r"^text_projection(\.weight)?$", "the projection, which a class without one does not use"),
    (
        "CLIPVision|SiglipVision",
        r"^(text_model|text_projection)\.",
        "the encoder of texts, where a whole CLIP is given for that of pictures",
    ),
    ("CLIPVision", r"^visual_projection\.", "the projection, which a class without one does not use"),
    ("T5Encoder", r"^decoder\.", "the decoder, where a whole T5 is given for its encoder"),
)
"""What may be left over: by class (a regular expression), names of tensors (another), and why that does no harm."""
_MAY_BE_MISSING = ("pooler.", "position_ids")
"""Weights that published encoders may lack, as `last_hidden_state` does not need them."""


def check_loaded(component: Component, module: Any, info: Mapping[str, Any]) -> None:
    """Raise BadInput if a module lacks weights, or the files have tensors that it lacks or has in another shape. The message names some.

    `info` is what `from_pretrained` returns with `output_loading_info=True`; it leaves out what the library itself knows to be harmless.
    """
    missing = sorted(key for key in info["missing_keys"] if not any(part in key for part in _MAY_BE_MISSING))
    if missing:
        raise BadInput(
            f"the weights in {component.path} lack {plural(len(missing), 'tensor')}, such as {missing[0]},"
            " which would get random values; download the model again"
        )
    known = [name for of, name, _why in _KNOWN if re.search(of, type(module).__name__)]
    more = [key for key in sorted(info["unexpected_keys"]) if not any(re.search(name, key) for name in known)]
    parts = _parts_left_out(component, module) if more else set[str]()
    more = [key for key in more if key.partition(".")[0] not in parts]
    other = sorted(str(key if isinstance(key, str) else key[0]) for key in info["mismatched_keys"])
    if more or other:
        what = f"with another shape, such as {first_of(other)}" if other else f"that it does not have, such as {first_of(more)}"
        raise BadInput(
            f"{component.path} does not fit the {type(module).__name__} that config.json in {component.folder} describes: it has"
            f" {plural(len(other or more), 'tensor')} {what}; give the weights of this component, or a folder with their own config.json"
        )


def _parts_left_out(component: Component, module: Any) -> set[str]:
    """The parts of the class that config.json names and that the loaded class does not have, such as a head or a decoder."""
    whole: Any = getattr(importlib.import_module("transformers"), str((component.config.get("architectures") or [""])[0]), None)
    if whole is None or isinstance(module, whole) or QUANTIZATION in component.config:
        return set()
    with suppress(Exception):  # a configuration of another class than it says: then nothing is known of its parts
        with importlib.import_module("accelerate").init_empty_weights():
            made = whole(whole.config_class.from_dict(dict(component.config)))
        names = {name for name, _part in made.named_children()} | {name for name, _own in made.named_parameters(recurse=False)}
        return names - {name for name, _part in module.named_children()} - {module.base_model_prefix}
    return set()
