"""Runs the caching and loading code of SimpleTuner, for `trainers.py`.

Its metadata backend scans and crops, its `VAECache` and `TextEmbeddingCache` write and read, and its models' classes scale and format. The
outputs of text encoders and VAEs are stand-ins.
"""
# The trainer's modules are in its checkout.
# pyright: reportMissingImports=false

import contextlib
import queue
import shutil
from collections.abc import Generator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from conformance.trainers import Case, Loaded, as_bits, clip_latents_of, clip_name, latents_of, noise_of

_LINES = {"caption_lines": "each", "captions": "all"}
_ID = "train"
"""The data backend's name, which is in the names of its JSON files."""
_MODELS = {
    "sd15": ("sd1x", "sd1x.model", "StableDiffusion1"),
    "sdxl": ("sdxl", "sdxl.model", "SDXL"),
    "sd3": ("sd3", "sd3.model", "SD3"),
    "flux": ("flux", "flux.model", "Flux"),
    "qwen-image": ("qwen_image", "qwen_image.model", "QwenImage"),
    "wan": ("wan", "wan.model", "Wan"),
    "flux2": ("flux2", "flux2.model", "Flux2"),
    "flux2-klein-4b": ("flux2", "flux2.model", "Flux2"),
}
"""By family: SimpleTuner's name, the module and the class."""
_SCALES = {
    "sd15": (0.18215, None),
    "sdxl": (0.13025, None),
    "sd3": (1.5305, 0.0609),
    "flux": (0.3611, 0.1159),
    "qwen-image": (1.0, None),
    "wan": (1.0, None),
}
_ROWS = 512
"""Of Wan's text and FLUX.2's, with padding."""
_FRAMES = 9
"""Of each video."""


def _noise(caption: str, what: str, *shape: int) -> torch.Tensor:
    return noise_of(caption, what, *shape).to(torch.bfloat16)


class _Vae:
    """Makes latents of pixels."""

    device, dtype = torch.device("cpu"), torch.bfloat16

    def __init__(self, driver: "SimpleTuner", family: str) -> None:
        self.driver = driver
        self.channels = 4 if family in {"sd15", "sdxl"} else 16
        if family.startswith("flux2"):
            self.channels, self.config = 32, SimpleNamespace(batch_norm_eps=1e-4)
            mean = torch.linspace(-1, 1, 128, dtype=torch.bfloat16)
            self.bn = SimpleNamespace(running_mean=mean, running_var=2 + mean)
            return
        scale, shift = _SCALES[family]
        self.config = SimpleNamespace(scaling_factor=scale, shift_factor=shift)
        if family in {"qwen-image", "wan"}:
            mean = torch.linspace(-1, 1, 16).tolist()
            self.config = SimpleNamespace(z_dim=16, latents_mean=mean, latents_std=[2 + one for one in mean])

    def to(self, *_where: object, **_more: object) -> "_Vae":
        return self

    def encode(self, pixels: torch.Tensor) -> Any:
        self.driver.encoded += 1
        if pixels.ndim == 5 and pixels.shape[2] > 1:
            made = clip_latents_of(pixels, self.channels, 4)
            parameters = torch.cat([made, torch.zeros_like(made)], 1).to(torch.bfloat16)
            return SimpleNamespace(latent_dist=SimpleNamespace(parameters=parameters))
        framed = pixels.ndim == 5
        flat = pixels[:, :, 0] if framed else pixels
        latents = latents_of(flat, self.channels).to(torch.bfloat16)
        latents = latents[:, :, None] if framed else latents
        return SimpleNamespace(latent_dist=SimpleNamespace(sample=lambda: latents, mode=lambda: latents))


def _rows(prompts: list[str], what: str, *shape: int) -> torch.Tensor:
    return torch.stack([_noise(prompt, what, *shape) for prompt in prompts])


