"""Rows, files and members of a source that fail alone: in the plan, the report, the forecast, `why`, and a later run."""

import json

import pytest

import cachestore as cs
from cachestore.cli import DAMAGE, OK, main
from cachestore.core.errors import BadInput, BadUsage, EncodeFailed
from cachestore.jobs.plan.options import PrecomputeRequest
from cachestore.jobs.share.plan import read_plan
from cachestore.jobs.start.forecast import forecast_of
from cachestore.jobs.start.here import precompute_here
from tests.fakes import adds_up, catalog, tells_of
from tests.sources.sources import folder

BAD = '{"file_name": "1.png", "text": "half \\ud83d"}'


def rows(tmp_path, *lines):
    """Pictures with metadata, of which some lines are given as they are."""
    found = [line if isinstance(line, str) else json.dumps({"file_name": f"{line}.png", "text": f"caption {line}"}) for line in lines]
    data = folder(tmp_path / "data", {f"{number}.png": f"picture {number}" for number in range(4)})
    (data / "metadata.jsonl").write_text("\n".join(found))
    return data


def run(data, root, **options):
    return precompute_here(PrecomputeRequest(str(data), "model", str(root), **options))


def test_a_row_that_cannot_be_used_is_one_failure_and_the_others_are_encoded(makers, tmp_path, root):
    data = rows(tmp_path, 0, BAD, 2, '{"file_name": "3.png", "text": "nul \\u0000"}', "no JSON")
    report = run(data, root)
    assert [(one["sample"].removeprefix(f"{data}/"), one["encoder"]) for one in report.failures] == [
        ("1.png", "source"),
        ("3.png", "source"),
        ("metadata.jsonl, line 5", "source"),
    ]
    assert adds_up(report)
    assert (report.complete, report.samples, report.failed, report.encoded, report.wanted) == (False, 5, 3, 5, 8)
    assert list(catalog(root).ids) == ["0.png", "2.png"]
    plan = read_plan(cs.open(root).layout, report.plan)
    assert (plan.refused_count, [sample for sample, _reason in plan.refused]) == (3, [one["sample"] for one in report.failures])


def test_a_second_run_says_the_same_and_encodes_nothing(makers, tmp_path, root):
    data = rows(tmp_path, 0, BAD, 2)
    first, second = run(data, root), run(data, root)
    assert (second.encoded, second.reused, second.failures) == (0, first.encoded, first.failures)
    assert adds_up(second)


@pytest.mark.parametrize(("allowed", "code"), [("0", 3), ("1", 0)])
def test_the_command_ends_as_for_other_failures(makers, tmp_path, root, allowed, code, capsys):
    data = rows(tmp_path, 0, BAD, 2)
    command = ["precompute", str(data), "--model", "m", "--store", str(root), "--max-failures", allowed]
    assert main(command) == code
    assert "failed: 1.png (source):" in capsys.readouterr().out


def test_strict_raises_for_it(makers, tmp_path, root):
    with pytest.raises(EncodeFailed, check=tells_of("'1.png'")):
        run(rows(tmp_path, 0, BAD, 2), root, strict=True)


def test_the_forecast_names_and_counts_it_before_anything_is_encoded(makers, tmp_path, root, capsys):
    data = rows(tmp_path, 0, BAD, 2)
    found = forecast_of(PrecomputeRequest(str(data), "model", str(root)))
    assert (found.samples, found.failed, found.wanted) == (3, 1, found.present + found.to_encode + found.failed)
    assert [one["sample"] for one in found.as_json()["failures"]] == ["1.png"]
    assert main(["precompute", str(data), "--model", "m", "--store", str(root), "--plan-only"]) == OK
    assert "1 row or file of the source cannot be used" in (said := capsys.readouterr().out)
    assert "metadata.jsonl, line 2" in said


def test_why_shows_it_until_it_is_mended(makers, tmp_path, root, capsys):
    run(rows(tmp_path, 0, BAD, 2), root)
    assert main(["why", str(root)]) == DAMAGE
    assert "train  1.png: not used: " in capsys.readouterr().out
    assert main(["why", str(root), "1.png", "--json"]) == DAMAGE
    [answer] = json.loads(capsys.readouterr().out)["in"]
    assert (answer["ready"], "half a character" in answer["lacks"][0]) == (False, True)
    run(rows(tmp_path, 0, 1, 2), root)
    assert main(["why", str(root)]) == OK
    assert main(["why", str(root), "1.png"]) == OK


def test_why_shows_it_no_more_once_its_row_is_removed(makers, tmp_path, root):
    run(rows(tmp_path, 0, BAD, 2), root)
    report = run(rows(tmp_path, 0, 2), root)
    assert (report.complete, report.generation) == (True, 1)
    assert main(["why", str(root)]) == OK


