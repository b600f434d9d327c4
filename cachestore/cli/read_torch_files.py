"""`cachestore read-torch-files`: what `import` starts to read files with pickles. Not for people, and not in `--help`."""

import argparse
import sys

from cachestore.cli import OK

HELP = "read files with pickles, asked for on stdin"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """It has none."""
    del parser


def run(arguments: argparse.Namespace) -> int:
    """Answer files from stdin on stdout until there are no more."""
    from cachestore.interop.sandbox import serve

    del arguments
    serve(sys.stdin.buffer, sys.stdout.buffer)
    return OK
