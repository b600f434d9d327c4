"""Measure training from an object store beside MosaicML streaming and litData: three shuffled epochs, with less and less room on the disk.

    python3 scripts/bench/stream_others.py                          # 256 entries of 512 KiB, 20 ms, 50 MB/s, limits 1.0, 0.5, 0.25
    python3 scripts/bench/stream_others.py --rtt 50 --rate 100

Server and proxy are those of `stream.py`, and so is the data: each project writes it in its own format, in shards of 8 MiB, and reads
it through the loader that it recommends: `make_loader` in the trainer's process, the others' in two workers. Each run is a process of its
own with an empty folder for copies, which may take a fraction of the data, and 4 MiB for indexes; no limit is set for 1.0. Prints one JSON
object for each run: the seconds of opening and of each epoch, and what was downloaded, as a multiple of the data.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import environment

if __name__ == "__main__":
    environment.enter(environment.COMPARED)

import argparse
import contextlib
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from bench.stream import ROOT, SHAPE, started

BATCH = 16
EPOCHS = 3
ENTRY_BYTES = 1 << 19
SHARD_BYTES = 8 << 20
SLACK_BYTES = 4 << 20
SECONDS = 180
"""A run that takes longer is ended."""
AGAIN = (sys.executable, "-c", "from bench import stream_others; stream_others.main()")


def sample(number: int) -> dict[str, torch.Tensor]:
    """Return an entry, with values that cannot be compressed."""
    made = np.random.default_rng(number).integers(0, 1 << 15, SHAPE, dtype=np.int16)
    return {"latents": torch.from_numpy(made)}


def _loads_torchvision() -> bool:
    """Whether it loads here: some of its wheels do so beside torch with CUDA alone."""
    return not subprocess.run([sys.executable, "-c", "import torchvision"], capture_output=True, check=False).returncode


class Cachestore:
    """`CachedDataset` and `make_loader`, which prefetches in the trainer's process."""

    def write(self, folder: Path, count: int) -> None:
        """Write a store."""
        from bench.loaders import Kind, make_store

        make_store(folder, Kind("", SHAPE, torch.float16, count))

    def loader(self, address: str, local: Path, limit: int | None) -> Iterable[Any]:
        """Open it."""
        import cachestore as cs

        return cs.make_loader(cs.CachedDataset(address, generation=1, local=local, limit=limit), batch_size=BATCH)


class Mds:
    """MosaicML streaming."""

    def prepare(self) -> Any:
        """Its package imports torchvision for classes that are not used here."""
        for name in () if _loads_torchvision() else ("nms", "qnms"):
            with contextlib.suppress(RuntimeError):
                torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        import streaming  # type: ignore[import-not-found]

        return streaming

    def write(self, folder: Path, count: int) -> None:
        """Write shards."""
        columns = {"latents": f"ndarray:int16:{','.join(map(str, SHAPE))}"}
        with self.prepare().MDSWriter(out=str(folder), columns=columns, size_limit=SHARD_BYTES) as writer:
            for number in range(count):
                writer.write({"latents": sample(number)["latents"].numpy()})

    def loader(self, address: str, local: Path, limit: int | None) -> Iterable[Any]:
        """Open them."""
        streaming = self.prepare()
        data = streaming.StreamingDataset(remote=address, local=str(local), shuffle=True, batch_size=BATCH, cache_limit=limit)
        return streaming.StreamingDataLoader(data, batch_size=BATCH, num_workers=2)


class LitData:
    """litData."""

    def write(self, folder: Path, count: int) -> None:
        """Write chunks."""
        import litdata  # type: ignore[import-not-found]

        size = f"{SHARD_BYTES // 1_000_000}MB"
        litdata.optimize(sample, inputs=list(range(count)), output_dir=str(folder), chunk_bytes=size, num_workers=1, verbose=False)

    def loader(self, address: str, local: Path, limit: int | None) -> Iterable[Any]:
        """Open them, through boto3: as litData uses obstore, that refuses a server without TLS."""
        import litdata  # type: ignore[import-not-found]
        from litdata.streaming import downloader  # type: ignore[import-not-found]
        from litdata.streaming.cache import Dir  # type: ignore[import-not-found]

        downloader._OBSTORE_AVAILABLE = False  # noqa: SLF001
        where = Dir(path=str(local), url=address)
        options = {"endpoint_url": os.environ["AWS_ENDPOINT_URL"]}
        data = litdata.StreamingDataset(where, shuffle=True, drop_last=True, max_cache_size=limit or "100GB", storage_options=options)
        return litdata.StreamingDataLoader(data, batch_size=BATCH, num_workers=2)


