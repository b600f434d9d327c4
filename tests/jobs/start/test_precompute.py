"""`precompute`: a data set over its life, and the folder that holds everything that goes wrong."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cachestore as cs
from cachestore.care.verify import verify
from cachestore.cli import main
from cachestore.cli.terminal.lines import training_lines
from cachestore.core.errors import BadInput, BadUsage, EncodeFailed, Incomplete, RecipeMismatch, Superseded, WriteFailed
from cachestore.files.paths import Layout
from cachestore.jobs.plan.options import PrecomputeRequest
from cachestore.jobs.share.stages import STAGES
from cachestore.jobs.share.workers import Heartbeat
from cachestore.jobs.start.forecast import _seconds, forecast_of, in_words
from cachestore.jobs.start.here import precompute_here
from cachestore.jobs.start.processes import Child
from cachestore.sources.combined import list_in_memory
from cachestore.store.format.catalog import list_generations, list_names
from cachestore.store.read.snapshot import list_segments
from cachestore.store.write.commit import create_store
from tests import fakes
from tests.encode import tiny
from tests.fakes import asks_for, catalog, tells_of

pytestmark = pytest.mark.processes


def picture(path, content, *, at=1):
    """A file that was modified long ago."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    os.utime(path, (at, at))
    return path


@pytest.fixture
def data(tmp_path):
    for n in range(5):
        picture(tmp_path / f"data/{n}.png", b"picture %d" % n)
        (tmp_path / f"data/{n}.txt").write_text(f"caption {n}")
    return tmp_path / "data"


def run(data, root, **options):
    return precompute_here(PrecomputeRequest(str(data), options.pop("model", "model"), str(root), **options))


def cells(root, encoder):
    """The digest each sample's cell was made from; None where it is empty."""
    found = catalog(root)
    column = next(column for column in found.columns if column.encoder == encoder)
    rows = {sample: column.row_cells(row) for row, sample in enumerate(found.ids)}
    return {sample: [cell.input.hex() if cell.key else None for cell in row] for sample, row in rows.items()}


# Nothing


@pytest.mark.parametrize("source", ["folder", "prompts.txt", "manifest.jsonl", "metadata/metadata.csv", "one.tar"])
@pytest.mark.parametrize("has_store", [False, True])
def test_a_source_of_nothing_makes_neither_a_store_nor_a_generation(tmp_path, root, makers, source, has_store):
    path = picture(tmp_path / source, b"\n" if source.endswith((".txt", ".jsonl")) else b"") if "." in source else tmp_path / source
    path.mkdir(exist_ok=True) if path.name == "folder" else None
    if has_store:
        create_store(root)
    data = path.parent if path.name == "metadata.csv" else path
    with pytest.raises(BadUsage, check=asks_for("data", data)):
        run(data, root)
    assert root.exists() == has_store
    assert not has_store or (list_names(Layout(root)), list((root / "plans").glob("*"))) == ([], [])


@pytest.mark.parametrize("inline", [False, True])
@pytest.mark.parametrize("nothing", ["[]", "two folders", "rows of a data set"])
def test_of_nothing_in_memory_and_of_several_sources_of_nothing_no_store_is_made(tmp_path, root, makers, nothing, inline):
    for name in "ab":
        (tmp_path / name).mkdir()
    of_datasets = pytest.importorskip("datasets").Dataset.from_dict({"image": [], "text": []}) if "rows" in nothing else None
    data: Any = {"[]": [], "two folders": [tmp_path / "a", tmp_path / "b"]}.get(nothing, of_datasets)
    with pytest.raises(BadUsage):
        cs.precompute(data, model="model", store=root, inline=inline)
    assert not root.exists()


def test_videos_without_frames_and_captions_without_text_are_nothing(tmp_path, root, makers):
    picture(tmp_path / "clips/a.mp4", b"a video")
    with pytest.raises(BadUsage, check=asks_for("data", "video-without-frames")):
        run(tmp_path / "clips", root)
    with pytest.raises(BadUsage, check=asks_for("frames", "a.mp4")):
        run(rows(tmp_path / "clips/m.jsonl", {"path": "a.mp4", "text": "a cat"}), root)
    prompts = picture(tmp_path / "prompts.txt", b"a cat\na dog\n")
    with pytest.raises(BadUsage, check=asks_for("data", "none of 2")):
        run(prompts, root, encode=("latents",))
    assert not root.exists()
    assert run(prompts, root).samples == 2, "prompts alone are a data set"


def test_under_a_name_that_has_samples_an_emptied_source_asks_to_be_let(data, root, makers):
    first = run(data, root)
    for path in data.iterdir():
        path.unlink()
    with pytest.raises(RecipeMismatch, check=asks_for("replace")):
        run(data, root)
    assert run(data, root, replace=True).generation == first.generation + 1
    assert verify(root).ok


# A folder that moved


def test_a_run_that_reuses_everything_from_a_moved_folder_records_the_new_path_and_changes_no_digest(data, root, makers, tmp_path):
    first = run(data, root)
    encoded = [len(maker.encoded) for maker in makers.made]
    moved = data.rename(tmp_path / "moved")
    second = run(moved, root)
    assert (second.encoded, second.generation, second.catalog_digest) == (0, first.generation + 1, first.catalog_digest)
    assert {hints["data"] for hints in catalog(root).request.values()} == {str(moved)}
    assert sum(len(maker.encoded) for maker in makers.made) == sum(encoded)
    assert run(moved, root).generation == second.generation, "the path is recorded once"
    assert verify(root).ok


def test_the_new_path_is_recorded_without_starting_a_process_too(data, root, makers, tmp_path, monkeypatch):
    run(data, root)
    monkeypatch.setattr("cachestore.jobs.start.launching.run_child", lambda *_arguments: pytest.fail("a process was started"))
    monkeypatch.setattr("cachestore.jobs.start.launching._is_model_here", lambda _request: True)
    moved = data.rename(tmp_path / "moved")
    assert cs.precompute(moved, model="model", store=root).encoded == 0
    assert {hints["data"] for hints in catalog(root).request.values()} == {str(moved)}


