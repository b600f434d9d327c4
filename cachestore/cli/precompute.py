"""`cachestore precompute`: encode a data set into a store, on any number of ranks."""

import argparse
import json
import os
import shlex
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from cachestore.cli import FAILURES, OK, USAGE, print_error, print_json, printable
from cachestore.core.errors import BadInput, Incomplete
from cachestore.core.words import human_bytes

if TYPE_CHECKING:
    from cachestore.core.captions import CaptionPolicy
    from cachestore.core.samples import Source
    from cachestore.jobs.forecast import Forecast
    from cachestore.jobs.pass_loop import Report
    from cachestore.jobs.planning import PrecomputeRequest
    from cachestore.jobs.precompute import Say

HELP = "encode captions, images and videos into a store"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments; their names are those of PrecomputeRequest."""
    # No option has a default here: what is not given is None, and may stand in a file. PrecomputeRequest has the defaults.
    parser.add_argument(
        "data",
        metavar="DATA",
        nargs="*",
        help="a folder of images or videos, a manifest .jsonl, a list of prompts .txt, tars; or several of these",
    )
    parser.add_argument(
        "--model", help="a diffusers folder or hub id, or a transformers text encoder; the denoiser's weights are never read"
    )
    parser.add_argument("--store", help="the store's folder; made if it does not exist")
    parser.add_argument(
        "--config", metavar="FILE.toml", help="take options and [[source]] tables from here; options given too have precedence"
    )
    what = parser.add_argument_group("what")
    what.add_argument(
        "--encode",
        metavar="LIST",
        help="text, latents or both (default: text,latents); some encoders alone by name",
    )
    what.add_argument("--name", help="the data set's name (default: train)")
    what.add_argument("--captions", metavar="first|all", help="of a sample with several; or a CaptionPolicy as JSON (default: first)")
    what.add_argument("--caption-lines", choices=("whole", "each", "first"), help="how a caption file is read (default: whole)")
    what.add_argument(
        "--caption",
        metavar="TEXT",
        help="for samples without one (default: the empty caption, with a warning; if no row has a caption, an error)",
    )
    what.add_argument("--sources", metavar="JSON", help="in place of DATA: a list of objects with the fields of cs.Source")
    what.add_argument(
        "--replace", action="store_true", default=None, help="let this source, model or resolution take the place of the name's earlier one"
    )
    _add_pictures(parser)
    model = parser.add_argument_group("model")
    model.add_argument("--vae", metavar="PATH", help="take the VAE from here: a folder, a hub id, or one .safetensors file")
    model.add_argument("--text-encoder", metavar="PATH", help="take the text encoder from here, likewise")
    model.add_argument("--revision", metavar="R", help="of a hub model")
    model.add_argument("--variant", metavar="V", help="of the weights, such as fp16")
    model.add_argument(
        "--encode-arg",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an argument for encode_prompt, such as clip_skip=1; JSON or text",
    )
    model.add_argument("--text-dtype", metavar="D", help="float32, bfloat16 or float16 (default: by family)")
    model.add_argument("--vae-dtype", metavar="D", help="float32, bfloat16 or float16 (default: by family)")
    model.add_argument("--latents", choices=("moments", "mean", "sample"), help="what is kept of the posterior (default: moments)")
    how = parser.add_argument_group("how")
    how.add_argument("--procs", type=int, metavar="N", help="start N local ranks (default: one for each GPU, else 1)")
    how.add_argument("--device", help="auto, cpu, cuda or cuda:i (default: auto)")
    how.add_argument("--batch-size", metavar="N", help="auto or a number (default: auto)")
    how.add_argument("--compile", action="store_true", default=None, help="compile the VAE's encoder for shapes that are many enough")
    how.add_argument("--workers", type=int, metavar="N", help="threads that read and decode (default: by processors)")
    how.add_argument("--rank", type=int, metavar="R", help="this process's rank, where no launcher says it")
    how.add_argument("--world-size", type=int, metavar="W", help="the number of ranks, with --rank")
    how.add_argument(
        "--strict", action="store_true", default=None, help="fail if any unit failed; refuse a model that needs more than is made here"
    )
    how.add_argument("--max-failures", metavar="N|P%", help="how many units may fail (default: 0)")
    output = parser.add_argument_group("output")
    output.add_argument("--plan-only", action="store_true", help="look at everything, say what would be done, and stop")
    output.add_argument("--json", action="store_true", help="print one JSON object")
    output.add_argument("--quiet", action="store_true", help="print nothing but the result: counts, failures, and where it is")


def _add_pictures(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("pictures")
    group.add_argument("--resolution", metavar="R[,R]", help="area R*R in aspect buckets; each sample at each of several (default: 1024)")
    group.add_argument("--bucket-step", type=int, metavar="N", help="sides of buckets are multiples of N pixels (default: 64)")
    group.add_argument("--no-upscale", action="store_true", default=None, help="small pictures go to smaller buckets, not scaled up")
    group.add_argument("--crop", choices=("center", "random"), help="what is kept of what sticks out of a bucket")
    group.add_argument("--variants", type=int, metavar="N", help="random crops of each picture (default: 1)")
    group.add_argument("--crop-seed", type=int, metavar="N", help="of random crops (default: 0)")
    group.add_argument("--flip", action="store_true", default=None, help="make each picture mirrored, too")
    videos = parser.add_argument_group("videos")
    videos.add_argument(
        "--frames", metavar="F[,F]", help="counts of frames: each video gets the largest that it can fill; without any none is encoded"
    )
    videos.add_argument("--fps", metavar="R", type=float, help="frames a second to take (default: the file's own frames)")
    videos.add_argument("--clips", metavar="N", type=int, help="parts of each video, evenly spread (default: 1, its beginning)")


def run(arguments: argparse.Namespace) -> int:
    """Encode, and print the report: 0 complete, 2 for arguments that are malformed in themselves, 3 with failures."""
    from cachestore.jobs.processes import LISTING, watch_parent

    is_child = watch_parent(os.environ)
    try:
        request = request_from(arguments)
        count = _process_count(request)
    except BadInput as error:
        print_error(error, as_json=arguments.json)
        return USAGE
    say = _silence if arguments.quiet else to_stderr
    if arguments.plan_only:
        _print_forecast(arguments, request)
        return OK
    resumes = None if is_child else request  # the parent says it, once for all ranks
    with _stopping(say, resumes, is_parent=count > 1) as stop:
        if count > 1:
            report = _run_children(arguments, request, count)
        else:
            number = os.environ.pop(LISTING, "") if is_child else ""
            report = _run_here(arguments, request, say, stop, int(number) if number.isdecimal() else None)
    if not _speaks(request):
        return OK if report.complete else FAILURES
    if arguments.json:
        print_json(report.as_json())
    else:
        _print_report(report, None if arguments.quiet else request)
    return OK if report.complete else FAILURES


def _run_here(arguments: argparse.Namespace, request: "PrecomputeRequest", say: "Say", stop: "_Stop", number: int | None) -> "Report":
    from cachestore.cli.progress import Bar
    from cachestore.jobs.precompute import precompute_here

    bar = Bar(Path(request.store), is_shown=not arguments.quiet and _speaks(request))
    try:
        return precompute_here(request, say=say, cancel=stop, on_progress=bar.look, number=number)
    finally:
        bar.end()


def _run_children(arguments: argparse.Namespace, request: "PrecomputeRequest", count: int) -> "Report":
    """Start ranks and wait for them: the first one draws the bar on our own terminal, and words of this process are about the others."""
    from dataclasses import replace

    from cachestore.files.paths import Layout
    from cachestore.jobs.pass_loop import Report
    from cachestore.jobs.precompute import handed_on, open_for_pass
    from cachestore.jobs.processes import Care, joined_report, run_children
    from cachestore.work.progress import Observer

    quiet = ["--quiet"] if arguments.quiet else []
    care = Care(Observer(Layout.at(request.store)).look_at, warn=to_stderr, words="inherited")
    store = handed_on(open_for_pass(request.store))
    children = run_children([*replace(request, procs=None).arguments(), *quiet], count, care, store)
    return Report.from_json(joined_report(children, warn=to_stderr))


def _speaks(request: "PrecomputeRequest") -> bool:
    """Whether this process prints the result: under a foreign launcher only rank 0, so that stdout holds one object."""
    from cachestore.jobs.precompute import find_placement

    placement = find_placement(request.rank, request.world_size)
    return placement.rank in (0, None) or placement.found_in in {"arguments", "cachestore"}


def request_from(arguments: argparse.Namespace) -> "PrecomputeRequest":
    """The request in parsed arguments. Raises BadInput for a malformed one."""
    from dataclasses import fields

    from cachestore.jobs.planning import PrecomputeRequest

    given = {one.name: getattr(arguments, one.name) for one in fields(PrecomputeRequest)}
    values = {name: value for name, value in given.items() if value not in (None, [])}
    sources = _sources(arguments)
    if arguments.config is not None:
        from cachestore.cli.config import read_config

        values = read_config(arguments.config) | values
        sources = sources or values.get("sources", ())
    for name in ("model", "store"):
        if not values.get(name):
            raise BadInput(f"--{name} is missing" + (f", on the command line and in {arguments.config}" if arguments.config else ""))
    if not sources:
        raise BadInput("DATA is missing: a path, or several, or --config with a [[source]] table for each")
    is_one_path = len(sources) == 1 and sources[0] == type(sources[0])(sources[0].data)
    values |= {"data": sources[0].data, "sources": ()} if is_one_path else {"data": "", "sources": tuple(sources)}
    request = PrecomputeRequest(**{name: _parsed(name, value) for name, value in values.items()})
    request.check()
    return request


def _numbers(name: str, given: object) -> int | tuple[int, ...]:
    """One number, or several with commas between, or a list; of frames several even if it is one. Raises BadInput for anything else."""
    text = ",".join(map(str, cast("list[object]", given))) if isinstance(given, list) else str(given)
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        what = "pixels" if name == "resolution" else "frames"
        raise BadInput(f"--{name} is a number of {what} from 1 on, or several with commas between, not {text!r}")
    found = tuple(map(int, parts))
    return found[0] if name == "resolution" and len(found) == 1 else found


def _sources(arguments: argparse.Namespace) -> "Sequence[Source]":
    """The sources in the arguments; none where there are none. Raises BadInput."""
    from cachestore.core.samples import Source

    if arguments.sources is None:
        return [Source(data) for data in arguments.data]
    if arguments.data:
        raise BadInput(f"DATA ({arguments.data[0]}) and --sources say the same: give one of them")
    try:
        return [Source(**source) for source in json.loads(arguments.sources)]
    except (TypeError, ValueError) as error:
        raise BadInput(
            f'--sources is a list of objects with the fields of cs.Source, such as [{{"data": PATH, "repeats": 2}}]: {error}'
        ) from error


def _parsed(name: str, given: object) -> Any:
    """The value of a field, from what the command line or a file gives. Raises BadInput."""
    value: Any = given
    match name:
        case "encode":
            return tuple(one.strip() for one in value.split(",") if one.strip())
        case "captions":
            return _captions(value)
        case "encode_arg":
            return dict(_pair(text) for text in value) if isinstance(given, list) else dict(value)
        case "batch_size" if value != "auto":
            if not value.isdecimal() or int(value) < 1:
                raise BadInput(f"--batch-size is auto or a number from 1 on, not {value!r}")
            return int(value)
        case "resolution" | "frames":
            return _numbers(name, given)
        case _:
            return value


def _captions(text: "str | Mapping[str, Any]") -> "str | CaptionPolicy":
    """first, all or random as they are, or the policy that a JSON object says. Raises BadInput for anything else."""
    from cachestore.core.captions import CHOICES, CaptionPolicy

    if isinstance(text, str) and text in CHOICES:
        return text
    try:
        return CaptionPolicy.parse(json.loads(text) if isinstance(text, str) else text)
    except ValueError as error:
        raise BadInput(f"--captions is first, all, or a CaptionPolicy as a JSON object, not {text!r} ({error})") from error


def _pair(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise BadInput(f"--encode-arg is NAME=VALUE, not {text!r}")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _process_count(request: "PrecomputeRequest") -> int:
    """How many processes to start. Raises BadInput for numbers that are none or do not fit each other, before anything is looked at."""
    from cachestore.jobs.precompute import allowed_failures, find_placement, process_count

    allowed_failures(request.max_failures, 0)
    find_placement(request.rank, request.world_size)
    if request.workers is not None and request.workers < 0:
        raise BadInput(f"--workers is a number of threads from 0 on, not {request.workers}")
    return process_count(request)


class _Stop:
    """Set by SIGINT or SIGTERM; the work then ends after the present batch, with everything encoded published."""

    def __init__(self) -> None:
        self.signal: int | None = None

    def is_set(self) -> bool:
        """Whether to stop."""
        return self.signal is not None


@contextmanager
def _stopping(say: "Say", resumes: "PrecomputeRequest | None", *, is_parent: bool) -> Generator[_Stop]:
    """Turn the first SIGINT or SIGTERM into a request to stop, and leave with 130 or 143 and the command that goes on from there.

    `resumes` is the request to say for that; None where somebody else says it.
    """
    stop = _Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def handle(number: int, frame: object) -> None:
        del frame
        # Ctrl-C reaches the ranks too, and then their parent's SIGTERM: only a second Ctrl-C means "at once".
        is_repeated = stop.signal is not None
        stop.signal = stop.signal or number
        if is_parent or (is_repeated and number == signal.SIGINT):
            raise KeyboardInterrupt
        if is_repeated:
            return
        say("stopping after the present batch …")

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    except (KeyboardInterrupt, Incomplete):
        if stop.signal is None:
            raise
        _say_how_to_go_on(resumes)
        raise SystemExit(128 + stop.signal) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _say_how_to_go_on(request: "PrecomputeRequest | None") -> None:
    if request is None:
        return
    program = "cachestore" if sys.argv[0].endswith("cachestore") else "python -m cachestore"
    to_stderr(f"cachestore: stopped; what is encoded is published. Go on with: {program} {shlex.join(request.arguments())}")


def to_stderr(line: str) -> None:
    """A line for a person. One that nobody can read any more is no reason to fail: a handler of signals says some in the middle of work."""
    with suppress(OSError, ValueError):
        print(printable(line), file=sys.stderr, flush=True)


def _silence(line: str) -> None:
    del line


def _look_ahead(request: "PrecomputeRequest") -> "Forecast":
    """Look ahead in the store, or where there is none yet in an empty one elsewhere: who only asks finds nothing made."""
    from dataclasses import replace

    from cachestore.jobs.precompute import look_ahead

    place = Path(request.store).absolute()
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        return look_ahead(request)
    there = next(folder for folder in (place, *place.parents) if folder.exists())
    with tempfile.TemporaryDirectory(prefix="cachestore-") as scratch:
        return replace(look_ahead(replace(request, store=scratch)), free_bytes=shutil.disk_usage(there).free)


def _print_forecast(arguments: argparse.Namespace, request: "PrecomputeRequest") -> None:
    from cachestore.jobs.forecast import in_words

    forecast = _look_ahead(request)
    if arguments.json:
        print_json(forecast.as_json())
        return
    for line in in_words(forecast, Path(request.store)):
        print(printable(line))


def _print_report(report: "Report", request: "PrecomputeRequest | None") -> None:
    """The result for a person: counts, each failure, and the lines of Python that train as `request` has it; without one none of these."""
    from cachestore.cli.lines import training_lines
    from cachestore.encode.needs import in_words as not_made
    from cachestore.work.stages import stages_in_words

    counts = f"{report.wanted} units: {report.reused} reused, {report.encoded} encoded, {report.failed} failed, {report.missing} missing"
    usable = "" if report.usable is None else f", {report.usable} of them complete and ready to train on"
    print(f"{counts}; {report.samples} samples{usable}; {human_bytes(report.bytes)} new, {report.seconds:.1f} s")
    if report.stages:
        print(printable(stages_in_words(report.stages)))
    for failure in report.failures:
        print(printable(f"failed: {_shown(failure)}"))
    print(printable(f"data set {report.name!r} generation {report.generation} in {report.store}"))
    if report.not_made_here:
        print(printable(not_made(report.not_made_here)))
    if report.samples and request is not None:
        lines = training_lines(report, captions=request.policy, sources=request.sources)
        print(printable("\nto train from it:\n\n" + "\n".join(f"    {line}" for line in lines)))


def _shown(failure: Mapping[str, Any]) -> str:
    return f"{failure['sample'] or '(the empty caption)'} ({failure['encoder']}): {failure['reason']}"
