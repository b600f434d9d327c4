"""Trainings of one to eight ranks that are alike, or differ in one thing: every rank gets what it must, or every rank is told.

A point is a world, a way to deal batches, a mesh, stores, and at most one fault. Without a fault each rank's batches are those of the
model, bit for bit: the order of one process, dealt by the rank's data dimension, from where the run was resumed, whatever validation comes
in between. With one, every rank ends with the error that names it, before its first batch.
"""

import json
import logging
import os
import random
import signal
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Final

from tests.torture.campaign import Campaign, Outcome, judged, outcome_of, scratch

BATCH_SIZE: Final = 2
SAMPLES: Final = 60
EPOCHS: Final = 3
SILENT_SECONDS: Final = 0.4
"""The deadline for the others, where a loader belongs to one rank alone or the orders differ."""
END_SECONDS: Final = 90.0
"""A training that has not ended by then hangs."""
SHAPES: Final = {
    1: [(1, 1)],
    2: [(2, 1), (1, 2)],
    3: [(3, 1)],
    4: [(4, 1), (2, 2), (1, 4)],
    6: [(6, 1), (3, 2)],
    8: [(8, 1), (4, 2), (2, 4)],
}
"""By number of ranks, data ranks and peers of each."""
FAULTS: Final = {
    "store": "RanksDiffer",
    "option": "RanksDiffer",
    "position": "RanksDiffer",
    "same part": "RanksDiffer",
    "dealt twice": "BadInput",
    "not dealt": "BadInput",
}
"""What is wrong on one rank, or with all, and the error of it."""
OPTIONS: Final = ({"seed": 4}, {"shuffle": False}, {"tail": "wrap"})


@dataclass(frozen=True, slots=True)
class Point:
    """One training."""

    number: int
    world: int
    shape: tuple[int, int]
    way: str
    """"loader", "by hand", "accelerate" or "numbers" (explicit ranks)."""
    apart: tuple[int, ...]
    """Ranks that read an equal store, made apart."""
    fault: str | None
    odd: int
    """The rank that is at fault."""
    validates: str
    """"", "all" or "alone"."""
    is_crossed: bool
    """Whether the odd rank begins with validation."""
    epoch: int
    consumed: int


def choose(number: int, draw: random.Random) -> Point:
    """A training; three of four have a fault, if there are ranks that can differ."""
    world = draw.choice((1, 2, 2, 3, 4, 4, 6, 8))
    shape = draw.choice(SHAPES[world])
    way = draw.choice(("loader", "by hand", "numbers" if shape[0] > 1 else "loader", "accelerate" if shape[1] == 1 else "loader"))
    fault = draw.choice((None, None, *FAULTS)) if world > 1 else None
    if fault in {"dealt twice", "not dealt", "same part"}:
        way, shape = {"dealt twice": "accelerate", "same part": "numbers"}.get(fault, "by hand"), (world, 1)
    validates = draw.choice(("", "all", "alone"))
    is_crossed = validates == "all" and world > 1 and fault is None and draw.random() < 0.5
    apart = tuple(rank for rank in range(world) if draw.random() < 0.3)
    odd = draw.randrange(world)
    return Point(
        number, world, shape, way, apart, fault, odd, validates, is_crossed, draw.randrange(2), draw.choice((0, 0, draw.randrange(12)))
    )


@dataclass(frozen=True, slots=True)
class Truth:
    """Stores, and what one process reads of them: (ids, digest of all values) of each batch, by epoch."""

    folder: Path
    training: list[list[list[Any]]]
    validation: list[list[list[Any]]]


def build(folder: Path) -> Truth:
    """A store, an equal one that was made apart, and one that lacks samples."""
    import cachestore as cs
    from tests.train.stores import Row, make_store, recipes

    rows = [Row(str(n), (f"one {n}", f"two {n}"), bucket=(8, 8) if n % 3 else (16, 8)) for n in range(SAMPLES)]
    for name, count in (("store", SAMPLES), ("apart", SAMPLES), ("smaller", SAMPLES - 6)):
        make_store(folder / name, rows[:count], recipes())
    data = opened(folder / "store")
    training = cs.make_loader(data, BATCH_SIZE, "single", seed=3)
    validation = cs.make_loader(data, BATCH_SIZE, "single", shuffle=False)
    return Truth(folder, *([read(loader) for _epoch in range(EPOCHS)] for loader in (training, validation)))


def opened(path: Path) -> Any:
    import cachestore as cs

    return cs.CachedDataset(path, generation=1, captions=cs.CaptionPolicy(choose="all"))


def read(batches: Any) -> list[list[Any]]:
    from tests.train.ranks import digest

    return [[batch["sample_id"], digest(batch)] for batch in batches]


