"""Conditions through a store, compared with what their pipelines make of the same frames and pictures."""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import cachestore as cs
from cachestore.cli.terminal.lines import training_lines
from tests.encode import tiny_conditions
from tests.encode.footage import moving, write
from tests.fakes import asks_for, tells_of

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore::FutureWarning:diffusers")]

SIZE = (64, 48)
FRAMES = 9
WANTED: dict[str, Any] = {"resolution": 56, "bucket_step": 16, "frames": FRAMES, "inline": True, "text_dtype": "float32"}


@dataclass(frozen=True)
class Tiny:
    folder: Path
    pipeline: Any


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    @cache
    def build(name):
        folder = tmp_path_factory.mktemp(name)
        return Tiny(folder, tiny_conditions.build(name, folder))

    return build


def frames_of(number):
    """The frames of a clip, each of another one."""
    return [np.roll(frame, 7 * number, axis=1) for frame in moving(FRAMES, SIZE)]


def picture_of(number):
    """A picture of a clip's size that is none of its frames."""
    return Image.fromarray(np.random.default_rng(number).integers(0, 256, (*SIZE[::-1], 3), dtype=np.uint8))


@pytest.fixture
def clips(tmp_path):
    """Three clips, the second with a first frame of its own, the third with both."""
    folder = tmp_path / "clips"
    folder.mkdir()
    rows: list[dict[str, Any]] = []
    for number in range(3):
        (folder / f"{number}.mkv").write_bytes(write(frames_of(number)))
        rows.append({"video": f"{number}.mkv", "caption": f"clip {number}"})
    picture_of(1).save(folder / "1.png")
    picture_of(2).save(folder / "2.png")
    rows[1]["first_frame"] = "1.png"
    rows[2] |= {"first_frame": "1.png", "last_frame": "2.png"}
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "rows.jsonl"


def ends_of(number):
    """The first and last pictures of each clip of `clips`."""
    frames = frames_of(number)
    first = Image.fromarray(frames[0]) if number == 0 else picture_of(1)
    return first, picture_of(2) if number == 2 else Image.fromarray(frames[-1])


def encoded(data, tiny_model, store, **options):
    report = cs.precompute(data, model=tiny_model.folder, store=store, **{**WANTED, **options})
    assert report.complete, report.failures
    return report, cs.CachedDataset(store)


def wan_condition(pipeline, first, last):
    """`condition` as `WanImageToVideoPipeline.__call__` makes it."""
    import torch

    width, height = SIZE
    image, last = (
        None if one is None else pipeline.video_processor.preprocess(one, height=height, width=width).to(torch.float32)
        for one in (first, last)
    )
    return pipeline.prepare_latents(image, 1, 16, height, width, FRAMES, torch.float32, torch.device("cpu"), None, None, last)[1][0]


@pytest.mark.parametrize("name", ["wan-i2v", "wan-flf2v", "wan22-i2v"])
def test_what_wan_is_shown_is_what_its_pipeline_makes_of_the_same_frames(tiny, clips, tmp_path, name):
    import torch

    report, data = encoded(clips, tiny(name), tmp_path / "store")
    assert report.not_made_here == ()
    lines = training_lines(report)
    assert "    # condition: float32 [3, 20, 3, 6, 8]" in lines
    assert any(line.startswith("    # image_embeds: float32 [3, ") for line in lines) == (name != "wan22-i2v")
    pipeline, has_last = tiny(name).pipeline, name == "wan-flf2v"
    with torch.inference_mode():
        for number in range(3):
            first, last = ends_of(number)
            shown = [first, last] if has_last else first
            expected = wan_condition(pipeline, first, last if has_last else None)
            sample = data[data.index(f"{number}.mkv")]
            assert sample["condition"].shape == expected.shape == (20, 3, 6, 8)
            torch.testing.assert_close(sample["condition"], expected, rtol=1e-5, atol=1e-5)
            if name == "wan22-i2v":
                assert "image_embeds" not in sample
                continue
            embeds = pipeline.encode_image(shown, "cpu")
            assert sample["image_embeds"].shape == ((2, 5, 16) if has_last else (5, 16))
            torch.testing.assert_close(sample["image_embeds"].reshape(embeds.shape), embeds, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["hunyuan15-i2v"])
