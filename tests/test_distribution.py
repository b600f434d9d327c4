"""What a user installs: a wheel and an sdist are built, and the wheel works without extras in a new environment of each Python there is."""

import shutil
import subprocess
import sys
import tarfile
import zipfile

import numpy as np
import pytest

import cachestore as cs
from tests.fakes import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
NOT_INSTALLED = ("torch", "PIL", "diffusers", "transformers")


def run(*command, cwd):
    return subprocess.run([*map(str, command)], capture_output=True, text=True, check=False, timeout=300, cwd=cwd)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder of the wheel and the sdist, built from the tree's files alone."""
    folder = tmp_path_factory.mktemp("dist")
    ended = run(sys.executable, "-m", "build", "--outdir", folder, ROOT, cwd=folder)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return folder


@pytest.fixture(scope="module", params=PYTHONS)
def installed(request, built, tmp_path_factory):
    """The folder of programs of a new environment of one Python that has the wheel and what it requires, no extras."""
    folder = tmp_path_factory.mktemp("new")
    is_own = request.param == ".".join(map(str, sys.version_info[:2]))
    python = sys.executable if is_own else shutil.which(f"python{request.param}")
    if python is None or (run(python, "-m", "venv", folder, cwd=folder).returncode and not is_own):
        pytest.skip(f"no Python {request.param} with venv is on the PATH")
    (wheel,) = built.glob("*.whl")
    ended = run(folder / "bin/python", "-m", "pip", "install", "--quiet", wheel, cwd=folder)
    assert ended.returncode == 0, ended.stderr
    for name in NOT_INSTALLED:
        assert run(folder / "bin/python", "-c", f"import {name}", cwd=folder).returncode == 1, name
    return folder / "bin"


def test_wheel_and_sdist_bear_the_name_of_the_distribution_and_hold_the_package(built):
    (wheel,) = built.glob("*.whl")
    (sdist,) = built.glob("*.tar.gz")
    assert wheel.name == f"diffusion_cachestore-{cs.__version__}-py3-none-any.whl"
    assert sdist.name == f"diffusion_cachestore-{cs.__version__}.tar.gz"
    tree = {str(path.relative_to(ROOT)) for path in (ROOT / "cachestore").rglob("*") if path.suffix in {".py", ".typed"}}
    with zipfile.ZipFile(wheel) as names:
        assert tree <= set(names.namelist())
    with tarfile.open(sdist) as names:
        assert {f"diffusion_cachestore-{cs.__version__}/{name}" for name in (*tree, "pyproject.toml", "README.md")} <= set(names.getnames())


def test_without_extras_the_command_helps_and_verifies_a_store(installed, tmp_path):
    with cs.open(tmp_path / "store", mode="a") as store, store.writer() as writer:
        writer.put(cs.key("one"), {"x": np.arange(4)})
    assert run(installed / "cachestore", "--version", cwd=tmp_path).stdout == f"cachestore {cs.__version__}\n"
    assert "precompute" in run(installed / "cachestore", "--help", cwd=tmp_path).stdout
    ended = run(installed / "cachestore", "verify", "store", cwd=tmp_path)
    assert (ended.returncode, ended.stderr) == (0, ""), ended.stdout
    (segment,) = (tmp_path / "store").rglob("*.safetensors")
    segment.chmod(0o644)
    segment.write_bytes(segment.read_bytes()[:-1] + b"\1")
    assert run(installed / "cachestore", "verify", "store", cwd=tmp_path).returncode == 4


def test_without_extras_a_line_names_the_one_that_is_missing(installed, tmp_path):
    (tmp_path / "prompts.txt").write_text("a cat\n")
    ended = run(
        installed / "cachestore", "precompute", "prompts.txt", "--model", "none", "--store", "store", "--encode", "text", cwd=tmp_path
    )
    assert ended.returncode == 1
    assert "[encode]" in ended.stderr
    assert "Traceback" not in ended.stderr
    ended = run(installed / "python", "-c", "import cachestore as cs; cs.CachedDataset", cwd=tmp_path)
    assert "MissingExtra: torch is not installed. The extra [torch] brings it" in ended.stderr
