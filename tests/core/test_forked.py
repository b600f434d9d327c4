"""In a forked process what reads uses one thread of torch. That a child hangs without it is shown by tests/torture/forks.py."""

import os
import subprocess
import sys

import pytest
import torch

from cachestore.core import forked
from cachestore.core.forked import in_one_thread

pytestmark = pytest.mark.torch

count = in_one_thread(torch.get_num_threads)


@pytest.fixture(autouse=True)
def _threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def as_forked(monkeypatch):
    monkeypatch.setattr(forked, "_is_forked", True)
    monkeypatch.setattr(forked, "_has_read", False)


def test_a_process_that_was_not_forked_keeps_its_threads(monkeypatch):
    monkeypatch.setattr(forked, "_is_forked", False)
    assert (count(), torch.get_num_threads()) == (3, 3)


@pytest.mark.usefixtures("as_forked")
class TestInAForkedProcess:
    def test_the_first_call_sets_one_thread_for_good(self):
        assert (count(), torch.get_num_threads()) == (1, 1)

    def test_a_number_that_is_set_after_it_holds_between_the_calls(self):
        count()
        torch.set_num_threads(2)
        assert (count(), torch.get_num_threads()) == (1, 2)
        assert (count(), torch.get_num_threads()) == (1, 2)

    def test_a_number_that_is_set_after_it_holds_after_an_error(self):
        count()
        torch.set_num_threads(2)
        with pytest.raises(ZeroDivisionError):
            in_one_thread(lambda: 1 // 0)()
        assert torch.get_num_threads() == 2

    def test_a_call_inside_of_another_changes_nothing(self):
        count()
        torch.set_num_threads(2)
        assert (in_one_thread(lambda: (count(), torch.get_num_threads()))(), torch.get_num_threads()) == ((1, 1), 2)

    def test_where_torch_does_not_use_openmp_its_number_is_left_alone(self, monkeypatch):
        monkeypatch.setattr(torch.backends.openmp, "is_available", lambda: False)
        assert (count(), torch.get_num_threads()) == (3, 3)


PROGRAM = """
import os, subprocess, sys
from types import ModuleType

from cachestore.core import forked

def say(name):
    print(name, forked._is_forked, forked._began_as_fork(), flush=True)

def in_child(act):
    child = os.fork()
    if not child:
        act()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0

def with_torch():
    in_child(lambda: say("child after torch"))
    again = [sys.executable, "-c", "from cachestore.core import forked; print('another program', forked._began_as_fork())"]
    subprocess.run(again, check=True)

def import_late():
    del sys.modules["cachestore.core.forked"]
    from cachestore.core import forked as anew
    print("imported in a child", anew._is_forked, flush=True)

say("here")
in_child(lambda: say("child before torch"))
sys.modules["torch"] = ModuleType("torch")
with_torch()
in_child(with_torch)
in_child(import_late)
say("here")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells whether a process was forked")
def test_a_process_is_forked_from_its_fork_on_if_its_parent_had_torch_and_until_it_is_another_program():
    said = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=50, check=True, env={**os.environ})
    assert said.stdout.splitlines() == [
        "here False False",
        "child before torch False True",
        "child after torch True True",
        "another program False",
        "child after torch True True",
        "another program False",
        "imported in a child True",
        "here False False",
    ]
