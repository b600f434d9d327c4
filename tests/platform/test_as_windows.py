"""The store, `fill`, upkeep, children and a whole run, each in processes that lack what Windows lacks (`as_windows`).

On Windows itself, and on macOS, the same programs run as they are.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def run(name, folder, seconds=55):
    (folder / "pids").mkdir()
    (folder / "work").mkdir()
    variables = {**os.environ, "AS_WINDOWS_FOLDER": str(folder / "pids"), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    paths = [str(HERE.parents[1])]
    if sys.platform == "linux":
        paths.insert(0, str(HERE / "site"))
    variables["PYTHONPATH"] = os.pathsep.join(paths)
    line = [sys.executable, str(HERE / "programs.py"), name, str(folder / "work")]
    ended = subprocess.run(line, env=variables, capture_output=True, text=True, encoding="utf-8", timeout=seconds, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_values_are_put_read_verified_and_examined(tmp_path):
    run("store", tmp_path)


@pytest.mark.processes
def test_two_ranks_fill_a_store_and_one_that_is_ended_costs_no_wait(tmp_path):
    run("fill", tmp_path)


def test_a_store_is_repaired_compacted_and_collected_although_its_segments_are_read_only(tmp_path):
    run("tidy", tmp_path)


def test_a_file_in_use_is_waited_for_and_named_if_it_stays(tmp_path):
    run("in_use", tmp_path)


@pytest.mark.processes
def test_a_worker_stops_when_it_is_asked_and_when_its_starter_was_ended(tmp_path):
    run("stop", tmp_path)


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.timeout(300)
def test_a_tiny_model_is_encoded_by_two_ranks_read_by_two_workers_exported_pushed_pulled_and_dropped(tmp_path):
    run("model", tmp_path, seconds=280)
