"""How busy encoding keeps the encoder: `python3 scripts/bench/encode.py [--device cuda --size real] [--json]`.

Random weights; by default small models on the CPU, with `--size real` those of SDXL and T5-XXL (for a GPU). All in one run:

    pictures    `cs.precompute` of JPEGs of 1024 x 1024      /  the VAE's encoder alone on tensors that are there
                                                              /  a loop as trainers have it: one picture at a time, PIL Lanczos, nothing
                                                                 overlapped, a file for each
    captions    `cs.precompute` of captions of lognormal length (mean 72 tokens, at most 512) through a masked T5
                                                              /  the encoder alone on the same captions, padded to 512
                                                              /  the loop, one caption at a time padded to 512
    pipeline    `cs.precompute` of the same captions through PixArt-Sigma's pipeline, which pads to 300
                                                              /  its encoder alone on tokens padded to 300
                                                              /  the same `cs.precompute` with `exact_padding`: padded to 300
    compiled    the VAE's encoder under `torch.compile`       /  the same, eager

The small VAE is the first of some that costs 10 to 20 times what decoding a picture does; the notes say how many. Ours, the encoder alone
and the loop take turns; ratios are medians of RUNS turns, and models are warm. What ours does once (listing, planning, loading the model,
the catalog) is part of its time. `of matmul` holds the encoder alone against a matrix product of the same dtype measured here, and the
notes say which stage the report names as limiting.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

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
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image

import cachestore as cs
from cachestore.jobs.share.report import Report

RUNS = 3
SIDE = 1024
MEAN_TOKENS, MOST_TOKENS, SIGMA = 72, 512, 0.7
WORDS = 2_000
LEAST_RATIO, MOST_RATIO = 10.0, 20.0
"""What a small VAE costs, in decodings of a picture."""
SMALL_VAES = (
    (4, 4, 4, 4),
    (4, 8, 8, 8),
    (8, 8, 8, 8),
    (8, 8, 16, 16),
    (8, 16, 16, 16),
    (12, 16, 16, 16),
    (16, 16, 32, 32),
    (24, 32, 32, 32),
)
"""Widths of the blocks of VAEs without attention, which at 1024 x 1024 would cost more than all the rest."""


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


Turn = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Turns:
    """Seconds that ours, the encoder alone and the loop took, turn by turn."""

    ours: Sequence[float]
    alone: Sequence[float]
    peer: Sequence[float]

    def row(self, what: str, count: int, fraction: float, notes: str) -> Row:
        """Rates by the medians, and the medians of each turn's ratios."""
        ours, alone, peer = (statistics.median(times) for times in (self.ours, self.alone, self.peer))
        of_alone = statistics.median(two / one for one, two in zip(self.ours, self.alone, strict=True))
        of_peer = statistics.median(two / one for one, two in zip(self.ours, self.peer, strict=True))
        return Row(what, count / ours, count / alone, count / peer, of_alone, of_peer, fraction / alone, notes)


def take_turns(ours: Turn, alone: Turn, peer: Turn) -> Turns:
    """RUNS turns after one of each that warms up."""
    for work in (ours, alone, peer):
        work()
    times = [(ours(), alone(), peer()) for _run in range(RUNS)]
    return Turns(*([turn[index] for turn in times] for index in range(3)))


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


def vae_of(widths: tuple[int, int, int, int], *, layers: int, groups: int, attention: bool = True) -> Any:
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
        "mid_block_add_attention": attention,
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


def laid_out(vae: Any, device: torch.device) -> Any:
    """A VAE with its memory laid out as ours lays it out."""
    return vae.to(memory_format=torch.channels_last) if device.type == "cpu" or next(vae.parameters()).dtype != torch.float32 else vae


def fitting_vae(paths: Sequence[Path], device: torch.device) -> tuple[Any, float]:
    """The smallest VAE that costs at least 10 decodings of a picture, and how many it costs."""
    batch = to_tensor([decode(paths[0])], torch.float32, device)
    for widths in SMALL_VAES:
        vae = laid_out(vae_of(widths, layers=1, groups=4, attention=False).to(device), device)
        with torch.inference_mode():
            pairs = [(seconds(lambda vae=vae: vae.encode(batch), device), seconds(lambda: decode(paths[0]), device)) for _pair in range(9)]
        ratio = statistics.median(one / other for one, other in pairs[1:])
        if ratio >= LEAST_RATIO:
            return vae, ratio
    sys.exit("no small VAE costs 10 times what decoding does on this machine: use --size real")


