"""The simulation of many ranks: small cases of it, and that its bounds can be missed."""

import json

import pytest
from bench import simulate_ranks
from bench.simulate_ranks import Case, Result, cases, simulate

from cachestore.jobs.share.choice import LEAST_WORKERS, ranges_of


def test_of_nothing_nothing_is_made():
    result = simulate(Case(0, 8), seed=1)
    assert (result.makespan, result.ratio, result.duplicates_percent, result.files) == (0.0, 1.0, 0.0, 0)


@pytest.mark.parametrize("ranks", [1, 3, 40])
def test_without_deaths_each_range_is_claimed_and_finished_once(ranks):
    result = simulate(Case(300, ranks), seed=1)
    ranges = ranges_of(300, each=1, workers=max(LEAST_WORKERS, ranks))
    assert result.duplicates == 0
    assert len(ranges) < result.files <= 2 * len(ranges), "one ledger covers what was claimed together"
    assert result.ratio >= 1.0


@pytest.mark.parametrize("seed", range(5))
def test_equal_units_and_many_uneven_ones_are_shared_evenly(seed):
    even = simulate(Case(25, 8, spread=0.0, ratio_bound=1.5), seed=seed)
    uneven = simulate(Case(20_000, 16, ratio_bound=1.1, duplicates_bound=1.0), seed=seed)
    assert even.missed + uneven.missed == []


@pytest.mark.parametrize("seed", range(3))
def test_with_dead_ranks_everything_is_finished_all_the_same(seed):
    simulation = simulate_ranks.Simulation(Case(20_000, 16, dead=4), seed=seed)
    result = simulation.run()
    assert simulation.board.finished == set(range(simulation.count))
    assert sum(rank.is_dead for rank in simulation.board.ranks.values()) == 4
    claimed_and_finished_once = 2 * len(ranges_of(simulation.count, each=4, workers=16))
    assert result.files > claimed_and_finished_once, "the rest are claims taken over, and attempts"


def test_a_simulation_is_the_same_for_the_same_seed():
    one, other, third = (simulate(Case(500, 8, dead=2), seed=seed) for seed in (1, 1, 2))
    assert one == other
    assert one != third


@pytest.fixture
def _ranges_anew():
    """The ranges of one way of choosing are not those of another."""
    ranges_of.cache_clear()
    yield
    ranges_of.cache_clear()


@pytest.mark.usefixtures("_ranges_anew")
def test_a_way_of_choosing_that_leaves_others_without_work_misses_its_bound(monkeypatch, capsys):
    monkeypatch.setattr("cachestore.jobs.share.choice.group_size", lambda *_sizes: 64)
    assert simulate_ranks.main(["--units", "25", "--json"]) == 1
    shown = json.loads(capsys.readouterr().out)
    assert shown["missed"] == [bound for row in shown["rows"] for bound in row["missed"]]
    assert shown["missed"][0].startswith("25 units on 8 ranks: makespan is")
    assert shown["seed"] == 1


def test_too_many_duplicates_miss_their_bound():
    result = Result(Case(100, 2, duplicates_bound=1.0), 1.0, 1.0, 2, 0, 0)
    assert result.missed == ["100 units on 2 ranks: 2.00 % duplicates, the bound is 1.0 %"]


def test_the_cases_with_bounds_are_those_that_are_promised():
    bounded = {(case.units, case.ranks, case.spread, case.ratio_bound) for case in cases() if case.ratio_bound}
    assert bounded == {(25, 8, 0.0, 1.5), (1_000_000, 64, 1.0, 1.05)}