def test_a_path_that_is_still_there_stays_recorded(data, root, makers, tmp_path):
    first = run(data, root)
    (tmp_path / "link").symlink_to(data)
    assert run(tmp_path / "link", root).generation == first.generation
    assert {hints["data"] for hints in catalog(root).request.values()} == {str(data)}


def test_the_run_says_beforehand_which_path_is_gone(data, root, makers, tmp_path):
    run(data, root)
    moved = data.rename(tmp_path / "moved")
    request = PrecomputeRequest(str(moved), "model", str(root))
    assert f"{data} is no longer there: the data set 'train' records the paths of this run instead" in forecast_of(request).remarks


# Columns


def rows(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_manifest_of_which_no_row_has_a_caption_is_refused_where_text_is_encoded(data, tmp_path, root, makers):
    misspelt = rows(data / "m.jsonl", *({"image": f"{n}.png", "captoin": f"caption {n}"} for n in range(3)))
    with pytest.raises(BadUsage, check=asks_for("caption", "image, captoin")):
        run(misspelt, root)
    assert not root.exists()
    create_store(root)
    with pytest.raises(BadUsage, check=asks_for("caption", "image, captoin")):
        run(misspelt, root)
    with pytest.raises(BadUsage, check=asks_for("caption", "image, captoin")):
        run("", root, sources=(cs.Source(str(data)), cs.Source(str(misspelt), name="m")))
    assert run(misspelt, root, caption="").samples == 3, "who says what they get means it"
    assert run(misspelt, root, name="pictures", encode=("latents",)).samples == 3, "without text no caption is needed"
    some = rows(data / "some.jsonl", {"image": "0.png", "text": "a cat"}, {"image": "1.png"})
    assert run(some, root, name="some").samples == 2
    assert list(catalog(root, "some").captions) == ["a cat", ""]


def test_a_folder_without_captions_goes_on_with_a_warning(data, root, makers, caplog):
    for path in data.glob("*.txt"):
        path.unlink()
    with caplog.at_level("INFO", "cachestore"):
        assert run(data, root).samples == 5
    assert "5 samples have no caption (0.png, 1.png, 2.png, …): they get" in caplog.text


# Life of a data set


def test_the_second_run_encodes_nothing_and_loads_nothing(data, root, makers):
    first = run(data, root)
    makers.made.clear()
    second = run(data, root)
    assert (first.wanted, first.encoded) == (11, 11)
    assert (second.encoded, second.reused, second.complete, second.generation) == (0, 11, True, first.generation)
    assert [encoder.prepared for encoder in makers.made] == [0, 0]


def test_text_today_and_latents_tomorrow_stand_under_one_name(data, root, makers):
    run(data, root, encode=("text",))
    report = run(data, root, encode=("latents",))
    assert (report.wanted, report.encoded) == (5, 5)
    assert set(cells(root, "text")) == set(cells(root, "latents")) == {f"{n}.png" for n in range(5)}
    assert all(None not in row for encoder in ("text", "latents") for row in cells(root, encoder).values())


def test_ten_pictures_added_are_ten_units_of_each_kind(data, root, makers):
    run(data, root)
    makers.encoded()
    for n in range(10):
        picture(data / f"new {n}.png", b"new %d" % n)
        (data / f"new {n}.txt").write_text(f"new caption {n}")
    report = run(data, root)
    assert len(makers.encoded("latents")) == 10
    assert (report.samples, report.encoded, report.reused) == (15, 20, 11)


def test_ten_pictures_added_without_captions_are_ten_units(data, root, makers):
    run(data, root)
    for n in range(10):
        picture(data / f"new {n}.png", b"new %d" % n)
    assert run(data, root).encoded == 10


def test_one_caption_edited_is_one_text_unit_and_one_picture_replaced_by_as_many_bytes_one_latent(data, root, makers):
    run(data, root)
    makers.encoded()
    (data / "3.txt").write_text("another caption")
    report = run(data, root)
    assert makers.encoded() == ["another caption"]
    assert (report.encoded, report.reused) == (1, 10)
    assert cells(root, "text")["3.png"] == [fakes.digest_text("another caption")]
    picture(data / "3.png", b"PICTURE 3", at=2)
    report = run(data, root)
    assert makers.encoded() == [b"PICTURE 3"]
    assert report.encoded == 1
    assert cells(root, "latents")["3.png"] == [fakes.digest_bytes(b"PICTURE 3")]


def test_a_picture_replaced_just_after_it_was_made_is_seen_even_with_the_same_time(data, root, makers):
    """Within the grain of a file's time, two contents look alike, so a fresh file's time is not believed."""
    now = data / "3.png"
    now.write_bytes(b"picture 3")
    stamp = now.stat().st_mtime_ns
    run(data, root)
    now.write_bytes(b"PICTURE 3")
    os.utime(now, ns=(stamp, stamp))
    makers.encoded()
    run(data, root)
    assert makers.encoded() == [b"PICTURE 3"]


def test_a_file_that_was_touched_is_not_encoded_again(data, root, makers):
    run(data, root)
    makers.encoded()
    os.utime(data / "3.png", (7, 7))
    report = run(data, root)
    assert makers.encoded() == []
    assert (report.encoded, report.reused) == (0, 11)


@pytest.mark.parametrize("batches", [1, 2, 3])
def test_a_picture_replaced_after_a_run_was_stopped_half_way_is_encoded_again(data, root, monkeypatch, batches):
    """The next run joins the unfinished pass, in which the picture may be recorded already."""
    makers = fakes.Makers(options={"limit": 2})
    monkeypatch.setattr("cachestore.jobs.plan.planning.make_encoders", makers)

    class Stop:
        def is_set(self):
            return sum(len(encoder.batches) for encoder in makers.made) >= batches

    with pytest.raises(Incomplete):
        precompute_here(PrecomputeRequest(str(data), "model", str(root), encode=("latents",)), cancel=Stop())
    first = makers.encoded()
    for n in range(5):
        picture(data / f"{n}.png", b"PICTURE %d" % n, at=2)
    report = run(data, root, encode=("latents",))
    assert len(first) == min(2 * batches, 5)
    assert sorted(makers.encoded()) == [b"PICTURE %d" % n for n in range(5)]
    assert report.complete
    assert cells(root, "latents") == {f"{n}.png": [fakes.digest_bytes(b"PICTURE %d" % n)] for n in range(5)}
    assert verify(root).ok


def test_samples_that_are_removed_leave_and_their_entries_stay(data, root, makers):
    run(data, root)
    (data / "3.png").unlink()
    report = run(data, root)
    assert (report.samples, report.encoded) == (4, 0)
    assert list(catalog(root).ids) == ["0.png", "1.png", "2.png", "4.png"]
    with cs.open(root) as store:
        assert len(store) == 11


def test_a_sample_that_comes_back_is_not_encoded_again(data, root, makers):
    run(data, root)
    content = (data / "3.png").read_bytes()
    (data / "3.png").unlink()
    run(data, root)
    picture(data / "3.png", content)
    assert run(data, root).encoded == 0


def test_a_data_set_that_moved_is_not_encoded_again(data, root, makers, tmp_path):
    run(data, root)
    makers.encoded()
    moved = data.rename(tmp_path / "moved")
    for path in moved.iterdir():
        os.utime(path, (9, 9))
    report = run(moved, root)
    assert makers.encoded() == []
    assert report.reused == 11


def test_a_kept_cell_is_emptied_when_its_picture_changed_and_filled_by_the_next_run_of_its_encoder(data, root, makers):
    run(data, root)
    picture(data / "3.png", b"PICTURE 3", at=2)
    run(data, root, encode=("text",))
    assert cells(root, "latents")["3.png"] == [None]
    assert cells(root, "latents")["2.png"] == [fakes.digest_bytes(b"picture 2")]
    run(data, root, encode=("latents",))
    assert cells(root, "latents")["3.png"] == [fakes.digest_bytes(b"PICTURE 3")]


def test_two_names_in_one_store_share_their_entries(data, root, makers):
    run(data, root, name="one")
    makers.encoded()
    report = run(data, root, name="other")
    assert makers.encoded() == []
    assert (report.encoded, report.reused) == (0, 11)
    assert list(catalog(root, "other").ids) == list(catalog(root, "one").ids)


def test_with_replace_another_source_takes_the_names_place(data, root, makers, tmp_path):
    run(data, root)
    other = picture(tmp_path / "other/x.png", b"x").parent
    with pytest.raises(RecipeMismatch, check=asks_for("replace")):
        run(other, root)
    assert run(other, root, replace=True).complete
    assert list(catalog(root).ids) == ["x.png"]


def test_with_replace_another_model_takes_the_columns_place(data, root, makers):
    run(data, root)
    with pytest.raises(RecipeMismatch, check=asks_for("replace")):
        run(data, root, model="other")
    assert run(data, root, model="other", replace=True).encoded == 11
    assert {recipe.make["model"] for recipe in catalog(root).recipes.values()} == {"other"}


def test_only_the_same_encoders_earlier_column_is_compared(data, root, makers):
    run(data, root, encode=("text",), model="one")
    assert run(data, root, encode=("latents",), model="other").complete


def test_all_captions_of_a_sample_or_the_first(tmp_path, root, makers):
    manifest = tmp_path / "m.jsonl"
    manifest.write_text(json.dumps({"id": "x", "caption": ["one", "two", "one"]}) + "\n")
    run(manifest, root, encode=("text",), captions="all")
    assert cells(root, "text") == {"x": [fakes.digest_text(text) for text in ("one", "two", "one")]}
    run(manifest, root, encode=("text",), captions="first")
    assert cells(root, "text") == {"x": [fakes.digest_text("one")]}


def test_another_policy_encodes_what_is_new_and_the_catalog_says_which_it_was(tmp_path, root, makers):
    manifest = tmp_path / "m.jsonl"
    manifest.write_text(json.dumps({"id": "x", "caption": ["a, b, c", "d"]}) + "\n")
    run(manifest, root, encode=("text",))
    assert (sorted(makers.encoded()), catalog(root).texts) == (["", "a, b, c"], {})
    policy = cs.CaptionPolicy(choose="all", dropout=0.1, shuffle_tags=True, variants=2)
    report = run(manifest, root, encode=("text",), captions=policy)
    assert sorted(makers.encoded()) == sorted({*policy.texts(["a, b, c", "d"])} - {"a, b, c"})
    assert (report.generation, catalog(root).texts) == (2, policy.encoding())
    assert run(manifest, root, encode=("text",), captions=cs.CaptionPolicy(choose="random", shuffle_tags=True, variants=2)).generation == 2
    assert makers.encoded() == []


def test_every_column_of_a_manifest_stays_in_the_catalog(tmp_path, root, makers):
    manifest = tmp_path / "m.jsonl"
    picture(tmp_path / "a.png", b"a")
    row = {
        "id": "x",
        "image": "a.png",
        "control": ["c.png", "d.png"],
        "mask": "m.png",
        "caption": "c",
        "artist": "é",
        "n": [1, {"deep": None}],
    }
    manifest.write_text(json.dumps(row) + "\n")
    run(manifest, root)
    found = catalog(root)
    assert json.loads(found.extras[0]) == {"artist": "é", "n": [1, {"deep": None}]}
    assert {role: [list(at), list(refs)] for role, (at, refs) in found.images.items()} == {
        "image": [[0, 1], ["a.png"]],
        "control": [[0, 2], ["c.png", "d.png"]],
        "mask": [[0, 1], ["m.png"]],
    }


def edits(tmp_path, controls):
    rows = []
    for n, references in enumerate(controls):
        picture(tmp_path / f"{n}.png", b"picture %d" % n)
        rows.append({"id": str(n), "image": f"{n}.png", "control": references, "caption": "make it so"})
        for reference in references:
            picture(tmp_path / reference, reference.encode())
    (tmp_path / "m.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "m.jsonl"


def control_cells(root):
    found = catalog(root)
    column = found.column("latents", "control")
    return {sample: [cell.input.hex() if cell.key else None for cell in column.row_cells(row)] for row, sample in enumerate(found.ids)}


def test_control_images_have_a_column_of_their_own_in_the_order_of_the_manifest(tmp_path, root, makers):
    manifest = edits(tmp_path, [["b.png", "a.png"], ["a.png"], []])
    report = run(manifest, root, encode=("latents",))
    assert (report.complete, report.wanted, report.encoded) == (True, 5, 5)
    b, a = (hashlib.sha256(name.encode()).hexdigest() for name in ("b.png", "a.png"))
    assert control_cells(root) == {"0": [b, a], "1": [a], "2": []}
    assert run(manifest, root, encode=("latents",)).encoded == 0
    picture(tmp_path / "a.png", b"another", at=2)
    assert run(manifest, root, encode=("latents",)).encoded == 1
    assert control_cells(root)["1"] == [hashlib.sha256(b"another").hexdigest()]


def test_control_images_that_are_no_longer_listed_leave_the_data_set(tmp_path, root, makers):
    run(edits(tmp_path, [["a.png"]]), root, encode=("latents",))
    run(edits(tmp_path, [[]]), root, encode=("latents",))
    assert [column.role for column in catalog(root).columns] == ["image"]


def test_a_control_image_that_cannot_be_made_is_a_failure_of_its_sample(tmp_path, root, makers):
    manifest = edits(tmp_path, [["a.png"], ["b.png"]])
    picture(tmp_path / "b.png", b"undecodable")
    assert [failure["sample"] for failure in run(manifest, root, encode=("latents",)).failures] == ["1"]
    assert control_cells(root)["1"] == [None]


def test_captions_that_are_shown_images_are_made_anew_when_one_is_replaced(tmp_path, root, makers):
    makers.options["shown"] = "control"
    manifest = edits(tmp_path, [["a.png", "b.png"], ["a.png"]])
    report = run(manifest, root)
    assert (report.complete, report.wanted) == (True, 2 + 2 + 2)
    assert makers.encoded("text") == ["make it so"] * 2, "without images there is no empty caption"
    assert run(manifest, root).encoded == 0
    picture(tmp_path / "b.png", b"another", at=2)
    assert run(manifest, root).encoded == 2
    assert makers.encoded("text") == ["make it so"]
    assert [column.options for column in catalog(root).columns if column.encoder == "text"] == [{"images": "control"}]


def test_a_forecast_of_captions_that_are_shown_images_counts_their_tokens(tmp_path, root, makers):
    makers.options |= {"shown": "control", "image_tokens": 3}
    manifest = edits(tmp_path, [["a.png", "b.png"], ["a.png"]])
    forecast = forecast_of(PrecomputeRequest(str(manifest), "model", str(root), encode=("text",)))
    # Three words and one picture fit into the eight tokens of the fake; with two pictures they do not.
    assert (forecast.wanted, forecast.to_encode, forecast.truncated_captions) == (2, 2, 1)


def test_a_sample_without_the_image_that_its_caption_needs_is_a_failure(tmp_path, root, makers):
    makers.options["shown"] = "control"
    report = run(edits(tmp_path, [["a.png"], []]), root, encode=("text",))
    assert [(failure["sample"], failure["reason"]) for failure in report.failures] == [("1", "it is shown no image")]


def test_a_store_inside_its_own_data_is_no_part_of_it(data, makers):
    root = data / "cache"
    first = run(data, root)
    picture(root / "not ours.png", b"x")
    second = run(data, root)
    assert (first.samples, second.samples, second.encoded) == (5, 5, 0)


# Words and failures


def test_what_a_user_should_know_is_reported_beforehand(data, root, makers):
    (data / "3.txt").unlink()
    (data / "4.txt").write_text("one\ntwo")
    reported = []
    precompute_here(PrecomputeRequest(str(data), "model", str(root)), say=reported.append)
    text = "\n".join(reported)
    for words in ("1 sample has no caption (3.png)", "1 caption has several lines (4.png)", "5 samples", "10 to encode", "free"):
        assert words in text


def test_longer_captions_than_the_encoder_reads_are_counted_aloud(tmp_path, root, makers):
    (tmp_path / "p.txt").write_text("short\n" + "word " * 9 + "\n")
    reported = []
    precompute_here(PrecomputeRequest(str(tmp_path / "p.txt"), "model", str(root)), say=reported.append)
    assert any("1 caption is longer" in line for line in reported)


def test_a_disk_without_room_is_refused_before_anything_is_encoded(data, root, makers, monkeypatch):
    monkeypatch.setattr("cachestore.jobs.start.forecast.free_bytes", lambda _path: 10)
    with pytest.raises(WriteFailed):
        run(data, root)
    assert makers.encoded() == []
    monkeypatch.undo()


def test_failures_within_the_limit_are_complete_and_beyond_it_are_not(data, root, makers):
    picture(data / "bad.png", b"undecodable")
    assert not run(data, root).complete
    assert run(data, root, max_failures="1").complete
    assert run(data, root, max_failures="10%").complete
    with pytest.raises(EncodeFailed, check=tells_of("bad.png")):
        run(data, root, strict=True)


def test_a_failed_picture_is_tried_again_by_the_next_run_and_its_reason_is_kept(data, root, makers):
    picture(data / "bad.png", b"undecodable")
    for _ in range(2):
        report = run(data, root)
        assert [dict(failure) for failure in report.failures] == [
            {"sample": "bad.png", "encoder": "latents", "reason": "this is no picture"}
        ]
        assert fakes.adds_up(report)
    picture(data / "bad.png", b"mended", at=3)
    assert run(data, root).complete


def test_limits_that_cannot_be_read_are_refused_before_anything_is_encoded(data, root, makers):
    with pytest.raises(BadInput, check=asks_for("max_failures")):
        run(data, root, max_failures="some")
    assert makers.encoded() == []


def test_an_unknown_option_is_refused_by_name(data, root):
    with pytest.raises(BadInput, check=asks_for("resolutoin")):
        cs.precompute(data, model="m", store=root, resolutoin=64)  # pyright: ignore[reportCallIssue]


def test_progress_within_this_process_counts_over_all_ranks_as_it_does_without(data, root, makers):
    reported = []
    report = cs.precompute(data, model="m", store=root, inline=True, on_progress=reported.append)
    counts = {"plan": report.plan, "pass": 1, "reused": 0, "encoded": 11, "failed": 0, "total": 11}
    assert reported[-1] == {**counts, "done": 11, "doing": "", "rate": None, "seconds_left": 0.0}
    assert all({*counts, "rate", "seconds_left"} <= set(one) for one in reported)


# Forecasts


def test_rank_0_says_what_there_was_to_do_if_others_have_done_it_by_then(data, root, makers, monkeypatch):
    monkeypatch.setenv("CACHESTORE_LAUNCH", "one")
    said = []
    for _process in range(2):
        monkeypatch.setattr("cachestore.jobs.share.invocations._invocations", {})
        precompute_here(PrecomputeRequest(str(data), "m", str(root), rank=0, world_size=2), say=said.append)
    first, second = [line for line in said if "to encode" in line]
    assert first == second
    assert "11 values, none of them in the store already" in first


def look(data, root, **options):
    return forecast_of(PrecomputeRequest(str(data), "model", str(root), **options))


def png(width, height, seed=0):
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


@pytest.fixture
def photos(tmp_path):
    """Three upright pictures and two wide ones, real."""
    for n in range(5):
        picture(tmp_path / f"photos/{n}.png", png(*((64, 128) if n < 3 else (128, 64)), seed=n))
    return tmp_path / "photos"


def test_a_forecast_of_nothing_is_all_zero(tmp_path, root, makers):
    (tmp_path / "empty").mkdir()
    run(rows(tmp_path / "m.jsonl", {"caption": "a cat"}), root)
    forecast = look(tmp_path / "empty", root, replace=True)
    assert (forecast.samples, forecast.wanted, forecast.present, forecast.to_encode, forecast.estimated_bytes) == (0, 0, 0, 0, 0)
    assert forecast.buckets == {}


def test_a_forecast_counts_and_encodes_nothing(photos, root, makers):
    forecast = look(photos, root, resolution=128)
    assert (forecast.samples, forecast.wanted, forecast.present, forecast.to_encode) == (5, 6, 0, 6)
    assert sum(forecast.buckets.values()) == 5
    assert len(forecast.buckets) == 2
    assert forecast.estimated_bytes == 6 * 16
    assert makers.encoded() == []
    assert list_names(Layout(root)) == []


def test_a_forecast_names_no_batch_size_of_its_own_and_says_what_several_leave_out(photos, root, makers):
    found = look(photos, root, resolution=128)
    assert found.left_out == {size: sum(count % size for count in found.buckets.values()) for size in (2, 4, 8, 16)}
    found = replace(found, buckets={"64x64": 5, "64x48": 2}, left_out={2: 1, 4: 3, 8: 7, 16: 7})
    [line] = [line for line in in_words(found, root) if "loader" in line]
    assert "leaves out 1 sample with a batch size of 2, 3 with 4, 7 with 8, 7 with 16;" in line
    assert "2 buckets: 5 of 64x64, 2 of 64x48" in in_words(found, root)
    assert not any("loader" in line for line in in_words(replace(found, left_out={2: 0}), root))
    [line] = [line for line in in_words(replace(found, left_out={2: 0, 8: 0, 16: 24}), root) if "loader" in line]
    assert "leaves out 24 samples with a batch size of 16, none with 8;" in line


def test_who_trains_with_another_program_is_told_nothing_of_this_loader(photos, root, makers):
    found = look(photos, root, resolution=128, buckets="ai-toolkit")
    assert (sum(found.buckets.values()), found.left_out) == (5, {})
    assert not any("loader" in line for line in in_words(found, root))


def test_buckets_are_those_of_the_pictures_that_are_trained_on(tmp_path, root, makers):
    manifest = edits(tmp_path, [["a.png", "b.png"], ["c.png"]])
    for path in tmp_path.glob("*.png"):
        picture(path, png(*((128, 64) if path.stem.isdigit() else (64, 128))))
    assert sum(look(manifest, root, resolution=128).buckets.values()) == 2
    run(manifest, root, resolution=128)
    assert look(manifest, root, resolution=128).buckets == {"4x4": 2}


def test_the_start_of_a_run_names_what_will_fail_and_leaves_the_reason_to_its_end(photos, root, makers):
    why = ({"sample": "a.png", "reason": "it is broken"},)
    found = replace(look(photos, root, resolution=128), will_fail=why, will_fail_count=1, failed=1, failures=why)
    at_once, at_start = ("\n".join(in_words(found, root, with_reasons=reasons)) for reasons in (True, False))
    assert (at_once.count("it is broken"), at_start.count("it is broken")) == (2, 0)
    assert ("1 sample will fail (a.png)" in at_start, "1 row or file of the source" in at_start) == (True, True)


def test_a_forecast_after_a_run_finds_all_present_and_still_tells_the_buckets(photos, root, makers):
    run(photos, root, resolution=128)
    forecast = look(photos, root, resolution=128)
    assert (forecast.present, forecast.to_encode, forecast.estimated_bytes) == (6, 0, 0)
    assert sum(forecast.buckets.values()) == 5


def test_a_forecast_opens_no_pass_and_touches_no_unfinished_one(data, root, makers):
    look(data, root)
    assert not list(root.glob("plans/*/1"))


# In processes of their own


PLAIN_SCRIPT = """
import sys, threading
import cachestore as cs
report = cs.precompute(sys.argv[1], model="model", store=sys.argv[2])
again = cs.precompute(sys.argv[1], model="model", store=sys.argv[2], procs=2)
print(report.complete, report.encoded, again.encoded, again.reused)
print(threading.active_count(), [name for name in ("torch", "transformers", "tokenizers", "diffusers") if name in sys.modules])
"""


def script(tmp_path, source, *arguments, **environment):
    """Run a script file without a `__main__` guard; encoders are fake in it and in what it starts."""
    path = tmp_path / "script.py"
    path.write_text(source)
    return subprocess.run(
        [sys.executable, path, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": fakes.PATHS, "FAKE_ENCODERS": "1", **environment},
    )


def test_a_plain_script_without_a_guard_encodes_in_processes_of_their_own(data, root, tmp_path):
    ended = script(tmp_path, PLAIN_SCRIPT, data, root)
    assert ended.stdout == "True 11 0 11\n1 []\n", ended.stderr
    assert verify(root).ok


def test_workers_that_are_asked_for_are_told_their_ranks_and_start_no_more(data, root, makers, monkeypatch, tmp_path):
    """Told `--procs 2`, each of two would start two."""
    reported = []
    report = run(data, tmp_path / "another")

    def children(arguments, count, _care, _environment):
        command, path = arguments
        body = json.loads(Path(path).read_text())
        reported.append((command, body["procs"], body["planned"]["plan"], count))
        return [Child(1, 0, report.as_json(), "")] * count

    monkeypatch.setattr("cachestore.jobs.start.launching.run_children", children)
    monkeypatch.setattr("cachestore.jobs.start.launching._is_model_here", lambda _request: True)
    assert cs.precompute(data, model="model", store=root, procs=2).wanted == report.wanted
    assert reported == [("work", None, report.plan, 2)]


@pytest.mark.parametrize("rank", [0, 1])
def test_under_a_launcher_each_rank_starts_one_worker_that_is_that_rank(data, root, tmp_path, rank):
    """As from a trainer under torchrun: every rank gets its report, not only the one that prints."""
    source = """
import sys
import cachestore as cs
from cachestore.jobs.share.workers import read_heartbeats
from cachestore.files.paths import Layout
from cachestore.sources.combined import list_in_memory
from pathlib import Path
report = cs.precompute(sys.argv[1], model="model", store=sys.argv[2])
[heartbeat] = read_heartbeats(Layout(Path(sys.argv[2])))
print(report.complete, report.wanted, heartbeat.rank, heartbeat.world_size)
"""
    launcher = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "TORCHELASTIC_RUN_ID": "none", "FAKE_PLAN_SECONDS": "0.2"}
    ended = script(tmp_path, source, data, root, **launcher)
    assert ended.stdout == f"True 11 {rank} 2\n", ended.stderr


def test_ranks_of_a_launch_that_start_workers_one_after_the_other_get_one_report(data, root, tmp_path):
    """The workers' parents differ, but they are one launch: the second returns the pass that the first ended."""
    source = """
import os, subprocess, sys
if "RANK" not in os.environ:  # the agent
    for rank in "01":
        own = {**os.environ, "RANK": rank, "WORLD_SIZE": "2", "LOCAL_RANK": rank, "TORCHELASTIC_RUN_ID": "none"}
        subprocess.run([sys.executable, *sys.argv], env=own, check=True)
else:
    import cachestore as cs
    report = cs.precompute(sys.argv[1], model="model", store=sys.argv[2])
    print(report.encoded, report.plan, report.generation, flush=True)
"""
    ended = script(tmp_path, source, data, root)
    first, second = ended.stdout.splitlines()
    assert first == second, ended.stderr
    assert first.startswith("11 ")


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"model": "other"}, RecipeMismatch),
        ({"model": "model", "strict": True}, EncodeFailed),
        ({"model": "model", "caption_lines": "none"}, BadInput),
        ({"model": "model", "max_failures": "x"}, BadInput),
    ],
)
def test_an_error_in_a_worker_is_the_same_error_in_the_caller(data, root, makers, monkeypatch, options: Any, error):
    picture(data / "bad.png", b"undecodable")
    run(data, root)
    fakes.fake_processes(monkeypatch)
    with pytest.raises(error) as raised:
        cs.precompute(data, store=root, **options)
    assert type(raised.value) is error


