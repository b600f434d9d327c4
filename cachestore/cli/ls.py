"""`cachestore ls`: list the entries of a store."""

import argparse
from typing import Any

from cachestore.cli import add_store, tell
from cachestore.core.words import human_bytes

HELP = "list entries"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_store(parser)
    parser.add_argument("--keys", action="store_true", help="print only the keys, one per line")


def run(arguments: argparse.Namespace) -> int:
    """Print the entries, sorted by key."""
    from cachestore.store.reader import Reader

    with Reader(arguments.store) as reader:
        keys = sorted(reader.keys())
        if arguments.keys and not arguments.json:
            return tell(arguments, None, map(str, keys))
        entries = [reader.describe(key).as_json() for key in keys]
    return tell(arguments, {"entries": entries}, map(_in_a_line, entries))


def _in_a_line(entry: dict[str, Any]) -> str:
    tensors = ", ".join(f"{name} {tensor['dtype']} {tensor['shape']}" for name, tensor in entry["tensors"].items())
    return f"{entry['key']}  {human_bytes(entry['bytes']):>10}  {tensors}"
