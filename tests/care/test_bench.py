"""Bench: real passes over made-up samples, whose rates leave start-up out, and nothing that stays behind."""

import json
import os
import signal
import threading

import pytest
import torch

from cachestore.care import bench
from cachestore.care.bench import CAPTIONS, HOST, PHOTOS, T5_CAPTIONS
from cachestore.care.bench_samples import Copies, list_captions, list_pictures, write_jpeg
from cachestore.cli import ERROR, OK, USAGE, main
from cachestore.encode.models import random_model
from cachestore.encode.pictures import images, shots
from cachestore.jobs.share.report import Report
from cachestore.jobs.share.stages import STAGES
from tests.fakes import ROOT

pytestmark = pytest.mark.torch


@pytest.fixture
def short(monkeypatch):
    """Passes of one and two samples."""
    monkeypatch.setattr(bench, "SECONDS", 0.0)
    monkeypatch.setattr(bench, "FIRST_COUNT", 1)


@pytest.fixture
def run(short, tmp_path, capsys):
    """Runs the command with its temporary files in an empty folder: (exit code, its object, what is left in the folder)."""
    folder = tmp_path / "here"
    folder.mkdir()

    def call(*arguments):
        code = main(["bench", "--folder", str(folder), "--device", "cpu", "--json", *map(str, arguments)])
        return code, json.loads(capsys.readouterr().out), list(folder.iterdir())

    return call


def names(rows):
    return [row["work"] for row in rows]


def test_it_measures_the_host_the_encoder_and_the_whole_and_leaves_nothing(run):
    code, found, left = run()
    assert (code, left) == (OK, [])
    assert names(found["host"]) == [work.name for work in HOST]
    assert (names(found["encoder"]), names(found["whole"])) == (["1216x832", "captions"], [PHOTOS.name, CAPTIONS.name])
    assert all(row["per_second"] > 0 and row["cores"] >= 1 for kind in ("host", "encoder", "whole") for row in found[kind])
    assert {row["limiting"] for row in (*found["host"], *found["whole"])} <= {*STAGES}
    assert found["limiting"] == found["whole"][0]["limiting"]
    # 512 rows of 32 numbers and a pooled row, in float32; 32 channels of a 152 x 104 latent
    assert found["million"]["bytes"] == 1_000_000 * sum(row["bytes_each"] for row in found["whole"])
    assert [row["bytes_each"] for row in found["whole"]] == [4 * 32 * 152 * 104, 4 * 32 * (512 + 1)]
    assert found["million"]["hours"] > 0


def test_the_host_alone_loads_no_model_of_the_users(run):
    code, found, left = run("--host-only")
    assert (code, found["encoder"], found["whole"], found["model"], left) == (OK, [], [], "", [])
    assert found["limiting"] == found["host"][0]["limiting"]
    assert {row["work"]: row["bytes_each"] for row in found["host"]}[T5_CAPTIONS.name] == 2 * 512 * 4096


def test_of_a_vae_pictures_are_measured_and_a_remark_says_what_is_not(tmp_path):
    vae = str(ROOT / "scripts/demo_model/vae")
    works, remarks = bench.Passes(tmp_path, vae, "cpu", "lanczos", bench.Kept, print, threading.Event()).works()
    assert works == [PHOTOS]
    assert [remark for remark in remarks if "cannot encode text" in remark] == remarks
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_is_not_there_is_refused_before_anything_is_measured(run, tmp_path, monkeypatch):
    monkeypatch.setattr(bench.Passes, "measure", None)
    code, found, left = run("--model", tmp_path / "nowhere")
    assert (code, left) == (ERROR, [])
    assert "nowhere" in found["error"]


class Timed(bench.Passes):
    """Passes that take a second to start and a tenth for each sample."""

    def _run(self, work, count):
        counts = {"wanted": count, "reused": 0, "encoded": count, "failed": 0, "missing": 0, "encoded_here": count, "bytes": 10 * count}
        about = {"complete": True, "samples": count, "seconds": 0.0, "store": "", "name": "", "plan": "", "generation": 1}
        return bench._Pass(Report.from_json({**counts, **about, "stages": {"limiting": "append"}}), 1 + count / 10)


