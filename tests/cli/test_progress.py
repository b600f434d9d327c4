"""One honest bar: units are counted when published, over all ranks, and who is silent or gone is named."""

import sys

import pytest

from cachestore.cli import progress
from cachestore.cli.progress import Bar
from cachestore.files.records import decode_record, encode_record
from cachestore.work.passes import join_pass
from cachestore.work.workers import FORMAT, VERSION, Heartbeat
from tests import fakes
from tests.fakes import FakeEncoder, captions, raising


@pytest.fixture
def at_once(monkeypatch):
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    monkeypatch.setattr(progress, "TERMINAL_SECONDS", 0.0)


def counts(one):
    return {"plan": one.plan.name, "pass": 1, "reused": 0, "encoded": 0, "failed": 0}


def test_nothing_is_drawn_before_the_pause_is_over(root, capsys):
    fakes.run(root, captions("a"), FakeEncoder(), on_progress=Bar(root, is_shown=True).look)
    assert capsys.readouterr().err == ""


def test_nothing_is_drawn_where_it_is_not_wanted(root, capsys, at_once):
    bar = Bar(root, is_shown=False)
    fakes.run(root, captions("a"), FakeEncoder(), on_progress=bar.look)
    bar.end()
    assert capsys.readouterr().err == ""


def test_elsewhere_than_on_a_terminal_lines_are_printed_with_what_is_published(root, capsys, at_once):
    bar = Bar(root, is_shown=True)
    fakes.run(root, captions(*map(str, range(100))), FakeEncoder(), on_progress=bar.look)
    bar.end()
    lines = capsys.readouterr().err.splitlines()
    done = [int(line.partition(" of ")[0]) for line in lines]
    assert done == sorted(done)
    assert done[-1] == 100
    assert all(" of 100 units: " in line for line in lines)
    assert "\r" not in "".join(lines)


def test_on_a_terminal_one_line_is_drawn_over_and_left_at_the_end(root, capsys, at_once, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    bar = Bar(root, is_shown=True)
    fakes.run(root, captions("a", "b"), FakeEncoder(), on_progress=bar.look)
    bar.end()
    err = capsys.readouterr().err
    assert err.startswith("\r")
    assert err.count("\n") == 1
    assert err.endswith("\n")


def test_a_store_that_cannot_be_read_just_now_draws_nothing(tmp_path, capsys, at_once):
    Bar(tmp_path / "gone", is_shown=True).look({"plan": "0" * 32, "pass": 1})
    assert capsys.readouterr().err == ""


def shown(one, capsys, **changes):
    """What the bar says while rank 1's heartbeat has these changes."""
    ref = join_pass(one.layout, one.plan.name, "launch")
    fakes.open_pass(one)
    with (
        Heartbeat(one.layout, one.plan.name, ref.number, "launch", 0, 2),
        Heartbeat(one.layout, one.plan.name, ref.number, "launch", 1, 2) as other,
    ):
        show(one, other, **changes)
        Bar(one.layout.root, is_shown=True).look(counts(one))
    return capsys.readouterr().err


def show(one, heartbeat, **changes):
    path = one.layout.worker(heartbeat.worker)
    body = decode_record(FORMAT, VERSION, path.read_bytes(), where=path)
    path.write_bytes(encode_record(FORMAT, VERSION, body | changes))


def killed(one, **changes):
    changes = {"launch": "launch", "rank": 2, "phase": "working", **changes}
    with Heartbeat(one.layout, one.plan.name, 1, "launch", 2, 3) as heartbeat:
        pass
    show(one, heartbeat, **changes)


@pytest.fixture
def one(root):
    return fakes.job(root, captions("a", "b"), [FakeEncoder()])


def test_a_rank_that_is_silent_is_named_with_its_phase(one, capsys, at_once):
    assert "; rank 1 silent " in (reported := shown(one, capsys, at=-1e6))
    assert "(planning)" in reported


def test_a_rank_without_a_claim_waits_and_is_not_silent(one, capsys, at_once):
    assert "silent" not in shown(one, capsys, at=-1e6, phase="working")


def test_a_rank_that_is_gone_is_named_and_one_that_ended_is_not(one, capsys, at_once):
    killed(one, phase="ended")
    assert "is gone" not in shown(one, capsys)
    killed(one)
    assert "; rank 2 has stopped, others do its work" in shown(one, capsys)


def test_nobody_of_a_launch_that_is_over_is_gone(one, capsys, at_once):
    killed(one, launch="an earlier one", encoded=1)
    reported = shown(one, capsys)
    assert "gone" not in reported
    assert "1 of 2 units: 0 reused, 1 encoded" in reported


def test_a_rank_that_was_started_again_is_not_gone(one, capsys, at_once):
    killed(one, rank=1)
    assert "gone" not in shown(one, capsys)


def test_workers_without_a_rank_are_told_apart_by_their_processes(one, capsys, at_once):
    assert "; worker 77 on " in shown(one, capsys, rank=None, pid=77, at=-1e6, started=-1.0)


def test_the_slowest_rank_is_named_where_there_are_several(one, capsys, at_once):
    assert "; slowest rank 0 (0.0/s" in shown(one, capsys, encoded=7, lived=1.0)


def test_rates_of_workers_with_one_rank_add_up(one, capsys, at_once):
    reported = shown(one, capsys, rank=0, encoded=2, lived=100.0)
    assert "0.0/s, " in reported
    assert "slowest rank 0 (0.0/s" in reported


def test_a_bar_that_nobody_can_read_any_more_ends_nothing(one, at_once, monkeypatch):
    fakes.open_pass(one)
    monkeypatch.setattr(sys.stderr, "write", raising(BrokenPipeError))
    bar = Bar(one.layout.root, is_shown=True)
    bar.look(counts(one))
    bar.end()
