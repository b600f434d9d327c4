"""The encoder of captions. It counts tokens and forms batches; `prompts` calls the models and imports torch."""

import threading
from collections.abc import Generator, Hashable, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from cachestore.core.errors import BadInput, EncodeFailed
from cachestore.core.inputs import CAPTIONS, OWN_CAPTION, digests_of, references_of
from cachestore.core.keys import Json, Key, Recipe, input_key
from cachestore.core.samples import CAPTION
from cachestore.encode.batching.unit import Prepared, Read, Resolved, Result
from cachestore.encode.families.lookup import form_names
from cachestore.encode.families.row import PAST_LIMIT
from cachestore.encode.models.setup import Caption, OwnCaptions, Padded, TextSetup, WithPictures, caption_at, padded_length, text_width
from cachestore.encode.pictures import images
from cachestore.encode.pictures.shots import read_shown

if TYPE_CHECKING:
    from cachestore.encode.batching.budget import Budget
    from cachestore.encode.text.prompts import TextModules
    from cachestore.encode.text.token_memory import TokenMemory
    from cachestore.encode.text.tokens import Rewriter

CAPTION_IN_META = 512
"""Captions up to this many characters are also stored in the entry's JSON value."""
LAYERS_ARG = "text_encoder_out_layers"
"""The argument with the layers whose rows FLUX.2 concatenates."""
WINDOW = 2_048
"""How many captions may wait for their batches."""
PICTURE_WINDOW = 16
"""The same for captions with decoded pictures, of 3 MB per megapixel."""
PATCH, MERGED = 14, 2
"""The side of a patch in pixels, and the side of a token's area in patches, if a processor's settings do not say them."""
ALONE = "alone"
"""Marks the group of captions that are encoded in a batch of their own."""


