"""What `precompute` shows while its workers run: a bar on a terminal, a line every 30 s elsewhere. Values count when they are published.

Everything is drawn by the process that started the workers, from their heartbeats, in the loop that waits for them. No thread draws.
"""

import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from cachestore.cli import failed_samples, printable
from cachestore.cli.terminal.folding import fold, folded
from cachestore.core.errors import CacheStoreError
from cachestore.core.words import NAMED, duration, plural
from cachestore.files.paths import Layout
from cachestore.jobs.share.pace import Pace
from cachestore.jobs.share.passes import PassRef
from cachestore.jobs.share.progress import ENDED, LaunchStatus, Observer, PassStatus, RankStatus

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text
    from typing_extensions import Self

Style = Literal["auto", "bar", "plain", "none"]

DRAW_SECONDS: Final = 0.25
PLAIN_SECONDS: Final = 1.0
LINE_SECONDS: Final = 30.0
_STILL_SECONDS: Final = 3.0
"""From when on a row says for how long its rank has been at the same unit."""
_MARGIN: Final = 3
"""Columns at the right that stay free: a terminal writes ^C there."""
_LEAST_BAR: Final = 8
_MOST_BAR: Final = 60
_LINES_BESIDE_ROWS: Final = 4


def style_for(asked: Style) -> Style:
    """Return the style for this process's stderr: `auto` is a bar on a terminal that can move its cursor, otherwise plain lines."""
    if asked != "auto":
        return asked
    is_terminal = sys.stderr is not None and sys.stderr.isatty()  # pyright: ignore[reportUnnecessaryComparison] - without a console
    return "bar" if is_terminal and os.environ.get("TERM", "") not in {"", "dumb", "unknown"} else "plain"


_FAILURE: Final = re.compile(r"(.*?) \((\w+)\): (.*)", re.DOTALL)
"""A failure in a heartbeat: a sample, its encoder, and the reason."""


class Progress:
    """Shows what the workers of one command do. For use in one thread, inside `with`; `first` is shown until a worker says more.

    When no worker has anything left to do, it says that the command finishes, or stops. At the end it prints failures that no result lists.
    """

    def __init__(
        self,
        store: Path,
        style: Style,
        first: str,
        is_stopping: Callable[[], bool] = lambda: False,
        *,
        result_lists_failures: bool = True,
    ) -> None:
        self._observer = Observer(Layout(store.absolute()))
        self._style = style
        self._first = first
        self._is_stopping = is_stopping
        self._result_lists_failures = result_lists_failures
        self._pace = Pace()
        self._screen: _Lines | _Bar = _Lines(first, seconds=float("inf"))
        self._status: PassStatus | None = None
        self._failures: dict[str, int] = {}
        """How many failures of each worker were seen."""
        self._failed: dict[str, None] = {}
        """Their descriptions, each once: the result lists them. They are printed here if an error or a signal ends the command."""
        self.seconds: float = DRAW_SECONDS if style == "bar" else PLAIN_SECONDS
        """How often `show` should be called."""
        self._followed_at = float("-inf")

    def __enter__(self) -> "Self":
        """Show the first line."""
        if self._style == "bar":
            self._screen = _Bar(self._first, self._is_stopping)
        elif self._style == "plain":
            self._screen = _Lines(self._first, seconds=LINE_SECONDS)
        self._screen.draw(LaunchStatus(), self._pace)
        return self

    def __exit__(self, error: object, *_exc: object) -> None:
        """Remove the bar. If an error or interrupt ends the command, print how far the pass is."""
        self._screen.close()
        if (error is not None or not self._result_lists_failures) and self._style != "none":
            for line in failed_once(self._failed):
                self.say(line)
        if error is not None and self._status is not None and self._style != "none":
            with suppress(CacheStoreError, OSError):
                status = self._observer.status(PassRef(self._status.plan, self._status.number))
                again = sum(max(0, one.failures_seen - one.failed) for one in status.ranks if one.worker in self._failures)
                self.say(f"{counts_in_words(status)}{f'; {again} more failed, and the next run tries them again' if again else ''}")

    def read(self, pids: Collection[int]) -> LaunchStatus:
        """Return what the processes with these pids do."""
        return self._observer.status_of_processes(pids)

    def show(self, seen: LaunchStatus) -> None:
        """Show what was seen. Failures are counted and kept: each is printed once, by the result."""
        if seen.status is not None:
            self._status = seen.status
            self._pace.see(seen.status, time.monotonic())
        if self._style == "none":
            return
        for one in _of_launch(seen):
            self._failures[one.worker] = one.failures_seen
            self._failed |= dict.fromkeys(one.failures)
        self._screen.draw(seen, self._pace)

    def follow(self, _counts: object) -> None:
        """Show what this process does itself; an `on_progress` for commands that start no workers."""
        if time.monotonic() - self._followed_at >= self.seconds:
            self._followed_at = time.monotonic()
            self.show(self.read([os.getpid()]))

    def words(self, text: str) -> None:
        """Print what a worker has written."""
        self._screen.write(text)

    def say(self, line: str) -> None:
        """Print a line."""
        self._screen.say(printable(line))


