"""Where there is too little memory to load torch or to start a child, a command ends with a sentence that says so."""

import os
import subprocess
import sys

import pytest
import torch
from PIL import Image

from tests.fakes import ROOT
from tests.trainers import trainers
from tests.trainers.simpletuner.files import write_simpletuner

pytestmark = [pytest.mark.processes, pytest.mark.torch, pytest.mark.slow]
VAE = ROOT / "scripts" / "demo_model" / "vae"


@pytest.fixture
def limited(tmp_path):
    """Runs a command in so many MiB of address space."""

    def run(mebibytes, *arguments):
        resource = f"import resource; resource.setrlimit(resource.RLIMIT_AS, ({mebibytes} << 20,) * 2); "
        program = resource + "import sys; from cachestore.cli import main; sys.exit(main(sys.argv[1:]))"
        own = {**os.environ, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", program, *map(str, arguments)]
        return subprocess.run(command, cwd=tmp_path, env=own, capture_output=True, text=True, timeout=100, check=False)

    return run


def check(ended):
    assert ended.returncode == 1, ended
    assert "Traceback" not in ended.stdout + ended.stderr
    assert "free memory" in ended.stderr or "too little memory" in ended.stderr, ended.stderr


@pytest.mark.parametrize("mebibytes", [150, 400, 800])
def test_encoding_ends_with_a_sentence(limited, tmp_path, mebibytes):
    (tmp_path / "data").mkdir()
    Image.new("RGB", (64, 64)).save(tmp_path / "data" / "a.png")
    check(limited(mebibytes, "precompute", "data", "--model", VAE, "--vae", VAE, "--store", "store", "--encode", "latents"))


@pytest.mark.parametrize("mebibytes", [150, 400])
def test_an_import_ends_with_a_sentence(limited, tmp_path, mebibytes):
    trainers.make_source(tmp_path / "data")
    write_simpletuner(tmp_path / "cache", tmp_path / "cache", "sdxl", dtype=torch.float32)
    check(limited(mebibytes, "import", "simpletuner", "cache", "--store", "store", "--data", "data", "--claim", "model=x"))
