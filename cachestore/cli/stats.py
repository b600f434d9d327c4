"""`cachestore stats`: count what is in a store."""

import argparse
from dataclasses import replace

from cachestore.cli import add_store, tell
from cachestore.cli.data_sets import add_name, choose
from cachestore.core.words import human_bytes, plural

HELP = "count entries and bytes, and list the data sets with their newest generation"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_store(parser, may_be_address=True)
    add_name(parser, "list only this data set; entries and bytes are those of the whole store (default: all)")


def run(arguments: argparse.Namespace) -> int:
    """Print the counts."""
    from cachestore.files.paths import Layout
    from cachestore.store.read.opener import is_address
    from cachestore.store.read.stats import stats
    from cachestore.store.read.unfinished import list_unfinished

    if is_address(arguments.store):  # only what is finished is pushed to one
        from cachestore.remote.reader import stats_of

        found, unfinished = stats_of(arguments.store, arguments.name), {}
    else:
        found, layout = stats(arguments.store), Layout.at(arguments.store)
        if arguments.name is None:
            unfinished = {one: one.in_words(layout) for one in list_unfinished(layout)}
        else:
            chosen, unfinished = choose(layout, arguments.name), {}
            found = replace(found, catalogs=tuple(one for one in found.catalogs if one.name == chosen))
    lines = [f"{plural(found.entries, 'value')} in {plural(found.segments, 'file')}, {human_bytes(found.bytes)}"]
    for catalog in found.catalogs:
        columns = ", ".join(catalog.columns) or "no encoder"
        prompts = f", {plural(catalog.prompts, 'prompt')} for validation" if catalog.prompts else ""
        counts = f"{plural(catalog.samples, 'sample')}, {catalog.complete} of them ready to train on ({columns}){prompts}"
        lines += [f"{catalog.name}: {counts}, generation {catalog.generation}"]
    lines += unfinished.values()
    return tell(arguments, {**found.as_json(), "unfinished": [one.as_json() for one in unfinished]}, lines)
