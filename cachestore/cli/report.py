"""`cachestore report`: write an HTML page about a store and one of its data sets."""

import argparse

from cachestore.cli import add_source, add_store, source_of, tell
from cachestore.core.words import human_bytes

HELP = "write an HTML page that shows what a store holds"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_store(parser)
    output = "the HTML file (default report.html); its folder is made if it does not exist"
    parser.add_argument("-o", "--output", metavar="FILE", default="report.html", help=output)
    parser.add_argument("--name", metavar="NAME", help="the data set (default train, else the first one)")
    parser.add_argument(
        "--batch-size", metavar="N", type=_positive, default=8, help="batch size for the samples that buckets leave out (default 8)"
    )
    add_source(parser.add_argument, ": the colours of thumbnails come from its pictures")
    level = parser.add_mutually_exclusive_group()
    level.add_argument("--full", action="store_true", help="read every byte for the damage map")
    level.add_argument("--quick", action="store_true", help="read names, sizes and headers only (the default)")


def run(arguments: argparse.Namespace) -> int:
    """Write the page and print its path. Damage is shown on the page and changes no exit code; `verify` is for that."""
    from cachestore.report.write import write_report

    report = write_report(
        arguments.store,
        arguments.output,
        arguments.name,
        level="full" if arguments.full else "quick",
        batch_size=arguments.batch_size,
        source=source_of(arguments.source),
    )
    of = f"data set {report['name']!r}" if report["name"] else "no data set"
    line = f"{report['output']}: {of}, {report['samples']} samples, {report['entries']} entries ({human_bytes(report['page_bytes'])})"
    return tell(arguments, report, [line])


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, not {text!r}")
    return int(text)
