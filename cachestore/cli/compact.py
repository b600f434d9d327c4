"""`cachestore compact`: merge many small segments into few."""

import argparse

from cachestore.cli import add_store, tell
from cachestore.core.words import human_bytes, plural

HELP = "merge small segments and leave out entries that no data set needs"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_store(parser)
    parser.add_argument("--dry-run", action="store_true", help="show what would be done, and change nothing")


def run(arguments: argparse.Namespace) -> int:
    """Print what was rewritten."""
    from cachestore.care.collect import compact

    report = compact(arguments.store, apply=not arguments.dry_run)
    would = "" if report.applied else "would be "
    into = f" into {report.written}" if report.applied else ""
    lines = [f"{plural(report.segments, 'segment')} with {plural(report.entries, 'needed entry')} {would}rewritten{into}"]
    lines += [f"{human_bytes(report.loose_bytes)} of unreferenced entries {would}left out"]
    if report.segments and report.applied:
        lines += ["the old segments stay readable for a day; `cachestore gc --apply` removes them after that"]
    return tell(arguments, report.as_json(), [*lines, *(f"note: {remark}" for remark in report.remarks)])
