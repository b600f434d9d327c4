"""`cachestore read-torch-files`: what `import` starts to read files with pickles. Not for people, and not in `--help`."""

import argparse
import sys

from cachestore.cli import OK

HELP = "read files with pickles, asked for on stdin"


def add_arguments(_parser: argparse.ArgumentParser) -> None:
    """It has none."""


def run(_arguments: argparse.Namespace) -> int:
    """Answer files from stdin on stdout until there are no more."""
    from cachestore.interop.sandbox import serve

    serve(sys.stdin.buffer, sys.stdout.buffer)
    return OK
