"""Runs SimpleTuner's own `train.py` with a tiny SDXL model, and says what its steps saw, for `live_simpletuner.py`.

Usage: python live_simpletuner_train.py CHECKOUT FOLDER OUT.json [OPTION...], also behind `-m cachestore.live simpletuner --store STORE`

FOLDER has `data` (pictures with captions) and `model` (a tiny SDXL pipeline); cache files would be in `cache`. Losses are those that the
trainer hands to its accelerator. Ranks but the first add their number to the file's name. Packages that the trainer imports and that
nothing here uses have empty stand-ins.
"""
# The trainer's modules are in its checkout.
# pyright: reportMissingImports=false

import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]
import torch
from conformance.trainers_code import use_checkout

_MEDIA = "librosa", "torchcodec", "torchaudio", "imageio_ffmpeg", "webshart", "spacy", "open_clip"
_QUANTISED = "bitsandbytes", "optimum", "sdnq", "kernels", "vector_quantize_pytorch"
_OTHERS = "wandb", "skrample", "hf_transfer", "tensorboard", "cryptography", "simpletuner.helpers.models.mageflow.vendor"
EMPTY = (*_MEDIA, *_QUANTISED, *_OTHERS)
OPTIONS: dict[str, Any] = {
    "model_family": "sdxl",
    "model_type": "lora",
    "lora_rank": 2,
    "optimizer": "adamw_bf16",
    "learning_rate": 1e-3,
    "lr_scheduler": "constant",
    "lr_warmup_steps": 0,
    "mixed_precision": "no",
    "base_model_default_dtype": "fp32",
    "train_batch_size": 2,
    "max_train_steps": 4,
    "num_train_epochs": 0,
    "resolution": 128,
    "resolution_type": "pixel",
    "minimum_image_size": 0,
    "caption_dropout_probability": 0.1,
    "seed": 42,
    "report_to": "none",
    "checkpoint_step_interval": 1000,
    "validation_prompt": "a validation",
    "validation_negative_prompt": "blurry",
    "validation_step_interval": 1000,
    "validation_disable_unconditional": "true",
    "disable_benchmark": "true",
    "vae_dtype": "fp32",
    "dataloader_prefetch": "false",
}
counts = {"text": 0, "latents": 0}
losses: list[str] = []


def backends(folder: Path) -> list[dict[str, Any]]:
    """Return the trainer's description of its data sets."""
    images: dict[str, Any] = {"id": "images", "type": "local", "instance_data_dir": str(folder / "data"), "caption_strategy": "textfile"}
    images |= {"resolution": 128, "resolution_type": "pixel", "crop": True, "crop_style": "center", "crop_aspect": "preserve"}
    images |= {"minimum_image_size": 0, "cache_dir_vae": str(folder / "cache/vae"), "repeats": 2}
    text = {"id": "text", "type": "local", "dataset_type": "text_embeds", "default": True, "cache_dir": str(folder / "cache/text")}
    return [images, text]


def watch() -> None:
    """Count what is encoded, and note each loss to the bit."""
    from accelerate import Accelerator
    from diffusers import AutoencoderKL
    from transformers import CLIPTextModelWithProjection

    def counted(owner: Any, method: str, part: str) -> None:
        own = getattr(owner, method)

        def call(self: Any, given: Any, *args: Any, **kwargs: Any) -> Any:
            counts[part] += len(given)
            return own(self, given, *args, **kwargs)

        setattr(owner, method, call)

    counted(AutoencoderKL, "encode", "latents")
    counted(CLIPTextModelWithProjection, "forward", "text")
    own_backward = Accelerator.backward

    def backward(self: Any, loss: torch.Tensor, **kwargs: Any) -> None:
        losses.append(float(loss.detach()).hex())
        own_backward(self, loss, **kwargs)

    Accelerator.backward = backward
    torch.Tensor.pin_memory = lambda self, *_args, **_more: self  # needs a GPU


def main() -> None:
    """Start the trainer's script, then write what was seen."""
    checkout, folder, out = (Path(one).resolve() for one in sys.argv[1:4])
    torch.set_num_threads(1)
    use_checkout("simpletuner", checkout, EMPTY)
    (folder / "backends.json").write_text(json.dumps(backends(folder)))
    options = OPTIONS | {"pretrained_model_name_or_path": folder / "model", "pretrained_vae_model_name_or_path": folder / "model"}
    options |= {"data_backend_config": folder / "backends.json", "output_dir": folder / "output"}
    sys.argv[1:] = [*(f"--{name}={value}" for name, value in options.items()), *sys.argv[4:]]
    os.environ["CONFIG_BACKEND"] = "cmd"
    watch()
    try:
        runpy.run_path(str(checkout / "simpletuner" / "train.py"), run_name="__main__")
    finally:
        if (rank := os.environ.get("RANK", "0")) != "0":
            out = out.with_stem(f"{out.stem} {rank}")
        files = [path for path in (folder / "cache").rglob("*") if path.is_file()]
        out.write_text(json.dumps({"encoded": counts, "losses": losses, "files": len(files)}))


if __name__ == "__main__":
    main()