class TextEncoder:
    """Implements `unit.Encoder` for captions.

    A request is `{"caption": TEXT}`, with `"images": {ROLE: [REF, ...]}` if the text encoder of the family sees pictures, and with
    `"captions": {ENCODER: TEXT}` if some of its text encoders read other captions.
    """

    def __init__(self, recipe: Recipe, setup: TextSetup, *, device: str = "auto", batch_size: int | Literal["auto"] = "auto") -> None:
        self.recipe = recipe
        self.setup = setup
        self.max_tokens = setup.max_tokens
        """Captions are cut to this many tokens, special tokens included."""
        self.found_bytes: int | None = None
        """The bytes of each entry, known once a pipeline without a row is loaded; None before that, and if there is a row."""
        self._device = device
        self._batch_size = batch_size
        self._fingerprint = recipe.fingerprint
        self._lock = threading.Lock()
        self._tokenizers: dict[str, Any] = {}
        self._rewriter: Rewriter | None = None
        self._memories: dict[str, TokenMemory] = {}
        """The tokens of captions, by the tokenizer's name, for the pipeline."""
        self._modules: TextModules | None = None
        self._budget: Budget | None = None

    def resolve(self, request: Mapping[str, Json], read: Read) -> Resolved:
        """Find the key of a caption, without a model. Raises EncodeFailed if it has too few or too many pictures for the family."""
        first, *others = self._captions_of(request)
        encoders = self.setup.family.encoders[1:] if others else ()
        own = {name: text for name, text in zip(encoders, others, strict=False) if text != first}
        references = references_of(request)
        self._check_pictures(len(references))
        shown = tuple(read_shown(reference, read, request.get("fps")) for reference in references)
        inputs = digests_of({**request, CAPTION: first, CAPTIONS: own}, [one.digest for one in shown])
        meta: dict[str, Json] = {"input_digest": inputs if own or references else inputs[CAPTION], "encoder": self.recipe.encoder}
        texts = {CAPTION: first, **{f"{OWN_CAPTION}{name}": text for name, text in own.items()}}
        meta |= {name: text for name, text in texts.items() if len(text) <= CAPTION_IN_META}
        caption: Caption = OwnCaptions((first, *others)) if own else first
        transform = shown[0].transform() if shown else {}
        return Resolved(input_key(self._fingerprint, inputs, transform), (caption, shown), inputs, meta)

    def _captions_of(self, request: Mapping[str, Json]) -> list[str]:
        """The caption that each text encoder reads, in order; one if all of them always read the same."""
        if not self.captioned:
            return [str(request[CAPTION])]
        own: Mapping[str, str] = request.get(CAPTIONS, {})
        return [own.get(name, str(request[CAPTION])) for name in self.setup.family.encoders]

    @property
    def captioned(self) -> tuple[str, ...]:
        """As `TextFamily.captioned`."""
        return self.setup.family.captioned

    @property
    def _counting(self) -> int:
        return self._index_of(self.setup.family.tokenizer)

    def _index_of(self, tokenizer: str) -> int:
        encoder, encoders = tokenizer.replace("tokenizer", "text_encoder"), self.setup.family.encoders
        return encoders.index(encoder) if encoder in encoders else 0

    def counted_caption(self, request: Mapping[str, Json]) -> str:
        """Return the caption of a request of which the tokens are counted."""
        captions = self._captions_of(request)
        return captions[self._counting if len(captions) > 1 else 0]

    def _check_pictures(self, count: int) -> None:
        shown = self.setup.family.pictures
        if shown is None or (count >= 1 and (shown.most is None or count <= shown.most)):
            return
        wanted = "at least one" if shown.most is None else "exactly one" if shown.most == 1 else f"one to {shown.most}"
        raise EncodeFailed(
            f"{self.setup.family.pipeline} shows its text encoder {wanted} {shown.role} image beside a caption, but this sample"
            f" has {count}; put them into the column {shown.role} of the manifest"
        )

    def prepare(self, resolved: Resolved) -> Prepared:
        """Count a caption's tokens and choose its group. Raises EncodeFailed if the tokenizer refuses it."""
        family = self.setup.family
        caption, pictures = resolved.item
        if family.pipeline is None:
            with self._lock:
                ids = self._token_ids(family.tokenizer, caption)
                count = len(ids)
                if count > self.max_tokens:
                    ids = self._token_ids(family.tokenizer, caption, self.max_tokens)
            payload, group = tuple(ids), padded_length(len(ids), self.max_tokens)
            cost = group
        elif (shown := family.pictures) is not None:
            decoded = (picture.picture() for picture in pictures)
            fitted = (images.fit_area(picture, shown.area, shown.step) if shown.area else picture for picture in decoded)
            payload, group = WithPictures(caption, tuple(fitted)), (ALONE,)
            with self._lock:
                count = cost = self._count(payload)
        else:
            counted = caption_at(caption, self._counting)
            with self._lock:
                count = self._count(counted)
                if not family.rewrites_captions:
                    self._tokenise(caption)
            group = self._group(counted, count)
            payload = Padded(caption, group) if self.setup.is_bucketed and isinstance(group, int) else caption
            cost = self._length(group)
        return Prepared(payload, group, {"tokens": count, "truncated": count > self.max_tokens}, cost)

    def _group(self, caption: str, tokens: int) -> Hashable:
        """Return the group of captions that may share a batch: those of one padded length, or all if it is always the same."""
        family = self.setup.family
        if caption in family.alone:
            return (ALONE, caption)
        if family.template_tokens is not None and tokens > self.max_tokens:
            return (ALONE,)  # Kandinsky cuts the others of its batch too, and Ideogram refuses the whole batch
        if self.setup.is_bucketed:
            # one row more than needed: an entry without padding then shows that the caption was cut
            return padded_length(min(tokens + 1, self.max_tokens), self.max_tokens)
        if family.length_step is None:
            return "captions"
        return -(-min(tokens, self.max_tokens) // family.length_step) * family.length_step

    @property
    def window(self) -> int:
        """Many captions, to sort them by length; few if they have decoded pictures, which are large."""
        return WINDOW if self.setup.family.pictures is None else PICTURE_WINDOW

    def batch_limit(self, group: Hashable) -> int:
        """Return how many captions go into one batch at most."""
        if isinstance(group, tuple) or (self._modules is not None and self._modules.is_single):
            return 1
        if isinstance(self._batch_size, int):
            return self._batch_size
        from cachestore.encode.models import modules
        from cachestore.encode.text import prompts

        if self._budget is None:
            self._budget = prompts.text_budget(modules.choose_device(self._device))
        return self._budget.units(self._length(group))

    def _length(self, group: Hashable) -> int:
        """Return how many tokens each caption of a group costs, with padding and the dropped rows of a template."""
        is_whole = self._modules is not None and self._modules.is_whole
        length = group if isinstance(group, int) and not is_whole else self.max_tokens
        return length + (self._rewriter.dropped if self._rewriter is not None else 0)

    def submit(self, batch: Sequence[tuple[Key, Any]]) -> Result:
        """Begin to encode (key, payload) pairs of one group. The result raises EncodeFailed if embeddings are unusable, such as NaN."""
        if not batch:
            return dict
        if self._modules is None:
            from cachestore.encode.models import modules
            from cachestore.encode.text import prompts

            self._modules = prompts.TextModules(self.setup, modules.choose_device(self._device), self._memories)
            self.found_bytes = self._modules.found_bytes
        with nullcontext() if self._budget is None else self._budget.spending(len(batch)):
            return self._modules.submit(batch, partial(self._took, batch))

    def _took(self, batch: Sequence[tuple[Key, Any]], seconds: float) -> None:
        if self._budget is None:
            return
        payload, group = batch[0][1], None
        if isinstance(payload, Padded):
            group = payload.length
        elif isinstance(payload, tuple):
            group = padded_length(len(payload), self.max_tokens)
        self._budget.took(len(batch), self._length(group), seconds)

    def count_tokens(self, captions: Sequence[str]) -> list[int]:
        """Return how many tokens each caption has before it is cut, with special tokens and a template's rows. Loads the tokenizer."""
        with self._lock:
            return [self._count(caption) for caption in captions]

    @property
    def image_tokens(self) -> int:
        """About how many tokens a picture takes that is encoded with a caption; 0 if the family uses no pictures."""
        shown = self.setup.family.pictures
        if shown is None or shown.area is None:
            return 0 if shown is None else shown.rows
        config = self.setup.components[self.setup.family.tokenizer].config
        return shown.area // (int(config.get("patch_size", PATCH)) * int(config.get("merge_size", MERGED))) ** 2

    def entry_bytes(self, tokens: int) -> int:
        """Return about how many bytes an entry of this many tokens takes. See `is_guessing`."""
        if self.found_bytes is not None:
            return self.found_bytes
        family = self.setup.family
        is_whole = not family.pad or PAST_LIMIT in family.trims.values()
        most = self.max_tokens + self.image_tokens
        rows = most if is_whole else min(tokens, most)
        widths = {name: text_width(component.config) for name, component in self.setup.components.items()}
        # rows come from the encoder whose tokenizer counts; pooled outputs are small
        main = family.encoders[self._counting]
        layers = len(self.setup.args.get(LAYERS_ARG) or (0,))
        numbers = 0
        for name, form in family.outputs.items():
            if name in family.rows:
                row = family.rows[name]
                config = self.setup.components[row.component].config
                layers_kept = int(config[row.layers] if isinstance(row.layers, str) else row.layers)
                numbers += rows * layers_kept * (text_width(config) if row.field is None else int(config[row.field]))
                continue
            parts = [part.rpartition(".")[2] for part in form_names(form) if "." in part] or [main]
            width = sum(widths[part] for part in parts)
            numbers += width * (rows * layers if name.partition(".")[0] == "prompt_embeds" else 1)
        return numbers * (4 if self.setup.dtype == "float32" else 2)

    @property
    def is_guessing(self) -> bool:
        """Whether `entry_bytes` is a guess, because the pipeline has no row and was not loaded yet."""
        return self.setup.family.is_found and self.found_bytes is None

    def close(self) -> None:
        """Release the modules' memory."""
        with self._lock:
            self._rewriter = None
            self._tokenizers, self._memories = {}, {}
        if self._modules is not None:
            self._modules = None
            from cachestore.encode.models import modules

            modules.free_memory()

    def _count(self, caption: str | WithPictures) -> int:
        if not isinstance(caption, WithPictures) and not self.setup.family.rewrites_captions:
            return len(self._token_ids(self.setup.family.tokenizer, caption))
        if self._rewriter is None:
            from cachestore.encode.text import tokens

            self._rewriter = tokens.Rewriter(self.setup, self._memory_of(self.setup.family.tokenizer))
        with _refusing(caption.caption if isinstance(caption, WithPictures) else caption):
            return self._rewriter.count(caption)

    def _tokenise(self, caption: Caption) -> None:
        """Let every tokenizer of the pipeline read its caption, whole and cut, so that the thread that encodes has no text to tokenise."""
        for name in self.setup.components:
            if name.startswith("tokenizer"):
                text = caption_at(caption, self._index_of(name))
                limit = min(self.max_tokens, self._tokenizer(name).model_max_length)
                if len(self._token_ids(name, text)) > limit:
                    self._token_ids(name, text, limit)

    def _token_ids(self, tokenizer: str, caption: str, limit: int | None = None) -> list[int]:
        memory = self._memory_of(tokenizer)
        if (known := memory.get(caption, limit)) is not None:
            return known.ids.tolist()
        options = {} if limit is None else {"truncation": True, "max_length": limit}
        tokenise = self._tokenizer(tokenizer)
        with _refusing(caption):
            encoded = tokenise(caption, verbose=False, **options)
        memory.put(caption, encoded, limit)
        return list(encoded.input_ids)

    def _tokenizer(self, name: str) -> Any:
        """Return a tokenizer. It is not shared with the pipeline, as cutting and padding are its state."""
        if name not in self._tokenizers:
            from cachestore.encode.models import modules

            self._tokenizers[name] = modules.load_tokenizer(self.setup.components[name])
        return self._tokenizers[name]

    def _memory_of(self, tokenizer: str) -> "TokenMemory":
        """Return the memory of a tokenizer's tokens. Imports torch, so it is made when the first caption is read."""
        if tokenizer not in self._memories:
            from cachestore.encode.text.token_memory import TokenMemory

            self._memories[tokenizer] = TokenMemory()
        return self._memories[tokenizer]


@contextmanager
def _refusing(caption: str) -> Generator[None]:
    try:
        yield
    except BadInput:
        raise
    except (TypeError, ValueError, UnicodeError) as error:
        raise EncodeFailed(f"the tokenizer refuses the caption {caption[:60]!r} ({error}): change it, or remove its sample") from error
