"""Runs the caching and loading code of musubi-tuner, for `conformance_trainers.py`.

Its `ImageDataset` lists, resizes and loads; the `encode_and_save_batch` of each architecture caches. Text encoders and VAEs are stand-ins.
"""
# The trainer's modules are in its checkout.
# pyright: reportMissingImports=false

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from conformance_trainers import Case, Loaded, as_bits, clip_latents_of, clip_name, latents_of, noise_of

_ARCHITECTURES = {"z-image": "zi", "qwen-image": "qi", "flux": "fk", "wan": "wan"}


def _noise(caption: str, what: str, *shape: int) -> torch.Tensor:
    return noise_of(caption, what, *shape).to(torch.bfloat16)


def _rows(caption: str) -> int:
    return 3 + len(caption) % 9


class _Vae:
    """Makes latents of pixels."""

    device = torch.device("cpu")

    def __init__(self, driver: "Musubi", dtype: torch.dtype = torch.float32) -> None:
        self.driver, self.dtype = driver, dtype

    def mean(self, pixels: torch.Tensor) -> torch.Tensor:
        self.driver.encoded += 1
        return latents_of(pixels, 16).to(self.dtype)

    def framed(self, pixels: torch.Tensor) -> torch.Tensor:
        """Encode `[B, 3, F, H, W]`."""
        self.driver.encoded += 1
        return clip_latents_of(pixels, 16, 4).to(self.dtype)


