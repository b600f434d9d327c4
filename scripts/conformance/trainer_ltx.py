"""Runs the caching and loading code of LTX-2's trainer, for `trainers.py`.

Its `compute_latents` and `compute_captions_embeddings` list, resize and save, with its own `FeatureExtractorV1`; its `PrecomputedDataset`
loads. Text encoder and VAE are stand-ins.
"""
# The trainer's modules are in its checkout.
# pyright: reportMissingImports=false

import importlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from conformance.trainers import Case, Loaded, as_bits, clip_latents_of, clip_name, noise_of

_ROWS, _LAYERS, _WIDTH = 1024, 2, 32
_PICTURES = ((1, 256, 256), (1, 256, 384), (1, 384, 256))
_VIDEOS = ((9, 256, 256), (17, 256, 384))
_TINY: Mapping[str, Any] = {"buckets": "cachestore", "latents": "mean", "encode_args": {"max_sequence_length": 256}}
_SIZES = ("num_frames", "height", "width")


class _Vae(torch.nn.Module):
    """Makes latents of pixels, a thirty-second as large."""

    def __init__(self, driver: "Ltx") -> None:
        super().__init__()
        self.driver, self.dtype = driver, torch.nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """Encode `[B, 3, F, H, W]`."""
        self.driver.encoded += 1
        return torch.nn.functional.avg_pool3d(clip_latents_of(pixels, 128, 8), (1, 4, 4)).to(torch.bfloat16)


class Ltx:
    """Implements `conformance.trainers.Driver`."""

    stand_ins = ("torchaudio", "pillow_heif")
    resolution, is_beside, encoded = 256, False, 0
    cases = (
        Case("ltx2", "ltx2", "ltx2", precompute=_TINY),
        Case("ltx2 videos", "ltx2", "ltx2", videos=True, precompute={**_TINY, "frames": (9, 17)}),
    )

    def _modules(self) -> tuple[Any, Any]:
        """Return its scripts for videos and captions, with stand-ins for what loads models."""
        trainer: Any = importlib.import_module("ltx_trainer")
        packages = Path(trainer.__file__).parents[3]
        sys.path += [str(packages / "ltx-core/src"), str(packages / "ltx-trainer/scripts")]
        videos: Any = importlib.import_module("process_videos")
        captions: Any = importlib.import_module("process_captions")
        videos.resolve_video_vae_path = lambda *_paths: None
        videos.read_video_scale_factors = lambda _path: videos.VIDEO_SCALE_FACTORS
        videos.load_video_vae_encoder = lambda *_paths, **_options: _Vae(self)
        captions.embedding_weight_paths = lambda *_paths: None
        captions.load_text_encoder = lambda *_paths, **_options: SimpleNamespace(encode=self._hidden)
        captions.load_embeddings_processor = lambda *_paths, **_options: SimpleNamespace(feature_extractor=self._extractor())
        return videos, captions

    def _hidden(self, captions: list[str]) -> list[tuple[tuple[torch.Tensor, ...], torch.Tensor]]:
        """Return the layers of each caption, padded on the left, and its mask."""
        self.encoded += 1
        found: list[tuple[tuple[torch.Tensor, ...], torch.Tensor]] = []
        for caption in captions:
            count = 3 + len(caption) % 9
            layers = torch.nn.functional.pad(noise_of(caption, "rows", _LAYERS, count, _WIDTH), (0, 0, _ROWS - count, 0))
            mask = (torch.arange(_ROWS) >= _ROWS - count).to(torch.int64)
            found.append((tuple(layers.to(torch.bfloat16)[:, None]), mask[None]))
        return found

    def _extractor(self) -> Any:
        module: Any = importlib.import_module("ltx_core.text_encoders.gemma.feature_extractor")
        torch.manual_seed(7)
        projection = torch.nn.Linear(_LAYERS * _WIDTH, _WIDTH, bias=False, dtype=torch.bfloat16)
        return module.FeatureExtractorV1(projection, is_av=True)

    def write(self, case: Case, data: Path, cache: Path) -> None:
        """Let its scripts cache what a list names."""
        videos, captions = self._modules()
        paths = sorted(path for path in data.iterdir() if path.suffix in {".png", ".mp4"})
        rows = [{"media_path": path.name, "caption": path.with_suffix(".txt").read_text(encoding="utf-8").strip()} for path in paths]
        listed = data / "list.json"
        listed.write_text(json.dumps(rows), encoding="utf-8")
        buckets = list(_VIDEOS if case.videos else _PICTURES)
        videos.compute_latents(listed, "media_path", buckets, str(cache / "latents"), "", device="cpu", num_dataloader_workers=0)
        captions.compute_captions_embeddings(listed, str(cache / "conditions"), "", "", device="cpu")
        listed.unlink()

    def read(self, case: Case, data: Path, cache: Path, batch_size: int) -> Loaded:
        """Load every sample as training does. Its batches need one shape, so each batch here is of one."""
        del data
        datasets: Any = importlib.import_module("ltx_trainer.datasets")
        dataset, found = datasets.PrecomputedDataset(str(cache), ["latents", "conditions"]), Loaded()
        groups: dict[tuple[int, ...], list[int]] = {}
        for number in range(len(dataset)):
            groups.setdefault(tuple(dataset[number]["latents"]["latents"].shape), []).append(number)
        batches = [those[start : start + batch_size] for those in groups.values() for start in range(0, len(those), batch_size)]
        for batch in torch.utils.data.DataLoader(dataset, batch_sampler=batches):
            values = {**batch["latents"], **batch["conditions"]}
            for row, number in enumerate(batch["idx"].tolist()):
                path, frames = dataset.sample_files["latents"][number], (int(values["num_frames"][row]) - 1) * 8 + 1
                name = clip_name(path.stem, 0, frames) if case.videos else path.stem
                found[name, False] = {key: as_bits(those[row]) for key, those in values.items()}
        return found

    def ours(self, case: Case, sample: Mapping[str, Any], its: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        """Latents are normalised means; text is padded on the left, and one for pictures and sound."""
        del case
        latents, text, length = sample["latents"], sample["prompt_embeds"], len(its["prompt_attention_mask"])
        text = text if "prompt_attention_mask" not in sample else text[sample["prompt_attention_mask"].bool()]
        rows = as_bits(torch.nn.functional.pad(text, (0, 0, length - len(text), 0)))
        mask = (np.arange(length) >= length - len(text)).astype(np.int64)
        made = {name: np.array(size) for name, size in zip(_SIZES, latents.shape[1:], strict=True)}
        made |= {"latents": as_bits(latents), "fps": np.array(float(sample.get("fps", 1)))}
        return {**made, "video_prompt_embeds": rows, "audio_prompt_embeds": rows, "prompt_attention_mask": mask}


DRIVER = Ltx()
