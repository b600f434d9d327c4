"""Comparing what was made again with what was stored: rounding passes, another value does not."""

import math

import numpy as np
import pytest

from cachestore.core.tensors import to_raw
from cachestore.encode.batching.compare import COSINE, TF32_TOLERANCE, TOLERANCES, find_difference, tolerance_of

RNG = np.random.default_rng(0)
VALUES = RNG.standard_normal((8, 32)).astype(np.float32)
OFFSETS = VALUES[:, RNG.permutation(32)]
"""As long as the values, and turned away from them."""


def bf16(array):
    """As bfloat16, by cutting."""
    halves = (np.ascontiguousarray(array, np.float32).view(np.uint32) >> 16).astype("<u2")
    return "BF16", array.shape, halves.tobytes()


def entry(array, dtype="F32", name="prompt_embeds"):
    if dtype == "BF16":
        return {name: bf16(array)}
    return to_raw({name: array.astype({"F64": "f8", "F32": "f4", "F16": "f2"}[dtype])})


def test_nothing_equals_nothing():
    assert find_difference({}, {}, "text") is None
    empty = entry(np.zeros((0, 32), np.float32))
    assert find_difference(empty, empty, "text") is None


@pytest.mark.parametrize("dtype", ["F64", "F32", "F16", "BF16"])
def test_what_is_off_by_less_than_rounding_passes_and_by_more_does_not(dtype):
    allowed = tolerance_of(dtype, "text") or 0.0
    stored = entry(VALUES, dtype)
    assert find_difference(stored, stored, "text") is None
    assert find_difference(stored, entry(VALUES + 0.7 * allowed * OFFSETS, dtype), "text") is None
    found = find_difference(stored, entry(VALUES + 1.3 * allowed * OFFSETS, dtype), "text")
    assert (found.tensor, "differs by" in found.words) == ("prompt_embeds", True)


def test_float32_latents_may_differ_by_tf32_and_text_may_not():
    made = entry(VALUES + 0.7 * TF32_TOLERANCE * OFFSETS, name="mean")
    assert find_difference(entry(VALUES, name="mean"), made, "latents") is None
    assert find_difference(entry(VALUES, name="mean"), made, "text")


def test_a_value_that_is_scaled_or_turned_round_is_another():
    for other in (-VALUES, 2 * VALUES, np.zeros_like(VALUES), VALUES[::-1], OFFSETS):
        assert find_difference(entry(VALUES), entry(other), "text")
        assert find_difference(entry(other), entry(VALUES), "text")


def test_two_of_length_zero_are_the_same():
    assert find_difference(entry(np.zeros((2, 2))), entry(np.zeros((2, 2))), "text") is None


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_is_never_the_same(bad):
    broken = VALUES.copy()
    broken[0, 0] = bad
    assert "NaN or infinite" in find_difference(entry(broken), entry(broken), "text").words


def test_names_dtypes_and_shapes_must_be_equal():
    assert find_difference(entry(VALUES), {}, "text").words == "is stored, but not made now"
    assert find_difference({}, entry(VALUES), "text").words == "is not stored"
    assert find_difference(entry(VALUES), entry(VALUES, "F16"), "text").words == "is stored as F32 [8, 32], but is now F16 [8, 32]"
    assert find_difference(entry(VALUES), entry(VALUES[:4]), "text").words == "is stored as F32 [8, 32], but is now F32 [4, 32]"


@pytest.mark.parametrize("dtype", ["int64", "uint8", "bool"])
def test_masks_and_whole_numbers_are_compared_bit_by_bit(dtype):
    one, two = np.array([1, 1, 0], dtype), np.array([1, 0, 0], dtype)
    assert find_difference(to_raw({"mask": one}), to_raw({"mask": one}), "text") is None
    assert find_difference(to_raw({"mask": one}), to_raw({"mask": two}), "text").words.endswith("differs")


def test_the_mean_of_moments_is_not_hidden_by_a_large_log_variance():
    deviation = np.full((4, 8, 8), -20.0)
    means = [RNG.standard_normal((4, 8, 8)) * 0.01 for _ in range(2)]
    moments = [np.concatenate([mean, deviation]) for mean in means]
    assert find_difference(entry(moments[0], name="other"), entry(moments[1], name="other"), "latents") is None
    assert find_difference(entry(moments[0], name="moments"), entry(moments[1], name="moments"), "latents").tensor == "moments"


def test_the_tolerances_are_those_that_the_page_on_numerics_tells():
    from tests.fakes import ROOT

    page = (ROOT / "docs/numerics.md").read_text()
    assert all(f"{allowed:.0e}".replace("e-0", "e-") in page for allowed in (*TOLERANCES.values(), TF32_TOLERANCE))
    assert str(COSINE) in page
