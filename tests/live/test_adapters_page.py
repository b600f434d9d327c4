"""The trainer and the adapter of docs/adapters.md, run as the page says."""

import ast
import os
import shlex
import subprocess
import sys

import numpy as np
import pytest
import torch

from tests import fakes
from tests.pages import python_by_title, text_of

pytestmark = [pytest.mark.torch, pytest.mark.processes]

TRAIN = """
import glob, sys
import torch
from painter.caching import Latents
torch.manual_seed(0)
latents = Latents("latents", torch.nn.Linear(4, 2), scale=float(sys.argv[1]))
latents.prepare(sorted(glob.glob("photos/*.npy")))
print([round(float(latents.load(file).sum()), 4) for file in latents.files.values()])
"""


@pytest.fixture
def place(tmp_path):
    """The folder of a training, with what the page says in it."""
    [trainer], [adapter] = (python_by_title("adapters.md")[title] for title in ("The trainer", "The adapter"))
    files = {"painter/__init__.py": "", "painter/caching.py": trainer, "painter_live.py": adapter, "train.py": TRAIN}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    for folder in ("photos", "latents"):
        (tmp_path / folder).mkdir()
    for number in range(3):
        np.save(tmp_path / f"photos/{number}.npy", np.full((2, 4), number, np.float32))
    return tmp_path


def run(place, *arguments):
    """(exit code, what was printed, last line of stderr) of the page's command."""
    [command] = [line for line in text_of("adapters.md").split("`") if line.startswith("python -m cachestore.live")]
    _python, *words = shlex.split(command)
    environment = {**os.environ, "PYTHONPATH": str(fakes.ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *words, *arguments], cwd=place, env=environment, capture_output=True, text=True, check=False, timeout=50
    )
    return done.returncode, done.stdout, (done.stderr.splitlines() or [""])[-1]


def test_the_adapter_of_the_page_reuses_what_is_there_and_notices_what_changed(place):
    torch.manual_seed(0)
    vae = torch.nn.Linear(4, 2)
    code, first, line = run(place, "1")
    with torch.inference_mode():
        expected = [round(float(vae(torch.full((2, 4), number)).sum()), 4) for number in (0.0, 1.0, 2.0)]
    assert (code, ast.literal_eval(first)) == (0, expected)
    assert "latents: 0 reused, 3 encoded" in line
    assert os.listdir(place / "latents") == []
    np.save(place / "photos/1.npy", np.full((2, 4), 7, np.float32))
    code, second, line = run(place, "1")
    assert "latents: 2 reused, 1 encoded" in line
    changed = [one != two for one, two in zip(*map(ast.literal_eval, (first, second)), strict=True)]
    assert changed == [False, True, False]


@pytest.mark.slow
def test_another_setting_makes_other_values(place):
    run(place, "1")
    assert "latents: 0 reused, 3 encoded" in run(place, "0.5")[2]


def test_a_reader_that_changes_values_is_found_before_anything_is_encoded(place):
    caching = place / "painter/caching.py"
    caching.write_text(f"{caching.read_text()}\n\nclass Turned(Latents):\n    def load(self, file):\n        return super().load(file).T\n")
    (place / "train.py").write_text(TRAIN.replace("Latents", "Turned"))
    code, out, line = run(place, "1")
    assert (code, out) == (2, "")
    assert "self-test: painter.caching.Latents.load" in line


def test_the_trainers_own_reader_is_tried(place):
    caching = place / "painter/caching.py"
    caching.write_text(caching.read_text().replace("np.load(file)", "np.load(file).T"))
    code, out, line = run(place, "1")
    assert (code, out) == (2, "")
    assert "self-test: painter.caching.Latents.load" in line
