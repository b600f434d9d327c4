"""Tables: columns with a checksum each, in one safetensors file."""

import contextlib
import json
import os
from itertools import pairwise

import pytest
import safetensors
from hypothesis import given
from hypothesis import strategies as st

from cachestore.core.errors import FormatError, NewerFormat
from cachestore.files.checksum import digest_of
from cachestore.files.container import TensorInfo, build_header
from cachestore.files.table import (
    Texts,
    digest_column,
    encode_table,
    number_column,
    offsets_of,
    open_table,
    read_header,
    read_table,
    string_columns,
    take,
)
from tests.leaks import held

texts = st.text(st.characters(exclude_categories=[]), max_size=6)
numbers = st.integers(-(2**63), 2**63 - 1)


def write(path, columns, header=None, *, kind="thing", version=1):
    path.write_bytes(b"".join(encode_table(kind, version, header or {}, columns)))
    return path


def small(path):
    columns = {
        **string_columns("words", ["a", "", "ä\udcff"]),
        "numbers": number_column([1, -2, 3]),
        "keys": digest_column([b"abcd"] * 3, width=4),
    }
    return write(path, columns, {"name": "x"})


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("table") / "f"


def test_a_table_without_columns_comes_back_and_a_column_that_is_not_there_is_empty(path):
    table = read_table(write(path, {}), "thing", 1)
    assert (table.header, dict(table.columns)) == ({}, {})
    assert list(table.numbers("n")) == []
    assert list(table.strings("s")) == []
    assert list(table.digests("d", 3)) == []


def test_columns_without_rows_come_back(path):
    columns = {**string_columns("s", []), "n": number_column([]), "d": digest_column([], width=16)}
    table = read_table(write(path, columns), "thing", 1)
    assert (list(table.numbers("n")), list(table.strings("s")), list(table.digests("d", 3))) == ([], [], [])


@given(
    words=st.lists(texts, max_size=5), values=st.lists(numbers, max_size=5), rows=st.lists(st.binary(min_size=3, max_size=3), max_size=5)
)
def test_a_table_comes_back(path, words, values, rows):
    columns = {**string_columns("s", words), "n": number_column(values), "d": digest_column(rows, width=3)}
    table = read_table(write(path, columns, {"words": words}), "thing", 1)
    assert table.header == {"words": words}
    assert list(table.strings("s")) == words
    assert list(table.numbers("n")) == values
    assert list(table.digests("d", 3)) == rows


@given(lengths=st.lists(st.integers(0, 5)))
def test_offsets_say_where_each_list_starts_and_the_last_one_ends(lengths):
    offsets = list(offsets_of(lengths))
    assert [end - start for start, end in pairwise(offsets)] == lengths
    assert offsets[0] == 0


def test_a_matrix_of_numbers_comes_flat(path):
    table = read_table(write(path, {"n": number_column([1, 2, 3, 4], width=2)}), "thing", 1)
    assert list(table.numbers("n")) == [1, 2, 3, 4]


def test_columns_are_sequences_with_ends_and_slices(path):
    table = read_table(small(path), "thing", 1)
    words, keys = table.strings("words"), table.digests("keys", 4)
    assert (words[-1], words[:2], len(words)) == ("ä\udcff", ["a", ""], 3)
    assert (keys[-1], keys[1:], len(keys)) == (b"abcd", [b"abcd"] * 2, 3)
    for column in (words, keys):
        with pytest.raises(IndexError):
            column[3]


def test_equal_tables_have_equal_bytes_and_digests(path):
    first = read_table(small(path), "thing", 1).digest
    raw = path.read_bytes()
    assert read_table(small(path), "thing", 1).digest == first
    assert path.read_bytes() == raw


def test_another_header_has_another_digest(path):
    columns = {"n": number_column([1])}
    assert read_table(write(path, columns, {"a": 1}), "thing", 1).digest != read_table(write(path, columns, {"a": 2}), "thing", 1).digest


def test_equal_bytes_of_another_shape_have_another_digest(path):
    flat = read_table(write(path, {"n": number_column([1, 2])}), "thing", 1).digest
    assert read_table(write(path, {"n": number_column([1, 2], width=2)}), "thing", 1).digest != flat


def test_the_stock_library_opens_a_table(path):
    write(path, {"n": number_column([1, 2]), "d": digest_column([b"abc"], width=3)}, {"é": 1})
    with safetensors.safe_open(path, "np") as file:
        assert file.get_tensor("n").tolist() == [1, 2]
        assert file.get_tensor("d").tolist() == [list(b"abc")]
        assert json.loads(file.metadata()["header"]) == {"é": 1}


