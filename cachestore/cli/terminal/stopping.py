"""How signals stop a command, and how it prints to stderr.

A signal that is ignored when the command starts stays ignored, as under `nohup`, and so does a handler that somebody else has set.
"""

import signal
import sys
import threading
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import TYPE_CHECKING

from cachestore.cli import printable
from cachestore.cli.terminal.folding import folded
from cachestore.core import system
from cachestore.core.errors import Incomplete
from cachestore.core.signals import STOPPING

if TYPE_CHECKING:
    from cachestore.jobs.start.ranks import Say


class Stop:
    """Set by the first signal of `STOPPING`. The work then ends after the current batch, and everything encoded is published.

    Before the work has asked `is_set` for the first time, the signal raises KeyboardInterrupt: nothing is encoded yet.
    """

    def __init__(self, say: "Say") -> None:
        self.signal: int | None = None
        self._say = say
        self._is_asked = False

    def is_set(self) -> bool:
        """Whether to stop."""
        self._is_asked = True
        return self.signal is not None

    def handle(self, number: int, _frame: object) -> None:
        """Take a signal.

        Of later ones only SIGINT counts, as it means "at once": SLURM sends SIGTERM after its warning, and after Ctrl-C a rank also gets
        a signal from its parent.
        """
        is_first = self.signal is None
        self.signal = self.signal or number
        if is_first:
            self._say(f"stopping{' after the current batch' * self._is_asked} …")
        if not self._is_asked if is_first else number == signal.SIGINT:
            raise KeyboardInterrupt


@contextmanager
def stopping(say: "Say", line: Sequence[str]) -> Generator[Stop]:
    """Turn the first signal into a request to stop, then exit with 128 and its number.

    So it does if a signal has stopped every worker, but not this process. `line` are the arguments of the command that continues from
    there, to be printed; empty if another process prints them.
    """
    with _handled(Stop(say)) as stop:
        try:
            yield stop
        except (KeyboardInterrupt, Incomplete) as error:
            number = stop.signal or getattr(error, "signal", None)
            if number is None:
                raise
            if line:
                to_stderr(f"cachestore: stopped; what was encoded is in the store. Continue with: {in_shell(line)}")
            raise SystemExit(128 + number) from None


def interrupting() -> AbstractContextManager[Stop]:
    """Raise KeyboardInterrupt in the block at the first signal, so that it removes what is half done."""
    return _handled(Stop(silence))


@contextmanager
def _handled(stop: Stop) -> Generator[Stop]:
    before = {number: signal.getsignal(number) for number in STOPPING if threading.current_thread() is threading.main_thread()}
    replaced: list[signal.Signals] = []
    try:
        for number, handler in before.items():
            is_a_commands = isinstance(getattr(handler, "__self__", None), Stop)  # of one around this one
            if is_a_commands or handler in {signal.SIG_DFL, signal.default_int_handler}:
                replaced.append(number)
                signal.signal(number, stop.handle)
        yield stop
    finally:
        for number in replaced:
            signal.signal(number, before[number])


def in_shell(line: Sequence[str]) -> str:
    """Return a command with these arguments, ready to paste."""
    return f"{'cachestore' if sys.argv[0].endswith('cachestore') else 'python -m cachestore'} {system.in_shell(line)}"


def to_stderr(line: str) -> None:
    """Print a line to stderr. Errors are ignored: stderr may be closed, and a signal handler may print while the same is printed."""
    with suppress(OSError, ValueError, RuntimeError):
        print(printable(folded(line, sys.stderr)), file=sys.stderr, flush=True)


def silence(_line: str) -> None:
    """Print nothing."""
