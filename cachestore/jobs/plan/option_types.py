"""The types of options: what a value may be, and how it is read from a command line, a file, Python and JSON."""

import json
import operator
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import Field, dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any, Final, Literal, cast

from cachestore.core.captions import CHOICES, CaptionPolicy
from cachestore.core.errors import BadInput
from cachestore.core.keys import Json
from cachestore.core.samples import BESIDE, CAPTION, IMAGE, ROLES, Source
from cachestore.core.words import listed
from cachestore.encode.families.resamplers import RESAMPLERS
from cachestore.encode.families.row import DTYPES, is_text_encoder
from cachestore.sources.prompts import Prompts, as_prompts, read_prompts

LATENTS: Final = "latents"
"""The value of `encode` for pictures and videos."""

_LEAST_FPS, _MOST_FPS = 0.1, 1000
DEVICES: Final = "auto, cpu, cuda, cuda:N, mps, xpu, xpu:N"
_ROLE: Final = re.compile(r"[a-z][a-z0-9_]{0,63}")
_ENDING: Final = re.compile(r"[^\w/,=][^/,=]+|_[^/,=]+")
"""Where images of a role are, as an ending of their stems: it begins with a mark, as `-masklabel`."""
_DEVICE: Final = re.compile(r"auto|cpu(:0)?|mps(:0)?|(cuda|xpu)(:(0|[1-9][0-9]{0,3}))?")
_WAYS: Final = "|".join(RESAMPLERS)
PATHS: Final = ("model", "vae", "text_encoder")


@dataclass(frozen=True, slots=True)
class OptionType:
    """How an option's values are read and checked."""

    wanted: str
    """What a value must be, for messages."""
    read: Callable[[Any], Any]
    """Turns a value from Python, TOML or JSON into that of a request. Raises TypeError, ValueError or BadInput if it is wrong."""
    parse: Callable[[Any], Any] = str
    """Turns the text of a command line into what `read` takes. Raises ValueError."""


@dataclass(frozen=True, slots=True)
class Option:
    """An option's metadata; its default is that of the field."""

    kind: OptionType
    group: str
    """Its heading in `--help`; empty for options above all groups."""
    help: str
    metavar: str | None = None
    is_hint: bool = True
    """Whether a catalog keeps it. True for options that decide what is made, False for the group "running"."""
    is_for_files: bool = True
    """Whether a TOML file may contain it."""


def make_option(
    default: Any, kind: OptionType, group: str, words: str, metavar: str | None = None, *, is_hint: bool = True, is_for_files: bool = True
) -> Any:
    """Return a field of PrecomputeRequest that is an option; `words` are its help."""
    about = {"option": Option(kind, group, words, metavar, is_hint=is_hint and group != "running", is_for_files=is_for_files)}
    return field(default_factory=default, metadata=about) if isinstance(default, type) else field(default=default, metadata=about)


def make_switch(group: str, words: str, *, is_hint: bool = True) -> Any:
    """Return a field that is false unless the option is given."""
    return make_option(default=False, kind=SWITCH, group=group, words=words, is_hint=is_hint)


def option_of(one: "Field[Any]") -> Option:
    """Return the metadata of a field of PrecomputeRequest."""
    return one.metadata["option"]


def _refuse() -> Any:
    raise ValueError


def _whole(least: int, value: Any) -> int:
    number = _refuse() if isinstance(value, bool) else operator.index(value)
    return number if number >= least else _refuse()


def whole_from(least: int) -> OptionType:
    """Return the type of whole numbers from `least` on."""
    return OptionType(f"a whole number of at least {least}", lambda value: _whole(least, value), int)


def _numbers(value: Any) -> tuple[int, ...]:
    several = cast("Sequence[Any]", value) if isinstance(value, list | tuple | range) else [value]
    return tuple(_whole(1, one) for one in several)


def _parse_numbers(text: str) -> list[int]:
    return [int(part) if part.strip().isdecimal() else _refuse() for part in text.split(",")]


def _sizes(value: Any) -> int | tuple[int, ...]:
    found = _numbers(value)
    return found if len(found) > 1 else found[0] if found else _refuse()


def _rate(value: Any) -> float:
    is_number = hasattr(value, "__float__") and not isinstance(value, bool)
    rate = float(value) if is_number else _refuse()
    return (value if type(value) is int else rate) if isfinite(rate) and _LEAST_FPS <= rate <= _MOST_FPS else _refuse()


def one_of(*words: str) -> OptionType:
    """Return the type of these words."""
    return OptionType(listed(words, "or"), lambda value: value if value in words else _refuse())


def _path(value: Any) -> str:
    path = os.fspath(cast("os.PathLike[Any]", value))
    return path if isinstance(path, str) and path else _refuse()


def _switched(value: Any) -> bool:
    return bool(value) if type(value).__name__ in {"bool", "bool_"} else _refuse()  # numpy's type has either name, depending on the version


def _text(value: Any) -> str:
    return value if isinstance(value, str) else _refuse()


