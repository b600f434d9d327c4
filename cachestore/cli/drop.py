"""`cachestore drop`: remove a data set."""

import argparse

from cachestore.cli import add_store, tell
from cachestore.cli.data_sets import add_name, given_name
from cachestore.core.errors import BadUsage
from cachestore.core.words import listed, noun, plural

HELP = "remove a data set with all its generations; `gc` then removes the entries that nothing else needs"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_store(parser)
    add_name(parser, "the data set", positional=True)
    parser.add_argument("--dry-run", action="store_true", help="show what would be done, and change nothing")


def run(arguments: argparse.Namespace) -> int:
    """Print what was removed. Without a name nothing is: what is meant must be said."""
    from cachestore.care.collect import drop
    from cachestore.files.paths import Layout
    from cachestore.store.read.snapshot import open_layout
    from cachestore.store.read.unfinished import list_data_sets, list_unfinished

    name, layout = given_name(arguments), open_layout(Layout.at(arguments.store))
    unfinished = {one.name: one for one in list_unfinished(layout)}
    there = [*list_data_sets(layout), *unfinished]
    if name is None:
        names = f"; there {noun(len(there), 'is', 'are')} {listed(map(repr, there))}" if there else ""
        raise BadUsage(f"say which data set to remove: add --name NAME{names}")
    far = f" (it was not finished: {unfinished[name].done} of {unfinished[name].total} values)" if name in unfinished else ""
    report = drop(arguments.store, name, apply=not arguments.dry_run)
    would = "" if report.applied else "would be "
    changes = f", {plural(report.changes, 'file')} of changes" if report.changes else ""
    counts = f"{plural(len(report.generations), 'catalog')}{changes} and {plural(len(report.plans), 'plan')} {would}removed{far}"
    lines = [f"{report.name}: {counts}; run {layout.command('gc')} to free the entries that nothing else needs"]
    if not set(there) - {name}:
        lines += [f"this {'was' if report.applied else 'is'} the only data set: to free the disk at once, delete the folder {layout.root}"]
    return tell(arguments, report.as_json(), lines)
