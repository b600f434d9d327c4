"""When compiling is worth its time."""

from hypothesis import given
from hypothesis import strategies as st

from cachestore.encode.batching.compiling import FIRST_GUESS, MOST_SHAPES, Compiling


def spend(compiling, shape, seconds):
    assert not compiling.is_due(shape)
    compiling.took(shape, seconds)


def compiled(cost=10.0, before=1.0):
    """One shape that is compiled, which took so long; a batch of it took `before` seconds."""
    compiling = Compiling()
    spend(compiling, "a", before)
    spend(compiling, "a", FIRST_GUESS)
    assert compiling.is_due("a")
    compiling.took("a", cost)
    return compiling


def test_a_shape_that_was_never_seen_is_not_compiled():
    assert not Compiling().is_due("a")


def test_a_shape_is_compiled_once_it_has_taken_as_long_as_compiling_is_thought_to():
    compiling = Compiling()
    spend(compiling, "a", FIRST_GUESS * 0.9)
    spend(compiling, "b", FIRST_GUESS * 0.9)
    spend(compiling, "a", FIRST_GUESS * 0.2)
    assert compiling.is_due("a")
    assert not compiling.is_due("b")


def test_what_compiling_took_is_the_measure_for_further_shapes():
    compiling = compiled(cost=10.0)
    spend(compiling, "b", 9.0)
    spend(compiling, "b", 2.0)
    assert compiling.is_due("b")


def test_all_shapes_go_on_as_they_are_where_a_compiled_one_is_not_faster():
    compiling = compiled(before=1.0)
    for _batch in range(3):
        assert compiling.is_due("a")
        compiling.took("a", 0.97)
    assert not compiling.is_due("a")


def test_a_faster_one_stays_compiled():
    compiling = compiled(before=1.0)
    for _batch in range(20):
        compiling.took("a", 0.8)
        assert compiling.is_due("a")


def test_no_more_shapes_are_compiled_than_torch_keeps():
    compiling = Compiling()
    for shape in range(MOST_SHAPES + 3):
        compiling.took(shape, 100 * FIRST_GUESS)
    assert sum(compiling.is_due(shape) for shape in range(MOST_SHAPES + 3)) == MOST_SHAPES


def test_nothing_is_compiled_after_it_failed_once():
    compiling = compiled()
    compiling.is_given_up = True
    assert not compiling.is_due("a")


@given(batches=st.integers(0, 400), cost=st.floats(1, 200), gain=st.floats(1.1, 10))
def test_it_never_takes_more_than_twice_what_is_best_and_one_batch(batches, cost, gain):
    compiling, spent = Compiling(cost=cost), 0.0
    is_compiled = False
    for _batch in range(batches):
        seconds = 1.0
        if compiling.is_due("a"):
            seconds = 1 / gain + (0 if is_compiled else cost)
            is_compiled = True
        compiling.took("a", seconds)
        spent += seconds
    assert spent <= 2 * min(batches, cost + batches / gain) + 1 + 1e-9
