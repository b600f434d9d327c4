"""Small checked JSON files."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachestore.core.errors import FormatError, NewerFormat
from cachestore.files.records import decode_record, encode_record, read_record

HERE = Path("claims/0.json")
texts = st.text(st.characters(exclude_categories=[]), max_size=8)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
bodies = st.dictionaries(texts, values, max_size=4)


def decode(data, version=1):
    return decode_record("thing", version, data, where=HERE)


def test_an_empty_body_comes_back():
    assert decode(encode_record("thing", 1, {})) == {}


@given(body=bodies)
def test_a_body_comes_back(body):
    assert decode(encode_record("thing", 1, body)) == body


@given(body=bodies)
def test_equal_bodies_give_equal_bytes_whatever_their_order(body):
    assert encode_record("thing", 1, dict(reversed(body.items()))) == encode_record("thing", 1, body)


def test_every_flipped_bit_is_detected_or_harmless():
    body = {"caption": "a cat\u2028\U0001f98a", "at": [1, 2.5, None], "é": True}
    data = encode_record("thing", 1, body)
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit >> 3] ^= 1 << (bit & 7)
        try:
            assert decode(flipped) == body
        except FormatError:
            continue


def test_every_cut_is_detected_or_harmless():
    data = encode_record("thing", 1, {"a": 1})
    for size in range(len(data) - 1):
        with pytest.raises(FormatError):
            decode(data[:size])


HOSTILE = {
    "nothing": b"",
    "a number": b"1",
    "null": b"null",
    "a list": b"[]",
    "no body": b'{"checksum":"0","format":"thing/1"}',
    "no checksum": b'{"body":{},"format":"thing/1"}',
    "no format": b'{"body":{},"checksum":"0"}',
    "no version": b'{"body":{},"checksum":"0","format":"thing"}',
    "a version in words": b'{"body":{},"checksum":"0","format":"thing/one"}',
    "a body that is a list": b'{"body":[],"checksum":"0","format":"thing/1"}',
    "NaN": b'{"body":{"a":NaN},"checksum":"0","format":"thing/1"}',
    "a number that is infinite": b'{"body":{"a":1e999},"checksum":"0","format":"thing/1"}',
    "a very long number": b'{"body":{"a":' + b"1" * 5000 + b'},"checksum":"0","format":"thing/1"}',
    "deep nesting": b'{"body":{"a":' + b"[" * 100_000 + b"]" * 100_000 + b'},"checksum":"0","format":"thing/1"}',
    "not UTF-8": b"\xff\xfe\xfd",
    "a format that is null": b'{"body":{},"checksum":"0","format":null}',
    "a checksum that is a list": b'{"body":{},"checksum":[],"format":"thing/1"}',
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_malformed_record_is_a_format_error(what):
    with pytest.raises(FormatError):
        decode(HOSTILE[what])


def test_nesting_at_the_edge_of_what_python_parses_is_a_format_error():
    for depth in range(800, 1100):
        with pytest.raises(FormatError):
            decode(b'{"body":{"a":' + b"[" * depth + b"]" * depth + b'},"checksum":"0","format":"thing/1"}')


@given(data=st.binary() | values.map(lambda value: json.dumps(value).encode("utf-8", "surrogatepass")))
def test_any_bytes_are_a_body_or_a_format_error(data):
    with pytest.raises(FormatError):
        decode(data)


def test_another_kind_is_refused_and_both_are_named():
    with pytest.raises(FormatError):
        decode(encode_record("other", 1, {}))


def test_a_newer_version_is_refused_with_the_way_out():
    with pytest.raises(NewerFormat):
        decode(encode_record("thing", 2, {}))


def test_an_older_version_is_read():
    assert decode(encode_record("thing", 1, {"a": 1}), version=2) == {"a": 1}


def test_a_record_is_read_from_a_file(tmp_path):
    path = tmp_path / "record.json"
    path.write_bytes(encode_record("thing", 1, {"a": 1}))
    assert read_record(path, "thing", 1) == {"a": 1}
