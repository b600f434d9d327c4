"""musubi-tuner for `live_shallow.py`: its data sets, caching functions and bucket reader."""
# The trainer's modules are in its checkout.
# pyright: basic, reportMissingImports=false

import argparse
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from conformance.trainer_musubi import DRIVER, Musubi
from conformance.trainers import Case

RESOLUTION = 256
STAND_INS = ("toml", "voluptuous", "einops", "easydict", "sentencepiece")
CASES = [case for case in Musubi.cases if "text" in case.kinds]
CACHE_FILE = r"\.safetensors$"
LOADERS = ((None, 0), ("fork", 2), ("spawn", 2), ("forkserver", 2))
EDITED = ("--again",)
SCANNED = ("src/musubi_tuner/**/*.py", "*.py")
CACHE_PATH = r"cache_path|cache_file|self\.cache_directory"
REPLACED = {"load_file", "save_file", "safetensors_utils.mem_eff_save_file", "safetensors_utils.MemoryEfficientSafeOpen"}
LEFT_OUT = set[str]()
REPLACED |= {"safetensors_utils.find_keys", "glob.glob", "os.path.exists", "os.remove"}
_DATA = "src/musubi_tuner/dataset"
CHANGES = (
    (
        "save_latent_cache_common's save_file is renamed",
        f"{_DATA}/cache_io.py",
        r"import save_file$",
        "import save_file as write_file",
        ["save_file", "cache_io"],
    ),
    (
        "get_latent_cache_path is renamed",
        f"{_DATA}/image_video_dataset.py",
        r"get_latent_cache_path",
        "latent_cache_path_of",
        ["get_latent_cache_path"],
    ),
    (
        "the bucket's reader transposes",
        f"{_DATA}/bucket.py",
        r"append\(sd\[key\]\)",
        "append(sd[key].transpose(-1, -2) if sd[key].ndim > 1 else sd[key])",
        ["BucketBatchManager", "self-test"],
    ),
    (
        "the bucket's reader casts",
        f"{_DATA}/bucket.py",
        r"append\(sd\[key\]\)",
        "append(sd[key].float())",
        ["BucketBatchManager", "self-test"],
    ),
    ("names of latents end otherwise", f"{_DATA}/image_video_dataset.py", r"_\{w:04d\}x\{h:04d\}_", "_{w:04d}-{h:04d}_", ["does not know"]),
    (
        "latents are saved past the adapter",
        f"{_DATA}/cache_io.py",
        r"^    save_file\(sd,",
        "    __import__('safetensors.torch').torch.save_file(sd,",
        ["self-test"],
    ),
)


def prepare(driver: Any, case: Case, data: Path, asked: argparse.Namespace) -> Callable[[str | None, int], Iterator[dict[str, Any]]]:
    """Cache as its scripts do, and return what yields all batches as training reads them."""
    import musubi_tuner.cache_latents as latents_loop
    import musubi_tuner.cache_text_encoder_outputs as text_loop

    cache = data.parent / "cache"
    cache.mkdir(exist_ok=True)
    dataset = driver._dataset(case, data, cache, 4)
    of_latents, of_text = driver._encoders(case)
    is_new = not dataset.get_all_text_encoder_output_cache_files()
    skip = not is_new and not asked.again
    settings = SimpleNamespace(num_workers=2, skip_existing=skip, batch_size=None, keep_cache=False)
    latents_loop.encode_datasets([dataset], of_latents, settings)
    files, paths = text_loop.prepare_cache_files_and_paths([dataset])
    text_loop.process_text_encoder_batches(2, skip, 4, [dataset], files, paths, of_text)
    text_loop.post_process_cache_files([dataset], files, paths, False)
    training = driver._dataset(case, data, cache, 2)
    epoch = multiprocessing.get_context("spawn").Value("i", 0)
    training.set_seed(3, epoch)
    training.prepare_for_training()
    for bucket in training.batch_manager.buckets.values():  # its own files are listed in the order of the folder
        bucket.sort(key=lambda item: Path(item.latent_cache_path).name)
    training.batch_manager.bucket_resos.sort()
    training.batch_manager.bucket_batch_indices.sort(key=str)

    def batches(method: str | None, workers: int) -> Iterator[dict[str, Any]]:
        options: dict[str, Any] = {"multiprocessing_context": method, "persistent_workers": True} if workers else {}
        loader = torch.utils.data.DataLoader(training, batch_size=1, num_workers=workers, collate_fn=_first, **options)
        for batch in loader:
            yield {name: value for name, value in batch.items() if value is not None}

    return batches


