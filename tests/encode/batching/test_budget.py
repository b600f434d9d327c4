"""The size of a batch, found by measuring."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachestore.encode.batching.budget import Budget


def run(budget, rate_of, batches=60):
    """Let a device that makes `rate_of(size)` a second work through full batches."""
    sizes = []
    for _batch in range(batches):
        size = budget.units(1)
        sizes.append(size)
        budget.took(size, 1, size / rate_of(size))
    return sizes


def test_a_budget_of_nothing_still_lets_one_unit_through():
    assert Budget(0, 0).units(5) == Budget(1, 1).units(0) == 1


def test_it_holds_as_many_units_as_their_cost_allows():
    assert [Budget(64, 64).units(cost) for cost in (1, 16, 48, 64, 1000)] == [64, 4, 1, 1, 1]
    assert [Budget(64, 64, 8).units(cost) for cost in (0, 16, 1000)] == [8, 4, 1]


def test_it_doubles_while_that_pays_up_to_the_most():
    sizes = run(Budget(8, 64), lambda size: size)
    assert sizes[-1] == 64
    assert sorted(set(sizes)) == [8, 16, 32, 64]


def test_it_stays_where_a_larger_batch_is_hardly_faster():
    assert run(Budget(8, 64), lambda size: min(size, 17))[-1] == 32  # 32 was 6 % faster than 16; 64 no more than that


def test_it_goes_back_where_a_larger_batch_is_slower():
    assert run(Budget(8, 1024), lambda size: size if size <= 16 else 10)[-1] == 16


def test_the_first_batch_of_a_size_warms_up_and_is_not_measured():
    budget = Budget(8, 16)
    for seconds in (1000.0, 1.0, 1.0):
        budget.took(8, 1, seconds)
    assert budget.size == 16


def test_a_ragged_batch_tells_nothing():
    budget = Budget(8, 16)
    for _batch in range(20):
        budget.took(5, 1, 1.0)
    assert budget.size == 8


@pytest.mark.parametrize("cost", [6, 10, 16])
@pytest.mark.parametrize(("first", "most"), [(1, 8), (9, 72)])
def test_a_batch_that_no_other_unit_fits_into_is_full_however_much_room_is_left(cost, first, most):
    budget = Budget(first * cost + cost - 1, most * cost + 8 * (cost - 1))
    assert budget.units(cost) == first
    for _batch in range(60):
        budget.took(budget.units(cost), cost, 1.0)  # any number of units takes a second
    assert budget.units(cost) >= most


def test_what_did_not_fit_is_halved_for_good():
    budget = Budget(16, 64)
    budget.did_not_fit()
    run(budget, lambda size: size)
    assert budget.size == 8


@pytest.mark.parametrize(("units", "error", "size"), [(4, "CUDA out of memory", 8), (1, "CUDA out of memory", 16), (4, "NaN", 16)])
def test_only_a_lack_of_memory_of_more_than_one_unit_counts_and_every_error_passes(units, error, size):
    budget = Budget(16, 64)
    with pytest.raises(RuntimeError, match=error), budget.spending(units):
        raise RuntimeError(error)
    assert budget.size == size


@pytest.mark.parametrize("seconds", [0.0, -1.0])
def test_a_clock_that_stands_still_changes_nothing(seconds):
    budget = Budget(8, 64)
    for _batch in range(9):
        budget.took(8, 1, seconds)
    assert budget.size == 8


@given(
    st.integers(1, 1000), st.integers(0, 5), st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 50), st.floats(0, 10)), max_size=60)
)
def test_whatever_is_measured_it_stays_between_one_and_the_most(size, doublings, batches):
    budget = Budget(size, size << doublings)
    for units, cost, seconds in batches:
        budget.took(units, cost, seconds)
        assert 1 <= budget.size <= size << doublings
