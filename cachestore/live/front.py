"""The front door: arms this process, and runs the trainer's own script in it as Python would have."""

import argparse
import io
import os
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.machinery import SourceFileLoader
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, Final, NoReturn

from cachestore.core.arguments import refuse_address
from cachestore.core.errors import BadInput, CacheStoreError
from cachestore.core.ranks import ARRAY, discover
from cachestore.files.paths import encode_name
from cachestore.live.adapter import USAGE, Refused
from cachestore.live.arming import ADAPTERS, Setting, arm, home_of, load_adapter, warnings

_CONFIG: Final = (".toml", ".yaml", ".yml", ".json")


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of `python -m cachestore.live`."""
    parser = argparse.ArgumentParser(
        prog="python -m cachestore.live",
        description="Run a trainer's own script with its cache in a store. Everything after SCRIPT belongs to the script.",
        allow_abbrev=False,
    )
    parser.add_argument("trainer", metavar="TRAINER", help=f"{', '.join(ADAPTERS)}, or the module of your own adapter")
    add_options(parser, is_required=True)
    parser.add_argument("-m", dest="is_module", action="store_true", help="SCRIPT is the name of a module, as for python -m")
    parser.add_argument("script", metavar="SCRIPT", help="the trainer's script")
    parser.add_argument("arguments", metavar="ARGS", nargs=argparse.REMAINDER, help="its arguments").required = False
    return parser


def add_options(parser: argparse.ArgumentParser, *, is_required: bool) -> None:
    """Add the options of the front door, which `cachestore live` hands on."""
    parser.add_argument("--store", required=is_required, metavar="STORE", help="the folder of the store; it is made if it is not there")
    parser.add_argument("--name", metavar="NAME", help="the data set's name (default: TRAINER/ and the stem of the script's configuration)")
    parser.add_argument(
        "--read", metavar="DATASET", help="read this data set, which `precompute --buckets TRAINER` made; nothing is encoded"
    )


def main(arguments: Sequence[str]) -> NoReturn:
    """Run a trainer's script with its cache in the store, and end as it ends; with 2 for a wrong command line."""
    chosen = make_parser().parse_args(arguments)
    refused, process = False, os.getpid()
    try:
        setting = _setting(chosen)
        arm(setting)
        if chosen.read and _is_first():
            _say_what_is_lacking()
        code, module = _code_of_module(chosen.script) if chosen.is_module else _code_of_script(chosen.script)
    except CacheStoreError as error:
        print(f"cachestore.live: error: {error}", file=sys.stderr)
        sys.exit(USAGE)
    sys.argv = [module.__file__ or "" if chosen.is_module else chosen.script, *chosen.arguments]
    if not chosen.is_module and not getattr(sys.flags, "safe_path", False):
        sys.path[0] = str(Path(chosen.script).resolve().parent)  # as Python does for a script
        if (home := setting.home) and home not in sys.path:
            sys.path.append(home)
    # It stays there after the script has ended: threads that it leaves, and what it has for `atexit`, still look there.
    sys.modules["__main__"] = module
    try:
        exec(code, vars(module))  # noqa: S102 - it is the program that the user starts
    except Refused:
        refused = True
        raise
    finally:
        if not refused and os.getpid() == process and _is_first():  # a child of os.fork() that ends as a program does is no rank
            with suppress(OSError, ValueError):  # stderr may be closed
                _say_last_line()
    sys.exit(0)


def _is_first() -> bool:
    found = discover(os.environ)
    return found.rank in {0, None} or found.found_in == ARRAY  # the tasks of a job array are runs of their own


