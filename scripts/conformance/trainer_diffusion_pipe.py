"""Runs the caching and loading code of diffusion-pipe, for `trainers.py`. It needs Python 3.12.

Its `Dataset` lists, resizes, caches and loads, with the functions of its own FLUX, SDXL and Wan pipelines. Text encoders and VAEs are
stand-ins, and PyAV opens videos in the place of ComfyUI.
"""
# The trainer's modules are in its checkout.
# pyright: reportMissingImports=false

import copy
import hashlib
import importlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from conformance.trainers import Case, Loaded, as_bits, clip_latents_of, clip_name, latents_of, noise_of

_CHANNELS = {"flux": 16, "sdxl": 4}
_CONSTANTS = {"flux": (0.3611, 0.1159), "sdxl": (0.13025, None)}
_CLIPS = {"claims": {"model": "stand-ins", "video_clip_mode": "single_beginning"}, "fps": 16}
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


class _WanModel(_Model):
    """A stand-in of one of Wan's models."""

    def __init__(self, driver: "DiffusionPipe") -> None:
        self.driver = driver

    def parameters(self) -> Iterator[torch.Tensor]:
        """Yield a tensor that tells device and dtype."""
        yield torch.zeros(1, dtype=self.dtype)


class _WanVae(_WanModel):
    """Makes latents of the pixels of clips."""

    clip = None

    @property
    def vae(self) -> "_WanVae":
        """The part that encodes pixels."""
        return self

    def encode(self, pixels: torch.Tensor, _scale: object) -> torch.Tensor:
        """Encode `[B, 3, F, H, W]`."""
        self.driver.encoded += 1
        return clip_latents_of(pixels, 16, 4).to(self.dtype)


class _WanText(_WanModel):
    """Tokenizes captions to bytes of their digests, and makes rows of these; rows of padding are not zeros."""

    def tokenizer(self, captions: list[str], **_options: object) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ids and mask."""
        ids = torch.tensor([list(hashlib.sha256(caption.encode()).digest()[:8]) for caption in captions])
        return ids, torch.stack([(torch.arange(8) < 1 + len(caption) % 7).long() for caption in captions])

    def __call__(self, ids: torch.Tensor, _mask: torch.Tensor) -> torch.Tensor:
        """Return `[B, 8, 64]`."""
        self.driver.encoded += 1
        return torch.stack([noise_of(str(one.tolist()), "umt5", 8, 64) for one in ids]).to(self.dtype)


class _Video:
    """Opens a video in the place of ComfyUI's class."""

    def __init__(self, path: str) -> None:
        import av

        with av.open(path) as container:
            (stream,) = container.streams.video
            rate: Any = stream.average_rate
            self.images = torch.from_numpy(np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(stream)])).float() / 255
        self.frame_rate, self.audio = rate, None

    def get_components(self) -> "_Video":
        """Return frames `[F, H, W, 3]` and their rate."""
        return self

    def get_dimensions(self) -> tuple[int, int]:
        """Return (width, height)."""
        return self.images.shape[2], self.images.shape[1]

    def get_frame_count(self) -> int:
        """Return how many frames it has."""
        return len(self.images)

    def get_frame_rate(self) -> Any:
        """Return how many frames it shows in a second."""
        return self.frame_rate


class DiffusionPipe:
    """Implements `conformance.trainers.Driver`. It only writes: diffusion-pipe deletes caches that it did not make."""

    stand_ins = (
        "deepspeed",
        "comfy",
        "comfy_api",
        "peft",
        "torchaudio",
        "accelerate",
        "diffusers",
        "transformers",
        "models.wan.t5",
        "models.wan.clip",
    )
    resolution, is_beside, encoded = 256, False, 0
    cases = (
        Case("flux", "flux", "flux"),
        Case("flux with masks", "flux", "flux", masks=True),
        Case("flux with control images", "flux", "flux", controls=True),
        Case("sdxl", "sdxl", "sdxl", kinds=("latents",)),
        Case("wan", "wan", "wan"),
        Case("wan videos", "wan", "wan", videos=True, importing=_CLIPS),
    )

    def _pipeline(self, case: Case) -> Any:
        """Return its pipeline with stand-ins for the models."""
        self._start()
        if case.family == "wan":
            return self._wan()
        from models import flux, sdxl

        made: Any = object.__new__({"flux": flux.FluxPipeline, "sdxl": sdxl.SDXLPipeline}[case.family])
        parts = {"vae": _Vae(self, case.family), "text_encoder": _Model(), "text_encoder_2": _Model()}
        made.config = {"model": {"dtype": torch.bfloat16}}
        made.__dict__ |= {**parts, "diffusers_pipeline": SimpleNamespace(**parts)}
        made._get_clip_prompt_embeds = lambda prompt, device: self._text(prompt, device, "clip_embed", 768)
        made._get_t5_prompt_embeds = lambda prompt, device: self._text(prompt, device, "t5_embed", 8, 4096)
        return made

    def _wan(self) -> Any:
        from models import base
        from models.wan import wan
        from utils import dataset

        base.InputImpl = dataset.InputImpl = SimpleNamespace(VideoFromFile=_Video)
        made: Any = object.__new__(wan.WanPipeline)
        vae, encoder = _WanVae(self), _WanText(self)
        text = SimpleNamespace(model=encoder, tokenizer=encoder.tokenizer)
        parts = {"vae": SimpleNamespace(model=vae, scale=None), "text_encoder": text, "cache_text_embeddings": True}
        made.__dict__ |= {"config": {}, "model_type": "t2v", "get_vae": lambda: vae, **parts}
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
        config |= {"min_ar": 0.5, "max_ar": 2.0, "num_ar_buckets": 5} | ({"frame_buckets": [1, 9, 17]} if case.videos else {})
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
                name = clip_name(Path(path).stem, 0, 4 * batch["latents"].shape[2] - 3) if case.videos else Path(path).stem
                found[name, False] = arrays
        return found

    def ours(self, case: Case, sample: Mapping[str, Any], its: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        """Latents are scaled; masks and latents of control images are beside them, and no data set returns them. So are rows of padding."""
        names = {"latents": "latents", **_TEXT}
        if case.family == "wan":
            rows = as_bits(sample["prompt_embeds"])
            assert len(rows) == its["seq_lens"]
            return {
                **its,
                "latents": as_bits(sample["latents"]),
                "text_embeddings": np.concatenate([rows, its["text_embeddings"][len(rows) :]]),
            }
        return {key: as_bits(sample[names[key]]) if key in names else array for key, array in its.items()}


DRIVER = DiffusionPipe()
