"""Models of a few kilobytes: pipelines with random weights built from configs, and folders that only look like models."""

import json
from pathlib import Path
from typing import Any, NoReturn

import pytest
from packaging.version import Version

# By these names also programs find them that tests start with the repository alone on their path.
from scripts import environment
from scripts.tiny_models import (
    ALPHABET,
    bert_tokenizer,
    clip_text,
    clip_tokenizer,
    flux,
    library,
    sdxl,
    t5_text,
    t5_tokenizer,
    vae,
    without_denoiser,
)

__all__ = ["ALPHABET", "clip_text", "clip_tokenizer", "flux", "library", "sdxl", "t5_text", "t5_tokenizer", "vae"]


def diffusers_lacks(what, *, pinned=None) -> NoReturn:
    """Skip a test because the installed diffusers is older than the pinned one; where it is not, what is lacking is a failure."""
    installed = library("diffusers").__version__
    reason = f"diffusers {installed} has no {what}"
    if Version(installed) < Version(pinned or environment.pinned()["diffusers"]):
        pytest.skip(reason)
    pytest.fail(reason)


def of_diffusers(class_name) -> Any:
    """A class of diffusers. A test that needs one which is newer than the installed diffusers is skipped, and says so."""
    found = getattr(library("diffusers"), class_name, None)
    return diffusers_lacks(class_name) if found is None else found


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


def sd15():
    return without_denoiser(
        library("diffusers").StableDiffusionPipeline,
        vae=vae(),
        text_encoder=clip_text(),
        tokenizer=clip_tokenizer(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
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
    tokenizer = bert_tokenizer(words)
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
    write(folder / "config.json", {"model_type": "bert", "architectures": ["BertModel"], "max_position_embeddings": 64})
    write(folder / "model.safetensors", "weights")
    write(folder / "tokenizer.json", {})
    write(folder / "tokenizer_config.json", {"model_max_length": 512})
    return folder


def look_alike_vae(folder: Path, **config):
    write(folder / "config.json", {"_class_name": "AutoencoderKL", "block_out_channels": [8, 16], **config})
    write(folder / "diffusion_pytorch_model.safetensors", "weights")
    return folder


def write(path: Path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))
