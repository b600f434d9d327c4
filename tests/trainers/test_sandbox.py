"""Files with pickles: read in a process of their own, which may do nothing else, and whose death is an error of one file alone."""

import gzip
import io
import os
import pickle
import signal
import subprocess
import sys
import zipfile
from dataclasses import replace

import pytest
import torch

import cachestore as cs
from cachestore.children.kinds import PICKLE_READER
from cachestore.children.start import start
from cachestore.core.errors import EncodeFailed, Incomplete
from cachestore.core.signals import STOPPING
from cachestore.trainers import sandbox
from cachestore.trainers.containers import read_npz
from cachestore.trainers.sandbox import TorchFiles
from cachestore.trainers.torch_files import read_torch, write_torch
from tests.leaks import held
from tests.trainers import trainers
from tests.trainers.simpletuner.files import write_simpletuner

pytestmark = pytest.mark.torch


def saved(value):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


class Executes:
    def __reduce__(self):
        return os.getcwd, ()


class TestInAProcessOfItsOwn:
    def test_neither_a_bad_file_nor_one_that_kills_it_hides_the_next(self):
        tensor = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)
        with TorchFiles() as files:
            read = files.read(saved({"a": tensor, "b": {"c": torch.tensor(True)}, "n": 3, "t": (None, "x")}))
            assert set(read.tensors) == {"a", "b.c"}
            assert dict(read.values) == {"n": 3, "t.0": None, "t.1": "x"}
            assert read.tensors["a"][:2] == ("BF16", (2, 3))
            for bad in (b"", b"no file of torch", saved(Executes()), saved({"a": tensor})[:-30]):
                with pytest.raises(EncodeFailed):
                    files.read(bad)
            assert files.read(saved(tensor)).tensors["value"][1] == (2, 3)
            first = files._child
            for number in {*STOPPING} - {signal.SIGXCPU}:
                os.kill(first.pid, number)
            assert files.read(saved(tensor)).tensors["value"][1] == (2, 3), "signals to a whole job are for the one that started it"
            first.kill()
            first.wait()
            with pytest.raises(EncodeFailed, match=r"read it \(signal 9\)"):
                files.read(saved(tensor))
            assert files.read(saved(tensor)).tensors["value"][1] == (2, 3)
            second = files._child
        assert files._child is None
        assert second.returncode is not None

    def test_a_file_that_takes_too_long_is_passed_over(self):
        with TorchFiles() as files:
            child = files._started()
            os.kill(child.pid, signal.SIGSTOP)
            files._seconds = 0.2
            with pytest.raises(EncodeFailed, match="not read within 0 s"):
                files.read(saved(torch.zeros(1)))
            assert child.returncode == -signal.SIGKILL

    def test_limits_of_its_caller_stay(self):
        program = """
import resource
from cachestore.trainers import pickle_reader
for name in ("RLIMIT_AS", "RLIMIT_CPU"):
    limit = 2 << 30 if name == "RLIMIT_AS" else 90
    resource.setrlimit(getattr(resource, name), (limit, limit))
pickle_reader._at_most = lambda wanted, hard, at_most=pickle_reader._at_most: print(at_most(wanted, hard) == hard) or at_most(wanted, hard)
pickle_reader._limit()
pickle_reader._allow_seconds()
"""
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50, check=False)
        assert done.stdout == "True\nTrue\n", done.stderr

    def test_the_child_may_write_no_file_and_take_no_endless_memory(self):
        program = """
import resource
from cachestore.trainers import pickle_reader
pickle_reader._limit()
assert resource.getrlimit(resource.RLIMIT_FSIZE) == (0, 0)
assert resource.getrlimit(resource.RLIMIT_CORE) == (0, 0)
try:
    bytearray(16 << 30)
except MemoryError:
    print("refused")
"""
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50, check=False)
        assert done.stdout == "refused\n", done.stderr


@pytest.mark.processes
class TestAReaderThatCannotStart:
    @pytest.fixture
    def starts(self, monkeypatch):
        """How often a reader is started that ends with an error of its own."""
        count = []
        broken = replace(PICKLE_READER, module="no_such_module")
        monkeypatch.setattr(sandbox, "start", lambda _kind, **given: count.append(1) or start(broken, **given))
        return count

    def test_it_is_tried_twice_and_blames_no_file(self, starts):
        before = held()
        with (
            TorchFiles() as files,
            pytest.raises(Incomplete, match=r"exit code 1: ModuleNotFoundError: No module named 'no_such_module'\)"),
        ):
            files.read(b"any")
        assert len(starts) == 2
        assert held() - before == set()

    def test_an_import_of_many_files_ends_with_it(self, starts, tmp_path):
        trainers.make_source(tmp_path / "data")
        write_simpletuner(tmp_path / "cache", tmp_path / "cache", "sdxl", dtype=torch.float32)
        with pytest.raises(Incomplete):
            cs.import_cache("simpletuner", tmp_path / "cache", store=tmp_path / "store", data=tmp_path / "data", claims={"model": "x"})
        assert len(starts) == 2

    def test_a_python_that_is_gone_is_named(self, tmp_path, monkeypatch):
        monkeypatch.setattr(sys, "executable", str(tmp_path / "gone"))
        with TorchFiles() as files, pytest.raises(Incomplete):
            files.read(b"any")


def test_nothing_is_executed():
    with pytest.raises(EncodeFailed):
        read_torch(saved(Executes()))
    with pytest.raises(EncodeFailed):
        read_torch(pickle.dumps(Executes()))


def test_what_is_neither_tensor_nor_plain_value_is_refused():
    with pytest.raises(EncodeFailed):
        read_torch(saved({"a": {1, 2}}))


def test_a_file_nested_too_deep_is_refused():
    value = torch.zeros(1)
    for _ in range(20):
        value = [value]
    with pytest.raises(EncodeFailed):
        read_torch(saved(value))


def test_files_in_gzip_are_told_by_their_first_bytes_and_bombs_refused(monkeypatch):
    packed = gzip.compress(saved(torch.zeros(4)))
    assert read_torch(packed).tensors["value"][1] == (4,)
    monkeypatch.setattr("cachestore.trainers.torch_files.LARGEST_BYTES", 64)
    with pytest.raises(EncodeFailed):
        read_torch(packed)
    monkeypatch.undo()
    with pytest.raises(EncodeFailed):
        read_torch(packed[:-9])


def test_a_file_above_the_cap_is_refused_without_starting_anything(monkeypatch):
    monkeypatch.setattr("cachestore.trainers.sandbox.LARGEST_BYTES", 3)
    with TorchFiles() as files, pytest.raises(EncodeFailed):
        files.read(b"four")
    assert files._child is None


def test_equal_tensors_make_equal_files():
    tensors = {"a": ("BF16", (2,), b"\x01\x02\x03\x04"), "b": ("I64", (), bytes(8))}
    assert write_torch(tensors, {}) == write_torch(tensors, {})
    assert read_torch(write_torch(tensors, {"fps": 1.5})).values == {"fps": 1.5}
    assert read_torch(write_torch(tensors, {})).tensors == {name: (d, s, bytes(b)) for name, (d, s, b) in tensors.items()}


def test_an_archive_of_many_or_large_arrays_is_refused_before_it_is_unpacked(monkeypatch):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.npy", bytes(1000))
    monkeypatch.setattr("cachestore.trainers.containers.LARGEST_BYTES", 999)
    with pytest.raises(EncodeFailed):
        read_npz(buffer.getvalue())