def test_a_sample_that_was_encoded_before_leaves_the_next_generation_and_nothing_of_it_is_encoded_twice(makers, tmp_path, root):
    run(rows(tmp_path, 0, 1, 2), root)
    report = run(rows(tmp_path, 0, BAD, 2), root)
    assert (list(catalog(root).ids), report.encoded, report.failed) == (["0.png", "2.png"], 0, 1)
    mended = run(rows(tmp_path, 0, 1, 2), root)
    assert (list(catalog(root).ids), mended.encoded, mended.complete) == (["0.png", "1.png", "2.png"], 0, True)


def test_if_every_row_is_refused_it_is_one_error_and_no_store_is_made(makers, tmp_path, root):
    with pytest.raises(BadInput, check=tells_of("2 problems", "metadata.jsonl")):
        run(rows(tmp_path, BAD, "{"), root)
    assert not root.exists()


def test_a_folder_without_the_picture_has_another_plan_than_one_in_which_its_captions_are_refused(makers, tmp_path, root):
    data = folder(tmp_path / "data", {"a.png": "a", "a.txt": "a", "b.png": "b", "b.txt": "b"})
    (data / "b.png").unlink()
    without = run(data, root)
    folder(data, {"b.png": "b", "b.txt": b"\xff"})
    report = run(data, root)
    assert (without.complete, report.complete, report.plan != without.plan) == (True, False, True)
    assert [(one["sample"], one["encoder"]) for one in report.failures] == [("b.png", "source")]


def test_samples_in_memory_and_those_that_a_worker_lists_fail_alone(makers, tmp_path, root):
    samples = [cs.Sample("a", {"image": b"a"}, ("one",)), cs.Sample("b", {"image": b"b"}, ("\ud83d",)), cs.Sample("a", {}, ("two",))]
    report = cs.precompute(samples, model="model", store=root, inline=True)
    assert [one["sample"] for one in report.failures] == ["b", "sample 2"]
    assert list(catalog(root).ids) == ["a"]


def test_of_several_sources_each_has_its_name_before_the_ids(makers, tmp_path, root):
    data = rows(tmp_path, 0, BAD)
    (tmp_path / "other.jsonl").write_text(
        '{"id": "x", "image": "data/0.png", "caption": "x"}\n{"id": "y", "image": "data/0.png", "caption": "y", "source": "mine"}\n{'
    )
    report = cs.precompute([cs.Source(data, name="one"), cs.Source(tmp_path / "other.jsonl")], model="model", store=root, inline=True)
    assert [one["sample"].removeprefix(f"{tmp_path}/") for one in report.failures] == ["one/1.png", "y", "other.jsonl, line 3"]
    assert list(catalog(root).ids) == ["one/0.png", "x"]


def test_a_source_of_which_nothing_is_left_is_an_error_beside_another_that_is_whole(makers, tmp_path, root):
    (tmp_path / "other.jsonl").write_text("{")
    with pytest.raises(BadInput, check=tells_of("other.jsonl, line 1")):
        cs.precompute([rows(tmp_path, 0), str(tmp_path / "other.jsonl")], model="model", store=root, inline=True)


@pytest.mark.parametrize(
    "row",
    [
        {"id": "bad", "mask": "m.png", "caption": "x"},
        {"id": "bad", "image": "0.png", "video": "v.mp4", "caption": "x"},
        {"id": "bad", "image": "0.png", "caption": "x", "caption.text_encoder_2": ["a", "b"]},
    ],
)
def test_a_sample_whose_parts_do_not_go_together_fails_alone(makers, tmp_path, root, row):
    makers.options["captioned"] = ("text_encoder", "text_encoder_2")
    makers.has_roles = True
    data = rows(tmp_path, 0)
    (data / "metadata.jsonl").rename(data / "rows.jsonl")
    (data / "rows.jsonl").write_text('{"image": "0.png", "caption": "a"}\n' + json.dumps(row))
    try:
        report = run(data / "rows.jsonl", root, frames=(1,))
    except BadUsage as error:
        pytest.fail(str(error))
    assert [(one["sample"], one["encoder"]) for one in report.failures if one["encoder"] == "source"] == [("bad", "source")]
    assert list(catalog(root).ids) == ["0.png"]


def test_a_row_that_fails_says_nothing_of_the_columns_of_its_source(makers, tmp_path, root):
    (tmp_path / "rows.jsonl").write_text('{"id": "x", "caption": "x"}\n{"text": "\\u0000", "imgae": "0.png", "size": 7}')
    report = run(tmp_path / "rows.jsonl", root)
    assert (list(catalog(root).ids), report.failed) == (["x"], 1)


def test_a_refill_says_what_of_the_source_cannot_be_used(makers, tmp_path, root, caplog):
    from tests.fakes import flip_entry

    run(rows(tmp_path, 0, BAD, 2), root)
    flip_entry(root, "0.png", "text")
    cs.verify(root)
    report = cs.repair(root, refill=True)
    assert (report.refilled, report.missing) == (1, 0)
    assert any("1 row or file of the source" in record.getMessage() for record in caplog.records)
