"""What the platform tests run in emulated processes: `python programs.py NAME FOLDER [ARGUMENTS]`. Imports no torch on its own."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

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
    second = subprocess.run([*line, "0", "2"], capture_output=True, text=True, timeout=50)
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
    from cachestore.storage.commit import create_store

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
        try:
            remove_file(layout, path)
        except WriteFailed as error:
            assert "has it open" in str(error), error
        else:
            raise AssertionError("an open file was removed")
        finally:
            other.kill()


if __name__ == "__main__":
    _program, name, where, *rest = sys.argv
    globals()[name](Path(where), *rest)
