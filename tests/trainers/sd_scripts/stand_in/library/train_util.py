"""Stands in for the module of this name in sd-scripts."""
# This folder is on the path, as the trainer's is.
# pyright: reportImplicitRelativeImport=false

import numpy as np
from PIL import Image

from library.strategy_base import LatentsCachingStrategy, TextEncoderOutputsCachingStrategy, TextEncodingStrategy, TokenizeStrategy

__all__ = ["LatentsCachingStrategy", "TextEncoderOutputsCachingStrategy", "TextEncodingStrategy", "TokenizeStrategy"]
IMAGE_TRANSFORMS = "to [-1, 1]"


class ImageInfo:
    def __init__(self, image_key, num_repeats, caption, is_reg, absolute_path, caption_dropout_rate=0.0):
        self.image_key, self.num_repeats, self.caption, self.is_reg = image_key, num_repeats, caption, is_reg
        self.absolute_path, self.caption_dropout_rate = absolute_path, caption_dropout_rate
        self.bucket_reso = self.resized_size = self.resize_interpolation = self.image = None
        self.image_size = self.latents_npz = self.text_encoder_outputs_npz = None


class BaseDataset:
    def __init__(self, batch_size=2):
        self.batch_size, self.image_data, self.image_to_subset = batch_size, {}, {}

    def new_cache_latents(self, model, accelerator):
        raise AssertionError("the trainer's own caching was called")

    def new_cache_text_encoder_outputs(self, models, accelerator):
        raise AssertionError("the trainer's own caching was called")


class DatasetGroup:
    def __init__(self, datasets):
        self.datasets = datasets

    def new_cache_latents(self, model, accelerator):
        raise AssertionError("the trainer's own caching was called")

    def new_cache_text_encoder_outputs(self, models, accelerator):
        raise AssertionError("the trainer's own caching was called")


def load_image(image_path, alpha=False):
    with Image.open(image_path) as image:
        return np.array(image.convert("RGBA" if alpha else "RGB"), np.uint8)
