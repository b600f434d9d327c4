"""Lets a pipeline tokenise each text once, though it asks for the same text twice and padding made from lists takes longest of all.

A pipeline asks its tokenizers for padded tensors, and again for ids that are not cut, to warn about what it cuts. Before that, captions
are tokenised when they are prepared. Here ids are remembered by text, whole and cut, and padded as the tokenizer itself would do it. What
is asked for in another way is left to the tokenizer. Imports torch.
"""

import importlib
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, cast

import numpy as np
import torch

from cachestore.encode.models.modules import Foreign

_MOST: Final = 8_192
"""How many rows are remembered: of twice as many captions as wait for their batches, each whole and cut."""
_MASK, _KINDS = "attention_mask", "token_type_ids"
_KNOWN: Final = frozenset({"input_ids", _MASK, _KINDS})
_PLAIN: Final[Mapping[str, tuple[object, ...]]] = {
    "add_special_tokens": (True,),
    "return_attention_mask": (True, None),
    "return_length": (False, None),
    "return_overflowing_tokens": (False, None),
    "truncation": (True, False, None),
    "padding": (True, "longest", "max_length"),
    "return_tensors": ("pt",),
}
"""Options of a call that is answered from memory, and their values. `max_length` is the other one."""


class TokenRow(NamedTuple):
    """What a tokenizer gives for one text."""

    ids: "np.ndarray[Any, Any]"
    kinds: "np.ndarray[Any, Any] | None"
    """The `token_type_ids`, for a tokenizer that gives them."""
    is_masked: bool
    """Whether the tokenizer gives a mask without being asked."""


class TokenMemory:
    """The token ids of texts, whole or cut to a limit. Safe to use from several threads."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, int | None], TokenRow] = {}
        self._lock = threading.Lock()

    def put(self, text: str, encoded: Mapping[str, Any], limit: int | None = None) -> None:
        """Remember what a tokenizer returned for one text, special tokens included; with a limit if that cut the text."""
        if not _KNOWN.issuperset(encoded):  # more than ids, kinds and a mask
            return
        kinds = None if encoded.get(_KINDS) is None else np.array(encoded[_KINDS], np.int64)
        row = TokenRow(np.array(encoded["input_ids"], np.int64), kinds, _MASK in encoded)
        with self._lock:
            self._rows[text, limit] = row
            while len(self._rows) > _MOST:
                del self._rows[next(iter(self._rows))]

    def get(self, text: str, limit: int | None = None) -> TokenRow | None:
        """Return what is remembered of a text, whole or cut to a limit; None if nothing is."""
        return self._rows.get((text, limit))


def remember(tokenizer: Foreign, memory: TokenMemory) -> None:
    """Let a tokenizer answer from `memory`, and remember there what it tokenises. It keeps the name of its class."""
    kind = type(tokenizer)
    tokenizer.__class__ = type(kind.__name__, (_Remembering, kind), {"__module__": kind.__module__})
    tokenizer.cachestore_memory = memory


def keep_prompts(pipeline: Foreign, tokenizers: Iterable[Foreign]) -> None:
    """Let a pipeline skip the search for textual inversions of several vectors, if its tokenizers have none.

    diffusers tokenises each prompt for it, and collects the added tokens anew for each token: 0.2 ms for a caption and tokenizer.
    """
    added = {token for tokenizer in tokenizers for token in getattr(tokenizer, "added_tokens_encoder", {})}
    if hasattr(pipeline, "maybe_convert_prompt") and not any(f"{token}_1" in added for token in added):
        pipeline.maybe_convert_prompt = lambda prompt, _tokenizer: prompt


class _Remembering:
    """Comes before a tokenizer's own class."""

    cachestore_memory: TokenMemory

    def __call__(self, text: Any = None, *more: Any, **options: Any) -> Any:
        call: Callable[..., Any] = super().__call__  # pyright: ignore[reportAttributeAccessIssue]
        answer = None if more or not is_plain(text, options) else _answer(self, call, text, options)
        return call(text, *more, **options) if answer is None else answer


def is_plain(text: Any, options: Mapping[str, Any]) -> bool:
    """Whether a call asks for nothing but padded tensors of a list of texts, whole or cut to a length."""
    if not isinstance(text, list) or not text or not all(isinstance(one, str) for one in cast("list[object]", text)):
        return False
    if not {"padding", "return_tensors"} <= options.keys() <= _PLAIN.keys() | {"max_length"}:
        return False
    for name in options.keys() & _PLAIN.keys():  # 1 is not True here
        if not any(type(options[name]) is type(value) and options[name] == value for value in _PLAIN[name]):
            return False
    if options["padding"] == "max_length" or options.get("truncation"):
        return isinstance(options.get("max_length"), int)
    return options.get("max_length") is None  # else the tokenizer may warn that it ignores it


def _answer(tokenizer: Any, call: Callable[..., Any], texts: list[str], options: Mapping[str, Any]) -> Any:
    memory: TokenMemory = tokenizer.cachestore_memory
    unknown = [text for text in dict.fromkeys(texts) if memory.get(text) is None]
    if unknown:
        encoded = call(unknown, verbose=False)
        for index, text in enumerate(unknown):
            memory.put(text, {name: rows[index] for name, rows in encoded.items()})
    limit: int | None = options.get("max_length")
    rows: list[TokenRow] = []
    for text in texts:
        row = memory.get(text)
        if row is not None and options.get("truncation") and limit is not None and len(row.ids) > limit:
            if memory.get(text, limit) is None:
                memory.put(text, call(text, truncation=True, max_length=limit), limit)
            row = memory.get(text, limit)
        if row is None:
            return None
        rows.append(row)
    longest = max(len(row.ids) for row in rows)
    length = limit if options["padding"] == "max_length" and limit is not None else longest
    if longest > length or tokenizer.pad_token_id is None:
        return None
    return _padded(tokenizer, rows, length, is_masked=rows[0].is_masked or bool(options.get("return_attention_mask")))


def _padded(tokenizer: Any, rows: Sequence[TokenRow], length: int, *, is_masked: bool) -> Any:
    shape = len(rows), length
    made = {"input_ids": np.full(shape, tokenizer.pad_token_id, np.int64)}
    if rows[0].kinds is not None:
        made[_KINDS] = np.full(shape, tokenizer.pad_token_type_id, np.int64)
    if is_masked:
        made[_MASK] = np.zeros(shape, np.int64)
    for index, row in enumerate(rows):
        used = slice(length - len(row.ids), length) if tokenizer.padding_side == "left" else slice(len(row.ids))
        for name, values in (("input_ids", row.ids), (_KINDS, row.kinds), (_MASK, 1)):
            if name in made and values is not None:
                made[name][index, used] = values
    encoding: Any = importlib.import_module("transformers").BatchEncoding
    return encoding({name: torch.from_numpy(values) for name, values in made.items()})
