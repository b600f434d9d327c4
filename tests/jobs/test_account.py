"""What is not used of a source: said in every run, kept with the pass, and no part of what is encoded."""

import json
import re

import pytest

import cachestore as cs
from cachestore.cli import OK, USAGE, main
from cachestore.core.errors import BadUsage
from cachestore.jobs.plan.options import PrecomputeRequest
from cachestore.jobs.start.here import precompute_here
from cachestore.report.write import write_report
from cachestore.store.write.commit import create_store
from tests.fakes import asks_for

pytestmark = pytest.mark.processes


@pytest.fixture
def data(tmp_path):
    """Two captioned pictures."""
    folder = tmp_path / "data"
    folder.mkdir()
    for name in "ab":
        (folder / f"{name}.png").write_bytes(name.encode())
        (folder / f"{name}.txt").write_text(name)
    return folder


def run(data, store, **options):
    return cs.precompute(data, model="m", store=store, inline=True, **options)


def reasons(found):
    return {row["reason"]: row["examples"] for row in found.unused}


def test_a_file_that_comes_beside_a_data_set_is_named_by_the_next_run_and_changes_nothing_else(data, root, makers):
    first = run(data, root)
    assert first.unused == ()
    (data / "c.heic").write_bytes(b"")
    (data / "old.txt").write_text("a caption")
    forecast, second = cs.plan(data, model="m", store=root), run(data, root)
    assert reasons(second) == reasons(forecast) == {"no-decoder": ["c.heic"], "caption-without-picture": ["old.txt"]}
    assert (second.plan, second.generation, second.encoded) == (first.plan, first.generation, 0)
    (data / "c.heic").unlink()
    (data / "old.txt").unlink()
    assert run(data, root).unused == ()


def test_pictures_without_a_row_are_named_also_where_the_plan_is_used_again(data, root, makers):
    (data / "metadata.jsonl").write_text('{"file_name": "a.png", "text": "a"}\n')
    assert reasons(run(data, root)) == {"picture-without-row": ["b.png"], "second-caption": ["a.txt"], "caption-without-picture": ["b.txt"]}
    (data / "new.png").write_bytes(b"new")
    again = run(data, root)
    assert (reasons(again)["picture-without-row"], again.encoded) == (["b.png", "new.png"], 0)


def test_the_command_says_it_before_the_run_and_in_its_json(data, root, makers, capsys):
    (data / "c.svg").write_bytes(b"")
    command = ["precompute", str(data), "--model", "m", "--store", str(root), "--plan-only"]
    assert main(command) == OK
    assert "not used, no-decoder: 1 file (c.svg): " in capsys.readouterr().out
    assert main([*command, "--json"]) == OK
    row = {"reason": "no-decoder", "count": 1, "examples": ["c.svg"]}
    said: list[str] = []
    assert json.loads(capsys.readouterr().out)["unused"] == [row]
    report = precompute_here(PrecomputeRequest(str(data), "m", str(root)), say=said.append)
    assert report.as_json()["unused"] == [row]
    assert any(line.startswith("not used, no-decoder: 1 file (c.svg): ") for line in said)


def test_the_record_of_the_pass_keeps_it_for_why_and_for_the_report(data, root, makers, capsys, tmp_path):
    (data / "c.svg").write_bytes(b"")
    run(data, root)
    assert main(["why", str(root)]) == OK
    assert "not used, no-decoder: 1 file (c.svg)" in capsys.readouterr().out
    assert main(["why", str(root), "--json"]) == OK
    row = {"reason": "no-decoder", "count": 1, "examples": ["c.svg"]}
    assert json.loads(capsys.readouterr().out)["unused"] == {"train": [row]}
    numbers = write_report(root, tmp_path / "page.html")
    assert [one["reason"] for one in numbers["unused"]] == ["no-decoder"]
    assert re.search(r"<bdi>no-decoder</bdi></th><td[^>]*>1</td>.*c\.svg", (tmp_path / "page.html").read_text())


def test_a_run_that_would_have_no_captions_stops_before_anything_is_made(data, root, makers):
    for path in data.glob("*.txt"):
        path.rename(path.with_suffix(".tags"))
    for inline in (True, False):
        with pytest.raises(BadUsage, check=asks_for("caption", "a.tags")):
            cs.precompute(data, model="m", store=root, inline=inline)
    assert not root.exists()
    assert not makers.made
    assert run(data, root, encode="latents").complete
    assert run(data, root, caption="").complete
    with pytest.raises(BadUsage, check=asks_for("caption", "a.tags")):
        run(data, root)  # the store is there now


