"""The campaign of hostile tars would see what it looks for."""

import random

import pytest

from cachestore.trainers.webdataset import groups as tar_groups
from tests.torture import tars

pytestmark = pytest.mark.torch


def test_a_tar_that_nobody_damaged_holds_what_was_exported(tmp_path):
    raw, before = tars.exported(tmp_path)
    (tmp_path / "work").mkdir()
    assert list(tars.imported(tmp_path / "work", raw, before)) == []
    assert all(tars.forged(raw, way, random.Random(1)) != raw for way in tars.FORGERIES)


def test_bytes_that_nobody_compares_would_be_seen(tmp_path, monkeypatch):
    raw, before = tars.exported(tmp_path)
    (tmp_path / "work").mkdir()
    at = raw.index(b"00000001.safetensors") + 2000
    damaged = raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :]
    assert list(tars.imported(tmp_path / "work", damaged, before)) == []

    def other(data):
        raise ValueError(data[:1])

    monkeypatch.setattr(tar_groups, "read_safetensors", other)
    assert any("ValueError" in one for one in tars.imported(tmp_path / "work", raw, before))
