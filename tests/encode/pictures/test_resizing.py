"""Pictures in their buckets by each way of resizing, compared with Pillow's filters."""

import hashlib
import sys
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from cachestore.encode.families.resamplers import RESAMPLERS
from cachestore.encode.pictures import images, resizing
from cachestore.encode.pictures.buckets import Size, choose, crop_box
from cachestore.encode.pictures.resizing import fit, mirror
from tests.fakes import examples, program
from tests.shares import share

pytestmark = pytest.mark.torch

FILTERS = {
    "lanczos": Image.Resampling.LANCZOS,
    "bicubic": Image.Resampling.BICUBIC,
    "bilinear": Image.Resampling.BILINEAR,
}
SIZES = ((37, 41), (64, 300), (511, 433))
FORMATS = {
    "JPEG": ("RGB", "L", "CMYK"),
    "PNG": ("RGB", "RGBA", "P", "L", "LA"),
    "WEBP": ("RGB", "RGBA"),
    "AVIF": ("RGB", "RGBA"),
    "GIF": ("P",),
    "BMP": ("RGB",),
    "TIFF": ("RGB", "RGBA"),
    "PPM": ("RGB",),
    "JPEG2000": ("RGB",),
}


def scene(width, height, seed=0):
    """Smooth colours with sharp edges and some noise, as in a photograph."""
    generator = np.random.default_rng(seed)
    rows, columns = np.mgrid[0:height, 0:width]
    channels = [128 + 90 * np.sin(columns / (7 + 9 * n) + rows / 23) + 60 * ((columns // 31 + rows // 17) % 2) for n in range(3)]
    return np.clip(np.stack(channels, -1) + generator.normal(0, 5, (height, width, 3)), 0, 255).astype(np.uint8)


def noise(width, height, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def saved(pixels, name, mode="RGB", **options):
    file = BytesIO()
    Image.fromarray(pixels).convert(mode).save(file, name, **options)
    return file.getvalue()


def by_pillow(image, bucket, box, resampling):
    """Pillow's own, rows before columns: from 13.0 on Pillow takes the columns first where that is less work."""
    left, top, right, bottom = images._box(image, box)
    rows = image.resize((bucket.width, image.height), resampling, box=(left, 0, right, image.height))
    return np.asarray(rows.resize(bucket, resampling, box=(0, top, bucket.width, bottom)))


def difference(picture, bucket, name):
    """How far a way is from Pillow's filter; 0 where Pillow resizes itself, as most of the scaled picture would be cropped off."""
    image = images.as_image(picture)
    box = crop_box(Size(*image.size), bucket)
    if box.resized.width * box.resized.height > 2 * bucket.width * bucket.height:
        assert np.array_equal(fit(picture, bucket, box, name), images.resize_crop(image, bucket, box, FILTERS[name]))
        return np.zeros(1)
    return np.abs(fit(picture, bucket, box, name).astype(int) - by_pillow(image, bucket, box, FILTERS[name]))


@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize("form_and_mode", share([(form, mode) for form, modes in FORMATS.items() for mode in modes], 3))
def test_pixels_are_within_two_levels_of_pillows_for_every_format(form_and_mode, name):
    form, mode = form_and_mode
    for number, (width, height) in enumerate(SIZES):
        options = {"exif": turned(1 + number)} if form in {"JPEG", "PNG", "WEBP", "AVIF"} else {}
        data = saved(scene(width, height, number), form, mode, **options)
        picture = images.decode_picture(data)
        assert np.array_equal(images.as_pixels(picture), np.asarray(images.decode(data)))
        found = difference(picture, choose(images.measure(data), 256, 64), name)
        assert found.max() <= 2
        assert (found > 0).mean() < 0.03


def turned(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif.tobytes()


@pytest.mark.parametrize("name", FILTERS)
def test_shrunk_photographs_are_within_one_level_of_pillows(name):
    for width, height in ((1500, 1000), (1000, 1500), (1024, 1024)):
        found = difference(scene(width, height), choose(Size(width, height), 512, 64), name)
        assert found.max() <= 1
        assert (found > 0).mean() < 0.01


@examples(60)
@given(st.integers(1, 700), st.integers(1, 700), st.sampled_from(sorted(FILTERS)), st.sampled_from([64, 128, 256]))
def test_noise_of_any_size_is_within_two_levels_of_pillows(width, height, name, resolution):
    assert difference(noise(width, height), choose(Size(width, height), resolution, 64), name).max() <= 2


@pytest.mark.parametrize("name", RESAMPLERS)
def test_a_picture_of_the_right_size_is_cropped_and_not_resampled(name):
    pixels = noise(96, 64)
    for picture in (pixels, Image.fromarray(pixels)):
        assert np.array_equal(fit(picture, Size(64, 64), crop_box(Size(96, 64), Size(64, 64)), name), pixels[:, 16:80])
    assert np.array_equal(images.resize_crop(Image.fromarray(pixels), Size(64, 64), crop_box(Size(96, 64), Size(64, 64))), pixels[:, 16:80])


@pytest.mark.parametrize("name", RESAMPLERS)
@pytest.mark.parametrize("size", [(1, 1), (1, 9), (3, 2), (200, 100), (90, 333)])
def test_one_colour_stays_that_colour(size, name):
    pytest.importorskip("cv2")
    pixels = np.full((size[1], size[0], 3), (12, 200, 99), np.uint8)
    made = fit(pixels, Size(64, 128), None, name)
    assert made.shape == (128, 64, 3)
    assert (made == (12, 200, 99)).all()


@pytest.mark.parametrize("name", RESAMPLERS)
@pytest.mark.parametrize("size", [(1, 100_000), (100_000, 1), (3, 40_000)])
def test_a_long_thin_picture_is_never_scaled_as_a_whole(size, name, monkeypatch):
    for whole in ("_by_torch", "_by_opencv"):
        monkeypatch.setattr(resizing, whole, lambda *_arguments: pytest.fail("6.6 billion pixels"))
    assert fit(noise(*size), Size(256, 256), None, name).shape == (256, 256, 3)


@pytest.mark.parametrize("name", RESAMPLERS)
def test_a_crop_holds_no_memory_of_what_was_cut_off(name):
    pytest.importorskip("cv2")
    for size in ((64, 90), (128, 180)):
        made = fit(noise(*size), Size(64, 64), None, name)
        assert made.flags.c_contiguous
        assert made.base is None or np.asarray(made.base).nbytes <= made.nbytes


def test_area_shrinks_by_opencv_and_enlarges_by_pillows_lanczos():
    cv2 = pytest.importorskip("cv2")
    pixels, bucket = noise(300, 200), Size(64, 64)
    assert np.array_equal(fit(pixels, bucket, None, "area"), cv2.resize(pixels, (96, 64), interpolation=cv2.INTER_AREA)[:, 16:80])
    assert np.array_equal(fit(pixels, Size(256, 256), None, "area"), fit(pixels, Size(256, 256), None, "pillow"))


def test_each_way_makes_other_pixels():
    pytest.importorskip("cv2")
    assert len({fit(noise(300, 200), Size(64, 64), None, name).tobytes() for name in RESAMPLERS}) == len(RESAMPLERS)


def test_a_mirrored_picture_has_left_and_right_exchanged():
    for shape in ((5, 7, 3), (2, 5, 7, 3)):
        pixels = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
        assert np.array_equal(mirror(pixels), pixels[..., ::-1, :])


SUMS = """
import hashlib, sys
import torch
from cachestore.encode.pictures.buckets import Size
from tests.encode.pictures.test_resizing import noise, sum_of
torch.set_num_threads(int(sys.argv[1]))
print(*(sum_of(name) for name in sys.argv[2:]))
"""


def sum_of(name):
    made = [fit(noise(w, h, w), Size(192, 128), None, name) for w, h in ((701, 433), (301, 999), (100, 70))]
    return hashlib.sha256(b"".join(pixels.tobytes() for pixels in made)).hexdigest()


def test_bits_are_equal_in_every_run_thread_and_process_and_with_any_number_of_threads():
    pytest.importorskip("cv2")
    names = list(RESAMPLERS)
    expected = [sum_of(name) for name in names]
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(lambda _number: [sum_of(name) for name in names], range(4)):
            assert found == expected
    process = program(SUMS, "3", *names)  # torch's threads: there is one here
    out, errors = process.communicate(timeout=50)
    assert process.returncode == 0, errors
    assert out.split() == expected


def test_planning_imports_neither_torch_nor_opencv():
    modules = "cachestore.jobs.plan.planning, cachestore.encode.pictures.latents"
    source = f"import sys; import {modules}; print(*({{'torch', 'cv2'}} & set(sys.modules)))"
    out, _errors = program(source).communicate(timeout=50)
    assert out.split() == []
    assert sys.modules.get("torch") is torch
