"""The safetensors container: made so that the stock library opens it, parsed more strictly than the stock library does."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors
from hypothesis import given
from hypothesis import strategies as st

from cachestore.core.errors import FormatError
from cachestore.files import container
from cachestore.files.container import (
    ALIGNMENT,
    DTYPE_BYTES,
    HEADER_LIMIT_BYTES,
    TENSOR_LIMIT,
    TensorInfo,
    build_header,
    parse_header,
    read_header,
    size_bytes,
)
from cachestore.files.opening import opened

HERE = Path("a.safetensors")
U8 = {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]}


def parse(fields, data_bytes=8):
    text = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    return parse_header(text, 8 + len(text) + data_bytes, where=HERE)


def lay_out(shapes):
    """Tensors one after the other, widest first."""
    tensors, position = {}, 0
    for name, (dtype, shape) in sorted(shapes.items(), key=lambda item: -DTYPE_BYTES[item[1][0]]):
        tensors[name] = TensorInfo(dtype, shape, position, position + size_bytes(dtype, shape))
        position = tensors[name].end
    return tensors, position


names = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=12).filter(
    lambda name: name != "__metadata__"
)
shapes = st.tuples(st.sampled_from(sorted(DTYPE_BYTES)), st.lists(st.integers(0, 4), max_size=4).map(tuple))
plain = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


def test_a_container_without_tensors_comes_back():
    raw = build_header({}, {})
    header = parse_header(raw[8:], len(raw), where=HERE)
    assert (header.tensors, header.metadata, header.data_start) == ({}, {}, len(raw))


@given(shapes=st.dictionaries(names, shapes, max_size=5), metadata=st.dictionaries(plain, plain, max_size=3))
def test_a_header_comes_back_with_its_tensors_in_the_order_of_their_bytes(shapes, metadata):
    tensors, data_bytes = lay_out(shapes)
    raw = build_header(tensors, metadata)
    header = parse_header(raw[8:], len(raw) + data_bytes, where=HERE)
    assert (header.tensors, header.metadata) == (tensors, metadata)
    infos = list(header.tensors.values())
    assert infos == sorted(infos, key=lambda info: info.start)


@given(shapes=st.dictionaries(names, shapes, max_size=3))
def test_data_starts_at_a_multiple_of_64(shapes):
    raw = build_header(lay_out(shapes)[0], {})
    assert len(raw) % ALIGNMENT == 0
    assert int.from_bytes(raw[:8], "little") == len(raw) - 8


@given(shapes=st.dictionaries(names, shapes, max_size=4), metadata=st.dictionaries(plain, plain, max_size=3))
def test_the_stock_library_opens_what_is_built(shapes, metadata):
    tensors, data_bytes = lay_out(shapes)
    found = safetensors.deserialize(build_header(tensors, metadata) + bytes(data_bytes))
    assert {name: (each["dtype"], tuple(each["shape"])) for name, each in found} == shapes


def test_what_the_stock_library_writes_is_parsed(tmp_path):
    from safetensors.numpy import save_file

    save_file({"b": np.zeros((2, 3), np.float32), "a": np.ones(5, np.uint8)}, tmp_path / "f", metadata={"x": "y"})
    with opened(tmp_path / "f") as (descriptor, status):
        header = read_header(descriptor, status.st_size, where=HERE)
    assert {name: info.shape for name, info in header.tensors.items()} == {"b": (2, 3), "a": (5,)}
    assert header.metadata == {"x": "y"}


MALFORMED = {
    "nothing": b"",
    "no brace": b" {}",
    "a list": b"[]",
    "no JSON": b"{",
    "a tail": b"{} x",
    "not UTF-8": b'{"\xff": 1}',
    "UTF-16": json.dumps({"a": U8}).encode("utf-16-le"),
    "one name twice": b'{"a":{"dtype":"U8","shape":[8],"data_offsets":[0,8]},"a":{"dtype":"U8","shape":[8],"data_offsets":[0,8]}}',
    "one field twice": b'{"a":{"dtype":"U8","shape":[8],"shape":[8],"data_offsets":[0,8]}}',
    "the metadata twice": b'{"__metadata__":{},"__metadata__":{},"a":{"dtype":"U8","shape":[8],"data_offsets":[0,8]}}',
    "deep nesting": b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "NaN": b'{"a":{"dtype":"U8","shape":[NaN],"data_offsets":[0,8]}}',
    "Infinity": b'{"a":{"dtype":"U8","shape":[8],"data_offsets":[0,Infinity]}}',
    "a very long number": b'{"a":{"dtype":"U8","shape":[' + b"8" * 5000 + b'],"data_offsets":[0,8]}}',
    "an empty name": {"": U8},
    "NUL in a name": {"a\0": U8},
    "a long name": {"a" * 257: U8},
    "a tensor that is null": {"a": None},
    "a tensor that is a list": {"a": [1]},
    "no dtype": {"a": {"shape": [8], "data_offsets": [0, 8]}},
    "an unknown field": {"a": U8 | {"extra": 1}},
    "an unknown dtype": {"a": U8 | {"dtype": "F4"}},
    "a dtype that is a list": {"a": U8 | {"dtype": ["U8"]}},
    "a dtype in lower case": {"a": U8 | {"dtype": "u8"}},
    "a shape that is a number": {"a": U8 | {"shape": 8}},
    "a shape with a fraction": {"a": U8 | {"shape": [8.0]}},
    "a shape with a truth value": {"a": U8 | {"shape": [8, True]}},
    "a negative shape": {"a": U8 | {"shape": [-8]}},
    "two negatives": {"a": U8 | {"shape": [-2, -4]}},
    "a huge shape that overflows": {"a": U8 | {"shape": [2**32, 2**32, 2**32]}},
    "a huge shape of nothing": {"a": {"dtype": "U8", "shape": [0, 2**62], "data_offsets": [0, 0]}, "b": U8},
    "too many dimensions": {"a": U8 | {"shape": [8, *[1] * 16]}},
    "one offset": {"a": U8 | {"data_offsets": [0]}},
    "three offsets": {"a": U8 | {"data_offsets": [0, 8, 8]}},
    "offsets the wrong way round": {"a": U8 | {"data_offsets": [8, 0]}},
    "negative offsets": {"a": U8 | {"data_offsets": [-8, 0]}},
    "offsets behind the end": {"a": U8 | {"data_offsets": [8, 16]}},
    "offsets in words": {"a": U8 | {"data_offsets": ["0", "8"]}},
    "bytes that the shape does not need": {"a": U8 | {"shape": [7]}},
    "a hole": {"a": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]}, "b": {"dtype": "U8", "shape": [4], "data_offsets": [4, 8]}},
    "a hole at the start": {"a": {"dtype": "U8", "shape": [7], "data_offsets": [1, 8]}},
    "an overlap": {"a": {"dtype": "U8", "shape": [5], "data_offsets": [0, 5]}, "b": {"dtype": "U8", "shape": [4], "data_offsets": [4, 8]}},
    "one range twice": {"a": U8, "b": U8},
    "a tail of data": {"a": {"dtype": "U8", "shape": [7], "data_offsets": [0, 7]}},
    "too little data": {"a": {"dtype": "U8", "shape": [9], "data_offsets": [0, 9]}},
    "data without tensors": {},
    "odd alignment": {
        "a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
        "b": {"dtype": "F32", "shape": [1], "data_offsets": [1, 5]},
        "c": {"dtype": "U8", "shape": [3], "data_offsets": [5, 8]},
    },
    "metadata that is a list": {"__metadata__": [], "a": U8},
    "metadata that is null": {"__metadata__": None, "a": U8},
    "metadata that holds a number": {"__metadata__": {"x": 1}, "a": U8},
}


def empty_tensors(count):
    return {str(n): {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]} for n in range(count)}


def test_the_file_that_the_malformed_ones_vary_is_good():
    assert parse({"a": U8}).tensors == {"a": TensorInfo("U8", (8,), 0, 8)}


@pytest.mark.parametrize("what", MALFORMED)
def test_a_malformed_header_is_a_format_error_that_names_the_file(what):
    with pytest.raises(FormatError):
        parse(MALFORMED[what])


def test_no_more_tensors_than_the_cap_are_parsed(monkeypatch):
    monkeypatch.setattr(container, "TENSOR_LIMIT", 8)
    assert len(parse(empty_tensors(8), 0).tensors) == 8
    with pytest.raises(FormatError):
        parse(empty_tensors(10), 0)


@pytest.mark.slow
def test_as_many_tensors_as_the_cap_are_parsed():
    assert len(parse(empty_tensors(TENSOR_LIMIT), 0).tensors) == TENSOR_LIMIT


@given(text=st.binary(), data_bytes=st.integers(-8, 100))
def test_any_bytes_are_a_header_or_a_format_error(text, data_bytes):
    try:
        parse_header(text, 8 + len(text) + data_bytes, where=HERE)
    except FormatError:
        return


pieces = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 2**70) | st.sampled_from([0.5, "U8", "F32", "é", "\0"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["dtype", "shape", "data_offsets", "__metadata__", "a"]), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(fields=st.dictionaries(st.sampled_from(["__metadata__", "a", "b", "", "\0"]), pieces, max_size=3), data_bytes=st.integers(0, 20))
def test_any_json_is_a_header_or_a_format_error(fields, data_bytes):
    try:
        parse(fields, data_bytes)
    except FormatError:
        return


LENGTHS = {
    "an empty file": b"",
    "half a length": b"\x08\0\0",
    "a length behind the end": (100).to_bytes(8, "little") + b"{}",
    "a length of 2^63": (1 << 63).to_bytes(8, "little") + b"{}",
    "a length of 2^64 - 1": b"\xff" * 8 + b"{}",
    "no header": bytes(8),
}


@pytest.mark.parametrize("what", LENGTHS)
def test_a_length_that_cannot_be_is_a_format_error(tmp_path, what):
    path = tmp_path / "f"
    path.write_bytes(LENGTHS[what])
    with opened(path) as (descriptor, status), pytest.raises(FormatError):
        read_header(descriptor, status.st_size, where=path)


def test_a_header_above_the_cap_is_refused_before_it_is_read(tmp_path):
    path = tmp_path / "f"
    length = HEADER_LIMIT_BYTES + 1
    with path.open("wb") as file:
        file.write(length.to_bytes(8, "little"))
        file.truncate(length + 8)
    with opened(path) as (descriptor, status), pytest.raises(FormatError):
        read_header(descriptor, status.st_size, where=path)


def test_a_header_above_the_cap_is_not_built(monkeypatch):
    with pytest.raises(FormatError):
        build_header({}, {"x": "y" * HEADER_LIMIT_BYTES})
    monkeypatch.setattr(container, "TENSOR_LIMIT", 8)
    with pytest.raises(FormatError):
        build_header({str(n): TensorInfo("U8", (0,), 0, 0) for n in range(9)}, {})


def test_an_unknown_dtype_has_no_size():
    with pytest.raises(FormatError):
        size_bytes("F4", (1,))


def test_every_dtype_is_one_that_the_stock_library_knows():
    for dtype in DTYPE_BYTES:
        tensors, data_bytes = lay_out({"a": (dtype, (3,))})
        assert safetensors.deserialize(build_header(tensors, {}) + bytes(data_bytes))[0][1]["dtype"] == dtype


def test_parsing_leaves_the_recursion_limit_alone():
    before = sys.getrecursionlimit()
    with pytest.raises(FormatError):
        parse(MALFORMED["deep nesting"])
    assert sys.getrecursionlimit() == before
