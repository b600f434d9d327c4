"""Reading for a trainer, beside what trainers use today: `python3 scripts/bench/read.py [--only PART ...] [--json]`.

    batches   shuffled batches of 16 and 64, in the page cache, and single entries: latents of 512 KiB (bf16) and 32 KiB (fp16), ragged
              text (20 to 512 rows of 4096, bf16, and a pooled vector), tiny vectors. Ours into reused buffers, against the limit (copies
              out of a mapped raw file into one reused buffer), and against one .pt, .npz or .safetensors an item and LMDB values;
              batches of a MixedDataset against those of one data set
    cold      batches of 16 of the large latents after POSIX_FADV_DONTNEED, against the raw file read record by record
    loaders   torch's DataLoader with 0 and 2 workers, and read_batch in the trainer's process, with an idle consumer and with one that
              runs 2 ms of Python for each batch
    single    single entries of 32 KiB, 1.5 KiB and 128 bytes against LMDB values
    scale     10,000, 100,000 and 1,000,000 tiny entries: opening, looking up, getting, and the private memory of a worker

Files are brought into the page cache by reading them from their start to their end before anything is measured: what was read at
random, or written while memory was in pieces, lies there in pages of 4 KiB, which the kernel copies out at half the speed. One row
says what that costs.

Pairs are measured in turn, their order alternating; a ratio is the median of the pairs' ratios, above 1 where ours is faster. Beside it
stands which share of the processors' time went to other machines on the same host ("stolen"): large batches are read by two threads,
which gain nothing from a processor that is not there. Bytes are random; bf16 stands in the .npz files as whole numbers, which numpy can
write.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import environment

if __name__ == "__main__":
    environment.enter()

import argparse
import gc
import json
import mmap
import os
import pickle
import platform
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from random import Random
from typing import Any, Final

import numpy as np

PAIRS: Final = 9
MAP_BYTES: Final = 64 << 30
BUSY_SECONDS: Final = 0.002


@dataclass(frozen=True, slots=True)
class Row:
    """One comparison."""

    what: str
    ours: float
    other: float
    unit: str
    ratio: float
    """Median of the pairs; above 1 where ours is better."""
    lowest: float
    highest: float
    stolen: float = 0.0
    """Which share of the processors' time the machine below a virtual one gave to others meanwhile."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What an item holds."""

    name: str
    items: int
    shapes: Callable[[int], Mapping[str, tuple[int, ...]]]
    dtype: str
    is_text: bool = False

    def arrays(self, number: int) -> dict[str, np.ndarray[Any, Any]]:
        """The item's tensors as bytes: random ones, the same each time."""
        random = np.random.default_rng(number)
        return {name: random.integers(0, 120, (*shape, 2), np.uint8) for name, shape in self.shapes(number).items()}

    def tensors(self, number: int) -> dict[str, Any]:
        """The same as torch tensors."""
        import torch

        dtype = getattr(torch, self.dtype)
        return {name: torch.from_numpy(array).view(dtype)[..., 0] for name, array in self.arrays(number).items()}

    def size_bytes(self, number: int) -> int:
        """Bytes of the item."""
        return sum(2 * int(np.prod(shape)) for shape in self.shapes(number).values())


def _ragged(number: int) -> dict[str, tuple[int, ...]]:
    return {"prompt_embeds": (Random(number).randint(20, 512), 4096), "pooled_prompt_embeds": (768,)}


KINDS: Final = (
    Kind("latents 512 KiB", 512, lambda _n: {"latents": (16, 128, 128)}, "bfloat16"),
    Kind("latents 32 KiB", 4096, lambda _n: {"latents": (4, 64, 64)}, "float16"),
    Kind("ragged text", 192, _ragged, "bfloat16", is_text=True),
    Kind("tiny vectors", 20_000, lambda _n: {"latents": (64,)}, "float16"),
)
SINGLE: Final = (KINDS[1], Kind("pooled text 1.5 KiB", 8000, lambda _n: {"latents": (768,)}, "bfloat16"), KINDS[3])
"""What single reads alone are measured with."""


# What items are kept in


