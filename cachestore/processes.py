"""Workers as processes of their own: `python -m cachestore …`, never `multiprocessing`.

No `__main__` guard is needed and notebooks work; the caller's process starts no tokenizer, OpenMP or CUDA threads of ours, gets its
memory back, and may fork afterwards.
"""

import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import IO, Any, Final

from cachestore import errors
from cachestore.errors import BadInput, CacheStoreError, Incomplete

_USAGE: Final = 2
_FAILED: Final = 3
_ENDED_WELL: Final = frozenset({0, _FAILED})
_STOP_SECONDS: Final = 30.0
_LAST_WORDS: Final = 2000


@dataclass(frozen=True, slots=True)
class Child:
    """One ended worker process."""

    pid: int
    returncode: int
    report: Mapping[str, Any] | None
    """The object it printed; None where it ended without one."""
    last_words: str
    """The end of what it wrote to stderr."""


def run_children(arguments: Sequence[str], count: int) -> list[Child]:
    """Run `count` workers with the same arguments as one launch, each with its own rank, and wait for all of them.

    Returns as they ended, in the order of ranks. Interrupting the caller stops them all: each publishes what it has encoded.
    """
    launch = f"procs:{secrets.token_hex(8)}"
    return _run(arguments, [_as_rank(rank, count, launch) for rank in range(count)])


def run_child(arguments: Sequence[str], environment: Mapping[str, str]) -> list[Child]:
    """As `run_children`, for one worker of a launch that others started; `environment` says which, over what it inherits."""
    return _run(arguments, [environment])


def _run(arguments: Sequence[str], environments: Sequence[Mapping[str, str]]) -> list[Child]:
    """One worker for each environment; the first one's words go to our stderr."""
    with ExitStack() as stack:
        started: list[tuple[subprocess.Popen[str], IO[str], IO[str]]] = []
        try:
            for rank, own in enumerate(environments):
                out, err = (stack.enter_context(tempfile.TemporaryFile("w+", encoding="utf-8")) for _stream in range(2))
                quiet = [] if rank == 0 else ["--quiet"]
                command = [sys.executable, "-m", "cachestore", *arguments, "--json", *quiet]
                heard = None if rank == 0 else err
                process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=out, stderr=heard, text=True, env={**os.environ, **own}
                )
                started.append((process, out, err))
            for process, _out, _err in started:
                process.wait()
        except BaseException:  # an interrupted wait must not leave workers behind, whatever interrupted it
            _stop([process for process, _out, _err in started])
            raise
        return [_ended(process, out, err) for process, out, err in started]


def _as_rank(rank: int, count: int, launch: str) -> dict[str, str]:
    own = {"CACHESTORE_LAUNCH": launch, "CACHESTORE_RANK": str(rank), "CACHESTORE_WORLD_SIZE": str(count), "LOCAL_RANK": str(rank)}
    if "OMP_NUM_THREADS" not in os.environ:
        # Otherwise each rank starts as many threads as there are processors, and they push each other aside: 3 times slower on 2 cores.
        own["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // count))
    return own


def _stop(processes: Sequence["subprocess.Popen[str]"]) -> None:
    """Ask the workers to publish and end; kill those that do not within 30 s."""
    for process in processes:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
    for process in processes:
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _ended(process: "subprocess.Popen[str]", out: IO[str], err: IO[str]) -> Child:
    out.seek(0)
    err.seek(0)
    try:
        report = json.loads(out.read())
    except ValueError:
        report = None
    return Child(process.pid, process.returncode, report, err.read()[-_LAST_WORDS:])


def joined_report(children: Sequence[Child]) -> dict[str, Any]:
    """The report that the surviving workers agree on, with what all of them published in `encoded_here`.

    Raises the error that a worker ended with, as its own class, or Incomplete where none of them reached the end.
    """
    ended = [child for child in children if child.returncode in _ENDED_WELL and child.report is not None]
    if ended:
        report = dict(ended[0].report or {})
        report["encoded_here"] = sum(int((child.report or {}).get("encoded_here", 0)) for child in ended)
        return report
    if any(child.returncode == _USAGE for child in children):
        message = next(child.last_words for child in children if child.returncode == _USAGE) or "the arguments were refused"
        raise BadInput(message.strip())
    for child in children:
        if child.report and "error" in child.report:
            raise _class_of(str(child.report.get("kind")))(str(child.report["error"]))
    said = [f"worker {rank} (pid {child.pid}) {_how(child)}" for rank, child in enumerate(children)]
    message = f"no worker reached the end: {'; '.join(said[:4])}. Run the same command again: it goes on where it stopped"
    raise Incomplete(message)


def _class_of(kind: str) -> type[CacheStoreError]:
    """The class of an error by the name that a worker printed."""
    found = getattr(errors, kind, None)
    return found if isinstance(found, type) and issubclass(found, CacheStoreError) else CacheStoreError


def _how(child: Child) -> str:
    if child.returncode < 0:
        return f"was killed by {signal.Signals(-child.returncode).name}"
    return f"ended with exit code {child.returncode}"
