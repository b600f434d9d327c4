"""Videos through a store: listed, planned, encoded, read as a trainer reads them, and made again."""

import importlib.util
import json
import os
import re
import shlex
import shutil
import tarfile
from contextlib import closing, contextmanager
from io import BytesIO
from typing import Any

import numpy as np
import pytest
from PIL import Image

import cachestore as cs
from cachestore.cli import DAMAGE, FAILURES, OK, main, make_parser
from cachestore.cli.precompute import request_from
from cachestore.cli.terminal.lines import training_lines
from cachestore.core.errors import BadInput, RecipeMismatch
from cachestore.core.samples import Sample
from cachestore.jobs.plan.options import PrecomputeRequest
from cachestore.jobs.run.task import UnitReader
from cachestore.jobs.start.forecast import forecast_of, in_words
from cachestore.sources.folders import list_source
from cachestore.sources.memory import list_objects
from cachestore.sources.reading import ListingOptions
from cachestore.sources.remarks import Remarks
from cachestore.sources.tars import list_tars
from cachestore.trainers.exporting import export_cache
from tests.encode import tiny
from tests.encode.footage import moving, write
from tests.encode.test_video_latents import look_alike_wan
from tests.fakes import ROOT, asks_for, tells_of

PICTURES = {"resolution": 64, "bucket_step": 16}
WANTED: dict[str, Any] = {**PICTURES, "frames": (5, 17), "fps": 8}
CLIPS = {"long.mkv": (60, (96, 64)), "tall.mp4": (36, (64, 96)), "short.avi": (14, (96, 64)), "blink.webm": (4, (96, 64))}
"""Frames, at 16 a second, and size: of 17, 17 and 5 frames at 8 a second, and too short."""
HOW: dict[str, Any] = {
    "mkv": {},
    "mp4": {"kind": "mp4", "codec": "libx264", "pix_fmt": "yuv420p"},
    "avi": {"kind": "avi", "codec": "mpeg4", "pix_fmt": "yuv420p"},
    "webm": {"kind": "webm", "codec": "libvpx", "pix_fmt": "yuv420p", "options": {"deadline": "realtime"}},
}


@pytest.fixture(scope="module")
def footage():
    return {name: write(moving(count, size), **HOW[name.rpartition(".")[2]]) for name, (count, size) in CLIPS.items()}


@pytest.fixture
def folder(tmp_path, footage):
    data = tmp_path / "data"
    data.mkdir()
    for name, content in footage.items():
        (data / name).write_bytes(content)
        (data / name).with_suffix(".txt").write_text(f"a video called {name}")
    Image.fromarray(moving(1)[0]).save(data / "picture.png")
    (data / "picture.txt").write_text("a picture")
    return data


def samples_of(listing):
    return {sample.id: sample for sample in listing.samples()}


# Listed


def test_videos_of_a_folder_are_samples_where_frames_are_asked_for_and_else_counted(folder):
    listed = samples_of(list_source(folder, ListingOptions(videos=True)))
    assert set(listed) == {*CLIPS, "picture.png"}
    assert listed["tall.mp4"] == Sample("tall.mp4", {"video": ("tall.mp4",)}, ("a video called tall.mp4",))
    remarks = Remarks()
    assert [sample.id for sample in list_source(folder).samples(remarks)] == ["picture.png"]
    assert remarks.unused.counts["video-without-frames"] == 4


def test_a_row_with_a_video_is_called_after_it_and_its_own_rate_is_not_taken_for_that_of_the_batch(tmp_path):
    manifest = tmp_path / "clips.jsonl"
    manifest.write_text(json.dumps({"video": "a.mp4", "caption": "a", "hero": 1}) + "\n")
    assert samples_of(list_source(manifest))["a.mp4"] == Sample("a.mp4", {"video": ("a.mp4",)}, ("a",), extras={"hero": 1})
    manifest.write_text(json.dumps({"video": "a.mp4", "fps": 24}) + "\n")
    with pytest.raises(BadInput):
        samples_of(list_source(manifest))
    manifest.write_text(json.dumps({"image": "a.png", "fps": 24}) + "\n")
    assert samples_of(list_source(manifest))["a.png"].extras == {"fps": 24}


