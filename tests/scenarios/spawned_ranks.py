"""Ranks that `torch.multiprocessing.spawn` starts: how do they end?

`python -m tests.scenarios.spawned_ranks RUNS [--store STORE] [--destroy]` starts two ranks so many times, with a loader of the store or
without cachestore, and prints how often which end was seen, as JSON. With `--destroy` they destroy their process group.

Without, torch sometimes aborts ("terminate called without an active exception"), with and without cachestore: a thread of gloo lets go of
the last tensor while the interpreter ends, and Python ends the thread inside of a destructor.
"""

import argparse
import json
import os
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed
import torch.multiprocessing

RANKS = 2


def train(rank: int, folder: str, store: str, destroys: Any) -> None:
    """Be a rank: read two batches, if there is a store, and add up a tensor over the ranks at each."""
    os.dup2(os.open(f"{folder}/{rank}", os.O_CREAT | os.O_WRONLY), 2)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=RANKS)
    for _batch in _batches(store):
        torch.distributed.all_reduce(torch.ones(1000))
    if destroys:
        torch.distributed.destroy_process_group()


def _batches(store: str) -> Any:
    if not store:
        return range(2)
    import cachestore as cs

    loader = cs.make_loader(cs.CachedDataset(store, generation=1), batch_size=2)
    batches = iter(loader)
    return next(batches), next(batches)  # the epoch is left open, as in a script that ends early


def end_of_run(store: str, destroys: Any) -> str:
    """Start the ranks once; return what was wrong with their ends, else "well"."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            torch.multiprocessing.spawn(train, (folder, store, destroys), nprocs=RANKS)
            wrong = ""
        except Exception as error:  # noqa: BLE001 - counted
            wrong = type(error).__name__ + ": " + str(error).strip().splitlines()[-1][:200]
        said = " ".join(Path(folder, str(rank)).read_text() for rank in range(RANKS))
    return (
        f"{wrong}{' terminate called' if 'terminate called' in said else ''}{' Traceback' if 'Traceback' in said else ''}".strip() or "well"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("runs", type=int)
    parser.add_argument("--store", default="")
    parser.add_argument("--destroy", action="store_true")
    asked = parser.parse_args()
    print(json.dumps(Counter(end_of_run(asked.store, asked.destroy) for _run in range(asked.runs))))
