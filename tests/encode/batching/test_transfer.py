"""Batches are put together for the device."""

import numpy as np
import pytest

pytestmark = pytest.mark.torch


def arrays(count):
    return [np.full((2, 3, 3), number, np.uint8) for number in range(count)]


def test_a_single_array_is_a_batch_without_a_copy_and_one_that_is_read_only_is_copied():
    import torch

    from cachestore.encode.batching.transfer import Transfer

    transfer = Transfer(torch.device("cpu"))
    [one] = arrays(1)
    shared = transfer.stacked([one])
    one[:] = 7
    assert shared.shape == (1, 2, 3, 3)
    assert shared.unique().tolist() == [7]
    one.flags.writeable = False
    copied = transfer.stacked([one])
    assert copied.tolist() == shared.tolist()
    assert copied.data_ptr() != shared.data_ptr()


def test_several_arrays_are_rows_of_one_batch_in_their_order():
    import torch

    from cachestore.encode.batching.transfer import Transfer

    batch = Transfer(torch.device("cpu")).stacked(arrays(3))
    assert batch.shape == (3, 2, 3, 3)
    assert batch[:, 0, 0, 0].tolist() == [0, 1, 2]
