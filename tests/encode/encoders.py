"""Asking the encoder of a tiny family, as a worker and then a trainer would."""

from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import numpy as np

from cachestore.core.keys import Key
from cachestore.encode.recipes import ModelRequest, encoders_for


class Files(dict[str, bytes]):
    """Files by reference, as a source reads them."""

    def __call__(self, reference, /):
        return self[reference]

    @contextmanager
    def open(self, reference):
        yield BytesIO(self[reference])


@dataclass(frozen=True)
class Built:
    folder: Any
    pipeline: Any
    family: Any


def encoder_of(model: Built, digest, encode, **options) -> Any:
    args = (model.family.encode_args or {}) if encode == "text" else {}
    defaults: dict[str, Any] = {"text_dtype": "float32", "vae_dtype": "float32", "encode_args": args}
    request = ModelRequest(str(model.folder), encode=[encode], device="cpu", **{**defaults, **options})
    return encoders_for(request, digest)[0]


def entries_of(encoder, captions, *, together=True):
    """Entries by caption, in one batch for each group, or alone."""
    batches: dict[Any, list[Any]] = {}
    for caption in captions:
        resolved = encoder.resolve({"caption": caption}, None)
        prepared = encoder.prepare(resolved)
        batches.setdefault(prepared.group if together else caption, []).append((resolved.key, prepared.payload, caption))
    found = {}
    for batch in batches.values():
        made = encoder.submit([(key, payload) for key, payload, _ in batch])()
        assert set(made) == {key for key, _, _ in batch}
        found |= {caption: made[key] for key, _, caption in batch}
    return found


def batch_for(encoder, captions):
    """What a worker hands over for these captions at once."""
    resolved = [encoder.resolve({"caption": caption}, None) for caption in captions]
    return [(one.key, encoder.prepare(one).payload) for one in resolved]


def latents(encoder):
    """Entries of one picture of noise."""
    pixels = np.random.default_rng(0).integers(0, 256, (64, 96, 3), dtype=np.uint8)
    return encoder.submit([(Key(bytes(16)), pixels)])()


def batch_of(encoder, captions, *, together=True):
    """What a trainer gets for these captions: read, joined, padded, with masks and constants."""
    from cachestore.core.read_block import parse_text
    from cachestore.train.collate import collate
    from cachestore.train.texts import read_outputs

    block = parse_text(encoder.recipe)
    found = entries_of(encoder, captions, together=together)
    return collate([read_outputs(block, found[caption]) for caption in captions], [block])
