"""Publishing a data set: `python3 scripts/bench/publish.py [--rows N] [--processes N] [--step N] [--folder PATH] [--json]`.

For a hundredth, a tenth and all of N rows (default a million), each with a key of a store that holds so many small values:

    steps       so many processes flush their share of the rows into one data set, in steps of 1,000 rows
    one         one row more in a session of its own, beside all others
    whole       `publish` of all rows from arrays, in a process of its own
    read        `store.dataset` and all its keys as an array, in a process of its own

Bytes are those that the processes passed to the system to write (wchar of /proc/self/io); a row is its id, 8 bytes, and a key of 16. Peak
memory is what the process alone held, beyond what it held before. A growth exponent of 1 says: ten times the rows, ten times the cost.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import environment

if __name__ == "__main__":
    environment.enter()

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, Final

NAME: Final = "rows"
SAMPLE_SECONDS: Final = 0.01
VALUES_AT_ONCE: Final = 50_000


def keys_of(rows: range) -> Any:
    """The keys of rows: uint8 of shape [n, 16]."""
    import numpy as np

    numbers = np.zeros((len(rows), 2), np.uint64)
    numbers[:, 1] = np.arange(rows.start + 1, rows.stop + 1)  # a key of zeros would be none
    numbers[:, 0] = numbers[:, 1] * np.uint64(0x9E3779B97F4A7C15)  # spread over all keys
    return numbers.view(np.uint8).reshape(-1, 16)


def ids_of(rows: range) -> list[str]:
    """The ids of rows."""
    return [f"{number:08}" for number in rows]


def fill(folder: str, rows: str) -> None:
    """Put a small value for each row."""
    import numpy as np

    import cachestore as cs

    with cs.open(folder, mode="a") as store:
        for start in range(0, int(rows) + 1, VALUES_AT_ONCE):
            with store.writer() as writer:
                for key in keys_of(range(start, min(start + VALUES_AT_ONCE, int(rows) + 1))):
                    writer.put(bytes(key), {"x": np.frombuffer(bytes(key[:4]), np.uint8)})
        store.commit()


def written_bytes() -> int:
    """How many bytes this process has passed to the system to write."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["wchar"])


