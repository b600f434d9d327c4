"""How counts and lists read in a message."""

from cachestore.core.words import first_of, human_bytes


def test_of_nothing_nothing_is_named():
    assert first_of([]) == ""


def test_the_first_names_are_listed_and_an_ellipsis_says_that_there_are_more():
    assert first_of(["a", "b", "c"]) == "a, b, c"
    assert first_of(iter("abcd")) == "a, b, c, …"
    assert first_of(range(3), 1) == "0, …"


def test_a_size_is_reported_in_the_largest_unit_that_leaves_a_whole_part():
    assert [human_bytes(size) for size in (0, 1023, 1024, 18.4 * 2**20, 2**50)] == ["0 B", "1023 B", "1.0 KiB", "18.4 MiB", "1024.0 TiB"]
