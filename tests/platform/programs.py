"""What the platform tests run in emulated processes: `python programs.py NAME FOLDER [ARGUMENTS]`. Imports no torch on its own."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import cachestore as cs
from cachestore.cli import main

COUNT = 40


def tensors(number):
    return {"value": np.full((16, 16), number, np.float32)}


def put(root, numbers):
    with cs.open(root, mode="a") as store, store.writer() as writer:
        for number in numbers:
            writer.put(cs.key("own", str(number)), tensors(number), meta={"number": number})


def check(root, numbers):
    with cs.open(root) as store:
        for number in numbers:
            found = store.get(cs.key("own", str(number)), as_numpy=True)
            assert (found["value"] == number).all(), number
    report = cs.verify(root)
    assert report.ok, report.findings


def store(folder):
    root = folder / "store"
    put(root, range(5))
    with cs.open(root, mode="a") as opened:  # what is open stays readable while others commit
        put(root, range(5, 10))
        opened.refresh()
        opened.commit()
        assert (opened.get(cs.key("own", "7"), as_numpy=True)["value"] == 7).all()
        put(root, range(10, 12))
        opened.refresh()
        opened.commit()
    check(root, range(12))
    with cs.open(root, io="mmap") as opened:
        assert (opened.get(cs.key("own", "3"), as_numpy=True)["value"] == 3).all()
    assert not list((root / "tmp").iterdir()), "what was published left a second name"
    code = main(["doctor", str(root)])
    assert code == 0, code


def wanted():
    return [(cs.key("fill", str(number)), number) for number in range(COUNT)]


def rank(folder, number, world, dies=""):
    """One rank of a fill; one that `dies` is ended while it encodes its second batch."""
    calls = []

    def encode(batch):
        calls.append(batch)
        if dies and len(calls) == 2:
            (folder / "died").touch()
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.02)
        return {key: tensors(item) for key, item in batch}

    with cs.open(folder / "store", mode="a") as opened:
        report = cs.fill(opened, wanted(), encode, batch_size=4, rank=int(number), world_size=int(world))
    print(json.dumps({"complete": report.complete, "encoded": report.encoded_here}))


def fill(folder):
    cs.open(folder / "store", mode="a").close()
    began = time.monotonic()
    line = [sys.executable, __file__, "rank", str(folder)]
    first = subprocess.Popen([*line, "1", "2", "dies"])
    while not (folder / "died").exists() and time.monotonic() - began < 20:
        time.sleep(0.02)
    second = subprocess.run([*line, "0", "2"], check=False, capture_output=True, text=True, timeout=50)
    assert first.wait(20) != 0
    assert second.returncode == 0, second.stderr
    assert json.loads(second.stdout.splitlines()[-1])["complete"]
    assert time.monotonic() - began < 30, "a killed rank was waited for until it was presumed dead"
    with cs.open(folder / "store") as opened:
        assert all((opened.get(key, as_numpy=True)["value"] == number).all() for key, number in wanted())
    assert cs.verify(folder / "store").ok


def tidy(folder):
    """repair, gc, compact."""
    root = folder / "store"
    for number in range(6):
        put(root, [number])
    damaged = next(iter(sorted((root / "segments").rglob("*.safetensors"))))
    os.chmod(damaged, 0o644)
    data = bytearray(damaged.read_bytes())
    data[-1] ^= 1
    damaged.write_bytes(data)
    assert not cs.verify(root).ok
    report = cs.repair(root)
    assert report.quarantined, report
    lost = [number for number in range(6) if not readable(root, number)]
    assert len(lost) == 1, lost
    put(root, lost)
    check(root, range(6))
    for name in os.listdir(root / "segments"):  # as an earlier version, or Linux, left them
        for path in (root / "segments" / name).iterdir():
            os.chmod(path, 0o444)
    assert cs.compact(root).segments > 1
    assert cs.gc(root, apply=True, grace_seconds=0).freed_bytes > 0
    check(root, range(6))
    assert sum(1 for _path in (root / "segments").rglob("*.safetensors")) == 1
    assert not list((root / "tmp").iterdir())


def readable(root, number):
    with cs.open(root) as opened:
        try:
            opened.get(cs.key("own", str(number)), as_numpy=True)
        except (cs.MissingEntry, cs.CorruptEntry):
            return False
        return True


def in_use(folder):
    """A file that another process has open is waited for, and named if it stays."""
    from cachestore.core.errors import WriteFailed
    from cachestore.files import in_use
    from cachestore.files.removal import remove_file
    from cachestore.store.write.commit import create_store

    layout = create_store(folder / "store")
    path = layout.temporary / f"{'0' * 32}.tmp"
    path.write_bytes(b"abc")
    hold = [sys.executable, "-c", f"import time; file = open({str(path)!r}, 'rb'); print('open', flush=True); time.sleep({{}})"]
    with subprocess.Popen([*hold[:2], hold[2].format(0.5)], stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        assert remove_file(layout, path) == 3
    path.write_bytes(b"abc")
    in_use.PATIENCE_SECONDS = 0.3
    with subprocess.Popen([*hold[:2], hold[2].format(30)], stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        with pytest.raises(WriteFailed, match="has it open"):
            remove_file(layout, path)
        other.kill()


def worker(folder, *_names):
    """A worker that waits until it is to stop."""
    from cachestore.jobs.start.parent_watch import watch_parent

    def stopped(number, _frame):
        (folder / "stopped").write_text(str(number))
        sys.exit(0)

    signal.signal(signal.SIGTERM, stopped)
    assert watch_parent(os.environ)
    (folder / "ready").touch()
    for _time in range(1000):
        time.sleep(0.02)


def start_worker(folder):
    from cachestore.jobs.start.parent_watch import PARENT

    variables = {**os.environ, PARENT: str(os.getpid())}
    child = subprocess.Popen([sys.executable, __file__, "worker", str(folder)], stdin=subprocess.PIPE, env=variables)
    wait_for(folder / "ready")
    return child


def wait_for(path):
    until = time.monotonic() + 20
    while not path.exists() and time.monotonic() < until:
        time.sleep(0.01)
    assert path.exists(), path


def starter(folder, *_names):
    """A process that starts a worker, lets another one hold the worker's stdin, and ends without a word."""
    child = start_worker(folder)
    (folder / "pid").write_text(str(child.pid))
    if os.name == "posix":
        nothing = subprocess.DEVNULL
        os.dup2(child.stdin.fileno(), 50)
        os.set_inheritable(50, True)
        subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(8)"], pass_fds=[50], stdout=nothing, stderr=nothing)
    os.kill(os.getpid(), signal.SIGTERM)


