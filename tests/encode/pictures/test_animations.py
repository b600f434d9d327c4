"""Animated GIF, WebP, PNG and AVIF files as clips, and the transparency of WebM."""

import json
import tarfile
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import cachestore as cs
from cachestore.core.errors import EncodeFailed
from cachestore.encode.families.resamplers import DEFAULT
from cachestore.encode.pictures import animations, images, videos
from cachestore.encode.pictures.buckets import CropBox, Size
from cachestore.encode.pictures.clips import as_rate
from cachestore.encode.pictures.kinds import Guided
from cachestore.encode.pictures.masks import MaskEncoder
from cachestore.encode.pictures.shots import HEAD_BYTES, is_video, read_shown
from cachestore.sources.animated import is_animated, is_animated_path
from tests.encode.encoders import Files
from tests.encode.footage import LOSSLESS, moving, numbered, numbers_of, write
from tests.encode.pictures.test_masks import png
from tests.encode.pictures.test_video_masks import FACTOR, FRAMES_EACH, WANTED, grey

SIZE = Size(32, 16)
WHOLE = CropBox(SIZE, (0, 0, 32, 16))
HOW: dict[str, dict[str, Any]] = {
    "GIF": {"disposal": 0},
    "PNG": {},
    "WEBP": {"lossless": True, "exact": True},
    "AVIF": {"quality": 100, "subsampling": "4:4:4", "codec": "auto"},
}


def animation(frames, form="GIF", durations: Any = 100, **options):
    """The bytes of an animation of these frames."""
    first, *rest = [Image.fromarray(frame) for frame in frames]
    file = BytesIO()
    first.save(file, form, save_all=True, append_images=rest, duration=durations, loop=0, **{**HOW.get(form, {}), **options})
    return file.getvalue()


def few(count):
    """So many frames of 32 x 16 pixels in colours that a palette holds, which can be told apart."""
    frames = [np.zeros((16, 32, 3), np.uint8) for _number in range(count)]
    for number, frame in enumerate(frames):
        frame[:, : 2 * number + 2] = (8 * number, 0, 255)
    return frames


def seen(data, rate=None, start=0, count=None):
    """Frames of a clip, at the size of the file."""
    video = videos.measure(BytesIO(data))
    count = video.timeline.count(rate) if count is None else count
    return videos.take(
        BytesIO(data), video.timeline.take(rate, start, count), video.size, CropBox(video.size, (0, 0, video.size.width, video.size.height))
    )


@pytest.mark.parametrize("form", HOW)
def test_an_animation_has_its_frames_at_their_times(form):
    frames, durations = few(6), [100, 200, 50, 100, 300, 100]
    data = animation(frames, form, durations)
    video = videos.measure(BytesIO(data))
    seconds = [round(float(time * video.timeline.tick), 4) for time in video.timeline.times.tolist()]
    assert (video.size, seconds, float(video.timeline.seconds)) == (SIZE, [0, 0.1, 0.3, 0.35, 0.45, 0.75], 0.85)
    assert np.abs(seen(data).astype(int) - np.stack(frames)).max() <= (12 if form == "AVIF" else 0)
    assert videos.estimate(BytesIO(data)).size == SIZE
    assert len(videos.estimate(BytesIO(data)).timeline.times) == 6
    at_ten = [0, 1, 1, 2, 3, 4, 4, 4, 5]  # those shown just before 0.05, 0.15, 0.25, ... seconds
    assert np.abs(seen(data, as_rate(10)).astype(int) - np.stack(frames)[at_ten]).max() <= (12 if form == "AVIF" else 0)
    np.testing.assert_array_equal(seen(data, None, 2, 3), seen(data)[2:5])


@pytest.mark.parametrize("form", HOW)
def test_a_file_of_one_frame_is_no_animation_and_one_of_several_is_wherever_it_is_asked(form, tmp_path):
    still, moves = animation(few(1), form), animation(few(3), form)
    for name, data, expected in (("still", still, False), ("moves", moves, True), ("cut", moves[:11], False), ("none", b"", False)):
        path = tmp_path / f"{name}.{form.lower()}"
        path.write_bytes(data)
        assert is_animated_path(path) == is_animated(BytesIO(data)) == animations.is_one(BytesIO(data)) == expected
    if form in ("PNG", "WEBP"):  # others FFmpeg reads as clips of one frame
        with pytest.raises(EncodeFailed):
            videos.measure(BytesIO(still))
    assert images.measure(moves) == SIZE  # as a picture it is its first frame, as before


