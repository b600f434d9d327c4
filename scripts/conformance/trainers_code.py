"""Loads another trainer's own code from a checkout, for `record_buckets.py` and `trainers.py`. Nothing of it is kept here.

Packages that the trainer imports but that its caching code does not use are replaced by empty stand-ins if they are not installed.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

FOLDERS = {
    "sd-scripts": ".",
    "musubi": "src",
    "simpletuner": ".",
    "ai-toolkit": ".",
    "diffusion-pipe": ".",
    "ltx": "packages/ltx-trainer/src",
    "nemo-automodel": ".",
}
"""By trainer: the folder of its checkout that is imported from."""


class _Empty(ModuleType):
    """A module in which every name is a class that does nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__init__": lambda _self, *_args, **_more: None, "__getattr__": lambda _self, _name: MagicMock()})


class _StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the named packages, with all modules in them, as empty stand-ins."""

    def __init__(self, packages: Sequence[str]) -> None:
        self.packages = tuple(packages)
        self.used: set[str] = set()

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        del path, target
        if not any(fullname == one or fullname.startswith(f"{one}.") for one in self.packages):
            return None
        self.used.add(fullname)
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        del module


def use_checkout(trainer: str, checkout: Path, stand_ins: Sequence[str] = ()) -> list[str]:
    """Make a trainer's modules importable, and return which of the named packages are not installed and get stand-ins.

    A name with a dot, such as `library.flux_models`, is replaced whether it is there or not.
    """
    sys.path.insert(0, str((checkout / FOLDERS[trainer]).resolve()))
    lacking = [name for name in stand_ins if "." in name or importlib.util.find_spec(name) is None]
    sys.meta_path.insert(0, _StandIns(lacking))
    if importlib.util.find_spec("torchvision") is not None and "torchvision" not in sys.modules:
        import_torchvision()
    return lacking


def import_torchvision() -> None:
    """Import torchvision, whose transforms alone are used, even if its compiled part was built for another torch."""
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        sys.modules["torchvision._meta_registrations"] = ModuleType("torchvision._meta_registrations")
        importlib.import_module("torchvision")


def commit_of(checkout: Path) -> str:
    """Return the commit of a checkout, shortened; empty if it is no git repository."""
    done = subprocess.run(["git", "-C", str(checkout), "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip()
