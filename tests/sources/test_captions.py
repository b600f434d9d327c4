"""Captions beside pictures, and the lines of files."""

import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachestore.core.errors import BadInput
from cachestore.sources.captions import lines_of, side_car
from cachestore.sources.folders import list_source
from cachestore.sources.reading import ListingOptions
from cachestore.sources.remarks import Remarks
from tests.sources.sources import captions, folder, listed

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
    assert listing.remarks == ("5 samples have no caption (0.png, 1.png, 2.png, …): they get the empty one; caption=TEXT sets another",)


def test_a_missing_caption_may_be_given(tmp_path):
    folder(tmp_path, {"a.png": "", "b.png": "", "b.txt": "its own"})
    listing = listed(tmp_path, caption="given")
    assert captions(listing) == {"a.png": ("given",), "b.png": ("its own",)}
    assert listing.remarks == ()


def test_a_caption_file_that_is_not_utf_8_is_refused_by_name(tmp_path):
    folder(tmp_path, {"a.png": "", "a.txt": b"caf\xe9"})
    with pytest.raises(BadInput):
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
    with pytest.raises(BadInput):
        list_source(tmp_path)


# What fails alone


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("a cat".encode("utf-16"), "UTF-16"),
        ("a cat".encode("utf-16-be"), "NUL"),
        ("a cat".encode("utf-16-le"), "NUL"),
        ("a cat".encode("utf-32"), "UTF-16 or UTF-32"),
        ("a cat".encode("utf-32-be"), "NUL"),
        ("кот и пёс".encode("cp1251"), "not UTF-8"),
        ("猫".encode("utf-16-le"), "UTF-8"),
        (b"nul \0", "NUL"),
        (b"x" * 10_000_000, "10,000,000 characters"),
        (b"x" * (17 << 20), "cannot be read"),
    ],
    ids=range(10),
)
@pytest.mark.parametrize("lines", ["whole", "each", "first"])
def test_a_caption_file_that_cannot_be_used_fails_alone_and_its_encoding_is_not_guessed(tmp_path, content, says, lines):
    folder(tmp_path, {"a.png": "", "a.txt": content, "b.png": "", "b.txt": "a dog"})
    listing = listed(tmp_path, caption_lines=lines)
    if content == "猫".encode("utf-16-le"):  # two bytes that are UTF-8 too, as those of many short texts: nobody can tell
        assert listing.refused == {} or says in listing.refused["a.png"]
        return
    assert captions(listing) == {"b.png": ("a dog",)}
    assert list(listing.refused) == ["a.png"]
    assert says in listing.refused["a.png"]
    assert "a.txt" in listing.refused["a.png"]


@pytest.mark.parametrize("to", ["nowhere", "a.txt"])
def test_a_caption_file_that_is_a_broken_link_fails_alone_and_says_so(tmp_path, to):
    folder(tmp_path, {"a.png": "", "b.png": "", "b.txt": "a dog"})
    (tmp_path / "a.txt").symlink_to(to)
    listing = listed(tmp_path)
    assert captions(listing) == {"b.png": ("a dog",)}
    assert "leads nowhere" in listing.refused["a.png"]


def test_prompts_that_cannot_be_encoded_fail_alone(tmp_path):
    (tmp_path / "p.txt").write_bytes(b"a cat\nnul \0\n" + b"x" * 200_000 + b"\ncaf\xe9\na dog\n")
    listing = listed(tmp_path / "p.txt")
    assert [sample.captions for sample in listing.samples] == [("a cat",), ("a dog",)]
    assert [place.rpartition(", ")[2] for place in listing.refused] == ["line 2", "line 3", "line 4"]


def test_a_caption_for_those_without_one_must_be_one_too():
    with pytest.raises(BadInput):
        ListingOptions(caption="a\0b")


# JSON beside a picture, and several files


def beside(tmp_path, files, **options):
    """The captions of a.png by its candidates in order, and what is said."""
    folder(tmp_path, files)
    seen = Remarks()
    return side_car([tmp_path / name for name in files], ListingOptions(**options), "a.png", seen), seen


@pytest.mark.parametrize(
    ("content", "options", "expected"),
    [
        ({"caption": "a cat", "text": "other"}, {}, ("a cat",)),
        ({"text": "a cat"}, {}, ("a cat",)),
        ({"prompt": " a cat\n"}, {}, ("a cat",)),
        ({"caption": ["a cat", "a tabby"]}, {}, ("a cat", "a tabby")),
        ({"caption": None, "text": "a cat"}, {}, ("a cat",)),
        ({"prompt": {"3": {"class_type": "KSampler"}}, "text": "a cat"}, {}, ("a cat",)),
        ({"description": "a cat", "caption": "other"}, {"caption_column": "description"}, ("a cat",)),
        ({"caption": "a cat\na dog"}, {"caption_lines": "each"}, ("a cat", "a dog")),
    ],
)
def test_a_json_beside_a_picture_has_its_captions_in_a_known_field(tmp_path, content, options, expected):
    assert beside(tmp_path, {"a.JSON": json.dumps(content)}, **options)[0] == expected


def test_who_names_a_field_of_the_json_gets_it_although_there_is_a_text(tmp_path):
    folder(tmp_path, {"a.png": "", "a.txt": "short", "a.json": '{"long": "a long one"}', "b.png": "", "b.txt": "alone"})
    assert captions(listed(tmp_path)) == {"a.png": ("short",), "b.png": ("alone",)}
    assert captions(listed(tmp_path, caption_column="long")) == {"a.png": ("a long one",), "b.png": ("alone",)}


@pytest.mark.parametrize("content", [{"title": "a cat", "tags": []}, [], 7, {"caption": 7}, {"caption": []}])
def test_a_json_without_such_a_field_is_no_caption_and_is_named(tmp_path, content):
    found, seen = beside(tmp_path, {"a.json": json.dumps(content), "a.caption": "a dog"})
    assert found == ("a dog",)
    [named] = seen.fieldless
    assert "a.json" in named
    assert "title" in named or "title" not in str(content)


@pytest.mark.parametrize("content", ["{", "[" * 200_000, '{"caption": "half \\ud83d"}', '{"caption": "\\u0000"}', '{"caption": NaN}'])
def test_a_json_beside_a_picture_that_cannot_be_used_makes_its_sample_fail(tmp_path, content):
    with pytest.raises(BadInput):
        beside(tmp_path, {"a.json": content})


def test_of_two_files_that_differ_the_first_is_taken_and_both_are_named(tmp_path):
    found, seen = beside(tmp_path, {"a.txt": "a cat", "a.json": json.dumps({"caption": "a dog"})})
    assert (found, seen.differing) == (("a cat",), ["a.png: a.txt is taken, not a.json"])
    assert beside(tmp_path, {"a.txt": "a cat\n", "a.json": json.dumps({"caption": " a cat"})})[1].differing == []
    assert beside(tmp_path, {"a.txt": "a cat", "a.json": "{"})[1].differing == []


def test_only_the_first_few_hundred_samples_are_compared_and_that_is_said(tmp_path):
    folder(tmp_path, {"a.txt": "a cat", "a.caption": "a dog"})
    seen = Remarks()
    for number in range(400):
        side_car([tmp_path / "a.txt", tmp_path / "a.caption"], ListingOptions(), f"{number}.png", seen)
    [words] = seen.in_words()
    assert words.startswith("300 samples have captions in two places that differ")
    assert "only the first 300" in words
