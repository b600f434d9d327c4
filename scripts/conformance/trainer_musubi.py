"""Runs the caching and loading code of musubi-tuner, for `trainers.py`.

Its `ImageDataset` lists, resizes and loads; the `encode_and_save_batch` of each architecture caches. Text encoders and VAEs are stand-ins.
"""
# The trainer's modules are in its checkout.
# pyright: reportMissingImports=false

import hashlib
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from conformance.trainers import Case, Loaded, as_bits, clip_latents_of, clip_name, latents_of, noise_of

_ARCHITECTURES = {"z-image": "zi", "qwen-image": "qi", "flux": "fk", "wan": "wan", "hunyuanvideo": "hv", "hunyuanvideo15": "hv15"}
_FLUX2 = {"flux2": "f2d", "flux2-klein-4b": "f2k4b", "flux2-klein-9b": "f2k9b"}
_RAW = {"z-image", "hunyuanvideo", "hunyuanvideo15"}


def _noise(caption: str, what: str, *shape: int) -> torch.Tensor:
    return noise_of(caption, what, *shape).to(torch.bfloat16)


def _rows(caption: str) -> int:
    return 3 + len(caption) % 9


class _Vae:
    """Makes latents of pixels."""

    device = torch.device("cpu")

    def __init__(self, driver: "Musubi", dtype: torch.dtype = torch.float32, channels: int = 16, factor: int = 8) -> None:
        self.driver, self.dtype, self.channels, self.further = driver, dtype, channels, factor // 8

    def mean(self, pixels: torch.Tensor) -> torch.Tensor:
        self.driver.encoded += 1
        return torch.nn.functional.avg_pool2d(latents_of(pixels, self.channels), self.further).to(self.dtype)

    def framed(self, pixels: torch.Tensor) -> torch.Tensor:
        """Encode `[B, 3, F, H, W]`."""
        self.driver.encoded += 1
        return clip_latents_of(pixels, self.channels, 4)[..., :: self.further, :: self.further].to(self.dtype)


class _Distribution:
    """Latents in the form in which HunyuanVideo's VAEs return them."""

    def __init__(self, latents: torch.Tensor) -> None:
        self.latents, self.latent_dist = latents, self

    def mode(self) -> torch.Tensor:
        """Return them."""
        return self.latents

    sample = mode


class _Encoder:
    """A text encoder of HunyuanVideo."""

    def __init__(self, embed: Callable[[list[str]], tuple[torch.Tensor, torch.Tensor]]) -> None:
        self.embed = embed

    def text2tokens(self, texts: list[str], **_options: object) -> list[str]:
        """Return the captions themselves."""
        return texts

    def encode(self, texts: list[str], **_options: object) -> Any:
        """Return embeddings and masks."""
        rows, mask = self.embed(texts)
        return SimpleNamespace(hidden_state=rows, attention_mask=mask.long())


class _Embedder:
    """The text encoder of FLUX.2: rows of padding are not zeros."""

    dtype = torch.bfloat16

    def __init__(self, driver: "Musubi") -> None:
        self.driver = driver

    def __call__(self, texts: list[str]) -> torch.Tensor:
        """Return `[B, rows, width]`."""
        self.driver.encoded += 1
        return torch.stack([_noise(text, "layers", 12, 96) for text in texts])


def _versions() -> Any:
    import musubi_tuner.flux_2.flux2_utils as of_flux2

    return of_flux2.FLUX2_MODEL_INFO.values()


