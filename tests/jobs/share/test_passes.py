"""Passes and rounds: which one a start joins, and what its files say."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachestore.core.errors import FormatError
from cachestore.files.records import encode_record
from cachestore.jobs.share import passes
from cachestore.jobs.share.passes import (
    VERSION,
    PassRef,
    Round,
    join_pass,
    list_passes,
    list_rounds,
    publish_done,
    publish_round,
    read_done,
    read_round,
)
from cachestore.jobs.share.plan import publish_plan
from cachestore.store.write.commit import create_store
from tests.fakes import FakeEncoder, captions, ending, plan_of

PLAN = plan_of(captions(*(f"caption {n}" for n in range(10))), [FakeEncoder("text"), FakeEncoder("text", model="b")])
REPORT = ending(PLAN.name, wanted=20)


@pytest.fixture
def layout(tmp_path):
    layout = create_store(tmp_path / "store")
    publish_plan(layout, PLAN)
    return layout


def opened(layout, number=0, units=None, launch="launch 1"):
    ref = join_pass(layout, PLAN.name, launch)
    everything = tuple(PLAN.units_of(recipe) for recipe in range(2))
    publish_round(layout, ref, PLAN, Round(number, units or everything, launch, 12.5, 3))
    return ref


def test_the_first_invocation_opens_pass_1(layout):
    assert list_passes(layout, PLAN.name) == []
    assert join_pass(layout, PLAN.name, "launch 1") == PassRef(PLAN.name, 1)
    assert list_passes(layout, PLAN.name) == [1]


def test_an_unfinished_pass_is_joined_by_every_launch(layout):
    ref = join_pass(layout, PLAN.name, "launch 1")
    assert join_pass(layout, PLAN.name, "launch 2") == ref
    opened(layout)
    assert join_pass(layout, PLAN.name, "launch 3") == ref


def test_a_pass_that_ended_under_the_own_launch_is_returned(layout):
    ref = opened(layout)
    publish_done(layout, ref, REPORT, ["launch 1", "launch 2"])
    assert join_pass(layout, PLAN.name, "launch 2") == ref


def test_after_a_pass_that_ended_under_another_launch_the_next_is_opened(layout):
    publish_done(layout, opened(layout), REPORT, ["launch 1"])
    assert join_pass(layout, PLAN.name, "launch 3").number == 2
    assert join_pass(layout, PLAN.name, "launch 4").number == 2


def test_after_a_pass_whose_end_is_damaged_the_next_is_opened(layout):
    ref = opened(layout)
    publish_done(layout, ref, REPORT, ["launch 1"])
    ref.folder(layout).done.write_bytes(b"{}")
    assert read_done(layout, ref) is None
    assert join_pass(layout, PLAN.name, "launch 1").number == 2


def test_a_pass_that_ends_while_a_rank_of_its_launch_joins_is_the_one_joined(layout, monkeypatch):
    ref, listed = opened(layout), passes.names_in

    def ended_after_each_look(folder):
        names = listed(folder)
        if folder == ref.folder(layout).root:
            monkeypatch.setattr(passes, "names_in", listed)
            publish_done(layout, ref, REPORT, ["launch 1"])
        return names

    monkeypatch.setattr(passes, "names_in", ended_after_each_look)
    assert join_pass(layout, PLAN.name, "launch 1") == ref


def test_passes_are_ordered_by_number_not_by_name(layout):
    for _ in range(11):
        publish_done(layout, join_pass(layout, PLAN.name, "new"), REPORT, ["old"])
    assert list_passes(layout, PLAN.name) == list(range(1, 12))


def test_who_ends_a_pass_second_gets_the_report_of_the_first(layout):
    ref = opened(layout)
    first, second = (ending(PLAN.name, encoded=encoded) for encoded in (1, 2))
    publish_done(layout, ref, first, ["a"])
    assert publish_done(layout, ref, second, ["b"]).report == first
    assert read_done(layout, ref).launches == ("a",)


def test_segments_say_which_pass_wrote_them():
    assert PassRef("p", 3).origin == "p/3"


# Rounds


def test_a_round_of_nothing_has_no_partitions(layout):
    found = read_round(layout, opened(layout, units=((), ())), PLAN, 0)
    assert found.unit_count == 0
    assert [found.partition_count(recipe) for recipe in range(2)] == [0, 0]


units_of_rounds = st.tuples(*(st.sets(st.sampled_from(list(PLAN.units_of(recipe)))).map(sorted) for recipe in range(2)))


@given(units_of_rounds, st.none() | st.integers(0, 9), st.integers(1, 512))
def test_a_round_is_read_as_it_was_published(tmp_path_factory, units, generation, workers):
    layout = create_store(tmp_path_factory.mktemp("rounds") / "store")
    publish_plan(layout, PLAN)
    ref = join_pass(layout, PLAN.name, "launch 1")
    assert publish_round(layout, ref, PLAN, Round(0, units, "launch 1", 12.5, generation, workers))
    found = read_round(layout, ref, PLAN, 0)
    assert [list(listed) for listed in found.units] == list(units)
    assert (found.launch, found.started, found.generation, found.workers) == ("launch 1", 12.5, generation, workers)


@given(units_of_rounds)
def test_the_partitions_of_a_round_hold_each_of_its_units_once(units):
    found = Round(0, units, "launch", 0.0)
    for recipe, listed in enumerate(units):
        assert [index for p in range(found.partition_count(recipe)) for index in found.partition(recipe, p)] == list(listed)


def test_of_two_that_open_a_round_the_first_counts_and_rounds_are_listed_in_order(layout):
    ref = opened(layout)
    assert not publish_round(layout, ref, PLAN, Round(0, ((), ()), "launch 2", 0.0))
    assert read_round(layout, ref, PLAN, 0).launch == "launch 1"
    for number in (10, 2, 1):
        opened(layout, number)
    assert list_rounds(ref.folder(layout)) == [0, 1, 2, 10]


@pytest.mark.parametrize("units", [[[0], [0]], [[], [20]], [[-1], []], [[0]]])
def test_a_round_that_names_units_its_plan_does_not_have_is_a_format_error(layout, units):
    ref = join_pass(layout, PLAN.name, "launch 1")
    body = {"units": units, "launch": "x", "started": 0.0, "generation": None, "workers": 1}
    ref.folder(layout).round(0).write_bytes(encode_record("cachestore-round", VERSION, body))
    with pytest.raises(FormatError):
        read_round(layout, ref, PLAN, 0)


def test_the_round_of_another_pass_is_refused_and_the_next_pass_is_opened(layout):
    first = opened(layout)
    publish_done(layout, first, REPORT, ["launch 1"])
    second = join_pass(layout, PLAN.name, "launch 2")
    second.folder(layout).round(0).write_bytes(first.folder(layout).round(0).read_bytes())
    with pytest.raises(FormatError, match="another pass"):
        read_round(layout, second, PLAN, 0)
    assert join_pass(layout, PLAN.name, "launch 2").number == 3
