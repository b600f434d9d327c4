"""`cachestore stats`: count what is in a store."""

import argparse
from dataclasses import replace

from cachestore.cli import add_store, tell
from cachestore.cli.data_sets import add_name, choose, made_in_words, row_of, unreadable_in_words
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
            catalogs = tuple(one for one in found.catalogs if one.name == chosen)
            found = replace(found, catalogs=catalogs, unreadable=tuple(one for one in found.unreadable if one == chosen))
    lines = [f"{plural(found.entries, 'value')} in {plural(found.segments, 'segment')}, {human_bytes(found.bytes)}"]
    for catalog in found.catalogs:
        columns = ", ".join(catalog.columns) or ("no encoder" if row_of(catalog.made) == "sample" else "no part")
        prompts = f", {plural(catalog.prompts, 'prompt')} for validation" if catalog.prompts else ""
        rows, ready = row_of(catalog.made), "ready to train on" if row_of(catalog.made) == "sample" else "with all their values"
        counts = f"{plural(catalog.samples, rows)}, {catalog.complete} of them {ready} ({columns}){prompts}"
        lines += [f"{catalog.name}: {counts}, generation {catalog.generation}{made_in_words(catalog.made)}"]
    shown = {catalog.name: catalog.generation for catalog in found.catalogs}
    lines += [unreadable_in_words(Layout.at(arguments.store), name, shown.get(name)) for name in found.unreadable]
    lines += unfinished.values()
    return tell(arguments, {**found.as_json(), "unfinished": [one.as_json() for one in unfinished]}, lines)
