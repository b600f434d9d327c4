"""`cachestore why` of a store without a data set: what is unfinished there."""

import pytest

from cachestore.cli import ERROR, OK, main
from cachestore.work.workers import Heartbeat
from tests import fakes
from tests.fakes import FakeEncoder, captions


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
    words = "an unfinished pass of 'train' has 0 of 2 units: run `cachestore precompute` again"
    assert said(capsys, begun.layout.root) == f"there is no data set here\n{words}\n"
    assert words in said(capsys, begun.layout.root, "a", code=ERROR)


def test_a_pass_that_runs_is_not_called_unfinished(begun, capsys):
    with Heartbeat(begun.layout, begun.plan.name, 1, "launch", 0, 1):
        reported = said(capsys, begun.layout.root)
    assert "a pass of 'train' is running and has 0 of 2 units" in reported
    assert "unfinished" not in reported


def test_a_data_set_that_is_there_is_told_without_its_passes(begun, capsys):
    fakes.run_pass(begun)
    assert said(capsys, begun.layout.root) == "data set 'train' (generation 1): all 2 samples are ready\n"