def test_a_member_of_a_tar_is_read_in_parts(tmp_path, footage):
    with tarfile.open(tmp_path / "clips.tar", "w") as tar:
        for name, content in footage.items():
            (tmp_path / name).write_bytes(content)
            tar.add(tmp_path / name, f"a/{name}")
    os.utime(tmp_path / "clips.tar", ns=(1, 1))
    assert list(list_tars([tmp_path / "clips.tar"]).samples()) == []
    listing = list_tars([tmp_path / "clips.tar"], ListingOptions(videos=True))
    assert samples_of(listing)["a/tall.mp4"].images == {"video": ("a/tall.mp4",)}
    for name, content in footage.items():
        with listing.open(f"a/{name}") as (file, stat):
            assert stat == listing.stat(f"a/{name}")
            assert stat is not None
            assert stat[0] == len(content)
            assert file.read() == content
            assert file.read(1) == b""
            for at in (0, 100, len(content) - 5):
                assert file.seek(at) == file.tell() == at
                assert file.read(64) == content[at : at + 64]
            assert file.seek(-3, os.SEEK_END) == len(content) - 3
            assert file.read() == content[-3:]


@pytest.mark.torch
@pytest.mark.parametrize("column", ["video", "clip"])
def test_a_column_of_videos_is_read_in_parts_and_one_that_decodes_is_refused_with_what_helps(column, footage):
    datasets: Any = pytest.importorskip("datasets")
    rows = {column: [{"bytes": footage[name], "path": None} for name in ("tall.mp4", "short.avi")], "caption": ["a", "b"]}
    kinds = datasets.Features({column: datasets.Video(decode=False), "caption": datasets.Value("string")})
    data = datasets.Dataset.from_dict(rows, features=kinds)
    listing = list_objects(data)
    samples = samples_of(listing)
    assert [sample.captions for sample in samples.values()] == [("a",), ("b",)]
    with listing.open(samples["1"].images["video"][0]) as (file, _stat):
        assert file.read() == footage["short.avi"]
    with pytest.raises(BadInput, check=asks_for("data", f"'{column}'")):
        list_objects(data.cast_column(column, datasets.Video()))


def test_a_file_that_changes_while_it_is_open_is_an_error_of_reading(tmp_path):
    path = tmp_path / "a.mkv"
    path.write_bytes(b"first")
    listing = list_source(tmp_path, ListingOptions(videos=True))

    def read():
        with listing.open("a.mkv") as (file, _stat):
            assert file.read() == b"first"
            path.write_bytes(b"other")
            os.utime(path, ns=(1, 1))

    with pytest.raises(OSError):
        read()


# Planned


def asked(data, tmp_path, model=None, **options):
    model = look_alike_wan(tmp_path / "vae") if model is None else model
    request: dict[str, Any] = {"encode": ("latents",), **WANTED, **options}
    return PrecomputeRequest(str(data), str(model), str(tmp_path / "store"), **request)


def test_buckets_are_reported_with_their_frames_before_anything_is_encoded(folder, tmp_path):
    forecast = forecast_of(asked(folder, tmp_path))
    assert forecast.buckets == {"80x48": 1, "80x48x5": 1, "80x48x17": 1, "48x80x17": 1}
    assert (forecast.samples, forecast.to_encode) == (5, 5)
    alone = forecast_of(asked(folder, tmp_path, frames=(), fps=None))
    assert alone.estimated_bytes < forecast.estimated_bytes
    assert (alone.samples, alone.buckets) == (1, {"80x48": 1})


