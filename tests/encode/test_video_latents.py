"""Videos to latents, compared with the VAE itself and with what its pipeline decodes."""

from typing import Any

import numpy as np
import pytest

from cachestore.core.errors import BadInput, EncodeFailed
from cachestore.core.keys import digest_bytes
from cachestore.encode.pictures.buckets import Size
from cachestore.encode.pictures.clips import Shape
from cachestore.encode.recipes import ModelRequest, encoders_for
from tests.encode import tiny
from tests.encode.encoders import Files
from tests.encode.footage import moving, numbered, numbers_of, write
from tests.encode.pictures.test_latents import latents_encoder, picture

WANTED: dict[str, Any] = {"resolution": 32, "step": 16, "frames": [5, 17]}


def resolve(encoder, data, **request):
    return encoder.resolve({"video": "a.mkv", **WANTED, **request}, Files({"a.mkv": data}))


def look_alike_wan(folder):
    return tiny.look_alike_vae(folder, _class_name="AutoencoderKLWan", scale_factor_spatial=8)


@pytest.fixture
def look_alike(tmp_path, digest):
    return latents_encoder(look_alike_wan(tmp_path / "vae"), digest)


@pytest.fixture(scope="module")
def clip():
    return write(numbered(40, size=(96, 32)), rate=20)


def test_a_videos_key_is_known_from_its_bytes_and_what_is_taken_of_it(look_alike, clip):
    resolved = resolve(look_alike, clip)
    assert resolved.inputs == {"video": digest_bytes(clip)}
    assert resolved.facts == {
        "size": [96, 32],
        "bucket": [48, 16, 17],
        "resized": [48, 16],
        "crop": [0, 0, 48, 16],
        "fps": [20, 1],
        "start": [0],
    }
    reported = {"bucket": [48, 16, 17], "start": 0, "pixels": "pyav-swscale-601-torch-lanczos/1"}
    assert resolved.meta == {"input_digest": digest_bytes(clip), "encoder": "latents", **reported}
    assert str(resolved.key) == str(resolve(look_alike, clip).key)


def test_bytes_frames_rate_clip_side_and_bucket_change_the_key(look_alike, clip):
    keys = [
        resolve(look_alike, clip).key,
        resolve(look_alike, write(numbered(40, size=(96, 32), first=1), rate=20)).key,
        resolve(look_alike, clip, frames=[5]).key,
        resolve(look_alike, clip, fps=10).key,
        resolve(look_alike, clip, fps=20).key,
        resolve(look_alike, clip, clip=1, clips=2).key,
        resolve(look_alike, clip, flip=True).key,
        resolve(look_alike, clip, resolution=64).key,
    ]
    assert len(set(keys)) == len(keys)


def test_what_is_taken_alike_has_one_key_whatever_else_was_asked_for(look_alike, clip):
    key = resolve(look_alike, clip).key
    assert resolve(look_alike, clip, frames=[17]).key == key
    assert resolve(look_alike, clip, clip=0, clips=3).key == key
    assert resolve(look_alike, clip, crop="random", seed=3, variant=0).key == key  # nothing sticks out
    short = write(numbered(17, size=(96, 32)), rate=20)
    assert len({resolve(look_alike, short, clip=number, clips=3).key for number in range(3)}) == 1


def test_a_pictures_key_is_what_it_was_before_there_were_videos(look_alike):
    data = b"P6\n100 70\n255\n" + bytes(100 * 70 * 3)
    resolved = look_alike.resolve({"image": "a", "role": "image", "resolution": 64, "step": 16}, lambda _reference: data)
    assert resolved.facts == {"size": [100, 70], "bucket": [80, 48], "resized": [80, 56], "crop": [0, 4, 80, 52]}
    assert set(resolved.meta) == {"input_digest", "encoder", "bucket"}