class Musubi:
    """Implements `conformance_trainers.Driver`."""

    stand_ins = ("musubi_tuner.zimage.zimage_utils", "musubi_tuner.qwen_image.qwen_image_utils", "musubi_tuner.wan.modules.t5")
    resolution, is_beside, encoded = 512, False, 0
    cases = (
        Case("zi", "z-image", "zimage"),
        Case("qi", "qwen-image", "qwenimage"),
        Case("fk", "flux", "flux", controls=True),
        Case("wan", "wan", "wan", precompute={"latents": "mean"}),
        Case("wan videos", "wan", "wan", videos=True, precompute={"latents": "mean", "frames": (5, 13), "clips": 2}),
    )

    def _dataset(self, case: Case, data: Path, cache: Path, batch_size: int) -> Any:
        from musubi_tuner.dataset.image_video_dataset import ImageDataset, VideoDataset

        if case.videos:
            return VideoDataset(
                (self.resolution, self.resolution),
                ".txt",
                batch_size,
                1,
                enable_bucket=True,
                bucket_no_upscale=False,
                frame_extraction="chunk",
                target_frames=[5, 9],
                video_directory=str(data),
                cache_directory=str(cache),
                architecture="wan",
            )
        controls = str(data.parent / "data_controls") if case.controls else None
        return ImageDataset(
            (self.resolution, self.resolution),
            ".txt",
            batch_size,
            1,
            enable_bucket=True,
            bucket_no_upscale=False,
            image_directory=str(data),
            control_directory=controls,
            cache_directory=str(cache),
            architecture=_ARCHITECTURES[case.family],
        )

    def _encoders(self, case: Case) -> tuple[Callable[[list[Any]], None], Callable[[list[Any]], None]]:
        """Return what caches latents, and what caches text, of a batch."""
        cpu, plain = torch.device("cpu"), _Vae(self)
        match case.family:
            case "z-image":
                import musubi_tuner.zimage_cache_latents as of_latents
                import musubi_tuner.zimage_cache_text_encoder_outputs as of_text

                vae = SimpleNamespace(device=cpu, dtype=torch.float32, encode=lambda x: SimpleNamespace(mode=lambda: plain.mean(x)))
                of_text.zimage_utils.get_text_embeds = lambda _tokenizer, _encoder, texts: self._padded(texts, 2560)
                return lambda batch: of_latents.encode_and_save_batch(vae, batch), lambda batch: of_text.encode_and_save_batch(
                    None, None, batch, cpu
                )
            case "qwen-image":
                import musubi_tuner.qwen_image_cache_latents as of_latents
                import musubi_tuner.qwen_image_cache_text_encoder_outputs as of_text

                framed = _Vae(self, torch.bfloat16)
                vae = SimpleNamespace(device=cpu, dtype=torch.bfloat16, encode_pixels_to_latents=framed.framed)
                of_text.qwen_image_utils.get_qwen_prompt_embeds = lambda _tokenizer, _encoder, texts: self._padded(texts, 3584)
                return lambda batch: of_latents.encode_and_save_batch(vae, batch, False), lambda batch: of_text.encode_and_save_batch(
                    None, None, None, None, batch, cpu, None
                )
            case "flux":
                import musubi_tuner.flux_kontext_cache_latents as of_latents
                import musubi_tuner.flux_kontext_cache_text_encoder_outputs as of_text

                vae = SimpleNamespace(device=cpu, dtype=torch.float32, encode=plain.mean)
                return lambda batch: of_latents.encode_and_save_batch(vae, batch), lambda batch: of_text.encode_and_save_batch(
                    _Tokens(), self._model("last_hidden_state", 8, 4096), _Tokens(), self._model("pooler_output", 768), batch, cpu
                )
            case _:
                import musubi_tuner.wan_cache_latents as of_latents
                import musubi_tuner.wan_cache_text_encoder_outputs as of_text

                framed = _Vae(self, torch.bfloat16)
                vae = SimpleNamespace(device=cpu, dtype=torch.bfloat16, encode=lambda x: list(framed.framed(x)))
                return lambda batch: of_latents.encode_and_save_batch(vae, None, False, batch), lambda batch: of_text.encode_and_save_batch(
                    lambda texts, _device: self._lists(texts), batch, cpu, None
                )

    def _lists(self, texts: list[str]) -> list[torch.Tensor]:
        self.encoded += 1
        return [_noise(text, "t5", _rows(text), 4096) for text in texts]

    def _padded(self, texts: list[str], width: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.encoded += 1
        longest = max(map(_rows, texts))
        rows = torch.zeros(len(texts), longest, width, dtype=torch.bfloat16)
        for row, text in zip(rows, texts, strict=True):
            row[: _rows(text)] = _noise(text, "rows", _rows(text), width)
        return rows, torch.stack([torch.arange(longest) < _rows(text) for text in texts])

    def _model(self, name: str, *shape: int) -> Any:
        """Return a stand-in of a text encoder for the tokens of `_Tokens`."""

        def call(input_ids: torch.Tensor, **_options: object) -> dict[str, torch.Tensor]:
            self.encoded += 1
            return {name: torch.stack([_noise(str(ids.tolist()), name, *shape) for ids in input_ids])}

        class Model:
            dtype, device = torch.bfloat16, torch.device("cpu")
            __call__ = staticmethod(call)

        return Model()

    def write(self, case: Case, data: Path, cache: Path) -> None:
        """Let the caching scripts' loops write."""
        import musubi_tuner.cache_latents as latents_loop
        import musubi_tuner.cache_text_encoder_outputs as text_loop

        cache.mkdir(exist_ok=True)
        dataset = self._dataset(case, data, cache, 4)
        of_latents, of_text = self._encoders(case)
        settings = SimpleNamespace(num_workers=2, skip_existing=False, batch_size=None, keep_cache=True)
        latents_loop.encode_datasets([dataset], of_latents, settings)
        files, paths = text_loop.prepare_cache_files_and_paths([dataset])
        text_loop.process_text_encoder_batches(2, False, 4, [dataset], files, paths, of_text)

    def read(self, case: Case, data: Path, cache: Path, batch_size: int) -> Loaded:
        """Load every batch, as training does."""
        dataset = self._dataset(case, data, cache, batch_size)
        dataset.prepare_for_training()
        manager, found = dataset.batch_manager, Loaded()
        for number, (bucket, index) in enumerate(manager.bucket_batch_indices):
            batch = manager[number]
            for row, item in enumerate(manager.buckets[bucket][index * batch_size :][:batch_size]):
                name = clip_name(item.item_key, *_span(item.latent_cache_path)) if case.videos else item.item_key
                found[name, False] = {key: as_bits(values[row]) for key, values in batch.items() if values is not None}
        return found

    def ours(self, case: Case, sample: Mapping[str, Any], its: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        """Latents are raw for Z-Image; text is in the trainer's parts; an import keeps control latents beside the picture's."""
        names = {"llm_embed": "prompt_embeds", "vl_embed": "prompt_embeds", "t5": "prompt_embeds", "t5_vec": "prompt_embeds"}
        names |= {"clip_l_pooler": "pooled_prompt_embeds", "latents": "raw" if case.family == "z-image" else "latents"}
        made = {key: as_bits(sample[names[key]]) for key in its if key in names}
        if "latents_control" in its:
            control = sample.get("control_latents")
            made["latents_control"] = its["latents_control"] if control is None else as_bits(control)
        return made


def _span(path: str) -> tuple[int, int]:
    """Return first frame and number of frames of a clip, as the loader reads them from the name of its file."""
    start, frames = path.split("_")[-3].split("-")
    return int(start), int(frames)


class _Tokens:
    """Tokenizes a caption to bytes of its digest."""

    def __call__(self, texts: list[str], **_options: object) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.tensor([list(hashlib.sha256(text.encode()).digest()[:8]) for text in texts])}


DRIVER = Musubi()
