"""`cachestore precompute`: encode a data set into a store, on any number of ranks."""

import argparse
import os
import time
from dataclasses import fields, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cachestore.cli import FAILURES, OK, PROGRESS, PROGRESS_HELP, USAGE, failed_samples, print_error, print_json, printable, say
from cachestore.cli.terminal.question import ask
from cachestore.cli.terminal.stopping import Stop, silence, stopping, to_stderr
from cachestore.core.errors import BadInput
from cachestore.core.words import human_bytes, listed, noun, plural

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from cachestore.cli.terminal.progress import Progress
    from cachestore.core.ranks import RankInfo
    from cachestore.jobs.plan.options import PrecomputeRequest
    from cachestore.jobs.share.progress import LaunchStatus
    from cachestore.jobs.share.report import Report

HELP = "encode captions, images and videos into a store"

_GROUPS = ("", "data", "captions", "pictures", "videos", "model", "running")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments: DATA, the fields of PrecomputeRequest as options, and the output options.

    They have no defaults here: None means that an option was not given, so that a file can give it.
    """
    from cachestore.jobs.plan.options import PrecomputeRequest, in_command, option_of, spelled, switched_off

    parser.usage = (
        "cachestore precompute DATA [DATA ...] --model MODEL --store STORE\n"
        "                             [options]\n"
        "       cachestore precompute --again --store STORE [options that change]"
    )
    data = "a folder of images or videos, rows (.jsonl, .csv, .tsv, .json, .parquet), a list of prompts (.txt), tars; or several of these"
    parser.add_argument("data", metavar="DATA", nargs="*", help=data)
    groups = {name: parser.add_argument_group(name) if name else parser for name in _GROUPS}
    for one in fields(PrecomputeRequest):
        if one.name == "data":
            continue
        option, words = option_of(one), option_of(one).help
        if isinstance(one.default, bool):
            switch = in_command(one.name)
            groups[option.group].add_argument(switch, action="store_true", default=None, help=words)
            parser.add_argument(switched_off(switch), dest=one.name, action="store_const", const=False, help=argparse.SUPPRESS)
            continue
        default = spelled(one.default)
        words += f" (default: {default})" if default else ""
        action = "append" if one.name == "encode_arg" else "store"
        groups[option.group].add_argument(in_command(one.name), action=action, metavar=option.metavar, help=words.replace("%", "%%"))
    again = "repeat the last command of the data set; options given here replace those in the store, and --no-flip takes --flip back"
    parser.add_argument("--again", action="store_true", help=again)
    parser.add_argument("--plan-only", action="store_true", help="show what would be encoded, and stop")
    config = "a TOML file with options and [[source]] tables; options on the command line override it"
    groups["data"].add_argument("--config", metavar="FILE.toml", help=config)
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="print one JSON object")
    output.add_argument("--quiet", action="store_true", help="print only the result: counts, failures, and the data set")
    output.add_argument("--progress", choices=PROGRESS, default="auto", help=PROGRESS_HELP)


def run(arguments: argparse.Namespace) -> int:
    """Encode and print the report. Returns 0 if complete, 2 for malformed arguments, 3 with failures."""
    from cachestore.cli.terminal.progress import Progress, style_for
    from cachestore.jobs.start.ranks import find_rank, process_count

    try:
        request = _named(arguments, request_from(arguments))
        rank_info = find_rank(request.rank, request.world_size)
        process_count(request)  # raises now, before anything is shown
    except BadInput as error:
        from cachestore.cli.terminal.meant import to_copy

        print_error(BadInput(f"{error}{to_copy(arguments.line)}"), as_json=arguments.json)
        return USAGE
    if rank_info.found_in == "single process":
        from cachestore.cli.terminal.meant import check_paths

        check_paths(request)
    # Under another launcher only rank 0 prints the result, so that stdout holds one object.
    speaks = rank_info.rank in {0, None} or rank_info.found_in in {"arguments", "cachestore"}
    if arguments.plan_only:
        _print_forecast(arguments, request)
        return OK
    style = style_for(arguments.progress) if speaks and not arguments.quiet else "none"
    # While workers run, the signal only asks to stop: an exception in the middle of drawing would leave half a bar. Rank 0 says it.
    began = time.monotonic()
    with (
        stopping(silence, arguments.line) as stop,
        Progress(Path(request.store), style, "starting", lambda: stop.signal is not None) as progress,
    ):
        report = _encode(request, rank_info, progress, stop, is_quiet=arguments.quiet)
    if arguments.json and speaks:
        print_json(report.as_json())
    elif speaks:
        _print_report(report, None if arguments.quiet else request, time.monotonic() - began)
    return OK if report.complete else FAILURES


def _encode(request: "PrecomputeRequest", rank_info: "RankInfo", progress: "Progress", stop: Stop, *, is_quiet: bool) -> "Report":
    """Encode in other processes, also for a single rank, so that this one can show what they do at any moment."""
    from cachestore.files.paths import Layout
    from cachestore.jobs.start.launching import precompute_in_processes
    from cachestore.jobs.start.processes import Care
    from cachestore.store.write.listing_numbers import number_if_there

    def read(pids: "Collection[int]") -> "LaunchStatus":
        if os.getpid() not in pids:  # what the end needs takes a third of a second: it is loaded while the workers start
            import_module("cachestore.cli.terminal.lines")
        return progress.read(pids)

    say = progress.say
    care = Care(read, progress.show, progress.seconds, stop, say=say, warn=say, words=progress.words, is_quiet=is_quiet)
    with number_if_there(Layout.at(request.store), request.name) as number:
        return precompute_in_processes(request, rank_info, care, number)


def request_from(arguments: argparse.Namespace) -> "PrecomputeRequest":
    """Return the request in parsed arguments. Raises BadInput for a malformed one."""
    from cachestore.core.samples import Source
    from cachestore.jobs.plan.options import PrecomputeRequest, in_command, parse_value
    from cachestore.jobs.plan.typed import in_line, typed
    from cachestore.jobs.start.ranks import find_rank

    given = {one: getattr(arguments, one.name) for one in fields(PrecomputeRequest) if one.name != "data"}
    values = {one.name: parse_value(one, text, in_command(one.name)) for one, text in given.items() if text is not None}
    if arguments.data and "sources" in values:
        both = f"DATA ({arguments.data[0]}) and --sources both say what to encode"
        raise BadInput(f"{both}: give only one of them", option="sources")
    if arguments.config is not None:
        from cachestore.cli.config import read_config

        values = read_config(arguments.config) | values
    if arguments.again:
        values = _remembered(arguments, values) | values
    sources = [Source(data) for data in arguments.data] or values.get("sources", ())
    arguments.name = values.get("name")
    missing = [f"--{name}" for name in ("model", "store") if not values.get(name)] + (["DATA"] if not sources else [])
    if missing:
        where = f", on the command line and in {arguments.config}" if arguments.config else ""
        data = ": a path, or several, or --config with a [[source]] table for each" if missing[-1] == "DATA" else ""
        raise BadInput(f"{listed(missing)} {noun(len(missing), 'is', 'are')} missing{where}{data}")
    is_one_path = len(sources) == 1 and sources[0] == Source(sources[0].data)
    values |= {"data": sources[0].data, "sources": ()} if is_one_path else {"data": "", "sources": tuple(sources)}
    request = PrecomputeRequest(**values)
    request.check()
    if arguments.again and not arguments.quiet and find_rank(request.rank, request.world_size).rank in {0, None}:
        to_stderr(f"again: {in_line(['cachestore', 'precompute', *typed(request)])}")
    return request


def _remembered(arguments: argparse.Namespace, given: "Mapping[str, Any]") -> "dict[str, Any]":
    """Return the options of the last command of the data set, by name; says what is not repeated. Raises BadInput."""
    from cachestore.core.samples import Source
    from cachestore.files.paths import Layout
    from cachestore.jobs.plan.options import PrecomputeRequest, option_of
    from cachestore.jobs.plan.remembered import remember_one, say_rest
    from cachestore.jobs.start.ranks import find_rank
    from cachestore.store.read.snapshot import open_layout

    if not given.get("store"):
        raise BadInput("--again needs --store: the store whose last command is repeated")
    found = remember_one(open_layout(Layout.at(given["store"])), given.get("name"))
    request = found.requests[0]
    if not arguments.quiet and find_rank(given.get("rank"), given.get("world_size")).rank in {0, None}:
        to_stderr(rest) if (rest := say_rest(found)) else None
    kept = {one.name: getattr(request, one.name) for one in fields(PrecomputeRequest) if option_of(one).is_hint and one.name != "data"}
    return {**kept, "sources": request.sources or (Source(request.data),)}


def _named(arguments: argparse.Namespace, request: "PrecomputeRequest") -> "PrecomputeRequest":
    """Return the request; if no name was given and the store has other data sets alone, ask or say which one is meant."""
    from cachestore.files.opening import status_of
    from cachestore.files.paths import Layout

    layout = Layout.at(request.store)
    if arguments.name is not None or status_of(layout.marker) is None:
        return request
    from cachestore.jobs.plan.remembered import name_made
    from cachestore.jobs.start.ranks import find_rank

    others, rank_info = name_made(layout), find_rank(request.rank, request.world_size)
    if not others or request.name in others or rank_info.rank not in {0, None}:
        return request
    if len(others) == 1 and rank_info.found_in == "single process" and not (arguments.json or arguments.quiet or arguments.plan_only):
        [other] = others
        question = f"There is a data set {other!r} here. Add to it (a), or make a new one called {request.name!r} (n)?"
        if ask(question, {"a": f"add to {other!r}", "n": "a new one"}, default="n") == "a":
            return replace(request, name=other)
    if not arguments.quiet:
        beside = listed(map(repr, others))
        to_stderr(f"this makes a second data set {request.name!r} beside {beside}; --name {others[0]} adds to that one")
    return request


def _print_forecast(arguments: argparse.Namespace, request: "PrecomputeRequest") -> None:
    from cachestore.encode.needs import in_words as not_made
    from cachestore.jobs.start.forecast import forecast_of, in_words, memory_in_words

    forecast = forecast_of(request)
    if arguments.json:
        print_json(forecast.as_json())
    else:
        first = [not_made(forecast.not_made_here)] if forecast.not_made_here else []
        for line in [*first, *in_words(forecast, Path(request.store)), *memory_in_words(forecast.memory)]:
            say(line)


def _print_report(report: "Report", request: "PrecomputeRequest | None", seconds: float) -> None:
    """Print the counts, each failure, the slowest part, and the lines of Python that train from the data set.

    If `request` is None, as with `--quiet`, it prints only the first two.

    The report counts over the whole pass; `seconds` is the time of this run, and is printed only if an earlier one had a part in it.
    """
    from cachestore.cli.terminal.lines import training_lines
    from cachestore.encode.needs import in_words as not_made
    from cachestore.jobs.run.pass_counts import masks_in_words, recheck_in_words
    from cachestore.jobs.share.stages import stages_in_words

    here = min(report.encoded_here, report.encoded)  # what two processes made at once counts once
    earlier = min(report.encoded_earlier, report.encoded - here)
    by = {"this process": here, "others": report.encoded - here - earlier, "earlier runs": earlier}
    whose = ", ".join(f"{count} by {name}" for name, count in by.items() if count or name == "this process")
    encoded = f"{report.encoded} encoded{f' ({whose})' if here < report.encoded else ''}"
    broken = {one["sample"] for one in report.failures}
    of_samples = f" (of {plural(len(broken), 'sample')})" if report.failed > len(broken) > 0 else ""
    counts = f"{plural(report.wanted, 'value')}: {report.reused} reused, {encoded}, {report.failed} failed{of_samples}"
    seconds_here = f" over all runs, {seconds:.1f} s in this one" if earlier else ""
    usable = "" if report.usable is None else f", {report.usable} of them ready to train on"
    say(f"{counts}; {plural(report.samples, 'sample')}{usable}; {human_bytes(report.bytes)} new, {report.seconds:.1f} s{seconds_here}")
    if report.stages and report.encoded and request is not None:
        say(stages_in_words(report.stages))
    if report.rechecked:
        say(recheck_in_words(report.rechecked))
    for line in masks_in_words(report.masks):
        say(line)
    failures = ((str(one["sample"] or "(the empty caption)"), str(one["encoder"]), str(one["reason"])) for one in report.failures)
    for line in failed_samples(failures):
        say(line)
    say(f"data set {report.name!r} generation {report.generation} in {report.store}")
    if report.without_picture:
        say(report.without_picture)
    if report.not_made_here:
        say(not_made(report.not_made_here))
    if report.samples and report.usable != 0 and request is not None:
        lines = training_lines(report, captions=request.policy, sources=request.sources)
        print(printable("\n".join(["\nto train from it:\n", *lines])))
