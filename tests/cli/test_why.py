"""`cachestore why` of a store without a data set: what is unfinished there."""

import json

import pytest

from cachestore.cli import DAMAGE, ERROR, OK, main
from cachestore.jobs.share.workers import Heartbeat
from tests import fakes
from tests.fakes import FakeEncoder, captions

pytestmark = pytest.mark.processes


@pytest.fixture
def begun(tmp_path):
    """A first pass over two units that was begun, with nothing done."""
    one = fakes.job(tmp_path / "store", captions("a", "b"), [FakeEncoder()])
    fakes.open_pass(one)
    return one


def said(capsys, *arguments, code=OK):
    assert main(["why", *map(str, arguments)]) == code
    return "".join(capsys.readouterr())


def test_an_unfinished_first_pass_is_named_with_its_counts(begun, capsys):
    words = (
        "the data set 'train' is not finished (0 of 2 values). If no run is working on it, run the same precompute again, or `cachestore"
    )
    assert said(capsys, begun.layout.root, code=DAMAGE).startswith(words)
    assert words in said(capsys, begun.layout.root, "a", code=ERROR)


def test_a_pass_that_runs_is_not_called_unfinished(begun, capsys):
    with Heartbeat(begun.layout, begun.plan.name, 1, "launch", 0, 1):
        reported = said(capsys, begun.layout.root, code=DAMAGE)
    assert "a run is working on the data set 'train' (0 of 2 values so far" in reported
    assert "not finished" not in reported


def test_a_data_set_that_is_there_is_told_without_its_passes(begun, capsys):
    fakes.run_pass(begun)
    assert said(capsys, begun.layout.root) == "data set 'train' (generation 1): all 2 samples are ready\n"


def made(tmp_path, pictures, encode):
    """The store of three samples, of which the last ones have a picture."""
    rows = [{"id": f"{n}", "caption": f"{n}"} | ({"image": f"{n}.png"} if n >= 3 - pictures else {}) for n in range(3)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for n in range(3):
        (tmp_path / f"{n}.png").write_bytes(b"%d" % n)
    store = tmp_path / "store"
    assert main(["precompute", str(tmp_path / "rows.jsonl"), "--model", "m", "--encode", encode, "--store", str(store)]) == OK
    return store


def test_a_sample_without_a_picture_is_not_ready_if_others_have_one(tmp_path, work_here, capsys):
    store = made(tmp_path, 2, "text,latents")
    capsys.readouterr()
    reported = said(capsys, store, code=DAMAGE)
    assert "train  0: no picture" in reported
    assert "1 of 3 samples is not ready" in reported
    assert "NOT READY\n  no picture" in said(capsys, store, "0", code=DAMAGE)
    assert ": ready" in said(capsys, store, "2")


def test_captions_alone_need_no_picture(tmp_path, work_here, capsys):
    store = made(tmp_path, 0, "text")
    capsys.readouterr()
    assert "all 3 samples are ready" in said(capsys, store)