class Files:
    """One file an item."""

    def __init__(self, folder: Path, kind: Kind, suffix: str) -> None:
        self.folder, self.kind, self.name = folder / suffix, kind, f"one .{suffix} an item"
        self.folder.mkdir()
        for number in range(kind.items):
            getattr(self, f"_write_{suffix}")(self.path(number), kind.tensors(number))
        self.read: Callable[[int], dict[str, Any]] = getattr(self, f"_read_{suffix}")

    def path(self, number: int) -> Path:
        """Where an item is."""
        return self.folder / f"{number:07}"

    @staticmethod
    def _write_pt(path: Path, tensors: dict[str, Any]) -> None:
        import torch

        torch.save({name: tensor.clone() for name, tensor in tensors.items()}, path)

    def _read_pt(self, number: int) -> dict[str, Any]:
        import torch

        return torch.load(self.path(number), weights_only=True)

    @staticmethod
    def _write_npz(path: Path, tensors: dict[str, Any]) -> None:
        import torch

        with path.open("wb") as file:
            np.savez(file, **{name: tensor.contiguous().view(torch.int16).numpy() for name, tensor in tensors.items()})

    def _read_npz(self, number: int) -> dict[str, Any]:
        import torch

        with np.load(self.path(number)) as found:
            return {name: torch.from_numpy(found[name]).view(getattr(torch, self.kind.dtype)) for name in found.files}

    @staticmethod
    def _write_safetensors(path: Path, tensors: dict[str, Any]) -> None:
        from safetensors.torch import save_file

        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)

    def _read_safetensors(self, number: int) -> dict[str, Any]:
        from safetensors.torch import load_file

        return load_file(self.path(number))


class LmdbValues:
    """One LMDB file whose values are the items' bytes; shapes follow from their length."""

    name = "LMDB values"

    def __init__(self, folder: Path, kind: Kind) -> None:
        import lmdb

        self.kind = kind
        path = str(folder / "values.lmdb")
        with lmdb.open(path, map_size=MAP_BYTES, subdir=False, lock=False, sync=False) as made, made.begin(write=True) as writing:
            for number in range(kind.items):
                joined = b"".join(tensor.contiguous().view(-1).numpy().tobytes() for tensor in self._as_bytes(kind.tensors(number)))
                writing.put(b"%08d" % number, joined, append=True)
        self.environment = lmdb.open(path, subdir=False, lock=False, readonly=True, readahead=False, max_spare_txns=1)

    @staticmethod
    def _as_bytes(tensors: Mapping[str, Any]) -> Iterable[Any]:
        import torch

        return (tensor.contiguous().view(torch.uint8) for tensor in tensors.values())

    def read(self, number: int) -> dict[str, Any]:
        """One item, its bytes copied out of the map."""
        import torch

        with self.environment.begin(buffers=True) as reading:
            raw = bytearray(reading.get(b"%08d" % number, b""))
        flat = torch.frombuffer(raw, dtype=getattr(torch, self.kind.dtype))
        found: dict[str, Any] = {}
        for name, shape in self.kind.shapes(number).items():
            size = int(np.prod(shape))
            found[name], flat = flat[:size].view(shape), flat[size:]
        return found


class Raw:
    """All items in one plain file: the limit, and what cold reads are held against."""

    def __init__(self, folder: Path, kind: Kind) -> None:
        self.kind, self.path = kind, folder / "raw"
        self.starts = [0]
        with self.path.open("wb") as file:
            for number in range(kind.items):
                for array in kind.arrays(number).values():
                    file.write(array.data)
                self.starts.append(file.tell())
            file.flush()
            os.fsync(file.fileno())
        self.descriptor = os.open(self.path, os.O_RDONLY)
        self.map_anew()
        self.buffer = _whole_pages(64 * max(map(kind.size_bytes, range(min(kind.items, 512)))))

    def map_anew(self) -> None:
        """Map the file; what was mapped before is let go of, so that its pages can leave the page cache."""
        self.mapping = memoryview(mmap.mmap(self.descriptor, 0, access=mmap.ACCESS_READ))

    def copy_out(self, batches: Sequence[Sequence[int]]) -> None:
        """Copy each item of each batch out of the map, one after the other into one reused buffer."""
        for batch in batches:
            position = 0
            for number in batch:
                start, end = self.starts[number], self.starts[number + 1]
                self.buffer[position : position + end - start] = self.mapping[start:end]
                position += end - start

    def read_records(self, batches: Sequence[Sequence[int]]) -> None:
        """Read each item of each batch by a positional read of its own."""
        for batch in batches:
            position = 0
            for number in batch:
                start, end = self.starts[number], self.starts[number + 1]
                position += os.preadv(self.descriptor, [self.buffer[position : position + end - start]], start)


