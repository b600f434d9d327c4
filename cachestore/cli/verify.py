"""`cachestore verify`: find damage and change nothing."""

import argparse
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from cachestore.cli import DAMAGE, add_moved, add_store, source_of, tell
from cachestore.cli.data_sets import add_name, unfinished_in_words
from cachestore.core.errors import BadUsage
from cachestore.core.spelling import option
from cachestore.core.words import human_bytes, plural

if TYPE_CHECKING:
    from cachestore.care.verify import VerifyReport

_MAX_LISTED: Final = 20
_AGAIN: Final = ("seed", "source", "model", "vae", "text_encoder")

HELP = "look for damaged and missing entries; change nothing"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_store(parser)
    add_name(parser, "read only the bytes of this data set's values; the rest is checked as with --quick (default: all)")
    level = parser.add_mutually_exclusive_group()
    level.add_argument("--full", action="store_true", help="read every byte (the default)")
    level.add_argument("--quick", action="store_true", help="check names, sizes, headers, index and catalogs only")
    level.add_argument("--subset", metavar="N/T", type=_subset, help="read only the N-th of T parts of the segments")
    again = parser.add_argument_group("encoding again")
    again.add_argument("--recompute", metavar="N", type=int, default=0, help="encode N entries again and compare them, up to rounding")
    again.add_argument("--seed", metavar="S", type=int, help="the seed that chooses these entries (default 0)")
    add_moved(again.add_argument)


def run(arguments: argparse.Namespace) -> int:
    """Print the findings. Returns 4 if there is damage."""
    from cachestore.care.verify import verify
    from cachestore.files.paths import Layout

    again = {name: getattr(arguments, name) for name in _AGAIN if getattr(arguments, name) is not None}
    if again and arguments.recompute == 0:
        raise BadUsage(f"{option(next(iter(again)))} needs {option('recompute', 'N')}", option=next(iter(again)))
    again |= {"source": source_of(arguments.source)}
    level = "quick" if arguments.quick else "full"
    report = verify(arguments.store, level, subset=arguments.subset, recompute=arguments.recompute, name=arguments.name, **again)
    unfinished = unfinished_in_words(Layout.at(arguments.store)) if arguments.name is None else []
    lines = [*(f"note: {line}" for line in unfinished), *_in_words(report)]
    return tell(arguments, report.as_json(), lines, is_ok=report.ok, otherwise=DAMAGE)


def _in_words(report: "VerifyReport") -> Iterator[str]:
    from cachestore.store.format.findings import HARMLESS

    for finding in report.findings:
        about = f" (sample {finding.sample!r})" if finding.sample and not finding.entries else ""
        yield f"{'note' if finding.kind in HARMLESS else finding.kind}: {finding.message}{about}"
        if finding.entries and finding.key is None:  # its header is damaged, not each of its entries
            alone = sum(not entry.has_copy for entry in finding.entries)
            yield f"  {plural(len(finding.entries), 'entry')} in it, {alone} without another copy (--json lists all)"
            continue
        for entry in finding.entries[:_MAX_LISTED]:
            used = f" (sample {entry.sample!r})" if entry.sample is not None else ""
            yield f"  entry {entry.key}{used}: {'another segment has a copy' if entry.has_copy else 'no other copy'}"
        if (more := len(finding.entries) - _MAX_LISTED) > 0:
            yield f"  … and {plural(more, 'more entry')} (--json lists all)"
    again: Mapping[str, Any] = report.recomputed or {}
    yield from (f"note: {remark}" for remark in (*report.remarks, *again.get("remarks", ())))
    if again:
        compared = f"{again['equal'] + again['wrong']} of {plural(again['chosen'], 'chosen entry')} encoded again"
        yield f"{compared} (of {again['of']}, seed {again['seed']}): {again['equal']} equal up to rounding, {again['wrong']} wrong"
    rate = f", {human_bytes(report.bytes / report.seconds)}/s" if report.seconds and report.level.startswith("full") else ""
    counts = (
        f"{plural(report.entries, 'entry')} in {plural(report.segments, 'segment')}, {human_bytes(report.bytes)}{rate} ({report.level})"
    )
    yield f"{'ok' if report.ok else 'DAMAGED'}: {counts}"


def _subset(text: str) -> tuple[int, int]:
    part, _, parts = text.partition("/")
    if not (part.isdecimal() and parts.isdecimal() and 1 <= int(part) <= int(parts)):
        raise argparse.ArgumentTypeError(f"must be N/T with 1 <= N <= T, not {text!r}")
    return int(part), int(parts)
