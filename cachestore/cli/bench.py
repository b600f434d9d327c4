"""`cachestore bench`: how many pictures and captions this machine encodes in a second."""

import argparse
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from cachestore.cli import tell

if TYPE_CHECKING:
    from cachestore.care.bench import BenchReport, Row

HELP = "measure how many pictures and captions this machine encodes in a second, and what limits it"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "--model",
        metavar="MODEL",
        help="as for precompute (default: a model with random weights: of FLUX.1's size if a GPU has 24 GiB free, else tiny)",
    )
    parser.add_argument("--device", metavar="DEVICE", default="auto", help="auto, cpu, cuda, cuda:N (default: auto)")
    parser.add_argument(
        "--resample",
        metavar="WAY",
        help="how to resize, as for precompute: lanczos, area, bicubic, bilinear, cv2-linear or pillow (default: lanczos)",
    )
    parser.add_argument(
        "--host-only",
        action="store_true",
        help="measure only the processors and the disk: an encoder that takes no time replaces the model",
    )
    parser.add_argument(
        "--folder", metavar="FOLDER", help="the folder for temporary files (up to 2 GiB), on the disk to measure (default: TMPDIR)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Print the rates."""
    from dataclasses import fields
    from pathlib import Path

    from cachestore.care.bench import bench
    from cachestore.cli.terminal.stopping import stopping, to_stderr
    from cachestore.core.errors import BadInput, BadUsage
    from cachestore.encode.families.resamplers import DEFAULT
    from cachestore.jobs.plan.options import PrecomputeRequest, parse_value

    by_name = {one.name: one for one in fields(PrecomputeRequest)}
    try:
        device = parse_value(by_name["device"], arguments.device, "--device")
        resample = parse_value(by_name["resample"], arguments.resample or DEFAULT, "--resample")
    except BadInput as error:
        raise BadUsage(str(error)) from error
    if arguments.host_only and arguments.model is not None:
        raise BadUsage("--host-only measures without a model: leave out --model or --host-only")
    if arguments.folder is not None and not Path(arguments.folder).is_dir():
        raise BadUsage(f"--folder {arguments.folder} is not a folder: make it, or give another one")
    folder = None if arguments.folder is None else Path(arguments.folder)
    with stopping(to_stderr, ()) as stop:
        found = bench(
            arguments.model,
            device=device,
            host_only=arguments.host_only,
            folder=folder,
            say=to_stderr,
            cancel=stop,
            resample=resample,
        )
    return tell(arguments, found.as_json(), _lines(found))


def _lines(found: "BenchReport") -> Iterator[str]:
    from cachestore.core.words import human_bytes

    yield f"host, {found.host[0].cores} cores, with an encoder that costs nothing:"
    yield from _rates(found.host)
    if found.whole:
        yield f"model: {found.model}, on {found.device}"
        yield "encoder alone:"
        yield from _rates(found.encoder)
        yield "whole:"
        yield from _rates(found.whole)
    yield from found.remarks
    yield f"bottleneck: {found.limiting}"
    yield f"a million such samples: {found.million['hours']:.1f} hours, {human_bytes(found.million['bytes'])}"


def _rates(rows: "Sequence[Row]") -> Iterator[str]:
    for row in rows:
        yield f"  {row.work:<30} {row.per_second:>9.1f} /s{f'   {row.limiting} limits' if row.limiting else ''}"
