"""Runs the caching and loading code of ai-toolkit, for `trainers.py`.

Its `AiToolkitDataset` lists, caches and loads, and its own classes collate batches. The model is a stand-in.
"""
# The trainer's modules are in its checkout.
# pyright: reportMissingImports=false

import importlib
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from conformance.trainers import Case, Loaded, as_bits, latents_of, noise_of

_STEPS = {"sd15": 16, "sdxl": 16, "sd3": 32, "flux": 32, "wan": 16, "qwen-image": 32, "z-image": 16}
_TRIGGER = "sks"
_PREFIX = {"bucket_step": 32, "captions": {"choose": "first", "prefix": f"{_TRIGGER} "}}
_SPACES = {
    "sd15": ("sd1", "sd1"),
    "sdxl": ("sdxl", "sdxl"),
    "sd3": ("sd3", "sd3"),
    "flux": ("flux1", "flux"),
    "wan": ("wan21", "wan21"),
    "qwen-image": ("qwen_image", "qwen_image"),
    "z-image": ("zimage", "zimage"),
}
"""By family: the versions of latents and text, as the trainer names them."""


_CLASSES = {
    "wan": ("toolkit.models.wan21.wan21", "Wan21"),
    "qwen-image": ("extensions_built_in.diffusion_models.qwen_image.qwen_image", "QwenImageModel"),
    "z-image": ("extensions_built_in.diffusion_models.z_image.z_image", "ZImageModel"),
}
"""By family: its own model class, which makes latents and text of what VAE and encoder return."""


class _Config(dict[str, Any]):
    """A configuration as diffusers has it."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(name)
        return self[name]


def _noise(caption: str, what: str, *shape: int) -> torch.Tensor:
    return noise_of(caption, what, *shape).to(torch.bfloat16)


class _Model:
    """The model, as far as caching asks for it."""

    device = device_torch = torch.device("cpu")
    torch_dtype, te_padding_side = torch.bfloat16, "right"
    vae_device_torch, vae_torch_dtype = device, torch_dtype
    unet = SimpleNamespace(config=SimpleNamespace())

    def __init__(self, driver: "AiToolkit", family: str) -> None:
        self.driver, self.family = driver, family
        self.is_xl, self.is_v3, self.is_flux = family == "sdxl", family == "sd3", family == "flux"
        self.latent_space_version, self.text_embedding_space_version = _SPACES[family]
        self.model_config = SimpleNamespace(latent_space_version=None, arch=family, is_pixart_sigma=False)
        self.channels = 4 if family in {"sd15", "sdxl"} else 16
        module, name = _CLASSES.get(family, ("", ""))
        self.own: Any = getattr(importlib.import_module(module), name) if module else None
        encoder = SimpleNamespace(device=self.device)
        self.pipeline = SimpleNamespace(text_encoder=encoder, encode_prompt=self._encode_prompt)
        mean = torch.linspace(-1, 1, 16).tolist()
        config = _Config(z_dim=16, latents_mean=mean, latents_std=[2 + one for one in mean], block_out_channels=[0] * 4)
        config |= {"scaling_factor": 0.3611, "shift_factor": 0.1159}
        does_nothing = dict.fromkeys(("to", "eval", "requires_grad_"), lambda *_options: None)
        self.vae = SimpleNamespace(config=config, device=self.device, encode=self._encode, **does_nothing)

    def __getattr__(self, _name: str) -> bool:
        """Return false: all that is not named here is off."""
        return False

    def get_frame_count_snapper(self) -> None:
        """Return no rule for frames."""

    def get_bucket_divisibility(self) -> int:
        return _STEPS[self.family]

    def set_device_state_preset(self, *_names: object) -> None:
        """Do nothing."""

    restore_device_state = set_device_state_preset

    def encode_images(self, pixels: torch.Tensor) -> torch.Tensor:
        if self.own is not None:
            return self.own.encode_images(self, list(pixels))
        self.driver.encoded += 1
        return latents_of(pixels, self.channels).to(torch.bfloat16)

    def _encode(self, pixels: torch.Tensor) -> Any:
        self.driver.encoded += 1
        latents = latents_of(pixels[:, :, 0] if pixels.ndim == 5 else pixels, self.channels).to(torch.bfloat16)
        return SimpleNamespace(latent_dist=SimpleNamespace(sample=lambda: latents[:, :, None] if pixels.ndim == 5 else latents))

    def _encode_prompt(self, prompt: str, **_options: object) -> tuple[Any, torch.Tensor | None]:
        """Return what a pipeline's method of this name does."""
        self.driver.encoded += 1
        rows = _noise(prompt, "rows", 3 + len(prompt) % 5, 64)
        if self.family == "wan":
            rows = torch.nn.functional.pad(rows, (0, 0, 0, 512 - len(rows)))
        return [rows] if self.family == "z-image" else rows[None], None

    def encode_prompt(self, prompts: str | list[str], *_more: object, **_options: object) -> Any:
        from toolkit.prompt_utils import PromptEmbeds

        (prompt,) = [prompts] if isinstance(prompts, str) else prompts
        if self.own is not None:
            return self.own.get_prompt_embeds(self, prompt)
        self.driver.encoded += 1
        match self.family:
            case "sd15":
                return PromptEmbeds(_noise(prompt, "rows", 1, 77, 768))
            case "sdxl":
                return PromptEmbeds([_noise(prompt, "rows", 1, 77, 2048), _noise(prompt, "pooled", 1, 1280)])
            case "sd3":
                clips = torch.nn.functional.pad(_noise(prompt, "clips", 1, 77, 2048), (0, 2048))
                return PromptEmbeds([torch.cat([clips, _noise(prompt, "t5", 1, 8, 4096)], 1), _noise(prompt, "pooled", 1, 2048)])
            case _:
                return PromptEmbeds([_noise(prompt, "rows", 1, 8, 4096), _noise(prompt, "pooled", 1, 768)])