def test_a_rate_leaves_out_what_a_pass_does_once(tmp_path):
    row = Timed(tmp_path, "model", "cpu", "lanczos", bench.Kept, print, threading.Event()).measure(PHOTOS)
    assert (row.per_second, row.limiting, row.bytes_each) == (10.0, "append", 10)


def test_a_pass_leaves_its_small_files_and_no_segment_until_the_end(short, tmp_path):
    tiny = random_model.random_model(random_model.TINY, torch.device("cpu"))
    with tiny.evaluating():
        bench.Passes(tmp_path, tiny, "cpu", "lanczos", bench._Free, print, threading.Event()).measure(CAPTIONS)
    assert len([*tmp_path.rglob("done.json")]) == 3
    assert [path for path in tmp_path.rglob("*") if path.parent.parent.name == "segments"] == []


def test_pictures_are_resized_in_the_way_that_is_asked_for(run, monkeypatch):
    monkeypatch.setattr(bench, "HOST", HOST[:1])
    ways = set()
    real = shots.fit
    monkeypatch.setattr(shots, "fit", lambda *given: (ways.add(given[-1]), real(*given))[1])
    assert run("--resample", "bilinear", "--host-only")[0] == OK
    assert ways == {"bilinear"}
    code, found, _left = run("--resample", "nearest")
    assert code == USAGE
    assert "nearest" in found["error"]


def test_the_copies_of_a_jpeg_differ_in_bytes_and_have_the_same_pixels(tmp_path):
    write_jpeg(tmp_path / "one.jpg", 64, 48)
    files = Copies(tmp_path / "one.jpg")
    one, other = (files.read(f"{number}.jpg")[0] for number in range(2))
    assert one != other
    assert images.measure(one) == (64, 48)
    assert images.decode(one).tobytes() == images.decode(other).tobytes() == images.decode((tmp_path / "one.jpg").read_bytes()).tobytes()
    with files.open("0.jpg") as (file, _stat):
        assert file.read() == one


def test_listings_of_other_sizes_differ_and_captions_do_not_repeat(tmp_path):
    assert list_pictures(tmp_path, 2).content != list_pictures(tmp_path, 3).content
    captions = [sample.captions for sample in list_captions(tmp_path, 100, words=8, vocabulary=100).samples()]
    assert len(set(captions)) == 100
    assert list(list_pictures(tmp_path, 0).samples()) == []


def test_the_random_model_has_the_real_sizes_and_a_cpu_gets_the_tiny_one():
    made = random_model.random_model(random_model.REAL, torch.device("meta"))
    sizes = {name: sum(one.numel() for one in part.parameters()) for name, part in made.parts.items() if isinstance(part, torch.nn.Module)}
    assert sizes == {"text_encoder": 123_060_480, "text_encoder_2": 4_762_310_656, "vae": 34_274_208}
    assert {str(part.dtype) for part in made.parts.values() if isinstance(part, torch.nn.Module)} == {"torch.bfloat16"}
    assert random_model.fitting(torch.device("cpu")) is random_model.TINY


@pytest.mark.parametrize(("number", "method"), [(signal.SIGINT, "_run"), (signal.SIGTERM, "_run"), (signal.SIGINT, "measure_alone")])
def test_a_signal_ends_it_and_nothing_is_left(short, tmp_path, monkeypatch, number, method):
    real = getattr(bench.Passes, method)

    def interrupted(self, *arguments):
        assert list(tmp_path.iterdir()) != []
        monkeypatch.setattr(bench, "SECONDS", 1e9)
        os.kill(os.getpid(), number)
        return real(self, *arguments)

    monkeypatch.setattr(bench, "HOST", HOST[2:])
    monkeypatch.setattr(bench.Passes, method, interrupted)
    with pytest.raises(SystemExit) as ended:
        main(["bench", "--device", "cpu", "--folder", str(tmp_path)])
    assert ended.value.code == 128 + number
    assert list(tmp_path.iterdir()) == []