def test_what_hunyuan_video_is_shown_is_what_its_pipeline_makes_of_the_same_frames(tiny, clips, tmp_path, name):
    """The first frame's latents are stored alone: a batch is padded with zeros, as the pipeline does."""
    import torch

    report, data = encoded(clips, tiny(name), tmp_path / "store", text_dtype="float32", encode=["latents"])
    assert report.not_made_here == ()
    pipeline, (width, height) = tiny(name).pipeline, SIZE
    with torch.inference_mode():
        for number in range(3):
            first, _last = ends_of(number)
            sample = data[data.index(f"{number}.mkv")]
            latents = sample["latents"][None]
            where = {"batch_size": 1, "height": height, "width": width, "dtype": torch.float32, "device": torch.device("cpu")}
            given, _mask = pipeline.prepare_cond_latents_and_mask(latents, first, **where)
            padded = torch.zeros_like(latents)
            padded[:, :, :1] = sample["image_latents"]
            torch.testing.assert_close(padded, given, rtol=1e-5, atol=1e-5)
            if name == "hunyuan15-i2v":
                embeds = pipeline.encode_image(first, 1, torch.device("cpu"), torch.float32)
                torch.testing.assert_close(sample["image_embeds"], embeds[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["hunyuan-i2v", pytest.param("hunyuan-i2v-33ch", marks=pytest.mark.slow)])
def test_captions_whose_encoder_sees_the_first_frame_and_its_latents_are_those_of_the_pipeline(tiny, clips, tmp_path, name):
    """LLaVA sees the whole first frame, brought or the video's own, at the rate of its clip."""
    import torch

    pipeline, template = tiny(name).pipeline, tiny_conditions.LLAVA_TEMPLATE
    given = {"encode_args": {"prompt_template": template}, "vae_dtype": "float32", "frames": 5}
    report, data = encoded(clips, tiny(name), tmp_path / "store", **given)
    assert report.not_made_here == ()
    together = data.read_batch([0, 1, 2])
    for number in range(3):
        first, _last = ends_of(number)
        row = data.index(f"{number}.mkv")
        sample, count = data[row], int(together["prompt_attention_mask"][row].sum())
        assert torch.equal(together["prompt_embeds"][row, :count], sample["prompt_embeds"])
        embeds = {name: sample[name][None] for name in ("prompt_embeds", "pooled_prompt_embeds")}
        mask = torch.ones(1, count, dtype=torch.int64)
        options: dict[str, Any] = {"height": SIZE[1], "width": SIZE[0], "num_frames": 5, "num_inference_steps": 2, "output_type": "latent"}

        def run(image=first, options=options, **text):
            return pipeline(image=image, **text, **options, generator=torch.Generator().manual_seed(0))[0]

        expected = run(prompt=f"clip {number}", prompt_template=template)
        found = run(**embeds, prompt_attention_mask=mask)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        other = pipeline.encode_prompt(image=picture_of(9), prompt=f"clip {number}", prompt_template=template)[0]
        assert not torch.allclose(other[:, -count:], embeds["prompt_embeds"], rtol=1e-3)


@pytest.mark.parametrize("name", ["wan22-ti2v", "ltx-i2v", "ltx2-i2v"])
def test_where_the_first_frame_takes_the_place_of_a_latent_frame_nothing_else_is_made_or_missed(tiny, clips, tmp_path, name):
    """The first latent frame of a clip is what the pipeline makes of its first frame alone."""
    import torch

    model = tiny(name)
    is_silent = name == "ltx2-i2v"
    options: dict[str, Any] = {"encode": ["latents"], "bucket_step": 16, "strict": not is_silent, "vae_dtype": "float32"}
    report = cs.precompute(clips, model=model.folder, store=tmp_path / "store", **{**WANTED, **options})
    lacks = ("audio latents, unless it is trained on pictures alone",) if is_silent else ()
    assert (report.complete, report.not_made_here, report.encoded) == (True, lacks, 3)
    first = model.pipeline.video_processor.preprocess(Image.fromarray(frames_of(0)[0]), height=SIZE[1], width=SIZE[0])
    latents = cs.CachedDataset(tmp_path / "store", latents="mean")[0]["latents"]
    with torch.inference_mode():
        if name != "wan22-ti2v":
            encoded_alone = model.pipeline.vae.encode(first[:, :, None]).latent_dist.mean
            vae = model.pipeline.vae
            expected = model.pipeline._normalize_latents(encoded_alone, vae.latents_mean, vae.latents_std)[0]
        else:
            rest = (1, 16, *SIZE[::-1], FRAMES, torch.float32, torch.device("cpu"))
            expected = model.pipeline.prepare_latents(first.to(torch.float32), *rest)[1][0]
    torch.testing.assert_close(latents[:, :1], expected, rtol=1e-4, atol=1e-5)


# Control videos and masks


WHITE = np.array([frame[..., :1] > 90 for frame in moving(FRAMES, SIZE)]) * np.full(3, 255, np.uint8)
"""A mask that moves, as frames."""


@pytest.fixture
def guided(tmp_path):
    """A clip with a control video, one with a mask as a video, one with a picture for each, and one with both as videos."""
    folder = tmp_path / "guided"
    folder.mkdir()
    for number in range(4):
        (folder / f"{number}.mkv").write_bytes(write(frames_of(number)))
    for number in (0, 3):
        (folder / f"{number}.control.mkv").write_bytes(write(frames_of(number + 5)))
    for number in (1, 3):
        (folder / f"{number}.mask.mkv").write_bytes(write(list(WHITE)))
    picture_of(7).save(folder / "2.control.png")
    Image.fromarray(WHITE[0]).save(folder / "2.mask.png")
    return folder


def vace_latents(pipeline, number):
    """`conditioning_latents` as `WanVACEPipeline.__call__` makes them of these frames."""
    import torch

    control = {0: frames_of(5), 1: list(np.where(WHITE == 255, 128, frames_of(1)).astype(np.uint8)), 2: [picture_of(7)] * FRAMES}
    mask = {0: None, 1: WHITE, 2: [WHITE[0]] * FRAMES}
    videos = [
        None if one is None else [Image.fromarray(np.asarray(frame)) for frame in one]
        for one in (control.get(number, frames_of(8)), mask.get(number, WHITE))
    ]
    width, height = SIZE
    video, white, shown = pipeline.preprocess_conditions(*videos, None, 1, height, width, FRAMES, torch.float32, torch.device("cpu"))
    return torch.cat([pipeline.prepare_video_latents(video, white, shown), pipeline.prepare_masks(white, shown)], dim=1)[0]


def test_what_guides_wan_vace_is_what_its_pipeline_makes_of_the_same_videos_and_masks(tiny, guided, tmp_path):
    import torch

    report, data = encoded(guided, tiny("wan-vace"), tmp_path / "store")
    assert (report.not_made_here, len(data)) == ((), 4)
    with torch.inference_mode():
        for number in range(4):
            expected = vace_latents(tiny("wan-vace").pipeline, number)
            made = data[data.index(f"{number}.mkv")]["conditioning_latents"]
            assert made.shape == expected.shape == (96, 3, 6, 8)
            torch.testing.assert_close(made, expected, rtol=1e-4, atol=1e-5)


def test_reference_pictures_of_wan_vace_are_latent_frames_in_front_as_in_its_pipeline(tiny, guided, tmp_path):
    """One of the clip's size beside a control, two of other shapes beside a mask as well, and one alone."""
    import torch

    pipeline, (width, height) = tiny("wan-vace").pipeline, SIZE
    shown = {0: [picture_of(20)], 1: [picture_of(21), picture_of(22).resize((100, 41))], 2: [], 3: [picture_of(23).resize((30, 70))]}
    (guided / "3.control.mkv").unlink()
    (guided / "3.mask.mkv").unlink()
    for number, pictures in shown.items():
        for rank, picture in enumerate(pictures, 1):
            picture.save(guided / f"{number}.reference.{rank}.png")
    report, data = encoded(guided, tiny("wan-vace"), tmp_path / "store", encode=["latents"], vae_dtype="float32")
    assert report.not_made_here == ()
    guides = {0: (frames_of(5), None), 1: (np.where(WHITE == 255, 128, frames_of(1)).astype(np.uint8), WHITE), 3: (None, None)}
    with torch.inference_mode():
        for number, both in guides.items():
            video, mask = (None if one is None else [Image.fromarray(frame) for frame in one] for one in both)
            where = (1, height, width, FRAMES, torch.float32, torch.device("cpu"))
            video, white, pictures = pipeline.preprocess_conditions(video, mask, shown[number], *where)
            rounded = [[(one * 127.5).round() / 127.5 for one in pictures[0]]] if number else pictures
            expected = torch.cat([pipeline.prepare_video_latents(video, white, rounded), pipeline.prepare_masks(white, pictures)], dim=1)[0]
            sample = data[data.index(f"{number}.mkv")]
            made, front = sample["conditioning_latents"], len(shown[number])
            assert made.shape == expected.shape == (96, 3 + front, 6, 8)
            assert "reference_latents" not in sample
            assert not made[16:, :front].any()
            torch.testing.assert_close(made, expected, rtol=1e-4, atol=1e-2 if number else 1e-5)
    with pytest.raises(cs.BadInput, check=tells_of("conditioning_latents", "'0.mkv'", "'1.mkv'")):
        data.read_batch([data.index("0.mkv"), data.index("1.mkv")])


# Inpainting


@pytest.fixture
def painted(tmp_path):
    """Three pictures with masks, two of one size."""
    folder = tmp_path / "painted"
    folder.mkdir()
    rows: list[dict[str, Any]] = []
    for number, size in enumerate([(64, 48), (64, 48), (48, 64)]):
        pixels = np.random.default_rng(number).integers(0, 256, (*size[::-1], 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
        mask = np.zeros(size[::-1], np.uint8)
        mask[5 + number : 30, 9:40] = (130, 127, 255)[number]
        mask[20:40, 3:12] = 255
        Image.fromarray(mask).save(folder / f"{number}-mask.png")
        rows.append({"image": f"{number}.png", "mask": f"{number}-mask.png", "caption": f"picture {number}"})
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "rows.jsonl"


PAINTING: dict[str, Any] = {"frames": (), "resolution": 56, "bucket_step": 16}


def inpainting(pipeline, folder, number):
    """`mask` and the moments of the masked picture, as `StableDiffusionXLInpaintPipeline.__call__` makes them."""
    import torch

    picture, mask = (Image.open(folder / f"{number}{end}.png") for end in ("", "-mask"))
    width, height = picture.size
    image = pipeline.image_processor.preprocess(picture, height=height, width=width).to(torch.float32)
    white = pipeline.mask_processor.preprocess(mask, height=height, width=width)
    sampled, _none = pipeline.prepare_mask_latents(white, None, 1, height, width, torch.float32, torch.device("cpu"), None, False)
    return sampled[0], pipeline.vae.encode(image * (white < 0.5)).latent_dist


def test_the_masked_picture_and_its_mask_are_those_of_the_pipeline_for_inpainting(tiny, painted, tmp_path):
    import torch

    from cachestore.train.latents import noise_seed

    model = tiny("sdxl-inpaint")
    report, data = encoded(painted, model, tmp_path / "store", **PAINTING)
    assert report.not_made_here == ()
    with torch.inference_mode():
        for number in range(3):
            mask, posterior = inpainting(model.pipeline, painted.parent, number)
            name = f"{number}.png"
            sample = data[data.index(name)]
            assert torch.equal(sample["mask"], mask)
            generator = torch.Generator().manual_seed(noise_seed(0, 0, f"{name}/masked_image_latents"))
            noise = torch.randn(posterior.mean.shape[1:], generator=generator)
            expected = model.pipeline.vae.config.scaling_factor * (posterior.mean + posterior.std * noise)[0]
            torch.testing.assert_close(sample["masked_image_latents"], expected, rtol=1e-5, atol=1e-6)


def test_what_flux_fill_paints_is_what_its_pipeline_packs_of_the_same_picture_and_mask(tiny, painted, tmp_path):
    import torch

    from cachestore.train.latents import noise_seed

    pipeline = tiny("flux-fill").pipeline
    report, data = encoded(painted, tiny("flux-fill"), tmp_path / "store", **PAINTING, encode=["latents"], vae_dtype="float32")
    assert report.not_made_here == ()
    assert "mask" not in data[0]
    with torch.inference_mode():
        for number in range(3):
            picture, mask = (Image.open(painted.parent / f"{number}{end}.png") for end in ("", "-mask"))
            width, height = picture.size
            image = pipeline.image_processor.preprocess(picture, height=height, width=width).to(torch.float32)
            white = pipeline.mask_processor.preprocess(mask, height=height, width=width)
            posterior, name = pipeline.vae.encode(image * (1 - white)).latent_dist, f"{number}.png"
            generator = torch.Generator().manual_seed(noise_seed(0, 0, f"{name}/masked_image_latents"))
            drawn = posterior.mean + posterior.std * torch.randn(posterior.mean.shape[1:], generator=generator)
            where = {"height": height, "width": width, "dtype": torch.float32, "device": torch.device("cpu"), "generator": None}
            packed, latents = pipeline.prepare_mask_latents(white, drawn, 1, 16, 1, **where)
            made = data[data.index(name)]["masked_image_latents"][None]
            made = pipeline._pack_latents(made, *made.shape)
            assert made.shape[-1] == pipeline.transformer.config.in_channels - 64
            torch.testing.assert_close(made, torch.cat([latents, packed], dim=-1), rtol=1e-5, atol=1e-6)


# As for any other value


def as_bytes(tensor):
    return tensor.contiguous().numpy().tobytes()


def test_what_of_a_picture_is_opaque_is_painted_anew_where_its_alpha_is_the_mask(tiny, tmp_path):
    """As with the alpha as a mask of its own, and with nothing else than latents from the picture."""
    import torch

    pixels = np.random.default_rng(0).integers(0, 256, (48, 64, 4), np.uint8)
    pixels[..., 3] = np.where(np.arange(64) < 32, 255, 0)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    Image.fromarray(np.ascontiguousarray(pixels[..., 3])).save(tmp_path / "m.png")
    stores = []
    for row, more in (({}, {"alpha": "mask"}), ({"mask": "m.png"}, {})):
        (tmp_path / "rows.jsonl").write_text(json.dumps({"image": "a.png", **row}) + "\n")
        options: dict[str, Any] = {**PAINTING, **more, "encode": ["latents"], "vae_dtype": "float32"}
        report, data = encoded(tmp_path / "rows.jsonl", tiny("sdxl-inpaint"), tmp_path / f"of-{len(stores)}", **options)
        assert (report.failed, report.not_made_here) == (0, ())
        stores.append(data[0])
    for field in ("mask", "masked_image_latents", "latents"):
        torch.testing.assert_close(stores[0][field], stores[1][field], rtol=1e-4, atol=1e-5)
    assert stores[0]["mask"].unique().tolist() == [0, 1]


@pytest.mark.parametrize(
    "name", ["wan-flf2v", "wan-vace", pytest.param("hunyuan15-i2v", marks=pytest.mark.slow), "sdxl-inpaint", "flux-fill"]
)
def test_a_batch_gives_what_single_inputs_give_and_is_read_straight_as_sample_by_sample(tiny, request, tmp_path, name):
    import torch

    is_painted = name in {"sdxl-inpaint", "flux-fill"}
    source = request.getfixturevalue("painted" if is_painted else "guided" if name == "wan-vace" else "clips")
    options: dict[str, Any] = {**(PAINTING if is_painted else {}), "encode": ["latents"], "vae_dtype": "float32"}
    stores = [encoded(source, tiny(name), tmp_path / f"of-{size}", batch_size=size, **options)[1] for size in (1, 3)]
    for index in range(3):
        one, other = (data[data.index(stores[0].ids[index])] for data in stores)
        for field in ("condition", "conditioning_latents", "image_latents", "image_embeds", "masked_image_latents", "mask"):
            if field in one:
                torch.testing.assert_close(one[field], other[field], rtol=1e-4, atol=1e-5)
    data = stores[0]
    for indices in ([0, 1] if is_painted else [0, 1, 2], [2]):
        straight, slow = data.read_batch(indices), data.collate([data[index] for index in indices])
        assert straight.keys() == slow.keys()
        for field, value in straight.items():
            assert torch.equal(value, slow[field]) if isinstance(value, torch.Tensor) else value == slow[field]
        for field in set(data.features) & set(straight):
            feature = data.features[field]
            assert feature.dtype == straight[field].dtype
            assert feature.shape is None or all(size in (None, now) for size, now in zip(feature.shape, straight[field].shape, strict=True))


def test_a_second_run_makes_nothing_and_a_changed_first_frame_makes_its_own_values_alone(tiny, clips, tmp_path):
    first, _data = encoded(clips, tiny("wan-flf2v"), tmp_path / "store")
    again, _data = encoded(clips, tiny("wan-flf2v"), tmp_path / "store")
    assert (first.encoded, again.encoded) == (13, 0)  # 4 captions with the empty one, 3 clips, and both conditions of each
    picture_of(5).save(clips.parent / "1.png")
    changed, data = encoded(clips, tiny("wan-flf2v"), tmp_path / "store")
    assert changed.encoded == 4
    text, _data = encoded(clips, tiny("wan-flf2v"), tmp_path / "store", encode=["text"])
    assert text.encoded == 0
    reused = cs.CachedDataset(tmp_path / "store")
    assert {as_bytes(one["condition"]) for one in (reused[0], reused[1], reused[2])} == {
        as_bytes(data[row]["condition"]) for row in range(3)
    }


def test_equal_values_are_stored_once_and_a_picture_that_is_a_frame_is_one_too(tiny, tmp_path):
    (tmp_path / "a.mkv").write_bytes(write(frames_of(0)))
    (tmp_path / "b.mkv").write_bytes(write([*frames_of(0)[:1], *frames_of(1)[1:]]))
    Image.fromarray(frames_of(0)[0]).save(tmp_path / "a.first_frame.png")
    (tmp_path / "b.first_frame.png").write_bytes((tmp_path / "a.first_frame.png").read_bytes())
    _report, data = encoded(tmp_path, tiny("wan-i2v"), tmp_path / "store")
    keys = [[column.row_keys(row) for row in range(2)] for column in data._selection.catalog.columns if column.role == "first_frame"]
    assert all(one == other for one, other in keys)


def test_conditions_have_the_variant_of_their_clip(tiny, tmp_path):
    """A brought picture with the frame's own pixels gives what the clip's own frame gives, however it is cropped and mirrored."""
    import torch

    wide = [np.concatenate([frame, 255 - frame], axis=1) for frame in frames_of(0)]
    clip = write(wide)  # a file has a number of its own, by which crops are drawn
    for name in ("own", "brought"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.mkv").write_bytes(clip)
    Image.fromarray(wide[0]).save(tmp_path / "brought" / "a.first_frame.png")
    Image.fromarray(wide[-1]).save(tmp_path / "brought" / "a.last_frame.png")
    options: dict[str, Any] = {"crop": "random", "variants": 2, "flip": True, "bucket_step": 32, "resolution": 48, "vae_dtype": "float32"}
    stores = [encoded(tmp_path / name, tiny("wan-flf2v"), tmp_path / f"{name}-store", **options)[1] for name in ("own", "brought")]
    crops: set[tuple[int, ...]] = set()
    for epoch in range(4):
        samples: list[Any] = []
        for data in stores:
            data.set_epoch(epoch)
            samples.append(data[0])
        crops.add(tuple(samples[0]["crop_top_left"].tolist()))
        for field in ("condition", "image_embeds", "latents"):
            torch.testing.assert_close(samples[0][field], samples[1][field], rtol=1e-5, atol=1e-5)
    assert len(crops) > 1


def test_verify_encodes_conditions_again_and_repair_makes_lost_ones(tiny, clips, tmp_path):
    encoded(clips, tiny("wan-flf2v"), tmp_path / "store")
    report = cs.verify(tmp_path / "store", recompute=100)
    assert (report.ok, report.recomputed["equal"], report.recomputed["of"]) == (True, 12, 12)  # all that samples have
    before = [dict(sample) for sample in map(cs.CachedDataset(tmp_path / "store").__getitem__, range(3))]
    for path in (tmp_path / "store" / "segments").rglob("*.safetensors"):
        path.write_bytes(path.read_bytes()[:-3])
    repaired = cs.repair(tmp_path / "store", refill=True)
    assert repaired.missing == 0
    after = cs.CachedDataset(tmp_path / "store")
    for row, sample in enumerate(before):
        np.testing.assert_allclose(after[row]["condition"], sample["condition"], rtol=1e-4, atol=1e-5)


def test_a_data_set_without_masks_or_with_some_names_role_and_column_and_strict_ends_before_anything(tiny, painted, tmp_path):
    from cachestore.core.errors import BadUsage

    rows = [json.loads(line) for line in painted.read_text().splitlines()]
    options: dict[str, Any] = {"model": tiny("sdxl-inpaint").folder, **WANTED, **PAINTING}
    del rows[1]["mask"]
    painted.write_text("".join(json.dumps(row) + "\n" for row in rows))
    some = "latents of the masked picture, and its mask as the denoiser takes it of 1 of 3 samples, which have no mask (1.png)"
    with pytest.raises(BadUsage):
        cs.precompute(painted, store=tmp_path / "store", strict=True, **options)
    planned = {name: value for name, value in options.items() if name != "inline"}
    assert cs.plan(painted, store=tmp_path / "store", **planned).not_made_here == (some,)
    for row in rows:
        row.pop("mask", None)
    painted.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(BadUsage):
        cs.precompute(painted, store=tmp_path / "store", strict=True, **options)


def test_a_role_of_the_users_own_and_references_are_latents_as_those_of_control_images(tiny, painted, tmp_path):
    import torch

    folder = tmp_path / "own"
    folder.mkdir()
    for number in range(2):
        for name, seed in (("", number), (".depth", 10 + number), (".reference.1", 20 + number), (".reference.2", 30)):
            picture_of(seed).save(folder / f"{number}{name}.png")
    options: dict[str, Any] = {**PAINTING, "encode": ["latents"], "vae_dtype": "float32"}
    with pytest.raises(cs.BadInput, check=asks_for("roles", "['image']")):
        encoded(folder, tiny("sdxl-inpaint"), tmp_path / "store", roles=["image"], **options)
    _report, data = encoded(folder, tiny("sdxl-inpaint"), tmp_path / "store", roles=["depth"], **options)
    batch = data.read_batch([0, 1])
    vae = tiny("sdxl-inpaint").pipeline.vae
    for row, sample in enumerate((data[0], data[1])):
        for name, seeds in (("depth_latents", [10 + row]), ("reference_latents", [20 + row, 30])):
            pixels = [torch.from_numpy(np.array(picture_of(seed))).permute(2, 0, 1)[None].float() / 127.5 - 1 for seed in seeds]
            with torch.inference_mode():
                expected = [vae.encode(one).latent_dist.mean[0] * vae.config.scaling_factor for one in pixels]
            made = [sample[name]] if name == "depth_latents" else sample[name]
            for one, other, again in zip(made, expected, [batch[name][row]] if name == "depth_latents" else batch[name][row], strict=True):
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
                assert torch.equal(one, again)
    again, _data = encoded(folder, tiny("sdxl-inpaint"), tmp_path / "store", roles=["depth"], **options)
    assert again.encoded == 0
    exported = cs.export_cache(tmp_path / "store", format="sd-scripts", folder=tmp_path / "out", family="sdxl")
    assert exported.left_out == ("2 values of latents, made of the role depth", "4 values of latents, made of the role reference")
