"""The lines of `docs/engines.md`, submitted here: torchrun on two nodes of one machine, and SLURM where a cluster answers."""

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import cachestore as cs
from tests.encode import tiny_families
from tests.fakes import ROOT

PICTURES = 40
UNITS = 2 * PICTURES + 1


def answers(*command):
    """Whether a command is there and ends well within ten seconds."""
    try:
        return subprocess.run(command, capture_output=True, timeout=10, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.timeout(400)]
on_slurm = pytest.mark.skipif(
    shutil.which("srun") is None or not answers("srun", "-n", "4", "true"),
    reason="no SLURM cluster answers `srun -n 4 true` here; Debian's slurm-wlm on one machine will do",
)
PAGE = (ROOT / "docs/engines.md").read_text(encoding="utf-8")
COMMANDS = "\n".join(re.findall(r"^```(?:bash)?\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)).replace("\\\n", "")
SCRIPTS = re.findall(r"^```bash\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture
def here(tmp_path):
    """The folder that stands for `/mnt`: photographs with captions, and a tiny SDXL."""
    family = tiny_families.FAMILIES["sdxl"]
    tiny_families.save(family, family.build(), tmp_path / "sdxl")
    (tmp_path / "photos").mkdir()
    for number in range(PICTURES):
        noise = np.random.default_rng(number).integers(0, 255, (64, 96, 3), dtype=np.uint8)
        Image.fromarray(noise).save(tmp_path / "photos" / f"{number}.png")
        (tmp_path / "photos" / f"{number}.txt").write_text(f"picture {number}")
    return tmp_path


def as_here(text, folder, instead):
    """Lines of the page for this folder, this Python, and a machine without GPUs."""
    text = re.sub(r"^#SBATCH --(gpus|cpus).*\n", "", text, flags=re.MULTILINE)
    small = "--resolution 64 --device cpu --batch-size 1"
    text = text.replace("--store /mnt/cache", f"--store /mnt/cache {small}").replace("/mnt/", f"{folder}/")
    text = re.sub(r"(?<!-m )\bcachestore precompute", f"{sys.executable} -m cachestore precompute", text)
    for old, new in instead.items():
        text = text.replace(old, new)
    return text


def environment():
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def submit(folder, script):
    """Submit a script; returns the job's number."""
    path = folder / "job.sh"
    path.write_text(script)
    command = ["sbatch", "--parsable", f"--output={folder}/%A_%a.log", path]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, env=environment(), cwd=folder)
    return ended.stdout.strip()


def wait_for(job, *, until=("",), seconds=300.0):
    """Wait until the queue says one of these states of a job; "" is that it has left the queue."""
    deadline = time.monotonic() + seconds
    while True:
        reported = subprocess.run(["squeue", "-h", "-j", job, "-o", "%T"], capture_output=True, text=True, check=False).stdout.split()
        if (reported[0] if reported else "") in until:
            return
        assert time.monotonic() < deadline, f"job {job} is {reported} after {seconds:.0f} s"
        time.sleep(0.5)


def finished(store):
    """How many partitions are finished."""
    return len(list(Path(store).glob("plans/*/*/ledgers/*")))


def is_complete(folder):
    """Whether the data set holds everything, and everything is sound."""
    logs = "\n".join(path.read_text() for path in folder.glob("*.log"))
    assert (folder / "cache").is_dir(), logs
    assert cs.verify(folder / "cache").ok
    assert len(cs.CachedDataset(folder / "cache")) == PICTURES, logs
    return True


def test_torchrun_on_two_nodes_needs_a_rendezvous_and_no_process_group(here):
    [line] = [line for line in COMMANDS.splitlines() if line.startswith("torchrun --nnodes")]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = shlex.split(as_here(line, here, {"node-0:29400": f"127.0.0.1:{port}", "--nproc-per-node 8": "--nproc-per-node 2"}))
    command = [sys.executable, "-m", "torch.distributed.run", *command[1:], "--json"]
    nodes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment(), cwd=here) for _ in range(2)]
    reported = [node.communicate(timeout=300)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0]
    reports = [json.loads(line) for text in reported for line in text.splitlines() if line.startswith("{")]
    assert len(reports) == 1  # rank 0 alone prints
    assert (reports[0]["complete"], reports[0]["encoded"]) == (True, UNITS)
    assert is_complete(here)


@on_slurm
def test_a_job_of_four_tasks_shares_the_work(here):
    wait_for(submit(here, as_here(SCRIPTS[0], here, {"nodes=2": "nodes=1", "ntasks-per-node=8": "ntasks-per-node=4"})))
    assert is_complete(here)


@on_slurm
def test_an_array_of_four_jobs_shares_the_work(here):
    wait_for(submit(here, as_here(SCRIPTS[1], here, {"array=0-15": "array=0-3"})))
    assert is_complete(here)


@on_slurm
def test_a_job_that_is_requeued_in_the_middle_goes_on(here):
    script = as_here(SCRIPTS[0], here, {"nodes=2": "nodes=1", "ntasks-per-node=8": "ntasks-per-node=2"})
    job = submit(here, script)
    deadline = time.monotonic() + 120
    while finished(here / "cache") < 1:
        assert time.monotonic() < deadline, "nothing was encoded"
        time.sleep(0.02)
    is_over = (here / "cache/catalogs/train/1.safetensors").exists()
    subprocess.run(["scontrol", "requeue", job], check=True, capture_output=True)
    wait_for(job, until=("PENDING", "RUNNING"))
    wait_for(job)
    assert not is_over
    assert is_complete(here)
