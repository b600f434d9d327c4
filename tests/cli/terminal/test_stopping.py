"""How signals stop commands: which of them, in which process, and what stays as it was."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import cachestore as cs
from cachestore.care.verify import verify
from cachestore.cli import OK, main
from cachestore.cli.terminal.stopping import interrupting, silence, stopping
from cachestore.core.errors import Incomplete
from cachestore.core.signals import STOPPING, heard
from tests import fakes
from tests.fakes import Gate, is_running
from tests.shares import share

NAMES = [number.name for number in STOPPING]


# In this process


def code_of(*numbers, looks=True):
    """The exit code of work that gets these signals, and how many of them it lived through."""
    lived = []
    with pytest.raises(SystemExit) as ended, stopping(silence, ()) as stop:
        work(stop, numbers, lived, looks=looks)
    return ended.value.code, len(lived)


def work(stop, numbers, lived, *, looks):
    assert not (looks and stop.is_set())
    for number in numbers:
        signal.raise_signal(number)
        lived.append(number)
    assert stop.is_set()
    raise Incomplete("stopped")


@pytest.mark.parametrize("number", STOPPING)
def test_the_first_signal_only_asks_once_the_work_has_looked(number):
    assert code_of(number) == (128 + number, 1)
    assert code_of(number, signal.SIGTERM) == (128 + number, 2), "as SLURM sends it at the limit, after its warning"


@pytest.mark.parametrize("number", STOPPING)
def test_before_the_work_has_looked_a_signal_ends_it_at_once(number):
    assert code_of(number, looks=False) == (128 + number, 0)


@pytest.mark.parametrize("first", STOPPING)
def test_after_any_signal_sigint_means_at_once(first):
    assert code_of(first, signal.SIGINT) == (128 + first, 1)


def of_others(_number, _frame):
    """A handler that a trainer has set."""


@pytest.mark.parametrize("handler", [signal.SIG_IGN, of_others])
@pytest.mark.parametrize("number", STOPPING)
def test_an_ignored_signal_and_a_handler_of_others_stay(number, handler):
    before = signal.signal(number, handler)
    try:
        with interrupting(), stopping(silence, ()) as stop:
            assert signal.getsignal(number) == handler
            signal.raise_signal(number)
            assert not stop.is_set()
        assert signal.getsignal(number) == handler
    finally:
        signal.signal(number, before)


def test_afterwards_each_signal_is_handled_as_before():
    before = [signal.getsignal(number) for number in STOPPING]
    with interrupting(), stopping(silence, ()):
        assert all(now != earlier for now, earlier in zip(map(signal.getsignal, STOPPING), before, strict=True))
    assert [signal.getsignal(number) for number in STOPPING] == before


def test_outside_the_main_thread_nothing_is_handled():
    found = []

    def look():
        with stopping(silence, ()):
            found.append([signal.getsignal(number) for number in STOPPING])

    before = [signal.getsignal(number) for number in STOPPING]
    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == [before]


def test_a_worker_is_stopped_by_a_signal_that_it_does_not_ignore():
    before = {number: signal.signal(number, signal.SIG_IGN) for number in STOPPING[:2]}
    try:
        assert heard() == STOPPING[2]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_command_that_only_reads_ends_with_the_signals_number_too(root, capsys, monkeypatch, number):
    cs.open(root, mode="a").close()
    monkeypatch.setattr("cachestore.care.verify.verify", lambda *_given, **_named: signal.raise_signal(number))
    assert main(["verify", str(root)]) == 128 + number
    assert f"verify {root}" in capsys.readouterr().err.splitlines()[-1]


# In processes


@pytest.fixture
def asked(tmp_path):
    data = fakes.numbered_pictures(tmp_path / "data", 12)
    return ["precompute", data, "--model", "model", "--store", tmp_path / "store"]


@pytest.fixture
def gate(tmp_path):
    return Gate(tmp_path / "gate")


def started(asked, gate, ignored=()):
    """The command as leader of a process group of its own, with some signals ignored as by `nohup`."""

    def ignore():
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)

    own = {**os.environ, "PYTHONPATH": fakes.PATHS, "FAKE_ENCODERS": "1", fakes.GATE: str(gate.folder), fakes.LOG: str(gate.folder / "log")}
    command = [sys.executable, "-m", "cachestore", *map(str, asked)]
    return subprocess.Popen(
        command,
        env=own,
        start_new_session=True,
        preexec_fn=ignore,  # noqa: PLW1509 - no thread runs
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def until(stream, words):
    return next(line for line in stream if words in line)


def ended(process):
    out, err = process.communicate(timeout=50)
    return process.returncode, out, err


def held(store):
    assert verify(store).ok
    with cs.open(store) as opened:
        return len(opened)


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_signal_to_all_processes_of_a_run_publishes_what_is_encoded(asked, gate, name):
    """As a terminal, `scancel --signal` and `kill -- -GROUP` send it."""
    process = started([*asked, "--procs", "2"], gate)
    while len([*gate.folder.glob("*.begun")]) < 2:
        time.sleep(0.01)
    os.killpg(process.pid, signal.Signals[name])
    until(process.stderr, "stopping")
    os.killpg(process.pid, signal.SIGTERM)
    gate.open()
    code, _out, err = ended(process)
    assert code == 128 + signal.Signals[name], err
    assert err.count("Continue with: ") == 1
    assert held(asked[-1]) == len(fakes.logged(gate.folder / "log")) > 1, "the two batches that were being encoded"


@pytest.mark.processes
@pytest.mark.parametrize("name", share(NAMES, 6, 3))
def test_a_signal_that_was_ignored_at_the_start_stops_nobody(asked, gate, name):
    process = started(asked, gate, [signal.Signals[name]])
    rank = gate.wait()
    os.killpg(process.pid, signal.Signals[name])
    os.kill(rank, signal.Signals[name])
    gate.open()
    code, _out, err = ended(process)
    assert code == OK, err
    assert held(asked[-1]) == 13


@pytest.mark.processes
@pytest.mark.slow
def test_a_run_that_ignores_sigterm_is_stopped_by_another_signal_and_loses_nothing(asked, gate):
    process = started(asked, gate, [signal.SIGTERM])
    gate.wait()
    process.send_signal(signal.SIGUSR1)
    until(process.stderr, "stopping")
    gate.open()
    assert ended(process)[0] == 128 + signal.SIGUSR1
    assert held(asked[-1]) == 1


@pytest.mark.processes
@pytest.mark.parametrize("name", share(["SIGXCPU", "SIGUSR1", "SIGTERM"], 3))
def test_a_signal_to_the_only_worker_ends_the_command_as_if_it_had_got_it(asked, gate, name):
    """A limit of processor time is reached by the worker, not by the command."""
    process = started(asked, gate)
    os.kill(gate.wait(), signal.Signals[name])
    until(process.stderr, "stopping")
    gate.open()
    code, _out, err = ended(process)
    assert code == 128 + signal.Signals[name], err
    assert err.count("Continue with: ") == 1
    assert held(asked[-1]) == 1


@pytest.mark.processes
@pytest.mark.slow
def test_a_signal_to_one_of_two_workers_leaves_its_work_to_the_other(asked, gate):
    process = started([*asked, "--procs", "2", "--json"], gate)
    os.kill(gate.wait(), signal.SIGUSR2)
    gate.open()
    code, out, err = ended(process)
    assert (code, json.loads(out)["encoded"]) == (OK, 13), err
    assert held(asked[-1]) == 13


@pytest.mark.processes
def test_a_terminal_that_is_closed_stops_the_run_and_nothing_encoded_is_lost(asked, gate):
    ours, tty = os.openpty()
    shell = ["sh", "-c", 'exec "$@" <"$0" >"$0" 2>&1', os.ttyname(tty), sys.executable, "-m", "cachestore", *map(str, asked)]
    own = {**os.environ, "PYTHONPATH": fakes.PATHS, "FAKE_ENCODERS": "1", fakes.GATE: str(gate.folder), "TERM": "xterm"}
    process = subprocess.Popen(shell, env=own, start_new_session=True)
    os.close(tty)
    rank = gate.wait()
    os.close(ours)  # the kernel sends SIGHUP, and from here on writing to the terminal fails
    while "stopping" not in Path(f"/proc/{rank}/fd/2").read_text():
        time.sleep(0.01)
    gate.open()
    assert process.wait(50) == 128 + signal.SIGHUP
    assert not is_running(rank)
    assert held(asked[-1]) == 1


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("closed", ["stdout", "stderr"])
def test_a_pipe_that_nobody_reads_any_more_loses_nothing(asked, gate, closed):
    process = started(asked, gate)
    gate.wait()
    getattr(process, closed).close()
    setattr(process, closed, None)
    gate.open()
    assert ended(process)[0] == OK
    assert held(asked[-1]) == 13


TRAINER = """
import os, signal, sys
import cachestore as cs
from tests import fakes

