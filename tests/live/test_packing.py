"""Packing: whatever a trainer caches comes back as it was."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cachestore as cs
from cachestore import live
from cachestore.live.adapter import Refused
from tests.fakes import tells_of

pytestmark = pytest.mark.torch
tensors = st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool]).flatmap(
    lambda dtype: st.lists(st.integers(0, 3), max_size=3).map(lambda shape: torch.arange(int(np.prod(shape))).reshape(shape).to(dtype))
)
leaves = st.none() | st.booleans() | st.integers(-(10**18), 10**18) | st.floats(allow_nan=False) | st.text(max_size=5) | tensors
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=3) | st.tuples(inner, inner) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


def same(one, other):
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return isinstance(other, dict) and list(one) == list(other) and all(same(one[name], other[name]) for name in one)
    return type(one) is type(other) and one == other


@settings(max_examples=60, deadline=None)
@given(values)
def test_what_was_packed_comes_back_with_its_lists_tuples_and_mappings(value):
    assert same(live.unpack(live.pack(value)), value)


@settings(max_examples=10, deadline=None)
@given(st.lists(values, min_size=1, max_size=4))
def test_a_store_holds_it(tmp_path_factory, some):
    with cs.open(tmp_path_factory.mktemp("store"), mode="a") as store:
        for number, value in enumerate(some):
            store.put(cs.key(str(number)), live.pack(value))
        assert all(same(live.unpack(store.get(cs.key(str(number)))), value) for number, value in enumerate(some))


def test_names_that_a_store_cannot_hold_are_no_matter():
    value = {"a/b": torch.ones(1), "a.b": torch.zeros(1), "": torch.ones(2), "shape": torch.ones(3)}
    assert same(live.unpack(live.pack(value)), value)


def test_an_array_comes_back_as_one():
    [back] = live.unpack(live.pack([np.arange(3)]))
    assert isinstance(back, np.ndarray)
    assert back.tolist() == [0, 1, 2]


def test_packed_tensors_are_not_the_trainers():
    tensor = torch.zeros(2)
    packed = live.pack(tensor)
    tensor += 1
    assert live.unpack(packed).tolist() == [0, 0]


def test_what_cannot_be_stored_is_refused_by_name():
    with pytest.raises(Refused, check=tells_of("value.mask.0", "builtins.object")):
        live.pack({"mask": [object()]})