def test_frames_that_leave_parts_of_earlier_ones_are_whole_and_on_white():
    """By each way of disposing of a frame: transparent where nothing is painted."""
    frames = [np.zeros((16, 32, 4), np.uint8) for _number in range(4)]
    for number, frame in enumerate(frames):
        frame[:, 8 * number : 8 * number + 8] = frame[15] = (255, 0, 8 * number, 255)
    for form, disposals in (("GIF", (1, 2)), ("PNG", (0, 1)), ("WEBP", (None,))):
        for disposal in disposals:
            data = animation(frames, form, **({} if disposal is None else {"disposal": disposal}))
            found = seen(data)
            with Image.open(BytesIO(data)) as image:
                for number in range(4):
                    image.seek(number)
                    shown = np.asarray(images.on_white(image.convert("RGBA")))
                    np.testing.assert_array_equal(found[number], shown)
            assert found[0, 0, 31].tolist() == [255, 255, 255]


def test_a_frame_without_a_time_is_shown_for_a_tenth_of_a_second_and_in_a_png_for_a_fifteenth():
    for form, durations, seconds in (("GIF", [0, 10, 20, 30], 0.16), ("PNG", [0, 10, 20, 30], 0.12667), ("WEBP", [0, 0, 20, 20], 0.24)):
        assert float(videos.measure(BytesIO(animation(few(4), form, durations))).timeline.seconds) == pytest.approx(seconds), form


def test_a_picture_in_front_of_an_animated_png_is_not_part_of_it():
    data = animation([few(9)[8], *few(3)], "PNG", default_image=True)
    assert videos.measure(BytesIO(data)).rate == 10
    np.testing.assert_array_equal(seen(data), np.stack(few(3)))


