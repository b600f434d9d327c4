"""Stands in for the module of this name in sd-scripts: the names and parameters that the adapter meets, with bodies of our own."""

from typing import Any

import numpy as np


class _Kind:
    _strategy = None

    @classmethod
    def set_strategy(cls, strategy):
        cls._strategy = strategy

    @classmethod
    def get_strategy(cls):
        return cls._strategy


class TokenizeStrategy(_Kind):
    _strategy = None


class TextEncodingStrategy(_Kind):
    _strategy = None

    def encode_tokens(self, tokenize_strategy, models, tokens):
        raise NotImplementedError

    def encode_tokens_with_weights(self, tokenize_strategy, models, tokens, weights):
        raise NotImplementedError


class TextEncoderOutputsCachingStrategy(_Kind):
    _strategy = None

    def __init__(self, cache_to_disk, batch_size, skip_disk_cache_validity_check, is_partial=False, is_weighted=False):
        self._cache_to_disk, self._batch_size = cache_to_disk, batch_size
        self.skip_disk_cache_validity_check = skip_disk_cache_validity_check
        self._is_partial, self._is_weighted = is_partial, is_weighted

    @property
    def batch_size(self):
        return self._batch_size


class LatentsCachingStrategy(_Kind):
    _strategy = None

    def __init__(self, cache_to_disk, batch_size, skip_disk_cache_validity_check):
        self._cache_to_disk, self._batch_size = cache_to_disk, batch_size
        self.skip_disk_cache_validity_check = skip_disk_cache_validity_check

    @property
    def batch_size(self):
        return self._batch_size

    def save_latents_to_disk(
        self, npz_path, latents_tensor, original_size, crop_ltrb, flipped_latents_tensor=None, alpha_mask=None, key_reso_suffix=""
    ):
        arrays: dict[str, Any] = {
            "latents": latents_tensor.float().numpy(),
            "original_size": np.array(original_size),
            "crop_ltrb": np.array(crop_ltrb),
        }
        if flipped_latents_tensor is not None:
            arrays["latents_flipped"] = flipped_latents_tensor.float().numpy()
        if alpha_mask is not None:
            arrays["alpha_mask"] = alpha_mask.float().numpy()
        np.savez(npz_path, **{name + key_reso_suffix: array for name, array in arrays.items()})

    def load_latents_from_disk(self, npz_path, bucket_reso):
        suffix = f"_{bucket_reso[1] // 8}x{bucket_reso[0] // 8}"
        with np.load(npz_path) as npz:
            if "latents" + suffix not in npz:
                raise ValueError(f"latents{suffix} not found in {npz_path}")
            maybe = [npz[name + suffix] if name + suffix in npz.files else None for name in ("latents_flipped", "alpha_mask")]
            return npz["latents" + suffix], npz["original_size" + suffix].tolist(), npz["crop_ltrb" + suffix].tolist(), *maybe
