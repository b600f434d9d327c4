"""What one rank does in tests of ranks that must agree: each part is a process forked from one that has torch.

A part says what its loaders gave, as ids, and which error ended it. Two ranks that must agree are told apart by `body["rank"]`.
"""

import hashlib
import io
import logging
import os
from collections.abc import Mapping
from contextlib import redirect_stdout
from datetime import timedelta
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader

import cachestore as cs
from cachestore.train import peers as comparing
from tests.train.stores import Row, make_store, recipes

torch.set_num_threads(1)

BATCH_SIZE = 2
ROWS = [Row(str(number), (f"one {number}", f"two {number}"), bucket=(8, 8) if number % 3 else (16, 8)) for number in range(24)]
KEPT: list[Any] = []
"""Groups and loaders outlive their part, as in `trainings`."""


def write_store(path, rows=24):
    return str(make_store(path, ROWS[:rows], recipes()))


def begin(body: Mapping[str, Any]):
    """Join the process group as a launcher's processes do."""
    rank, world = body["rank"], body["world_size"]
    comparing.DEADLINE_SECONDS = body.get("deadline", 20.0)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    torch.distributed.init_process_group("gloo", init_method=f"file://{body['meeting']}", rank=rank, world_size=world)
    # A rank that ends at once with an error must not do so while others still connect to it.
    store = torch.distributed.distributed_c10d._get_default_store()
    store.set(f"connected/{rank}", "")
    store.wait([f"connected/{other}" for other in range(world)], timedelta(seconds=60))


def open_data(body: Mapping[str, Any]):
    options: Any = {"generation": 1, "captions": "all", **body.get("data", {})}
    if "dtype" in options:
        options["dtype"] = getattr(torch, options["dtype"])
    return cs.CachedDataset(body["store"], **options)


def own_loader(data, options, **more):
    """A DataLoader of the trainer's own."""
    return DataLoader(data, batch_sampler=cs.BucketBatchSampler(data, BATCH_SIZE, **options), collate_fn=data.collate, **more)


def made_loader(body: Mapping[str, Any], data: Any) -> Any:
    """The loader as the body asks for it, with what a framework wraps around it."""
    options = {**body.get("options", {})}
    if body.get("mesh"):
        options["mesh"] = mesh_of(**body["mesh"])
    loader = own_loader(data, options) if body.get("by_hand") else cs.make_loader(data, BATCH_SIZE, **options)
    if (wrapper := body.get("wrapper")) == "accelerate":
        import accelerate.data_loader
        from accelerate import Accelerator
        from accelerate.utils import DataLoaderConfiguration

        if body.get("mesh"):  # as an Accelerator does that has a mesh
            Accelerator(cpu=True)
            return accelerate.data_loader.prepare_data_loader(loader, torch_device_mesh=options["mesh"])
        return Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**body.get("accelerate", {}))).prepare(loader)
    if wrapper == "fabric":
        from lightning.fabric import Fabric
        from lightning.fabric.strategies import DDPStrategy

        fabric = Fabric(accelerator="cpu", devices=body["world_size"], strategy=DDPStrategy(process_group_backend="gloo"))
        fabric.launch()
        return fabric.setup_dataloaders(loader, use_distributed_sampler=False)
    return loader


def mesh_of(shape, names, data=None):
    made = torch.distributed.device_mesh.init_device_mesh("cpu", tuple(shape), mesh_dim_names=tuple(names))
    if data is None:
        return made
    return made["dp"].get_group() if data == "group" else (made, data if isinstance(data, str) else tuple(data))


def caught(act):
    """What the act returns, or the name and the text of the error of ours that ended it."""
    heard: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: heard.append(record.getMessage())
    logging.getLogger("cachestore").addHandler(handler)
    try:
        return {"error": None, "message": "", "said": heard, **act()}
    except cs.CacheStoreError as error:
        return {"error": type(error).__name__, "message": str(error), "said": heard}
    finally:
        logging.getLogger("cachestore").removeHandler(handler)


def ids(batches):
    return [batch["sample_id"] for batch in batches]


def loop(body: Mapping[str, Any]):
    """Some epochs, or the rest of one, of one loader."""
    begin(body)

    def act():
        data = open_data(body)
        loader = made_loader(body, data)
        KEPT.append(loader)
        if body.get("state"):
            loader.load_state_dict(body["state"])
        if body.get("epoch"):
            loader.set_epoch(body["epoch"])
        return {"epochs": [ids(islice(loader, body.get("steps"))) for _epoch in range(body.get("epochs", 1))]}

    return caught(act)