def bench_pictures(folder: Path, count: int, device: torch.device, size: Literal["small", "real"]) -> Row:
    """JPEGs to latents."""
    paths = make_pictures(folder / "pictures", count)
    dtype = torch.bfloat16 if size == "real" else torch.float32
    vae, cost = (real_vae(), 0.0) if size == "real" else fitting_vae(paths, device)
    model = folder / "vae"
    vae.save_pretrained(model)
    vae = laid_out(vae.to(device, dtype), device)
    stores, reports = (folder / f"store {run}" for run in range(99)), list[Report]()

    def ours() -> float:
        begin = time.perf_counter()
        options: dict[str, Any] = {"device": str(device), "vae_dtype": str(dtype).removeprefix("torch."), "resolution": SIDE}
        reports.append(cs.precompute(paths[0].parent, model=model, store=next(stores), encode=("latents",), inline=True, **options))
        assert reports[-1].encoded == count, reports[-1]
        return time.perf_counter() - begin

    batch_size = 16 if device.type == "cuda" else 1
    resident = [
        to_tensor([decode(path) for path in paths[start : start + batch_size]], dtype, device) for start in range(0, count, batch_size)
    ]
    peers = folder / "peer"
    peers.mkdir()

    def peer() -> None:
        for path in paths:
            latents = vae.encode(to_tensor([decode(path)], dtype, device)).latent_dist.sample().cpu()
            torch.save(latents, peers / f"{path.stem}.pt")

    with torch.inference_mode():
        turns = take_turns(
            ours,
            lambda: seconds(lambda: [vae.encode(batch).latent_dist.parameters.cpu() for batch in resident], device),
            lambda: seconds(peer, device),
        )
    fraction = module_flops(vae.encode, resident[0][:1]) * count / matmul_flops(dtype, device)
    notes = f"{'VAE of SDXL' if size == 'real' else f'VAE = {cost:.1f} decodings'}; {reports[-1].stages['limiting']} limits"
    return turns.row("pictures", count, fraction, notes)


def bench_compiled(folder: Path, count: int, device: torch.device, size: Literal["small", "real"]) -> Row:
    """What `--compile` makes of the VAE's encoder at one shape. Compiling itself is not counted."""
    paths = make_pictures(folder / "pictures", min(count, 16))
    dtype = torch.bfloat16 if size == "real" else torch.float32
    vae = laid_out((real_vae() if size == "real" else fitting_vae(paths, device)[0]).to(device, dtype), device)
    batch = to_tensor([decode(path) for path in paths[: 16 if device.type == "cuda" else 1]], dtype, device)
    compiled: Any = torch.compile(vae.encoder, dynamic=False)

    def turn(encoder: Callable[[torch.Tensor], torch.Tensor]) -> float:
        return seconds(lambda: encoder(batch).cpu(), device)

    with torch.inference_mode():
        turns = take_turns(lambda: turn(compiled), lambda: turn(vae.encoder), lambda: turn(vae.encoder))
    flops = module_flops(vae.encoder, batch)
    rate = matmul_flops(dtype, device)
    notes = f"for {list(batch.shape)}, the others eager; compiled it has {flops / statistics.median(turns.ours) / rate:.2f} of matmul"
    return turns.row("compiled", len(batch), flops / rate, notes)


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

    stores, reports = (folder / f"text store {run}" for run in range(99)), list[Report]()

    def ours() -> float:
        begin = time.perf_counter()
        options: dict[str, Any] = {"device": str(device), "text_dtype": str(dtype).removeprefix("torch.")}
        reports.append(cs.precompute(source, model=model_folder, store=next(stores), encode=("text",), inline=True, **options))
        assert reports[-1].encoded == count + 1, reports[-1]
        return time.perf_counter() - begin

    batch_size = 64 if device.type == "cuda" else 4
    padded = [
        tokenizer(captions[start : start + batch_size], padding="max_length", max_length=MOST_TOKENS, return_tensors="pt").to(device)
        for start in range(0, count, batch_size)
    ]
    peers = folder / "text peer"
    peers.mkdir()

    def peer() -> None:
        for number, caption in enumerate(captions):
            one = tokenizer([caption], padding="max_length", max_length=MOST_TOKENS, return_tensors="pt").to(device)
            torch.save(model(**one).last_hidden_state.cpu(), peers / f"{number}.pt")

    with torch.inference_mode():
        turns = take_turns(
            ours,
            lambda: seconds(lambda: [model(**batch).last_hidden_state.cpu() for batch in padded], device),
            lambda: seconds(peer, device),
        )
    fraction = module_flops(model, **padded[0]) / len(padded[0]["input_ids"]) * count / matmul_flops(dtype, device)
    tokens = statistics.mean(len(caption.split()) + 1 for caption in captions)
    notes = f"mean {tokens:.0f} tokens; encoder alone is padded to {MOST_TOKENS}; {reports[-1].stages['limiting']} limits"
    return turns.row("captions", count, fraction, notes)


