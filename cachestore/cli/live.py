"""`cachestore live`: write the front door of `cachestore.live` into the command that starts a trainer, and run that."""

import argparse
import json
import os
import shlex
import subprocess
import sys
from typing import Any, Final

from cachestore.cli import USAGE, printable, tell
from cachestore.core.errors import BadUsage

_SECONDS: Final = 600
HELP = "run a trainer with its cache in a store: its own encoders fill it, and no file of the trainer is changed"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments. What follows `--` is the trainer's command."""
    from cachestore.live.arming import ADAPTERS
    from cachestore.live.front import add_options

    starts = "cachestore live TRAINER --store STORE [--name NAME] [--read DATASET]"
    parser.usage = f"{starts}\n                       -- COMMAND…\n       cachestore live --check TRAINER [PATH] [--json]"
    parser.set_defaults(command_after=[])
    parser.add_argument("trainer", metavar="TRAINER", help=f"{', '.join(ADAPTERS)}, or the module of your own adapter")
    parser.add_argument("path", metavar="PATH", nargs="?", help="with --check: the trainer's checkout (default: the current folder)")
    add_options(parser, is_required=False)
    parser.add_argument(
        "--check",
        action="store_true",
        help="start no training: import the trainer's modules from PATH, and list for each plug point whether the adapter fits it",
    )
    parser.add_argument("--json", action="store_true", help="with --check: print one JSON object")
    parser.epilog = "COMMAND starts the trainer, as you would write it without cachestore: by python, accelerate, torchrun or deepspeed."


def run(arguments: argparse.Namespace) -> int:
    """Become the trainer's command, so that its exit code is this one's. With `--check`, returns 0 if all fits, else 2."""
    from cachestore.live.command import with_front

    command: list[str] = arguments.command_after
    options = {name: value for name in ("store", "name", "read") if (value := getattr(arguments, name)) is not None}
    if arguments.check:
        if command or options:
            raise BadUsage("--check starts nothing: it takes TRAINER and PATH alone")
        return _check(arguments)
    if arguments.path is not None or arguments.json:
        raise BadUsage(f"{'--json' if arguments.json else arguments.path} belongs to --check; the trainer's command stands after --")
    if not command:
        raise BadUsage("the trainer's command is missing: cachestore live TRAINER --store STORE -- accelerate launch … train.py …")
    if not options.get("store"):
        raise BadUsage("--store is missing: the folder of the store, which is made if it is not there")
    words = with_front(command, [arguments.trainer, *(word for name, value in options.items() for word in (f"--{name}", value))])
    print(printable(f"cachestore: running {shlex.join(words)}"), file=sys.stderr, flush=True)
    try:
        os.execvp(words[0], words)  # noqa: S606 - it is the user's own command
    except OSError as error:
        raise BadUsage(f"{words[0]} cannot be started: {error.strerror}") from error


def _check(arguments: argparse.Namespace) -> int:
    from cachestore.children.kinds import TRAINER_CHECK
    from cachestore.children.start import reason_of, start
    from cachestore.live.check import NOT_NEEDED, THERE, UNTOLD

    checkout = arguments.path or "."
    if not os.path.isdir(checkout):  # noqa: PTH112 - its text is shown as it was given
        raise BadUsage(f"{checkout} is not a folder: give the trainer's checkout")
    with start(TRAINER_CHECK, arguments.trainer, checkout, os.getcwd()) as child:  # noqa: PTH109 - as Python would put it into sys.path
        try:
            out, _err = child.communicate(timeout=_SECONDS)
        except subprocess.TimeoutExpired as error:
            child.kill()
            raise BadUsage(f"the modules of {checkout} are not imported after {_SECONDS} s") from error
        if child.returncode:
            raise BadUsage(f"the modules of {checkout} cannot be looked at: {reason_of(child)}")
    found: dict[str, Any] = json.loads(out)
    if "error" in found:
        raise BadUsage(found["error"])
    points: list[dict[str, Any]] = found["points"]
    states: list[str] = [point["state"] for point in points]
    wrong = [state for state in states if state not in {THERE, NOT_NEEDED}]
    fits = not wrong and THERE in states
    lines = [f"{point['module']} {point['name']}: {point['state']}" for point in points]
    versions = {point["module"]: point["version"] for point in points if point["version"]}
    lines += [f"note: {name} is not in a version that the adapter was tested with ({digest})" for name, digest in versions.items()]
    if fits:
        lines += ["the adapter fits this checkout"]
    elif all(state.startswith(UNTOLD) for state in wrong):
        lines += ["it cannot be told here whether the adapter fits: run this in the trainer's own environment, which has these packages"]
    else:
        lines += ["the adapter does not fit this checkout: a run would end with 2"]
    return tell(arguments, {"fits": fits, **found}, lines, is_ok=fits, otherwise=USAGE)
