"""`cachestore doctor`: check this machine, a store's file system, or what a model's encoders make; and say what to fix."""

import argparse
from typing import TYPE_CHECKING, Any, Final

from cachestore.cli import DAMAGE, FAILURES, add_store, failed_samples, positive, tell
from cachestore.core.errors import BadUsage

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from cachestore.care.proof import Proof
    from cachestore.core.keys import Json

HELP = "check this machine, the file system of a store, or that a model's values are those of diffusers; say what to fix"

_NOT_TAKEN: Final = ("data", "model", "store", "name", "sources", "prompts", "latents", "compile")
"""Options of `precompute` that decide what is made, and that a comparison has no use for."""
_ALSO_TAKEN: Final = ("device", "batch_size")
_SHOWN: Final = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments, and those options of `precompute` that change values."""
    from cachestore.jobs.plan.options import in_command, option_of

    parser.usage = (
        "cachestore doctor [STORE] [--peer] [--torch] [--json]\n       cachestore doctor --model MODEL --data DATA [--n N] [its options]"
    )
    add_store(parser, is_optional=True)
    parser.add_argument(
        "--peer",
        action="store_true",
        help="run it on two machines at once: it tests whether each sees the files that the other writes to the store, and after how long",
    )
    parser.add_argument("--torch", action="store_true", help="also ask torch which devices it sees (in a separate process)")
    proof = parser.add_argument_group(
        "comparing with diffusers", "encode a few samples as precompute does, and again by the calls of the model's own pipeline"
    )
    proof.add_argument("--model", metavar="MODEL", help="the model, as for precompute; needs --data")
    proof.add_argument("--data", metavar="DATA", help="samples, as for precompute; needs --model")
    proof.add_argument("--n", metavar="N", type=positive, default=None, help="how many samples are compared (default: 8)")
    values = parser.add_argument_group("options of precompute", "`cachestore precompute --help` explains them")
    for one in _taken():
        if isinstance(one.default, bool):
            values.add_argument(in_command(one.name), action="store_true", default=None)
        else:
            action = "append" if one.name == "encode_arg" else "store"
            values.add_argument(in_command(one.name), action=action, metavar=option_of(one).metavar)


def _taken() -> "list[Any]":
    from dataclasses import fields

    from cachestore.jobs.plan.options import PrecomputeRequest, option_of

    options = [one for one in fields(PrecomputeRequest) if one.name in _ALSO_TAKEN or option_of(one).is_hint]
    return [one for one in options if one.name not in _NOT_TAKEN]


def run(arguments: argparse.Namespace) -> int:
    """Print what was found. Returns 1 if there is a problem; for a comparison 4 if values differ, 3 if samples could not be encoded."""
    from cachestore.jobs.plan.options import in_command

    if arguments.model is None and arguments.data is None:
        if given := [one.name for one in _taken() if getattr(arguments, one.name) is not None] + ["n"] * (arguments.n is not None):
            raise BadUsage(f"{in_command(given[0])} needs --model and --data, whose values it is for")
        return _examine(arguments)
    if arguments.model is None or arguments.data is None:
        raise BadUsage("--model and --data belong together: cachestore doctor --model MODEL --data DATA")
    if arguments.store is not None or arguments.peer or arguments.torch:
        raise BadUsage("a comparison with diffusers uses no store: leave out STORE, --peer and --torch, or --model and --data")
    return _prove(arguments)


def _examine(arguments: argparse.Namespace) -> int:
    from cachestore.care.doctor import PROBLEM, examine

    if arguments.peer and arguments.store is None:
        raise BadUsage("--peer needs the store that both machines share: cachestore doctor STORE --peer")
    checks = examine(arguments.store, ask_torch=arguments.torch)
    if arguments.peer:
        from cachestore.care.peer import meet
        from cachestore.files.paths import Layout
        from cachestore.store.read.snapshot import open_layout

        checks += meet(open_layout(Layout.at(arguments.store)))
    is_ok = all(check.state != PROBLEM for check in checks)
    lines: list[str] = []
    for check in checks:
        lines += [f"{check.state:>7}  {check.name}: {check.found}", *([f"         {check.advice}"] if check.advice else [])]
    return tell(arguments, {"ok": is_ok, "checks": [check.as_json() for check in checks]}, lines, is_ok=is_ok)


def _prove(arguments: argparse.Namespace) -> int:
    import os

    from cachestore.care.proof import COUNT, prove
    from cachestore.cli.terminal.stopping import to_stderr
    from cachestore.core.errors import BadInput
    from cachestore.encode.batching.environment import set_library_defaults
    from cachestore.jobs.plan.options import PrecomputeRequest, in_command, parse_value

    set_library_defaults(os.environ)
    try:
        given = {one: getattr(arguments, one.name) for one in _taken()}
        values = {one.name: parse_value(one, text, in_command(one.name)) for one, text in given.items() if text is not None}
        request = PrecomputeRequest(data=arguments.data, model=arguments.model, store="not used", **values)
        request.check()
    except BadInput as error:
        raise BadUsage(str(error)) from error
    found = prove(request, arguments.n or COUNT, to_stderr)
    code = FAILURES if found.ok else DAMAGE
    return tell(arguments, found.as_json(), _lines(found), is_ok=found.ok and not found.failures, otherwise=code)


def _lines(found: "Proof") -> "Iterator[str]":
    from math import isfinite

    from cachestore.core.words import plural

    yield f"{found.model}, {plural(len(found.samples), 'sample')}: cachestore's values, and those of diffusers' own calls one by one"
    if found.rows:
        width = max(len(row.what) for row in found.rows)
        yield f"  {'what':<{width}}  values  equal  difference     allowed  verdict"
        for row in found.rows:
            far = f"{row.distance:.1e}" if isfinite(row.distance) else "another shape"
            apart = "equal" if row.equal == row.compared else "" if row.allowed is None else far
            allowed = "equal" if row.allowed is None else f"{row.allowed:g}"
            verdict = f"{len(row.differs)} differ" if row.differs else "within"
            yield f"  {row.what:<{width}}  {row.compared:>6}  {row.equal:>5}  {apart:<13}  {allowed:<7}  {verdict}"
        yield "  (equal: equal bits; difference: the largest |a - b| / max(|a|, |b|), docs/numerics.md)"
    for row in found.rows:
        yield from (f"differs: {row.what} of {one['sample']}: {one['reason']}" for one in row.differs[:_SHOWN])
        if len(row.differs) > _SHOWN:
            yield f"  and {len(row.differs) - _SHOWN} more"
    if any(row.differs for row in found.rows):
        yield f"this is with {', '.join(map(' '.join, found.versions.items()))}; docs/families.md says which versions were compared"
    yield from (f"not compared: {words}" for words in found.not_compared)
    yield from failed_samples((str(one["sample"]), str(one["encoder"]), str(one["reason"])) for one in found.failures)
    if not found.rows:
        yield "nothing was compared"
    if found.trainer:
        yield f"what --buckets {found.trainer} changes:"
        yield from (f"  {words}" for words in found.habits)
        yield from (f"  {_unlike(one)}" for one in found.differences)


def _unlike(one: "Mapping[str, Json]") -> str:
    def sides(size: "Json") -> str:
        return " x ".join(map(str, size))

    theirs, ours, levels = one["trainer"], one["cachestore"], one["levels"]
    words = [f"{sides(fit['bucket'])} cut out of {sides(fit['resized'])}" for fit in (theirs, ours)]
    how = f"{words[0]}, as without it" if theirs == ours else f"{words[0]} instead of {words[1]}"
    pixels = "" if levels is None else f"; pixels differ by {levels:g} of 255 levels on average"
    return f"{one['sample']} ({sides(one['size'])}): {how}{pixels}"
