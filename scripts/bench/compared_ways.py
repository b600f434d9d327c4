"""Ways to keep latents and text embeddings: ours, and those of others, each used as its own documentation or code does.

A sample is what SD 1.5 needs at 512 pixels: `latents` of [4, 64, 64] and `prompt_embeds` of [77, 768], both bfloat16, 147.5 KiB. Its
values are random and follow from its number, so whoever reads it knows what is right.

`python bench/compared_ways.py write|measure|inspect|kill WAY FOLDER --count N` runs one step in a process of its own and prints one JSON
object; `compare.py` starts it. Knows nothing of tables and plots.
"""

import argparse
import contextlib
import functools
import hashlib
import json
import os
import shutil
import signal
import stat
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from random import Random
from typing import Any, Final

import numpy as np

SHAPES: Final = {"latents": (4, 64, 64), "prompt_embeds": (77, 768)}
BATCH: Final = 16
AT_ONCE: Final = 256
"""Samples that become durable together, where the caller decides."""
MAP_BYTES: Final = 64 << 30
KILLED_AT: Final = (0.4, 0.7, 0.55)
"""After which shares of the bytes a writer is killed."""
STEP_SECONDS: Final = 90
"""How long one forked step may take."""
STEP_BYTES: Final = 1662
"""How far the values of two samples lie apart in the pool."""


# Samples


@functools.cache
def _threads(name: str) -> bytes:
    seed = list(SHAPES).index(name)
    return np.random.default_rng(seed).integers(0, 120, 24 << 20, np.uint8).tobytes()  # no NaN and no infinity among them


def raw(name: str, number: int) -> bytes:
    """The bytes of one tensor of a sample."""
    size = 2 * int(np.prod(SHAPES[name]))
    start = number * STEP_BYTES
    if start + size > len(_threads(name)):
        raise ValueError(f"there are no more than {(len(_threads(name)) - size) // STEP_BYTES} different samples")
    return _threads(name)[start : start + size]


def tensor(name: str, number: int) -> Any:
    """One tensor of a sample, in memory of its own."""
    import torch

    return torch.frombuffer(bytearray(raw(name, number)), dtype=torch.bfloat16).view(SHAPES[name])


def sample(number: int) -> dict[str, Any]:
    """A sample's tensors."""
    return {name: tensor(name, number) for name in SHAPES}


def is_right(found: Mapping[str, Any], number: int) -> bool:
    """Whether these are the sample's values, in whatever dtype they were kept."""
    return all(bool((found[name].float() == tensor(name, number).float()).all()) for name in SHAPES)


