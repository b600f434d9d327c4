"""What `push` and `pull` share: arguments, progress and the result in words."""

import argparse
import sys
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from cachestore.cli import PROGRESS, PROGRESS_HELP, positive, tell
from cachestore.cli.data_sets import add_name
from cachestore.core.errors import BadInput
from cachestore.core.words import human_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from cachestore.remote.transfer import TransferReport


def address(text: str) -> str:
    """Return an address as given. Anything else is a usage error."""
    from cachestore.remote.address import parse_address

    try:
        parse_address("it", text)
    except BadInput as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def say_whom(address: str) -> None:
    """Say on stderr which object store is asked, and how long its answer is waited for; nothing for a folder (file://)."""
    from cachestore.cli.terminal.stopping import to_stderr
    from cachestore.remote.address import parse_address
    from cachestore.remote.client import ClientLimits

    if parse_address("address", address).scheme != "file":
        to_stderr(f"asking {address}; without an answer this ends within {ClientLimits().longest_seconds:.0f} s")


def add_address(parser: argparse.ArgumentParser) -> None:
    """Add ADDRESS."""
    parser.add_argument("address", metavar="ADDRESS", type=address, help="s3://BUCKET/PATH, gs://…, az://… or file:///…")


def add_options(parser: argparse.ArgumentParser, what: str) -> None:
    """Add the options of a command that would `what` (such as "send")."""
    add_name(parser, f"{what} only this data set (default: the whole store)")
    parser.add_argument("--generation", metavar="G", type=positive, help="with --name: this generation (default: the newest)")
    parser.add_argument("--jobs", metavar="N", type=positive, default=8, help=f"{what} N files at once (default 8)")
    parser.add_argument(
        "--check", action="store_true", help="also compare the digests of files that exist at both ends; without it, only their sizes"
    )
    parser.add_argument("--dry-run", action="store_true", help=f"say what it would {what}, in bytes and requests, and change nothing")
    parser.add_argument("--progress", choices=PROGRESS, default="auto", help=PROGRESS_HELP)


def run_transfer(arguments: argparse.Namespace, act: "Callable[..., TransferReport]", *given: str, done: str, **more: object) -> int:
    """Call `push` or `pull` with progress, and print the result. `done` is what happened to the files, such as "sent".

    `more` are arguments that only one of the two takes.
    """
    from cachestore.cli.terminal.progress import style_for

    options = {name: getattr(arguments, name) for name in ("name", "generation", "jobs", "check", "dry_run")}
    style = style_for(arguments.progress)
    if style != "none":
        say_whom(arguments.address)
    with _showing(style) as show:
        report = act(*given, **options, **more, on_progress=show)
    amount = f"{report.files} files with {human_bytes(report.bytes)}"
    if report.applied:
        first = f"{amount} {done} in {report.seconds:.1f} s; {report.skipped} files were there already"
    else:
        first = f"{amount} would be {done}, with {report.requests} requests; {report.skipped} files are there already"
    generations = [f"{name}: generation {', '.join(map(str, some))}" for name, some in report.generations.items()]
    return tell(arguments, report.as_json(), [first, *generations, *(f"note: {remark}" for remark in report.remarks)])


@contextmanager
def _showing(style: str) -> "Generator[Callable[[str, int, int], None]]":
    """Give the block a function that shows how many bytes have moved: in a bar on a terminal, a line every 30 s elsewhere.

    The bar is drawn in the thread that calls it. A line comes after the first 30 s, as most transfers are shorter.
    """
    from cachestore.cli.terminal.progress import DRAW_SECONDS, LINE_SECONDS
    from cachestore.cli.terminal.stopping import to_stderr

    began = shown_at = time.monotonic()

    def show_line(doing: str, done: int, total: int) -> None:
        nonlocal shown_at
        now = time.monotonic()
        if style == "plain" and now - shown_at >= LINE_SECONDS:
            shown_at = now
            to_stderr(f"{doing}: {human_bytes(done)} of {human_bytes(total)}, {human_bytes(done / (now - began))}/s")

    if style != "bar":
        yield show_line
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn()
    console = Console(file=sys.stderr, force_terminal=True, markup=False, emoji=False, highlight=False)
    bar = Progress(*columns, TimeRemainingColumn(), console=console, auto_refresh=False, transient=True, redirect_stdout=False)
    task = bar.add_task("listing what is there", total=None)

    def show_bar(doing: str, done: int, total: int) -> None:
        nonlocal shown_at
        if time.monotonic() - shown_at >= DRAW_SECONDS:
            shown_at = time.monotonic()
            bar.update(task, description=doing, completed=done, total=total or None)
            with suppress(OSError, ValueError):
                bar.refresh()

    with suppress(OSError, ValueError):
        bar.start()
    try:
        yield show_bar
    finally:
        with suppress(OSError, ValueError):
            bar.stop()
