"""`cachestore doctor`: what this machine and a store's file system can do, and what to do about it."""

import argparse

from cachestore.cli import ERROR, OK, add_store, print_json, say

HELP = "probe this machine, and a store's file system, and say what to do"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_store(parser, is_optional=True)
    parser.add_argument("--torch", action="store_true", help="also ask torch for its devices, in a process of its own")


def run(arguments: argparse.Namespace) -> int:
    """Print what was found; 1 if something stands in the way."""
    from cachestore.maintain.doctor import PROBLEM, examine

    checks = examine(arguments.store, ask_torch=arguments.torch)
    is_ok = all(check.state != PROBLEM for check in checks)
    if arguments.json:
        print_json({"ok": is_ok, "checks": [check.as_json() for check in checks]})
        return OK if is_ok else ERROR
    for check in checks:
        say(f"{check.state:>7}  {check.name}: {check.found}")
        if check.advice:
            say(f"         {check.advice}")
    return OK if is_ok else ERROR
