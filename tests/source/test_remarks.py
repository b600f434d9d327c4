"""What is said of a source as a whole."""

import pytest

from cachestore.core.errors import BadInput
from cachestore.source.remarks import Problems, Remarks, taken
from cachestore.source.unused import BROKEN_LINK, Unused
from tests.source.sources import listed, manifest


def test_malformed_rows_are_named_all_at_once_the_first_twenty_and_a_count(tmp_path):
    rows = [row for n in range(25) for row in ({"image": 7}, {"image": f"{n}.png", "caption": "a"})]
    manifest(tmp_path / "m.jsonl", *rows)
    with pytest.raises(BadInput, match=r"25 problems in .*m\.jsonl: line 1: image must be .*; line 39: .*; and 5 more$") as refused:
        listed(tmp_path / "m.jsonl")
    assert str(refused.value).count("line ") == 20


def test_one_problem_is_its_own_sentence_and_none_is_no_error():
    problems = Problems()
    problems.refuse("here")
    problems.add("x.png is no picture")
    with pytest.raises(BadInput, match=r"^x\.png is no picture$"):
        problems.refuse("here")


def test_items_that_can_be_parsed_come_before_the_error_that_names_the_others():
    def parse(number):
        if number % 2:
            raise BadInput(f"{number} is odd")
        return [number]

    found = taken(range(4), parse, "these")
    assert [next(found), next(found)] == [0, 2]
    with pytest.raises(BadInput, match="2 problems in these: 1 is odd; 3 is odd"):
        next(found)


def test_remarks_of_several_sources_name_samples_after_their_source():
    together = Remarks()
    for label in "ab":
        unused = Unused()
        unused.add(BROKEN_LINK, "gone")
        together.add(Remarks(missing=["x.png"], unused=unused, wordless=["here"], collapsed=2), f"{label}/")
    assert (together.missing, together.wordless, together.collapsed) == (["a/x.png", "b/x.png"], ["here", "here"], 4)
    assert together.unused.as_json() == [{"reason": BROKEN_LINK, "count": 2, "examples": ["a/gone", "b/gone"]}]
