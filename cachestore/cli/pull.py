"""`cachestore pull`: copy a store out of an object store."""

import argparse

from cachestore.cli import add_access, add_store
from cachestore.cli.transfer import add_address, add_options, run_transfer

HELP = "copy a store, or one data set of it, out of an object store; every segment is checked"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_address(parser)
    add_store(parser)
    add_options(parser, "receive")
    add_access(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print what was received."""
    from cachestore.remote.pull import pull

    return run_transfer(arguments, pull, arguments.address, arguments.store, done="received", access=arguments.access)
