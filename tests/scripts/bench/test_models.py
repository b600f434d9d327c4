"""The models that the script measures have the published sizes, and one that fails stops no other."""

from dataclasses import replace

import pytest
import torch
from bench import models
from bench.models import MODELS
from bench.models_table import BIG_G, CLIP_L, GEMMA_2B, QWEN3_VL_4B, T5_XXL, UMT5_XXL

from cachestore.care import bench
from cachestore.encode.families.text import TEXT_FAMILIES
from cachestore.encode.models import random_model

pytestmark = pytest.mark.torch


@pytest.mark.parametrize(
    ("name", "texts"),
    [("sdxl", [CLIP_L, BIG_G]), ("flux", [CLIP_L, T5_XXL]), ("wan", [UMT5_XXL]), ("lumina2", [GEMMA_2B]), ("krea2", [QWEN3_VL_4B])],
)
def test_models_have_the_sizes_of_the_published_ones_in_the_dtypes_of_precompute(name, texts):
    model = random_model.random_model(MODELS[name], torch.device("meta"))
    modules = {part: module for part, module in model.parts.items() if isinstance(module, torch.nn.Module)}
    vae = modules.pop("vae")
    assert [sum(one.numel() for one in module.parameters()) for module in modules.values()] == [text.parameters for text in texts]
    family = TEXT_FAMILIES[MODELS[name].pipeline]
    assert {str(module.dtype) for module in modules.values()} == {f"torch.{family.text_dtype}"}
    assert str(vae.dtype) == f"torch.{family.vae_dtype}"


@pytest.mark.slow
def test_a_model_that_fails_is_named_at_the_end_and_the_others_are_measured(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(bench, "SECONDS", 0.0)
    monkeypatch.setattr(bench, "FIRST_COUNT", 1)
    monkeypatch.setattr(bench, "HOST", bench.HOST[:1])
    monkeypatch.setitem(MODELS, "flux", replace(MODELS["flux"], modules={}))
    asked = ["--tiny", "--device", "cpu", "--folder", str(tmp_path), "--only", "flux", "--only", "sdxl"]
    with pytest.raises(SystemExit, match=r"^FLUX.1 .*: BadInput: the loaded model has no "):
        models.main(asked)
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| SDXL")]
    assert [row[1] for row in rows] == ["jpeg 3000x2000 to 1216x832", "captions"]
    assert all(float(row[2].removesuffix("/s")) > 0 for row in rows)
    assert [*tmp_path.iterdir()] == []
