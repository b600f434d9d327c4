"""Captions to text embeddings, as the model's own pipeline makes them. Knows how to batch and count; what needs torch is in `prompts`.

Constructing an encoder loads nothing, resolving a unit hashes its caption, preparing one loads the tokenizer, encoding the modules.
"""

import threading
from collections.abc import Hashable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from cachestore.encode.families import form_names
from cachestore.encode.setup import TextSetup, padded_length, text_width
from cachestore.encode.unit import Prepared, Read, Resolved, Result
from cachestore.errors import EncodeFailed
from cachestore.keys import Json, Key, Recipe, digest_text, input_key

if TYPE_CHECKING:
    from cachestore.encode.budget import Budget
    from cachestore.encode.prompts import TextModules

CAPTION_IN_META = 512
"""Captions up to this many characters are repeated in the entry's JSON value."""


LAYERS_ARG = "text_encoder_out_layers"
"""Names the layers whose rows FLUX.2 puts side by side."""

WINDOW = 512
"""How many captions wait for their batches at most."""

ALONE = "alone"
"""Marks the group of a caption that shares a batch with no other."""


class TextEncoder:
    """Implements `unit.Encoder` for captions. Requests are `{"caption": TEXT}`."""

    def __init__(self, recipe: Recipe, setup: TextSetup, *, device: str = "auto", batch_size: int | Literal["auto"] = "auto") -> None:
        """Keep the settings; nothing is loaded."""
        self.recipe = recipe
        self.setup = setup
        self.max_tokens = setup.max_tokens
        """The most tokens of a caption that count, special tokens included."""
        self._device = device
        self._batch_size = batch_size
        self._fingerprint = recipe.fingerprint
        self._lock = threading.Lock()
        self._tokenizer: Any = None
        self._modules: TextModules | None = None
        self._budget: Budget | None = None

    def resolve(self, request: Mapping[str, Json], read: Read) -> Resolved:
        """The key of a caption, known without any model. `read` is not called."""
        del read
        caption = str(request["caption"])
        digest = digest_text(caption)
        meta: dict[str, Json] = {"input_digest": digest, "encoder": self.recipe.encoder}
        if len(caption) <= CAPTION_IN_META:
            meta["caption"] = caption
        return Resolved(input_key(self._fingerprint, {"caption": digest}, {}), caption, {"caption": digest}, meta)

    def prepare(self, resolved: Resolved) -> Prepared:
        """Count a caption's tokens, and group it with captions it may share a batch with."""
        caption: str = resolved.item
        with self._lock:
            ids = self._token_ids(caption)
            count = len(ids)
            if self.setup.family.pipeline is None and count > self.max_tokens:
                ids = self._token_ids(caption, truncation=True, max_length=self.max_tokens)
        facts: dict[str, Json] = {"tokens": count, "truncated": count > self.max_tokens}
        if self.setup.family.pipeline is None:
            length = padded_length(len(ids), self.max_tokens)
            return Prepared(tuple(ids), length, facts, cost=length)
        group = self._group(caption, count)
        return Prepared(caption, group, facts, cost=self._length(group))

    def _group(self, caption: str, tokens: int) -> Hashable:
        """Which captions of a pipeline this one may share a batch with."""
        family = self.setup.family
        if caption in family.alone:
            return (ALONE, caption)
        if family.length_step is None:
            return "captions"
        return -(-min(tokens, self.max_tokens) // family.length_step) * family.length_step

    @property
    def window(self) -> int:
        """Captions are small, and share a batch by their lengths."""
        return WINDOW

    def batch_limit(self, group: Hashable) -> int:
        """How many captions go into one batch at most."""
        if isinstance(group, tuple) or (self._modules is not None and self._modules.is_single):
            return 1
        if isinstance(self._batch_size, int):
            return self._batch_size
        from cachestore.encode import modules, prompts

        device = modules.choose_device(self._device)
        if self._budget is None:
            self._budget = prompts.text_budget(device)
        return prompts.text_batch(self._length(group), self._budget, device)

    def _length(self, group: Hashable) -> int:
        """To how many tokens each caption of a group is padded."""
        return group if isinstance(group, int) else self.max_tokens

    def submit(self, batch: Sequence[tuple[Key, Any]]) -> Result:
        """Begin to embed (key, payload) pairs of one group. An empty batch gives nothing.

        The result raises EncodeFailed where a value is not finite.
        """
        if not batch:
            return dict
        if self._modules is None:
            from cachestore.encode import modules, prompts

            self._modules = prompts.TextModules(self.setup, modules.choose_device(self._device))
        with nullcontext() if self._budget is None else self._budget.spending(len(batch)):
            return self._modules.submit(batch, partial(self._took, batch))

    def encode(self, batch: Sequence[tuple[Key, Any]]) -> Mapping[Key, Mapping[str, Any]]:
        """As `submit`, waiting for the result."""
        return self.submit(batch)()

    def _took(self, batch: Sequence[tuple[Key, Any]], seconds: float) -> None:
        if self._budget is not None:
            payload = batch[0][1]
            length = self.max_tokens if isinstance(payload, str) else padded_length(len(payload), self.max_tokens)
            self._budget.took(len(batch) * length, seconds)

    def count_tokens(self, captions: Sequence[str]) -> list[int]:
        """How many tokens each caption has before it is cut, special tokens included. Loads the tokenizer if there are captions."""
        with self._lock:
            return [len(self._token_ids(caption)) for caption in captions]

    def entry_bytes(self, tokens: int) -> int:
        """About how many bytes an entry's tensors take for a caption of so many tokens: for estimates before anything is encoded."""
        family = self.setup.family
        rows = min(tokens, self.max_tokens) if family.pad else self.max_tokens
        widths = {name: text_width(component.config) for name, component in self.setup.components.items()}
        # The sequence comes from the encoder whose tokenizer counts; what is pooled is small, and about as wide as any encoder.
        main = family.tokenizer.replace("tokenizer", "text_encoder")
        layers = len(self.setup.args.get(LAYERS_ARG) or (0,))
        numbers = 0
        for name, form in family.outputs.items():
            parts = [part.rpartition(".")[2] for part in form_names(form) if "." in part] or [main]
            width = sum(widths[part] for part in parts)
            numbers += width * (rows * layers if name.partition(".")[0] == "prompt_embeds" else 1)
        return numbers * (4 if self.setup.dtype == "float32" else 2)

    def close(self) -> None:
        """Give back the modules' memory."""
        with self._lock:
            self._tokenizer = None
        if self._modules is not None:
            self._modules = None
            from cachestore.encode import modules

            modules.free_memory()

    def _token_ids(self, caption: str, **options: Json) -> list[int]:
        """Token ids of one caption. The tokenizer is this object's own: cutting and padding are state of a tokenizer, not of a call."""
        if self._tokenizer is None:
            from cachestore.encode import modules

            self._tokenizer = modules.load_tokenizer(self.setup.components[self.setup.family.tokenizer])
        try:
            return list(self._tokenizer(caption, verbose=False, **options).input_ids)
        except (TypeError, ValueError, UnicodeError) as error:
            message = f"the tokenizer refuses the caption {caption[:60]!r}: {error}"
            raise EncodeFailed(message) from error