def _whole_pages(size: int) -> memoryview:
    """Memory that starts with a page, as the file does: 16 bytes on, where malloc begins, some processors copy at a third of the speed."""
    held = np.ones(size + mmap.PAGESIZE, np.uint8)
    start = -held.ctypes.data % mmap.PAGESIZE
    return memoryview(held[start : start + size].data)


def make_store(folder: Path, kind: Kind) -> Path:
    """A store of the items with a catalog, as `precompute` leaves it."""
    import cachestore as cs
    from cachestore.core.keys import Recipe
    from cachestore.encode.families import lookup as families
    from cachestore.encode.families.text import PLAIN
    from cachestore.store.format.catalog import Catalog, Cell, make_column
    from cachestore.store.write.catalog_writer import draft_of, publish_draft

    if kind.is_text:
        read = {**families.text_read(PLAIN)}
        read["outputs"] = {name: {"from": name} for name in ("prompt_embeds", "pooled_prompt_embeds")}
        recipe, role = Recipe("text", {"of": kind.name}, read), "caption"
    else:
        vae = {"scaling_factor": 1.0, "latent_channels": 4, "block_out_channels": [1, 1, 1, 1]}
        recipe, role = (
            Recipe("latents", {"of": kind.name}, families.latents_read(families.vae_family("AutoencoderKL"), vae, "mean")),
            "image",
        )
    keys = [cs.key(kind.name, str(number)) for number in range(kind.items)]
    rename = {"latents": "mean"}
    with cs.open(folder / "store", mode="a") as store:
        with store.writer() as writer:
            for number, key in enumerate(keys):
                writer.put(key, {rename.get(name, name): tensor.contiguous() for name, tensor in kind.tensors(number).items()})
        store.commit()
        column = make_column(recipe.encoder, role, recipe.fingerprint, {}, [[Cell(key)] for key in keys])
        rows = range(kind.items)
        catalog = Catalog(
            name="train",
            request={},
            recipes={recipe.fingerprint: recipe},
            ids=[f"{number:08}" for number in rows],
            captions_at=list(range(kind.items + 1)),
            captions=["" for _row in rows],
            images={},
            extras=["{}" for _row in rows],
            columns=(column,),
        )
        publish_draft(store.layout, draft_of(catalog), after=0)
    return folder / "store"


# Measuring


def compare(
    what: str,
    size: float,
    unit: str,
    ours: Callable[[], object],
    other: Callable[[], object],
    *,
    before: Callable[[], object] = lambda: None,
) -> Row:
    """Run both in turn, the order changing from pair to pair; `before` runs outside of the time taken."""
    times: list[tuple[float, float]] = []
    stolen, passed = ticks()
    for number in range(PAIRS + 1):
        pair = [_seconds(function, before) for function in ((ours, other) if number % 2 else (other, ours))]
        times.append((pair[0], pair[1]) if number % 2 else (pair[1], pair[0]))
    del times[0]  # warms up
    ratios = [theirs / mine for mine, theirs in times]
    rates = [size / statistics.median(pair[side] for pair in times) for side in range(2)]
    fraction = (ticks()[0] - stolen) / max(1, ticks()[1] - passed)
    ratio, lowest, highest = (round(f(ratios), 2) for f in (statistics.median, min, max))
    row = Row(what, round(rates[0], 1), round(rates[1], 1), unit, ratio, lowest, highest, round(fraction, 2))
    print(f"{row.what}: {row.ratio}, {row.stolen:.0%} of the processors stolen", file=sys.stderr)
    return row


def ticks() -> tuple[int, int]:
    """How long the processors were stolen, and how long there were any; (0, 0) where nothing tells."""
    path = Path("/proc/stat")
    if not path.exists():
        return 0, 0
    times = [int(word) for word in path.read_text().split("\n", 1)[0].split()[1:9]]
    return times[7], sum(times)


def _seconds(function: Callable[[], object], before: Callable[[], object]) -> float:
    before()
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def batches_of(count: int, size: int) -> list[list[int]]:
    """All items once, shuffled, in whole batches."""
    order = Random(0).sample(range(count), count)
    return [order[start : start + size] for start in range(0, count - size + 1, size)]