def test_an_animation_that_is_damaged_fails_by_name():
    frames = [np.random.default_rng(number).integers(0, 256, (64, 64, 3), np.uint8) for number in range(4)]
    data = animation(frames, "PNG")
    with pytest.raises(EncodeFailed):
        videos.measure(BytesIO(data[: len(data) // 2]))


def test_an_animation_may_be_the_mask_or_the_control_of_a_clip():
    frames = moving(9, (64, 48))
    files = Files(clip=write(frames), mask=write(grey(frames)), animated=animation(grey(frames), "WEBP", 62))
    files["picture"] = png(grey(frames)[0])
    encoder = MaskEncoder(FACTOR, FRAMES_EACH)

    def masked(mask):
        return encoder.prepare(encoder.resolve({**WANTED, "images": {"mask": [mask]}}, files)).payload

    np.testing.assert_array_equal(masked("animated"), masked("mask"))
    assert not np.array_equal(masked("animated"), masked("picture"))
    guided = Guided().read_files({**WANTED, "images": {"control": ["animated"]}}, files, DEFAULT)
    control = guided.shot.pixels()
    np.testing.assert_array_equal(control, Guided().read_files({**WANTED, "images": {"control": ["mask"]}}, files, DEFAULT).shot.pixels())
    assert read_shown("animated", files).transform() == {}  # a picture that a text encoder sees stays its first frame
    shown = read_shown("animated", files, 2.0)
    np.testing.assert_array_equal(np.asarray(shown.picture()), grey(frames)[4])


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore::FutureWarning:diffusers")
def test_animations_are_clips_in_every_kind_of_source_where_clips_are_asked_for(built, tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    frames = moving(9, (64, 48))
    (folder / "a.gif").write_bytes(animation(frames, "GIF", 60))
    (folder / "b.webp").write_bytes(animation(frames, "WEBP", 60))
    (folder / "c.png").write_bytes(png(frames[0]))
    (folder / "d.gif").write_bytes(animation(frames[:1], "GIF"))
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        "\n".join(json.dumps(row) for row in ({"video": "data/a.gif"}, {"file_name": "data/b.webp"}, {"file_name": "data/d.gif"}))
    )
    with tarfile.open(tmp_path / "t.tar", "w") as tar:
        for path in sorted(folder.iterdir()):
            tar.add(path, path.name)
    memory = [cs.Sample("a.gif", {"video": (folder / "a.gif").read_bytes()}), cs.Sample("b.webp", {"video": str(folder / "b.webp")})]
    options: dict[str, Any] = {"model": built("wan").folder, "resolution": 56, "bucket_step": 16, "encode": "latents"}
    for number, data in enumerate((folder, rows, tmp_path / "t.tar", memory)):
        report = cs.precompute(
            data, store=tmp_path / "store", name=f"n{number}", frames=[1, 5, 9], vae_dtype="float32", inline=True, **options
        )
        assert report.failed == 0
        made = cs.CachedDataset(tmp_path / "store", f"n{number}")
        counts = {Path(name).name: int(made[made.index(name)]["num_frames"]) for name in made.ids}
        assert counts == {name: count for name, count in {"a.gif": 9, "b.webp": 9, "c.png": 1, "d.gif": 1}.items() if name in counts}
        assert report.encoded == (4 if number == 0 else 0)  # the same keys everywhere
    plain = cs.plan(folder, store=tmp_path / "other", **options)
    assert (plain.samples, plain.buckets) == (4, {"64x48": 4})  # without --frames all are pictures


# The transparency of WebM


def transparent(count=9, size=(64, 48)):
    """Frames whose left half is opaque."""
    alpha = np.where(np.arange(size[0]) < size[0] // 2, 255, 0).astype(np.uint8)
    return [np.concatenate([frame, np.tile(alpha[None, :, None], (size[1], 1, 1))], axis=-1) for frame in moving(count, size)]


def webm(frames, codec="libvpx-vp9", **options):
    how: dict[str, Any] = {"deadline": "realtime", "crf": "4", "b:v": "2M", "auto-alt-ref": "0"}
    return write(frames, kind="webm", codec=codec, pix_fmt=options.pop("pix_fmt", "yuva420p"), options=how, **options)


@pytest.mark.parametrize("codec", ["libvpx", "libvpx-vp9"])
def test_transparent_parts_of_a_webm_are_white(codec):
    frames = transparent()
    data = webm(frames, codec)
    found = seen(data)
    assert found[:, :, 34:].min() >= 253
    assert np.abs(found[:, :, :30].astype(int) - np.stack(frames)[:, :, :30, :3]).max() <= 24
    np.testing.assert_array_equal(seen(data, None, 4, 3), found[4:7])  # also where it begins within the file


def test_an_alpha_that_no_decoder_reads_is_refused_by_name(monkeypatch):
    data = webm(transparent(2))
    monkeypatch.setattr(videos, "_LIBVPX", {})
    with pytest.raises(EncodeFailed):
        videos.measure(BytesIO(data))


TRANSPARENT: dict[str, dict[str, Any]] = {
    "mov": {"codec": "prores_ks", "pix_fmt": "yuva444p10le"},
    "matroska": {"codec": "ffv1", "pix_fmt": "bgra"},
    "avi": {"codec": "utvideo", "pix_fmt": "gbrap"},
    "webm": {},
}


@pytest.mark.parametrize("kind", TRANSPARENT)
def test_the_alpha_of_a_video_is_its_mask_where_that_is_asked_for_and_that_of_a_masks_video_too(kind):
    frames = transparent()
    painted = [np.concatenate([np.full_like(frame[..., :3], 255), frame[..., 3:]], axis=-1) for frame in frames]
    of = webm if kind == "webm" else lambda some: write(some, kind=kind, **TRANSPARENT[kind])
    files = Files(
        clip=of(frames), mask=of(painted), opaque=write([frame[..., :3] for frame in frames]), both=of([one[::-1] for one in frames])
    )
    encoder = MaskEncoder(FACTOR, FRAMES_EACH)

    def masked(mask, video, **more):
        resolved = encoder.resolve({**WANTED, **more, "video": video, "images": {"mask": [mask]}}, files)
        return encoder.prepare(resolved).payload[0]

    expected = np.broadcast_to(np.where(np.arange(8) < 4, 255, 0), (3, 6, 8))
    for mask, video, more in (("mask", "opaque", {}), ("clip", "clip", {"alpha": "mask"})):
        assert np.abs(masked(mask, video, **more).astype(int) - expected).max() <= 3
    assert (masked("opaque", "opaque", alpha="mask") == 255).all()
    with pytest.raises(EncodeFailed):
        masked("clip", "opaque")
    guided = Guided().read_files({**WANTED, "video": "opaque", "images": {"mask": ["mask"]}}, files, DEFAULT)
    given = guided.shot.pixels()[..., 3]
    assert (given[:, :, :28] == 0).all()
    assert (given[:, :, 36:] == 255).all()


def test_a_mask_video_whose_alpha_is_opaque_is_read_as_one_without():
    frames = grey(moving(9, (64, 48)))
    opaque = [np.concatenate([frame, np.full_like(frame[..., :1], 255)], axis=-1) for frame in frames]
    files = Files(clip=write(moving(9, (64, 48))), plain=write(frames), mask=write(opaque, codec="ffv1", pix_fmt="bgra"))
    encoder = MaskEncoder(FACTOR, FRAMES_EACH)
    plain, mask = (encoder.resolve({**WANTED, "images": {"mask": [name]}}, files) for name in ("plain", "mask"))
    np.testing.assert_array_equal(encoder.prepare(plain).payload, encoder.prepare(mask).payload)


def test_a_mask_video_in_other_units_is_refused_and_one_in_colours_told():
    ones = [frame // 255 for frame in [np.where(one > 99, 255, 0).astype(np.uint8) for one in grey(moving(5, (64, 48)))]]
    files = Files(clip=write(moving(5, (64, 48))), ones=write(ones), colours=write(moving(5, (64, 48))))
    encoder = MaskEncoder(FACTOR, FRAMES_EACH)
    ones, colours = (encoder.resolve({**WANTED, "frames": [5], "images": {"mask": [name]}}, files) for name in ("ones", "colours"))
    with pytest.raises(EncodeFailed, match="values up to 1 of 255"):
        encoder.prepare(ones)
    assert encoder.prepare(colours).facts == {"weight": [1], "coloured": [1]}


# Containers


CONTAINERS: dict[str, dict[str, Any]] = {
    "mpegts": {"codec": "libx264", "pix_fmt": "yuv420p"},
    "mpeg": {"codec": "mpeg2video", "pix_fmt": "yuv420p"},
    "asf": {"codec": "wmv2", "pix_fmt": "yuv420p"},
    "flv": {"codec": "flv", "pix_fmt": "yuv420p"},
    "3gp": {"codec": "mpeg4", "pix_fmt": "yuv420p"},
    "ipod": {"codec": "libx264", "pix_fmt": "yuv420p"},
    "ogg": {"codec": "theora", "pix_fmt": "yuv420p"},
    "mpeg2video": {"codec": "mpeg2video", "pix_fmt": "yuv420p"},
}


@pytest.mark.parametrize("kind", [one for one in CONTAINERS if one != "ogg"])
def test_clips_of_other_containers_have_their_frames_and_are_known_by_their_first_bytes(kind):
    frames = [np.full((64, 96, 3), 20 + 7 * number, np.uint8) for number in range(30)]
    data = write(frames, kind=kind, rate=25, options={"b:v": "4M"}, **CONTAINERS[kind])
    assert is_video(data[:HEAD_BYTES])
    video = videos.measure(BytesIO(data))
    assert len(video.timeline.times) == 30
    found = seen(data)
    assert np.abs(found.mean(axis=(1, 2, 3)) - [20 + 7 * number for number in range(30)]).max() <= 3
    np.testing.assert_array_equal(seen(data, None, 11, 5), found[11:16])
    np.testing.assert_array_equal(seen(data, as_rate(5), 1, 2), found[[7, 12]])


def test_a_codec_that_is_not_known_is_refused_by_name():
    data = webm(transparent(2))
    assert data.count(b"V_VP9") == 1
    with pytest.raises(EncodeFailed):
        videos.measure(BytesIO(data.replace(b"V_VP9", b"V_XP9")))


def test_pictures_are_no_videos_by_their_first_bytes():
    for form in ("JPEG", "PNG", "GIF", "WEBP", "AVIF", "BMP", "TIFF", "PPM", "JPEG2000"):
        file = BytesIO()
        Image.fromarray(numbered(1)[0]).save(file, form)
        assert not is_video(file.getvalue()[:HEAD_BYTES]), form
    assert is_video(write(numbered(2), **LOSSLESS)[:HEAD_BYTES])
    assert numbers_of(seen(write(numbered(3), **LOSSLESS))) == [0, 1, 2]
