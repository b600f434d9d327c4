"""How units are cut."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from cachestore.files.paths import PARTITION_LIMIT
from cachestore.jobs.share.partition import bounds, partition_count, runs_of

UNITS = st.integers(1, 3 * PARTITION_LIMIT) | st.sampled_from([1, PARTITION_LIMIT - 1, PARTITION_LIMIT, PARTITION_LIMIT + 1, 10_000_000])


def test_no_units_have_no_partitions():
    assert partition_count(0) == 0


@given(UNITS)
def test_partitions_are_disjoint_and_together_everything_in_order(units):
    cut = [bounds(units, p) for p in range(partition_count(units))]
    assert (cut[0][0], cut[-1][1]) == (0, units)
    assert all(end == start for (_, end), (start, _) in pairwise(cut))


@given(UNITS)
def test_sizes_of_partitions_differ_by_at_most_one_and_none_is_empty(units):
    sizes = {end - start for start, end in (bounds(units, p) for p in range(partition_count(units)))}
    assert min(sizes) >= 1
    assert max(sizes) - min(sizes) <= 1


def test_few_units_have_a_partition_each_and_many_at_most_4096():
    assert partition_count(1) == 1
    assert partition_count(PARTITION_LIMIT) == PARTITION_LIMIT == 4096
    assert partition_count(10_000_000) == PARTITION_LIMIT


@given(st.sets(st.integers(0, 60)))
def test_runs_have_no_gaps_and_are_as_few_as_possible(partitions):
    runs = runs_of(sorted(partitions))
    assert [p for run in runs for p in run] == sorted(partitions)
    assert all(one.stop < other.start for one, other in pairwise(runs))
