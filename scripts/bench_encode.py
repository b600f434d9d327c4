"""How busy encoding keeps the encoder: `python3 scripts/bench_encode.py [--device cuda --size real] [--json]`.

Random weights; by default small models on the CPU, with `--size real` those of SDXL and T5-XXL (for a GPU). All in one run:

    pictures    `cs.precompute` of JPEGs of 1024 x 1024      /  the VAE's encoder alone on tensors that are there
                                                              /  a loop as trainers have it: one picture at a time, PIL Lanczos, nothing
                                                                 overlapped, a file for each
    captions    `cs.precompute` of captions of lognormal length (mean 72 tokens, at most 512) through a masked T5
                                                              /  the encoder alone on the same captions, padded to 512
                                                              /  the loop, one caption at a time padded to 512

The small VAE is the first of some that costs at least 10 times what decoding a picture does; the notes say how many. Each figure is the
median of RUNS; models are warm. `share of matmul` holds the encoder alone against a matrix product of the same dtype measured here.
"""

import environment

if __name__ == "__main__":
    environment.enter()

import argparse
import io
import json
import math
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image

import cachestore as cs

RUNS = 3
SIDE = 1024
MEAN_TOKENS, MOST_TOKENS, SIGMA = 72, 512, 0.7
WORDS = 2_000
LEAST_RATIO = 10.0
"""What a small VAE costs at least, in decodings of a picture."""


@dataclass(frozen=True, slots=True)
class Row:
    """One comparison; rates in items a second."""

    what: str
    ours: float
    encoder_only: float
    peer: float
    of_encoder_only: float
    of_peer: float
    share_of_matmul: float
    notes: str


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """How long a piece of work takes, the device's part included."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begin = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin


def median_seconds(work: Callable[[], object], device: torch.device) -> float:
    """The median of several runs after one that warms up."""
    work()
    return statistics.median(seconds(work, device) for _run in range(RUNS))


def matmul_flops(dtype: torch.dtype, device: torch.device) -> float:
    """Operations a second of a large matrix product, the most that an encoder could reach here."""
    side = 8192 if device.type == "cuda" else 1024
    one, two = (torch.randn(side, side, dtype=dtype, device=device) for _matrix in range(2))
    with torch.inference_mode():
        return 2 * side**3 / median_seconds(lambda: one @ two, device)


def module_flops(module: Callable[..., Any], *arguments: Any, **named: Any) -> int:
    """Operations of one call, counted."""
    from torch.utils.flop_counter import FlopCounterMode

    with torch.inference_mode(), FlopCounterMode(display=False) as counter:
        module(*arguments, **named)
    return counter.get_total_flops()


# Pictures


def make_pictures(folder: Path, count: int) -> list[Path]:
    """JPEGs with soft structure: noise that was made larger, of about 300 KB each."""
    folder.mkdir()
    paths: list[Path] = []
    for number in range(count):
        coarse = np.random.default_rng(number).integers(0, 256, (SIDE // 8, SIDE // 8, 3), dtype=np.uint8)
        path = folder / f"{number:04}.jpg"
        Image.fromarray(coarse).resize((SIDE, SIDE), Image.Resampling.BICUBIC).save(path, quality=92)
        paths.append(path)
    return paths


def vae_of(widths: tuple[int, int, int, int], *, layers: int, groups: int) -> Any:
    """A VAE of SD's layout with random weights."""
    import diffusers

    shape: dict[str, Any] = {
        "block_out_channels": widths,
        "down_block_types": ("DownEncoderBlock2D",) * 4,
        "up_block_types": ("UpDecoderBlock2D",) * 4,
        "layers_per_block": layers,
        "norm_num_groups": groups,
        "latent_channels": 4,
        "sample_size": SIDE,
    }
    return diffusers.AutoencoderKL(**shape).eval()


def real_vae() -> Any:
    """SDXL's VAE."""
    return vae_of((128, 256, 512, 512), layers=2, groups=32)


def decode(path: Path) -> np.ndarray[Any, Any]:
    """As trainers do: PIL, Lanczos to the bucket, to an array."""
    with Image.open(io.BytesIO(path.read_bytes())) as picture:
        return np.asarray(picture.convert("RGB").resize((SIDE, SIDE), Image.Resampling.LANCZOS))


