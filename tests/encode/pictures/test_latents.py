"""Pictures to latents, compared with the VAE itself and with diffusers' training scripts."""

import shutil
from copy import deepcopy
from io import BytesIO
from typing import Any

import numpy as np
import pytest
from PIL import Image

import cachestore as cs
from cachestore.core.errors import BadInput, EncodeFailed
from cachestore.core.keys import Recipe, digest_bytes
from cachestore.encode.pictures import latents
from cachestore.encode.pictures.buckets import Size
from cachestore.encode.recipes import ModelRequest, encoders_for
from tests.encode import tiny
from tests.fakes import tells_of


def picture(width=100, height=70, seed=0, name="PNG"):
    image = Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))
    file = BytesIO()
    image.save(file, name)
    return file.getvalue()


def latents_encoder(folder, digest, **options) -> Any:
    return encoders_for(ModelRequest(model=str(folder), encode=["latents"], **options), digest)[0]


def resolve(encoder, data, **request):
    return encoder.resolve({"image": "a.png", "role": "image", "resolution": 64, "step": 16, **request}, lambda reference: data)


def encode(encoder, pictures):
    resolved = [resolve(encoder, data) for data in pictures]
    made = encoder.submit([(one.key, encoder.prepare(one).payload) for one in resolved])()
    assert set(made) == {one.key for one in resolved}
    return [made[one.key] for one in resolved]


@pytest.fixture
def look_alike(tmp_path, digest):
    return latents_encoder(tiny.look_alike_vae(tmp_path / "vae"), digest)


def test_an_empty_batch_gives_nothing_and_loads_nothing(look_alike):
    assert look_alike.submit([])() == {}
    assert look_alike._vae is None
    look_alike.close()


def test_a_pictures_key_is_known_from_its_bytes_and_header(look_alike):
    data = picture()
    resolved = resolve(look_alike, data)
    assert resolved.inputs == {"image": digest_bytes(data)}
    assert resolved.facts == {"size": [100, 70], "bucket": [80, 48], "resized": [80, 56], "crop": [0, 4, 80, 52]}
    assert resolved.meta == {"input_digest": digest_bytes(data), "encoder": "latents", "bucket": [80, 48]}


def test_bytes_resolution_and_model_change_the_key_and_roles_and_names_do_not(look_alike, tmp_path, digest):
    data = picture()
    key = resolve(look_alike, data).key
    other = latents_encoder(tiny.look_alike_vae(tmp_path / "other", scaling_factor=2.0), digest)
    keys = {resolve(look_alike, picture(seed=1)).key, resolve(look_alike, data, resolution=96).key, resolve(other, data).key}
    assert len(keys | {key}) == 4
    control = resolve(look_alike, data, role="control", image="elsewhere/b.png")
    assert (control.key, control.inputs) == (key, {"control": digest_bytes(data)})


def test_the_key_of_a_picture_stays_what_it_is(look_alike):
    data = b"P6\n100 70\n255\n" + bytes(100 * 70 * 3)
    assert str(resolve(look_alike, data).key) == "bc6dfd32955f290902b25afea1490736"


@pytest.mark.torch
def test_a_mirrored_picture_is_the_plain_one_turned_and_a_drawn_crop_is_what_stands_there(look_alike):
    data, drawn = picture(120, 60), {"crop": "random", "seed": 0, "variant": 1}
    plain, turned = resolve(look_alike, data, **drawn), resolve(look_alike, data, **drawn, flip=True)
    assert plain.key != turned.key
    pixels, mirrored = (look_alike.prepare(one).payload for one in (plain, turned))
    assert mirrored.tobytes() == pixels[:, ::-1].tobytes()
    image = Image.open(BytesIO(data)).resize(plain.facts["resized"], Image.Resampling.LANCZOS)
    assert np.abs(np.asarray(image.crop(plain.facts["crop"]), np.int16) - pixels).max() <= 2


def test_a_control_image_is_cut_as_the_picture_it_goes_with(look_alike):
    files = {"a.png": picture(120, 60, seed=1), "b.png": picture(120, 60, seed=2)}
    drawn = {"resolution": 64, "step": 16, "crop": "random", "seed": 0, "variant": 1}
    image = look_alike.resolve({"image": "a.png", "role": "image", **drawn}, files.__getitem__)
    control = look_alike.resolve({"image": "b.png", "role": "control", "like": "a.png", **drawn}, files.__getitem__)
    alone = look_alike.resolve({"image": "b.png", "role": "control", **drawn}, files.__getitem__)
    assert control.facts["crop"] == image.facts["crop"] != alone.facts["crop"]
    assert control.inputs == {"control": digest_bytes(files["b.png"]), "image": digest_bytes(files["a.png"])}
    assert control.meta["input_digest"] == digest_bytes(files["b.png"])


