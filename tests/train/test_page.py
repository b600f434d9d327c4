"""The lines of `docs/loading.md`, run as programs."""

from importlib.util import find_spec

import pytest

from tests.pages import blocks, python_by_title, text_of
from tests.scenarios.trainers import ROWS, data_set

pytestmark = [pytest.mark.torch, pytest.mark.processes]

EPOCHS = 2

BEFORE = """
import sys

import torch
from torch.utils.data import DataLoader

import cachestore as cs

epochs, seen = 2, []


def train(batch):
    seen.extend(batch["sample_id"])
"""
IMPORTS = {
    "accelerate": "from accelerate import Accelerator\n",
    "Stop and resume with accelerate": "from accelerate import Accelerator\n",
    "Lightning Fabric": "from lightning.fabric import Fabric\n",
    "Lightning's Trainer": """
from lightning import LightningModule, Trainer


class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, number):
        train(batch)
        return self.layer(batch["latents"].flatten()[:1]).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


module = Module()
""",
}
AFTER = """
sys.stdout.write(f"seen {len(seen)} {len(set(seen))}\\n")
"""


def programs():
    """The lines under each title that has some."""
    return {title: "\n".join(some) for title, some in python_by_title("loading.md").items()}


LIGHTNING = pytest.mark.skipif(find_spec("lightning") is None, reason="lightning is not installed; the dependency group brings it")


def marks(title):
    """Importing lightning takes seconds."""
    return [LIGHTNING, pytest.mark.slow] if title.startswith("Lightning") else []


def test_the_page_has_lines_for_every_way_to_train():
    assert set(IMPORTS) | {"One process, and plain DDP", "A DataLoader of your own", "Stop and resume"} == set(programs())


@pytest.mark.parametrize("title", [pytest.param(title, marks=marks(title)) for title in programs()])
def test_the_lines_of_the_page_show_every_sample_once_an_epoch(torch_crowd, tmp_path, title):
    data_set(tmp_path / "cache")
    [(_kind, opening)] = blocks(text_of("loading.md").partition("\n## ")[0], "python")
    source = BEFORE + IMPORTS.get(title, "") + opening + programs()[title] + AFTER
    [(code, out)] = torch_crowd.run("tests.scenarios.trainers:run_lines", {"source": source, "cwd": str(tmp_path)})
    epochs = 1 if title.startswith("Stop and resume") else EPOCHS
    assert (code, out.splitlines()[-1]) == (0, f"seen {epochs * len(ROWS)} {len(ROWS)}")
