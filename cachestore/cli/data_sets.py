"""How commands name a data set: `--name` in each of them, and what they do without it."""

import argparse
from typing import TYPE_CHECKING

from cachestore.core.errors import BadInput, BadUsage

if TYPE_CHECKING:
    from cachestore.files.paths import Layout
    from cachestore.store.format.catalog import Catalog

ONLY_ONE = "the data set (default: the only one)"


def add_name(parser: argparse.ArgumentParser, words: str = ONLY_ONE, *, positional: bool = False) -> None:
    """Add `--name`. With `positional` also NAME, as an older spelling of it; `given_name` reads both."""
    if positional:
        parser.add_argument("named", metavar="NAME", nargs="?", help="the same as --name NAME")
    parser.add_argument("--name", metavar="NAME", help=words)


def given_name(arguments: argparse.Namespace) -> str | None:
    """Return the name that was given by position or by `--name`; None for neither. Raises BadUsage for two different ones."""
    names = dict.fromkeys(name for name in (arguments.named, arguments.name) if name is not None)
    if len(names) > 1:
        one, other = names
        raise BadUsage(f"two data sets are named, {one!r} and --name {other!r}: leave one of them out")
    return next(iter(names), None)


def choose(layout: "Layout", name: str | None) -> str:
    """Return the name of the data set that is meant: the given one, else the only one. Raises BadInput if there is none, or several."""
    from cachestore.store.read.unfinished import list_data_sets, list_unfinished, not_there, several_there

    there = list_data_sets(layout)
    if name is not None:
        if name not in there:
            raise not_there(layout, name, there)
        return name
    if len(there) > 1:
        raise several_there(layout, there)
    if not there:
        unfinished = [one.in_words(layout) for one in list_unfinished(layout)]
        raise BadInput("; ".join(unfinished) or f"{layout.root} has no data set: `cachestore precompute` makes one")
    return there[0]


def catalogs_of(layout: "Layout", name: str | None) -> "list[Catalog]":
    """Return the newest readable catalog of each data set, or only of the named one. Raises BadInput if there is no such data set."""
    from cachestore.store.format.catalog import list_names
    from cachestore.store.read.rows import newest_catalog
    from cachestore.store.read.unfinished import list_data_sets, not_there

    names = sorted(list_names(layout))
    found = [catalog for one in names if name in {None, one} and (catalog := newest_catalog(layout, one)) is not None]
    if name is not None and not found:
        raise not_there(layout, name, list_data_sets(layout))
    return found


def unfinished_in_words(layout: "Layout", name: str | None = None) -> list[str]:
    """Return a line for each data set that is not finished, or only for the named one."""
    from cachestore.store.read.unfinished import list_unfinished

    return [one.in_words(layout) for one in list_unfinished(layout) if name in {None, one.name}]
