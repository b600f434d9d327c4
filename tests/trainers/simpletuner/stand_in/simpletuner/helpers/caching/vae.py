"""A stand-in of SimpleTuner's module, with bodies of our own: latents that follow from a picture's bytes and crop."""

import os
from importlib import import_module

import torch


class VAECache:
    """Makes, saves and loads latents."""

    def __init__(
        self,
        called,
        model,
        vae,
        accelerator,
        metadata_backend,
        instance_data_dir,
        image_data_backend,
        *,
        cache_dir="vae",
        dataset_type="image",
    ):
        self.id, self.model, self.vae, self.accelerator, self.cache_dir = called, model, vae, accelerator, cache_dir
        self.image_data_backend = self.cache_data_backend = image_data_backend
        self.dataset_type, self.num_video_frames, self.vae_cache_ondemand = dataset_type, None, False
        self._metadata_search_types, self.dtype = ["image"], torch.float32

    def _cache_vae_dtype(self):
        return self.dtype

    def generate_vae_cache_filename(self, filepath):
        """Return the file of a picture's latents."""
        base = os.path.basename(filepath) + ".pt"
        return os.path.join(self.cache_dir, base), base

    def already_cached(self, filepath):
        """Whether there is a file."""
        return self.cache_data_backend.exists(self.generate_vae_cache_filename(filepath)[0])

    def discover_unprocessed_files(self):
        """Return pictures without a file."""
        self.cache_data_backend.list_files(instance_data_dir="vae", file_extensions=["pt"])
        self.local_unprocessed_files = list(import_module("simpletuner.helpers.training.state_tracker").StateTracker.images)
        return self.local_unprocessed_files

    def process(self, size=2):
        """Encode what has no file, in batches, and write."""
        lacking = [path for path in self.local_unprocessed_files if not self.already_cached(path)]
        for start in range(0, len(lacking), size):
            batch = lacking[start : start + size]
            images = [torch.tensor(list(self.image_data_backend.read(path)[:12]), dtype=self.dtype).reshape(3, 2, 2) for path in batch]
            made = self.encode_images(images, batch, load_from_cache=False)
            self.cache_data_backend.write_batch([self.generate_vae_cache_filename(path)[0] for path in batch], made)

    def retrieve_from_cache(self, filepath):
        """Load latents."""
        return self.encode_images([None], [filepath])[0]

    def encode_images(self, images, filepaths, load_from_cache=True):
        """Load latents that have a file, and make others."""
        names = [self.generate_vae_cache_filename(path)[0] for path in filepaths]
        if load_from_cache:
            return [self.cache_data_backend.torch_load(name) for name in names]
        return list(self.model.encode_pictures(self.vae, torch.stack(list(images))))
