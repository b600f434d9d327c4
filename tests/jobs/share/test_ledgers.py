"""Ledgers: what became of each unit, and damaged ones left out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachestore.core.keys import Key
from cachestore.files.paths import LedgerName
from cachestore.jobs.share.ledgers import Ledger, Outcome, list_ledgers, publish_ledger, read_ledgers
from cachestore.jobs.share.passes import join_pass
from cachestore.store.write.commit import create_store

PLAN = "0" * 32


@pytest.fixture
def folder(layout):
    return join_pass(layout, PLAN, "launch").folder(layout)


def ledger(number=0, recipe=0, partition=0, outcomes=(), worker="w" * 32):
    return Ledger(LedgerName(number, recipe, partition, partition), worker, "launch", tuple(outcomes))


def test_without_ledgers_nothing_is_finished(folder):
    assert list_ledgers(folder, 0) == frozenset()
    assert list(read_ledgers(folder, 0)) == []


def test_a_partition_without_units_may_have_a_ledger(layout, folder):
    publish_ledger(layout, folder, ledger())
    assert list(read_ledgers(folder, 0)) == [ledger()]


outcomes = st.builds(
    Outcome,
    unit=st.integers(0, 2**40),
    result=st.sampled_from(["made", "found", "failed"]),
    key=st.none() | st.binary(min_size=16, max_size=16).map(Key),
    input=st.sampled_from(["", "ab" * 32]),
    stat=st.tuples(st.integers(-1, 2**50), st.integers(-1, 2**62)),
    facts=st.dictionaries(st.sampled_from(["size", "bucket"]), st.lists(st.integers(0, 9), min_size=2, max_size=2), max_size=2),
    reason=st.text(max_size=20),
    is_transient=st.booleans(),
)


@given(st.lists(outcomes, max_size=4))
def test_a_ledger_is_read_as_it_was_written(tmp_path_factory, rows):
    layout = create_store(tmp_path_factory.mktemp("ledgers") / "store")
    folder = join_pass(layout, PLAN, "launch").folder(layout)
    assert publish_ledger(layout, folder, ledger(outcomes=rows))
    assert list(read_ledgers(folder, 0)) == [ledger(outcomes=rows)]


def test_of_two_ledgers_of_a_partition_the_first_stays(layout, folder):
    assert publish_ledger(layout, folder, ledger(worker="a" * 32))
    assert not publish_ledger(layout, folder, ledger(worker="b" * 32))
    assert [found.worker for found in read_ledgers(folder, 0)] == ["a" * 32]


def test_a_ledger_finishes_every_partition_of_its_range(layout, folder):
    publish_ledger(layout, folder, Ledger(LedgerName(0, 1, 2, 4), "w" * 32, "launch", ()))
    assert list_ledgers(folder, 0) == {(1, 2), (1, 3), (1, 4)}


def test_ledgers_of_other_rounds_do_not_count(layout, folder):
    publish_ledger(layout, folder, ledger(0, 1, 2))
    publish_ledger(layout, folder, ledger(1, 0, 0))
    publish_ledger(layout, folder, ledger(10, 0, 0))
    assert list_ledgers(folder, 0) == {(1, 2)}
    assert [found.name for found in read_ledgers(folder, 1)] == [LedgerName(1, 0, 0, 0)]


@pytest.mark.parametrize("damage", [b"", b"{}", b"[]", b"\xff\xfe", None])
def test_a_damaged_ledger_is_left_out_and_says_nothing(layout, folder, damage):
    publish_ledger(layout, folder, ledger(0, 0, 0, [Outcome(0, "made", Key(bytes(16)))]))
    publish_ledger(layout, folder, ledger(0, 0, 1, [Outcome(1, "made", Key(bytes(16)))]))
    path = folder.ledger(LedgerName(0, 0, 0, 0))
    path.write_bytes(path.read_bytes().replace(b"made", b"nade") if damage is None else damage)
    assert [found.name.first for found in read_ledgers(folder, 0)] == [1]


def test_a_file_of_another_name_is_no_ledger(folder):
    (folder.ledgers / "notes.txt").write_text("mine")
    (folder.ledgers / "0.0.0-01.json").write_text("{}")
    assert list_ledgers(folder, 0) == frozenset()