class _Lines:
    """Plain lines: what has changed when the pause is over."""

    def __init__(self, first: str, *, seconds: float) -> None:
        self._first = first
        self._pause = seconds
        self._drawn_at = time.monotonic() if seconds == float("inf") else float("-inf")

    def draw(self, seen: LaunchStatus, pace: Pace) -> None:
        if time.monotonic() - self._drawn_at < self._pause:
            return
        self._drawn_at = time.monotonic()
        if seen.status is None:
            self.say(printable(_summed([one.doing for one in seen.ranks]) or self._first))
        else:
            self.say(printable(in_a_line(seen.status, pace)))

    def write(self, text: str) -> None:
        with suppress(OSError, ValueError, AttributeError):  # stderr is closed, or there is none
            sys.stderr.write(folded(text, sys.stderr))
            sys.stderr.flush()

    def say(self, line: str) -> None:
        self.write(line + "\n")

    def close(self) -> None:
        """Do nothing: each line is complete."""


class _Bar:
    """A bar and a row for each rank, drawn over until it is closed; what is printed meanwhile comes above."""

    def __init__(self, first: str, is_stopping: Callable[[], bool]) -> None:
        from rich.console import Console
        from rich.live import Live

        self._idle = self._first = first
        self._since = time.monotonic()
        """Since when it shows what is done while no worker says it."""
        self._is_stopping = is_stopping
        self._partial = ""
        self._console = Console(file=sys.stderr, force_terminal=True, markup=False, emoji=False, highlight=False)
        # rich would end the process, and send its stdout to nowhere.
        self._console.on_broken_pipe = lambda: None  # pyright: ignore[reportAttributeAccessIssue]
        self._live = Live(
            console=self._console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=True,  # what this process logs comes above, too
            vertical_overflow="crop",
        )
        self._safely(self._live.start)
        self._safely(partial(self._console.show_cursor, show=True))  # so that it is not lost if this process is killed

    def draw(self, seen: LaunchStatus, pace: Pace) -> None:
        width, rows = self._console.width - _MARGIN, self._console.height - _LINES_BESIDE_ROWS
        now = time.monotonic()
        idle = "" if _at_work(seen) else "stopping" if self._is_stopping() else self._first if seen == LaunchStatus() else "finishing"
        self._since = self._since if idle == self._idle else now
        self._idle = idle
        drawn = _drawn(seen, pace, f"{idle}  {duration(now - self._since)}", width=max(width, _LEAST_BAR), rows=max(rows, 1))
        self._safely(partial(self._live.update, drawn, refresh=True))

    def write(self, text: str) -> None:
        """Print whole lines. Of a line that was written over with carriage returns, as other bars are, print how it ended."""
        *lines, self._partial = (self._partial + text).split("\n")
        for line in lines:
            self.say(next((part for part in reversed(line.split("\r")) if part), ""))

    def say(self, line: str) -> None:
        from rich.text import Text

        self._safely(partial(self._console.print, Text.from_ansi(fold(line, self._console.width)), soft_wrap=True))

    def close(self) -> None:
        if self._partial:
            self.write("\n")
        self._safely(self._live.stop)

    def _safely(self, act: Callable[[], object]) -> None:
        with suppress(OSError, ValueError):
            act()


# What is shown


def _at_work(seen: LaunchStatus) -> list[RankStatus]:
    return [one for one in _of_launch(seen) if one.phase != ENDED and (one.alive is not False or seen.status is None)]


def _drawn(seen: LaunchStatus, pace: Pace, idle: str, *, width: int, rows: int) -> "RenderableType":
    from rich.console import Group

    ranks = _at_work(seen)
    gone = seen.status.gone if seen.status is not None else ()
    listed = [_row(one, seen) for one in ranks] or [_clipped(idle, width)]
    listed += [_clipped(f"{named(one)}  has stopped; others do its work", width, "yellow") for one in gone if one.launch == seen.launch]
    if len(listed) > rows:
        rest = ranks[rows - 1 :]
        listed = [*listed[: rows - 1], _clipped(f"and {len(listed) - rows + 1} more: {_summed([one.doing for one in rest])}", width)]
    for text in listed:
        text.truncate(width, overflow="ellipsis")
    return Group(*([] if seen.status is None else [_bar(seen.status, pace, width)]), *listed)


