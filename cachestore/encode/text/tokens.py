"""Count the tokens of captions if the pipeline puts them into a template or cleans them first.

Only the pipeline knows how it rewrites a caption. So it is called with stand-ins for its modules and a tokenizer that counts the tokens
of the text that it is asked to cut. Imports torch and diffusers; loads a tokenizer, but no weights.
"""

from collections.abc import Sequence
from typing import Any, Final, NoReturn, cast

import torch

from cachestore.core.errors import BadInput
from cachestore.encode.families.row import MAX_LENGTH_ARG
from cachestore.encode.models.modules import Absent, Foreign, build_pipeline, load_processor, load_tokenizer
from cachestore.encode.models.setup import TextSetup, WithPictures
from cachestore.encode.text.prompts import call_arguments, picture_arguments, prompt_arguments
from cachestore.encode.text.token_memory import TokenMemory, is_plain

_CUTTING: Final = frozenset({"padding", "max_length", "truncation", "return_tensors"})
"""The arguments with which a tokenizer is asked to cut and pad."""


class Rewriter:
    """Counts tokens of captions as a family's pipeline rewrites them. Use it from one thread at a time."""

    def __init__(self, setup: TextSetup, memory: TokenMemory | None = None) -> None:
        """Load the tokenizer and build the pipeline around it. Tokens are put into `memory`, for the one that encodes. Raises BadInput."""
        family = setup.family
        if family.pipeline is None:
            raise BadInput("a text encoder that stands alone rewrites no caption")
        parts: dict[str, Foreign] = dict.fromkeys(setup.components, Absent())
        parts[family.tokenizer] = _listener(setup, memory or TokenMemory())
        pipeline = build_pipeline(family.pipeline, parts, setup.settings, stand_ins=family.stand_ins)
        self._family = family
        self._encode_prompt = pipeline.encode_prompt
        self._arguments = prompt_arguments(pipeline.encode_prompt, call_arguments(pipeline, setup.args), 1, torch.device("cpu"))
        self._limit = family.tokenizer_limit or int(setup.args.get(MAX_LENGTH_ARG) or setup.max_tokens)
        self._template = int(getattr(pipeline, family.template_tokens)) if family.template_tokens else 0
        self.dropped = 0
        """How many tokens in front of each caption are encoded and then dropped; 0 until a caption was counted."""

    def count(self, caption: str | WithPictures) -> int:
        """Return how many rows a caption makes if it is not cut, with those kept of its template. Raises the tokenizer's own error."""
        arguments = self._arguments | (picture_arguments(self._family, caption) if isinstance(caption, WithPictures) else {})
        try:
            self._encode_prompt(prompt=[caption.caption if isinstance(caption, WithPictures) else caption], **arguments)
        except _Heard as heard:
            tokens, limit = heard.args
            self.dropped = self._template if limit is None else limit - self._limit
            return tokens - self.dropped
        raise BadInput(
            f"encode_prompt of {self._family.pipeline} should cut captions, but does not in this diffusers: install diffusers 0.42.1"
        )


def _listener(setup: TextSetup, memory: TokenMemory) -> Foreign:
    reader, shown = setup.components[setup.family.tokenizer], setup.family.pictures
    if shown is None or not reader.name.startswith("processor"):
        return _Listener(load_tokenizer(reader), memory, hears_all=setup.family.template_tokens is not None)
    processor = load_processor(reader)

    def hear(text: Sequence[str], images: Any = None, **_options: Any) -> NoReturn:
        pictures = () if images is None else images if isinstance(images, list) else (images,)
        raise _Heard(processor.count(text[0], pictures), setup.max_tokens + shown.dropped)

    return hear


class _Heard(Exception):
    """Raised when the tokenizer reads a caption. `args` are its number of tokens, and the number to cut to; None if nothing is cut."""


class _Listener:
    """A tokenizer that raises _Heard when it is asked to cut a text: that is the caption, as it would be encoded.

    With `hears_all` it is the first text of which the token ids are wanted as a tensor.
    """

    def __init__(self, tokenizer: Foreign, memory: TokenMemory, *, hears_all: bool) -> None:
        self._tokenizer = tokenizer
        self._memory = memory
        self._hears_all = hears_all

    def __call__(self, text: Any, **options: Any) -> Any:
        return self._hear(self._tokenizer, text, options)

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any:
        return self._hear(self._tokenizer.apply_chat_template, conversation, options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def _hear(self, tokenize: Foreign, text: Any, options: dict[str, Any]) -> Any:
        if not (("return_tensors" in options) if self._hears_all else options.get("truncation")):
            return tokenize(text, **options)
        encoded = tokenize(text, **{name: value for name, value in options.items() if name not in _CUTTING})
        ids = encoded["input_ids"]
        if tokenize is self._tokenizer and isinstance(text, list) and is_plain(cast("list[object]", text), options):
            self._memory.put(text[0], {name: rows[0] for name, rows in encoded.items()})
        raise _Heard(len(ids[0] if ids and isinstance(ids[0], list) else ids), None if self._hears_all else int(options["max_length"]))
