"""Stands in for the strategies of one family of sd-scripts. The encoders are tiny modules."""
# This folder is on the path, as the trainer's is.
# pyright: reportImplicitRelativeImport=false

import os

import numpy as np
import torch

from library import strategy_base


class SmallTokenizeStrategy(strategy_base.TokenizeStrategy):
    def __init__(self, max_length):
        self.max_length = max_length

    def tokenize(self, text):
        rows = [[ord(letter) % 64 for letter in one[: self.max_length]] for one in text]
        return [torch.tensor([row + [0] * (self.max_length - len(row)) for row in rows])]


class SmallTextEncodingStrategy(strategy_base.TextEncodingStrategy):
    def encode_tokens(self, tokenize_strategy, models, tokens):
        rows = models[0](tokens[0])
        return [rows, rows.mean(1)]


class SmallTextEncoderOutputsCachingStrategy(strategy_base.TextEncoderOutputsCachingStrategy):
    def get_outputs_npz_path(self, image_abs_path):
        return os.path.splitext(image_abs_path)[0] + "_small_te.npz"

    def is_disk_cached_outputs_expected(self, npz_path):
        return os.path.exists(npz_path) and "rows" in np.load(npz_path)

    def load_outputs_npz(self, npz_path):
        data = np.load(npz_path)
        return [data["rows"], data["pooled"]]

    def cache_batch_outputs(self, tokenize_strategy, models, text_encoding_strategy, infos):
        tokens = tokenize_strategy.tokenize([info.caption for info in infos])
        with torch.no_grad():
            rows, pooled = text_encoding_strategy.encode_tokens(tokenize_strategy, models, tokens)
        for info, one, two in zip(infos, rows.numpy(), pooled.numpy(), strict=True):
            if self._cache_to_disk:
                np.savez(info.text_encoder_outputs_npz, rows=one, pooled=two, is_weighted=self._is_weighted)
            else:
                info.text_encoder_outputs = (one, two)


class SmallLatentsCachingStrategy(strategy_base.LatentsCachingStrategy):
    def get_latents_npz_path(self, absolute_path, image_size):
        return f"{os.path.splitext(absolute_path)[0]}_{image_size[0]:04d}x{image_size[1]:04d}_small.npz"

    def is_disk_cached_latents_expected(self, bucket_reso, npz_path, flip_aug, alpha_mask):
        if not os.path.exists(npz_path):
            return False
        return not flip_aug or f"latents_flipped_{bucket_reso[1] // 8}x{bucket_reso[0] // 8}" in np.load(npz_path)

    def cache_batch_latents(self, model, batch, flip_aug, alpha_mask, random_crop):
        for info in batch:
            with torch.no_grad():
                latents = model(torch.from_numpy(info.image[:, :, :3].copy()).permute(2, 0, 1).float()[None])[0]
            flipped = latents.flip(2) if flip_aug else None
            mask = torch.ones(latents.shape[1:]) if alpha_mask else None
            height, width = info.image.shape[:2]
            suffix = f"_{latents.shape[1]}x{latents.shape[2]}"
            self.save_latents_to_disk(info.latents_npz, latents, (width, height), (0, 0, width, height), flipped, mask, suffix)
