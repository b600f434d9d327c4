"""Training from an address: every batch is the one that the folder gives, whatever happens to helper, cache and server."""

import errno
import gc
import json
import os
import pickle
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cachestore as cs
from cachestore.cli import main
from cachestore.core.errors import BadInput, CorruptEntry, MissingEntry, RemoteFailed, StoreNotFound
from cachestore.remote import downloads
from cachestore.remote.cache import used_bytes
from cachestore.store.read.fetch import new_buffer
from cachestore.train.prefetch import Prefetcher
from tests.fakes import ROOT, asks_for, program, tells_of
from tests.remote.streams import (
    ADDRESS,
    KEYS,
    ROWS,
    SHORT,
    aged,
    agree,
    agree_plainly,
    entries_here,
    equal,
    helper,
    in_child,
    is_alive,
    make,
    open_both,
    parts,
    ranges,
    serve_folder,
)

pytest.importorskip("obstore", reason="the extra [objects] is not installed")
pytestmark = [
    pytest.mark.torch,
    pytest.mark.processes,
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),  # more workers than cores
]

LIMITS = {"nothing": 0, "one batch": 8 * 6144, "half": 120_000, "all": "1GB"}
"""Of the values. The blocks at the ends of an entry count too."""


@pytest.fixture(autouse=True)
def ended():
    """No helper outlives a test, whose server and limits it has."""
    yield
    downloads.downloads().end()


@pytest.mark.parametrize("limit", LIMITS.values(), ids=LIMITS)
def test_every_batch_is_the_one_of_the_folder(path, tmp_path, bucket, limit):
    before = dict(bucket.objects)
    data, own = open_both(path, tmp_path, ADDRESS, limit=limit)
    assert agree(data, own)
    assert agree_plainly(data, own)
    assert bucket.objects == before
    assert {method for method, _path in bucket.requests} == {"GET"}


@pytest.mark.parametrize("limit", LIMITS.values(), ids=LIMITS)
def test_what_has_no_room_is_downloaded_again_and_the_rest_is_not(path, tmp_path, bucket, limit):
    data, own = open_both(path, tmp_path, ADDRESS, limit=0)
    copies = used_bytes(tmp_path / "local")
    limit = limit if limit in {0, "1GB"} else limit + copies
    data = cs.CachedDataset(ADDRESS, local=tmp_path / "local", limit=limit)
    asked = []
    for _epoch in range(3):
        before = ranges(bucket)
        assert agree(data, own, epochs=1)
        asked.append(ranges(bucket) - before)
    assert asked[1] == asked[2] or limit not in {0, "1GB"}
    assert (asked[2] == 0) == (limit == "1GB")
    assert asked[2] <= asked[0]
    kept = used_bytes(tmp_path / "local") - copies
    assert kept <= (max(0, limit - copies) if limit != "1GB" else 10**9)
    assert bool(kept) == bool(limit)


def test_a_second_process_reads_what_the_first_one_brought(path, tmp_path, bucket):
    data, own = open_both(path, tmp_path, ADDRESS)
    assert agree(data, own, epochs=1)
    before = ranges(bucket)
    assert in_child(lambda: agree(*open_both(path, tmp_path, ADDRESS), epochs=1))
    assert ranges(bucket) == before


