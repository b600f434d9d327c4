"""FLUX.1's text encoders and VAE with random weights, to measure with: of the real sizes, or tiny. Nothing is downloaded.

What is encoded with them is noise, but it takes the time and the memory of the real model. Imports torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Final

import torch

from cachestore.core import vector_math
from cachestore.encode.loaded import LoadedModel
from cachestore.encode.models import Component

vector_math.settle()

WORDS: Final = 2_000
"""How many words the tokenizers know: `w0`, `w1`, …; each is one token."""

_VOCABULARY: Final = {"<pad>": 0, "</s>": 1, "<unk>": 2, **{f"w{number}": number + 3 for number in range(WORDS)}}


@dataclass(frozen=True, slots=True)
class RandomSize:
    """The sizes of a random model."""

    name: str
    clip: Mapping[str, int]
    t5: Mapping[str, int]
    vae: Mapping[str, Any]
    dtype: torch.dtype


TINY: Final = RandomSize(
    "a tiny model in the form of FLUX.1, with random weights",
    {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": len(_VOCABULARY)},
    {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": len(_VOCABULARY)},
    {"block_out_channels": (4, 4, 4, 4), "norm_num_groups": 4, "layers_per_block": 1, "mid_block_add_attention": False},
    torch.float32,
)
REAL: Final = RandomSize(
    "FLUX.1's text encoders and VAE at their real sizes, with random weights",
    {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12, "num_hidden_layers": 12, "vocab_size": 49_408},
    {"d_model": 4096, "d_kv": 64, "d_ff": 10_240, "num_layers": 24, "num_heads": 64, "vocab_size": 32_128},
    {"block_out_channels": (128, 256, 512, 512), "norm_num_groups": 32, "layers_per_block": 2},
    torch.bfloat16,
)
REAL_BYTES: Final = 24 << 30
"""The free memory of a GPU on which REAL is used: 10 GB of weights, and room for batches."""


def fitting(device: torch.device) -> RandomSize:
    """Return REAL for a GPU with room for it, else TINY: a CPU would take a minute for each picture and caption."""
    if device.type == "cuda" and torch.cuda.mem_get_info(device)[0] >= REAL_BYTES:
        return REAL
    return TINY


@dataclass(frozen=True, slots=True)
class RandomModel(LoadedModel):
    """A model in memory that does not change, so that its contents are digested once."""

    known: dict[str, Component] = field(default_factory=dict[str, Component])

    def component(self, name: str) -> Component:
        """As for any model in memory."""
        if name not in self.known:
            self.known[name] = LoadedModel.component(self, name)
        return self.known[name]


def random_model(size: RandomSize, device: torch.device) -> RandomModel:
    """Make a model on a device. On one device it has the same weights at every call."""
    before = torch.get_default_dtype()
    libraries = import_module("diffusers"), import_module("transformers")
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.device(device):
        torch.manual_seed(0)
        torch.set_default_dtype(size.dtype)
        try:
            modules = _modules(*libraries, size)
        finally:
            torch.set_default_dtype(before)
    ready = {name: module.eval().requires_grad_(requires_grad=False) for name, module in modules.items()}
    return RandomModel("FluxPipeline", {**ready, "tokenizer": _tokenizer(77), "tokenizer_2": _tokenizer(512)})


def noise(shape: Sequence[int]) -> torch.Tensor:
    """Return normal noise in bfloat16."""
    return torch.randn(tuple(shape)).bfloat16()


def _modules(diffusers: Any, transformers: Any, size: RandomSize) -> dict[str, Any]:
    clip = transformers.CLIPTextConfig(**size.clip, bos_token_id=0, eos_token_id=1, pad_token_id=0, max_position_embeddings=77)
    t5 = transformers.T5Config(**size.t5, feed_forward_proj="gated-gelu", pad_token_id=0, eos_token_id=1, dropout_rate=0.0)
    levels = len(size.vae["block_out_channels"])
    vae = diffusers.AutoencoderKL(
        **size.vae,
        down_block_types=("DownEncoderBlock2D",) * levels,
        up_block_types=("UpDecoderBlock2D",) * levels,
        latent_channels=16,
        sample_size=1024,
        scaling_factor=0.3611,
        shift_factor=0.1159,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )
    vae.decoder = torch.nn.Identity()  # never used
    return {"text_encoder": transformers.CLIPTextModel(clip), "text_encoder_2": transformers.T5EncoderModel(t5), "vae": vae}


def _tokenizer(limit: int) -> Any:
    """Return a tokenizer of whole words that ends each text with `</s>`."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words: Any = Tokenizer(models.WordLevel(_VOCABULARY, "<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    special: dict[str, Any] = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    return import_module("transformers").PreTrainedTokenizerFast(tokenizer_object=words, model_max_length=limit, **special)
