"""What is said of a source as a whole."""

import pytest

from cachestore.core.errors import BadInput
from cachestore.sources.remarks import Problems, Refusals, RefusedItem, Remarks, taken
from cachestore.sources.unused import BROKEN_LINK, Unused
from tests.sources.sources import listed, manifest


def test_malformed_rows_are_named_all_at_once_the_first_twenty_and_a_count(tmp_path):
    manifest(tmp_path / "m.jsonl", *[{"image": 7}] * 25)
    with pytest.raises(BadInput) as refused:
        listed(tmp_path / "m.jsonl")
    assert str(refused.value).count("line ") == 20


def test_malformed_rows_fail_alone_where_others_can_be_used(tmp_path):
    rows = [row for n in range(25) for row in ({"image": 7}, {"image": f"{n}.png", "caption": "a"})]
    listing = listed(manifest(tmp_path / "m.jsonl", *rows))
    assert [sample.id for sample in listing.samples] == [f"{n}.png" for n in range(25)]
    assert list(listing.refused) == [f"{tmp_path}/m.jsonl, line {n}" for n in range(1, 50, 2)]


def test_of_very_many_that_fail_alone_the_first_are_kept_by_name_and_all_are_counted():
    refused = Refusals()
    for n in range(10_050):
        refused.append(RefusedItem(str(n), "x" * 1000))
    together = Refusals()
    together.add(refused, "faces/")
    assert (len(together), len(list(together)), next(iter(together)).sample) == (10_050, 10_000, "faces/0")
    assert len(next(iter(together)).reason) <= 501


def test_one_problem_is_its_own_sentence_and_none_is_no_error():
    problems = Problems()
    problems.refuse("here")
    problems.add("x.png is no picture")
    with pytest.raises(BadInput):
        problems.refuse("here")


def test_items_that_cannot_be_parsed_fail_alone_under_their_ids_else_at_their_place():
    def parse(number):
        if number % 2:
            raise BadInput(f"place {number}: it is odd")
        return [number]

    seen = Remarks()
    places = ((f"place {number}", number) for number in range(5))
    assert list(taken(places, parse, lambda number: ["three"] if number == 3 else [], seen)) == [0, 2, 4]
    assert [(one.sample, one.reason, one.has_id) for one in seen.refused] == [
        ("place 1", "it is odd", False),
        ("three", "place 3: it is odd", True),
    ]


def test_remarks_of_several_sources_name_samples_after_their_source():
    together = Remarks()
    for label in "ab":
        unused = Unused()
        unused.add(BROKEN_LINK, "gone")
        together.add(Remarks(missing=["x.png"], unused=unused, wordless=["here"], collapsed=2), f"{label}/")
    assert (together.missing, together.wordless, together.collapsed) == (["a/x.png", "b/x.png"], ["here", "here"], 4)
    assert together.unused.as_json() == [{"reason": BROKEN_LINK, "count": 2, "examples": ["a/gone", "b/gone"]}]
