"""musubi-tuner: latents and text embeddings by the paths of its cache files. All architectures save and load at these places.

Its scripts say what is out of date: `--skip_existing`, `--keep_cache`. Read: `dataset/cache_io.py`, `bucket.py`, `image_video_dataset.py`.
"""

# pyright: basic, reportMissingImports=false
import os
import re
from typing import Any

from cachestore import live

_TESTED = {
    "musubi_tuner.dataset.bucket": ["aab8c02aeabb"],
    "musubi_tuner.dataset.cache_io": ["516f76329a6f"],
    "musubi_tuner.dataset.image_video_dataset": ["7951419af56d"],
    "musubi_tuner.utils.safetensors_utils": ["0d14ea6868e8"],
}
adapter = live.Adapter("musubi", data_set="files", tested=_TESTED, reads_exports=True)
_DATA_SET = "musubi_tuner.dataset.image_video_dataset"
_data_sets: list[Any] = []


def _of_folder(folder: str) -> set[str]:
    caches = ((data_set.cache_directory, data_set.architecture) for data_set in _data_sets)
    return {architecture for cache, architecture in caches if cache is not None and os.path.abspath(cache) == folder}


def _part(folder: str, name: str) -> str | None:
    for architecture in _of_folder(folder):
        if name.endswith(f"_{architecture}_te.safetensors"):
            return "text"
        if re.search(rf"_\d{{4,}}x\d{{4,}}_{re.escape(architecture)}\.safetensors$", name):
            return "latents"
    return None


def _self_test(folder: str) -> None:
    import torch
    from musubi_tuner.dataset import bucket, cache_io
    from musubi_tuner.dataset import image_video_dataset as module
    from musubi_tuner.utils import safetensors_utils

    data_set = module.BaseDataset(cache_directory=folder, architecture=module.ARCHITECTURE_WAN)
    item = module.ItemInfo("a picture.png", "a caption", (96, 64), (96, 64))
    item.latent_cache_path = data_set.get_latent_cache_path(item)
    item.text_encoder_output_cache_path = data_set.get_text_encoder_output_cache_path(item)
    latents = torch.arange(2 * 1 * 4 * 6, dtype=torch.float32).view(2, 1, 4, 6)
    text, more = torch.arange(15.0).view(3, 5).bfloat16(), torch.arange(4, dtype=torch.int64)
    cache_io.save_latent_cache_common(item, {"latents_1x4x6_float32": latents}, module.ARCHITECTURE_WAN_FULL)
    for tensors in ({"varlen_t5_bfloat16": text}, {"more_int64": more}):  # the second is laid over the first
        cache_io.save_text_encoder_output_cache_common(item, tensors, module.ARCHITECTURE_WAN_FULL)
    listed = [data_set.get_all_latent_cache_files(), data_set.get_all_text_encoder_output_cache_files()]
    paths = [[item.latent_cache_path], [item.text_encoder_output_cache_path]]
    live.check_same("image_video_dataset.BaseDataset.get_all_latent_cache_files", paths, listed)
    names = safetensors_utils.find_keys(item.latent_cache_path, starts_with="latents_")
    live.check_same("safetensors_utils.find_keys", ["latents_1x4x6_float32"], names)
    batch = bucket.BucketBatchManager({(96, 64): [item]}, 1)[0]
    parts = {"latents": latents[None], "t5": [text], "more": more[None]}
    live.check_same("dataset.bucket.BucketBatchManager", parts, {name: batch.get(name) for name in parts})
    os.remove(item.latent_cache_path)
    live.check_same("os.remove of a cache file", [], data_set.get_all_latent_cache_files())


files = live.NamedFiles(adapter, holds=lambda folder: bool(_of_folder(folder)), part=_part, self_test=_self_test)


@adapter.replace(_DATA_SET, "BaseDataset.__init__")
def _begin(own: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    own(self, *args, **kwargs)
    _data_sets.append(self)
    files.begin()


@adapter.replace(_DATA_SET, "BaseDataset.get_latent_cache_path")
def _latents_path(own: Any, self: Any, item_info: Any) -> str:
    return files.check(own(self, item_info))


@adapter.replace(_DATA_SET, "BaseDataset.get_text_encoder_output_cache_path")
def _text_path(own: Any, self: Any, item_info: Any) -> str:
    return files.check(own(self, item_info))


adapter.change("musubi_tuner.dataset.bucket", "load_file")(lambda _own: files.load_file)  # in a worker, which has no data set to ask
adapter.change("musubi_tuner.dataset.cache_io", "save_file")(files.saving)
adapter.change("musubi_tuner.utils.safetensors_utils", "mem_eff_save_file")(files.saving)
adapter.change("musubi_tuner.utils.safetensors_utils", "MemoryEfficientSafeOpen")(files.opening)
