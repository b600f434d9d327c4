"""Ways of resizing through a store: chosen once, kept by later runs, used again to check and to refill."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import cachestore as cs
from cachestore.core.errors import RecipeMismatch
from cachestore.encode.families.resamplers import RESAMPLERS
from cachestore.files.paths import Layout
from cachestore.store.read.rows import newest_catalog
from tests.fakes import ROOT, asks_for, started

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore::FutureWarning:diffusers")]

SETTINGS: dict[str, Any] = {"encode": ("latents",), "resolution": 64, "bucket_step": 16, "vae_dtype": "float32", "inline": True}


@pytest.fixture
def data(tmp_path):
    """Three pictures that are larger than their buckets."""
    folder = tmp_path / "data"
    folder.mkdir()
    for seed, size in enumerate([(150, 90), (90, 150), (120, 120)]):
        pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{seed}.png")
        os.utime(folder / f"{seed}.png", (9, 9))
    return folder


@pytest.fixture
def run(built, data, tmp_path):
    """Calls `precompute` with the tiny VAE into the one store."""

    def call(**options):
        return cs.precompute(data, model=built("flux").folder, store=tmp_path / "store", **SETTINGS | options)

    return call


def way_of(store, name="train"):
    """The transform in the recipe of a data set's latents, and what its catalog says that was asked for."""
    catalog = newest_catalog(Layout.at(store), name)
    (recipe,) = catalog.recipes.values()
    return recipe.make["transform"]["pixels"], catalog.request["latents"].get("resample")


def test_a_new_data_set_is_resized_by_torchs_lanczos(run, tmp_path):
    assert run().encoded == 3
    assert way_of(tmp_path / "store") == ("torch-lanczos-cover-center/1", "lanczos")
    assert run().encoded == 0


@pytest.mark.parametrize("name", RESAMPLERS)
def test_a_data_set_keeps_the_way_in_which_it_was_made(run, tmp_path, name):
    pytest.importorskip("cv2")
    assert run(resample=name).encoded == 3
    assert run().encoded == 0
    assert way_of(tmp_path / "store") == (RESAMPLERS[name].pictures, name)


def test_another_way_must_be_asked_for_and_encodes_everything_again(run, tmp_path):
    run(resample="pillow")
    with pytest.raises(RecipeMismatch, check=asks_for("replace")):
        run(resample="lanczos")
    assert run(resample="lanczos", replace=True).encoded == 3
    assert way_of(tmp_path / "store") == ("torch-lanczos-cover-center/1", "lanczos")
    assert run().encoded == 0


def test_replacing_the_samples_alone_keeps_the_way(run):
    run(resample="pillow")
    assert run(replace=True).encoded == 0


@pytest.mark.parametrize("name", RESAMPLERS)
def test_values_are_checked_and_refilled_in_the_way_in_which_they_were_made(run, tmp_path, name):
    pytest.importorskip("cv2")
    run(resample=name)
    store = tmp_path / "store"
    before = _values(store)
    assert cs.verify(store, recompute=3).ok
    for segment in (store / "segments").rglob("*.safetensors"):
        segment.unlink()
    assert cs.repair(store, refill=True).refilled == 3
    assert _values(store) == before
    assert cs.verify(store, recompute=3).ok


def _values(store):
    opened = cs.open(store)
    return {key: {name: value.tobytes() for name, value in opened.get(key, as_numpy=True).items()} for key in sorted(opened.keys())}


@pytest.mark.slow
@pytest.mark.processes
def test_a_rank_whose_torch_is_too_old_refuses_and_the_other_one_encodes(built, data, tmp_path):
    old = tmp_path / "old" / "torch-2.9.1.dist-info"
    old.mkdir(parents=True)
    (old / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.9.1\n")
    arguments = ["-m", "cachestore", "precompute", data, "--model", built("flux").folder, "--store", tmp_path / "store"]
    arguments += ["--encode", "latents", "--resolution", "64", "--bucket-step", "16", "--vae-dtype", "float32", "--world-size", "2"]
    paths = {0: str(ROOT), 1: os.pathsep.join([str(old.parent), str(ROOT)])}
    ranks = [started([*arguments, "--rank", rank], ROOT, {"PYTHONPATH": path}) for rank, path in paths.items()]
    (_, first), (_, second) = (rank.communicate(timeout=55) for rank in ranks)
    assert ranks[1].returncode == 1
    assert "--resample lanczos needs torch 2.12 or newer, but torch 2.9.1 is installed here" in second
    assert ranks[0].returncode == 0, first
    assert way_of(tmp_path / "store")[0] == "torch-lanczos-cover-center/1"
    assert Path(tmp_path / "store").is_dir()
