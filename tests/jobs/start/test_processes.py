"""Workers as processes: what the caller sees, what is left when it returns or dies, and how a bad end is said."""

import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import cachestore as cs
from cachestore.care.verify import verify
from cachestore.cli import main
from cachestore.core.errors import BadInput, BadUsage, CacheStoreError, Incomplete, WriteFailed
from cachestore.jobs.share.progress import RankStatus
from cachestore.jobs.start import processes
from cachestore.jobs.start.parent_watch import PARENT, watch_parent
from cachestore.jobs.start.processes import Care, Child, hangs, how_it_ended, joined_report, run_child, run_children
from tests import fakes
from tests.fakes import asks_for, is_running, raising
from tests.leaks import held

pytestmark = pytest.mark.processes


@pytest.fixture
def data(tmp_path):
    return fakes.numbered_pictures(tmp_path / "data", 5)


@pytest.fixture
def fake(monkeypatch):
    """Fake encoders in this process, and in those it starts."""
    monkeypatch.setattr("cachestore.jobs.plan.planning.make_encoders", fakes.Makers())
    monkeypatch.setattr("cachestore.encode.models.hub._cached", lambda name, _revision: None if name == "far-away" else Path(name))
    fakes.fake_processes(monkeypatch)


@pytest.fixture
def log(monkeypatch, tmp_path):
    monkeypatch.setenv(fakes.LOG, str(tmp_path / "log"))
    return tmp_path / "log"


@pytest.fixture
def gate(fake, monkeypatch, tmp_path):
    gate = fakes.Gate(tmp_path / "gate")
    monkeypatch.setenv(fakes.GATE, str(gate.folder))
    return gate


@pytest.fixture
def no_process(monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", raising(AssertionError("a process was started")))


class Meanwhile:
    """Does something in a thread while the test's own thread waits inside a call."""

    def __init__(self, *steps):
        self._thread = threading.Thread(target=lambda: [step() for step in steps])

    def __enter__(self):
        self._thread.start()

    def __exit__(self, *_exc):
        self._thread.join()


def keys(store):
    with cs.open(store) as opened:
        return {str(key) for key in opened.keys()}  # noqa: SIM118 - a store is no mapping


def made(log):
    return {key for _pid, _encoder, key in fakes.logged(log)}


def wait_until_it_stops(pid):
    """Wait until a worker, which goes on with its batch, has said that it will stop after it. Its words have no name, but a descriptor."""
    while "stopping after the current batch" not in Path(f"/proc/{pid}/fd/2").read_text():
        time.sleep(0.01)


def sign(**changes):
    who = {"rank": 0, "host": "here", "pid": 1, "worker": "w", "launch": "l", "phase": "working", "alive": True}
    counts = {"done": 0, "reused": 0, "encoded": 0, "failed": 0, "count": 1}
    times = {"rate": 0.0, "beat_age_seconds": 0.0, "slowest_batch": 0.0, "still_seconds": 0.0}
    body: dict[str, Any] = who | counts | times | changes
    return RankStatus(**body)


# With nothing to encode


def test_no_workers_at_all_end_well():
    assert run_children(["precompute"], 0) == []


def test_a_second_call_starts_no_process(data, root, fake, no_process):
    with pytest.raises(AssertionError, match="a process was started"):
        cs.precompute(data, model="model", store=root)
    cs.precompute(data, model="model", store=root, inline=True)
    for options in ({}, {"procs": 2}):
        asked: dict[str, Any] = {"model": "model", "store": root, **options}
        report = cs.precompute(data, **asked)
        assert (report.complete, report.wanted, report.reused, report.encoded) == (True, 6, 6, 0)


def test_a_model_that_is_not_here_is_downloaded_by_a_process_of_its_own(data, root, fake, no_process):
    cs.precompute(data, model="far-away", store=root, inline=True)
    with pytest.raises(AssertionError, match="a process was started"):
        cs.precompute(data, model="far-away", store=root)


def test_an_empty_source_starts_no_process_and_makes_no_store(tmp_path, root, fake, no_process):
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadUsage):
        cs.precompute(tmp_path / "empty", model="model", store=root)
    assert not root.exists()


def test_the_process_that_would_download_a_model_makes_no_store_of_an_empty_source(tmp_path, root, fake):
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadUsage):
        cs.precompute(tmp_path / "empty", model="far-away", store=root)
    assert not root.exists()


