"""The table of processes is the same in the code and on its page, and nothing starts a process in another way."""

import importlib
import re
import subprocess
import sys

import pytest

from cachestore.children.kinds import KINDS
from cachestore.children.start import command_of
from tests.fakes import ROOT

PACKAGE = ROOT / "cachestore"


def test_the_page_lists_each_child_with_its_module_and_who_starts_it():
    page = (ROOT / "docs/design/processes.md").read_text(encoding="utf-8")
    rows = [re.split(r" *\| *", line.strip("| ")) for line in page.split("\n\n")[2].splitlines()[2:]]
    assert [tuple(one.strip("`") for one in row[:3]) for row in rows] == [(kind.name, kind.module, kind.started_by) for kind in KINDS]
    for row, kind in zip(rows, KINDS, strict=True):
        assert ("`-I`; an allow-list" in row[3]) == kind.is_isolated == ("-I" in command_of(kind))
        assert ("the root folder" in row[3]) == (not kind.keeps_folder)


def test_each_kind_is_started_by_the_file_that_the_table_names():
    by_name = {name: kind for name, kind in vars(importlib.import_module("cachestore.children.kinds")).items() if kind in KINDS}
    found = {
        (name, path.relative_to(PACKAGE).as_posix())
        for path in PACKAGE.rglob("*.py")
        for name in re.findall(r"\b[A-Z_]+\b", path.read_text(encoding="utf-8"))
        if name in by_name and path.parent.name != "children"
    }
    assert found == {(name, kind.started_by) for name, kind in by_name.items()}


@pytest.mark.parametrize(
    ("line", "is_refused"),
    [
        ("import subprocess\nsubprocess.Popen(['x'])", True),
        ("from subprocess import run\nrun(['x'])", True),
        ("import os\nos.execv('x', [])", True),
        ("import os\nos.posix_spawn('x', [], {})", True),
        ("import os\nos.fork()", True),
        ("import multiprocessing", True),
        ("import runpy", True),
        ("import os\nos.getpid()", False),
    ],
)
def test_another_way_to_start_a_process_fails_the_check(line, is_refused):
    command = [sys.executable, "-m", "ruff", "check", "--select", "TID251", "--config", str(ROOT / "pyproject.toml")]
    named = ["--stdin-filename", str(PACKAGE / "jobs" / "new.py"), "-"]
    ended = subprocess.run([*command, *named], input=line + "\n", capture_output=True, text=True, check=False, timeout=50)
    assert ("TID251" in ended.stdout) == is_refused, ended.stdout
