"""PNG: any pixels come back as they were, read by Pillow."""

from io import BytesIO

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from cachestore.report.png import encode_png
from tests.fakes import tells_of


@given(st.integers(1, 9), st.integers(1, 9), st.booleans(), st.integers(0, 2**32 - 1))
def test_any_pixels_come_back(height, width, is_grey, seed):
    shape = (height, width) if is_grey else (height, width, 3)
    pixels = np.random.default_rng(seed).integers(0, 256, shape, np.uint8)
    with Image.open(BytesIO(encode_png(pixels))) as image:
        assert image.mode == ("L" if is_grey else "RGB")
        assert (np.asarray(image) == pixels).all()


@pytest.mark.parametrize("shape", [(0, 3), (3, 0, 3), (2, 2, 4), (2,), (2, 2, 1)])
def test_what_is_no_picture_is_refused(shape):
    with pytest.raises(ValueError, match="a PNG needs"):
        encode_png(np.zeros(shape, np.uint8))


def test_other_numbers_than_bytes_are_refused():
    with pytest.raises(ValueError, check=tells_of("float32")):
        encode_png(np.zeros((2, 2), np.float32))  # pyright: ignore[reportArgumentType]