def _setting(chosen: argparse.Namespace) -> Setting:
    """Raises BadInput for a wrong value of an option, and for an adapter that is not there or cannot serve this script."""
    if not chosen.store:
        raise BadInput("--store must be a path, not ''", option="store")
    refuse_address("--store", chosen.store)
    trainer: str = chosen.trainer
    adapter, name = load_adapter(trainer), ADAPTERS.get(trainer, trainer)
    if adapter.concerns(chosen.script) if chosen.is_module else adapter.lies_at(str(Path(chosen.script).resolve())):
        raise BadInput(f"{chosen.script} has plug points itself, and a script has run when they could be put in: start what imports it")
    stem = chosen.script.removesuffix(".__main__").rpartition(".")[2] if chosen.is_module else Path(chosen.script).stem
    data_set = chosen.name if chosen.name is not None else f"{trainer}/{adapter.data_set or name_of(stem, chosen.arguments)}"
    encode_name(data_set)
    store, generation = str(Path(chosen.store).absolute()), None
    if chosen.read is not None:
        if not adapter.reads_exports:
            raise BadInput(f"the adapter of {trainer} reads no data set of `precompute`: leave --read out", option="read")
        from cachestore.store.write.writer import open_store

        with open_store(store) as opened:
            generation = opened.dataset(chosen.read).generation  # all processes of this one read the same
    return Setting(name, store, data_set, chosen.read or "", generation, home_of(name))


def _code_of_script(path: str) -> tuple[CodeType, ModuleType]:
    """Return a script's code and the empty module in which it runs. Raises BadInput."""
    if not Path(path).is_file():
        raise BadInput(f"there is no script {path}; give its path after the options", option="script")
    module = ModuleType("__main__")
    module.__file__ = str(Path(path).absolute())
    module.__loader__ = SourceFileLoader("__main__", path)
    vars(module)["__cached__"] = None
    with io.open_code(module.__file__) as file:
        return _compiled(file.read(), path, module.__file__), module


def _compiled(source: bytes, path: str, file: str) -> CodeType:
    if b"\0" in source:
        raise BadInput(f"{path} is not a script of Python; give its path after the options", option="script")
    return compile(source, file, "exec", dont_inherit=True)


def _code_of_module(name: str) -> tuple[CodeType, ModuleType]:
    """As `_code_of_script`, for a module, or for `__main__` of a package."""
    try:
        spec = find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = find_spec(f"{name}.__main__")
    except (ModuleNotFoundError, ValueError):
        spec = None
    loader: Any = None if spec is None else spec.loader
    code = loader.get_code(spec.name) if spec is not None and hasattr(loader, "get_code") else None
    if spec is None or code is None:
        raise BadInput(
            f"there is no module {name} to run; the folder that holds it must be the current one, or on PYTHONPATH", option="script"
        )
    module = ModuleType("__main__")
    module.__file__, module.__loader__, module.__package__, module.__spec__ = spec.origin, spec.loader, spec.parent, spec
    vars(module)["__cached__"] = spec.cached
    return code, module


def _say_what_is_lacking() -> None:
    from cachestore.live.run import current

    if (files := current().exported) is not None and files.lacking:
        print(f"cachestore.live: note: {files.lacking}", file=sys.stderr)


def _say_last_line() -> None:
    """What was reused and encoded; or that nothing was, and why."""
    if "cachestore.live.run" in sys.modules:
        from cachestore.live.run import current

        line = current().last_line()
    else:
        line = "the trainer asked for no cached value"
    print(f"cachestore.live: {line}", file=sys.stderr)
    for warning in warnings():
        print(f"cachestore.live: warning: {warning}", file=sys.stderr)


def name_of(script: str, arguments: Sequence[str]) -> str:
    """Return a name for a run's data: the stem of the first configuration among its arguments, else its output's, else the script's."""
    values = [value.rpartition("=")[2] if value.startswith("-") else value for value in arguments]
    configs = [Path(value).stem for value in values if value.endswith(_CONFIG) and Path(value).is_file()]
    outputs = [after for before, after in pairwise(arguments) if before == "--output_name"]
    stem = (configs or outputs or [script])[0]
    return re.sub(r"[^\w.-]+", "-", stem)
