"""What a data set says of its tensors before it reads one: nothing that a batch does not hold, and None for what no recipe tells."""

import pytest

import cachestore as cs
from cachestore.core.keys import Recipe
from cachestore.files.paths import Layout
from tests.train.stores import FLUX, PLAIN, SDXL, Recipes, Row, agrees, make_store, recipes

pytestmark = pytest.mark.torch

MASKS = Recipe("mask", {"kind": "masks"}, {"format": 1, "stored": "mask", "factor": 8})


@pytest.mark.parametrize("family", [SDXL, FLUX, PLAIN, None])
@pytest.mark.parametrize(
    ("stored", "form"), [("moments", "sample"), ("moments", "moments"), ("moments", "raw"), ("mean", "mean"), (None, "mean")]
)
def test_features_are_what_a_batch_holds(family, stored, form, tmp_path):
    if family is None and stored is None:
        return
    data = cs.CachedDataset(make_store(tmp_path / "s", [Row("a"), Row("b", ("two words",))], recipes(family, stored)), latents=form)
    agrees(data, [0, 1])
    assert ("latents" in data.features) == (stored is not None)


def test_what_a_recipe_tells_stands_there_in_one_line_and_the_rest_is_a_question(tmp_path):
    text = Recipe("text", {"model": "flux", "dtype": "float32"}, recipes(FLUX).text.read)
    latents = Recipe("latents", {"vae": 1, "dtype": "float32"}, recipes().latents.read)
    found = cs.CachedDataset(make_store(tmp_path / "s", [Row("a")], Recipes(text, latents))).features
    assert {name: str(feature) for name, feature in found.items()} == {
        "latents": "Feature(float32 [?, 4, ?, ?])",
        "prompt_embeds": "Feature(float32 [...])",
        "pooled_prompt_embeds": "Feature(float32 [...])",
        "text_ids": "Feature(float32 [?, 3])",
        "original_size": "Feature(int64 [?, 2])",
        "crop_top_left": "Feature(int64 [?, 2])",
        "target_size": "Feature(int64 [?, 2])",
    }
    plain = cs.CachedDataset(make_store(tmp_path / "p", [Row("a")], recipes(PLAIN))).features
    assert repr(plain["prompt_embeds"]) == "Feature(? [?, ?, ?])"
    assert repr(plain["prompt_attention_mask"]) == "Feature(int64 [?, ?])"


def test_masks_and_control_images_have_features_too(tmp_path):
    made = Recipes(recipes().text, recipes().latents, MASKS)
    one = make_store(tmp_path / "one", [Row("a", controls=[(64, 48)], has_mask=True), Row("b", controls=[(64, 48)])], made)
    agrees(cs.CachedDataset(one), [0, 1])
    several = make_store(tmp_path / "several", [Row("a", controls=[(64, 48)] * 2), Row("b", controls=[(64, 48)])], recipes())
    agrees(cs.CachedDataset(several), [0, 1])
    assert cs.CachedDataset(several).features["control_latents"].shape is None


def test_features_read_no_entry_and_follow_the_fields(tmp_path):
    store = make_store(tmp_path / "s", [Row("a")], recipes())
    segments = list(Layout.at(store).segments.rglob("*.safetensors"))
    assert segments
    for segment in segments:
        segment.unlink()
    assert set(cs.CachedDataset(store, fields={"pooled_prompt_embeds"}).features) == {"pooled_prompt_embeds"}
    assert cs.CachedDataset(make_store(tmp_path / "empty", [], Recipes())).features == {}