def _names(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        value = [one.strip() for one in value.split(",") if one.strip()]
    names = tuple(value) if not isinstance(value, bytes | Mapping) else _refuse()
    are_names = all(isinstance(name, str) and (name in {"text", LATENTS} or is_text_encoder(name)) for name in names)
    return names if names and are_names else _refuse()


def _roles(value: Any) -> tuple[str, ...]:
    entries = tuple(one.strip() for one in value.split(",") if one.strip()) if isinstance(value, str) else tuple(value)
    are_right = all(isinstance(entry, str) and _is_role(*entry.partition("=")) for entry in entries)
    return entries if are_right and len(set(entries)) == len(entries) else _refuse()


def _is_role(name: str, equals: str, where: str) -> bool:
    """Whether an entry of --roles is right: a name of the user's own, or any role but a video with where its images are."""
    is_free = _ROLE.fullmatch(name) is not None and name not in {*ROLES, CAPTION}
    if not equals:
        return is_free
    parts = where.removesuffix("/").split("/")
    is_folder = where.endswith("/") and all(part and part.strip(".") for part in parts)
    return (is_free or name in {*BESIDE, IMAGE}) and (is_folder or _ENDING.fullmatch(where) is not None)


def read_device(value: Any) -> str:
    """Return a device as torch spells it. Raises as every type's `read`."""
    return value if _DEVICE.fullmatch(value) else _refuse()


def _batch_size(value: Any) -> int | Literal["auto"]:
    return "auto" if isinstance(value, str) and value == "auto" else _whole(1, value)


def _captions(value: Any) -> str | CaptionPolicy:
    return value if isinstance(value, str) and value in CHOICES else CaptionPolicy.parse(value)


def _parse_captions(text: str) -> Any:
    return text if text in CHOICES else json.loads(text)


def _arguments(value: Any) -> dict[str, Json]:
    given = cast("Mapping[Any, Json]", value) if isinstance(value, Mapping) else _refuse()
    return {_text(name): one for name, one in given.items()}


def _parse_arguments(texts: Sequence[str]) -> dict[str, Json]:
    found: dict[str, Json] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not (name and equals):
            raise ValueError(f"{text!r} must be NAME=VALUE")
        found[name] = value
        with suppress(RecursionError, ValueError):
            found[name] = json.loads(value)
    return found


def _failures(value: Any) -> str:
    text = str(value) if isinstance(value, str) else str(_whole(0, value))
    return text if _allowed(text) is not None else _refuse()


def _allowed(text: str) -> tuple[float, bool] | None:
    """The number in `3` or `2%`, and whether it is a percentage; None for anything else."""
    number, is_percent = text.removesuffix("%"), text.endswith("%")
    try:
        value = float(number) if is_percent else int(number)
    except ValueError:
        return None
    return (value, is_percent) if value >= 0 and not (is_percent and value > 100) else None


def allowed_failures(text: str, units: int) -> int:
    """Return how many of `units` may fail. `text` is a count, or a share such as `2%`. Raises BadInput."""
    found = _allowed(text)
    if found is None:
        raise BadInput(f"max_failures must be {FAILURES.wanted}, not {text!r}")
    value, is_percent = found
    return int(units * value / 100) if is_percent else int(value)


def _prompts(value: Any) -> Prompts:
    if isinstance(value, str | os.PathLike):
        return read_prompts(Path(_path(value)))
    return as_prompts(cast("Sequence[object]", value)) if isinstance(value, list | tuple) else _refuse()


def _parse_prompts(text: str) -> Any:
    return json.loads(text) if text.startswith("[") else text


def _sources(value: Any) -> tuple[Source, ...]:
    listed = cast("Sequence[Any]", value) if isinstance(value, list | tuple) else _refuse()
    return tuple(one if isinstance(one, Source) else Source(**one) for one in listed)


MODEL: Final = OptionType("a path or a hub id", _path)
STORE: Final = OptionType("a path (str or pathlib.Path, and not empty)", _path)
TEXT: Final = OptionType("a text", _text)
SWITCH: Final = OptionType("true or false", _switched, lambda given: given)
DTYPE: Final = OptionType(f"auto or one of {', '.join(DTYPES)}", one_of("auto", *DTYPES).read)
FAILURES: Final = OptionType("a count or a share such as 2%", _failures)
NUMBERS: Final = OptionType("a whole number of at least 1, or several of them", _numbers, _parse_numbers)
SIZES: Final = OptionType(NUMBERS.wanted, _sizes, _parse_numbers)
RATE: Final = OptionType(f"a number of frames a second from {_LEAST_FPS} to {_MOST_FPS}", _rate, float)
THREADS: Final = OptionType("a number of threads, 0 or more", lambda value: _whole(0, value), int)
BATCH: Final = OptionType("auto or a whole number of at least 1", _batch_size, lambda text: text if text == "auto" else int(text))
ARGUMENTS: Final = OptionType("NAME=VALUE (in a file a table, from Python a mapping)", _arguments, _parse_arguments)
PROMPTS: Final = OptionType("a .txt, .json or .jsonl file with prompts (from Python also a list of prompts)", _prompts, _parse_prompts)
POLICY: Final = OptionType("first, all, random, or a CaptionPolicy (as JSON, or as a table)", _captions, _parse_captions)
ROLE_NAMES: Final = OptionType(
    f"a list of names in small letters, such as depth,pose, that are not in {', '.join(ROLES)}; or of ROLE=WHERE, where WHERE is a folder"
    " such as masks/ or an ending such as -masklabel",
    _roles,
)
ENCODERS: Final = OptionType(
    "a list of names, such as text,latents or text_encoder,text_encoder_2",
    _names,
)
SOURCES: Final = OptionType('a list of objects with the fields of cs.Source, such as [{"data": PATH, "repeats": 2}]', _sources, json.loads)
