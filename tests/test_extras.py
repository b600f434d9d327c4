"""Without an extra: one line that names it, wherever a package of it is first needed; reading as numpy needs none."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

import cachestore as cs
from tests.fakes import ROOT

MODEL = ROOT / "scripts/demo_model/vae"
pytestmark = pytest.mark.processes

HIDES = """
import importlib.abc, os, sys
class Hidden(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in os.environ["HIDDEN"].split(","):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Hidden())
"""
ALL = "torch,diffusers,transformers,accelerate,huggingface_hub,PIL,ftfy,bs4,av"


@pytest.fixture
def python(tmp_path):
    """Runs Python in which packages are not installed, by their names."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(HIDES)

    def run(*arguments, hidden=ALL):
        surroundings = {**os.environ, "HIDDEN": hidden, "PYTHONPATH": os.pathsep.join([str(tmp_path / "site"), str(ROOT)])}
        return subprocess.run(
            [sys.executable, *map(str, arguments)], capture_output=True, text=True, check=False, timeout=50, cwd=tmp_path, env=surroundings
        )

    return run


@pytest.fixture
def store(tmp_path):
    with cs.open(tmp_path / "store", mode="a") as store, store.writer() as writer:
        writer.put(cs.key("one"), {"x": np.arange(4)})
    return tmp_path / "store"


@pytest.mark.parametrize(
    ("hidden", "package"), [(ALL, "PIL"), *(pytest.param(name, name, marks=pytest.mark.slow) for name in ("torch", "PIL", "diffusers"))]
)
def test_precompute_without_an_extra_ends_with_1_and_one_line_that_names_it(python, tmp_path, hidden, package):
    (tmp_path / "pictures").mkdir()
    Image.new("RGB", (64, 64)).save(tmp_path / "pictures" / "a.png")
    ended = python(
        "-m",
        "cachestore",
        "precompute",
        "pictures",
        "--model",
        MODEL,
        "--vae",
        MODEL,
        "--store",
        "store",
        "--encode",
        "latents",
        "--json",
        hidden=hidden,
    )
    assert ended.returncode == 1, ended.stderr
    assert "Traceback" not in ended.stderr
    body = json.loads(ended.stdout)
    assert body["kind"] == "MissingExtra"
    assert body["error"].startswith(f"{package} is not installed")
    assert "pip install '.[" in body["error"]


@pytest.mark.parametrize("name", ["CachedDataset", "make_loader", "MixedDataset"])
def test_a_name_that_needs_torch_says_how_to_install_it(python, name):
    ended = python(
        "-c", f"import cachestore as cs\ntry:\n    cs.{name}\nexcept ImportError as error:\n    print(type(error).__name__, error)"
    )
    assert ended.stdout.startswith("MissingExtra torch is not installed. The extra [torch] brings it: run `pip install '.[torch]'`")


def test_a_model_of_the_hub_says_what_asking_for_it_needs(python, tmp_path):
    Image.new("RGB", (64, 64)).save(tmp_path / "a.png")
    ended = python("-c", "import cachestore as cs\ncs.precompute('.', model='someone/model', store='store')", hidden="huggingface_hub")
    last = ended.stderr.splitlines()[-1]
    assert last.startswith("cachestore.core.errors.MissingExtra: huggingface_hub is not installed. The extra [encode] brings it")


def test_reading_without_torch_says_so_and_as_numpy_works(python, store):
    lines = f"import cachestore as cs\nstore = cs.open({str(store)!r})\nkey = cs.key('one')\n"
    assert python("-c", f"{lines}print(store.get(key, as_numpy=True)['x'].tolist())").stdout == "[0, 1, 2, 3]\n"
    ended = python("-c", f"{lines}store.get(key)")
    assert ended.stderr.splitlines()[-1].startswith("cachestore.core.errors.MissingExtra: torch is not installed")


def test_what_is_missing_of_other_packages_stays_what_it_is(python):
    lines = "from cachestore.core.errors import naming_extras\nwith naming_extras():\n    import no_such_package"
    assert "ModuleNotFoundError: No module named 'no_such_package'" in python("-c", lines).stderr


def test_ray_is_named_where_it_is_missing_and_nothing_else_needs_it(python, store):
    ended = python("-c", "import cachestore.ray", hidden="ray")
    assert ended.stderr.splitlines()[-1].startswith("cachestore.core.errors.MissingExtra: ray is not installed")
    assert "'.[ray]'" in ended.stderr
    assert python("-m", "cachestore", "verify", store, hidden="ray").returncode == 0