@pytest.mark.parametrize("damage", ["flipped", "zeroed", "cut", "empty", "marked", "folder", "link", "gone"])
def test_damage_in_the_cache_is_mended_from_the_address(path, tmp_path, bucket, damage):
    data, own = open_both(path, tmp_path, ADDRESS)
    assert agree(data, own, epochs=1)
    some, marks = parts(tmp_path / "local")
    for part in some:
        size = part.stat().st_size
        match damage:
            case "flipped":
                part.write_bytes(bytes(byte ^ 1 for byte in part.read_bytes()))
            case "zeroed":
                part.write_bytes(bytes(size))
            case "cut":
                os.truncate(part, size // 3)
            case "empty":
                part.write_bytes(b"")
            case "gone":
                part.unlink()
            case "marked":
                part.write_bytes(bytes(size))
                [mark.write_bytes(b"\1" * 10_000) for mark in marks]
            case _:
                part.unlink()
                part.mkdir() if damage == "folder" else part.symlink_to("/etc/passwd")
    again = cs.CachedDataset(ADDRESS, local=tmp_path / "local", verify="never")
    assert agree(again, own, epochs=2)
    assert agree(data, own, epochs=2)
    before = ranges(bucket)
    assert agree(cs.CachedDataset(ADDRESS, local=tmp_path / "local"), own, epochs=1)
    assert ranges(bucket) == before


def catalogs_of(tmp_path):
    [copy] = (tmp_path / "local").glob("*/catalogs/*/1.safetensors")
    return copy


def put_damaged(copy, damage, right):
    copy.unlink()
    match damage:
        case "folder":
            copy.mkdir()
        case "fifo":
            os.mkfifo(copy)
        case bytes():
            copy.write_bytes(damage)
        case _:
            assert damage == "gone"
    assert damage in {"folder", "fifo", "gone"} or damage != right


def test_a_damaged_copy_of_a_catalog_is_brought_again(path, tmp_path, bucket):
    """By who opens the data set anew, and by another process that was given it."""
    data, own = open_both(path, tmp_path, ADDRESS)
    raw, copy = pickle.dumps(data), catalogs_of(tmp_path)
    right = copy.read_bytes()
    another = next(data for key, data in bucket.objects.items() if "/segments/" in key)
    for damage in ("gone", "folder", "fifo", b"", right[:-1], right[:-20] + bytes([right[-20] ^ 1]) + right[-19:], another):
        for open_again in (lambda: cs.CachedDataset(ADDRESS, local=tmp_path / "local", generation=1), lambda: pickle.loads(raw)):
            put_damaged(copy, damage, right)
            assert equal(open_again()[0], own[0])
            assert copy.read_bytes() == right


def test_no_byte_of_the_copy_of_a_catalog_is_trusted(path, tmp_path, bucket):
    _data, own = open_both(path, tmp_path, ADDRESS)
    copy = catalogs_of(tmp_path)
    right = copy.read_bytes()
    for at in range(0, len(right), len(right) // 20):
        put_damaged(copy, right[:at] + bytes([right[at] ^ 64]) + right[at + 1 :], right)
        assert equal(cs.CachedDataset(ADDRESS, local=tmp_path / "local", generation=1)[0], own[0])
        assert copy.read_bytes() == right


def test_a_second_opening_writes_nothing_and_needs_no_room(path, tmp_path, bucket, monkeypatch):
    data, own = open_both(path, tmp_path, ADDRESS)
    assert agree(data, own, epochs=1)

    def refuse(*_given, **_named):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for name in ("link", "rename", "replace", "mkdir", "truncate", "pwrite"):
        monkeypatch.setattr(os, name, refuse)
    monkeypatch.setattr(Path, "open", refuse)
    assert agree(cs.CachedDataset(ADDRESS, local=tmp_path / "local", generation=1), own, epochs=1)


def test_an_entry_that_comes_damaged_once_is_no_corrupt_entry(path, tmp_path, bucket):
    """Its copy is damaged too, so the answer is the first look at the object."""
    data, own = open_both(path, tmp_path, ADDRESS)
    assert agree(data, own, epochs=1)
    for part in parts(tmp_path / "local")[0]:
        part.write_bytes(bytes(part.stat().st_size))
    asked: list[str] = []

    def flipped(_method, path, status, body, headers):
        asked.append(path)
        return status, body[:-1] + bytes([body[-1] ^ 1]), headers

    again = cs.CachedDataset(ADDRESS, local=tmp_path / "local", generation=1)
    bucket.faults.append(flipped)
    located = again._reader.locate(list(again._reader.keys())[:1])
    runs = [new_buffer(specs.size_bytes) for specs in located.specs]
    assert again._reader.fill(list(again._reader.keys())[:1], located, [[run] for run in runs])
    assert ["/segments/" in one for one in asked] == [True]


def test_an_answer_that_is_wrong_once_while_a_data_set_is_opened_changes_nothing(path, tmp_path, bucket):
    """One segment is in no index, so its header is read too."""
    with cs.open(path, mode="a") as store, store.writer() as writer:
        writer.put(cs.key("in no index"), {"value": np.zeros(3, np.float32)})
    serve_folder(bucket, path)
    own = cs.CachedDataset(path, generation=1)
    before = len(bucket.requests)
    cs.CachedDataset(ADDRESS, local=tmp_path / "counted", generation=1)
    for number in range(len(bucket.requests) - before):
        changes = [
            lambda _method, _path, status, body, headers: (status, body[:-9] + bytes([body[-9] ^ 1]) + body[-8:], headers),
            lambda _method, _path, _status, _body, _headers: (404, b"", {}),
        ]
        for change in changes:
            bucket.faults[:] = [None] * number + [change]
            data = cs.CachedDataset(ADDRESS, local=tmp_path / str(number), generation=1)
            assert bucket.faults == []
            assert equal(data[0], own[0])
            shutil.rmtree(tmp_path / str(number))


def test_a_part_that_was_removed_while_it_is_read_is_made_again(path, tmp_path, bucket):
    """The reader checked entries in the removed file; they are holes in the one that takes its name."""
    data, own = open_both(path, tmp_path, ADDRESS)
    assert agree(data, own, epochs=1)
    for each in [*parts(tmp_path / "local")[0], *parts(tmp_path / "local")[1]]:
        each.unlink()
    other = cs.CachedDataset(ADDRESS, local=tmp_path / "local")
    assert agree_plainly(other.select([0, 2]), own.select([0, 2]))
    data._reader._fetcher.close()
    assert agree(data, own, epochs=2)


def test_damage_at_the_address_is_a_corrupt_entry_that_names_the_object(path, tmp_path, server, short):
    make(path)
    serve_folder(server, path)
    for key in [key for key in server.objects if "/segments/" in key]:
        data = bytearray(server.objects[key])
        data[-1] ^= 1
        server.objects[key] = bytes(data)
    data, _own = open_both(path, tmp_path, ADDRESS)
    with pytest.raises(CorruptEntry, check=tells_of(f"{ADDRESS}/segments/", f"`cachestore push STORE {ADDRESS} --check`")):
        list(cs.make_loader(data, batch_size=1, tail="pad"))


def test_a_segment_that_is_gone_at_the_address_is_a_missing_entry(path, tmp_path, bucket):
    data, _own = open_both(path, tmp_path, ADDRESS)
    for key in [key for key in bucket.objects if "/segments/" in key]:
        del bucket.objects[key]
    with pytest.raises(MissingEntry):
        list(cs.make_loader(data, batch_size=4))


@pytest.mark.parametrize("limit", [0, "1GB"])
def test_an_outage_that_ends_in_time_is_not_noticed(path, tmp_path, bucket, monkeypatch, limit):
    monkeypatch.setattr(downloads, "_LIMITS", SHORT._replace(retry_seconds=20.0))
    data, own = open_both(path, tmp_path, ADDRESS, limit=limit)
    bucket.faults += [503, "reset", "cut", 429] * 8
    assert agree(data, own, epochs=2)
    assert bucket.faults == []


@pytest.mark.slow
@pytest.mark.parametrize("limit", [0, "1GB"])
def test_an_outage_that_lasts_is_a_failed_request_and_never_damage(path, tmp_path, bucket, limit):
    data, own = open_both(path, tmp_path, ADDRESS, limit=limit)
    bucket.faults += [503] * 100_000
    for read in (lambda: list(cs.make_loader(data, batch_size=4)), lambda: data[0], lambda: data.prompt("")):
        with pytest.raises(RemoteFailed, check=tells_of("'train'", ADDRESS)):
            read()
    bucket.faults.clear()
    assert agree(data, own, epochs=1)


def test_a_forked_child_reads_through_a_helper_of_its_own(path, tmp_path, bucket):
    data, own = open_both(path, tmp_path, ADDRESS)
    first = data[0]["latents"]
    mine = helper()

    def in_the_child():
        is_right = agree_plainly(data, own)
        return is_right and helper() not in {None, mine} and agree(data, own, epochs=1) and in_child(lambda: agree(data, own, epochs=1))

    assert in_child(in_the_child)
    assert helper() == mine
    assert is_alive(mine)
    before = ranges(bucket)
    assert agree_plainly(data, own)
    assert ranges(bucket) == before
    data.set_epoch(0)
    assert data[0]["latents"].equal(first)


def test_a_fork_while_threads_read_harms_neither(path, tmp_path, bucket):
    data, own = open_both(path, tmp_path, ADDRESS, limit=0)
    for number, _batch in enumerate(cs.make_loader(data, batch_size=2)):
        if number in {1, 4}:
            assert in_child(lambda: agree(data, own, epochs=1))
    assert agree(data, own, epochs=1)


@pytest.mark.parametrize(
    ("method", "workers"),
    [
        ("fork", 2),
        pytest.param("fork", 4, marks=pytest.mark.slow),
        *(pytest.param(method, count, marks=pytest.mark.slow) for method in ("spawn", "forkserver") for count in (2, 4)),
    ],
)
def test_workers_of_every_start_method_read_the_same(path, tmp_path, bucket, method, workers):
    from torch.utils.data import DataLoader

    if method == "forkserver":  # its children have the environment in which it was started: that of an earlier test's server
        server_of_forks: Any = forkserver._forkserver
        server_of_forks._stop()
    data, own = open_both(path, tmp_path, ADDRESS, limit=90_000)
    batches = list(cs.BucketBatchSampler(own, batch_size=4))
    options: dict[str, Any] = {"batch_sampler": batches, "num_workers": workers, "multiprocessing_context": method}
    for _epoch in range(3):
        found = list(DataLoader(data, collate_fn=data.collate, **options))
        assert len(found) == len(batches)
        for batch, indices in zip(found, batches, strict=True):
            assert batch["latents"].equal(own.read_batch(indices)["latents"])


@pytest.mark.parametrize("limit", [0, "1GB"])
def test_a_helper_that_is_killed_at_any_moment_is_replaced(path, tmp_path, bucket, limit):
    data, own = open_both(path, tmp_path, ADDRESS, limit=limit)
    killed = 0
    for epoch in range(6):
        loader, expected = cs.make_loader(data, batch_size=2, seed=epoch), cs.make_loader(own, batch_size=2, seed=epoch)
        for number, (one, other) in enumerate(zip(loader, expected, strict=True)):
            assert one["latents"].equal(other["latents"])
            if number % 4 == epoch % 4 and (pid := helper()) is not None:
                os.kill(pid, signal.SIGKILL)
                killed += 1
        for part in parts(tmp_path / "local")[1]:
            part.unlink()
    assert killed > 6


def test_helpers_that_always_end_are_given_up(path, tmp_path, bucket, monkeypatch):
    data, _own = open_both(path, tmp_path, ADDRESS)
    os.kill(helper(), signal.SIGKILL)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(
        RemoteFailed, match=r"3 helper processes ended without an answer \(the last one with exit code 1\); run the same command again"
    ):
        _ = data[0]
    monkeypatch.undo()
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)


def test_a_helper_that_is_stopped_is_given_up_within_the_bound(path, tmp_path, bucket, monkeypatch):
    data, own = open_both(path, tmp_path, ADDRESS)
    os.kill(helper(), signal.SIGSTOP)
    with monkeypatch.context() as patch:
        patch.setattr(downloads, "_LIMITS", (1.0, 0.3))
        patch.setattr(downloads, "_SLACK_SECONDS", 0.5)
        with pytest.raises(RemoteFailed):
            _ = data[0]
    assert agree(data, own, epochs=1)


def test_a_helper_ends_with_its_reader_though_forked_children_hold_its_pipe(path, tmp_path):
    make(path)
    source = """
import os, sys, time
import cachestore as cs
from cachestore.remote.downloads import downloads
data = cs.CachedDataset(sys.argv[1], local=sys.argv[2])
child = os.fork()
if child == 0:
    os.close(1), os.close(2)
    time.sleep(60)
print(downloads().helper_pid, child, flush=True)
time.sleep(60)
"""
    reader = program(source, f"file://{path}", str(tmp_path / "local"))
    pid, child = map(int, reader.stdout.readline().split())
    reader.kill()
    reader.communicate()
    until = time.monotonic() + 20  # it takes a second or two, and longer on a busy machine
    while is_alive(pid) and time.monotonic() < until:
        time.sleep(0.05)
    os.kill(child, signal.SIGKILL)
    assert not is_alive(pid)


TRAINER = """
import sys
import cachestore as cs
from torch.utils.data import DataLoader

if __name__ == "__main__":
    data = cs.CachedDataset(sys.argv[1], local=sys.argv[2])
    batches = list(cs.BucketBatchSampler(data, batch_size=4))
    loader = DataLoader(data, batch_sampler=batches, collate_fn=data.collate, num_workers=2, multiprocessing_context="fork")
    print("open", flush=True)
    sys.stdin.readline()
    for _batch in loader:
        pass
"""


def test_workers_of_a_killed_trainer_and_their_helpers_end_while_the_server_says_nothing(path, tmp_path, server):
    """They would wait for its answer for a minute."""
    serve_folder(server, make(path))
    program_file = tmp_path / "trainer.py"
    program_file.write_text(TRAINER)
    command = [sys.executable, str(program_file), ADDRESS, str(tmp_path / "local")]
    surroundings = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=surroundings) as trainer:
        assert trainer.stdout.readline() == b"open\n"
        server.faults += ["stall"] * 1000
        asked = len(server.requests)
        trainer.stdin.write(b"\n")
        trainer.stdin.flush()
        while len(server.requests) < asked + 2:  # by both workers
            time.sleep(0.01)
        started = descendants(trainer.pid)
        trainer.kill()
        until = time.monotonic() + 25  # within 5 s on a quiet machine
        while left := [pid for pid in started if is_alive(pid)]:
            assert time.monotonic() < until, left
            time.sleep(0.05)
    assert len(started) >= 4


