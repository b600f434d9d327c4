"""diffusion-pipe for `live_shallow.py`: its data set, its caching in processes of its own, and its batches.

Its own cache needs Python 3.12; before that, the run that it is compared with opens its data base without `autocommit`.
"""
# The trainer's modules are in its checkout.
# pyright: basic, reportMissingImports=false

import argparse
import random
import sqlite3
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from conformance.trainer_diffusion_pipe import DRIVER, DiffusionPipe
from conformance.trainers import Case

RESOLUTION = 256
STAND_INS = ("torchvision", "einops", "toml", "comfy_api", "comfy", "safetensors_", "bitsandbytes", "optimum")
CASES = list(DiffusionPipe.cases)
CACHE_FILE = r"(shard_\d+\.bin|metadata\.db)$"
LOADERS = ((None, 0), ("fork", 2))
EDITED = ()
SCANNED = ("*.py", "utils/*.py", "models/**/*.py", "tools/**/*.py")
CACHE_PATH = r"shard_|metadata_db"
LEFT_OUT = {"utils/cache.py"}  # its own cache
REPLACED = {"Cache"}
_FILE = "utils/dataset.py"
CHANGES = (
    ("Cache has another name", _FILE, r"import Cache$", "import Cache as Shards", ["utils.dataset", "Cache"]),
    (
        "items are read transposed",
        _FILE,
        r"ret = self.latent_dataset\[(.*)\]$",
        r"ret = self.latent_dataset[\1]; ret['latents'] = ret['latents'].mT",
        ["SizeBucketDataset", "self-test"],
    ),
    (
        "batches are cast",
        _FILE,
        r"features = torch.stack\(features\)",
        "features = torch.stack(features).double()",
        ["SizeBucketDataset", "self-test"],
    ),
)


def prepare(driver: Any, case: Case, data: Path, asked: argparse.Namespace) -> Callable[[str | None, int], Iterator[dict[str, Any]]]:
    """Let it cache what is missing, and return what yields all batches as training reads them."""
    del asked
    if sys.version_info < (3, 12):
        own = sqlite3.connect
        sqlite3.connect = lambda path, autocommit=False: own(path)
    random.seed(7)
    dataset = driver._cached(case, data)
    dataset.post_init(0, 1, {None: 1}, 1, {None: 1})

    def batches(method: str | None, workers: int) -> Iterator[dict[str, Any]]:
        options: dict[str, Any] = {"multiprocessing_context": method, "persistent_workers": True} if workers else {}
        loader = torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=workers, **options)
        for batch in loader:
            tensors = {name: value for name, value in batch.items() if name != "image_spec"}
            yield tensors | {"name": Path(batch["image_spec"][0][1]).name}  # the order of a folder's files is not always the same

    return batches


__all__ = [
    "CACHE_FILE",
    "CACHE_PATH",
    "CASES",
    "CHANGES",
    "DRIVER",
    "EDITED",
    "LOADERS",
    "REPLACED",
    "RESOLUTION",
    "SCANNED",
    "STAND_INS",
    "prepare",
]
