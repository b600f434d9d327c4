"""Locations of entries: packed for the index and back."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachestore.store.format.entry import Specs, TensorSpec
from cachestore.store.format.locations import LOCATION_BYTES, Located, Location, SegmentRef, pack_location, unpack_firsts, unpack_locations

locations = st.tuples(
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**32 - 1),
    st.binary(min_size=16, max_size=16),
)


def test_no_bytes_are_no_locations():
    assert unpack_locations(b"") == []


@given(many=st.lists(locations, max_size=5))
def test_locations_one_after_the_other_come_back(many):
    raw = b"".join(pack_location(*location) for location in many)
    assert len(raw) == LOCATION_BYTES * len(many)
    assert unpack_locations(raw) == many


@given(many=st.lists(st.lists(locations, min_size=1, max_size=3), max_size=5))
def test_the_first_location_of_each_value_is_found_whatever_stands_behind_it(many):
    assert unpack_firsts([b"".join(pack_location(*location) for location in each) for each in many]) == [each[0] for each in many]


def test_a_value_that_is_too_short_is_refused_even_beside_one_that_is_longer_by_as_much():
    with pytest.raises(struct.error):
        unpack_firsts([bytes(LOCATION_BYTES - 1), bytes(LOCATION_BYTES + 1)])


def test_no_locations_are_empty_columns_and_others_come_back_from_theirs():
    assert Located.of([]) == ((), (), (), (), ())
    made = [Location(SegmentRef(str(n), 100, 1, ""), n, 64 * n, Specs((TensorSpec("a", "F32", (n,)),)), bytes([n])) for n in range(3)]
    assert [Located.of(made).location(n) for n in range(3)] == made


def test_the_size_of_a_location_is_that_of_its_tensors():
    ref = SegmentRef("0" * 32, 100, 1, "")
    assert Location(ref, 0, 64, Specs(), b"").size_bytes == 0
    assert Location(ref, 0, 64, Specs((TensorSpec("a", "F32", (2, 3)), TensorSpec("b", "U8", (5,)))), b"").size_bytes == 29