def descendants(pid):
    """The processes that a process has started, and those that they have."""
    parents = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parents[int(status.parent.name)] = int(status.read_text().rpartition(")")[2].split()[1])
    found = [pid]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found[1:]


def test_a_reader_has_no_thread_and_no_network_client(path, tmp_path, torch_crowd):
    make(path)
    source = """
import pickle, sys, threading
import cachestore as cs
data = cs.CachedDataset(sys.argv[1], local=sys.argv[2])
for _batch in cs.make_loader(data, batch_size=4): pass
_ = pickle.loads(pickle.dumps(data))[0]
assert "obstore" not in sys.modules
print([thread.name for thread in threading.enumerate()])
"""
    body = {"source": source, "arguments": [f"file://{path}", str(tmp_path / "local")]}
    assert torch_crowd.run("tests.scenarios.trainers:run_lines", body) == [(0, "['MainThread']\n")]


def test_the_helper_ends_with_the_last_data_set(path, tmp_path):
    make(path)
    gc.collect()  # data sets of other tests
    data, _own = open_both(path, tmp_path)
    other = cs.CachedDataset(f"file://{path}", local=tmp_path / "local")
    _ = data[0], other[0]
    pid = helper()
    del other
    assert is_alive(pid)
    del data
    assert not is_alive(pid)


