"""Runs the caching and loading code of kohya's sd-scripts, for `trainers.py`.

Its `DreamBoothDataset` caches and loads, by its own caching strategies. Tokenizers, text encoders and VAEs are stand-ins.
"""
# The trainer's modules are in its checkout.
# pyright: reportMissingImports=false

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from conformance.trainers import Case, Loaded, latents_of, noise_of

_FIRST = {"caption_lines": "first"}
_TOKENS = 8
"""The length of T5's sequences, which is 256 or 512 in reality."""


class _Text:
    """Tokenizes and encodes: values follow from the caption alone."""

    def __init__(self, driver: "SdScripts", family: str) -> None:
        self.driver, self.family = driver, family

    def tokenize(self, text: str | list[str]) -> list[torch.Tensor]:
        texts = [text] if isinstance(text, str) else text
        ids = torch.tensor([list(hashlib.sha256(one.encode()).digest()[:_TOKENS]) for one in texts])
        lengths = torch.tensor([1 + len(one) % _TOKENS for one in texts])
        mask = (torch.arange(_TOKENS) < lengths[:, None]).long()
        ones = torch.ones(len(texts), 77, dtype=torch.long)
        return {"sdxl": [ids, ids], "flux": [ids, ids, mask], "sd3": [ids, ids, ids, ones, ones, mask]}.get(self.family, [ids])

    def encode_tokens(self, _strategy: object, _models: object, tokens: Sequence[torch.Tensor], **_options: object) -> list[torch.Tensor]:
        self.driver.encoded += 1

        def noise(what: int, *shape: int) -> torch.Tensor:
            return torch.stack([noise_of(str(ids.tolist()), str(what), *shape) for ids in tokens[0]])

        both = noise(1, 77, 2048)
        match self.family:
            case "sdxl":
                return [noise(1, 77, 768), noise(2, 77, 1280), noise(3, 1280)]
            case "flux":
                return [noise(1, 768), noise(2, _TOKENS, 4096), torch.zeros(len(both), _TOKENS, 3), tokens[2]]
            case _:
                return [both, noise(2, _TOKENS, 4096), noise(3, 2048), *tokens[3:]]


class _Vae:
    """Makes latents of pixels."""

    device, dtype = torch.device("cpu"), torch.float32

    def __init__(self, driver: "SdScripts", family: str) -> None:
        self.driver, self.is_diffusers = driver, family in {"sd15", "sdxl"}
        self.channels = 4 if self.is_diffusers else 16

    def encode(self, pixels: torch.Tensor) -> Any:
        self.driver.encoded += 1
        latents = latents_of(pixels, self.channels)
        return SimpleNamespace(latent_dist=SimpleNamespace(sample=lambda: latents)) if self.is_diffusers else latents


