"""Masks to the size of their pictures' latents."""

from io import BytesIO
from typing import Any

import numpy as np
import pytest
from PIL import Image

from cachestore.core.errors import EncodeFailed
from cachestore.core.keys import digest_bytes
from cachestore.encode.pictures.masks import MaskEncoder

REQUEST = {"image": "mask.png", "like": "picture.png", "role": "mask", "resolution": 64, "step": 16}


def png(array):
    file = BytesIO()
    Image.fromarray(array).save(file, "PNG")
    return file.getvalue()


def grey(width, height, seed=0):
    return png(np.random.default_rng(seed).integers(0, 256, (height, width), np.uint8))


def resolve(mask, picture, encoder=None, **more):
    read: Any = {"mask.png": mask, "picture.png": picture}.__getitem__  # a mask is read whole
    return (encoder or MaskEncoder(2)).resolve({**REQUEST, **more}, read)


def made(mask, picture, factor=2, **more):
    encoder = MaskEncoder(factor)
    resolved = resolve(mask, picture, encoder, **more)
    return encoder.submit([(resolved.key, encoder.prepare(resolved).payload)])()[resolved.key]["mask"]


def test_an_empty_batch_gives_nothing():
    assert MaskEncoder(8).submit([])() == {}
    MaskEncoder(8).close()


def test_a_mask_has_the_size_of_its_pictures_latents_and_the_mean_of_each_area():
    values = np.random.default_rng(1).integers(0, 256, (64, 64), np.uint8)
    found = made(png(values), grey(64, 64), factor=8)
    assert (found.shape, found.dtype) == ((1, 8, 8), np.dtype(np.uint8))
    assert np.abs(found[0] - values.reshape(8, 8, 8, 8).mean(axis=(1, 3))).max() <= 1


def test_white_stays_white_and_black_black_whatever_the_mode_and_number_of_pixels():
    for array in (np.full((70, 100), 255, np.uint8), np.ones((35, 50), bool), np.full((140, 200, 3), 255, np.uint8)):
        assert np.unique(made(png(array), grey(100, 70))).tolist() == [255]
        assert np.unique(made(png(np.zeros_like(array)), grey(100, 70))).tolist() == [0]


def test_a_mask_is_cut_and_mirrored_as_its_picture():
    columns = np.repeat(np.arange(120, dtype=np.uint8)[None], 60, axis=0)
    drawn: dict[str, Any] = {"crop": "random", "seed": 0, "variant": 1}
    plain, mirrored = made(png(columns), grey(120, 60), **drawn), made(png(columns), grey(120, 60), **drawn, flip=True)
    left, _, right, _ = resolve(png(columns), grey(120, 60), **drawn).facts["crop"]
    width = resolve(png(columns), grey(120, 60)).facts["resized"][0]
    assert plain.tobytes() == mirrored[:, :, ::-1].tobytes()
    assert abs(plain[0, 0, 0] - 120 * (left + 0.5) / width) <= 1.5
    assert abs(plain[0, 0, -1] - 120 * (right - 1.5) / width) <= 1.5


def test_the_key_is_of_the_mask_and_the_crop_of_its_picture():
    mask, image = grey(200, 60), grey(200, 60, seed=1)
    key = resolve(mask, image).key
    drawn = {"crop": "random", "seed": 0, "step": 32}
    assert resolve(mask, grey(200, 60, seed=2)).key == resolve(mask, grey(400, 120)).key == key
    others = [
        resolve(grey(200, 60, seed=9), image),
        resolve(mask, image, resolution=96),
        resolve(mask, image, flip=True),
        *(resolve(mask, image, **drawn, variant=variant) for variant in range(2)),
        resolve(mask, image, MaskEncoder(8)),
    ]
    assert len({key, *(one.key for one in others)}) == 1 + len(others)
    assert resolve(mask, image).inputs == {"mask": digest_bytes(mask), "image": digest_bytes(image)}


def test_a_mask_of_another_shape_than_its_picture_is_refused():
    with pytest.raises(EncodeFailed):
        resolve(grey(64, 64), grey(100, 70))
    resolve(grey(33, 23), grey(100, 70))


def test_a_mask_is_cut_to_the_part_of_its_picture_that_counts_in_any_number_of_pixels():
    left = np.zeros((60, 120), np.uint8)
    left[:, 30:60] = 255
    for mask in (left, left[::2, ::2], left.repeat(3, 0).repeat(3, 1)):
        found = made(png(mask), grey(120, 60), within=[30, 0, 90, 60])
        half = found.shape[2] // 2
        assert np.unique(found[0, :, : half - 1]).tolist() == [255]
        assert np.unique(found[0, :, half + 1 :]).tolist() == [0]


def test_the_key_of_a_part_of_a_mask_is_of_the_part_and_of_its_pictures_size():
    mask = grey(120, 60)
    keys = [
        resolve(mask, grey(120, 60)).key,
        resolve(mask, grey(120, 60), within=[30, 0, 90, 60]).key,
        resolve(mask, grey(120, 60), within=[31, 0, 91, 60]).key,
        resolve(mask, grey(240, 120), within=[30, 0, 90, 60]).key,
    ]
    assert len(set(keys)) == len(keys)