def _first(rows: list[Any]) -> Any:
    return rows[0]


def read_epochs(asked: argparse.Namespace) -> dict[str, list[float]]:
    """Save FLUX-sized samples as its own files and in the store, and return the seconds of epochs of its DataLoader over each."""
    from musubi_tuner.dataset import bucket, cache_io
    from musubi_tuner.dataset.image_video_dataset import ImageDataset, ItemInfo
    from safetensors.torch import load_file, save_file

    count, own_folder, folder = asked.pictures, asked.root / "own", asked.root / "live"
    for each in (own_folder, folder):
        each.mkdir(parents=True)
    dataset = ImageDataset(
        (1024, 1024), ".txt", 1, 1, False, False, image_directory=str(folder), cache_directory=str(folder), architecture="fk"
    )
    items, ours = [], bucket.load_file
    for number in range(count):
        noise = torch.Generator().manual_seed(number)
        item = ItemInfo(f"{number:04d}.png", "a caption", (1024, 1024), (1024, 1024))
        item.latent_cache_path, item.text_encoder_output_cache_path = (
            dataset.get_latent_cache_path(item),
            dataset.get_text_encoder_output_cache_path(item),
        )
        latents = {"latents_1x128x128_bfloat16": torch.randn(16, 128, 128, generator=noise).bfloat16()}
        text = {
            "t5_vec_bfloat16": torch.randn(512, 4096, generator=noise).bfloat16(),
            "clip_l_pooler_bfloat16": torch.randn(768).bfloat16(),
        }
        cache_io.save_latent_cache_common(item, dict(latents), "flux_kontext")
        cache_io.save_text_encoder_output_cache_common(item, dict(text), "flux_kontext")
        save_file(latents, own_folder / Path(item.latent_cache_path).name)
        save_file(text, own_folder / Path(item.text_encoder_output_cache_path).name)
        items.append(item)
    manager = bucket.BucketBatchManager({(1024, 1024): items}, 1)
    seconds: dict[str, list[float]] = {}
    time.sleep(3)  # names are looked up again after each change, for 2 s
    for _round in range(3):
        for how in ("cold", "warm"):
            for name, read in (("own", lambda path: load_file(own_folder / Path(path).name)), ("live", ours)):
                bucket.load_file = read
                if how == "cold":
                    _forget_pages(asked.root)
                began = time.perf_counter()
                for batch in torch.utils.data.DataLoader(manager, batch_size=1, collate_fn=_first):
                    assert batch["t5_vec"].shape == (1, 512, 4096)
                seconds.setdefault(f"{name} {how}", []).append(time.perf_counter() - began)
    return seconds


def _forget_pages(folder: Path) -> None:
    """Let the kernel drop the pages of all files: also of the store, which lies there too."""
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def check_more(run: Any, folder: Path) -> None:
    """Read epochs of FLUX-sized samples; the best of three rounds counts."""
    folder.mkdir()
    seconds = run.ask("epochs", folder, store=folder / "store")
    for how in ("cold", "warm"):
        own, live = (min(seconds[f"{name} {how}"]) for name in ("own", "live"))
        figures = f"its own files {own:.2f} s, live {live:.2f} s, ratio {own / live:.2f}; {seconds}"
        run.say(f"an epoch of {run.pictures} FLUX-sized samples, {how}", own / live >= 0.9, figures)


__all__ = [
    "CACHE_FILE",
    "CASES",
    "CHANGES",
    "DRIVER",
    "EDITED",
    "LOADERS",
    "RESOLUTION",
    "STAND_INS",
    "check_more",
    "prepare",
    "read_epochs",
]
