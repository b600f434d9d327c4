"""Programs without a file of their own, and without a guard."""

import pytest

from cachestore.care.verify import verify
from tests.fakes import ROOT, captioned
from tests.scenarios.trainers import run_script

pytestmark = pytest.mark.processes

CELL = """
import os
import cachestore as cs
with open("runs", "a") as file:
    file.write("run\\n")
report = cs.precompute("data", model="model", store="store", encode=("text", "latents"){options})
print(report.complete, report.wanted, report.encoded)
"""
NOTEBOOK = """
cell = {cell!r}
exec(compile(cell, "<ipython-input-1>", "exec"), {{"__name__": "__main__", "__builtins__": __builtins__}})
"""


@pytest.mark.parametrize("options", ["", ", procs=2"])
def test_precompute_needs_neither_a_file_nor_a_guard(tmp_path, options):
    """Reports of every trainer whose workers are started by multiprocessing: `freeze_support`, `__main__ has no attribute __file__`."""
    captioned(tmp_path / "data", 3)
    notebook = NOTEBOOK.format(cell=CELL.format(options=options))
    assert run_script(tmp_path, notebook, paths=[ROOT / "tests/cli/at_start"], FAKE_ENCODERS="1") == "True 7 7\n"
    assert (tmp_path / "runs").read_text() == "run\n", "nobody ran the program a second time"
    assert verify(tmp_path / "store").ok
