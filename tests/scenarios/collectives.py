"""Parts of a process group whose collectives are forbidden. Imports torch: for processes that are to have it before they are forked."""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from tests.fakes import raising
from tests.scenarios import parts

torch.set_num_threads(1)
MEANWHILE_ALLOWED = {
    "init_process_group",
    "destroy_process_group",
    "is_initialized",
    "is_available",
    "get_rank",
    "get_world_size",
    "get_backend",
    "get_backend_config",
    "get_default_backend_for_device",
    "get_process_group_ranks",
    "get_group_rank",
    "get_global_rank",
    "get_node_local_rank",
    "get_pg_count",
    "is_backend_available",
    "is_gloo_available",
    "is_mpi_available",
    "is_nccl_available",
    "is_torchelastic_launched",
    "is_ucc_available",
    "is_xccl_available",
}


class Forbidden(Exception):
    """A collective was called."""


def forbid_collectives():
    """Let every function of torch.distributed raise that talks to another process; returns their names."""
    found = []
    for name in distributed_c10d.__all__:
        if callable(getattr(distributed_c10d, name)) and name[0].islower() and name not in MEANWHILE_ALLOWED:
            found.append(name)
            for module in (distributed_c10d, dist):
                setattr(module, name, _forbidden(name))
    return found


def _forbidden(name):
    return raising(Forbidden(name))


def fill(body):
    """A rank of a gloo group with an encoder loaded before; it finds its rank in the group alone."""
    dist.init_process_group("gloo", init_method=f"file://{body['meeting']}", rank=body["rank"], world_size=body["world_size"])
    model = torch.nn.Linear(8, 8)
    assert {"barrier", "all_reduce", "broadcast_object_list", "all_gather", "send"} <= set(forbid_collectives())
    seen = 0

    def encode(batch):
        nonlocal seen
        seen += 1
        if body["rank"] == body.get("victim") and seen == body["dies_at"]:
            _say_and_wait(body)
        with torch.inference_mode():
            model(torch.zeros(len(batch), 8))
        return parts.encode_names(batch)

    return parts.fill({**body, "rank": None, "world_size": None}, encode)


def _say_and_wait(body):
    """The victim stands in its batch until it is killed."""
    Path(body["standing"]).write_text(str(os.getpid()))
    while True:
        time.sleep(0.01)


def barrier(body):
    """What a call of ours that was overlooked would do."""
    del body
    forbid_collectives()
    try:
        dist.barrier()
    except Forbidden as error:
        return str(error)
    return "went through"
