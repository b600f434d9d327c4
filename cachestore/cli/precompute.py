"""`cachestore precompute`: encode a data set into a store, on any number of ranks."""

import argparse
import json
import os
import shlex
import signal
import sys
import threading
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cachestore.cli import FAILURES, OK, human_bytes, print_json, printable
from cachestore.errors import BadInput, Incomplete

if TYPE_CHECKING:
    from cachestore.forecast import Forecast
    from cachestore.request import PrecomputeRequest
    from cachestore.run import Report, Say

HELP = "encode captions and images into a store"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments; their names are those of PrecomputeRequest."""
    parser.add_argument("data", metavar="DATA", help="a folder of images, a manifest .jsonl, or a list of prompts .txt")
    parser.add_argument(
        "--model", required=True, help="a diffusers folder or hub id, or a transformers text encoder; the denoiser is never read"
    )
    parser.add_argument("--store", required=True, help="the store's folder; made if it does not exist")
    what = parser.add_argument_group("what")
    what.add_argument("--encode", default="text,latents", metavar="LIST", help="text, latents or both (default: text,latents)")
    what.add_argument("--resolution", type=int, default=1024, metavar="R", help="area R*R in aspect buckets (default: 1024)")
    what.add_argument("--name", default="train", help="the data set's name (default: train)")
    what.add_argument("--captions", choices=("first", "all"), default="first", help="of a sample with several captions (default: first)")
    what.add_argument(
        "--caption-lines", choices=("whole", "each", "first"), default="whole", help="how a caption file is read (default: whole)"
    )
    what.add_argument("--caption", metavar="TEXT", help="for samples without one (default: the empty caption, with a warning)")
    what.add_argument(
        "--replace", action="store_true", help="let this source, model or resolution take the place of the name's earlier one"
    )
    model = parser.add_argument_group("model")
    model.add_argument("--vae", metavar="PATH", help="take the VAE from here")
    model.add_argument("--text-encoder", metavar="PATH", help="take the text encoder from here")
    model.add_argument("--revision", metavar="R", help="of a hub model")
    model.add_argument("--variant", metavar="V", help="of the weights, such as fp16")
    model.add_argument(
        "--encode-arg", action="append", default=[], metavar="NAME=VALUE", help="an argument for encode_prompt; VALUE is JSON or text"
    )
    model.add_argument("--text-dtype", default="auto", metavar="D", help="float32, bfloat16 or float16 (default: by family)")
    model.add_argument("--vae-dtype", default="auto", metavar="D", help="float32, bfloat16 or float16 (default: by family)")
    model.add_argument(
        "--latents", choices=("moments", "mean", "sample"), default="moments", help="what is kept of the posterior (default: moments)"
    )
    how = parser.add_argument_group("how")
    how.add_argument("--procs", type=int, metavar="N", help="start N local ranks (default: one for each GPU, else 1)")
    how.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:i (default: auto)")
    how.add_argument("--batch-size", default="auto", metavar="N", help="auto or a number (default: auto)")
    how.add_argument("--workers", type=int, metavar="N", help="threads that read and decode (default: by processors)")
    how.add_argument("--rank", type=int, metavar="R", help="this process's rank, where no launcher says it")
    how.add_argument("--world-size", type=int, metavar="W", help="the number of ranks, with --rank")
    how.add_argument("--strict", action="store_true", help="fail if any unit failed")
    how.add_argument("--max-failures", default="0", metavar="N|P%", help="how many units may fail (default: 0)")
    output = parser.add_argument_group("output")
    output.add_argument("--plan-only", action="store_true", help="look at everything, say what would be done, and stop")
    output.add_argument("--json", action="store_true", help="print one JSON object")
    output.add_argument("--quiet", action="store_true", help="print nothing but the result")


def run(arguments: argparse.Namespace) -> int:
    """Encode, and print the report: 0 complete, 3 with failures."""
    from cachestore.run import look_ahead, precompute_here

    request = request_from(arguments)
    say = _silence if arguments.quiet else _to_stderr
    if arguments.plan_only:
        _print_forecast(arguments, request, look_ahead(request))
        return OK
    count = _process_count(request)
    with _stopping(say, request, is_parent=count > 1) as stop:
        if count > 1:
            report = _run_children(request, count, ["--quiet"] if arguments.quiet else [])
        else:
            from cachestore.cli.progress import Bar

            bar = Bar(Path(request.store), is_shown=not arguments.quiet)
            report = precompute_here(request, say=say, cancel=stop, on_progress=bar.look)
            bar.end()
    if not _speaks(request):
        return OK if report.complete else FAILURES
    if arguments.json:
        print_json(report.as_json())
    else:
        _print_report(report)
    return OK if report.complete else FAILURES


def _speaks(request: "PrecomputeRequest") -> bool:
    """Whether this process prints the result: under a foreign launcher only rank 0, so that stdout holds one object."""
    from cachestore.run import find_placement

    placement = find_placement(request.rank, request.world_size)
    return placement.rank in (0, None) or placement.found_in in {"arguments", "cachestore"}


def request_from(arguments: argparse.Namespace) -> "PrecomputeRequest":
    """The request in parsed arguments. Raises BadInput for a malformed one."""
    from dataclasses import fields

    from cachestore.request import PrecomputeRequest

    values: dict[str, Any] = {one.name: getattr(arguments, one.name) for one in fields(PrecomputeRequest)}
    values["encode"] = tuple(name.strip() for name in arguments.encode.split(",") if name.strip())
    values["encode_arg"] = dict(_pair(text) for text in arguments.encode_arg)
    if arguments.batch_size != "auto":
        if not arguments.batch_size.isdecimal() or int(arguments.batch_size) < 1:
            message = f"--batch-size is auto or a number from 1 on, not {arguments.batch_size!r}"
            raise BadInput(message)
        values["batch_size"] = int(arguments.batch_size)
    if arguments.resolution < 1:
        message = f"--resolution is a number of pixels from 1 on, not {arguments.resolution}"
        raise BadInput(message)
    return PrecomputeRequest(**values)


def _pair(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        message = f"--encode-arg is NAME=VALUE, not {text!r}"
        raise BadInput(message)
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _process_count(request: "PrecomputeRequest") -> int:
    """How many processes to start: as asked, else one for each GPU, and none beside those of a launcher."""
    from cachestore.run import find_placement

    if request.procs is not None:
        if request.procs < 1 or (request.procs > 1 and request.rank is not None):
            message = f"--procs starts local ranks, from 1 on, and does not go with --rank; got {request.procs}"
            raise BadInput(message)
        return request.procs
    is_launched = request.rank is not None or find_placement(None, None).found_in != "single process"
    return 1 if is_launched or request.device != "auto" else max(1, _gpu_count())


def _gpu_count() -> int:
    """NVIDIA GPUs that a process started here may use, without loading torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([one for one in visible.split(",") if one.strip() and one.strip() != "-1"])
    folder = Path("/proc/driver/nvidia/gpus")
    return len(list(folder.iterdir())) if folder.is_dir() else 0


