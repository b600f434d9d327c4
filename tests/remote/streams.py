"""Data sets read from an address, beside the same ones read from the folder."""

import os
import time
from pathlib import Path
from typing import Any

import cachestore as cs
from cachestore.remote import downloads
from cachestore.remote.client import ClientLimits
from tests.train.stores import Row, make_store, recipes

KEYS = {"AWS_ACCESS_KEY_ID": "AKIDKEY", "AWS_SECRET_ACCESS_KEY": "hushhush", "AWS_REGION": "us-east-1"}
ADDRESS = "s3://bucket/cache"
SHORT = ClientLimits(request_seconds=20.0, retry_seconds=0.3)
ROWS = [Row(f"{n}.png", (f"caption {n % 5}" + "." * (n % 3),), bucket=(128, 96) if n % 2 else (96, 128)) for n in range(24)]
"""An entry of latents has 6144 bytes, so each takes blocks of its own in a part."""


def make(path, rows=ROWS, **options):
    return make_store(path, rows, recipes(), **options)


def serve_folder(server, root, prefix="cache"):
    """Put the files of a store into a server's bucket."""
    for path in root.rglob("*"):
        if path.is_file() and path.relative_to(root).parts[0] in {"cachestore.json", "segments", "index", "catalogs", "recipes"}:
            server.objects[f"{prefix}/{path.relative_to(root).as_posix()}"] = path.read_bytes()


def open_both(path, tmp_path, address=None, **options):
    """The data set at an address, and the one in the folder."""
    given: dict[str, Any] = {"local": tmp_path / "local", "generation": 1, **options}
    return cs.CachedDataset(address or f"file://{path}", **given), cs.CachedDataset(path, generation=1)


def equal(one, other):
    import torch

    same = {
        name: torch.equal(value, other[name]) if isinstance(value, torch.Tensor) else value == other[name] for name, value in one.items()
    }
    return list(one) == list(other) and all(same.values())


def agree(data, own, epochs=3, **options):
    """Whether every batch of some epochs is the same, bit for bit."""
    loaders = [cs.make_loader(each, batch_size=4, **(options if each is data else {})) for each in (data, own)]
    found = []
    for _epoch in range(epochs):
        batches = [list(loader) for loader in loaders]
        found += [len(batches[0]) == len(batches[1]) > 0, *(equal(one, other) for one, other in zip(*batches, strict=True))]
    return all(found)


def agree_plainly(data, own):
    """As `agree`, in torch's own loader without prefetching."""
    from torch.utils.data import DataLoader

    batches = list(cs.BucketBatchSampler(own, batch_size=2))
    found = []
    for each in (data, own):
        each.set_epoch(3)
        found.append(list(DataLoader(each, batch_sampler=batches, collate_fn=each.collate)))
    return all(equal(one, other) for one, other in zip(*found, strict=True))


def ranges(server):
    """How often a client asked for values."""
    return sum(method == "GET" and "/segments/" in path for method, path in server.requests)


def helper() -> Any:
    """The pid of this process's helper."""
    return downloads.downloads().helper_pid


def parts(folder: Path):
    """The parts in a cache, and what says which of their entries are there."""
    return sorted(folder.glob("*/parts/*")), sorted(folder.glob("*/have/*"))


def entries_here(folder: Path):
    """How many entries a cache has."""
    return sum(mark.read_bytes().count(1) for mark in parts(folder)[1])


def is_alive(pid):
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False


def in_child(act):
    """Whether `act` returns something true in a forked child."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 0 if act() else 2
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def aged(path: Path, seconds: float) -> None:
    """Let a file look as if it was used so long ago."""
    moment = time.time() - seconds
    os.utime(path, (moment, moment))
