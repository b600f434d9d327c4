"""Captions to text embeddings, as the model's own pipeline makes them. Knows how to batch and count; what needs torch is in `prompts`.

Constructing an encoder loads nothing, resolving a unit hashes its caption, preparing one loads the tokenizer, encoding the modules.
"""

import threading
from collections.abc import Generator, Hashable, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from cachestore.encode.families import form_names
from cachestore.encode.setup import Padded, TextSetup, padded_length, text_width
from cachestore.encode.unit import Prepared, Read, Resolved, Result
from cachestore.errors import BadInput, EncodeFailed
from cachestore.keys import Json, Key, Recipe, digest_text, input_key

if TYPE_CHECKING:
    from cachestore.encode.budget import Budget
    from cachestore.encode.prompts import TextModules
    from cachestore.encode.tokens import Rewriter

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
        self._rewriter: Rewriter | None = None
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
        if self.setup.family.pipeline is None:
            return self._prepare_ids(caption)
        with self._lock:
            count = self._count(caption)
        group = self._group(caption, count)
        payload = Padded(caption, group) if self.setup.is_bucketed and isinstance(group, int) else caption
        return Prepared(payload, group, self._facts(count), cost=self._length(group))

    def _prepare_ids(self, caption: str) -> Prepared:
        """A caption for a text encoder that stands alone, which is not tokenised again."""
        with self._lock:
            ids = self._token_ids(caption)
            count = len(ids)
            if count > self.max_tokens:
                ids = self._token_ids(caption, truncation=True, max_length=self.max_tokens)
        length = padded_length(len(ids), self.max_tokens)
        return Prepared(tuple(ids), length, self._facts(count), cost=length)

    def _facts(self, tokens: int) -> dict[str, Json]:
        return {"tokens": tokens, "truncated": tokens > self.max_tokens}

    def _group(self, caption: str, tokens: int) -> Hashable:
        """Which captions of a pipeline this one may share a batch with: those of one padded length, where that is not always the same."""
        family = self.setup.family
        if caption in family.alone:
            return (ALONE, caption)
        if self.setup.is_bucketed:
            # One row more than it has, so that an entry without padding tells of a caption that was cut.
            return padded_length(min(tokens + 1, self.max_tokens), self.max_tokens)
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
        """How many tokens each caption of a group costs, padding and what is encoded in front of it included."""
        is_whole = self._modules is not None and self._modules.is_whole
        length = group if isinstance(group, int) and not is_whole else self.max_tokens
        return length + (self._rewriter.dropped if self._rewriter is not None else 0)

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
        if self._budget is None:
            return
        payload, group = batch[0][1], None
        if isinstance(payload, Padded):
            group = payload.length
        elif not isinstance(payload, str):
            group = padded_length(len(payload), self.max_tokens)
        self._budget.took(len(batch) * self._length(group), seconds)

    def count_tokens(self, captions: Sequence[str]) -> list[int]:
        """How many tokens each caption has before it is cut, with special tokens and what a template adds to its rows.

        Loads the tokenizer if there are captions, and where a pipeline rewrites them diffusers.
        """
        with self._lock:
            return [self._count(caption) for caption in captions]

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
            self._tokenizer = self._rewriter = None
        if self._modules is not None:
            self._modules = None
            from cachestore.encode import modules

            modules.free_memory()

    def _count(self, caption: str) -> int:
        """How many rows a caption makes if it is not cut. Raises EncodeFailed where the tokenizer refuses it."""
        if not self.setup.family.rewrites_captions:
            return len(self._token_ids(caption))
        if self._rewriter is None:
            from cachestore.encode import tokens

            self._rewriter = tokens.Rewriter(self.setup)
        with _refusing(caption):
            return self._rewriter.count(caption)

    def _token_ids(self, caption: str, **options: Json) -> list[int]:
        """Token ids of one caption. The tokenizer is this object's own: cutting and padding are state of a tokenizer, not of a call."""
        if self._tokenizer is None:
            from cachestore.encode import modules

            self._tokenizer = modules.load_tokenizer(self.setup.components[self.setup.family.tokenizer])
        with _refusing(caption):
            return list(self._tokenizer(caption, verbose=False, **options).input_ids)


@contextmanager
def _refusing(caption: str) -> Generator[None]:
    """What a tokenizer raises for a text that it does not take, as EncodeFailed."""
    try:
        yield
    except BadInput:
        raise
    except (TypeError, ValueError, UnicodeError) as error:
        message = f"the tokenizer refuses the caption {caption[:60]!r}: {error}"
        raise EncodeFailed(message) from error
