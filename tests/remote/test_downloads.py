"""The helper and the reader's end of it: without data sets."""

import gc
import os
import signal
import threading
from dataclasses import replace
from typing import Any

import pytest

from cachestore.core.errors import BadInput, RemoteFailed
from cachestore.core.signals import STOPPING
from cachestore.remote import downloads
from cachestore.remote.address import parse_address
from cachestore.remote.downloads import Downloads, HelperClient
from tests.remote.streams import in_child, is_alive

pytestmark = pytest.mark.processes

pytest.importorskip("obstore", reason="the extra [objects] is not installed")


@pytest.fixture(autouse=True)
def ended():
    yield
    downloads.downloads().end()


@pytest.fixture
def client(tmp_path):
    (tmp_path / "segments").mkdir()
    (tmp_path / "segments" / "a").write_bytes(bytes(range(256)) * 40_000)
    (tmp_path / "b").write_bytes(b"small\n")
    return HelperClient(parse_address("address", f"file://{tmp_path}"))


def test_it_lists_and_reads(client):
    assert [[tuple(one) for one in page] for page in client.list("segments")] == [[("segments/a", 10_240_000)]]
    assert client.get("b") == b"small\n"
    assert client.get_range("segments/a", 3, 4) == bytes([3, 4, 5, 6])
    assert client.get_range("segments/a", 0, 10_240_000) == bytes(range(256)) * 40_000


def test_errors_keep_their_kind_and_number(client):
    with pytest.raises(RemoteFailed) as said:
        client.get("nothing")
    assert said.value.errno == 2
    with pytest.raises(BadInput):
        _ask("ftp://x/y")


def _ask(address):
    helper = downloads.downloads()
    request = helper.send({"do": "get", "address": address, "key": "x"})
    helper.wait([request])
    request.result()


def test_threads_get_their_own_answers(client):
    found = {}

    def read(number):
        found[number] = client.get_range("segments/a", number, 100_000)

    threads = [threading.Thread(target=read, args=(number,)) for number in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    whole = bytes(range(256)) * 40_000
    assert found == {number: whole[number : number + 100_000] for number in range(24)}


def test_a_signal_to_all_processes_of_a_job_does_not_end_the_helper(client):
    client.get("b")
    helper: Any = downloads.downloads().helper_pid
    for number in {*STOPPING} - {signal.SIGXCPU}:
        os.kill(helper, number)
    client.get("b")
    assert downloads.downloads().helper_pid == helper


def test_open_requests_go_to_the_next_helper(client):
    client.get("b")
    helper: Any = downloads.downloads()
    os.kill(helper.helper_pid, signal.SIGSTOP)
    body = {"do": "range", "address": str(client.address), "key": "segments/a", "start": 0, "size": 9}
    requests = [helper.send(body) for _one in range(5)]
    os.kill(helper.helper_pid, signal.SIGKILL)
    helper.wait(requests)
    assert [request.result() for request in requests] == [bytes(range(9))] * 5


def test_a_request_that_nothing_holds_is_not_sent_to_the_next_helper(client, monkeypatch):
    client.get("b")
    helper: Any = downloads.downloads()
    os.kill(helper.helper_pid, signal.SIGSTOP)
    body = {"do": "range", "address": str(client.address), "key": "segments/a", "start": 0, "size": 9}
    helper.send(body)
    waiting = helper.send(body)
    os.kill(helper.helper_pid, signal.SIGKILL)
    lines = []
    monkeypatch.setattr(helper, "_write", lambda line, write=helper._write: (lines.append(line), write(line)))
    helper.wait([waiting])
    assert waiting.result() == bytes(range(9))
    assert lines == [waiting.line]


def test_a_thread_that_sends_leaves_the_next_helper_to_the_thread_that_reads(client, monkeypatch):
    client.get("b")
    started = []
    start_helper = downloads.Helper

    def start(*arguments):
        started.append(start_helper(*arguments))
        return started[-1]

    monkeypatch.setattr(downloads, "Helper", start)
    helper: Any = downloads.downloads()
    os.kill(helper.helper_pid, signal.SIGSTOP)
    body = {"do": "range", "address": str(client.address), "key": "segments/a", "start": 0, "size": 9}
    first = helper.send(body)
    reader = threading.Thread(target=helper.wait, args=([first],))
    reader.start()
    while not helper._is_reading:
        pass
    os.kill(helper.helper_pid, signal.SIGKILL)
    requests = [first, *(helper.send(body) for _one in range(5))]
    helper.wait(requests)
    reader.join()
    assert [request.result() for request in requests] == [bytes(range(9))] * 6
    assert len(started) == 1


def test_a_child_neither_uses_nor_ends_its_parents_helper(client):
    client.get("b")
    pid = downloads.downloads().helper_pid

    def in_the_child():
        is_new = downloads.downloads().helper_pid is None
        found = client.get("b") == b"small\n"
        other = downloads.downloads().helper_pid
        downloads.downloads().end()
        gc.collect()
        return is_new and found and other != pid

    assert in_child(in_the_child)
    assert is_alive(pid)
    assert client.get("b") == b"small\n"
    assert downloads.downloads().helper_pid == pid


def test_another_environment_gets_another_helper(client, monkeypatch):
    client.get("b")
    helper = downloads.downloads()
    pid = helper.helper_pid

    class User:
        pass

    users = [User(), User()]
    helper.hold(users[0])
    assert helper.helper_pid == pid
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "another")
    helper.hold(users[1])
    assert helper.helper_pid is None
    assert client.get("b") == b"small\n"


def test_it_ends_with_its_last_user(client):
    helper = Downloads()

    class User:
        pass

    users = [User(), User()]
    helper.hold(users[0])
    helper.hold(users[1])
    request = helper.send({"do": "get", "address": str(client.address), "key": "b"})
    helper.wait([request])
    pid = helper.helper_pid
    users.pop()
    assert is_alive(pid)
    users.pop()
    assert not is_alive(pid)


@pytest.mark.parametrize("given", ["0", "-3", "many"])
def test_a_wrong_number_of_requests_at_once_is_named(client, monkeypatch, given):
    monkeypatch.setenv(downloads.PARALLEL, given)
    downloads.downloads().end()
    with pytest.raises(BadInput):
        client.get("b")


def test_wrong_numbers_are_not_counted_as_helpers_that_ended(client, monkeypatch):
    downloads.downloads().end()
    monkeypatch.setenv(downloads.PARALLEL, "many")
    for _time in range(4):
        with pytest.raises(BadInput):
            client.get("b")
    monkeypatch.delenv(downloads.PARALLEL)
    assert client.get("b") == b"small\n"


def test_helpers_that_cannot_start_are_tried_three_times_and_their_last_words_are_said(client, monkeypatch, capfd):
    downloads.downloads().end()
    started, start = [], downloads.Helper
    broken = replace(downloads.HELPER, module="no_such_module")
    monkeypatch.setattr(downloads, "Helper", lambda _kind, *given: started.append(1) or start(broken, *given))
    for time in (1, 2):
        with pytest.raises(RemoteFailed, match=r"exit code 1: ModuleNotFoundError: No module named 'no_such_module'"):
            client.get("b")
        assert len(started) == 3 * time
    assert "Traceback" not in capfd.readouterr().err
