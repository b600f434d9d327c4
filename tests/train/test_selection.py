"""Which rows and columns are handed out, and by which keys; nothing is read for it."""

import numpy as np
import pytest

from cachestore.train.dataset import CachedDataset
from tests.fakes import tells_of
from tests.train.stores import Row, make_store, recipes

pytestmark = pytest.mark.torch


@pytest.fixture
def selection(tmp_path):
    return CachedDataset(make_store(tmp_path, [Row("a"), Row("b"), Row("c")], recipes()))._selection


def test_a_part_of_a_part_is_of_the_whole(selection):
    assert (selection.select(np.array([2, 0])).select(np.array([1])).ids, selection.ids) == (["a"], ["a", "b", "c"])


def test_a_part_has_an_epoch_of_its_own(selection):
    selection.select(np.array([0])).epoch.set(3)
    assert selection.epoch.get() == 0


def test_no_indices_have_no_rows_and_are_no_part(selection):
    assert selection.rows_at([]) == []
    part = selection.select(np.array([], dtype=np.int64))
    assert (part.ids, part.groups) == ([], {})


def test_an_index_that_there_is_not_is_named_with_the_data_set(selection):
    with pytest.raises(IndexError, check=tells_of("'train'", "3 samples", "at 3")):
        selection.rows_at([0, 3])
