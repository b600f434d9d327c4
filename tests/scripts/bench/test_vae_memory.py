"""What a VAE's row says of its memory is what its published size needs: no less, and not much more."""

import pytest
import torch
from bench import vae_memory
from bench.models_table import MODELS

from cachestore.encode.families.vae import VAE_FAMILIES

pytestmark = pytest.mark.torch

ROWS = sorted({model.vae.name for model in MODELS})


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_a_row_says_at_least_what_the_tensors_take_in_the_dtype_of_its_family(name):
    row = VAE_FAMILIES[name]
    is_of_clips = row.has_frames and not row.is_of_pictures
    for dtype in (torch.float32, torch.bfloat16):
        vae = vae_memory.build(name, dtype)
        parameters = {model.vae.parameters for model in MODELS if model.vae.name == name}
        assert name == "AutoencoderKL" or sum(one.numel() for one in vae.parameters()) in parameters
        for frames in vae_memory.FRAMES if is_of_clips else (1,):
            found, estimate = vae_memory.bytes_a_pixel(vae, frames), vae_memory.estimate_of(row, frames, dtype)
            assert found <= 1.01 * estimate, (dtype, frames)
            assert name == "AutoencoderKLCosmos" or estimate <= 2.1 * found, (dtype, frames)  # its attention grows with the picture


def test_a_watch_counts_what_exists_at_once_and_shared_memory_once():
    with vae_memory.Watch() as watch:
        one = torch.empty(1 << 20, dtype=torch.uint8, device="meta")
        other = one.view(1 << 10, -1) + 1
        del one
        kept = other[:512] + 1
    assert (watch.most, watch.now) == (4 << 19, 3 << 19)
    del other, kept
    assert watch.now == 0
