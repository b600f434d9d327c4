"""Listing a folder of 100,000 files, beside an earlier commit: `python3 scripts/bench/listing.py --before COMMIT [--files N] [--pairs 9]`.

A third of the files are pictures, a third their captions, and a third are used by nobody: captions without a picture, `.npz`, `.heic` and
others. The sides take turns, in alternating order; each listing runs in a process of its own, which times itself. A first pair warms up.
Prints the seconds of each side and the median ratio, with the lowest and the highest.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import environment

if __name__ == "__main__":
    environment.enter()

import argparse
import os
import platform
import statistics
import subprocess
import tempfile
from typing import Final

MEMORY: Final = Path("/dev/shm")  # noqa: S108 - a folder in memory is meant
SIDE: Final = """
import sys, time
from cachestore.sources.combined import list_path
before = time.perf_counter()
listing = list_path(sys.argv[1])
count = sum(1 for _sample in listing.samples())
print(time.perf_counter() - before, count)
"""
UNUSED: Final = ("gone-{}.txt", "cache-{}_te.npz", "raw-{}.heic", "notes-{}.dat")


def fill(folder: Path, files: int) -> None:
    """Write so many files: a third each of pictures, their captions, and files that are not used."""
    for number in range(files // 3):
        (folder / f"picture-{number:06}.jpg").write_bytes(b"\xff\xd8\xff")
        (folder / f"picture-{number:06}.txt").write_text(f"a photograph of number {number}, in the sun")
        (folder / UNUSED[number % len(UNUSED)].format(number)).write_bytes(b"\0" * 16)


def seconds(tree: Path, folder: Path) -> float:
    """How long a tree takes to list the folder, in a process of its own. Raises RuntimeError if it lists something else."""
    command = [sys.executable, "-c", SIDE, str(folder)]
    answer = subprocess.run(command, cwd=tree, env={**os.environ, "PYTHONPATH": str(tree)}, capture_output=True, text=True, check=True)
    taken, count = answer.stdout.split()
    if int(count) != len(list(folder.glob("*.jpg"))):
        raise RuntimeError(f"{tree} lists {count} samples")
    return float(taken)


def main() -> None:
    """Measure both trees."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", required=True, metavar="COMMIT", help="the commit to compare with")
    parser.add_argument("--files", type=int, default=100_000, help="how many files the folder has (default: 100000)")
    parser.add_argument("--pairs", type=int, default=9, help="how often both are measured (default: 9)")
    arguments = parser.parse_args()
    memory = MEMORY if MEMORY.is_dir() else None
    with tempfile.TemporaryDirectory(dir=memory) as data, tempfile.TemporaryDirectory() as above:
        fill(Path(data), arguments.files)
        earlier = Path(above) / "earlier"
        subprocess.run(["git", "worktree", "add", "--detach", str(earlier), arguments.before], cwd=environment.ROOT, check=True)
        try:
            pairs: list[tuple[float, float]] = []
            for number in range(arguments.pairs + 1):
                sides = (earlier, environment.ROOT) if number % 2 else (environment.ROOT, earlier)
                taken = {tree: seconds(tree, Path(data)) for tree in sides}
                pairs.append((taken[earlier], taken[environment.ROOT]))
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(earlier)], cwd=environment.ROOT, check=True)
    before, now = ([pair[side] for pair in pairs[1:]] for side in (0, 1))
    ratios = sorted(new / old for old, new in pairs[1:])
    print(
        f"{platform.platform()}, {os.cpu_count()} processors, Python {platform.python_version()}; {arguments.files:,} files in one folder"
    )
    print(f"before ({arguments.before}): {statistics.median(before):.2f} s; now: {statistics.median(now):.2f} s")
    print(f"ratio: {statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f}) in {arguments.pairs} pairs")


if __name__ == "__main__":
    main()