def test_a_worker_that_is_killed_is_an_error_that_says_how(data, root, makers, monkeypatch):
    fakes.fake_processes(monkeypatch)
    monkeypatch.setenv("CACHESTORE_FAILPOINT", "worker.before_ledger")
    with pytest.raises(Incomplete, check=tells_of("SIGKILL")):
        cs.precompute(data, model="model", store=root)
    monkeypatch.delenv("CACHESTORE_FAILPOINT")
    report = cs.precompute(data, model="model", store=root)
    assert (report.complete, report.encoded) == (True, 11)


def test_one_killed_worker_of_two_does_not_matter(data, root, monkeypatch, tmp_path):
    gate = fakes.Gate(tmp_path / "gate")
    starting = fakes.command(
        "precompute", data, "--model", "model", "--store", root, "--procs", "2", "--json", FAKE_ENCODER_GATE=str(gate.folder)
    )
    os.kill(gate.wait(), 9)
    gate.open()
    out, err = starting.communicate(timeout=50)
    report = json.loads(out)
    assert (starting.returncode, report["complete"], report["encoded"]) == (0, True, 11), err
    assert verify(root).ok


# The folder that holds everything that goes wrong, with a real model


REFUSED = {"truncated.jpg", "text.png", "empty.jpg", "broken link.png"}


