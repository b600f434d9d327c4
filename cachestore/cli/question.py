"""Questions on a terminal. Where there is none, or no answer comes, the default holds."""

import os
import sys
import threading
from collections.abc import Mapping
from typing import Final

from cachestore.cli import printable

_SECONDS: Final = 60.0
"""How long an answer is waited for: a job that was started on a terminal and left alone must go on."""
_TRIES: Final = 3
_INPUT: Final = 0
"""The descriptor that is read."""


def ask(question: str, answers: Mapping[str, str], *, default: str) -> str | None:
    """Ask on the terminal; return one of the letters of `answers`, whose values say what each does.

    Returns the default for an empty line, for no answer within a minute, and after three other answers; None without a terminal.
    """
    if not (_is_terminal(sys.stdin) and _is_terminal(sys.stderr)):
        return None
    without = f"[{default}: {answers[default]}; taken if nothing is typed for {_SECONDS:.0f} s]"
    for _try in range(_TRIES):
        print(printable(f"{question} {without} "), end="", file=sys.stderr, flush=True)
        line = _line()
        if line is None:
            print(file=sys.stderr)
            return default
        found = line.strip().casefold()
        if not found:
            return default
        if (letter := found[0]) in answers and found in {letter, answers[letter]}:
            return letter
        print(f"Type {' or '.join(answers)}.", file=sys.stderr)
    return default


def _is_terminal(stream: object) -> bool:
    return stream is not None and getattr(stream, "isatty", lambda: False)()


def _line() -> str | None:
    """Return what was typed; None if nothing was in time, or the input has ended."""
    # Read from the descriptor in a thread: Python's own stdin would stay locked at the end, and select knows no consoles of Windows.
    found: list[bytes] = []
    thread = threading.Thread(target=lambda: found.append(os.read(_INPUT, 1024)), daemon=True)
    thread.start()
    thread.join(_SECONDS)
    return found[0].decode(errors="replace") if found and found[0] else None
