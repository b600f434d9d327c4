"""`cachestore work`: one rank of a `precompute`, which starts it and reads its report. Not listed by `--help`."""

import argparse
import json
import os
from contextlib import nullcontext
from pathlib import Path

from cachestore.cli import FAILURES, OK, print_json
from cachestore.cli.terminal.stopping import silence, stopping, to_stderr

HELP = "one rank of precompute"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the file of the request and the output options. The report is always JSON."""
    parser.add_argument("request", metavar="REQUEST.json")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quiet", action="store_true")


def run(arguments: argparse.Namespace) -> int:
    """Do this rank's part of the request and print the report. It ends if the process that started it ends."""
    from cachestore.core.spelling import for_command_line
    from cachestore.files.opening import read_foreign
    from cachestore.jobs.plan.options import PrecomputeRequest
    from cachestore.jobs.start.here import precompute_here
    from cachestore.jobs.start.launching import PLANNED, TYPED
    from cachestore.jobs.start.parent_watch import watch_parent
    from cachestore.jobs.start.processes import LISTING

    watch_parent(os.environ)
    number = os.environ.pop(LISTING, "")
    body = json.loads(read_foreign(Path(arguments.request)))
    say = silence if arguments.quiet else to_stderr
    with for_command_line() if body[TYPED] else nullcontext(), stopping(say, ()) as stop:
        report = precompute_here(
            PrecomputeRequest.from_json(body),
            say=say,
            warn=say,
            cancel=stop,
            number=int(number) if number.isdecimal() else None,
            planned_before=body[PLANNED],
        )
    print_json(report.as_json())
    return OK if report.complete else FAILURES