WAYS: dict[str, Any] = {"cachestore": Cachestore(), "mosaicml-streaming": Mds(), "litdata": LitData()}


def serve_all(root: Path) -> None:
    """Be the server of all files below a folder until stdin ends; prints its port."""
    from tests.remote.server import served

    with served() as (state, url):
        state.objects |= {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}
        print(url.rpartition(":")[2], flush=True)
        sys.stdin.read()


def train(name: str, local: Path, limit: int | None) -> list[float]:
    """Return the seconds of opening, and of each epoch."""
    times = [time.perf_counter()]
    loader = WAYS[name].loader(f"s3://bucket/{name}", local, limit)
    times.append(time.perf_counter())
    for _epoch in range(EPOCHS):
        for batch in loader:
            assert batch["latents"].shape[1:] == torch.Size(SHAPE)
        times.append(time.perf_counter())
    return [after - before for before, after in pairwise(times)]


def measure(name: str, fraction: float, entries: int, scratch: Path, count: Path) -> dict[str, Any]:
    """Train in another process. Returns the figures."""
    total = entries * ENTRY_BYTES
    before = int(count.read_text(encoding="utf-8"))
    command = [*AGAIN, "--train", name, str(scratch), str(int(fraction * total) + SLACK_BYTES if fraction < 1 else 0)]
    found: dict[str, Any] = {"name": name, "limit": fraction}
    with (scratch.parent / "log").open("w", encoding="utf-8") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True)
        try:
            out, _err = process.communicate(timeout=SECONDS)
            opened, *epochs = json.loads(out.splitlines()[-1]) if process.returncode == 0 else (None,)
            found |= {"open": opened, "epochs": epochs, "seconds": opened + sum(epochs)} if opened is not None else {"failed": True}
        except subprocess.TimeoutExpired:
            found["failed"] = f"did not end within {SECONDS} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)
            process.communicate()
    if "failed" in found:
        found["last_words"] = (scratch.parent / "log").read_text(encoding="utf-8").strip()[-300:]
    return found | {"downloaded": (int(count.read_text(encoding="utf-8")) - before) / total}


def main() -> int:
    """Measure, or be one of the processes that this needs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", type=int, default=256, help="entries of 512 KiB (default 256)")
    parser.add_argument("--rtt", type=float, default=20, metavar="MS", help="round trip (default 20)")
    parser.add_argument("--rate", type=float, default=50, metavar="MB", help="MB in a second (default 50)")
    parser.add_argument("--limit", type=float, nargs="+", default=[1.0, 0.5, 0.25], help="fractions of the data that fit")
    parser.add_argument("--way", nargs="+", choices=WAYS, default=list(WAYS), help="what to measure (default: all)")
    parser.add_argument("--train", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--serve-all", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    if arguments.serve_all:
        serve_all(arguments.serve_all)
        return 0
    if arguments.train:
        name, local, limit = arguments.train
        print(json.dumps(train(name, Path(local), int(limit) or None)))
        return 0
    os.environ |= {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "scripts"), str(ROOT)])
    with tempfile.TemporaryDirectory(prefix="cachestore-bench-") as folder:
        root, count = Path(folder) / "root", Path(folder) / "count"
        count.write_text("0", encoding="utf-8")
        for name in arguments.way:
            WAYS[name].write(root / name, arguments.entries)
        serving = subprocess.Popen([*AGAIN, "--serve-all", str(root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert serving.stdout is not None
        port = int(serving.stdout.readline())
        try:
            with started("--proxy", port, arguments.rtt / 1000, arguments.rate * 1e6, "--count", count) as proxy:
                os.environ["AWS_ENDPOINT_URL"] = os.environ["S3_ENDPOINT_URL"] = f"http://127.0.0.1:{proxy}"
                for fraction in arguments.limit:
                    for name in arguments.way:
                        print(
                            json.dumps(measure(name, fraction, arguments.entries, Path(folder) / f"{name}-{fraction}", count)), flush=True
                        )
        finally:
            serving.kill()
            serving.communicate()
    return 0


if __name__ == "__main__":
    sys.exit(main())
