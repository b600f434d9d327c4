"""`cachestore precompute`: encode a data set into a store, on any number of ranks."""

import argparse
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from cachestore.cli import FAILURES, OK, USAGE, print_error, print_json, printable
from cachestore.cli.stopping import Stop, silence, stopping, to_stderr
from cachestore.core.errors import BadInput
from cachestore.core.words import human_bytes

if TYPE_CHECKING:
    from cachestore.jobs.options import PrecomputeRequest
    from cachestore.jobs.pass_loop import Report
    from cachestore.jobs.ranks import Say

HELP = "encode captions, images and videos into a store"

_GROUPS = ("", "what", "pictures", "videos", "model", "how")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments: DATA, the fields of PrecomputeRequest as options, and the output options.

    They have no defaults here: None means that an option was not given, so that a file can give it.
    """
    from cachestore.jobs.options import PrecomputeRequest, in_command, option_of, spelled

    data = "a folder of images or videos, a manifest .jsonl, a list of prompts .txt, tars; or several of these"
    parser.add_argument("data", metavar="DATA", nargs="*", help=data)
    groups = {name: parser.add_argument_group(name) if name else parser for name in _GROUPS}
    for one in fields(PrecomputeRequest):
        if one.name == "data":
            continue
        option, words = option_of(one), option_of(one).help
        if isinstance(one.default, bool):
            groups[option.group].add_argument(in_command(one.name), action="store_true", default=None, help=words)
            continue
        default = spelled(one.default)
        words += f" (default: {default})" if default else ""
        action = "append" if one.name == "encode_arg" else "store"
        groups[option.group].add_argument(in_command(one.name), action=action, metavar=option.metavar, help=words.replace("%", "%%"))
    config = "a TOML file with options and [[source]] tables; options on the command line override it"
    parser.add_argument("--config", metavar="FILE.toml", help=config)
    output = parser.add_argument_group("output")
    output.add_argument("--plan-only", action="store_true", help="show what would be encoded, and stop")
    output.add_argument("--json", action="store_true", help="print one JSON object")
    output.add_argument("--quiet", action="store_true", help="print only the result: counts, failures, and the data set")


def run(arguments: argparse.Namespace) -> int:
    """Encode and print the report. Returns 0 if complete, 2 for malformed arguments, 3 with failures."""
    from cachestore.jobs.ranks import find_rank, process_count

    try:
        request = request_from(arguments)
        rank_info = find_rank(request.rank, request.world_size)
        count = process_count(request)
    except BadInput as error:
        print_error(error, as_json=arguments.json)
        return USAGE
    # Under another launcher only rank 0 prints the result, so that stdout holds one object.
    speaks = rank_info.rank in {0, None} or rank_info.found_in in {"arguments", "cachestore"}
    say = silence if arguments.quiet else to_stderr
    if arguments.plan_only:
        _print_forecast(arguments, request)
        return OK
    with stopping(say, arguments.line, is_parent=count > 1) as stop:
        report = _run_ranks(request, count) if count > 1 else run_here(request, say, stop, is_shown=not arguments.quiet and speaks)
    if arguments.json and speaks:
        print_json(report.as_json())
    elif speaks:
        _print_report(report, None if arguments.quiet else request)
    return OK if report.complete else FAILURES


def run_here(request: "PrecomputeRequest", say: "Say", stop: Stop, *, is_shown: bool, number: int | None = None) -> "Report":
    """Encode in this process, with a progress bar if `is_shown`. `number` is the listing number of the process that started this one."""
    from cachestore.cli.progress import Bar
    from cachestore.jobs.precompute import precompute_here

    bar = Bar(Path(request.store), is_shown=is_shown)
    try:
        return precompute_here(request, say=say, cancel=stop, on_progress=bar.look, number=number)
    finally:
        bar.end()


def _run_ranks(request: "PrecomputeRequest", count: int) -> "Report":
    """Start ranks and wait for them. The first rank draws the bar on our terminal; this process prints only warnings about the others."""
    from cachestore.jobs.precompute import run_ranks
    from cachestore.jobs.processes import Care
    from cachestore.jobs.ranks import open_for_pass
    from cachestore.work.progress import Observer

    layout = open_for_pass(request.store)
    return run_ranks(layout, request, count, Care(Observer(layout).look_at, warn=to_stderr, words="inherited"))


def request_from(arguments: argparse.Namespace) -> "PrecomputeRequest":
    """Return the request in parsed arguments. Raises BadInput for a malformed one."""
    from cachestore.core.samples import Source
    from cachestore.jobs.options import PrecomputeRequest, in_command, parse_value

    given = {one: getattr(arguments, one.name) for one in fields(PrecomputeRequest) if one.name != "data"}
    values = {one.name: parse_value(one, text, in_command(one.name)) for one, text in given.items() if text is not None}
    if arguments.data and "sources" in values:
        raise BadInput(f"DATA ({arguments.data[0]}) and --sources both say what to encode: give only one of them")
    if arguments.config is not None:
        from cachestore.cli.config import read_config

        values = read_config(arguments.config) | values
    for name in ("model", "store"):
        if not values.get(name):
            raise BadInput(f"--{name} is missing" + (f", on the command line and in {arguments.config}" if arguments.config else ""))
    sources = [Source(data) for data in arguments.data] or values.get("sources", ())
    if not sources:
        raise BadInput("DATA is missing: a path, or several, or --config with a [[source]] table for each")
    is_one_path = len(sources) == 1 and sources[0] == Source(sources[0].data)
    values |= {"data": sources[0].data, "sources": ()} if is_one_path else {"data": "", "sources": tuple(sources)}
    request = PrecomputeRequest(**values)
    request.check()
    return request


def _print_forecast(arguments: argparse.Namespace, request: "PrecomputeRequest") -> None:
    from cachestore.jobs.forecast import in_words
    from cachestore.jobs.precompute import forecast_of

    forecast = forecast_of(request)
    if arguments.json:
        print_json(forecast.as_json())
    else:
        print(printable("\n".join(in_words(forecast, Path(request.store)))))


def _print_report(report: "Report", request: "PrecomputeRequest | None") -> None:
    """Print the counts, each failure, and the lines of Python that train from the data set (none if `request` is None)."""
    from cachestore.cli.lines import training_lines
    from cachestore.encode.needs import in_words as not_made
    from cachestore.work.stages import stages_in_words

    counts = f"{report.wanted} units: {report.reused} reused, {report.encoded} encoded, {report.failed} failed, {report.missing} missing"
    usable = "" if report.usable is None else f", {report.usable} of them complete and ready to train on"
    print(f"{counts}; {report.samples} samples{usable}; {human_bytes(report.bytes)} new, {report.seconds:.1f} s")
    if report.stages:
        print(printable(stages_in_words(report.stages)))
    for failure in report.failures:
        print(printable(f"failed: {failure['sample'] or '(the empty caption)'} ({failure['encoder']}): {failure['reason']}"))
    print(printable(f"data set {report.name!r} generation {report.generation} in {report.store}"))
    if report.not_made_here:
        print(printable(not_made(report.not_made_here)))
    if report.samples and request is not None:
        lines = training_lines(report, captions=request.policy, sources=request.sources)
        print(printable("\nto train from it:\n\n" + "\n".join(f"    {line}" for line in lines)))
