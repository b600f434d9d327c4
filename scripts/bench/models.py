"""How fast models of real sizes are encoded: `python3 scripts/bench/models.py [--device cuda] [--resample WAY] [--only NAME] [--tiny]`.

Weights are random, and nothing is downloaded. Each model is measured as by `cachestore bench` (`cachestore.care.bench`), the host alone
once before them; batches grow from pass to pass to the size that is fastest. Prints the rows of the host and of the models in
docs/benchmarks.md. Temporary files lie in `--folder`. With `--tiny` the models are small, so that a machine without a GPU can show that
everything runs.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import environment

if __name__ == "__main__":
    environment.enter()

import argparse
import gc
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from cachestore.care.bench import BenchReport, Row, bench, bench_model
from cachestore.core.words import human_bytes
from cachestore.encode.families.resamplers import DEFAULT, RESAMPLERS
from cachestore.encode.models.random_model import CLIP_IDS, CLIP_L, FLUX_VAE, KL, REAL, T5_IDS, T5_XXL, RandomSize, random_model

BIG_G = {"hidden_size": 1280, "intermediate_size": 5120, "num_attention_heads": 20, "num_hidden_layers": 32, "projection_dim": 1280}
GEMMA_2B = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "vocab_size": 256_000,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
QWEN3_VL_4B = {
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151_936,
        "tie_word_embeddings": True,
        "rope_scaling": {"mrope_section": [24, 20, 20], "rope_type": "default"},
        "rope_theta": 5e6,
    },
    "vision_config": {
        "depth": 24,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_heads": 16,
        "out_hidden_size": 2560,
        "deepstack_visual_indexes": [5, 11, 17],
    },
}
SDXL_VAE = {**KL, "latent_channels": 4, "scaling_factor": 0.13025}

MODELS = {
    "sdxl": RandomSize(
        "SDXL (CLIP-L, CLIP bigG, its VAE)",
        "StableDiffusionXLPipeline",
        {
            "text_encoder": ("CLIPTextModel", {**CLIP_L, **CLIP_IDS}),
            "text_encoder_2": ("CLIPTextModelWithProjection", {**BIG_G, **CLIP_IDS, "vocab_size": CLIP_L["vocab_size"]}),
            "vae": ("AutoencoderKL", SDXL_VAE),
        },
        {"tokenizer": 77, "tokenizer_2": 77},
        torch.float32,
        torch.float32,
    ),
    "flux": replace(REAL, name="FLUX.1 (CLIP-L, T5-XXL, its VAE)"),
    "wan": RandomSize(
        "Wan 2.1 (UMT5-XXL, its VAE)",
        "WanPipeline",
        {"text_encoder": ("UMT5EncoderModel", {**T5_XXL, **T5_IDS, "vocab_size": 256_384}), "vae": ("AutoencoderKLWan", {})},
        {"tokenizer": 512},
        torch.bfloat16,
        torch.float32,
    ),
    "lumina2": RandomSize(
        "Lumina 2 (Gemma 2 2B, FLUX.1's VAE)",
        "Lumina2Pipeline",
        {"text_encoder": ("Gemma2Model", GEMMA_2B), "vae": ("AutoencoderKL", FLUX_VAE)},
        {"tokenizer": 8192},
        torch.bfloat16,
        torch.bfloat16,
    ),
    "krea2": RandomSize(
        "Krea 2 (Qwen3-VL 4B, its VAE)",
        "Krea2Pipeline",
        {"text_encoder": ("Qwen3VLModel", QWEN3_VL_4B), "vae": ("AutoencoderKLQwenImage", {})},
        {"tokenizer": 512},
        torch.bfloat16,
        torch.float32,
    ),
}
"""By name: what `--only` takes. Dtypes are those that `precompute` takes for the family."""

_TINY: Mapping[str, Mapping[str, Any]] = {
    "CLIPTextModel": {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4},
    "CLIPTextModelWithProjection": {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4},
    "T5EncoderModel": {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4},
    "UMT5EncoderModel": {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "vocab_size": 4_096},
    "Gemma2Model": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16, "vocab_size": 4_096},
    "Qwen3VLModel": {
        "text_config": {
            **QWEN3_VL_4B["text_config"],
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 36,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "vocab_size": 4_096,
            "rope_scaling": {"mrope_section": [4, 2, 2], "rope_type": "default"},
        },
        "vision_config": {
            **QWEN3_VL_4B["vision_config"],
            "depth": 1,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_heads": 2,
            "out_hidden_size": 64,
            "deepstack_visual_indexes": [0],
        },
    },
    "AutoencoderKL": {"block_out_channels": (4,) * 4, "norm_num_groups": 4, "layers_per_block": 1, "mid_block_add_attention": False},
    "AutoencoderKLWan": {"base_dim": 4, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1},
    "AutoencoderKLQwenImage": {"base_dim": 4, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1},
}


def tiny(size: RandomSize) -> RandomSize:
    """A small model of the same classes, in float32."""
    modules = {name: (kind, {**config, **_TINY[kind]}) for name, (kind, config) in size.modules.items()}
    return replace(size, name=f"{size.name}, tiny", modules=modules, text_dtype=torch.float32, vae_dtype=torch.float32)


def measure(size: RandomSize, device: torch.device, folder: Path | None, resample: Any) -> BenchReport:
    """Make a model, measure it and free its memory."""
    began = time.monotonic()
    model = random_model(size, device)
    _say(f"{size.name}: made in {time.monotonic() - began:.0f} s")
    found = bench_model(model, device=str(device), folder=folder, say=_say, cancel=threading.Event(), resample=resample)
    del model
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return replace(found, model=size.name)


def table_of_host(host: Sequence[Row]) -> list[str]:
    """The lines of the host's table."""
    head = f"| host alone, {host[0].cores} processors | a second | limits |", "|---|---|---|"
    return [*head, *(f"| {row.work} | {row.per_second:.1f} | {row.limiting} |" for row in host)]


