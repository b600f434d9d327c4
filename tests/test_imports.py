"""What importing costs, and what it must never bring along.

The layout is the fork-safety argument: a DataLoader worker has no lock and no model because nothing it imports knows one. Each
module is imported in a process of its own, so modules added later are held to their room's rule without being listed here.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import cachestore

MODELS = ("torch", "transformers", "diffusers", "accelerate", "av")
LIGHT = (*MODELS, "numpy", "filelock", "lmdb")
TRAINER = ("transformers", "diffusers", "accelerate", "av", "filelock", "cachestore.store", "cachestore.work", "cachestore.encode")
MODULE_RULES = {"cachestore": LIGHT, "cachestore.cli": LIGHT}
"""What single modules must not bring along."""
_DRIVERS = (
    "run",
    "readthrough",
    "recompute",
    "report",
    "upkeep",
    "doctor",
    "cli",
    "importing",
    "exporting",
    "untrusted",
    "claims",
    "previews",
    "counting",
)
ROOM_RULES = {
    "loading": TRAINER,
    "reader": (*MODELS, "filelock"),
    **dict.fromkeys(("errors", "keys", "samples", "files", "captions", "ranks", "digests", "storage", "work", "sources", "page"), MODELS),
    **dict.fromkeys(("store", "worker", "reconcile", *_DRIVERS), MODELS),
}
"""What the modules of a room must not bring along: without torch unless an encoder of ours, or a trainer, asks for it."""


def modules() -> list[str]:
    """Every module of the package by name, found as files so that nothing is imported; `__main__` would run."""
    root = Path(cachestore.__path__[0])
    names = (".".join(("cachestore", *file.relative_to(root).with_suffix("").parts)) for file in root.rglob("*.py"))
    return sorted(name.removesuffix(".__init__") for name in names if not name.endswith(".__main__"))


def forbidden_for(module: str) -> tuple[str, ...]:
    """The packages that a module must not bring along."""
    room = module.split(".")[1] if "." in module else ""
    return MODULE_RULES.get(module) or ROOM_RULES.get(room, ())


def run(program: str, *arguments: str) -> str:
    """The stdout of a fresh interpreter that runs a program; it must end well."""
    command = [sys.executable, "-c", program, *arguments]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def loaded(module: str, forbidden: tuple[str, ...]) -> list[str]:
    """Which of the forbidden packages stand in `sys.modules` after a fresh interpreter has imported a module."""
    program = """
import importlib, json, sys
importlib.import_module(sys.argv[1])
print(json.dumps([name for name in sys.argv[2:] if name in sys.modules]))
"""
    return json.loads(run(program, module, *forbidden))


RULED = [
    pytest.param(name, marks=[pytest.mark.torch] if "torch" not in forbidden_for(name) else []) for name in modules() if forbidden_for(name)
]


@pytest.mark.parametrize("module", RULED)
def test_importing_a_module_brings_nothing_that_its_room_forbids(module: str):
    assert loaded(module, forbidden_for(module)) == []


def test_the_check_sees_what_an_import_brings():
    assert loaded("numpy", ("numpy", "torch")) == ["numpy"]


def test_the_check_covers_the_modules_inside_a_room_and_the_package_itself():
    assert {"cachestore", "cachestore.errors", "cachestore.files.paths", "cachestore.loading"} <= set(modules())
    assert forbidden_for("cachestore.files.paths") == MODELS
    assert forbidden_for("cachestore.encode.unit") == ()


def test_help_loads_neither_torch_nor_numpy():
    command = [sys.executable, "-X", "importtime", "-m", "cachestore", "--help"]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert finished.returncode == 0, finished.stderr.splitlines()[-1]
    imported = {line.rsplit("|", 1)[1].strip().split(".")[0] for line in finished.stderr.splitlines() if line.startswith("import time:")}
    assert "cachestore" in imported
    assert imported.isdisjoint(LIGHT)


@pytest.mark.torch
def test_importing_every_module_starts_no_thread():
    program = """
import importlib, json, sys, threading
for name in sys.argv[1:]:
    importlib.import_module(name)
print(json.dumps([thread.name for thread in threading.enumerate()]))
"""
    assert json.loads(run(program, *modules())) == ["MainThread"]
