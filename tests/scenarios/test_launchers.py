"""A rank is killed under each launcher: what ends, what goes on, and that the same command then finishes. `docs/engines.md` says it."""

import os
import shutil
import subprocess
import sys

import pytest

import cachestore as cs
from tests.fakes import ROOT

pytestmark = [pytest.mark.torch, pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(300)]

KEYS = 24
SCRIPT = f"""
import os, sys, time
from pathlib import Path

import numpy as np

import cachestore as cs

folder = Path(sys.argv[1])
rank = int(os.environ.get("RANK") or os.environ.get("OMPI_COMM_WORLD_RANK") or 0)


def encode(pairs):
    (folder / f"began {{rank}}").touch()
    if rank == 1 and not (folder / "killed").exists():
        (folder / "killed").touch()
        os.kill(os.getpid(), 9)
    while rank == 0 and not (folder / "killed").exists():
        time.sleep(0.05)
    time.sleep(0.2)
    return {{key: {{"value": np.full(4, item)}} for key, item in pairs}}


with cs.open(folder / "store", mode="a") as store:
    cs.fill(store, [(cs.key(str(n)), n) for n in range({KEYS})], encode, batch_size=1)
(folder / f"ended {{rank}}").touch()
"""
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0")
LAUNCHERS = {
    "torchrun": (sys.executable, *TORCHRUN),
    "torchrun, restarts": (sys.executable, *TORCHRUN, "--max-restarts", "1"),
    "mpirun": ("mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2", sys.executable),
}


def start(launcher, folder):
    (folder / "fill.py").write_text(SCRIPT)
    surroundings = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [*LAUNCHERS[launcher], str(folder / "fill.py"), str(folder)]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, env=surroundings)


def stored(folder):
    with cs.open(folder / "store") as store:
        return len(list(store.keys()))


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_killed_rank_ends_the_others_unless_the_launcher_starts_them_again(tmp_path, launcher):
    if shutil.which(LAUNCHERS[launcher][0]) is None:
        pytest.skip(f"{LAUNCHERS[launcher][0]} is not installed")
    ended = start(launcher, tmp_path)
    assert (tmp_path / "killed").exists(), ended.stderr[-2000:]
    is_restarted = "restarts" in launcher
    assert (ended.returncode == 0) == is_restarted, ended.stderr[-2000:]
    assert (stored(tmp_path) == KEYS) == is_restarted
    assert start(launcher, tmp_path).returncode == 0
    assert stored(tmp_path) == KEYS