def test_the_frames_of_a_clip_are_prepared_in_order_and_its_bytes_are_not_kept(look_alike, clip):
    for request, expected in (
        ({}, list(range(17))),
        ({"fps": 10}, list(range(0, 34, 2))),
        ({"clip": 1, "clips": 2}, list(range(23, 40))),
        ({"frames": [5], "fps": 40}, [0, 0, 1, 1, 2]),
    ):
        resolved = resolve(look_alike, clip, resolution=64, **request)
        prepared = look_alike.prepare(resolved)
        frames = len(expected)
        assert prepared.group == Shape(96, 32, frames)  # their own size, so that each pixel is what was written
        assert prepared.payload.shape == (frames, 32, 96, 3)
        assert prepared.cost == 96 * 32 * frames
        assert numbers_of(prepared.payload) == expected
        assert not any(isinstance(getattr(resolved.item, name), bytes) for name in resolved.item.__slots__)


@pytest.mark.torch
def test_a_mirrored_clip_is_the_plain_one_turned(look_alike, clip):
    plain, turned = (look_alike.prepare(resolve(look_alike, clip, flip=flip)).payload for flip in (False, True))
    assert np.array_equal(plain[:, :, ::-1], turned)
    assert turned.flags["C_CONTIGUOUS"]


def test_clips_of_one_bucket_share_a_group_and_pictures_are_in_another(look_alike, clip):
    groups = {look_alike.prepare(resolve(look_alike, data)).group for data in (clip, write(moving(30, size=(96, 32))))}
    assert groups == {Shape(48, 16, 17)}
    image = look_alike.resolve({"image": "a", "resolution": 32, "step": 16}, lambda _reference: picture(96, 32))
    assert look_alike.prepare(image).group == Size(48, 16)


def test_counts_that_the_vae_cannot_take_are_refused(look_alike, clip):
    with pytest.raises(BadInput):
        resolve(look_alike, clip, frames=[18])


def test_a_video_that_is_too_short_or_none_fails_alone(look_alike, clip):
    with pytest.raises(EncodeFailed):
        resolve(look_alike, clip, frames=[81])
    with pytest.raises(EncodeFailed):
        resolve(look_alike, picture())


def test_what_reading_raises_passes_through(look_alike):
    def missing(reference):
        raise FileNotFoundError(reference)

    read: Any = Files()
    read.open = missing
    with pytest.raises(FileNotFoundError):
        look_alike.resolve({"video": "gone.mkv", **WANTED}, read)


@pytest.mark.parametrize(("number", "name"), [(16, "PQ, smpte2084"), (18, "HLG, arib-std-b67")])
def test_high_dynamic_range_is_refused_by_its_name_and_fails_alone(look_alike, number, name):
    data = write(moving(5), kind="matroska", codec="ffv1", pix_fmt="yuv420p10le", color_trc=number)
    with pytest.raises(EncodeFailed, match=rf"^the video has high dynamic range \({name}\).*convert it to standard range first"):
        resolve(look_alike, data)


@pytest.mark.parametrize(
    ("config", "factor"),
    [
        ({"_class_name": "AutoencoderKLWan"}, (8, 4)),
        ({"_class_name": "AutoencoderKLQwenImage"}, (8, 4)),
        ({"_class_name": "AutoencoderKLLTXVideo"}, (32, 8)),
        ({"_class_name": "AutoencoderKLLTXVideo", "spatio_temporal_scaling": [True, True, False, False]}, (16, 4)),
        (
            {
                "_class_name": "AutoencoderKLLTXVideo",
                "spatio_temporal_scaling": [True] * 4,
                "spatial_compression_ratio": 32,
                "temporal_compression_ratio": 8,
            },
            (32, 8),
        ),
        ({"_class_name": "AutoencoderKLCogVideoX", "block_out_channels": [1] * 4}, (8, 4)),
        ({"_class_name": "AutoencoderKLHunyuanVideo"}, (8, 4)),
        ({"_class_name": "AutoencoderKLHunyuanVideo15"}, (16, 4)),
        ({"_class_name": "AutoencoderKLHunyuanVideo15", "temporal_compression_ratio": 2}, (16, 2)),
        ({"_class_name": "AutoencoderKLMochi", "encoder_block_out_channels": [1] * 4}, (8, 6)),
        ({"_class_name": "AutoencoderKL", "block_out_channels": [1] * 4}, (8, 1)),
    ],
)
def test_how_much_a_vae_shrinks_frames_follows_from_its_config(config, factor):
    from cachestore.encode.families import lookup as families

    read = families.latents_read(families.vae_family(config["_class_name"]), config, "moments")
    assert (read["spatial_factor"], read["temporal_factor"]) == factor


