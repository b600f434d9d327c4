"""`cachestore export`: write a data set as another trainer caches it."""

import argparse

from cachestore.cli import FAILURES, OK, add_store, print_json, printable
from cachestore.core.words import first_of, human_bytes

HELP = "write a data set as another trainer's cache"
_SHOWN = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_store(parser)
    parser.add_argument("name", metavar="NAME", nargs="?", default="train", help="the data set's name (default train)")
    parser.add_argument("--format", metavar="FORMAT", required=True, help="sd-scripts, simpletuner, musubi or ai-toolkit")
    parser.add_argument(
        "-o",
        "--output",
        metavar="FOLDER",
        required=True,
        help="where to, made if it does not exist; of sd-scripts and ai-toolkit also DATA itself",
    )
    parser.add_argument("--generation", metavar="N", type=int, help="of the data set (default the newest)")
    parser.add_argument("--family", metavar="FAMILY", help="such as flux, where the data set does not tell it")
    parser.add_argument("--resolution-only", metavar="R", type=int, help="of several resolutions this one alone")
    parser.add_argument("--variant-only", metavar="N", type=int, help="of several random crops of each picture this one, from 0 on")
    parser.add_argument(
        "--leave-out", metavar="LIST", type=_names, default=(), help="flips, masks or both: not written although there are some"
    )
    parser.add_argument("--replace", action="store_true", help="overwrite files that are not an earlier export's")


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def run(arguments: argparse.Namespace) -> int:
    """Print what was written; 3 if something could not be, would have overwritten a stranger's file, or is not what the trainer takes."""
    from cachestore.interop.exporting import export_cache

    report = export_cache(
        arguments.store,
        arguments.name,
        format=arguments.format,
        folder=arguments.output,
        generation=arguments.generation,
        family=arguments.family,
        resolution_only=arguments.resolution_only,
        variant_only=arguments.variant_only,
        leave_out=arguments.leave_out,
        replace=arguments.replace,
    )
    if arguments.json:
        print_json(report.as_json())
        return OK if report.complete else FAILURES
    for failure in report.failures:
        print(printable(f"{failure['encoder']} of {failure['sample']!r}: {failure['reason']}"))
    if report.foreign:
        named = first_of(report.foreign, _SHOWN)
        print(printable(f"{len(report.foreign)} files are there with other bytes and are not an earlier export's (--replace): {named}"))
    for cast in report.casts:
        print(printable(f"not bit for bit as stored: {cast}"))
    for what in report.not_taken:
        print(printable(f"not taken: {what}"))
    for remark in report.remarks:
        print(printable(f"note: {remark}"))
    for what in report.left_out:
        print(printable(f"not in the files: {what}"))
    counts = f"{report.written} files written ({human_bytes(report.bytes)}), {report.unchanged} were there"
    print(printable(f"{report.name!r}, generation {report.generation}, to {report.folder}: {counts}"))
    return OK if report.complete else FAILURES