def test_a_worker_spells_options_as_its_caller_would(tmp_path, root, fake, capfd):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"video": "a.mp4", "caption": "a cat"}\n')
    with pytest.raises(BadUsage, check=asks_for("frames")) as refused:
        cs.precompute(rows, model="far-away", store=root)
    assert "pass frames with" in str(refused.value)
    assert main(["precompute", str(rows), "--model", "far-away", "--store", str(root)]) == 2
    assert "pass --frames with" in capfd.readouterr().err


def test_a_failed_unit_is_work_and_starts_a_process(data, root, fake, monkeypatch):
    (data / "bad.png").write_bytes(b"undecodable")
    cs.precompute(data, model="model", store=root, inline=True)
    monkeypatch.setattr(
        "cachestore.jobs.start.launching.run_child", lambda *_arguments: [Child(1, 1, {"error": "started", "kind": "WriteFailed"}, "")]
    )
    with pytest.raises(WriteFailed):
        cs.precompute(data, model="model", store=root)


SECOND_CALL = """
import os, subprocess, sys
import cachestore as cs
before = dict(os.environ)
first = cs.precompute(sys.argv[1], model=sys.argv[1], store=sys.argv[2])
subprocess.Popen = None
second = cs.precompute(sys.argv[1], model=sys.argv[1], store=sys.argv[2])
assert dict(os.environ) == before, set(os.environ) - set(before)
loaded = [name for name in ("torch", "transformers", "diffusers", "tokenizers") if name in sys.modules]
print(first.encoded, second.encoded, second.reused, loaded)
"""


def test_neither_call_imports_torch_or_changes_the_environment(data, root, fake):
    out, err = fakes.program(SECOND_CALL, data, root, PYTHONPATH=fakes.PATHS).communicate(timeout=50)
    assert out == "6 0 6 []\n", err


# Progress and cancel


def test_progress_is_reported_in_the_calling_thread_with_counts_over_all_ranks(data, root, gate, monkeypatch):
    monkeypatch.setattr(processes, "LOOK_SECONDS", 0.0)
    reported = []

    def on_progress(counts):
        reported.append((threading.current_thread(), counts))
        gate.open()

    report = cs.precompute(data, model="model", store=root, procs=2, on_progress=on_progress)
    assert {thread for thread, _counts in reported} == {threading.main_thread()}
    counts = {"plan": report.plan, "pass": 1, "reused": 0, "encoded": 6, "failed": 0, "total": 6}
    assert reported[-1][1] == {**counts, "done": 6, "doing": "", "rate": None, "seconds_left": 0.0}
    done = [counts["encoded"] for _thread, counts in reported]
    assert done == sorted(done)
    assert all(set(counts) == set(reported[-1][1]) for _thread, counts in reported)


def test_an_error_in_on_progress_reaches_the_caller_and_stops_the_workers(data, root, gate, monkeypatch):
    monkeypatch.setattr(processes, "LOOK_SECONDS", 0.0)
    pids = []

    def on_progress(_counts):
        pids.append(gate.wait())
        gate.open()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        cs.precompute(data, model="model", store=root, on_progress=on_progress)
    assert not is_running(pids[0])


def test_cancel_publishes_what_is_encoded_and_raises_incomplete(data, root, gate, log):
    cancel = threading.Event()
    with (
        Meanwhile(gate.wait, cancel.set, lambda: wait_until_it_stops(gate.wait()), gate.open),
        pytest.raises(Incomplete),
    ):
        cs.precompute(data, model="model", store=root, cancel=cancel)
    assert 0 < len(made(log)) < 6
    assert keys(root) == made(log)
    again = cs.precompute(data, model="model", store=root)
    assert (again.complete, again.encoded) == (True, 6)
    assert len(fakes.logged(log)) == 6, "nothing was encoded twice"


def test_cancelled_before_it_begins_nothing_is_started(data, root, fake, no_process):
    cancel = threading.Event()
    cancel.set()
    with pytest.raises(Incomplete):
        cs.precompute(data, model="model", store=root, cancel=cancel)


# How a worker ended