class Musubi:
    """Implements `conformance.trainers.Driver`."""

    stand_ins = ("musubi_tuner.zimage.zimage_utils", "musubi_tuner.qwen_image.qwen_image_utils", "musubi_tuner.wan.modules.t5")
    resolution, is_beside, encoded = 512, False, 0
    cases = (
        Case("zi", "z-image", "zimage"),
        Case("qi", "qwen-image", "qwenimage"),
        Case("fk", "flux", "flux", controls=True),
        Case("wan", "wan", "wan", precompute={"latents": "mean"}),
        Case("wan videos", "wan", "wan", videos=True, precompute={"latents": "mean", "frames": (5, 13), "clips": 2}),
        Case("f2d", "flux2", "flux2", precompute={"latents": "mean"}),
        Case("f2k4b", "flux2-klein-4b", "flux2klein", precompute={"latents": "mean"}),
        Case("f2k9b", "flux2-klein-9b", "flux2klein", precompute={"latents": "mean"}),
        Case("hv", "hunyuanvideo", "hunyuanvideo"),
        Case("hv videos", "hunyuanvideo", "hunyuanvideo", videos=True, precompute={"frames": (5, 13), "clips": 2}),
        Case("hv15", "hunyuanvideo15", "hunyuanvideo15", kinds=("latents",), precompute={"latents": "mean"}),
        Case(
            "hv15 videos",
            "hunyuanvideo15",
            "hunyuanvideo15",
            kinds=("latents",),
            videos=True,
            precompute={"latents": "mean", "frames": (5, 13), "clips": 2},
        ),
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
                architecture=(_ARCHITECTURES | _FLUX2)[case.family],
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
            architecture=(_ARCHITECTURES | _FLUX2)[case.family],
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
            case "hunyuanvideo" | "hunyuanvideo15":
                return self._hunyuan(case)
            case "flux2" | "flux2-klein-4b" | "flux2-klein-9b":
                return self._flux2(case)
            case _:
                import musubi_tuner.wan_cache_latents as of_latents
                import musubi_tuner.wan_cache_text_encoder_outputs as of_text

                framed = _Vae(self, torch.bfloat16)
                vae = SimpleNamespace(device=cpu, dtype=torch.bfloat16, encode=lambda x: list(framed.framed(x)))
                return lambda batch: of_latents.encode_and_save_batch(vae, None, False, batch), lambda batch: of_text.encode_and_save_batch(
                    lambda texts, _device: self._lists(texts), batch, cpu, None
                )

    def _hunyuan(self, case: Case) -> tuple[Callable[[list[Any]], None], Callable[[list[Any]], None]]:
        cpu = torch.device("cpu")
        if case.family == "hunyuanvideo":
            import musubi_tuner.cache_latents as of_latents
            import musubi_tuner.cache_text_encoder_outputs as of_text

            framed = _Vae(self, torch.bfloat16)
            vae = SimpleNamespace(device=cpu, dtype=torch.bfloat16, encode=lambda x: _Distribution(framed.framed(x)))
            llm, clip = _Encoder(lambda texts: self._padded(texts, 64, 256)), _Encoder(self._pooled)

            def of_both(batch: list[Any]) -> None:
                for one in (llm, clip):
                    of_text.encode_and_save_batch(one, batch, one is llm, None)

            return lambda batch: of_latents.encode_and_save_batch(vae, batch), of_both
        import musubi_tuner.hv_1_5_cache_latents as of_latents
        import musubi_tuner.hv_1_5_cache_text_encoder_outputs as of_text

        framed = _Vae(self, torch.bfloat16, 32, 16)
        vae = SimpleNamespace(device=cpu, dtype=torch.bfloat16, encode=lambda x: [_Distribution(framed.framed(x))])
        of_text.hunyuan_video_1_5_text_encoder.get_qwen_prompt_embeds = lambda _tokenizer, _encoder, texts: self._padded(texts, 64)
        of_text.hunyuan_video_1_5_text_encoder.get_glyph_prompt_embeds = lambda _tokenizer, _encoder, text: self._padded([text], 32)
        return lambda batch: of_latents.encode_and_save_batch(vae, None, batch), lambda batch: of_text.encode_and_save_batch(
            None, None, None, None, batch, cpu, None
        )

    def _flux2(self, case: Case) -> tuple[Callable[[list[Any]], None], Callable[[list[Any]], None]]:
        import musubi_tuner.flux_2_cache_latents as of_latents
        import musubi_tuner.flux_2_cache_text_encoder_outputs as of_text

        cpu, patched = torch.device("cpu"), _Vae(self, torch.float32, 128, 16)
        vae = SimpleNamespace(device=cpu, dtype=torch.float32, encode=patched.mean)
        full = next(one.architecture_full for one in _versions() if one.architecture == _FLUX2[case.family])
        encoder = _Embedder(self)
        return lambda batch: of_latents.encode_and_save_batch(vae, batch, full), lambda batch: of_text.encode_and_save_batch(
            encoder, batch, cpu, full
        )

    def _lists(self, texts: list[str]) -> list[torch.Tensor]:
        self.encoded += 1
        return [_noise(text, "t5", _rows(text), 4096) for text in texts]

    def _pooled(self, texts: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
        self.encoded += 1
        return torch.stack([_noise(text, "pooled", 48) for text in texts]), torch.ones(len(texts), 77)

    def _padded(self, texts: list[str], width: int, length: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        self.encoded += 1
        longest = max(length, *map(_rows, texts))
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
        for path in () if "text" in case.kinds else (data.parent / "cache").rglob("*_te.safetensors"):  # it loads none without text
            folder = next(cache.rglob("*.safetensors")).parent
            if not (folder / path.name).exists():
                shutil.copy(path, folder)
        dataset.prepare_for_training()
        manager, found = dataset.batch_manager, Loaded()
        for number, (bucket, index) in enumerate(manager.bucket_batch_indices):
            batch = manager[number]
            for row, item in enumerate(manager.buckets[bucket][index * batch_size :][:batch_size]):
                name = clip_name(item.item_key, *_span(item.latent_cache_path)) if case.videos else item.item_key
                own = {key: values[row] for key, values in batch.items() if values is not None}
                found[name, False] = {key: as_bits(one) for key, one in own.items() if "text" in case.kinds or key == "latents"}
        return found

    def ours(self, case: Case, sample: Mapping[str, Any], its: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        """Latents are raw for Z-Image; text is in the trainer's parts; an import keeps control latents beside the picture's."""
        names = {"llm_embed": "prompt_embeds", "vl_embed": "prompt_embeds", "t5": "prompt_embeds", "t5_vec": "prompt_embeds"}
        names |= {"clip_l_pooler": "pooled_prompt_embeds", "latents": "raw" if case.family in _RAW else "latents"}
        names |= {"ctx_vec": "prompt_embeds", "clipL": "pooled_prompt_embeds"}
        made = {key: as_bits(sample[names[key]]) for key in its if key in names}
        if "llm" in its:
            rows = sample["prompt_embeds"]
            made["llm"] = as_bits(torch.nn.functional.pad(rows, (0, 0, 0, 256 - len(rows))))
            made["llm_mask"] = (np.arange(256) < len(rows)).astype(np.int64)
            made |= {key: its[key] for key in ("clipL_mask",) if key in its}  # its trainer does not use it
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