@pytest.mark.parametrize("has_store", [False, True])
def test_where_nothing_can_be_encoded_what_is_there_is_named(tmp_path, root, makers, has_store):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos/a.cr3").write_bytes(b"raw")
    if has_store:
        create_store(root)
    with pytest.raises(BadUsage, check=asks_for("data", "no-decoder", "a.cr3")):
        run(tmp_path / "photos", root)


def test_names_of_masks_stop_a_run_until_it_is_said_what_they_are(data, root, makers):
    (data / "a-masklabel.png").write_bytes(b"mask")
    with pytest.raises(BadUsage, check=asks_for("roles", "a-masklabel")):
        run(data, root)
    assert not root.exists()
    assert run(data, root, roles="mask=-masklabel").samples == 2
    assert run(data, tmp_other(root), roles="image=-masklabel").samples == 3


def tmp_other(root):
    return root.with_name("other")


def test_what_was_lost_is_made_again_whatever_the_names_beside_it_are_by_now(data, root, makers):
    for path in data.glob("*.txt"):
        path.unlink()
    run(data, root)
    (data / "a.tags").write_text("a caption")
    with pytest.raises(BadUsage, check=asks_for("caption", "a.tags")):
        run(data, root)
    for path in (root / "segments").rglob("*.safetensors"):
        path.unlink()
    assert cs.repair(root, refill=True).missing == 0


# why of a source


def test_why_of_a_folder_accounts_for_every_file_without_model_and_store(data, capsys):
    for name in ("c.heic", "v.mp4", ".hidden", "old.txt"):
        (data / name).write_bytes(b"")
    assert main(["why", str(data)]) == OK
    said = capsys.readouterr().out.splitlines()
    assert said[0] == f"{data}: 2 samples, 2 of them with a caption"
    assert said[1] == "files that are used: 2 image, 2 text"
    assert [line.partition(":")[0] for line in said[2:6]] == [
        "not used, no-decoder",
        "not used, video-without-frames",
        "not used, caption-without-picture",
        "not used, and no data",
    ]
    assert main(["why", str(data), "--frames", "--json"]) == OK
    found = json.loads(capsys.readouterr().out)
    assert (found["samples"], found["used"]) == (3, {"image": 2, "text": 2, "video": 1})
    assert [row["reason"] for row in found["unused"]] == ["no-decoder", "caption-without-picture", "hidden"]


def test_why_of_a_folder_says_what_would_stop_a_run(data, capsys):
    (data / "masks").mkdir()
    (data / "masks/a.png").write_bytes(b"")
    assert main(["why", str(data)]) == USAGE
    assert "a run would stop: files such as masks/a" in capsys.readouterr().out
    assert main(["why", str(data), "--roles", "mask=masks/"]) == OK
    assert "2 image, 1 mask, 2 text" in capsys.readouterr().out


def test_why_of_a_manifest_and_of_tars_lists_them(data, capsys):
    (data / "rows.jsonl").write_text('{"image": "a.png", "text": "a"}\n')
    assert main(["why", str(data / "rows.jsonl"), "--json"]) == OK
    found = json.loads(capsys.readouterr().out)
    assert (found["samples"], found["captioned"], found["used"], found["unused"]) == (1, 1, {"image": 1}, [])


def test_a_picture_whose_row_fails_alone_is_no_picture_without_a_row_and_fails_once_in_the_forecast(tmp_path, makers):
    for name in ("a.png", "b.png", "c.png"):
        (tmp_path / name).write_bytes(b"x")
    rows = [{"file_name": "a.png", "text": "fine"}, {"file_name": "b.png", "text": "a\0b"}]
    (tmp_path / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = cs.plan(tmp_path, model="model", store=tmp_path / "store")
    assert [(row["reason"], row["examples"]) for row in found.unused if row["reason"] == "picture-without-row"] == [
        ("picture-without-row", ["c.png"])
    ]
    assert [failure["sample"] for failure in found.failures] == ["b.png"]
    assert "b.png" not in [failure["sample"] for failure in found.will_fail]
