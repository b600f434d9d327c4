"""Rows with the tensors behind their keys."""

import pytest
import torch

import cachestore as cs
from cachestore.train.dataset import CachedDataset
from tests.train.stores import Row, make_store, recipes

pytestmark = pytest.mark.torch


def test_a_row_that_is_asked_for_twice_gives_tensors_of_its_own_each_time(tmp_path):
    one, two = CachedDataset(make_store(tmp_path, [Row("a"), Row("b")], recipes()))._rows.samples([0, 0], 0)
    tensors = [name for name, value in one.items() if isinstance(value, torch.Tensor) and value.numel()]
    assert tensors
    assert all(torch.equal(one[name], two[name]) and one[name].data_ptr() != two[name].data_ptr() for name in tensors)


def test_no_rows_are_no_samples(tmp_path):
    assert CachedDataset(make_store(tmp_path, [Row("a")], recipes()))._rows.samples([], 0) == []


def test_the_keys_of_a_row_are_in_the_store_one_for_each_column_handed_out(tmp_path):
    data = CachedDataset(make_store(tmp_path, [Row("a"), Row("b"), Row("c")], recipes()))
    parts = data._rows.parts(data._selection.choose([1], 0), 0)
    assert len(parts) == len(data._selection.texts) + (data._selection.latents is not None)
    with cs.open(tmp_path) as store:
        assert all(key in store for part in parts for key in part.keys)
