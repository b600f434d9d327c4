"""A request as a person types it: the arguments of `cachestore precompute` that ask for it."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from shlex import quote
from typing import Any, Final, cast

from cachestore.core.captions import CaptionPolicy
from cachestore.core.errors import BadInput
from cachestore.core.samples import Source
from cachestore.jobs.plan.options import PrecomputeRequest, in_command
from cachestore.sources.combined import labels_of

_FIRST: Final = ("model", "store", "name")
"""The options that come right after DATA."""


def typed(request: PrecomputeRequest) -> list[str]:
    """Return the arguments after `cachestore precompute`: DATA, then the options that differ from their defaults."""
    request = without_chosen(request)
    found = _typed_data(request)
    named = {one.name: one for one in fields(request) if one.name not in {"data", "sources"}}
    for name in dict.fromkeys((*_FIRST, *named)):
        one, value = named[name], getattr(request, name)
        default = one.default_factory() if callable(one.default_factory) else one.default
        if value != default:
            found += typed_option(name, value)
    return found


def without_chosen(request: PrecomputeRequest) -> PrecomputeRequest:
    """Return the request without what planning chose and would choose again: a catalog records what was chosen.

    What was chosen because of older values stays: a new data set would not choose it.
    """
    from cachestore.encode.pictures.bucket_rules import RULES

    rule, step = RULES[request.buckets], request.bucket_step
    is_step_chosen = rule.has_own_step or step == rule.step(1)
    limits = rule.limits_at(upscales=not request.no_upscale)
    are_limits_chosen = (request.bucket_min, request.bucket_max) == limits
    return replace(
        request,
        bucket_step=None if is_step_chosen else step,
        bucket_min=None if are_limits_chosen else request.bucket_min,
        bucket_max=None if are_limits_chosen else request.bucket_max,
        resample=None if request.resample == rule.resample else request.resample,
    )


def typed_option(name: str, value: object) -> list[str]:
    """Return an option with its value as arguments of the command line. Empty for None, and for a switch that is off."""
    option = in_command(name)
    if value is None or isinstance(value, bool):
        return [option] if value else []
    if isinstance(value, Mapping):
        pairs = cast("Mapping[str, Any]", value).items()
        return [word for key, one in pairs for word in (option, f"{key}={_as_argument(one)}")]
    text = _as_text(value)
    return [f"{option}={text}"] if text.startswith("-") else [option, text]


def in_line(words: Iterable[str]) -> str:
    """Return arguments as one line for a shell. Control characters are written in hexadecimal, as bash and zsh read them in `$'...'`."""
    return " ".join(map(_quoted, words))


def _quoted(word: str) -> str:
    if word.isprintable():
        return quote(word)
    escaped = ("".join(f"\\x{byte:02x}" for byte in one.encode()) for one in word)
    return "$'" + "".join(one if one.isprintable() and one not in "\\'" else code for one, code in zip(word, escaped, strict=True)) + "'"


def _typed_data(request: PrecomputeRequest) -> list[str]:
    """DATA, or `--sources` for sources with settings of their own."""
    if not request.sources:
        return [f"./{request.data}" if request.data.startswith("-") else request.data]
    plain = [Source(source.data) for source in request.sources]
    try:
        labels = labels_of(plain)
    except BadInput:  # two have equal names, so their labels were given
        labels = [""] * len(plain)
    if all(one in (same, replace(same, label=label)) for one, same, label in zip(request.sources, plain, labels, strict=True)):
        return [str(source.data) for source in plain]
    return ["--sources", json.dumps([source.as_json() for source in request.sources], ensure_ascii=False)]


def _as_text(value: object) -> str:
    match value:
        case CaptionPolicy():
            return json.dumps(value.as_json(), ensure_ascii=False)
        case tuple() if any(isinstance(one, tuple) for one in cast("tuple[object, ...]", value)):
            pairs = cast("Sequence[tuple[str, str]]", value)
            return json.dumps([list(pair) if pair[1] else pair[0] for pair in pairs], ensure_ascii=False)
        case tuple():
            return ",".join(map(str, cast("tuple[object, ...]", value)))
        case _:
            return str(value)


def _as_argument(value: object) -> str:
    """The value of `--encode-arg NAME=VALUE`: a text as it is, unless it would be read as JSON."""
    if isinstance(value, str):
        try:
            json.loads(value)
        except (RecursionError, ValueError):
            return value
    return json.dumps(value, ensure_ascii=False)
