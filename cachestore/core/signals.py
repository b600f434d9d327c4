"""The signals that people, terminals and schedulers send to end a run. Every process of cachestore takes the same ones."""

import signal
from typing import Final

_NAMES: Final = ("SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGXCPU", "SIGBREAK", "SIGINT")
STOPPING: Final = tuple(signal.Signals[name] for name in _NAMES if hasattr(signal, name))
"""Windows has SIGTERM, SIGINT, and SIGBREAK for a console that is closed. SLURM sends USR1, USR2, HUP or XCPU before the time limit, if
it is asked to; a terminal that is closed sends HUP."""


def heard() -> signal.Signals:
    """Return a signal that this process does not ignore, if there is one. The processes that it starts do not ignore it either."""
    return next((number for number in STOPPING if signal.getsignal(number) is not signal.SIG_IGN), signal.SIGTERM)


def leave_to_starter() -> None:
    """Ignore the signals that reach a helper process together with the one that started it: that one decides, and the helper ends with it.

    SIGXCPU is about the helper's own time.
    """
    for number in set(STOPPING) - {getattr(signal, "SIGXCPU", None)}:
        signal.signal(number, signal.SIG_IGN)