PIXART_TOKENS = 300


def bench_pipeline(folder: Path, count: int, device: torch.device, size: Literal["small", "real"]) -> Row:
    """Captions to embeddings through a pipeline whose text encoder is given a mask, with and without length buckets."""
    import diffusers

    dtype = torch.bfloat16 if size == "real" else torch.float32
    encoder, tokenizer = text_model(folder / "text", size)
    none: dict[str, Any] = dict.fromkeys(("vae", "transformer", "scheduler"))
    model = folder / "pixart"
    diffusers.PixArtSigmaPipeline(tokenizer=tokenizer, text_encoder=encoder, **none).save_pretrained(model)
    captions = make_captions(count)
    source = folder / "captions.txt"
    source.write_text("\n".join(captions) + "\n")

    def precompute(run: str, encode_args: dict[str, bool]) -> float:
        begin = time.perf_counter()
        options: dict[str, Any] = {"device": str(device), "text_dtype": str(dtype).removeprefix("torch."), "encode_args": encode_args}
        report = cs.precompute(source, model=model, store=folder / f"store {run}", encode=("text",), inline=True, **options)
        assert report.encoded == count + 1, report
        return time.perf_counter() - begin

    kinds = {"bucketed": {}, "exact": {"exact_padding": True}}
    rounds = [{kind: precompute(f"{kind} {run}", args) for kind, args in kinds.items()} for run in range(RUNS + 1)][1:]
    ours_seconds, exact_seconds = (statistics.median(one[kind] for one in rounds) for kind in kinds)
    encoder = encoder.to(device, dtype)
    batch_size = 64 if device.type == "cuda" else 6
    given: dict[str, Any] = {"padding": "max_length", "max_length": PIXART_TOKENS, "truncation": True, "return_tensors": "pt"}
    padded = [tokenizer(captions[start : start + batch_size], **given).to(device) for start in range(0, count, batch_size)]
    with torch.inference_mode():
        alone = median_seconds(lambda: [encoder(**batch).last_hidden_state.cpu() for batch in padded], device)
    fraction = module_flops(encoder, **padded[0]) / len(padded[0]["input_ids"]) * count / alone / matmul_flops(dtype, device)
    return Row(
        "pipeline",
        count / ours_seconds,
        count / alone,
        count / exact_seconds,
        alone / ours_seconds,
        statistics.median(one["exact"] / one["bucketed"] for one in rounds),
        fraction,
        f"PixArt-Sigma; the peer is `exact_padding`, to {PIXART_TOKENS}",
    )


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="How busy encoding keeps the encoder.")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--size", choices=("small", "real"), default="small")
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--captions", type=int, default=96)
    parser.add_argument("--only", choices=("pictures", "captions", "pipeline", "compiled"))
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    benches = {
        "pictures": (bench_pictures, arguments.images),
        "captions": (bench_captions, arguments.captions),
        "pipeline": (bench_pipeline, arguments.captions),
        "compiled": (bench_compiled, arguments.images),
    }
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
