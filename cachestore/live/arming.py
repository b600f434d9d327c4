"""Arm a process: the adapter's plug points are put into the trainer's modules, here and in every process that this one starts.

A process that is forked has all of this already. One that is started by spawn or forkserver gets it through what it unpickles: every
`multiprocessing` process of an armed process carries a `Setting`, which arms where it is read. Environment variables are not used:
launchers drop them, and they would arm programs that are none of the trainer's.
"""

import sys
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from multiprocessing.process import BaseProcess
from types import ModuleType
from typing import Any, Final

from cachestore.core.errors import BadInput
from cachestore.live.adapter import Adapter, refuse

ADAPTERS: Final = {
    "sd-scripts": "cachestore.trainers.sd_scripts.live",
    "simpletuner": "cachestore.trainers.simpletuner.live",
    "musubi": "cachestore.trainers.musubi.live",
    "ai-toolkit": "cachestore.trainers.ai_toolkit.live",
    "diffusion-pipe": "cachestore.trainers.diffusion_pipe.live",
}


@dataclass(frozen=True, slots=True)
class Setting:
    """What a process must know to be armed. Reading a pickled one arms the process that reads it."""

    adapter: str
    """The dotted name of the adapter's module."""
    store: str
    """The store's absolute path."""
    name: str
    """The data set's name."""
    source: str = ""
    """The data set of `precompute` that is read; empty if the trainer's own encoders fill the store."""
    generation: int | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return _arm_again, astuple(self)


_armed: list[tuple[Setting, Adapter]] = []


def armed() -> Setting | None:
    """What this process was armed with, if it was."""
    return _armed[0][0] if _armed else None


def load_adapter(name: str) -> Adapter:
    """Import an adapter: one of ours by its name, another by its module's dotted name. Raises BadInput if there is none."""
    module = ADAPTERS.get(name, name)
    try:
        adapter = import_module(module).adapter
    except ModuleNotFoundError as error:
        if error.name is None or not module.startswith(error.name):
            raise
        raise BadInput(f"there is no adapter {name!r}; there is one for {', '.join(ADAPTERS)}, or give the module of your own") from error
    if not isinstance(adapter, Adapter):
        raise BadInput(f"{module}.adapter is a {type(adapter).__name__}, not a cachestore.live.Adapter")
    return adapter


def arm(setting: Setting) -> None:
    """Arm this process. A second call with the same setting changes nothing. Raises Refused, BadInput."""
    if _armed:
        if _armed[0][0] != setting:
            refuse(f"this process is armed for {_armed[0][0]}, and read something of {setting}")
        return
    adapter = load_adapter(setting.adapter)
    _armed.append((setting, adapter))
    sys.meta_path.insert(0, _Hook(adapter))
    for name, module in list(sys.modules.items()):
        if isinstance(module, ModuleType) and adapter.concerns(name):  # pyright: ignore[reportUnnecessaryIsInstance]
            adapter.plug_into(module)
    carry(BaseProcess)


def carry(process: type[Any]) -> type[Any]:
    """Let every process of this class, or of one below it, arm the process that it becomes. For libraries with a class of their own."""
    own = process.__init__

    def begin(self: Any, *args: Any, **kwargs: Any) -> None:
        vars(self)["_cachestore_live"] = armed()  # first, so that it is also unpickled first
        own(self, *args, **kwargs)

    process.__init__ = begin
    return process


def _arm_again(*fields: Any) -> Setting:
    setting = Setting(*fields)
    arm(setting)
    return setting


class _Hook(MetaPathFinder):
    """Puts plug points into a module as soon as it has run."""

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if not self.adapter.concerns(fullname):
            return None
        finders = [finder for finder in sys.meta_path if finder is not self]
        spec = next((found for finder in finders if (found := finder.find_spec(fullname, path, target)) is not None), None)
        loader = None if spec is None else spec.loader
        if spec is None or loader is None:
            return spec
        if not isinstance(loader, SourceFileLoader):
            if not self.adapter.needs(fullname):
                return spec
            refuse(f"{fullname} is loaded by a {type(loader).__name__}, and plug points are put into plain .py files alone")
        execute = loader.exec_module  # of this loader alone: each module has its own

        def execute_and_plug(module: ModuleType) -> None:
            execute(module)
            for remark in self.adapter.remarks(module):
                print(f"cachestore.live: note: {remark}", file=sys.stderr)
            self.adapter.plug_into(module)

        loader.exec_module = execute_and_plug  # type: ignore[method-assign]
        return spec
