"""Clips of videos: which of which video, with which frames; there and back."""

import json
from contextlib import nullcontext
from functools import partial
from io import BytesIO
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

import cachestore as cs
from cachestore.core.errors import BadInput, RecipeMismatch
from cachestore.core.keys import Recipe
from cachestore.files.paths import Layout
from cachestore.jobs.start.declared_model import DeclaredEncoder
from cachestore.store.read.rows import newest_catalog
from tests.encode import tiny_families
from tests.encode.footage import moving, numbered, numbers_of, write
from tests.fakes import asks_for
from tests.trainers import trainers
from tests.trainers.caches import bring, equal, send
from tests.trainers.diffusion_pipe.files import write_diffusion_pipe_wan
from tests.trainers.musubi.files import write_musubi

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("torch_files_read_here")]

LENGTHS = {"dog": 24, "a cat": 9, "bird_00000-005": 12}
SIZE = (48, 32)
"""Of the videos, and of their bucket."""


@pytest.fixture(scope="module")
def footage():
    return {name: write(moving(count, SIZE)) for name, count in LENGTHS.items()}


@pytest.fixture
def videos(tmp_path, footage):
    """A folder of videos with captions."""
    folder = tmp_path / "videos"
    folder.mkdir()
    for name, content in footage.items():
        (folder / f"{name}.mkv").write_bytes(content)
        (folder / f"{name}.txt").write_text(f"what {name} does")
    return folder


