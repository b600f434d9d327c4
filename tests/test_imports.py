"""What importing costs, and what it must never bring along.

The layout is the fork-safety argument: a DataLoader worker has no lock and no model because nothing it imports knows one. Modules are
imported in fresh processes, so modules added later are held to their room's rule without being listed here.
"""

import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import tomllib

import cachestore

MODELS = ("torch", "transformers", "diffusers", "accelerate", "av", "ray", "obstore")
LIGHT = (*MODELS, "numpy", "filelock", "lmdb")
TRAINER = (
    "transformers",
    "diffusers",
    "accelerate",
    "av",
    "ray",
    "obstore",
    "filelock",
    "cachestore.store.write.writer",
    "cachestore.jobs.share",
    "cachestore.encode",
)
MODULE_RULES = {
    "cachestore": LIGHT,
    "cachestore.cli": LIGHT,
    "cachestore.store.read.reader": (*MODELS, "filelock"),
    **dict.fromkeys(("cachestore.core.tensors", "cachestore.core.vector_math", "cachestore.trainers.torch_files"), ()),
}
"""What single modules must not bring along. The last three are about torch."""
ROOM_RULES = {
    "train": TRAINER,
    "train.encoding": (),  # it runs the encoders
    **dict.fromkeys(("cli", "report", "trainers", "remote", "care", "jobs", "store", "sources", "files", "children", "core"), MODELS),
}
"""What the modules of a room must not bring along: without torch unless an encoder of ours, or a trainer, asks for it."""


def modules() -> list[str]:
    """Every module of the package by name, found as files: nothing is imported, `__main__` would run, and Ray may not be there."""
    root = Path(cachestore.__path__[0])
    names = (".".join(("cachestore", *file.relative_to(root).with_suffix("").parts)) for file in root.rglob("*.py"))
    left_out = (".__main__",) if find_spec("ray") else (".__main__", ".ray.__init__", ".ray.actors")
    return sorted(name.removesuffix(".__init__") for name in names if not name.endswith(left_out))


def forbidden_for(module: str) -> tuple[str, ...]:
    """The packages that a module must not bring along."""
    _package, *parts = module.split(".")
    room = next((room for room in (".".join(parts[:2]), *parts[:1]) if room in ROOM_RULES), "")
    return MODULE_RULES.get(module, ROOM_RULES.get(room, ()))


def run(program: str, *arguments: str) -> str:
    """The stdout of a fresh interpreter that runs a program; it must end well."""
    command = [sys.executable, "-c", program, *arguments]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def in_memory(modules: list[str], forbidden: tuple[str, ...]) -> dict[str, list[str]]:
    """Import modules one after the other in a fresh interpreter: by the first module that brought it, what is forbidden."""
    program = """
import importlib, json, sys
forbidden, found = json.loads(sys.argv[1]), {}
for module in sys.argv[2:]:
    before = {*sys.modules}
    importlib.import_module(module)
    if new := [name for name in forbidden if name in sys.modules and name not in before]:
        found[module] = new
print(json.dumps(found))
"""
    return json.loads(run(program, json.dumps(forbidden), *modules))


RULES = {rule: [name for name in modules() if forbidden_for(name) == rule] for rule in dict.fromkeys(map(forbidden_for, modules())) if rule}


@pytest.mark.parametrize("rule", [pytest.param(rule, marks=[pytest.mark.torch] if "torch" not in rule else []) for rule in RULES])
def test_importing_a_module_brings_nothing_that_its_room_forbids(rule):
    """Modules with the same rule are imported in one process: what none of them brings, none brings alone."""
    assert in_memory(RULES[rule], rule) == {}


def test_the_check_names_who_brings_what():
    assert in_memory(["json", "numpy", "numpy.linalg"], ("numpy", "torch")) == {"numpy": ["numpy"]}


def test_the_check_covers_the_modules_inside_a_room_and_the_package_itself():
    assert {"cachestore", "cachestore.core.errors", "cachestore.files.paths", "cachestore.train"} <= set(modules())
    assert forbidden_for("cachestore.files.paths") == MODELS
    assert forbidden_for("cachestore.encode.batching.unit") == ()


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


ROOT = Path(cachestore.__path__[0]).parent
LINTER = (str(Path(sys.executable).with_name("lint-imports")), "--no-logo", "--no-cache")


def contract(name: str) -> list[str]:
    """The lines of a contract of the import linter, without the parentheses of what may be absent."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    return next([line.replace("(", "").replace(")", "") for line in one["layers"]] for one in settings["contracts"] if one["id"] == name)


def test_the_drawing_of_the_rooms_is_the_contract():
    drawing = (ROOT / "docs/design.md").read_text().split("```")[1].strip("\n").splitlines()
    drawn = [line[:42].strip().replace("/", "") for line in drawing]
    assert drawn == [line for line in contract("layers") if line != "__main__"]
    assert len(contract("layers")) <= 10


def test_nothing_but_the_public_names_lies_at_the_root():
    assert sorted(file.name for file in Path(cachestore.__path__[0]).glob("*.py")) == ["__init__.py", "__main__.py"]


def test_a_file_without_a_room_fails_the_contract(tmp_path):
    shutil.copytree(ROOT / "cachestore", tmp_path / "cachestore", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "cachestore" / "helpers.py").write_text("")
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    ended = subprocess.run(LINTER, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=50, check=False)
    assert ended.returncode == 1
    assert "cachestore.helpers" in ended.stdout