@pytest.mark.parametrize(
    ("ending", "words"),
    [
        ({"returncode": 1}, "ended with exit code 1"),
        ({"returncode": -11}, "was killed by SIGSEGV"),
        ({"returncode": -9}, "was killed by SIGKILL"),
        ({"returncode": -9, "oom_kills": 2}, "ran out of memory (2 processes"),
        ({"returncode": -11, "oom_kills": 2}, "was killed by SIGSEGV"),
        ({"returncode": -99}, "signal 99"),
        ({"returncode": 143}, "was stopped by SIGTERM"),
        ({"returncode": 1, "last_words": "torch.OutOfMemoryError: CUDA out of memory."}, "out of memory by its last output"),
    ],
)
def test_an_end_is_reported_in_words(ending, words):
    assert words in how_it_ended(**ending)
    assert ("memory" in words) == ("batch_size" in how_it_ended(**ending)), "it says what helps"


@pytest.mark.parametrize(
    ("shown", "age", "is_hung"),
    [
        (None, 10.0, False),
        (None, processes.UNSEEN_SECONDS + 1, True),
        ({"still_seconds": 1799.0}, 9e9, False),
        ({"still_seconds": 1801.0}, 1801.0, True),
        ({"still_seconds": 1801.0, "slowest_batch": 700.0}, 1801.0, False),
        ({"still_seconds": 2101.0, "slowest_batch": 700.0}, 2101.0, True),
        ({"still_seconds": 9e9, "phase": "waiting"}, 9e9, False),
    ],
)
def test_a_worker_hangs_when_its_count_stands_still_for_30_minutes_and_three_batches(shown, age, is_hung):
    assert bool(hangs(shown and sign(**shown), age)) == is_hung


def test_a_worker_that_hangs_is_stopped_and_reported_with_its_phase(data, root, gate, monkeypatch):
    for name, seconds in (("STILL_SECONDS", 3.0), ("STOP_SECONDS", 0.3), ("WATCH_SECONDS", 0.05)):
        monkeypatch.setattr(processes, name, seconds)
    with pytest.raises(Incomplete, match=r"hung: .* in phase 'loading'; asked to stop, it was killed by SIGKILL"):
        cs.precompute(data, model="model", store=root)
    assert not is_running(gate.wait())


def test_a_segfault_of_the_only_worker_is_an_error_with_its_stack(data, root, gate):
    with Meanwhile(lambda: os.kill(gate.wait(), signal.SIGSEGV)), pytest.raises(Incomplete, match="SIGSEGV") as raised:
        cs.precompute(data, model="model", store=root)
    assert "in at_the_gate" in str(raised.value)


def test_one_crashed_rank_of_two_is_reported_with_its_last_words(data, root, gate, caplog):
    crashed = []

    def crash():
        crashed.append(gate.wait())
        os.kill(crashed[0], signal.SIGSEGV)

    with Meanwhile(crash, gate.open):
        report = cs.precompute(data, model="model", store=root, procs=2)
    assert (report.complete, report.encoded) == (True, 6)
    [reported] = [record.getMessage() for record in caplog.records if "SIGSEGV" in record.getMessage()]
    assert f"(pid {crashed[0]}) was killed by SIGSEGV" in reported
    assert "in at_the_gate" in reported


def test_a_worker_that_the_system_killed_for_memory_is_reported_as_such(data, root, gate, tmp_path, monkeypatch):
    counter = tmp_path / "vmstat"
    counter.write_text("pgfault 7\noom_kill 3\n")
    monkeypatch.setattr(processes, "_VMSTAT", counter)

    def kill():
        pid = gate.wait()
        counter.write_text("pgfault 9\noom_kill 4\n")
        os.kill(pid, signal.SIGKILL)

    with Meanwhile(kill), pytest.raises(Incomplete, match="ran out of memory"):
        cs.precompute(data, model="model", store=root)


@pytest.mark.parametrize("text", [None, "", "oom_kill x\n"])
def test_where_the_system_counts_no_kills_none_are_reported(tmp_path, monkeypatch, text):
    monkeypatch.setattr(processes, "_VMSTAT", tmp_path / "vmstat")
    if text is not None:
        (tmp_path / "vmstat").write_text(text)
    assert processes._oom_kills() is None
    assert processes._risen(None) == 0


REPORT = {"encoded_here": 2}


