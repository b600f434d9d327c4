"""What every test gets without asking: no waiting for disks, and no deadlines for generated examples. And processes that fork fast."""

import gc
import os
import pathlib
import re
import signal
import sys

import pytest
from hypothesis import settings

from cachestore.core.signals import STOPPING

settings.register_profile("cachestore", deadline=None, max_examples=40)
settings.register_profile("fast", deadline=None, max_examples=10)  # scripts/test.py --fast
settings.load_profile("cachestore")


def late(name):
    """A call of `os` that is looked up when it is made."""
    return lambda *arguments, **named: getattr(os, name)(*arguments, **named)  # noqa: PLW0108 - not looked up before


if sys.version_info < (3, 11):  # its pathlib keeps the calls of `os` as they were at its import, but tests replace them
    for name in ("chmod", "link", "listdir", "mkdir", "rename", "replace", "rmdir", "scandir", "stat", "unlink"):
        setattr(pathlib._normal_accessor, name, late(name))  # pyright: ignore[reportAttributeAccessIssue]

ABOUT_TORCH = re.compile(r"^pytestmark = (\[[^\]]*)?pytest\.mark\.torch\b", re.MULTILINE)


def _leaves_out_torch(config):
    return "not torch" in config.option.markexpr.split(" and ")


def pytest_configure(config):
    """Where tests of torch are left out, importing it fails: a test that does so without the mark would cost all others seconds.

    A signal that the shell ignores, as `nohup` and `&` do, would be ignored by every process of a test.
    """
    for number in STOPPING:
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    if _leaves_out_torch(config):
        sys.modules["torch"] = None  # pyright: ignore[reportArgumentType] - Python takes it: an import then fails


def pytest_ignore_collect(collection_path, config):
    """Files that are about torch as a whole are not even imported where no test of theirs is wanted: torch alone takes seconds."""
    is_left_out = _leaves_out_torch(config) and collection_path.match("test_*.py")
    return True if is_left_out and ABOUT_TORCH.search(collection_path.read_text(encoding="utf-8")) else None


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Nothing of thousands of modules and tests is garbage: neither while they are collected nor in any later search for it."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    """Tests of encoding come first and together: one process loads transformers and diffusers and builds tiny models, and not each.

    Then those that share one interpreter with torch, and those beside this file, of which several parse the whole package.
    """
    items.sort(key=lambda one: ("/encode/" not in one.nodeid, "torch_crowd" not in one.fixturenames, one.nodeid.count("/") > 1))


@pytest.fixture(scope="session", autouse=True)
def _no_waiting_for_disks():
    """A sync costs 10 ms and no test cuts the power. Tests about syncing count or fail the calls; programs in subprocesses do sync."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", os.fstat)
        yield


@pytest.fixture(scope="session", autouse=True)
def _new_files_stay_new():
    """However slow the machine is: files that a test has just made do not grow old enough between two of its calls to be trusted.

    A test that sets a file's modification time back makes it old: no program can set the change time back.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cachestore.files.stat_record.WRITTEN_SECONDS", 3600)
        patch.setattr("cachestore.files.stat_record.CHANGED_SECONDS", 0)
        yield


@pytest.fixture
def root(tmp_path):
    return tmp_path / "store"


@pytest.fixture
def layout(root):
    from cachestore.store.write.commit import create_store

    return create_store(root)


@pytest.fixture
def makers(monkeypatch):
    """Fake encoders for `precompute`: those that were made in this process; the processes that commands start make their own."""
    from tests import fakes

    makers = fakes.Makers()
    monkeypatch.setattr("cachestore.jobs.plan.planning.make_encoders", makers)
    fakes.fake_processes(monkeypatch)
    return makers


@pytest.fixture
def work_here(makers, monkeypatch):
    """As `makers`, with a worker's part done in this process: for tests of what a command says."""
    from tests import fakes

    fakes.work_here(monkeypatch)
    return makers


@pytest.fixture
def torch_files_read_here(monkeypatch):
    """The process that reads files with pickles is test_sandbox's: starting one takes seconds."""
    from cachestore.trainers.torch_files import read_torch

    monkeypatch.setattr("cachestore.trainers.sandbox.TorchFiles.read", lambda _files, data: read_torch(data))


@pytest.fixture(scope="session")
def torch_crowd(tmp_path_factory):
    """Processes with torch, accelerate and the parts of tests of trainings, which take seconds to import."""
    from tests.scenarios.crowd import Crowd

    parts = ("scenarios.collectives", "scenarios.trainers", "train.ranks", "train.trainings")
    crowd = Crowd(tmp_path_factory.mktemp("ranks"), *(f"tests.{part}" for part in parts), "accelerate", end_seconds=75)
    yield crowd
    crowd.close()


@pytest.fixture(scope="session")
def one_zygote(tmp_path_factory):
    from tests.fakes import Zygote

    zygote = Zygote(tmp_path_factory.mktemp("zygote"))
    yield zygote
    zygote.close()


@pytest.fixture
def zygote(one_zygote):
    one_zygote.log()
    return one_zygote