def write_clip(cache, name, start, frames, *, size=SIZE, latent_frames=None):
    """A clip as musubi-tuner caches it: the size in its name is that of the bucket."""
    cache.mkdir(exist_ok=True)
    shape = (16, (frames - 1) // 4 + 1 if latent_frames is None else latent_frames, SIZE[1] // 8, SIZE[0] // 8)
    tensor = trainers.noise(name, start, frames, shape=shape, dtype=torch.bfloat16)
    path = cache / f"{name}_{start:05d}-{frames:03d}_{size[0]:04d}x{size[1]:04d}_wan.safetensors"
    reported = {"architecture": "wan", "width": f"{size[0]}", "height": f"{size[1]}", "frame_count": f"{frames}"}
    save_file({f"latents_{shape[1]}x{shape[2]}x{shape[3]}_bfloat16": tensor}, path, metadata=reported)
    return tensor


def write_text(cache, name):
    cache.mkdir(exist_ok=True)
    metadata = {"architecture": "wan", "caption1": f"what {name} does"}
    save_file(
        {"varlen_t5_bfloat16": trainers.noise(name, shape=(3, 16)).to(torch.bfloat16)}, cache / f"{name}_wan_te.safetensors", metadata
    )


def reasons_of(report):
    return {failure["sample"]: failure["reason"] for failure in report.report.failures}


def facts_of(store):
    """Frames, first frame and rate of each sample of a data set."""
    catalog = newest_catalog(Layout.at(store), "train")
    assert catalog is not None
    column = next(column for column in catalog.columns if column.role == "video")
    cells = [column.cell(column.at[row]).facts for row in range(len(catalog))]
    return {name: (one["bucket"][2], *one["start"], *one.get("fps", ())) for name, one in zip(catalog.ids, cells, strict=True) if one}


def test_each_clip_of_a_video_is_a_sample_with_its_own_latents_and_goes_out_as_it_came_in(videos, store, out, tmp_path):
    cache = tmp_path / "cache"
    clips = [(name, start, frames) for name, start, frames in product(LENGTHS, (0, 3, 7, 11), (1, 5, 9)) if start + frames <= LENGTHS[name]]
    wanted = {f"{name}.mkv#{start:05d}-{frames:03d}": write_clip(cache, name, start, frames) for name, start, frames in clips}
    for name in LENGTHS:
        write_text(cache, name)
    assert bring("musubi", cache, store, videos).complete
    data = cs.CachedDataset(store)
    assert sorted(data.ids) == sorted(wanted)
    for name, tensor in wanted.items():
        assert equal(data[data.index(name)]["latents"], tensor), name
        assert data[data.index(name)]["caption"] == f"what {name.partition('.')[0]} does"
    assert facts_of(store) == {f"{name}.mkv#{start:05d}-{frames:03d}": (frames, start, 16, 1) for name, start, frames in clips}
    written = send("musubi", store, out)
    assert (written.complete, written.left_out) == (True, ())
    theirs = {path.name: load_file(path) for path in cache.iterdir()}
    ours = {path.name: load_file(path) for path in out.glob("*.safetensors")}
    assert theirs.keys() == ours.keys()
    assert all(theirs[name].keys() == ours[name].keys() for name in theirs)
    assert all(equal(tensor, ours[name][key]) for name, tensors in theirs.items() for key, tensor in tensors.items())
    assert bring("musubi", cache, store, videos).report.reused == len(clips) + len(LENGTHS)


def test_a_video_with_one_clip_keeps_its_name_so_that_text_can_be_added_to_it(videos, store, tmp_path):
    for name in LENGTHS:
        write_clip(tmp_path / "cache", name, 0, 9)
        write_text(tmp_path / "text", name)
    bring("musubi", tmp_path / "cache", store, videos)
    bring("musubi", tmp_path / "text", store, videos)
    data = cs.CachedDataset(store)
    assert (sorted(data.ids), data.buckets.keys()) == ([f"{name}.mkv" for name in sorted(LENGTHS)], {(*SIZE, 9)})
    assert {"latents", "prompt_embeds"} <= data[0].keys()


def test_a_rate_that_the_trainer_took_is_recorded_and_decides_how_many_frames_a_video_has(videos, store, tmp_path):
    write_clip(tmp_path / "cache", "dog", 3, 9)
    assert bring("musubi", tmp_path / "cache", store, videos, fps=8).report.encoded == 1
    assert facts_of(store)["dog.mkv"] == (9, 3, 8, 1)
    write_clip(tmp_path / "cache", "dog", 5, 9)
    reasons = reasons_of(bring("musubi", tmp_path / "cache", tmp_path / "other", videos, fps=8))
    assert "is of the frames 5 to 13, but the video has 12" in reasons["dog.mkv#00005-009"]
    with pytest.raises(BadInput, check=asks_for("fps")):
        bring("musubi", tmp_path / "cache", store, videos, fps=-1)


@pytest.mark.parametrize(
    ("clips", "reason"),
    [
        ([{"start": 4, "frames": 9}], "is of the frames 4 to 12, but the video has 9"),
        ([{"start": 0, "frames": 9, "latent_frames": 2}], "says that it is of 9 frames, but holds latents of 5"),
        ([{"start": 0, "frames": 9}, {"start": 0, "frames": 9, "size": (64, 48)}], "all belong to"),
    ],
)
def test_a_clip_that_cannot_be_of_its_video_fails_with_the_reason(videos, store, tmp_path, clips, reason):
    write_clip(tmp_path / "cache", "dog", 0, 5)
    for clip in clips:
        write_clip(tmp_path / "cache", "a cat", **clip)
    report = bring("musubi", tmp_path / "cache", store, videos)
    assert reason in reasons_of(report)["a cat.mkv"]
    assert list(cs.CachedDataset(store).ids) == ["dog.mkv"]


def test_a_file_that_may_be_of_a_clip_or_of_a_picture_is_used_for_neither(videos, store, tmp_path):
    Image.new("RGB", SIZE).save(videos / "dog_00000-005.png")
    write_clip(tmp_path / "cache", "dog", 0, 5)
    write_clip(tmp_path / "cache", "a cat", 0, 5)
    report = bring("musubi", tmp_path / "cache", store, videos)
    reasons = reasons_of(report)
    assert all("may be of dog_00000-005.png or of dog.mkv" in reasons[name] for name in ("dog.mkv", "dog_00000-005.png"))
    assert list(cs.CachedDataset(store).ids) == ["a cat.mkv"]


def test_latents_of_several_frames_are_of_no_picture(store, tmp_path):
    (tmp_path / "data").mkdir()
    Image.new("RGB", SIZE).save(tmp_path / "data" / "dog_00000-005.png")
    write_clip(tmp_path / "cache", "dog", 0, 5)
    assert "holds latents of 5 frames" in reasons_of(bring("musubi", tmp_path / "cache", store, tmp_path / "data"))["dog_00000-005.png"]


def test_videos_of_which_a_cache_holds_nothing_are_left_out_with_a_remark(videos, store, tmp_path):
    pictures = [trainers.Picture("one.png", "a fox", (64, 48), (6, 8))]
    trainers.make_source(videos, pictures)
    write_musubi(tmp_path / "cache", "wan", pictures)
    report = bring("musubi", tmp_path / "cache", store, videos)
    assert (report.complete, list(cs.CachedDataset(store).ids)) == (True, ["one.png"])
    assert "3 videos are ignored (the cache holds nothing of videos)" in report.remarks


@pytest.mark.parametrize(("fps", "numbers"), [(None, [7, 8, 9, 10, 11]), (8, [14, 16, 18, 20, 22])])
def test_the_frames_of_a_clip_are_made_again_from_its_first_one_and_its_rate(fps, numbers):
    """The declared model encodes them, to compare."""
    video = BytesIO(write(numbered(24, SIZE)))
    reader: Any = SimpleNamespace(open=lambda _reference: nullcontext(video))
    vae: Any = None
    declared = DeclaredEncoder(vae, Recipe("latents", {}))
    request = {"key": "0" * 32, "video": "dog.mkv", "bucket": [*SIZE, 5], "start": [7], **({} if fps is None else {"fps": fps})}
    assert numbers_of(declared.resolve(request, reader).item.pixels()) == numbers


@pytest.mark.slow
@pytest.mark.parametrize("clips", [1, 2])
def test_a_real_vae_recognises_its_clips_and_text_is_added_to_whole_videos_without_encoding_them(videos, tmp_path, clips):
    model, store = tmp_path / "model", tmp_path / "store"
    tiny_families.save(tiny_families.FAMILIES["wan"], tiny_families.FAMILIES["wan"].build(), model)
    wanted: dict[str, Any] = {"resolution": 48, "buckets": "musubi", "frames": (5, 9), "clips": clips, "latents": "mean"}
    assert cs.precompute(videos, model=model, store=tmp_path / "ours", inline=True, **wanted).complete
    assert send("musubi", tmp_path / "ours", tmp_path / "out").complete
    assert bring("musubi", tmp_path / "out", store, videos, claims=None, model=model, encode=["latents"]).complete
    assert cs.verify(store, recompute=10).recomputed["wrong"] == 0
    add: Any = partial(cs.precompute, videos, model=model, store=store, encode=("text",), frames=(5, 9), inline=True)
    if clips == 1:
        assert (add().encoded, len(cs.CachedDataset(store))) == (len(LENGTHS) + 1, len(LENGTHS))  # and the empty caption
    else:
        with pytest.raises(RecipeMismatch, match="none of them is in this source"):
            add()


def test_pictures_and_videos_of_one_data_set_go_into_folders_of_their_own(videos, store, out, tmp_path):
    """musubi-tuner takes each file of a folder of videos for a clip."""
    pictures = [trainers.Picture("one.png", "a fox", (64, 48), (6, 8))]
    trainers.make_source(videos, pictures)
    write_musubi(tmp_path / "cache", "wan", pictures)
    for name in LENGTHS:
        write_clip(tmp_path / "cache", name, 2, 5)
        write_text(tmp_path / "cache", name)
    bring("musubi", tmp_path / "cache", store, videos)
    assert send("musubi", store, out).complete
    found = {str(path.relative_to(out)) for path in out.rglob("*.safetensors")}
    clips = {f"videos/{name}_{rest}.safetensors" for name in LENGTHS for rest in ("00002-005_0048x0032_wan", "wan_te")}
    assert found == {"images/one_0064x0048_wan.safetensors", "images/one_wan_te.safetensors"} | clips


def test_simpletuner_takes_the_beginning_of_each_video_and_no_other_clip(videos, store, out, tmp_path):
    for name, start in (("dog", 0), ("a cat", 0), ("bird_00000-005", 4)):
        write_clip(tmp_path / "cache", name, start, 5)
    bring("musubi", tmp_path / "cache", store, videos)
    written = send("simpletuner", store, out)
    assert [(one["sample"], one["reason"].partition(",")[0]) for one in written.failures] == [
        ("bird_00000-005.mkv", "its clip begins at frame 4")
    ]
    (sizes,) = out.glob("aspect_ratio_bucket_metadata_*.json")
    known = json.loads(sizes.read_bytes())
    assert {Path(path).name: one["num_frames"] for path, one in known.items()} == {"dog.mkv": 5, "a cat.mkv": 5}
    report = bring("simpletuner", out, tmp_path / "back", videos, family="wan", encode=["latents"])
    assert {failure["sample"] for failure in report.report.failures} == {"bird_00000-005.mkv"}
    theirs, ours = cs.CachedDataset(store), cs.CachedDataset(tmp_path / "back")
    assert list(ours.ids) == ["a cat.mkv", "dog.mkv"]
    assert all(equal(ours[ours.index(name)]["latents"], theirs[theirs.index(name)]["latents"]) for name in ours.ids)


@pytest.mark.parametrize("kind", ["simpletuner", "musubi"])
def test_a_video_that_could_not_be_encoded_is_a_failure_of_an_export_and_hides_no_other(videos, store, out, tmp_path, kind):
    write_clip(tmp_path / "cache", "dog", 0, 5)
    write_clip(tmp_path / "cache", "a cat", LENGTHS["a cat"], 5)  # it would begin behind the end
    assert not bring("musubi", tmp_path / "cache", store, videos).complete
    written = send(kind, store, out)
    assert {failure["sample"] for failure in written.failures} == {"a cat.mkv", "bird_00000-005.mkv"}
    assert len([path for path in out.rglob("*") if path.suffix in {".pt", ".safetensors"}]) == 1


def test_two_samples_of_one_video_get_the_same_clips_each_with_its_caption(videos, store, tmp_path):
    rows = [{"id": caption, "video": "dog.mkv", "caption": caption} for caption in ("one", "two")]
    (videos / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for start in (0, 5):
        write_clip(tmp_path / "cache", "dog", start, 5)
    report = bring("musubi", tmp_path / "cache", store, videos / "rows.jsonl")
    assert (report.report.encoded, report.report.failed) == (2, 0)
    assert sorted(cs.CachedDataset(store).ids) == ["one#00000-005", "one#00005-005", "two#00000-005", "two#00005-005"]


BEGINNING = {"model": "a model", "video_clip_mode": "single_beginning"}
"""What a user says of diffusion-pipe's clips."""


def write_wan(cache):
    """What diffusion-pipe caches of each video, by the video's name."""
    return {name: write_diffusion_pipe_wan(cache, f"{name}.mkv", f"what {name} does", 9, SIZE) for name in LENGTHS}


def test_what_diffusion_pipe_cached_of_videos_is_of_their_beginning_at_the_models_rate(videos, store, tmp_path):
    wanted = write_wan(tmp_path / "wan")
    report = bring("diffusion-pipe", tmp_path / "wan", store, videos, claims=BEGINNING)
    assert (report.complete, report.family, report.unmatched) == (True, "wan", ())
    data = cs.CachedDataset(store)
    assert sorted(data.ids) == [f"{name}.mkv" for name in sorted(LENGTHS)]
    for name, (latents, rows) in wanted.items():
        sample = data[data.index(f"{name}.mkv")]
        assert equal(sample["latents"], latents)
        assert equal(sample["prompt_embeds"], rows)
    assert facts_of(store) == {f"{name}.mkv": (9, 0, 16, 1) for name in LENGTHS}


@pytest.mark.parametrize(
    ("folder", "fps", "rate"), [("wan2.2_5b", None, 24), ("skyreels_v2", None, 24), ("wan_i2v", None, 16), ("wan", 12, 12)]
)
def test_the_rate_of_diffusion_pipes_clips_is_that_of_the_model_which_its_folder_names(videos, store, tmp_path, folder, fps, rate):
    write_diffusion_pipe_wan(tmp_path / folder, "dog.mkv", "what dog does", 9, SIZE)
    bring("diffusion-pipe", tmp_path / folder, store, videos, claims=BEGINNING, fps=fps)
    assert facts_of(store) == {"dog.mkv": (9, 0, rate, 1)}


@pytest.mark.parametrize(
    ("folder", "claims", "option", "help_text"),
    [
        ("wan", {"model": "a model"}, "claims", "video_clip_mode"),
        ("wan", {"video_clip_mode": "single_middle"}, "claims", "video_clip_mode"),
        ("renamed", BEGINNING, "fps", "fps=24"),
    ],
)
def test_clips_of_diffusion_pipe_are_refused_while_nobody_says_which_frames_they_have(
    videos, store, tmp_path, folder, claims, option, help_text
):
    write_wan(tmp_path / folder)
    with pytest.raises(BadInput, check=asks_for(option, help_text)):
        bring("diffusion-pipe", tmp_path / folder, store, videos, claims=claims, family="wan")
    assert not store.exists()
    assert bring("diffusion-pipe", tmp_path / folder, store, videos, claims=claims, family="wan", encode=["text"]).complete


def test_of_several_resolutions_of_a_video_the_largest_is_imported_and_pictures_beside_videos_too(videos, store, tmp_path):
    Image.new("RGB", SIZE).save(videos / "one.png")
    (videos / "one.txt").write_text("a fox")
    picture, _rows = write_diffusion_pipe_wan(tmp_path / "wan", "one.png", "a fox", 1, SIZE)
    write_wan(tmp_path / "wan")
    larger, _rows = write_diffusion_pipe_wan(tmp_path / "wan", "dog.mkv", "what dog does", 9, (96, 64))
    report = bring("diffusion-pipe", tmp_path / "wan", store, videos, claims=BEGINNING, encode=["latents"])
    assert report.complete
    data = cs.CachedDataset(store)
    assert equal(data[data.index("dog.mkv")]["latents"], larger)
    assert equal(data[data.index("one.png")]["latents"], picture)


def test_a_clip_of_diffusion_pipe_that_is_longer_than_its_video_fails(videos, store, tmp_path):
    write_diffusion_pipe_wan(tmp_path / "wan", "dog.mkv", "what dog does", 9, SIZE)
    write_diffusion_pipe_wan(tmp_path / "wan", "a cat.mkv", "what a cat does", 13, SIZE)
    report = bring("diffusion-pipe", tmp_path / "wan", store, videos, claims=BEGINNING)
    assert "is of the frames 0 to 12, but the video has 9" in reasons_of(report)["a cat.mkv"]
    assert list(cs.CachedDataset(store).ids) == ["dog.mkv"]