def nasty(folder):
    """Real pictures of every kind, and what only looks like one. Returns the folder."""
    from PIL import Image

    def noise(mode, size=(96, 64), seed=0):
        bands = len(Image.new(mode, (1, 1)).getbands())
        pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], bands), dtype=np.uint8)
        return Image.fromarray(pixels[..., 0] if bands == 1 else pixels, mode)

    def save(name, image, kind, **options):
        file = BytesIO()
        image.save(file, kind, **options)
        return picture(folder / name, file.getvalue())

    picture(folder / "truncated.jpg", save("plain.jpg", noise("RGB"), "JPEG").read_bytes()[:-400])
    picture(folder / "text.png", b"this is a text")
    picture(folder / "empty.jpg", b"")
    save("rgba.png", noise("RGBA"), "PNG")
    save("palette.gif", noise("RGB").quantize(16), "GIF")
    sixteen = np.random.default_rng(1).integers(0, 65536, (64, 96), dtype=np.uint16)
    save("sixteen.png", Image.fromarray(sixteen), "PNG")
    save("cmyk.jpg", noise("CMYK"), "JPEG")
    exif = Image.Exif()
    exif[0x0112] = 6
    save("rotated.jpg", noise("RGB", seed=2), "JPEG", exif=exif)
    save("a.jpg", noise("RGB", seed=3), "JPEG")
    save("a.png", noise("RGB", seed=4), "PNG")
    save("sub/a.png", noise("RGB", seed=5), "PNG")
    save("SHOUTED.JPG", noise("RGB", seed=6), "JPEG")
    save("ünïcöde 写真.png", noise("RGB", seed=7), "PNG")
    save("with space.and.dots.png", noise("RGB", seed=8), "PNG")
    save("tall.webp", noise("RGB", (40, 120), seed=9), "WEBP")
    save("one pixel.bmp", noise("RGB", (1, 1)), "BMP")
    save("same as a.png", noise("RGB", seed=4), "PNG")
    for name in ("plain", "rgba", "a", "sub/a", "SHOUTED", "ünïcöde 写真", "with space.and.dots"):
        (folder / f"{name}.txt").write_text(f"a caption of {name}", encoding="utf-8")
    (folder / "cmyk.txt").write_text("")
    (folder / "broken link.png").symlink_to("nowhere.png")
    outside = folder.parent / "outside"
    save("../outside/linked.png", noise("RGB", seed=10), "PNG")
    (folder / "linked").symlink_to(outside)
    (folder / "loop").symlink_to(folder)
    picture(folder / "notes.md", b"# notes")
    picture(folder / ".hidden.png", b"hidden")
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    import torch

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("model")
    tiny.save(tiny.sd15(), folder, "unet", "UNet2DConditionModel")
    return folder


