"""Animated files are told from still ones by their containers."""

from functools import cache
from io import BytesIO

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from cachestore.sources.animated import is_animated, is_animated_path
from tests.encode.pictures.test_animations import animation, few


def test_what_ends_or_lies_within_a_gif_is_not_taken_for_a_frame():
    still = animation(few(1), comment=b",!;" * 200)
    moves = animation(few(2), comment=b",!;" * 200)
    assert [is_animated(BytesIO(one)) for one in (still, moves, moves[:-40], still + moves)] == [False, True, True, False]
    table = Image.fromarray(few(1)[0]).quantize(256)
    file = BytesIO()
    table.save(file, "GIF", save_all=True, append_images=[Image.fromarray(few(2)[1]).quantize(7)], duration=50)
    assert is_animated(BytesIO(file.getvalue()))
    with_icc = BytesIO()
    Image.fromarray(few(1)[0]).save(with_icc, "WEBP", icc_profile=b"x" * 501, exif=b"Exif\0\0" + bytes(33))
    assert not is_animated(BytesIO(with_icc.getvalue()))


def test_a_file_that_is_not_there_or_has_another_suffix_is_no_animation(tmp_path):
    assert not is_animated_path(tmp_path / "gone.gif")
    (tmp_path / "a.jpg").write_bytes(animation(few(3)))
    assert not is_animated_path(tmp_path / "a.jpg")
    (tmp_path / "A.GIF").write_bytes(animation(few(3)))
    assert is_animated_path(tmp_path / "A.GIF")


@cache
def _whole(form):
    return animation(few(3), form)


@pytest.mark.parametrize("form", ["GIF", "PNG", "WEBP", "AVIF"])
@given(data=st.data())
def test_no_bytes_make_it_fail_or_read_for_ever(form, data):
    whole = bytearray(_whole(form))
    for at in data.draw(st.lists(st.integers(0, len(whole) - 1), max_size=8)):
        whole[at] = data.draw(st.integers(0, 255))
    assert is_animated(BytesIO(bytes(whole[: data.draw(st.integers(0, len(whole)))]))) in (True, False)
