"""Places: packed for the index and back."""

from hypothesis import given
from hypothesis import strategies as st

from cachestore.storage.entry import TensorSpec
from cachestore.storage.places import PLACE_BYTES, Place, SegmentRef, pack_place, unpack_places

places = st.tuples(
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**32 - 1),
    st.binary(min_size=16, max_size=16),
)


def test_no_bytes_are_no_places():
    assert unpack_places(b"") == []


@given(many=st.lists(places, max_size=5))
def test_places_one_after_the_other_come_back(many):
    raw = b"".join(pack_place(*place) for place in many)
    assert len(raw) == PLACE_BYTES * len(many)
    assert unpack_places(raw) == many


def test_the_size_of_a_place_is_that_of_its_tensors():
    ref = SegmentRef("0" * 32, 100, 1, "")
    assert Place(ref, 0, 64, (), b"").size_bytes == 0
    assert Place(ref, 0, 64, (TensorSpec("a", "F32", (2, 3)), TensorSpec("b", "U8", (5,))), b"").size_bytes == 29