class AiToolkit:
    """Implements `conformance.trainers.Driver`."""

    packages = "torchaudio controlnet_aux albumentations lycoris optimum optimum.quanto torchao peft oyaml bitsandbytes open_clip timm"
    stand_ins = (*packages.split(), "extensions_built_in.diffusion_models.ltx2")
    resolution, is_beside, encoded = 512, True, 0
    cases = (
        Case("sd15", "sd15", "sd15", precompute={"bucket_step": 16}),
        Case("wan21", "wan", "wan", precompute={"bucket_step": 16}),
        Case("qwen_image", "qwen-image", "qwenimage", precompute={"bucket_step": 32}),
        Case("zimage", "z-image", "zimage", precompute={"bucket_step": 16}),
        Case("sdxl", "sdxl", "sdxl", precompute={"bucket_step": 16}),
        Case(
            "sdxl with flips", "sdxl", "sdxl", flips=True, left_out="an import leaves mirrored versions out", precompute={"bucket_step": 16}
        ),
        Case("sd3", "sd3", "sd3", precompute={"bucket_step": 32}),
        Case("flux", "flux", "flux", precompute={"bucket_step": 32}),
        Case("flux with a trigger word", "flux", "flux", importing={"trigger_word": _TRIGGER}, precompute=_PREFIX),
    )

    def _dataset(self, case: Case, data: Path, batch_size: int) -> Any:
        from toolkit.config_modules import DatasetConfig
        from toolkit.data_loader import AiToolkitDataset

        config = DatasetConfig(
            folder_path=str(data),
            resolution=self.resolution,
            buckets=True,
            cache_latents_to_disk=True,
            cache_text_embeddings="text" in case.kinds,
            caption_ext="txt",
            flip_x=case.flips,
            trigger_word=case.importing.get("trigger_word"),
        )
        return AiToolkitDataset(config, batch_size=batch_size, sd=_Model(self, case.family))

    def write(self, case: Case, data: Path, cache: Path) -> None:
        """Let the dataset cache, as it does when it is made."""
        del cache
        self._dataset(case, data, 4)

    def read(self, case: Case, data: Path, cache: Path, batch_size: int) -> Loaded:
        """Load every batch as the trainer collates it."""
        from toolkit.data_transfer_object.data_loader import DataLoaderBatchDTO

        del cache
        dataset, found = self._dataset(case, data, batch_size), Loaded()
        for number in range(len(dataset)):
            batch = DataLoaderBatchDTO(file_items=dataset[number])
            for row, item in enumerate(batch.file_items):
                arrays = {"latents": as_bits(batch.latents[row])}
                if "text" in case.kinds:
                    embeds = item.prompt_embeds
                    arrays["rows"] = as_bits(embeds.text_embeds[0])
                    more = {"pooled": embeds.pooled_embeds, "mask": embeds.attention_mask}
                    arrays |= {name: as_bits(those[0]) for name, those in more.items() if those is not None}
                found[Path(item.path).stem, bool(item.flip_x)] = arrays
        return found

    def ours(self, case: Case, sample: Mapping[str, Any], its: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        """Latents are scaled; those of Qwen-Image have no axis of frames. Wan's text is filled with zeros."""
        rows = sample.get("prompt_embeds", torch.zeros(0, 1))
        made: dict[str, Any] = {
            "latents": sample["latents"],
            "pooled": sample.get("pooled_prompt_embeds"),
            "mask": torch.ones(len(rows), dtype=torch.int64),
        }
        made["rows"] = torch.nn.functional.pad(rows, (0, 0, 0, len(its.get("rows", rows)) - len(rows)))
        made["latents"] = made["latents"][:, 0] if case.family == "qwen-image" else made["latents"]
        return {name: as_bits(made[name]) for name in its}


DRIVER = AiToolkit()
