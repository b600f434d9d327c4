"""A VAE whose encoder is compiled: what it makes is what it makes without."""

import shutil

import numpy as np
import pytest
import torch

from cachestore.encode.batching import compiling
from cachestore.encode.pictures.vae import Compiled
from tests.encode.tiny import of_diffusers

pytestmark = pytest.mark.torch


class Fast(torch.nn.Module):
    """Stands for what torch.compile gives: the same module, and a list of the sizes of its batches."""

    def __init__(self, module, **_options):
        super().__init__()
        self.module, self.sizes = module, []

    def forward(self, inputs):
        self.sizes.append(len(inputs))
        return self.module(inputs)


class Broken(Fast):
    def forward(self, inputs):
        del inputs
        raise RuntimeError("no compiler")


@pytest.fixture(scope="module")
def vae():
    torch.manual_seed(0)
    return of_diffusers("AutoencoderKL")(block_out_channels=(8, 8), down_block_types=("DownEncoderBlock2D",) * 2, norm_num_groups=2).eval()


def pictures(count, side=32):
    return torch.from_numpy(np.random.default_rng(count).normal(size=(count, 3, side, side)).astype(np.float32))


def encode(compiled, inputs, seconds=1.0):
    with torch.inference_mode():
        found = compiled.encode(inputs).latent_dist.parameters
    compiled.ran(seconds)
    return found


def alone(vae, inputs):
    with torch.inference_mode():
        return vae.encode(inputs).latent_dist.parameters


def eager(monkeypatch, vae, kind=Fast):
    monkeypatch.setattr(torch, "compile", kind)
    return Compiled(vae)


def test_a_shape_goes_through_what_is_compiled_once_it_has_taken_long_and_not_before(monkeypatch, vae):
    compiled = eager(monkeypatch, vae)
    encode(compiled, pictures(4))
    assert compiled._fast.sizes == []
    encode(compiled, pictures(4), seconds=2 * compiling.FIRST_GUESS)
    found = encode(compiled, pictures(4))
    assert compiled._fast.sizes == [4]
    torch.testing.assert_close(found, alone(vae, pictures(4)))


def test_a_smaller_last_batch_is_filled_up_its_own_pictures_first_and_another_bucket_runs_as_it_is(monkeypatch, vae):
    compiled = eager(monkeypatch, vae)
    for _batch in range(2):
        encode(compiled, pictures(4), seconds=2 * compiling.FIRST_GUESS)
    found = encode(compiled, pictures(3))
    assert compiled._fast.sizes == [4, 4]
    torch.testing.assert_close(found[:3], alone(vae, pictures(3)))
    encode(compiled, pictures(4, side=64))
    assert compiled._fast.sizes == [4, 4]


def test_where_compiling_fails_the_encoder_runs_as_it_is_and_says_so(monkeypatch, vae, caplog):
    compiled = eager(monkeypatch, vae, Broken)
    encode(compiled, pictures(4), seconds=2 * compiling.FIRST_GUESS)
    for _batch in range(2):
        torch.testing.assert_close(encode(compiled, pictures(4)), alone(vae, pictures(4)))
    assert caplog.text.count("no compiler") == 1


def test_the_vae_itself_stays_what_it_was(monkeypatch, vae):
    encoder = vae.encoder
    compiled = eager(monkeypatch, vae)
    for _batch in range(2):
        encode(compiled, pictures(2), seconds=2 * compiling.FIRST_GUESS)
    assert vae.encoder is encoder


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, when it imports its compiler
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU")
def test_torchs_own_compiler_gives_the_same_within_tolerance(vae):
    compiled = Compiled(vae)
    encode(compiled, pictures(2), seconds=2 * compiling.FIRST_GUESS)
    torch.testing.assert_close(encode(compiled, pictures(2)), alone(vae, pictures(2)), atol=1e-4, rtol=1e-4)
    assert not compiled._policy.is_given_up
