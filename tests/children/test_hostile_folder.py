"""In a folder of strangers no command, and no script that lies elsewhere, runs anything of theirs in a process that cachestore starts."""

import os
import subprocess
import sys

import pytest
import torch

from cachestore.cli import COMMANDS
from tests import fakes
from tests.children.hostile import make_hostile, ran
from tests.trainers import trainers
from tests.trainers.simpletuner.files import write_simpletuner

pytestmark = [pytest.mark.processes, pytest.mark.torch]

COMMAND = "import sys\nfrom cachestore.cli import main\nsys.exit(main())\n"
"""What an installed command consists of."""

SCRIPT = """
import sys
import cachestore as cs

def main(data, cache, root):
    assert cs.precompute(data, model="model", store=f"{root}/made").complete
    assert cs.import_cache("simpletuner", cache, store=f"{root}/store", data=data, claims={"model": "x"}).report.encoded
    cs.push(f"{root}/store", f"file://{root}/pushed")
    cs.pull(f"file://{root}/pushed", f"{root}/pulled")
    read = cs.CachedDataset(f"file://{root}/pushed", local=f"{root}/local", generation=1)
    for batch in cs.make_loader(read, batch_size=1, num_workers=1):
        assert batch["sample_id"]

if __name__ == "__main__":
    main(*sys.argv[1:])
"""


@pytest.fixture
def here(tmp_path):
    """What lies outside of the folder: pictures, a trainer's cache with a pickle, a command and a script."""
    trainers.make_source(tmp_path / "data")
    write_simpletuner(tmp_path / "cache", tmp_path / "cache", "sdxl", dtype=torch.float32)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "cachestore").write_text(COMMAND)
    (tmp_path / "bin" / "script.py").write_text(SCRIPT)
    make_hostile(tmp_path / "hostile", tmp_path / "marker")
    return tmp_path


def run_there(here, program, *arguments):
    """Run a program in the folder, with fake encoders."""
    own = {**os.environ, "PYTHONPATH": fakes.PATHS, "FAKE_ENCODERS": "1"}
    command = [sys.executable, str(here / "bin" / program), *map(str, arguments)]
    return subprocess.run(command, cwd=here / "hostile", env=own, capture_output=True, text=True, timeout=200, check=False)


def test_the_folder_is_hostile(here):
    subprocess.run([sys.executable, "-c", "import json"], cwd=here / "hostile", check=True)
    assert "json" in ran(here / "marker")


def test_a_script_that_lies_elsewhere_runs_nothing_of_it(here):
    ended = run_there(here, "script.py", here / "data", here / "cache", here)
    assert (ran(here / "marker"), ended.returncode) == ([], 0), ended.stderr


def asked_of(here) -> dict[str, list[object]]:
    """The arguments of each command, in an order in which they can be run."""
    store, address = here / "store", f"file://{here}/bucket"
    return {
        "precompute": ["precompute", here / "data", "--model", "model", "--store", store],
        **{name: [name, store] for name in ("status", "verify", "repair", "stats", "ls", "gc", "compact")},
        "doctor": ["doctor", store, "--torch"],
        "show": ["show", store, "two.png"],
        "why": ["why", store, "two.png"],
        "report": ["report", store, "-o", here / "page.html"],
        "relocate": ["relocate", store, "--source", f"{here / 'data'}={here / 'data'}"],
        "bench": ["bench", "--host-only"],
        "import": ["import", "simpletuner", here / "cache", "--store", here / "other", "--data", here / "data", "--claim", "model=x"],
        "export": ["export", here / "other", "train", "--format", "simpletuner", "-o", here / "out"],
        "push": ["push", store, address],
        "ls of an address": ["ls", address],
        "pull": ["pull", address, here / "pulled"],
        "cache": ["cache", here / "local"],
        "drop": ["drop", store, "train"],
    }


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_no_command_runs_anything_of_it(here):
    asked = asked_of(here)
    assert {*asked} - {"ls of an address"} == {*COMMANDS}
    ended = {name: run_there(here, "cachestore", *arguments) for name, arguments in asked.items()}
    assert ran(here / "marker") == []
    wrong = {name: (one.returncode, one.stderr) for name, one in ended.items() if one.returncode not in {0, 1} or "Traceback" in one.stderr}
    assert wrong == {}
    assert {name for name, one in ended.items() if one.returncode} <= {"doctor", "cache", "relocate"}, ended