def seen(path):
    table = read_table(path, "thing", 1)
    return table.header, list(table.strings("words")), list(table.numbers("numbers")), list(table.digests("keys", 4))


def test_every_flipped_bit_is_detected_or_harmless(path):
    raw = small(path).read_bytes()
    expected = seen(path)
    with path.open("r+b", buffering=0) as file:
        for index, byte in enumerate(raw):
            for bit in range(8):
                os.pwrite(file.fileno(), bytes([byte ^ 1 << bit]), index)
                with contextlib.suppress(FormatError):
                    assert seen(path) == expected
            os.pwrite(file.fileno(), bytes([byte]), index)


def test_every_cut_is_detected(path):
    for size in reversed(range(small(path).stat().st_size)):
        os.truncate(path, size)
        with pytest.raises(FormatError):
            read_table(path, "thing", 1)


def test_another_kind_is_refused_and_both_are_named(path):
    with pytest.raises(FormatError):
        read_table(write(path, {}, kind="other"), "thing", 1)


def test_a_newer_version_is_refused_with_the_way_out(path):
    with pytest.raises(NewerFormat):
        read_table(write(path, {}, version=2), "thing", 1)


def test_an_older_version_is_read(path):
    assert read_table(write(path, {}, {"a": 1}), "thing", 2).header == {"a": 1}


def forged(**metadata):
    """A file without columns whose metadata was made by somebody who knows the checksums."""
    texts = {"format": "thing/1", "header": "{}", "checksums": "{}"} | metadata
    texts.setdefault("digest", digest_of([b"\0".join(texts[name].encode() for name in ("header", "checksums", "format"))]))
    return build_header({}, texts)


FORGED = {
    "an empty file": b"",
    "zeros": bytes(100),
    "no metadata": build_header({}, {}),
    "another container": build_header({"a": TensorInfo("U8", (0,), 0, 0)}, {"format": "pt"}),
    "no version": forged(format="thing"),
    "a version that is no number": forged(format="thing/²"),
    "a header that is not JSON": forged(header="{"),
    "a deep header": forged(header="[" * 100_000),
    "deep checksums": forged(checksums="[" * 100_000),
    "checksums that are not JSON": forged(checksums=""),
    "checksums of other columns": forged(checksums='{"a":["U8",[0],"0"]}'),
    "another digest": forged(digest="0" * 32),
}


def test_the_file_that_the_forged_ones_vary_is_good(path):
    path.write_bytes(forged())
    assert read_table(path, "thing", 1).header == {}


@pytest.mark.parametrize("what", FORGED)
def test_a_forged_table_is_a_format_error(path, what):
    path.write_bytes(FORGED[what])
    with pytest.raises(FormatError):
        read_table(path, "thing", 1)


# The header alone


def test_a_header_is_read_without_its_columns(path):
    write(path, {"numbers": number_column(range(100))}, {"a": 1})
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    assert read_header(path, "thing", 1) == {"a": 1}
    with pytest.raises(FormatError):
        read_table(path, "thing", 1)


def test_a_damaged_header_is_a_format_error(path):
    write(path, {}, {"a": 1})
    raw = path.read_bytes()
    path.write_bytes(raw.replace(b'{\\"a\\":1}', b'{\\"a\\":2}'))
    assert path.read_bytes() != raw
    with pytest.raises(FormatError):
        read_header(path, "thing", 1)


def test_a_header_of_a_newer_version_or_another_kind_is_refused(path):
    write(path, {}, version=2)
    for kind, version in (("thing", 1), ("another", 2)):
        with pytest.raises(FormatError):
            read_header(path, kind, version)


@pytest.mark.parametrize("what", sorted(set(FORGED) - {"checksums of other columns"}))
def test_the_header_of_a_forged_table_is_a_format_error(path, what):
    path.write_bytes(FORGED[what])
    with pytest.raises(FormatError):
        read_header(path, "thing", 1)


@given(raw=st.binary(max_size=200))
def test_any_bytes_are_a_table_or_a_format_error(path, raw):
    path.write_bytes(raw)
    with pytest.raises(FormatError):
        read_table(path, "thing", 1)


@given(
    words=st.lists(texts, max_size=5), values=st.lists(numbers, max_size=5), rows=st.lists(st.binary(min_size=3, max_size=3), max_size=5)
)
def test_columns_go_to_disk_again_as_they_were_read(tmp_path_factory, words, values, rows):
    path = tmp_path_factory.getbasetemp() / "again"
    write(path, {**string_columns("s", words), "n": number_column(values), "d": digest_column(rows, width=3)})
    before = path.read_bytes()
    for io in ("pread", "mmap"):
        table = read_table(path, "thing", 1, io=io)
        same = {**string_columns("s", table.strings("s")), "n": number_column(table.numbers("n"))}
        chunks = encode_table("thing", 1, {}, {**same, "d": digest_column(table.digests("d", 3), width=3)})
        if rows:
            assert b"".join(chunks) == before


