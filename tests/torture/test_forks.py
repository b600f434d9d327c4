"""Forks of a process that has read, with tensors of real sizes: a child of every kind, and every way to read."""

import pytest
from PIL import Image

from tests.fakes import ROOT
from tests.scenarios.trainers import run_script
from tests.torture.campaign import scratch
from tests.torture.forks import FORKS, READS, build, start

pytestmark = [pytest.mark.torch, pytest.mark.processes]


def test_forked_children_read_as_their_parent_does_in_every_way_and_hang_without_what_keeps_them_in_one_thread():
    points = [(read, number % len(FORKS)) for number, read in enumerate(READS)]
    with scratch() as folder:
        build(folder)
        told = start("has read", folder, points, {}, without=[("a sample", 0)])
    assert told.violations == []
    assert told.without == ["has read, in_fork, a sample: it hangs"]


ENCODING = """
import os, signal, sys
import cachestore as cs
import torch

torch.set_num_threads(4)
torch.ones(1 << 20).exp()
child = os.fork()
if child == 0:
    signal.alarm(50)
    pictures, model, store = sys.argv[1:]
    report = cs.precompute(pictures, model=model, store=store, encode="latents", resolution=256, inline=True)
    os._exit(0 if report.complete and report.encoded == 2 else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.slow
def test_a_forked_child_encodes_though_its_parent_has_computed_in_threads(tmp_path):
    (tmp_path / "pictures").mkdir()
    for number in range(2):
        Image.effect_noise((256, 256), 50 + number).convert("RGB").save(tmp_path / "pictures" / f"{number}.png")
    model = ROOT / "scripts" / "demo_model" / "vae"
    assert run_script(tmp_path, ENCODING, tmp_path / "pictures", model, tmp_path / "store", seconds=55, OMP_NUM_THREADS="(unset)") == "0\n"
