"""The table of campaigns: what is played, what is printed, and that a violation is never overlooked."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
from chaos import torture

from tests.fakes import ROOT
from tests.torture import calls, campaign
from tests.torture.campaign import Campaign, Outcome, judged, outcome_of, timed
from tests.torture.jobs import Job


def of(outcome, count=3):
    return Campaign(lambda _count, _seed: outcome, count)


def test_without_campaigns_the_table_is_a_heading(capsys):
    assert torture.play_all({}, count=None, seed=1, as_json=False) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_a_campaign_is_played_whole_or_as_many_points_of_it_as_are_asked_for():
    asked = []
    campaign = Campaign(lambda count, seed: asked.append((count, seed)) or Outcome(count), 7)
    assert torture.play("one", campaign, count=None, seed=3)[0].points == 7
    assert torture.play("one", campaign, count=2, seed=3)[0].points == 2
    assert asked == [(7, 3), (2, 3)]


def test_a_violation_is_printed_and_ends_with_1(capsys):
    assert torture.play_all({"good": of(Outcome(5)), "bad": of(Outcome(5, ("it is lost",)))}, count=None, seed=1, as_json=False) == 1
    reported = capsys.readouterr()
    assert "VIOLATION in bad: it is lost" in reported.err
    assert "| bad | 5 | 1 |" in reported.out
    assert torture.play_all({"good": of(Outcome(5))}, count=None, seed=1, as_json=True) == 0
    assert json.loads(capsys.readouterr().out)["rows"][0]["points"] == 5


@pytest.mark.parametrize(("option", "status"), [("--help", 0), ("--misspelt", 2)])
def test_help_and_what_is_misspelt_are_answered_before_an_environment_is_made(tmp_path, option, status):
    scripts = tmp_path / "scripts"
    for script in ("chaos/torture.py", "environment.py"):
        (scripts / script).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / "scripts" / script, scripts / script)
    ended = subprocess.run([sys.executable, scripts / "chaos/torture.py", option], capture_output=True, text=True, check=False)
    assert (ended.returncode, "--only NAME" in ended.stdout + ended.stderr) == (status, True)
    assert [path.name for path in tmp_path.iterdir()] == ["scripts"]


def test_a_campaign_that_is_none_is_answered_with_those_that_are(capsys):
    with pytest.raises(SystemExit):
        torture.main(["--only", "crash"])
    assert re.search("no campaign 'crash'; known are .*crashes", capsys.readouterr().err)


def test_a_campaign_that_judged_nothing_ends_with_1():
    assert torture.play_all({"empty": of(Outcome(0))}, count=None, seed=1, as_json=False) == 1


def misbehave(point):
    if point == "signal":
        os.kill(os.getpid(), signal.SIGKILL)
    if point == "raise":
        raise OSError(point)
    if point == "hang":
        time.sleep(60)
    return ["one", "two"] if point == "find" else []


@pytest.mark.processes
def test_what_judges_find_raise_die_of_and_hang_in_is_reported():
    found = dict(judged(["good", "signal", "raise", "hang", "find"], misbehave, seconds=2))
    assert found["good"] == []
    assert found["find"] == ["one", "two"]
    assert "-9" in found["signal"][0]
    assert "OSError" in found["raise"][0]
    assert found["hang"] == ["it did not end in time"]
    assert outcome_of(found.items()).points == 5
    assert len(outcome_of(found.items()).violations) == 4


def test_a_call_that_does_not_end_is_reported_with_where_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr(campaign, "HANG_SECONDS", 0.2)
    os.mkfifo(tmp_path / "fifo")
    calls = {
        "sleeps": lambda: time.sleep(60),
        "turns": lambda: any(turn for turn in iter(int, 1)),
        "waits for a fifo": (tmp_path / "fifo").read_bytes,
        "ends": lambda: None,
    }

    def judge(name):
        timed(calls[name])
        return []

    found = dict(judged(calls, judge, seconds=20))
    assert found.pop("ends") == []
    assert all("Hang: it takes longer than 0.2 s" in violation for [violation] in found.values())
    assert "read_bytes" in found["waits for a fifo"][0]


def test_time_in_which_others_run_is_no_hang(tmp_path, monkeypatch):
    """As on a machine so busy that nearly all of the time goes to others."""
    started = time.monotonic()
    monkeypatch.setattr(campaign, "HANG_SECONDS", 0.05)
    monkeypatch.setattr(campaign, "waited_seconds", lambda *_pids: time.monotonic() - started)
    assert dict(judged([0.5], lambda seconds: [str(timed(time.sleep, seconds))], seconds=20)) == {0.5: ["None"]}


@pytest.mark.processes
@pytest.mark.parametrize("is_busy", [False, True])
def test_a_rank_that_does_not_end_is_ended_unless_the_machine_is_busy(tmp_path, monkeypatch, is_busy):
    started, notes = time.monotonic(), calls._Notes(tmp_path / "root")
    monkeypatch.setattr(calls, "HANG_SECONDS", 0.1)
    monkeypatch.setattr(calls, "waited_seconds", lambda *_pids: time.monotonic() - started if is_busy else 0.0)
    nothing = Job("sleep", lambda _root: None, lambda *_given: time.sleep(0.5 if is_busy else 600), lambda _root: set())
    pid = calls._start(nothing, notes.root, 0, 1, None)
    while not notes.beside("acknowledged").exists():
        time.sleep(0.01)
    [code] = calls._wait([pid], notes)
    assert code == 0 if is_busy else "hangs in" in str(code)


def test_without_points_nobody_judges():
    assert list(judged([], pytest.fail)) == []
