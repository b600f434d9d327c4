"""The pixels of pictures against a second way to compute them, which shares no code with the first."""

from collections import defaultdict

import numpy as np
import pytest

from cachestore.encode.pictures.images import decode
from tests.encode import drawn_pictures

USUAL = 1.5
MOST = {
    "16 bits, RGB, another profile": 16,
    "16 bits, RGB, linear profile": 14,
    "16 bits, RGBA, another profile": 16,
    "16 bits, RGBA, linear profile": 14,
    "16 bits, grey and alpha, another profile": 4,
    "16 bits, grey and alpha, linear profile": 14,
    "16 bits, grey, another profile": 4,
    "16 bits, grey, linear profile": 14,
    "8 bits, grey, linear profile for grey": 11,
    "PNG, RGBA, 16 bits": 2.1,
    "TIFF, RGBA, 16 bits": 2.1,
    "PNG, grey and alpha, 16 bits": 2.1,
    "TIFF, RGBA times alpha": 7,
    "TIFF, LAB": 10.5,
}
"""The largest difference by group, in levels of 255. docs/numerics.md says why these are larger than `USUAL`."""


def differences(step):
    found = defaultdict(list)
    for drawn in drawn_pictures.draw(step=step):
        made = np.asarray(decode(drawn.data)).astype(float)
        assert made.shape == drawn.expected.shape, drawn.name
        found[drawn.group].append((np.abs(made - drawn.expected).max(), drawn.name))
    return found


def check(found):
    too_far = [worst for group, all_of_it in found.items() if (worst := max(all_of_it))[0] > MOST.get(group, USUAL)]
    assert not too_far


def test_a_sample_of_drawn_pictures_has_the_pixels_that_formulas_give():
    found = differences(step=7)
    assert sum(map(len, found.values())) >= 40
    check(found)


@pytest.mark.slow
def test_all_drawn_pictures_have_the_pixels_that_formulas_give():
    found = differences(step=1)
    assert sum(map(len, found.values())) == drawn_pictures.ALL
    assert found.keys() >= MOST.keys()
    check(found)


def test_a_picture_that_is_read_without_its_profile_would_be_found():
    of_p3 = next(one for one in drawn_pictures.draw() if one.group == "PNG, RGB" and "P3" in one.name)
    plain = drawn_pictures.by_pillow_raw(of_p3.data)
    turns = [turned for turn in range(1, 9) if (turned := drawn_pictures.turned(plain, turn)).shape == of_p3.expected.shape]
    assert min(np.abs(turned - of_p3.expected).max() for turned in turns) > 10 * USUAL