def test_reports_are_joined_and_who_failed_meanwhile_is_reported():
    reported = []
    children = [
        Child(1, 0, REPORT, ""),
        Child(2, 3, REPORT, ""),
        Child(3, 1, {"error": "the disk refuses", "kind": "WriteFailed"}, "", 2, "ended with exit code 1: the disk refuses"),
    ]
    assert joined_report(children, warn=reported.append) == {"encoded_here": 4}
    assert reported == ["worker 2 (pid 3) ended with exit code 1: the disk refuses; the others did its work"]


@pytest.mark.parametrize(
    ("child", "error", "words"),
    [
        (Child(1, 1, {"error": "no such model", "kind": "BadInput", "option": "model"}, ""), BadInput, "no such model"),
        (Child(1, 2, {"error": "no number", "kind": "BadInput"}, ""), BadInput, "no number"),
        (Child(1, 2, None, "usage: cachestore"), BadInput, "usage: cachestore"),
        (Child(1, 2, None, ""), BadInput, "refused"),
        (Child(1, 1, {"error": "odd", "kind": "int"}, ""), CacheStoreError, "odd"),
        (Child(1, -11, None, "Fatal Python error", 0, "was killed by SIGSEGV"), Incomplete, "(?s)SIGSEGV.*Fatal Python error"),
        (Child(1, 0, None, ""), Incomplete, "ended"),
    ],
)
def test_without_a_worker_that_reached_the_end_its_error_is_raised(child, error, words):
    with pytest.raises(error, match=words) as raised:
        joined_report([child])
    assert type(raised.value) is error
    if child.report and "option" in child.report:
        assert raised.value.option == child.report["option"]


# What is left


def possessions():
    """What this process holds: threads, descriptors, children, handlers. Not what tests before left to the garbage."""
    gc.collect()
    children = {child for task in Path("/proc/self/task").iterdir() for child in (task / "children").read_text().split()}
    descriptors = {one.name: os.readlink(one) for one in Path("/proc/self/fd").iterdir() if one.exists()}
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    return set(threading.enumerate()), descriptors, children, handlers


def test_nothing_is_left_in_the_caller(data, root, fake):
    cs.precompute(data, model="model", store=root, inline=True)  # imports, and what Python itself opens
    before = possessions()
    assert cs.precompute(data, model="another", store=root.parent / "another", procs=2).encoded == 6
    assert possessions() == before
    with pytest.raises(CacheStoreError):
        cs.precompute(data, model="model", store=root, name="x", max_failures="y")
    with pytest.raises(CacheStoreError):
        run_child_that_fails(data, root)
    assert possessions() == before


def run_child_that_fails(data, root):
    joined_report(run_child(["precompute", str(data / "gone"), "--model", "m", "--store", str(root)], {}, Care()))


def test_a_process_that_cannot_be_started_leaves_nothing(data, root, fake, monkeypatch):
    before = possessions()
    monkeypatch.setattr(sys, "executable", str(data / "no python"))
    with pytest.raises(BadInput, check=asks_for("inline")):
        cs.precompute(data, model="model", store=root)
    monkeypatch.setattr(sys, "executable", "")
    with pytest.raises(BadInput, check=asks_for("inline")):
        cs.precompute(data, model="model", store=root)
    assert possessions() == before


@pytest.mark.parametrize("procs", [None, 2])
def test_workers_that_cannot_start_are_an_error_with_their_last_line_and_no_traceback(data, root, fake, monkeypatch, capfd, procs):
    monkeypatch.setattr(processes, "WORKER", replace(processes.WORKER, module="no_such_module"))
    with pytest.raises(Incomplete, match="exit code 1: ModuleNotFoundError: No module named 'no_such_module'") as raised:
        cs.precompute(data, model="model", store=root, procs=procs)
    assert "Traceback" not in str(raised.value) + capfd.readouterr().err


CALLER = """
import os, sys, time
import cachestore as cs
from cachestore.jobs.start import processes

processes.LOOK_SECONDS = 0.0

def fork_once(_counts, forked=[]):
    if not forked:
        forked.append(os.fork())  # holds a copy of everything that this process has open
        if forked == [0]:
            os.close(1)
            os.close(2)
            time.sleep(50)
            os._exit(0)
        print(forked[0], flush=True)

told = fork_once if sys.argv[3] == "forks" else None
cs.precompute(sys.argv[1], model="model", store=sys.argv[2], on_progress=told)
"""


