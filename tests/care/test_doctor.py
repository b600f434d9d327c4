"""Doctor: it names what stands in the way, says what to do, and leaves nothing behind."""

import multiprocessing.util
import os
import sys
import tempfile
from pathlib import Path

import pytest
import tomllib
from packaging.requirements import Requirement

from cachestore.care import doctor
from cachestore.care.doctor import NOTE, OK, PROBLEM, default_start_method, examine, file_system_of
from cachestore.store.write.commit import create_store
from tests.care.test_collect import run
from tests.fakes import ROOT, refusing


def check(name, store=None, **options):
    """The one check of a name."""
    [found] = [check for check in examine(store, **options) if check.name == name]
    return found


def test_without_a_store_it_looks_at_the_machine_alone():
    names = [check.name for check in examine()]
    assert {"python", "packages", "start method", "gpu", "open files"} <= set(names)
    assert "publish" not in names
    assert len(names) == len(set(names))


def test_a_sound_store_has_no_problem_and_is_left_as_it_was(layout):
    before = sorted(layout.root.rglob("*"))
    found = {check.name: check.state for check in examine(layout.root)}
    assert [name for name in ("publish", "rename", "locks", "clock") if found[name] != OK] == []
    assert sorted(layout.root.rglob("*")) == before


def test_a_file_system_without_links_is_worth_a_note_and_no_more(layout, monkeypatch):
    monkeypatch.setattr(os, "link", refusing(95))
    found = check("publish", layout.root)
    assert (found.state, "check and rename" in found.found) == (NOTE, True)


def test_a_file_system_that_links_over_a_taken_name_is_a_problem(layout, monkeypatch):
    monkeypatch.setattr(Path, "hardlink_to", lambda self, target: self.write_bytes(target.read_bytes()))
    assert check("publish", layout.root).state == PROBLEM


@pytest.mark.parametrize("name", ["fsync", "rename"])
def test_what_is_refused_is_a_problem_with_advice(layout, monkeypatch, name):
    monkeypatch.setattr(os, name, refusing(5))
    found = check("publish" if name == "fsync" else "rename", layout.root)
    assert found.state == PROBLEM
    assert "another file system" in found.advice


def test_a_store_that_cannot_be_written_can_be_read(layout, monkeypatch):
    monkeypatch.setattr(Path, "write_bytes", refusing(30))
    found = check("publish", layout.root)
    assert (found.state, found.advice.startswith("reading works")) == (PROBLEM, True)


def test_locks_that_keep_nobody_out_are_worth_a_note(layout, monkeypatch):
    class Granted:
        def __init__(self, *_arguments, **_named):
            self.is_held = True

        def __enter__(self):
            return self

        def __exit__(self, *_error):
            pass

    monkeypatch.setattr(doctor, "LifeLock", Granted)
    assert check("locks", layout.root).state == NOTE


def test_a_clock_that_is_off_is_worth_a_note(layout, monkeypatch):
    real = doctor.time.time
    monkeypatch.setattr(doctor.time, "time", lambda: real() + 60)
    found = check("clock", layout.root)
    assert (found.state, "-60" in found.found or "-59" in found.found) == (NOTE, True)


def test_a_catalog_that_is_gone_is_a_problem(tmp_path):
    run(tmp_path / "store", "a")
    create_store(tmp_path / "store").catalog("train", 1).unlink()
    found = check("catalogs", tmp_path / "store")
    assert (found.state, "repair" in found.advice) == (PROBLEM, True)


def test_missing_packages_are_named(monkeypatch):
    real = doctor.version

    def without(name):
        if name in {"ftfy", "lmdb"}:
            raise doctor.PackageNotFoundError
        return real(name)

    monkeypatch.setattr(doctor, "version", without)
    assert (check("packages").state, "lmdb" in check("packages").advice) == (PROBLEM, True)
    assert (check("encoding").state, "ftfy" in check("encoding").advice) == (PROBLEM, True)


