"""Items of lists, tuples and mappings with tensors among them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

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
