"""Items of lists, tuples and mappings with tensors among them."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cachestore as cs
from cachestore import live

DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool)
TENSORS = st.builds(lambda dtype, shape: torch.zeros(shape).to(dtype), st.sampled_from(DTYPES), st.lists(st.integers(0, 3), max_size=3))
PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
ITEMS = st.recursive(
    TENSORS | PLAIN,
    lambda inner: st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


def shown(value):
    """Return what tells an item apart from every other."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), list(value.shape), value.reshape(-1).view(torch.uint8).tolist()
    if isinstance(value, dict):
        return {name: shown(one) for name, one in value.items()}
    return [type(value).__name__, [shown(one) for one in value] if isinstance(value, list | tuple) else repr(value)]


@settings(max_examples=40, deadline=None)
@given(ITEMS)
def test_an_item_comes_back_as_it_was(item):
    assert shown(live.unpack(live.pack(item))) == shown(item)


@pytest.mark.parametrize("item", [{"size": {1, 2}}, {1: "a"}, b"bytes", [torch.nn.Linear(1, 1)]])
def test_what_cannot_be_kept_is_refused(item):
    with pytest.raises(live.Refused):
        live.pack(item)


@settings(max_examples=10, deadline=None)
@given(st.lists(ITEMS, min_size=1, max_size=4))
def test_a_store_holds_it(tmp_path_factory, some):
    with cs.open(tmp_path_factory.mktemp("store"), mode="a") as store:
        for number, value in enumerate(some):
            store.put(cs.key(str(number)), live.pack(value))
        assert all(shown(live.unpack(store.get(cs.key(str(number))))) == shown(value) for number, value in enumerate(some))


def test_names_that_a_store_cannot_hold_are_no_matter():
    value = {"a/b": torch.ones(1), "a.b": torch.zeros(1), "": torch.ones(2), "shape": torch.ones(3)}
    assert shown(live.unpack(live.pack(value))) == shown(value)


def test_an_array_comes_back_as_one():
    [back] = live.unpack(live.pack([np.arange(3)]))
    assert isinstance(back, np.ndarray)
    assert back.tolist() == [0, 1, 2]
