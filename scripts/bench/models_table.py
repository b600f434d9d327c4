"""The table of docs/models.md: `python3 scripts/bench/models_table.py` prints it. Loads no model and no torch.

What is stored, and its bytes, come from the families of the package and from the forecast of `precompute`. The sizes of the models are
stated here by their published configurations, with the parameters that modules of these configurations have.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import environment

if __name__ == "__main__":
    environment.enter()

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from cachestore.core.keys import Recipe
from cachestore.core.words import human_bytes
from cachestore.encode.families.lookup import latents_read, vae_family
from cachestore.encode.families.row import MAX_LENGTH_ARG
from cachestore.encode.families.text import TEXT_FAMILIES
from cachestore.encode.memory import HEAD, ITEM_BYTES, KEPT_FREE, LONGEST, text_working, vae_working
from cachestore.encode.models.folders import Component
from cachestore.encode.models.setup import TextSetup
from cachestore.encode.pictures.buckets import Size
from cachestore.encode.pictures.latents import LatentsEncoder
from cachestore.encode.recipes import latents_setup
from cachestore.encode.text.encoder import TextEncoder

TOKENS = 72
"""The length of a usual caption."""
SIDE = 1024
KL_BLOCKS = (128, 256, 512, 512)
CARDS = (12, 16, 24)
"""The memory of the cards that are asked about, in GB."""


@dataclass(frozen=True, slots=True)
class Module:
    """A text encoder or VAE: its name, its parameters, and the fields of its configuration that decide the size of entries."""

    name: str
    parameters: int
    config: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class Published:
    """A published model of a family."""

    hub_id: str
    pipeline: str
    texts: tuple[Module, ...]
    vae: Module


def _text(name: str, parameters: int, width: int, sizes: tuple[int, int, int], scores: int = 0) -> Module:
    """A text encoder. `sizes` are its layers, the width within a layer, and its heads; `scores` its vocabulary if its class scores it."""
    fields = ("num_hidden_layers", "intermediate_size", "num_attention_heads")
    return Module(name, parameters, {"hidden_size": width, "vocab_size": scores, **dict(zip(fields, sizes, strict=True))})


def _kl(channels: int, parameters: int) -> Module:
    return Module("AutoencoderKL", parameters, {"latent_channels": channels, "block_out_channels": list(KL_BLOCKS)})


CLIP_L = _text("CLIP-L", 123_060_480, 768, (12, 3072, 12))
CLIP_L_PROJECTED = replace(CLIP_L, parameters=123_650_304)
BIG_G = _text("CLIP bigG", 694_659_840, 1280, (32, 5120, 20))
T5_XXL = _text("T5-XXL", 4_762_310_656, 4096, (24, 10_240, 64))
UMT5_XXL = _text("UMT5-XXL", 5_680_910_336, 4096, (24, 10_240, 64))
GEMMA_2B = _text("Gemma 2 2B", 2_614_341_888, 2304, (26, 9216, 8))
QWEN3_4B = _text("Qwen3 4B", 4_022_468_096, 2560, (36, 9728, 32), 151_936)
QWEN_VL_7B = _text("Qwen2.5-VL 7B", 8_292_166_656, 3584, (28, 18_944, 28), 152_064)
LLAMA_8B = _text("Llama 3 8B", 7_505_186_816, 4096, (32, 14_336, 32))
LLAVA_8B = _text("LLaVA Llama 3 8B", 8_355_272_704, 4096, (32, 14_336, 32), 128_320)
GLM_9B = _text("GLM-4 9B", 8_779_194_368, 4096, (40, 13_696, 32))
PILE_T5_XL = _text("Pile-T5-XL", 1_223_550_976, 2048, (24, 5120, 32))
BYT5_SMALL = _text("ByT5 small", 219_314_944, 1472, (12, 3584, 6))
MISTRAL_24B = _text("Mistral Small 3 24B", 24_011_361_280, 5120, (40, 32_768, 32), 131_072)
GEMMA_12B = _text("Gemma 3 12B", 12_202_563_392, 3840, (48, 15_360, 16), 262_208)
QWEN3_VL_4B, QWEN3_VL_8B = (
    _text("Qwen3-VL 4B", 4_437_815_808, 2560, (36, 9728, 32)),
    _text("Qwen3-VL 8B", 8_144_793_840, 4096, (36, 12_288, 32), 151_936),
)
LLAMA_31_8B = _text("Llama 3.1 8B", 8_030_261_248, 4096, (32, 14_336, 32), 128_256)
T5_11B = _text("T5-11B", 4_864_791_552, 1024, (24, 65_536, 128))
CLIP_L_LONG = replace(CLIP_L, parameters=123_781_632)
BIG_G_LONG = replace(BIG_G, parameters=694_878_720)
SD_VAE, FLUX_VAE = _kl(4, 83_653_863), _kl(16, 83_819_683)
WAN_VAE = Module("AutoencoderKLWan", 126_892_531)
QWEN_VAE = replace(WAN_VAE, name="AutoencoderKLQwenImage")
FLUX2_VAE = Module("AutoencoderKLFlux2", 84_046_115)
WAN22_VAE = Module("AutoencoderKLWan", 704_688_668, {"z_dim": 48, "scale_factor_spatial": 16})
LTX2_VAE = Module("AutoencoderKLLTX2Video", 1_222_479_601, {"spatial_compression_ratio": 32, "temporal_compression_ratio": 8})
HUNYUAN_IMAGE_VAE = Module("AutoencoderKLHunyuanImage", 405_575_491, {"latent_channels": 64, "spatial_compression_ratio": 32})
NORMALISED = {"latents_mean": None, "latents_std": None}
"""Their numbers do not change the sizes."""
COSMOS_VAE = Module("AutoencoderKLCosmos", 105_653_696, NORMALISED)
QWEN21_VAE = Module("AutoencoderKLQwenImage21", 337_740_404, NORMALISED)
HUNYUAN_VAE = Module("AutoencoderKLHunyuanVideo", 246_478_803)
WITHOUT_SIZES = {"ErnieImagePipeline"}
"""Families that are not in the table, as the sizes of their published text encoder are not known here."""

MODELS = (
    Published("stable-diffusion-v1-5/stable-diffusion-v1-5", "StableDiffusionPipeline", (CLIP_L,), SD_VAE),
    Published("stabilityai/stable-diffusion-xl-base-1.0", "StableDiffusionXLPipeline", (CLIP_L, BIG_G), SD_VAE),
    Published("stabilityai/stable-diffusion-3.5-large", "StableDiffusion3Pipeline", (CLIP_L_PROJECTED, BIG_G, T5_XXL), FLUX_VAE),
    Published("black-forest-labs/FLUX.1-dev", "FluxPipeline", (CLIP_L, T5_XXL), FLUX_VAE),
    Published("black-forest-labs/FLUX.1-Kontext-dev", "FluxKontextPipeline", (CLIP_L, T5_XXL), FLUX_VAE),
    Published("black-forest-labs/FLUX.2-klein-4B", "Flux2KleinPipeline", (QWEN3_4B,), FLUX2_VAE),
    Published("black-forest-labs/FLUX.2-dev", "Flux2Pipeline", (MISTRAL_24B,), FLUX2_VAE),
    Published("black-forest-labs/FLUX.1-Fill-dev", "FluxFillPipeline", (CLIP_L, T5_XXL), FLUX_VAE),
    Published("black-forest-labs/FLUX.1-Canny-dev", "FluxControlPipeline", (CLIP_L, T5_XXL), FLUX_VAE),
    Published("PixArt-alpha/PixArt-Sigma-XL-2-1024-MS", "PixArtSigmaPipeline", (T5_XXL,), SD_VAE),
    Published("Efficient-Large-Model/Sana_1600M_1024px_diffusers", "SanaPipeline", (GEMMA_2B,), Module("AutoencoderDC", 312_250_275)),
    Published("Alpha-VLLM/Lumina-Image-2.0", "Lumina2Pipeline", (GEMMA_2B,), FLUX_VAE),
    Published("Wan-AI/Wan2.1-T2V-14B-Diffusers", "WanPipeline", (UMT5_XXL,), WAN_VAE),
    Published("Wan-AI/Wan2.2-TI2V-5B-Diffusers", "WanPipeline", (UMT5_XXL,), WAN22_VAE),
    Published("Qwen/Qwen-Image", "QwenImagePipeline", (QWEN_VL_7B,), QWEN_VAE),
    Published("Qwen/Qwen-Image-Edit", "QwenImageEditPipeline", (QWEN_VL_7B,), QWEN_VAE),
    Published("Qwen/Qwen-Image-Edit-2509", "QwenImageEditPlusPipeline", (QWEN_VL_7B,), QWEN_VAE),
    Published("Lightricks/LTX-Video", "LTXPipeline", (T5_XXL,), Module("AutoencoderKLLTXVideo", 419_193_649)),
    Published("Lightricks/LTX-2", "LTX2Pipeline", (GEMMA_12B,), LTX2_VAE),
    Published("zai-org/CogVideoX-5b", "CogVideoXPipeline", (T5_XXL,), Module("AutoencoderKLCogVideoX", 215_583_907)),
    Published("Tongyi-MAI/Z-Image-Turbo", "ZImagePipeline", (QWEN3_4B,), FLUX_VAE),
    Published("lodestones/Chroma1-HD", "ChromaPipeline", (T5_XXL,), FLUX_VAE),
    Published(
        "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v",
        "HunyuanVideo15Pipeline",
        (QWEN_VL_7B, BYT5_SMALL),
        Module("AutoencoderKLHunyuanVideo15", 1_260_634_115),
    ),
    Published("zai-org/CogView4-6B", "CogView4Pipeline", (GLM_9B,), FLUX_VAE),
    Published("hunyuanvideo-community/HunyuanVideo", "HunyuanVideoPipeline", (LLAMA_8B, CLIP_L), HUNYUAN_VAE),
    Published("hunyuanvideo-community/HunyuanVideo-I2V-33ch", "HunyuanVideoImageToVideoPipeline", (LLAVA_8B, CLIP_L), HUNYUAN_VAE),
    Published("hunyuanvideo-community/HunyuanImage-2.1-Diffusers", "HunyuanImagePipeline", (QWEN_VL_7B, BYT5_SMALL), HUNYUAN_IMAGE_VAE),
    Published("kandinskylab/Kandinsky-5.0-T2V-Lite-sft-5s-Diffusers", "Kandinsky5T2VPipeline", (QWEN_VL_7B, CLIP_L), HUNYUAN_VAE),
    Published("kandinskylab/Kandinsky-5.0-T2I-Lite-sft-Diffusers", "Kandinsky5T2IPipeline", (QWEN_VL_7B, CLIP_L), FLUX_VAE),
    Published("krea/Krea-2-Raw", "Krea2Pipeline", (QWEN3_VL_4B,), QWEN_VAE),
    Published("ideogram-ai/ideogram-v4", "Ideogram4Pipeline", (QWEN3_VL_8B,), FLUX2_VAE),
    Published("HiDream-ai/HiDream-I1-Full", "HiDreamImagePipeline", (CLIP_L_LONG, BIG_G_LONG, T5_XXL, LLAMA_31_8B), FLUX_VAE),
    Published("Qwen/Qwen-Image-2.1", "QwenImage21Pipeline", (replace(QWEN3_VL_8B, parameters=8_767_123_696),), QWEN21_VAE),
    Published("nvidia/Cosmos-1.0-Diffusion-7B-Text2World", "CosmosTextToWorldPipeline", (T5_11B,), COSMOS_VAE),
    Published("nvidia/Cosmos-Predict2-2B-Text2Image", "Cosmos2TextToImagePipeline", (T5_11B,), WAN_VAE),
    Published("Efficient-Large-Model/SANA-Video_2B_480p_diffusers", "SanaVideoPipeline", (GEMMA_2B,), WAN_VAE),
    Published("genmo/mochi-1-preview", "MochiPipeline", (T5_XXL,), Module("AutoencoderKLMochi", 459_748_611)),
    Published("fal/AuraFlow", "AuraFlowPipeline", (PILE_T5_XL,), SD_VAE),
)


def _components(modules: Mapping[str, Module]) -> dict[str, Component]:
    return {name: Component(name, "", module.name, Path(), {}, config=module.config) for name, module in modules.items()}


def text_bytes(model: Published, tokens: int) -> int:
    """The forecast of one caption's entry."""
    family = TEXT_FAMILIES[model.pipeline]
    components = _components({**dict.fromkeys(family.components, Module("", 0)), **dict(zip(family.encoders, model.texts, strict=True))})
    limit = int(family.args.get(MAX_LENGTH_ARG, family.max_tokens))
    setup = TextSetup(family, components, max_tokens=limit, args=family.args, dtype=family.text_dtype)
    encoder = TextEncoder(Recipe("text"), setup)
    return encoder.entry_bytes(tokens + encoder.image_tokens)


