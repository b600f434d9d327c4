"""What a data set says of its tensors before it reads one, beside what its batches hold: every family through a store."""

import pytest
from PIL import Image

import cachestore as cs
from tests.encode.tiny_families import FAMILIES
from tests.shares import share
from tests.train.stores import agrees

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore::FutureWarning:diffusers")]


@pytest.mark.parametrize("name", share(FAMILIES, 4))
def test_the_features_of_every_family_are_what_its_batches_hold(name, built, tmp_path):
    import torch

    (tmp_path / "data").mkdir()
    for picture, caption in (("a", "a cat"), ("b", 'a longer caption with a "SIGN" on it')):
        Image.new("RGB", (64, 64), (200, 30, len(caption))).save(tmp_path / "data" / f"{picture}.png")
        (tmp_path / "data" / f"{picture}.txt").write_text(caption)
    args = built(name).family.encode_args or {}
    report = cs.precompute(
        str(tmp_path / "data"), model=str(built(name).folder), store=str(tmp_path / "store"), resolution=64, encode_args=args, inline=True
    )
    assert report.complete
    for form in ("sample", "raw"):
        data = cs.CachedDataset(str(tmp_path / "store"), latents=form)
        agrees(data, [0, 1])
        assert data.features["latents"].dtype == getattr(torch, data.recipes["latents"].make["dtype"])
        shape = data.features["latents"].shape
        assert shape is not None
        assert shape.count(None) == len(shape) - 1  # all but the channels are free
        texts = [feature for field, feature in data.features.items() if field.startswith("prompt_embeds")]
        assert texts
        assert all(feature.dtype is not None for feature in texts)


def test_only_vaes_of_pictures_make_one_of_each_frame():
    """Whether latents have an axis of frames is told by the factor alone."""
    from cachestore.encode.families.lookup import latents_read
    from cachestore.encode.families.vae import VAE_FAMILIES

    sizes = {"latent_channels": 4, "spatial_compression_ratio": 8, "latents_mean": [0.0], "latents_std": [1.0]}
    for row in VAE_FAMILIES.values():
        config = {name: sizes[name] for name in row.required}
        assert (latents_read(row, config, "mean")["temporal_factor"] > 1) == row.has_frames
