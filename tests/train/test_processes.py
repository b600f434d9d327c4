"""A data set in a DataLoader's workers: however they are started, whatever the parent did before, and whatever happens beside them."""

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

import cachestore as cs
from cachestore.care.collect import collect, compact
from cachestore.care.repair import repair
from cachestore.core.tensors import to_raw
from cachestore.store.format.entry import make_entry
from cachestore.store.format.segment import read_contents
from cachestore.store.write.append import publish_segment
from cachestore.store.write.commit import commit
from tests.fakes import publish_catalog
from tests.store.stores import flip
from tests.train.stores import PLAIN, Row, catalog_of, make_store, picture_key, recipes, stored_latents

pytestmark = [
    pytest.mark.torch,
    pytest.mark.processes,
    # Python 3.12 and later warn of any fork beside torch's own threads; that it works is what is tested here.
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
]

ROWS = [Row(f"{n}.png", (f"caption {n % 5}" + "." * (n % 3),), bucket=(64, 48) if n % 2 else (48, 64)) for n in range(14)]
SPARE = cs.key("an entry that no batch needs")
METHODS = ("fork", "spawn", "forkserver")


def loader(data, sampler, **options):
    return DataLoader(data, batch_sampler=sampler, collate_fn=data.collate, **options)


def equal(one, other):
    same = {
        name: torch.equal(value, other[name]) if isinstance(value, torch.Tensor) else value == other[name] for name, value in one.items()
    }
    return list(one) == list(other) and all(same.values())


def children():
    return {int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()}


def write_another(path, n):
    """Another data set's entries, in a segment of their own, and a newer index."""
    make_store(path, [Row(f"other {n}", (f"of another data set {n}",))], recipes(PLAIN), name=f"other{n}")


def copy_everything(path):
    """A second copy of each entry, in a segment of its own."""
    with cs.open(path) as store:
        layout = store.layout
        entries = [make_entry(key, raw, {}) for key, raw in zip(store.keys(), store.get_raw(list(store.keys())), strict=True)]
    publish_segment(layout, [*entries, make_entry(SPARE, {"spare": ("U8", (8,), bytes(8))}, {})], origin="")


def damage_and_repair(path):
    """Damage an entry that no batch needs; repair moves its segment away, and those that batches need with it."""
    with cs.open(path) as store:
        segment = store.layout.root / store.describe(SPARE).segment
    flip(segment, next(entry.offset for entry in read_contents(segment).entries if entry.key == SPARE))
    repair(path)
    assert not segment.exists()


def write_elsewhere(path):
    """Write all segments together as one, and remove those that readers have open."""
    before = set((path / "segments").rglob("*.safetensors"))
    compact(path)
    for _step in range(2):
        collect(path, apply=True, grace_seconds=0)
    assert before - set((path / "segments").rglob("*.safetensors"))  # one that came out as it went in stays


def beside(path, what, epoch):
    match what:
        case "append and commit":
            write_another(path, epoch)
        case "repair" if epoch == 0:
            damage_and_repair(path)
        case "compact and gc" if epoch == 0:
            write_elsewhere(path)
        case _:
            pass


def two_epochs(path, method, before, workers, what, *, persistent=False):
    make_store(path, ROWS, recipes(PLAIN))
    copy_everything(path)
    twin, data = cs.CachedDataset(path), cs.CachedDataset(path)
    sampler = cs.BucketBatchSampler(twin, batch_size=3, tail="pad")
    expected = [[twin.read_batch(indices) for indices in sampler] for _epoch in range(2)]
    if before == "read":
        assert data[3]["sample_id"] == "3.png"
    if before == "precomputed":
        write_another(path, 2)
    started = children()
    options = {"num_workers": workers, "persistent_workers": persistent}
    if workers:
        options["multiprocessing_context"] = method
    batches = loader(data, cs.BucketBatchSampler(data, batch_size=3, tail="pad"), **options)
    for epoch in range(2):
        found = list(batches)
        assert len(found) == len(expected[epoch]) == 6
        assert all(map(equal, found, expected[epoch]))
        beside(path, what, epoch)
    del batches
    gc.collect()
    assert not {pid for pid in children() - started if not is_pythons_own(command(pid))}


def is_pythons_own(line):
    """Servers that multiprocessing starts once and keeps."""
    return b"resource_tracker" in line or b"forkserver" in line or not line


