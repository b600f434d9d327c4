"""Three ways to feed a trainer, side by side: `python3 scripts/bench/loaders.py [--json]`.

    when asked     the trainer's process reads each batch when it is asked for     the baseline
    ahead          its thread reads two batches ahead                              what `cs.make_loader` does by default
    2 workers      two processes of torch's DataLoader read, and hand batches over

each beside a trainer that is idle, one that runs 2 ms of pure Python a batch (holding the interpreter's lock), and one that waits 10 ms
a batch as for a GPU. Epochs over latents in the page cache, checked before (the steady state of verify="first"), in batches of 16; the
ways take turns, the order changing from run to run. A figure is the median of the runs; time counts from the first batch on, so that
starting workers is left out.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import environment

if __name__ == "__main__":
    environment.enter()

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

import cachestore as cs

RUNS = 7
BATCH_SIZE = 16
WAYS: Mapping[str, Mapping[str, Any]] = {"when asked": {"ahead": 0}, "ahead": {}, "2 workers": {"num_workers": 2}}
"""Arguments of `make_loader` by name; the first is the baseline."""


def idle() -> None:
    """A trainer that takes no time."""


def run_python(seconds: float = 0.002) -> None:
    """A trainer that holds the interpreter's lock."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def wait(seconds: float = 0.010) -> None:
    """A trainer that waits for its accelerator."""
    time.sleep(seconds)


CONSUMERS: Mapping[str, Callable[[], None]] = {"idle": idle, "2 ms of Python": run_python, "waits 10 ms": wait}


@dataclass(frozen=True, slots=True)
class Kind:
    """Latents of one size."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    samples: int


KINDS = (
    Kind("512 KiB, bf16", (16, 128, 128), torch.bfloat16, 1024),
    Kind("32 KiB, fp16", (4, 64, 64), torch.float16, 4096),
)


@dataclass(frozen=True, slots=True)
class Row:
    """One way beside one trainer."""

    latents: str
    consumer: str
    way: str
    batches_per_second: float
    ratio: float
    """To the baseline, the median of the runs' ratios; above 1 is faster."""
    lowest: float
    highest: float
    lost_ms: float
    """What a batch costs the trainer besides its own time."""


def make_store(path: Path, kind: Kind) -> None:
    """Latents of random numbers under a catalog, in two buckets of one shape."""
    from cachestore.core.keys import Recipe, digest_text, input_key
    from cachestore.encode.families import lookup as families
    from cachestore.store.format.catalog import Catalog, Cell, make_column
    from cachestore.store.write.catalog_writer import draft_of, publish_draft

    config = {"scaling_factor": 0.3611, "shift_factor": 0.1159, "latent_channels": kind.shape[0], "block_out_channels": [1, 1, 1, 1]}
    recipe = Recipe("latents", {"of": "a benchmark"}, families.latents_read(families.vae_family("AutoencoderKL"), config, "mean"))
    ids = [f"{number:06}" for number in range(kind.samples)]
    keys = [input_key(recipe.fingerprint, {"image": digest_text(name)}, {}) for name in ids]
    made = torch.Generator().manual_seed(0)
    buckets = ((1024, 1024), (1024, 1088))
    cells = [[Cell(key, facts={"bucket": buckets[number % 2], "size": (1, 1), "crop": (0, 0, 1, 1)})] for number, key in enumerate(keys)]
    with cs.open(path, mode="a") as store:
        with store.writer() as writer:
            for key in keys:
                writer.put(key, {"mean": torch.randn(kind.shape, generator=made).to(kind.dtype)})
        store.commit()
        catalog = Catalog(
            name="train",
            request={},
            recipes={recipe.fingerprint: recipe},
            ids=ids,
            captions_at=[0] * (len(ids) + 1),
            captions=[],
            images={},
            extras=["{}"] * len(ids),
            columns=(make_column("latents", "image", recipe.fingerprint, {}, cells),),
        )
        publish_draft(store.layout, draft_of(catalog), after=0)


def seconds_of(loader: Any, consume: Callable[[], None]) -> tuple[float, int]:
    """(seconds, batches) of an epoch from its first batch on."""
    batches = iter(loader)
    next(batches)
    begin, count = time.perf_counter(), 0
    consume()
    for _batch in batches:
        consume()
        count += 1
    return time.perf_counter() - begin, count


def compare(data: Any, kind: Kind, consumer: str, runs: int, ways: Mapping[str, Mapping[str, Any]] = WAYS) -> list[Row]:
    """All ways beside one trainer, in turn."""
    consume = CONSUMERS[consumer]
    loaders = {way: cs.make_loader(data, BATCH_SIZE, "single", **options) for way, options in ways.items()}
    taken: dict[str, list[tuple[float, int]]] = {way: [] for way in loaders}
    for run in range(runs + 1):
        for way in list(loaders) if run % 2 else reversed(loaders):
            taken[way].append(seconds_of(loaders[way], consume))
    begin = time.perf_counter()
    for _time in range(20):
        consume()
    own = (time.perf_counter() - begin) / 20
    first, *_ = ways
    rows: list[Row] = []
    for way, times in taken.items():
        per_batch = statistics.median(seconds / count for seconds, count in times[1:])
        ratios = sorted(base / ours for (base, _), (ours, _) in zip(taken[first][1:], times[1:], strict=True))
        spread = (round(statistics.median(ratios), 2), round(ratios[0], 2), round(ratios[-1], 2))
        rows.append(Row(kind.name, consumer, way, round(1 / per_batch, 1), *spread, round((per_batch - own) * 1e3, 2)))
    return rows


def measure(kinds: Sequence[Kind] = KINDS, runs: int = RUNS, folder: str | None = None) -> list[Row]:
    """Every kind beside every trainer. No kinds give no rows."""
    rows: list[Row] = []
    for kind in kinds:
        with tempfile.TemporaryDirectory(prefix="cachestore-bench-", dir=folder) as name:
            make_store(Path(name) / "store", kind)
            data = cs.CachedDataset(Path(name) / "store", latents="raw")
            for _batch in cs.make_loader(data, BATCH_SIZE, "single"):  # every entry is checked once
                pass
            rows += [row for consumer in CONSUMERS for row in compare(data, kind, consumer, runs)]
    return rows


def main() -> int:
    """Measure and print one table."""
    parser = argparse.ArgumentParser(description="Three ways to feed a trainer, side by side.")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--folder", help="where to work (default: a temporary folder)")
    parser.add_argument("--runs", type=int, default=RUNS)
    arguments = parser.parse_args()
    rows = measure(runs=arguments.runs, folder=arguments.folder)
    machine = {"python": platform.python_version(), "torch": torch.__version__, "processors": os.cpu_count(), "numpy": np.__version__}
    if arguments.json:
        print(json.dumps({"machine": machine, "rows": [asdict(row) for row in rows]}))
        return 0
    print(", ".join(f"{name} {value}" for name, value in machine.items()))
    print(f"{'latents':<15}{'trainer':<16}{'way':<12}{'batches/s':>10}{'ratio':>7}  {'lowest to highest':<18}{'ms lost a batch':>16}")
    for row in rows:
        spread = f"{row.lowest} to {row.highest}"
        print(f"{row.latents:<15}{row.consumer:<16}{row.way:<12}{row.batches_per_second:>10}{row.ratio:>7}  {spread:<18}{row.lost_ms:>16}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
