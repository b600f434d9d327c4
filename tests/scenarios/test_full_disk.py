"""A disk that fills up at every stage of the work: a small file system of its own, on which little is left free."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import cachestore as cs
from cachestore.care.collect import collect, compact
from cachestore.core.errors import WriteFailed
from cachestore.core.samples import Sample
from tests import fakes
from tests.fakes import FakeEncoder
from tests.scenarios.parts import value_of
from tests.shares import share

SIZE = 64 << 20
STEP = 16 << 10
MOST = 96 * STEP
"""More than a job takes, so that the last ones go through."""
NAMES = [f"entry {n}" for n in range(20)]


@pytest.fixture
def disk(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.name != "posix" or shutil.which("mount") is None:
        pytest.skip("there is no mount here")
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(folder)], capture_output=True, text=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip(f"a small file system cannot be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def leave(disk: Path, free: int) -> None:
    """Have so many bytes free, and the rest taken by a file beside the store."""
    ballast = disk / "ballast"
    ballast.unlink(missing_ok=True)
    ballast.write_bytes(bytes(max(0, shutil.disk_usage(disk).free - free)))


def fill(root):
    with cs.open(root, mode="a") as store:
        wanted = [(cs.key(name), name) for name in NAMES]
        return cs.fill(store, wanted, lambda batch: {key: {"value": value_of(name)} for key, name in batch}).complete


def run(root):
    root.mkdir(exist_ok=True)
    encoder = FakeEncoder(answer=lambda batch: {key: {"value": value_of(name)} for key, name in batch}, limit=8)
    return fakes.run(root, [Sample(name, captions=(name,)) for name in NAMES], encoder).complete


JOBS = {"fill": fill, "a pass with a plan": run}


def is_clean(root):
    """Nothing but what was being written is amiss."""
    return not (root / "cachestore.json").exists() or {finding.kind for finding in cs.verify(root).findings} <= {"stale-temp"}


def fails_cleanly(disk, work):
    """Whether work ended for want of room; then it says where, and how much is needed."""
    try:
        work()
    except WriteFailed as error:
        text = str(error)
        assert str(disk) in text
        assert re.search(r"\d+ bytes|make room", text), text
        return True
    return False


def sweep(disk, job, *, step):
    """With ever more room: a clean error, or all is there; with enough room the same call finishes. Returns how many failed."""
    failed = 0
    for number, free in enumerate(range(0, MOST, step)):
        root = disk / f"store {number}"
        leave(disk, free)
        failed += fails_cleanly(disk, lambda root=root: job(root))
        assert is_clean(root), free
        (disk / "ballast").unlink()
        assert job(root)
        assert cs.verify(root).ok
        shutil.rmtree(root)
    return failed


@pytest.mark.parametrize("job", share(JOBS, 2))
def test_a_job_on_a_full_disk_says_what_it_needs_and_finishes_once_there_is_room(disk, job):
    assert 0 < sweep(disk, JOBS[job], step=16 * STEP) < MOST // (16 * STEP)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("job", JOBS)
def test_at_every_stage_a_job_on_a_full_disk_says_what_it_needs(disk, job):
    assert 0 < sweep(disk, JOBS[job], step=STEP) < MOST // (STEP)


def test_upkeep_on_a_full_disk_loses_nothing(disk):
    root = disk / "store"
    assert run(root)
    assert fill(root)
    before = {key: value["value"].tobytes() for key, value in values(root)}
    failed = 0
    for free in range(0, MOST, 16 * STEP):
        leave(disk, free)
        failed += fails_cleanly(disk, lambda: compact(root))
        failed += fails_cleanly(disk, lambda: collect(root, apply=True, grace_seconds=0))
        failed += fails_cleanly(disk, lambda: cs.repair(root))
        assert {key: value["value"].tobytes() for key, value in values(root)} == before
    assert failed
    (disk / "ballast").unlink()
    assert cs.verify(root).ok


def values(root):
    with cs.open(root) as store:
        keys = list(store.keys())
        return list(zip(keys, store.get_many(keys, as_numpy=True), strict=True))
