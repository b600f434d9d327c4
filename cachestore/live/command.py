"""Write the front door into a command that starts a trainer: before the trainer's script, whatever launches it."""

import argparse
import os
import re
import shlex
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from importlib import import_module
from io import StringIO
from typing import Any, Final, TypeAlias

from cachestore.core.errors import BadUsage

_FRONT: Final = "cachestore.live"
_PYTHON: Final = re.compile(r"python[\d.]*(\.exe)?")
_LONG: Final = "check-hash-based-pycs"
"""Python's only long option with a value; its short ones are -c, -m, -W and -X."""
_Parsed: TypeAlias = tuple[int, bool]
"""(how many words stand before the script, whether it is a module)."""


def with_front(command: Sequence[str], front: Sequence[str]) -> list[str]:
    """Return a command with `-m cachestore.live` and `front`, its arguments, before the trainer's script.

    Words before the launcher, such as `srun` or `env A=1`, stay. If the script is not found, raises BadUsage with what to write by hand.
    """
    words = list(command)
    if _FRONT in words:
        raise BadUsage(f"{_FRONT} stands in the command already: run it as it is")
    for number, word in enumerate(words):
        name = os.path.basename(word)
        if _PYTHON.fullmatch(name):
            return [*words[: number + 1], *_after_python(words, number + 1, front)]
        if name in _LAUNCHERS:
            return [*words[: number + 1], *_after_launcher(name, words, number + 1, front)]
    raise _not_found(words, front, "no python, accelerate, torchrun or deepspeed stands in it")


def _after_python(words: Sequence[str], start: int, front: Sequence[str]) -> list[str]:
    number = start
    while number < len(words) and re.match(r"-[^-]|--.", words[number]):
        option = re.fullmatch(r"(-[^-mcWX]*([mcWX]))(.*)", words[number], re.DOTALL)
        letters, kind, value = (option[1], option[2], option[3]) if option else (words[number], "", "")
        if kind == "c":
            raise _not_found(words, front, "the program of -c is no script")
        following = number + (1 if value or not (kind or letters[2:] == _LONG) else 2)
        if kind == "m":
            module = value or " ".join(words[number + 1 : following])
            if module in _LAUNCHERS:
                return [*words[start:number], letters, module, *_after_launcher(module, words, following, front)]
            if not module:
                raise _not_found(words, front, "-m has no module")
            return [*words[start:number], letters, _FRONT, *front, "-m", module, *words[following:]]
        number = following
    options = words[start:number]
    number += words[number : number + 1] == ["--"]
    if number >= len(words) or words[number] == "-":
        raise _not_found(words, front, "it names no script")
    return [*options, "-m", _FRONT, *front, *words[number:]]


def _after_launcher(name: str, words: Sequence[str], start: int, front: Sequence[str]) -> list[str]:
    given = list(words[start:])
    begin: list[str] = []
    if name in _WITH_COMMAND:
        if given[:1] != ["launch"]:
            raise _not_found(words, front, f"`{name} launch` starts trainers, and this is another command")
        begin, given = given[:1], given[1:]
    printed = StringIO()
    try:
        with redirect_stderr(printed), redirect_stdout(printed):
            before, is_module = _LAUNCHERS[name](given)
    except ImportError as error:
        raise _not_found(words, front, f"{name} is not installed beside cachestore ({error})") from error
    except SystemExit as error:
        last = printed.getvalue().strip().splitlines()[-1:] or ["it names no script"]
        raise _not_found(words, front, f"{name} does not understand it: {last[0]}") from error
    script = ["-m", given[before]] if is_module else [given[before]]
    return [*begin, *given[:before], *([] if is_module else ["-m"]), _FRONT, *front, *script, *given[before + 1 :]]


def _counted(given: Sequence[str], parsed: argparse.Namespace, script: str, arguments: Sequence[str]) -> _Parsed:
    before = len(given) - len(arguments) - 1
    if before < 0 or given[before] != script or getattr(parsed, "no_python", False) or getattr(parsed, "run_path", False):
        raise SystemExit(2)
    return before, bool(parsed.module)


def _accelerate(given: Sequence[str]) -> _Parsed:
    parsed = import_module("accelerate.commands.launch").launch_command_parser().parse_args(list(given))
    return _counted(given, parsed, parsed.training_script, parsed.training_script_args)


def _torchrun(given: Sequence[str]) -> _Parsed:
    parsed = import_module("torch.distributed.run").get_args_parser().parse_args(list(given))
    return _counted(given, parsed, parsed.training_script, parsed.training_script_args)


def _torch_launch(given: Sequence[str]) -> _Parsed:
    parsed = import_module("torch.distributed.launch").parse_args(list(given))
    return _counted(given, parsed, parsed.training_script, parsed.training_script_args)


def _deepspeed(given: Sequence[str]) -> _Parsed:
    parsed: Any = import_module("deepspeed.launcher.runner").parse_args(list(given))
    return _counted(given, parsed, parsed.user_script, parsed.user_args)


_WITH_COMMAND: Final = ("accelerate", "accelerate.commands.accelerate_cli")
_LAUNCHERS: Final[dict[str, Callable[[Sequence[str]], _Parsed]]] = {
    "accelerate": _accelerate,
    "accelerate-launch": _accelerate,
    "accelerate.commands.accelerate_cli": _accelerate,
    "accelerate.commands.launch": _accelerate,
    "torchrun": _torchrun,
    "torch.distributed.run": _torchrun,
    "torch.distributed.launch": _torch_launch,
    "deepspeed": _deepspeed,
    "deepspeed.launcher.runner": _deepspeed,
}
"""How to find the script, by the names of commands and of modules for `python -m`: each asks the launcher's own parser."""


def _not_found(words: Sequence[str], front: Sequence[str], why: str) -> BadUsage:
    line = shlex.join(["-m", _FRONT, *front])
    return BadUsage(
        f"the trainer's script is not found in `{shlex.join(words)}`: {why}. Write `{line}` before the script yourself, with another -m"
        " between the two if it is a module"
    )
