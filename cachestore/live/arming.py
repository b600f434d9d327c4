"""Arm a process: the adapter's plug points are put into the trainer's modules, here and in every process that this one starts.

A process that is forked has all of this already. One that is started by spawn or forkserver gets it through what it unpickles: before it
runs the main script, `multiprocessing` reads what its parent prepared for it, and there a `Setting` stands first, which arms where it is
read. Environment variables are not used: launchers drop them, and they would arm programs that are none of the trainer's.
"""

import multiprocessing
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from functools import wraps
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from multiprocessing import spawn
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from cachestore.core.errors import BadInput
from cachestore.core.ranks import discover
from cachestore.core.words import did_you_mean
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
    home: str = ""
    """The folder from which an adapter that is not ours is imported."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _arm_again, astuple(self)


class _Paths:
    """Reading a pickled one adds this process's folders of modules, which the other gets too late: `cachestore` may lie in one."""

    def __reduce__(self) -> tuple[Any, ...]:
        paths = [str(Path(path).absolute()) for path in sys.path]
        return exec, (f"import sys; sys.path += [path for path in {paths!r} if path not in sys.path]",)


_armed: list[tuple[Setting, Adapter]] = []


def armed() -> Setting | None:
    """What this process was armed with, if it was."""
    return _armed[0][0] if _armed else None


def load_adapter(name: str) -> Adapter:
    """Import an adapter: one of ours by its name, another by its module's dotted name. Raises BadInput if there is none."""
    module = ADAPTERS.get(name, name)
    try:
        adapter = getattr(import_module(module), "adapter", None)
    except (ModuleNotFoundError, TypeError, ValueError) as error:  # the latter two for '' and for '.name'
        missing = error.name if isinstance(error, ModuleNotFoundError) else module
        if missing is None or not f"{module}.".startswith(f"{missing}."):
            raise
        meant = did_you_mean(name, ADAPTERS) or f"; there is one for {', '.join(ADAPTERS)}, or give the module of your own"
        raise BadInput(f"there is no adapter {name!r}{meant}", option="trainer") from error
    if not isinstance(adapter, Adapter):
        raise BadInput(f"{module} has no adapter: its `adapter` is a {type(adapter).__name__}, not a cachestore.live.Adapter")
    return adapter


def home_of(module: str) -> str:
    """Return the folder from which an imported module of an adapter came, empty for those that lie in cachestore."""
    file = getattr(sys.modules[module], "__file__", None)
    if module.startswith("cachestore.") or file is None:
        return ""
    above = module.count(".") + (Path(file).name == "__init__.py")
    return str(Path(file).absolute().parents[above])


def arm(setting: Setting, *, is_first: bool = True) -> None:
    """Arm this process, the first of a run or one that it started. A second call changes nothing. Raises Refused, BadInput."""
    if _armed:
        if _armed[0][0] != setting:
            refuse(f"this process is armed for {_armed[0][0]}, and read something of {setting}")
        return
    if setting.home and setting.home not in sys.path:
        sys.path.append(setting.home)  # what its functions import later lies there too
    adapter = load_adapter(setting.adapter)
    _armed.append((setting, adapter))
    says = is_first and discover(os.environ).rank in {0, None}
    for one in (adapter, _POOLS):
        sys.meta_path.insert(0, _Hook(one, says=says))
        for name, module in list(sys.modules.items()):
            if isinstance(module, ModuleType) and one.concerns(name):  # pyright: ignore[reportUnnecessaryIsInstance]
                one.plug_into(module)
    spawn.get_preparation_data = _carry(spawn.get_preparation_data)
    _preload_nothing(multiprocessing)


def _carry(own: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Return `get_preparation_data` of `multiprocessing.spawn`, or of its copy in `multiprocess`: who reads what it returns is armed."""

    @wraps(own)
    def prepared(*args: Any, **kwargs: Any) -> dict[str, Any]:
        # First of all, so that it is also unpickled first.
        return {"sys.path": _Paths(), "cachestore.live": armed(), **own(*args, **kwargs)}

    return prepared


def _preload_nothing(server: Any) -> Any:
    # A fork server would run the main script before anything arms it.
    server.set_forkserver_preload([])
    return server


_POOLS: Final = Adapter("multiprocess")
"""For the library whose processes dill pickles: it is a copy of `multiprocessing`."""
_POOLS.change("multiprocess.spawn", "get_preparation_data", optional=True)(_carry)
_POOLS.change("multiprocess.forkserver", "_forkserver", optional=True)(_preload_nothing)


def warnings() -> list[str]:
    """What the armed process was not armed for: modules with plug points that came past Python's import system, or none at all."""
    if not _armed:
        return []
    adapter = _armed[0][1]
    others = ((name, module) for name, module in sorted(sys.modules.items()) if name not in adapter.plugged and adapter.concerns(name))
    # a namespace package is a folder, which no import runs
    past = [name for name, module in others if getattr(module, "__file__", None) is not None or not hasattr(module, "__path__")]
    found = [f"{name} was not loaded by an import: nothing of it was replaced" for name in past]
    if not past and not adapter.plugged:
        found = [f"this process imported nothing that the {adapter.name} adapter replaces: it ran without the store"]
    return found


def _arm_again(*fields: Any) -> Setting:
    setting = Setting(*fields)
    arm(setting, is_first=False)
    return setting


class _Hook(MetaPathFinder):
    """Puts plug points into a module as soon as it has run."""

    def __init__(self, adapter: Adapter, *, says: bool) -> None:
        self.adapter, self.says = adapter, says

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if not self.adapter.may_concern(fullname):
            return None
        after = sys.meta_path[sys.meta_path.index(self) + 1 :]  # another hook of ours is among them, and asks those after itself
        finders = [finder for finder in after if hasattr(finder, "find_spec")]
        spec = next((found for finder in finders if (found := finder.find_spec(fullname, path, target)) is not None), None)
        loader = None if spec is None else spec.loader
        if spec is None or loader is None:
            return spec
        if spec.origin is not None and spec.has_location:
            self.adapter.check_name(fullname, spec.origin)
        if not self.adapter.concerns(fullname):
            return spec
        if not isinstance(loader, SourceFileLoader):
            if not self.adapter.needs(fullname):
                return spec
            refuse(f"{fullname} is loaded by a {type(loader).__name__}, and plug points are put into plain .py files alone")
        execute = loader.exec_module  # of this loader alone: each module has its own

        def execute_and_plug(module: ModuleType) -> None:
            execute(module)
            self._remark(module)
            self.adapter.plug_into(module)

        loader.exec_module = execute_and_plug  # type: ignore[method-assign]
        return spec

    def _remark(self, module: ModuleType) -> None:
        version = self.adapter.version(module) if self.says else None
        if version is not None:
            what = f"{module.__name__} is not in a version that this adapter was tested with ({version}); the self-test decides"
            print(f"cachestore.live: note: {what}", file=sys.stderr)