def collate_plainly(samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What trainers do with items that they loaded: stack, or pad to the longest with a mask."""
    import torch

    batch = {}
    for name in samples[0]:
        rows = [sample[name] for sample in samples]
        if name != "prompt_embeds":
            batch[name] = torch.stack(rows)
            continue
        longest = max(len(row) for row in rows)
        batch[name] = torch.zeros((len(rows), longest, rows[0].shape[1]), dtype=rows[0].dtype)
        batch["mask"] = torch.zeros((len(rows), longest), dtype=torch.int64)
        for number, row in enumerate(rows):
            batch[name][number, : len(row)] = row
            batch["mask"][number, : len(row)] = 1
    return batch


def read_all(data: Any, batches: Sequence[Sequence[int]], buffers: Any) -> None:
    """An epoch in the trainer's process."""
    for batch in batches:
        data.read_batch(batch, into=buffers)


def read_all_alone(data: Any, batches: Sequence[Sequence[int]], buffers: Any) -> None:
    """The same where torch, and so we, may use one thread, as in a DataLoader's worker."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        read_all(data, batches, buffers)
    finally:
        torch.set_num_threads(before)


def measure_batches(folder: Path, kind: Kind) -> list[Row]:
    """Every row of one kind of item, in the page cache."""
    import cachestore as cs
    from cachestore.train.buffers import BatchBuffers

    store, raw = make_store(folder, kind), Raw(folder, kind)
    peers: list[Any] = [*(Files(folder, kind, suffix) for suffix in ("pt", "npz", "safetensors")), LmdbValues(folder, kind)]
    buffers = BatchBuffers()
    handles = {
        'verify="first", steady': cs.CachedDataset(store, latents="raw"),
        'verify="always"': cs.CachedDataset(store, latents="raw", verify="always"),
        'io="mmap"': cs.CachedDataset(store, latents="raw", io="mmap"),
    }
    steady, rows = handles['verify="first", steady'], []
    files = [raw.path, *store.glob("segments/*/*.safetensors")]
    bring_in(files)
    for size in (16, 64):
        batches = batches_of(kind.items, size)
        megabytes = sum(kind.size_bytes(number) for batch in batches for number in batch) / 1e6
        title = f"{kind.name}, batches of {size}"
        bytes_of = megabytes, "MB/s"
        rows += [
            compare(
                f"{title}, {how}{threads} / limit",
                *bytes_of,
                lambda r=read, h=how, b=batches: r(handles[h], b, buffers),
                lambda b=batches: raw.copy_out(b),
            )
            for threads, read in (("", read_all), (", torch on one thread", read_all_alone))
            for how in handles
        ]
        fresh: list[Any] = []

        def reopen(fresh: list[Any] = fresh) -> None:
            fresh[:] = [cs.CachedDataset(store, latents="raw")]

        rows.append(
            compare(
                f"{title}, checking epoch / limit",
                *bytes_of,
                lambda b=batches, f=fresh: read_all(f[0], b, buffers),
                lambda b=batches: raw.copy_out(b),
                before=reopen,
            )
        )
        rows.append(
            compare(
                f"{title}, bare preadv of the raw file / limit",
                *bytes_of,
                lambda b=batches: raw.read_records(b),
                lambda b=batches: raw.copy_out(b),
            )
        )
        halves = cs.MixedDataset([steady.select(range(first, len(steady), 2)) for first in range(2)])
        rows.append(
            compare(
                f"{title} of two data sets / of one",
                *bytes_of,
                lambda b=batches, h=halves: read_all(h, b, buffers),
                lambda b=batches: read_all(steady, b, buffers),
            )
        )
        for peer in peers:

            def load(peer: Any = peer, batches: Sequence[Sequence[int]] = batches) -> None:
                for batch in batches:
                    collate_plainly([peer.read(number) for number in batch])

            rows.append(compare(f"{title} / {peer.name}", *bytes_of, lambda b=batches: read_all(steady, b, buffers), load))
    rows += measure_gets(store, kind, peers)
    batches = batches_of(kind.items, 16)
    raw.map_anew()
    handles.clear()
    gc.collect()  # pages that are mapped do not leave the page cache
    drop(files)
    read_all(steady, batches, buffers)
    raw.read_records(batches)
    how = f"{kind.name}, batches of 16, steady after a cold epoch that was read at random / limit"
    megabytes = sum(kind.size_bytes(number) for batch in batches for number in batch) / 1e6
    rows.append(compare(how, megabytes, "MB/s", lambda: read_all(steady, batches, buffers), lambda: raw.copy_out(batches)))
    return rows


def measure_gets(store: Path, kind: Kind, peers: Sequence[Any], look: Callable[[Mapping[str, Any]], None] | None = None) -> list[Row]:
    """Single entries: the median and the 99th percentile of the time of one, ours and each peer's in turn.

    One byte of each page is looked at, as some of what peers return is a view of a file that was not read yet. `look` does something else.
    """
    look = look or touch
    import cachestore as cs

    numbers = Random(1).choices(range(kind.items), k=2000 if kind.size_bytes(0) < 1 << 16 else 400)
    keys = [cs.key(kind.name, str(number)) for number in range(kind.items)]
    rows: list[Row] = []
    with cs.open(store) as reading:
        for peer in peers:
            times: tuple[list[float], list[float]] = ([], [])
            for number in numbers:
                ours, theirs = (lambda n=number: look(reading.get(keys[n]))), (lambda n=number, p=peer: look(p.read(n)))
                for side, function in enumerate((ours, theirs)):
                    times[side].append(_seconds(function, lambda: None))
            for name, quantile in (("p50", 50), ("p99", 99)):
                mine, other = (statistics.quantiles(side, n=100)[quantile - 1] * 1e6 for side in times)
                ratio = round(other / mine, 2)
                rows.append(Row(f"{kind.name}, get {name} / {peer.name}", round(mine, 1), round(other, 1), "us", ratio, ratio, ratio))
    return rows


def measure_single(folder: Path, kind: Kind) -> list[Row]:
    """Single entries beside LMDB's values, whose bytes are copied too, so that nothing else has to be looked at."""
    (folder / kind.name).mkdir()
    store = make_store(folder / kind.name, kind)
    return measure_gets(store, kind, [LmdbValues(folder / kind.name, kind)], lambda _tensors: None)


def touch(tensors: Mapping[str, Any]) -> None:
    """Look at one byte of each page."""
    import torch

    for tensor in tensors.values():
        tensor.contiguous().view(-1).view(torch.uint8)[::4096].sum()


def drop(paths: Iterable[Path]) -> None:
    """Have the files leave the page cache."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def resident_fraction(path: Path) -> float:
    """How much of a file is in the page cache, by 200 looks."""
    size = path.stat().st_size
    descriptor = os.open(path, os.O_RDONLY)
    found = 0
    for step in range(200):
        try:
            found += os.preadv(descriptor, [bytearray(1)], size * step // 200, os.RWF_NOWAIT)
        except BlockingIOError:
            continue
    os.close(descriptor)
    return found / 200


def bring_in(files: Iterable[Path]) -> None:
    """Have files in the page cache as a reader from start to end leaves them there: in large pages."""
    drop(files)
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.read(1 << 20):
                pass


def measure_cold(folder: Path, kind: Kind) -> list[Row]:
    """Nothing in memory, each time."""
    import cachestore as cs
    from cachestore.train.buffers import BatchBuffers

    store, raw = make_store(folder, kind), Raw(folder, kind)
    raw.mapping.release()
    files = [raw.path, *store.glob("segments/*/*.safetensors")]
    batches, buffers = batches_of(kind.items, 16), BatchBuffers()
    megabytes = len(batches) * 16 * kind.size_bytes(0) / 1e6
    fractions: list[float] = []

    def forget() -> None:
        gc.collect()
        drop(files)
        fractions.append(max(map(resident_fraction, files)))

    def prefetch_one() -> None:
        data = cs.CachedDataset(store, latents="raw")
        for batch, following in zip(batches, [*batches[1:], []], strict=True):
            data.prefetch(following)
            data.read_batch(batch, into=buffers)

    def plainly() -> None:
        read_all(cs.CachedDataset(store, latents="raw"), batches, buffers)

    rows = [
        compare(
            f"cold, {kind.name}, {how} / raw file record by record",
            megabytes,
            "MB/s",
            ours,
            lambda: raw.read_records(batches),
            before=forget,
        )
        for how, ours in (("one batch prefetched", prefetch_one), ("nothing prefetched", plainly))
    ]
    if max(fractions) > 0.02:
        print(f"not cold: {max(fractions):.0%} of a file was still in memory", file=sys.stderr)
    return rows


def measure_loaders(folder: Path, kind: Kind) -> list[Row]:
    """Epochs of batches of 16 as a trainer asks for them; the DataLoader's workers are alive before time is taken."""
    from torch.utils.data import DataLoader

    import cachestore as cs
    from cachestore.train.buffers import BatchBuffers

    data = cs.CachedDataset(make_store(folder, kind), latents="raw")
    batches, buffers, rows = batches_of(kind.items, 16), BatchBuffers(), []
    for workers in (0, 2):
        loader = DataLoader(
            data,
            batch_sampler=batches,
            collate_fn=data.collate,
            num_workers=workers,
            persistent_workers=workers > 0,
            multiprocessing_context="fork" if workers else None,
        )
        for busy in (0.0, BUSY_SECONDS):

            def ours(busy: float = busy) -> None:
                for batch in batches:
                    data.read_batch(batch, into=buffers)
                    use(busy)

            def theirs(loader: Any = loader, busy: float = busy) -> None:
                for _batch in loader:
                    use(busy)

            what = f"{kind.name}, read_batch in process / DataLoader, {workers} workers, consumer {'busy 2 ms' if busy else 'idle'}"
            rows.append(compare(what, len(batches) * 16, "samples/s", ours, theirs))
    return rows


def use(seconds: float) -> None:
    """Run Python, holding the interpreter."""
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


# Many entries


def fill_tiny(folder: Path, count: int) -> Path:
    """A store and a catalog of so many vectors of 128 bytes."""
    return make_store(folder, Kind("tiny", count, lambda _n: {"latents": (64,)}, "float16"))


def measure_scale(folder: Path, counts: Sequence[int]) -> list[Row]:
    """How opening, looking up, getting and memory grow with the number of entries."""
    rows: list[Row] = []
    stores = {count: fill_tiny(folder / str(count), count) for count in counts}
    for count, store in stores.items():
        rows += [measure_open(store, count), *measure_look_ups(store, count)]
        rows += [measure_memory(store, count, method) for method in ("fork", "spawn")]
    few, many = min(counts), max(counts)
    what = f"a get at {many:,} entries / at {few:,}"
    return [*rows, compare(what, 4000, "a second", getting(stores[many], many), getting(stores[few], few))]


def bare_index(store: Path) -> Any:
    """The store's index as LMDB opens it, of a copy, since one process opens a file once."""
    import lmdb

    copy = store.parent / "index.lmdb"
    if not copy.exists():
        shutil.copyfile(next((store / "index").iterdir()), copy)
    engine: dict[str, Any] = {"lib_version": 0} if int(lmdb.__version__.split(".")[0]) >= 3 else {}
    return lmdb.open(str(copy), subdir=False, readonly=True, lock=False, max_dbs=4, **engine)


def measure_open(store: Path, count: int) -> Row:
    """A handed-over reader against opening LMDB and listing the segments."""
    from cachestore.store.read.reader import Reader

    with Reader(store) as reading:
        handed = pickle.dumps(reading)

    def bare() -> None:
        bare_index(store).close()
        for folder in (store / "segments").iterdir():
            for _segment in folder.iterdir():
                pass

    def take_over() -> None:
        pickle.loads(handed).close()  # noqa: S301 - it was pickled three lines above

    return compare(f"{count:,} entries, opening with the verdict / lmdb.open and listing", 1, "a second", take_over, bare)


def measure_look_ups(store: Path, count: int) -> list[Row]:
    """Where entries stand, one at a time and in batches, against a bare get of a transaction of its own."""
    import cachestore as cs
    from cachestore.store.read.reader import Reader

    keys = [cs.key("tiny", str(number)) for number in Random(2).choices(range(count), k=4000)]
    environment_ = bare_index(store)
    table = environment_.open_db(b"entries", create=False)

    def bare() -> None:
        for key in keys:
            with environment_.begin() as transaction:
                transaction.get(key, db=table)

    with Reader(store) as reading:

        def one_by_one() -> None:
            for key in keys:
                reading.locate([key])

        def in_batches() -> None:
            for start in range(0, len(keys), 16):
                reading.locate(keys[start : start + 16])

        rows = [
            compare(f"{count:,} entries, look-up of one / bare LMDB get", len(keys), "a second", one_by_one, bare),
            compare(f"{count:,} entries, look-up in batches of 16 / bare LMDB get", len(keys), "a second", in_batches, bare),
        ]
    environment_.close()
    return rows


def getting(store: Path, count: int) -> Callable[[], object]:
    """4,000 gets of a store that stays open."""
    import cachestore as cs

    keys = [cs.key("tiny", str(number)) for number in Random(2).choices(range(count), k=4000)]
    reading = cs.open(store)
    return lambda: [reading.get(key, as_numpy=True) for key in keys]


def measure_memory(store: Path, count: int, method: str) -> Row:
    """Private memory of a DataLoader's worker above that of a process of the same kind that imports torch and does nothing."""
    found = [json.loads(_own_output("--worker", str(store) if what else "", method))["private_bytes"] / 2**20 for what in (True, False)]
    more = round(found[0] - found[1], 1)
    what = f"{count:,} entries, private MiB of a worker ({method}) above one that only imports torch"
    return Row(what, round(found[0], 1), round(found[1], 1), "MiB", more, more, more)


def _own_output(*arguments: str) -> str:
    ended = subprocess.run([sys.executable, __file__, *arguments], stdout=subprocess.PIPE, text=True, check=True)
    return ended.stdout.splitlines()[-1]


def private_bytes() -> int:
    """What this process alone has written and holds. Pages of files that are merely mapped, as the index's, are the page cache's."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Private_Dirty"))


class Nothing:
    """A data set that holds nothing, for a worker that only imports torch."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> int:
        return index

    def __getitems__(self, indices: Sequence[int]) -> list[int]:
        """Tell."""
        return [hinted_private_bytes(indices)]


def hinted_private_bytes(indices: Sequence[int]) -> int:
    """What a worker holds. Garbage is collected first: that writes to all that was inherited by fork, sooner or later, in any worker."""
    del indices
    gc.collect()
    return private_bytes()


class Watched:
    """A data set whose batches say what memory the worker holds after them."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitems__(self, indices: Sequence[int]) -> list[int]:
        """Read them, and tell."""
        for index in indices:
            self.data[index]
        return [hinted_private_bytes(indices)]


def run_worker(store: str, method: str) -> None:
    """One DataLoader worker over 64 batches; prints the most memory that it held."""
    from torch.utils.data import DataLoader

    import cachestore as cs

    data: Any = Watched(cs.CachedDataset(store, latents="raw") if store else Nothing())
    batches = [Random(n).choices(range(len(data)), k=16) for n in range(64)]
    loader = DataLoader(data, batch_sampler=batches, collate_fn=_as_they_are, num_workers=1, multiprocessing_context=method)
    print(json.dumps({"private_bytes": max(found[0] for found in loader)}))


def _as_they_are(samples: Any) -> Any:
    return samples


PARTS: Final[Mapping[str, Callable[[Path], list[Row]]]] = {
    **{kind.name: lambda folder, kind=kind: measure_batches(folder, kind) for kind in KINDS},
    "cold": lambda folder: measure_cold(folder, KINDS[0]),
    "loaders": lambda folder: measure_loaders(folder, KINDS[0]),
    "single": lambda folder: [row for kind in SINGLE for row in measure_single(folder, kind)],
    "scale": lambda folder: measure_scale(folder, (10_000, 100_000, 1_000_000)),
}


def main() -> int:
    """Measure and print one table."""
    parser = argparse.ArgumentParser(description="Reading for a trainer, beside what trainers use today.")
    parser.add_argument("--only", nargs="+", choices=sorted(PARTS), help="leave out the other parts")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--folder", help="where to work (default: a temporary folder)")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        run_worker(*arguments.worker)
        return 0
    rows: list[Row] = []
    for name, part in PARTS.items():
        if arguments.only and name not in arguments.only:
            continue
        folder = Path(tempfile.mkdtemp(prefix="cachestore-bench-", dir=arguments.folder))
        try:
            rows += part(folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    machine = {"python": platform.python_version(), "system": platform.platform(), "processors": os.cpu_count()}
    if arguments.json:
        print(json.dumps({"machine": machine, "rows": [asdict(row) for row in rows]}))
        return 0
    print(", ".join(f"{name} {value}" for name, value in machine.items()) + f"; {PAIRS} pairs\n")
    print(f"{'':84} {'ours':>10} {'other':>10} {'ratio':>6} stolen  lowest to highest")
    for row in rows:
        between = f"{row.lowest} to {row.highest} ({row.unit})"
        print(f"{row.what:84} {row.ours:>10} {row.other:>10} {row.ratio:>6} {row.stolen:>6.0%}  {between}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
