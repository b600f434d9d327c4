"""One table of dtypes, held against numpy, torch and the safetensors library."""

import numpy as np
import pytest

from cachestore.core.dtypes import DTYPES, NUMPY_NAMES, TORCH_NAMES


@pytest.mark.parametrize("name", DTYPES)
def test_numpy_has_each_dtype_or_one_of_its_size(name):
    assert np.dtype(DTYPES[name].numpy).itemsize == DTYPES[name].size


@pytest.mark.torch
@pytest.mark.parametrize("name", DTYPES)
def test_torch_has_each_dtype_under_its_name(name):
    assert getattr(pytest.importorskip("torch"), DTYPES[name].torch).itemsize == DTYPES[name].size


def test_a_dtype_comes_back_from_its_names():
    assert {TORCH_NAMES[dtype.torch]: dtype for dtype in DTYPES.values()} == DTYPES
    assert all(DTYPES[name].numpy == numpy for numpy, name in NUMPY_NAMES.items())
    assert DTYPES.keys() - NUMPY_NAMES.values() == {"BF16", "F8_E4M3", "F8_E5M2"}
