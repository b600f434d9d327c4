"""How commands name a data set: `--name` in each of them, and what they do without it."""

import argparse
from typing import TYPE_CHECKING, cast

from cachestore.core.errors import BadInput, BadUsage, FormatError

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


def choose(layout: "Layout", name: str | None, *, with_sources: bool = False) -> str:
    """Return the name of the data set that is meant: the given one, else the only one. Raises BadInput if there is none, or several.

    If several are there, `with_sources` leaves out those that a program published.
    """
    from cachestore.store.read.unfinished import list_data_sets, list_unfinished, not_there, several_there

    there = list_data_sets(layout)
    if name is not None:
        if name not in there:
            raise not_there(layout, name, there)
        return name
    if len(there) > 1 and with_sources:
        from cachestore.store.write.made import has_sources

        there = [each for each in there if has_sources(layout, each, if_damaged=True)] or there
    if len(there) > 1:
        raise several_there(layout, there)
    if not there:
        unfinished = [one.in_words(layout) for one in list_unfinished(layout)]
        raise BadInput("; ".join(unfinished) or f"{layout.root} has no data set: `cachestore precompute` makes one")
    return there[0]


def catalogs_of(layout: "Layout", name: str | None) -> "list[Catalog]":
    """Return the newest readable catalog of each data set, or only of the named one. Raises BadInput if there is no such data set."""
    from cachestore.store.read.rows import newest_catalog
    from cachestore.store.read.unfinished import list_data_sets, not_there

    names = list_data_sets(layout)
    if name is not None and name not in names:
        raise not_there(layout, name, names)
    found = [catalog for one in names if name in {None, one} and (catalog := newest_catalog(layout, one)) is not None]
    if name is not None and not found:
        raise FormatError(unreadable_in_words(layout, name))
    return found


def all_unreadable(layout: "Layout", catalogs: "list[Catalog]", name: str | None = None) -> list[str]:
    """Return a line for each data set, or only for the named one, that cannot be read as it is now. `catalogs` are what is shown."""
    from cachestore.store.read.stats import unreadable_names

    shown = {catalog.name: catalog.generation for catalog in catalogs}
    return [unreadable_in_words(layout, one, shown.get(one)) for one in unreadable_names(layout, catalogs) if name in {None, one}]


def unreadable_in_words(layout: "Layout", name: str, shown: int | None = None) -> str:
    """Return what is said of a data set that cannot be read as it is now, if an older generation is `shown` or none."""
    instead = "" if shown is None else f", so generation {shown} is shown"
    return f"the data set {name!r} cannot be read as it is now{instead}: run {layout.command('verify')}"


def row_of(made: str) -> str:
    """Return what a row of a data set is called."""
    return "sample" if made in {"precompute", "imported"} else "row"


def made_in_words(made: str) -> str:
    """Return what made a data set, as the end of a line; empty for `precompute`, which makes most."""
    from cachestore.store.format.catalog import MADE

    return "" if made == "precompute" else f", {cast('dict[str, str]', MADE)[made]}"


def unfinished_in_words(layout: "Layout", name: str | None = None) -> list[str]:
    """Return a line for each data set that is not finished, or only for the named one."""
    from cachestore.store.read.unfinished import list_unfinished

    return [one.in_words(layout) for one in list_unfinished(layout) if name in {None, one.name}]
