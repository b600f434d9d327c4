"""Starts workers as separate processes, never with `multiprocessing`.

So no `__main__` guard is needed, and notebooks work. The caller's process gets no tokenizer, OpenMP or CUDA threads, and may fork
afterwards: no process, thread, descriptor or memory of the workers is left.
"""

import codecs
import json
import logging
import os
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Final, cast

from cachestore.children.kinds import WORKER
from cachestore.children.start import ChildProcess, last_line, start
from cachestore.core import errors, system
from cachestore.core.errors import BadInput, CacheStoreError, Incomplete
from cachestore.core.signals import STOPPING, heard
from cachestore.core.spelling import option
from cachestore.core.words import plural
from cachestore.files.opening import read_at
from cachestore.jobs.run.task import Cancel
from cachestore.jobs.share.progress import WAITING, LaunchStatus, PassStatus, RankStatus
from cachestore.jobs.start.parent_watch import PARENT
from cachestore.sources.files import SourceFiles
from cachestore.sources.pipe import PIPE, Answers

WORK: Final = "work"
"""The command that a worker runs: `cachestore work REQUEST`."""
LISTING: Final = "CACHESTORE_LISTING"
"""The variable with the number of the listing that a worker's parent made (`store/write/listing_numbers`)."""
STOP_SECONDS: Final = 30.0
STOP_BATCHES: Final = 3.0
"""A worker that was asked to stop is killed after 30 s or three times its slowest batch, whichever is longer."""
STILL_SECONDS: Final = 1800.0
STILL_BATCHES: Final = 3.0
"""A worker whose count has not risen for 30 minutes or three times its slowest batch, whichever is longer, hangs."""
UNSEEN_SECONDS: Final = 4 * 3600.0
"""How long a worker may list its source and digest its model before it is seen in its pass."""
POLL_SECONDS: Final = 0.05
LOOK_SECONDS: Final = 1.0
"""How often `on_progress` is called."""
WATCH_SECONDS: Final = 10.0
"""How often the workers are looked at if no progress is shown, to notice one that hangs."""
LOOKS_APART: Final = 20.0
"""Looks take at most one part of this many of the time: with hundreds of ranks on a slow file system, one takes long."""
_USAGE: Final = 2
_FAILED: Final = 3
_ENDED_WELL: Final = frozenset({0, _FAILED})
_LAST_WORDS: Final = 2000
_COPY_BYTES: Final = 1 << 16
_MEMORY_WORDS: Final = (
    "out of memory",
    "MemoryError",
    "bad_alloc",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "not enough memory",
    "failed to map segment",
    "cannot allocate memory",
    "Cannot allocate memory",
)
_VMSTAT: Final = Path("/proc/vmstat")

_log = logging.getLogger("cachestore")


def _to_stderr(text: str) -> None:
    """Write to the current `sys.stderr`, which may be None, a file or a notebook's cell. Errors are ignored, as if it is closed."""
    if sys.stderr is not None:  # pyright: ignore[reportUnnecessaryComparison] - None in a program without a console
        with suppress(OSError, ValueError):
            sys.stderr.write(text)
            sys.stderr.flush()


@dataclass(frozen=True, slots=True)
class Care:
    """What to watch and call while workers run; all of it in the calling thread."""

    status_of: Callable[[Collection[int]], LaunchStatus] = lambda _pids: LaunchStatus()
    """Returns what these pids do, and how far their pass is. A worker not yet seen in it is given more time."""
    show: Callable[[LaunchStatus], None] | None = None
    """Called with what `status_of` has returned."""
    seconds: float = LOOK_SECONDS
    """How often `show` is called."""
    cancel: Cancel | None = None
    """Once it is set, the workers stop; each publishes what it has encoded."""
    say: Callable[[str], None] = _log.info
    """Called with a line for a person, if this process ends the pass itself."""
    warn: Callable[[str], None] = _log.warning
    """Called with a line when a worker failed while others continue."""
    pictures: SourceFiles | None = None
    """What is in this process's memory and workers ask for; None if there is nothing."""
    words: Callable[[str], None] = _to_stderr
    """Called with what the first worker writes to its stderr, as it comes."""
    is_quiet: bool = False
    """Whether rank 0, too, writes nothing but warnings of libraries."""


def showing(tell: Callable[[PassStatus], None] | None) -> Callable[[LaunchStatus], None] | None:
    """Return a `Care.show` that tells how far the pass is once it is known; None if no caller asks for it."""
    if tell is None:
        return None
    return lambda seen: None if seen.status is None else tell(seen.status)


