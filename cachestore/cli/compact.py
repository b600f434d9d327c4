"""`cachestore compact`: write many small segments anew as few."""

import argparse

from cachestore.cli import add_store, tell
from cachestore.core.words import human_bytes

HELP = "merge small segments, and leave behind what no data set needs"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_store(parser)
    parser.add_argument("--dry-run", action="store_true", help="say what would be done, and do nothing")


def run(arguments: argparse.Namespace) -> int:
    """Print what was written anew."""
    from cachestore.maintain.collect import compact

    report = compact(arguments.store, apply=not arguments.dry_run)
    would = "" if report.applied else "would be "
    into = f" as {report.written}" if report.applied else ""
    lines = [f"{report.segments} segments with {report.entries} needed entries {would}written anew{into}"]
    lines += [f"{human_bytes(report.loose_bytes)} that nothing needs {would}left behind"]
    if report.segments and report.applied:
        lines += ["the old segments stay readable for a day; `cachestore gc --apply` removes them then"]
    return tell(arguments, report.as_json(), [*lines, *(f"note: {remark}" for remark in report.remarks)])