@pytest.fixture(scope="module")
def encoded(model, tmp_path_factory):
    """The nasty folder, encoded by a real model in this process, with the store inside it: (folder, store, report)."""
    folder = nasty(tmp_path_factory.mktemp("nasty") / "data")
    report = cs.precompute(folder, model=model, store=folder / "cache", resolution=64, device="cpu", inline=True)
    return folder, folder / "cache", report


@pytest.mark.torch
def test_every_sample_of_the_nasty_folder_is_encoded_or_listed_with_its_reason(encoded):
    _folder, store, report = encoded
    assert {failure["sample"] for failure in report.failures} == REFUSED
    assert all(failure["reason"] and failure["encoder"] == "latents" for failure in report.failures)
    found = catalog(store)
    latents = found.column("latents", "image")
    for row, sample in enumerate(found.ids):
        assert (latents.row_keys(row)[0] is None) == (sample in REFUSED), sample
    assert report.samples == len(found) == 20
    assert (report.failed, fakes.adds_up(report)) == (len(REFUSED), True)
    assert verify(store).ok


@pytest.mark.torch
def test_every_entry_of_the_nasty_folder_names_the_digest_of_its_own_image(encoded):
    folder, store, _report = encoded
    found = catalog(store)
    latents, text = found.column("latents", "image"), found.column("text", "caption")
    with cs.open(store) as reader:
        for row, sample in enumerate(found.ids):
            if sample in REFUSED:
                continue
            own = hashlib.sha256((folder / sample).read_bytes()).hexdigest()
            meta = reader.describe(latents.row_keys(row)[0]).meta
            assert (meta["input_digest"], meta["encoder"]) == (own, "latents"), sample
            assert latents.row_cells(row)[0].input.hex() == own
            assert reader.describe(text.row_keys(row)[0]).meta["caption"] == found.row_captions(row)[0]


