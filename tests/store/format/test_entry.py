"""One entry as bytes: bound to its key, cut back into what it was."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from cachestore.core.errors import BadInput
from cachestore.core.keys import key
from cachestore.files.container import DTYPE_BYTES, size_bytes
from cachestore.store.format.entry import checksum_of, make_entry, split

KEY = key("a")
OTHER = key("b")

names = st.text(st.characters(categories=["L", "N", "P", "S"], exclude_characters="/"), min_size=1, max_size=8).filter(str.isprintable)


@st.composite
def tensors(draw):
    dtype = draw(st.sampled_from(sorted(DTYPE_BYTES)))
    shape = tuple(draw(st.lists(st.integers(0, 3), max_size=3)))
    size = size_bytes(dtype, shape)
    return dtype, shape, draw(st.binary(min_size=size, max_size=size))


entries = st.dictionaries(names, tensors(), max_size=4)


def test_an_entry_without_tensors_is_valid():
    entry = make_entry(KEY, {}, {"why": "only a note"})
    assert (entry.specs, entry.specs.size_bytes) == ((), 0)
    assert split(entry.specs, memoryview(b"")) == {}


@given(given_tensors=entries)
def test_the_tensors_of_an_entry_come_back_from_its_bytes(given_tensors):
    entry = make_entry(KEY, given_tensors, {})
    run = memoryview(b"".join(entry.buffers))
    found = split(entry.specs, run)
    assert {name: (dtype, shape, bytes(raw)) for name, (dtype, shape, raw) in found.items()} == given_tensors
    assert entry.specs.size_bytes == len(run)


@given(given_tensors=entries)
def test_every_tensor_starts_at_a_multiple_of_its_element(given_tensors):
    entry, position = make_entry(KEY, given_tensors, {}), 0
    for spec in entry.specs:
        assert position % DTYPE_BYTES[spec.dtype] == 0
        position += spec.size_bytes


@given(given_tensors=entries)
def test_the_order_of_the_tensors_does_not_matter(given_tensors):
    assert make_entry(KEY, dict(reversed(given_tensors.items())), {}).checksum == make_entry(KEY, given_tensors, {}).checksum


@given(given_tensors=entries)
def test_the_checksum_of_one_run_is_that_of_its_parts(given_tensors):
    entry = make_entry(KEY, given_tensors, {})
    assert checksum_of(KEY, entry.specs, [b"".join(entry.buffers)]) == entry.checksum
    assert len(entry.checksum) == 16


@given(keys=st.tuples(*[st.sampled_from([KEY, OTHER])] * 2), tensors=st.tuples(entries, entries))
def test_different_entries_have_different_checksums(keys, tensors):
    assume(keys[0] != keys[1] or tensors[0] != tensors[1])
    one, other = (make_entry(key, named, {}).checksum for key, named in zip(keys, tensors, strict=True))
    assert one != other


BYTES = bytes(range(8))
BASE = {"x": ("U16", (2, 2), BYTES)}
CHANGED = {
    "the name": (KEY, {"y": ("U16", (2, 2), BYTES)}),
    "the dtype": (KEY, {"x": ("I16", (2, 2), BYTES)}),
    "the shape": (KEY, {"x": ("U16", (4,), BYTES)}),
    "the order of dimensions": (KEY, {"x": ("U16", (1, 4), BYTES)}),
    "a byte": (KEY, {"x": ("U16", (2, 2), BYTES[:-1] + b"?")}),
    "the key": (OTHER, BASE),
    "an empty tensor": (KEY, BASE | {"y": ("U8", (0,), b"")}),
    "where one tensor ends": (KEY, {"x": ("U16", (1,), BYTES[:2]), "y": ("U16", (3,), BYTES[2:])}),
}


@pytest.mark.parametrize("what", CHANGED)
def test_the_checksum_is_bound_to(what):
    assert make_entry(*CHANGED[what], {}).checksum != make_entry(KEY, BASE, {}).checksum


def test_swapped_tensors_have_another_checksum():
    one, two = ("U8", (1,), b"1"), ("U8", (1,), b"2")
    assert make_entry(KEY, {"x": one, "y": two}, {}).checksum != make_entry(KEY, {"x": two, "y": one}, {}).checksum


REFUSED = {
    "an empty name": ({"": ("U8", (1,), b"1")}, {}),
    "a name with a slash": ({"a/b": ("U8", (1,), b"1")}, {}),
    "a name with NUL": ({"a\0": ("U8", (1,), b"1")}, {}),
    "a name with a line end": ({"a\n": ("U8", (1,), b"1")}, {}),
    "a name with half a surrogate pair": ({"\udcff": ("U8", (1,), b"1")}, {}),
    "a long name": ({"a" * 129: ("U8", (1,), b"1")}, {}),
    "an unknown dtype": ({"a": ("F4", (1,), b"1")}, {}),
    "too few bytes": ({"a": ("U16", (1,), b"1")}, {}),
    "too many bytes": ({"a": ("U8", (1,), b"12")}, {}),
    "too many dimensions": ({"a": ("U8", (1,) * 17, b"1")}, {}),
    "a dimension that is no size": ({"a": ("U8", (0, 1 << 50), b"")}, {}),
    "a negative dimension": ({"a": ("U8", (-1, -1), b"1")}, {}),
    "a value that is not JSON": ({}, {"a": object()}),
    "a value that is NaN": ({}, {"a": float("nan")}),
}


@pytest.mark.parametrize("what", REFUSED)
def test_it_is_refused_with(what):
    tensors, meta = REFUSED[what]
    with pytest.raises(BadInput):
        make_entry(KEY, tensors, meta)


def test_splitting_copies_nothing():
    entry = make_entry(KEY, BASE, {})
    run = bytearray(BYTES)
    found = split(entry.specs, memoryview(run))
    run[0] = 99
    assert bytes(found["x"][2])[0] == 99
