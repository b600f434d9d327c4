"""How many tokens of a caption a pipeline's text encoder reads, where the pipeline puts it into a template or cleans it first.

Only the pipeline knows what it makes of a caption. So it is called, with a tokenizer that listens and with nothing in the place of its
modules: what it is about to cut is what counts. Imports torch and diffusers; loads a tokenizer and no weights.
"""

from collections.abc import Sequence
from typing import Any, Final, NoReturn

import torch

from cachestore.core.errors import BadInput
from cachestore.encode.family import MAX_LENGTH_ARG
from cachestore.encode.modules import Absent, Foreign, build_pipeline, load_processor, load_tokenizer
from cachestore.encode.prompts import call_arguments, picture_arguments, prompt_arguments
from cachestore.encode.setup import Shown, TextSetup

_CUTTING: Final = frozenset({"padding", "max_length", "truncation", "return_tensors"})
"""What a tokenizer is told to cut and pad by."""


class Rewriter:
    """What a family's pipeline makes of captions before they are cut. One caller at a time: a tokenizer is no state to share."""

    def __init__(self, setup: TextSetup) -> None:
        """Load the tokenizer and build the pipeline around it. Raises BadInput where that cannot be done."""
        family = setup.family
        if family.pipeline is None:
            raise BadInput("a text encoder that stands alone rewrites no caption")
        parts: dict[str, Foreign] = dict.fromkeys(setup.components, Absent())
        parts[family.tokenizer] = _listener(setup)
        pipeline = build_pipeline(family.pipeline, parts, setup.settings)
        self._family = family
        self._encode_prompt = pipeline.encode_prompt
        self._arguments = prompt_arguments(pipeline.encode_prompt, call_arguments(pipeline, setup.args), 1, torch.device("cpu"))
        self._limit = family.tokenizer_limit or int(setup.args.get(MAX_LENGTH_ARG) or setup.max_tokens)
        self.dropped = 0
        """Tokens in front of each caption that are encoded and not kept, as far as captions were counted."""

    def count(self, caption: str | Shown) -> int:
        """How many rows a caption makes if it is not cut, those of its template and pictures included that are kept.

        Raises what a tokenizer raises for a text that it does not take.
        """
        arguments = self._arguments | (picture_arguments(self._family, caption) if isinstance(caption, Shown) else {})
        try:
            self._encode_prompt([caption.caption if isinstance(caption, Shown) else caption], **arguments)
        except _Heard as heard:
            tokens, limit = heard.args
            self.dropped = limit - self._limit
            return tokens - self.dropped
        raise BadInput(f"encode_prompt of {self._family.pipeline} should cut captions, but does not in the installed diffusers")


def _listener(setup: TextSetup) -> Foreign:
    reader, shown = setup.components[setup.family.tokenizer], setup.family.pictures
    if shown is None:
        return _Listener(load_tokenizer(reader))
    processor = load_processor(reader)

    def hear(text: Sequence[str], images: Any = None, **_options: Any) -> NoReturn:
        pictures = () if images is None else images if isinstance(images, list) else (images,)
        raise _Heard(processor.count(text[0], pictures), setup.max_tokens + shown.dropped)

    return hear


class _Heard(Exception):
    """A caption came to the tokenizer. `args` are its number of tokens, and the number to which they were to be cut."""


class _Listener:
    """A tokenizer that is no longer used when it is asked to cut something: that is the caption, in the form in which it is encoded."""

    def __init__(self, tokenizer: Foreign) -> None:
        self._tokenizer = tokenizer

    def __call__(self, text: Any, **options: Any) -> Any:
        return self._hear(self._tokenizer, text, options)

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any:
        """As the tokenizer's own."""
        return self._hear(self._tokenizer.apply_chat_template, conversation, options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    @staticmethod
    def _hear(tokenize: Foreign, text: Any, options: dict[str, Any]) -> Any:
        if not options.get("truncation"):
            return tokenize(text, **options)
        ids = tokenize(text, **{name: value for name, value in options.items() if name not in _CUTTING})["input_ids"]
        raise _Heard(len(ids[0] if ids and isinstance(ids[0], list) else ids), int(options["max_length"]))
