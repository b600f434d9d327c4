"""Trains four steps by SimpleTuner's own code, from its own cache and from a store, for `trainers.py simpletuner --live`.

Its factory's cache classes, sampler, data set, `collate_fn`, `prepare_batch`, `model_predict` and `loss` run. The classes that read the
store are those of the page docs/coming-from/simpletuner.md. The trained model is a tiny one; encoders are those of trainer_simpletuner.py.
"""
# The trainer's modules are in its checkout.
# pyright: reportMissingImports=false

import contextlib
import os
import random
import re
import shutil
import types
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from conformance.trainer_simpletuner import SimpleTuner, captions_of, record_of
from conformance.trainers import Case, Outcome, make_source, quiet, tiny_model

import cachestore as cs

PAGE = Path(__file__).parents[2] / "docs/coming-from/simpletuner.md"
CASES = ("sdxl", "flux")
"""Whose steps run."""
_STEPS, _BATCH = 4, 2
_TRAINING: dict[str, Any] = {
    "weight_dtype": torch.float32,
    "base_weight_dtype": torch.float32,
    "flow_matching": False,
    "offset_noise": False,
    "input_perturbation": 0,
    "timestep_bias_portion": 0.0,
    "timestep_bias_strategy": "none",
    "disable_segmented_timestep_sampling": False,
    "refiner_training": False,
    "snr_gamma": None,
    "snr_weight": 1.0,
    "caption_dropout_probability": 0.0,
    "controlnet": False,
    "flow_schedule_shift": 3.0,
    "flow_sigmoid_scale": 1.0,
    "flow_use_beta_schedule": False,
    "flow_use_uniform_schedule": False,
    "flux_attention_masked_training": False,
    "flux_fast_schedule": False,
    "flux_guidance_mode": "constant",
    "flux_guidance_value": 1.0,
}
"""SimpleTuner's options that a training step reads."""

UNET: dict[str, Any] = {
    "block_out_channels": (8, 16),
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "attention_head_dim": 4,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 8,
}
_FLUX: dict[str, Any] = {
    "num_layers": 1,
    "num_single_layers": 1,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "axes_dims_rope": (4, 6, 6),
}


