"""Runs the caching and loading code of diffusion-pipe, for `conformance_trainers.py`. It needs Python 3.12.

Its `Dataset` lists, resizes, caches and loads, with the functions of its own FLUX and SDXL pipelines. Text encoders and VAEs are stand-ins.
"""
# The trainer's modules are in its checkout.
# pyright: reportMissingImports=false

import copy
import importlib
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from conformance_trainers import Case, Loaded, as_bits, latents_of, noise_of

_CHANNELS = {"flux": 16, "sdxl": 4}
_CONSTANTS = {"flux": (0.3611, 0.1159), "sdxl": (0.13025, None)}
_TEXT = {"t5_embed": "prompt_embeds", "clip_embed": "pooled_prompt_embeds"}


class _Model:
    """A stand-in of a model that is not moved to a GPU."""

    device, dtype = torch.device("cpu"), torch.bfloat16

    def load_model_if_needed(self) -> None:
        """Do nothing: there is nothing to load."""


class _Vae(_Model):
    """Makes latents of pixels."""

    def __init__(self, driver: "DiffusionPipe", family: str) -> None:
        factor, shift = _CONSTANTS[family]
        self.driver, self.channels = driver, _CHANNELS[family]
        self.config = SimpleNamespace(scaling_factor=factor, shift_factor=shift)

    def encode(self, pixels: torch.Tensor) -> Any:
        """Encode `[B, 3, H, W]`."""
        self.driver.encoded += 1
        made = latents_of(pixels, self.channels).to(self.dtype)
        return SimpleNamespace(latent_dist=SimpleNamespace(sample=lambda: made))


class DiffusionPipe:
    """Implements `conformance_trainers.Driver`. It only writes: diffusion-pipe deletes caches that it did not make."""

    stand_ins = ("deepspeed", "comfy", "comfy_api", "peft", "torchaudio", "accelerate", "diffusers", "transformers")
    resolution, is_beside, encoded = 256, False, 0
    cases = (
        Case("flux", "flux", "flux"),
        Case("flux with masks", "flux", "flux", masks=True),
        Case("flux with control images", "flux", "flux", controls=True),
        Case("sdxl", "sdxl", "sdxl", kinds=("latents",)),
    )

    def _pipeline(self, case: Case) -> Any:
        """Return its pipeline with stand-ins for the models."""
        self._start()
        from models import flux, sdxl

        made: Any = object.__new__({"flux": flux.FluxPipeline, "sdxl": sdxl.SDXLPipeline}[case.family])
        parts = {"vae": _Vae(self, case.family), "text_encoder": _Model(), "text_encoder_2": _Model()}
        made.config = {"model": {"dtype": torch.bfloat16}}
        made.__dict__ |= {**parts, "diffusers_pipeline": SimpleNamespace(**parts)}
        made._get_clip_prompt_embeds = lambda prompt, device: self._text(prompt, device, "clip_embed", 768)
        made._get_t5_prompt_embeds = lambda prompt, device: self._text(prompt, device, "t5_embed", 8, 4096)
        return made

    def _text(self, captions: list[str], device: torch.device, what: str, *shape: int) -> torch.Tensor:
        self.encoded += 1
        return torch.stack([noise_of(caption, what, *shape) for caption in captions]).to(device, torch.bfloat16)

    def _start(self) -> None:
        """Start torch.distributed with one process, and let deepspeed's stand-in speak of it."""
        comm = importlib.import_module("deepspeed.comm.comm")  # imported first, or a stand-in is a class

        if not torch.distributed.is_initialized():
            with tempfile.NamedTemporaryFile(delete=False) as file:
                torch.distributed.init_process_group("gloo", init_method=f"file://{file.name}.init", rank=0, world_size=1)
        stand_ins: list[Any] = [comm, importlib.import_module("deepspeed.comm")]
        for module in stand_ins:
            module.get_rank, module.barrier = lambda: 0, lambda: None
            module.get_world_group = lambda: torch.distributed.group.WORLD
        os.environ["TOKENIZERS_PARALLELISM"] = "false"

    def _cached(self, case: Case, data: Path) -> Any:
        """Let it cache what is missing, and return its dataset."""
        pipeline = self._pipeline(case)
        from utils import dataset

        folder = {"path": str(data)}
        folder |= {"mask_path": f"{data}_masks"} if case.masks else {}
        folder |= {"control_path": f"{data}_controls"} if case.controls else {}
        config = {"directory": [folder], "resolutions": [self.resolution], "enable_ar_bucket": True}
        config |= {"min_ar": 0.5, "max_ar": 2.0, "num_ar_buckets": 5}
        found = dataset.Dataset(copy.deepcopy(config), pipeline, skip_dataset_validation=True)
        manager = dataset.DatasetManager(pipeline)
        manager.register(found)
        manager.cache()
        return found

    def write(self, case: Case, data: Path, cache: Path) -> None:
        """Let it cache in `data/cache`, which is also `cache`."""
        self._cached(case, data)
        cache.symlink_to(data / "cache" / case.family)

    def read(self, case: Case, data: Path, cache: Path, batch_size: int) -> Loaded:
        """Load every batch, as training does."""
        del cache
        dataset, found = self._cached(case, data), Loaded()
        dataset.post_init(0, 1, {None: batch_size}, 1, {None: batch_size})
        for number in range(len(dataset)):
            batch = dataset[number]
            for row, (_tar, path) in enumerate(batch["image_spec"]):
                arrays = {key: as_bits(values[row]) for key, values in batch.items() if torch.is_tensor(values)}
                found[Path(path).stem, False] = arrays
        return found

    def ours(self, case: Case, sample: Mapping[str, Any], its: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        """Latents are scaled; masks and latents of control images are beside them, and no data set returns them."""
        del case
        names = {"latents": "latents", **_TEXT}
        return {key: as_bits(sample[names[key]]) if key in names else array for key, array in its.items()}


DRIVER = DiffusionPipe()
