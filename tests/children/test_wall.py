"""The wall: code that has taken over the process that reads pickles can do nothing but compute and answer."""

import json
import os
import sys
import time
from dataclasses import replace

import pytest

from cachestore.children import wall
from cachestore.children.kinds import PICKLE_READER
from cachestore.trainers import sandbox
from cachestore.trainers.sandbox import TorchFiles
from tests.fakes import ROOT, is_running, program

pytestmark = [
    pytest.mark.torch,
    pytest.mark.processes,
    pytest.mark.skipif(not wall.is_available(), reason="this system cannot filter system calls"),
]

TAKEN_OVER = """
import ctypes, io, os, pathlib, resource, signal, socket, subprocess, sys, threading
from cachestore.core.raw_tensors import Contents
from cachestore.trainers import pickle_reader
from cachestore.trainers import torch_files

read, main, libc = torch_files.read_torch, pickle_reader.main, ctypes.CDLL(None, use_errno=True)

def call(number, *arguments):
    if libc.syscall(number, *arguments) == -1:
        raise OSError(ctypes.get_errno(), "refused")

def tried(line):
    try:
        return repr(eval(line))
    except BaseException as error:
        return type(error).__name__

def instead(data):
    if not data.startswith(b"try: "):
        return read(data)
    return Contents({}, {line: tried(line) for line in data[5:].decode().splitlines()})

torch_files.read_torch = instead
"""
"""Stands for a file whose code runs: what it sends is evaluated in the process, behind its wall."""

REFUSED = """
open('made', 'w')
open(there)
open(there, 'w')
os.listdir('/')
os.mkdir('/tmp/made by a pickle')
os.link(there, there + '2')
os.symlink(there, there + '3')
os.rename(there, there + '4')
os.remove(there)
os.truncate(there, 0)
os.chmod(there, 0)
os.memfd_create('x')
os.pipe()
os.dup(0)
socket.socket()
socket.socket(socket.AF_UNIX)
socket.socketpair()
os.fork()
os.execv('/bin/true', ['true'])
os.posix_spawn('/bin/true', ['true'], {})
subprocess.run(['/bin/true'])
os.system('true') == 0 or no_such_name
threading.Thread(target=print).start()
os.kill(parent, signal.SIGTERM)
os.kill(parent, 0)
os.killpg(0, 0)
resource.prlimit(parent, resource.RLIMIT_NOFILE)
open(f'/proc/{parent}/environ').read()
open('/proc/self/environ').read()
open(f'/proc/{parent}/mem', 'rb')
os.chdir('/')
os.setuid(0)
os.stat(there)
ctypes.CDLL(there)
__import__('antigravity')
"""

NUMBERS = {
    "x86_64": {"ptrace": 101, "process_vm_readv": 310, "io_uring_setup": 425, "bpf": 321, "x32 open": 0x40000002},
    "aarch64": {"ptrace": 117},
}


@pytest.fixture(scope="module")
def child(tmp_path_factory):
    folder = tmp_path_factory.mktemp("taken over")
    (folder / "taken_over.py").write_text(TAKEN_OVER)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(folder), str(ROOT)]))
        patch.setenv("AWS_SECRET_ACCESS_KEY", "a secret")
        patch.setenv("HF_TOKEN", "a secret")
        patch.setattr(sandbox, "PICKLE_READER", replace(PICKLE_READER, module="taken_over"))
        with TorchFiles() as files:
            yield files


def test_all_that_harms_is_refused(child, tmp_path):
    there = tmp_path / "there"
    there.write_text("mine")
    lines = REFUSED.replace("there", repr(str(there))).replace("parent", str(os.getpid())).strip().splitlines()
    lines += [f"call({number}, 0, 0, 0, 0, 0)" for number in NUMBERS[os.uname().machine].values()]
    found = dict(child.read(b"try: " + "\n".join(lines).encode()).values)
    assert {
        line: how
        for line, how in found.items()
        if how not in {"PermissionError", "OSError", "RuntimeError", "ModuleNotFoundError", "NameError"}
    } == {}
    assert len(found) == len(lines)
    assert (sorted(path.name for path in tmp_path.iterdir()), there.read_text()) == (["there"], "mine")


def test_it_sees_no_credential_and_holds_its_pipes_alone(child):
    found = child.read(b"try: dict(os.environ)\n1 + 1").values
    assert "a secret" not in str(found["dict(os.environ)"])
    assert found["1 + 1"] == "2", "what is harmless is done"
    own = f"/proc/{child._child.pid}"
    assert sorted(os.listdir(f"{own}/fd")) == ["0", "1", "2"]
    assert os.readlink(f"{own}/cwd") == "/"


@pytest.mark.parametrize(
    "answer",
    [
        {"tensors": [["a", "F32", [1], -1]], "values": {}, "body": 0},
        {"tensors": [["a", "F32", [1], 1 << 40]], "values": {}, "body": 0},
        {"tensors": [["a"]], "values": {}, "body": 0},
        {"tensors": 3, "values": {}, "body": 0},
        {"values": {}, "body": 0},
        {"tensors": [], "values": 3, "body": 0},
        {"tensors": [], "values": {}, "body": 1 << 60},
        [],
        "[" * 100_000,
    ],
    ids=lambda answer: str(answer)[:40],
)
def test_an_answer_of_a_process_that_was_taken_over_is_a_fault_of_its_file_alone(tmp_path, monkeypatch, answer):
    text = (answer if isinstance(answer, str) else json.dumps(answer)).encode()
    program = """
import sys
def main(_arguments):
    answers = sys.stdout.buffer
    for line in (b'{"body":0}', TEXT):
        answers.write(line + bytes([10]))
        answers.flush()
    sys.stdin.read()
"""
    (tmp_path / "answers.py").write_text(program.replace("TEXT", repr(text)))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(sandbox, "PICKLE_READER", replace(PICKLE_READER, module="answers"))
    with TorchFiles() as files, pytest.raises(sandbox.EncodeFailed, match="crashed the process"):
        files.read(b"any")


CALLER = """
import os, sys, time
from dataclasses import replace
from cachestore.children.kinds import PICKLE_READER
from cachestore.children.start import start
child = start(replace(PICKLE_READER, module="busy"))
child.stdout.read(1)
print(child.pid, flush=True)
os.kill(os.getpid(), 9)
"""
BUSY = """
from cachestore.children import wall

def main(_arguments):
    wall.build()
    print(1, flush=True)
    while True:
        pass
"""


def test_a_process_that_was_taken_over_ends_with_a_killed_caller(tmp_path):
    (tmp_path / "busy.py").write_text(BUSY)
    caller = program(CALLER, PYTHONPATH=os.pathsep.join([str(tmp_path), str(ROOT)]))
    said, _errors = caller.communicate(timeout=50)
    until = time.monotonic() + 30
    while is_running(int(said)):
        assert time.monotonic() < until
        time.sleep(0.01)


def test_on_another_machine_only_limits_hold(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not wall.is_available()


def test_both_tables_of_calls_have_the_numbers_of_this_machine():
    assert {"x86_64", "aarch64"} == {*wall._ARCHITECTURES}
    assert all(len(set(one.allowed.values())) == len(one.allowed) for one in wall._ARCHITECTURES.values())
