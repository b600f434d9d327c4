"""`cachestore doctor`: what this machine and a store's file system can do, and what to do about it."""

import argparse

from cachestore.cli import add_store, tell

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
    lines: list[str] = []
    for check in checks:
        lines += [f"{check.state:>7}  {check.name}: {check.found}", *([f"         {check.advice}"] if check.advice else [])]
    return tell(arguments, {"ok": is_ok, "checks": [check.as_json() for check in checks]}, lines, is_ok=is_ok)
