"""`cachestore cache`: what lies in a folder for local copies of stores at addresses."""

import argparse
from pathlib import Path

from cachestore.cli import add_folder, tell
from cachestore.core.words import human_bytes

HELP = "list the local copies of what was read from object stores; --clear removes them"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_folder(parser, "the folder that was passed as `CachedDataset(..., local=)`")
    parser.add_argument("--clear", action="store_true", help="remove all copies; a data set that is in use downloads again what it needs")


def run(arguments: argparse.Namespace) -> int:
    """Print what is there, by store."""
    from cachestore.remote.cache import read_cache

    report = read_cache(Path(arguments.folder), clear=arguments.clear)
    lines: list[str] = []
    for store in report.stores:
        names = (
            ", ".join(f"{name} (generation {', '.join(map(str, numbers))})" for name, numbers in store.datasets.items()) or "no data set"
        )
        lines.append(f"{store.address or store.store}: {names}, values of {store.segments} segments, {human_bytes(store.bytes)}")
    freed = f", {human_bytes(report.freed_bytes)} freed" if arguments.clear else ""
    return tell(arguments, report.as_json(), [*lines, f"{human_bytes(report.bytes)} in {report.folder}{freed}"])