def train(truth: Truth, point: Point, rank: int, meeting: Path) -> dict[str, Any]:
    """What one rank reads: its training's first batches, then validation, the rest of the epoch, and the next one."""
    import cachestore as cs
    from cachestore.train import peers
    from tests.train.ranks import begin

    is_odd = rank == point.odd
    logging.getLogger("cachestore").setLevel(logging.ERROR)
    begin({"rank": rank, "world_size": point.world, "meeting": str(meeting), "deadline": 20.0})
    name = "smaller" if point.fault == "store" and is_odd else "apart" if rank in point.apart else "store"
    data = opened(truth.folder / name)
    options = {"seed": 3} | (OPTIONS[point.number % len(OPTIONS)] if point.fault == "option" and is_odd else {})
    loader, sampler = training_loader(data, point, rank, options)
    epoch = point.epoch + (1 if point.fault == "position" and is_odd else 0)
    sampler.load_state_dict({**sampler.state_dict(), "epoch": epoch, "consumed": point.consumed})
    found: dict[str, Any] = {"training": [], "validation": []}

    def validate() -> None:
        if point.validates == "all" or (point.validates == "alone" and rank == 0):
            own: dict[str, Any] = {"rank": 0, "num_replicas": 1} if point.validates == "alone" else {}
            if point.validates == "alone":
                peers.DEADLINE_SECONDS = SILENT_SECONDS
            validation = cs.make_loader(data, BATCH_SIZE, "ddp", shuffle=False, **own)
            found["validation"] = read(validation)

    if point.is_crossed:
        peers.DEADLINE_SECONDS = SILENT_SECONDS
    if point.is_crossed and is_odd:
        validate()
    batches = iter(loader)
    found["training"].append(read(islice(batches, 2)))
    if not (point.is_crossed and is_odd):
        validate()
    found["training"][0] += read(batches)
    found["training"].append(read(loader))
    return found


def training_loader(data: Any, point: Point, rank: int, options: Mapping[str, Any]) -> tuple[Any, Any]:
    """The loader to iterate over, and its sampler."""
    import torch
    from torch.utils.data import DataLoader

    import cachestore as cs

    dealing: dict[str, Any] = {}
    if point.way == "numbers":
        dealing = {"rank": rank // point.shape[1], "num_replicas": point.shape[0]}
        if point.fault == "same part":
            dealing = {"rank": 0, "num_replicas": 1}
    elif point.shape[1] > 1:
        dealing = {"mesh": torch.distributed.device_mesh.init_device_mesh("cpu", point.shape, mesh_dim_names=("dp", "tp"))}
    if point.way in {"loader", "numbers"}:
        loader = cs.make_loader(data, BATCH_SIZE, **options, **dealing)
        return loader, loader.batch_sampler
    if "mesh" not in dealing:
        is_outside = point.fault == "not dealt" or (point.way == "accelerate" and point.fault != "dealt twice")
        dealing = {"split": "outside" if is_outside else "found"}
    sampler = cs.BucketBatchSampler(data, BATCH_SIZE, **options, **dealing)
    loader = DataLoader(data, batch_sampler=sampler, collate_fn=data.collate)
    if point.way == "accelerate":
        from accelerate import Accelerator

        return Accelerator(cpu=True).prepare(loader), sampler
    return loader, sampler


def judge(truth: Truth, point: Point) -> list[str]:
    """Start the ranks of a training, and compare what each says with the model."""
    with scratch() as folder:
        reported = run_ranks(truth, point, folder)
    if reported is None:
        return [f"the ranks had not ended after {END_SECONDS:g} s"]
    wanted = None if point.fault is None else FAULTS[point.fault]
    if errors := [one.get("error") for one in reported if one.get("error") != wanted]:
        return [f"the ranks end with {[one.get('error') for one in reported]}, not {wanted}: {errors[:1]} {reported[0].get('why', '')}"]
    if wanted is not None:
        return []
    return [f"rank {rank} reads other {what}" for rank, one in enumerate(reported) for what in differing(truth, point, rank, one)]


def differing(truth: Truth, point: Point, rank: int, reported: Mapping[str, Any]) -> list[str]:
    """Of what a rank reads, what is not the model's."""
    parts, peers = point.shape
    part = rank // peers
    training = [dealt(truth.training[point.epoch][point.consumed :], part, parts), dealt(truth.training[point.epoch + 1], part, parts)]
    validation: list[Any] = []
    if point.validates == "alone":
        validation = truth.validation[0] if rank == 0 else []
    elif point.validates == "all":
        validation = dealt(truth.validation[0], rank, point.world)
    wanted = {"training": training, "validation": validation}
    return [what for what, batches in wanted.items() if reported[what] != batches]


def dealt(batches: Sequence[Any], part: int, parts: int) -> list[Any]:
    return list(batches[: len(batches) - len(batches) % parts][part::parts])


def run_ranks(truth: Truth, point: Point, folder: Path) -> list[dict[str, Any]] | None:
    """Let every rank train in a process of its own; what each says. None if they do not end."""
    pids = [start_rank(truth, point, rank, folder) for rank in range(point.world)]
    deadline, left = time.monotonic() + END_SECONDS, set(pids)
    while left and time.monotonic() < deadline:
        left -= {pid for pid in left if os.waitpid(pid, os.WNOHANG)[0]}
        time.sleep(0.01)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return None if left else [json.loads((folder / f"{rank}.json").read_text()) for rank in range(point.world)]


def start_rank(truth: Truth, point: Point, rank: int, folder: Path) -> int:
    if pid := os.fork():
        return pid
    try:
        try:
            reported = train(truth, point, rank, folder / "meeting")
        except Exception as error:  # noqa: BLE001 - whatever ends a rank is judged by its name
            reported = {"error": type(error).__name__, "why": traceback.format_exc()[-600:]}
        (folder / f"{rank}.part").write_text(json.dumps(reported))
        os.rename(folder / f"{rank}.part", folder / f"{rank}.json")
    finally:
        os._exit(0)


def play(count: int, seed: int) -> Outcome:
    """So many trainings."""
    import accelerate.data_loader
    import torch

    assert accelerate.data_loader  # every judge would import it
    torch.set_num_threads(1)
    draw = random.Random(seed)
    points = [choose(number, draw) for number in range(count)]
    with scratch() as folder:
        truth = build(folder)
        return outcome_of(judged(points, partial(judge, truth)), remarks=[f"{sum(one.fault is None for one in points)} without a fault"])


CAMPAIGNS: Final = {"training": Campaign(play, 300)}