def test_resolutions_that_share_a_bucket_share_the_key(look_alike):
    assert resolve(look_alike, picture(64, 64), resolution=64).key == resolve(look_alike, picture(64, 64), resolution=70).key


def test_a_file_that_is_no_picture_is_refused_when_it_is_resolved(look_alike):
    with pytest.raises(EncodeFailed):
        resolve(look_alike, b"this is text")


def test_a_picture_that_ends_early_is_refused_when_it_is_prepared(look_alike):
    resolved = resolve(look_alike, picture()[:-5000])
    with pytest.raises(EncodeFailed):
        look_alike.prepare(resolved)


def test_what_reading_raises_passes_through(look_alike):
    def read(reference):
        raise FileNotFoundError(reference)

    with pytest.raises(FileNotFoundError):
        look_alike.resolve({"image": "gone.png", "resolution": 64}, read)


def test_the_installed_resampler_is_checked_for_the_first_picture_alone(look_alike, monkeypatch):
    checked = []
    monkeypatch.setattr(latents, "check_resampler", checked.append)
    for size in ((100, 70), (50, 35)):
        look_alike.prepare(resolve(look_alike, picture(*size)))
    assert checked == [look_alike.setup.resample]


def test_pictures_of_one_bucket_are_prepared_to_one_shape(look_alike):
    prepared = [look_alike.prepare(resolve(look_alike, picture(*size))) for size in ((100, 70), (1000, 700), (50, 35))]
    assert {one.group for one in prepared} == {Size(80, 48)}
    assert {(one.payload.shape, one.payload.dtype) for one in prepared} == {((48, 80, 3), np.dtype(np.uint8))}


@pytest.mark.parametrize("step", [1, 3, 15, 33])
def test_a_step_that_the_vae_cannot_divide_is_refused(look_alike, step):
    with pytest.raises(BadInput):
        resolve(look_alike, picture(), step=step)


def test_a_flux_step_is_a_multiple_of_factor_and_patch(tmp_path, digest):
    encoder = latents_encoder(tiny.look_alike(tmp_path, "FluxPipeline"), digest)
    assert encoder.setup.multiple == 16
    with pytest.raises(BadInput):
        resolve(encoder, picture(), step=8)


# With torch


def direct(vae, pictures, dtype):
    """What diffusers' training scripts do: resize to the bucket, ToTensor, Normalize([0.5], [0.5]), cast, encode."""
    import torch

    arrays = [np.asarray(Image.open(BytesIO(data)).convert("RGB")) for data in pictures]
    scaled = torch.stack([torch.from_numpy(array.copy()).permute(2, 0, 1).contiguous().to(torch.float32).div(255) for array in arrays])
    with torch.inference_mode():
        return deepcopy(vae).to(dtype).encode(((scaled - 0.5) / 0.5).to(dtype)).latent_dist


@pytest.fixture
def vae_folder(tmp_path):
    folder = tmp_path / "tiny-vae"
    tiny.vae().save_pretrained(folder)
    return folder


@pytest.mark.torch
@pytest.mark.parametrize("name", ["sd15", "sdxl", "flux"])
def test_moments_equal_the_vaes_own_and_the_denoiser_is_not_opened(tiny_model, digest, name):
    import torch

    from cachestore.encode.batching.outputs import difference, tolerance

    model = tiny_model(name)
    encoder = latents_encoder(model.folder, digest)
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[encoder.recipe.make["dtype"]]
    assert dtype == (torch.bfloat16 if name == "flux" else torch.float32)
    pictures = [picture(64, 64, seed) for seed in range(3)]
    expected = direct(model.pipeline.vae, pictures, dtype)
    for row, entry in enumerate(encode(encoder, pictures)):
        assert set(entry) == {"moments"}
        assert entry["moments"].shape == (2 * encoder.recipe.read["channels"], 32, 32)
        assert entry["moments"].dtype == dtype
        # Half precision rounds otherwise with other threads: docs/numerics.md.
        bound = tolerance("bfloat16", torch.device("cpu")) if name == "flux" else 1e-5
        assert difference({"moments": entry["moments"]}, {"moments": expected.parameters[row]}, bound) is None
    encoder.close()


