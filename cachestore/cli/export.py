"""`cachestore export`: write a data set as another trainer caches it."""

import argparse

from cachestore.cli import FAILURES, add_store, options_of, tell, words_of
from cachestore.core.words import first_of, human_bytes

HELP = "write a data set as another trainer's cache"
_SHOWN = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_store(parser)
    parser.add_argument("name", metavar="NAME", nargs="?", default="train", help="the data set's name (default train)")
    parser.add_argument("--format", metavar="FORMAT", required=True, help="sd-scripts, simpletuner, musubi or ai-toolkit")
    output = "where to, made if it does not exist; of sd-scripts and ai-toolkit also DATA itself"
    parser.add_argument("-o", "--output", dest="folder", metavar="FOLDER", required=True, help=output)
    parser.add_argument("--generation", metavar="N", type=int, help="of the data set (default the newest)")
    parser.add_argument("--family", metavar="FAMILY", help="such as flux, where the data set does not tell it")
    parser.add_argument("--resolution-only", metavar="R", type=int, help="of several resolutions this one alone")
    parser.add_argument("--variant-only", metavar="N", type=int, help="of several random crops of each picture this one, from 0 on")
    left_out = "flips, masks or both: not written although there are some"
    parser.add_argument("--leave-out", metavar="LIST", type=words_of, default=(), help=left_out)
    parser.add_argument("--replace", action="store_true", help="overwrite files that are not an earlier export's")


def run(arguments: argparse.Namespace) -> int:
    """Print what was written; 3 if something could not be, would have overwritten a stranger's file, or is not what the trainer takes."""
    from cachestore.interop.exporting import export_cache

    report = export_cache(**options_of(arguments))
    lines = [f"{failure['encoder']} of {failure['sample']!r}: {failure['reason']}" for failure in report.failures]
    if report.foreign:
        foreign = f"{len(report.foreign)} files are there with other bytes and are not an earlier export's (--replace)"
        lines += [f"{foreign}: {first_of(report.foreign, _SHOWN)}"]
    lines += [f"not bit for bit as stored: {cast}" for cast in report.casts]
    lines += [f"not taken: {what}" for what in report.not_taken]
    lines += [f"note: {remark}" for remark in report.remarks]
    lines += [f"not in the files: {what}" for what in report.left_out]
    counts = f"{report.written} files written ({human_bytes(report.bytes)}), {report.unchanged} were there"
    lines += [f"{report.name!r}, generation {report.generation}, to {report.folder}: {counts}"]
    return tell(arguments, report.as_json(), lines, is_ok=report.complete, otherwise=FAILURES)
