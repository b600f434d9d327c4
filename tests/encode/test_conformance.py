"""Every family against its own pipeline: what is stored and read again makes the denoiser do what the caption itself makes it do."""

import inspect
from importlib.metadata import version
from io import BytesIO

import numpy as np
import pytest
from packaging.version import Version
from PIL import Image

from tests.encode.encoders import Built, batch_of, encoder_of, entries_of
from tests.encode.tiny_families import FAMILIES
from tests.shares import share

pytestmark = [
    pytest.mark.torch,
    # What diffusers' own pipelines warn of when they run.
    pytest.mark.filterwarnings("ignore::FutureWarning:diffusers"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:diffusers"),
    pytest.mark.filterwarnings("ignore:In CPU autocast"),
]

SHORT, LONG = "a cat", 'a photograph of an astronaut riding a horse, and a "SIGN" with text on it'
CAPTIONS = ["", SHORT, LONG, "x", "two  spaces & <b>tags</b>"]


def run(model: Built, **prompts):
    """The latents that a pipeline ends with after a few steps from the same noise."""
    import torch

    called = inspect.signature(model.pipeline.__call__).parameters
    options = {"height": 64, "width": 64, "num_inference_steps": 2, "output_type": "latent", "guidance_scale": 1.0}
    options |= {"generator": torch.Generator().manual_seed(0), **(model.family.run or {}), **(model.family.encode_args or {})}
    with torch.inference_mode():
        return model.pipeline(**{name: value for name, value in (options | prompts).items() if name in called})[0]


def run_stored(model: Built, batch):
    """The same with a batch as the arguments of the family's pipeline, or in the place of what `inputs` names."""
    called = inspect.signature(model.pipeline.__call__).parameters
    given = {name: value for name, value in batch.items() if name in called}
    inputs = {} if model.family.inputs is None else model.family.inputs(model.pipeline, batch)
    given |= {name: value for name, value in inputs.items() if name in called}
    with pytest.MonkeyPatch.context() as patching:
        for name in inputs.keys() - called.keys():
            patching.setitem(vars(model.pipeline), name, inputs[name])
        return run(model, **given)


def has_masks_of_heads():
    """HunyuanVideo's denoiser before diffusers 0.33 takes the masks of a batch for those of its attention heads."""
    return Version(version("diffusers")) < Version("0.33")


def assert_same(found, expected, rtol=2e-4, atol=2e-5):
    import torch

    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)


def apart(one, other):
    return float((one - other).norm() / other.norm())


@pytest.mark.parametrize("name", share(FAMILIES, 4, 0))
def test_stored_embeddings_make_the_denoiser_do_what_the_caption_does(built, digest, name, record_property):
    model = built(name)
    encoder = encoder_of(model, digest, "text")
    # CogView4's pipeline pads a batch to its longest caption without a mask, and so does the denoiser of Kandinsky 5: alone they agree.
    is_alone = (
        encoder.setup.family.length_step is not None or name.startswith("kandinsky") or (name == "hunyuanvideo" and has_masks_of_heads())
    )
    groups = [[SHORT], [LONG]] if is_alone else [[SHORT, LONG]]
    for captions in groups:
        expected = run(model, prompt=list(captions))  # Z-Image writes into the list
        found = apart(run_stored(model, batch_of(encoder, captions)), expected)
        others = [LONG if caption == SHORT else SHORT for caption in captions]
        effect = apart(run_stored(model, batch_of(encoder, others)), expected)
        record_property("apart", found)
        assert effect > 1e-5, "the captions make no difference to this tiny denoiser"
        assert found <= min(1e-5, effect / 100)


@pytest.mark.parametrize("name", share(FAMILIES, 3, 1))
def test_a_batch_gives_what_single_captions_give_or_the_fall_back_says_so(built, digest, name, caplog, record_property):
    encoder = encoder_of(built(name), digest, "text")
    together, alone = entries_of(encoder, CAPTIONS), entries_of(encoder, CAPTIONS, together=False)
    assert encoder._modules.is_single == ("one by one" in caplog.text)
    for caption in CAPTIONS:
        assert set(together[caption]) == set(alone[caption])
        for stored, tensor in together[caption].items():
            assert_same(tensor, alone[caption][stored])
    record_property(
        "apart", max(apart(together[c][s].double(), alone[c][s].double()) for c in CAPTIONS for s in alone[c] if alone[c][s].any())
    )


@pytest.mark.parametrize("name", share(FAMILIES, 4, 2))
def test_in_the_dtype_of_its_family_a_batch_is_not_taken_for_another_value(built, digest, name):
    encoder = encoder_of(built(name), digest, "text", text_dtype="auto")
    entry = entries_of(encoder, [SHORT])[SHORT]
    assert {str(tensor.dtype) for tensor in entry.values()} == {f"torch.{encoder.recipe.make['dtype']}"}
    assert not encoder._modules.is_single


# Latents


def picture(seed, side=64):
    file = BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8)).save(file, "PNG")
    return file.getvalue()


def latents_of(encoder, pictures):
    """Entries of pictures, in order, from one batch."""
    request = {"image": "a.png", "role": "image", "resolution": 64, "step": 32}
    resolved = [encoder.resolve(request, lambda _, data=data: data) for data in pictures]
    made = encoder.submit([(one.key, encoder.prepare(one).payload) for one in resolved])()
    return [made[one.key] for one in resolved]