# With torch

THREE: list[dict[str, Any]] = [
    {"count": 40, "rate": 16, "size": (96, 32)},
    {"count": 120, "rate": 24, "size": (32, 96)},
    {"count": 320, "rate": 16, "size": (96, 32)},
]
"""Twenty seconds and more of video, at three counts of frames and two shapes."""


def encode(encoder, datas, **request):
    resolved = [resolve(encoder, data, resolution=64, step=32, **request) for data in datas]
    made = {}
    for one in resolved:
        made |= encoder.submit([(one.key, encoder.prepare(one).payload)])()
    return [(one, made[one.key]) for one in resolved]


def encoder_of(built, digest, **options) -> Any:
    return encoders_for(ModelRequest(model=str(built.folder), encode=["latents"], vae_dtype="float32", **options), digest)[0]


@pytest.mark.torch
@pytest.mark.parametrize("name", ["wan", pytest.param("ltx", marks=pytest.mark.slow)])
def test_twenty_seconds_at_three_buckets_are_what_the_vae_makes_of_the_frames_and_decode_as_its_pipeline_does(built, digest, name):
    import torch

    from cachestore.core.read_block import parse_latents
    from cachestore.train.latents import read_latents

    model = built(name)
    encoder = encoder_of(model, digest, latents="mean")
    datas = [write(moving(one["count"], one["size"]), rate=one["rate"]) for one in THREE]
    made = encode(encoder, datas, frames=[17, 49, 81], fps=16)
    assert [tuple(one.facts["bucket"]) for one, _entry in made] == [(96, 32, 17), (32, 96, 49), (96, 32, 81)]
    for one, entry in made:
        frames = (torch.from_numpy(encoder.prepare(one).payload).permute(3, 0, 1, 2).float() / 255 - 0.5) / 0.5
        with torch.inference_mode():
            mean = model.pipeline.vae.float().encode(frames[None]).latent_dist.mode()
        torch.testing.assert_close(entry["mean"][None], mean, rtol=1e-4, atol=1e-4)
        width, height, count = one.facts["bucket"]
        assert entry["mean"].shape[1:] == ((count - 1) // 4 + 1, height // encoder.setup.factor, width // encoder.setup.factor)
        batch = read_latents(parse_latents(encoder.recipe), "mean", entry)[None]
        shown = decoded_by(name, model.pipeline, batch, one.facts["bucket"])
        with torch.inference_mode():
            expected = model.pipeline.vae.decode(mean, return_dict=False)[0]
        expected = model.pipeline.video_processor.postprocess_video(expected, output_type="np")
        assert shown.shape == (1, count, height, width, 3)
        np.testing.assert_allclose(shown, expected, atol=1e-3)


def decoded_by(name, pipeline, latents, bucket):
    """What a pipeline's own call shows of latents that its denoiser leaves as they are."""
    import torch

    width, height, frames = bucket
    before = pipeline.transformer.forward
    pipeline.transformer.forward = lambda hidden_states, **_rest: (torch.zeros_like(hidden_states),)
    try:
        packed = latents if name == "wan" else pipeline._pack_latents(latents, 1, 1)
        embeds = torch.zeros(1, 8, 32)
        masks = {} if name == "wan" else {"prompt_attention_mask": torch.ones(1, 8), "decode_timestep": 0.0}
        return pipeline(
            prompt_embeds=embeds,
            latents=packed,
            width=width,
            height=height,
            num_frames=frames,
            num_inference_steps=1,
            guidance_scale=1.0,
            output_type="np",
            **masks,
        ).frames
    finally:
        pipeline.transformer.forward = before


@pytest.mark.torch
@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("wan", 17),
        ("ltx", 17),
        ("hunyuanvideo", 17),
        ("cogvideox", 17),
        ("hunyuanvideo15", 9),
        ("mochi", 13),
        ("wan22", 9),
        ("ltx2", 9),
        ("cosmos", 17),
    ],
)
def test_moments_of_a_clip_equal_the_vaes_own_and_their_size_is_known_before(built, digest, name, count):
    import torch

    from cachestore.core.read_block import parse_latents
    from cachestore.train.latents import read_latents

    model = built(name)
    encoder = encoder_of(model, digest)
    [(one, entry)] = encode(encoder, [write(moving(20))], frames=[1, count])
    frames = (torch.from_numpy(encoder.prepare(one).payload).permute(3, 0, 1, 2).float() / 255 - 0.5) / 0.5
    with torch.inference_mode():
        expected = model.pipeline.vae.float().encode(frames[None]).latent_dist.parameters[0]
    [found] = entry.values()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    width, height, frames = one.facts["bucket"]
    assert frames == count
    assert encoder.entry_bytes(Size(width, height), count) == found.numel() * found.element_size()
    if name == "cosmos":  # which has a mean and a deviation for each latent frame
        read = read_latents(parse_latents(encoder.recipe), "mean", entry)
        config, shape = model.pipeline.vae.config, (4, 20, 1, 1)
        mean, std = (torch.tensor(numbers).view(shape)[:, : read.shape[1]] for numbers in (config.latents_mean, config.latents_std))
        torch.testing.assert_close(read, (found - mean) / std)