def test_the_packages_that_are_looked_for_are_those_that_installing_brings():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed, encode = (
        {one.name for one in map(Requirement, listed) if one.marker is None or one.marker.evaluate()}
        for listed in (project["dependencies"], project["optional-dependencies"]["encode"])
    )
    assert set(doctor._NEEDED) == needed
    assert set(doctor._CLEANERS) <= encode <= set(doctor._ENCODING)


@pytest.mark.parametrize(
    ("environment", "modules", "name"),
    [({"TOKENIZERS_PARALLELISM": "true"}, {"tokenizers": sys}, "tokenizers"), ({}, {"jax": sys}, "jax"), ({"RANK": "3"}, {}, "rank")],
)
def test_what_makes_a_forked_worker_hang_or_a_rank_unknown_is_noted(monkeypatch, environment, modules, name):
    monkeypatch.setattr(doctor, "default_start_method", lambda *_: "fork")
    found = {check.name: check for check in doctor._process(environment, modules)}
    assert found[name].state == NOTE
    assert found[name].advice
    assert {check.state for check in doctor._process({}, {}) if check.name != "start method"} == {OK}


@pytest.mark.parametrize(
    ("system", "python", "method"),
    [("linux", (3, 11), "fork"), ("linux", (3, 14), "forkserver"), ("darwin", (3, 11), "spawn"), ("win32", (3, 14), "spawn")],
)
def test_how_workers_start_by_default_follows_the_system_and_the_python(system, python, method):
    assert default_start_method(system, python) == method


@pytest.mark.parametrize(
    ("path", "kind"), [("/", "ext4"), ("/data/a", "nfs4"), ("/data two/a", "tmpfs"), ("/database", "ext4"), ("/data/x/y", "xfs")]
)
def test_a_path_lies_on_the_innermost_mount(path, kind):
    mounts = "/dev/a / ext4 rw\nserver:/ /data nfs4 rw\nnone /data\\040two tmpfs rw\nold /data/x ext2 rw\nnew /data/x xfs rw\nbroken\n"
    assert file_system_of(Path(path), mounts) == kind
    assert file_system_of(Path(path), "") == "unknown"


@pytest.mark.processes
def test_torch_is_asked_in_a_process_of_its_own_and_its_failure_is_reported(monkeypatch, tmp_path):
    (tmp_path / "torch.py").write_text("class cuda:\n    device_count = int\nclass version:\n    cuda = None\n__version__ = '9'\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert (check("torch", ask_torch=True).state, check("torch", ask_torch=True).found) == (OK, "torch 9 with CUDA None sees no GPU")
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart')")
    found = check("torch", ask_torch=True)
    assert (found.state, "ImportError: libcudart" in found.found, "Traceback" in found.found) == (PROBLEM, True, False)
    (tmp_path / "torch.py").write_text("import time; time.sleep(60)")
    monkeypatch.setattr(doctor, "_TORCH_SECONDS", 0.2)
    assert check("torch", ask_torch=True).state == PROBLEM
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nothing"))
    assert check("torch", ask_torch=True).state == PROBLEM


def test_a_system_that_cannot_filter_calls_is_worth_a_note(monkeypatch):
    monkeypatch.setattr(doctor.wall, "is_available", lambda: False)
    found = check("wall")
    assert (found.state, "limits on memory" in found.found, "Linux" in found.advice) == (NOTE, True, True)


def test_a_folder_for_temporary_files_that_is_too_long_for_workers_is_worth_a_note(monkeypatch):
    monkeypatch.delattr(multiprocessing.util, "_get_base_temp_dir", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", "/tmp")
    assert check("temporary files").state == OK
    monkeypatch.setattr(tempfile, "tempdir", "/tmp/".ljust(76, "x"))
    assert (check("temporary files").state, "shorter" in check("temporary files").advice) == (NOTE, True)
