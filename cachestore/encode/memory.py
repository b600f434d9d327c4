"""How much memory an encoder takes at least: its weights, and what a batch of one input needs. Loads no model; imports no torch.

Weights are counted by the headers of their files. What a batch needs is an estimate: by `VaeFamily.working` for VAEs, and by config.json
for text encoders. Larger batches take more, but their sizes follow from what is free.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from typing import Final

from cachestore.core.dtypes import DTYPES
from cachestore.core.errors import FormatError
from cachestore.core.keys import Json
from cachestore.encode.batching.unit import Encoder
from cachestore.encode.families.row import VaeFamily
from cachestore.encode.families.vae import VAE_FAMILIES
from cachestore.encode.models.folders import QUANTIZATION, Component, opened_weights
from cachestore.encode.models.setup import text_width
from cachestore.encode.pictures.buckets import Size
from cachestore.encode.pictures.latents import LatentsEncoder
from cachestore.encode.pictures.vision import VisionEncoder
from cachestore.encode.text.encoder import TextEncoder

ITEM_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}
MARGIN: Final = 1.25
"""How much more a GPU takes than the tensors of a batch: FLUX.1's VAE took 1.21 times as much on an H200 (docs/benchmarks.md)."""
CARDS: Final = tuple(size << 30 for size in (8, 12, 16, 24, 32, 48, 80))
KEPT_FREE: Final = 1 << 30
"""What the driver, torch's kernels and a screen take of a card."""
LONGEST: Final = 1024
"""The tokens of a caption if the limit is higher and none of that length was seen: some tokenizers allow 131,072."""
HEAD: Final = "ForCausalLM"
_HEADS: Final = (HEAD, "ForConditionalGeneration")
"""How the names of classes end that also score each token of the vocabulary."""


@dataclass(frozen=True, slots=True)
class EncoderMemory:
    """What one encoder takes. Encoders are loaded one after the other, but all text encoders of a pipeline together."""

    encoder: str
    weights: int
    working: int
    """Bytes for a batch of one caption, picture or clip."""

    @property
    def bytes(self) -> int:
        """Both together."""
        return self.weights + self.working


def memory_of(encoder: Encoder, bucket: Sequence[int], tokens: int = 0) -> EncoderMemory | None:
    """Return what an encoder takes at least; None if it has no model.

    `bucket` is (width, height) or (width, height, frames) of the largest picture or clip, `tokens` the length of the longest caption.
    """
    name = encoder.recipe.encoder
    match encoder:
        case TextEncoder():
            tokens = max(min(encoder.max_tokens, LONGEST), min(encoder.max_tokens + encoder.image_tokens, tokens))
            parts, item = encoder.setup.components.values(), ITEM_BYTES[encoder.setup.dtype]
            return EncoderMemory(name, _weights(parts, item), max(text_working(one.config, one.class_name, tokens, item) for one in parts))
        case LatentsEncoder():
            vae, item = encoder.setup.components["vae"], ITEM_BYTES[encoder.setup.dtype]
            frames = 1 if encoder.setup.is_of_pictures else (*bucket, 1)[2]
            return EncoderMemory(name, _weights([vae], item), vae_working(VAE_FAMILIES[vae.class_name], Size(*bucket[:2]), frames, item))
        case VisionEncoder():
            parts, item = encoder.setup.components.values(), ITEM_BYTES[encoder.setup.dtype]
            model = next(iter(parts))
            tokens = 1 + (int(model.config.get("image_size") or 224) // int(model.config.get("patch_size") or 14)) ** 2
            return EncoderMemory(name, _weights(parts, item), text_working(model.config, model.class_name, tokens, item))
        case _:
            return None


def vae_working(row: VaeFamily, size: Size, frames: int, item: int) -> int:
    """Return about what encoding one picture or clip takes beside the weights, at so many bytes a number."""
    picture, clip, each = row.working
    numbers = picture if frames == 1 else clip + each * frames
    return int(MARGIN * prod(size) * numbers * item / ITEM_BYTES["float32"])


def text_working(config: Mapping[str, Json], class_name: str, tokens: int, item: int) -> int:
    """Return about what encoding one caption of so many tokens takes beside the weights; 0 for a tokenizer or processor.

    Each layer's output, twice, as many pipelines stack them; one layer's widest part and attention; scores of the vocabulary, if made.
    """
    inner: Mapping[str, Json] = config.get("text_config") or config
    layers = inner.get("num_hidden_layers") or inner.get("num_layers") or 0
    wide = inner.get("intermediate_size") or inner.get("d_ff") or 4 * text_width(config)
    heads = inner.get("num_attention_heads") or inner.get("num_heads") or 1
    if not text_width(config) or not layers:
        return 0
    scores = int(inner.get("vocab_size") or 0) if class_name.endswith(_HEADS) else 0
    numbers = tokens * (2 * (layers + 1) * text_width(config) + 3 * wide + scores)
    return int(MARGIN * (numbers * item + heads * tokens**2 * (ITEM_BYTES["float32"] + item)))


def _weights(components: Iterable[Component], item: int) -> int:
    """The bytes of weights once they are loaded: floats in the dtype for encoding, unless a library has quantised them."""
    total = 0
    for component in components:
        if component.loaded is not None:
            own = component.loaded.parameters() if hasattr(component.loaded, "parameters") else ()
            total += sum(tensor.numel() * tensor.element_size() for tensor in own)
            continue
        for path in (path for file, path in component.files.items() if file.endswith(".safetensors")):
            with suppress(FormatError, OSError), opened_weights(path) as (_descriptor, header):  # loading tells what is wrong with it
                for info in header.tensors.values():
                    is_cast = info.dtype[:1] in {"F", "B"} and info.dtype != "BOOL" and QUANTIZATION not in component.config
                    total += prod(info.shape) * (item if is_cast else DTYPES[info.dtype].size)
    return total
