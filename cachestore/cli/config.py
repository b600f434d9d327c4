"""`--config FILE.toml`: what `precompute` takes as options, in a file; options that are given too have precedence.

model = "path-or-id"
store = "cache/"
resolution = 1024

[[source]]
data = "photos/"

[[source]]
data = "faces/{000..012}.tar"
name = "faces"
repeats = 10
"""

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, Final, cast, get_args

from cachestore.core.arguments import refuse_address
from cachestore.core.errors import BadInput
from cachestore.core.samples import Source
from cachestore.jobs.planning import PrecomputeRequest
from cachestore.source.captions import CaptionLines

_TABLE: Final = "source"
_NOT_IN_FILES: Final = frozenset({"data", "sources", "rank", "world_size"})
_WORDS: Final[Mapping[str, Sequence[str]]] = {"caption_lines": get_args(CaptionLines), "latents": ("moments", "mean", "sample")}


def read_config(path: str | Path) -> dict[str, Any]:
    """The fields of a PrecomputeRequest that a file gives; paths are relative to where the command runs, as on the command line.

    Raises BadInput, which names file, table and field.
    """
    refuse_address("--config", str(path))
    try:
        with Path(path).open("rb") as file:
            found = tomllib.load(file)
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadInput(f"{path} is not TOML: {error}") from error
    values = {name.replace("-", "_"): value for name, value in found.items()}
    tables = values.pop(_TABLE, None)
    known = [one.name for one in fields(PrecomputeRequest) if one.name not in _NOT_IN_FILES]
    _refuse_unknown(values, [*known, _TABLE], str(path))
    checked = {name: _checked(name, value, f"{path}: {name}") for name, value in values.items()}
    if tables is not None:
        checked["sources"] = _sources(tables, path)
    return checked


def _sources(tables: object, path: str | Path) -> tuple[Source, ...]:
    listed = cast("list[dict[str, Any]]", tables)
    if not isinstance(tables, list) or not all(_is_any_of((dict,), table) for table in listed):
        raise BadInput(f"{path}: {_TABLE} is an array of tables: write [[{_TABLE}]]")
    found: list[Source] = []
    for number, table in enumerate(listed, start=1):
        where = f"{path}, [[{_TABLE}]] {number}"
        values = {name.replace("-", "_"): value for name, value in table.items()}
        _refuse_unknown(values, [one.name for one in fields(Source)], where)
        if not isinstance(values.get("data"), str) or not values["data"]:
            raise BadInput(f"{where}: data is a path, not {values.get('data')!r}" if "data" in values else f"{where}: data is missing")
        try:
            found.append(Source(**values))
        except BadInput as error:
            raise BadInput(f"{where}: {error}") from error
    return tuple(found)


def _refuse_unknown(values: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    if unknown := next((name for name in values if name not in known), None):
        meant = next(iter(get_close_matches(unknown, known, 1)), None)
        shown = f"[[{meant}]]" if meant == _TABLE else meant
        hint = f", but one called {shown}" if meant is not None else ""
        raise BadInput(f"{where}: there is no field {unknown!r}{hint}; fields are {', '.join(known)}")


def _checked(name: str, value: object, where: str) -> object:
    """A value in the form in which the command line gives it. Raises BadInput for one that cannot be meant."""
    wanted = _wanted(name, value)
    if wanted:
        raise BadInput(f"{where} is {wanted}, not {value!r}")
    if name == "encode" and isinstance(value, list):
        return ",".join(cast("list[str]", value))
    return str(value) if name in {"batch_size", "max_failures"} else value


def _wanted(name: str, value: object) -> str:
    """What a field should be, in words, where it is not that; empty where it is."""
    fits, words = _CHECKS.get(name, (lambda value: isinstance(value, str), "a text"))
    return "" if fits(value) else words


def _is_from(least: int, value: object) -> bool:
    return type(value) is int and value >= least


def _is_one_of(words: Sequence[str], value: object) -> bool:
    return value in words


def _is_any_of(kinds: tuple[type, ...], value: object) -> bool:
    return isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))


def _are_names(value: object) -> bool:
    names = cast("list[object]", value) if isinstance(value, list) else [value]
    return all(isinstance(name, str) for name in names)


def _are_resolutions(value: object) -> bool:
    listed = cast("list[object]", value) if isinstance(value, list) else [value]
    return bool(listed) and all(_is_from(1, one) for one in listed)


_FROM_ONE: Final = (partial(_is_from, 1), "a whole number from 1 on")
_SWITCH: Final = (partial(_is_any_of, (bool,)), "true or false")
_CHECKS: Final[Mapping[str, tuple[Callable[[object], bool], str]]] = {
    "encode": (_are_names, 'a list such as ["text", "latents"]'),
    "captions": (partial(_is_any_of, (str, dict)), "a word, or a table with the fields of a CaptionPolicy"),
    "encode_arg": (partial(_is_any_of, (dict,)), "a table of arguments"),
    "batch_size": (partial(_is_any_of, (int, str)), "auto, or a number"),
    "max_failures": (partial(_is_any_of, (int, str)), 'a number, or a share such as "2%"'),
    "resolution": (_are_resolutions, "a whole number from 1 on, or a list of such"),
    "variants": _FROM_ONE,
    "crop": (partial(_is_one_of, ("center", "random")), "center or random"),
    "crop_seed": (partial(_is_from, 0), "a whole number from 0 on"),
    "flip": _SWITCH,
    "bucket_step": _FROM_ONE,
    "no_upscale": _SWITCH,
    "frames": (_are_resolutions, "a whole number from 1 on, or a list of such"),
    "fps": (partial(_is_any_of, (int, float)), "a number of frames a second"),
    "clips": _FROM_ONE,
    "procs": _FROM_ONE,
    "workers": (partial(_is_from, 0), "a whole number from 0 on"),
    "compile": _SWITCH,
    "strict": _SWITCH,
    "replace": _SWITCH,
    **{name: (partial(_is_one_of, words), f"one of {', '.join(words)}") for name, words in _WORDS.items()},
}
