"""`cachestore doctor`: check this machine and a store's file system, and say what to fix."""

import argparse

from cachestore.cli import add_store, tell
from cachestore.core.errors import BadUsage

HELP = "check this machine, and the file system of a store if one is given, and say what to fix"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_store(parser, is_optional=True)
    parser.add_argument(
        "--peer",
        action="store_true",
        help="run it on two machines at once: it tests whether each sees the files that the other writes to the store, and after how long",
    )
    parser.add_argument("--torch", action="store_true", help="also ask torch which devices it sees (in a separate process)")


def run(arguments: argparse.Namespace) -> int:
    """Print what was found. Returns 1 if there is a problem."""
    from cachestore.maintain.doctor import PROBLEM, examine

    if arguments.peer and arguments.store is None:
        raise BadUsage("--peer needs the store that both machines share: cachestore doctor STORE --peer")
    checks = examine(arguments.store, ask_torch=arguments.torch)
    if arguments.peer:
        from cachestore.files.paths import Layout
        from cachestore.maintain.peer import meet
        from cachestore.storage.snapshot import open_layout

        checks += meet(open_layout(Layout.at(arguments.store)))
    is_ok = all(check.state != PROBLEM for check in checks)
    lines: list[str] = []
    for check in checks:
        lines += [f"{check.state:>7}  {check.name}: {check.found}", *([f"         {check.advice}"] if check.advice else [])]
    return tell(arguments, {"ok": is_ok, "checks": [check.as_json() for check in checks]}, lines, is_ok=is_ok)