@pytest.mark.torch
@pytest.mark.parametrize("name", ["sd15", "sdxl", "flux"])
def test_read_normalises_as_diffusers_training_script_does(tiny_model, digest, name):
    import torch

    model = tiny_model(name)
    encoder = latents_encoder(model.folder, digest, latents="mean", vae_dtype="float32")
    read, data = encoder.recipe.read, picture(64, 64)
    config = model.pipeline.vae.config
    mean = direct(model.pipeline.vae, [data], torch.float32).mean[0]
    script = (mean - config.shift_factor) * config.scaling_factor if name == "flux" else mean * config.scaling_factor
    normalised = (encode(encoder, [data])[0]["mean"] - (read["shift_factor"] or 0)) * read["scaling_factor"]
    torch.testing.assert_close(normalised, script, rtol=1e-5, atol=1e-5)
    assert read["latents_mean"] is read["latents_std"] is None


@pytest.mark.torch
def test_a_batch_gives_what_single_pictures_give(vae_folder, digest):
    import torch

    encoder = latents_encoder(vae_folder, digest)
    pictures = [picture(100, 70, seed) for seed in range(4)]
    for data, entry in zip(pictures, encode(encoder, pictures), strict=True):
        torch.testing.assert_close(encode(encoder, [data])[0]["moments"], entry["moments"], rtol=1e-5, atol=1e-5)


@pytest.mark.torch
def test_a_kept_sample_is_drawn_by_its_key_alone(vae_folder, digest):
    import torch

    encoder = latents_encoder(vae_folder, digest, latents="sample")
    pictures = [picture(64, 64, seed) for seed in range(3)]
    together, alone = encode(encoder, pictures), [encode(encoder, [data])[0] for data in pictures]
    for one, other in zip(together, alone, strict=True):
        torch.testing.assert_close(one["sample"], other["sample"], rtol=1e-5, atol=1e-5)
    moments = encode(latents_encoder(vae_folder, digest), pictures)
    noises = []
    for entry, raw in zip(together, moments, strict=True):
        mean, logvar = raw["moments"].chunk(2)
        noises.append((entry["sample"] - mean) / torch.exp(0.5 * logvar.clamp(-30, 20)))
    assert not torch.allclose(noises[0], noises[1], atol=0.1)
    assert abs(float(torch.stack(noises).std()) - 1) < 0.1


@pytest.mark.torch
def test_latents_are_contiguous_and_have_no_gradient(vae_folder, digest):
    for stored in ("moments", "mean", "sample"):
        for entry in encode(latents_encoder(vae_folder, digest, latents=stored), [picture(seed=1), picture(seed=2)]):
            assert entry[stored].is_contiguous()
            assert not entry[stored].requires_grad


@pytest.mark.torch
@pytest.mark.parametrize(("stored", "dtype"), [("moments", "float32"), ("mean", "bfloat16"), ("sample", "float32")])
def test_the_size_of_an_entry_is_known_before(vae_folder, digest, stored, dtype):
    encoder = latents_encoder(vae_folder, digest, latents=stored, vae_dtype=dtype)
    tensor = encode(encoder, [picture()])[0][stored]
    assert encoder.entry_bytes(Size(80, 48)) == tensor.numel() * tensor.element_size()


@pytest.mark.torch
def test_pixels_are_put_into_range_exactly_as_the_training_scripts_do():
    import torch

    from cachestore.encode.pictures.vae import to_range

    levels = torch.arange(256, dtype=torch.uint8).view(1, 16, 16, 1).expand(1, 16, 16, 3)
    scripts = (levels.permute(0, 3, 1, 2).contiguous().to(torch.float32).div(255) - 0.5) / 0.5
    assert torch.equal(to_range(levels), scripts)
    last = to_range(levels, memory_format=torch.channels_last)
    assert torch.equal(last, scripts)
    assert last.is_contiguous(memory_format=torch.channels_last)
    assert to_range(levels).min() == -1
    assert to_range(levels).max() == 1


@pytest.mark.torch
@pytest.mark.parametrize(("factor", "frames"), [(8, 9), (4, 5), (2, 1), (3, 4)])
def test_a_folded_mask_is_read_as_a_channel_for_each_of_its_pixels(factor, frames):
    """As Wan VACE's pipeline folds it; without frames as that of FLUX Fill."""
    import torch

    from cachestore.core.read_block import parse_latents
    from cachestore.encode.families import lookup as families
    from cachestore.encode.pictures import vae
    from cachestore.train.latents import read_latents

    mask = torch.rand((2, frames, 4 * factor, 6 * factor), generator=torch.Generator().manual_seed(frames)) < 0.5
    count = (frames + 3) // 4
    split = mask.view(2, frames, 4, factor, 6, factor).permute(0, 3, 5, 1, 2, 4).flatten(1, 2).float()
    expected = torch.nn.functional.interpolate(split, size=(count, 4, 6), mode="nearest-exact")
    read = families.latents_read(families.vae_family("AutoencoderKLWan"), {}, "mean") | {"mask_channels": factor**2}
    block = parse_latents(Recipe("condition", {}, read))
    for folded, wanted in ((vae.fold_mask(mask, factor, 4), expected), (vae.fold_mask(mask[:, 0], factor, 4), split[:, :, 0])):
        made = read_latents(block, "sample", {"mean": torch.zeros(16, *wanted.shape[2:]), "mask_bits": folded[1]})
        assert folded.dtype == torch.uint8
        assert torch.equal(made[16:], wanted[1])


