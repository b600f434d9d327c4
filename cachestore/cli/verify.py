"""`cachestore verify`: find damage, change nothing."""

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from cachestore.cli import DAMAGE, OK, USAGE, add_source, add_store, print_error, print_json, say, source_of
from cachestore.core.errors import BadInput
from cachestore.core.words import human_bytes

if TYPE_CHECKING:
    from cachestore.storage.verify import VerifyReport

_AGAIN: Final = ("seed", "source", "model", "vae", "text_encoder")

HELP = "check a store and change nothing"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_store(parser)
    level = parser.add_mutually_exclusive_group()
    level.add_argument("--full", action="store_true", help="read every byte (the default)")
    level.add_argument("--quick", action="store_true", help="names, sizes, headers, index and catalogs only")
    level.add_argument("--subset", metavar="N/T", type=_subset, help="read the N-th of T parts of the segments")
    again = parser.add_argument_group("making again")
    again.add_argument("--recompute", metavar="N", type=int, default=0, help="encode N entries again and compare them, up to rounding")
    again.add_argument("--seed", metavar="S", type=int, help="another choice of these entries (default 0)")
    add_source(again.add_argument, "")
    again.add_argument("--model", metavar="MODEL", help="where the model is now, if it moved; it must have the same fingerprint")
    again.add_argument("--vae", metavar="PATH", help="where the VAE is now, if it moved")
    again.add_argument("--text-encoder", metavar="PATH", help="where the text encoder is now, if it moved")


def run(arguments: argparse.Namespace) -> int:
    """Print the findings; 4 if there is damage."""
    if arguments.recompute == 0 and (unused := [name for name in _AGAIN if getattr(arguments, name) is not None]):
        message = f"--{unused[0].replace('_', '-')} goes with --recompute N, which was not asked for"
        print_error(BadInput(message), as_json=arguments.json)
        return USAGE
    from cachestore.storage.findings import HARMLESS

    report = _verify(arguments)
    if arguments.json:
        print_json(report.as_json())
    else:
        for finding in report.findings:
            about = f" (sample {finding.sample!r})" if finding.sample else ""
            say(f"{'note' if finding.kind in HARMLESS else finding.kind}: {finding.message}{about}")
        for remark in report.remarks:
            say(f"note: {remark}")
        rate = f", {human_bytes(report.bytes / report.seconds)}/s" if report.seconds and report.level == "full" else ""
        counts = f"{report.entries} entries in {report.segments} segments, {human_bytes(report.bytes)}{rate} ({report.level})"
        if report.recomputed is not None:
            _tell(report.recomputed)
        say(f"{'ok' if report.ok else 'DAMAGED'}: {counts}")
    return OK if report.ok else DAMAGE


def _verify(arguments: argparse.Namespace) -> "VerifyReport":
    """Only what makes entries again loads the whole job, and with it torch."""
    level, subset = "quick" if arguments.quick else "full", arguments.subset
    if arguments.recompute == 0:
        from cachestore.maintain.collect import verify

        return verify(arguments.store, level, subset=subset)
    from cachestore.maintain import recompute

    again = {name: getattr(arguments, name) for name in _AGAIN if getattr(arguments, name) is not None}
    again |= {"source": source_of(arguments.source)} if arguments.source is not None else {}
    return recompute.verify(arguments.store, level, subset=subset, recompute=arguments.recompute, **again)


def _tell(recomputed: Mapping[str, Any]) -> None:
    """What was made again, for a person."""
    for remark in recomputed["remarks"]:
        say(f"note: {remark}")
    chosen = f"{recomputed['chosen']} of {recomputed['of']} entries made again (seed {recomputed['seed']})"
    say(f"{chosen}: {recomputed['equal']} as stored, up to rounding, {recomputed['wrong']} wrong")


def _subset(text: str) -> tuple[int, int]:
    """N/T as numbers; what is none is a usage error."""
    part, _, parts = text.partition("/")
    if not (part.isdecimal() and parts.isdecimal() and 1 <= int(part) <= int(parts)):
        raise argparse.ArgumentTypeError(f"N/T with 1 <= N <= T, not {text!r}")
    return int(part), int(parts)