def private_bytes() -> int:
    """What this process alone holds."""
    lines = (line.split() for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    return 1024 * sum(int(words[1]) for words in lines if words[0] in {"Private_Clean:", "Private_Dirty:"})


def steps(folder: str, first: str, last: str, step: str, name: str) -> None:
    """Flush rows in steps, in this process; prints the seconds of each step and the bytes as JSON."""
    import cachestore as cs

    import_module("cachestore.store.write.session")  # once, and not in the first step

    taken: list[float] = []
    with cs.open(folder, mode="a") as store:
        bytes_before = written_bytes()
        with store.session(name) as session:
            for start in range(int(first), int(last), int(step)):
                rows = range(start, min(start + int(step), int(last)))
                began = time.perf_counter()
                for sample, key in zip(ids_of(rows), keys_of(rows), strict=True):
                    session.set(sample, x=bytes(key))
                session.flush()
                taken.append(time.perf_counter() - began)
        print(json.dumps({"seconds": taken, "bytes": written_bytes() - bytes_before}))


def one(folder: str, row: str, name: str) -> None:
    """Add a row in a session of its own, in this process; prints milliseconds and bytes as JSON."""
    import cachestore as cs

    import_module("cachestore.store.write.session")  # once, and not in what is measured

    with cs.open(folder, mode="a") as store:
        bytes_before, began = written_bytes(), time.perf_counter()
        with store.session(name) as session:
            session.set("one more", x=bytes(keys_of(range(int(row), int(row) + 1))[0]))
        print(json.dumps({"ms": 1000 * (time.perf_counter() - began), "bytes": written_bytes() - bytes_before}))


def whole(folder: str, rows: str, name: str) -> None:
    """Publish all rows from arrays, in this process; prints seconds and peak memory as JSON."""
    import cachestore as cs

    with cs.open(folder, mode="a") as store:
        ids, keys = ids_of(range(int(rows))), keys_of(range(int(rows)))
        print(json.dumps(measured(lambda: store.publish(name, cs.Rows(ids, {"x": keys})))))


def read(folder: str, rows: str, name: str) -> None:
    """Read all rows, in this process; prints seconds and peak memory as JSON. Raises RuntimeError if some are not there."""
    import cachestore as cs

    with cs.open(folder) as store:
        found: dict[str, Any] = {}

        def look() -> None:
            found["rows"] = store.dataset(name)
            found["keys"] = found["rows"].keys("x")

        body = measured(look)
        if len(found["rows"]) < int(rows) or not (found["keys"][: int(rows)].any(axis=1)).all():
            raise RuntimeError(f"{len(found['rows'])} rows of {rows} are there")
        print(json.dumps(body))


def measured(call: Callable[[], object]) -> dict[str, float]:
    """The seconds of a call, the bytes that it wrote, and the memory that the process held more at its peak."""
    before, ended = private_bytes(), threading.Event()
    peak = [before]

    def watch() -> None:
        while not ended.wait(SAMPLE_SECONDS):
            peak[0] = max(peak[0], private_bytes())

    watching = threading.Thread(target=watch)
    watching.start()
    bytes_before, began = written_bytes(), time.perf_counter()
    call()
    seconds = time.perf_counter() - began
    written = written_bytes() - bytes_before
    ended.set()
    watching.join()
    return {"seconds": seconds, "bytes": written, "peak": max(peak[0], private_bytes()) - before}


def begin(part: str, *words: object) -> "subprocess.Popen[str]":
    """Start a part in a process of its own."""
    code = f"import sys; from bench import publish; publish.{part}(*sys.argv[1:])"
    paths = os.pathsep.join(map(str, (environment.ROOT / "scripts", environment.ROOT)))
    command = [sys.executable, "-c", code, *map(str, words)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": paths})


def ended(part: "subprocess.Popen[str]") -> dict[str, Any]:
    """What a part printed. Raises RuntimeError if it failed."""
    text, _errors = part.communicate()
    if part.returncode:
        raise RuntimeError(f"a part ended with {part.returncode}")
    return json.loads(text) if text else {}


def measure(folder: Path, rows: int, processes: int, step: int) -> dict[str, Any]:
    """All parts for so many rows."""
    store = folder / f"store {rows}"
    ended(begin("fill", store, rows))
    bounds = [rows * number // processes for number in range(processes + 1)]
    began = time.perf_counter()
    parts = [begin("steps", store, bounds[n], bounds[n + 1], step, NAME) for n in range(processes)]
    each = [ended(part) for part in parts]
    seconds = time.perf_counter() - began
    taken = [one for body in each for one in body["seconds"]]
    files = Counter(path.suffix for path in (store / "catalogs" / NAME).iterdir())
    size = sum(path.stat().st_size for path in (store / "catalogs" / NAME).iterdir())
    found: dict[str, Any] = {
        "rows": rows,
        "seconds": seconds,
        "bytes a row": sum(body["bytes"] for body in each) / rows,
        "step": statistics.median(taken),
        "last step": statistics.median(body["seconds"][-1] for body in each),
        "files": dict(files),
        "disk bytes": size,
    }
    found["one"] = ended(begin("one", store, rows, NAME))
    found["read after steps"] = ended(begin("read", store, rows, NAME))
    found["whole"] = ended(begin("whole", store, rows, "whole"))
    found["read"] = ended(begin("read", store, rows, "whole"))
    return found


def exponents(found: Sequence[dict[str, Any]]) -> dict[str, float]:
    """How costs grow from the second size to the last."""
    few, many = found[-2], found[-1]
    wider = math.log(many["rows"] / few["rows"])
    costs: dict[str, Callable[[dict[str, Any]], float]] = {
        "seconds of all steps": lambda body: body["seconds"],
        "bytes of all steps": lambda body: body["bytes a row"] * body["rows"],
        "files": lambda body: sum(body["files"].values()),
        "a step": lambda body: body["step"],
        "one row more, ms": lambda body: body["one"]["ms"],
        "one row more, bytes": lambda body: body["one"]["bytes"],
        "publish": lambda body: body["whole"]["seconds"],
        "publish, peak": lambda body: body["whole"]["peak"],
        "read": lambda body: body["read"]["seconds"],
    }
    return {name: math.log(cost(many) / cost(few)) / wider for name, cost in costs.items()}


def shown(body: dict[str, Any]) -> str:
    """A size as a few lines."""
    one_more, published, reading, folded = body["one"], body["whole"], body["read"], body["read after steps"]
    files = f"files {sum(body['files'].values())} {body['files']}, {body['disk bytes'] / 2**20:.1f} MiB"
    peaks = [f"peak {part['peak'] / 2**20:.0f} MiB" for part in (published, reading)]
    lines = [
        f"{body['rows']:,} rows",
        f"  steps: {body['seconds']:.1f} s, {body['bytes a row']:.0f} bytes a row; {files}",
        f"  a step: {1000 * body['step']:.0f} ms, the last {1000 * body['last step']:.0f} ms; reading then: {folded['seconds']:.3f} s",
        f"  one row more: {one_more['bytes']:,} bytes, {one_more['ms']:.1f} ms",
        f"  publish: {published['seconds']:.2f} s, {published['bytes'] / body['rows']:.0f} bytes a row, {peaks[0]}",
        f"  reading: {reading['seconds']:.3f} s, {peaks[1]}",
    ]
    return "\n".join(lines)


def main() -> None:
    """Measure three sizes and print."""
    parser = argparse.ArgumentParser(description="What it costs to publish a data set, by many processes and at once.")
    parser.add_argument("--rows", type=int, default=1_000_000, help="the largest size (default: 1000000)")
    parser.add_argument("--processes", type=int, default=8, help="how many publish into one data set (default: 8)")
    parser.add_argument("--step", type=int, default=1_000, help="rows of each flush (default: 1000)")
    parser.add_argument("--folder", type=Path, help="where the stores are made (default: a temporary folder)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="cachestore-bench-", dir=asked.folder) as folder:
        found = [measure(Path(folder), rows, asked.processes, asked.step) for rows in (asked.rows // 100, asked.rows // 10, asked.rows)]
    grows = exponents(found)
    if asked.json:
        print(json.dumps({"sizes": found, "exponents": grows}))
        return
    print(f"{platform.platform()}, {os.cpu_count()} processors, Python {platform.python_version()}")
    print("\n".join(map(shown, found)))
    print("exponents: " + ", ".join(f"{name} {value:.2f}" for name, value in grows.items()))


if __name__ == "__main__":
    main()
