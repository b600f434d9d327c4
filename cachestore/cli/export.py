"""`cachestore export`: write a data set as another trainer's cache."""

import argparse

from cachestore.cli import FAILURES, add_store, failed_values, options_of, tell, words_of
from cachestore.core.words import first_of, human_bytes, plural

HELP = "write a data set as another trainer's cache, or as tars"
_MAX_LISTED = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_store(parser)
    parser.add_argument("name", metavar="NAME", nargs="?", default="train", help="the data set's name (default train)")
    parser.add_argument(
        "--format",
        metavar="FORMAT",
        required=True,
        help="sd-scripts, simpletuner, musubi, ai-toolkit or ltx; or webdataset, which writes the whole data set as tars",
    )
    output = "the folder to write to, made if it does not exist; for sd-scripts and ai-toolkit it can be the folder of the pictures"
    parser.add_argument("-o", "--output", dest="folder", metavar="FOLDER", required=True, help=output)
    parser.add_argument("--generation", metavar="N", type=int, help="generation of the data set (default: the newest)")
    parser.add_argument("--family", metavar="FAMILY", help="the model family, such as flux, if the data set does not say it")
    parser.add_argument("--resolution-only", metavar="R", type=int, help="export only this one of several resolutions")
    parser.add_argument(
        "--variant-only", metavar="N", type=int, help="export only this one of several random crops of each picture, counted from 0"
    )
    left_out = "flips, masks or both: export the rest without them"
    parser.add_argument("--leave-out", metavar="LIST", type=words_of, default=(), help=left_out)
    parser.add_argument(
        "--replace", action="store_true", help="also overwrite files that no earlier export wrote (otherwise they are kept and listed)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print what was written. Returns 3 if something failed, exists with other contents, or cannot be used by the trainer."""
    from cachestore.interop.exporting import export_cache

    report = export_cache(**options_of(arguments))
    lines = failed_values(report.failures)
    if report.foreign:
        foreign = f"{plural(len(report.foreign), 'file')} with other contents kept, not written by an export (--replace overwrites)"
        lines += [f"{foreign}: {first_of(report.foreign, _MAX_LISTED)}"]
    lines += [f"not bit-identical to the store: {cast}" for cast in report.casts]
    lines += [f"the trainer cannot use all of it: {what}" for what in report.not_taken]
    lines += [f"note: {remark}" for remark in report.remarks]
    lines += [f"not exported: {what}" for what in report.left_out]
    counts = f"{plural(report.written, 'file')} written ({human_bytes(report.bytes)}), {report.unchanged} were already there"
    lines += [f"{report.name!r}, generation {report.generation}, to {report.folder}: {counts}"]
    return tell(arguments, report.as_json(), lines, is_ok=report.complete, otherwise=FAILURES)