def to_tensor(pixels: Sequence[np.ndarray[Any, Any]], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """uint8 pictures to a batch in -1..1."""
    raw = torch.from_numpy(np.stack(pixels)).to(device)
    return raw.permute(0, 3, 1, 2).contiguous().float().div(127.5).sub(1).to(dtype)


def fitting_vae(paths: Sequence[Path], device: torch.device) -> tuple[Any, float]:
    """The smallest VAE that costs at least 10 decodings of a picture, and how many it costs."""
    plain = median_seconds(lambda: decode(paths[0]), device)
    for width in (8, 12, 16, 24, 32, 48, 64):
        vae = vae_of((width, 2 * width, 2 * width, 2 * width), layers=1, groups=4).to(device)
        batch = to_tensor([decode(paths[0])], torch.float32, device)
        with torch.inference_mode():
            ratio = median_seconds(lambda vae=vae, batch=batch: vae.encode(batch), device) / plain
        if ratio >= LEAST_RATIO:
            return vae, ratio
    sys.exit("no small VAE costs 10 times what decoding does on this machine: use --size real")


def bench_pictures(folder: Path, count: int, device: torch.device, size: Literal["small", "real"]) -> Row:
    """JPEGs to latents."""
    paths = make_pictures(folder / "pictures", count)
    dtype = torch.bfloat16 if size == "real" else torch.float32
    vae, notes = (real_vae(), "SDXL's VAE") if size == "real" else fitting_vae(paths, device)
    if not isinstance(notes, str):
        notes = f"VAE = {notes:.1f} decodings"
    model = folder / "vae"
    vae.save_pretrained(model)
    vae = vae.to(device, dtype)

    def ours(run: int) -> float:
        store = folder / f"store {run}"
        begin = time.perf_counter()
        name = str(dtype).removeprefix("torch.")
        report = cs.precompute(
            paths[0].parent, model=model, store=store, encode=("latents",), resolution=SIDE, inline=True, device=str(device), vae_dtype=name
        )
        assert report.encoded == count, report
        return time.perf_counter() - begin

    ours(-1)
    ours_seconds = statistics.median(ours(run) for run in range(RUNS))
    batch_size = 16 if device.type == "cuda" else 1
    resident = [
        to_tensor([decode(path) for path in paths[start : start + batch_size]], dtype, device) for start in range(0, count, batch_size)
    ]
    with torch.inference_mode():
        alone = median_seconds(lambda: [vae.encode(batch).latent_dist.parameters.cpu() for batch in resident], device)
        peers = folder / "peer"
        peers.mkdir()

        def peer() -> None:
            for path in paths:
                latents = vae.encode(to_tensor([decode(path)], dtype, device)).latent_dist.sample().cpu()
                torch.save(latents, peers / f"{path.stem}.pt")

        peer_seconds = median_seconds(peer, device)
    flops = module_flops(vae.encode, resident[0][:1]) * count
    share = flops / alone / matmul_flops(dtype, device)
    return Row(
        "pictures",
        count / ours_seconds,
        count / alone,
        count / peer_seconds,
        alone / ours_seconds,
        peer_seconds / ours_seconds,
        share,
        notes,
    )


# Captions


def make_captions(count: int) -> list[str]:
    """Captions of one-token words: lognormal lengths with a mean of 72, at most 510 beside the two special tokens."""
    chosen = random.Random(0)
    mu = math.log(MEAN_TOKENS) - SIGMA**2 / 2
    lengths = [max(1, min(MOST_TOKENS - 2, round(chosen.lognormvariate(mu, SIGMA)))) for _caption in range(count)]
    return [" ".join(f"w{chosen.randrange(WORDS)}" for _word in range(length)) for length in lengths]


def text_model(folder: Path, size: Literal["small", "real"]) -> Any:
    """A T5 encoder with a tokenizer of whole words, saved to a folder."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast, T5Config, T5EncoderModel

    vocabulary = {"<pad>": 0, "</s>": 1, "<unk>": 2, **{f"w{n}": n + 3 for n in range(WORDS)}}
    words: Any = Tokenizer(models.WordLevel(vocabulary, "<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    special: dict[str, Any] = {f"{name}_token": token for name, token in (("pad", "<pad>"), ("eos", "</s>"), ("unk", "<unk>"))}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, model_max_length=MOST_TOKENS, **special)
    shape: dict[str, Any] = {"d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_layers": 24, "num_heads": 64} if size == "real" else {}
    small: dict[str, Any] = {"d_model": 256, "d_kv": 64, "d_ff": 1024, "num_layers": 4, "num_heads": 4}
    config = T5Config(vocab_size=len(vocabulary), feed_forward_proj="gated-gelu", **(shape or small))
    model = T5EncoderModel(config).eval()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model, tokenizer


def bench_captions(folder: Path, count: int, device: torch.device, size: Literal["small", "real"]) -> Row:
    """Captions to embeddings."""
    dtype = torch.bfloat16 if size == "real" else torch.float32
    model_folder = folder / "text"
    model, tokenizer = text_model(model_folder, size)
    model = model.to(device, dtype)
    captions = make_captions(count)
    source = folder / "captions.txt"
    source.write_text("\n".join(captions) + "\n")

    def ours(run: int) -> float:
        begin = time.perf_counter()
        name = str(dtype).removeprefix("torch.")
        store = folder / f"text store {run}"
        report = cs.precompute(source, model=model_folder, store=store, encode=("text",), inline=True, device=str(device), text_dtype=name)
        assert report.encoded == count + 1, report
        return time.perf_counter() - begin

    ours(-1)
    ours_seconds = statistics.median(ours(run) for run in range(RUNS))
    batch_size = 64 if device.type == "cuda" else 4
    padded = [
        tokenizer(captions[start : start + batch_size], padding="max_length", max_length=MOST_TOKENS, return_tensors="pt").to(device)
        for start in range(0, count, batch_size)
    ]
    with torch.inference_mode():
        alone = median_seconds(lambda: [model(**batch).last_hidden_state.cpu() for batch in padded], device)
        peers = folder / "text peer"
        peers.mkdir()

        def peer() -> None:
            for number, caption in enumerate(captions):
                one = tokenizer([caption], padding="max_length", max_length=MOST_TOKENS, return_tensors="pt").to(device)
                torch.save(model(**one).last_hidden_state.cpu(), peers / f"{number}.pt")

        peer_seconds = median_seconds(peer, device)
    flops = module_flops(model, **padded[0]) / len(padded[0]["input_ids"]) * count
    share = flops / alone / matmul_flops(dtype, device)
    tokens = statistics.mean(len(caption.split()) + 1 for caption in captions)
    notes = f"mean {tokens:.0f} tokens; encoder alone is padded to {MOST_TOKENS}"
    return Row(
        "captions",
        count / ours_seconds,
        count / alone,
        count / peer_seconds,
        alone / ours_seconds,
        peer_seconds / ours_seconds,
        share,
        notes,
    )


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="How busy encoding keeps the encoder.")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--size", choices=("small", "real"), default="small")
    parser.add_argument("--images", type=int, default=24)
    parser.add_argument("--captions", type=int, default=96)
    parser.add_argument("--only", choices=("pictures", "captions"))
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    benches = {"pictures": (bench_pictures, arguments.images), "captions": (bench_captions, arguments.captions)}
    rows: list[Row] = []
    for name, (bench, count) in benches.items():
        if arguments.only in {None, name}:
            with tempfile.TemporaryDirectory(prefix="cachestore-bench-") as folder:
                rows.append(bench(Path(folder), count, device, arguments.size))
    machine = f"{os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}, {torch.get_num_threads()} threads, {device}"
    if arguments.json:
        print(json.dumps({"rows": [asdict(row) for row in rows], "machine": machine}))
        return 0
    print(machine)
    print(f"{'':<10} {'ours/s':>9} {'encoder/s':>10} {'peer/s':>9} {'/encoder':>9} {'/peer':>7} {'of matmul':>10}")
    for row in rows:
        rates = f"{row.what:<10} {row.ours:>9.2f} {row.encoder_only:>10.2f} {row.peer:>9.2f}"
        print(f"{rates} {row.of_encoder_only:>9.2f} {row.of_peer:>7.2f} {row.share_of_matmul:>10.2f}  {row.notes}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
