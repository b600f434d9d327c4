"""Joining, padding and masking of stored embeddings, on tensors alone."""

from dataclasses import replace

import pytest
import torch

from cachestore.core.errors import FormatError
from cachestore.core.read_block import Constant, Form, LatentsBlock, Padding, TextBlock
from cachestore.train.latents import read_latents
from cachestore.train.texts import make_constant, pad_rows, read_outputs

pytestmark = pytest.mark.torch

RIGHT = Padding(dim=-2, side="right", length=None, multiple=1, value=0, mask="mask")


def rows(*lengths, start=1):
    return [torch.arange(start, start + 2 * length, dtype=torch.float32).view(length, 2) for length in lengths]


def pad(lengths, padding):
    batch, mask = pad_rows(rows(*lengths), padding)
    return batch.tolist(), mask.tolist()


def test_rows_of_no_length_make_a_batch_of_no_length():
    assert pad([0, 0], RIGHT) == ([[], []], [[], []])


def test_rows_are_padded_on_the_side_the_model_wants():
    assert pad([1, 2], RIGHT) == ([[[1, 2], [0, 0]], [[1, 2], [3, 4]]], [[1, 0], [1, 1]])
    assert pad([1, 2], replace(RIGHT, side="left", value=-1)) == ([[[-1, -1], [1, 2]], [[1, 2], [3, 4]]], [[0, 1], [1, 1]])


def test_rows_are_padded_to_a_fixed_length_or_to_a_multiple():
    assert pad([1], replace(RIGHT, length=3))[1] == [[1, 0, 0]]
    assert pad([3, 1], replace(RIGHT, multiple=4))[1] == [[1, 1, 1, 0], [1, 0, 0, 0]]
    assert pad([4], replace(RIGHT, multiple=4))[1] == [[1, 1, 1, 1]]


def test_an_entry_longer_than_its_recipe_allows_is_an_error():
    with pytest.raises(FormatError):
        pad([1, 4], replace(RIGHT, length=3))


def test_parts_are_joined_inside_out():
    one, two, three = rows(1, 1, 2)
    block = TextBlock({"x": Form((Form(("a", "b"), -2), "c"), -1), "y": Form(("a",), None)}, {}, {}, None)
    found = read_outputs(block, {"a": one, "b": two, "c": three})
    assert {name: value.tolist() for name, value in found.items()} == {"x": [[1, 2, 1, 2], [1, 2, 3, 4]], "y": [[1, 2]]}


def test_constants_take_length_and_batch_size_from_their_output():
    like = torch.ones(3, 5, 2, dtype=torch.bfloat16)
    made = make_constant(Constant(("B", "S", 4), "x"), like)
    assert (list(made.shape), made.dtype, made.any().item()) == ([3, 5, 4], torch.bfloat16, False)


def test_positions_count_along_the_length_in_the_last_number():
    made = make_constant(Constant(("B", "S", 4), "x", "positions"), torch.ones(2, 3, 7, dtype=torch.bfloat16))
    assert made.dtype == torch.int64
    assert made.tolist() == [[[0, 0, 0, 0], [0, 0, 0, 1], [0, 0, 0, 2]]] * 2


def test_a_join_is_widened_with_zeros_and_never_cut():
    one, two, wide = rows(1, 1, 3)
    form = Form((Form(("a", "b"), -1, 6), "c"), -2)
    found = read_outputs(TextBlock({"x": form}, {}, {}, None), {"a": one, "b": two, "c": wide.view(1, 6)})
    assert found["x"].tolist() == [[1, 2, 1, 2, 0, 0], [1, 2, 3, 4, 5, 6]]
    with pytest.raises(FormatError):
        read_outputs(TextBlock({"x": Form(("a", "b"), -1, 3)}, {}, {}, None), {"a": one, "b": two})


def test_an_entry_without_a_tensor_that_its_recipe_names_is_an_error():
    with pytest.raises(FormatError, match="no tensor 'a'; it has b"):
        read_outputs(TextBlock({"x": Form(("a",), None)}, {}, {}, None), {"b": torch.ones(1)})
    with pytest.raises(FormatError):
        read_latents(LatentsBlock("moments", 1, 1.0, None, None, None), "mean", {})