def command(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except FileNotFoundError:
        return b""  # it has ended meanwhile


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="children are counted by the proc file system")
class TestMatrix:
    @pytest.mark.parametrize(
        ("method", "before", "workers", "what"),
        [
            ("fork", "read", 2, "append and commit"),
            ("fork", "precomputed", 2, "repair"),
            ("here", "read", 0, "append and commit"),
            ("here", "untouched", 0, "repair"),
            ("fork", "read", 2, "compact and gc"),
            ("here", "read", 0, "compact and gc"),
        ],
    )
    def test_workers_read_the_same_batches(self, path, method, before, workers, what):
        two_epochs(path, method, before, workers, what)

    @pytest.mark.slow
    @pytest.mark.timeout(300)
    @pytest.mark.parametrize("persistent", [False, True])
    @pytest.mark.parametrize("what", ["alone", "append and commit", "repair", "compact and gc"])
    @pytest.mark.parametrize("before", ["untouched", "read", "precomputed"])
    @pytest.mark.parametrize("method", METHODS)
    def test_workers_read_the_same_batches_in_every_combination(self, path, method, before, what, persistent):
        two_epochs(path, method, before, 2, what, persistent=persistent)


KILLED = """
import os, signal, sys
import cachestore as cs
from tests.train.test_processes import equal, loader

data = cs.CachedDataset(sys.argv[1])
batches = [[n, n + 2] for n in range(12)]
expected = [data.read_batch(indices) for indices in batches]
reading = loader(data, batches, num_workers=2, multiprocessing_context="fork")
iterator = iter(reading)
assert equal(next(iterator), expected[0])
signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler raises for each dead worker, wherever the interpreter is at that moment
try:
    for worker in iterator._workers:
        os.kill(worker.pid, signal.SIGKILL)
    list(iterator)
    list(iterator)
except RuntimeError as error:
    print("DataLoader worker" in str(error))
except (OSError, EOFError):  # a batch came whose tensors nobody is left to hand over
    print(True)
del iterator
print(all(map(equal, reading, expected)))
"""


def run(program, *arguments):
    environment = os.environ | {"PYTHONPATH": str(Path.cwd()), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", program, *map(str, arguments)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False, env=environment)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.split()


def test_after_its_workers_were_killed_the_next_iterator_gives_the_same_batches(path):
    make_store(path, ROWS, recipes(PLAIN))
    assert run(KILLED, path) == ["True", "True"]


def test_a_segment_cut_short_under_a_reading_worker_is_a_clear_error_in_the_trainer(path):
    data = cs.CachedDataset(make_store(path, ROWS, recipes(PLAIN)))
    assert data[0]["sample_id"] == "0.png"
    iterator = iter(loader(data, [[0]] * 40, num_workers=1, multiprocessing_context="fork", prefetch_factor=1))
    next(iterator)
    for segment in (path / "segments").rglob("*.safetensors"):
        segment.chmod(0o644)
        os.truncate(segment, 100)
    with pytest.raises(cs.CorruptEntry):
        list(iterator)


@pytest.mark.slow
def test_two_data_sets_on_one_store_read_in_one_process_and_in_its_forked_workers(path):
    made = recipes(PLAIN)
    make_store(path, ROWS, made)
    make_store(path, ROWS[4:], made, name="part")
    whole, part = cs.CachedDataset(path), cs.CachedDataset(path, "part")
    assert equal(whole.read_batch([4, 6]), part.read_batch([0, 2]))
    for data in (whole, part):
        index = data.index("6.png")
        here = data.read_batch([index])
        assert all(equal(found, here) for found in loader(data, [[index]] * 4, num_workers=2, multiprocessing_context="fork"))
    part._reader.close()
    assert whole.read_batch([4])["sample_id"] == ["4.png"]


LIMITED = """
import resource, sys
import cachestore as cs
from cachestore.train.buffers import BatchBuffers
from torch.utils.data import DataLoader

resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[2]), int(sys.argv[2])))
data = cs.CachedDataset(sys.argv[1])
batches = [list(range(start, len(data), len(data) // 16)) for start in range(len(data) // 16)]
buffers = BatchBuffers()
for _epoch in range(2):
    assert sum(len(data.read_batch(batch, into=buffers)["sample_id"]) for batch in batches) == len(data)
found = DataLoader(data, batch_sampler=batches, collate_fn=data.collate, num_workers=2, multiprocessing_context="fork")
print(sum(len(batch["sample_id"]) for batch in found))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("segments", "limit"), [(160, 64), pytest.param(2000, 256, marks=pytest.mark.timeout(300))], ids=str)
def test_more_segments_than_descriptors_are_read_by_the_trainer_and_its_workers(path, segments, limit):
    rows, made = [Row(f"{n}.png") for n in range(segments)], recipes(None)
    make_store(path, [], made)
    with cs.open(path) as store:
        layout = store.layout
    for row in rows:
        tensors = to_raw(stored_latents(made.latents, row.id, (64, 48)))
        publish_segment(layout, [make_entry(picture_key(made.latents, row.id), tensors, {})], origin="")
    commit(layout).close()
    publish_catalog(layout, catalog_of(rows, made, "train"))
    assert run(LIMITED, path, limit) == [str(segments)]