def peers(body: Mapping[str, Any]):
    """As `loop`, with the digest of every value of each batch, and the state after three batches of the second epoch."""
    begin(body)

    def act():
        loader = made_loader(body, open_data(body))
        KEPT.append(loader)
        if body.get("state"):
            sampler_of(loader).load_state_dict(body["state"])
        epochs, digests, state = [], [], None
        for epoch in range(body.get("epochs", 1)):
            batches = []
            for step, batch in enumerate(loader, 1):
                batches.append((batch["sample_id"], digest(batch)))
                if (epoch, step) == (1, 3):
                    state = sampler_of(loader).state_dict(batches_consumed=3)
            epochs.append([one for one, _digest in batches])
            digests.append([one for _ids, one in batches])
        return {"epochs": epochs, "digests": digests, "state": state}

    return caught(act)


def sampler_of(loader):
    sampler = loader.batch_sampler
    return getattr(sampler, "batch_sampler", sampler)


def digest(batch):
    state = hashlib.sha256(repr([batch["sample_id"], batch["caption"]]).encode())
    for name in sorted(batch):
        if isinstance(batch[name], torch.Tensor):
            state.update(name.encode() + batch[name].contiguous().view(torch.uint8).numpy().tobytes())
    return state.hexdigest()


def validate_alone(body: Mapping[str, Any]):
    """Rank 0 validates alone by a loader that no other rank has, twice; each time it makes a new one at the same line."""
    begin(body)

    def act():
        data = open_data(body)
        loader, found = cs.make_loader(data, BATCH_SIZE), []
        training = [ids(islice(loader, 2))]
        for _time in range(2 if body["rank"] == 0 else 0):
            options = body.get("options", {})
            found.append(ids(cs.make_loader(data, BATCH_SIZE, shuffle=False, rank=0, num_replicas=1, **options)))
            comparing.DEADLINE_SECONDS = 1000.0  # would be a hang if the second one waited
        return {"epochs": [*training, *found]}

    return caught(act)


def in_other_orders(body: Mapping[str, Any]):
    """Ranks begin two loaders, one after the other, in different orders."""
    begin(body)

    def act():
        data = open_data(body)
        loaders = [cs.make_loader(data, BATCH_SIZE, seed=3), cs.make_loader(data, BATCH_SIZE, seed=4)]
        order = [0, 1] if body["rank"] == 0 else [1, 0]
        found = {number: ids(loaders[number]) for number in order}
        return {"epochs": [found[0], found[1]]}

    return caught(act)


def resume_later(body: Mapping[str, Any]):
    """After its first batches one rank loads a state that the other one does not have."""
    begin(body)

    def act():
        data = open_data(body)
        loader = cs.make_loader(data, BATCH_SIZE)
        ids(islice(loader, 2))
        loader.load_state_dict({**loader.state_dict(), "epoch": body["rank"], "consumed": 0})
        return {"epochs": [ids(loader)]}

    return caught(act)


def trainer_of_transformers(body: Mapping[str, Any]):
    """Hugging Face's Trainer over the data set itself, or over our loader as the docs say."""
    begin(body)
    import transformers

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)
            self.seen: list[list[str]] = []

        def forward(self, latents, sample_id, **_others):
            self.seen.append(list(sample_id))
            return {"loss": self.layer(latents.float().flatten(1).mean(1, keepdim=True)).mean()}

    data, model = open_data(body), Model()

    class Trainer(transformers.Trainer):
        def get_train_dataloader(self):
            if body["is_ours"]:
                return self.accelerator.prepare(cs.make_loader(data, BATCH_SIZE, "accelerate"))
            return super().get_train_dataloader()

    def act():
        arguments = transformers.TrainingArguments(
            body["folder"], use_cpu=True, report_to=[], num_train_epochs=1, per_device_train_batch_size=BATCH_SIZE, save_strategy="no",
            disable_tqdm=True, remove_unused_columns=False, ddp_backend="gloo",
        )  # fmt: skip
        with redirect_stdout(io.StringIO()):  # the crowd speaks there
            Trainer(model, arguments, train_dataset=data.select([n for n in range(24) if n % 3])).train()
        return {"epochs": [model.seen]}

    return caught(act)