def stop(folder):
    """A worker is asked to stop, and another one notices that the process that started it was ended."""
    from cachestore.core import system

    child = start_worker(folder)
    system.send_stop(child.send_signal, signal.SIGTERM, child.stdin.fileno())
    assert child.wait(10) == 0
    wait_for(folder / "stopped")
    assert system.is_readable(child.stdin.fileno(), 0.0) in {True, False}
    other = folder / "other"
    other.mkdir()
    subprocess.run([sys.executable, __file__, "starter", str(other)], check=False, timeout=30)
    wait_for(other / "stopped")


def pictures(folder):
    from PIL import Image

    data = folder / "data"
    data.mkdir()
    for number in range(6):
        Image.effect_noise((96, 80), 40 + number).convert("RGB").save(data / f"{number}.png")
        (data / f"{number}.txt").write_text(f"picture {number}", encoding="utf-8")
    return data


def model(folder):
    """precompute by the command line with two ranks, verify, a loader with two workers, export, push, pull, drop, gc: of a tiny SDXL."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
    import multiprocessing

    import tiny_models

    tiny_models.sdxl().save_pretrained(folder / "model")
    root, data = str(folder / "store"), pictures(folder)
    line = ["precompute", str(data), "--model", str(folder / "model"), "--store", root, "--resolution", "64", "--device", "cpu"]
    assert main([*line, "--procs", "2"]) == 0
    assert main([*line, "--json"]) == 0
    assert main(["verify", root]) == 0
    assert multiprocessing.get_start_method() == "spawn"
    found = cs.CachedDataset(root, generation=1)
    loader = cs.make_loader(found, batch_size=2, num_workers=2)
    ids = [name for _epoch in range(2) for batch in loader for name in batch["sample_id"]]
    assert sorted(ids) == sorted([*found.ids] * 2), ids
    move(folder)


def move(folder):
    """Take a data set along: export, push, pull, read from an address, report, drop, gc."""
    root, out = str(folder / "store"), str(folder / "out")
    for _time in range(2):
        assert main(["export", root, "--format", "sd-scripts", "-o", out]) == 0
    address = (folder / "bucket").as_uri()
    (folder / "bucket").mkdir()
    assert main(["push", root, address]) == 0
    assert main(["pull", address, str(folder / "pulled")]) == 0
    assert main(["verify", str(folder / "pulled")]) == 0
    found = cs.CachedDataset(root, generation=1)
    for _time in range(2):
        away = cs.CachedDataset(address, generation=1, local=str(folder / "local"))
        assert all((away[number]["latents"] == found[number]["latents"]).all() for number in range(len(found)))
    assert main(["report", root, "-o", str(folder / "report.html")]) == 0
    del found
    assert main(["drop", root, "train"]) == 0
    assert main(["gc", root, "--apply"]) == 0
    assert cs.verify(root).ok


if __name__ == "__main__":
    _program, name, where, *rest = sys.argv
    globals()[name](Path(where), *rest)