def test_a_copied_data_set_sends_nothing_until_it_misses_and_carries_no_credential(path, tmp_path, bucket):
    data, own = open_both(path, tmp_path, ADDRESS)
    assert agree(data, own, epochs=1)
    raw = pickle.dumps(data)
    assert b"AKIDKEY" not in raw
    assert b"hush" not in raw
    bucket.requests.clear()
    copy = pickle.loads(raw)
    assert agree(copy, own, epochs=1)
    assert bucket.requests == []
    for index in (tmp_path / "local").glob("*/index/*"):
        index.unlink()
    assert agree(pickle.loads(raw), own, epochs=1)


def test_a_disk_that_is_full_costs_downloads_alone(path, tmp_path, bucket):
    """The helper may write no file, as on a full disk; it sends what it reads."""
    data, own = open_both(path, tmp_path, ADDRESS)
    resource.prlimit(helper(), resource.RLIMIT_FSIZE, (0, 0))
    assert agree(data, own, epochs=2)
    assert ranges(bucket) > len(ROWS)
    assert agree(*open_both(path, tmp_path, ADDRESS), epochs=1)


@pytest.mark.parametrize("limit", [0, "1GB"])
def test_what_was_all_in_the_cache_is_not_looked_up_twice_until_something_is_missing(path, tmp_path, bucket, limit, monkeypatch):
    data, own = open_both(path, tmp_path, ADDRESS, limit=limit)
    calls: list[Any] = []
    prefetch = data.prefetch
    monkeypatch.setattr(data, "prefetch", lambda indices: calls.append(prefetch(indices)))

    def looks_up():
        calls.clear()
        assert agree(data, own, epochs=1)
        return bool(calls)

    assert [looks_up() for _epoch in range(3)] == [True, True, not limit]
    for part in parts(tmp_path / "local")[0]:
        part.unlink()
    data._reader._fetcher.close()
    assert [looks_up() for _epoch in range(3)] == [True, True, not limit]


