"""Ranks of `torch.multiprocessing.spawn` that leave a loader in use and destroy their process group end well.

Without `destroy_process_group`, torch itself sometimes aborts: see `spawned_ranks`, which counts it.
"""

import json
import os
import subprocess
import sys

import pytest

from tests.fakes import ROOT
from tests.scenarios.trainers import data_set

pytestmark = [pytest.mark.torch, pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(600)]

RUNS = 10


def test_ranks_that_leave_a_loader_in_use_end_well(tmp_path):
    arguments = [str(RUNS), "--store", str(data_set(tmp_path / "store")), "--destroy"]
    surroundings = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.scenarios.spawned_ranks", *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=580, check=True, env=surroundings)
    assert json.loads(ended.stdout) == {"well": RUNS}
