"""What a sample asks of the encoders of pictures and videos."""

from typing import Any

import pytest

from cachestore.core.errors import BadInput
from cachestore.core.samples import Sample
from cachestore.encode.pictures.masks import MaskEncoder
from cachestore.jobs.plan.options import PrecomputeRequest
from cachestore.jobs.plan.wanted_columns import requests_of, wanted_columns
from tests.fakes import FakeEncoder, asks_for, tells_of

FRAMES = {"resolution": 64, "frames": [5]}


@pytest.mark.parametrize(
    ("role", "images"),
    [
        ("mask", {"mask": ("m.png",)}),
        ("first_frame", {"image": ("a.png",), "first_frame": ("f.png",)}),
        ("last_frame", {"video": ("a.mkv",), "last_frame": ("f.png", "g.png")}),
    ],
)
def test_an_image_without_what_it_belongs_to_is_refused(role, images):
    with pytest.raises(BadInput, check=tells_of("'x'", role)):
        requests_of(role, FRAMES, Sample("x", images))


def test_a_picture_without_a_mask_and_one_beside_frames_ask_for_none():
    assert requests_of("mask", {"resolution": 64}, Sample("x", {"image": ("a.png",)})) == []
    assert requests_of("first_frame", FRAMES, Sample("x", {"image": ("a.png",)})) == []


def test_a_first_frame_that_nobody_brings_is_the_videos_own_and_has_its_variants():
    options = {**FRAMES, "crop": "random", "seed": 7, "variants": 2, "flip": True}
    own = requests_of("first_frame", options, Sample("x", {"video": ("a.mkv",)}))
    same = {"resolution": 64, "frames": [5], "crop": "random", "seed": 7}
    assert own[:2] == [{"video": "a.mkv", "role": "first_frame", **same, "variant": 0, **more} for more in ({}, {"flip": True})]
    assert len(own) == len(requests_of("video", options, Sample("x", {"video": ("a.mkv",)}))) == 4
    brought = requests_of("first_frame", options, Sample("x", {"video": ("a.mkv",), "first_frame": ("f.png",)}))
    assert brought[3] == {"image": "f.png", "role": "first_frame", **same, "variant": 1, "flip": True, "like": "a.mkv"}


def test_further_images_that_an_encoder_reads_come_with_those_that_the_sample_brings():
    options = {**FRAMES, "images": ["last_frame"]}
    assert "images" not in requests_of("first_frame", options, Sample("x", {"video": ("a.mkv",)}))[0]
    [both] = requests_of("first_frame", options, Sample("x", {"video": ("a.mkv",), "last_frame": ("l.png",)}))
    assert both == {"video": "a.mkv", "role": "first_frame", "resolution": 64, "frames": [5], "images": {"last_frame": ["l.png"]}}


def test_columns_that_are_made_from_masks_say_that_an_alpha_may_be_one(tmp_path):
    def options(**more):
        request = PrecomputeRequest(data=str(tmp_path), model="m", store=str(tmp_path / "store"), frames=(5,), **more)
        return [dict(column.column.options).get("alpha") for column in wanted_columns([MaskEncoder(8)], request)]

    assert (options(), options(alpha="mask")) == ([None, None], ["mask", "mask"])


def text_columns(tmp_path, **options):
    """The columns of a text encoder that sees first frames."""
    encoder: Any = FakeEncoder(shown="first_frame")
    return wanted_columns([encoder], PrecomputeRequest(data=str(tmp_path), model="m", store=str(tmp_path / "store"), **options))


def test_a_text_encoder_that_sees_first_frames_takes_them_from_the_videos_at_the_rate_of_clips(tmp_path):
    [plain], [timed] = text_columns(tmp_path), text_columns(tmp_path, fps=12)
    brought, own = (Sample("x", {"video": ("a.mkv",), **more}, ("a dog",)) for more in ({"first_frame": ("f.png",)}, {}))
    assert plain.requests(brought) == [{"caption": "a dog", "images": {"first_frame": ["f.png"]}}]
    assert timed.requests(own) == [{"caption": "a dog", "images": {"first_frame": ["a.mkv"]}, "fps": 12}]
    for option, value in (("clips", 2), ("flip", True)):
        with pytest.raises(BadInput, check=asks_for(option)):
            text_columns(tmp_path, **{option: value})
