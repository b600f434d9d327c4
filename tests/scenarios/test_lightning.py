"""Lightning's ranks take different paths around `launch()`, and nobody waits for anybody in ours."""

from importlib.util import find_spec

import pytest

from tests.scenarios.trainers import data_set, run_script

pytestmark = [
    pytest.mark.torch,
    pytest.mark.slow,  # each of two processes imports all of lightning, one after the other
    pytest.mark.skipif(
        find_spec("lightning") is None, reason="lightning is not installed; the dependency group `lightning` brings it (37 MB)"
    ),
]

FABRIC = """
import os, sys, time
import numpy
import cachestore as cs
from lightning.fabric import Fabric

root, order = sys.argv[1:]
wanted = [(cs.key(str(number)), number) for number in range(200)]


def fill():
    with cs.open(root, mode="a") as store:
        return cs.fill(store, wanted, lambda batch: {key: {"value": numpy.array([number])} for key, number in batch})


fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
rank = int(os.environ.get("LOCAL_RANK", "0"))
if order == "before" and rank == 0:  # the first process fills when the other does not exist yet
    first = fill()
fabric.launch()
assert fabric.global_rank == rank
if order == "alone" and rank == 0:  # rank 0 comes when rank 1 has finished, which therefore cannot have waited for it
    deadline = time.monotonic() + 40
    while not os.path.exists("rank 1 is through"):
        assert time.monotonic() < deadline, "rank 1 waits for rank 0"
        time.sleep(0.05)
report = fill()
if rank == 1:
    open("rank 1 is through", "w").close()
fabric.barrier()
with cs.open(root) as store:
    assert len(store) == 200
sys.stdout.write(f"{rank} {report.complete} {report.wanted}\\n")
"""


@pytest.mark.parametrize("order", ["alone", "before"])
def test_rank_1_does_not_wait_for_rank_0(tmp_path, order):
    """Lightning PR #16204 and Fabric #20536: rank 1 stands in a barrier that rank 0, in its own preparation, never reaches."""
    out = run_script(tmp_path, FABRIC, tmp_path / "store", order)
    assert sorted(line for line in out.splitlines() if line.endswith("True 200")) == ["0 True 200", "1 True 200"]


TRAINER = """
import sys
import numpy, torch
import cachestore as cs
import lightning as L
from torch.utils.data import DataLoader

root, filled = sys.argv[1:]


class Data(L.LightningDataModule):
    def prepare_data(self):  # on rank 0 alone
        with cs.open(filled, mode="a") as store:
            cs.fill(store, [(cs.key("a"), 1)], lambda batch: {key: {"value": numpy.array([number])} for key, number in batch})

    def setup(self, stage):  # on every rank
        with cs.open(filled, mode="a") as store:
            wanted = [(cs.key("a"), 1), (cs.key("b"), 2)]
            self.report = cs.fill(store, wanted, lambda batch: {key: {"value": numpy.array([number])} for key, number in batch})

    def train_dataloader(self):
        data = cs.CachedDataset(root)
        sampler = cs.BucketBatchSampler(data, batch_size=4, rank=self.trainer.global_rank, num_replicas=self.trainer.world_size)
        return DataLoader(data, batch_sampler=sampler, collate_fn=data.collate, num_workers=1, multiprocessing_context="fork")


class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen = []

    def training_step(self, batch, number):
        self.seen += batch["sample_id"]
        return self.layer(batch["latents"].flatten()[:1].float()).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


data, model = Data(), Model()
trainer = L.Trainer(
    accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
    use_distributed_sampler=False, enable_model_summary=False,
)
trainer.fit(model, datamodule=data)
sys.stdout.write(f"rank {trainer.global_rank} {data.report.complete} {len(model.seen)}\\n")
"""


def test_a_lightning_trainer_fills_in_its_hooks_and_reads_its_batches(tmp_path):
    """The same with the Trainer: `prepare_data` on one rank, `setup` on all, and every rank reads half of the samples."""
    out = run_script(tmp_path, TRAINER, data_set(tmp_path / "store"), tmp_path / "filled")
    assert sorted(line for line in out.splitlines() if line.startswith("rank")) == ["rank 0 True 12", "rank 1 True 12"]
