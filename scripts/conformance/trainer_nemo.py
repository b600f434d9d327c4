"""Runs the loading code of NeMo Automodel, for `trainers.py`. It trains only from a cache, so nothing is imported.

Its dataset classes, its sampler and its collate functions load an export in batches, as their builders make them.
"""
# The trainer's modules are in its checkout.
# pyright: reportMissingImports=false

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from conformance.trainers import Case, Loaded, as_bits, clip_name

_FRAMES = 9
"""Of each video."""
_OWN: Mapping[str, Any] = {"buckets": "cachestore"}
_WAN: Mapping[str, Any] = {**_OWN, "latents": "mean", "encode_args": {"max_sequence_length": 226}}


class Nemo:
    """Implements `conformance.trainers.Driver`."""

    stand_ins = ()
    resolution, is_beside, encoded = 512, False, 0
    cases = (
        Case("flux", "flux", "flux", precompute=_OWN),
        Case("flux2", "flux2", "flux2", precompute={**_OWN, "latents": "mean"}),
        Case("qwen_image", "qwen-image", "qwenimage", precompute=_OWN),
        Case("wan", "wan", "wan", precompute=_WAN),
        Case("wan videos", "wan", "wan", videos=True, precompute={**_WAN, "frames": (_FRAMES,)}),
    )

    def write(self, case: Case, data: Path, cache: Path) -> None:
        """Do nothing: what it preprocesses is not imported."""

    def read(self, case: Case, data: Path, cache: Path, batch_size: int) -> Loaded:
        """Load every batch as its builders make it for one process."""
        module: Any = importlib.import_module("nemo_automodel.components.datasets.diffusion.collate_fns")
        found = Loaded()
        build = (
            module.build_video_multiresolution_dataloader if case.family == "wan" else module.build_text_to_image_multiresolution_dataloader
        )
        options: dict[str, Any] = {"batch_size": batch_size, "dp_rank": 0, "dp_world_size": 1, "drop_last": False, "shuffle": False}
        loader, sampler = build(cache_dir=str(cache), num_workers=0, pin_memory=False, **options)
        for indices, batch in zip(sampler, loader, strict=True):
            names = {"video_latents", "image_latents", "text_embeddings", "pooled_prompt_embeds"} & batch.keys()
            for row, index in enumerate(indices):
                item = loader.dataset.metadata[index]
                stem = Path(item.get("video_path") or item["image_path"]).stem
                name = clip_name(stem, 0, _FRAMES) if case.videos else stem
                found[name, False] = {key.replace("image_", "").replace("video_", ""): as_bits(batch[key][row]) for key in names}
                more = batch.get("metadata", {})
                assert "prompts" not in more or more["prompts"][row] == item["prompt"]
        return found

    def ours(self, case: Case, sample: Mapping[str, Any], its: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        """Latents are normalised; those of Qwen-Image have no axis of frames. Text is filled with zeros."""
        latents = sample["latents"][:, 0] if case.family == "qwen-image" else sample["latents"]
        rows = sample["prompt_embeds"]
        made = {"latents": latents, "text_embeddings": torch.nn.functional.pad(rows, (0, 0, 0, len(its["text_embeddings"]) - len(rows)))}
        made |= {"pooled_prompt_embeds": sample["pooled_prompt_embeds"]} if "pooled_prompt_embeds" in its else {}
        return {name: as_bits(tensor) for name, tensor in made.items()}


DRIVER = Nemo()
