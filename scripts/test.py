"""Run every check and test: `python3 scripts/test.py [--fast | --lowest] [pytest arguments]`.

Makes the environment if there is none. Every gate runs, even after one has failed; the table at the end says which. The exit
status is 0 only if all passed. `--fast` leaves out the tests that import torch, start several processes or talk to a server, and
the types of tests and scripts, and tries ten examples of each property; it takes at most 60 s on 2 cores.
`--lowest` runs only the tests of encoding and loading, in an environment of its own with the lowest versions that pyproject.toml
declares. Everything else is handed to pytest.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import environment

WHOLE = ("-m", "not slow")
FAST = ("-m", "not slow and not torch and not processes", "--hypothesis-profile=fast")
WHOLE_FILES = ("--dist", "worksteal")
"""Each process gets one run of files and later takes half of what another has left: few files' fixtures and models are made twice."""
LOWEST = "--lowest"
OF_LIBRARIES = ("tests/encode", "tests/loading")
OLD_WARNINGS = ("-W", "ignore::FutureWarning", "-W", "ignore:'mode' parameter is deprecated:DeprecationWarning")
"""The second is Pillow's of 11.3, which took it back."""
QUIET_THREADS = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
"""One thread for each of pytest's processes, and no look at the network."""
COMPILED_ONCE = {"PYTHONDONTWRITEBYTECODE": ""}
"""Whatever the caller's shell says: tests start hundreds of interpreters, each of which would compile the package again."""
MEMORY_FOLDER = Path("/dev/shm")  # noqa: S108 - the file system in memory itself; pytest makes folders of its own in it
MEMORY_BYTES = 2 << 30
TYPES = "basedpyright"
LIMIT_SECONDS = 2400
"""For one gate; the longest takes a few minutes."""
TIMED_OUT = 124


def fast_folder() -> dict[str, str]:
    """Where tests make their files: in memory where there is room, as they sync thousands of small files (faster on slow disks)."""
    has_room = MEMORY_FOLDER.is_dir() and shutil.disk_usage(MEMORY_FOLDER).free > MEMORY_BYTES
    return {"TMPDIR": str(MEMORY_FOLDER)} if has_room else {}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one gate."""

    name: str
    status: int
    seconds: float


def gates(arguments: Sequence[str], *, fast: bool) -> dict[str, list[str]]:
    """The commands by name, in order; pytest comes last so that its count stands next to the table."""
    python = str(environment.PYTHON)
    return {
        "ruff format": [python, "-m", "ruff", "format", "--check"],
        "ruff check": [python, "-m", "ruff", "check"],
        TYPES: [python, "-m", "basedpyright", *(["cachestore"] if fast else [])],
        "import-linter": [str(environment.BIN / "lint-imports"), "--no-logo"],
        "pytest": [python, "-m", "pytest", "-n", "3", *WHOLE_FILES, *(FAST if fast else WHOLE), *arguments],
    }


def lowest_gates(arguments: Sequence[str]) -> dict[str, list[str]]:
    """The tests whose subject is other libraries, with the lowest versions of these. They warn of themselves, which is no fault here."""
    pytest = [str(environment.LOWEST.python), "-m", "pytest", "-n", "2", *WHOLE_FILES, *WHOLE, *OLD_WARNINGS]
    return {"pytest, lowest": [*pytest, *(arguments or OF_LIBRARIES)]}


def run(name: str, command: Sequence[str], *, out: IO[bytes] | None = None) -> Outcome:
    """Run one gate under a heading; its output goes to the terminal as it comes, or into a file."""
    if out is None:
        print(f"\n=== {name}", flush=True)
    begin = time.monotonic()
    surroundings = QUIET_THREADS | fast_folder() | os.environ | COMPILED_ONCE
    try:
        ended = subprocess.run(
            command,
            cwd=environment.ROOT,
            env=surroundings,
            check=False,
            timeout=LIMIT_SECONDS,
            stdout=out,
            stderr=out and subprocess.STDOUT,
        )
        status = ended.returncode
    except subprocess.TimeoutExpired:
        print(f"{name} had not ended after {LIMIT_SECONDS} s: a test may be in a loop that its own limit cannot leave", flush=True)
        status = TIMED_OUT
    return Outcome(name, status, time.monotonic() - begin)


def run_all(chosen: Mapping[str, Sequence[str]]) -> list[Outcome]:
    """Run the gates in order, the type checker beside them: it needs one processor, and pytest leaves some of two unused."""
    with tempfile.TemporaryFile() as out, ThreadPoolExecutor(1) as beside:
        types = {name: beside.submit(run, name, command, out=out) for name, command in chosen.items() if name == TYPES}
        outcomes = [types[name] if name in types else run(name, command) for name, command in chosen.items()]
        ended = [one if isinstance(one, Outcome) else one.result() for one in outcomes]
        for name in types:
            out.seek(0)
            print(f"\n=== {name}\n{out.read().decode(errors='replace')}", flush=True)
    return ended


def summarise(outcomes: Sequence[Outcome]) -> int:
    """Print the table; return the exit status."""
    print("\n=== summary")
    for outcome in outcomes:
        verdict = "passed" if outcome.status == 0 else f"FAILED ({outcome.status})"
        print(f"{outcome.name:<14} {verdict:<12} {outcome.seconds:6.1f} s")
    return int(any(outcome.status for outcome in outcomes))


def main() -> int:
    """Run all gates with the arguments of the command line."""
    arguments = sys.argv[1:]
    rest = [argument for argument in arguments if argument not in {"--fast", LOWEST}]
    chosen = lowest_gates(rest) if LOWEST in arguments else gates(rest, fast="--fast" in arguments)
    return summarise(run_all(chosen))


if __name__ == "__main__":
    environment.enter(environment.LOWEST if LOWEST in sys.argv else environment.USUAL)
    sys.exit(main())
