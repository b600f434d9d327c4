"""The lines of `docs/start.md`, run as they stand, in a new environment that finds its requirements in this one."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest

from tests import pages
from tests.fakes import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.torch, pytest.mark.timeout(900)]

CLONE = "git clone … && cd cachestore\n"
FILES = ("cachestore", "scripts", "pyproject.toml", "README.md", "LICENSE")


def run(command, folder):
    """Run a command that finds this environment's packages, but not its own programs."""
    packages = os.pathsep.join(path for path in sys.path if path.endswith("site-packages"))
    environment = os.environ | {"PYTHONPATH": packages, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=800, env=environment, cwd=folder)


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """What a clone has, as far as the page needs it."""
    folder = tmp_path_factory.mktemp("start") / "cachestore"
    folder.mkdir()
    for name in FILES:
        path = ROOT / name
        if path.is_dir():
            shutil.copytree(path, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(path, folder)
    return folder


@pytest.fixture(scope="module")
def run_page(clone):
    """The folder that the page works in, and what its blocks printed, after all of them ran in one shell."""
    page = pages.text_of("start.md")
    assert CLONE in page
    lines = ["set -e", f"cd '{clone}'"]
    for number, (kind, text) in enumerate(pages.blocks(page, "sh", "python")):
        saved = f"cat > train.py <<'END'\n{text}END"
        lines += [f"echo '=== {number}'", saved if kind == "python" else text.replace(CLONE, "")]
    ended = run(["bash", "-c", "\n".join(lines)], clone)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return clone.parent / "tour", re.split(r"^=== \d+\n", ended.stdout, flags=re.MULTILINE)[1:]


def command(folder, *arguments):
    ended = run([folder / "env/bin/cachestore", *arguments, "--json"], folder)
    return ended.returncode, json.loads(ended.stdout)


def test_the_lines_install_encode_and_show(run_page):
    folder, _printed = run_page
    assert (folder / "report.html").read_text().startswith("<!DOCTYPE html>")
    assert (folder / "cat.png").read_bytes().startswith(b"\x89PNG")
    assert (folder / "env/bin/cachestore").is_file()


def test_training_from_the_store_lowers_the_loss(run_page):
    _folder, printed = run_page
    [losses] = [found for text in printed if (found := re.findall(r"^epoch \d+: loss ([\d.]+)$", text, re.MULTILINE))]
    assert len(losses) == 10
    assert float(losses[-1]) < 0.7 * float(losses[0])


def test_the_page_counts_what_the_store_has(run_page):
    folder, _printed = run_page
    code, stats = command(folder, "stats", "cache/")
    assert code == 0
    assert stats["entries"] == 14 + 15 + 1  # pictures, captions with the empty one, the edited caption
    [catalog] = stats["catalogs"]
    assert (catalog["generation"], catalog["samples"]) == (2, 14)
    assert command(folder, "verify", "cache/")[0] == 0
