"""What is known of units, as columns: the same as an object for each would say."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cachestore.core.inputs import NO_STAT
from cachestore.core.keys import Key
from cachestore.jobs.share.ledgers import Outcome
from cachestore.jobs.share.outcomes import Cells, Outcomes

WIDTHS = {"size": 2, "tokens": 1}
UNITS = 6

rows = st.builds(
    Outcome,
    unit=st.integers(0, UNITS - 1),
    result=st.sampled_from(["made", "found", "failed"]),
    key=st.none() | st.binary(min_size=16, max_size=16).filter(any).map(Key),
    input=st.sampled_from(["", "ab" * 32, "00" * 31 + "01"]),
    stat=st.just(NO_STAT) | st.tuples(st.integers(0, 2**40), st.integers(0, 2**62)),
    facts=st.fixed_dictionaries({}, optional={"size": st.tuples(st.integers(0, 9), st.integers(0, 9)), "tokens": st.integers(0, 99)}),
    reason=st.sampled_from(["", "no"]),
    is_transient=st.booleans(),
)


def test_of_no_units_nothing_is_known():
    outcomes = Outcomes(0, WIDTHS)
    outcomes.record([])
    assert len(outcomes) == 0
    assert outcomes.known.tolist() == outcomes.keyed.tolist() == []
    assert len(outcomes.cells(np.array([], np.int64)).keys) == 0


def test_a_unit_of_which_nothing_is_known_has_no_key_and_says_so():
    outcomes = Outcomes(1, WIDTHS)
    assert (outcomes.key(0), outcomes.result(0)) == (None, None)
    assert outcomes.reason(0) == "no worker could finish it"


@given(st.lists(st.lists(rows, max_size=4, unique_by=lambda row: row.unit), max_size=4))
def test_columns_say_what_the_last_ledger_said(ledgers):
    outcomes, last = Outcomes(UNITS, WIDTHS), {}
    for ledger in ledgers:
        outcomes.record(ledger)
        last |= {row.unit: row for row in ledger}
    for index in range(UNITS):
        row = last.get(index)
        assert outcomes.known[index] == (row is not None)
        if row is None:
            continue
        assert (outcomes.result(index), outcomes.key(index)) == (row.result, row.key)
        assert outcomes.inputs[index].tobytes().hex() == (row.input or "00" * 32)
        assert tuple(outcomes.stats[index]) == row.stat
        assert outcomes.transient[index] == row.is_transient
        assert outcomes.reasons.get(index, "") == row.reason
        for name, values in outcomes.facts.items():
            reported = row.facts.get(name, (-1,) * WIDTHS[name])
            assert tuple(values[index]) == (reported if isinstance(reported, tuple) else (reported,))


def test_a_fact_without_a_column_is_passed_over_and_a_long_one_is_cut():
    outcomes = Outcomes(1, WIDTHS)
    outcomes.record([Outcome(0, "made", facts={"truncated": True, "size": [1, 2, 3]})])
    assert {name: values.tolist() for name, values in outcomes.facts.items()} == {"size": [[1, 2]]}


def test_what_is_forgotten_is_unknown():
    outcomes = Outcomes(2, WIDTHS)
    outcomes.record([Outcome(n, "made", Key(bytes([n + 1]) * 16), "ab" * 32, (1, 2), {"tokens": 3}) for n in range(2)])
    outcomes.forget(np.array([True, False]))
    assert outcomes.known.tolist() == outcomes.keyed.tolist() == [False, True]
    assert outcomes.facts["tokens"].tolist() == [[-1], [3]]


def test_an_index_below_zero_has_a_row_of_which_nothing_is_known():
    cells = Cells(np.ones((1, 16), np.uint8), np.ones((1, 32), np.uint8), np.ones((1, 2), np.int64), {"tokens": np.ones((1, 1), np.int64)})
    taken = cells.take(np.array([-1, 0]))
    assert taken.keys.any(axis=1).tolist() == [False, True]
    assert taken.stats.tolist() == [[-1, -1], [1, 1]]
    assert taken.facts["tokens"].tolist() == [[-1], [1]]


def test_cells_of_an_empty_catalog_can_be_taken():
    nothing = Cells(np.zeros((0, 16), np.uint8), np.zeros((0, 32), np.uint8), np.zeros((0, 2), np.int64), {})
    assert nothing.take(np.array([-1])).keys.tolist() == [[0] * 16]