def encoded_by(vae, data):
    """What the VAE itself gives for a picture alone: its raw output, and the mean in it, both with a batch axis."""
    import torch

    pixels = torch.from_numpy(np.asarray(Image.open(BytesIO(data))).copy()).permute(2, 0, 1)[None].float() / 127.5 - 1
    has_frames = "temperal_downsample" in vae.config or any(isinstance(module, torch.nn.Conv3d) for module in vae.encoder.modules())
    if vae.config.get("in_channels") == 4:
        pixels = torch.cat([pixels, torch.ones_like(pixels[:, :1])], dim=1)
    with torch.inference_mode():
        encoded = vae.encode(pixels.unsqueeze(2) if has_frames else pixels)
    if hasattr(encoded, "latent"):
        return encoded.latent, encoded.latent
    return encoded.latent_dist.parameters, encoded.latent_dist.mode()


def denormalised(pipeline, latents):
    """Before its VAE decodes, what each pipeline does with the latents that its denoiser made."""
    import torch

    vae, config, kind, name = pipeline.vae, pipeline.vae.config, type(pipeline.vae).__name__, type(pipeline).__name__
    shape = (1, -1, *[1] * (latents.ndim - 2))
    if kind == "AutoencoderKLFlux2":
        epsilon = 1e-5 if name == "ErnieImagePipeline" else config.batch_norm_eps
        latents = latents * torch.sqrt(vae.bn.running_var.view(shape) + epsilon) + vae.bn.running_mean.view(shape)
        return unfolded(latents) if name == "Ideogram4Pipeline" else pipeline._unpatchify_latents(latents)
    if kind in {"AutoencoderKLLTXVideo", "AutoencoderKLLTX2Video"}:
        return pipeline._denormalize_latents(latents, vae.latents_mean, vae.latents_std, config.scaling_factor)
    if "latents_mean" in config and config.latents_mean is not None:
        # Cosmos has numbers for more frames. Its scheduler's sigma_data belongs to the noise, not to the latents that are stored.
        each = (latents.shape[1], -1, *[1] * (latents.ndim - 3))
        mean, std = (torch.tensor(numbers).view(each)[:, : latents.shape[2]] for numbers in (config.latents_mean, config.latents_std))
        return latents * std / (config.scaling_factor if "scaling_factor" in config else 1.0) + mean
    shift = 0.0 if name == "Kandinsky5T2IPipeline" else getattr(config, "shift_factor", None) or 0.0
    return latents / config.scaling_factor + shift


def unfolded(latents):
    """What Ideogram 4 does with the patches of its latents; its pipeline has no method for it."""
    size, channels, height, width = latents.shape
    split = latents.permute(0, 2, 3, 1).reshape(size, height, width, 2, 2, channels // 4)
    return split.permute(0, 5, 1, 3, 2, 4).reshape(size, channels // 4, height * 2, width * 2)


@pytest.mark.parametrize("name", share(FAMILIES, 4, 1))
def test_latents_equal_the_vaes_own_and_decode_to_the_same_picture(built, digest, name, caplog, record_property):
    import torch

    from cachestore.core.read_block import parse_latents
    from cachestore.train.latents import read_latents

    model = built(name)
    encoder = encoder_of(model, digest, "latents")
    pictures = [picture(seed) for seed in range(3)]
    entries = latents_of(encoder, pictures)
    assert encoder._vae.is_single == ("one by one" in caplog.text) is False
    block = parse_latents(encoder.recipe)
    for data, entry in zip(pictures, entries, strict=True):
        raw, mean = encoded_by(model.pipeline.vae, data)
        assert_same(entry[block.stored][None], raw)
        assert entry[block.stored].shape[0] == encoder.recipe.read["channels"] * (2 if block.stored == "moments" else 1)
        assert 64 // raw.shape[-1] == encoder.recipe.read["spatial_factor"]
        normalised = read_latents(block, "mean", entry)[None]
        if name != "cogview4":  # whose factor is 1
            assert normalised.shape != mean.shape or apart(normalised, mean) > 0.01
        with torch.inference_mode():
            stored = denormalised(model.pipeline, normalised)
            assert_same(stored, mean)
            decoded, expected = (model.pipeline.vae.decode(latents).sample for latents in (stored, mean))
        assert_same(decoded, expected, rtol=1e-3, atol=1e-4)
        record_property("apart", apart(entry[block.stored][None], raw))
        record_property("decoded", apart(decoded, expected))


@pytest.mark.parametrize("name", share(FAMILIES, 4, 3))
@pytest.mark.parametrize("stored", ["mean", "sample"])
def test_every_vae_keeps_what_was_asked_for_as_far_as_it_has_it(built, digest, name, stored):
    encoder = encoder_of(built(name), digest, "latents", latents=stored)
    entry = latents_of(encoder, [picture(0)])[0]
    has_samples = name not in {"sana", "cosmos"}
    assert set(entry) == {stored if has_samples else "mean"} == {encoder.recipe.read["stored"]}
    from cachestore.encode.pictures.buckets import Size

    assert encoder.entry_bytes(Size(64, 64)) == sum(tensor.nbytes for tensor in entry.values())
