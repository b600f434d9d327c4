"""Training from an address while its server is gone, the disk is full, or somebody damages the cache and kills helpers."""

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, suppress

import pytest

import cachestore as cs
from cachestore.core.errors import RemoteFailed
from cachestore.remote import downloads
from cachestore.remote.cache import used_bytes
from tests.fakes import ROOT, tells_of
from tests.leaks import held
from tests.remote.server import served
from tests.remote.servers import seaweed
from tests.remote.streams import ADDRESS, KEYS, agree, helper, in_child, make, open_both, parts, ranges, serve_folder

pytest.importorskip("obstore", reason="the extra [objects] is not installed")
pytestmark = [
    pytest.mark.torch,
    pytest.mark.processes,
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
]

ON_SMALL_DISKS = """
import sys
import cachestore as cs
from tests.remote.streams import agree, open_both
from pathlib import Path
from cachestore.remote.cache import used_bytes
store, small, smaller = map(Path, sys.argv[1:])
print(agree(*open_both(store, small, limit="1GB")), used_bytes(small / "local"))
try:
    cs.CachedDataset(f"file://{store}", local=smaller / "local")
except cs.WriteFailed as error:
    print(error)
"""


@pytest.fixture(autouse=True)
def ended():
    """No helper outlives a test, whose server and limits it has."""
    yield
    downloads.downloads().end()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_file_system_that_is_really_full_costs_downloads_alone(path, tmp_path):
    """With file systems of a size of their own, in a mount namespace; one has no room for the copy of the index."""
    inside = ["unshare", "--user", "--map-root-user", "--mount"]
    if shutil.which("unshare") is None or subprocess.run([*inside, "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs unshare and user namespaces")
    make(path)
    cs.CachedDataset(f"file://{path}", local=tmp_path / "local", limit=0)
    size = used_bytes(tmp_path / "local") + 100_000
    for name in ("small", "smaller"):
        (tmp_path / name).mkdir()
    mount = f'mount -t tmpfs -o size={size} none "$2" && mount -t tmpfs -o size=16k none "$3" && exec "$0" -c "$4" "$1" "$2" "$3"'
    command = [
        *inside,
        "sh",
        "-c",
        mount,
        sys.executable,
        *(str(tmp_path / name) for name in ("store", "small", "smaller")),
        ON_SMALL_DISKS,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done
    same, refused = done.stdout.splitlines()
    is_same, kept = same.split()
    assert (is_same, size - 100_000 < int(kept) <= size + 4096) == ("True", True)
    assert re.match(rf"cannot write {tmp_path}/smaller/.+: No space left on device; make room there, or pass another folder", refused)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("limit", [0, "1GB"])
def test_training_goes_on_after_the_server_was_gone_for_20_seconds(path, tmp_path, monkeypatch, limit):
    with ExitStack() as stack:
        first = stack.enter_context(ExitStack())
        state, url = first.enter_context(served())
        for name, value in {**KEYS, "AWS_ENDPOINT_URL": url}.items():
            monkeypatch.setenv(name, value)
        serve_folder(state, make(path))
        data, own = open_both(path, tmp_path, ADDRESS, limit=limit)
        assert agree(data, own, epochs=1)
        shutil.rmtree(tmp_path / "local")
        data, own = (open_both(path, tmp_path, ADDRESS, limit=limit)) if limit else (data, own)
        state.faults += ["reset"] * 100_000  # for connections that are open
        first.close()

        def come_back():
            state.faults.clear()
            stack.enter_context(served(state=state, port=int(url.rpartition(":")[2])))

        timer = threading.Timer(20, come_back)
        timer.start()
        asked = ranges(state)
        assert agree(data, own, epochs=1)
        timer.join()
        assert ranges(state) > asked


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_server_that_is_gone_for_ever_is_named_within_the_bound(path, tmp_path, monkeypatch):
    """Though most requests wait for others, and later batches were requested too: the bound is that of one request."""
    with served() as (state, url):
        for name, value in {**KEYS, "AWS_ENDPOINT_URL": url, downloads.PARALLEL: "2"}.items():
            monkeypatch.setenv(name, value)
        serve_folder(state, make(path))
        data, _own = open_both(path, tmp_path, ADDRESS)
        state.faults += ["reset"] * 100_000
    before, began = held(), time.monotonic()
    with pytest.raises(RemoteFailed, check=tells_of("'train'", f"{ADDRESS}/segments/")):
        list(cs.make_loader(data, batch_size=4))
    limits = downloads._LIMITS
    assert time.monotonic() - began < limits.retry_seconds + downloads._SLACK_SECONDS
    downloads.downloads().end()
    assert not [one for one in held() - before if isinstance(one, threading.Thread)]


@pytest.mark.parametrize("limit", [pytest.param(0, marks=pytest.mark.slow), 120_000, pytest.param("1GB", marks=pytest.mark.slow)])
def test_trainers_that_share_a_folder_at_once_read_what_is_in_the_store(path, tmp_path, bucket, limit):
    """Three of them, with the same batches in the same order: they miss the same entries at the same time."""

    def train(number):
        data, own = open_both(path, tmp_path, ADDRESS, limit=limit)
        return agree(data, own, epochs=1 + number)

    def train_and_fork(number):
        child = os.fork()
        if child == 0:
            try:
                os._exit(0 if train(number) else 2)
            finally:
                os._exit(1)
        return child

    children = [train_and_fork(number) for number in (1, 2)]
    assert train(1)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0, 0]
    assert agree(*open_both(path, tmp_path, ADDRESS, limit=limit), epochs=1)


def spoil(folder, chance):
    """Do some harm to a cache and the helper of this process."""
    some, marks = parts(folder)
    with suppress(OSError, IndexError):
        part = chance.choice(some)
        size = part.stat().st_size
        match chance.choices(["flip", "zero", "cut", "gone", "mark", "kill"], [4, 4, 4, 4, 4, 1])[0]:
            case "flip":
                with part.open("r+b") as file:
                    for _byte in range(40):
                        file.seek(chance.randrange(size))
                        file.write(b"\xa5")
            case "zero":
                with part.open("r+b") as file:
                    file.write(bytes(size))
            case "cut":
                os.truncate(part, chance.randrange(size))
            case "gone":
                part.unlink()
            case "mark":
                with chance.choice(marks).open("r+b") as file:
                    file.write(b"\1" * 1000)
            case _:
                if (pid := helper()) is not None:
                    os.kill(pid, signal.SIGKILL)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seconds", [1.5, pytest.param(60.0, marks=pytest.mark.slow)])
def test_harm_at_any_moment_changes_no_batch(path, tmp_path, bucket, monkeypatch, seconds):
    """With verify="always": what was found to be right is else not compared again, as in a folder."""
    monkeypatch.setattr(downloads, "_STARTS", 1000)  # a helper may be killed before its first answer, again and again
    data, own = open_both(path, tmp_path, ADDRESS, verify="always")
    chance, is_over = random.Random(0), threading.Event()

    def harm():
        while not is_over.wait(chance.uniform(0, 0.2)):
            spoil(tmp_path / "local", chance)

    thread = threading.Thread(target=harm)
    thread.start()
    until = time.monotonic() + seconds
    try:
        while time.monotonic() < until:
            assert agree(data, own, epochs=1)
    finally:
        is_over.set()
        thread.join()
    assert in_child(lambda: agree(*open_both(path, tmp_path, ADDRESS, verify="always"), epochs=1))


@pytest.fixture(scope="module")
def weed(tmp_path_factory):
    with seaweed(tmp_path_factory.mktemp("weed")) as variables:
        yield variables


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("limit", [0, 120_000, "1GB"])
def test_training_from_seaweedfs_gives_the_batches_of_the_folder(path, tmp_path, weed, monkeypatch, limit):
    for name, value in weed.items():
        monkeypatch.setenv(name, value)
    make(path)
    cs.push(path, "s3://bucket/trained")
    data, own = open_both(path, tmp_path, "s3://bucket/trained", limit=limit)
    assert agree(data, own)
    assert agree(data, own, epochs=2, num_workers=2)
    assert agree(*open_both(path, tmp_path, "s3://bucket/trained", limit=limit), epochs=1)
