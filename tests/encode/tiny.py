"""Models of a few kilobytes: pipelines with random weights built from configs, and folders that only look like models."""

import importlib
import json
from pathlib import Path
from typing import Any

ALPHABET = [chr(code) for code in [*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 324)]]
"""The 256 symbols that byte-level tokenizers write bytes as."""


def library(name) -> Any:
    """diffusers or transformers, whose types are too narrow for pipelines that lack parts."""
    return importlib.import_module(name)


def denoiser(folder, name, class_name):
    """A denoiser nobody can load: whoever opens it fails."""
    (folder / name).mkdir()
    (folder / name / "config.json").write_text("this is no JSON")
    (folder / name / "diffusion_pytorch_model.safetensors").write_bytes(b"these are no weights")
    index = json.loads((folder / "model_index.json").read_text())
    index[name] = ["diffusers", class_name]
    (folder / "model_index.json").write_text(json.dumps(index))


def save(pipeline, folder, denoiser_name, denoiser_class):
    pipeline.save_pretrained(folder)
    denoiser(folder, denoiser_name, denoiser_class)


def clip_tokenizer(pad="<|endoftext|>"):
    words = [*ALPHABET, *(symbol + "</w>" for symbol in ALPHABET), "<|startoftext|>", "<|endoftext|>"]
    vocabulary = {word: place for place, word in enumerate(words)}
    return library("transformers").CLIPTokenizer(vocab=vocabulary, merges=[], pad_token=pad, model_max_length=77)


def t5_tokenizer():
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0), *((chr(code), -3.0) for code in range(33, 127))]
    return library("transformers").T5Tokenizer(vocab=pieces, extra_ids=0, model_max_length=512)


def clip_text(width=32, projected=False):
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
    )
    name = "CLIPTextModelWithProjection" if projected else "CLIPTextModel"
    return getattr(library("transformers"), name)(config).eval()


def t5_text():
    return (
        library("transformers")
        .T5EncoderModel(
            library("transformers").T5Config(vocab_size=120, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, dropout_rate=0.1)
        )
        .eval()
    )


def vae(channels=4, scaling_factor=0.18215, shift_factor=None, seed=0, **options):
    import torch

    torch.manual_seed(seed)
    return (
        library("diffusers")
        .AutoencoderKL(
            block_out_channels=(8, 16),
            down_block_types=["DownEncoderBlock2D"] * 2,
            up_block_types=["UpDecoderBlock2D"] * 2,
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


def sd15():
    return library("diffusers").StableDiffusionPipeline(
        vae=vae(),
        text_encoder=clip_text(),
        tokenizer=clip_tokenizer(),
        unet=None,
        scheduler=None,
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def sdxl():
    return library("diffusers").StableDiffusionXLPipeline(
        vae=vae(scaling_factor=0.13025),
        text_encoder=clip_text(),
        text_encoder_2=clip_text(width=48, projected=True),
        tokenizer=clip_tokenizer(),
        tokenizer_2=clip_tokenizer(pad="!"),
        unet=None,
        scheduler=None,
    )


def flux():
    return library("diffusers").FluxPipeline(
        scheduler=None,
        vae=vae(16, 0.3611, 0.1159, use_quant_conv=False, use_post_quant_conv=False),
        text_encoder=clip_text(),
        tokenizer=clip_tokenizer(),
        text_encoder_2=t5_text(),
        tokenizer_2=t5_tokenizer(),
        transformer=None,
    )


PIPELINES: dict[str, Any] = {
    "sd15": (sd15, "unet", "UNet2DConditionModel"),
    "sdxl": (sdxl, "unet", "UNet2DConditionModel"),
    "flux": (flux, "transformer", "FluxTransformer2DModel"),
}


def plain(folder, **options):
    """A BERT with its tokenizer, saved flat: what a transformers text-encoder folder looks like."""
    import torch

    torch.manual_seed(1)
    words = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        *(chr(code) for code in range(97, 123)),
        *("##" + chr(code) for code in range(97, 123)),
    ]
    tokenizer = library("transformers").BertTokenizer(vocab={word: place for place, word in enumerate(words)}, model_max_length=64)
    model = (
        library("transformers")
        .BertModel(
            library("transformers").BertConfig(
                vocab_size=len(words),
                hidden_size=32,
                intermediate_size=64,
                num_attention_heads=4,
                num_hidden_layers=2,
                max_position_embeddings=64,
            ),
            **options,
        )
        .eval()
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model, tokenizer


# Folders that only look like models: for planning, which reads no weights


def look_alike(folder: Path, class_name="StableDiffusionPipeline"):
    """A pipeline's folder whose weights are a few letters."""
    text = ["transformers", "CLIPTextModel"]
    index = {
        "_class_name": class_name,
        "vae": ["diffusers", "AutoencoderKL"],
        "text_encoder": text,
        "tokenizer": ["transformers", "CLIPTokenizer"],
    }
    write(folder / "vae/config.json", {"_class_name": "AutoencoderKL", "latent_channels": 4, "block_out_channels": [8, 16, 16, 16]})
    write(folder / "vae/diffusion_pytorch_model.safetensors", "vae weights")
    write(folder / "text_encoder/config.json", {"model_type": "clip_text_model", "architectures": ["CLIPTextModel"], "hidden_size": 32})
    write(folder / "text_encoder/model.safetensors", "text weights")
    write(folder / "tokenizer/tokenizer_config.json", {"model_max_length": 77})
    write(folder / "tokenizer/vocab.json", {"a": 0})
    write(folder / "tokenizer/merges.txt", "")
    write(folder / "README.md", "about this model")
    write(folder / "model_index.json", index)
    denoiser(folder, "unet", "UNet2DConditionModel")
    return folder


def look_alike_text(folder: Path):
    """A text encoder's folder whose weights are a few letters."""
    write(folder / "config.json", {"model_type": "bert", "architectures": ["BertModel"], "max_position_embeddings": 64})
    write(folder / "model.safetensors", "weights")
    write(folder / "tokenizer.json", {})
    write(folder / "tokenizer_config.json", {"model_max_length": 512})
    return folder


def look_alike_vae(folder: Path, **config):
    """A VAE's folder whose weights are a few letters."""
    write(folder / "config.json", {"_class_name": "AutoencoderKL", "block_out_channels": [8, 16], **config})
    write(folder / "diffusion_pytorch_model.safetensors", "weights")
    return folder


def write(path: Path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))
