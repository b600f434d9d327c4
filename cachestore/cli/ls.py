"""`cachestore ls`: list the entries of a store."""

import argparse

from cachestore.cli import OK, add_store, print_json, say
from cachestore.core.words import human_bytes

HELP = "list entries"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_store(parser)
    parser.add_argument("--keys", action="store_true", help="print the keys alone, one a line")


def run(arguments: argparse.Namespace) -> int:
    """Print the entries in the order of their keys."""
    from cachestore.store.reader import Reader

    with Reader(arguments.store) as reader:
        keys = sorted(reader.keys())
        if arguments.keys and not arguments.json:
            for key in keys:
                say(str(key))
            return OK
        entries = [reader.describe(key).as_json() for key in keys]
    if arguments.json:
        print_json({"entries": entries})
        return OK
    for entry in entries:
        tensors = ", ".join(f"{name} {tensor['dtype']} {tensor['shape']}" for name, tensor in entry["tensors"].items())
        say(f"{entry['key']}  {human_bytes(entry['bytes']):>10}  {tensors}")
    return OK
