"""`cachestore relocate`: record that the sources of data sets have moved."""

import argparse
from pathlib import Path

from cachestore.cli import add_store, tell
from cachestore.cli.data_sets import add_name

HELP = "record the new path of a source that has moved, so that repair and report find its files"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_store(parser)
    moved = "the old and the new path of a source, or of a folder above it; may be given several times"
    parser.add_argument("--source", metavar="OLD=NEW", action="append", required=True, type=_move, help=moved)
    add_name(parser, "only this data set (default: all)")


def run(arguments: argparse.Namespace) -> int:
    """Print the data sets that record the new paths."""
    from cachestore.care.relocate import relocate

    report = relocate(arguments.store, dict(arguments.source), name=arguments.name)
    lines = [f"{old} is now {new}" for old, new in report.paths.items()]
    lines += [f"data set {name!r}: recorded in generation {number}, same rows" for name, number in report.generations.items()]
    if not lines:
        old, new = (", ".join(paths) for paths in zip(*arguments.source, strict=True))
        lines = [f"nothing to do: no data set records {old}, and what lies at {new} is recorded already"]
    return tell(arguments, report.as_json(), lines)


def _move(text: str) -> tuple[str, str]:
    """Split OLD=NEW. If a path contains `=`, the split at which NEW exists is taken."""
    at = [index for index, letter in enumerate(text) if letter == "=" and 0 < index < len(text) - 1]
    if not at:
        raise argparse.ArgumentTypeError(f"must be OLD=NEW, the old and the new path, not {text!r}")
    index = next((index for index in at if Path(text[index + 1 :]).exists()), at[0])
    return text[:index], text[index + 1 :]