def test_neighbours_come_with_one_request(path, tmp_path, bucket):
    data, own = open_both(path, tmp_path, ADDRESS)
    before = ranges(bucket)
    assert equal(data.__getitems__(range(24))[23], own.__getitems__(range(24))[23])
    assert ranges(bucket) - before == 1


def test_batches_are_requested_before_they_are_read(path, tmp_path, bucket):
    data, own = open_both(path, tmp_path, ADDRESS)
    loader = iter(cs.make_loader(data, batch_size=2))
    next(loader)
    until = time.monotonic() + 20
    while entries_here(tmp_path / "local") < 12 and time.monotonic() < until:
        time.sleep(0.02)
    del loader
    assert entries_here(tmp_path / "local") >= 12
    assert agree(data, own, epochs=1)


@pytest.mark.parametrize("limit", [0, "1GB"])
def test_workers_that_request_their_next_batches_read_the_same(path, tmp_path, bucket, limit):
    assert agree(*open_both(path, tmp_path, ADDRESS, limit=limit), epochs=2, num_workers=2)


def test_a_worker_requests_its_next_batches_before_it_reads_one(path, tmp_path, bucket):
    data, own = open_both(path, tmp_path, ADDRESS)
    worker = Prefetcher(data, batches=0, workers=1)
    first = next(iter(cs.BucketBatchSampler(worker, batch_size=2)))
    assert equal(worker.__getitems__(first)[0], own.read_batch(first))
    until = time.monotonic() + 20
    while entries_here(tmp_path / "local") < 8 and time.monotonic() < until:
        time.sleep(0.02)
    assert entries_here(tmp_path / "local") >= 8


