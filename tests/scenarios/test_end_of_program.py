"""A program ends while loaders, readers and stores are in use: it says nothing, and ends well."""

import os
import signal
import subprocess
import sys

import pytest

from tests.fakes import ROOT
from tests.scenarios.trainers import data_set
from tests.shares import share

pytestmark = [pytest.mark.torch, pytest.mark.processes]

PROGRAM = """
import codecs, logging, os, sys, threading, warnings
from pathlib import Path

warnings.simplefilter("ignore")
logging.disable()

import numpy as np
from torch.utils.data import DataLoader

import cachestore as cs
import cachestore.jobs.plan.planning
from cachestore.train.prefetch import Prefetcher
from tests import fakes
from tests.train.encoders import ReadableEncoder

path, held_by, folder, has_forked = sys.argv[1], sys.argv[2], Path(sys.argv[3]), sys.argv[4] == "forked"
data, store = cs.CachedDataset(path), cs.open(path)
sampler = cs.BucketBatchSampler(data, 2)
prefetcher = Prefetcher(data)
makers = cachestore.jobs.plan.planning.make_encoders = fakes.Makers()
makers.make = ReadableEncoder
encoding = cs.ReadThrough.of("model", store=folder / "encoded").open(fakes.captioned(folder / "pictures", 70))
written = cs.open(folder / "written", mode="a")
writer = written.writer()
writer.__enter__().put(cs.key("a"), {"x": np.ones(3)})
through = cs.ReadThrough(written, lambda missing: {key: {"x": np.ones(3)} for key, _item in missing}, on_miss="encode")
through([(cs.key("b"), 1)])
elsewhere = []
thread = threading.Thread(target=lambda: (elsewhere.append(iter(cs.make_loader(data, batch_size=2))), next(elsewhere[0])))
thread.start()
thread.join()
iterations = [
    iter(cs.make_loader(data, batch_size=2)),
    iter(cs.make_loader(cs.MixedDataset([data, data.select([1])]), batch_size=2)),
    iter(cs.make_loader(encoding, batch_size=2)),
    iter(DataLoader(data, batch_sampler=sampler, collate_fn=data.collate)),
    iter(cs.BucketBatchSampler(prefetcher, 2)),
    store.keys(),
]
if not has_forked:
    iterations += [
        iter(cs.make_loader(data, batch_size=2, num_workers=1)),
        iter(DataLoader(data, batch_sampler=sampler, collate_fn=data.collate, num_workers=1, persistent_workers=True)),
    ]
read = [next(iteration) for iteration in iterations]
prefetcher.__getitems__(read[4])
mapped = cs.open(path, io="mmap")
mapped.get(next(mapped.keys()))
held = [iterations, read, elsewhere, data, data.ids, store, mapped, writer, written, through, encoding]
if held_by == "a cycle":
    held.append(held)
elif held_by == "a module that is emptied late":
    codecs.held = held
if has_forked and os.fork():
    os._exit(os.waitstatus_to_exitcode(os.wait()[1]))
print("the end")
"""


@pytest.mark.parametrize("forked", share(["not forked", "forked"], 2))
@pytest.mark.parametrize("held_by", share(["its main module", "a cycle", "a module that is emptied late"], 3))
def test_a_program_that_ends_in_the_midst_of_reading_says_nothing(tmp_path, held_by, forked):
    arguments = [str(data_set(tmp_path / "store")), held_by, str(tmp_path), forked]
    surroundings = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", PROGRAM, *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=55, check=False, env=surroundings)
    assert (ended.stdout, ended.stderr, ended.returncode) == ("the end\n", "", 0)


DAEMON = """
import sys, threading
import cachestore as cs

loader = cs.make_loader(cs.CachedDataset(sys.argv[1]), batch_size=2)
has_begun = threading.Event()

def train():
    while True:
        for _batch in loader:
            has_begun.set()

threading.Thread(target=train, daemon=True).start()
has_begun.wait()
"""


def test_a_program_that_ends_while_a_daemon_thread_trains_shows_no_traceback(tmp_path):
    """Python ends such a thread within torch's own code, which may abort the process ("terminate called"), with or without a loader."""
    command = [sys.executable, "-c", DAEMON, str(data_set(tmp_path / "store"))]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=55, check=False, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert "Traceback" not in ended.stderr
    assert ended.returncode in {0, -signal.SIGABRT}