@dataclass(frozen=True, slots=True)
class Child:
    """A worker process that has ended."""

    pid: int
    returncode: int
    report: Mapping[str, Any] | None
    """The JSON object that it printed; None if it printed none."""
    last_words: str
    """The end of what it wrote to stderr."""
    rank: int = 0
    how: str = ""
    """How it failed; empty if it ended well."""
    signal: int | None = None
    """The signal that stopped it, if another process than its parent sent one."""
    reported: str = ""
    """What of its last output `how` has already."""

    @property
    def is_well(self) -> bool:
        """Whether it reached the end of the pass."""
        return self.returncode in _ENDED_WELL and self.report is not None and "error" not in self.report


@dataclass(slots=True)
class _Running:
    rank: int
    process: ChildProcess
    out: IO[bytes]
    err: IO[bytes]
    stdin: int
    """The other end of its stdin, which ends with this process."""
    started: float
    sign: RankStatus | None = None
    """Its last status that was seen."""
    reason: str = ""
    """Why it was asked to stop."""
    asked_at: float | None = None
    child: Child | None = None
    _copied: int = 0
    _decoder: codecs.IncrementalDecoder = field(default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace"))

    def ask_to_stop(self, reason: str) -> None:
        """Send a signal, once: it then publishes what it has encoded, and ends."""
        if self.asked_at is None:
            self.asked_at, self.reason = time.monotonic(), reason
            system.send_stop(self.process.send_signal, heard(), self.stdin)

    @property
    def patience(self) -> float:
        return max(STOP_SECONDS, STOP_BATCHES * (self.sign.slowest_batch if self.sign else 0.0))

    def copy_words(self, words: Callable[[str], None]) -> None:
        while new := read_at(self.err.fileno(), _COPY_BYTES, self._copied):
            self._copied += len(new)
            words(self._decoder.decode(bytes(new)))

    def last_words(self) -> str:
        size = os.fstat(self.err.fileno()).st_size
        start = max(0, size - _LAST_WORDS)
        return read_at(self.err.fileno(), size - start, start).decode("utf-8", "replace").strip()


def run_children(
    arguments: Sequence[str], count: int, care: Care | None = None, environment: Mapping[str, str] | None = None
) -> list[Child]:
    """Run `count` workers with the same arguments as one launch, each with its own rank; wait, and return them in the order of ranks.

    `environment` is added to what all of them inherit. Any error or interrupt stops them all: each publishes what it has encoded.
    Raises Incomplete if `care.cancel` stopped them and none reached the end.
    """
    launch = f"procs:{secrets.token_hex(8)}"
    return _run_until_ended(arguments, [{**(environment or {}), **_as_rank(rank, count, launch)} for rank in range(count)], care or Care())


def run_child(arguments: Sequence[str], environment: Mapping[str, str], care: Care | None = None) -> list[Child]:
    """Like `run_children`, for one worker of an existing launch. `environment` names launch and rank, and is added to what it inherits."""
    return _run_until_ended(arguments, [environment], care or Care())


def gpu_count() -> int:
    """Return the number of NVIDIA GPUs that a process started here may use, without loading torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([one for one in visible.split(",") if one.strip() and one.strip() != "-1"])
    folder = Path("/proc/driver/nvidia/gpus")
    return len(list(folder.iterdir())) if folder.is_dir() else 0


def _run_until_ended(arguments: Sequence[str], environments: Sequence[Mapping[str, str]], care: Care) -> list[Child]:
    """Run one worker for each environment; only the first one's stderr is shown."""
    if care.cancel is not None and care.cancel.is_set():
        raise Incomplete(_CANCELLED)
    oom_kills = _oom_kills()
    with ExitStack() as stack:
        running: list[_Running] = []
        answers = Answers(care.pictures) if care.pictures is not None else None
        if answers is not None:
            stack.callback(answers.close)
        try:
            _start(arguments, environments, care, stack, running, answers=answers)
            _attend(running, care, oom_kills, answers)
        except BaseException:  # also after an interrupt, no worker may be left
            if answers is not None:
                answers.close()
            _stop(running, care)
            raise
        children = [one.child for one in running if one.child is not None]
    if any(one.reason == _CANCELLED for one in running) and not any(child.is_well for child in children):
        raise Incomplete(_CANCELLED)
    return children


_CANCELLED: Final = "stopped on request; what was encoded is in the store. Run the same command again to continue"


def _start(
    arguments: Sequence[str],
    environments: Sequence[Mapping[str, str]],
    care: Care,
    stack: ExitStack,
    running: list[_Running],
    *,
    answers: Answers | None,
) -> None:
    """Start the workers. Their stdin ends when this process ends; only on Windows something is written to it (`system.send_stop`)."""
    if answers is not None and system.IS_WINDOWS:
        pipes = "samples in memory are passed to workers over pipes, which this system does not have"
        raise BadInput(f"{pipes}: pass {option('inline', value=True)}, or paths", option="inline")
    for rank, own in enumerate(environments):
        out, err = _temporary(stack), _temporary(stack)
        quiet = ["--quiet"] if care.is_quiet or own.get("CACHESTORE_RANK", "0") != "0" else []
        line = answers.new_line() if answers is not None else ()
        pipe = {PIPE: ",".join(map(str, line))} if line else {}
        theirs, ours = os.pipe()
        stack.callback(os.close, ours)
        try:
            process = start(
                WORKER,
                *arguments,
                "--json",
                *quiet,
                stdin=theirs,
                stdout=out,
                stderr=err,
                # A worker that crashes in a library then prints its stack.
                variables={"PYTHONFAULTHANDLER": "1", **own, **pipe, PARENT: str(os.getpid())},
                pass_fds=line,
            )
        except OSError as error:
            raise BadInput(
                f"cannot start a worker process ({error}): free memory, or pass {option('inline', value=True)} to encode in this process",
                option="inline",
            ) from error
        finally:
            for descriptor in (*line, theirs):
                os.close(descriptor)
        running.append(_Running(rank, process, out, err, ours, time.monotonic()))


def _temporary(stack: ExitStack) -> IO[bytes]:
    return stack.enter_context(tempfile.TemporaryFile())


def _attend(running: Sequence[_Running], care: Care, oom_kills: int | None, answers: Answers | None) -> None:
    """Wait for all workers: copy what the first one says, record how each ends, and stop those that hang or are cancelled."""
    pass_time = time.sleep if answers is None else answers.serve
    read_at_time = float("-inf")
    while True:
        for one in running:
            if one.child is None and one.process.poll() is not None:
                one.child = _ended(one, _risen(oom_kills))
                _tell_of(one.child, running, care)
        left = [one for one in running if one.child is None]
        for first in running[:1]:
            first.copy_words(care.words)
        if not left:
            return
        if care.cancel is not None and care.cancel.is_set():
            for one in left:
                one.ask_to_stop(_CANCELLED)
        if (now := time.monotonic()) >= read_at_time:
            _read_signs(left, care)
            # The first time also imports what it needs: that says nothing about how long the next ones take.
            took = time.monotonic() - now if read_at_time > 0 else 0.0
            read_at_time = now + max(WATCH_SECONDS if care.show is None else care.seconds, LOOKS_APART * took)
        for one in left:
            now = time.monotonic()
            if one.asked_at is not None and now - one.asked_at > one.patience:
                one.process.kill()
            elif one.asked_at is None and (hanging := hangs(one.sign, now - one.started)):
                one.ask_to_stop(hanging)
        pass_time(POLL_SECONDS)


def _read_signs(running: Sequence[_Running], care: Care) -> None:
    seen = care.status_of([one.process.pid for one in running])
    shown = {rank.pid: rank for rank in seen.status.ranks} if seen.status is not None else {}
    for one in running:
        one.sign = shown.get(one.process.pid, one.sign)
    if care.show is not None:
        care.show(seen)


def hangs(sign: RankStatus | None, age_seconds: float) -> str:
    """Return why a worker seems to hang; empty if it does not. `age_seconds` is how long ago it was started.

    A worker that waits for others does not hang: it gives up by itself.
    """
    if sign is None:
        return f"hung: it reported no count within {age_seconds:.0f} s" if age_seconds > UNSEEN_SECONDS else ""
    limit = max(STILL_SECONDS, STILL_BATCHES * sign.slowest_batch)
    if sign.phase == WAITING or sign.still_seconds <= limit:
        return ""
    return f"hung: its count did not change for {sign.still_seconds:.0f} s in phase {sign.phase!r}"


def _as_rank(rank: int, count: int, launch: str) -> dict[str, str]:
    own = {"CACHESTORE_LAUNCH": launch, "CACHESTORE_RANK": str(rank), "CACHESTORE_WORLD_SIZE": str(count)}
    own |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(count)}
    if "OMP_NUM_THREADS" not in os.environ:
        # Otherwise each rank starts as many threads as there are processors, and they compete: 3 times slower on 2 cores.
        own["OMP_NUM_THREADS"] = str(max(1, processors() // count))
    return own


def processors() -> int:
    """Return how many processors this process may use, which can be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _stop(running: Sequence[_Running], care: Care) -> None:
    """Ask the workers to publish and end. Kill those that do not end in time; after another interrupt, kill them at once."""
    left = [one for one in running if one.process.poll() is None]
    for one in left:
        one.ask_to_stop("stopped with its parent")
    try:
        for one in left:
            until = (one.asked_at if one.asked_at is not None else time.monotonic()) + one.patience
            while one.process.poll() is None and time.monotonic() < until:
                running[0].copy_words(care.words)
                time.sleep(POLL_SECONDS)
    finally:
        for one in left:
            if one.process.poll() is None:
                one.process.kill()
                one.process.wait()
        for first in running[:1]:
            first.copy_words(care.words)


def _ended(one: _Running, oom_kills: int) -> Child:
    report = _printed(one.out)
    code, words = one.process.returncode, one.last_words()
    how, reported = one.reason if one.reason != _CANCELLED else "", ""
    if report is None or "error" in report or code not in _ENDED_WELL:
        ending = how_it_ended(code, last_words=words, oom_kills=0 if one.reason else oom_kills)
        how = f"{how}; asked to stop, it {ending}" if how else ending
        reported = last_line(words) if 0 < code <= 128 and report is None else ""
        reason = str(report["error"]) if report and "error" in report else reported
        how += f": {reason}" if reason else ""
    number = -code if code < 0 else code - 128
    return Child(one.process.pid, code, report, words, one.rank, how, number if number in STOPPING and not one.reason else None, reported)


def _printed(out: IO[bytes]) -> Mapping[str, Any] | None:
    out.seek(0)
    try:
        found: Any = json.loads(out.read())
    except ValueError:
        return None
    return cast("Mapping[str, Any]", found) if isinstance(found, dict) else None


def how_it_ended(returncode: int, *, last_words: str = "", oom_kills: int = 0) -> str:
    """Describe how a process ended. `oom_kills` is the number of processes that the system killed for memory meanwhile."""
    if returncode == -getattr(signal, "SIGKILL", 9) and oom_kills:
        killed = plural(oom_kills, "process was", "processes were")
        return f"was killed by SIGKILL as the system ran out of memory ({killed} killed for it): {_less_memory()}"
    if returncode < 0:
        how = f"was killed by {_signal_name(-returncode)}"
    elif returncode > 128:
        how = f"was stopped by {_signal_name(returncode - 128)}"
    else:
        how = f"ended with exit code {returncode}"
    if any(word in last_words for word in _MEMORY_WORDS):
        how += f", out of memory by its last output: {_less_memory()}"
    return how


def _less_memory() -> str:
    return f"pass fewer {option('procs')} or a smaller {option('batch_size')}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _oom_kills() -> int | None:
    try:
        found = [line.split()[1] for line in _VMSTAT.read_text().splitlines() if line.startswith("oom_kill ")]
        return int(found[0])
    except (OSError, IndexError, ValueError):
        return None


def _risen(before: int | None) -> int:
    now = _oom_kills()
    return max(0, now - before) if now is not None and before is not None else 0


def _tell_of(child: Child, running: Sequence[_Running], care: Care) -> None:
    """Warn at once if one of several workers died. An error in its own report is left to `joined_report`."""
    is_expected = child.is_well or child.report is not None or child.returncode == _USAGE
    was_cancelled = any(one.reason == _CANCELLED for one in running) or (care.cancel is not None and care.cancel.is_set())
    if len(running) > 1 and not is_expected and not was_cancelled:
        care.warn(f"{_named(child)}; the others do its work.{_quoted(child)}")


def _named(child: Child) -> str:
    return f"worker {child.rank} (pid {child.pid}) {child.how or 'ended'}"


def _quoted(child: Child) -> str:
    """Return the last output of a worker, unless that is one line which `how` has already."""
    return "" if child.last_words == child.reported else f" Its last output:\n{child.last_words}"


def joined_report(children: Sequence[Child], *, warn: Callable[[str], None] = _log.warning) -> dict[str, Any]:
    """Return the report of the workers that reached the end; `encoded_here` is the sum over all workers.

    If none did, raises the error that a worker reported, as its own class, or Incomplete. If some did, `warn` gets a line for each
    worker that reported an error.
    """
    ended = [child for child in children if child.is_well]
    if ended:
        for child in children:
            if not child.is_well and child.report is not None:
                warn(f"{_named(child)}; the others did its work")
        report = dict(ended[0].report or {})
        report["encoded_here"] = sum(int((child.report or {}).get("encoded_here", 0)) for child in ended)
        return report
    for child in children:
        if child.report and "error" in child.report:
            kind: Any = getattr(errors, str(child.report.get("kind")), None)
            kind = kind if isinstance(kind, type) and issubclass(kind, CacheStoreError) else CacheStoreError
            error = kind(str(child.report["error"]))
            if isinstance(error, BadInput):
                error.option = str(child.report.get("option", ""))
            raise error
    if any(child.returncode == _USAGE for child in children):
        message = next((child.last_words for child in children if child.returncode == _USAGE and child.last_words), "")
        raise BadInput(message or "the arguments were refused")
    names = "; ".join(_named(child) for child in children[:4])
    last = next((_quoted(child) for child in children if child.last_words), "")
    incomplete = Incomplete(f"no worker finished: {names}. Run the same command again: it continues where it stopped.{last}")
    if all(child.signal is not None for child in children):
        incomplete.signal = children[0].signal
    raise incomplete
