"""How SIGINT and SIGTERM stop a command that encodes, and how it prints to stderr."""

import signal
import sys
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from shlex import join
from typing import TYPE_CHECKING

from cachestore.cli import printable
from cachestore.core.errors import Incomplete

if TYPE_CHECKING:
    from cachestore.jobs.ranks import Say


class Stop:
    """Set by SIGINT or SIGTERM. The work ends after the current batch, and everything encoded is published."""

    def __init__(self) -> None:
        self.signal: int | None = None

    def is_set(self) -> bool:
        """Whether to stop."""
        return self.signal is not None


@contextmanager
def stopping(say: "Say", line: Sequence[str]) -> Generator[Stop]:
    """Turn the first SIGINT or SIGTERM into a request to stop, then exit with 130 or 143.

    `line` are the arguments of the command that continues from there, to be printed; empty if another process prints them.
    """
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def handle(number: int, _frame: object) -> None:
        # After Ctrl-C a rank also gets SIGTERM from its parent, so only a second Ctrl-C means "at once".
        is_repeated = stop.signal is not None
        stop.signal = stop.signal or number
        if is_repeated and number == signal.SIGINT:
            raise KeyboardInterrupt
        if not is_repeated:
            say("stopping after the current batch …")

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    except (KeyboardInterrupt, Incomplete):
        if stop.signal is None:
            raise
        _say_how_to_go_on(line)
        raise SystemExit(128 + stop.signal) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _say_how_to_go_on(line: Sequence[str]) -> None:
    if line:
        program = "cachestore" if sys.argv[0].endswith("cachestore") else "python -m cachestore"
        to_stderr(f"cachestore: stopped; what was encoded is in the store. Continue with: {program} {join(line)}")


def to_stderr(line: str) -> None:
    """Print a line to stderr. Errors are ignored: stderr may be closed, and a signal handler may print in the middle of work."""
    with suppress(OSError, ValueError):
        print(printable(line), file=sys.stderr, flush=True)


def silence(_line: str) -> None:
    """Print nothing."""
