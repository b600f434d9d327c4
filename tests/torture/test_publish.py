"""The models of the campaigns `publish` and `files`: what they take for right, and what they must notice."""

import json

import pytest

from tests.torture import files, publish
from tests.torture.files import Call, Look
from tests.torture.publish import Operation, wrong_order, wrong_states


def flush(*changes, number=0, links=(), what="flush", began=0, ended=0):
    return Operation(what, [(sample, parts, 0) for sample, parts in changes], began, False, list(links) or [number], number, ended)


A = ("a", {"x": ["1"]})
B = ("b", {"x": ["2"]})
ROW_A, ROW_B = ["a", {"x": ["1"]}, 0], ["b", {"x": ["2"]}, 0]


def test_states_of_flushes_in_their_order_are_right():
    operations = [flush(A, number=2), flush(B, number=3), flush(("a", None), number=5), flush(B, number=7, what="table")]
    states = [(1, []), (2, [ROW_A]), (3, [ROW_A, ROW_B]), (4, [ROW_A, ROW_B]), (6, [ROW_B]), (8, [ROW_B])]
    assert wrong_states(operations, states) == []
    assert wrong_states([], []) == []


@pytest.mark.parametrize(
    "state",
    [(3, [ROW_A]), (3, [ROW_B, ROW_A]), (2, [ROW_A, ROW_B]), (3, [ROW_A, ["b", {"x": ["1"]}, 0]])],
    ids=["a row is lost", "another order", "too early", "another key"],
)
def test_another_state_is_noticed(state):
    assert wrong_states([flush(A, number=2), flush(B, number=3)], [state])


def test_a_flush_that_was_killed_may_count_or_not_but_the_same_in_all_reads():
    operations = [flush(A, number=2), flush(B, links=[3])]
    assert wrong_states(operations, [(3, [ROW_A])]) == []
    assert wrong_states(operations, [(3, [ROW_A, ROW_B]), (4, [ROW_A, ROW_B])]) == []
    assert wrong_states(operations, [(3, [ROW_A, ROW_B]), (4, [ROW_A])])


def test_a_number_that_is_returned_twice_or_out_of_order_is_noticed():
    assert wrong_states([flush(A, number=2), flush(B, number=2)], [])
    first, second = flush(A, number=3, began=0, ended=1), flush(B, number=2, began=2, ended=3)
    assert wrong_order([first, second], [])
    assert wrong_order([flush(A, number=2, began=0, ended=1), flush(B, number=3, began=2, ended=3)], []) == []
    assert wrong_order([flush(A, number=2, links=[1], ended=1)], [])


def test_a_read_that_misses_what_was_acknowledged_before_it_is_noticed():
    reads = [{"e": "reads", "earlier": None}, {"e": "read", "n": 1}]
    assert wrong_order([flush(A, number=2, began=-2, ended=-1)], reads)
    assert wrong_order([flush(A, number=2, began=-2, ended=-1)], [reads[0], {"e": "read", "n": 2}]) == []
    assert wrong_order([flush(A, number=2, began=-2, ended=-1)], [reads[0], {"e": "unread", "is_absent": True}])


def test_links_into_other_folders_are_not_counted():
    notes = [{"e": "begin", "p": 0, "what": "flush", "changes": []}]
    notes += [{"e": "link", "p": 0, "path": path} for path in ("catalogs/own/2.changes", "catalogs/own/1-4.changes", "tmp/3.changes")]
    assert [each.links for each in publish.operations_of(json.loads(json.dumps(notes)))] == [[2]]


SAVED = [Call("a", 1, 0, [(2, 1)], 2), Call("a", 2, 10, [(3, 12)], 14)]


def look(what, began, ended, **seen):
    return Look({"what": what, "path": "a"}, seen, began, ended)


def test_a_look_sees_what_was_there_at_some_moment_of_it():
    looks = [
        look("load", 3, 5, value=1),
        look("load", 11, 13, value=2),
        look("exists", 20, 21, exists=True),
        look("glob", 20, 21, paths=["a"]),
    ]
    assert files.wrong_looks(SAVED, looks, {"a": 2}) == []
    assert files.wrong_looks([], [look("load", 0, 1, value=None)], {}) == []


@pytest.mark.parametrize(
    "seen",
    [look("load", 15, 16, value=1), look("load", 3, 5, value=2), look("metadata", 3, 5, value=None), look("exists", 3, 5, exists=False)],
)
def test_a_look_at_what_is_past_or_yet_to_come_is_noticed(seen):
    assert files.wrong_looks(SAVED, [seen], {"a": 2})


def test_files_that_are_not_as_they_were_left_are_noticed():
    assert files.wrong_looks(SAVED, [], {"a": 1})
    assert files.wrong_looks([*SAVED, Call("b", 1, 20, [], 21)], [], {"a": 2})
