"""`cachestore gc`: remove in two steps what no data set needs."""

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING

from cachestore.cli import add_store, positive, tell
from cachestore.cli.data_sets import add_name
from cachestore.core.words import human_bytes, plural

if TYPE_CHECKING:
    from cachestore.care.collect import Amount, GcReport

HELP = (
    "list files that no data set needs and change nothing; with --apply, mark them, and remove those that were marked a day ago or earlier"
)


_SHOWN = 40
"""So many names of removed files are printed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_store(parser)
    parser.add_argument(
        "--apply",
        action="store_true",
        help="remove generations that are not kept; mark the listed files, and remove those that were marked a day ago or earlier",
    )
    parser.add_argument("--grace", metavar="HOURS", type=_hours, default=24.0, help="how long marked files stay readable (default 24)")
    kept = "how many generations of each data set to keep (default: the newest three, and all of the last 30 days)"
    parser.add_argument("--keep", metavar="N", type=positive, help=kept)
    add_name(parser, "with --keep: only this data set's generations (default: all)")


def run(arguments: argparse.Namespace) -> int:
    """Print what was removed, or would be."""
    from cachestore.care.collect import collect

    grace = arguments.grace
    report = collect(arguments.store, apply=arguments.apply, grace_seconds=grace * 3600, keep=arguments.keep, name=arguments.name)
    return tell(arguments, report.as_json(), _in_words(report, grace, Path(arguments.store).absolute()))


def _in_words(report: "GcReport", hours: float, store: Path) -> list[str]:
    would = "" if report.applied else "would be "
    lines = [f"{_amount(report.removed)} {would}removed" + (f", {report.copied} still needed {would}copied first" * bool(report.copied))]
    lines.append(f"{_amount(report.condemned)} {would}marked for deletion: readable for {hours:g} h, then a later run removes them")
    if report.waiting.segments:
        since = "" if report.removable_from is None else f"; they can be removed from {_moment(report.removable_from)} on"
        lines.append(f"{_amount(report.waiting)} marked earlier and not removed yet{since}")
    if report.partly.segments:
        loose = f"{report.partly.entries} unreferenced entries ({human_bytes(report.partly.bytes)})"
        lines.append(f"{plural(report.partly.segments, 'segment contains', 'segments contain')} {loose}: run `cachestore compact`")
    if older := {name: count for name, count in report.generations.items() if count > 1}:
        names = ", ".join(f"{count} of {name!r}" for name, count in older.items())
        freed = f"`--keep 1` frees {human_bytes(report.held.bytes + report.held_catalog_bytes)}"
        more = f", and `cachestore compact` after it {human_bytes(report.held_partly.bytes)}" if report.held_partly.bytes else ""
        lines.append(f"{plural(sum(older.values()), 'generation is', 'generations are')} kept ({names}): {freed}{more}")
    if report.files or report.plans:
        lines.append(f"{plural(len(report.files), 'old file')} and {plural(len(report.plans), 'plan')} {would}removed")
        names = [*report.files, *(f"plans/{name}" for name in report.plans)]
        lines += [f"  {name}" for name in names[:_SHOWN]]
        lines += [f"  and {len(names) - _SHOWN} more: --json lists them all"] if len(names) > _SHOWN else []
    lines += [f"note: {remark}" for remark in report.remarks]
    return lines + _freed(report, hours, store)


def _freed(report: "GcReport", hours: float, store: Path) -> list[str]:
    marked = report.condemned.bytes
    now = f"{human_bytes(report.freed_bytes)} {'freed' if report.applied else 'would be freed'} now"
    if marked and report.applied:
        later = f"; {human_bytes(marked)} more if it runs again with --apply from {_moment(time.time() + hours * 3600)} on"
    elif marked:
        later = f", and {human_bytes(marked)} {hours:g} h later: run it with --apply, and then once more"
    else:
        later = "" if report.applied or not report.freed_bytes else ": run it with --apply"
    if report.waiting.bytes and report.removable_from is not None:
        later += f"; {human_bytes(report.waiting.bytes)} marked earlier from {_moment(report.removable_from)} on"
    if marked or report.freed_bytes or report.waiting.segments:
        return [f"{now}{later}"]
    needed = f" ({', '.join(map(repr, report.generations))})" if report.generations else ""
    all_here = f"all that is here but {plural(report.young, 'young value')}" if report.young else "all that is here"
    return [f"{now}: {all_here} is needed{needed}. To free the whole store, delete its folder {store}"]


def _amount(amount: "Amount") -> str:
    return f"{plural(amount.segments, 'segment')} with {plural(amount.entries, 'entry')} ({human_bytes(amount.bytes)})"


def _moment(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds + 59))  # the next full minute, by the user's clock


def _hours(text: str) -> float:
    hours = float(text)
    if not 0 <= hours < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number of hours, 0 or more, not {text!r}")
    return hours
