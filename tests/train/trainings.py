"""What the ranks of small trainings do: each part is one rank, in a process forked from one that has torch. Returns what it was shown.

The data set has 1,003 samples in 7 uneven buckets; a sample's id begins with its bucket, so that a mixed batch shows in its ids.
"""

import math
import os
from collections.abc import Mapping
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist

import cachestore as cs
from tests.train.stores import Row, make_store, recipes

torch.set_num_threads(1)

COUNTS = {(8, 8): 401, (8, 16): 256, (16, 8): 152, (16, 16): 97, (24, 8): 64, (8, 24): 32, (24, 16): 1}
ROWS = [Row(f"{width}x{height}/{number}", bucket=(width, height)) for (width, height), count in COUNTS.items() for number in range(count)]
BATCH_SIZE = 8
WHOLE_BATCHES = sum(count // BATCH_SIZE for count in COUNTS.values())
"""125, which go round neither 2 nor 3 ranks. What is over after each bucket's last whole batch no epoch holds."""


KEPT: list[Any] = []
"""Wrapped models, which outlive their process group: the last owner of a gloo group waits for its thread while it holds the
interpreter's lock, which that thread may be waiting for (torch 2's Reducer; one rank in about a hundred on a busy machine)."""


def write_data_set(path):
    return make_store(path, ROWS, recipes(family=None, stored="mean"))


def open_data(body: Mapping[str, Any]):
    return cs.CachedDataset(body["store"], generation=body.get("generation", 1), latents="raw")


def join_group(body: Mapping[str, Any]):
    torch.distributed.init_process_group("gloo", init_method=f"file://{body['meeting']}", rank=body["rank"], world_size=body["world_size"])


class Model(torch.nn.Module):
    """One weight, so that each step is a collective: a rank with another number of steps would wait for good."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def forward(self, latents):
        return self.layer(latents.flatten(1).mean(1, keepdim=True)).mean()


def ddp(body: Mapping[str, Any]):
    """Plain torch: epochs from where a state is, or its rest, or some steps of it. Returns the batches' ids by epoch, and the state."""
    if body["world_size"] > 1:
        join_group(body)
    loader = cs.make_loader(open_data(body), BATCH_SIZE, **body.get("options", {}))
    model: Any = Model()
    if body["world_size"] > 1:
        model = torch.nn.parallel.DistributedDataParallel(model)
        KEPT.append(model)
    if body.get("state"):
        loader.load_state_dict(body["state"])
    left_out, epochs = loader.batch_sampler.left_out, []
    for _epoch in range(body.get("epochs", 1)):
        epochs.append([])
        for batch in islice(loader, body.get("steps")):
            model(batch["latents"]).backward()
            epochs[-1].append(batch["sample_id"])
        # An `islice` that is full does not ask for the end: the state is that of a run that stopped in the middle.
    state = loader.state_dict()
    if dist.is_initialized():
        dist.destroy_process_group()
    return {"epochs": epochs, "state": state, "left_out": left_out, "steps": len(loader)}


def accelerated(body: Mapping[str, Any]):
    """A loop as in diffusers' training scripts: accumulated gradients, gathered losses, an interruption and the skipping of batches."""
    from accelerate import Accelerator

    join_group(body)
    os.environ |= {"RANK": str(body["rank"]), "LOCAL_RANK": str(body["rank"]), "WORLD_SIZE": str(body["world_size"])}
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    assert accelerator.num_processes == body["world_size"]
    raw = cs.make_loader(open_data(body), BATCH_SIZE, **body.get("options", {}))
    sampler = raw.batch_sampler
    model = Model()
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 1e-3), raw)
    KEPT.append(model)
    updates_in_epoch = math.ceil(len(loader) / accelerator.gradient_accumulation_steps)
    first_epoch, skipped, way = body.get("first_epoch", 0), body.get("skipped", 0), body.get("way", "")
    if way == "state":
        sampler.load_state_dict(body["state"])
    epochs, updates, state = [], 0, {}
    for epoch in range(first_epoch, body["epochs"]):
        epochs.append([])
        active = loader
        if way == "skip":
            loader.set_epoch(epoch)
            if epoch == first_epoch:
                active = accelerator.skip_first_batches(loader, skipped)
        for step, batch in enumerate(active, 1):
            with accelerator.accumulate(model):
                loss = model(batch["latents"])
                gathered: Any = accelerator.gather(loss.detach().repeat(len(batch["latents"])))
                assert torch.isfinite(gathered).all()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            updates += accelerator.sync_gradients
            epochs[-1].append(batch["sample_id"])
            if (epoch, step) == tuple(body.get("saves_at", ())):
                state = sampler.state_dict(batches_consumed=step)
            if epoch > first_epoch and step == body.get("steps"):
                break
    dist.destroy_process_group()
    return {"epochs": epochs, "state": state, "updates": updates, "updates_in_epoch": updates_in_epoch, "steps": len(loader)}


def forgotten(body: Mapping[str, Any]):
    """Under accelerate, iterating what was not prepared. Returns the error."""
    from accelerate import Accelerator

    join_group(body)
    Accelerator(cpu=True)
    loader = cs.make_loader(open_data(body), BATCH_SIZE)
    try:
        return len(list(loader))
    except cs.BadInput as error:
        return str(error)
    finally:
        dist.destroy_process_group()


def fabric(body: Mapping[str, Any]):
    """Lightning Fabric over ranks that a launcher started."""
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import DDPStrategy

    join_group(body)
    made = Fabric(accelerator="cpu", devices=body["world_size"], strategy=DDPStrategy(process_group_backend="gloo"))
    made.launch()
    raw = cs.make_loader(open_data(body), BATCH_SIZE, **body.get("options", {}))
    refused = ""
    try:
        made.setup_dataloaders(raw)
    except TypeError as error:
        refused = str(error)
    loader: Any = made.setup_dataloaders(raw, use_distributed_sampler=False)
    if body.get("state"):
        raw.load_state_dict(body["state"])
    plain = Model()
    model, _optimizer = made.setup(plain, torch.optim.SGD(plain.parameters(), 1e-3))
    KEPT.append(model)
    epochs = []
    for _epoch in range(body["epochs"]):
        epochs.append([])
        for batch in islice(loader, body.get("steps")):
            made.backward(model(batch["latents"]))
            epochs[-1].append(batch["sample_id"])
    dist.destroy_process_group()
    return {"epochs": epochs, "state": raw.state_dict(), "refused": refused, "steps": len(loader)}


def trainer(body: Mapping[str, Any]):
    """Lightning's Trainer; the loader is made before the ranks know of each other."""
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = Model()
            self.epochs = {}

        def training_step(self, batch, _number):
            self.epochs.setdefault(self.trainer.current_epoch, []).append(batch["sample_id"])
            return self.model(batch["latents"])

        def on_train_batch_end(self, outputs, batch, batch_idx):
            if self.trainer.global_step == body.get("saves_at"):
                self.trainer.save_checkpoint(body["saves_to"])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 1e-3)

    module = Module()
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    loader = cs.make_loader(open_data(body), BATCH_SIZE, "lightning", **body.get("options", {}))
    join_group(body)
    strategy = lightning.pytorch.strategies.DDPStrategy(process_group_backend="gloo")  # pyright: ignore[reportAttributeAccessIssue]
    fitting = lightning.Trainer(
        accelerator="cpu", devices=body["world_size"], strategy=strategy, use_distributed_sampler=False, max_epochs=body["epochs"], **quiet
    )
    fitting.fit(module, loader, ckpt_path=body.get("checkpoint"))
    return {"epochs": list(module.epochs.values()), "steps": len(loader)}
