"""Questions on a terminal. Where there is none, or no answer comes, the default holds."""

import os
import sys
from collections.abc import Mapping
from typing import Final

from cachestore.cli import printable
from cachestore.cli.terminal.folding import folded
from cachestore.core import system

_SECONDS: Final = 60.0
"""How long an answer is waited for: a job that was started on a terminal and left alone must go on."""
_TRIES: Final = 3
_INPUT: Final = 0
"""The descriptor that is read."""


def ask(question: str, answers: Mapping[str, str], *, default: str) -> str | None:
    """Ask on the terminal; return one of the letters of `answers`, whose values say what each does.

    Returns the default for an empty line, for no answer within a minute, and after three other answers; None without a terminal, and on
    Windows, where a console cannot be waited for with a bound.
    """
    if system.IS_WINDOWS or not (_is_terminal(sys.stdin) and _is_terminal(sys.stderr)):
        return None
    without = f"[{default}: {answers[default]}; taken if nothing is typed for {_SECONDS:.0f} s]"
    for _try in range(_TRIES):
        print(printable(folded(f"{question} {without}", sys.stderr)), end=" ", file=sys.stderr, flush=True)
        typed = os.read(_INPUT, 1024) if system.is_readable(_INPUT, _SECONDS) else b""  # Python's own stdin may hold back what was typed
        if not typed:
            print(file=sys.stderr)
            return default
        found = typed.decode(errors="replace").strip().casefold()
        if not found:
            return default
        if (letter := found[0]) in answers and found in {letter, answers[letter]}:
            return letter
        print(printable(f"Type {' or '.join(answers)}."), file=sys.stderr)
    return default


def _is_terminal(stream: object) -> bool:
    return stream is not None and getattr(stream, "isatty", lambda: False)()