@pytest.mark.torch
def test_missing_and_empty_captions_of_the_nasty_folder_are_the_empty_caption(encoded):
    _folder, store, _report = encoded
    found = catalog(store)
    captions = {sample: found.row_captions(row) for row, sample in enumerate(found.ids)}
    assert captions["cmyk.jpg"] == captions["palette.gif"] == captions["linked/linked.png"] == [""]
    assert captions["a.jpg"] == captions["a.png"] == ["a caption of a"]
    assert captions["sub/a.png"] == ["a caption of sub/a"]


@pytest.mark.torch
def test_pictures_of_equal_bytes_in_the_nasty_folder_share_an_entry(encoded):
    _folder, store, _report = encoded
    found = catalog(store)
    keys = {sample: found.column("latents", "image").row_keys(row)[0] for row, sample in enumerate(found.ids)}
    assert keys["a.png"] == keys["same as a.png"]
    assert len({key for key in keys.values() if key}) == len(keys) - len(REFUSED) - 1


@pytest.mark.torch
def test_the_latents_of_an_upright_picture_are_upright(encoded):
    """A picture turned by EXIF, and one that is taller than wide."""
    _folder, store, _report = encoded
    found = catalog(store)
    facts = {sample: found.column("latents", "image").row_cells(row)[0].facts for row, sample in enumerate(found.ids)}
    assert facts["rotated.jpg"]["size"] == (64, 96)
    assert facts["tall.webp"]["size"] == (40, 120)
    assert facts["plain.jpg"]["size"] == (96, 64)


