"""Times an epoch of FLUX-sized samples through the data set and DataLoader of sd-scripts: from a store, and from its own npz.

Usage: python -m cachestore.live sd-scripts --store STORE live_sd_scripts_speed.py CHECKOUT DATA [SAMPLES]      (STORE and DATA are made)
"""
# The trainer's modules are in its checkout.
# pyright: basic, reportMissingImports=false

import os
import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any


def main() -> None:
    """Make both, and read them in turn."""
    checkout, data, count = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 500
    sys.path.insert(0, str(checkout))
    import numpy as np
    import torch
    from library import flux_utils, strategy_base, strategy_flux, train_util
    from PIL import Image

    from cachestore import live

    flux_utils.get_t5xxl_actual_dtype = lambda _model: torch.float32
    data.mkdir(parents=True)
    for number in range(count):
        Image.fromarray(np.full((64, 64, 3), number % 256, np.uint8)).resize((1024, 1024)).save(data / f"{number:04}.bmp")
        (data / f"{number:04}.txt").write_text(f"picture {number}")

    class Vae(torch.nn.Module):
        device, dtype = torch.device("cpu"), torch.float32

        def encode(self, pixels: Any) -> Any:
            return torch.randn(len(pixels), 16, 128, 128)

    class Text(strategy_flux.FluxTextEncodingStrategy):
        def encode_tokens(self, tokenize_strategy: Any, models: Any, tokens: Any, apply_t5_attn_mask: Any = None) -> Any:
            count = len(tokens[0])
            return [torch.randn(count, 768), torch.randn(count, 512, 4096), torch.zeros(count, 512, 3), tokens[2]]

    tokenize = object.__new__(strategy_flux.FluxTokenizeStrategy)
    type(tokenize).tokenize = lambda _self, text: [
        torch.zeros(len(text), 77),
        torch.zeros(len(text), 512),
        torch.ones(len(text), 512).long(),
    ]
    for kind, strategy in (
        (strategy_base.LatentsCachingStrategy, strategy_flux.FluxLatentsCachingStrategy(True, 4, False)),
        (strategy_base.TextEncoderOutputsCachingStrategy, strategy_flux.FluxTextEncoderOutputsCachingStrategy(True, 4, False)),
        (strategy_base.TokenizeStrategy, tokenize),
        (strategy_base.TextEncodingStrategy, Text()),
    ):
        kind._strategy = strategy
    off: dict[str, Any] = dict.fromkeys(
        ("keep_tokens_separator", "secondary_separator", "caption_prefix", "caption_suffix", "class_tokens")
    )
    off |= dict.fromkeys(
        ("shuffle_caption", "enable_wildcard", "color_aug", "random_crop", "is_reg", "cache_info", "flip_aug", "alpha_mask"), False
    )
    off |= dict.fromkeys(
        ("keep_tokens", "token_warmup_min", "token_warmup_step", "caption_dropout_every_n_epochs", "caption_tag_dropout_rate"), 0
    )
    subset = train_util.DreamBoothSubset(
        image_dir=str(data),
        caption_extension=".txt",
        num_repeats=1,
        caption_separator=",",
        face_crop_aug_range=None,
        caption_dropout_rate=0,
        **off,
    )
    shared = {"network_multiplier": 1.0, "prior_loss_weight": 1.0, "debug_dataset": False, "validation_split": 0.0, "validation_seed": None}
    buckets = {"enable_bucket": True, "min_bucket_reso": 256, "max_bucket_reso": 2048, "bucket_reso_steps": 64, "bucket_no_upscale": False}
    one = train_util.DreamBoothDataset([subset], True, 1, (1024, 1024), **shared, **buckets, resize_interpolation=None)
    one.make_buckets()
    one.set_current_strategies()
    accelerator = SimpleNamespace(num_processes=1, process_index=0, device="cpu")
    one.new_cache_latents(Vae(), accelerator)
    one.new_cache_text_encoder_outputs([None, None], accelerator)
    names: dict[str, list[tuple[str, str]]] = {"store": [], "npz": []}
    for info in one.image_data.values():
        files = (str(data / f"{Path(info.image_key).stem}_flux.npz"), str(data / f"{Path(info.image_key).stem}_flux_te.npz"))
        for file, name in zip(files, (info.latents_npz, info.text_encoder_outputs_npz), strict=True):
            np.savez(file, **live.current().get(name))
        names["store"].append((info.latents_npz, info.text_encoder_outputs_npz))
        names["npz"].append(files)

    def forget() -> None:
        for path in [*data.glob("*.npz"), *Path(live.current().store.layout.root).rglob("*.safetensors")]:
            file = os.open(path, os.O_RDONLY)
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)

    def epoch(of: str, workers: int) -> float:
        for info, (latents, text) in zip(one.image_data.values(), names[of], strict=True):
            info.latents_npz, info.text_encoder_outputs_npz = latents, text
        loader = torch.utils.data.DataLoader(one, batch_size=1, shuffle=True, collate_fn=lambda batch: batch[0], num_workers=workers)
        begun = time.perf_counter()
        assert sum(1 for _ in loader) == count
        return time.perf_counter() - begun

    for workers in (0, 2):
        for is_cold in (False, True):
            found: dict[str, list[float]] = {"store": [], "npz": []}
            for turn in range(6):
                for of in ("store", "npz") if turn % 2 else ("npz", "store"):
                    if is_cold:
                        forget()
                    seconds = epoch(of, workers)
                    if turn:
                        found[of].append(seconds)
            reported = {
                of: f"{min(times) / count * 1000:.2f} ms (median {statistics.median(times) / count * 1000:.2f})"
                for of, times in found.items()
            }
            ratio = (
                min(found["npz"]) / min(found["store"]),
                statistics.median(a / b for a, b in zip(found["npz"], found["store"], strict=True)),
            )
            print(
                f"{workers} workers, {'cold' if is_cold else 'warm'}: {reported}; ratio {ratio[0]:.2f}, of pairs {ratio[1]:.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
