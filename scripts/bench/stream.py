"""Measure training from an object store: cold, warm and the first batch, as fractions of what the link gives.

    python3 scripts/bench/stream.py                                 # 20 and 50 ms, 50 and 100 MB/s, 384 entries of 512 KiB
    python3 scripts/bench/stream.py --entries 64 --rtt 20 --rate 50

The server is that of the tests, in a process of its own. In front of it a proxy, in another process, adds half of the round trip to each
direction and lets the answers of all connections pass at a given rate. What the link gives is measured by 32 threads that get the same
ranges through the same proxy. Prints one JSON object for each link, and a table of the fractions and seconds in them, one column a link.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import environment

if __name__ == "__main__":
    environment.enter()

import argparse
import asyncio
import itertools
import json
import os
import random
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

ROOT = environment.ROOT
ADDRESS = "s3://bucket/cache"
BATCH = 16
THREADS = 32
WORKER_RUNS = 3
"""Cold epochs with two workers, of each kind."""
RUNS = 21
"""Warm epochs, each beside one of the store in the folder."""
SHAPE = (16, 128, 128)
"""Of a latent; 512 KiB in float16."""
MOVED = ("cachestore.json", "segments", "index", "catalogs", "recipes")


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, link: "Link | None", delay: float) -> None:
    """Pass on what one side sends, later; through the link, if there is one."""
    queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(256)

    async def send() -> None:
        while True:
            at, data = await queue.get()
            if (wait := at - time.monotonic()) > 0:
                await asyncio.sleep(wait)
            if not data:
                break
            writer.write(data)
            await writer.drain()
        writer.close()

    sending = asyncio.create_task(send())
    try:
        while data := await reader.read(65536):
            free = link.free_after(len(data)) if link is not None else time.monotonic()
            await queue.put((free + delay, data))
    except ConnectionError:
        pass
    await queue.put((0, b""))
    await asyncio.gather(sending, return_exceptions=True)


class Link:
    """What all answers pass through, one after the other."""

    def __init__(self, rate: float, count: Path | None) -> None:
        self._rate = rate
        self._free = 0.0
        self._count = count.open("r+b", buffering=0) if count is not None else None
        self._total = 0

    def free_after(self, size: int) -> float:
        """Return when so many bytes have passed."""
        self._total += size
        if self._count is not None:
            os.pwrite(self._count.fileno(), b"%020d" % self._total, 0)  # of one length, so that no reader finds a part of it
        self._free = max(self._free, time.monotonic()) + size / self._rate
        return self._free


def serve_proxy(target: int, rtt: float, rate: float, count: Path | None) -> None:
    """Be the proxy until this process is killed; prints its port. `rtt` in seconds, `rate` in bytes a second.

    A file may get the number of bytes that were answered.
    """
    link = Link(rate, count)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = await asyncio.open_connection("127.0.0.1", target)
        both = (_pump(reader, there[1], None, rtt / 2), _pump(there[0], writer, link, rtt / 2))
        await asyncio.gather(*both, return_exceptions=True)

    async def run() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        print(server.sockets[0].getsockname()[1], flush=True)
        await server.serve_forever()

    asyncio.run(run())


def serve_folder(root: Path) -> None:
    """Be the server until stdin ends; prints its port."""
    from tests.remote.server import served

    with served() as (state, url):
        for path in root.rglob("*"):
            if path.is_file() and path.relative_to(root).parts[0] in MOVED:
                state.objects[f"cache/{path.relative_to(root).as_posix()}"] = path.read_bytes()
        print(url.rpartition(":")[2], flush=True)
        sys.stdin.read()


def get_ranges(ranges: Sequence[tuple[str, int, int]]) -> float:
    """Get these ranges with 32 threads. Returns the seconds, without those of the first 32."""
    from cachestore.remote.address import parse_address
    from cachestore.remote.client import Client

    client = Client(parse_address("address", ADDRESS))
    with ThreadPoolExecutor(THREADS) as threads:
        list(threads.map(lambda one: client.get_range(*one), ranges[:THREADS]))
        began = time.perf_counter()
        list(threads.map(lambda one: client.get_range(*one), ranges))
        return time.perf_counter() - began


@contextmanager
def started(*arguments: object) -> Generator[int]:
    """Run a part of this program in another process; yields the port that it prints."""
    command = [sys.executable, __file__, *map(str, arguments)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield int(process.stdout.readline())
    finally:
        process.kill()
        process.communicate()


def plain_loader(data: Any, workers: int) -> Any:
    """Return torch's own loader, whose workers do not know their next batches."""
    import cachestore as cs

    sampler = cs.BucketBatchSampler(data, batch_size=BATCH)
    return torch.utils.data.DataLoader(data, batch_sampler=sampler, collate_fn=data.collate, num_workers=workers)  # type: ignore[arg-type]


def epoch(data: Any, step_seconds: float = 0.0, loader: Any = None) -> dict[str, Any]:
    """Train an epoch whose steps take so long. Returns seconds, seconds to the first batch, and the longest wait after the second one."""
    import cachestore as cs

    waits: list[float] = []
    began = before = time.perf_counter()
    for batch in cs.make_loader(data, batch_size=BATCH) if loader is None else loader:
        waits.append(time.perf_counter() - before)
        assert batch["latents"].shape[0] == BATCH
        time.sleep(step_seconds)
        before = time.perf_counter()
    late = waits[2:] or [0.0]
    return {"seconds": time.perf_counter() - began, "first": waits[0], "longest_wait": max(late), "median_wait": statistics.median(late)}


