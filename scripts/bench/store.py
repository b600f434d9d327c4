"""Speed of the store against plain files, as ratios within one run: `python3 scripts/bench/store.py [--json]`.

    append      one segment of the bytes, durable   /  write + fsync of the same bytes into one file
    write       entries of 32 KiB and of 1.5 KiB        /  LMDB, a synced transaction for each segment's entries
    get         one entry                           /  one record copied out of a mapped raw file into a reused buffer
    get_many    a batch of entries                  /  the same records copied likewise
    verify      every byte checked, of 2 GiB        /  `cat` of the same files to /dev/null; and the same read into a reused buffer

Every pair is measured in turn, several times; the ratio is the median of the pairs' ratios, 1 is the speed of the plain file. Data
are in the page cache. The machine's fsync decides the first row.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import environment

if __name__ == "__main__":
    environment.enter()

import argparse
import json
import mmap
import os
import platform
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from random import Random
from typing import Any

import numpy as np

ENTRY_BYTES = 512 * 1024
"""FLUX latents at 1024 x 1024 in bfloat16."""
PAIRS = 9
VERIFY_PAIRS = 5
BATCH = 16


@dataclass(frozen=True, slots=True)
class Row:
    """One comparison."""

    what: str
    ours_mb_s: float
    plain_mb_s: float
    ratio: float
    """Ours over plain, median of the pairs; above 1 is faster than the plain file."""
    lowest: float
    highest: float


def compare(what: str, size: int, ours: Callable[[], object], plain: Callable[[], object], *, pairs: int = PAIRS) -> Row:
    """Run both in turn, the order changing from pair to pair."""
    times: list[tuple[float, float]] = []
    for number in range(pairs + 1):
        first, second = (ours, plain) if number % 2 else (plain, ours)
        one, two = _seconds(first), _seconds(second)
        times.append((one, two) if number % 2 else (two, one))
    times = times[1:]  # the first pair warms up
    ratios = [plain_seconds / our_seconds for our_seconds, plain_seconds in times]
    median = statistics.median
    rates = [size / median(pair[side] for pair in times) / 1e6 for side in range(2)]
    return Row(what, round(rates[0], 1), round(rates[1], 1), round(median(ratios), 2), round(min(ratios), 2), round(max(ratios), 2))


def _seconds(function: Callable[[], object]) -> float:
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def bench_append(folder: Path, megabytes: int) -> Row:
    """A segment against one file of the same bytes."""
    import cachestore as cs

    count = megabytes * 1024 * 1024 // ENTRY_BYTES
    values = [np.random.default_rng(n).integers(0, 255, ENTRY_BYTES, dtype=np.uint8) for n in range(count)]
    turn = iter(range(1 << 30))

    def ours() -> None:
        with cs.open(folder / f"append{next(turn)}", mode="a") as store, store.writer() as writer:
            for number, value in enumerate(values):
                writer.put(cs.key(str(number)), {"latents": value})

    def plain() -> None:
        with (folder / f"plain{next(turn)}").open("wb") as file:
            for value in values:
                file.write(value.data)
            file.flush()
            os.fsync(file.fileno())

    row = compare(f"append {megabytes} MiB", megabytes * 1024 * 1024, ours, plain)
    for path in folder.glob("append*"):
        shutil.rmtree(path)
    for path in folder.glob("plain*"):
        path.unlink()
    return row


def bench_small(folder: Path, size: int, count: int) -> Row:
    """Writing small entries against LMDB with a synced transaction for the entries of each segment."""
    import lmdb

    import cachestore as cs
    from cachestore.store.write.append import SegmentLimits

    at_once = min(SegmentLimits().entries, SegmentLimits().size_bytes // size)
    values = [np.random.default_rng(n).integers(0, 255, size, dtype=np.uint8) for n in range(512)]
    keys = [cs.key(str(number)) for number in range(count)]
    turn = iter(range(1 << 30))

    def ours() -> None:
        with cs.open(folder / f"small{next(turn)}", mode="a") as store, store.writer() as writer:
            for number, key in enumerate(keys):
                writer.put(key, {"x": values[number % len(values)]})

    def plain() -> None:
        environment = lmdb.open(str(folder / f"small{next(turn)}"), map_size=1 << 32)
        for start in range(0, count, at_once):
            with environment.begin(write=True) as transaction:
                for number in range(start, min(count, start + at_once)):
                    transaction.put(keys[number], values[number % len(values)].tobytes())
        environment.close()

    row = compare(f"write {count} of {size / 1024:g} KiB / LMDB", size * count, ours, plain)
    for path in folder.glob("small*"):
        shutil.rmtree(path)
    return row


def bench_reading(folder: Path, megabytes: int) -> list[Row]:
    """Reading against a mapped raw file."""
    count = megabytes * 1024 * 1024 // ENTRY_BYTES
    path, keys = _make_store(folder / "store", count)
    raw = folder / "raw"
    with raw.open("wb") as file:
        for number in range(count):
            file.write(_value(number).data)
    rows = [_bench_get(path, raw, keys, verify) for verify in ("first", "always", "never")]
    return [*rows, *(_bench_get_many(path, raw, keys, verify) for verify in ("first", "always", "never"))]


def _make_store(path: Path, count: int) -> tuple[Path, list[Any]]:
    """A store of so many entries, and their keys."""
    import cachestore as cs

    keys = [cs.key(str(number)) for number in range(count)]
    with cs.open(path, mode="a") as store:
        with store.writer() as writer:
            for number, key in enumerate(keys):
                writer.put(key, {"latents": _value(number)})
        store.commit()
    return path, keys


def _value(number: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(number).integers(0, 255, ENTRY_BYTES, dtype=np.uint8)


def _order(count: int) -> list[int]:
    return Random(0).sample(range(count), count)


def _mapped(raw: Path) -> mmap.mmap:
    with raw.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _bench_get(path: Path, raw: Path, keys: list[Any], verify: Any) -> Row:
    import cachestore as cs

    order = _order(len(keys))
    mapping, buffer = memoryview(_mapped(raw)), memoryview(bytearray(ENTRY_BYTES))

    def plain() -> None:
        for number in order:
            buffer[:] = mapping[number * ENTRY_BYTES : (number + 1) * ENTRY_BYTES]

    with cs.open(path, verify=verify) as store:

        def ours() -> None:
            for number in order:
                store.get(keys[number], as_numpy=True)

        return compare(f'get, verify="{verify}"', len(keys) * ENTRY_BYTES, ours, plain)


def _bench_get_many(path: Path, raw: Path, keys: list[Any], verify: Any) -> Row:
    import cachestore as cs

    order = _order(len(keys))
    batches = [order[start : start + BATCH] for start in range(0, len(order), BATCH)]
    mapping, buffer = memoryview(_mapped(raw)), memoryview(bytearray(ENTRY_BYTES * BATCH))

    def plain() -> None:
        for batch in batches:
            for index, number in enumerate(batch):
                buffer[index * ENTRY_BYTES : (index + 1) * ENTRY_BYTES] = mapping[number * ENTRY_BYTES : (number + 1) * ENTRY_BYTES]

    with cs.open(path, verify=verify) as store:

        def ours() -> None:
            for batch in batches:
                store.get_many([keys[number] for number in batch], as_numpy=True)

        return compare(f'get_many of {BATCH}, verify="{verify}"', len(keys) * ENTRY_BYTES, ours, plain)


def bench_verify(folder: Path, megabytes: int) -> list[Row]:
    """Verifying every byte of several segments, against `cat` and against reading them."""
    from cachestore.care.verify import verify

    path, _keys = _make_store(folder / "to verify", megabytes * 1024 * 1024 // ENTRY_BYTES)
    files = sorted(path.glob("segments/*/*.safetensors"))
    size = sum(file.stat().st_size for file in files)
    buffer = bytearray(1 << 20)

    def cat() -> None:
        subprocess.run(["cat", *map(str, files)], stdout=subprocess.DEVNULL, check=True)

    def plain() -> None:
        for file in files:
            with file.open("rb", buffering=0) as opened:
                while opened.readinto(buffer):
                    pass

    def ours() -> None:
        assert verify(path).ok

    what = f"verify --full, {megabytes} MiB in {len(files)} segments"
    return [compare(f"{what} / {name}", size, ours, other, pairs=VERIFY_PAIRS) for name, other in (("cat", cat), ("reading", plain))]


def main() -> int:
    """Measure and print one table."""
    parser = argparse.ArgumentParser(description="Speed of the store against plain files.")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--megabytes", type=int, default=512, help="bytes to read (default: 512 MiB); appending takes a quarter")
    parser.add_argument("--verify-megabytes", type=int, default=2048, help="size of the store that is verified (default: 2 GiB)")
    parser.add_argument("--only-verify", action="store_true", help="verify alone")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="cachestore-bench-") as name:
        folder = Path(name)
        rows = bench_verify(folder, arguments.verify_megabytes)
        if not arguments.only_verify:
            rows += [bench_append(folder, arguments.megabytes // 4), bench_small(folder, 32 * 1024, 8192), bench_small(folder, 1536, 65536)]
            rows += bench_reading(folder, arguments.megabytes)
    machine = {"python": platform.python_version(), "system": platform.platform(), "processors": os.cpu_count(), "numpy": np.__version__}
    if arguments.json:
        print(json.dumps({"machine": machine, "rows": [asdict(row) for row in rows]}))
        return 0
    print(", ".join(f"{name} {value}" for name, value in machine.items()) + f"; entries of {ENTRY_BYTES // 1024} KiB, {PAIRS} pairs\n")
    print(f"{'':52} {'ours MB/s':>10} {'plain MB/s':>10} {'ratio':>6}  lowest to highest")
    for row in rows:
        print(f"{row.what:52} {row.ours_mb_s:>10} {row.plain_mb_s:>10} {row.ratio:>6}  {row.lowest} to {row.highest}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
