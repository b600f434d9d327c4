"""`cachestore report`: what it prints, and how it opens the page."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import cachestore as cs
from cachestore.core.words import human_bytes
from tests.fakes import ROOT


@pytest.fixture
def store(tmp_path):
    cs.open(tmp_path / "store", mode="a").close()
    return tmp_path / "store"


def report(store, *options, **environment):
    """Run the command in a process without a display, so that no browser of this machine is found; `environment` is added."""
    known = {name: value for name, value in os.environ.items() if name not in {"DISPLAY", "WAYLAND_DISPLAY", "BROWSER"}}
    given = known | {"PATH": "/nowhere", "PYTHONPATH": str(ROOT)} | environment
    command = [sys.executable, "-m", "cachestore", "report", str(store), *options]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=50, cwd=store.parent, env=given)


@pytest.mark.processes
def test_the_size_of_the_page_is_said_apart_from_that_of_the_store(store):
    ended = report(store)
    held, _semicolon, page = ended.stdout.partition("; ")
    assert held.endswith("0 entries (0 B)")
    assert page == f"the page has {human_bytes((store.parent / 'report.html').stat().st_size)}\n"


@pytest.mark.processes
def test_open_gives_the_page_to_the_browser_under_an_address_that_survives_odd_names(store):
    browser = store.parent / "browser"
    browser.write_text(f"#!{sys.executable}\nimport sys\nopen('opened', 'w').write(sys.argv[1])\n")
    browser.chmod(0o755)
    ended = report(store, "--open", "-o", "a #1 ?.html", BROWSER=f"{browser} %s")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert (store.parent / "opened").read_text() == Path(store.parent / "a #1 ?.html").as_uri()


@pytest.mark.processes
@pytest.mark.parametrize("browser", ["", "/nowhere/browser %s"])
def test_without_a_browser_the_page_is_written_and_a_line_names_it(store, browser):
    ended = report(store, "--open", "--json", **({"BROWSER": browser} if browser else {}))
    page = store.parent / "report.html"
    assert ended.returncode == 1
    assert json.loads(ended.stdout)["page_bytes"] == page.stat().st_size
    assert ended.stderr.count("\n") == 1
    assert str(page) in ended.stderr
    assert "no browser was found" in ended.stderr
