"""Text encoders and VAEs with random weights, to measure with. FLUX.1's sizes are here, real and tiny. Nothing is downloaded.

What is encoded with them is noise, but it takes the time and the memory of the real model. Imports torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Final

import torch

from cachestore.core import vector_math
from cachestore.encode.models.folders import Component
from cachestore.encode.models.loaded import LoadedModel

vector_math.settle()

WORDS: Final = 2_000
"""How many words the tokenizers know: `w0`, `w1`, …; each is one token."""
_VOCABULARY: Final = {"<pad>": 0, "</s>": 1, "<unk>": 2, **{f"w{number}": number + 3 for number in range(WORDS)}}


@dataclass(frozen=True, slots=True)
class RandomSize:
    """A model to make, and its sizes."""

    name: str
    pipeline: str
    modules: Mapping[str, tuple[str, Mapping[str, Any]]]
    """By component name: a class of transformers, or of diffusers for the VAE, and its configuration."""
    limits: Mapping[str, int]
    """How many tokens each tokenizer keeps, by component name."""
    text_dtype: torch.dtype
    vae_dtype: torch.dtype


CLIP_IDS: Final = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0, "max_position_embeddings": 77}
T5_IDS: Final = {"pad_token_id": 0, "eos_token_id": 1, "feed_forward_proj": "gated-gelu", "dropout_rate": 0.0}
CLIP_L: Final = {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12, "num_hidden_layers": 12, "vocab_size": 49_408}
T5_XXL: Final = {"d_model": 4096, "d_kv": 64, "d_ff": 10_240, "num_layers": 24, "num_heads": 64, "vocab_size": 32_128}
KL: Final = {
    "block_out_channels": (128, 256, 512, 512),
    "norm_num_groups": 32,
    "layers_per_block": 2,
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "sample_size": 1024,
}
FLUX_VAE: Final = {
    **KL,
    "latent_channels": 16,
    "scaling_factor": 0.3611,
    "shift_factor": 0.1159,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
}


def _flux(name: str, clip: Mapping[str, Any], t5: Mapping[str, Any], vae: Mapping[str, Any], dtype: torch.dtype) -> RandomSize:
    modules = {
        "text_encoder": ("CLIPTextModel", {**clip, **CLIP_IDS}),
        "text_encoder_2": ("T5EncoderModel", {**t5, **T5_IDS}),
        "vae": ("AutoencoderKL", {**FLUX_VAE, **vae}),
    }
    return RandomSize(name, "FluxPipeline", modules, {"tokenizer": 77, "tokenizer_2": 512}, dtype, dtype)


TINY: Final = _flux(
    "a tiny model in the form of FLUX.1, with random weights",
    {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": len(_VOCABULARY)},
    {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": len(_VOCABULARY)},
    {"block_out_channels": (4, 4, 4, 4), "norm_num_groups": 4, "layers_per_block": 1, "mid_block_add_attention": False},
    torch.float32,
)
REAL: Final = _flux("FLUX.1's text encoders and VAE at their real sizes, with random weights", CLIP_L, T5_XXL, {}, torch.bfloat16)
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
    modules: dict[str, Any] = {}
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.device(device):
        torch.manual_seed(0)
        try:
            for name, (class_name, config) in size.modules.items():
                torch.set_default_dtype(size.vae_dtype if name == "vae" else size.text_dtype)
                if name == "vae":
                    module = getattr(import_module("diffusers"), class_name)(**config)
                    module.decoder = torch.nn.Identity()  # never used
                else:
                    made = getattr(import_module("transformers"), class_name)
                    module = made(made.config_class(**config))
                modules[name] = module.eval().requires_grad_(requires_grad=False)
        finally:
            torch.set_default_dtype(before)
    return RandomModel(size.pipeline, {**modules, **{name: _tokenizer(limit) for name, limit in size.limits.items()}})


def noise(shape: Sequence[int]) -> torch.Tensor:
    """Return normal noise in bfloat16."""
    return torch.randn(tuple(shape)).bfloat16()


def _tokenizer(limit: int) -> Any:
    """Return a tokenizer of whole words that ends each text with `</s>`."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words: Any = Tokenizer(models.WordLevel(_VOCABULARY, "<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    special: dict[str, Any] = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    return import_module("transformers").PreTrainedTokenizerFast(tokenizer_object=words, model_max_length=limit, **special)