@pytest.mark.torch
def test_a_batch_of_clips_gives_what_single_clips_give(built, digest):
    import torch

    encoder = encoder_of(built("wan"), digest)
    resolved = [resolve(encoder, write(moving(count)), resolution=64, step=16) for count in (20, 18, 30)]
    batch = [(one.key, encoder.prepare(one).payload) for one in resolved]
    together = encoder.submit(batch)()
    assert not encoder._vae.is_single
    for pair in batch:
        alone = encoder.submit([pair])()
        torch.testing.assert_close(together[pair[0]]["moments"], alone[pair[0]]["moments"], rtol=1e-4, atol=1e-4)


@pytest.mark.torch
def test_a_vae_that_mixes_the_clips_of_a_batch_gets_them_one_by_one(built, digest, caplog):
    import torch

    encoder = encoder_of(built("wan"), digest)
    resolved = [resolve(encoder, write(moving(count)), resolution=64, step=16) for count in (20, 18)]
    batch = [(one.key, encoder.prepare(one).payload) for one in resolved]
    expected = {key: encoder.submit([(key, payload)])()[key]["moments"] for key, payload in batch}
    vae = encoder._vae._vae
    plain = vae.encode
    vae.encode = lambda pixels: plain(pixels - pixels.mean(dim=0, keepdim=True) if len(pixels) > 1 and pixels.shape[2] > 1 else pixels)
    made = encoder.submit(batch)()
    assert encoder._vae.is_single
    assert "a clip gives other latents in a batch than alone" in caplog.text
    for key, tensor in expected.items():
        torch.testing.assert_close(made[key]["moments"], tensor)


@pytest.mark.torch
def test_the_frames_of_a_clip_count_in_the_size_of_a_batch(built, digest):
    encoder = encoder_of(built("wan"), digest, device="cpu")
    sizes = [encoder.batch_limit(group) for group in (Size(64, 64), Shape(64, 64, 1), Shape(64, 64, 5), Shape(64, 64, 81))]
    assert sizes == [16, 16, 3, 1]
