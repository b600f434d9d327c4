"""Buckets of other trainers through a store: encoded, exported so that the trainer finds everything, imported again."""

import os
from typing import Any

import numpy as np
import pytest
from PIL import Image

import cachestore as cs
from cachestore.core.errors import BadInput, RecipeMismatch
from cachestore.files.paths import Layout
from cachestore.store.read.rows import newest_catalog

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore::FutureWarning:diffusers"),
    pytest.mark.usefixtures("torch_files_read_here"),
]

SIZES = [(150, 90), (97, 150), (121, 119), (400, 60), (199, 101), (70, 50), (64, 100), (333, 222), (151, 90), (90, 151)]
SETTINGS: dict[str, Any] = {"encode": ("latents",), "resolution": 128, "latents": "sample", "vae_dtype": "float32", "inline": True}
TRAINERS: dict[str, dict[str, Any]] = {
    "sd-scripts": {"family": "flux", "bucket_step": 16, "bucket_min": 64, "bucket_max": 256},
    "musubi": {"family": "z-image"},
    "ai-toolkit": {"family": "flux", "bucket_step": 32},  # as for the real model, whose sides have larger steps than the tiny one's
}


@pytest.fixture
def data(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    for seed, size in enumerate(SIZES):
        Image.fromarray(np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), np.uint8)).save(folder / f"{seed}.png")
        os.utime(folder / f"{seed}.png", (9, 9))
    return folder


@pytest.fixture
def run(data, built, tmp_path):
    """Encodes with a tiny model, and exports for a trainer."""

    def call(trainer, store="store", **options):
        model, wanted = built("zimage" if trainer == "musubi" else "flux").folder, dict(TRAINERS[trainer])
        family = wanted.pop("family")
        assert cs.precompute(data, model=model, store=tmp_path / store, **SETTINGS | wanted | options).complete
        return cs.export_cache(tmp_path / store, format=trainer, folder=tmp_path / f"{store} {trainer}", family=family)

    return call


@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_trainer_finds_all_latents_in_its_own_buckets_and_says_which_it_needs(run, trainer):
    made = run(trainer, buckets=trainer)
    assert made.complete
    assert not made.not_taken
    if trainer != "sd-scripts":  # its buckets are ours, but for ties
        others = run(trainer, "others", bucket_step=16)
        assert not others.complete
        assert f'precompute with buckets="{trainer}" makes latents for its buckets' in others.not_taken[0]


def test_simpletuner_gets_the_sizes_and_crops_of_its_own_rule(data, built, tmp_path):
    model = built("flux").folder
    assert cs.precompute(data, model=model, store=tmp_path / "store", **SETTINGS, buckets="simpletuner", bucket_step=16).complete
    assert cs.export_cache(tmp_path / "store", format="simpletuner", folder=tmp_path / "out", family="flux").complete
    catalog = newest_catalog(Layout.at(tmp_path / "store"), "train")
    assert catalog is not None
    (column,) = (column for column in catalog.columns if column.role == "image")
    assert dict(column.options) == {"resolution": 128, "step": 16, "buckets": "simpletuner"}
    facts = column.cell(catalog.ids.index("3.png")).facts
    assert [tuple(facts[name][:2]) for name in ("size", "bucket", "resized")] == [(400, 60), (336, 48), (336, 50)]


def test_a_square_of_diffusers_scripts_is_centred_and_random_crops_stay_inside(data, built, tmp_path):
    fixed: dict[str, Any] = {**SETTINGS, "model": built("flux").folder, "store": tmp_path / "store", "buckets": "diffusers"}
    assert cs.precompute(data, **fixed).complete
    assert set(map(tuple, cs.CachedDataset(tmp_path / "store").buckets)) == {(128, 128)}
    drawn: dict[str, Any] = {**fixed, "crop": "random", "variants": 2, "flip": True, "name": "drawn"}
    assert cs.precompute(data, **drawn).complete
    odd: dict[str, Any] = fixed | {"resolution": 127, "name": "odd"}
    with pytest.raises(BadInput):
        cs.precompute(data, **odd)


def test_other_buckets_under_a_used_name_need_replace(run, data, built, tmp_path):
    run("musubi", buckets="musubi")
    model = built("zimage").folder
    with pytest.raises(RecipeMismatch):
        cs.precompute(data, model=model, store=tmp_path / "store", **SETTINGS, bucket_step=16)
    again = cs.precompute(data, model=model, store=tmp_path / "store", **SETTINGS, bucket_step=16, replace=True)
    assert again.complete
    assert again.encoded < len(SIZES), "pictures with the same crop by both rules are not encoded again"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"buckets": "simpletuner", "no_upscale": True}, 'no_upscale=True cannot be used with buckets="simpletuner"'),
        ({"buckets": "musubi", "bucket_step": 64}, 'bucket_step cannot be used with buckets="musubi"'),
        ({"buckets": "musubi", "bucket_max": 256}, 'bucket_max cannot be used with buckets="musubi"'),
        ({"buckets": "sd-scripts", "bucket_min": 64, "no_upscale": True}, "bucket_min cannot be used with no_upscale=True"),
        ({"pixels": "as-trainer"}, 'pixels="as-trainer" needs a trainer'),
        ({"buckets": "kohya"}, "^buckets must be cachestore, sd-scripts, musubi, simpletuner, ai-toolkit or diffusers, not 'kohya'"),
    ],
)
def test_settings_that_a_rule_lacks_are_refused(data, built, tmp_path, options, message):
    with pytest.raises(BadInput, match=message):
        cs.precompute(data, model=built("flux").folder, store=tmp_path / "store", **SETTINGS | options)
    assert not (tmp_path / "store").exists()
