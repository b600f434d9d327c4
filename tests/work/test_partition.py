"""How units are cut, and in which order a worker looks at the parts."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from cachestore.work.partition import PARTITION_LIMIT, bounds, order_for, partition_count

UNITS = st.integers(1, 3 * PARTITION_LIMIT) | st.sampled_from([1, PARTITION_LIMIT - 1, PARTITION_LIMIT, PARTITION_LIMIT + 1, 10_000_000])


@st.composite
def workers(draw):
    """(rank, world size): rank unknown, or below the world size."""
    world = draw(st.integers(1, 40))
    return draw(st.none() | st.integers(0, world - 1)), world


def test_no_units_have_no_partitions_and_nobody_looks_at_any():
    assert partition_count(0) == 0
    assert order_for(0, 1, 0, seed=3) == order_for(None, 4, 0, seed=3) == order_for(3, 4, 0, seed=3) == []


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


@given(workers(), st.integers(0, 300), st.integers(0, 2**32))
def test_every_worker_looks_at_every_partition_once(worker, count, seed):
    rank, world = worker
    assert sorted(order_for(rank, world, count, seed=seed)) == list(range(count))


@given(workers(), st.integers(0, 300), st.integers(0, 2**32))
def test_a_worker_looks_at_its_own_partitions_first(worker, count, seed):
    rank, world = worker
    if rank is None:
        return
    own = [p for p in range(count) if p % world == rank]
    assert order_for(rank, world, count, seed=seed)[: len(own)] == own


@given(st.integers(1, 40), st.integers(0, 300))
def test_the_first_choices_of_all_ranks_are_disjoint_and_together_everything(world, count):
    own = [{p for p in order_for(rank, world, count, seed=0) if p % world == rank} for rank in range(world)]
    assert sum(map(len, own)) == count
    assert set().union(*own) == set(range(count))


def test_workers_without_a_rank_begin_with_different_partitions():
    assert len({order_for(None, 8, 100, seed=seed)[0] for seed in range(50)}) == 50


def test_thieves_begin_with_different_partitions():
    assert len({order_for(rank, 4, 16, seed=0)[4] for rank in range(4)}) == 4
