"""Runs the caching and loading code of ai-toolkit, for `conformance_trainers.py`.

Its `AiToolkitDataset` lists, caches and loads, and its own classes collate batches. The model is a stand-in.
"""
# The trainer's modules are in its checkout.
# pyright: reportMissingImports=false

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from conformance_trainers import Case, Loaded, as_bits, latents_of, noise_of

_STEPS = {"sd15": 16, "sdxl": 16, "sd3": 32, "flux": 32}
_TRIGGER = "sks"
_PREFIX = {"bucket_step": 32, "captions": {"choose": "first", "prefix": f"{_TRIGGER} "}}
_SPACES = {"sd15": ("sd1", "sd1"), "sdxl": ("sdxl", "sdxl"), "sd3": ("sd3", "sd3"), "flux": ("flux1", "flux")}
"""By family: the versions of latents and text, as the trainer names them."""


def _noise(caption: str, what: str, *shape: int) -> torch.Tensor:
    return noise_of(caption, what, *shape).to(torch.bfloat16)


class _Model:
    """The model, as far as caching asks for it."""

    device = device_torch = torch.device("cpu")
    torch_dtype, te_padding_side = torch.bfloat16, "right"
    vae, unet = SimpleNamespace(config=SimpleNamespace()), SimpleNamespace(config=SimpleNamespace())

    def __init__(self, driver: "AiToolkit", family: str) -> None:
        self.driver, self.family = driver, family
        self.is_xl, self.is_v3, self.is_flux = family == "sdxl", family == "sd3", family == "flux"
        self.latent_space_version, self.text_embedding_space_version = _SPACES[family]
        self.model_config = SimpleNamespace(latent_space_version=None, arch=family, is_pixart_sigma=False)
        self.channels = 4 if family in {"sd15", "sdxl"} else 16

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
        self.driver.encoded += 1
        return latents_of(pixels, self.channels).to(torch.bfloat16)

    def encode_prompt(self, prompts: str | list[str], *_more: object, **_options: object) -> Any:
        from toolkit.prompt_utils import PromptEmbeds

        self.driver.encoded += 1
        (prompt,) = [prompts] if isinstance(prompts, str) else prompts
        match self.family:
            case "sdxl":
                return PromptEmbeds([_noise(prompt, "rows", 1, 77, 2048), _noise(prompt, "pooled", 1, 1280)])
            case "sd3":
                clips = torch.nn.functional.pad(_noise(prompt, "clips", 1, 77, 2048), (0, 2048))
                return PromptEmbeds([torch.cat([clips, _noise(prompt, "t5", 1, 8, 4096)], 1), _noise(prompt, "pooled", 1, 2048)])
            case _:
                return PromptEmbeds([_noise(prompt, "rows", 1, 8, 4096), _noise(prompt, "pooled", 1, 768)])


class AiToolkit:
    """Implements `conformance_trainers.Driver`."""

    stand_ins = ("torchaudio", "controlnet_aux", "albumentations", "lycoris", "optimum", "torchao")
    resolution, is_beside, encoded = 512, True, 0
    cases = (
        Case("sd15", "sd15", "sd15", kinds=("latents",), precompute={"bucket_step": 16}),
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
                    arrays |= {"rows": as_bits(embeds.text_embeds[0]), "pooled": as_bits(embeds.pooled_embeds[0])}
                found[Path(item.path).stem, bool(item.flip_x)] = arrays
        return found

    def ours(self, case: Case, sample: Mapping[str, Any], its: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        """Latents are scaled."""
        del case
        names = {"latents": "latents", "rows": "prompt_embeds", "pooled": "pooled_prompt_embeds"}
        return {name: as_bits(sample[names[name]]) for name in its}


DRIVER = AiToolkit()
