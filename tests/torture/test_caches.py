"""The campaign of hostile caches reads what it damages, and would see what it looks for."""

import random

import pytest

from cachestore.core.errors import EncodeFailed
from cachestore.core.raw_tensors import Misplaced
from cachestore.trainers.cache_files import CacheFiles
from cachestore.trainers.families import FAMILIES
from cachestore.trainers.sandbox import TorchFiles
from cachestore.trainers.table import load_formats
from tests.torture import caches

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("torch_files_read_here")]


def values(folder, files, file):
    """How many values are read of a file that nobody damaged, as the family whose file it is."""
    for other in files:
        path = folder / other.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(other.data)
    found = 0
    for family in FAMILIES:
        try:
            found = max(found, len(list(caches._values(CacheFiles(folder, file.format, TorchFiles()), file, family))))
        except Misplaced as error:
            found = max(found, "mirrored" in str(error))  # read whole, and refused for what it says
        except (EncodeFailed, KeyError):
            continue
    return found


def test_every_recorded_file_is_read_before_it_is_damaged(tmp_path):
    files = caches.recorded_files()
    assert {file.format.name for file in files} == {one.name for one in load_formats() if one.reads is not None}
    draw = random.Random(1)
    for number, file in enumerate(draw.sample(files, 30)):
        beside = [other for other in files if other.folder == file.folder]
        assert values(tmp_path / str(number), beside, file), file.path


def test_a_pickle_that_is_executed_would_be_seen(tmp_path, monkeypatch):
    import torch

    monkeypatch.setattr(TorchFiles, "read", lambda _files, data: torch.load(caches.io.BytesIO(data), weights_only=False))
    files = [file for file in caches.recorded_files() if file.format.name == "simpletuner"]
    found = list(caches._read(files, files[0], "pickle", tmp_path, random.Random(1), TorchFiles()))
    assert any("was executed" in one for one in found)