def latents_bytes(model: Published) -> int:
    """The forecast of the latents of one picture of SIDE x SIDE."""
    family = TEXT_FAMILIES[model.pipeline]
    read = latents_read(vae_family(model.vae.name), model.vae.config, "moments")
    setup = latents_setup(family, _components({"vae": model.vae})["vae"], read, family.vae_dtype)
    return LatentsEncoder(Recipe("latents"), setup).entry_bytes(Size(SIDE, SIDE))


def working_bytes(model: Published) -> tuple[int, int]:
    """The estimates of what one caption needs beside the weights of the text encoders, and one picture of SIDE x SIDE beside the VAE's."""
    family = TEXT_FAMILIES[model.pipeline]
    tokens = min(int(family.args.get(MAX_LENGTH_ARG, family.max_tokens)), LONGEST)
    item = ITEM_BYTES[family.text_dtype]
    texts = (text_working(one.config, HEAD if one.config["vocab_size"] else "", tokens, item) for one in model.texts)
    return max(texts), vae_working(vae_family(model.vae.name), Size(SIDE, SIDE), 1, ITEM_BYTES[family.vae_dtype])


def table() -> list[str]:
    """The lines of the table."""
    memory = ("`MODEL`", "text encoders", "at least", "12, 16, 24 GB")
    titles = (*memory, "a caption of 72 tokens", "latents of a picture", "a million samples")
    lines = [f"| {' | '.join(titles)} |", f"|{'---|' * len(titles)}"]
    for model in MODELS:
        family = TEXT_FAMILIES[model.pipeline]
        weights = sum(module.parameters for module in model.texts) * ITEM_BYTES[family.text_dtype]
        vae = model.vae.parameters * ITEM_BYTES[family.vae_dtype]
        of_caption, of_picture = working_bytes(model)
        least = max(weights + of_caption, vae + of_picture)
        text, latents = text_bytes(model, TOKENS), latents_bytes(model)
        cells = [
            f"`{model.hub_id}`",
            ", ".join(module.name for module in model.texts),
            human_bytes(least),
            ", ".join("yes" if least + KEPT_FREE <= size << 30 else "no" for size in CARDS),
            human_bytes(text),
            human_bytes(latents),
            human_bytes(1_000_000 * (text + latents)),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    print("\n".join(table()))
