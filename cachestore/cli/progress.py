"""One progress bar over all ranks, with the counts of published units from the workers' heartbeats.

It is redrawn in place on a terminal. Elsewhere it is a line every 30 s.
"""

import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from cachestore.cli import printable
from cachestore.core.errors import CacheStoreError
from cachestore.files.paths import Layout
from cachestore.work.passes import PassRef
from cachestore.work.progress import Observer, PassStatus, RankStatus

TERMINAL_SECONDS: Final = 1.0
LINE_SECONDS: Final = 30.0
NAMED: Final = 3
"""How many silent ranks, and how many dead ones, are named."""


class Bar:
    """The bar. It is drawn when the worker reports published units, at most once a second (every 30 s without a terminal)."""

    def __init__(self, store: Path, *, is_shown: bool) -> None:
        self._observer = Observer(Layout(store.absolute()))
        self._is_shown = is_shown
        self._is_terminal = sys.stderr is not None and sys.stderr.isatty()  # pyright: ignore[reportUnnecessaryComparison] - without a console
        self._drawn_at = time.monotonic()
        self._width = 0

    def look(self, counts: Mapping[str, Any]) -> None:
        """Draw the bar if it is time."""
        pause = TERMINAL_SECONDS if self._is_terminal else LINE_SECONDS
        if not self._is_shown or time.monotonic() - self._drawn_at < pause:
            return
        self._drawn_at = time.monotonic()
        try:
            line = printable(in_a_line(self._observer.look(PassRef(str(counts["plan"]), int(counts["pass"])))))
        except (CacheStoreError, OSError):
            return
        with suppress(OSError, ValueError):  # stderr is closed
            self._draw(line)

    def _draw(self, line: str) -> None:
        if self._is_terminal:
            sys.stderr.write("\r" + line.ljust(self._width))
            sys.stderr.flush()
            self._width = len(line)
        else:
            print(line, file=sys.stderr, flush=True)

    def end(self) -> None:
        """End the bar's line on a terminal."""
        if self._width:
            with suppress(OSError, ValueError):
                sys.stderr.write("\n")


def in_a_line(status: PassStatus) -> str:
    """Return how far a pass is, in one line: counts, rate, time left, and the ranks that are slow, silent or dead."""
    text = f"{status.done} of {status.total} units: {status.reused} reused, {status.encoded} encoded, {status.failed} failed"
    working = status.at_work
    rate = sum(one.rate for one in working)
    if rate:
        text += f"; {rate:.1f}/s, {max(0, status.total - status.done) / rate:.0f} s left"
    if len(working) > 1:
        slowest = min(working, key=lambda one: one.rate)
        text += f"; slowest {named(slowest)} ({slowest.rate:.1f}/s, {slowest.phase})"
    gone = [f"; {named(one)} has stopped, others do its work" for one in status.gone]
    silent = [f"; {named(one)} silent {one.still_seconds:.0f} s ({one.phase})" for one in status.silent]
    return text + "".join([*gone[:NAMED], *silent[:NAMED]])


def named(one: RankStatus) -> str:
    """Return a worker's name for a person: its rank, else its process."""
    return f"rank {one.rank}" if one.rank is not None else f"worker {one.pid} on {one.host}"
