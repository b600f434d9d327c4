"""Families looked up, and the `read` blocks that their rows give."""

import pytest

from cachestore.core.errors import BadInput
from cachestore.encode import families
from cachestore.encode.vae_families import VAE_FAMILIES


def test_an_unknown_class_is_refused_with_the_known_ones():
    with pytest.raises(BadInput):
        families.text_family("NoPipeline")
    with pytest.raises(BadInput):
        families.vae_family("NoVae")


def test_a_vae_whose_config_lacks_what_has_no_default_is_refused():
    with pytest.raises(BadInput):
        families.latents_read(VAE_FAMILIES["AutoencoderKLCosmos"], {}, "mean")


def test_a_vaes_read_block_takes_what_its_config_says_and_the_defaults_for_the_rest():
    row = VAE_FAMILIES["AutoencoderKL"]
    old = families.latents_read(row, {"block_out_channels": [128, 256, 512, 512]}, "moments")
    assert (old["scaling_factor"], old["shift_factor"], old["spatial_factor"], old["channels"]) == (0.18215, None, 8, 4)
    new = families.latents_read(
        row, {"scaling_factor": 0.3611, "shift_factor": 0.1159, "latent_channels": 16, "latents_mean": None}, "mean"
    )
    assert (new["scaling_factor"], new["shift_factor"], new["channels"], new["stored"]) == (0.3611, 0.1159, 16, "mean")