taken = []
def requeue(number, frame):
    taken.append(number)

numbers = [signal.SIGUSR1, signal.SIGHUP, signal.SIGTERM]
for number in numbers:
    signal.signal(number, requeue)

def encode(batch):
    assert all(signal.getsignal(number) is requeue for number in numbers)
    os.kill(os.getpid(), signal.SIGUSR1)
    return fakes.encode(batch)

with cs.open(sys.argv[2], mode="a") as store:
    assert cs.fill(store, [(cs.key(name), name) for name in "ab"], encode).complete
assert taken == [signal.SIGUSR1]

def on_progress(now):
    assert all(signal.getsignal(number) is requeue for number in numbers)
    if len(taken) == 1:
        os.kill(os.getpid(), signal.SIGUSR1)

assert cs.precompute(sys.argv[1], model="model", store=sys.argv[2], on_progress=on_progress).complete
assert len(taken) == 2
assert all(signal.getsignal(number) is requeue for number in numbers)
assert signal.getsignal(signal.SIGXCPU) is signal.SIG_DFL
"""


@pytest.mark.processes
def test_a_trainers_own_handlers_are_called_and_never_replaced(asked):
    process = fakes.program(TRAINER, str(asked[1]), str(asked[-1]), PYTHONPATH=fakes.PATHS, FAKE_ENCODERS="1")
    code, _out, err = ended(process)
    assert code == 0, err
