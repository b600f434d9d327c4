"""`cachestore drop`: remove a data set."""

import argparse

from cachestore.cli import add_store, tell
from cachestore.core.words import plural

HELP = "remove a data set with all its generations; `gc` then removes the entries that nothing else needs"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_store(parser)
    parser.add_argument("name", metavar="NAME", help="the data set's name")
    parser.add_argument("--dry-run", action="store_true", help="show what would be done, and change nothing")


def run(arguments: argparse.Namespace) -> int:
    """Print what was removed."""
    from cachestore.maintain.collect import drop

    report = drop(arguments.store, arguments.name, apply=not arguments.dry_run)
    would = "" if report.applied else "would be "
    counts = f"{plural(len(report.generations), 'catalog')} and {plural(len(report.plans), 'plan')} {would}removed"
    return tell(arguments, report.as_json(), [f"{report.name}: {counts}; run `cachestore gc` to free the entries that nothing else needs"])
