"""`cachestore verify`: find damage, change nothing."""

import argparse

from cachestore.cli import DAMAGE, OK, add_store, human_bytes, print_json, printable
from cachestore.errors import BadInput

HELP = "check a store and change nothing"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_store(parser)
    level = parser.add_mutually_exclusive_group()
    level.add_argument("--full", action="store_true", help="read every byte (the default)")
    level.add_argument("--quick", action="store_true", help="names, sizes, headers, index and catalogs only")
    level.add_argument("--subset", metavar="N/T", help="read the N-th of T parts of the segments")


def run(arguments: argparse.Namespace) -> int:
    """Print the findings; 4 if there is damage."""
    from cachestore.storage.verify import HARMLESS, verify

    report = verify(arguments.store, "quick" if arguments.quick else "full", subset=_subset(arguments.subset))
    if arguments.json:
        print_json(report.as_json())
    else:
        for finding in report.findings:
            about = f" (sample {finding.sample!r})" if finding.sample else ""
            print(printable(f"{'note' if finding.kind in HARMLESS else finding.kind}: {finding.message}{about}"))
        rate = f", {human_bytes(report.bytes / report.seconds)}/s" if report.seconds and report.level == "full" else ""
        counts = f"{report.entries} entries in {report.segments} segments, {human_bytes(report.bytes)}{rate} ({report.level})"
        print(f"{'ok' if report.ok else 'DAMAGED'}: {counts}")
    return OK if report.ok else DAMAGE


def _subset(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    part, _, parts = text.partition("/")
    if not (part.isdecimal() and parts.isdecimal() and 1 <= int(part) <= int(parts)):
        message = f"--subset is N/T with 1 <= N <= T, not {text!r}"
        raise BadInput(message)
    return int(part), int(parts)
