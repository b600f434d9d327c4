"""One honest bar over all ranks: counts published units from the workers' beats, on a terminal in place, elsewhere a line every 30 s."""

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from cachestore.errors import CacheStoreError
from cachestore.files.paths import Layout
from cachestore.storage.snapshot import open_layout

TERMINAL_SECONDS: Final = 1.0
LINE_SECONDS: Final = 30.0
SILENT_SECONDS: Final = 30.0


class Bar:
    """Drawn when the worker tells that something was published, and at most that often."""

    def __init__(self, store: Path, *, is_shown: bool) -> None:
        """Draws nothing yet."""
        self._store = store
        self._is_shown = is_shown
        self._is_terminal = sys.stderr.isatty()
        self._drawn_at = time.monotonic()
        self._width = 0

    def look(self, counts: Mapping[str, Any]) -> None:
        """Draw, if it is time."""
        pause = TERMINAL_SECONDS if self._is_terminal else LINE_SECONDS
        if not self._is_shown or time.monotonic() - self._drawn_at < pause:
            return
        self._drawn_at = time.monotonic()
        line = self._line(str(counts["plan"]), int(counts["pass"]))
        if line and self._is_terminal:
            sys.stderr.write("\r" + line.ljust(self._width))
            sys.stderr.flush()
            self._width = len(line)
        elif line:
            print(line, file=sys.stderr, flush=True)

    def _line(self, plan: str, number: int) -> str:
        from cachestore.work.passes import PassRef
        from cachestore.work.progress import pass_status

        try:
            status = pass_status(open_layout(Layout(self._store.absolute())), PassRef(plan, number))
        except (CacheStoreError, OSError):
            return ""
        done = status.reused + status.encoded + status.failed
        rates = {rank.rank: rank.rate for rank in status.ranks if rank.alive}
        text = f"{done} of {status.total} units: {status.reused} reused, {status.encoded} encoded, {status.failed} failed"
        if sum(rates.values()):
            text += f"; {sum(rates.values()):.1f}/s, {max(0, status.total - done) / sum(rates.values()):.0f} s left"
        if len(rates) > 1:
            slowest = min(rates, key=lambda rank: rates[rank])
            text += f"; slowest rank {slowest} ({rates[slowest]:.1f}/s)"
        unfinished = [rank for rank in status.ranks if rank.phase != "ended"]
        gone = [f"; rank {rank.rank} is gone, others do its work" for rank in unfinished if rank.alive is False]
        silent = [rank for rank in unfinished if rank.alive is not False and rank.beat_age_seconds > SILENT_SECONDS]
        return text + "".join([*gone[:3], *(f"; rank {rank.rank} silent {rank.beat_age_seconds:.0f} s" for rank in silent[:3])])

    def end(self) -> None:
        """Leave the terminal on a fresh line."""
        if self._width:
            sys.stderr.write("\n")
