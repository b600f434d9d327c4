"""This tree beside an earlier commit: `python3 scripts/bench/pairs.py --before COMMIT [--pairs 5] [--only ROW ...] [--json]`.

Each side runs in a process of its own, which answers for one row at a time (each tree's own `pairs_side.py`), with this tree's
environment; the earlier commit is checked out into a temporary folder. The sides take turns, in alternating order, and so does what a row
is measured beside: `dd`, LMDB, or the VAE alone. A ratio is the median over the pairs, with the lowest and the highest. A first pair
warms up. With `--before` left out, this tree alone is measured.

Let nothing else run. All rows with 5 pairs take less than 20 minutes on 2 processors, up to 3 GB of disk, and 1.5 GB of memory.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import environment

if __name__ == "__main__":
    environment.enter()

import argparse
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Final

SIDE: Final = Path("scripts/bench/pairs_side.py")
"""What answers, in each tree: it knows that tree's modules."""
MEMORY: Final = Path("/dev/shm")  # noqa: S108 - a folder in memory is meant
ENDING_SECONDS: Final = 30


@dataclass(slots=True)
class Side:
    """A process that measures one tree."""

    process: "subprocess.Popen[str]"
    package: str = ""
    decoder: str = ""

    def answer(self) -> dict[str, Any]:
        """Its next answer. Raises RuntimeError if it has ended; what it wrote to stderr was shown."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process that measures {self.package or 'one side'} has ended")
        return json.loads(line)

    def rate(self, row: str, part: str) -> float:
        """The rate of a row, measured now."""
        assert self.process.stdin is not None
        print(json.dumps({"row": row, "part": part}), file=self.process.stdin, flush=True)
        return self.answer()["rate"]


@contextmanager
def running(tree: Path, common: Path, memory: Path, name: str) -> Generator[Side]:
    """A side over a tree, which ends with the block."""
    own, in_memory = common / name, memory / name
    own.mkdir()
    in_memory.mkdir()
    paths = os.pathsep.join([str(tree), str((tree / SIDE).parent)])
    variables = {**os.environ, "PYTHONPATH": paths, "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "TMPDIR": str(own)}
    command = [sys.executable, str(tree / SIDE), str(common), str(own), str(in_memory)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=variables, cwd=own) as process:
        try:
            side = Side(process)
            hello = side.answer()
            side.package, side.decoder = hello["package"], hello["decoder"]
            if Path(side.package).resolve() != (tree / "cachestore").resolve():
                raise RuntimeError(f"{name} would measure {side.package}, not {tree}")
            yield side
        finally:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(ENDING_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()


@contextmanager
def checked_out(commit: str, folder: Path) -> Generator[Path]:
    """A commit in a folder, which is removed with the block."""
    tree = folder / "tree"
    git = ["git", "-C", str(environment.ROOT), "worktree"]
    subprocess.run([*git, "add", "--quiet", "--detach", str(tree), commit], check=True)
    try:
        yield tree
    finally:
        subprocess.run([*git, "remove", "--force", str(tree)], check=False)


@dataclass(slots=True)
class Measured:
    """The rates of one row, pair by pair."""

    row: str
    unit: str
    beside_name: str
    rates: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    """By `before`, `after` and `beside`."""

    def ratio(self, one: str, other: str) -> str:
        """The median of each pair's ratio, the lowest and the highest; empty if one of them was not measured."""
        if one not in self.rates or other not in self.rates:
            return ""
        ratios = [first / second for first, second in zip(self.rates[one], self.rates[other], strict=True)]
        return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"

    def median(self, name: str) -> str:
        """The median rate; empty if it was not measured."""
        if name not in self.rates:
            return ""
        rate = statistics.median(self.rates[name])
        return f"{rate:,.0f}" if rate >= 100 else f"{rate:.1f}"


def measure(name: str, row: Any, sides: Mapping[str, Side], pairs: int) -> Measured:
    """Measure a row by turns, in alternating order. A pair that warms up is left out."""
    measured = Measured(name, row.unit, row.beside)
    turns = [(which, side, "ours") for which, side in sides.items()]
    turns += [("beside", sides["after"], "beside")] if row.beside else []
    warming = 1 if row.warms_up else 0
    for number in range(warming + pairs):
        for which, side, part in turns if number % 2 else reversed(turns):
            rate = side.rate(name, part)
            if number >= warming:
                measured.rates.setdefault(which, []).append(rate)
    return measured


HEADS: Final = ("row", "unit", "before", "after", "after / before", "beside", "", "before / beside", "after / beside")


def table(rows: Sequence[Measured]) -> str:
    """One line for each row, in columns."""
    lines: list[tuple[str, ...]] = [HEADS]
    for row in rows:
        medians = row.median("before"), row.median("after")
        ratios = row.ratio("before", "beside"), row.ratio("after", "beside")
        lines.append((row.row, row.unit, *medians, row.ratio("after", "before"), row.beside_name, row.median("beside"), *ratios))
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADS))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure all rows and print them as a table, or as one JSON object."""
    from bench.pairs_side import ROWS

    parser = argparse.ArgumentParser(description="This tree beside an earlier commit, by turns.")
    parser.add_argument("--before", metavar="COMMIT", help="the earlier commit (default: measure this tree alone)")
    parser.add_argument("--pairs", type=int, default=5, help="pairs that count (default: 5)")
    parser.add_argument("--only", nargs="+", choices=list(ROWS), help="leave out the other rows")
    parser.add_argument("--folder", help="a folder on the disk to measure (default: the one for temporary files)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    chosen = parser.parse_args(arguments)
    began, load = time.monotonic(), os.getloadavg()[0]
    rows: list[Measured] = []
    with ExitStack() as stack:
        folder, memory = (
            Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cachestore-pairs-", dir=parent)))
            for parent in (chosen.folder, MEMORY if MEMORY.is_dir() else chosen.folder)
        )
        trees = {"before": stack.enter_context(checked_out(chosen.before, folder))} if chosen.before else {}
        trees["after"] = environment.ROOT
        sides = {name: stack.enter_context(running(tree, folder, memory, name)) for name, tree in trees.items()}
        for name in chosen.only or ROWS:
            rows.append(measure(name, ROWS[name], sides, chosen.pairs))
            print(f"{name}: {time.monotonic() - began:.0f} s since the start", file=sys.stderr, flush=True)
        decoders = {name: side.decoder for name, side in sides.items()}
        fitting = folder / "fitting.json"
        vae = json.loads(fitting.read_text())["times"] if fitting.exists() else None
    about = {"before": chosen.before, "pairs": chosen.pairs, "processors": os.cpu_count(), "load_before": round(load, 1)}
    about |= {"decoders": decoders, "vae_in_decodings": vae, "seconds": round(time.monotonic() - began)}
    if chosen.json:
        print(json.dumps({**about, "rows": [asdict(row) for row in rows]}))
    else:
        print("\n".join(f"{name}: {value}" for name, value in about.items()), table(rows), sep="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
