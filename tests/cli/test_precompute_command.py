"""`cachestore precompute` as processes: what it prints where, how it is stopped, and how many of it work together."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import cachestore as cs
from cachestore.care.verify import verify
from cachestore.cli import ERROR, FAILURES, OK, SUPERSEDED, USAGE, main
from tests import fakes
from tests.fakes import Gate, command, is_running
from tests.shares import share

pytestmark = pytest.mark.processes


@pytest.fixture
def data(tmp_path):
    return fakes.numbered_pictures(tmp_path / "data", 12)


@pytest.fixture
def gate(tmp_path):
    return Gate(tmp_path / "gate")


@pytest.fixture
def asked(data, tmp_path):
    return ["precompute", data, "--model", "model", "--store", tmp_path / "store"]


def ended(process):
    """(exit code, stdout, stderr) of a command."""
    out, err = process.communicate(timeout=50)
    return process.returncode, out, err


def keys(store):
    with cs.open(store) as opened:
        return set(opened.keys())


# What is printed


def test_stdout_carries_the_result_alone_and_stderr_the_words(asked):
    code, out, err = ended(command(*asked, "--json"))
    assert code == OK
    assert json.loads(out)["encoded"] == 13
    assert "12 samples" in err


def test_quiet_says_nothing_but_the_result(asked, work_here, capfd):
    assert main([*map(str, asked), "--json", "--quiet"]) == OK
    out, err = capfd.readouterr()
    assert err == ""
    assert json.loads(out)["complete"]


def test_quiet_prints_counts_and_the_data_set_alone(asked, work_here, capfd):
    assert main([*map(str, asked), "--quiet"]) == OK
    out, err = capfd.readouterr()
    assert ([line.split()[0] for line in out.splitlines()], err) == (["13", "data"], "")


def test_a_person_gets_counts_and_the_lines_that_train(asked, work_here, capfd):
    assert main(list(map(str, asked))) == OK
    out = capfd.readouterr().out
    assert "13 values: 0 reused, 13 encoded, 0 failed; " in out
    assert "cs.CachedDataset(" in out
    assert "generation=1" in out


def test_under_a_launcher_only_rank_0_prints(asked):
    ranks = [command(*asked, "--json", RANK=str(rank), WORLD_SIZE="2", TORCHELASTIC_RUN_ID="x") for rank in range(2)]
    assert [(code, len(out.splitlines())) for code, out, _err in map(ended, ranks)] == [(OK, 1), (OK, 0)]


@pytest.mark.slow
def test_the_group_that_a_store_is_made_for_is_named_and_another_access_is_refused(asked, tmp_path):
    code, _out, err = ended(command(*asked, "--access", "group"))
    assert (code, "is shared with the group" in err) == (OK, True)
    assert json.loads((tmp_path / "store" / "cachestore.json").read_text())["body"]["mode"] == "group"
    code, out, _err = ended(command(*asked, "--access", "private", "--json"))
    assert (code, json.loads(out)["kind"]) == (ERROR, "BadInput")
    (tmp_path / "c.toml").write_text('access = "group"\n')
    assert ended(command(*asked, "--config", tmp_path / "c.toml"))[0] == OK
    assert ended(command(*asked, "--access", "all"))[0] == USAGE


@pytest.mark.slow
def test_ranks_named_by_hand_each_print_their_report(asked):
    for rank in range(2):
        code, out, _err = ended(command(*asked, "--json", "--rank", rank, "--world-size", 2))
        assert (code, json.loads(out)["wanted"]) == (OK, 13)


def test_a_launcher_that_contradicts_itself_is_reported_once_and_goes_on(asked):
    code, out, err = ended(command(*asked, "--json", RANK="7", WORLD_SIZE="2"))
    assert (code, json.loads(out)["encoded"]) == (OK, 13)
    assert err.count("rank 7 of 2") == 1


# Several processes


@pytest.mark.slow  # as `test_failures_in_a_rank_are_3_for_all`, without a failure
def test_ranks_started_by_the_command_report_as_one(asked):
    code, out, err = ended(command(*asked, "--procs", "2", "--json"))
    report = json.loads(out)
    assert (code, report["encoded"], report["encoded_here"], report["complete"]) == (OK, 13, 13, True), err


@pytest.mark.slow
def test_any_number_of_processes_makes_the_same_keys(asked, tmp_path):
    found = []
    for procs in (1, 3):
        store = tmp_path / f"store of {procs}"
        assert ended(command(*asked[:-1], store, "--procs", procs))[0] == OK
        found.append(keys(store))
        assert verify(store).ok
    assert found[0] == found[1]
    assert len(found[0]) == 13


@pytest.mark.slow
@pytest.mark.torch
def test_under_torchrun_the_same_keys_are_made(asked, tmp_path):
    assert ended(command(*asked))[0] == OK
    store = tmp_path / "torchrun's"
    launcher = ["--nproc-per-node", 4, "-m", "cachestore", *asked[:-1], store, "--json"]
    code, out, err = ended(command(*launcher, module="torch.distributed.run"))
    assert code == OK, err
    assert json.loads(out)["encoded"] == 13
    assert keys(store) == keys(asked[-1])
    heartbeats = [json.loads(path.read_text())["body"] for path in (store / "workers").glob("*.json")]
    assert {heartbeat["rank"] for heartbeat in heartbeats} <= {0, 1, 2, 3}
    assert {heartbeat["world_size"] for heartbeat in heartbeats} == {4}
    assert len({heartbeat["launch"] for heartbeat in heartbeats}) == 1
    again, _out, _err = ended(command(*launcher, module="torch.distributed.run"))
    assert again == OK
    assert len(list(store.glob("plans/*/*/done.json"))) == 2, "a later launch looks at everything again"


def test_an_error_in_all_ranks_is_1_and_named(asked, tmp_path):
    asked[1] = tmp_path / "gone"
    code, out, err = ended(command(*asked, "--procs", "2", "--json"))
    assert code == ERROR
    assert json.loads(out)["kind"] == "BadInput"
    assert "gone" in err


def test_nothing_in_all_ranks_is_2_and_publishes_nothing(asked, tmp_path):
    (tmp_path / "empty").mkdir()
    asked[1] = tmp_path / "empty"
    code, out, err = ended(command(*asked, "--procs", "2", "--json", FAKE_PLAN_SECONDS="0.2"))
    assert (code, json.loads(out)["kind"]) == (USAGE, "BadUsage")
    assert not (tmp_path / "store").exists()
    assert "there is nothing to encode in" in err


def test_failures_in_a_rank_are_3_for_all(asked, data):
    (data / "bad.png").write_bytes(b"undecodable")
    code, out, _err = ended(command(*asked, "--procs", "2", "--json"))
    report = json.loads(out)
    assert (code, report["failed"], report["encoded"], report["encoded_here"]) == (FAILURES, 1, 13, 13)


# Seen from another shell


def test_status_shows_a_running_pass_from_another_shell(asked, gate, capsys):
    process = command(*asked, "--json", FAKE_ENCODER_GATE=str(gate.folder))
    pid = gate.wait()
    assert main(["status", str(asked[-1]), "--json"]) == OK
    [plan] = json.loads(capsys.readouterr().out)["plans"]
    [rank] = plan["ranks"]
    assert (plan["complete"], plan["claimed"] > 0, plan["finished"], plan["encoded"]) == (False, True, 0, 0)
    assert (rank["pid"], rank["alive"]) == (pid, True)
    gate.open()
    assert ended(process)[0] == OK
    main(["status", str(asked[-1]), "--json"])
    [plan] = json.loads(capsys.readouterr().out)["plans"]
    assert (plan["complete"], plan["encoded"]) == (True, 13)


# Stopped


@pytest.mark.parametrize("number", share(["SIGHUP", "SIGINT", "SIGUSR1", "SIGUSR2", "SIGTERM", "SIGXCPU"], 6))
def test_a_signal_publishes_what_is_encoded_and_prints_the_command_that_goes_on(asked, gate, number, tmp_path):
    number = signal.Signals[number]
    process = command(*asked, "--json", cwd=tmp_path, FAKE_ENCODER_GATE=str(gate.folder))
    gate.wait()
    process.send_signal(number)
    until(process.stderr, "stopping")
    gate.open()
    returned, out, err = ended(process)
    assert (returned, out) == (128 + number, "")
    assert verify(asked[-1]).ok
    assert len(keys(asked[-1])) == 1, "the batch that was being encoded"
    line = err.strip().splitlines()[-1].partition("Continue with: ")[2]
    program, *arguments = shlex.split(line.removeprefix("python -m "))
    assert program == "cachestore"
    returned, out, err = ended(command(*arguments, "--json"))
    report = json.loads(out)
    assert (returned, report["complete"], report["encoded"], report["encoded_here"]) == (OK, True, 13, 12), err


@pytest.mark.parametrize("style", ["bar", "plain", "none"])
def test_a_signal_while_the_command_plans_ends_it_at_once(asked, monkeypatch, style):
    def plan_for_ever(*_arguments, **_named):
        signal.raise_signal(signal.SIGINT)
        pytest.fail("the signal only asked to stop")

    monkeypatch.setattr("cachestore.jobs.start.launching.precompute_in_processes", plan_for_ever)
    with pytest.raises(SystemExit) as ended:
        main([*map(str, asked), "--progress", style])
    assert ended.value.code == 128 + signal.SIGINT


@pytest.mark.slow
def test_a_run_that_goes_on_says_what_it_did_itself(asked, gate):
    process = command(*asked, FAKE_ENCODER_GATE=str(gate.folder))
    assert interrupted(process, gate, lambda process: process.send_signal(signal.SIGINT))[0] == 130
    code, out, err = ended(command(*asked))
    assert code == OK, err
    assert "13 values: 0 reused, 13 encoded (12 by this process, 1 by earlier runs), 0 failed" in out
    assert re.search(r" new, [0-9.]+ s over all runs, [0-9.]+ s in this one\n", out)


def interrupted(process, gate, send):
    """Signal a process whose rank stands at the gate, then let it go on; returns how it ended."""
    gate.wait()
    send(process)
    until(process.stderr, "stopping")
    gate.open()
    return ended(process)


@pytest.mark.slow
def test_one_signal_to_the_parent_stops_its_ranks(asked, gate):
    process = command(*asked, "--procs", "2", FAKE_ENCODER_GATE=str(gate.folder))
    code, out, err = interrupted(process, gate, lambda process: process.send_signal(signal.SIGTERM))
    assert (code, out) == (143, "")
    assert err.count("Continue with: ") == 1
    assert verify(asked[-1]).ok
    code, out, _err = ended(command(*asked, "--json"))
    assert (code, json.loads(out)["complete"]) == (OK, True)


def test_ctrl_c_reaches_parent_and_ranks_and_nothing_encoded_is_lost(asked, gate, tmp_path):
    """The terminal signals all of them, and the parent then signals its ranks once more."""
    log = tmp_path / "log"
    paths = os.pathsep.join([str(fakes.ROOT / "tests/cli/at_start"), str(fakes.ROOT)])
    process = subprocess.Popen(
        [sys.executable, "-m", "cachestore", *map(str, asked), "--procs", "2"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": paths, "FAKE_ENCODERS": "1", fakes.GATE: str(gate.folder), fakes.LOG: str(log)},
    )
    code, _out, err = interrupted(process, gate, lambda process: os.killpg(process.pid, signal.SIGINT))
    assert code == 130, err
    assert err.count("Continue with: ") == 1
    made = {key for _pid, _encoder, key in fakes.logged(log)}
    assert made == {str(key) for key in (keys(asked[-1]) if made else set())}
    assert verify(asked[-1]).ok


def test_no_rank_outlives_the_command(asked, gate):
    process = command(*asked, "--procs", "2", FAKE_ENCODER_GATE=str(gate.folder))
    gate.wait()
    process.send_signal(signal.SIGTERM)
    gate.open()
    ended(process)
    for heartbeat in [json.loads(path.read_text())["body"] for path in (asked[-1] / "workers").glob("*.json")]:
        with pytest.raises(ProcessLookupError):
            os.kill(heartbeat["pid"], 0)


# Stopped and killed, with several ranks


def standing(gate, count):
    gate.wait()
    while len(found := sorted(gate.folder.glob("*.begun"))) < count:
        time.sleep(0.01)
    return [int(path.stem) for path in found]


@pytest.mark.parametrize("ranks", share([1, 3], 2))
def test_two_ranks_that_were_stopped_are_gone_on_with_by_any_number_and_nothing_is_encoded_twice(asked, gate, tmp_path, ranks):
    log = tmp_path / "log"
    process = command(*asked, "--procs", "2", FAKE_ENCODER_GATE=str(gate.folder), FAKE_ENCODER_LOG=str(log))
    standing(gate, 2)
    process.send_signal(signal.SIGINT)
    assert "stopping after the current batch" in until(process.stderr, "stopping")
    gate.open()
    code, out, err = ended(process)
    assert (code, out) == (130, "")
    assert err.count("Continue with: ") == 1
    first = {key for _pid, _encoder, key in fakes.logged(log)}
    assert 0 < len(first) < 13
    assert first == {str(key) for key in keys(asked[-1])}
    code, out, err = ended(command(*asked, "--procs", ranks, "--json", FAKE_ENCODER_LOG=str(log)))
    report = json.loads(out)
    assert (code, report["complete"], report["encoded"], report["encoded_here"]) == (OK, True, 13, 13 - len(first)), err
    assert len(fakes.logged(log)) == 13, "nothing was encoded twice"


def until(stream, words):
    return next(line for line in stream if words in line)


def test_ranks_of_a_command_that_is_killed_stop_and_publish(asked, gate, tmp_path):
    log = tmp_path / "log"
    process = command(*asked, "--procs", "2", FAKE_ENCODER_GATE=str(gate.folder), FAKE_ENCODER_LOG=str(log))
    ranks = standing(gate, 2)
    process.kill()
    while not any("stopping" in Path(f"/proc/{rank}/fd/2").read_text() for rank in ranks):  # nobody copies their words any more
        time.sleep(0.01)
    gate.open()
    ended(process)
    while any(map(is_running, ranks)):
        time.sleep(0.01)
    made = {key for _pid, _encoder, key in fakes.logged(log)}
    assert made
    assert made == {str(key) for key in keys(asked[-1])}


def test_a_kill_loses_the_open_segment_alone(asked, gate, tmp_path):
    log = tmp_path / "log"
    process = command(*asked, FAKE_ENCODER_GATE=str(gate.folder), CACHESTORE_FAILPOINT="worker.before_ledger", FAKE_ENCODER_LOG=str(log))
    gate.wait()
    gate.open()
    code, _out, err = ended(process)
    assert (code, "was killed by SIGKILL. Run the same command again" in err) == (ERROR, True), err
    first = {key for _pid, _encoder, key in fakes.logged(log)}
    assert first == {str(key) for key in keys(asked[-1])}, "its segment was acknowledged before"
    code, out, _err = ended(command(*asked, "--json", FAKE_ENCODER_LOG=str(log)))
    assert (code, json.loads(out)["encoded"], len(fakes.logged(log))) == (OK, 13, 13)


def test_what_a_killed_run_published_is_reported_alike_by_status_and_by_the_plan(asked, gate, monkeypatch, capsys):
    monkeypatch.setattr("cachestore.encode.models.hub._cached", lambda _name, _revision: None)
    asked += ["--encode", "latents"]
    process = command(*asked, FAKE_ENCODER_GATE=str(gate.folder), CACHESTORE_FAILPOINT="worker.before_ledger")
    gate.wait()
    gate.open()
    assert ended(process)[0] == ERROR
    assert main(["status", str(asked[5]), "--json"]) == OK
    [reported] = json.loads(capsys.readouterr().out)["plans"]
    assert (reported["encoded"], reported["finished"]) == (12, 0)
    monkeypatch.setattr("cachestore.jobs.plan.planning.make_encoders", fakes.Makers())
    assert main([*map(str, asked), "--plan-only", "--json"]) == OK
    forecast = json.loads(capsys.readouterr().out)
    assert (forecast["present"], forecast["to_encode"], forecast["published"], forecast["left"]) == (0, 12, 12, 0)
    assert main([*map(str, asked), "--plan-only"]) == OK
    assert "12 values, 12 of them in the store already, from a run that did not finish; 0 to encode" in capsys.readouterr().out
    fakes.fake_processes(monkeypatch)
    assert main([*map(str, asked)]) == OK
    assert main([*map(str, asked), "--plan-only", "--json"]) == OK
    forecast = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (forecast["present"], forecast["published"]) == (12, 0)


@pytest.mark.slow
def test_two_runs_at_once_share_the_work(asked, gate, tmp_path):
    log = tmp_path / "log"
    runs = [command(*asked, "--json", FAKE_ENCODER_GATE=str(gate.folder), FAKE_ENCODER_LOG=str(log)) for _ in range(2)]
    standing(gate, 2)
    gate.open()
    reports = [json.loads(ended(run)[1]) for run in runs]
    assert [report["encoded"] for report in reports] == [13, 13]
    assert sum(report["encoded_here"] for report in reports) == 13
    assert len(fakes.logged(log)) == 13
    assert len({pid for pid, _encoder, _key in fakes.logged(log)}) == 2


# Runs that overtake each other


def test_a_run_that_was_stopped_and_overtaken_ends_with_5_and_replaces_nothing(asked, data, gate, tmp_path):
    older = command(*asked, "--json", FAKE_ENCODER_GATE=str(gate.folder))
    os.kill(rank := gate.wait(), signal.SIGSTOP)
    for name in ("98.png", "99.png"):
        (data / name).write_bytes(name.encode())
        os.utime(data / name, (1, 1))
    assert ended(command(*asked, "--json"))[0] == OK
    gate.open()
    os.kill(rank, signal.SIGCONT)
    code, out, err = ended(older)
    assert (code, json.loads(out)["kind"]) == (SUPERSEDED, "Superseded")
    assert "generation 1 (14 samples; this run lists 12)" in err
    newest = fakes.catalog(tmp_path / "store")
    assert (newest.generation, len(newest)) == (1, 14)
    code, out, _err = ended(command(*asked, "--json"))
    assert (code, json.loads(out)["encoded"], json.loads(out)["generation"]) == (OK, 0, 1)


@pytest.mark.slow
@pytest.mark.parametrize("procs", ["1", "2"])
def test_of_two_runs_with_different_resolutions_the_second_to_end_is_refused_as_at_planning(asked, gate, tmp_path, procs):
    one = command(*asked, "--json", "--resolution", "512", "--procs", procs, FAKE_ENCODER_GATE=str(gate.folder))
    gate.wait()
    assert ended(command(*asked, "--json"))[0] == OK
    gate.open()
    code, _out, err = ended(one)
    assert code == ERROR
    assert "--replace takes the new settings" in err
    assert [column.options.get("resolution") for column in fakes.catalog(tmp_path / "store").columns] == [1024, None]
