"""Makes tiny random models in the formats of sd-scripts, and a copy of its checkout in which the sizes of models are small.

Usage, in the copy: python live_sd_scripts_models.py FOLDER SEED
"""
# The trainer's modules are in its checkout.
# pyright: reportMissingImports=false

import json
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

SIZES = {
    "library/flux_utils.py": [
        (r'"hidden_size": 768', '"hidden_size": 32'),
        (r'"intermediate_size": 3072', '"intermediate_size": 64'),
        (r'"num_attention_heads": 12', '"num_attention_heads": 2'),
        (r'"num_hidden_layers": 12', '"num_hidden_layers": 2'),
        (r'"projection_dim": 768', '"projection_dim": 32'),
        (r'"vocab_size": 49408', '"vocab_size": 514'),
        (r'"d_ff": 10240', '"d_ff": 64'),
        (r'"d_kv": 64', '"d_kv": 16'),
        (r'"d_model": 4096', '"d_model": 32'),
        (r'"num_heads": 64', '"num_heads": 2'),
        (r'"num_layers": 24', '"num_layers": 2'),
        (r'"vocab_size": 32128', '"vocab_size": 300'),
    ],
    "library/flux_models.py": [
        (r"vec_in_dim=768", "vec_in_dim=32"),
        (r"context_in_dim=4096", "context_in_dim=32"),
        (r"hidden_size=3072", "hidden_size=128"),
        (r"num_heads=24", "num_heads=1"),
        (r"\bch=128", "ch=32"),
    ],
    "library/model_util.py": [(r"VAE_PARAMS_CH = 128", "VAE_PARAMS_CH = 32")],
    "library/sdxl_original_unet.py": [
        (r"ADM_IN_CHANNELS: int = 2816", "ADM_IN_CHANNELS: int = 1568"),
        (r"CONTEXT_DIM: int = 2048", "CONTEXT_DIM: int = 64"),
        (r"MODEL_CHANNELS: int = 320", "MODEL_CHANNELS: int = 64"),
        (r"TIME_EMBED_DIM = 320 \* 4", "TIME_EMBED_DIM = 64 * 4"),
        (r"cross_attention_dim=2048", "cross_attention_dim=64"),
        (r"num_transformer_layers=10", "num_transformer_layers=1"),
    ],
    "library/sdxl_model_util.py": [
        (r"vocab_size=49408", "vocab_size=514"),
        (r"hidden_size=(768|1280)", "hidden_size=32"),
        (r"intermediate_size=(3072|5120)", "intermediate_size=64"),
        (r"num_hidden_layers=(12|32)", "num_hidden_layers=12"),
        (r"num_attention_heads=(12|20)", "num_attention_heads=2"),
        (r"projection_dim=(768|1280)", "projection_dim=32"),
    ],
}
"""By file of the checkout: what is replaced. Numbers alone."""


def shrink(checkout: Path, copy: Path, sizes: Mapping[str, Sequence[tuple[str, str]]] = SIZES) -> None:
    """Copy a checkout, with small sizes. Raises ValueError if one is not there."""
    shutil.copytree(checkout, copy, ignore=shutil.ignore_patterns(".git", "__pycache__", "images", "docs"))
    for file, pairs in sizes.items():
        text = (copy / file).read_text()
        for old, new in pairs:
            text, count = re.subn(old, new, text)
            if not count:
                raise ValueError(f"{file} has no {old}")
        (copy / file).write_text(text)


