"""`cachestore stats`: count what is in a store."""

import argparse

from cachestore.cli import add_store, tell
from cachestore.core.words import human_bytes, plural

HELP = "count entries and bytes, and list the data sets with their newest generation"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_store(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the counts."""
    from cachestore.storage.stats import stats

    found = stats(arguments.store)
    lines = [f"{plural(found.entries, 'entry')} in {plural(found.segments, 'segment')}, {human_bytes(found.bytes)}"]
    lines += [f"{f'index {found.generation}' if found.generation >= 0 else 'no index yet'}, {plural(len(found.recipes), 'recipe')}"]
    for catalog in found.catalogs:
        columns = ", ".join(catalog.columns) or "no encoder"
        prompts = f", {plural(catalog.prompts, 'prompt')} for validation" if catalog.prompts else ""
        counts = f"{plural(catalog.samples, 'sample')}, {catalog.complete} complete ({columns}){prompts}"
        lines += [f"{catalog.name}: {counts}, generation {catalog.generation}"]
    return tell(arguments, found.as_json(), lines)
