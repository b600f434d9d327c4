"""Which keys are there, for millions at once."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cachestore.store.read.held import are_among

keys_of_two_halves = st.tuples(st.sampled_from([b"a" * 8, b"b" * 8, bytes(8)]), st.sampled_from([b"c" * 8, bytes(7) + b"d", bytes(8)])).map(
    b"".join
)


@given(st.lists(keys_of_two_halves, max_size=8), st.lists(keys_of_two_halves, max_size=8))
def test_keys_are_found_among_others_as_in_a_set(keys, present):
    def rows(values):
        return np.frombuffer(b"".join(values), np.uint8).reshape(-1, 16)

    assert are_among(rows(keys), rows(present)).tolist() == [key in set(present) for key in keys]
