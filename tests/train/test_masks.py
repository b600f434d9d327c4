"""Stored masks to what a loss is weighted by."""

import numpy as np
import pytest
import torch

from cachestore.core.errors import FormatError
from cachestore.core.keys import Recipe
from cachestore.core.read_block import parse_mask
from cachestore.encode.pictures.masks import mask_recipe
from cachestore.train.latents import mask_shape, read_mask, read_masks_into

pytestmark = pytest.mark.torch

BLOCK = parse_mask(mask_recipe(8))


def stored(seed=0):
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, (1, 4, 6), np.uint8))


def test_a_mask_is_read_as_fractions_of_one():
    mask = read_mask("mask", {"mask": stored()}, 1)
    assert (mask.dtype, mask.shape) == (torch.float32, (1, 4, 6))
    assert mask.equal(stored().float() / 255)


def test_beside_folded_latents_it_is_the_mean_of_each_patch():
    mask = read_mask("mask", {"mask": stored()}, 2)
    assert mask.shape == mask_shape((1, 4, 6), 2) == (1, 2, 3)
    assert torch.allclose(mask, torch.nn.functional.avg_pool2d(stored().float() / 255, 2))


@pytest.mark.parametrize("patch", [1, 2])
def test_a_batch_has_the_bits_of_its_masks(patch):
    masks = [stored(seed) for seed in range(3)]
    out = torch.empty((3, *mask_shape((1, 4, 6), patch)))
    read_masks_into(torch.stack(masks), patch, out)
    assert out.equal(torch.stack([read_mask("mask", {"mask": one}, patch) for one in masks]))


def test_an_entry_without_a_mask_and_an_unknown_recipe_are_refused():
    with pytest.raises(FormatError):
        read_mask("mask", {"moments": stored()}, 1)
    for read in ({"format": 2, "stored": "mask", "factor": 8}, {"format": 1, "stored": "mask"}, {**mask_recipe(8).read, "blur": 3}):
        with pytest.raises(FormatError):
            parse_mask(Recipe("mask", {}, read))
