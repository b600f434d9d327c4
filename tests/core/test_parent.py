"""How a process of ours notices that the one that started it has ended."""

import os
import signal

import pytest

from cachestore.core.parent import is_orphan
from tests.fakes import program

SOURCE = """
import os, signal, sys, threading, time
from cachestore.core.parent import leave_with
{before}
leave_with({starter}, seconds={seconds}, gone={gone})
time.sleep(50)
"""
IGNORES_ALL = "from cachestore.core.signals import STOPPING; [signal.signal(number, signal.SIG_IGN) for number in STOPPING]"


@pytest.mark.processes
@pytest.mark.parametrize(
    ("given", "code"),
    [
        ({"starter": "os.getppid() + 1"}, -signal.SIGTERM),
        ({"starter": "os.getppid()", "before": "gone = threading.Event(); gone.set()", "gone": "gone"}, -signal.SIGTERM),
        (
            {"starter": "1", "before": IGNORES_ALL, "seconds": "0.05"},
            128 + signal.SIGTERM,
        ),
    ],
    ids=["its starter has ended", "it was told so", "it does not stop"],
)
def test_a_process_leaves_with_the_one_that_started_it(given, code):
    process = program(SOURCE.format(**{"before": "", "gone": "None", "seconds": "60", **given}))
    process.communicate(timeout=50)
    assert process.returncode == code


def test_a_process_that_is_no_worker_may_outlive_its_parent():
    assert not is_orphan(os.getppid())
    assert not is_orphan(os.getppid() + 1)
