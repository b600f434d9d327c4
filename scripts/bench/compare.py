"""cachestore beside other ways to keep latents and text embeddings: `python3 scripts/bench/compare.py [--page] [--json]`.

For each way of `compared_ways.py`: seconds to write 10,000 samples of 147.5 KiB, bytes and files on disk, time to open, one sample, a batch
of 16, two epochs through a DataLoader; then one flipped bit, and a writer that is killed. Every step runs in a process of its own, one
after the other; files are deleted before the next way. `--page` writes docs/compared.json and docs/compared.svg, and puts the tables into
docs/compared.md. torch uses one thread in each process.

The peers stand in an environment of their own, `.venv-peers`, made at the first run (1.9 GB). A run needs up to 4 GB of disk.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import environment

if __name__ == "__main__":
    environment.enter(environment.COMPARED)

import argparse
import json
import mmap
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any, Final

from bench.compared_page import put_into, svg_of, tables_of
from bench.compared_ways import WAYS, Way, bytes_in, files_in

DOCS: Final = environment.ROOT / "docs"
KILLED: Final = 500
"""Samples that a writer which is killed wants to write."""
STEP_SECONDS: Final = 900


def run_step(step: str, way: Way, folder: Path, count: int) -> dict[str, Any]:
    """One step in a process of its own. Raises CalledProcessError or TimeoutExpired; what it wrote to stderr was shown."""
    command = [sys.executable, str(Path(__file__).with_name("compared_ways.py")), step, way.name, str(folder), "--count", str(count)]
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}  # in each process, as in a worker of a DataLoader
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=STEP_SECONDS, env=one_thread)
    return json.loads(ended.stdout.splitlines()[-1])


def flip(folder: Path, stored: bytes) -> str:
    """Flip one bit in the middle of a value that lies somewhere in these files; returns the kind of file. Raises LookupError."""
    for path in files_in(folder):
        if path.stat().st_size < len(stored):
            continue
        with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
            start = mapped.find(stored)
            if start >= 0:
                mapped[start + len(stored) // 2] ^= 1
                return path.suffix
    raise LookupError(f"the value is in no file below {folder}")


def compare(way: Way, folder: Path, count: int) -> dict[str, Any]:
    """All figures of one way."""
    began = time.monotonic()
    samples = folder / "samples"
    found: dict[str, Any] = {"about": way.about, "version": _version(way.distribution), "syncs": way.syncs}
    found["write"] = run_step("write", way, samples, count)
    found |= {"bytes": bytes_in(samples), "files": len(files_in(samples))}
    found["read"] = run_step("measure", way, samples, count)
    whole = run_step("inspect", way, samples, count)
    if whole["right"] != count:
        raise RuntimeError(f"{way.name}: {whole} of {count} samples that were written and not touched")
    flip(samples, way.stored(count // 3))
    found["flip"] = run_step("inspect", way, samples, count)
    shutil.rmtree(samples)
    found["kill"] = run_step("kill", way, folder / "killed", min(KILLED, count))
    print(f"{way.name}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    return found


def _version(distribution: str | None) -> str:
    try:
        return version(distribution or "unknown")
    except PackageNotFoundError:
        return distribution or "unknown"


def machine(folder: str) -> dict[str, Any]:
    """Where this runs."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0
    return {
        "processor": model,
        "processors": os.cpu_count(),
        "memory_gib": round(memory / 2**30),
        "system": f"{platform.system()} {platform.release().split('-')[0]}",
        "python": platform.python_version(),
        "torch": _version("torch").split("+")[0],
        "file_system": _file_system(Path(folder)),
        "load_before": round(os.getloadavg()[0], 1),
    }


def _file_system(folder: Path) -> str:
    """Of which kind the folder's is; empty where nothing tells."""
    mounts = Path("/proc/mounts")
    lines = [line.split()[1:3] for line in mounts.read_text().splitlines()] if mounts.exists() else []
    above = [(len(point), kind) for point, kind in lines if folder.resolve().is_relative_to(point)]
    return max(above)[1] if above else ""


def is_installed(way: Way) -> bool:
    """Whether the module that it needs is there."""
    return way.package is None or find_spec(way.package) is not None


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure all, print the tables or one JSON object, write the page if asked."""
    parser = argparse.ArgumentParser(description="cachestore beside other ways to keep latents and text embeddings.")
    parser.add_argument("--count", type=int, default=10_000, help="samples (default: 10,000)")
    parser.add_argument("--only", nargs="+", choices=list(WAYS), help="leave out the other ways")
    parser.add_argument("--folder", help="where to work (default: a temporary folder)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--page", action="store_true", help="write docs/compared.json and docs/compared.svg, and the tables of docs/compared.md"
    )
    chosen = parser.parse_args(arguments)
    began, where = time.monotonic(), machine(chosen.folder or tempfile.gettempdir())
    ways: dict[str, Any] = {}
    for name, way in WAYS.items():
        if (chosen.only and name not in chosen.only) or not is_installed(way):
            continue
        folder = Path(tempfile.mkdtemp(prefix="cachestore-compare-", dir=chosen.folder))
        try:
            ways[name] = compare(way, folder, chosen.count)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    result = {"machine": where, "samples": chosen.count, "seconds": round(time.monotonic() - began), "ways": ways}
    print(json.dumps(result) if chosen.json else tables_of(result))
    if chosen.page:
        (DOCS / "compared.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        (DOCS / "compared.svg").write_text(svg_of(result), encoding="utf-8")
        page = DOCS / "compared.md"
        page.write_text(put_into(page.read_text(encoding="utf-8"), tables_of(result)), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