def _with_workers(local: Path, *, plain: bool) -> float:
    """Return the seconds of a cold epoch with two workers."""
    import cachestore as cs

    data = cs.CachedDataset(ADDRESS, generation=1, local=local)
    loader = plain_loader(data, 2) if plain else cs.make_loader(data, batch_size=BATCH, num_workers=2)
    seconds = epoch(data, loader=loader)["seconds"]
    shutil.rmtree(local)
    return seconds


def measure(store: Path, server: int, rtt: float, rate: float, scratch: Path) -> dict[str, Any]:
    """Return the figures of one link."""
    import cachestore as cs

    own = cs.CachedDataset(store, generation=1)
    with cs.open(store) as reader:
        located = reader.locate(list(reader.keys()))
    ranges = [
        (f"segments/{ref.digest[:2]}/{ref.digest}.safetensors", offset, 1 << 19)
        for ref, offset in zip(located.segments, located.offsets, strict=True)
    ]
    random.Random(0).shuffle(ranges)
    total = len(ranges) * (1 << 19)
    with started("--proxy", server, rtt, rate) as port:
        os.environ["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{port}"
        raw = subprocess.run([sys.executable, __file__, "--ranges"], input=json.dumps(ranges), capture_output=True, text=True, check=True)
        link = total / float(raw.stdout)
        began = time.perf_counter()
        data = cs.CachedDataset(ADDRESS, generation=1, local=scratch / "cold")
        opened = time.perf_counter() - began
        cold = epoch(data)
        epoch(own)
        pairs = [(epoch(data)["seconds"], epoch(own)["seconds"]) for _run in range(RUNS)]
        half = BATCH * (1 << 19) / (link / 2)
        slow = epoch(cs.CachedDataset(ADDRESS, generation=1, local=scratch / "half"), step_seconds=half)
        workers = [
            statistics.median(_with_workers(scratch / f"{kind}{turn}", plain=kind == "plain") for turn in range(WORKER_RUNS))
            for kind in ("plain", "ahead")
        ]
        none = epoch(cs.CachedDataset(ADDRESS, generation=1, local=scratch / "none", limit=0))
    return {
        "rtt_ms": rtt * 1000,
        "rate_mb": rate / 1e6,
        "raw_mb": link / 1e6,
        "open_seconds": opened,
        "first_batch_seconds": cold["first"],
        "first_batch_bound_seconds": 2 * rtt + BATCH * (1 << 19) / link + 1,
        "cold_fraction_of_raw": total / cold["seconds"] / link,
        "limit_0_fraction_of_raw": total / none["seconds"] / link,
        "cold_fraction_with_2_workers": total / workers[1] / link,
        "cold_fraction_with_2_plain_workers": total / workers[0] / link,
        "warm_fraction_of_local": statistics.median(folder / warm for warm, folder in pairs),
        "half_demand_longest_wait_seconds": slow["longest_wait"],
        "half_demand_median_wait_seconds": slow["median_wait"],
    }


def as_table(found: Sequence[dict[str, Any]]) -> str:
    """Return the figures of all links as a table in Markdown."""
    rows = [("", *(f"{one['rtt_ms']:.0f} ms, {one['rate_mb']:.0f} MB/s" for one in found)), ("---",) * (len(found) + 1)]
    names = [name for name in found[0] if name not in {"rtt_ms", "rate_mb"}]
    rows += [(name.replace("_", " "), *(f"{one[name]:.3g}" for one in found)) for name in names]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main() -> int:
    """Measure, or be one of the processes that this needs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", type=int, default=384, help="entries of 512 KiB (default 384)")
    parser.add_argument("--rtt", type=float, nargs="+", default=[20, 50], metavar="MS", help="round trips to measure")
    parser.add_argument("--rate", type=float, nargs="+", default=[50, 100], metavar="MB", help="MB in a second to measure")
    parser.add_argument("--folder", help="where the stores are made (default: the folder for temporary files)")
    parser.add_argument("--proxy", type=float, nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--count", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--ranges", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    if arguments.proxy:
        serve_proxy(int(arguments.proxy[0]), arguments.proxy[1], arguments.proxy[2], arguments.count)
    elif arguments.serve:
        serve_folder(Path(arguments.serve))
    elif arguments.ranges:
        print(get_ranges([tuple(one) for one in json.load(sys.stdin)]))
    else:
        from bench.loaders import Kind, make_store

        os.environ |= {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}
        with tempfile.TemporaryDirectory(prefix="cachestore-bench-", dir=arguments.folder) as folder:
            store = Path(folder) / "store"
            make_store(store, Kind("512 KiB", SHAPE, torch.float16, arguments.entries))
            with started("--serve", store) as server:
                found: list[dict[str, Any]] = []
                for rtt, rate in itertools.product(arguments.rtt, arguments.rate):
                    found.append(measure(store, server, rtt / 1000, rate * 1e6, Path(folder) / f"local{len(found)}"))
                    print(json.dumps(found[-1]), flush=True)
                print(as_table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
