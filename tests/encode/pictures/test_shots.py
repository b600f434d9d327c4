"""What guides a clip is cut as the clip itself, and refused with a sentence where it cannot be."""

from io import BytesIO
from typing import Any

import numpy as np
import pytest
from PIL import Image

from cachestore.core.errors import EncodeFailed
from cachestore.encode.families.resamplers import DEFAULT
from cachestore.encode.pictures.kinds import BLANK, COVERED, GIVEN, GREY, IN_FRONT, Guided
from cachestore.encode.pictures.shots import is_video, read_input, read_shown
from tests.encode.encoders import Files
from tests.encode.footage import moving, write

SIZE = (64, 48)
LEFT = np.where(np.arange(24)[None, :, None] < 12, 0, 255).repeat(48, axis=0)
"""A picture of 24 x 48 pixels, black on its left."""
WANTED: dict[str, Any] = {"video": "clip", "resolution": 56, "step": 16, "frames": [5]}


def png(pixels):
    file = BytesIO()
    Image.fromarray(np.asarray(pixels, np.uint8)).save(file, "PNG")
    return file.getvalue()


@pytest.fixture(scope="module")
def files():
    frames, wide = moving(9, SIZE), moving(9, (96, 48))
    white = np.zeros((48, 64), np.uint8)
    white[:, 32:] = 255
    return Files(
        clip=write(frames),
        control=write([255 - frame for frame in frames]),
        wide=write([255 - frame for frame in wide]),
        short=write(frames[:3]),
        moving_mask=write([np.repeat(np.roll(white, 3 * n, axis=1)[..., None], 3, axis=2) for n in range(9)]),
        mask=png(white),
        shown=png(frames[3]),
    )


def guided(files, **given):
    images = {role: [given[role]] for role in ("control", "mask") if role in given}
    images |= {"reference": given["reference"]} if "reference" in given else {}
    more = {name: value for name, value in given.items() if name not in images}
    return Guided().read_files({**WANTED, **more, **({"images": images} if images else {})}, files, DEFAULT)


@pytest.mark.torch
def test_a_control_is_cut_and_mirrored_as_its_clip_and_all_of_it_is_made_anew_without_a_mask(files):
    for options in ({}, {"flip": True}, {"clips": 2, "clip": 1}, {"fps": 12.0}):
        own = read_input({**WANTED, **options}, files, DEFAULT).shot.pixels()
        pixels = guided(files, control="control", **options).shot.pixels()
        np.testing.assert_array_equal(pixels[..., :3], 255 - own)
        assert (pixels[..., 3] == COVERED).all()
    still = guided(files, control="shown").shot.pixels()
    assert (still[..., :3] == moving(9, SIZE)[3]).all()
    assert guided(files, control="wide").shot.pixels().shape == still.shape  # scaled to cover the bucket


@pytest.mark.torch
def test_a_mask_without_a_control_turns_the_clips_own_pixels_grey_in_every_frame_or_as_it_moves(files):
    for flip in (False, True):
        own = read_input({**WANTED, "flip": flip}, files, DEFAULT).shot.pixels()
        for mask, shift in (("mask", 0), ("moving_mask", 3)):
            pixels = guided(files, mask=mask, flip=flip).shot.pixels()
            white = np.stack([np.roll(np.arange(64) >= 32, shift * n) for n in range(5)])[:, None]
            white = np.broadcast_to(white[..., ::-1] if flip else white, own.shape[:3])
            np.testing.assert_array_equal(pixels[..., 3], np.where(white, COVERED, GIVEN))
            np.testing.assert_array_equal(pixels[..., :3], np.where(white[..., None], GREY, own))


def test_every_file_counts_in_the_key_and_so_does_its_role(files):
    given = (
        {},
        {"control": "control"},
        {"control": "clip"},
        {"mask": "mask"},
        {"control": "control", "mask": "mask"},
        {"mask": "moving_mask"},
    )
    found = [guided(files, **one) for one in given]
    assert len({tuple(one.keyed.items()) for one in found}) == len(given)
    assert [*found[4].inputs] == ["video", "control", "mask"]


@pytest.mark.parametrize(
    ("images", "words"),
    [
        ({"control": ["short"]}, r"^the control video is too short: it has 3 frames, but the clip of its sample ends after 5$"),
        ({"mask": ["wide"]}, r"^the mask has 96 x 48 pixels, but its video 64 x 48: they need the same aspect ratio$"),
        ({"control": ["control", "wide"]}, r"^a video has one control, but this sample has 2: leave the others out$"),
    ],
)
def test_what_cannot_guide_a_clip_is_refused(files, images, words):
    with pytest.raises(EncodeFailed, match=words):
        Guided().read_files({**WANTED, "images": images}, files, DEFAULT)


def test_a_video_where_a_picture_is_meant_is_refused_by_its_role(files):
    with pytest.raises(EncodeFailed):
        read_input({"image": "control", "role": "control", "resolution": 56, "step": 16}, files, DEFAULT)


def test_files_say_in_their_first_bytes_whether_they_are_videos(files):
    frames = moving(3, SIZE)
    options: dict[str, Any] = {"codec": "mpeg4", "pix_fmt": "yuv420p"}
    videos = [files["clip"], *(write(frames, kind=kind, **options) for kind in ("mp4", "avi", "mov"))]
    pictures = [files["mask"], b"\xff\xd8\xff\xe0", b"RIFF\0\0\0\0WEBPVP8 ", b"\0\0\0\x20ftypavif", b""]
    assert [is_video(data) for data in (*videos, *pictures)] == [True] * 4 + [False] * 5


def test_a_text_encoder_is_shown_a_whole_picture_or_the_frame_with_which_a_clip_at_this_rate_begins(files):
    shown = {fps: read_shown("clip", files, fps) for fps in (None, 2.0)}
    for fps, one in shown.items():
        rate = {} if fps is None else {"fps": fps}
        begins = read_input({**WANTED, **rate, "frames": [1]}, files, DEFAULT).shot.pixels()[0]
        np.testing.assert_array_equal(np.asarray(one.picture()), begins)
    assert len({np.asarray(one.picture()).tobytes() for one in shown.values()}) == 2
    assert shown[None].transform() != shown[2.0].transform()
    picture = read_shown("shown", files, 2.0)
    np.testing.assert_array_equal(np.asarray(picture.picture()), moving(9, SIZE)[3])
    assert picture.transform() == {}


@pytest.mark.torch
def test_reference_pictures_come_in_front_the_last_one_first_and_mirrored_as_the_clip(files):
    for flip in (False, True):
        pixels = guided(Files({**files, "left": png(np.tile(LEFT, (1, 1, 3)))}), reference=["left", "shown"], flip=flip).shot.pixels()
        assert pixels.shape == (2 + 5, 48, 64, 4)
        assert (pixels[:2, ..., 3] == IN_FRONT).all()
        assert (pixels[2:] == (0, 0, 0, BLANK)).all()  # nothing is known of the clip
        turned = pixels[:2, :, ::-1, :3] if flip else pixels[:2, ..., :3]
        assert (turned[0] == moving(9, SIZE)[3]).all()
        columns = turned[1].mean(axis=(0, 2)).tolist()
        assert columns == [255] * 20 + [0] * 12 + [255] * 32  # as it is, on white
    with pytest.raises(EncodeFailed):
        guided(files, reference=["control"])
