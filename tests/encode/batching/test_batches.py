"""Which units go into one batch."""

from hypothesis import given
from hypothesis import strategies as st

from cachestore.encode.batching.batches import Batches
from cachestore.encode.batching.unit import Prepared


def gather(units, limit=4):
    """The batches that come of (group, cost) pairs, those that filled up and those that were left."""
    batches = Batches(lambda group: limit)
    full = [batch for index, (group, cost) in enumerate(units) if (batch := batches.add(Prepared(None, group, cost=cost), index))]
    return full, list(batches.rest())


def test_of_nothing_there_is_no_batch():
    assert gather([]) == ([], [])


def test_a_batch_is_full_at_the_limit_and_is_of_one_group():
    assert gather([("a", 1), ("b", 1), ("a", 1), ("b", 1), ("b", 1)], limit=2) == ([[0, 2], [1, 3]], [[4]])


def test_what_is_left_comes_costliest_first():
    assert gather([("short", 16), ("long", 512), ("middle", 64)])[1] == [[1], [2], [0]]


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9))), st.integers(1, 5))
def test_every_unit_is_in_one_batch_of_its_group(units, limit):
    full, rest = gather(units, limit)
    assert sorted(index for batch in full + rest for index in batch) == list(range(len(units)))
    assert all(len({units[index][0] for index in batch}) == 1 for batch in full + rest)
    assert all(len(batch) == limit for batch in full)
    assert all(len(batch) < limit for batch in rest)


def test_the_rest_is_given_once():
    batches = Batches(lambda group: 8)
    batches.add(Prepared(None, "a"), 1)
    assert list(batches.rest()) == [[1]]
    assert list(batches.rest()) == []


def test_after_a_batch_did_not_fit_half_of_it_is_the_most_for_its_group_alone():
    batches = Batches(lambda group: 8)
    assert batches.did_not_fit("a", 8) == 4
    assert (batches.limit("a"), batches.limit("b")) == (4, 8)
    assert batches.did_not_fit("a", 1) == 1


def test_the_limit_is_asked_each_time_as_it_may_grow():
    sizes = iter([1, 2, 2])
    batches = Batches(lambda group: next(sizes))
    assert batches.add(Prepared(None, "a"), 0) == [0]
    assert batches.add(Prepared(None, "a"), 1) == []
    assert batches.add(Prepared(None, "a"), 2) == [1, 2]
