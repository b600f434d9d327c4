"""`cachestore repair`: make a store consistent; with `--refill` also complete."""

import argparse
from pathlib import Path

from cachestore.cli import DAMAGE, PROGRESS, PROGRESS_HELP, add_moved, add_store, options_of, source_of, tell
from cachestore.cli.data_sets import add_name
from cachestore.core.words import plural

HELP = "save the good entries of damaged files, move these files aside and rebuild the index; with --refill also encode lost entries again"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_store(parser)
    parser.add_argument("--dry-run", action="store_true", help="show what would be done, and change nothing")
    parser.add_argument("--refill", action="store_true", help="encode entries again that have no valid copy")
    add_name(parser, "with --refill: only what this data set lacks (default: all)")
    add_moved(parser.add_argument, "with --refill: ")
    parser.add_argument("--progress", choices=PROGRESS, default="auto", help=f"with --refill: {PROGRESS_HELP}")


def run(arguments: argparse.Namespace) -> int:
    """Print what was done, or would be. Returns 4 if an entry, changes or a data set's newest catalog are missing."""
    from cachestore.care.repair import repair
    from cachestore.cli.terminal.progress import Progress, style_for
    from cachestore.cli.terminal.stopping import silence, stopping

    given = options_of(arguments, source=source_of(arguments.source))
    store, asked = given.pop("store"), given.pop("progress")
    with (
        stopping(silence, arguments.line) as stop,
        Progress(
            Path(store), style_for(asked) if arguments.refill else "none", "looking for what is lost", result_lists_failures=False
        ) as progress,
    ):
        report = repair(store, **given, on_progress=progress.follow, cancel=stop)
    would = "would be " if report.dry_run else ""
    with_refill = f"{plural(report.refilled, 'entry')} encoded again, {report.missing} still missing"
    lines = [
        f"{plural(report.salvaged, 'entry')} {would}salvaged, {plural(len(report.quarantined), 'file')} {would}quarantined",
        f"without --refill {report.missing} would still be missing" if report.dry_run else with_refill,
        *(f"{name} {would}rebuilt" for name in report.rebuilt),
        *(f"lost: {one}" for one in report.lost),
        *(f"{finding.kind}: {finding.message}" for finding in report.findings),
    ]
    is_ok = not report.missing and not report.lost and all(finding.kind != "bad-catalog" for finding in report.findings)
    return tell(arguments, report.as_json(), lines, is_ok=is_ok, otherwise=DAMAGE)