def _bar(status: PassStatus, pace: Pace, width: int) -> "RenderableType":
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    left, rate = pace.seconds_left(status), pace.rate
    reached = status.done + status.unpublished
    parts = [f"{100 * reached // max(status.total, 1)}%"]
    parts += [f"{duration(left)} left"] if left is not None and status.done < status.total else []
    parts += [f"{_short(rate)}/s"] if rate is not None else []
    parts += [f"{status.done:,} of {plural(status.total, 'value', form=',')}"]
    parts += [f"{status.unpublished:,} to be written"] if status.unpublished else []
    parts += [f"{status.failed:,} failed"] if status.failed else []
    shown = parts[:1]
    for part in parts[1:]:
        if len("  ".join([*shown, part])) + 1 + _LEAST_BAR <= width:
            shown.append(part)
    text = "  ".join(shown)
    size = min(_MOST_BAR, width - len(text) - 1)
    line = Table.grid(padding=(0, 1, 0, 0))
    line.add_column(width=size, no_wrap=True)
    line.add_column(no_wrap=True)
    line.add_row(ProgressBar(total=max(status.total, 1), completed=reached, width=size), text)
    return line


def _row(one: RankStatus, seen: LaunchStatus) -> "Text":
    silent = seen.status is not None and one in seen.status.silent
    still = f"  {duration(one.still_seconds)}" if one.still_seconds >= _STILL_SECONDS else ""
    doing = f"silent for {one.still_seconds:.0f} s ({one.doing})" if silent else f"{one.doing}{still}"
    done = f"  {one.done:,} done" if one.done and not silent else ""
    return _clipped(f"{named(one)}  {doing}{done}", None, "yellow" if silent else "")


def _clipped(text: str, width: int | None, style: str = "") -> "Text":
    from rich.text import Text

    made = Text(printable(text), style=style, no_wrap=True, overflow="ellipsis")
    if width is not None:
        made.truncate(width, overflow="ellipsis")
    return made


def _of_launch(seen: LaunchStatus) -> list[RankStatus]:
    """The workers of this launch; before it has joined a pass, those that were looked for."""
    ours = [one for one in seen.ranks if seen.status is None or one.launch == seen.launch or not one.launch]
    return sorted(ours, key=lambda one: (one.rank is None, one.rank or 0))


def _summed(doings: Sequence[str]) -> str:
    if len(doings) == 1:
        return doings[0]
    return ", ".join(f"{count} {doing}" for doing, count in Counter(doings).most_common())


def _short(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.1f}" if rate >= 1 else f"{rate:.2f}"


def failed_once(failures: Iterable[str]) -> list[str]:
    """Return a line for each sample and reason among the failures of heartbeats."""
    found = ((failure, _FAILURE.fullmatch(failure)) for failure in failures)
    return failed_samples(("", "", failure) if match is None else [str(part) for part in match.groups()] for failure, match in found)


def counts_in_words(status: PassStatus) -> str:
    """Return the counts of a pass, in the words of its report."""
    return f"{status.done} of {plural(status.total, 'value')}: {status.reused} reused, {status.encoded} encoded, {status.failed} failed"


def in_a_line(status: PassStatus, pace: Pace | None = None) -> str:
    """Return how far a pass is, in one line: counts, rate, time left, what its ranks do, and which of them are silent or dead.

    Without a `pace`, from a single look, the rate is that of the running workers since they started.
    """
    text, working = counts_in_words(status), status.at_work
    since_start = sum(one.rate for one in working)
    rate = since_start or None if pace is None else pace.rate
    left = (status.total - status.done) / rate if pace is None and rate else None if pace is None else pace.seconds_left(status)
    text += f", {status.unpublished} to be written" if status.unpublished else ""
    text += f"; {_short(rate)}/s" if rate else ""
    text += f", {duration(left)} left" if rate and left is not None else ""
    text += f"; {_summed([one.doing for one in working])}" if working and pace is not None else ""
    if len(working) > 1:
        slowest = min(working, key=lambda one: one.rate)
        text += f"; slowest {named(slowest)} ({slowest.rate:.1f}/s, {slowest.doing})"
    gone = [f"; {named(one)} has stopped, others do its work" for one in status.gone]
    silent = [f"; {named(one)} silent {one.still_seconds:.0f} s ({one.doing})" for one in status.silent]
    return text + "".join([*gone[:NAMED], *silent[:NAMED]])


def named(one: RankStatus) -> str:
    """Return a worker's name for a person: its rank, else its process."""
    return f"rank {one.rank}" if one.rank is not None else f"worker {one.pid} on {one.host}"
