"""`cachestore report`: write an HTML page about a store and one of its data sets."""

import argparse
import os
from contextlib import suppress
from pathlib import Path

from cachestore.children.start import absolute_entries
from cachestore.cli import ERROR, add_source, add_store, positive, print_error, source_of, tell
from cachestore.cli.data_sets import add_name, row_of
from cachestore.core.errors import BadInput
from cachestore.core.words import human_bytes, plural

HELP = "write an HTML page that shows what a store holds"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_store(parser, may_be_address=True)
    output = "the HTML file (default report.html); its folder is made if it does not exist"
    parser.add_argument("-o", "--output", metavar="FILE", default="report.html", help=output)
    add_name(parser)
    parser.add_argument(
        "--batch-size", metavar="N", type=positive, default=8, help="the page counts the samples that do not fill a batch of N (default 8)"
    )
    add_source(parser.add_argument, ": the page shows these pictures as originals")
    level = parser.add_mutually_exclusive_group()
    level.add_argument("--full", action="store_true", help="read every byte for the damage map")
    level.add_argument("--quick", action="store_true", help="read names, sizes and headers only (the default)")
    parser.add_argument("--open", action="store_true", help="show the page in the browser")


def run(arguments: argparse.Namespace) -> int:
    """Write the page, print its path and show it if asked. Damage is shown on the page and changes no exit code: `verify` is for that."""
    from cachestore.report.write import write_report

    report = write_report(
        arguments.store,
        arguments.output,
        arguments.name,
        level="full" if arguments.full else "quick",
        batch_size=arguments.batch_size,
        source=source_of(arguments.source),
    )
    unfinished = [] if report["name"] else [one["words"] for one in report["unfinished"]]
    of = f"data set {report['name']!r}" if report["name"] else "no data set that is finished" if unfinished else "no data set"
    samples = "" if unfinished else f", {plural(report['samples'], row_of(report['made']))}"
    held = f"{of}{samples}, {plural(report['entries'], 'entry')} ({human_bytes(report['bytes'])})"
    code = tell(arguments, report, [*unfinished, f"{report['output']}: {held}; the page has {human_bytes(report['page_bytes'])}"])
    return code if not arguments.open or _is_opened(arguments.output) else ERROR


def _is_opened(output: str) -> bool:
    """Show a page in the browser; without one, say so on stderr and return False. A program in the current folder is none."""
    import webbrowser

    os.environ["PATH"] = absolute_entries(os.environ.get("PATH", ""))
    page = Path(output).absolute()
    with suppress(webbrowser.Error, OSError):
        if webbrowser.open(page.as_uri()):
            return True
    text = f"the page is written, but no browser was found here to show it: open {page} yourself, or name a browser in BROWSER"
    print_error(BadInput(text), as_json=False)  # with --json, stdout has the report already
    return False
