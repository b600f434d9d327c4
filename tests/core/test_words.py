"""How counts and lists read in a message."""

import pytest

from cachestore.core.words import did_you_mean, duration, first_of, human_bytes, listed, misspelt, nearest, noun, plural


def test_of_nothing_nothing_is_named():
    assert first_of([]) == ""


def test_the_first_names_are_listed_and_an_ellipsis_says_that_there_are_more():
    assert first_of(["a", "b", "c"]) == "a, b, c"
    assert first_of(iter("abcd")) == "a, b, c, …"
    assert first_of(range(3), 1) == "0, …"


def test_a_size_is_reported_in_the_largest_unit_that_leaves_a_whole_part():
    assert [human_bytes(size) for size in (0, 1023, 1024, 18.4 * 2**20, 2**50)] == ["0 B", "1023 B", "1.0 KiB", "18.4 MiB", "1024.0 TiB"]


def test_the_nearest_known_word_is_suggested_in_any_case():
    assert did_you_mean("VERFY", ["verify", "repair"]) == "; did you mean 'verify'?"
    assert nearest("trainn", ["train1", "train", "train2", "other"]) == "train"
    assert did_you_mean("x", ["verify"]) == did_you_mean("verify", []) == did_you_mean("", ["verify"]) == ""


def test_a_word_is_found_under_its_other_names_if_it_is_known():
    also = {"kohya": "sd-scripts"}
    assert did_you_mean("Kohya", ["sd-scripts", "musubi"], also) == "; did you mean 'sd-scripts'?"
    assert did_you_mean("kohya", ["musubi"], also) == ""


def test_a_slip_is_letters_in_another_order_or_one_too_many_or_too_few():
    known = ("image", "mask", "crop", "id", "text")
    slips = [misspelt(given, known) for given in ("imgae", "imag", "Maks", "crop_", "textt")]
    assert slips == ["image", "image", "mask", "crop", "text"]
    assert [given for given in ("image", "task", "image_path", "i", "", "test", "texture") if misspelt(given, known)] == []


def test_a_count_stands_with_the_form_of_its_noun():
    assert [plural(number, "entry") for number in (0, 1, 2)] == ["0 entries", "1 entry", "2 entries"]
    assert [plural(number, "caption is", "captions are") for number in (1, 2)] == ["1 caption is", "2 captions are"]
    assert (plural(1003, "segment", form=","), noun(1, "day"), noun(2, "day")) == ("1,003 segments", "day", "days")


def test_names_are_listed_as_in_a_sentence():
    assert [listed("abc"[:count]) for count in range(4)] == ["", "a", "a and b", "a, b and c"]
    assert listed(["x", 2], "or") == "x or 2"


@pytest.mark.parametrize(("seconds", "words"), [(0, "0:00"), (5.9, "0:05"), (754, "12:34"), (3723, "1:02:03")])
def test_a_duration_is_written_as_clocks_do(seconds, words):
    assert duration(seconds) == words
