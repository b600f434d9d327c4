"""What tiny models made, exported as each trainer caches it and imported again: the same values for each sample, or a reason."""

import json
import os
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import cachestore as cs

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore::FutureWarning:diffusers"),
    pytest.mark.usefixtures("torch_files_read_here"),
]

OPTIONS: dict[str, Any] = {"resolution": 64, "bucket_step": 16, "latents": "sample", "vae_dtype": "float32", "text_dtype": "float32"}
ROWS = {"a/one": ((100, 60), "a fox"), "a/two": ((60, 100), "a bird, in snow"), "two": ((70, 70), "a fox"), "four.v2": ((100, 60), "")}
FORMATS: dict[str, tuple[str, ...]] = {
    "sdxl": ("sd-scripts", "simpletuner", "ai-toolkit"),
    "sd3": ("sd-scripts", "simpletuner", "ai-toolkit"),
}
FORMATS["flux"] = FORMATS["sdxl"]
FORMATS["zimage"] = ("musubi",)
"""musubi-tuner's form of FLUX needs control images."""


@pytest.fixture
def data(tmp_path):
    folder = tmp_path / "data"
    (folder / "a").mkdir(parents=True)
    rows = []
    for seed, (name, (size, caption)) in enumerate(ROWS.items()):
        Image.fromarray(np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), np.uint8)).save(folder / f"{name}.png")
        os.utime(folder / f"{name}.png", (9, 9))
        rows.append({"id": name, "image": f"{name}.png", "caption": caption})
    (folder / "m.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "m.jsonl"


def check_same(one, other, *, but=()):
    names = {name for name, value in one.items() if isinstance(value, torch.Tensor)} - set(but)
    assert names <= other.keys()
    for name in sorted(names):
        assert one[name].dtype == other[name].dtype, name
        assert torch.equal(one[name], other[name]), name


@pytest.mark.parametrize("family", FORMATS)
def test_what_is_exported_and_imported_with_its_model_is_the_same_for_each_sample(tmp_path, data, built, family):
    model = built(family).folder
    assert cs.precompute(data, model=model, store=tmp_path / "store", inline=True, **OPTIONS).complete
    for kind in FORMATS[family]:
        folder, back = tmp_path / kind, tmp_path / f"{kind} back"
        flat = {"musubi": [row for row in ROWS if not row.startswith("a/two")]}.get(kind, list(ROWS))
        report = cs.export_cache(tmp_path / "store", format=kind, folder=folder, family=family if family != "zimage" else "z-image")
        assert {failure["sample"] for failure in report.failures} == ({"two"} if kind == "musubi" else set())
        imported = cs.import_cache(kind, folder, store=back, data=data, model=model)
        form: Any = "raw" if not cs.CachedDataset(back).recipes["latents"].read.get("scaled") else "sample"
        own, came = (cs.CachedDataset(store, latents=form) for store in (tmp_path / "store", back))
        if kind == "musubi":
            assert {failure["sample"] for failure in imported.report.failures} == {"a/two", "two"}
            flat.remove("two")
        else:
            assert imported.complete, imported.report.failures
        assert len(came) == len(flat)
        for name in flat:
            check_same(own[own.index(name)], came[came.index(name)])