@pytest.mark.torch
def test_numbers_that_are_not_finite_are_refused_and_named(vae_folder, digest):
    import torch

    encoder = latents_encoder(vae_folder, digest)
    resolved = resolve(encoder, picture())
    pixels = encoder.prepare(resolved).payload
    encoder.submit([(resolved.key, pixels)])()
    with torch.no_grad():
        encoder._vae._vae.encoder.conv_in.bias.fill_(float("inf"))
    with pytest.raises(EncodeFailed, check=tells_of("NaN", "'moments'", resolved.key)):
        encoder.submit([(resolved.key, pixels)])()


@pytest.mark.torch
def test_closing_gives_the_vae_back_and_encoding_loads_it_again(vae_folder, digest):
    encoder = latents_encoder(vae_folder, digest)
    before = encode(encoder, [picture()])[0]["moments"]
    encoder.close()
    encoder.close()
    assert encoder._vae is None
    assert encode(encoder, [picture()])[0]["moments"].equal(before)


@pytest.mark.torch
def test_a_batch_size_is_chosen_by_the_picture_or_taken_as_given(vae_folder, digest):
    import torch

    from cachestore.encode.pictures.vae import latents_budget

    cpu = torch.device("cpu")
    budget = latents_budget("float32", cpu)
    assert budget.size == budget.most
    assert [budget.units(side * side) for side in (16, 64, 128, 256, 1024)] == [16, 16, 4, 1, 1]
    assert latents_encoder(vae_folder, digest, batch_size=7).batch_limit(Size(1024, 1024)) == 7
    assert latents_encoder(vae_folder, digest, device="cpu").batch_limit(Size(128, 128)) == 4


@pytest.mark.torch
def test_a_text_encoder_and_a_vae_of_other_models_work_together(plain_model, vae_folder, digest):
    made: Any = encoders_for(ModelRequest(model=str(plain_model[0]), vae=str(vae_folder)), digest)
    text, latents = made
    never_read: Any = pytest.fail
    resolved = text.resolve({"caption": "a cat"}, never_read)
    assert text.submit([(resolved.key, text.prepare(resolved).payload)])()[resolved.key]["prompt_embeds"].shape[-1] == 32
    assert encode(latents, [picture()])[0]["moments"].shape == (8, 24, 40)


@pytest.mark.torch
def test_weights_that_cannot_be_read_are_bad_input_that_names_the_folder(tiny_model, digest, tmp_path):
    folder = tmp_path / "vae"
    shutil.copytree(tiny_model("sd15").folder / "vae", folder)
    weights = folder / "diffusion_pytorch_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(BadInput):
        encode(latents_encoder(folder, digest), [picture()])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"resolution": 65, "bucket_step": 3}, "bucket_step=3 does not suit this VAE: it must be a multiple of 2"),
        ({"resolution": (64, 8), "bucket_step": 16}, "resolution 8 with bucket step 16 gives no bucket"),
        ({"bucket_step": 16, "data": [8]}, "resolution 8 with bucket step 16 gives no bucket"),
    ],
)
def test_buckets_that_cannot_be_are_refused_before_anything_is_loaded(tmp_path, options, words):
    """The weights of this VAE are no weights."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.png").write_bytes(picture())
    sources = [cs.Source(tmp_path / "data", name="a", resolution=one) for one in options.pop("data", ())]
    vae = tiny.look_alike_vae(tmp_path / "vae")
    with pytest.raises(BadInput, match=words):
        cs.precompute(sources or tmp_path / "data", model=vae, store=tmp_path / "store", encode=("latents",), inline=True, **options)


def test_a_part_of_a_picture_gives_the_pixels_of_a_file_that_was_cut_before(look_alike):
    """Nothing of what was cut off bleeds in at the edges."""
    image = Image.open(BytesIO(picture(120, 90)))
    file = BytesIO()
    image.crop((25, 5, 115, 65)).save(file, "PNG")
    part, cut = resolve(look_alike, picture(120, 90), within=[25, 5, 115, 65]), resolve(look_alike, file.getvalue())
    assert np.array_equal(look_alike.prepare(part).payload, look_alike.prepare(cut).payload)
    assert part.key != cut.key
    assert part.meta["within"] == [25, 5, 115, 65]
    assert resolve(look_alike, picture(120, 90), within=[25, 5, 115, 64]).key != part.key
