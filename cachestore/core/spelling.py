"""How messages spell an option: `--crop random` where a command was typed, `crop="random"` where Python was called."""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Final

_IN_PYTHON: Final[Mapping[str, str]] = {"encode_arg": "encode_args", "claim": "claims"}
"""Python's names for options that may be repeated: their values are mappings."""
_is_typed = False
_data = "DATA"


@contextmanager
def for_command_line(data: str = "DATA") -> Generator[None]:
    """Spell the options of messages as they are typed, while the block runs. It covers the whole process, so one block at a time.

    `data` is how this command is given what it encodes.
    """
    global _is_typed, _data
    before = _is_typed, _data
    _is_typed, _data = True, data
    try:
        yield
    finally:
        _is_typed, _data = before


def is_typed() -> bool:
    """Return whether messages spell options as they are typed: for processes that work for this one."""
    return _is_typed


def option(name: str, value: object = None) -> str:
    """Return an option, with a value if one is given, as the caller would write it. A switch has the value True.

    `name` is Python's; "data" is the argument DATA, or `--data`. A text in capitals, such as "PATH", stands for any value, without quotes.
    """
    if _is_typed:
        typed = _data if name == "data" else f"--{name.replace('_', '-')}"
        return typed if value is None or value is True else f"{typed} {value}"
    name = _IN_PYTHON.get(name, name)
    if value is None:
        return name
    is_word = isinstance(value, str) and not value.isupper()
    return f'{name}="{value}"' if is_word else f"{name}={value}"
