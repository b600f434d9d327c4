"""`cachestore forget`: take samples out of a store."""

import argparse
from typing import TYPE_CHECKING

from cachestore.cli import FAILURES, add_store, tell
from cachestore.cli.data_sets import add_name
from cachestore.core.words import first_of, human_bytes, listed, noun, plural

if TYPE_CHECKING:
    from cachestore.care.forget import ForgetReport

HELP = "take samples out of all data sets, as their owner withdraws them; with --now, remove their values at once"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_store(parser)
    parser.add_argument("samples", metavar="SAMPLE", nargs="+", help="the id of a sample (`cachestore ls STORE --samples` lists them)")
    add_name(parser, "the data set (default: all that have one of the samples)")
    parser.add_argument("--now", action="store_true", help="also remove at once their values, older generations and plans that name them")
    parser.add_argument("--dry-run", action="store_true", help="show what would be done, and change nothing")


def run(arguments: argparse.Namespace) -> int:
    """Print what was done, what stays, and what is beyond reach."""
    from cachestore.care.forget import forget

    now = arguments.now
    report = forget(arguments.store, arguments.samples, name=arguments.name, now=now, apply=not arguments.dry_run)
    return tell(arguments, report.as_json(), _in_words(report, is_now=now), is_ok=not report.left, otherwise=FAILURES)


def _in_words(report: "ForgetReport", *, is_now: bool) -> list[str]:
    would = "" if report.applied else "would be "
    them = noun(len(report.samples), "it", "them")
    lines = [f"{name}: {would}published without {them} as generation {n}" for name, n in report.generations.items()]
    older = [f"{listed(numbers)} of {name!r}" for name, numbers in report.older.items()]
    count = sum(map(len, report.older.values()))
    if is_now:
        removed = f"{plural(report.values, 'value')}, {plural(count, 'older generation')} and {plural(len(report.plans), 'plan')}"
        copied = f"; {plural(report.copied, 'other value')} of the same files copied" if report.copied else ""
        freed = f", {human_bytes(max(report.freed_bytes, 0))} freed" if report.applied else ""
        what = f"{removed} {would}removed{copied}{freed}"
        lines.append(f"not all could be removed: {removed}" if report.left else what)
        lines += [f"kept: the value {key}, as {who} needs it" for key, who in report.kept.items()]
    else:
        if older:
            names = f"{noun(count, 'generation', 'generations')} {listed(older)} {noun(count, 'names', 'name')} {them}"
            lines.append(f"{names} until `cachestore gc` removes {noun(count, 'it', 'them')} as old, and then the values")
        if report.plans:
            lists = f"{noun(len(report.plans), 'lists', 'list')} {them}"
            lines.append(f"{plural(len(report.plans), 'plan')} ({first_of(report.plans)}) {lists}")
        lines.append("with --now, all that names them and their values are removed at once")
    lines += [f"left: {one}" for one in report.left]
    return lines + [f"note: {one}" for one in report.remarks]