def test_a_mix_of_addresses_and_folders_has_one_helper(path, tmp_path, server, short):
    serve_folder(server, make(path), prefix="cache")
    serve_folder(server, make(tmp_path / "other", ROWS[:8]), prefix="other")
    sets = [cs.CachedDataset(f"s3://bucket/{name}", local=tmp_path / "local") for name in ("cache", "other")]
    folders = [cs.CachedDataset(path), cs.CachedDataset(tmp_path / "other")]
    before = helper()
    assert agree(cs.MixedDataset(sets), cs.MixedDataset(folders))
    assert agree(cs.MixedDataset([sets[0], folders[1]]), cs.MixedDataset(folders))
    assert helper() == before


def test_training_resumes_where_it_stopped(path, tmp_path, bucket):
    data, own = open_both(path, tmp_path, ADDRESS)
    loaders = [cs.make_loader(each, batch_size=2) for each in (data, own)]
    rest = []
    for loader in loaders:
        for number, _batch in enumerate(loader):
            if number == 3:
                break
        rest.append(loader.state_dict())
    assert rest[0] == rest[1]
    found = []
    for each in (data, own):
        loader = cs.make_loader(each, batch_size=2)
        loader.load_state_dict(rest[0])
        found.append([batch["sample_id"] for batch in loader])
    assert found[0] == found[1]
    assert 0 < len(found[0]) < 12


def test_a_newer_generation_is_seen_and_an_unknown_one_named(path, tmp_path, server, short):
    serve_folder(server, make(path))
    assert cs.CachedDataset(ADDRESS, local=tmp_path / "local").generation == 1
    make(path, ROWS[:6])
    serve_folder(server, path)
    assert len(cs.CachedDataset(ADDRESS, local=tmp_path / "local")) == 6
    assert len(cs.CachedDataset(ADDRESS, generation=1, local=tmp_path / "local")) == 24
    with pytest.raises(BadInput, check=asks_for("generation")):
        cs.CachedDataset(ADDRESS, generation=9, local=tmp_path / "local")
    with pytest.raises(BadInput, check=asks_for("name")):
        cs.CachedDataset(ADDRESS, "trian", local=tmp_path / "local")


