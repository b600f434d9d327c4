"""How a recipe is read, as values: what is known, and that nothing unknown is passed over."""

import pytest

from cachestore.core.errors import FormatError, NewerFormat
from cachestore.core.keys import Recipe
from cachestore.core.read_block import Constant, Form, Padding, parse_latents, parse_text
from cachestore.encode.families import lookup as families
from cachestore.encode.families.text import PLAIN, TEXT_FAMILIES
from cachestore.encode.families.vae import VAE_FAMILIES
from tests.train.stores import FLUX, SDXL, recipes


def text(**changes):
    return Recipe("text", {}, {**families.text_read(SDXL), **changes})


def latents(**changes):
    return Recipe("latents", {}, {**recipes().latents.read, **changes})


LACKING = [other for family in TEXT_FAMILIES.values() for other in (*family.without.values(), *family.configured.values())]


@pytest.mark.parametrize("family", [*TEXT_FAMILIES.values(), *LACKING, PLAIN], ids=lambda family: family.name)
def test_the_recipe_of_every_family_is_known_whole(family):
    widths = dict.fromkeys([*family.components, *family.asks], 32)
    block = parse_text(Recipe("text", {}, families.text_read(family, limit=77, widths=widths)))
    assert block.names() >= {*family.outputs, *family.constants}
    assert block.mask_name == family.mask


@pytest.mark.parametrize("stored", ["moments", "mean", "sample"])
def test_the_recipe_of_every_vae_is_known_whole(stored):
    for family in VAE_FAMILIES.values():
        config = {"latent_channels": 4, "spatial_compression_ratio": 8, "latents_mean": [0.0] * 4, "latents_std": [1.0] * 4}
        required = {name: config[name] for name in family.required}
        block = parse_latents(Recipe("latents", {}, families.latents_read(family, required, stored)))
        assert block.stored == (stored if family.is_random else "mean")


def test_forms_padding_and_constants_become_values():
    assert parse_text(text()).outputs["prompt_embeds"] == Form(("prompt_embeds.text_encoder", "prompt_embeds.text_encoder_2"), -1)
    nested = {"prompt_embeds": {"join": [{"join": ["a", "b"], "dim": -1}, "c"], "dim": -2}}
    assert parse_text(text(outputs=nested)).outputs["prompt_embeds"] == Form((Form(("a", "b"), -1), "c"), -2)
    plain = parse_text(Recipe("text", {}, families.text_read(PLAIN)))
    assert plain.padding == {"prompt_embeds": Padding(-2, "right", None, 1, 0.0, "prompt_attention_mask")}
    flux = parse_text(Recipe("text", {}, families.text_read(FLUX)))
    assert flux.constants == {"text_ids": Constant(("S", 3), "prompt_embeds")}
    widened = {"prompt_embeds": {"join": [{"join": ["a", "b"], "dim": -1, "widen": 9}, "c"], "dim": -2}}
    assert parse_text(text(outputs=widened)).outputs["prompt_embeds"] == Form((Form(("a", "b"), -1, 9), "c"), -2)
    counted = {"ids": {"kind": "positions", "shape": ["B", "S", 4], "like": "prompt_embeds"}}
    assert parse_text(text(constants=counted)).constants == {"ids": Constant(("B", "S", 4), "prompt_embeds", "positions")}


def test_factors_that_a_vae_does_not_have_change_nothing():
    block = parse_latents(latents(scaling_factor=None, shift_factor=None))
    assert (block.scaling_factor, block.shift_factor) == (1.0, None)


@pytest.mark.parametrize(
    "changes",
    [
        {"format": 2},
        {"rotate": 90},
        {"outputs": {"x": {"from": "x", "widen": 9}}},
        {"outputs": {"x": {"join": [], "dim": -1}}},
        {"outputs": None},
        {"pad": {"prompt_embeds": {"side": "right"}}},
        {"pad": {"prompt_embeds": {"twice": 1}}},
        {"pad": {"prompt_embeds": {"dim": -2, "side": "top", "length": None, "mask": None}}},
        {"outputs": {"x": {"join": ["x"], "dim": -1, "widen": "text_encoder_3"}}},
        {"constants": {"c": {"kind": "ones", "shape": [], "like": "prompt_embeds"}}},
        {"constants": {"c": {"kind": "positions", "shape": ["S"], "like": "prompt_embeds"}}},
        {"constants": {"c": {"kind": "zeros", "shape": ["T"], "like": "prompt_embeds"}}},
        {"constants": {"c": {"kind": "zeros", "shape": [], "like": "other"}}},
    ],
)
def test_a_text_recipe_that_is_not_known_whole_is_refused(changes):
    with pytest.raises(NewerFormat):
        parse_text(text(**changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"format": None},
        {"rotate": 90},
        {"stored": "codes"},
        {"latents_mean": [0.5]},
        {"patchify": "two"},
        {"channels": [4]},
        {"channels": 0},
        {"spatial_factor": "8"},
        {"temporal_factor": True},
        {"mask_channels": -1},
    ],
)
def test_a_latents_recipe_that_is_not_known_whole_is_refused(changes):
    with pytest.raises(NewerFormat):
        parse_latents(latents(**changes))


def test_latents_that_were_normalised_already_say_so_and_moments_cannot_be():
    assert parse_latents(latents(stored="sample", scaled=True)).is_scaled
    assert not parse_latents(latents(stored="sample")).is_scaled
    for wrong in (latents(stored="moments", scaled=True), latents(stored="sample", scaled="yes")):
        with pytest.raises(FormatError):
            parse_latents(wrong)