def code_of(page: Path) -> str:
    """Return the Python code that a page shows."""
    (code,) = re.findall(r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return code


class _Live(SimpleTuner):
    """Trains, besides."""

    @contextlib.contextmanager
    def _classes_of(self, store: Path | None) -> Generator[None]:
        """Run the page's code, which replaces the factory's classes; without a store they stay SimpleTuner's own."""
        from simpletuner.helpers.data_backend import factory

        own = factory.VAECache, factory.TextEmbeddingCache
        if store is not None:
            os.environ["CACHESTORE"] = str(store)
            exec(compile(code_of(PAGE), str(PAGE), "exec"), vars(types.ModuleType("train_from_store")))  # noqa: S102 - our own page
            assert factory.VAECache is not own[0]
            assert factory.TextEmbeddingCache is not own[1]
        try:
            yield
        finally:
            factory.VAECache, factory.TextEmbeddingCache = own

    def losses(self, case: Case, data: Path, cache: Path, store: Path | None) -> list[float]:
        """Return the loss of each step. The samples come from the store, or from SimpleTuner's own files in `cache`."""
        from simpletuner.helpers.training.state_tracker import StateTracker

        for path in data.glob("aspect_ratio_bucket_*.json"):
            path.unlink()  # it finds its buckets in the pictures
        with self._classes_of(store), self._running(case, data, cache) as (metadata, vae_cache, text_cache, images):
            metadata.refresh_buckets()
            metadata.aspect_ratio_bucket_indices = {
                key: sorted(paths) for key, paths in sorted(metadata.aspect_ratio_bucket_indices.items())
            }
            StateTracker.set_accelerator(vae_cache.accelerator)
            vae_cache.discover_all_files()
            text_cache.discover_all_files()
            paths = sorted(data.glob("*.png"))
            vae_cache.build_vae_cache_filename_map([str(path) for path in paths])
            vae_cache.discover_unprocessed_files()
            vae_cache.process_buckets()
            records = [record_of(case, path, one) for path in paths for one in captions_of(images, path)]
            text_cache.compute_embeddings_for_prompts(records, return_concat=False, load_from_cache=False)
            with mock.patch.object(torch.Tensor, "pin_memory", lambda tensor: tensor):  # needs a GPU
                return list(self._steps(vae_cache.model, metadata, vae_cache, text_cache, images))

    def _steps(self, model: Any, metadata: Any, vae_cache: Any, text_cache: Any, images: Any) -> Iterator[float]:
        """Train, and yield the losses."""
        from accelerate import PartialState
        from simpletuner.helpers.multiaspect.dataset import MultiAspectDataset
        from simpletuner.helpers.multiaspect.sampler import MultiAspectSampler
        from simpletuner.helpers.training.collate import collate_fn
        from simpletuner.helpers.training.state_tracker import StateTracker

        PartialState(cpu=True)  # its loggers need one
        vars(StateTracker.get_args()).update(_TRAINING, model_family=model.config.model_family)
        vars(model.config).update(_TRAINING)
        StateTracker.set_weight_dtype(torch.float32)
        StateTracker.data_backends[images.id] |= {"vaecache": vae_cache, "text_embed_cache": text_cache}
        StateTracker.set_default_text_embed_cache(text_cache)
        model.accelerator, model.controlnet, model.diff2flow_bridge = vae_cache.accelerator, None, None
        model.diffusion_blocks_controller, model._twinflow_diffusion_bridge = None, False
        model.accelerator.unwrap_model = lambda wrapped, **_more: wrapped
        sampler = MultiAspectSampler(
            images.id, metadata, images, model, vae_cache.accelerator, _BATCH, resolution=self.resolution, caption_strategy="textfile"
        )
        random.seed(3)
        np.random.seed(3)
        torch.manual_seed(3)
        loader = torch.utils.data.DataLoader(
            MultiAspectDataset(images.id, [metadata]), batch_size=1, sampler=sampler, collate_fn=collate_fn
        )
        optimizer = None
        for _step, batch in zip(range(_STEPS), loader, strict=False):
            if optimizer is None:
                model.model, model.noise_schedule = _tiny_denoiser(model, batch)
                optimizer = torch.optim.AdamW(model.model.parameters(), lr=1e-3)
            prepared = model.prepare_batch(batch, state={"global_step": _step})
            output = model.model_predict(prepared_batch=prepared)
            loss, _logs = model.loss_with_logs(prepared_batch=prepared, model_output=output)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            yield loss.item()


def _tiny_denoiser(model: Any, batch: dict[str, Any]) -> tuple[Any, Any]:
    """Return a tiny network of the model's class, with the widths in a batch, and a noise schedule."""
    from diffusers import DDPMScheduler, FlowMatchEulerDiscreteScheduler

    channels, width, pooled = batch["latent_batch"].shape[1], batch["prompt_embeds"].shape[-1], batch["add_text_embeds"].shape[-1]
    if model.config.model_family == "flux":
        made, schedule = dict(_FLUX, joint_attention_dim=width, pooled_projection_dim=pooled), FlowMatchEulerDiscreteScheduler()
    else:
        made = dict(UNET, in_channels=channels, out_channels=channels, cross_attention_dim=width)
        made["projection_class_embeddings_input_dim"] = 6 * UNET["addition_time_embed_dim"] + pooled
        schedule = DDPMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear")
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return model.MODEL_CLASS(**made), schedule


def _compared(case: Case, what: str, own: list[float], live: list[float], encoded: int) -> Outcome:
    largest = max(abs(one - other) for one, other in zip(own, live, strict=True))
    shown = [f"losses {', '.join(f'{one:.6f}' for one in live)}"]
    unequal = [] if own == live and len(own) == _STEPS else [f"losses differ by up to {largest:.2e}; its own are {own}"]
    return Outcome(case.name, what, _STEPS * _BATCH, unequal, encoded, shown)


def run_live(case: Case, folder: Path, count: int) -> Iterator[Outcome]:
    """Compare the losses from a store with those from SimpleTuner's own cache: of an import of it, and of what was encoded here."""
    if case.name not in CASES:
        return
    driver, data, cache = _Live(), folder / "data", folder / "cache"
    make_source(data, count, masks=False, controls=False, sizes=(driver.resolution // 2, 2 * driver.resolution), lines=True)
    with quiet():
        driver.write(case, data, cache)
    imported, encoded, files = folder / "imported", folder / "encoded", folder / "exported"
    claims: dict[str, Any] = {"claims": {"model": "stand-ins"}, "encode": case.kinds, **case.importing}
    cs.import_cache("simpletuner", cache, store=imported, data=data, family=case.family, **claims)
    asked: dict[str, Any] = {"resolution": driver.resolution, "buckets": "simpletuner", "latents": "sample", "inline": True}
    asked |= {"vae_dtype": "float32", "text_dtype": "float32"}
    with quiet():
        cs.precompute(data, model=tiny_model(case.pipeline, folder / "model"), store=encoded, **asked, **case.importing)
    cs.export_cache(encoded, format="simpletuner", folder=files, family=case.family)
    for what, own_files, store in (("imported", cache, imported), ("encoded here", files, encoded)):
        driver.encoded = 0
        with quiet():
            own = driver.losses(case, data, own_files, None)
            live = driver.losses(case, data, folder / f"no files of {what}", store)
        shutil.rmtree(own_files)
        yield _compared(case, f"{_STEPS} steps from a store, {what}", own, live, driver.encoded)