def test_an_address_without_a_folder_for_copies_says_what_to_pass(path, tmp_path, bucket, monkeypatch):
    with pytest.raises(BadInput, check=asks_for("local")):
        cs.CachedDataset(ADDRESS)
    monkeypatch.setenv("CACHESTORE_LOCAL", str(tmp_path / "elsewhere"))
    assert len(cs.CachedDataset(ADDRESS)) == 24
    assert (tmp_path / "elsewhere/cachestore-cache.json").exists()
    refused: list[dict[str, Any]] = [{"local": tmp_path / "local"}, {"limit": 3}]
    for options in refused:
        with pytest.raises(BadInput, check=asks_for(next(iter(options)))):
            cs.CachedDataset(path, **options)
    limits: list[Any] = ["lots", -1, "3 XB", 1.5]
    for limit in limits:
        with pytest.raises(BadInput, check=asks_for("limit")):
            cs.CachedDataset(ADDRESS, local=tmp_path / "local", limit=limit)
    with pytest.raises(BadInput, check=asks_for("io")):
        cs.CachedDataset(ADDRESS, local=tmp_path / "local", io="mmap")
    with pytest.raises(StoreNotFound):
        cs.CachedDataset("s3://bucket/nothing", local=tmp_path / "local")
    with pytest.raises(BadInput, check=asks_for("local")):
        cs.CachedDataset(ADDRESS, local=path)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_trainer_or_a_worker_that_is_killed_leaves_a_cache_that_is_read(path, tmp_path, workers):
    make(path)
    source = """
import multiprocessing, os, sys
import cachestore as cs
data = cs.CachedDataset(sys.argv[1], local=sys.argv[2])
for number, _batch in enumerate(cs.make_loader(data, batch_size=2, num_workers=int(sys.argv[4]))):
    if number == int(sys.argv[3]): os.kill(next((child.pid for child in multiprocessing.active_children()), os.getpid()), 9)
"""
    for number in range(3):
        reader = program(source, f"file://{path}", str(tmp_path / "local"), str(number), str(workers))
        reader.communicate(timeout=150)
        assert reader.returncode == (1 if workers else -9)
    assert agree(*open_both(path, tmp_path), epochs=1)


def test_opening_makes_room_by_what_other_data_sets_left_and_says_what_fits(path, tmp_path, bucket, caplog):
    data, own = open_both(path, tmp_path, ADDRESS)
    assert agree(data, own, epochs=1)
    serve_folder(bucket, make(tmp_path / "other", [replace(row, id=f"other {row.id}") for row in ROWS]), prefix="other")
    full = used_bytes(tmp_path / "local") + 100_000
    options: dict[str, Any] = {"local": tmp_path / "local", "limit": full}
    other = cs.CachedDataset("s3://bucket/other", **options)
    words = rf"\d+ % of the data set 'train' of s3://bucket/other fits in {tmp_path}/local.+ every epoch downloads about \d+\.\d KiB"
    assert re.search(words, caplog.text)
    there = parts(tmp_path / "local")[0]
    caplog.clear()
    for path_ in there:  # as if it had been used yesterday
        aged(path_, 86400)
        aged(path_.parent.parent / "have" / path_.name, 86400)
    other = cs.CachedDataset("s3://bucket/other", **options)
    assert caplog.text == ""
    assert parts(tmp_path / "local")[0] == []
    assert agree(other, cs.CachedDataset(tmp_path / "other"))
    assert agree(data, own)
    assert used_bytes(tmp_path / "local") <= full


def test_the_command_lists_and_clears_and_others_refuse_the_folder(path, tmp_path, bucket, capsys):
    data, own = open_both(path, tmp_path, ADDRESS)
    assert agree(data, own, epochs=1)
    local = str(tmp_path / "local")
    assert main(["cache", local]) == 0
    assert re.match(
        rf"{ADDRESS}: train \(generation 1\), values of 1 segments, \d+\.\d KiB\n\d+\.\d KiB in {local}\n", capsys.readouterr().out
    )
    assert main(["verify", local]) == 10
    assert f"it has copies of stores at addresses: `cachestore cache {local}` lists them" in capsys.readouterr().err
    with pytest.raises(BadInput, check=tells_of(local)):
        cs.open(local, mode="a")
    assert main(["cache", local, "--clear", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["stores"], report["freed_bytes"] > 100_000) == ([], True)
    assert agree(data, own, epochs=1)
    assert agree(*open_both(path, tmp_path, ADDRESS), epochs=1)
