"""Models of a few kilobytes with random weights, built from configurations alone: for scripts and tests. Nothing is downloaded.

Their tokenizers know the bytes of a caption and nothing else. Seed torch before, where the weights matter.
"""

import importlib
import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ALPHABET = [chr(code) for code in [*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 324)]]
"""The 256 symbols that byte-level tokenizers write bytes as."""


def library(name: str) -> Any:
    """The library diffusers or transformers, whose types are too narrow for pipelines that lack parts."""
    return importlib.import_module(name)


def is_transformers_4() -> bool:
    """Whether tokenizers are still made from files, as before transformers 5."""
    return str(library("transformers").__version__).startswith("4.")


def of_files(class_name: str, vocabulary: Mapping[str, int], **options: Any) -> Any:
    """A byte-level tokenizer of transformers 4 that merges nothing, made from files as it must be there."""
    with tempfile.TemporaryDirectory() as folder:
        files = {"vocab_file": Path(folder, "vocab.json"), "merges_file": Path(folder, "merges.txt")}
        files["vocab_file"].write_text(json.dumps(vocabulary), encoding="utf-8")
        files["merges_file"].write_text("#version: 0.2\n", encoding="utf-8")
        return getattr(library("transformers"), class_name)(**{name: str(path) for name, path in files.items()}, **options)


def clip_tokenizer(pad: str = "<|endoftext|>") -> Any:
    """A CLIP tokenizer that knows bytes and merges none."""
    words = [*ALPHABET, *(symbol + "</w>" for symbol in ALPHABET), "<|startoftext|>", "<|endoftext|>"]
    vocabulary = {word: index for index, word in enumerate(words)}
    options = {"pad_token": pad, "model_max_length": 77}
    if is_transformers_4():
        return of_files("CLIPTokenizer", vocabulary, **options)
    return library("transformers").CLIPTokenizer(vocab=vocabulary, merges=[], **options)


def t5_tokenizer() -> Any:
    """A T5 tokenizer whose pieces are single letters."""
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0), *((chr(code), -3.0) for code in range(33, 127))]
    transformers = library("transformers")
    if not is_transformers_4():
        return transformers.T5Tokenizer(vocab=pieces, extra_ids=0, model_max_length=512)
    tokenizers = library("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.Unigram(pieces, unk_id=2))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    made.decoder = tokenizers.decoders.Metaspace()
    made.post_processor = tokenizers.processors.TemplateProcessing(single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 1)])
    return transformers.T5TokenizerFast(tokenizer_object=made, extra_ids=0, model_max_length=512)


def bert_tokenizer(words: list[str]) -> Any:
    """A BERT tokenizer of these words and word ends."""
    make = library("transformers").BertTokenizer
    if not is_transformers_4():
        return make(vocab={word: index for index, word in enumerate(words)}, model_max_length=64)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "vocab.txt")
        file.write_text("\n".join(words), encoding="utf-8")
        return make(vocab_file=str(file), model_max_length=64)


def clip_text(width: int = 32, *, projected: bool = False, positions: int = 77) -> Any:
    """A CLIP text encoder of two layers."""
    config = library("transformers").CLIPTextConfig(
        bos_token_id=512,
        eos_token_id=513,
        pad_token_id=513,
        hidden_size=width,
        intermediate_size=2 * width,
        num_attention_heads=4,
        num_hidden_layers=2,
        vocab_size=520,
        projection_dim=width,
        max_position_embeddings=positions,
    )
    name = "CLIPTextModelWithProjection" if projected else "CLIPTextModel"
    return getattr(library("transformers"), name)(config).eval()


def t5_text() -> Any:
    """A T5 encoder of two layers, with dropout that evaluation must switch off."""
    transformers = library("transformers")
    config = transformers.T5Config(vocab_size=120, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=2, dropout_rate=0.1)
    return transformers.T5EncoderModel(config).eval()


def vae(
    channels: int = 4,
    scaling_factor: float = 0.18215,
    shift_factor: float | None = None,
    seed: int = 0,
    widths: tuple[int, ...] = (8, 16),
    **options: Any,
) -> Any:
    """A VAE with a level of each width, which halves each side once less than it has levels."""
    import torch

    torch.manual_seed(seed)
    return (
        library("diffusers")
        .AutoencoderKL(
            block_out_channels=widths,
            down_block_types=["DownEncoderBlock2D"] * len(widths),
            up_block_types=["UpDecoderBlock2D"] * len(widths),
            latent_channels=channels,
            norm_num_groups=4,
            layers_per_block=1,
            sample_size=64,
            scaling_factor=scaling_factor,
            shift_factor=shift_factor,
            **options,
        )
        .eval()
    )


def without_denoiser(make: Callable[..., Any], **parts: Any) -> Any:
    """A Stable Diffusion pipeline of these parts, without U-Net and scheduler; `make` is its class, or another way to it."""
    try:
        return make(**parts, unet=None, scheduler=None)
    except AttributeError:  # before diffusers 0.33 it looks into both, and can give them up only afterwards
        diffusers = library("diffusers")
        blocks = {"down_block_types": ["DownBlock2D"], "up_block_types": ["UpBlock2D"], "mid_block_type": None}
        unet = diffusers.UNet2DConditionModel(**blocks, block_out_channels=(32,))
        made = make(**parts, unet=unet, scheduler=diffusers.DDIMScheduler(steps_offset=1, clip_sample=False))
        made.register_modules(unet=None, scheduler=None)
        return made


def sdxl() -> Any:
    """A Stable Diffusion XL pipeline without a denoiser."""
    return without_denoiser(
        library("diffusers").StableDiffusionXLPipeline,
        vae=vae(scaling_factor=0.13025),
        text_encoder=clip_text(),
        text_encoder_2=clip_text(width=48, projected=True),
        tokenizer=clip_tokenizer(),
        tokenizer_2=clip_tokenizer(pad="!"),
    )


def flux() -> Any:
    """A FLUX.1 pipeline without a denoiser."""
    return library("diffusers").FluxPipeline(
        scheduler=None,
        vae=vae(16, 0.3611, 0.1159, use_quant_conv=False, use_post_quant_conv=False),
        text_encoder=clip_text(),
        tokenizer=clip_tokenizer(),
        text_encoder_2=t5_text(),
        tokenizer_2=t5_tokenizer(),
        transformer=None,
    )
