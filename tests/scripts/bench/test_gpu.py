"""The script for a card measures every way that concerns a model, keeps each row at once, and goes on after one that fails."""

import json
import time

import pytest
import torch
from bench import gpu
from bench.gpu import Way, normalise

from cachestore.care import bench

pytestmark = pytest.mark.torch

OF_A_VAE = ["today", "TF32", "channels last", "channels last, GroupNorm keeps it", "compiled VAE"]
OF_TEXT = ["today", "TF32", "one block compiled", "bfloat16"]


@pytest.fixture
def measured(monkeypatch, tmp_path, capsys):
    """Runs the script on the tiny SDXL; returns the rows of its file and what it printed."""
    monkeypatch.setattr(bench, "FIRST_COUNT", 1)
    monkeypatch.setitem(gpu.KINDS, "sdxl", (bench.Work("jpeg 96x64", "latents", (96, 64)), bench.CAPTIONS))

    def run(*options, ways=gpu.WAYS):
        monkeypatch.setattr(gpu, "WAYS", ways)
        file = tmp_path / "rows.json"
        gpu.main(["--tiny", "--only", "sdxl", "--json", str(file), "--folder", str(tmp_path), *options])
        return json.loads(file.read_text())["rows"], capsys.readouterr().out

    return run


@pytest.mark.slow
def test_every_way_of_a_model_is_a_row_with_its_rates_and_its_share_of_the_peak(measured):
    rows, printed = measured()
    assert [row["way"] for row in rows] == OF_A_VAE + OF_TEXT
    assert [row["reason"] for row in rows] == [""] * len(rows)
    assert all(row[name] > 0 for row in rows for name in ("batch", "encoder_per_second", "whole_per_second", "gflop_each", "peak_fraction"))
    assert [row["difference"] for row in rows if row["way"] == "today"] == [0, 0]
    assert all(row["difference"] < 0.05 for row in rows)
    assert sum(line.startswith("| SDXL") for line in printed.splitlines()) == len(rows)


@pytest.mark.slow
def test_a_way_that_fails_is_named_and_the_others_are_measured(measured, tmp_path):
    def breaks(_model, _size):
        raise ValueError("no compiler here")

    ways = (gpu.WAYS[0], Way("broken", ("latents",), breaks), gpu.WAYS[2])
    with pytest.raises(SystemExit, match="1 rows"):
        measured(ways=ways)
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [(row["way"], row["reason"]) for row in rows] == [
        ("today", ""),
        ("broken", "ValueError: no compiler here"),
        ("channels last", ""),
        ("today", ""),
    ]


def test_rows_for_which_no_time_is_left_say_so(measured, monkeypatch):
    rows, _printed = measured("--minutes", "0")
    assert [row["way"] for row in rows] == OF_A_VAE + OF_TEXT
    assert {row["reason"] for row in rows} == {"the time was over"}


@pytest.mark.parametrize("groups", [1, 4, 8])
def test_the_group_norm_that_keeps_channels_last_is_torchs(groups):
    made = torch.Generator().manual_seed(groups)
    norm = torch.nn.GroupNorm(groups, 8, eps=1e-6)
    torch.nn.init.normal_(norm.weight, generator=made)
    torch.nn.init.normal_(norm.bias, generator=made)
    x = (torch.randn(3, 8, 5, 7, generator=made) + 2).to(memory_format=torch.channels_last)
    with torch.inference_mode():
        found = normalise(x, norm.weight, norm.bias, groups, norm.eps)
        assert found.is_contiguous(memory_format=torch.channels_last)
        torch.testing.assert_close(found, norm(x))


def test_the_peak_counts_two_operations_for_each_product_of_numbers(monkeypatch):
    ticks = iter(range(1000))
    monkeypatch.setattr(time, "perf_counter", lambda: next(ticks))
    assert gpu.measured_peaks(torch.device("cpu"), 8) == dict.fromkeys(("bfloat16", "float32", "tf32"), 2 * 8**3)
