"""`cachestore push`: copy a store into an object store."""

import argparse

from cachestore.cli import add_store
from cachestore.cli.transfer import add_address, add_options, run_transfer

HELP = "copy a store, or one data set of it, into an object store: S3, GCS, Azure"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_store(parser)
    add_address(parser)
    add_options(parser, "send")


def run(arguments: argparse.Namespace) -> int:
    """Print what was sent."""
    from cachestore.remote.push import push

    return run_transfer(arguments, push, arguments.store, arguments.address, done="sent")