@pytest.mark.torch
def test_a_second_run_over_the_nasty_folder_reuses_all_that_did_not_fail(encoded, model):
    folder, store, first = encoded
    report = cs.precompute(folder, model=model, store=store, resolution=64, device="cpu", inline=True)
    assert (report.encoded, report.reused, report.failed) == (0, first.wanted - first.failed, first.failed)
    assert list_generations(Layout(store), "train") == [report.generation] == [first.generation]


@pytest.mark.torch
def test_a_call_with_nothing_to_encode_imports_no_torch_with_a_real_model(model, tmp_path):
    picture(tmp_path / "data/a.png", png(64, 64))
    (tmp_path / "data/a.txt").write_text("a caption")
    cs.precompute(tmp_path / "data", model=model, store=tmp_path / "store", resolution=64, device="cpu", inline=True)
    source = """
import subprocess, sys
import cachestore as cs
subprocess.Popen = None
report = cs.precompute(sys.argv[1], model=sys.argv[2], store=sys.argv[3], resolution=64)
print(report.complete, report.encoded, report.reused, [name for name in ("torch", "transformers", "diffusers") if name in sys.modules])
"""
    out, err = fakes.program(source, tmp_path / "data", model, tmp_path / "store").communicate(timeout=50)
    assert out == "True 0 3 []\n", err


