"""Tensors as bytes: casts round as torch does, and scaling is computed as diffusers does."""

import numpy as np
import pytest
import torch

from cachestore.core.errors import EncodeFailed
from cachestore.core.raw_tensors import Scale, as_array, cast, from_array, is_finite, joined, numbers, rounded, to_state, without_batch
from cachestore.core.tensors import to_raw, to_torch
from cachestore.trainers.families import FAMILIES
from cachestore.trainers.text import apart, together
from tests.trainers import trainers

pytestmark = pytest.mark.torch

VALUES = torch.cat([torch.randn(1000, generator=torch.Generator().manual_seed(0)) * 10.0**e for e in range(-30, 30, 5)])
ODD = torch.tensor([0.0, -0.0, float("inf"), float("-inf"), 3.0e38, 1.00390625, 1.01171875, 65504.0, 1e-40])


def raw_of(tensor):
    return to_raw({"it": tensor})["it"]


def torch_of(raw):
    dtype, shape, buffer = raw
    return to_torch({"it": (dtype, shape, bytearray(buffer))})["it"]


@pytest.mark.parametrize(
    ("name", "dtype"), [("BF16", torch.bfloat16), ("F16", torch.float16), ("F32", torch.float32), ("F64", torch.float64)]
)
def test_numbers_are_rounded_as_torch_rounds_them(name, dtype):
    values = torch.cat([VALUES, ODD])
    assert torch.equal(torch_of(rounded(values.numpy(), name)), values.to(dtype))


def test_nan_stays_nan_in_bfloat16():
    assert torch_of(rounded(np.array([np.nan, 1.0], np.float32), "BF16")).isnan().tolist() == [True, False]


def test_smaller_dtypes_fit_into_float32_exactly_and_casting_to_ones_own_changes_no_byte():
    for dtype in (torch.bfloat16, torch.float16):
        raw = raw_of(VALUES.to(dtype))
        assert torch.equal(torch_of(cast(raw, "F32")), VALUES.to(dtype).float())
        assert cast(raw, raw[0]) is raw
        assert bytes(cast(cast(raw, "F32"), raw[0])[2]) == bytes(raw[2])


def test_scaling_is_what_diffusers_computes_and_undoing_it_gives_it_back():
    latents = torch.randn(16, 4, 4, generator=torch.Generator().manual_seed(1))
    scaled = torch_of(to_state(raw_of(latents), Scale(0.3611, 0.1159), was_scaled=False, is_scaled=True))
    assert torch.equal(scaled, (latents - 0.1159) * 0.3611)
    back = to_state(raw_of(scaled), Scale(0.3611, 0.1159), was_scaled=True, is_scaled=False)
    assert torch.allclose(torch_of(back), latents, atol=1e-6)


def test_scaling_by_channel_is_what_diffusers_computes():
    latents = torch.randn(2, 1, 3, 3, generator=torch.Generator().manual_seed(1))
    scale = Scale(None, None, (0.5, -1.0), (2.0, 4.0))
    made = torch_of(to_state(raw_of(latents), scale, was_scaled=False, is_scaled=True))
    mean, std = torch.tensor([0.5, -1.0]).view(2, 1, 1, 1), torch.tensor([2.0, 4.0]).view(2, 1, 1, 1)
    assert torch.equal(made, (latents - mean) * 1.0 / std)
    assert torch.allclose(torch_of(to_state(raw_of(made), scale, was_scaled=True, is_scaled=False)), latents, atol=1e-6)


def test_latents_in_the_right_state_keep_their_bytes_and_unknown_constants_convert_nothing():
    raw = raw_of(VALUES)
    assert to_state(raw, Scale(), was_scaled=True, is_scaled=True) is raw
    with pytest.raises(EncodeFailed):
        to_state(raw, Scale(), was_scaled=True, is_scaled=False)


@pytest.mark.parametrize("family", [family for family in FAMILIES if family.name in {"sdxl", "sd3", "flux"}], ids=lambda one: one.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_taking_text_apart_and_putting_it_together_changes_no_bit(family, dtype):
    made = {name: raw_of(tensor) for name, tensor in trainers.text_of("a caption", family.name, dtype).items()}
    prompt, pooled = together(family, apart(family, made["prompt"], made["pooled"]))
    assert (prompt[:2], bytes(prompt[2])) == (made["prompt"][:2], bytes(made["prompt"][2]))
    assert (pooled[:2], bytes(pooled[2])) == (made["pooled"][:2], bytes(made["pooled"][2]))


def test_text_of_another_width_is_refused():
    family = next(family for family in FAMILIES if family.name == "sd3")
    good, pooled = from_array(np.zeros((80, 4096), np.float32)), from_array(np.zeros(2048, np.float32))
    apart(family, good, pooled)
    for prompt in [
        from_array(np.zeros((80, 4095), np.float32)),
        from_array(np.zeros((60, 4096), np.float32)),
        from_array(np.ones((80, 4096), np.float32)),
    ]:
        with pytest.raises(EncodeFailed):
            apart(family, prompt, pooled)


def test_a_batch_axis_of_one_is_left_out_and_another_refused():
    assert without_batch("it", from_array(np.zeros((1, 2, 3))), 2)[1] == (2, 3)
    assert without_batch("it", from_array(np.zeros((2, 3))), 2)[1] == (2, 3)
    with pytest.raises(EncodeFailed):
        without_batch("it", from_array(np.zeros((2, 2, 3))), 2)


def test_what_is_no_floating_point_number_is_told_from_what_is():
    whole = from_array(np.array([1, 2]))
    assert is_finite(whole)
    assert not is_finite(from_array(np.array([1.0, np.inf])))
    with pytest.raises(EncodeFailed):
        numbers(whole)
    with pytest.raises(EncodeFailed):
        from_array(np.array(["a"]))
    with pytest.raises(EncodeFailed):
        as_array(("C64", (1,), bytes(8)))


def test_tensors_of_two_dtypes_are_joined_in_float32():
    one, two = raw_of(torch.ones(2, dtype=torch.bfloat16)), raw_of(torch.zeros(1))
    assert torch_of(joined([one, two], -1)).tolist() == [1.0, 1.0, 0.0]