def _outputs(family: str, prompts: list[str]) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Return what the stand-ins of a family's text encoders make of prompts."""
    match family:
        case "sdxl":
            return _rows(prompts, "both", 77, 2048), _rows(prompts, "pooled", 1280)
        case "sd3":
            clips = torch.nn.functional.pad(_rows(prompts, "clips", 77, 2048), (0, 2048))
            return torch.cat([clips, _rows(prompts, "t5", 8, 4096)], 1), _rows(prompts, "pooled", 2048)
        case "flux":
            count = len(prompts)
            return _rows(prompts, "t5", 8, 4096), _rows(prompts, "pooled", 768), torch.zeros(count, 8, 3), torch.ones(count, 8)
        case _:
            return _outputs_of_one(family, prompts)


def _outputs_of_one(family: str, prompts: list[str]) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Return the same of families whose text is one tensor."""
    lengths = [3 + len(prompt) % 5 for prompt in prompts]
    is_real = torch.arange(_ROWS) < torch.tensor(lengths)[:, None]
    match family:
        case "sd15":
            return _rows(prompts, "rows", 77, 768)
        case "wan":  # in the place of a mask it keeps the text of the empty caption
            text, empty = _rows(prompts, "umt5", _ROWS, 64), _noise("", "umt5", 1, 64)
            return text.masked_fill(~is_real[..., None], 0), torch.nn.functional.pad(empty, (0, 0, 0, _ROWS - 1)).repeat(len(prompts), 1, 1)
        case "qwen-image":
            mask = is_real[:, : max(lengths)].long()
            return _rows(prompts, "vl", max(lengths), 3584).masked_fill(mask[..., None] == 0, 0), mask
        case _:
            return _rows(prompts, "layers", _ROWS, 96), is_real.long()


class SimpleTuner:
    """Implements `conformance.trainers.Driver`."""

    stand_ins = ("torchaudio", "lycoris", "peft", "bitsandbytes", "torchao", "optimum", "wandb", "torchsde", "boto3", "botocore")
    resolution, is_beside, encoded = 512, False, 0
    cases = (
        Case("sd1x", "sd15", "sd15", importing=_LINES),
        Case("sdxl", "sdxl", "sdxl", importing=_LINES),
        Case("sd3", "sd3", "sd3", importing=_LINES),
        Case("flux", "flux", "flux", importing=_LINES),
        Case("qwen_image", "qwen-image", "qwenimage", importing=_LINES, precompute={"bucket_step": 32}),
        Case("wan videos", "wan", "wan", videos=True, precompute={"latents": "mean", "frames": (_FRAMES,)}),
        Case("flux2", "flux2", "flux2", importing=_LINES, precompute={"latents": "mean"}),
        Case("flux2 klein", "flux2-klein-4b", "flux2klein", importing=_LINES, precompute={"latents": "mean"}),
        Case("qwen_image by file name", "qwen-image", "qwenimage", importing={"caption_lines": "first"}, is_import_only=True),
    )

    def _model(self, case: Case) -> Any:
        import importlib

        family, module, name = _MODELS[case.family]
        vae, driver = _Vae(self, case.family), self
        base = getattr(importlib.import_module(f"simpletuner.helpers.models.{module}"), name)

        class Model(base):
            """The trainer's model class, whose encoders are stand-ins."""

            def __init__(self) -> None:
                flavour = "klein-4b" if "klein" in case.family else ""
                self.config = SimpleNamespace(model_family=family, model_flavour=flavour, model_type="lora", t5_padding="unmodified")
                self.vae = vae

            def get_vae(self) -> _Vae:
                return vae

            def text_embed_cache_key(self) -> Any:
                """Return by what text is named: of models that edit pictures, by the picture's path."""
                from simpletuner.helpers.models.common import TextEmbedCacheKey

                return TextEmbedCacheKey.DATASET_AND_FILENAME if case.is_import_only else TextEmbedCacheKey.CAPTION

            def _encode_prompts(self, prompts: list[str], is_negative_prompt: bool = False) -> Any:
                driver.encoded += 1
                return _outputs(case.family, prompts)

            _encode_prompts_qwen3 = _encode_prompts_mistral = _encode_prompts

        return Model()

    def _settings(self, case: Case, cache: Path) -> SimpleNamespace:
        """Return the options of SimpleTuner's command line that its caches ask for."""
        step = int(case.precompute.get("bucket_step", 64))
        settings: dict[str, Any] = {"aspect_bucket_alignment": step, "aspect_bucket_rounding": 2, "output_dir": str(cache / "state")}
        settings |= {"aspect_bucket_worker_count": 1, "enable_multiprocessing": False, "ignore_missing_files": False}
        settings |= {"preserve_data_backend_cache": False, "resolution": self.resolution, "resolution_type": "area"}
        settings |= {"cache_file_suffix": None, "skip_file_discovery": "", "framerate": 25, "allow_multiscale": True}
        settings |= {"pretrained_model_name_or_path": "", "pretrained_vae_model_name_or_path": None, "max_train_steps": 1, "seed": 0}
        return SimpleNamespace(**settings)

    @contextlib.contextmanager
    def _running(self, case: Case, data: Path, cache: Path) -> Generator[tuple[Any, Any, Any, Any]]:
        """Yield metadata backend, VAE cache, text cache and image backend, as SimpleTuner sets them up."""
        from simpletuner.helpers.data_backend import factory
        from simpletuner.helpers.data_backend.local import LocalDataBackend
        from simpletuner.helpers.metadata.backends import base
        from simpletuner.helpers.metadata.backends.discovery import DiscoveryMetadataBackend
        from simpletuner.helpers.training.state_tracker import StateTracker

        base.Queue = queue.Queue  # its scan ends when a queue looks empty, as one between processes does before its values arrive
        model, family = self._model(case), _MODELS[case.family][0]
        accelerator = SimpleNamespace(device=torch.device("cpu"), num_processes=1, process_index=0, is_main_process=True)
        accelerator.is_local_main_process, accelerator.wait_for_everyone = True, lambda: None
        accelerator.split_between_processes = contextlib.nullcontext
        (cache / "state").mkdir(parents=True, exist_ok=True)
        StateTracker.all_image_files, StateTracker.all_vae_cache_files, StateTracker.all_text_cache_files = {}, {}, {}
        StateTracker.data_backends, StateTracker.aspect_resolution_map = {}, {}
        StateTracker._save_to_disk = classmethod(lambda *_args, **_more: None)
        StateTracker._load_from_disk = classmethod(lambda *_args, **_more: None)
        StateTracker.set_args(self._settings(case, cache))
        StateTracker.set_model_family(family)
        StateTracker.set_model(model)
        StateTracker.vae_dtype = torch.bfloat16
        images = LocalDataBackend(accelerator, _ID)
        area = self.resolution * self.resolution / 1000**2
        config = {"crop": True, "crop_aspect": "preserve", "crop_style": "center", "resolution": area, "resolution_type": "area"}
        config |= {"instance_data_dir": str(data), "caption_strategy": "textfile"}
        kind = "video" if case.videos else "image"
        config |= {"video": {"num_frames": _FRAMES, "min_frames": _FRAMES}} if case.videos else {}
        StateTracker.register_data_backend({"id": _ID, "data_backend": images, "config": config, "dataset_type": kind})
        metadata = DiscoveryMetadataBackend(
            _ID,
            str(data),
            str(data / "aspect_ratio_bucket_indices"),
            str(data / "aspect_ratio_bucket_metadata"),
            images,
            accelerator,
            1,
            area,
            "area",
            cache_file_suffix=_ID,
            **({"num_frames": _FRAMES, "minimum_num_frames": _FRAMES} if case.videos else {}),
        )
        StateTracker.data_backends[_ID]["metadata_backend"] = metadata
        vae_cache = factory.VAECache(
            _ID,
            model,
            model.vae,
            accelerator,
            metadata,
            str(data),
            images,
            cache_data_backend=images,
            cache_dir=str(cache / "vae"),
            max_workers=1,
            dataset_type=kind,
            num_video_frames=_FRAMES,
            vae_batch_size=1 if case.videos else 4,
        )
        text = LocalDataBackend(accelerator, "text")
        text_cache = factory.TextEmbeddingCache(
            "text",
            text,
            [],
            [],
            accelerator,
            cache_dir=str(cache / "text"),
            model_type=family,
            model=model,
            text_encoder_batch_size=1 if "flux2" in case.family else 4,
        )
        try:
            yield metadata, vae_cache, text_cache, images
        finally:
            text_cache.process_write_batches = False
            text_cache.batch_write_thread.join(5)

    def write(self, case: Case, data: Path, cache: Path) -> None:
        """Scan the folder, and let both caches write."""
        with self._running(case, data, cache) as (metadata, vae_cache, text_cache, images):
            metadata.refresh_buckets()
            vae_cache.discover_all_files()
            vae_cache.build_vae_cache_filename_map([str(path) for path in sorted(data.glob(_pattern(case)))])
            vae_cache.discover_unprocessed_files()
            vae_cache.process_buckets()
            if "text" in case.kinds:
                captions = [record_of(case, path, one) for path in sorted(data.glob(_pattern(case))) for one in captions_of(images, path)]
                text_cache.compute_embeddings_for_prompts(captions, return_concat=False, load_from_cache=False)
                text_cache.wait_for_pending_writes()
        shutil.rmtree(cache / "state")

    def read(self, case: Case, data: Path, cache: Path, batch_size: int) -> Loaded:
        """Load each bucket in batches, by the JSON files beside the pictures; text by the caption file of each picture."""
        for path in cache.glob("aspect_ratio_bucket_*.json"):  # an export's; the docs say to copy them
            shutil.copy2(path, data / path.name)
        with self._running(case, data, cache) as (metadata, vae_cache, text_cache, images):
            metadata.reload_cache()
            found: Loaded = {}
            for paths in metadata.aspect_ratio_bucket_indices.values():
                for start in range(0, len(paths), batch_size):
                    batch = paths[start : start + batch_size]
                    latents = torch.stack(vae_cache.encode_images([None] * len(batch), batch, load_from_cache=True))
                    for path, one in zip(batch, latents, strict=True):
                        name = clip_name(Path(path).stem, 0, _FRAMES) if case.videos else Path(path).stem
                        found[name, False] = {"latents": as_bits(one), **self._text(case, text_cache, images, Path(path))}
        shutil.rmtree(cache / "state")
        return found

    def _text(self, case: Case, text_cache: Any, images: Any, path: Path) -> dict[str, np.ndarray]:
        if "text" not in case.kinds:
            return {}
        record = record_of(case, path, captions_of(images, path)[0])
        loaded = text_cache.load_from_cache(text_cache.hash_prompt_with_path(record))
        if case.family == "qwen-image":  # a batch is padded
            loaded["prompt_embeds"] = loaded["prompt_embeds"][:, : int(loaded["attention_masks"].sum())]
        return {name: as_bits(tensor) for name, tensor in loaded.items() if name in {"prompt_embeds", "pooled_prompt_embeds"}}

    def ours(self, case: Case, sample: Mapping[str, Any], its: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        """Latents are scaled, without an axis of frames; sequences have a batch axis."""
        latents = sample["latents"]
        latents = latents[:, 0] if latents.ndim == 4 and not case.videos else latents
        made = {"latents": as_bits(latents.to(torch.bfloat16) if its["latents"].dtype == np.int16 else latents)}

        def padded(tensor: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.pad(tensor, (0, 0, 0, its["prompt_embeds"].shape[1] - len(tensor)))[None]

        names = {"prompt_embeds": padded, "pooled_prompt_embeds": lambda tensor: tensor}
        return made | {name: as_bits(change(sample[name])) for name, change in names.items() if name in its}


def _pattern(case: Case) -> str:
    return "*.mp4" if case.videos else "*.png"


def record_of(case: Case, path: Path, caption: str) -> Any:
    """Return what SimpleTuner asks the text cache for."""
    return {"prompt": caption, "key": f"{_ID}:{path.name}" if case.is_import_only else caption, "metadata": {}}


def captions_of(images: Any, path: Path) -> list[str]:
    """Return the captions that SimpleTuner makes of a picture's caption file."""
    from simpletuner.helpers.prompts import PromptHandler

    made = PromptHandler.magic_prompt(
        str(path), use_captions=True, caption_strategy="textfile", prepend_instance_prompt=False, data_backend=images
    )
    return made if isinstance(made, list) else [made]


DRIVER = SimpleTuner()
