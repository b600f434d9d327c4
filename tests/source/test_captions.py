"""Captions beside pictures, and the lines of files."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachestore.core.errors import BadInput
from cachestore.source.captions import lines_of
from cachestore.source.folders import list_source
from tests.source.sources import captions, folder, listed

LINES = " first \n\n second\r\nthird\n"


@pytest.mark.parametrize(
    ("lines", "expected"), [("whole", ("first \n\n second\r\nthird",)), ("each", ("first", "second", "third")), ("first", ("first",))]
)
def test_a_caption_file_is_read_as_asked(tmp_path, lines, expected):
    folder(tmp_path, {"a.png": "", "a.txt": LINES})
    assert captions(listed(tmp_path, caption_lines=lines)) == {"a.png": expected}


def test_a_caption_of_several_lines_is_reported_only_where_it_is_taken_whole(tmp_path):
    folder(tmp_path, {"a.png": "", "a.txt": LINES, "b.png": "", "b.txt": "one line\n"})
    [remark] = listed(tmp_path).remarks
    assert remark.startswith("1 caption has several lines (a.png)")
    assert listed(tmp_path, caption_lines="each").remarks == ()


@pytest.mark.parametrize("lines", ["whole", "each", "first"])
@pytest.mark.parametrize("content", ["", " \n\t\n", "\ufeff"], ids=["empty", "blank", "mark"])
def test_an_empty_caption_file_is_the_empty_caption_and_not_a_missing_one(tmp_path, lines, content):
    folder(tmp_path, {"a.png": "", "a.txt": content})
    listing = listed(tmp_path, caption_lines=lines, caption="given")
    assert captions(listing) == {"a.png": ("",)}
    assert listing.remarks == ()


def test_a_missing_caption_is_the_empty_one_and_is_reported(tmp_path):
    folder(tmp_path, {f"{n}.png": "" for n in range(5)})
    listing = listed(tmp_path)
    assert set(captions(listing).values()) == {("",)}
    assert listing.remarks == ("5 samples have no caption (0.png, 1.png, 2.png, …): they get the empty one; --caption TEXT sets another",)


def test_a_missing_caption_may_be_given(tmp_path):
    folder(tmp_path, {"a.png": "", "b.png": "", "b.txt": "its own"})
    listing = listed(tmp_path, caption="given")
    assert captions(listing) == {"a.png": ("given",), "b.png": ("its own",)}
    assert listing.remarks == ()


def test_a_caption_file_that_is_not_utf_8_is_refused_by_name(tmp_path):
    folder(tmp_path, {"a.png": "", "a.txt": b"caf\xe9"})
    with pytest.raises(BadInput, match=r"a\.txt is not UTF-8 \(byte 3\)"):
        listed(tmp_path)


def test_a_byte_order_mark_is_no_part_of_a_caption(tmp_path):
    folder(tmp_path, {"a.png": "", "a.txt": b"\xef\xbb\xbfa caption"})
    assert captions(listed(tmp_path)) == {"a.png": ("a caption",)}


def test_other_separators_than_line_ends_are_part_of_a_caption(tmp_path):
    """Word processors leave U+2028 behind; it ends no line of a file."""
    folder(tmp_path, {"a.png": "", "a.txt": "one\u2028still one\x85and\x0con"})
    assert captions(listed(tmp_path, caption_lines="each")) == {"a.png": ("one\u2028still one\x85and\x0con",)}


def test_a_line_that_is_not_utf_8_is_named_by_its_byte(tmp_path):
    (tmp_path / "p.txt").write_bytes(b"\xef\xbb\xbfa\nb\xff\nc")
    listing = listed(tmp_path / "p.txt")
    assert [sample.captions for sample in listing.samples] == [("a",), ("c",)]
    assert listing.refused == {f"{tmp_path}/p.txt, line 2": "it is not UTF-8 (byte 6 of the file): save it as UTF-8"}


@given(st.lists(st.sampled_from(["a", "\r", "\n", "\r\n", "\u2028", " "]), max_size=8).map("".join))
def test_lines_are_split_as_those_of_a_text_file(tmp_path_factory, text):
    path = tmp_path_factory.getbasetemp() / "lines.txt"
    path.write_bytes(text.encode())
    expected = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    found = [line for _number, line in lines_of(path)]
    assert [line for line in found if line] == [line for line in expected if line]
    assert [number for number, _line in lines_of(path)] == list(range(1, len(found) + 1))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no fifos here")
def test_a_fifo_in_the_place_of_captions_is_refused_and_not_waited_for(tmp_path):
    (tmp_path / "a.png").write_bytes(b"a")
    os.mkfifo(tmp_path / "a.txt")
    with pytest.raises(BadInput, match=r"a\.txt cannot be read"):
        list_source(tmp_path)
