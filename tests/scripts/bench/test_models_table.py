"""The table of docs/models.md is what the package's forecast says, and has every family."""

import pytest
from bench import models_table
from bench.models_table import MODELS, WITHOUT_SIZES, latents_bytes, text_bytes

from cachestore.encode.families.text import TEXT_FAMILIES
from tests.fakes import ROOT


def test_the_page_has_the_table_that_the_script_prints():
    assert "\n".join(models_table.table()) in (ROOT / "docs/models.md").read_text(encoding="utf-8")


def test_every_family_with_a_pipeline_has_a_model():
    assert {model.pipeline for model in MODELS} | WITHOUT_SIZES == {*TEXT_FAMILIES}


@pytest.mark.parametrize(
    ("hub_id", "text", "latents"),
    [
        # 77 rows of 768 and of 1280 and a pooled row of 1280, in float32; mean and variance of 4 channels of 128 x 128, in float32
        ("stabilityai/stable-diffusion-xl-base-1.0", 4 * (77 * (768 + 1280) + 1280), 4 * 8 * 128 * 128),
        # 512 rows of 4096 and a pooled row of 768, in bfloat16; 16 channels
        ("black-forest-labs/FLUX.1-dev", 2 * (512 * 4096 + 768), 2 * 32 * 128 * 128),
        # what LTX-2 keeps of 49 layers; 128 channels at a 32nd of the side
        ("Lightricks/LTX-2", 2 * 72 * 3840, 4 * 256 * 32 * 32),
        # 128 rows of T5, the same rows of 32 layers of Llama, and a pooled row
        ("HiDream-ai/HiDream-I1-Full", 2 * (128 * 4096 * 33 + 2048), 2 * 32 * 128 * 128),
        # the rows of the caption alone; a latent without variance at a 32nd of the side
        ("Efficient-Large-Model/Sana_1600M_1024px_diffusers", 2 * 72 * 2304, 2 * 32 * 32 * 32),
    ],
)
def test_bytes_follow_from_the_shapes(hub_id, text, latents):
    model = next(model for model in MODELS if model.hub_id == hub_id)
    assert latents_bytes(model) == latents
    assert text_bytes(model, 72) == pytest.approx(text, rel=0.01)  # the forecast takes one width for pooled outputs
