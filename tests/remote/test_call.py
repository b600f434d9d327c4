"""push, pull and ls run in a helper process, which ends with the call, however that ends."""

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

import cachestore as cs
from cachestore.core.signals import STOPPING
from cachestore.remote import call
from cachestore.remote.listing import list_address
from tests.fakes import ROOT
from tests.leaks import held
from tests.remote.copies import files_of, make
from tests.remote.server import served
from tests.remote.streams import is_alive

pytest.importorskip("obstore", reason="the extra [objects] is not installed")
pytestmark = pytest.mark.processes


@pytest.fixture
def s3(monkeypatch):
    """A server in this process."""
    with served() as (server, url):
        for name, value in {
            "AWS_ENDPOINT_URL": url,
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
        }.items():
            monkeypatch.setenv(name, value)
        yield server


@pytest.fixture
def helpers(monkeypatch):
    """The pids of the helpers that were started."""
    started, start = [], call.Helper

    def noted(*given):
        helper = start(*given)
        started.append(helper.pid)
        return helper

    monkeypatch.setattr(call, "Helper", noted)
    return started


def stop(*_given):
    raise ValueError("stop here")


def test_nothing_of_a_call_is_left_behind_however_it_ends(root, tmp_path, helpers):
    make(root, [1, 2], [3])
    before = held()
    assert list_address(f"file://{root}").catalogs[1].samples == 3
    with pytest.raises(cs.StoreNotFound):
        list_address(f"file://{tmp_path}/nothing")
    with pytest.raises(ValueError, match="stop here"):
        cs.push(root, f"file://{tmp_path}/other", on_progress=stop)
    assert held() - before == set()
    assert len(helpers) == 3
    assert not any(map(is_alive, helpers))


def test_a_call_that_is_stopped_removes_what_is_half_written(root, tmp_path, s3, helpers):
    make(root, [1], [2])
    s3.objects |= {f"cache/{path.relative_to(root)}": path.read_bytes() for path in root.rglob("*") if path.is_file()}
    asked, half_written = threading.Event(), []

    def fault(_method):
        if s3.requests[-1][1].startswith("/bucket/cache/segments/"):
            asked.set()
            return None if s3.released.is_set() else "stall"
        return None

    def shown(doing, _done, _total):
        if doing == "receiving segments":
            assert asked.wait(30)
            half_written.extend((tmp_path / "pulled" / "tmp").iterdir())
            threading.Timer(0.2, s3.released.set).start()
            raise KeyboardInterrupt

    s3.fault = fault
    with pytest.raises(KeyboardInterrupt):
        cs.pull("s3://bucket/cache", tmp_path / "pulled", jobs=1, on_progress=shown)
    assert not any(map(is_alive, helpers))
    assert half_written
    assert list((tmp_path / "pulled" / "tmp").iterdir()) == []
    cs.pull("s3://bucket/cache", tmp_path / "pulled")
    assert files_of(tmp_path / "pulled") == files_of(root)


def test_a_signal_that_reaches_the_helper_too_leaves_the_decision_to_the_caller(root, s3, helpers):
    """A scheduler's warning goes to all processes of a job, and the caller may go on after it."""
    make(root, [1, 2], [3])

    def shown(_doing, _done, _total):
        for number in {*STOPPING} - {signal.SIGXCPU}:
            os.kill(helpers[-1], number)

    cs.push(root, "s3://bucket/cache", jobs=1, on_progress=shown)
    assert {key.removeprefix("cache/"): data for key, data in s3.objects.items()}.items() >= files_of(root).items()


def test_a_killed_helper_is_an_error_that_says_so_and_the_same_call_goes_on(root, s3, helpers):
    make(root, [1, 2], [3])

    def shown(doing, _done, _total):
        if doing == "sending segments":
            os.kill(helpers[-1], signal.SIGKILL)

    with pytest.raises(cs.RemoteFailed, match=r"the helper process ended without a result \(signal 9\); run the same command again"):
        cs.push(root, "s3://bucket/cache", jobs=1, on_progress=shown)
    assert not is_alive(helpers[-1])
    cs.push(root, "s3://bucket/cache")
    assert {key.removeprefix("cache/"): data for key, data in s3.objects.items()}.items() >= files_of(root).items()


def test_a_helper_ends_with_a_killed_caller_whose_child_holds_its_pipe(root, s3):
    make(root, [1])
    s3.faults[:] = ["stall"] * 100
    program = """
import os, sys, time, cachestore as cs
from cachestore.remote import call
start = call.Helper
def noted(*given):
    helper = start(*given)
    child = os.fork() or time.sleep(60)
    print(helper.pid, child, flush=True)
    return helper
call.Helper = noted
cs.push(sys.argv[1], "s3://bucket/cache")
"""
    with subprocess.Popen([sys.executable, "-c", program, str(root)], stdout=subprocess.PIPE, text=True, cwd=ROOT) as caller:
        helper, child = map(int, caller.stdout.readline().split())
        caller.kill()
        try:
            until = time.monotonic() + 30
            while is_alive(helper):
                assert time.monotonic() < until
                time.sleep(0.05)
        finally:
            os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("do", [pytest.param("push", marks=pytest.mark.slow), "pull", pytest.param("ls", marks=pytest.mark.slow)])
def test_a_helper_ends_with_a_killed_caller_while_a_server_says_nothing(root, tmp_path, s3, do):
    make(root, [1])
    s3.faults[:] = ["stall"] * 100
    program = """
import sys, cachestore as cs
from cachestore.remote import call
from cachestore.remote.listing import list_address
start = call.Helper
def noted(*given):
    helper = start(*given)
    print(helper.pid, flush=True)
    return helper
call.Helper = noted
address, (do, store) = "s3://bucket/cache", sys.argv[1:]
{"push": lambda: cs.push(store, address), "pull": lambda: cs.pull(address, store), "ls": lambda: list_address(address)}[do]()
"""
    store = root if do == "push" else tmp_path / "pulled"
    with subprocess.Popen([sys.executable, "-c", program, do, str(store)], stdout=subprocess.PIPE, text=True, cwd=ROOT) as caller:
        helper = int(caller.stdout.readline())
        while not s3.requests:
            time.sleep(0.01)
        caller.kill()
        wait_until_it_is_gone(helper)


def wait_until_it_is_gone(pid):
    until = time.monotonic() + 25  # the server is waited for longer; on a quiet machine it takes less than 5 s
    while is_alive(pid):
        assert time.monotonic() < until
        time.sleep(0.05)


def test_a_helper_that_cannot_be_started_is_named(root, monkeypatch):
    make(root, [1])
    monkeypatch.setattr(sys, "executable", str(Path(root) / "nothing"))
    with pytest.raises(cs.RemoteFailed):
        cs.push(root, "s3://bucket/cache")


def test_a_helper_that_cannot_start_is_an_error_with_its_own_last_words(root, monkeypatch, capfd):
    make(root, [1])
    monkeypatch.setattr(call, "CALL_HELPER", replace(call.CALL_HELPER, module="no_such_module"))
    with pytest.raises(cs.RemoteFailed, match=r"exit code 1: ModuleNotFoundError: No module named 'no_such_module'"):
        cs.push(root, f"file://{root}/other")
    assert "Traceback" not in capfd.readouterr().err
