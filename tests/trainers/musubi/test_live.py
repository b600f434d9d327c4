"""musubi-tuner's cache files in a store: against a stand-in that has its functions at the plug points, with bodies of our own."""

# The trainer's modules are a stand-in.
# pyright: basic, reportMissingImports=false
import glob
import os

import pytest
import torch
from safetensors.torch import save_file

from cachestore import live
from tests.trainers.live_stand_ins import armed_here

DATA_SET = """
import glob, os
from musubi_tuner.dataset.cache_io import *
ARCHITECTURE_WAN, ARCHITECTURE_WAN_FULL = "wan", "wan"

class ItemInfo:
    def __init__(self, item_key, caption, original_size, bucket_size=None, frame_count=None, content=None, latent_cache_path=None):
        self.item_key, self.caption, self.original_size, self.bucket_size = item_key, caption, original_size, bucket_size
        self.latent_cache_path, self.text_encoder_output_cache_path = latent_cache_path, None

class BaseDataset:
    def __init__(self, resolution=(960, 544), cache_directory=None, architecture="no_default"):
        self.cache_directory, self.architecture = cache_directory, architecture

    def _path(self, item_info, end):
        return os.path.join(self.cache_directory, os.path.splitext(os.path.basename(item_info.item_key))[0] + end)

    def get_latent_cache_path(self, item_info):
        return self._path(item_info, "_{:04d}x{:04d}_".format(*item_info.original_size) + self.architecture + ".safetensors")

    def get_text_encoder_output_cache_path(self, item_info):
        return self._path(item_info, "_" + self.architecture + "_te.safetensors")

    def get_all_latent_cache_files(self):
        return glob.glob(os.path.join(self.cache_directory, "*_" + self.architecture + ".safetensors"))

    def get_all_text_encoder_output_cache_files(self):
        return glob.glob(os.path.join(self.cache_directory, "*_" + self.architecture + "_te.safetensors"))
"""
CACHE_IO = """
import os
from safetensors.torch import save_file
from musubi_tuner.utils import safetensors_utils

def save_latent_cache_common(item_info, sd, arch_fullname):
    save_file(sd, item_info.latent_cache_path, metadata={"architecture": arch_fullname})

def save_text_encoder_output_cache_common(item_info, sd, arch_fullname, merge_existing=True):
    path = item_info.text_encoder_output_cache_path
    if os.path.exists(path):
        with safetensors_utils.MemoryEfficientSafeOpen(path) as f:
            assert f.metadata()["caption1"] == item_info.caption
            sd = {name: f.get_tensor(name) for name in f.keys()} | sd
    safetensors_utils.mem_eff_save_file(sd, path, metadata={"caption1": item_info.caption})
"""
UTILS = """
import safetensors.torch

def mem_eff_save_file(tensors, filename, metadata=None):
    safetensors.torch.save_file(tensors, filename, metadata)

class MemoryEfficientSafeOpen:
    def __init__(self, filename, disable_numpy_memmap=False):
        self.file = open(filename, "rb")

def find_keys(safetensors_file, starts_with=None, ends_with=None):
    with MemoryEfficientSafeOpen(safetensors_file) as f:
        return [name for name in f.keys() if name.startswith(starts_with)]
"""
BUCKET = """
import torch
from safetensors.torch import load_file

class BucketBatchManager:
    def __init__(self, bucketed_item_info, batch_size, num_timestep_buckets=None):
        (self.items,) = bucketed_item_info.values()

    def __getitem__(self, idx):
        batch = {}
        for item in self.items:
            for name, tensor in {**load_file(item.latent_cache_path), **load_file(item.text_encoder_output_cache_path)}.items():
                batch.setdefault(name.split("_")[1 if name.startswith("varlen_") else 0], []).append(tensor)
        return {name: rows if name == "t5" else torch.stack(rows) for name, rows in batch.items()}
"""
SOURCES = {
    "musubi_tuner/dataset/image_video_dataset.py": DATA_SET,
    "musubi_tuner/dataset/cache_io.py": CACHE_IO,
    "musubi_tuner/dataset/bucket.py": BUCKET,
    "musubi_tuner/utils/safetensors_utils.py": UTILS,
}


def armed(monkeypatch, tmp_path, **changed):
    sources = {name: text.replace(*changed.get(name.split("/")[-1].removesuffix(".py"), ("", ""))) for name, text in SOURCES.items()}
    return armed_here(monkeypatch, tmp_path, "cachestore.trainers.musubi.live", sources)


def data_set_in(folder):
    from musubi_tuner.dataset import image_video_dataset

    return image_video_dataset.BaseDataset(cache_directory=str(folder), architecture="wan")


def item_of(data_set, name="a cat.png"):
    from musubi_tuner.dataset import image_video_dataset

    item = image_video_dataset.ItemInfo(name, "a caption", (640, 480))
    item.latent_cache_path = data_set.get_latent_cache_path(item)
    item.text_encoder_output_cache_path = data_set.get_text_encoder_output_cache_path(item)
    return item


