"""Turns that depend on names and epochs alone."""

import pytest

from cachestore.train.order import turn_of


@pytest.mark.parametrize("count", [1, 2, 5])
def test_each_has_its_turn_once_in_as_many_epochs(count):
    for number in range(3):
        assert sorted(turn_of(count, number * count + epoch, "0", "a.png") for epoch in range(count)) == list(range(count))


def test_turns_differ_from_name_to_name_and_from_round_to_round():
    orders = {tuple(turn_of(6, 6 * number + epoch, name) for epoch in range(6)) for number in range(4) for name in ("a", "b")}
    assert len(orders) == 8