def _run_children(request: "PrecomputeRequest", count: int, more: list[str]) -> "Report":
    from dataclasses import replace

    from cachestore.processes import joined_report, run_children
    from cachestore.run import Report

    return Report.from_json(joined_report(run_children([*replace(request, procs=None).arguments(), *more], count)))


class _Stop:
    """Set by SIGINT or SIGTERM; the work then ends after the present batch, with everything encoded published."""

    def __init__(self) -> None:
        self.signal: int | None = None

    def is_set(self) -> bool:
        """Whether to stop."""
        return self.signal is not None


@contextmanager
def _stopping(say: "Say", request: "PrecomputeRequest", *, is_parent: bool) -> Generator[_Stop]:
    """Turn the first SIGINT or SIGTERM into a request to stop, and leave with 130 or 143 and the command that goes on from there."""
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
        _say_how_to_go_on(request)
        raise SystemExit(128 + stop.signal) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _say_how_to_go_on(request: "PrecomputeRequest") -> None:
    if os.environ.get("CACHESTORE_LAUNCH", "").startswith("procs:"):
        return  # the parent says it, once for all ranks
    program = "cachestore" if sys.argv[0].endswith("cachestore") else "python -m cachestore"
    print(f"cachestore: stopped; what is encoded is published. Go on with: {program} {shlex.join(request.arguments())}", file=sys.stderr)


def _to_stderr(line: str) -> None:
    print(printable(line), file=sys.stderr, flush=True)


def _silence(line: str) -> None:
    del line


def _print_forecast(arguments: argparse.Namespace, request: "PrecomputeRequest", forecast: "Forecast") -> None:
    from cachestore.forecast import in_words

    if arguments.json:
        print_json(forecast.as_json())
        return
    for line in in_words(forecast, Path(request.store)):
        print(printable(line))


def _print_report(report: "Report") -> None:
    """The result for a person: counts, each failure, and the lines of Python that train from this store."""
    from cachestore.cli.lines import training_lines

    counts = f"{report.wanted} units: {report.reused} reused, {report.encoded} encoded, {report.failed} failed, {report.missing} missing"
    print(f"{counts}; {report.samples} samples, {human_bytes(report.bytes)} new, {report.seconds:.1f} s")
    for failure in report.failures:
        print(printable(f"failed: {_shown(failure)}"))
    print(printable(f"data set {report.name!r} generation {report.generation} in {report.store}"))
    if report.samples:
        print("\nto train from it:\n\n" + "\n".join(f"    {line}" for line in training_lines(report)))


def _shown(failure: Mapping[str, Any]) -> str:
    return f"{failure['sample'] or '(the empty caption)'} ({failure['encoder']}): {failure['reason']}"