def make_tokenizers(folder: Path) -> None:
    """Make CLIP's and T5's, as `--tokenizer_cache_dir` has them."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import CLIPTokenizer, PreTrainedTokenizerFast

    # In transformers 4, which the trainer asks for.
    from transformers.models.clip.tokenization_clip import bytes_to_unicode  # pyright: ignore[reportAttributeAccessIssue]

    letters = list(bytes_to_unicode().values())
    words = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    (folder / "clip").mkdir(parents=True)
    (folder / "clip" / "vocab.json").write_text(json.dumps({word: number for number, word in enumerate(words)}))
    (folder / "clip" / "merges.txt").write_text("#version: 0.2\n")
    clip = CLIPTokenizer(str(folder / "clip" / "vocab.json"), str(folder / "clip" / "merges.txt"), model_max_length=77)
    clip.save_pretrained(folder / "openai_clip-vit-large-patch14")
    clip.pad_token = "!"
    clip.save_pretrained(folder / "laion_CLIP-ViT-bigG-14-laion2B-39B-b160k")
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0), *((letter, -3.0) for letter in letters)]
    t5 = Tokenizer(models.Unigram(pieces, unk_id=2))
    t5.pre_tokenizer = pre_tokenizers.Metaspace()
    from tokenizers.processors import TemplateProcessing

    t5.post_processor = TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    fast = PreTrainedTokenizerFast(tokenizer_object=t5, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=512)
    fast.save_pretrained(folder / "google_t5-v1_1-xxl")
    config = folder / "google_t5-v1_1-xxl" / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "tokenizer_class": "T5TokenizerFast", "extra_ids": 0}))


def make_models(folder: Path, seed: int) -> None:
    """Make checkpoints for FLUX and SDXL."""
    import dataclasses

    import torch
    from diffusers import AutoencoderKL
    from library import flux_models, model_util, sdxl_model_util, sdxl_original_unet
    from safetensors.torch import save_file
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection, T5Config, T5EncoderModel

    torch.manual_seed(seed)
    folder.mkdir(parents=True, exist_ok=True)
    params = dataclasses.replace(flux_models.configs["dev"].params, depth=1, depth_single_blocks=1)
    save_file(flux_models.Flux(params).state_dict(), folder / "flux.safetensors")
    save_file(flux_models.AutoEncoder(flux_models.configs["dev"].ae_params).state_dict(), folder / "ae.safetensors")
    shape = {"vocab_size": 514, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    clip = CLIPTextConfig(**shape, max_position_embeddings=77, eos_token_id=2, projection_dim=32)
    save_file(CLIPTextModel(clip).state_dict(), folder / "clip_l.safetensors")
    t5 = T5Config(
        d_ff=64, d_kv=16, d_model=32, num_heads=2, num_layers=2, vocab_size=300, feed_forward_proj="gated-gelu", tie_word_embeddings=False
    )
    state = {name: value.clone() for name, value in T5EncoderModel(t5).state_dict().items()}
    save_file(state, folder / "t5xxl.safetensors")
    longer = CLIPTextConfig(**{**shape, "num_hidden_layers": 12}, max_position_embeddings=77, eos_token_id=2, projection_dim=32)
    sdxl_model_util.save_stable_diffusion_checkpoint(
        str(folder / "sdxl.safetensors"),
        CLIPTextModel(longer),
        CLIPTextModelWithProjection(longer),
        sdxl_original_unet.SdxlUNet2DConditionModel(),
        0,
        0,
        None,
        AutoencoderKL(**model_util.create_vae_diffusers_config()),
        torch.tensor(1.0),
        {},
    )


def make_pictures(folder: Path, count: int) -> None:
    """Make pictures of a few shapes, some with transparency, and captions."""
    import numpy as np
    from PIL import Image

    folder.mkdir(parents=True)
    draw = np.random.default_rng(0)
    for number in range(count):
        size = [(140, 130), (200, 70), (70, 200)][number % 3]
        pixels = draw.integers(0, 256, (size[1], size[0], 4 if number % 4 == 0 else 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"picture_{number:03}.png")
        (folder / f"picture_{number:03}.txt").write_text(f"picture number {number}, a thing of some kind\n")


if __name__ == "__main__":
    sys.path.insert(0, ".")
    target = Path(sys.argv[1])
    make_models(target, int(sys.argv[2]))
    if not (target.parent / "tokenizers").exists():
        make_tokenizers(target.parent / "tokenizers")
