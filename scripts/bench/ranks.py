"""How much later the first batch comes as ranks compare what they read: `python3 scripts/bench/ranks.py [--ranks N] [--runs N]`.

So many local ranks of torch.distributed (gloo) begin loaders with and without `check_ranks`, in turns, each after a barrier. Printed is the
median time to the first batch of both, over ranks and runs, and of 200 later batches.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import environment

if __name__ == "__main__":
    environment.enter()

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from bench.loaders import Kind, make_store

import cachestore as cs

BATCH_SIZE = 4
LATER = 200


def begin(rank: int, ranks: int, runs: int, folder: str) -> None:
    """What one rank does; it leaves its times in a file."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:29471", rank=rank, world_size=ranks)
    data = cs.CachedDataset(Path(folder) / "store", latents="raw", generation=1)
    found: dict[str, list[tuple[float, float]]] = {"compared": [], "not compared": []}
    for run in range(2 * runs):
        name = ("compared", "not compared")[run % 2]
        check: Any = None if name == "compared" else False
        loader = cs.make_loader(data, BATCH_SIZE, check_ranks=check, ahead=0)
        dist.barrier()
        began = time.perf_counter()
        batches = iter(loader)
        next(batches)
        first = time.perf_counter()
        later = sum(1 for _batch in batches)
        found[name].append((first - began, (time.perf_counter() - first) / later))
    (Path(folder) / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def medians(times: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Milliseconds to the first batch, and of a later one."""
    return tuple(1000 * statistics.median(one) for one in zip(*times, strict=True))  # pyright: ignore[reportReturnType] - of two


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="How much later the first batch comes as ranks compare what they read.")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--runs", type=int, default=20)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="cachestore-bench-") as folder:
        make_store(Path(folder) / "store", Kind("small", (4, 8, 8), torch.float16, (LATER + 1) * BATCH_SIZE * asked.ranks))
        mp.spawn(begin, (asked.ranks, asked.runs, folder), asked.ranks)
        each = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(asked.ranks)]
    for name in ("not compared", "compared"):
        first, later = medians([pair for one in each for pair in one[name][1:]])  # the first pair warms up
        print(f"{name:<13} first batch {first:7.2f} ms, later ones {later:6.3f} ms")


if __name__ == "__main__":
    main()