def test_clips_whose_frames_are_repeated_are_named_with_both_rates(tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    for name, rate in (("slow.mp4", 4), ("slower.mp4", 2), ("film.mp4", 8)):
        (data / name).write_bytes(write(moving(5 * rate), rate=rate, **HOW["mp4"]))
    found = forecast_of(asked(data, tmp_path))
    assert found.as_json()["repeated_frames"] == {
        "count": 2,
        "worst": [
            {"sample": "slower.mp4", "amount": 0.706, "rate": 2.0, "fps": 8.0},
            {"sample": "slow.mp4", "amount": 0.471, "rate": 4.0, "fps": 8.0},
        ],
    }
    [line] = [line for line in in_words(found, tmp_path) if "repeated" in line]
    assert "2 clips have fewer frames a second" in line
    assert "slow.mp4 47% (4 a second at fps=8)" in line
    assert forecast_of(asked(data, tmp_path, fps=2)).fits.repeated_frames.count == 0
    assert forecast_of(asked(data, tmp_path, fps=None)).fits.repeated_frames.count == 0


@pytest.mark.parametrize(
    ("options", "nearest"),
    [
        ({"frames": (16,)}, "13 and 17"),
        ({"frames": (5, 18)}, "17 and 21"),
    ],
)
def test_counts_that_the_vae_cannot_take_are_refused_at_planning(folder, tmp_path, options, nearest):
    with pytest.raises(BadInput, check=asks_for("frames", nearest)):
        forecast_of(asked(folder, tmp_path, **options))


def test_a_vae_of_pictures_takes_no_videos(folder, tmp_path):
    with pytest.raises(BadInput):
        forecast_of(asked(folder, tmp_path, model=tiny.look_alike_vae(tmp_path / "kl")))


def test_without_pyav_it_is_reported_how_to_install_it_and_pictures_need_none(folder, tmp_path, monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *rest: None if name == "av" else real(name, *rest))
    with pytest.raises(cs.MissingExtra, check=tells_of("PyAV", "[video]")):
        forecast_of(asked(folder, tmp_path))
    assert forecast_of(asked(folder, tmp_path, frames=(), fps=None)).samples == 1


@pytest.mark.parametrize(
    ("row", "options", "says"),
    [
        ({"video": "a.mp4"}, {"frames": (), "fps": None}, "has a video: pass frames"),
        ({"video": "a.mp4", "image": "a.png"}, {}, "has a video and a picture, but only one of them can be trained on"),
        ({"video": ["a.mp4", "b.mp4"]}, {}, "has a video and another one"),
        ({"video": "a.mp4", "control": "c.png"}, {"clips": 2}, 'has a video with control images, which crop="random" and clips'),
        ({"video": "a.mp4", "control": "c.png"}, {"crop": "random"}, 'has a video with control images, which crop="random" and clips'),
    ],
)
def test_what_does_not_go_with_a_video_is_refused_by_the_samples_name(tmp_path, row, options, says):
    (tmp_path / "clips.jsonl").write_text(json.dumps({"id": "one", **row}) + "\n")
    with pytest.raises(BadInput, match=f"sample 'one' {says}"):
        forecast_of(asked(tmp_path / "clips.jsonl", tmp_path, **options))


def test_a_plan_of_pictures_is_what_it_was_before_there_were_videos(folder, tmp_path):
    from cachestore.store.write.commit import create_store
    from tests.fakes import planned

    (folder / "only").mkdir()
    shutil.copy(folder / "picture.png", folder / "only")
    layout = create_store(tmp_path / "store")
    with_frames, without = (planned(layout, asked(folder / "only", tmp_path, frames=frames, fps=None)).plan for frames in ((17,), ()))
    assert [column.role for column in without.columns] == [column.role for column in with_frames.columns] == ["image"]
    assert list(without.unit_ids) == list(with_frames.unit_ids)  # no unit of a picture is another beside videos


# Encoded


def precompute(data, store, model, **options):
    return cs.precompute(data, model=model, store=store, inline=True, vae_dtype="float32", **{**WANTED, **options})


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore::FutureWarning:diffusers")
@pytest.mark.parametrize("others", [(), ("picture.png",)])
def test_videos_of_several_resolutions_are_read_at_each_with_pictures_and_without(built, tmp_path, footage, folder, others):
    data = tmp_path / "small"
    data.mkdir()
    (data / "short.avi").write_bytes(footage["short.avi"])
    for name in others:
        shutil.copy(folder / name, data)
    report = precompute(data, tmp_path / "store", built("wan").folder, resolution=[64, 32], encode=["latents"])
    assert report.encoded == 2 * (1 + len(others))
    assert any("resolution=" in line for line in training_lines(report))

    def latents_of(size):
        data = cs.CachedDataset(tmp_path / "store", resolution=size)
        return data[data.index("short.avi")]["latents"]

    sides = {size: latents_of(size).shape[1:] for size in (64, 32)}
    assert sides == {64: (2, 6, 10), 32: (2, 4, 4)}
    with pytest.raises(cs.BadInput, check=asks_for("resolution", "64, 32")):
        cs.CachedDataset(tmp_path / "store")


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore::FutureWarning:diffusers")
def test_a_mixed_folder_becomes_batches_of_one_shape_each_and_nothing_is_made_twice(built, folder, tmp_path, footage, capsys):
    import torch
    from torch.utils.data import DataLoader

    model, store = built("wan").folder, tmp_path / "store"
    report = precompute(folder, store, model)
    assert (report.encoded, report.failed) == (10, 1)
    [failure] = report.failures
    assert failure["sample"] == "blink.webm"
    assert "the video is too short: it has 2 frames at 8 a second" in failure["reason"]

    data = cs.CachedDataset(store)
    assert {bucket: [data.ids[index] for index in indices] for bucket, indices in data.buckets.items()} == {
        (48, 80, 17): ["tall.mp4"],
        (80, 48, 1): ["picture.png"],
        (80, 48, 5): ["short.avi"],
        (80, 48, 17): ["long.mkv"],
    }
    sampler = cs.BucketBatchSampler(data, batch_size=2, rank=0, num_replicas=1, tail="wrap", shuffle=False)
    shapes = {}
    for batch in DataLoader(data, batch_sampler=sampler, collate_fn=data.collate):
        assert len({*batch["sample_id"]}) == 1  # each bucket has but one sample, which fills the batch
        shapes[batch["sample_id"][0]] = (*batch["latents"].shape[1:], batch["num_frames"].tolist(), batch["fps"].tolist())
    assert shapes == {
        "long.mkv": (16, 5, 6, 10, [17, 17], [8.0, 8.0]),
        "tall.mp4": (16, 5, 10, 6, [17, 17], [8.0, 8.0]),
        "short.avi": (16, 2, 6, 10, [5, 5], [8.0, 8.0]),
        "picture.png": (16, 1, 6, 10, [1, 1], [0.0, 0.0]),
    }
    for index in range(len(data)):
        straight, slow = data.read_batch([index]), data.collate([data[index]])
        assert straight.keys() == slow.keys()
        for name, value in straight.items():
            assert torch.equal(value, slow[name]) if isinstance(value, torch.Tensor) else value == slow[name]
    assert data.recipes["latents"].read["temporal_factor"] == 4

    capsys.readouterr()
    assert main(["why", str(store), "short.avi"]) == OK
    assert "bucket [80, 48, 5], resized [80, 53], crop [0, 2, 80, 50], fps [8, 1], start [0]" in capsys.readouterr().out
    assert main(["why", str(store), "blink.webm"]) == DAMAGE
    assert "the video is too short" in capsys.readouterr().out
    assert main(["show", str(store), "long.mkv", "--png", str(tmp_path / "long.png")]) == OK
    with Image.open(tmp_path / "long.png") as shown:
        assert (shown.size, shown.mode) == ((10, 6), "RGB")  # in colours: the file's own frames were found and fitted
    assert main(["report", str(store), "-o", str(tmp_path / "report.html")]) == OK
    page = (tmp_path / "report.html").read_text()
    assert all(bucket in page for bucket in ("48x80x17", "80x48x17", "80x48x5"))
    verified = cs.verify(store, recompute=20)
    assert verified.ok
    assert (verified.recomputed["equal"], verified.recomputed["of"]) == (9, 9)  # all that samples have

    capsys.readouterr()
    command = ["precompute", str(folder), "--model", str(model), "--store", str(store), "--vae-dtype", "float32", "--quiet", "--json"]
    options = ["--resolution", "64", "--bucket-step", "16", "--frames", "5,17", "--fps", "8"]
    os.utime(folder / "long.mkv", ns=(1, 1))  # another time, the same bytes
    assert main([*command, *options]) == FAILURES
    assert json.loads(capsys.readouterr().out)["encoded"] == 0
    (folder / "long.mkv").write_bytes(footage["tall.mp4"])
    assert main([*command, *options]) == FAILURES
    again = json.loads(capsys.readouterr().out)
    assert again["encoded"] == 0  # the key of what stands there now is that of the other's file
    assert cs.CachedDataset(store).buckets[48, 80, 17] == [0, 3]

    (folder / "tall.txt").write_text("another caption")
    os.utime(folder / "tall.mp4", ns=(2, 2))
    text = precompute(folder, store, model, encode=("text",))
    assert (text.encoded, text.failed) == (1, 0)
    kept = cs.CachedDataset(store, latents="mean")
    assert kept[kept.index("tall.mp4")]["latents"].shape == (16, 5, 10, 6)  # of a file whose bytes are still those


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore::FutureWarning:diffusers")
def test_the_same_videos_in_folder_manifest_tar_and_memory_have_the_same_keys(built, folder, tmp_path, footage):
    model, store = built("wan").folder, tmp_path / "store"
    (folder / "blink.webm").unlink()
    (folder / "picture.png").unlink()
    names = ("long.mkv", "short.avi", "tall.mp4")
    rows = [{"video": name, "caption": f"a video called {name}"} for name in names]
    (folder / "clips.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with tarfile.open(tmp_path / "clips.tar", "w") as tar:
        for name in names:
            tar.add(folder / name, name)
            tar.add((folder / name).with_suffix(".txt"), name.partition(".")[0] + ".txt")
    in_memory = [Sample(name, {"video": (footage[name],)}, (f"a video called {name}",)) for name in names]
    on_disk = [Sample(name, {"video": folder / name}, (f"a video called {name}",)) for name in names]
    first = precompute(folder, store, model)
    assert (first.encoded, first.failed) == (7, 0)
    for number, data in enumerate((folder / "clips.jsonl", tmp_path / "clips.tar", in_memory, on_disk)):
        again = precompute(data, store, model, name=f"other {number}")
        assert (again.encoded, again.reused, again.failed) == (0, 7, 0)


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore::FutureWarning:diffusers")
def test_each_epoch_shows_another_clip_of_a_video_and_the_picture_beside_it_as_it_is(built, folder, tmp_path):
    import torch

    for name in ("tall.mp4", "short.avi", "blink.webm"):
        (folder / name).unlink()
    store = tmp_path / "store"
    report = precompute(folder, store, built("wan").folder, clips=3, flip=True, encode=("latents",))
    assert (report.encoded, report.failed) == (8, 0)
    data = cs.CachedDataset(store, latents="mean")
    assert list(data.ids) == ["long.mkv", "picture.png"]
    seen = {name: set() for name in data.ids}
    for epoch in range(6):
        data.set_epoch(epoch)
        for name in data.ids:
            batch = data.read_batch([data.index(name)])
            assert torch.equal(batch["latents"], data.collate([data[data.index(name)]])["latents"])
            seen[name].add(batch["latents"].numpy().tobytes())
    assert {name: len(found) for name, found in seen.items()} == {"long.mkv": 6, "picture.png": 2}
    with closing(cs.open(store)) as reader:
        starts = sorted(reader.describe(key).meta.get("start", -1) for key in list(reader.keys()))
    assert starts == [-1, -1, 0, 0, 7, 7, 13, 13]
    with pytest.raises(RecipeMismatch):
        precompute(folder, store, built("wan").folder, clips=2, flip=True, encode=("latents",))


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore::FutureWarning:diffusers")
def test_videos_alone_are_read_without_being_joined_and_in_workers_too(built, folder, tmp_path):
    from torch.utils.data import DataLoader

    (folder / "picture.png").unlink()
    store = tmp_path / "store"
    precompute(folder, store, built("wan").folder, encode=("latents",))
    data = cs.CachedDataset(store)
    assert set(data.buckets) == {(80, 48, 17), (80, 48, 5), (48, 80, 17)}
    sampler = cs.BucketBatchSampler(data, batch_size=1, rank=0, num_replicas=1)
    batches = list(DataLoader(data, batch_sampler=sampler, collate_fn=data.collate, num_workers=1))
    assert sorted(batch["num_frames"].item() for batch in batches) == [5, 17, 17]


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore::FutureWarning:diffusers")
def test_control_images_stand_beside_a_video_and_an_export_names_what_it_leaves_out(built, folder, tmp_path):
    (folder / "clips.jsonl").write_text(json.dumps({"video": "long.mkv", "control": "picture.png", "caption": "go"}) + "\n")
    store = tmp_path / "store"
    report = precompute(folder / "clips.jsonl", store, built("wan").folder)
    assert (report.encoded, report.failed) == (4, 0)
    batch = cs.CachedDataset(store, latents="mean").read_batch([0])
    assert (batch["control_latents"].shape, batch["latents"].shape) == ((1, 16, 1, 6, 10), (1, 16, 5, 6, 10))
    made = export_cache(store, format="musubi", folder=tmp_path / "musubi")
    assert (made.left_out, made.failures) == (("latents of 1 control image",), ())
    assert (tmp_path / "musubi" / "long_00000-017_0080x0048_wan.safetensors").exists()


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore::FutureWarning:diffusers")
def test_a_damaged_video_fails_alone_with_its_reason(built, folder, tmp_path):
    cut = (folder / "tall.mp4").read_bytes()
    (folder / "tall.mp4").write_bytes(cut[: len(cut) // 2])
    (folder / "short.avi").write_bytes(b"")
    report = precompute(folder, tmp_path / "store", built("wan").folder, encode=("latents",))
    reasons = {failure["sample"]: failure["reason"] for failure in report.failures}
    assert reasons.keys() == {"tall.mp4", "short.avi", "blink.webm"}
    assert "damaged, incomplete" in reasons["tall.mp4"]
    assert "empty" in reasons["short.avi"]
    assert np.isfinite(cs.CachedDataset(tmp_path / "store")[0]["latents"].numpy()).all()


# What a worker reads


class Once:
    """A source whose file is another one after it was looked at so often."""

    def __init__(self, same):
        self.same, self.looks = same, 0

    def stat(self, _reference):
        self.looks += 1
        return (3, 1) if self.looks <= self.same else (3, 2)

    @contextmanager
    def open(self, _reference):
        yield BytesIO(b"abc"), (3, 1)


def test_a_file_that_is_another_one_when_it_is_opened_again_is_an_error_of_reading():
    source: Any = Once(same=2)
    reading = UnitReader(source)
    for _time in range(2):
        with reading.open("a.mkv") as file:
            assert file.read() == b"abc"
    assert reading.stats == [(3, 1)]
    with pytest.raises(OSError), reading.open("a.mkv"):
        pass


# The page


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore::FutureWarning:diffusers")
def test_the_lines_of_the_page_encode_and_load(built, folder, tmp_path, monkeypatch):
    page = (ROOT / "docs/video.md").read_text(encoding="utf-8")
    [lines] = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    [command] = re.findall(r"^\$ cachestore (precompute .*)$", page, re.MULTILINE)
    request = request_from(make_parser().parse_args(shlex.split(command)))
    assert (request.frames, request.fps, request.resolution) == ((17, 49, 81), 16, 480)
    (folder / "picture.png").unlink()
    monkeypatch.chdir(tmp_path)
    folder.rename(tmp_path / "clips")
    names: dict[str, Any] = {"cs": cs}
    small = lines.replace('"path-or-id"', repr(str(built("wan").folder))).replace(
        "resolution=480", "resolution=64, bucket_step=16, inline=True"
    )
    exec(small.replace("fps=16", "fps=8").replace("17, 49, 81", "5"), names)
    assert len(names["data"]) == 3
    assert names["batch"]["num_frames"].tolist() == [5, 5]