@pytest.mark.parametrize("meanwhile", ["waits", "forks"])
def test_no_worker_outlives_a_caller_that_is_killed_and_what_it_encoded_is_there(data, root, gate, log, meanwhile):
    caller = fakes.program(CALLER, data, root, meanwhile, PYTHONPATH=fakes.PATHS)
    worker = gate.wait()
    forked = int(caller.stdout.readline()) if meanwhile == "forks" else None
    caller.kill()
    caller.wait()
    wait_until_it_stops(worker)
    gate.open()
    while is_running(worker):
        time.sleep(0.01)
    assert not forked or is_running(forked)
    if forked:
        os.kill(forked, signal.SIGKILL)
    caller.communicate()
    assert len(made(log)) == 1, "the batch that was being encoded"
    assert keys(root) == made(log)
    assert verify(root).ok


def test_a_worker_that_cannot_stop_leaves_all_the_same():
    source = """
import os, signal, time
from cachestore.core.signals import STOPPING
from cachestore.jobs.start import parent_watch
for number in STOPPING:
    signal.signal(number, signal.SIG_IGN)
parent_watch.LEAVE_SECONDS = 0.05
assert parent_watch.watch_parent(os.environ)
assert parent_watch.PARENT not in os.environ
time.sleep(50)
"""
    process = fakes.program(source, CACHESTORE_PARENT="1")  # whose stdin has ended already
    process.communicate(timeout=50)
    assert process.returncode == 128 + signal.SIGTERM


def test_a_process_that_nobody_of_ours_started_watches_nobody():
    before = held()
    assert not watch_parent({})
    assert not watch_parent({PARENT: "x"})
    assert not held() - before


# Scripts and notebooks


CELL = """
import io, sys
import cachestore as cs
sys.stderr = io.StringIO()
report = cs.precompute({data!r}, model="model", store={store!r})
shown, sys.stderr = sys.stderr.getvalue(), sys.__stderr__
print(report.complete, report.encoded, "6 values" in shown, shown.count("to encode"))
"""

NOTEBOOK = """
import sys, types
cells = sys.stdin.read()
main = sys.modules["__main__"] = types.ModuleType("__main__")
exec(cells, main.__dict__)
"""


@pytest.mark.parametrize("way", ["file", "stdin", "notebook"])
def test_without_a_guard_it_encodes_and_shows_the_workers_words_where_the_caller_looks(data, root, fake, tmp_path, way):
    cell = CELL.format(data=str(data), store=str(root))
    (tmp_path / "script.py").write_text(cell)
    arguments = {"file": [str(tmp_path / "script.py")], "stdin": ["-"], "notebook": ["-c", NOTEBOOK]}[way]
    given = None if way == "file" else cell
    ended = subprocess.run([sys.executable, *arguments], input=given, capture_output=True, text=True, timeout=50, check=False, cwd=tmp_path)
    assert ended.stdout == "True 6 True 1\n", ended.stderr


def test_words_are_copied_whole_as_they_come(tmp_path):
    copied = []
    with (tmp_path / "err").open("w+b") as err:
        one = processes._Running(0, None, err, err, -1, 0.0)  # pyright: ignore[reportArgumentType] - no process is needed
        raw = "größer".encode()
        err.write(raw[:3])
        err.flush()
        one.copy_words(copied.append)
        assert copied == ["gr"]
        err.write(raw[3:])
        err.flush()
        one.copy_words(copied.append)
        assert copied == ["gr", "ößer"]
        assert one.last_words() == "größer"


def test_a_caller_without_a_stderr_or_with_a_closed_one_is_not_disturbed(monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    processes._to_stderr("lost")
    with open(os.devnull, "w") as closed:
        pass
    monkeypatch.setattr(sys, "stderr", closed)
    processes._to_stderr("lost")


def test_the_json_of_a_worker_that_printed_none_is_none(tmp_path):
    for text, found in ((b"", None), (b"[1]", None), (b"{", None), (json.dumps(REPORT).encode(), REPORT)):
        (tmp_path / "out").write_bytes(text)
        with (tmp_path / "out").open("rb") as out:
            assert processes._printed(out) == found