@pytest.mark.torch
def test_a_folder_of_one_file_goes_through_with_a_real_model(encoded, model, tmp_path):
    picture(tmp_path / "data/plain.jpg", (encoded[0] / "plain.jpg").read_bytes())
    report = cs.precompute(tmp_path / "data", model=model, store=tmp_path / "store", resolution=64, device="cpu", inline=True)
    assert (report.complete, report.samples, report.wanted) == (True, 1, 2)
    assert Path(report.store) == tmp_path / "store"


@pytest.mark.torch
def test_the_segments_of_a_store_open_in_the_stock_library(encoded):
    from safetensors import safe_open

    for path in (encoded[1] / "segments").glob("*/*.safetensors"):
        with safe_open(path, "numpy") as file:
            assert list(file.keys())


@pytest.mark.torch
def test_a_lost_entry_is_refilled_with_source_and_model_elsewhere_and_with_no_other_model(encoded, model, tmp_path):
    folder, _store, _report = encoded
    data = shutil.copytree(folder, tmp_path / "moved", symlinks=True)
    (data / "loop").unlink()
    (data / "loop").symlink_to(data)  # as in the original, and not to it
    moved, other = shutil.copytree(model, tmp_path / "moved model"), shutil.copytree(model, tmp_path / "other model")
    weights = next((other / "vae").glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x07")
    store = data / "cache"
    for digest in list_segments(Layout(store)):
        Layout(store).segment(digest).unlink()
    with pytest.raises(RecipeMismatch):
        cs.repair(store, refill=True, source=data, model=other)
    assert main(["repair", str(store), "--refill", "--source", str(data), "--model", str(moved), "--json"]) == 0
    assert verify(store).ok
    assert {cell.key is None for cell in catalog(store).column("latents", "image").row_cells(0)} == {False}


@pytest.mark.torch
def test_the_printed_lines_of_python_train_from_the_store(encoded, torch_crowd):
    _folder, _store, report = encoded
    lines = training_lines(report, batch_size=2)
    assert all(word in "\n".join(lines) for word in ("prompt_embeds", "# latents: float32 [2, ", f"generation={report.generation}"))
    source = "\n".join([*lines, "    print(sorted(batch)[0], batch['latents'].shape[0])"])
    [(code, out)] = torch_crowd.run("tests.scenarios.trainers:run_lines", {"source": source})
    assert code == 0
    assert out


# Two calls at once


@pytest.mark.parametrize("processes", [False, True])
def test_samples_in_memory_are_as_old_as_the_call_that_listed_them(data, root, makers, monkeypatch, processes):
    def listed(count):
        return [cs.Sample(f"{n}", {"image": data / f"{n}.png"}, (f"caption {n}",)) for n in range(count)]

    fakes.fake_processes(monkeypatch)
    cs.precompute(listed(1), model="model", store=root, inline=True)
    real = list_in_memory

    def overtaken(*given, **named):
        monkeypatch.setattr("cachestore.jobs.start.precompute.list_in_memory", real)
        found = real(*given, **named)
        cs.precompute(listed(3), model="model", store=root, inline=True)
        return found

    monkeypatch.setattr("cachestore.jobs.start.precompute.list_in_memory", overtaken)
    with pytest.raises(Superseded):
        cs.precompute(listed(2), model="model", store=root, inline=not processes)
    assert (len(catalog(root)), list_generations(Layout(root), "train")) == (3, [1, 2])


def test_the_time_of_a_forecast_is_that_of_workers_with_these_encoders_alone_without_their_loading(root):
    layout = create_store(root)
    for name, encoded, seconds in (("latents", 10, 100.0), ("text", 50, 10.0)):
        with Heartbeat(layout, "", 0, "launch", 0, 1) as worker:
            worker.units, worker.encoded = {name: [encoded, 0]}, encoded
            worker.stages = dict.fromkeys(STAGES, (seconds - 1, 1.0))
    times = [_seconds(layout, 100, "", encoders) for encoders in ({"text"}, {"latents"}, {"masks"})]
    assert times == [20.0, 1000.0, None]
    assert _seconds(layout, 100, "launch", {"text"}) is None
    assert _seconds(layout, 0, "", {"masks"}) == 0.0