HEAD = "| model | work | encoder alone | whole | whole / encoder | limits | bytes each |", "|---|---|---|---|---|---|---|"


def rows_of(report: BenchReport) -> list[str]:
    """The lines of one model in the table under HEAD."""
    lines: list[str] = []
    for alone, whole in zip(report.encoder, report.whole, strict=True):
        rates = f"{alone.per_second:.1f}/s", f"{whole.per_second:.1f}/s", f"{whole.per_second / alone.per_second:.2f}"
        lines.append(f"| {' | '.join((report.model, whole.work, *rates, whole.limiting, human_bytes(whole.bytes_each)))} |")
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print. A model that cannot be measured is named; the run goes on with the others, and ends with 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--resample", choices=RESAMPLERS, default=DEFAULT)
    parser.add_argument("--only", choices=MODELS, action="append")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--tiny", action="store_true")
    asked = parser.parse_args(arguments)
    device = torch.device(asked.device)
    about = torch.cuda.get_device_name(device) if device.type == "cuda" else "no GPU"
    print(f"{about}, torch {torch.__version__}, --resample {asked.resample}", flush=True)
    host = bench(None, device="cpu", host_only=True, folder=asked.folder, say=_say, cancel=threading.Event(), resample=asked.resample)
    print("", *table_of_host(host.host), "", *HEAD, sep="\n", flush=True)
    failed: list[str] = []
    for name in asked.only or MODELS:
        size = tiny(MODELS[name]) if asked.tiny else MODELS[name]
        try:
            print(*rows_of(measure(size, device, asked.folder, asked.resample)), sep="\n", flush=True)
        except Exception as error:  # noqa: BLE001 - a model may raise anything; the others are still measured
            failed.append(f"{size.name}: {type(error).__name__}: {error}")
    if failed:
        sys.exit("\n".join(failed))


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
