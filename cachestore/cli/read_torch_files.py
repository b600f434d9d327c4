"""`cachestore read-torch-files`: `import` starts it to read files with pickles. Not listed by `--help`."""

import argparse
import sys

from cachestore.cli import OK

HELP = "read files with pickles, asked for on stdin"


def add_arguments(_parser: argparse.ArgumentParser) -> None:
    """Add no arguments."""


def run(_arguments: argparse.Namespace) -> int:
    """Read files from stdin and answer on stdout, until stdin ends."""
    from cachestore.interop.sandbox import serve

    serve(sys.stdin.buffer, sys.stdout.buffer)
    return OK
