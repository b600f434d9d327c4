"""Rows with the tensors behind their keys."""

import pytest
import torch

from cachestore.train.dataset import CachedDataset
from tests.train.stores import Row, make_store, recipes

pytestmark = pytest.mark.torch


def test_a_row_that_is_asked_for_twice_gives_tensors_of_its_own_each_time(tmp_path):
    one, two = CachedDataset(make_store(tmp_path, [Row("a"), Row("b")], recipes()))._read.samples([0, 0])
    tensors = [name for name, value in one.items() if isinstance(value, torch.Tensor) and value.numel()]
    assert tensors
    assert all(torch.equal(one[name], two[name]) and one[name].data_ptr() != two[name].data_ptr() for name in tensors)


def test_no_rows_are_no_samples(tmp_path):
    assert CachedDataset(make_store(tmp_path, [Row("a")], recipes()))._read.samples([]) == []
