"""`cachestore show` of a sample: first what a person asks, then the keys of its values."""

import json

import pytest

import cachestore as cs
from cachestore.cli import OK, main
from cachestore.cli.show import _fit
from tests import fakes


@pytest.fixture
def store(tmp_path, makers):
    data = fakes.captioned(tmp_path / "data", 2)
    cs.precompute(data, model="m", store=tmp_path / "store", flip=True, inline=True)
    return tmp_path / "store"


def test_a_sample_begins_with_its_picture_how_it_was_cut_and_its_caption(store, capsys):
    assert main(["show", str(store), "1.png"]) == OK
    lines = capsys.readouterr().out.splitlines()
    titles = [line.split(":")[0].strip() for line in lines if not line.startswith("    ")]
    assert titles == ["data set train (generation 1)", "picture", "caption", "latents/image (2 cells share it)", "text/caption"]
    assert lines[1].endswith("data/1.png")
    assert lines[2].strip().startswith("4x4 pixels, scaled 1.00 times to 4x4, nothing cut off, bucket 4x4")
    assert not any(word in "\n".join(lines) for word in ("digest", "segments/"))


def test_machines_get_digests_and_facts_too(store, capsys):
    main(["show", str(store), "1.png", "--json"])
    [found] = json.loads(capsys.readouterr().out)["in"]
    assert found["facts"]["latents/image"][0]["bucket"] == [4, 4]
    assert "input_digest" in found["entries"]["latents/image"][0]["meta"]
    assert found["images"]["image"][0].endswith("data/1.png")


def test_a_clip_is_said_with_its_frames_rate_and_length_and_a_cut_with_its_sides():
    facts = {"size": [96, 64], "resized": [80, 53], "crop": [0, 2, 80, 50], "bucket": [80, 48, 17], "fps": [8, 1], "start": [3]}
    words = _fit(facts)
    assert "cut off 2 at the top and 3 at the bottom (9% of it), bucket 80x48" in words
    assert words.endswith("17 frames at 8 a second (2.12 s) from frame 3 on")
    assert "17 frames from frame 0 on" in _fit({**facts, "fps": [0, 1], "start": [0]})
    assert _fit({"weight": [0]}) == "nothing of it counts"


def test_sizes_that_are_nonsense_are_shown_as_they_are():
    from cachestore.cli.show import _fit

    assert "size [0, 0]" in _fit({"size": [0, 0], "crop": [0, 0, 8, 8], "resized": [8, 8], "bucket": [8, 8]})
