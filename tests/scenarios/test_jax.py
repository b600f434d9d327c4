"""JAX has compiled something, and has its threads, before a DataLoader forks."""

from importlib.util import find_spec

import pytest

from tests.scenarios.trainers import data_set, run_script

pytestmark = [
    pytest.mark.torch,
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("jax") is None, reason="jax is not installed; the dependency group `jax` brings it (380 MB)"),
]

TRAINER = """
import sys
import jax, jax.numpy
print(float(jax.jit(lambda x: (x @ x).sum())(jax.numpy.ones((300, 300)))) == 300.0**3)
from torch.utils.data import DataLoader
import cachestore as cs

data = cs.CachedDataset(sys.argv[1])
for epoch in range(3):
    batches = DataLoader(data, batch_size=4, collate_fn=data.collate, num_workers=2, multiprocessing_context="fork")
    print(sorted(name for batch in batches for name in batch["sample_id"]) == sorted(data.ids))
"""


def test_a_forking_loader_reads_after_jax_has_compiled(tmp_path):
    """NerfStudio: a trainer that imported JAX for one function forks its loader, and hangs now and then."""
    assert run_script(tmp_path, TRAINER, data_set(tmp_path / "store"), JAX_PLATFORMS="cpu") == "True\n" * 4