def stack(samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A batch."""
    import torch

    return {name: torch.stack([one[name] for one in samples]) for name in SHAPES}


# Ways


class Way:
    """One way to keep samples. `write` may be called again on what an earlier call left; `open` is called in the process that reads."""

    name: str
    about: str
    package: str | None = None
    """The module that it needs beyond torch, numpy, safetensors and LMDB."""
    distribution: str | None = None
    """What to show a version of; the commit where its code was read and not installed."""
    syncs = False
    """Whether its writer makes its files durable."""
    kills = len(KILLED_AT)
    """How often its writer is killed."""

    def prepare(self) -> Any:
        """Import what it needs."""
        return import_module(self.package) if self.package else None

    def write(self, folder: Path, count: int) -> int:
        """Store the samples that are not there yet, as its users would; returns how many were written now."""
        raise NotImplementedError

    def open(self, folder: Path) -> "Opened":
        """Open for reading."""
        raise NotImplementedError

    def check(self, folder: Path) -> list[str] | None:
        """What its own command for checking finds; None where there is no such command."""
        del folder

    def stored(self, number: int) -> bytes:
        """The bytes of a sample's latents as they lie on disk."""
        return raw("latents", number)


class Opened:
    """Samples that can be read. By default an epoch goes through torch's DataLoader, one item at a time."""

    def __init__(self, count: int) -> None:
        self.count = count

    def get(self, number: int) -> dict[str, Any]:
        """One sample. Raises LookupError or FileNotFoundError if it is not there, anything else if it cannot be read."""
        raise NotImplementedError

    def batch(self, numbers: Sequence[int]) -> dict[str, Any]:
        """Several samples."""
        return stack([self.get(number) for number in numbers])

    def loader(self, workers: int) -> Iterable[Any]:
        """Shuffled batches of one epoch."""
        from torch.utils.data import DataLoader

        items: Any = _Items(self)
        return DataLoader(items, batch_size=BATCH, shuffle=True, drop_last=True, num_workers=workers)

    def close(self) -> None:
        """Let go of it."""


class _Items:
    """A map-style data set."""

    def __init__(self, opened: Opened) -> None:
        self._opened = opened

    def __len__(self) -> int:
        return self._opened.count

    def __getitem__(self, number: int) -> dict[str, Any]:
        return self._opened.get(number)


class Cachestore(Way):
    """Blocks of `store.writer()`, a data set over the entries, `make_loader`."""

    name, about, package, distribution, syncs = (
        "cachestore",
        "a `store.writer()` for each 256 samples",
        "cachestore",
        "diffusion-cachestore",
        True,
    )

    def write(self, folder: Path, count: int) -> int:
        """What is acknowledged is skipped by the next run."""
        import cachestore as cs

        written = 0
        with cs.open(folder, mode="a") as store:
            missing = [number for number in range(count) if any(key not in store for key in self.keys(number).values())]
            for start in range(0, len(missing), AT_ONCE):
                with store.writer() as writer:
                    for number in missing[start : start + AT_ONCE]:
                        keys = self.keys(number)
                        writer.put(keys["latents"], {"mean": tensor("latents", number)})
                        writer.put(keys["prompt_embeds"], {"prompt_embeds": tensor("prompt_embeds", number)})
                        written += 1
            store.commit()
            self._publish(store, count)
        return written

    @staticmethod
    @functools.cache
    def keys(number: int) -> dict[str, Any]:
        """The keys of a sample's two entries."""
        import cachestore as cs

        return {name: cs.key(name, str(number)) for name in SHAPES}

    def _publish(self, store: Any, count: int) -> None:
        """Make the data set, as `precompute` does once all entries are there."""
        from cachestore.core.keys import Recipe
        from cachestore.encode.families import lookup as families
        from cachestore.encode.families.text import PLAIN
        from cachestore.store.format.catalog import Catalog, Cell, list_generations, make_column
        from cachestore.store.write.catalog_writer import draft_of, publish_draft

        if list_generations(store.layout, "train"):
            return
        vae = {"scaling_factor": 1.0, "latent_channels": 4, "block_out_channels": [1, 1, 1, 1]}
        read = {**families.text_read(PLAIN), "outputs": {"prompt_embeds": {"from": "prompt_embeds"}}}
        recipes = {
            "latents": Recipe("latents", {}, families.latents_read(families.vae_family("AutoencoderKL"), vae, "mean")),
            "prompt_embeds": Recipe("text", {}, read),
        }
        roles = {"latents": "image", "prompt_embeds": "caption"}
        columns = tuple(
            make_column(recipe.encoder, roles[name], recipe.fingerprint, {}, [[Cell(self.keys(number)[name])] for number in range(count)])
            for name, recipe in recipes.items()
        )
        catalog = Catalog(
            name="train",
            request={},
            recipes={recipe.fingerprint: recipe for recipe in recipes.values()},
            ids=[f"{number:08}" for number in range(count)],
            captions_at=list(range(count + 1)),
            captions=["" for _number in range(count)],
            images={},
            extras=["{}" for _number in range(count)],
            columns=columns,
        )
        publish_draft(store.layout, draft_of(catalog), after=0)

    def open(self, folder: Path) -> Opened:
        """Read entries by key, and batches as a trainer does."""
        return _OpenedStore(folder, self)

    def check(self, folder: Path) -> list[str] | None:
        """`cachestore verify`."""
        import cachestore as cs

        return [finding.message for finding in cs.verify(folder).findings]


class _OpenedStore(Opened):
    def __init__(self, folder: Path, way: Cachestore) -> None:
        import cachestore as cs

        self._folder, self._way, self._store = folder, way, cs.open(folder)

    @functools.cached_property
    def _data(self) -> Any:
        import cachestore as cs

        return cs.CachedDataset(self._folder, latents="raw")

    def get(self, number: int) -> dict[str, Any]:
        keys = self._way.keys(number)
        return {
            "latents": self._store.get(keys["latents"])["mean"],
            "prompt_embeds": self._store.get(keys["prompt_embeds"])["prompt_embeds"],
        }

    def batch(self, numbers: Sequence[int]) -> dict[str, Any]:
        return self._data.read_batch(numbers)

    def loader(self, workers: int) -> Iterable[Any]:
        import cachestore as cs

        return cs.make_loader(self._data, batch_size=BATCH, num_workers=workers)

    def close(self) -> None:
        self._store.close()


class Files(Way):
    """Files for each sample. What exists is skipped by the next run."""

    def paths(self, folder: Path, number: int) -> dict[str, Path]:
        """The files of a sample, by tensor."""
        raise NotImplementedError

    def save(self, path: Path, name: str, number: int) -> None:
        """Write one file."""
        raise NotImplementedError

    def load(self, path: Path, name: str) -> Any:
        """Read one tensor."""
        raise NotImplementedError

    def is_there(self, path: Path, name: str) -> bool:
        """Whether a later run takes this file as done."""
        del name
        return path.exists()

    def write(self, folder: Path, count: int) -> int:
        """One file after the other."""
        return sum(self._write_one(folder, number) for number in range(count))

    def _write_one(self, folder: Path, number: int) -> int:
        """Returns 1 if a file had to be written."""
        missing = [(path, name) for name, path in self.paths(folder, number).items() if not self.is_there(path, name)]
        for path, name in missing:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.save(path, name, number)
        return int(bool(missing))

    def open(self, folder: Path) -> Opened:
        """There is nothing to open; the files are found by their names."""
        return _OpenedFiles(folder, self)


class _OpenedFiles(Opened):
    def __init__(self, folder: Path, way: Files) -> None:
        self._folder, self._way = folder, way
        if not folder.is_dir():
            raise FileNotFoundError(folder)

    def get(self, number: int) -> dict[str, Any]:
        return {name: self._way.load(path, name) for name, path in self._way.paths(self._folder, number).items()}


class SimpleTuner(Files):
    """Two `.pt` files, written to a temporary name, synced and renamed (`LocalDataBackend` with atomicwrites), 16 at a time."""

    name, about, distribution, syncs = "SimpleTuner", "two `.pt` files a sample, each written to a temporary name", "commit bc8e6ab", True

    def paths(self, folder: Path, number: int) -> dict[str, Path]:
        """VAE files by the SHA-256 of the picture's name, text files by the MD5 of the caption."""
        vae = hashlib.sha256(f"{number:08}".encode()).hexdigest()
        text = hashlib.md5(f"caption {number}".encode(), usedforsecurity=False).hexdigest()
        return {"latents": folder / "vae" / f"{vae}.pt", "prompt_embeds": folder / "text" / f"{text}-sd1x.pt"}

    def write(self, folder: Path, count: int) -> int:
        """Its threads."""
        with ThreadPoolExecutor(16) as threads:
            return sum(threads.map(lambda number: self._write_one(folder, number), range(count)))

    def save(self, path: Path, name: str, number: int) -> None:
        """A bare tensor for latents, a dict with a batch axis for text."""
        import torch

        value = tensor(name, number)
        temporary = path.with_name(f"tmp{number}-{name}")
        with temporary.open("wb") as file:
            torch.save(value if name == "latents" else {name: value[None]}, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_folder(path.parent)

    def load(self, path: Path, name: str) -> Any:
        """As its own reader, on the CPU."""
        import torch

        value = torch.load(path, map_location="cpu", weights_only=True)
        return value if name == "latents" else value[name][0]


class SdScripts(Files):
    """Two `.npz` files by `np.savez`, straight to their final names, in float32 (bfloat16 is converted before)."""

    name, about, distribution = "sd-scripts", "two `.npz` files a sample, in float32", "commit 48d368f"
    _names: Final = {"latents": "latents", "prompt_embeds": "hidden_state1"}

    def paths(self, folder: Path, number: int) -> dict[str, Path]:
        """Beside the pictures."""
        return {"latents": folder / f"{number:08}_0512x0512_sd.npz", "prompt_embeds": folder / f"{number:08}_te_outputs.npz"}

    def is_there(self, path: Path, name: str) -> bool:
        """Whether the file exists and has its keys; a file that cannot be opened is an error, and ends the run."""
        return path.exists() and self._names[name] in np.load(path)

    def save(self, path: Path, name: str, number: int) -> None:
        """Values, and for latents the sizes."""
        value = tensor(name, number).float().numpy()
        if name == "latents":
            np.savez(path, latents=value, original_size=np.array([512, 512]), crop_ltrb=np.array([0, 0, 512, 512]))
        else:
            np.savez(path, hidden_state1=value)

    def load(self, path: Path, name: str) -> Any:
        """As its own reader."""
        import torch

        return torch.from_numpy(np.load(path)[self._names[name]])

    def stored(self, number: int) -> bytes:
        """Converted."""
        return tensor("latents", number).float().numpy().tobytes()


class Safetensors(Files):
    """Two safetensors files by `save_file`, straight to their final names, as musubi-tuner and ai-toolkit do."""

    name, about, distribution = "musubi-tuner", "two `.safetensors` files a sample", "commit 30c658c"
    _names: Final = {"latents": "latents_1x64x64_bfloat16", "prompt_embeds": "varlen_t5_bfloat16"}

    def paths(self, folder: Path, number: int) -> dict[str, Path]:
        """In the cache's folder."""
        return {"latents": folder / f"{number:08}_0512x0512_wan.safetensors", "prompt_embeds": folder / f"{number:08}_wan_te.safetensors"}

    def save(self, path: Path, name: str, number: int) -> None:
        """With its metadata."""
        from safetensors.torch import save_file

        metadata = {"architecture": "wan", "width": "512", "height": "512", "format_version": "1.0.1"}
        save_file({self._names[name]: tensor(name, number)}, path, metadata=metadata)

    def load(self, path: Path, name: str) -> Any:
        """The whole file."""
        from safetensors.torch import load_file

        return load_file(path)[self._names[name]]


class PtFolder(Way):
    """One `.pt` file with both tensors by `torch.save`: what a script of one's own does."""

    name, about, distribution = ".pt folder", "one `.pt` file a sample, `torch.save` to its final name", "torch"

    def write(self, folder: Path, count: int) -> int:
        """What exists is skipped."""
        import torch

        folder.mkdir(parents=True, exist_ok=True)
        missing = [number for number in range(count) if not (folder / f"{number:08}.pt").exists()]
        for number in missing:
            torch.save(sample(number), folder / f"{number:08}.pt")
        return len(missing)

    def open(self, folder: Path) -> Opened:
        """There is nothing to open."""
        return _OpenedPt(folder)


class _OpenedPt(Opened):
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def get(self, number: int) -> dict[str, Any]:
        import torch

        return torch.load(self._folder / f"{number:08}.pt", weights_only=True)


class Lmdb(Way):
    """One value for each tensor, 256 samples in a transaction, LMDB's own syncing."""

    name, about, package, distribution, syncs = "LMDB", "one value a tensor, transactions of 256 samples", "lmdb", "lmdb", True

    def write(self, folder: Path, count: int) -> int:
        """What was committed is skipped."""
        import lmdb

        folder.mkdir(parents=True, exist_ok=True)
        with lmdb.open(str(folder), map_size=MAP_BYTES) as made:
            with made.begin() as reading:
                missing = [number for number in range(count) if reading.get(self.key(number, "prompt_embeds")) is None]
            for start in range(0, len(missing), AT_ONCE):
                with made.begin(write=True) as writing:
                    for number in missing[start : start + AT_ONCE]:
                        for name in SHAPES:
                            writing.put(self.key(number, name), raw(name, number))
        return len(missing)

    @staticmethod
    def key(number: int, name: str) -> bytes:
        """Under which a tensor lies."""
        return b"%08d.%s" % (number, name.encode())

    def open(self, folder: Path) -> Opened:
        """Once in each process, as LMDB demands."""
        return _OpenedLmdb(folder)


class _OpenedLmdb(Opened):
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._environments: dict[int, Any] = {}

    @property
    def _environment(self) -> Any:
        import lmdb

        found = self._environments.get(os.getpid())
        if found is None:
            found = self._environments[os.getpid()] = lmdb.open(str(self._folder), readonly=True, lock=False, readahead=False)
        return found

    def get(self, number: int) -> dict[str, Any]:
        import torch

        found = {}
        with self._environment.begin(buffers=True) as reading:
            for name, shape in SHAPES.items():
                value = reading.get(Lmdb.key(number, name))
                if value is None:
                    raise KeyError(number)
                found[name] = torch.frombuffer(bytearray(value), dtype=torch.bfloat16).view(shape)
        return found

    def loader(self, workers: int) -> Iterable[Any]:
        self.close()  # a fork must not inherit it
        return super().loader(workers)

    def close(self) -> None:
        for environment in self._environments.values():
            environment.close()
        self._environments.clear()


class Mds(Way):
    """MosaicML streaming: `MDSWriter` and `StreamingDataset` on local files, shards of 64 MiB, a hash of each shard."""

    name, about, package, distribution = "MosaicML streaming", "MDS shards of 64 MiB, xxh64 of each", "streaming", "mosaicml-streaming"

    def prepare(self) -> Any:
        """Its package imports torchvision for classes that are not used here; wheels of that load beside torch with CUDA alone."""
        import torch

        for name in ("nms", "qnms"):
            with contextlib.suppress(RuntimeError):  # it was defined by an earlier call, or by a torchvision that loads
                torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return import_module("streaming")

    def write(self, folder: Path, count: int) -> int:
        """It takes an empty folder only."""
        columns = {name: f"ndarray:uint16:{','.join(map(str, shape))}" for name, shape in SHAPES.items()}
        with self.prepare().MDSWriter(out=str(folder), columns=columns, hashes=["xxh64"]) as writer:
            for number in range(count):
                writer.write({name: np.frombuffer(raw(name, number), np.uint16).reshape(shape) for name, shape in SHAPES.items()})
        return count

    def open(self, folder: Path) -> Opened:
        """With `local` only."""
        return _OpenedMds(folder, self.prepare())


def _as_tensors(found: Mapping[str, Any]) -> dict[str, Any]:
    """Numpy has no bfloat16; the samples were stored as whole numbers."""
    import torch

    return {name: torch.from_numpy(np.array(found[name])).view(torch.bfloat16) for name in SHAPES}


def _collate_arrays(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return stack([_as_tensors(one) for one in found])


class _OpenedMds(Opened):
    def __init__(self, folder: Path, streaming: Any) -> None:
        import_module("streaming.base.util")
        streaming.base.util.clean_stale_shared_memory()
        self._streaming = streaming
        self._data = streaming.StreamingDataset(local=str(folder), shuffle=True, batch_size=BATCH, validate_hash="xxh64")

    def get(self, number: int) -> dict[str, Any]:
        return _as_tensors(self._data[number])

    def loader(self, workers: int) -> Iterable[Any]:
        return self._streaming.StreamingDataLoader(self._data, batch_size=BATCH, num_workers=workers, collate_fn=_collate_arrays)


def _as_whole_numbers(number: int) -> dict[str, Any]:
    """A sample for litData, whose serializer of tensors refuses bfloat16."""
    import torch

    return {name: value.view(torch.int16) for name, value in sample(number).items()}


class LitData(Way):
    """litData: `optimize` with chunks of 64 MB and checkpoints, `StreamingDataset` and `StreamingDataLoader`."""

    name, about, package, distribution = "litData", "chunks of 64 MB by `optimize`", "litdata", "litdata"
    kills = 2  # its workers take seconds to start

    def write(self, folder: Path, count: int) -> int:
        """With `use_checkpoint`, a run that was interrupted goes on."""
        litdata = self.prepare()
        before = len(list(folder.glob("*.bin"))) if folder.is_dir() else 0
        litdata.optimize(
            _as_whole_numbers,
            inputs=list(range(count)),
            output_dir=str(folder),
            chunk_bytes="64MB",
            num_workers=2,
            use_checkpoint=True,
            verbose=False,
        )
        return count if not before else -1

    def open(self, folder: Path) -> Opened:
        """From its folder."""
        return _OpenedLitData(folder)


class _OpenedLitData(Opened):
    def __init__(self, folder: Path) -> None:
        self._litdata = import_module("litdata")
        self._data = self._litdata.StreamingDataset(str(folder), shuffle=True, drop_last=True)

    def get(self, number: int) -> dict[str, Any]:
        import torch

        found = self._data[number]
        return {name: found[name].view(torch.bfloat16) for name in SHAPES}

    def loader(self, workers: int) -> Iterable[Any]:
        return self._litdata.StreamingDataLoader(self._data, batch_size=BATCH, num_workers=workers)


WAYS: Final[Mapping[str, Way]] = {
    way.name: way for way in (Cachestore(), SimpleTuner(), SdScripts(), Safetensors(), PtFolder(), Lmdb(), Mds(), LitData())
}


# Steps, each in a process of its own


def files_in(folder: Path) -> list[Path]:
    """All files below a folder."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def sync_folder(folder: Path) -> None:
    """Make the names in it durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def sync_all(folder: Path) -> None:
    """Make everything below a folder durable."""
    for path in files_in(folder):
        with path.open("rb") as file:
            os.fsync(file.fileno())
    for child in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
        sync_folder(child)


def write(way: Way, folder: Path, count: int) -> dict[str, Any]:
    """Store the samples; sync what the way does not sync itself, in a time of its own."""
    sample(0)  # imports torch and makes the values
    way.prepare()
    began = time.perf_counter()
    written = way.write(folder, count)
    ended = time.perf_counter()
    if not way.syncs:
        sync_all(folder)
    return {"written": written, "seconds": ended - began, "sync_seconds": 0.0 if way.syncs else time.perf_counter() - ended}


def inspect(way: Way, folder: Path, count: int) -> dict[str, Any]:
    """Read every sample: how many are right, wrong, not there, or end in an error."""
    way.prepare()
    found: dict[str, Any] = {"right": 0, "wrong": 0, "missing": 0, "errors": 0, "error": None, "check": None}
    try:
        opened = way.open(folder)
    except Exception as error:  # noqa: BLE001 - whatever another library raises is the result
        return found | {"missing": count, "error": in_short(error)}
    for number in range(count):
        try:
            found["right" if is_right(opened.get(number), number) else "wrong"] += 1
        except (LookupError, FileNotFoundError):
            found["missing"] += 1
        except Exception as error:  # noqa: BLE001 - as above
            found["errors"] += 1
            found["error"] = found["error"] or in_short(error)
    return found | {"check": way.check(folder)}


def kill(way: Way, folder: Path, count: int) -> dict[str, Any]:
    """Kill writers after a part of the bytes, look at what is left, run the same writer again, and look again."""
    way.prepare()
    sample(0)
    whole = folder / "whole"
    _in_a_fork(lambda: way.write(whole, count))
    size = bytes_in(whole)
    rounds = [_kill_once(way, folder / f"{number}", count, size * part) for number, part in enumerate(KILLED_AT[: way.kills])]
    shutil.rmtree(folder)
    return {"samples": count, "rounds": rounds}


def _kill_once(way: Way, folder: Path, count: int, size: float) -> dict[str, Any]:
    child = _fork(lambda: way.write(folder, count))
    deadline = time.monotonic() + STEP_SECONDS
    while bytes_in(folder) < size and os.waitpid(child, os.WNOHANG)[0] == 0:
        if time.monotonic() > deadline:
            break
    else:
        if bytes_in(folder) < size:
            raise RuntimeError(f"{way.name}: the writer ended before it was killed")
    with contextlib.suppress(ProcessLookupError, ChildProcessError):
        os.killpg(child, signal.SIGKILL)  # its workers too
        os.waitpid(child, 0)
    left = _in_a_fork(lambda: inspect(way, folder, count))
    again = _in_a_fork(lambda: {"written": way.write(folder, count)})
    return {"left": left, "again": again, "after": _in_a_fork(lambda: inspect(way, folder, count))}


def _fork(function: Callable[[], object]) -> int:
    """Start a process of a group of its own that calls this and ends."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        with contextlib.suppress(OSError):
            os.setpgid(child, child)
        return child
    try:
        os.setpgid(0, 0)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        function()
    except BaseException:  # noqa: BLE001 - a forked process must not return into its parent's code
        os._exit(1)
    os._exit(0)


def _in_a_fork(function: Callable[[], Any]) -> Any:
    """What a function returns in a process of its own, or {"error": …}. The process has an end."""
    descriptor, path = tempfile.mkstemp()

    def report() -> None:
        try:
            found = function()
        except Exception as error:  # noqa: BLE001 - whatever another library raises is the result
            found = {"error": in_short(error)}
        os.write(descriptor, json.dumps(found).encode())

    child = _fork(report)
    deadline = time.monotonic() + STEP_SECONDS
    while os.waitpid(child, os.WNOHANG)[0] == 0:
        if time.monotonic() > deadline:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            break
        time.sleep(0.01)
    text = Path(path).read_text()
    os.close(descriptor)
    Path(path).unlink()
    return json.loads(text) if text else {"error": "no end within the limit"}


def bytes_in(folder: Path) -> int:
    """Sum of the sizes of all files; files may go meanwhile."""
    found = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            status = path.lstat()
            found += status.st_size if stat.S_ISREG(status.st_mode) else 0
    return found


def in_short(error: BaseException) -> str:
    """An error in one line, without the folder that it happened in."""
    line = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {' '.join(word for word in line.split() if '/' not in word)}"[:160]


def measure(way: Way, folder: Path, count: int) -> dict[str, Any]:
    """Open, single samples, batches of 16 and epochs, with all files in the page cache."""
    for path in files_in(folder):
        with path.open("rb", buffering=0) as file:
            while file.read(1 << 20):
                pass
    found: dict[str, Any] = {"open_ms": 1e3 * statistics.median(_seconds(lambda: _open_once(way, folder)) for _turn in range(5))}
    opened = way.open(folder)
    opened.count = count
    random = Random(0)
    numbers = random.choices(range(count), k=min(2000, 4 * count))
    gets = [_seconds(lambda n=number: touch(opened.get(n))) for number in numbers]
    found["get_us"] = 1e6 * statistics.median(gets)
    drawn = [random.sample(range(count), BATCH) for _turn in range(min(300, count))]
    batches = [_seconds(lambda b=batch: touch(opened.batch(b))) for batch in drawn]
    found["batch_ms"] = 1e3 * statistics.median(batches)
    opened.close()
    found["epochs"] = {str(workers): _epochs(way, folder, count, workers) for workers in (0, 2)}
    return found


def _open_once(way: Way, folder: Path) -> None:
    opened = way.open(folder)
    touch(opened.get(0))
    opened.close()


def _epochs(way: Way, folder: Path, count: int, workers: int) -> dict[str, Any]:
    """Samples a second of a first epoch after opening, and of the next one."""
    opened = way.open(folder)
    opened.count = count
    loader, rates = opened.loader(workers), list[float]()
    for _epoch in range(2):
        began, samples = time.perf_counter(), 0
        for batch in _batches(loader):
            touch(batch)
            samples += len(batch["latents"])
        rates.append(samples / (time.perf_counter() - began))
        if samples < count - 4 * BATCH:
            raise RuntimeError(f"{way.name}: an epoch of {samples} of {count} samples")
    opened.close()
    return {"first": rates[0], "next": rates[1]}


def _batches(loader: Iterable[Any]) -> Iterator[Any]:
    yield from loader


def touch(tensors: Mapping[str, Any]) -> None:
    """Look at one byte of each page: some readers hand out a map of a file that was not read yet."""
    import torch

    for name in SHAPES:
        tensors[name].contiguous().view(-1).view(torch.uint8)[::4096].sum()


def _seconds(function: Callable[[], object]) -> float:
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


STEPS: Final[Mapping[str, Callable[[Way, Path, int], dict[str, Any]]]] = {
    "write": write,
    "measure": measure,
    "inspect": inspect,
    "kill": kill,
}


def main() -> int:
    """Run one step."""
    parser = argparse.ArgumentParser(description="One step of bench/compare.py.")
    parser.add_argument("step", choices=STEPS)
    parser.add_argument("way", choices=WAYS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, required=True)
    arguments = parser.parse_args()
    found = STEPS[arguments.step](WAYS[arguments.way], arguments.folder, arguments.count)
    print(json.dumps(found), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
