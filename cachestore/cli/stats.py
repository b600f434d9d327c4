"""`cachestore stats`: count what is in a store."""

import argparse

from cachestore.cli import add_store, tell
from cachestore.core.words import human_bytes

HELP = "count entries and bytes, and list the data sets with their newest generation"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_store(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the counts."""
    from cachestore.storage.stats import stats

    found = stats(arguments.store)
    lines = [f"{found.entries} entries in {found.segments} segments, {human_bytes(found.bytes)}"]
    lines += [f"index {found.generation}, {len(found.recipes)} recipes"]
    for catalog in found.catalogs:
        columns = ", ".join(catalog.columns) or "no encoder"
        lines += [f"{catalog.name}: {catalog.samples} samples, {catalog.complete} complete ({columns}), generation {catalog.generation}"]
    return tell(arguments, found.as_json(), lines)