@given(st.lists(texts, max_size=5))
def test_texts_that_are_gathered_are_the_columns_of_the_same_list(words):
    gathered = Texts()
    for word in words:
        gathered.append(word)
    assert len(gathered) == len(words)
    assert list(gathered.strings()) == words
    as_bytes = {name: (dtype, shape, bytes(raw)) for name, (dtype, shape, raw) in string_columns("s", gathered.strings()).items()}
    assert as_bytes == {name: (dtype, shape, bytes(raw)) for name, (dtype, shape, raw) in string_columns("s", words).items()}


def test_equal_columns_have_equal_checksums_whatever_else_is_in_their_tables(path):
    one = read_table(write(path, {**string_columns("s", ["a"]), "n": number_column([1])}), "thing", 1).checksums
    two = read_table(write(path, {**string_columns("s", ["a"]), "n": number_column([2])}), "thing", 1).checksums
    assert one["s.text"] == two["s.text"]
    assert one["n"] != two["n"]


def test_a_mapped_table_that_is_damaged_is_refused(path):
    raw = bytearray(small(path).read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    with pytest.raises(FormatError):
        read_table(path, "thing", 1, io="mmap")


# A table that is read where it is looked at


def test_a_table_without_columns_can_be_looked_at(path):
    table = open_table(write(path, {}), "thing", 1)
    assert (table.header, dict(table.columns)) == ({}, {})
    assert list(table.strings("s")) == list(table.numbers("n")) == list(table.digests("d", 3)) == []


@given(
    words=st.lists(texts, max_size=5), values=st.lists(numbers, max_size=5), rows=st.lists(st.binary(min_size=3, max_size=3), max_size=5)
)
def test_what_is_looked_at_is_what_reading_the_whole_table_gives(path, words, values, rows):
    columns = {**string_columns("s", words), "n": number_column(values), "d": digest_column(rows, width=3)}
    whole, table = (function(write(path, columns, {"words": words}), "thing", 1) for function in (read_table, open_table))
    assert (table.header, table.digest) == (whole.header, whole.digest)
    for one, other in zip(columns_of(table), columns_of(whole), strict=True):
        assert list(one) == list(other)
        assert list(one[1:]) == list(other[1:])
        assert list(one[::-1]) == list(other[::-1])
        assert [one[index] for index in range(-len(one), len(one))] == [other[index] for index in range(-len(other), len(other))]
        assert take(one, range(len(one))) == take(other, range(len(other)))


def columns_of(table):
    return table.strings("s"), table.numbers("n"), table.digests("d", 3)


def test_what_was_looked_at_goes_to_disk_again_as_it_is(tmp_path):
    table = open_table(small(tmp_path / "f"), "thing", 1)
    again = {
        **string_columns("words", table.strings("words")),
        "numbers": number_column(table.numbers("numbers")),
        "keys": digest_column(table.digests("keys", 4), width=4),
    }
    assert write(tmp_path / "g", again, {"name": "x"}).read_bytes() == (tmp_path / "f").read_bytes()


def test_no_more_is_read_than_is_looked_at(tmp_path, monkeypatch):
    import cachestore.files.table

    table, sizes = open_table(small(tmp_path / "f"), "thing", 1), []
    read_at = cachestore.files.table.read_at
    monkeypatch.setattr(cachestore.files.table, "read_at", lambda fd, size, start: sizes.append(size) or read_at(fd, size, start))
    assert table.digests("keys", 4)[1] == b"abcd"
    assert table.strings("words")[0] == "a"
    assert sizes == [4, 8, 8, 1]


def test_a_file_that_was_cut_short_meanwhile_is_a_format_error(tmp_path):
    path = small(tmp_path / "f")
    table = open_table(path, "thing", 1)
    os.truncate(path, path.stat().st_size - 12)
    with pytest.raises(FormatError):
        list(table.digests("keys", 4))


def test_its_file_is_closed_when_nobody_looks_at_it_any_more(tmp_path):
    before = held()
    table = open_table(small(tmp_path / "f"), "thing", 1)
    words = table.strings("words")
    del table
    assert words[0] == "a"
    del words
    assert not held() - before


def test_an_open_table_is_closed_although_its_module_is_empty_as_at_the_end_of_the_interpreter(tmp_path, monkeypatch):
    before = held()
    table = open_table(small(tmp_path / "f"), "thing", 1)
    monkeypatch.setattr("cachestore.files.table.os", None)
    del table
    assert not held() - before