class SdScripts:
    """Implements `conformance.trainers.Driver`."""

    stand_ins = ("library.sdxl_lpw_stable_diffusion", "library.lpw_stable_diffusion", "library.custom_train_functions")
    resolution, is_beside, encoded = 512, True, 0
    cases = (
        Case("sd15", "sd15", "sd15", kinds=("latents",), importing=_FIRST),
        Case("sdxl", "sdxl", "sdxl", importing=_FIRST),
        Case("sdxl with flips and masks", "sdxl", "sdxl", flips=True, masks=True, importing=_FIRST),
        Case("sd3", "sd3", "sd3", importing=_FIRST),
        Case("flux", "flux", "flux", importing=_FIRST),
    )

    def _dataset(self, case: Case, data: Path, batch_size: int) -> Any:
        from library import config_util, flux_utils, strategy_base, strategy_flux, strategy_sd, strategy_sd3, strategy_sdxl, train_util

        flux_utils.get_t5xxl_actual_dtype = lambda _model: torch.float32
        latents, texts = {
            "sd15": (strategy_sd.SdSdxlLatentsCachingStrategy(True, True, 4, False), None),
            "sdxl": (
                strategy_sd.SdSdxlLatentsCachingStrategy(False, True, 4, False),
                strategy_sdxl.SdxlTextEncoderOutputsCachingStrategy(True, 4, False),
            ),
            "sd3": (
                strategy_sd3.Sd3LatentsCachingStrategy(True, 4, False),
                strategy_sd3.Sd3TextEncoderOutputsCachingStrategy(True, 4, False),
            ),
            "flux": (
                strategy_flux.FluxLatentsCachingStrategy(True, 4, False),
                strategy_flux.FluxTextEncoderOutputsCachingStrategy(True, 4, False),
            ),
        }[case.family]
        text = _Text(self, case.family)
        strategies = {
            strategy_base.LatentsCachingStrategy: latents,
            strategy_base.TextEncoderOutputsCachingStrategy: texts,
            strategy_base.TokenizeStrategy: text,
            strategy_base.TextEncodingStrategy: text,
        }
        for kind, strategy in strategies.items():
            kind._strategy = strategy
        off: dict[str, Any] = dict.fromkeys(("keep_tokens_separator", "secondary_separator", "caption_prefix", "caption_suffix"))
        off |= dict.fromkeys(("shuffle_caption", "enable_wildcard", "color_aug", "random_crop", "is_reg", "cache_info"), False)
        off |= dict.fromkeys(("keep_tokens", "token_warmup_min", "token_warmup_step"), 0)
        off |= dict.fromkeys(("caption_dropout_rate", "caption_dropout_every_n_epochs", "caption_tag_dropout_rate"), 0)
        subset = train_util.DreamBoothSubset(
            image_dir=str(data),
            class_tokens=None,
            caption_extension=".txt",
            alpha_mask=case.masks,
            num_repeats=1,
            caption_separator=",",
            flip_aug=case.flips,
            face_crop_aug_range=None,
            **off,
        )
        shared = {"network_multiplier": 1.0, "prior_loss_weight": 1.0, "debug_dataset": True, "validation_split": 0.0}
        made = train_util.DreamBoothDataset(
            [subset],
            is_training_dataset=True,
            batch_size=batch_size,
            resolution=(self.resolution, self.resolution),
            enable_bucket=True,
            min_bucket_reso=config_util.DreamBoothDatasetParams.min_bucket_reso,
            max_bucket_reso=config_util.DreamBoothDatasetParams.max_bucket_reso,
            bucket_reso_steps=64,
            bucket_no_upscale=False,
            validation_seed=None,
            resize_interpolation=None,
            **shared,
        )
        made.make_buckets()
        made.set_current_strategies()
        accelerator = SimpleNamespace(num_processes=1, process_index=0, device="cpu")
        made.new_cache_latents(_Vae(self, case.family), accelerator)
        if texts is not None:
            made.new_cache_text_encoder_outputs([None, None, None], accelerator)
        return made

    def write(self, case: Case, data: Path, cache: Path) -> None:
        """Let `new_cache_latents` and `new_cache_text_encoder_outputs` write."""
        del cache
        self._dataset(case, data, 4)

    def read(self, case: Case, data: Path, cache: Path, batch_size: int) -> Loaded:
        """Load every batch, plain and mirrored."""
        from library import train_util

        del cache
        dataset = self._dataset(case, data, batch_size)
        names: dict[str, tuple[str | None, ...]] = {"sdxl": ("hidden1", "hidden2", "pooled"), "flux": ("pooled", "t5", None, None)}
        names["sd3"] = ("clips", "t5", "pooled", None, None, None)
        found: Loaded = {}
        for is_flipped in (False, True) if case.flips else (False,):
            train_util.random.random = lambda is_flipped=is_flipped: 0.0 if is_flipped else 1.0
            for number in range(len(dataset)):
                batch = dataset[number]
                texts = batch["text_encoder_outputs_list"] or []
                for row, key in enumerate(batch["image_keys"]):
                    arrays = {"latents": batch["latents"][row].numpy()}
                    for name, tensor in zip(names.get(case.family, ()), texts, strict=True):
                        arrays |= {name: tensor[row].numpy()} if name is not None else {}
                    if batch["alpha_masks"] is not None:
                        arrays["mask"] = _shrunk(batch["alpha_masks"][row])
                    arrays["time_ids"] = torch.cat([batch[one][row] for one in _TIME_IDS]).numpy()
                    found[Path(key).stem, is_flipped] = arrays
        return found

    def ours(self, case: Case, sample: Mapping[str, Any], its: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        """Latents are raw but for FLUX; text is in the trainer's parts; sizes and crops are its own."""
        made = {"latents": sample["latents" if case.family == "flux" else "raw"].float().numpy(), "time_ids": its["time_ids"]}
        if "mask" in its:
            made["mask"] = its["mask"] if "mask" not in sample else _mirrored_as(its["mask"], sample["mask"])
        if case.kinds == ("latents",):
            return made
        rows = sample["prompt_embeds"].numpy()
        pooled = sample["pooled_prompt_embeds"].numpy()
        match case.family:
            case "sdxl":
                width = its["hidden1"].shape[-1]
                return {**made, "hidden1": rows[:, :width].copy(), "hidden2": rows[:, width:].copy(), "pooled": pooled}
            case "flux":
                return {**made, "pooled": pooled, "t5": rows}
            case _:
                clips, width = its["clips"].shape
                return {**made, "clips": rows[:clips, :width].copy(), "t5": rows[clips:].copy(), "pooled": pooled}


_TIME_IDS = ("original_sizes_hw", "crop_top_lefts", "target_sizes_hw")


def _shrunk(mask: torch.Tensor) -> np.ndarray:
    """Return the mean of a mask over the pixels of each latent, in 255ths."""
    return (torch.nn.functional.avg_pool2d(mask[None, None], 8)[0] * 255).round().to(torch.uint8).numpy()


def _mirrored_as(its: np.ndarray, mask: torch.Tensor) -> np.ndarray:
    """Return our mask; mirrored if the trainer's is."""
    own = mask.numpy()
    own = own if own.dtype == np.uint8 else (own * 255).round().astype(np.uint8)
    return own[..., ::-1].copy() if (own != its).any() and (own[..., ::-1] == its).all() else own


DRIVER = SdScripts()