def test_what_it_saves_is_what_its_bucket_reads_and_no_file_is_on_the_disk(monkeypatch, tmp_path):
    with armed(monkeypatch, tmp_path) as here:
        from musubi_tuner.dataset import bucket, image_video_dataset

        (tmp_path / "cache").mkdir()
        item = item_of(data_set_in(tmp_path / "cache"))
        latents, text = torch.randn(2, 1, 4, 6), torch.randn(3, 5).bfloat16()
        image_video_dataset.save_latent_cache_common(item, {"latents_1x4x6_float32": latents}, "wan")
        image_video_dataset.save_text_encoder_output_cache_common(item, {"varlen_t5_bfloat16": text}, "wan")
        image_video_dataset.save_text_encoder_output_cache_common(item, {"more_int64": torch.arange(2)}, "wan")
        batch = bucket.BucketBatchManager({(640, 480): [item]}, 1)[0]
        assert torch.equal(batch["latents"], latents[None])
        assert torch.equal(batch["t5"][0], text)
        assert torch.equal(batch["more"], torch.arange(2)[None])
        assert here.counts() == {"latents": [0, 1], "text": [0, 1]}
        assert not [*(tmp_path / "cache").iterdir()]
    assert sorted(here.rows()) == sorted([item.latent_cache_path, item.text_encoder_output_cache_path])


def test_files_are_listed_looked_for_and_removed_in_the_store(monkeypatch, tmp_path):
    with armed(monkeypatch, tmp_path):
        from musubi_tuner.dataset import cache_io

        data_set = data_set_in(tmp_path)
        items = [item_of(data_set, name) for name in ("b.png", "a.png")]
        for item in items:
            cache_io.save_latent_cache_common(item, {"latents": torch.zeros(2)}, "wan")
        paths = [item.latent_cache_path for item in items]
        assert data_set.get_all_latent_cache_files() == sorted(paths)
        assert data_set.get_all_text_encoder_output_cache_files() == []
        os.remove(paths[0])
        assert [os.path.exists(path) for path in paths] == [False, True]
        with pytest.raises(FileNotFoundError):
            os.remove(paths[0])


def test_other_files_stay_files_even_beside_the_cache(monkeypatch, tmp_path):
    with armed(monkeypatch, tmp_path):
        from musubi_tuner.utils import safetensors_utils

        data_set_in(tmp_path)
        for name in ("lora.safetensors", "my_wan.safetensors", "umt5_te.safetensors"):
            safetensors_utils.mem_eff_save_file({"weight": torch.zeros(2)}, str(tmp_path / name))
            assert os.path.exists(tmp_path / name)
        other = tmp_path / "other"
        other.mkdir()
        save_file({"weight": torch.zeros(2)}, other / "a_0640x0480_wan.safetensors")
        assert glob.glob(f"{other}/*_wan.safetensors") == [f"{other}/a_0640x0480_wan.safetensors"]
        os.remove(other / "a_0640x0480_wan.safetensors")
        assert not [*other.iterdir()]


@pytest.mark.parametrize(
    ("module", "old", "new", "words"),
    [
        ("bucket", "append(tensor)", "append(tensor.flip(-1))", "BucketBatchManager"),
        ("bucket", "append(tensor)", "append(tensor.float())", "BucketBatchManager"),
        ("cache_io", "    save_file(sd", "    __import__('safetensors').torch.save_file(sd", "get_all_latent_cache_files"),
        ("cache_io", "import save_file", "import save_file as write", "save_file"),
        ("image_video_dataset", "_{:04d}x{:04d}_", "_{}-{}_", "does not know"),
        ("image_video_dataset", "get_all_latent_cache_files", "latent_files", "get_all_latent_cache_files"),
        ("image_video_dataset", "get_latent_cache_path", "latent_path", "get_latent_cache_path"),
        ("safetensors_utils", "mem_eff_save_file", "save_it", "mem_eff_save_file"),
    ],
)
def test_a_version_that_does_not_fit_is_refused_by_name(monkeypatch, tmp_path, module, old, new, words):
    with armed(monkeypatch, tmp_path, **{module: (old, new)}) as here, pytest.raises(live.Refused, match=words) as refused:
        data_set_in(tmp_path)
    assert refused.value.code == 2
    assert not here.store.exists()


def test_what_opens_a_cache_file_on_the_disk_is_refused(monkeypatch, tmp_path):
    with armed(monkeypatch, tmp_path) as here:
        item = item_of(data_set_in(tmp_path))
        (hook,) = here.hooks
        hook("open", (str(tmp_path / "a cat.png"), "rb", 0))
        with pytest.raises(live.Refused, match="past the adapter"):
            hook("open", (item.latent_cache_path, "rb", 0))
