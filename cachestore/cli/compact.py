"""`cachestore compact`: write many small segments anew as few."""

import argparse

from cachestore.cli import OK, add_store, print_json, say
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
    if arguments.json:
        print_json(report.as_json())
        return OK
    would = "" if report.applied else "would be "
    into = f" as {report.written}" if report.applied else ""
    say(f"{report.segments} segments with {report.entries} needed entries {would}written anew{into}")
    say(f"{human_bytes(report.loose_bytes)} that nothing needs {would}left behind")
    if report.segments and report.applied:
        say("the old segments stay readable for a day; `cachestore gc --apply` removes them then")
    for remark in report.remarks:
        say(f"note: {remark}")
    return OK
